"""Settings of targets that follow predictions, or measurements in their place. Names in brackets are Katalyst's."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

TimeOfDay = Annotated[str, Meta(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]
Offset = Annotated[float, Meta(ge=-1, le=1)]


class Slot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[strategy_slots] what a prediction below this means for the target."""

    below: float
    """[net] predictions below it, and not below the previous slot's, are in this one; the last slot has all above too."""
    offset: Offset
    """[offset] added to the target (borwein_v2), or the target itself (borwein_v3)."""


class SpecialTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """[strategy_special_time] part of the day, in UTC, in which predictions do not count. May go over midnight."""

    start: TimeOfDay
    end: TimeOfDay
    offset: Offset

    def covers(self, minute: int) -> bool:
        """Whether this minute of the day is within it, start included and end not."""
        start, end = _minute(self.start), _minute(self.end)
        return start <= minute < end if start <= end else minute >= start or minute < end


class InferenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """How predictions of a latency regression move the target of cpu_usage_ratio. Where no model is asked, a pod's measured
    request_p99_ms over the target in its service profile takes their place: 1 is on target, 2 twice as long."""

    strategy: Literal["none", "borwein_v2", "borwein_v3"] = "none"
    """[StrategyGroup] `borwein_v2` adds the slot's offset to the target, `borwein_v3` puts it in the target's place."""
    slots: tuple[Slot, ...] = ()
    special_times: tuple[SpecialTime, ...] = ()
    offset_min: Offset = -0.25
    """[OffsetMin] bounds of what is added,"""
    offset_max: Offset = 0.25
    """[OffsetMax]"""
    target_min: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """[IndicatorMin] and of the target that comes of it."""
    target_max: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """[IndicatorMax]"""
    stale_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    """Predictions older than this do not count: the target is what it is without them."""

    def __post_init__(self) -> None:
        if self.strategy != "none" and not self.slots:
            raise ValueError(f"strategy {self.strategy} needs slots")
        if self.offset_min > self.offset_max or self.target_min > self.target_max:
            raise ValueError("a minimum is above its maximum")
        if any(first.below >= second.below for first, second in pairwise(self.slots)):
            raise ValueError("slots must be in ascending order of below")


def _minute(time: str) -> int:
    return int(time[:2]) * 60 + int(time[3:])
