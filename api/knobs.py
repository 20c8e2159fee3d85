"""Kernel controls of a cgroup or of the node, and the Reason for changing one.
Values are in the notation of cgroup v2; agent/qrm/knobs maps each knob to files of v1 and v2.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from api.text import make_printable


class Knob(StrEnum):
    """A kernel control of one cgroup or of the node; agent/qrm/knobs/knob_files.py maps it to files of v1 and v2.

    Values are in the notation of cgroup v2. MEMORY_RECLAIM to MIGRATE_PAGES are one-shot operations without an original to
    restore. WBT to SCHEMATA belong to the node, not to a cgroup.
    """

    CPUSET = "cpuset.cpus"
    """CPU list; empty inherits the parent's (v2)."""
    MEMS = "cpuset.mems"
    """List of NUMA nodes; empty inherits the parent's (v2)."""
    WEIGHT = "cpu.weight"
    """Weight, 1 to 10000, default 100; converted to cpu.shares on v1."""
    QUOTA = "cpu.max"
    """Microseconds of CPU per period and the period: `50000 100000`; `max 100000` means no limit."""
    BURST = "cpu.max.burst"
    """Microseconds that may be accumulated and used beyond the quota (Linux 5.14)."""
    IDLE = "cpu.idle"
    """`1`: tasks that wake up in other children of the parent cgroup interrupt the tasks of this one (Linux 5.15)."""
    MEMORY_MAX = "memory.max"
    """Bytes, or `max`."""
    MEMORY_HIGH = "memory.high"
    """Bytes above which the cgroup's tasks reclaim memory themselves, or `max`; v2 only."""
    MEMORY_LOW = "memory.low"
    """Bytes that are reclaimed only if no unprotected memory is left; v2 only."""
    MEMORY_MIN = "memory.min"
    """Bytes that are never reclaimed; v2 only."""
    SWAP_MAX = "memory.swap.max"
    """Bytes of swap, or `max`."""
    IO_WEIGHT = "io.weight"
    """Weight, 1 to 10000, default 100."""
    IO_MAX = "io.max"
    """One line per device: `8:16 rbps=1048576 wbps=max riops=max wiops=max`."""
    NET_CLASS = "net_cls.classid"
    """Class id of the cgroup's packets; v1 only."""
    MEMORY_RECLAIM = "memory.reclaim"
    """Reclaim this many bytes from the cgroup by writeback, dropping or swapping (Linux 5.19)."""
    DROP_CACHE = "drop_cache"
    """Reclaim page cache of the cgroup: this many bytes, or on v1 as much as possible (memory.force_empty)."""
    MIGRATE_PAGES = "migrate_pages"
    """Move memory of the cgroup's tasks between NUMA nodes: `0 1`, from and to, as lists."""
    WBT = "wbt_lat_usec"
    """Latency in microseconds above which reads of a disk throttle writeback; 0 disables throttling."""
    IO_COST_QOS = "io.cost.qos"
    """When a disk counts as overloaded: its number and parameters such as `enable=1 rpct=95.00 rlat=10000`."""
    IO_COST_MODEL = "io.cost.model"
    """Cost model of a disk: its number and parameters such as `ctrl=user model=linear rbps=174019176`."""
    POWER_LIMIT = "constraint_0_power_limit_uw"
    """Long-term power limit of a processor package in microwatts (RAPL)."""
    SCHEMATA = "schemata"
    """Cache and memory-bandwidth allocation of a resctrl group, `L3:0=f MB:0=100`."""
    SLICE = "sched_runtime"
    """Nanoseconds for which each thread of a cgroup may run before a task that wakes up can take its CPU (EEVDF slice,
    sched_setattr(2), Linux 6.12); 0 is the kernel's default."""
    OOM_SCORE_ADJ = "oom_score_adj"
    """OOM score adjustment of each process in a cgroup, in thousandths of memory; -1000 exempts it from the OOM killer."""


ONE_SHOT_KNOBS = frozenset((Knob.MEMORY_RECLAIM, Knob.DROP_CACHE, Knob.MIGRATE_PAGES))
"""Knobs that trigger an operation and hold no value."""


ReasonInputs = dict[str, float | int | str | None]
"""Observed values that a decision was based on, by name."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a decision was made: the rule that applied, its threshold and every input it used."""

    rule: str
    """Stable short code, usable as a metric label: `wait_above_target`."""
    text: str
    """One sentence for people, including the numbers; printable."""
    threshold: float | None = None
    inputs: Mapping[str, float | int | str | None] = {}

    def __post_init__(self) -> None:
        make_printable(self, "text")
