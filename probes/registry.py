"""Lists every probe except run-queue latency, in loading order; a new probe is one row here.
Run-queue latency (probes/runqlat.py) is loaded first and by an interface of its own, because decisions depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from api.interfaces import Probe
from probes.blame import open_blame
from probes.blockio import open_blockio
from probes.btf import VMLINUX
from probes.counters import open_counters
from probes.kswapd import open_kswapd
from probes.loader import CHILD_PYTHON
from probes.migrations import open_migrations
from probes.oomkill import open_oomkill
from probes.sockets import open_sockets
from probes.softirq import open_softirq
from probes.threads import open_threads
from probes.throttles import open_throttles
from probes.wakeups import open_wakeups

BPF, PERFMON = "BPF", "PERFMON"
BPF_CAPABILITIES = (BPF, PERFMON)
"""Capabilities for programs at tracepoints and the maps that they count in."""


class ProbeOpener(Protocol):
    """A module's `open_NAME`. Raises Unavailable with reason and remedy if the kernel accepts no form of the probe."""

    def __call__(self, *, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> Probe: ...


class ProbeEntry(msgspec.Struct, frozen=True):
    """One probe: how to open and describe it."""

    name: str
    open: ProbeOpener
    about: str
    """What the probe measures, in half a line."""
    fallback: str
    """What remains available if no form of the probe runs."""
    capabilities: tuple[str, ...] = BPF_CAPABILITIES
    """Capabilities that the probe needs."""
    opt_in: bool = False
    """Whether the agent loads the probe only if the setting `probes` names it, because of its cost or rare hardware."""


PROBES = (
    ProbeEntry(
        "blame",
        open_blame,
        "run-queue latency by aggressor: time waited for a CPU, by the cgroups that ran on it meanwhile",
        "run-queue latency without its aggressors",
    ),
    ProbeEntry(
        "blockio",
        open_blockio,
        "latency and bytes of block I/O per cgroup and device",
        "bytes from io.stat and blkio files",
    ),
    ProbeEntry(
        "sockets",
        open_sockets,
        "TCP and UDP bytes and packets, and TCP retransmits, per cgroup",
        "traffic of interfaces",
    ),
    ProbeEntry(
        "softirq",
        open_softirq,
        "time of the kernel's deferred interrupt work per CPU and kind",
        "its sum in /proc/stat",
    ),
    ProbeEntry(
        "kswapd",
        open_kswapd,
        "memory reclaim: by kswapd per NUMA node, by waiting tasks per cgroup",
        "sums in /proc/vmstat and memory.stat",
    ),
    ProbeEntry(
        "oomkill",
        open_oomkill,
        "processes killed for memory per cgroup, and the latest victims",
        "counts in memory.events and memory.oom_control",
    ),
    ProbeEntry(
        "threads",
        open_threads,
        "threads by state and load averages per cgroup",
        "the number of threads in pids.current, and of running and blocked ones on the node in /proc/stat",
    ),
    ProbeEntry(
        "throttles",
        open_throttles,
        "duration of each single throttle by a CPU quota, per cgroup",
        "sums in cpu.stat",
    ),
    ProbeEntry(
        "migrations",
        open_migrations,
        "tasks moved to a CPU of another NUMA node, per cgroup",
        "numa_pages_migrated in /proc/vmstat",
    ),
    ProbeEntry(
        "wakeups",
        open_wakeups,
        "wakeups per pair of cgroups, and the time until the woken task runs",
        "run-queue latency without the wakers",
        opt_in=True,
    ),
    ProbeEntry(
        "counters",
        open_counters,
        "cycles, instructions and cache misses per cgroup and CPU, by hardware counters",
        "nothing: the kernel has no such counters of its own",
        opt_in=True,
    ),
)
PROBE_NAMES = tuple(row.name for row in PROBES)
DEFAULT_PROBES = tuple(row.name for row in PROBES if not row.opt_in)
"""Probes that the agent loads by default."""
BY_NAME = {row.name: row for row in PROBES}


def openers(
    chosen: Collection[str], instead: Mapping[str, Callable[[], Probe]] = {}
) -> list[tuple[str, Callable[[], Probe]]]:
    """Return name and opener of the chosen probes, in the order of the table. `instead` overrides openers by name."""
    return [(row.name, instead.get(row.name, row.open)) for row in PROBES if row.name in chosen]
