"""Peaks of five minutes each, over three days, and what a forecast looks at in them.

A bucket that nothing was measured in is None: windows pass over it, and where too little is left of a window it is not known.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

NS_PER_S = 1_000_000_000
BUCKET_S = 300
BUCKET_NS = BUCKET_S * NS_PER_S
HORIZON = 12
"""Buckets that a forecast is for: an hour."""
DAY = 288
KEPT = 3 * DAY + 1
RECENT = 3
"""Buckets of the last quarter of an hour; one of them at least has to be known."""

Peaks = Sequence[float | None]


class Features(msgspec.Struct, frozen=True):
    """What the regression is given, in the unit of the samples."""

    values: tuple[float, ...]
    """1 and eight peaks, see FEATURES."""
    season: bool
    """Whether yesterday's peaks are known; if not, the last hour's stand for them."""


FEATURES = (
    "constant", "bucket", "quarter", "hour", "six_hours", "day", "next_hour_yesterday", "same_hour_yesterday",
    "next_hour_of_days",
)  # fmt: skip
PRIOR = (0.0, 0.0, 0.3, 0.3, 0.0, 0.0, 0.2, 0.0, 0.2)
"""What the features weigh before anything is learned: half the present, half the days before."""


def known_peak(values: Peaks, least: int = 1) -> float | None:
    """The highest known value, if so many are known."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) >= least else None


def hour_peak(values: Peaks) -> float | None:
    """The peak of an hour of which at least three quarters are known: of less, it may have been missed."""
    return known_peak(values, HORIZON * 3 // 4)


def features(peaks: Peaks) -> Features | None:
    """What is known at the end of the last bucket; None where it says too little of the last hour."""
    quarter = known_peak(peaks[-RECENT:])
    hour = known_peak(peaks[-HORIZON:], RECENT)
    if quarter is None or hour is None:
        return None
    newest = next(value for value in reversed(peaks) if value is not None)
    six_hours, day = known_peak(peaks[-6 * HORIZON :]), known_peak(peaks[-DAY:])
    last = len(peaks) - 1
    days = [_following(peaks, last - DAY * ago) for ago in (1, 2, 3)]
    before = hour_peak(peaks[last - DAY - HORIZON + 1 : last - DAY + 1]) if last - DAY - HORIZON + 1 >= 0 else None
    seen = [value for value in days if value is not None]
    values = (
        1.0,
        newest,
        quarter,
        hour,
        hour if six_hours is None else six_hours,
        hour if day is None else day,
        hour if days[0] is None else days[0],
        hour if before is None else before,
        sum(seen) / len(seen) if seen else hour,
    )
    return Features(values, days[0] is not None)


def _following(peaks: Peaks, index: int) -> float | None:
    return hour_peak(peaks[index + 1 : index + 1 + HORIZON]) if index >= 0 else None
