"""Headroom policy `forecast`: what the predicted peak of online use leaves of the node, for CPU and for memory.
Until a forecast is trusted, the headroom of the fallback policy is the upper bound. Amounts are cores or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from agent.advisor.forecast.predictor import format_amount
from agent.advisor.headroom.reclaim_exclusion import unreclaimable_idle_bytes
from agent.advisor.memory.memory_inputs import format_bytes
from agent.config.config import AgentConfig
from api.advice import Headroom, MemoryAdvice
from api.forecast import Forecast, ForecastResource
from api.knobs import Reason
from api.snapshot import Snapshot


class ForecastHeadroom(msgspec.Struct, frozen=True, kw_only=True):
    """What can be promised to reclaimed pods; None where nothing is known: keep what was promised, or less."""

    amount: float | None
    reason: Reason


def compute_forecast_headroom(
    capacity: float, reserve: float, outlook: Forecast, canonical: float | None
) -> ForecastHeadroom:
    """max(capacity - reserve - peak, 0) of the node as it is now.

    `canonical` is what Katalyst's formula (by requests or estimates) would promise: while history is short or stale it is the
    upper bound, and all there is without a forecast. A peak is never taken to be below what online work uses at this moment,
    where that is known.
    """
    forecast, used, resource = outlook.forecast, outlook.used, outlook.resource
    free = max(capacity - reserve, 0.0)
    inputs = {"capacity": capacity, "reserve": reserve, "canonical": canonical, "used": used, **forecast.reason.inputs}
    bound = None if canonical is None else min(max(canonical, 0.0), free)
    if forecast.peak is None:
        rule = "canonical_without_forecast"
        text = f"{forecast.reason.text} Katalyst's formula promises {_format_bound(resource, bound)}."
        return ForecastHeadroom(amount=bound, reason=Reason(rule=rule, text=text, inputs=inputs))
    peak = max(forecast.peak, used or 0.0)
    amount = max(free - peak, 0.0)
    whole, kept, top, left = (format_amount(resource, value) for value in (capacity, reserve, peak, amount))
    text = f"{forecast.reason.text} {whole} less {kept} kept and a peak of {top} leave {left}"
    if forecast.trusted:
        return ForecastHeadroom(
            amount=amount, reason=Reason(rule="forecast", text=f"{text}.", threshold=peak, inputs=inputs)
        )
    rule = "forecast_below_canonical"
    if bound is None:
        text = f"{text}, but neither is the forecast trusted yet nor Katalyst's formula known."
        return ForecastHeadroom(amount=None, reason=Reason(rule=rule, text=text, threshold=peak, inputs=inputs))
    text = f"{text}, Katalyst's formula {format_amount(resource, bound)}; the forecast is not trusted to promise more."
    return ForecastHeadroom(
        amount=min(amount, bound), reason=Reason(rule=rule, text=text, threshold=peak, inputs=inputs)
    )


def _format_bound(resource: ForecastResource, amount: float | None) -> str:
    return "nothing that is known" if amount is None else format_amount(resource, amount)


FORECAST_POLICY = "forecast"


def forecast_cores(
    capacity: float, reserve: float, forecasts: Sequence[Forecast], fallback: Headroom, reclaimable_cores: float | None
) -> tuple[float | None, Reason]:
    """Cores that can be promised, and why; never more than is lent now."""
    outlook = _find_forecast(ForecastResource.CPU, forecasts)
    if outlook is None:
        return fallback.cores, fallback.reason
    found = compute_forecast_headroom(capacity, reserve, outlook, fallback.cores)
    if found.amount is None or reclaimable_cores is None or found.amount <= reclaimable_cores:
        return found.amount, found.reason
    verdict = found.reason
    text = f"{verdict.text.removesuffix('.')}; no more than the {reclaimable_cores:.2f} that are lent now."
    inputs = {**verdict.inputs, "lent_cores": reclaimable_cores}
    return reclaimable_cores, msgspec.structs.replace(verdict, text=text, inputs=inputs)


def apply_memory_forecast(
    memory: MemoryAdvice, forecasts: Sequence[Forecast], snapshot: Snapshot, config: AgentConfig
) -> MemoryAdvice:
    """The same advice, with what the forecast leaves of the node's memory; by NUMA node in the parts that it had before."""
    outlook, total = _find_forecast(ForecastResource.MEMORY, forecasts), snapshot.node.memory_total_bytes
    nothing = config.memory.policy == "none" or not config.advisor.enable_reclaim
    if nothing or outlook is None or total is None:
        return memory
    before, reserve = memory.headroom_bytes, config.memory.reserve_bytes(total) + unreclaimable_idle_bytes(snapshot)
    found = compute_forecast_headroom(float(total), float(reserve), outlook, before)
    verdict = found.reason
    if outlook.forecast.peak is not None and found.amount is not None:
        text = f"The most to expect of all but reclaimed pods within an hour is {format_bytes(outlook.forecast.peak)}"
        text += f": of {format_bytes(total)}, {format_bytes(reserve)} kept, {format_bytes(found.amount)} are promised"
        text += "." if outlook.forecast.trusted else ", no more than without the forecast, which is not trusted yet."
        verdict = msgspec.structs.replace(verdict, text=text)
    return msgspec.structs.replace(
        memory,
        headroom_bytes=found.amount,
        headroom_by_numa=_split_by_numa(found.amount, memory.headroom_by_numa, snapshot),
        headroom_reason=verdict,
    )


def _split_by_numa(amount: float | None, before: Mapping[int, float], snapshot: Snapshot) -> dict[int, float]:
    nodes, whole = snapshot.topology.numa_nodes, sum(before.values())
    if amount is None:
        return {}
    if len(nodes) == 1:
        return {nodes[0]: amount}
    return {numa: amount * part / whole for numa, part in before.items()} if whole else {}


def _find_forecast(resource: ForecastResource, forecasts: Sequence[Forecast]) -> Forecast | None:
    return next((outlook for outlook in forecasts if outlook.resource is resource), None)
