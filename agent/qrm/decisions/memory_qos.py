"""Requests Koordinator's memory QoS limits for containers whose QoS level is configured. Pure.
memory.min = request x min %, memory.low = request x low %,
memory.high = request + (limit - request) x throttling %, in whole pages; without a limit, the memory of the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent.config.qrm import MemoryQosLevel
from agent.qrm.knobs.notation import MAX, PAGE_BYTES
from api.advice import KnobRequest
from api.knobs import Knob, Reason
from api.pod import Container
from api.qos import QoSLevel
from api.snapshot import Snapshot


def memory_qos_requests(snapshot: Snapshot, levels: Mapping[QoSLevel, MemoryQosLevel]) -> tuple[KnobRequest, ...]:
    """Return the memory limits of every container that requests memory and whose QoS level is configured."""
    return tuple(
        KnobRequest(cgroup=container.cgroup, knob=knob, value=value, reason=reason)
        for pod in snapshot.pods
        if pod.qos in levels
        for container in pod.containers
        for knob, value, reason in _limits(container, levels[pod.qos], snapshot.node.memory_total_bytes)
    )


def _limits(container: Container, level: MemoryQosLevel, node_bytes: int | None) -> Iterator[tuple[Knob, str, Reason]]:
    request = container.reclaimed_memory_bytes or container.memory_request_bytes
    if not request:
        return
    for knob, percent in ((Knob.MEMORY_MIN, level.min_percent), (Knob.MEMORY_LOW, level.low_percent)):
        if percent > 0:
            size_bytes = _page_floor(request * percent / 100)
            text = f"{knob.value} of {size_bytes} bytes: {percent:g} % of the request of {request}."
            yield knob, str(size_bytes), _reason(text, {"request_bytes": request, "percent": percent})
    limit, percent = container.memory_limit_bytes or node_bytes, level.throttling_percent
    if percent > 0 and limit is not None:
        high = _page_floor(request + (limit - request) * percent / 100)
        # At the limit or above, memory.high could never be reached.
        value = MAX if high >= limit else str(high)
        text = f"memory.high of {value}: {percent:g} % of the way from the request of {request} to {limit}."
        inputs = {"request_bytes": request, "limit_bytes": limit, "percent": percent}
        yield Knob.MEMORY_HIGH, value, _reason(text, inputs)


def _page_floor(size_bytes: float) -> int:
    return int(size_bytes) // PAGE_BYTES * PAGE_BYTES


def _reason(text: str, inputs: Mapping[str, float]) -> Reason:
    return Reason(rule="memory_qos", text=text, inputs=inputs)
