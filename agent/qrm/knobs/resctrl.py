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
"""Prefix of the agent's groups; no other group is changed."""


class CacheCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Caches and memory bandwidth of the default group."""

    l3: Mapping[int, int] = {}
    """Mask by cache."""
    mb: Mapping[int, int] = {}
    """Memory bandwidth by cache, in the machine's unit."""

    @property
    def absolute(self) -> bool:
        """Whether bandwidth is in eighths of a GB/s (AMD)."""
        return any(value > 100 for value in self.mb.values())


class ResctrlGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A control group and its schemata."""

    name: str
    schemata: str
    reason: Reason


def parse_schemata(text: str) -> CacheCapacity:
    """Parse lines such as `L3:0=7ff;1=7ff` and `MB:0=100`. Raises ValueError on an invalid L3 or MB line."""
    caches_by_kind: dict[str, dict[int, int]] = {"L3": {}, "MB": {}}
    for line in text.splitlines():
        kind, _, rest = line.strip().partition(":")
        if kind not in caches_by_kind:
            continue
        for pair in filter(None, rest.split(";")):
            cache, _, value = pair.partition("=")
            caches_by_kind[kind][int(cache)] = int(value, 16 if kind == "L3" else 10)
    return CacheCapacity(l3=caches_by_kind["L3"], mb=caches_by_kind["MB"])


def build_resctrl_groups(caches: CacheCapacity, levels: Mapping[QoSLevel, ResctrlLevel]) -> tuple[ResctrlGroup, ...]:
    """Return a group for each level. Raises ValueError if a share contains no cache way."""
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
    """Return the schemata of a share: a line for each of L3 and MB that the machine has."""
    l3 = ";".join(f"{cache}={l3_mask(full_mask, share):x}" for cache, full_mask in sorted(caches.l3.items()))
    mb = ";".join(f"{cache}={mba_value(share.mba_percent, absolute=caches.absolute)}" for cache in sorted(caches.mb))
    return "".join(f"{kind}:{line}\n" for kind, line in (("L3", l3), ("MB", mb)) if line)


def l3_mask(full_mask: int, share: ResctrlLevel) -> int:
    """Return Koordinator's CalculateCatL3MaskValue: ways from ceil(start) to ceil(end), counted from the lowest."""
    if full_mask <= 0 or full_mask & (full_mask + 1):
        raise ValueError(f"the mask {full_mask:x} of the default group is not one block from bit 0")
    ways = full_mask.bit_length()
    # Rounded first: in binary fractions, 30 % of ten ways is slightly more than three.
    start, end = (ceil(round(ways * percent / 100, 9)) for percent in (share.cat_start_percent, share.cat_end_percent))
    if end <= start:
        raise ValueError(
            f"no cache way of {ways} lies between {share.cat_start_percent:g} and {share.cat_end_percent:g} %"
        )
    return (1 << end) - (1 << start)


def mba_value(percent: float, *, absolute: bool) -> int:
    """Return the percentage in the machine's unit."""
    if not absolute:
        return min(ceil(round(percent / INTEL_STEP, 9)) * INTEL_STEP, 100)
    return AMD_UNLIMITED if percent >= 100 else max(int(AMD_FULL_BANDWIDTH * percent / 100), 1)
