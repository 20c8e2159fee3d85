"""The margin on top of an expected peak: a quantile of how far reality went beyond it, steered by the misses that came of it.

Adaptive conformal inference (Gibbs and Candes, 2021): each miss raises the quantile a little, each hit lowers it less, so
that the share of misses comes out at the wanted one whatever the errors look like.
"""

from __future__ import annotations

import msgspec

from agent.advisor.forecast.window import DAY, HORIZON

KEPT = 3 * DAY
HALF_LIFE = DAY
STEP = 0.0005
"""How far one miss moves the quantile. Misses come in dozens, one for each forecast that a peak was in."""
LOWEST, HIGHEST, BEYOND = 0.85, 0.98, 1.5
"""Between these the quantile is steered, and where more may be missed, as low as so many times the wanted share of misses asks
for: forecasts miss less than their quantile, because the alarm holds them up."""
LEAST = HORIZON
"""Errors that have to be known: an hour of them."""
_WEIGHTS = tuple(0.5 ** (age / HALF_LIFE) for age in range(KEPT - 1, -1, -1))


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the expectation over three days, and what follows from them."""

    residuals: tuple[float, ...] = ()
    """Actual minus expected peak, the latest last."""
    quantile: float | None = None
    """As steered; None before the first forecast came true."""
    amount: float | None = None
    """What is added to the expected peak; None while too few errors are known."""


def learn(margin: Margin, residual: float, missed: bool | None, miss_ratio: float) -> Margin:
    """The margin with one more error in it; `missed` is None where nothing had been foretold."""
    quantile = 1 - miss_ratio if margin.quantile is None else margin.quantile
    if missed is not None:
        lowest, highest = min(LOWEST, 1 - BEYOND * miss_ratio), max(HIGHEST, 1 - miss_ratio)
        quantile = min(max(quantile + STEP * (missed - miss_ratio), lowest), highest)
    residuals = (*margin.residuals[-KEPT + 1 :], residual)
    amount = weighted_quantile(residuals, quantile) if len(residuals) >= LEAST else None
    return Margin(residuals=residuals, quantile=quantile, amount=amount)


def weighted_quantile(residuals: tuple[float, ...], quantile: float) -> float:
    """The quantile of these, the latest weighing most: half as much a day earlier."""
    weights = _WEIGHTS[-len(residuals) :]
    threshold, seen = quantile * sum(weights), 0.0
    order = sorted(range(len(residuals)), key=residuals.__getitem__)
    for index in order:
        seen += weights[index]
        if seen >= threshold:
            return residuals[index]
    return residuals[order[-1]]
