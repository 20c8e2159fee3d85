"""What probes of rarer events than context switches cost per event, each under a load that makes such events.

    python -m bench.event_cost [--rounds 5] [--write bench/results/event_cost.md]

Nanoseconds are the kernel's own BPF statistics, which take the time before and after each run: the row `empty program` shows
what that alone comes to here, and the last column is the rest. Rounds are shuffled, because the machine drifts.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from agent.hierarchy import detect
from bench.machine import this_machine
from probes import blockio, bpf, sockets, softirq, wakeups
from probes.loader import Form, Job, Loaded, Program, load

LOAD_S = 1.0
EMPTY = Form(name="tp_btf", typed=True, fields={}, programs=[Program("on_event", "softirq_entry", "dtse_empty")])
TEXT = """## Probe cost per event

{machine}. `python -m bench.event_cost --rounds {rounds}`: medians of {rounds} shuffled rounds of {load_s:g} s each.

| probe and form | load | program | events a second | ns an event | range | ns beyond an empty program |
|---|---|---|---:|---:|---:|---:|
{rows}

- *ns an event*: run time of the program by the kernel's BPF statistics, which take the time before and after each run.
- Loads, all on loopback or in memory and, but for the last, in one task: datagrams of 100 bytes there and back; the same on one
  TCP connection; a TCP connection made, used for one byte and closed; direct reads of 4 KiB from a loop device; table tennis, a
  byte that two tasks pass back and forth through pipes, where each pass is a wakeup and a switch.
"""
Turn = Callable[[], None]


@dataclass
class Contestant:
    """A probe in one form, the load for it, and what was measured: by program, (events a second, ns an event)."""

    name: str
    load: str
    job: Job
    seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def contestants(scratch: Path) -> list[Contestant]:
    empty = scratch / "empty.bpf.c"
    empty.write_text("int on_event(u64 *ctx) { return 0; }\n")
    found = [Contestant("empty program", "datagrams", Job(sources=[empty], forms=[EMPTY], maps=[], constants={}))]
    for form in ("tp_btf", "raw_tp"):
        talk = sockets.job((form,), os.cpu_count() or 1)
        found += [Contestant(f"sockets, {form}", load, talk) for load in ("datagrams", "stream", "connections")]
        found.append(Contestant(f"softirq, {form}", "datagrams", softirq.job((form,))))
        found.append(Contestant(f"blockio, {form}", "direct reads", blockio.job((form,))))
        who = wakeups.job((form,), os.cpu_count() or 1)
        found += [Contestant(f"wakeups, {form}", load, who) for load in ("table tennis", "datagrams")]
    return found


@contextmanager
def datagrams() -> Iterator[Turn]:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as two,
    ):
        two.bind(("127.0.0.1", 0))
        one.connect(two.getsockname())
        yield lambda: (one.send(b"x" * 100), two.recv(100), None)[-1]


@contextmanager
def stream() -> Iterator[Turn]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        two, _ = server.accept()
        with two:
            yield lambda: (one.send(b"x" * 100), two.recv(100), None)[-1]


@contextmanager
def connections() -> Iterator[Turn]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def turn() -> None:
            with socket.create_connection(server.getsockname()) as one:
                two, _ = server.accept()
                with two:
                    one.send(b"x")
                    two.recv(1)

        yield turn


@contextmanager
def direct_reads() -> Iterator[Turn]:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as backing:
        backing.write(b"z" * (1 << 20))
        backing.flush()
        made = subprocess.run(
            ["losetup", "--find", "--show", backing.name], capture_output=True, text=True, check=True
        ).stdout.strip()
        file, buffer = os.open(made, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
        try:
            yield lambda: (os.preadv(file, [buffer], 0), None)[-1]
        finally:
            os.close(file)
            subprocess.run(["losetup", "--detach", made], check=True)


@contextmanager
def table_tennis() -> Iterator[Turn]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        there, back = other.stdin.fileno(), other.stdout.fileno()
        yield lambda: (os.write(there, b"x"), os.read(back, 1), None)[-1]


LOADS = {
    "datagrams": datagrams,
    "stream": stream,
    "connections": connections,
    "direct reads": direct_reads,
    "table tennis": table_tennis,
}


def visit(contestant: Contestant) -> None:
    """Load the probe, run the load, take the statistics of its programs."""
    with load(contestant.job) as loaded, LOADS[contestant.load]() as turn:
        statistics = bpf.enable_stats()
        try:
            before, started = _stats(loaded), time.monotonic()
            while time.monotonic() - started < LOAD_S:
                turn()
            elapsed, after = time.monotonic() - started, _stats(loaded)
        finally:
            os.close(statistics)
    for name, (runs, run_ns) in after.items():
        count = runs - before[name][0]
        if count >= 1000:
            pair = (count / elapsed, (run_ns - before[name][1]) / count)
            contestant.seen.setdefault(name, []).append(pair)


def _stats(loaded: Loaded) -> dict[str, tuple[int, int]]:
    return {name: (info.run_count, info.run_time_ns) for name, info in loaded.stats().items()}


def rows(measured: list[Contestant]) -> str:
    """The table; programs that the load hardly ran are left out."""
    empty = median(ns for pairs in measured[0].seen.values() for _, ns in pairs)
    lines = []
    for contestant in measured:
        for name, pairs in contestant.seen.items():
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
    with tempfile.TemporaryDirectory() as scratch:
        measured = contestants(Path(scratch))
        for _ in range(options.rounds):
            for contestant in random.sample(measured, len(measured)):
                visit(contestant)
    text = TEXT.format(
        machine=this_machine(detect().mode).line(), rounds=options.rounds, load_s=LOAD_S, rows=rows(measured)
    )
    options.write.parent.mkdir(parents=True, exist_ok=True)
    options.write.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
