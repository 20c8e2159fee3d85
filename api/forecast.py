"""Forecast of the peak CPU and memory use of online pods, and the accuracy of earlier forecasts.
Amounts are cores or bytes.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from api.knobs import Reason


class ForecastResource(StrEnum):
    """What is foretold; amounts are cores of the one and bytes of the other."""

    CPU = "cpu"
    MEMORY = "memory"


class PeakForecast(msgspec.Struct, frozen=True, kw_only=True):
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
    reason: Reason = msgspec.field(name="verdict")


class ForecastScore(msgspec.Struct, frozen=True, kw_only=True):
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


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast of one resource."""

    resource: ForecastResource
    used: float | None
    """What online work, and all else that is no reclaimed pod's, uses at this moment; None where it is not known."""
    forecast: PeakForecast
    target_miss_ratio: float = msgspec.field(name="promised_miss_ratio")
    """Misses that the settings allow, the measure for `score`."""
    score: ForecastScore | None = None
    """None of a method that keeps none."""
