"""Every probe beside run-queue waits, in the order in which they are loaded. A new probe is one row here.

Run-queue waits (probes/runqlat.py) come first and by a port of their own, because decisions hang on them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from api.ports import Probe
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
LOADED = (BPF, PERFMON)
"""Capabilities for programs at tracepoints and the maps that they count in."""


class Opener(Protocol):
    """A module's `open_NAME`. Raises Unavailable with reason and remedy where the kernel takes no form of the probe."""

    def __call__(self, *, child_python: Path = CHILD_PYTHON, btf: Path = VMLINUX) -> Probe: ...


class Row(msgspec.Struct, frozen=True):
    """One probe, for people and for whoever opens it."""

    name: str
    open: Opener
    about: str
    """What it shows, in half a line."""
    fallback: str
    """What is left to look at where no form of it runs."""
    capabilities: tuple[str, ...] = LOADED
    """All that it needs of root's powers."""
    asked: bool = False
    """Whether the agent loads it only where the setting `probes` names it: for what it costs, or what few machines have."""


ROWS = (
    Row(
        "blame",
        open_blame,
        "who makes whom wait: time waited for a CPU, by the cgroups that had it meanwhile",
        "how long cgroups wait, not for whom",
    ),
    Row(
        "blockio",
        open_blockio,
        "latency and bytes of block I/O per cgroup and device",
        "bytes from io.stat and blkio files",
    ),
    Row(
        "sockets",
        open_sockets,
        "TCP and UDP bytes and packets, and TCP retransmits, per cgroup",
        "traffic of interfaces",
    ),
    Row(
        "softirq",
        open_softirq,
        "time of the kernel's deferred interrupt work per CPU and kind",
        "its sum in /proc/stat",
    ),
    Row(
        "kswapd",
        open_kswapd,
        "reclaim of memory: by kswapd per NUMA node, by tasks that wait for it per cgroup",
        "sums in /proc/vmstat and memory.stat",
    ),
    Row(
        "oomkill",
        open_oomkill,
        "processes killed for memory per cgroup, and who the latest were",
        "counts in memory.events and memory.oom_control",
    ),
    Row(
        "threads",
        open_threads,
        "threads by state and load averages per cgroup",
        "how many there are in pids.current, and how many run and block on the node in /proc/stat",
    ),
    Row(
        "throttles",
        open_throttles,
        "how long each single throttle by a CPU quota lasted, per cgroup",
        "sums in cpu.stat",
    ),
    Row(
        "migrations",
        open_migrations,
        "tasks moved to a CPU of another NUMA node, per cgroup",
        "numa_pages_migrated in /proc/vmstat",
    ),
    Row(
        "wakeups",
        open_wakeups,
        "who wakes whom: wakeups per pair of cgroups, and how long until the woken task runs",
        "how long cgroups wait, not who woke them",
        asked=True,
    ),
    Row(
        "counters",
        open_counters,
        "cycles, instructions and cache misses per cgroup and CPU, by hardware counters",
        "nothing: the kernel keeps none by itself",
        asked=True,
    ),
)
NAMES = tuple(row.name for row in ROWS)
USUAL = tuple(row.name for row in ROWS if not row.asked)
"""What the agent loads where nobody says otherwise."""
BY_NAME = {row.name: row for row in ROWS}


def openers(
    chosen: Collection[str], instead: Mapping[str, Callable[[], Probe]] = {}
) -> list[tuple[str, Callable[[], Probe]]]:
    """Name and opening of the chosen probes, in the order of the table. `instead` has other ways to open some of them."""
    return [(row.name, instead.get(row.name, row.open)) for row in ROWS if row.name in chosen]
