"""Amounts as quantities, each in one spelling: what has not changed must not look as if it had. Pure."""

from __future__ import annotations

from api.crds.meta import ResourceList
from api.pods import RECLAIMED_CPU, RECLAIMED_MEMORY


def cores_of(cores: float) -> str:
    """`4`, or `500m`; parts of a thousandth are left out."""
    millicores = int(cores * 1000 + 1e-6)
    return str(millicores // 1000) if millicores % 1000 == 0 else f"{millicores}m"


def bytes_of(size: float) -> str:
    """Whole bytes."""
    return str(int(size))


def promised(cores: float | None, memory: float | None) -> ResourceList:
    """What is lent, under Katalyst's names, rounded down: a promise is never more than was found."""
    found: dict[str, str | int] = {}
    if cores is not None:
        found[RECLAIMED_CPU] = str(int(cores * 1000 + 1e-6))
    if memory is not None:
        found[RECLAIMED_MEMORY] = bytes_of(memory)
    return found
