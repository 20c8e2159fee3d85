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
    """A module's `open_NAME`. Raises Unavailable with reason and remedy where the kernel takes no form of the probe."""

    def __call__(self, *, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> Probe: ...


class ProbeEntry(msgspec.Struct, frozen=True):
    """One probe, for people and for whoever opens it."""

    name: str
    open: ProbeOpener
    about: str
    """What it shows, in half a line."""
    fallback: str
    """What is left to look at where no form of it runs."""
    capabilities: tuple[str, ...] = BPF_CAPABILITIES
    """All that it needs of root's powers."""
    asked: bool = False
    """Whether the agent loads it only where the setting `probes` names it: for what it costs, or what few machines have."""


PROBES = (
    ProbeEntry(
        "blame",
        open_blame,
        "who makes whom wait: time waited for a CPU, by the cgroups that had it meanwhile",
        "how long cgroups wait, not for whom",
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
        "reclaim of memory: by kswapd per NUMA node, by tasks that wait for it per cgroup",
        "sums in /proc/vmstat and memory.stat",
    ),
    ProbeEntry(
        "oomkill",
        open_oomkill,
        "processes killed for memory per cgroup, and who the latest were",
        "counts in memory.events and memory.oom_control",
    ),
    ProbeEntry(
        "threads",
        open_threads,
        "threads by state and load averages per cgroup",
        "how many there are in pids.current, and how many run and block on the node in /proc/stat",
    ),
    ProbeEntry(
        "throttles",
        open_throttles,
        "how long each single throttle by a CPU quota lasted, per cgroup",
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
        "who wakes whom: wakeups per pair of cgroups, and how long until the woken task runs",
        "how long cgroups wait, not who woke them",
        asked=True,
    ),
    ProbeEntry(
        "counters",
        open_counters,
        "cycles, instructions and cache misses per cgroup and CPU, by hardware counters",
        "nothing: the kernel keeps none by itself",
        asked=True,
    ),
)
PROBE_NAMES = tuple(row.name for row in PROBES)
DEFAULT_PROBES = tuple(row.name for row in PROBES if not row.asked)
"""What the agent loads where nobody says otherwise."""
BY_NAME = {row.name: row for row in PROBES}


def openers(
    chosen: Collection[str], instead: Mapping[str, Callable[[], Probe]] = {}
) -> list[tuple[str, Callable[[], Probe]]]:
    """Name and opening of the chosen probes, in the order of the table. `instead` has other ways to open some of them."""
    return [(row.name, instead.get(row.name, row.open)) for row in PROBES if row.name in chosen]
