"""Threads by state from /proc, two files for each thread: what the iterator does, for kernels without it and for comparison.

Costs about a hundred times as much and is bounded: beyond `MAX_THREADS` it gives up rather than take seconds of CPU.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from api.facts import ThreadStates
from api.ports import Unavailable

MAX_THREADS = 20_000
"""Half a second of CPU."""
_DEAD = frozenset("ZXx")


class ProcWalk:
    """A Census (`probes.threads`) of the threads below `proc`."""

    form = "proc"

    def __init__(self, proc: Path) -> None:
        self._proc = proc

    def count(self, live: Mapping[int, str]) -> dict[int, ThreadStates]:
        """Threads by cgroup id. Raises Unavailable where /proc cannot be listed, or lists too much."""
        ids = {path: number for number, path in live.items()}
        counts: Counter[tuple[int, str]] = Counter()
        for walked, thread in enumerate(self._threads()):
            if walked == MAX_THREADS:
                raise Unavailable(
                    f"more than {MAX_THREADS} threads: reading them one by one would take too long",
                    "use the form `iterator`, which needs Linux 5.8 and the capabilities BPF and PERFMON",
                )
            try:
                letter = state((thread / "stat").read_bytes())
                number = ids.get(cgroup((thread / "cgroup").read_bytes()))
            except OSError:  # it has ended
                continue
            if number is not None and letter not in _DEAD:
                counts[number, letter] += 1
        return {
            number: ThreadStates(
                runnable=counts[number, "R"],
                uninterruptible=counts[number, "D"],
                iowait=None,
                sleeping=sum(n for (owner, letter), n in counts.items() if owner == number and letter not in "RD"),
            )
            for number in {owner for owner, _ in counts}
        }

    def close(self) -> None:
        """Nothing is kept open."""

    def _threads(self) -> Iterator[Path]:
        try:
            processes = [path for path in self._proc.iterdir() if path.name.isdigit()]
        except OSError as error:
            raise Unavailable(f"{self._proc} cannot be listed: {error.strerror}", "mount proc there") from error
        for process in processes:
            try:
                yield from (process / "task").iterdir()
            except OSError:
                continue


def state(stat: bytes) -> str:
    """The letter of /proc/TID/stat, behind a name that may hold anything; a text without one is a thread that has ended."""
    _, closing, rest = stat.rpartition(b") ")
    return chr(rest[0]) if closing and rest else "X"


def cgroup(text: bytes) -> str:
    """The path in the cpu controller's hierarchy, or in the unified one, of /proc/TID/cgroup."""
    unified = ""
    for line in text.splitlines():
        number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if b"cpu" in controllers.split(b","):
            return os.fsdecode(path)
        if number == b"0" and not controllers:
            unified = os.fsdecode(path)
    return unified
