"""Measures what probes of rarer events cost per event, each under a load that causes such events.
Nanoseconds come from the kernel's BPF statistics.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.interfaces import Unavailable
from bench.event_loads import LOADS, SLEEPERS
from bench.machine import this_machine
from probes import blockio, bpf, counters, kswapd, migrations, sockets, softirq, threads, throttles, wakeups
from probes.loader import Form, Job, Loaded, Program, load
from probes.maps import cpu_id_limit, possible_cpu_ids, possible_cpus
from probes.perf_event import SOFTWARE, PerfEvent

LOAD_S = 1.0
MIN_EVENTS = 200
"""Minimum number of program runs in a visit; with fewer, the mean is not meaningful."""
EMPTY = Form(name="tp_btf", typed=True, fields={}, programs=[Program("on_event", "softirq_entry", "dtse_empty")])
SUBSTITUTE_EVENTS = {"cycles": PerfEvent(SOFTWARE, 2), "instructions": PerfEvent(SOFTWARE, 4)}
"""PERF_COUNT_SW_PAGE_FAULTS and _CPU_MIGRATIONS, for machines without counters: the same call without reading a register."""
TEXT = """## Probe cost per event

{machine}. `python -m bench.event_cost --rounds {rounds}`: medians of {rounds} shuffled rounds of {load_s:g} s each.

| probe and form | load | program | events a second | ns an event | range | ns beyond an empty program |
|---|---|---|---:|---:|---:|---:|
{rows}

- *ns an event*: run time of the program by the kernel's BPF statistics, which take the time before and after each run.
- Loads, on loopback, in memory or in cgroups of their own: datagrams of 100 bytes there and back; the same on one TCP
  connection; a TCP connection made, used for one byte and closed; direct reads of 4 KiB from a loop device; two processes on
  one CPU that pass a byte back and forth; a task sent from one CPU to another, which here stand for two NUMA nodes; a file of
  64 MiB read within a limit of 16 MiB; a walk over all threads, {sleepers:,} of them asleep (an event is a thread).
- oomkill's program runs once for each killed process: little compared with the kill. Context switches are in the section above.
- *counters* reads two {counted} at each switch.
"""


@dataclass
class EventProbe:
    """A probe in one form, its load, and its measurements by program: (events a second, ns an event)."""

    name: str
    load: str
    job: Job
    prepare: Callable[[Loaded], object] = lambda _loaded: None
    """Further set-up of the probe before its programs record events."""
    measurements: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def event_probes(scratch: Path, events: counters.PerfEvents) -> list[EventProbe]:
    empty = scratch / "empty.bpf.c"
    empty.write_text("int on_event(u64 *ctx) { return 0; }\n")
    event_cost_probes = [
        EventProbe("empty program", "datagrams", Job(sources=[empty], forms=[EMPTY], maps=[], constants={}))
    ]
    for form in ("tp_btf", "raw_tp"):
        talk = sockets.job((form,), os.cpu_count() or 1)
        event_cost_probes += [
            EventProbe(f"sockets, {form}", load, talk) for load in ("datagrams", "stream", "connections")
        ]
        event_cost_probes.append(EventProbe(f"softirq, {form}", "datagrams", softirq.job((form,))))
        event_cost_probes.append(EventProbe(f"blockio, {form}", "direct reads", blockio.job((form,))))
        event_cost_probes.append(EventProbe(f"throttles, {form}", "switches", throttles.job((form,), possible_cpus())))
        event_cost_probes.append(
            EventProbe(f"kswapd, {form}", "reads under a limit", kswapd.job((form,), kswapd.nodes_with_memory()))
        )
        wakeups_job = wakeups.job((form,), cpu_id_limit())
        event_cost_probes += [EventProbe(f"wakeups, {form}", load, wakeups_job) for load in ("switches", "datagrams")]
        two_nodes = partial(migrations.MigrationsProbe, cpu_nodes={cpu: cpu for cpu in os.sched_getaffinity(0)})
        event_cost_probes.append(
            EventProbe(f"migrations, {form}", "moves", migrations.job((form,), cpu_id_limit()), two_nodes)
        )
        reading = partial(counters.CountersProbe, events=events)
        counting = counters.job((form,), possible_cpu_ids(), events)
        event_cost_probes.append(EventProbe(f"counters, {form}", "switches", counting, reading))
    event_cost_probes.append(EventProbe("threads, iterator", "1,000 threads", threads.job()))
    return event_cost_probes


def hardware_events() -> counters.PerfEvents:
    """Return the events cycles and instructions, or software events that are read in the same way."""
    try:
        there = counters.countable_events(counters.EVENTS, counters.online_cpus()[0])
    except Unavailable:
        return SUBSTITUTE_EVENTS
    return {name: there[name] for name in SUBSTITUTE_EVENTS}


def measure_probe(contestant: EventProbe) -> None:
    """Load the probe, run the load, read the BPF statistics of its programs."""
    with load(contestant.job) as loaded, LOADS[contestant.load](loaded) as turn:
        contestant.prepare(loaded)
        statistics = bpf.enable_stats()
        try:
            before, started = _program_stats(loaded), time.monotonic()
            while time.monotonic() - started < LOAD_S:
                turn()
            elapsed, after = time.monotonic() - started, _program_stats(loaded)
        finally:
            os.close(statistics)
    for name, (runs, run_ns) in after.items():
        count = runs - before[name][0]
        if count >= MIN_EVENTS:
            pair = (count / elapsed, (run_ns - before[name][1]) / count)
            contestant.measurements.setdefault(name, []).append(pair)


def _program_stats(loaded: Loaded) -> dict[str, tuple[int, int]]:
    return {name: (info.run_count, info.run_time_ns) for name, info in loaded.stats().items()}


def markdown_rows(measured: list[EventProbe]) -> str:
    """Render the table; programs with too few runs are left out."""
    empty = median(ns for pairs in measured[0].measurements.values() for _, ns in pairs)
    lines = []
    for contestant in measured:
        for name, pairs in contestant.measurements.items():
            each = [ns for _, ns in pairs]
            cells = (
                contestant.name,
                contestant.load,
                f"`{name}`",
                f"{median(rate for rate, _ in pairs):,.0f}",
                f"{median(each):.0f}",
                f"{min(each):.0f} to {max(each):.0f}",
                "" if contestant is measured[0] else f"{median(each) - empty:.0f}",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, default=Path(__file__).parent / "results/event_cost.md")
    options = parser.parse_args()
    events = hardware_events()
    with tempfile.TemporaryDirectory() as scratch:
        measured = event_probes(Path(scratch), events)
        for _ in range(options.rounds):
            for contestant in random.sample(measured, len(measured)):
                measure_probe(contestant)
    text = TEXT.format(
        machine=this_machine(detect_hierarchy().mode).line(),
        rounds=options.rounds,
        load_s=LOAD_S,
        rows=markdown_rows(measured),
        sleepers=SLEEPERS,
        counted="software events (this machine has no hardware counters, whose registers take longer)"
        if events is SUBSTITUTE_EVENTS
        else "hardware counters",
    )
    options.write.parent.mkdir(parents=True, exist_ok=True)
    options.write.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
