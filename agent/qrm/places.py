"""Shapes of the files that hold knobs: how texts become values, values texts, and in which writes one leads to the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from agent.qrm import notation
from agent.qrm.notation import IO_KEYS, IO_UNLIMITED, MAX, PAGE_BYTES, UNLIMITED_BYTES

Texts = Mapping[str, str]
"""What the files of a knob hold, byte for byte, by file name."""
Steps = tuple[tuple[str, str], ...]
"""File and text of each write, in order."""

CFS_QUOTA, CFS_PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"
MEMS, MIGRATE = "cpuset.mems", "cpuset.memory_migrate"
LIMIT, LIMIT_WITH_SWAP = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
THROTTLES = {
    "rbps": "blkio.throttle.read_bps_device",
    "wbps": "blkio.throttle.write_bps_device",
    "riops": "blkio.throttle.read_iops_device",
    "wiops": "blkio.throttle.write_iops_device",
}


def outright(_current: Texts, wanted: Texts) -> Steps:
    """One write for each file, whatever is there."""
    return tuple(wanted.items())


class Place(msgspec.Struct, frozen=True, eq=False):
    """Where one version keeps a knob. `encode` may leave out files whose text has no influence on that value."""

    controller: str
    files: tuple[str, ...]
    decode: Callable[[Texts], str]
    encode: Callable[[str], Texts]
    steps: Callable[[Texts, Texts], Steps] = outright
    """Writes that lead from what the files hold now, those `beside` included, to what is wanted. Raises ValueError."""
    beside: tuple[str, ...] = ()
    """Files that are read along because the value depends on them, and that are neither journalled nor written."""
    own: Callable[[Texts], Texts] = lambda texts: texts
    """The part of the files that the knob is. Raises ValueError on garbage."""
    weights: tuple[int, int] = (1, 10_000)
    """The least and the most of a weight, in version 2's notation."""


def single(controller: str, file: str, decode: Callable[[str], str], encode: Callable[[str], str]) -> Place:
    """One file that holds one value."""
    return Place(controller, (file,), lambda texts: decode(texts[file]), lambda value: {file: encode(value)})


def same(controller: str, file: str, read: Callable[[str], str]) -> Place:
    """One file in the common notation."""
    return single(controller, file, read, lambda value: value)


def _decode_cfs(texts: Texts) -> str:
    quota = texts[CFS_QUOTA].strip()
    return notation.quota(f"{MAX if quota == '-1' else quota} {texts[CFS_PERIOD]}")


def _encode_cfs(value: str) -> Texts:
    quota, period = value.split()
    return {CFS_QUOTA: "-1"} if quota == MAX else {CFS_QUOTA: quota, CFS_PERIOD: period}


def _cfs_steps(current: Texts, wanted: Texts) -> Steps:
    """Version 1 refuses a quota:period ratio above the parent's or below a child's, also one between two writes.

    Either file alone may make such a ratio on the way; no limit at all is accepted under every parent and over every
    child (tg_cfs_schedulable_down, kernel/sched/core.c), so the period changes while there is none.
    """
    quota = (CFS_QUOTA, wanted[CFS_QUOTA])
    period = wanted.get(CFS_PERIOD, current[CFS_PERIOD])
    if period.strip() == current[CFS_PERIOD].strip():
        return (quota,)
    return ((CFS_QUOTA, "-1"), (CFS_PERIOD, period), quota)


CFS = Place("cpu", (CFS_QUOTA, CFS_PERIOD), _decode_cfs, _encode_cfs, _cfs_steps)


def _mems_steps(current: Texts, wanted: Texts) -> Steps:
    """Memory follows its cgroup only while the flag is set: before nodes change, and until they have changed back."""
    flag, mems = (MIGRATE, wanted[MIGRATE]), (MEMS, wanted[MEMS])
    if flag[1].strip() == current[MIGRATE].strip():
        return (mems,)
    return (flag, mems) if flag[1].strip() == "1" else (mems, flag)


MEMS_V1 = Place(
    "cpuset",
    (MEMS, MIGRATE),
    lambda texts: notation.nodes(texts[MEMS]),
    lambda value: {MIGRATE: "1", MEMS: value},
    _mems_steps,
)


def _decode_swap(texts: Texts) -> str:
    both = notation.size(texts[LIMIT_WITH_SWAP])
    return both if both == MAX else str(max(int(both) - int(notation.number(texts[LIMIT])), 0))


def _swap_steps(current: Texts, wanted: Texts) -> Steps:
    """Version 1 limits memory and swap together: `+N` is N bytes more than memory alone may have."""
    text = wanted[LIMIT_WITH_SWAP]
    if not text.startswith("+"):
        return ((LIMIT_WITH_SWAP, text),)
    limit = notation.number(current[LIMIT])
    if limit >= UNLIMITED_BYTES:
        raise ValueError(
            "version 1 limits memory and swap together, and memory has no limit here: set memory.max first"
        )
    return ((LIMIT_WITH_SWAP, str(limit + int(text[1:]))),)


SWAP_V1 = Place(
    "memory",
    (LIMIT_WITH_SWAP,),
    _decode_swap,
    lambda value: {LIMIT_WITH_SWAP: str(UNLIMITED_BYTES) if value == MAX else f"+{value}"},
    _swap_steps,
    beside=(LIMIT,),
)


def default_weight(file: str, most: int) -> Place:
    """`default 100` and lines of single devices, which are left alone."""

    def own(texts: Texts) -> Texts:
        lines = [line for line in texts[file].splitlines() if line.startswith("default ")]
        if len(lines) != 1:
            raise ValueError("there is no default weight")
        return {file: f"{lines[0]}\n"}

    return Place(
        "io",
        (file,),
        lambda texts: notation.whole(texts[file].removeprefix("default ")),
        lambda value: {file: f"default {value}"},
        own=own,
        weights=(1, most),
    )


def bfq_weight_v1() -> Place:
    """BFQ's, whose default is 100 too."""
    made = same("blkio", "blkio.bfq.weight", notation.whole)
    return Place(made.controller, made.files, made.decode, made.encode, weights=(1, 1000))


def cfq_weight_v1() -> Place:
    """CFQ's, to Linux 4.20: from 10 to 1000, and 500 is the default."""
    file = "blkio.weight"
    return Place(
        "blkio",
        (file,),
        lambda texts: str(notation.number(texts[file]) // 5),
        lambda value: {file: str(int(value) * 5)},
        weights=(2, 200),
    )


def _io_steps(current: Texts, wanted: Texts) -> Steps:
    """The kernel takes one device a write; one without a line is written as unlimited."""
    now, then = notation.parse_io(current["io.max"]), notation.parse_io(wanted["io.max"])
    lines = {
        device: " ".join(f"{key}={then.get(device, {}).get(key, MAX)}" for key in IO_KEYS) for device in (*now, *then)
    }
    return tuple(
        ("io.max", f"{device} {lines[device]}")
        for device in notation.in_order(lines)
        if now.get(device) != then.get(device)
    )


IO_MAX_V2 = Place(
    "io",
    ("io.max",),
    lambda texts: notation.io_max(texts["io.max"]),
    lambda value: {"io.max": value},
    _io_steps,
    own=lambda texts: {"io.max": notation.io_max(texts["io.max"])},
)


def _decode_throttles(texts: Texts) -> str:
    limits: dict[str, dict[str, int]] = {}
    for key, file in THROTTLES.items():
        for device, limit in notation.parse_devices(texts[file]).items():
            if 0 < limit < IO_UNLIMITED[key]:
                limits.setdefault(device, {})[key] = limit
    return notation.format_io(limits)


def _encode_throttles(value: str) -> Texts:
    limits = notation.parse_io(value)
    return {
        file: "".join(
            f"{device} {limits[device][key]}\n" for device in notation.in_order(limits) if key in limits[device]
        )
        for key, file in THROTTLES.items()
    }


def _throttle_steps(current: Texts, wanted: Texts) -> Steps:
    """One device a write here too; 0 takes the limit away."""
    steps = []
    for file in THROTTLES.values():
        now, then = notation.parse_devices(current[file]), notation.parse_devices(wanted[file])
        steps += [
            (file, f"{device} {then.get(device, 0)}")
            for device in notation.in_order({*now, *then})
            if now.get(device) != then.get(device)
        ]
    return tuple(steps)


IO_MAX_V1 = Place(
    "blkio",
    tuple(THROTTLES.values()),
    _decode_throttles,
    _encode_throttles,
    _throttle_steps,
    own=lambda texts: _encode_throttles(_decode_throttles(texts)),
)


def bytes_v1(file: str) -> Place:
    """A limit in bytes."""
    return single("memory", file, notation.size, lambda value: str(UNLIMITED_BYTES) if value == MAX else value)


def pages(size_bytes: int) -> int:
    """The least whole pages that hold so many bytes, in bytes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
