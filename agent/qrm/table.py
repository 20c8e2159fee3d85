"""The one table of kernel controls: which file of which controller holds each knob, on cgroup version 1 and 2.

Everything outside speaks one notation, version 2's, on both versions (`api.knobs.Knob`). Nothing here knows a reason
or a policy, and nothing is opened here: agent/qrm/knobs.py does that.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec

from agent.qrm import notation, places
from agent.qrm.notation import DEFAULT_WEIGHT, UNLIMITED, shares_of, weight_of
from agent.qrm.places import CFS_PERIOD, CFS_QUOTA, Place, Steps, Texts, same, single
from api.knobs import Knob

__all__ = (
    "CFS_PERIOD", "CFS_QUOTA", "DEFAULT_WEIGHT", "EFFECTIVE", "LACKS", "ONCE_FILES", "REMEDIES", "TABLE", "UNLIMITED",
    "Place", "Row", "Steps", "Texts", "canonical", "meaning", "place_with", "shares_of", "weight_of",
)  # fmt: skip


class Row(msgspec.Struct, frozen=True, eq=False):
    """One knob. `canonical` makes equal meanings equal texts; it raises ValueError on anything else.

    Of the places of a version the first that the kernel has is used; none is what `LACKS` explains.
    """

    canonical: Callable[[str], str]
    v1: tuple[Place, ...]
    v2: tuple[Place, ...]


@lru_cache(maxsize=4096)
def canonical(knob: Knob, text: str) -> str:
    """The one spelling of a knob's value: `0,1` is `0-1`, `50000` is `50000 100000`, every `max` has the default period.

    Raises ValueError that quotes the text.
    """
    try:
        return (TABLE[knob].canonical if knob in TABLE else ONCE_FORMS[knob])(text)
    except ValueError as error:
        raise ValueError(f"{knob.value}: {error}") from None


@lru_cache(maxsize=1024)
def meaning(knob: Knob, place: Place, texts: tuple[tuple[str, str], ...]) -> str:
    """What these texts of its files mean, in canonical notation. Raises ValueError and KeyError where they mean nothing."""
    # Most texts are those of the round before, and those of other cgroups.
    return canonical(knob, place.decode(dict(texts)))


@lru_cache(maxsize=256)
def place_with(places: tuple[Place, ...], files: tuple[str, ...]) -> Place | None:
    """The first of these places that has all of these files."""
    return next((place for place in places if set(files) <= set(place.files)), None)


def _both(controller: str, file: str, read: Callable[[str], str], v2_file: str | None = None) -> Row:
    return Row(read, (same(controller, file, read),), (same(controller, v2_file or file, read),))


def _memory_v2(knob: Knob, v1: Place | None = None) -> Row:
    return Row(notation.size, (v1,) if v1 else (), (same("memory", knob.value, notation.size),))


TABLE: Mapping[Knob, Row] = {
    Knob.CPUSET: _both("cpuset", "cpuset.cpus", notation.cpus),
    Knob.MEMS: Row(notation.nodes, (places.MEMS_V1,), (same("cpuset", "cpuset.mems", notation.nodes),)),
    Knob.WEIGHT: Row(
        canonical=notation.whole,
        v1=(
            single(
                "cpu",
                "cpu.shares",
                lambda text: str(weight_of(notation.number(text))),
                lambda value: str(shares_of(int(value))),
            ),
        ),
        v2=(same("cpu", "cpu.weight", notation.whole),),
    ),
    Knob.QUOTA: Row(notation.quota, (places.CFS,), (same("cpu", "cpu.max", notation.quota),)),
    Knob.BURST: _both("cpu", "cpu.cfs_burst_us", notation.whole, "cpu.max.burst"),
    Knob.IDLE: _both("cpu", "cpu.idle", notation.idle),
    Knob.MEMORY_MAX: _memory_v2(Knob.MEMORY_MAX, places.bytes_v1(places.LIMIT)),
    Knob.MEMORY_HIGH: _memory_v2(Knob.MEMORY_HIGH),
    Knob.MEMORY_LOW: _memory_v2(Knob.MEMORY_LOW),
    Knob.MEMORY_MIN: _memory_v2(Knob.MEMORY_MIN),
    Knob.SWAP_MAX: _memory_v2(Knob.SWAP_MAX, places.SWAP_V1),
    Knob.IO_WEIGHT: Row(
        canonical=notation.whole,
        v1=(places.bfq_weight_v1(), places.cfq_weight_v1()),
        v2=(places.default_weight("io.weight", 10_000), places.default_weight("io.bfq.weight", 1000)),
    ),
    Knob.IO_MAX: Row(notation.io_max, (places.IO_MAX_V1,), (places.IO_MAX_V2,)),
    Knob.NET_CLASS: Row(notation.class_id, (same("net_cls", "net_cls.classid", notation.class_id),), ()),
}

ONCE_FORMS: Mapping[Knob, Callable[[str], str]] = {
    Knob.MEMORY_RECLAIM: notation.amount,
    Knob.DROP_CACHE: notation.amount,
    Knob.MIGRATE_PAGES: notation.migration,
}
ONCE_FILES: Mapping[Knob, tuple[str | None, str | None]] = {
    Knob.MEMORY_RECLAIM: (None, "memory.reclaim"),
    Knob.DROP_CACHE: ("memory.force_empty", "memory.reclaim"),
    Knob.MIGRATE_PAGES: ("memory.numa_stat", "memory.numa_stat"),
}
"""Files of the memory controller without which those knobs cannot be turned, on version 1 and 2."""

EFFECTIVE = {
    Knob.CPUSET: ("cpuset.effective_cpus", "cpuset.cpus.effective"),
    Knob.MEMS: ("cpuset.effective_mems", "cpuset.mems.effective"),
}
"""What a group's tasks really may use: version 1's name and version 2's."""

_V2_ONLY = "cgroup version 1 has nothing like it"
LACKS: Mapping[tuple[Knob, str], tuple[str, str]] = {
    (Knob.MEMORY_HIGH, "v1"): (_V2_ONLY, "boot with cgroup version 2 to have reclaim instead of a hard limit"),
    (Knob.MEMORY_LOW, "v1"): (_V2_ONLY, "boot with cgroup version 2 to protect memory"),
    (Knob.MEMORY_MIN, "v1"): (_V2_ONLY, "boot with cgroup version 2 to protect memory"),
    (Knob.MEMORY_RECLAIM, "v1"): (
        _V2_ONLY,
        "boot with cgroup version 2 and Linux 5.19; drop_cache gives back page cache",
    ),
    (Knob.NET_CLASS, "v2"): (
        "cgroup version 2 marks no packets",
        "mount net_cls beside it, or classify packets by BPF",
    ),
}
"""What one version cannot do: why, and what to do about it."""

REMEDIES: Mapping[tuple[Knob, int], str] = {
    (Knob.CPUSET, errno.EACCES): "the cgroup above does not have these CPUs: widen its cpuset.cpus first",
    (Knob.CPUSET, errno.EBUSY): "a cgroup below uses CPUs that this list leaves out: narrow that one first",
    (Knob.CPUSET, errno.ENOSPC): "its tasks would be left without a CPU: name at least one",
    (Knob.CPUSET, errno.EINVAL): "name CPUs that are online and that no exclusive cpuset beside it holds",
    (Knob.MEMS, errno.EACCES): "the cgroup above does not have these NUMA nodes: widen its cpuset.mems first",
    (Knob.MEMS, errno.EBUSY): "a cgroup below uses NUMA nodes that this list leaves out: narrow that one first",
    (Knob.MEMS, errno.ENOSPC): "its tasks would be left without memory: name at least one NUMA node",
    (Knob.MEMS, errno.EINVAL): "name NUMA nodes that have memory",
    (Knob.WEIGHT, errno.EINVAL): "cpu.idle=1 pins the weight: set cpu.idle to 0 first",
    (Knob.WEIGHT, errno.ERANGE): "choose a weight from 1 to 10000",
    (Knob.QUOTA, errno.EINVAL): "keep the quota at 1000 us or more, not below cpu.cfs_burst_us or cpu.max.burst, and on"
    " version 1 its part of the period between that of the cgroups below and that of the one above",
    (Knob.BURST, errno.EINVAL): "keep the burst at the quota or below",
    (Knob.IDLE, errno.EINVAL): "the kernel lets only cgroups below the root be idle",
    (Knob.MEMORY_MAX, errno.EBUSY): "it uses more, and the kernel cannot take that back now: lower the limit in steps",
    (Knob.MEMORY_MAX, errno.EINVAL): "keep it at memory.memsw.limit_in_bytes or below",
    (Knob.SWAP_MAX, errno.EINVAL): "memory and swap together cannot have less than memory alone",
    (Knob.IO_MAX, errno.ENODEV): "name whole disks that are there, as MAJOR:MINOR",
    (Knob.IO_MAX, errno.ENXIO): "name whole disks that are there, as MAJOR:MINOR",
    (Knob.IO_WEIGHT, errno.ERANGE): "choose a weight within the range of the disks' scheduler",
    (Knob.IO_WEIGHT, errno.EOPNOTSUPP): "give a disk the bfq scheduler, or set io.cost.qos of the root",
}
"""What a person can do when the kernel refuses a write for that reason."""
