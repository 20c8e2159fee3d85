"""Measures how fast CPU is taken back from batch work when the online load jumps."""

from __future__ import annotations

import math
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import JournalEntry, OutcomeStatus
from api.knobs import Knob
from api.units import NS_PER_MS, NS_PER_S
from bench.colocation_cell import CellSetup, running_cell, warmup_s
from bench.colocation_layouts import CellCgroups
from bench.colocation_modes import ColocationMode
from bench.colocation_report import Reaction
from bench.colocation_scenarios import Scenario
from demo.counters import ClientCell
from demo.schedule import RateBursts, random_bursts

CALM_SHARE, STEP_SHARE = 0.1, 0.9
"""Shares of the node; a step takes nearly all CPU of the batch job."""
PERIOD_S, STEP_S, FIRST_S = 3.5, 1.2, 2.0
BURSTING = 0.3
"""Share of time in random bursts."""
POLL_S, WINDOW_S, BEFORE_S = 0.005, 0.05, 0.3
TAKEN_BACK_SHARE = 0.9
"""CPU counts as taken back when the use of batch work has fallen by this part of the required amount."""
KINDS = ("steps", "bursts")


def schedule_of(kind: str, low: float, high: float, steps: int) -> RateBursts:
    """Return steps at even distances, or as many bursts of random lengths and distances in the same time."""
    if kind == "steps":
        return RateBursts(low=low, high=high, period_s=PERIOD_S, on=((FIRST_S, FIRST_S + STEP_S),))
    return random_bursts(low, high, period_s=PERIOD_S * steps, count=steps, on_share=BURSTING, seed=1)


class BatchCpuSampler:
    """Samples the CPU time of the batch job, and records the times at which a knob file changes."""

    def __init__(self, hierarchy: Hierarchy, groups: CellCgroups) -> None:
        directories = [d for path in (groups.online, groups.batch, groups.competing) for d in groups.directories(path)]
        names = ("cpu.idle", "cpu.shares", "cpu.weight", "cpu.cfs_quota_us", "cpu.max", "cpuset.cpus")
        self._files = [path.open("rb", buffering=0) for d in directories for n in names if (path := d / n).exists()]
        mount, v2, batch = hierarchy.controller("cpuacct"), hierarchy.mode == "v2", groups.batch.lstrip("/")
        self._use = (
            hierarchy.primary / batch / "cpu.stat" if v2 or mount is None else mount / batch / "cpuacct.usage"
        ).open("rb", buffering=0)
        self.samples: list[tuple[int, int]] = []
        """CLOCK_REALTIME and cumulative CPU time, in nanoseconds."""
        self.changes_ns: list[int] = []
        """CLOCK_REALTIME of each change of a knob file."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(PermissionError):  # then samples may be late on busy CPUs, never early
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        before = self._read()
        while not self._ended.wait(POLL_S):
            now = self._read()
            if now != before:
                self.changes_ns.append(time.time_ns())
            before = now
            self._use.seek(0)
            self.samples.append((time.time_ns(), used_ns(self._use.read(4096))))

    def _read(self) -> list[bytes]:
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read(256))
        return texts

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        for file in (*self._files, self._use):
            file.close()


def used_ns(text: bytes) -> int:
    """Parse the CPU time in cpuacct.usage or cpu.stat, in nanoseconds."""
    word, _, rest = text.partition(b" ")
    return int(rest.split(maxsplit=1)[0]) * 1000 if word == b"usage_usec" else int(word)


def measure_reaction(bed: CellSetup, mode: ColocationMode, base: Scenario, kind: str, steps: int) -> Reaction:
    """Apply sudden jumps of the load to the service of a scenario, and measure the batch job's loss of CPU."""
    schedule = schedule_of(kind, bed.size.rate(CALM_SHARE), bed.size.rate(STEP_SHARE), steps)
    scenario = msgspec.structs.replace(base, name=kind, what=kind, load=CALM_SHARE)
    first_s = warmup_s(mode)
    schedule = msgspec.structs.replace(schedule, from_s=first_s)
    duration_s = first_s + PERIOD_S * steps
    with running_cell(bed, mode, scenario, schedule, duration_s=duration_s) as running:
        sampler = BatchCpuSampler(bed.hierarchy, running.groups)
        try:
            running.loads.process("client").wait(duration_s + 60)
            start_ns = running.loads.client[ClientCell.STARTED_NS]
            journal = running.agent.get("/api/v1/decisions?limit=2000", 10) if running.agent else None
        finally:
            sampler.close()
    entries = [e for e in msgspec.json.decode(journal or b"[]", type=list[JournalEntry]) if is_taking_back(e)]
    onsets_s = [onset for onset in schedule.spikes(duration_s) if onset >= first_s]
    spans = [tuple(start_ns + int(at * NS_PER_S) for at in (on, burst_end_s(schedule, on))) for on in onsets_s]
    return _reaction((mode.name, kind), spans, sampler, entries, bed.size.cpus * (1 - STEP_SHARE))


def burst_end_s(schedule: RateBursts, onset_s: float) -> float:
    """Return the end of the burst that begins at `onset_s`."""
    at = (onset_s - schedule.from_s) % schedule.period_s
    begin, end = min(schedule.on, key=lambda burst: abs(burst[0] - at))
    return onset_s + end - begin


def _reaction(
    which: tuple[str, str],
    spans: Sequence[tuple[int, ...]],
    watch: BatchCpuSampler,
    entries: Sequence[JournalEntry],
    left_cores: float,
) -> Reaction:
    reaction_times: list[float] = []
    decided, written, triggers = [], [], []
    for onset, end in spans:
        if (reaction_ms := taken_back_ms(watch.samples, onset, end, left_cores)) is not None:
            reaction_times.append(reaction_ms)
        entry = next((e for e in entries if onset <= e.wall_time_ns < end), None)
        if entry is not None:
            decided.append((entry.wall_time_ns - onset) / NS_PER_MS)
            triggers.append(entry.trigger)
            written += [(t - onset) / NS_PER_MS for t in watch.changes_ns if t >= entry.wall_time_ns][:1]
    return Reaction(
        mode=which[0],
        kind=which[1],
        steps=len(spans),
        taken_ms=tuple(value for value in reaction_times if math.isfinite(value)),
        never=sum(not math.isfinite(value) for value in reaction_times),
        decided_ms=tuple(decided),
        written_ms=tuple(written),
        triggers=tuple(triggers),
    )


def taken_back_ms(samples: Sequence[tuple[int, int]], onset_ns: int, end_ns: int, left_cores: float) -> float | None:
    """Return the time from the onset until batch work's use, averaged over the last WINDOW_S, has fallen by TAKEN_BACK_SHARE of
    the required amount; the window limits the resolution. Infinite if that does not happen within the step, None if batch work
    used so little before that nothing had to be taken back."""
    began = mean_cores(samples, onset_ns - int(BEFORE_S * NS_PER_S), onset_ns)
    if began is None or began <= left_cores:
        return None
    limit = began - TAKEN_BACK_SHARE * (began - left_cores)
    first = bisect_left(samples, (onset_ns,))
    for at_ns, _ in samples[first : bisect_right(samples, (end_ns,))]:
        now = mean_cores(samples, at_ns - int(WINDOW_S * NS_PER_S), at_ns)
        if now is not None and now <= limit:
            return (at_ns - onset_ns) / NS_PER_MS
    return math.inf


def mean_cores(samples: Sequence[tuple[int, int]], from_ns: int, until_ns: int) -> float | None:
    """Return the mean use between the last samples before both times; None without samples."""
    first, last = (bisect_right(samples, (at, 1 << 63)) - 1 for at in (from_ns, until_ns))
    if first < 0 or first == last:
        return None
    (then_ns, then_used), (now_ns, now_used) = samples[first], samples[last]
    return (now_used - then_used) / (now_ns - then_ns)


def is_taking_back(entry: JournalEntry) -> bool:
    """Whether the decision was applied and reduces the quota of the batch job."""
    outcome = entry.outcome
    if outcome.status is not OutcomeStatus.APPLIED or outcome.decision.knob is not Knob.QUOTA:
        return False
    return _quota(outcome.decision.value) < _quota(outcome.before or "max")


def _quota(text: str) -> float:
    """Parse the first word of cpu.max: microseconds, or infinity."""
    word = text.split(maxsplit=1)[0]
    return math.inf if word == "max" else float(word)
