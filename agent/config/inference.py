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
    """`HH:MM`, the first minute of it,"""
    end: TimeOfDay
    """and the first after it."""
    offset: Offset
    """What is added to the target then (borwein_v2), or the target itself (borwein_v3)."""

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
    """[strategy_slots] in ascending order of `below`."""
    special_times: tuple[SpecialTime, ...] = ()
    """[strategy_special_time] parts of the day in which predictions do not count."""
    offset_min: Offset = -0.25
    """[OffsetMin] bounds of what is added,"""
    offset_max: Offset = 0.25
    """[OffsetMax] the upper of them,"""
    target_min: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """[IndicatorMin] and of the target that comes of it."""
    target_max: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """[IndicatorMax] the upper bound of it."""
    stale_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0
    """Predictions older than this do not count: the target is what it is without them."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no single field's bounds can say."""
        if self.strategy != "none" and not self.slots:
            raise ValueError(f"strategy {self.strategy} needs slots; add them or choose none")
        if self.offset_min > self.offset_max:
            raise ValueError(f"offsetMin {self.offset_min:g} is above offsetMax {self.offset_max:g}; lower it")
        if self.target_min > self.target_max:
            raise ValueError(f"targetMin {self.target_min:g} is above targetMax {self.target_max:g}; lower it")
        for first, second in pairwise(self.slots):
            if first.below >= second.below:
                raise ValueError(
                    f"slots: below {second.below:g} comes after below {first.below:g}; put them in ascending order"
                )


def _minute(time: str) -> int:
    return int(time[:2]) * 60 + int(time[3:])
