"""What online work is foretold to use at the most, and how earlier forecasts compared with what came."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from api.knobs import Verdict


class Resource(StrEnum):
    """What is foretold; amounts are cores of the one and bytes of the other."""

    CPU = "cpu"
    MEMORY = "memory"


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The highest use to expect within the horizon, in the unit of the samples."""

    peak: float | None
    """None where nothing can be foretold: promise nothing on its account."""
    expected: float | None = None
    """The expected peak,"""
    margin: float = 0.0
    """and what is added for safety, the alarm's share included."""
    season: bool = False
    """Whether yesterday's peaks had a part in it."""
    alarm: bool = False
    """Whether use rose above every forecast for it within the last hour."""
    trusted: bool = False
    """Whether history is long and fresh enough to promise more than Katalyst's formula would."""
    history_s: float = 0.0
    """Time of which a peak is remembered."""
    verdict: Verdict


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How forecasts of the last day, one for each five minutes, compared with their hour's peak; None before the first."""

    miss_ratio: float | None = None
    """Part of them that the peak exceeded,"""
    big_miss_ratio: float | None = None
    """by more than a tenth of the node."""
    shortfall_mean: float | None = None
    """By how much those fell short; None where none did."""
    shortfall_max: float | None = None
    bias: float | None = None
    """Mean of forecast minus peak: above 0 is caution."""
    quantile_ratio: float | None = None
    """Part of past errors that the margin covers, as its misses have steered it."""
    evaluated: int = 0
    """Since the agent started."""
    missed: int = 0


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast of one resource."""

    resource: Resource
    used: float | None
    """What online work, and all else that is no reclaimed pod's, uses at this moment; None where it is not known."""
    forecast: Forecast
    promised_miss_ratio: float
    """Misses that the settings allow, the measure for `score`."""
    score: Score | None = None
    """None of a method that keeps none."""
