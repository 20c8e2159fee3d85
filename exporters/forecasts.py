"""The forecasts of a round, and how earlier ones fared, as rows of the catalogue. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from api.forecasts import Outlook, Resource
from exporters.points import Family, points

UNITS = {Resource.CPU: "cores", Resource.MEMORY: "bytes"}


def forecast_families(outlooks: Sequence[Outlook]) -> Iterator[Family]:
    """Amounts are rows of their own for each resource, because their units differ."""
    for outlook in outlooks:
        yield from _amounts(outlook)
    named = [((outlook.resource.value,), outlook) for outlook in outlooks]
    yield points("dioptase_forecast_promised_miss_ratio", ((name, o.promised_miss_ratio) for name, o in named))
    yield points("dioptase_forecast_alarm", ((name, int(o.forecast.alarm)) for name, o in named))
    yield points("dioptase_forecast_trusted", ((name, int(o.forecast.trusted)) for name, o in named))
    yield points("dioptase_forecast_history_seconds", ((name, o.forecast.history_s) for name, o in named))
    scores = [(name, o.score) for name, o in named if o.score is not None]
    yield points("dioptase_forecast_miss_ratio", ((name, score.miss_ratio) for name, score in scores))
    yield points("dioptase_forecast_big_miss_ratio", ((name, score.big_miss_ratio) for name, score in scores))
    yield points("dioptase_forecast_quantile_ratio", ((name, score.quantile_ratio) for name, score in scores))
    yield points("dioptase_forecast_evaluated_total", ((name, score.evaluated) for name, score in scores))
    yield points("dioptase_forecast_missed_total", ((name, score.missed) for name, score in scores))


def _amounts(outlook: Outlook) -> Iterator[Family]:
    forecast, score = outlook.forecast, outlook.score
    amounts = {
        "used": outlook.used,
        "peak": forecast.peak,
        "expected": forecast.expected,
        "margin": None if forecast.peak is None else forecast.margin,
    }
    if score is not None and score.miss_ratio is not None:
        # Where nothing fell short, by nothing: a line that ends would say that nobody knows.
        amounts |= {
            "shortfall_mean": score.shortfall_mean or 0.0,
            "shortfall_max": score.shortfall_max,
            "bias": score.bias,
        }
    unit = UNITS[outlook.resource]
    for what, amount in amounts.items():
        yield points(f"dioptase_forecast_{outlook.resource.value}_{what}_{unit}", [((), amount)])
