"""Forecast of the peak CPU and memory use of online pods, and the accuracy of earlier forecasts.
Amounts are cores or bytes.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from api.knobs import Reason


class ForecastResource(StrEnum):
    """Forecast resource; amounts are cores (CPU) or bytes (memory)."""

    CPU = "cpu"
    MEMORY = "memory"


class PeakForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted peak use within the horizon, in the unit of the samples."""

    peak: float | None
    """None if no forecast is possible; then no headroom may be based on it."""
    expected: float | None = None
    """Expected peak without margin."""
    margin: float = 0.0
    """Safety margin, including the surcharge of an active alarm."""
    season: bool = False
    """Whether yesterday's peaks contributed."""
    alarm: bool = False
    """Whether use rose above every forecast for it within the last hour."""
    trusted: bool = False
    """Whether the history is long and recent enough to allow more headroom than Katalyst's formula."""
    history_s: float = 0.0
    """Length of the recorded history of peaks."""
    reason: Reason = msgspec.field(name="verdict")


class ForecastScore(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy of the last day's forecasts, made every five minutes, against the peak of their hour; None before the first."""

    miss_ratio: float | None = None
    """Share of the forecasts that the peak exceeded."""
    big_miss_ratio: float | None = None
    """Share of the forecasts that the peak exceeded by more than a tenth of the node."""
    shortfall_mean: float | None = None
    """Mean amount by which the exceeded forecasts were too low; None if none was exceeded."""
    shortfall_max: float | None = None
    bias: float | None = None
    """Mean of forecast minus peak; positive values are conservative."""
    quantile_ratio: float | None = None
    """Quantile of past errors covered by the margin; adjusted after misses."""
    evaluated: int = 0
    """Forecasts evaluated since the agent started."""
    missed: int = 0


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of one resource."""

    resource: ForecastResource
    used: float | None
    """Current use by everything but reclaimed pods; None if unknown."""
    forecast: PeakForecast
    target_miss_ratio: float = msgspec.field(name="promised_miss_ratio")
    """Configured miss ratio that `score` is compared with."""
    score: ForecastScore | None = None
    """None for a method that does not measure its accuracy."""
