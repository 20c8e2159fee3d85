"""Headroom policy `forecast`: what the predicted peak of online use leaves of the node, for CPU and for memory.
Until a forecast is trusted, the headroom of the fallback policy is the upper bound. Amounts are cores or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from agent.advisor.forecast.predictor import format_amount
from agent.advisor.headroom.reclaim_exclusion import unreclaimable_idle_bytes
from agent.config.config import AgentConfig
from api.advice import Headroom, MemoryAdvice
from api.forecast import Forecast, ForecastResource
from api.knobs import Reason
from api.quantity import format_bytes
from api.snapshot import Snapshot


class ForecastHeadroom(msgspec.Struct, frozen=True, kw_only=True):
    """Headroom by forecast; None if no amount is known: the reporter then holds or lowers the previous one."""

    amount: float | None
    reason: Reason


def compute_forecast_headroom(
    capacity: float, reserve: float, forecast: Forecast, canonical: float | None
) -> ForecastHeadroom:
    """Return max(capacity - reserve - peak, 0).

    `canonical` is the headroom by Katalyst's formula: the upper bound while history is short or stale, and the fallback
    without a forecast. The peak is at least the current use, if that is measured.
    """
    prediction, used, resource = forecast.forecast, forecast.used, forecast.resource
    free = max(capacity - reserve, 0.0)
    inputs = {
        "capacity": capacity,
        "reserve": reserve,
        "canonical": canonical,
        "used": used,
        **prediction.reason.inputs,
    }
    bound = None if canonical is None else min(max(canonical, 0.0), free)
    if prediction.peak is None:
        shown = "not known" if bound is None else format_amount(resource, bound)
        text = f"{prediction.reason.text} Headroom by Katalyst's formula is {shown}."
        reason = Reason(rule="canonical_without_forecast", text=text, inputs=inputs)
        return ForecastHeadroom(amount=bound, reason=reason)
    peak = max(prediction.peak, used or 0.0)
    amount = max(free - peak, 0.0)
    total, reserved, highest, left = (format_amount(resource, value) for value in (capacity, reserve, peak, amount))
    text = f"{prediction.reason.text} {total} less {reserved} reserved and a peak of {highest} leave {left}"
    if prediction.trusted:
        reason = Reason(rule="forecast", text=f"{text}.", threshold=peak, inputs=inputs)
        return ForecastHeadroom(amount=amount, reason=reason)
    if bound is None:
        text += ", but the forecast is not trusted yet and the value by Katalyst's formula is not known."
    else:
        text += f", Katalyst's formula {format_amount(resource, bound)}, the upper bound until the forecast is trusted."
    reason = Reason(rule="forecast_below_canonical", text=text, threshold=peak, inputs=inputs)
    return ForecastHeadroom(amount=None if bound is None else min(amount, bound), reason=reason)


FORECAST_POLICY = "forecast"


def forecast_cores(
    capacity: float, reserve: float, forecasts: Sequence[Forecast], fallback: Headroom, reclaimable_cores: float | None
) -> tuple[float | None, Reason]:
    """Return the CPU headroom in cores and its reason; at most the cores that reclaimed pods may use now."""
    forecast = _find_forecast(ForecastResource.CPU, forecasts)
    if forecast is None:
        return fallback.cores, fallback.reason
    headroom = compute_forecast_headroom(capacity, reserve, forecast, fallback.cores)
    if headroom.amount is None or reclaimable_cores is None or headroom.amount <= reclaimable_cores:
        return headroom.amount, headroom.reason
    reason = headroom.reason
    text = f"{reason.text.removesuffix('.')}; at most the {reclaimable_cores:.2f} that reclaimed pods may use now."
    inputs = {**reason.inputs, "lent_cores": reclaimable_cores}
    return reclaimable_cores, replace(reason, text=text, inputs=inputs)


def apply_memory_forecast(
    memory: MemoryAdvice, forecasts: Sequence[Forecast], snapshot: Snapshot, config: AgentConfig
) -> MemoryAdvice:
    """Return the memory advice with the headroom by forecast, split over NUMA nodes as before."""
    forecast, total = _find_forecast(ForecastResource.MEMORY, forecasts), snapshot.node.memory_total_bytes
    disabled = config.memory.policy == "none" or not config.advisor.enable_reclaim
    if disabled or forecast is None or total is None:
        return memory
    before, reserve = memory.headroom_bytes, config.memory.reserve_bytes(total) + unreclaimable_idle_bytes(snapshot)
    headroom = compute_forecast_headroom(float(total), float(reserve), forecast, before)
    reason = headroom.reason
    if forecast.forecast.peak is not None and headroom.amount is not None:
        bound = (
            "" if forecast.forecast.trusted else ", at most the value without the forecast, which is not trusted yet"
        )
        text = (
            f"The predicted memory peak without reclaimed pods within an hour is {format_bytes(forecast.forecast.peak)}"
            f": with {format_bytes(reserve)} of {format_bytes(total)} reserved,"
            f" the headroom is {format_bytes(headroom.amount)}{bound}."
        )
        reason = replace(reason, text=text)
    return replace(
        memory,
        headroom_bytes=headroom.amount,
        headroom_by_numa=_split_by_numa(headroom.amount, memory.headroom_by_numa, snapshot),
        headroom_reason=reason,
    )


def _split_by_numa(amount: float | None, before: Mapping[int, float], snapshot: Snapshot) -> dict[int, float]:
    nodes, total = snapshot.topology.numa_nodes, sum(before.values())
    if amount is None:
        return {}
    if len(nodes) == 1:
        return {nodes[0]: amount}
    return {numa: amount * part / total for numa, part in before.items()} if total else {}


def _find_forecast(resource: ForecastResource, forecasts: Sequence[Forecast]) -> Forecast | None:
    return next((forecast for forecast in forecasts if forecast.resource is resource), None)
