"""The load that probes are measured under: pairs of processes that pass a byte back and forth, one pair on each CPU.

Every pass is a wakeup and a switch, and nothing else happens: the worst case for anything that runs at switches. Each pair
has a cgroup of its own; its round trips are counted in shared memory, so that reading them costs the load nothing.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from agent.hierarchy import detect


class SwitchLoad:
    """Runs until the end of its `with` block."""

    def __init__(self, cpus: tuple[int, ...]) -> None:
        self._cpus = cpus
        self._counts = mmap.mmap(-1, 8 * len(cpus))
        self._pids: list[int] = []
        root = detect(Path("/proc")).primary
        self._groups = [root / f"dioptase-bench-switch-{os.getpid()}-{cpu}" for cpu in cpus]

    def round_trips(self) -> int:
        return sum(struct.unpack(f"{len(self._cpus)}Q", self._counts[:]))

    def __enter__(self) -> SwitchLoad:
        for at, (cpu, group) in enumerate(zip(self._cpus, self._groups, strict=True)):
            group.mkdir()
            there, back = os.pipe(), os.pipe()
            self._pids += [
                self._fork(cpu, group, partial(self._lead, there[1], back[0], at)),
                self._fork(cpu, group, partial(self._follow, there[0], back[1])),
            ]
            for fd in (*there, *back):
                os.close(fd)
        return self

    def _fork(self, cpu: int, group: Path, body: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            os.sched_setaffinity(0, {cpu})
            (group / "cgroup.procs").write_text(str(os.getpid()))
            body()
            os._exit(0)
        return pid

    def _lead(self, writer: int, reader: int, at: int) -> None:
        trips = 0
        while True:
            os.write(writer, b"x")
            os.read(reader, 1)
            trips += 1
            struct.pack_into("Q", self._counts, 8 * at, trips)

    @staticmethod
    def _follow(reader: int, writer: int) -> None:
        while True:
            os.read(reader, 1)
            os.write(writer, b"x")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for group in self._groups:
            group.rmdir()
