"""Amounts of what is foretold, in words. Pure."""

from __future__ import annotations

from agent.advisor.memory.stats import human
from api.forecasts import Resource


def said(resource: Resource, amount: float) -> str:
    """`2.5 cores`, `20.6 GiB`."""
    return f"{amount:.4g} cores" if resource is Resource.CPU else human(amount)
