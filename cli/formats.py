"""Formats numbers, names, knob values and forecasts for terminals. Pure.
`exporters/page/static/format.js` formats alike.
An absent value is a dash, never zero.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

from api.decision import Decision, JournalEntry, Outcome, OutcomeStatus
from api.forecast import Forecast, ForecastResource
from api.text import printable

ABSENT = "\N{EN DASH}"
STATUS_SIGNS = {
    OutcomeStatus.APPLIED: "✓",
    OutcomeStatus.UNCHANGED: "=",
    OutcomeStatus.DRY_RUN: "◌",
    OutcomeStatus.REFUSED: "✕",
    OutcomeStatus.VANISHED: "∅",
    OutcomeStatus.MISMATCH: "≠",
}
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
MAX_PLAIN_NUMBER = 1e15
_CPU_LIST_KNOBS = {"cpuset.cpus": "CPUs", "cpuset.mems": "NUMA nodes"}
_BYTE_KNOBS = (
    "memory.max",
    "memory.high",
    "memory.low",
    "memory.min",
    "memory.swap.max",
    "memory.reclaim",
    "drop_cache",
)
"""Knobs whose value is a number of bytes."""


def fixed(value: float, digits: int) -> str:
    """Round half up, as browsers do (Python rounds halves to even). From 1e15 on use a power of ten, because numbers come
    from other programs and must not widen a table without limit."""
    if abs(value) >= MAX_PLAIN_NUMBER:
        return f"{value:.2e}"
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def figures(value: float) -> str:
    """Format with at most three digits: 123, 12.3, 1.23."""
    size = abs(value)
    return fixed(value, 0 if size >= 99.95 else 1 if size >= 9.995 else 2)


def cores(value: float | None) -> str:
    return ABSENT if value is None else fixed(value, 1 if abs(value) >= 99.95 else 2)


def duration(us: float | None) -> str:
    """Format a time given in microseconds."""
    if us is None:
        return ABSENT
    if us < 999.5:
        return f"{figures(us)} µs"
    return f"{figures(us / 1e3)} ms" if us < 999_500 else f"{figures(us / 1e6)} s"


def milliseconds(ms: float | None) -> str:
    return duration(None if ms is None else ms * 1000)


def percent(ratio: float | None) -> str:
    if ratio is None:
        return ABSENT
    value = ratio * 100
    if 0 < value < 0.1:
        return "< 0.1 %"
    return f"{fixed(value, 1 if 0 < value < 9.95 else 0)} %"


def size(value: int | None) -> str:
    """Format a number of bytes."""
    if value is None:
        return ABSENT
    for unit_bytes, unit in _SIZES:
        if value >= unit_bytes:
            return f"{figures(value / unit_bytes)} {unit}"
    return f"{value} B"


def integer(value: float | None) -> str:
    if value is None or abs(value) >= MAX_PLAIN_NUMBER:
        return ABSENT if value is None else fixed(value, 0)
    return f"{int(fixed(value, 0)):,}"


def clock(wall_time_ms: float) -> str:
    """Format the local time of day."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(wall_time_ms / 1000))
    except (OverflowError, ValueError, OSError):
        return ABSENT


def age(seconds: float) -> str:
    """Format how long ago something happened; negative ages (clock skew between machines) count as 0."""
    if seconds < 99.5:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def knob_value(knob: str, value: str | None) -> str:
    """Format a knob's value by its meaning: cores, bytes, CPUs."""
    if value is None:
        return ABSENT
    if knob == "cpu.max":
        quota, _, period = value.partition(" ")
        if quota == "max":
            return "no limit"
        if quota.isdigit() and period.isdigit() and int(period):
            return f"{cores(int(quota) / int(period))} cores"
    if knob in _CPU_LIST_KNOBS:
        return f"{_CPU_LIST_KNOBS[knob]} {printable(value)}" if value else "all of its parent"
    if knob in _BYTE_KNOBS:
        return "no limit" if value == "max" else size(int(value)) if value.isdecimal() else printable(value)
    if knob == "cpu.idle":
        return {"1": "yields to siblings", "0": "normal"}.get(value, printable(value))
    if knob == "sched_runtime" and value.isdecimal():
        return "default slice" if value == "0" else f"slice of {int(value) / 1e6:.2g} ms"
    return printable(value)


def knob_change(outcome: Outcome) -> str:
    """Return the change as `3.40 → 3.80 cores` or `3.80 cores → no limit`, with the unit once."""
    knob = outcome.decision.knob.value
    before, after = knob_value(knob, outcome.before), knob_value(knob, outcome.decision.value)
    if after.endswith(" cores"):
        before = before.removesuffix(" cores")
    return f"{before} → {after}"


def decision_line(entry: JournalEntry) -> str:
    """Format one decision on one line: time, outcome, pod, knob, old and new value, reason."""
    outcome, decision = entry.outcome, entry.outcome.decision
    why = printable(decision.reason.text)
    if outcome.error:
        why = f"{printable(outcome.error)}; {why}"
    status = f"{STATUS_SIGNS[outcome.status]} {outcome.status.value}"
    when = clock(entry.wall_time_ns / 1e6)
    return f"{when}  {status:<9}  {decision_target(decision)}  {decision.knob.value} {knob_change(outcome)}  ({why})"


def decision_target(decision: Decision) -> str:
    """Return the pod of a decision, or its cgroup if it belongs to no pod."""
    return printable(decision.pod or decision.cgroup)


def join(parts: Sequence[str], separator: str = " · ") -> str:
    """Join the parts that are not empty."""
    return separator.join(part for part in parts if part)


def forecast_text(forecast: Forecast) -> str:
    """Describe a forecast: the predicted peak, whether it is trusted, and how often earlier forecasts were exceeded."""
    prediction, score = forecast.forecast, forecast.score
    if prediction.peak is None:
        return f"{forecast.resource.value}: {printable(prediction.reason.text)}"
    text = f"{forecast.resource.value}: at most {forecast_amount(forecast, prediction.peak)} within the hour"
    text += f", {forecast_amount(forecast, forecast.used)} now"
    text += "" if prediction.trusted else ", not trusted yet"
    text += "; above every forecast within the last hour" if prediction.alarm else ""
    if score is None or score.miss_ratio is None:
        return text
    missed, allowed = percent(score.miss_ratio), percent(forecast.target_miss_ratio)
    return f"{text}; the peak exceeded {missed} of the last day's forecasts, {allowed} are allowed"


def forecast_amount(forecast: Forecast, value: float | None) -> str:
    """Format a value of the forecast's resource: cores or bytes."""
    if forecast.resource is ForecastResource.CPU:
        return f"{cores(value)} cores"
    return size(None if value is None else round(value))
