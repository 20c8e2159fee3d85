"""QRM's memory side beside what the advisor wishes: Koordinator's memory QoS. Pure.

memory.min = request x min %, memory.low = request x low %
memory.high = request + (limit - request) x throttling %, in whole pages; without a limit, what the node has
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.config.qrm_knobs import MemoryQosLevel
from agent.qrm.notation import MAX, PAGE_BYTES
from api.advice import Wish
from api.knobs import Knob, Verdict
from api.pods import Container
from api.qos import QoSLevel
from api.samples import Snapshot


def memory_qos(snapshot: Snapshot, levels: Mapping[QoSLevel, MemoryQosLevel]) -> tuple[Wish, ...]:
    """Koordinator's memory QoS, of every container with a request whose level is configured."""
    node_bytes = snapshot.node.memory_total_bytes
    wishes = []
    for pod in snapshot.pods:
        level = levels.get(pod.qos)
        for container in pod.containers if level is not None else ():
            wishes += _of_container(container, level, node_bytes) if level is not None else []
    return tuple(wishes)


def _of_container(container: Container, level: MemoryQosLevel, node_bytes: int | None) -> list[Wish]:
    request = container.reclaimed_memory_bytes or container.memory_request_bytes
    if not request:
        return []
    found = []
    for knob, percent in ((Knob.MEMORY_MIN, level.min_percent), (Knob.MEMORY_LOW, level.low_percent)):
        if percent > 0:
            size_bytes = _page_floor(request * percent / 100)
            text = f"{knob.value} of {size_bytes} bytes: {percent:g} % of the request of {request}."
            found.append(_wish(container, knob, str(size_bytes), text, {"request_bytes": request, "percent": percent}))
    limit = container.memory_limit_bytes or node_bytes
    if level.throttling_percent > 0 and limit is not None:
        high = _page_floor(request + (limit - request) * level.throttling_percent / 100)
        # At the limit or above it could never be reached.
        value = MAX if high >= limit else str(high)
        text = f"memory.high of {value}: {level.throttling_percent:g} % of the way from the request of {request} to {limit}."
        inputs = {"request_bytes": request, "limit_bytes": limit, "percent": level.throttling_percent}
        found.append(_wish(container, Knob.MEMORY_HIGH, value, text, inputs))
    return found


def _page_floor(size_bytes: float) -> int:
    return int(size_bytes) // PAGE_BYTES * PAGE_BYTES


def _wish(container: Container, knob: Knob, value: str, text: str, inputs: Mapping[str, float]) -> Wish:
    verdict = Verdict(rule="memory_qos", text=text, inputs=inputs)
    return Wish(cgroup=container.cgroup, knob=knob, value=value, verdict=verdict)
