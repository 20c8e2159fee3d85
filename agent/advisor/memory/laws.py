"""Laws of memory offloading: how much a cgroup is to give up in one interval. Numbers in, bytes out.

psi and refault are Katalyst's (transparent memory offloading after Meta's TMO, ASPLOS 2022), senpai is oomd's (Senpai.cpp),
where an error is how many times the stall misses its aim.
"""

from __future__ import annotations

from typing import NamedTuple

_GROWTH = 1.05
_INACTIVE_PART = 0.1
MAPPED_FACTOR = 2
"""Cache that is less than so many times what is mapped is in use."""
_LEAST_CAP = 1 << 20


def psi(usage: float, avg60: float, max_probe: float, threshold: float) -> float:
    """A part of the use that shrinks to nothing as the pressure (some avg60, percent) comes up to the threshold."""
    return max(0.0, 1 - avg60 / threshold) * max_probe * usage


class Pages(NamedTuple):
    """What reclaim did to the cgroup in an interval."""

    scanned: int
    stolen: int
    activated: int
    """Of the stolen ones and earlier ones: read back soon and wanted."""

    @property
    def accuracy(self) -> float:
        """The part of what was reclaimed that was not wanted; 1 where nothing was."""
        return 1 - self.activated / self.stolen if self.stolen > 0 and self.scanned > 0 else 1.0

    @property
    def efficiency(self) -> float:
        """The part of what was looked at that could be reclaimed; 1 where nothing was."""
        return self.stolen / self.scanned if self.stolen > 0 and self.scanned > 0 else 1.0


class Targets(NamedTuple):
    """Settings of `refault`."""

    accuracy: float
    efficiency: float
    max_probe: float


def refault(last: float, pages: Pages, inactive: float, usage: float, targets: Targets) -> float:
    """Less than the last time when reclaim hit the wrong pages or hardly any, and a little more when it went well.

    Where nothing is called inactive (the multi-generational LRU says so of all memory until it is first asked for some) it
    begins with a part of the most that may be asked: with nothing it would never begin.
    """
    if pages.accuracy < targets.accuracy or pages.efficiency < targets.efficiency:
        return max(0.0, last * pages.accuracy)
    most = usage * targets.max_probe
    return min(max(last * _GROWTH, (inactive or most) * _INACTIVE_PART), most)


class Senpai(NamedTuple):
    """Settings of `senpai`."""

    stall_s: float
    min_bytes: float
    max_bytes: float
    max_probe: float
    max_backoff: float
    probe: float
    backoff: float


def senpai(usage: float, size: float, stall_s: float, law: Senpai) -> tuple[float, float]:
    """The size to aim at from now on, and how much to give up for it, at most max_probe of the use.

    With more stall than is aimed at the size grows and nothing is asked for; with less it shrinks, the faster the less.
    """
    if stall_s >= law.stall_s:
        error = stall_s / law.stall_s
        grown = size * (1 + min((error / law.backoff) ** 2, 1.0) * law.max_backoff)
        return min(grown, max(law.max_bytes, usage)), 0.0
    error = law.stall_s / max(stall_s, 1e-6)
    part = min((error / law.probe) ** 2 * law.max_probe, law.max_probe)
    size = max(min(size, usage) * (1 - part), min(law.min_bytes, usage))
    return size, min(max(usage - size, 0.0), usage * law.max_probe)


def without_swap(target: float, cache: float, mapped: float, inactive_file: float, reserved: float | None) -> float:
    """No more than file cache can give where nothing can be swapped out."""
    if cache < MAPPED_FACTOR * mapped:
        return 0.0
    target = min(target, max(MAPPED_FACTOR * (cache - mapped), _LEAST_CAP))
    if reserved is not None:
        target = min(target, inactive_file - MAPPED_FACTOR * mapped - reserved)
    return max(target, 0.0)
