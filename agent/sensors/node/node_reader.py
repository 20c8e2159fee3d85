"""Reads the machine as a whole from /proc and /sys into a NodeSample, once per cycle.
`NODE_SOURCES` lists the sources by cadence; slow ones are read together, so that one timestamp covers them. A
missing file leaves its fields empty and is reported as a health problem with a remedy; `read` never raises.
"""

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
"""Bytes; a UUID and the end of its line are 37."""
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
"""By name, for people; what is not listed under TICK is as old as `files_read_at_ns` says. `frequencies` of every tick has
a state of its own and is added to them."""
KERNEL_QUERIES: dict[str, NodeSource] = {
    "sockets": node_network.read_tcp_states,
    "filesystems": node_disks.read_filesystems,
}
"""What is no file: the kernel that runs us answers. As slow as the others."""


class NodeReader:
    """Reads /proc and /sys once a tick. Keeps files open; `close` gives them back."""

    def __init__(self, proc: Path, sys: Path = Path("/sys"), *, live: bool = True) -> None:
        """`live` is false for the files of another machine: then nothing is told that only its kernel knows."""
        self._files = ProcSysFiles(proc, sys)
        self.boot_id = _boot_id(proc)
        """What the kernel calls this boot, empty where it does not tell; counters of another boot are not comparable."""
        self._machine = read_machine(self._files)
        self._sources = {cadence: dict(sources) for cadence, sources in NODE_SOURCES.items()}
        self._sources[Cadence.TICK]["frequencies"] = node_cpu.CpuFrequencyReader()
        self._sources[Cadence.SLOW] |= KERNEL_QUERIES if live else {}
        self._kept: dict[str, Any] = {}
        self._due_ns: int | None = None

    def read(self, now_ns: int | None = None, wall_time_ns: int | None = None) -> NodeSample:
        """What they say now, by the caller's clocks or this process's own. Never raises: `problems` tells what is missing."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        if self._due_ns is None or now_ns >= self._due_ns:
            self._due_ns = now_ns + CADENCE_PERIOD_NS[Cadence.SLOW]
            stamp = time.time_ns() if wall_time_ns is None else wall_time_ns
            self._kept = {"files_read_at_ns": stamp, **self._read(Cadence.SLOW)}
        return NodeSample(machine=self._machine, **self._kept, **self._read(Cadence.TICK))

    def problems(self) -> tuple[ComponentHealth, ...]:
        """What the latest read did not get although every machine has it, in one line, with the remedies."""
        failures = self._files.failures()
        if not failures:
            return ()
        remedy = "; ".join(dict.fromkeys(failures.values()))
        return (ComponentHealth(name="node-files", ok=False, error="; ".join(failures), remedy=remedy),)

    def lacks(self) -> tuple[tuple[str, Unavailable], ...]:
        """What this machine does not have and others have: no failures, but worth telling who asks."""
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
        said = read_small_file(proc / "sys/kernel/random/boot_id", MAX_BOOT_ID_BYTES)
    except OSError:
        return ""
    return said.decode("ascii", "replace").strip() if len(said) <= MAX_BOOT_ID_BYTES else ""
