"""How forecasts compared with what came: kept with the predictor, to be shown live."""

from __future__ import annotations

import msgspec

from agent.advisor.forecast.window import DAY

KEPT = DAY


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the start, and each error of the last day. In the unit of the samples."""

    evaluated: int = 0
    """Forecasts whose hour is over, one for each five minutes."""
    missed: int = 0
    """Those that the peak exceeded."""
    shortfall_sum: float = 0.0
    """By how much, together."""
    shortfall_max: float = 0.0
    error_sum: float = 0.0
    """Forecast minus peak, together: what was not lent for safety."""
    recent: tuple[float, ...] = ()
    """Forecast minus peak over the last day, the latest last."""


def count(accuracy: Accuracy, predicted: float, actual: float) -> Accuracy:
    """The accuracy with one more forecast in it."""
    error = predicted - actual
    return Accuracy(
        evaluated=accuracy.evaluated + 1,
        missed=accuracy.missed + (error < 0),
        shortfall_sum=accuracy.shortfall_sum + max(-error, 0.0),
        shortfall_max=max(accuracy.shortfall_max, -error),
        error_sum=accuracy.error_sum + error,
        recent=(*accuracy.recent[-KEPT + 1 :], error),
    )


def miss_ratio(accuracy: Accuracy, beyond: float = 0.0) -> float | None:
    """Share of the last day's forecasts that the peak exceeded by more than `beyond`; None before the first."""
    if not accuracy.recent:
        return None
    return sum(error < -beyond for error in accuracy.recent) / len(accuracy.recent)


def mean_shortfall(accuracy: Accuracy) -> float | None:
    """By how much the last day's missed forecasts were missed on average; None where none was."""
    short = [-error for error in accuracy.recent if error < 0]
    return sum(short) / len(short) if short else None


def max_shortfall(accuracy: Accuracy) -> float | None:
    """By how much the worst of the last day was missed, 0 where none was; None before the first forecast."""
    return max(0.0, -min(accuracy.recent)) if accuracy.recent else None


def bias(accuracy: Accuracy) -> float | None:
    """Mean of forecast minus peak over the last day: above 0 is caution. None before the first forecast."""
    return sum(accuracy.recent) / len(accuracy.recent) if accuracy.recent else None
