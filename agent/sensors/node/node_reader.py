"""Reads the machine from /proc and /sys into a NodeSample, once per cycle. `NODE_SOURCES` lists the sources by cadence;
slow ones are read together, so that one timestamp covers them. A missing file leaves its fields empty and is reported
as a health problem with a remedy; `read` never raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.sensors import parsers
from agent.sensors.kernel_files import ProcSysFiles
from agent.sensors.node import node_cpu, node_disks, node_memory, node_network, rapl
from agent.sensors.node.machine import read_machine
from api.interfaces import Unavailable
from api.snapshot import CADENCE_PERIOD_NS, Cadence, ComponentHealth, NodeSample
from common.files import read_small_file

NodeSource = Callable[[ProcSysFiles], dict[str, Any]]
MAX_BOOT_ID_BYTES = 64
"""A UUID and its newline are 37 bytes."""
PSI_REMEDY = "boot with psi=1, on a kernel with CONFIG_PSI"


def _load(files: ProcSysFiles) -> dict[str, Any]:
    return {"load": files.parse("loadavg", parsers.load_averages)}


def _pressure(files: ProcSysFiles) -> dict[str, Any]:
    return {
        f"{resource}_pressure": files.parse(f"pressure/{resource}", parsers.pressure, PSI_REMEDY)
        for resource in ("cpu", "memory", "io")
    }


NODE_SOURCES: dict[Cadence, dict[str, NodeSource]] = {
    Cadence.TICK: {
        "times": node_cpu.read_cpu_times,
        "memory": node_memory.read_meminfo,
        "load": _load,
        "pressure": _pressure,
        "delays": node_cpu.read_run_delays,
        "energy": rapl.read_rapl_energy,
        "monitors": node_cpu.read_l3_monitors,
    },
    Cadence.SLOW: {
        "vmstat": node_memory.read_vmstat,
        "settings": node_memory.read_vm_settings,
        "zones": node_memory.read_zones,
        "numa": node_memory.read_numa_nodes,
        "network": node_network.read_protocol_counters,
        "interfaces": node_network.read_interfaces,
        "disks": node_disks.read_disks,
        "interrupts": node_cpu.read_interrupts,
    },
}
"""Sources by cadence and name; slow ones are as old as `files_read_at_ns`. The reader adds `frequencies`, which has
state."""
KERNEL_QUERIES: dict[str, NodeSource] = {
    "sockets": node_network.read_tcp_states,
    "filesystems": node_disks.read_filesystems,
}
"""Slow sources that ask the running kernel instead of reading a file."""


class NodeReader:
    """Reads /proc and /sys once per cycle. Keeps files open; `close` closes them."""

    def __init__(self, proc: Path, sys: Path = Path("/sys"), *, live: bool = True) -> None:
        """`live` is false for files of another machine: then the running kernel is not queried."""
        self._files = ProcSysFiles(proc, sys)
        self.boot_id = _boot_id(proc)
        """The kernel's id of this boot, empty if unreadable; counters of another boot are not comparable."""
        self._machine = read_machine(self._files)
        self._sources = {cadence: dict(sources) for cadence, sources in NODE_SOURCES.items()}
        self._sources[Cadence.TICK]["frequencies"] = node_cpu.CpuFrequencyReader()
        self._sources[Cadence.SLOW] |= KERNEL_QUERIES if live else {}
        self._slow_fields: dict[str, Any] = {}
        self._due_ns: int | None = None

    def read(self, now_ns: int | None = None, wall_time_ns: int | None = None) -> NodeSample:
        """Return the current values, stamped with the caller's clocks or the process's own. Never raises; see
        `problems`."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        if self._due_ns is None or now_ns >= self._due_ns:
            self._due_ns = now_ns + CADENCE_PERIOD_NS[Cadence.SLOW]
            stamp = time.time_ns() if wall_time_ns is None else wall_time_ns
            self._slow_fields = {"files_read_at_ns": stamp, **self._read(Cadence.SLOW)}
        return NodeSample(machine=self._machine, **self._slow_fields, **self._read(Cadence.TICK))

    def problems(self) -> tuple[ComponentHealth, ...]:
        """Return what the latest read missed although every machine has it, as one status with the remedies."""
        failures = self._files.failures()
        if not failures:
            return ()
        remedy = "; ".join(dict.fromkeys(failures.values()))
        return (ComponentHealth(name="node-files", ok=False, error="; ".join(failures), remedy=remedy),)

    def lacks(self) -> tuple[tuple[str, Unavailable], ...]:
        """Return what this machine does not have and others have: information, not failures."""
        return self._files.lacks()

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        self._files.close()

    def _read(self, cadence: Cadence) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, source in self._sources[cadence].items():
            self._files.begin(name)
            fields.update(source(self._files))
        return fields


def _boot_id(proc: Path) -> str:
    try:
        text = read_small_file(proc / "sys/kernel/random/boot_id", MAX_BOOT_ID_BYTES)
    except OSError:
        return ""
    return text.decode("ascii", "replace").strip() if len(text) <= MAX_BOOT_ID_BYTES else ""
