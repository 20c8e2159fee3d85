"""The machine as a whole, from /proc and /sys. A file that is missing leaves its fields empty and is told of.

`SOURCES` is the list of them. Those that cost much, or that change slowly, are read every few seconds, all together, so
that one stamp says when.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.sense import disks, filesystems, numa, parsers, power, proc_cpu, proc_memory, proc_net, resctrl
from agent.sense.cadence import PERIOD_NS, Cadence
from agent.sense.machine import read_machine
from agent.sense.node_files import NodeFiles
from agent.smallfile import read_small
from api.ports import Unavailable
from api.samples import NodeSample, SourceStatus

NodeSource = Callable[[NodeFiles], dict[str, Any]]
LONGEST_BOOT_ID = 64
"""Bytes; a UUID and the end of its line are 37."""
PSI = "boot with psi=1, on a kernel with CONFIG_PSI"


def _load(files: NodeFiles) -> dict[str, Any]:
    return {"load": files.parse("loadavg", parsers.load_averages)}


def _pressure(files: NodeFiles) -> dict[str, Any]:
    return {
        f"{resource}_pressure": files.parse(f"pressure/{resource}", parsers.pressure, PSI)
        for resource in ("cpu", "memory", "io")
    }


SOURCES: dict[Cadence, dict[str, NodeSource]] = {
    Cadence.TICK: {
        "times": proc_cpu.times,
        "memory": proc_memory.meminfo,
        "load": _load,
        "pressure": _pressure,
        "delays": proc_cpu.delays,
        "energy": power.energy,
        "monitors": resctrl.monitors,
    },
    Cadence.SLOW: {
        "vmstat": proc_memory.vmstat,
        "settings": proc_memory.settings,
        "zones": proc_memory.zones,
        "numa": numa.nodes,
        "network": proc_net.counters,
        "interfaces": proc_net.interfaces,
        "disks": disks.disks,
        "interrupts": proc_cpu.interrupts,
    },
}
"""By name, for people; what is not listed under TICK is as old as `files_read_at_ns` says. `frequencies` of every tick has
a state of its own and is added to them."""
ASKED: dict[str, NodeSource] = {"sockets": proc_net.states, "filesystems": filesystems.filesystems}
"""What is no file: the kernel that runs us answers. As slow as the others."""


class NodeReader:
    """Reads /proc and /sys once a tick. Keeps files open; `close` gives them back."""

    def __init__(self, proc: Path, sys: Path = Path("/sys"), *, live: bool = True) -> None:
        """`live` is false for the files of another machine: then nothing is told that only its kernel knows."""
        self._files = NodeFiles(proc, sys)
        self.boot_id = _boot_id(proc)
        """What the kernel calls this boot, empty where it does not tell; counters of another boot are not comparable."""
        self._machine = read_machine(self._files)
        self._sources = {cadence: dict(sources) for cadence, sources in SOURCES.items()}
        self._sources[Cadence.TICK]["frequencies"] = proc_cpu.Frequencies()
        self._sources[Cadence.SLOW] |= ASKED if live else {}
        self._kept: dict[str, Any] = {}
        self._due_ns: int | None = None

    def read(self, now_ns: int | None = None, wall_time_ns: int | None = None) -> NodeSample:
        """What they say now, by the caller's clocks or this process's own. Never raises: `problems` tells what is missing."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        if self._due_ns is None or now_ns >= self._due_ns:
            self._due_ns = now_ns + PERIOD_NS[Cadence.SLOW]
            stamp = time.time_ns() if wall_time_ns is None else wall_time_ns
            self._kept = {"files_read_at_ns": stamp, **self._read(Cadence.SLOW)}
        return NodeSample(machine=self._machine, **self._kept, **self._read(Cadence.TICK))

    def problems(self) -> tuple[SourceStatus, ...]:
        """What the latest read did not get although every machine has it, in one line, with the remedies."""
        failures = self._files.failures()
        if not failures:
            return ()
        remedy = "; ".join(dict.fromkeys(failures.values()))
        return (SourceStatus(name="node-files", ok=False, error="; ".join(failures), remedy=remedy),)

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
        said = read_small(proc / "sys/kernel/random/boot_id", LONGEST_BOOT_ID)
    except OSError:
        return ""
    return said.decode("ascii", "replace").strip() if len(said) <= LONGEST_BOOT_ID else ""
