"""Parses requests and limits of one container from Kubernetes resource lists. Pure.
Raises PodFieldError with field, reason and remedy for what Kubernetes would reject.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any, NamedTuple

from api.pod import NET_BANDWIDTH, RECLAIMED_CPU, RECLAIMED_MEMORY
from api.quantity import convert_quantity

CPU, MEMORY = "cpu", "memory"
CONTAINER_RESOURCES = (CPU, MEMORY, RECLAIMED_CPU, RECLAIMED_MEMORY, NET_BANDWIDTH)
"""Resources that have a place in api.pod.Container."""
MILLI = 1000


class PodFieldError(ValueError):
    """`field: reason; remedy`."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self._parts = field, reason

    def of(self, pod: str) -> PodFieldError:
        """The same, with the name of the pod that it is about."""
        field, reason = self._parts
        return PodFieldError(field, f"{reason} (pod {pod!r:.80})")


class ResourceRequirements(NamedTuple):
    """What one container asks for, by resource name: in Kubernetes' units."""

    requests: Mapping[str, Decimal] = {}
    limits: Mapping[str, Decimal] = {}


def read_requirements(
    requests: Mapping[str, Any], limits: Mapping[str, Any], known: Collection[str], path: str
) -> ResourceRequirements:
    """The quantities of both lists; `path` is that of the field that holds them.

    Raises FieldError for a name that is not `known`, and for what Kubernetes would refuse: a request above its limit, a
    limit of nothing, and for resources that are not its own (`domain/name`) a fraction, or another request than limit.
    """
    ask = ResourceRequirements(
        _quantities(requests, known, f"{path}.requests"), _quantities(limits, known, f"{path}.limits")
    )
    for name, limit in ask.limits.items():
        field = f"{path}.limits.{name}"
        if limit == 0 and "/" not in name:
            raise PodFieldError(field, "is 0, which nothing can run with; leave it out for no limit")
    for name in ask.requests.keys() & ask.limits.keys():
        request, limit, field = ask.requests[name], ask.limits[name], f"{path}.requests.{name}"
        if "/" in name and request != limit:
            raise PodFieldError(field, f"{request} is not the limit, {limit}; write the same, or one of them only")
        if request > limit:
            raise PodFieldError(field, f"{request} is more than the limit {limit}; raise the limit")
    return ask


def container_fields(ask: ResourceRequirements) -> dict[str, Any]:
    """The fields of api.pod.Container that say what it asks for. A reclaimed limit alone is a request too."""
    requests, limits = ask
    millicpu = requests.get(RECLAIMED_CPU, limits.get(RECLAIMED_CPU))
    return {
        "cpu_request_cores": _cores_or_none(requests.get(CPU)),
        "cpu_limit_cores": _cores_or_none(limits.get(CPU)),
        "memory_request_bytes": _integer(requests.get(MEMORY)),
        "memory_limit_bytes": _integer(limits.get(MEMORY)),
        "reclaimed_cpu_cores": None if millicpu is None else float(millicpu / MILLI),
        "reclaimed_memory_bytes": _integer(requests.get(RECLAIMED_MEMORY, limits.get(RECLAIMED_MEMORY))),
        "net_bandwidth_mbit": _integer(requests.get(NET_BANDWIDTH, limits.get(NET_BANDWIDTH))),
    }


def is_whole(quantity: Decimal) -> bool:
    return quantity == quantity.to_integral_value()


def _quantities(listed: Mapping[str, Any], known: Collection[str], path: str) -> dict[str, Decimal]:
    found = {}
    for name, value in listed.items():
        if name not in known:
            raise PodFieldError(path, f"object contains unknown field `{name[:80]}`; choose from {', '.join(known)}")
        if value is None:
            continue
        found[name] = _quantity(value, f"{path}.{name}")
        if "/" in name and not is_whole(found[name]):
            unit = "Mbit/s" if name == NET_BANDWIDTH else "thousandths of a CPU" if name.endswith("cpu") else "bytes"
            raise PodFieldError(f"{path}.{name}", f"{value!r:.80} is no whole number of {unit}; write one")
    return found


def _quantity(value: Any, field: str) -> Decimal:
    try:
        return convert_quantity(value)
    except ValueError as error:
        raise PodFieldError(field, str(error)) from None


def _cores_or_none(quantity: Decimal | None) -> float | None:
    return None if quantity is None else float(quantity)


def _integer(quantity: Decimal | None) -> int | None:
    return None if quantity is None else int(quantity.to_integral_value(ROUND_CEILING))
