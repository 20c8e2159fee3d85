"""Headroom policy `forecast`: what the foretold peak of online use leaves of the node may be promised. Pure.

One function for CPU and for memory: all amounts are of one unit, cores or bytes.
"""

from __future__ import annotations

import msgspec

from agent.advisor.forecast.amounts import said
from api.forecasts import Outlook, Resource
from api.knobs import Verdict


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """What can be promised to reclaimed pods; None where nothing is known: keep what was promised, or less."""

    amount: float | None
    verdict: Verdict


def promise(capacity: float, reserve: float, outlook: Outlook, canonical: float | None) -> Promise:
    """max(capacity - reserve - peak, 0) of the node as it is now.

    `canonical` is what Katalyst's formula (by requests or estimates) would promise: while history is short or stale it is the
    upper bound, and all there is without a forecast. A peak is never taken to be below what online work uses at this moment,
    where that is known.
    """
    forecast, used, resource = outlook.forecast, outlook.used, outlook.resource
    free = max(capacity - reserve, 0.0)
    inputs = {"capacity": capacity, "reserve": reserve, "canonical": canonical, "used": used, **forecast.verdict.inputs}
    bound = None if canonical is None else min(max(canonical, 0.0), free)
    if forecast.peak is None:
        rule = "canonical_without_forecast"
        text = f"{forecast.verdict.text} Katalyst's formula promises {_text(resource, bound)}."
        return Promise(amount=bound, verdict=Verdict(rule=rule, text=text, inputs=inputs))
    peak = max(forecast.peak, used or 0.0)
    amount = max(free - peak, 0.0)
    whole, kept, top, left = (said(resource, value) for value in (capacity, reserve, peak, amount))
    text = f"{forecast.verdict.text} {whole} less {kept} kept and a peak of {top} leave {left}"
    if forecast.trusted:
        return Promise(amount=amount, verdict=Verdict(rule="forecast", text=f"{text}.", threshold=peak, inputs=inputs))
    rule = "forecast_below_canonical"
    if bound is None:
        text = f"{text}, but neither is the forecast trusted yet nor Katalyst's formula known."
        return Promise(amount=None, verdict=Verdict(rule=rule, text=text, threshold=peak, inputs=inputs))
    text = f"{text}, Katalyst's formula {said(resource, bound)}; the forecast is not trusted to promise more."
    return Promise(amount=min(amount, bound), verdict=Verdict(rule=rule, text=text, threshold=peak, inputs=inputs))


def _text(resource: Resource, amount: float | None) -> str:
    return "nothing that is known" if amount is None else said(resource, amount)
