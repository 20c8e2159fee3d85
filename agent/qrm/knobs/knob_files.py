"""The table of kernel controls: files, codecs and clamp of each knob on cgroup v1 and v2. Pure.
All other modules use cgroup v2 notation (`api.knobs.Knob`). A codec also gives the order of writes that the kernel
accepts. A clamp never exceeds a limit of the owner and never lowers a protection of the owner; it raises ValueError
where no permitted value has the same meaning.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import inf

import msgspec

from agent.qrm.knobs import notation
from agent.qrm.knobs.notation import (
    IO_KEYS,
    IO_UNLIMITED,
    MAX,
    PAGE_BYTES,
    UNLIMITED,
    UNLIMITED_BYTES,
    format_io,
    parse_io,
    shares_to_weight,
    weight_to_shares,
)
from api.cpu import format_cpu_list, parse_cpu_list
from api.knobs import Knob

Texts = Mapping[str, str]
"""Content of the files of a knob, byte for byte, by file name."""
Steps = tuple[tuple[str, str], ...]
"""File and text of each write, in order."""

CFS_QUOTA, CFS_PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"
MEMS_FILE, MEMORY_MIGRATE_FILE = "cpuset.mems", "cpuset.memory_migrate"
MEMORY_LIMIT_FILE, MEMSW_LIMIT_FILE = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
THROTTLE_FILES = {
    "rbps": "blkio.throttle.read_bps_device",
    "wbps": "blkio.throttle.write_bps_device",
    "riops": "blkio.throttle.read_iops_device",
    "wiops": "blkio.throttle.write_iops_device",
}


def write_each_file(_current: Texts, target: Texts) -> Steps:
    """Return one write for each file, regardless of the current content."""
    return tuple(target.items())


class KnobCodec(msgspec.Struct, frozen=True, eq=False):
    """Files and notation of a knob in one cgroup version. `encode` may omit files that do not affect the value."""

    controller: str
    files: tuple[str, ...]
    decode: Callable[[Texts], str]
    encode: Callable[[str], Texts]
    steps: Callable[[Texts, Texts], Steps] = write_each_file
    """Writes that lead from the current texts, those of `context_files` included, to the target. Raises ValueError."""
    context_files: tuple[str, ...] = ()
    """Files that are read because the value depends on them, and neither journalled nor written."""
    normalize: Callable[[Texts], Texts] = lambda texts: texts
    """Function from the files to the part that belongs to the knob. Raises ValueError on an unknown format."""
    weights: tuple[int, int] = (1, 10_000)
    """Minimum and maximum of a weight, in version 2 notation."""


def single_value_codec(
    controller: str, file: str, decode: Callable[[str], str], encode: Callable[[str], str]
) -> KnobCodec:
    """Return the codec of one file that holds one value."""
    return KnobCodec(controller, (file,), lambda texts: decode(texts[file]), lambda value: {file: encode(value)})


def plain_codec(controller: str, file: str, read: Callable[[str], str]) -> KnobCodec:
    """Return the codec of one file in version 2 notation."""
    return single_value_codec(controller, file, read, lambda value: value)


def _decode_cfs(texts: Texts) -> str:
    quota = texts[CFS_QUOTA].strip()
    return notation.canonical_quota(f"{MAX if quota == '-1' else quota} {texts[CFS_PERIOD]}")


def _encode_cfs(value: str) -> Texts:
    quota, period = value.split()
    return {CFS_QUOTA: "-1"} if quota == MAX else {CFS_QUOTA: quota, CFS_PERIOD: period}


def _cfs_steps(current: Texts, target: Texts) -> Steps:
    """Return the writes of a version 1 quota, none of which violates the limits of the parent or of a child. Version
    1 refuses a quota:period ratio above the parent's or below a child's, also between two writes. No limit is
    accepted under every parent and over every child (tg_cfs_schedulable_down(), kernel/sched/core.c), so the period
    changes while there is none."""
    quota = (CFS_QUOTA, target[CFS_QUOTA])
    period = target.get(CFS_PERIOD, current[CFS_PERIOD])
    if period.strip() == current[CFS_PERIOD].strip():
        return (quota,)
    return ((CFS_QUOTA, "-1"), (CFS_PERIOD, period), quota)


CFS_CODEC = KnobCodec("cpu", (CFS_QUOTA, CFS_PERIOD), _decode_cfs, _encode_cfs, _cfs_steps)


def _mems_steps(current: Texts, target: Texts) -> Steps:
    """Return the writes of `cpuset.mems`: memory follows the cgroup only while the migrate flag is set. The flag is
    set before nodes change, and cleared after they have changed back."""
    flag, mems = (MEMORY_MIGRATE_FILE, target[MEMORY_MIGRATE_FILE]), (MEMS_FILE, target[MEMS_FILE])
    if flag[1].strip() == current[MEMORY_MIGRATE_FILE].strip():
        return (mems,)
    return (flag, mems) if flag[1].strip() == "1" else (mems, flag)


MEMS_CODEC_V1 = KnobCodec(
    "cpuset",
    (MEMS_FILE, MEMORY_MIGRATE_FILE),
    lambda texts: notation.canonical_nodes(texts[MEMS_FILE]),
    lambda value: {MEMORY_MIGRATE_FILE: "1", MEMS_FILE: value},
    _mems_steps,
)


def _decode_swap(texts: Texts) -> str:
    both = notation.canonical_size(texts[MEMSW_LIMIT_FILE])
    return both if both == MAX else str(max(int(both) - int(notation.parse_number(texts[MEMORY_LIMIT_FILE])), 0))


def _swap_steps(current: Texts, target: Texts) -> Steps:
    """Return the write of the combined limit of version 1: `+N` means N bytes more than the memory limit."""
    text = target[MEMSW_LIMIT_FILE]
    if not text.startswith("+"):
        return ((MEMSW_LIMIT_FILE, text),)
    limit = notation.parse_number(current[MEMORY_LIMIT_FILE])
    if limit >= UNLIMITED_BYTES:
        raise ValueError(
            "version 1 limits memory and swap together, and memory has no limit here: set memory.max first"
        )
    return ((MEMSW_LIMIT_FILE, str(limit + int(text[1:]))),)


SWAP_CODEC_V1 = KnobCodec(
    "memory",
    (MEMSW_LIMIT_FILE,),
    _decode_swap,
    lambda value: {MEMSW_LIMIT_FILE: str(UNLIMITED_BYTES) if value == MAX else f"+{value}"},
    _swap_steps,
    context_files=(MEMORY_LIMIT_FILE,),
)


def default_weight_codec(file: str, max_weight: int) -> KnobCodec:
    """Return the codec of a file with a `default 100` line; lines of single devices are left alone."""

    def normalize(texts: Texts) -> Texts:
        lines = [line for line in texts[file].splitlines() if line.startswith("default ")]
        if len(lines) != 1:
            raise ValueError("there is no default weight")
        return {file: f"{lines[0]}\n"}

    return KnobCodec(
        "io",
        (file,),
        lambda texts: notation.canonical_number(texts[file].removeprefix("default ")),
        lambda value: {file: f"default {value}"},
        normalize=normalize,
        weights=(1, max_weight),
    )


def bfq_weight_codec_v1() -> KnobCodec:
    """Return the codec of BFQ's weight, whose default is 100 as well."""
    codec = plain_codec("blkio", "blkio.bfq.weight", notation.canonical_number)
    return msgspec.structs.replace(codec, weights=(1, 1000))


def cfq_weight_codec_v1() -> KnobCodec:
    """Return the codec of CFQ's weight (up to Linux 4.20): 10 to 1000, default 500."""
    file = "blkio.weight"
    return KnobCodec(
        "blkio",
        (file,),
        lambda texts: str(notation.parse_number(texts[file]) // 5),
        lambda value: {file: str(int(value) * 5)},
        weights=(2, 200),
    )


def _io_steps(current: Texts, target: Texts) -> Steps:
    """Return one write per changed device, as the kernel requires; a device without limits is written as unlimited."""
    limits_before, limits_after = notation.parse_io(current["io.max"]), notation.parse_io(target["io.max"])
    lines = {
        device: " ".join(f"{key}={limits_after.get(device, {}).get(key, MAX)}" for key in IO_KEYS)
        for device in (*limits_before, *limits_after)
    }
    return tuple(
        ("io.max", f"{device} {lines[device]}")
        for device in notation.sorted_devices(lines)
        if limits_before.get(device) != limits_after.get(device)
    )


IO_MAX_CODEC_V2 = KnobCodec(
    "io",
    ("io.max",),
    lambda texts: notation.canonical_io_max(texts["io.max"]),
    lambda value: {"io.max": value},
    _io_steps,
    normalize=lambda texts: {"io.max": notation.canonical_io_max(texts["io.max"])},
)


def _decode_throttles(texts: Texts) -> str:
    limits: dict[str, dict[str, int]] = {}
    for key, file in THROTTLE_FILES.items():
        for device, limit in notation.parse_devices(texts[file]).items():
            if 0 < limit < IO_UNLIMITED[key]:
                limits.setdefault(device, {})[key] = limit
    return notation.format_io(limits)


def _encode_throttles(value: str) -> Texts:
    limits = notation.parse_io(value)
    return {
        file: "".join(
            f"{device} {limits[device][key]}\n" for device in notation.sorted_devices(limits) if key in limits[device]
        )
        for key, file in THROTTLE_FILES.items()
    }


def _throttle_steps(current: Texts, target: Texts) -> Steps:
    """Return one write per changed device and file; 0 removes the limit."""
    steps = []
    for file in THROTTLE_FILES.values():
        limits_before, limits_after = notation.parse_devices(current[file]), notation.parse_devices(target[file])
        steps += [
            (file, f"{device} {limits_after.get(device, 0)}")
            for device in notation.sorted_devices({*limits_before, *limits_after})
            if limits_before.get(device) != limits_after.get(device)
        ]
    return tuple(steps)


IO_MAX_CODEC_V1 = KnobCodec(
    "blkio",
    tuple(THROTTLE_FILES.values()),
    _decode_throttles,
    _encode_throttles,
    _throttle_steps,
    normalize=lambda texts: _encode_throttles(_decode_throttles(texts)),
)


def bytes_codec_v1(file: str) -> KnobCodec:
    """Return the codec of a limit in bytes."""
    return single_value_codec(
        "memory", file, notation.canonical_size, lambda value: str(UNLIMITED_BYTES) if value == MAX else value
    )


def round_up_to_pages(size_bytes: int) -> int:
    """Return the size in bytes, rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class KnobSpec(msgspec.Struct, frozen=True, eq=False):
    """One knob: the canonical notation of its values, and its codecs by cgroup version. `canonical` gives equal
    meanings equal texts and raises ValueError on anything else. The first codec whose files the kernel has is used;
    `UNSUPPORTED` explains a version without any."""

    canonical: Callable[[str], str]
    v1: tuple[KnobCodec, ...]
    v2: tuple[KnobCodec, ...]


@lru_cache(maxsize=4096)
def canonical(knob: Knob, text: str) -> str:
    """Return the canonical notation of a value: `0-1` for `0,1`, `50000 100000` for `50000`; `max` has the default
    period. Raises ValueError that quotes the text."""
    try:
        return (KNOB_SPECS[knob].canonical if knob in KNOB_SPECS else ONE_SHOT_NOTATIONS[knob])(text)
    except ValueError as error:
        raise ValueError(f"{knob.value}: {error}") from None


@lru_cache(maxsize=1024)
def decode_texts(knob: Knob, codec: KnobCodec, texts: tuple[tuple[str, str], ...]) -> str:
    """Return the value of these file texts in canonical notation. Raises ValueError and KeyError if they have none."""
    # Cached: most texts equal those of the cycle before, and those of other cgroups.
    return canonical(knob, codec.decode(dict(texts)))


@lru_cache(maxsize=256)
def codec_for_files(codecs: tuple[KnobCodec, ...], files: tuple[str, ...]) -> KnobCodec | None:
    """Return the first of these codecs that has all of these files."""
    return next((codec for codec in codecs if set(files) <= set(codec.files)), None)


def _same_file_spec(controller: str, file: str, read: Callable[[str], str], v2_file: str | None = None) -> KnobSpec:
    return KnobSpec(read, (plain_codec(controller, file, read),), (plain_codec(controller, v2_file or file, read),))


def _memory_spec(knob: Knob, v1: KnobCodec | None = None) -> KnobSpec:
    return KnobSpec(
        notation.canonical_size, (v1,) if v1 else (), (plain_codec("memory", knob.value, notation.canonical_size),)
    )


KNOB_SPECS: Mapping[Knob, KnobSpec] = {
    Knob.CPUSET: _same_file_spec("cpuset", "cpuset.cpus", notation.canonical_cpus),
    Knob.MEMS: KnobSpec(
        notation.canonical_nodes, (MEMS_CODEC_V1,), (plain_codec("cpuset", "cpuset.mems", notation.canonical_nodes),)
    ),
    Knob.WEIGHT: KnobSpec(
        canonical=notation.canonical_number,
        v1=(
            single_value_codec(
                "cpu",
                "cpu.shares",
                lambda text: str(shares_to_weight(notation.parse_number(text))),
                lambda value: str(weight_to_shares(int(value))),
            ),
        ),
        v2=(plain_codec("cpu", "cpu.weight", notation.canonical_number),),
    ),
    Knob.QUOTA: KnobSpec(
        notation.canonical_quota, (CFS_CODEC,), (plain_codec("cpu", "cpu.max", notation.canonical_quota),)
    ),
    Knob.BURST: _same_file_spec("cpu", "cpu.cfs_burst_us", notation.canonical_number, "cpu.max.burst"),
    Knob.IDLE: _same_file_spec("cpu", "cpu.idle", notation.canonical_idle),
    Knob.MEMORY_MAX: _memory_spec(Knob.MEMORY_MAX, bytes_codec_v1(MEMORY_LIMIT_FILE)),
    Knob.MEMORY_HIGH: _memory_spec(Knob.MEMORY_HIGH),
    Knob.MEMORY_LOW: _memory_spec(Knob.MEMORY_LOW),
    Knob.MEMORY_MIN: _memory_spec(Knob.MEMORY_MIN),
    Knob.SWAP_MAX: _memory_spec(Knob.SWAP_MAX, SWAP_CODEC_V1),
    Knob.IO_WEIGHT: KnobSpec(
        canonical=notation.canonical_number,
        v1=(bfq_weight_codec_v1(), cfq_weight_codec_v1()),
        v2=(default_weight_codec("io.weight", 10_000), default_weight_codec("io.bfq.weight", 1000)),
    ),
    Knob.IO_MAX: KnobSpec(notation.canonical_io_max, (IO_MAX_CODEC_V1,), (IO_MAX_CODEC_V2,)),
    Knob.NET_CLASS: KnobSpec(
        notation.canonical_class_id, (plain_codec("net_cls", "net_cls.classid", notation.canonical_class_id),), ()
    ),
}

ONE_SHOT_NOTATIONS: Mapping[Knob, Callable[[str], str]] = {
    Knob.MEMORY_RECLAIM: notation.canonical_amount,
    Knob.DROP_CACHE: notation.canonical_amount,
    Knob.MIGRATE_PAGES: notation.canonical_migration,
}
ONE_SHOT_FILES: Mapping[Knob, tuple[str | None, str | None]] = {
    Knob.MEMORY_RECLAIM: (None, "memory.reclaim"),
    Knob.DROP_CACHE: ("memory.force_empty", "memory.reclaim"),
    Knob.MIGRATE_PAGES: ("memory.numa_stat", "memory.numa_stat"),
}
"""Files of the memory controller (version 1, version 2) that these knobs need."""

EFFECTIVE_FILES = {
    Knob.CPUSET: ("cpuset.effective_cpus", "cpuset.cpus.effective"),
    Knob.MEMS: ("cpuset.effective_mems", "cpuset.mems.effective"),
}
"""Files with the CPUs or NUMA nodes that the tasks may use in effect: version 1's name and version 2's."""

_V2_ONLY = "cgroup version 1 has nothing like it"
UNSUPPORTED: Mapping[tuple[Knob, str], tuple[str, str]] = {
    (Knob.MEMORY_HIGH, "v1"): (_V2_ONLY, "boot with cgroup version 2 to have reclaim instead of a hard limit"),
    (Knob.MEMORY_LOW, "v1"): (_V2_ONLY, "boot with cgroup version 2 to protect memory"),
    (Knob.MEMORY_MIN, "v1"): (_V2_ONLY, "boot with cgroup version 2 to protect memory"),
    (Knob.MEMORY_RECLAIM, "v1"): (
        _V2_ONLY,
        "boot with cgroup version 2 and Linux 5.19; drop_cache gives back page cache",
    ),
    (Knob.NET_CLASS, "v2"): (
        "cgroup version 2 marks no packets",
        "mount net_cls in addition, or classify packets by BPF",
    ),
}
"""Knobs that a cgroup version lacks, each with reason and remedy."""

REMEDIES: Mapping[tuple[Knob, int], str] = {
    (Knob.CPUSET, errno.EACCES): "the cgroup above does not have these CPUs: widen its cpuset.cpus first",
    (Knob.CPUSET, errno.EBUSY): "a cgroup below uses CPUs that this list leaves out: narrow that one first",
    (Knob.CPUSET, errno.ENOSPC): "its tasks would be left without a CPU: name at least one",
    (Knob.CPUSET, errno.EINVAL): "name CPUs that are online and that no exclusive sibling cpuset holds",
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
"""Remedy by knob and error code of a refused write."""

LIST_KNOBS = (Knob.CPUSET, Knob.MEMS)
KNOB_GROUPS = (
    (Knob.IDLE,),
    (Knob.WEIGHT,),
    (Knob.QUOTA, Knob.BURST),
    (Knob.CPUSET,),
    (Knob.MEMS,),
    (Knob.MEMORY_MAX, Knob.SWAP_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN),
    (Knob.IO_WEIGHT,),
    (Knob.IO_MAX,),
    (Knob.NET_CLASS,),
)
"""Knobs whose values depend on one another, in the order in which these groups are written."""
KNOB_ORDER = tuple(knob for group in KNOB_GROUPS for knob in group)
GROUP_OF = {knob: number for number, group in enumerate(KNOB_GROUPS) for knob in group}
CHANGED_BY = {Knob.WEIGHT: Knob.IDLE, Knob.BURST: Knob.QUOTA}
"""The knob whose write changes another one: the original of the latter is needed as long as that of the former."""

MIN_WEIGHT, MAX_WEIGHT = 1, 10_000
MIN_QUOTA_US = 1_000
MIN_PERIOD_US, MAX_PERIOD_US = 1_000, 1_000_000
"""`min_cfs_quota_period` and `max_cfs_quota_period` (kernel/sched/core.c)."""
MIN_IO = {"rbps": 65_536, "wbps": 65_536, "riops": 10, "wiops": 10}
"""Below these limits a task that holds a file system lock while it waits for its disk blocks all others."""


class KnobLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the machine and of the owner for one knob of one cgroup."""

    allowed: tuple[int, ...] | None = None
    """CPUs or NUMA nodes that the parent cgroup may use; None if the kernel does not report them."""
    cpu_count: int = 1
    empty_inherits_parent: bool = True
    """Whether an empty cpuset means the parent's (version 2); on version 1 it would be no CPU."""
    own_quota: str = UNLIMITED
    """The owner's quota in canonical notation, which no decision exceeds."""
    own: str | None = None
    """The owner's value of any other knob; None if it is no limit."""
    quota: str = UNLIMITED
    """Quota that the cgroup has or is about to get; its burst must not exceed it."""
    floor_bytes: int = 0
    """Minimum of a memory limit: a lower one would make the kernel kill a process or block the cycle."""
    weights: tuple[int, int] = (MIN_WEIGHT, MAX_WEIGHT)


def clamp_value(knob: Knob, value: str, limits: KnobLimits) -> str:
    """Return the canonical value that may be written for this canonical value. Raises ValueError if there is none."""
    return CLAMPS[knob](value, limits)


def smaller_size(value: str, limit: str) -> str:
    """Return the smaller of two canonical sizes."""
    return min(value, limit, key=_size_bytes)


def _size_bytes(value: str) -> float:
    return inf if value == MAX else int(value)


def _list_clamp(what: str) -> Callable[[str, KnobLimits], str]:
    # Cached: all containers of a pool have the same list and the same limit.
    @lru_cache(maxsize=256)
    def among(value: str, allowed: tuple[int, ...]) -> str:
        inside = set(parse_cpu_list(value)) & set(allowed)
        if not inside:
            listed = format_cpu_list(allowed)
            raise ValueError(f"none of the {what} {value} is available in the parent cgroup, which has {listed}")
        return format_cpu_list(inside)

    def clamp(value: str, limits: KnobLimits) -> str:
        if limits.allowed is None:
            return value
        if not value:
            return "" if limits.empty_inherits_parent else format_cpu_list(limits.allowed)
        return among(value, limits.allowed)

    return clamp


def _clamp_weight(value: str, limits: KnobLimits) -> str:
    minimum, maximum = limits.weights
    return str(min(max(int(value), minimum), maximum))


def _clamp_quota(value: str, limits: KnobLimits) -> str:
    quota, period = value.split()
    if quota_ratio(value) >= quota_ratio(limits.own_quota):
        return limits.own_quota
    requested_us, requested_period_us = int(quota), max(int(period), 1)
    period_us = min(max(requested_period_us, MIN_PERIOD_US), MAX_PERIOD_US)
    # Keep the ratio when the period was clamped.
    quota_us = max(requested_us * period_us // requested_period_us, MIN_QUOTA_US)
    return UNLIMITED if quota_us >= period_us * limits.cpu_count else f"{quota_us} {period_us}"


def quota_ratio(value: str) -> float:
    """Return a canonical quota in CPUs."""
    quota, period = value.split()
    return inf if quota == MAX else int(quota) / max(int(period), 1)


def _clamp_burst(value: str, limits: KnobLimits) -> str:
    quota = limits.quota.split()[0]
    return value if quota == MAX else str(min(int(value), int(quota)))


def _clamp_limit(value: str, limits: KnobLimits) -> str:
    return value if limits.own is None else smaller_size(value, limits.own)


def _clamp_stepped(value: str, limits: KnobLimits) -> str:
    return _clamp_limit(value if value == MAX else str(max(int(value), limits.floor_bytes)), limits)


def _clamp_protection(value: str, limits: KnobLimits) -> str:
    return value if limits.own is None else max(value, limits.own, key=_size_bytes)


def _clamp_io_max(value: str, limits: KnobLimits) -> str:
    requested, own = parse_io(value), parse_io(limits.own or "")
    return format_io(
        {
            device: {
                key: min(
                    max(requested[device][key], MIN_IO[key]) if key in requested.get(device, {}) else 2**64,
                    own.get(device, {}).get(key, 2**64),
                )
                for key in IO_KEYS
                if key in requested.get(device, {}) or key in own.get(device, {})
            }
            for device in {**requested, **own}
        }
    )


def _unclamped(value: str, _limits: KnobLimits) -> str:
    return value


CLAMPS: Mapping[Knob, Callable[[str, KnobLimits], str]] = {
    Knob.CPUSET: _list_clamp("CPUs"),
    Knob.MEMS: _list_clamp("NUMA nodes"),
    Knob.WEIGHT: _clamp_weight,
    Knob.QUOTA: _clamp_quota,
    Knob.BURST: _clamp_burst,
    Knob.IDLE: _unclamped,
    Knob.MEMORY_MAX: _clamp_stepped,
    Knob.MEMORY_HIGH: _clamp_stepped,
    Knob.MEMORY_LOW: _clamp_protection,
    Knob.MEMORY_MIN: _clamp_protection,
    Knob.SWAP_MAX: _clamp_limit,
    Knob.IO_WEIGHT: _clamp_weight,
    Knob.IO_MAX: _clamp_io_max,
    Knob.NET_CLASS: _unclamped,
}


QUOTA_PERIODS_US = (100_000, 200_000, 500_000, 1_000_000)
"""Periods of quotas: the kernel's default if possible, up to the kernel's maximum for small shares."""


def format_quota(cores: float) -> str:
    """Return the quota and period for these cores; small shares get a longer period to reach the minimum quota."""
    period_us = next(
        (period for period in QUOTA_PERIODS_US if round(cores * period) >= MIN_QUOTA_US), QUOTA_PERIODS_US[-1]
    )
    return f"{round(cores * period_us)} {period_us}"
