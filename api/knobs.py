"""Kernel controls of a cgroup or of the node, and the Reason for changing one.
Values are in the notation of cgroup v2; agent/qrm/knobs maps each knob to files of v1 and v2.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class Knob(StrEnum):
    """A kernel control of one cgroup, named for what it does; agent/qrm/knobs/knob_files.py maps it to files of v1 and v2.

    Values are in version 2's notation. Those from MEMORY_RECLAIM on are no settings: they make the kernel do something once,
    and there is nothing to put back. Those from WBT on are the node's, not a cgroup's, but for OOM_SCORE_ADJ.
    """

    CPUSET = "cpuset.cpus"
    """CPU list; empty means: whatever the parent has (v2)."""
    MEMS = "cpuset.mems"
    """List of NUMA nodes; empty as above."""
    WEIGHT = "cpu.weight"
    """v2 weight, 1 to 10000, 100 is the default; translated to shares on v1."""
    QUOTA = "cpu.max"
    """Microseconds of CPU per period and the period: `50000 100000`; `max 100000` is no limit."""
    BURST = "cpu.max.burst"
    """Microseconds that may be saved up and used beyond the quota (Linux 5.14)."""
    IDLE = "cpu.idle"
    """`1`: the group runs only where nobody else wants to (Linux 5.15)."""
    MEMORY_MAX = "memory.max"
    """Bytes, or `max`."""
    MEMORY_HIGH = "memory.high"
    """Bytes above which the group itself has to reclaim, or `max`; version 1 has nothing like it."""
    MEMORY_LOW = "memory.low"
    """Bytes that are reclaimed only when nothing else is left; version 1 has nothing like it."""
    MEMORY_MIN = "memory.min"
    """Bytes that are never reclaimed; version 1 has nothing like it."""
    SWAP_MAX = "memory.swap.max"
    """Bytes of swap, or `max`."""
    IO_WEIGHT = "io.weight"
    """1 to 10000, 100 is the default."""
    IO_MAX = "io.max"
    """A line for each device: `8:16 rbps=1048576 wbps=max riops=max wiops=max`."""
    NET_CLASS = "net_cls.classid"
    """Class of the group's packets, as a number; version 1 alone."""
    MEMORY_RECLAIM = "memory.reclaim"
    """Have the group give up so many bytes, by writing them back, dropping them or swapping them out (Linux 5.19)."""
    DROP_CACHE = "drop_cache"
    """Have the group give up page cache: so many bytes, of version 1 as much as it can (memory.force_empty)."""
    MIGRATE_PAGES = "migrate_pages"
    """Move memory of the group's tasks from some NUMA nodes to another: `0 1`, from and to, as lists."""
    WBT = "wbt_lat_usec"
    """Of a disk: reads that take longer have writing back held up, in microseconds; 0 holds nothing up."""
    IO_COST_QOS = "io.cost.qos"
    """Of a disk: when it counts as overloaded. The device's number, and words such as `enable=1 rpct=95.00 rlat=10000`."""
    IO_COST_MODEL = "io.cost.model"
    """Of a disk: what requests cost it. Likewise, such as `ctrl=user model=linear rbps=174019176`."""
    SCHEMATA = "schemata"
    """Of a group of resctrl: its part of caches and memory bandwidth, `L3:0=f MB:0=100`."""
    OOM_SCORE_ADJ = "oom_score_adj"
    """Of each process in a cgroup: thousandths of the memory that it counts as using beside its own; -1000 is never killed."""


ONE_SHOT_KNOBS = frozenset((Knob.MEMORY_RECLAIM, Knob.DROP_CACHE, Knob.MIGRATE_PAGES))
"""Those that are done, not set."""


ReasonInputs = dict[str, float | int | str | None]
"""Observed values that a decision was based on, by name."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why: the rule that fired, in a sentence, with the threshold and every input that it looked at."""

    rule: str
    """Short code, stable, usable as a metric label: `wait_above_target`."""
    text: str
    """One sentence for a person, with the numbers in it."""
    threshold: float | None = None
    inputs: Mapping[str, float | int | str | None] = {}
