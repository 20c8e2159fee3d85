"""Computes resctrl schemata: the share of L3 cache and of memory bandwidth of each QoS level. Pure.
Masks are contiguous (Documentation/arch/x86/resctrl.rst) and computed as in Koordinator. Intel takes memory
bandwidth in percent, in steps of 10; AMD takes it in eighths of a GB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import msgspec

from agent.config.qrm import ResctrlLevel
from api.knobs import Reason
from api.qos import QoSLevel

AMD_FULL_BANDWIDTH, AMD_UNLIMITED = 160, 2048
INTEL_STEP = 10
GROUP_PREFIX = "dioptase-"
"""Of the names of our groups: nobody else's are touched."""


class CacheCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the default group of this machine has."""

    l3: Mapping[int, int] = {}
    """Mask by cache."""
    mb: Mapping[int, int] = {}
    """Memory bandwidth by cache, in the unit of the machine."""

    @property
    def absolute(self) -> bool:
        """Whether bandwidth is in eighths of a GB/s (AMD)."""
        return any(value > 100 for value in self.mb.values())


class ResctrlGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A control group as it should be."""

    name: str
    schemata: str
    reason: Reason


def parse_schemata(text: str) -> CacheCapacity:
    """The lines of a schemata file: `L3:0=7ff;1=7ff` and `MB:0=100`. Raises ValueError on any other L3 or MB."""
    found: dict[str, dict[int, int]] = {"L3": {}, "MB": {}}
    for line in text.splitlines():
        kind, _, rest = line.strip().partition(":")
        if kind not in found:
            continue
        for pair in filter(None, rest.split(";")):
            cache, _, value = pair.partition("=")
            found[kind][int(cache)] = int(value, 16 if kind == "L3" else 10)
    return CacheCapacity(l3=found["L3"], mb=found["MB"])


def build_resctrl_groups(caches: CacheCapacity, levels: Mapping[QoSLevel, ResctrlLevel]) -> tuple[ResctrlGroup, ...]:
    """A group for each level, with what its share comes to on this machine. Raises ValueError where it comes to nothing."""
    return tuple(
        ResctrlGroup(
            name=f"{GROUP_PREFIX}{level.value}",
            schemata=format_schemata(caches, share),
            reason=Reason(
                rule="resctrl_level",
                text=f"{level.value} has the L3 caches from {share.cat_start_percent:g} to {share.cat_end_percent:g} % and "
                f"{share.mba_percent:g} % of the memory bandwidth.",
            ),
        )
        for level, share in levels.items()
    )


def format_schemata(caches: CacheCapacity, share: ResctrlLevel) -> str:
    """What is written: a line for each of L3 and MB that the machine has."""
    l3 = ";".join(f"{cache}={l3_mask(whole, share):x}" for cache, whole in sorted(caches.l3.items()))
    mb = ";".join(f"{cache}={mba_value(share.mba_percent, absolute=caches.absolute)}" for cache in sorted(caches.mb))
    return "".join(f"{kind}:{line}\n" for kind, line in (("L3", l3), ("MB", mb)) if line)


def l3_mask(whole: int, share: ResctrlLevel) -> int:
    """Koordinator's CalculateCatL3MaskValue: ways from ceil(start) to ceil(end), counted from the lowest."""
    if whole <= 0 or whole & (whole + 1):
        raise ValueError(f"the mask {whole:x} of the default group is not one block from bit 0")
    ways = whole.bit_length()
    # Rounded first, so that 30 % of ten ways is three and not a hair more.
    start, end = (ceil(round(ways * percent / 100, 9)) for percent in (share.cat_start_percent, share.cat_end_percent))
    if end <= start:
        raise ValueError(f"from {share.cat_start_percent:g} to {share.cat_end_percent:g} % there is no way of {ways}")
    return (1 << end) - (1 << start)


def mba_value(percent: float, *, absolute: bool) -> int:
    """Percent as the machine takes it."""
    if not absolute:
        return min(ceil(round(percent / INTEL_STEP, 9)) * INTEL_STEP, 100)
    return AMD_UNLIMITED if percent >= 100 else max(int(AMD_FULL_BANDWIDTH * percent / 100), 1)
