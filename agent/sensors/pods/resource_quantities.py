"""Parses requests and limits of one container from Kubernetes resource lists. Pure.
Raises PodFieldError with field, reason and remedy for what Kubernetes would reject.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any, NamedTuple

from api.pod import NET_BANDWIDTH, RECLAIMED_CPU, RECLAIMED_MEMORY
from api.quantity import convert_quantity
from api.text import quote

CPU, MEMORY = "cpu", "memory"
CONTAINER_RESOURCES = (CPU, MEMORY, RECLAIMED_CPU, RECLAIMED_MEMORY, NET_BANDWIDTH)
"""Resources with a field in api.pod.Container."""
MILLI = 1000


class PodFieldError(ValueError):
    """An invalid field; the text is `field: reason; remedy`."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self._parts = field, reason

    def of(self, pod: str) -> PodFieldError:
        """Return the same error with the pod's name."""
        field, reason = self._parts
        return PodFieldError(field, f"{reason} (pod {quote(pod)})")


class ResourceRequirements(NamedTuple):
    """Requests and limits of one container by resource name, in Kubernetes' units."""

    requests: Mapping[str, Decimal] = {}
    limits: Mapping[str, Decimal] = {}


def read_requirements(
    requests: Mapping[str, Any], limits: Mapping[str, Any], known_resources: Collection[str], path: str
) -> ResourceRequirements:
    """Return the quantities of both lists; `path` is the field that holds them.

    Raises PodFieldError for an unknown name and for what Kubernetes rejects: a request above its limit, a limit of 0,
    and for extended resources (`domain/name`) a fraction, or a request that differs from the limit.
    """
    requirements = ResourceRequirements(
        _quantities(requests, known_resources, f"{path}.requests"),
        _quantities(limits, known_resources, f"{path}.limits"),
    )
    for name, limit in requirements.limits.items():
        field = f"{path}.limits.{name}"
        if limit == 0 and "/" not in name:
            raise PodFieldError(field, "is 0; remove it for no limit, or raise it")
    for name in requirements.requests.keys() & requirements.limits.keys():
        request, limit, field = requirements.requests[name], requirements.limits[name], f"{path}.requests.{name}"
        if "/" in name and request != limit:
            raise PodFieldError(
                field, f"{request} differs from the limit {limit}; set both to the same, or one of them"
            )
        if request > limit:
            raise PodFieldError(field, f"{request} is more than the limit {limit}; raise the limit")
    return requirements


def container_fields(requirements: ResourceRequirements, *, reclaimed: bool) -> dict[str, Any]:
    """Return the resource fields of api.pod.Container. A limit of a reclaimed resource without a request is a request too. If
    the pod is reclaimed, such a limit is also the container's CPU or memory limit."""
    requests, limits = requirements
    millicpu = requests.get(RECLAIMED_CPU, limits.get(RECLAIMED_CPU))
    if reclaimed:
        limits = _with_reclaimed_limits(limits)
    return {
        "cpu_request_cores": _cores_or_none(requests.get(CPU)),
        "cpu_limit_cores": _cores_or_none(limits.get(CPU)),
        "memory_request_bytes": _integer(requests.get(MEMORY)),
        "memory_limit_bytes": _integer(limits.get(MEMORY)),
        "reclaimed_cpu_cores": None if millicpu is None else float(millicpu / MILLI),
        "reclaimed_memory_bytes": _integer(requests.get(RECLAIMED_MEMORY, limits.get(RECLAIMED_MEMORY))),
        "net_bandwidth_mbit": _integer(requests.get(NET_BANDWIDTH, limits.get(NET_BANDWIDTH))),
    }


def _with_reclaimed_limits(limits: Mapping[str, Decimal]) -> Mapping[str, Decimal]:
    """Return the limits, with reclaimed CPU and memory as CPU and memory. Of two limits for a resource the lower counts."""
    reclaimed = {CPU: limits.get(RECLAIMED_CPU, Decimal(0)) / MILLI, MEMORY: limits.get(RECLAIMED_MEMORY, Decimal(0))}
    lowest = {name: min(size, limits.get(name, size)) for name, size in reclaimed.items() if size}
    return {**limits, **lowest}


def is_whole(quantity: Decimal) -> bool:
    return quantity == quantity.to_integral_value()


def _quantities(listed: Mapping[str, Any], known_resources: Collection[str], path: str) -> dict[str, Decimal]:
    quantities = {}
    for name, value in listed.items():
        if name not in known_resources:
            raise PodFieldError(
                path, f"object contains unknown field `{name[:80]}`; choose from {', '.join(known_resources)}"
            )
        if value is None:
            continue
        quantities[name] = _quantity(value, f"{path}.{name}")
        if "/" in name and not is_whole(quantities[name]):
            unit = "Mbit/s" if name == NET_BANDWIDTH else "thousandths of a CPU" if name.endswith("cpu") else "bytes"
            raise PodFieldError(f"{path}.{name}", f"{quote(value)} is not a whole number of {unit}; write one")
    return quantities


def _quantity(value: Any, field: str) -> Decimal:
    try:
        return convert_quantity(value)
    except ValueError as error:
        raise PodFieldError(field, str(error)) from None


def _cores_or_none(quantity: Decimal | None) -> float | None:
    return None if quantity is None else float(quantity)


def _integer(quantity: Decimal | None) -> int | None:
    return None if quantity is None else int(quantity.to_integral_value(ROUND_CEILING))
