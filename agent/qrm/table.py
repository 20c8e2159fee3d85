"""The one table of kernel controls: which file of which controller holds each knob, on cgroup version 1 and 2.

Everything outside this module speaks one notation, version 2's, on both versions (`api.decisions.Knob`). Nothing here
knows a reason or a policy, and nothing is opened here: agent/qrm/knobs.py does that.

Weights are translated as the kernel itself does it (`sched_weight_from_cgroup` and `sched_weight_to_cgroup`,
kernel/sched/sched.h) and as systemd does: 1024 shares are weight 100, linearly. The same number then means the same
part of the CPU on both versions. runc and the kubelet map [2..262144] onto [1..10000] instead, by which 1024 shares
become weight 39; theirs is not used because it changes a group's standing beside its neighbours. Shares below 6 read
as weight 0, which is also what version 2 shows for them: no decision may ask for it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from api.cpus import format_cpu_list, parse_cpu_list
from api.knobs import Knob

Texts = Mapping[str, str]
"""What the files of a knob hold, byte for byte, by file name."""
Steps = tuple[tuple[str, str], ...]
"""File and text of each write, in order."""

DEFAULT_SHARES, DEFAULT_WEIGHT = 1024, 100
DEFAULT_PERIOD_US = 100_000
UNLIMITED = f"max {DEFAULT_PERIOD_US}"


@dataclass(frozen=True)
class Place:
    """Where one version keeps a knob. `encode` may leave out files whose text has no influence on that value."""

    controller: str
    files: tuple[str, ...]
    decode: Callable[[Texts], str]
    encode: Callable[[str], Texts]
    steps: Callable[[Texts, Texts], Steps] = lambda _current, wanted: tuple(wanted.items())
    """Writes that lead from what the files hold now to what is wanted."""


@dataclass(frozen=True)
class Row:
    """One knob on both versions. `canonical` makes equal meanings equal texts; it raises ValueError on anything else."""

    canonical: Callable[[str], str]
    v1: Place
    v2: Place


def canonical(knob: Knob, text: str) -> str:
    """The one spelling of a knob's value: `0,1` is `0-1`, `50000` is `50000 100000`, every `max` has the default period.

    Raises ValueError that quotes the text.
    """
    try:
        return TABLE[knob].canonical(text)
    except ValueError as error:
        raise ValueError(f"{knob.value}: {error}") from None


def _number(text: str) -> int:
    stripped = text.strip()
    if not (stripped.isascii() and stripped.isdigit() and len(stripped) <= 20):
        raise ValueError(f"{text[:60]!r} is not a whole number of at least 0")
    return int(stripped)


def _cpus(text: str) -> str:
    return format_cpu_list(parse_cpu_list(text))


def _weight(text: str) -> str:
    return str(_number(text))


def _idle(text: str) -> str:
    if text.strip() not in ("0", "1"):
        raise ValueError(f"{text[:60]!r} is neither 0 nor 1")
    return text.strip()


def _quota(text: str) -> str:
    words = text.split()
    if not 1 <= len(words) <= 2:
        raise ValueError(
            f"{text[:60]!r} is not a quota and a period in microseconds, such as 50000 100000 or max 100000"
        )
    period_us = _number(words[1]) if len(words) == 2 else DEFAULT_PERIOD_US
    return UNLIMITED if words[0] == "max" else f"{_number(words[0])} {period_us}"


def shares_of(weight: int) -> int:
    """Version 1's shares for a version 2 weight, rounded as the kernel rounds."""
    return (weight * DEFAULT_SHARES + DEFAULT_WEIGHT // 2) // DEFAULT_WEIGHT


def weight_of(shares: int) -> int:
    """Version 2's weight for version 1 shares; the inverse of `shares_of` for every weight from 1 to 10000."""
    return (shares * DEFAULT_WEIGHT + DEFAULT_SHARES // 2) // DEFAULT_SHARES


CFS_QUOTA, CFS_PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


def _decode_cfs(texts: Texts) -> str:
    quota = texts[CFS_QUOTA].strip()
    return _quota(f"{'max' if quota == '-1' else quota} {texts[CFS_PERIOD]}")


def _encode_cfs(value: str) -> Texts:
    quota, period = value.split()
    return {CFS_QUOTA: "-1"} if quota == "max" else {CFS_QUOTA: quota, CFS_PERIOD: period}


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


def _single(controller: str, file: str, decode: Callable[[str], str], encode: Callable[[str], str]) -> Place:
    return Place(controller, (file,), lambda texts: decode(texts[file]), lambda value: {file: encode(value)})


def _same(controller: str, file: str, read: Callable[[str], str]) -> Place:
    return _single(controller, file, read, lambda value: value)


TABLE: Mapping[Knob, Row] = {
    Knob.CPUSET: Row(
        canonical=_cpus,
        v1=_same("cpuset", "cpuset.cpus", _cpus),
        v2=_same("cpuset", "cpuset.cpus", _cpus),
    ),
    Knob.WEIGHT: Row(
        canonical=_weight,
        v1=_single(
            "cpu",
            "cpu.shares",
            lambda text: str(weight_of(_number(text))),
            lambda value: str(shares_of(int(value))),
        ),
        v2=_same("cpu", "cpu.weight", _weight),
    ),
    Knob.QUOTA: Row(
        canonical=_quota,
        v1=Place("cpu", (CFS_QUOTA, CFS_PERIOD), _decode_cfs, _encode_cfs, _cfs_steps),
        v2=_same("cpu", "cpu.max", _quota),
    ),
    Knob.IDLE: Row(
        canonical=_idle,
        v1=_same("cpu", "cpu.idle", _idle),
        v2=_same("cpu", "cpu.idle", _idle),
    ),
}

EFFECTIVE_CPUS = ("cpuset.effective_cpus", "cpuset.cpus.effective")
"""CPUs that a group's tasks really may use: version 1's name and version 2's."""

REMEDIES: Mapping[tuple[Knob, int], str] = {
    (Knob.CPUSET, errno.EACCES): "the cgroup above does not have these CPUs: widen its cpuset.cpus first",
    (Knob.CPUSET, errno.EBUSY): "a cgroup below uses CPUs that this list leaves out: narrow that one first",
    (Knob.CPUSET, errno.ENOSPC): "its tasks would be left without a CPU: name at least one",
    (Knob.CPUSET, errno.EINVAL): "name CPUs that are online and that no exclusive cpuset beside it holds",
    (Knob.WEIGHT, errno.EINVAL): "cpu.idle=1 pins the weight: set cpu.idle to 0 first",
    (Knob.WEIGHT, errno.ERANGE): "choose a weight from 1 to 10000",
    (Knob.QUOTA, errno.EINVAL): "keep the quota at 1000 us or more, not below cpu.cfs_burst_us or cpu.max.burst, and on"
    " version 1 its part of the period between that of the cgroups below and that of the one above",
    (Knob.IDLE, errno.EINVAL): "the kernel lets only cgroups below the root be idle",
}
"""What a person can do when the kernel refuses a write for that reason."""
