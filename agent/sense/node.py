"""The machine as a whole: CPU time by mode, memory, load and PSI from /proc. A file that is missing leaves its fields None.

CPU times come from /proc/stat in ticks of sysconf(_SC_CLK_TCK), 10 ms nearly everywhere: that is their resolution.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agent.sense import parsers
from agent.sense.files import Budget, KeptFile
from api.facts import CpuTimes, Pressure
from api.ports import Vanished
from api.samples import NodeSample, SourceStatus

Value = TypeVar("Value")
_MEMORY_TOTAL = parsers.meminfo_bytes(b"MemTotal")
_MEMORY_AVAILABLE = parsers.meminfo_bytes(b"MemAvailable")


class NodeReader:
    """Reads /proc once a tick. Keeps files open; `close` gives them back."""

    def __init__(self, proc: Path) -> None:
        budget = Budget()
        self.boot_id = _boot_id(proc)
        """What the kernel calls this boot, empty where it does not tell; counters of another boot are not comparable."""
        self._hz = os.sysconf("SC_CLK_TCK")
        self._files = {
            name: KeptFile(budget, os.fsencode(proc / name))
            for name in ("stat", "meminfo", "loadavg", "pressure/cpu", "pressure/memory", "pressure/io")
        }
        self._failures: list[str] = []

    def read(self) -> NodeSample:
        """What /proc says now. Never raises: `problems` tells what is missing."""
        self._failures.clear()
        cpu, per_cpu = self._parse("stat", self._cpu_lines) or (None, {})
        memory_total, memory_available = self._parse("meminfo", _memory) or (None, None)
        return NodeSample(
            cpu=cpu,
            per_cpu=per_cpu,
            load=self._parse("loadavg", parsers.load_averages),
            memory_total_bytes=memory_total,
            memory_available_bytes=memory_available,
            cpu_pressure=self._pressure("cpu"),
            memory_pressure=self._pressure("memory"),
            io_pressure=self._pressure("io"),
        )

    def problems(self) -> tuple[SourceStatus, ...]:
        """What the latest read did not get, in one line, with the remedy."""
        if not self._failures:
            return ()
        remedy = "give the agent the host's /proc"
        if all("pressure/" in failure for failure in self._failures):
            remedy = "boot with psi=1, on a kernel with CONFIG_PSI"
        return (SourceStatus(name="node-files", ok=False, error="; ".join(self._failures), remedy=remedy),)

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for file in self._files.values():
            file.close()

    def _cpu_lines(self, text: bytes) -> tuple[CpuTimes, dict[int, CpuTimes]] | None:
        total, per_cpu = parsers.cpu_lines(text, self._hz)
        return None if total is None else (total, per_cpu)

    def _pressure(self, resource: str) -> Pressure | None:
        return self._parse(f"pressure/{resource}", parsers.pressure)

    def _parse(self, name: str, parse: Callable[[bytes], Value | None]) -> Value | None:
        try:
            value = parse(self._files[name].read())
        except Vanished:
            self._failures.append(f"{name} is missing")
            return None
        except OSError as error:
            self._failures.append(f"{name}: {error.strerror}")
            return None
        if value is None:
            self._failures.append(f"{name} is not what it should be")
        return value


def _memory(meminfo: bytes) -> tuple[int, int | None] | None:
    total = _MEMORY_TOTAL(meminfo)
    return None if total is None else (total, _MEMORY_AVAILABLE(meminfo))


def _boot_id(proc: Path) -> str:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
