"""What whoever admits pods asks for, as a pod of ours. Pure.

A quantity is named by what the pod asked for, or by what that was mapped to: Katalyst's ORM names it one way for hints and
the other for the allocation, and sends the same number. So the unit is the key's where it says one, and else that of the
pod's level: reclaimed pods ask for CPU in thousandths, whatever the key.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from agent.qrm.protocol.common import Unusable
from api.enhancements import bound_numa, enhancements
from api.pods import NET_BANDWIDTH, RECLAIMED_CPU, RECLAIMED_MEMORY, Container, Pod
from api.proto import resource_plugin_pb2 as plugin
from api.qos import Dialect, QoSLevel, stated_level

CPU, MEMORY = "cpu", "memory"
_KEYS = {CPU: (CPU, RECLAIMED_CPU), MEMORY: (MEMORY, RECLAIMED_MEMORY)}
_MOST = float(1 << 62)


class Ask(msgspec.Struct, frozen=True):
    """One container's request of one resource."""

    pod: Pod
    """With this container, and those that were asked for before."""
    container: Container
    resource: str
    """`cpu` or `memory`."""
    amount: float
    """Cores, or bytes."""
    hint: tuple[int, ...]
    """NUMA nodes that were agreed on; empty where none were."""


def ask_of(request: Any, resource: str, before: Pod | None, dialect: Dialect) -> Ask:
    """What a ResourceRequest asks of the plugin of that resource; `before` is the pod as it is known.

    Raises Unusable that names the field.
    """
    for field in ("pod_uid", "pod_name", "container_name"):
        if not getattr(request, field):
            raise Unusable(f"{field} is empty")
    annotations, labels = dict(request.annotations), dict(request.labels)
    try:
        qos = stated_level(annotations, dialect.selectors) or QoSLevel.SHARED
    except ValueError as error:
        raise Unusable(f"annotations: {str(error)[:250]}") from None
    amount = quantity(request, resource, qos)
    wants, problems = enhancements(annotations, qos, dialect, None)
    said, unbound = bound_numa(annotations, dialect)
    hint = tuple(sorted({int(node) for node in request.hint.nodes if node < 1024}))
    if not said and before is not None:
        said = before.bound_numa
    container = _container(request, resource, qos, amount, before)
    others = tuple(one for one in before.containers if one.name != container.name) if before is not None else ()
    pod = Pod(
        uid=request.pod_uid,
        namespace=request.pod_namespace,
        name=request.pod_name,
        qos=qos,
        containers=(*others, container) if container.sidecar or not others else (container, *others),
        annotations=annotations,
        labels=labels,
        priority=0 if before is None else before.priority,
        enhancements=wants,
        bound_numa=hint if wants.numa_binding and hint else said,
        problems=(*problems, *unbound),
    )
    return Ask(pod, container, resource, amount, hint if wants.numa_binding else ())


def quantity(request: Any, resource: str, qos: QoSLevel) -> float:
    """Cores or bytes. Raises Unusable where there is not just one number, or it is of another resource."""
    listed: dict[str, float] = dict(request.resource_requests)
    if len(listed) != 1:
        raise Unusable(f"resource_requests has {len(listed)} entries; it has just the one that is asked for")
    ((key, value),) = listed.items()
    if key not in _KEYS[resource]:
        other = f", it is of {NET_BANDWIDTH}" if key == NET_BANDWIDTH else ""
        raise Unusable(
            f"resource_requests[{key:.80}] is not for the plugin of {resource}{other}; it takes {_KEYS[resource]}"
        )
    if not math.isfinite(value) or not 0 <= value <= _MOST:
        raise Unusable(f"resource_requests[{key:.80}] is {value!r:.40}; it is a number from 0 on")
    thousandths = resource == CPU and (key == RECLAIMED_CPU or qos is QoSLevel.RECLAIMED)
    return value / 1000 if thousandths else value


def _container(request: Any, resource: str, qos: QoSLevel, amount: float, before: Pod | None) -> Container:
    name = request.container_name
    known = next((one for one in before.containers if one.name == name), None) if before is not None else None
    if known is None:
        # Not a path yet: nothing is written to it, it only tells containers apart.
        known = Container(
            name=name, cgroup=f"{request.pod_uid}/{name}", sidecar=request.container_type == plugin.SIDECAR
        )
    if resource == CPU:
        field = "reclaimed_cpu_cores" if qos is QoSLevel.RECLAIMED else "cpu_request_cores"
        return msgspec.structs.replace(known, **{field: amount})
    field = "reclaimed_memory_bytes" if qos is QoSLevel.RECLAIMED else "memory_request_bytes"
    return msgspec.structs.replace(known, **{field: int(amount)})
