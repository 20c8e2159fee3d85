"""Requests Koordinator's memory QoS limits for containers whose QoS level is configured. Pure.
memory.min = request x min %, memory.low = request x low %,
memory.high = request + (limit - request) x throttling %, in whole pages; without a limit, the memory of the node.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.config.qrm import MemoryQosLevel
from agent.qrm.knobs.notation import MAX, PAGE_BYTES
from api.advice import KnobRequest
from api.knobs import Knob, Reason
from api.pod import Container
from api.qos import QoSLevel
from api.snapshot import Snapshot


def memory_qos_requests(snapshot: Snapshot, levels: Mapping[QoSLevel, MemoryQosLevel]) -> tuple[KnobRequest, ...]:
    """Koordinator's memory QoS, of every container with a request whose level is configured."""
    node_bytes = snapshot.node.memory_total_bytes
    wishes = []
    for pod in snapshot.pods:
        level = levels.get(pod.qos)
        for container in pod.containers if level is not None else ():
            wishes += _container_requests(container, level, node_bytes) if level is not None else []
    return tuple(wishes)


def _container_requests(container: Container, level: MemoryQosLevel, node_bytes: int | None) -> list[KnobRequest]:
    request = container.reclaimed_memory_bytes or container.memory_request_bytes
    if not request:
        return []
    found = []
    for knob, percent in ((Knob.MEMORY_MIN, level.min_percent), (Knob.MEMORY_LOW, level.low_percent)):
        if percent > 0:
            size_bytes = _page_floor(request * percent / 100)
            text = f"{knob.value} of {size_bytes} bytes: {percent:g} % of the request of {request}."
            found.append(
                _knob_request(container, knob, str(size_bytes), text, {"request_bytes": request, "percent": percent})
            )
    limit = container.memory_limit_bytes or node_bytes
    if level.throttling_percent > 0 and limit is not None:
        high = _page_floor(request + (limit - request) * level.throttling_percent / 100)
        # At the limit or above it could never be reached.
        value = MAX if high >= limit else str(high)
        text = f"memory.high of {value}: {level.throttling_percent:g} % of the way from the request of {request} to {limit}."
        inputs = {"request_bytes": request, "limit_bytes": limit, "percent": level.throttling_percent}
        found.append(_knob_request(container, Knob.MEMORY_HIGH, value, text, inputs))
    return found


def _page_floor(size_bytes: float) -> int:
    return int(size_bytes) // PAGE_BYTES * PAGE_BYTES


def _knob_request(container: Container, knob: Knob, value: str, text: str, inputs: Mapping[str, float]) -> KnobRequest:
    verdict = Reason(rule="memory_qos", text=text, inputs=inputs)
    return KnobRequest(cgroup=container.cgroup, knob=knob, value=value, reason=verdict)
