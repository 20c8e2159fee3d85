"""The forecast of what everything but reclaimed pods will use, in words. Pure."""

from __future__ import annotations

from api.forecasts import Outlook, Resource
from cli import words


def sentence(outlook: Outlook) -> str:
    """What is foretold, whether it is trusted, and how often earlier forecasts were exceeded."""
    forecast, score = outlook.forecast, outlook.score
    if forecast.peak is None:
        return f"{outlook.resource.value}: {words.clean(forecast.verdict.text)}"
    text = f"{outlook.resource.value}: at most {amount(outlook, forecast.peak)} within the hour"
    text += f", {amount(outlook, outlook.used)} now"
    text += "" if forecast.trusted else ", not trusted yet"
    text += "; above every forecast within the last hour" if forecast.alarm else ""
    if score is None or score.miss_ratio is None:
        return text
    missed, allowed = words.percent(score.miss_ratio), words.percent(outlook.promised_miss_ratio)
    return f"{text}; the peak exceeded {missed} of the last day's forecasts, {allowed} are allowed"


def amount(outlook: Outlook, value: float | None) -> str:
    """Cores or bytes."""
    if outlook.resource is Resource.CPU:
        return f"{words.cores(value)} cores"
    return words.size(None if value is None else round(value))
