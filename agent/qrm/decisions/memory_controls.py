"""Decides memory limits by Koordinator's memory QoS, and `oom_score_adj` by Katalyst's `oom_priority`. Pure.
memory.min = request x min %, memory.low = request x low %,
memory.high = request + (limit - request) x throttling %, in whole pages; without a limit, the memory of the node.
Katalyst passes OOM priorities to a BPF OOM killer; `oom_score_adj` (mm/oom_kill.c, oom_badness()) works on every
kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent.config.qrm import MemoryQosLevel
from agent.qrm.knobs.notation import MAX, PAGE_BYTES
from api.advice import KnobRequest
from api.annotations import OOM_PRIORITY_NEVER
from api.decision import Decision
from api.knobs import Knob, Reason
from api.pod import Container
from api.qos import QoSLevel
from api.quantity import format_bytes
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
            text = (
                f"{knob.value} is {format_bytes(size_bytes)}: {percent:g} % of the request of {format_bytes(request)}."
            )
            yield knob, str(size_bytes), _reason(text, {"request_bytes": request, "percent": percent})
    limit, percent = container.memory_limit_bytes or node_bytes, level.throttling_percent
    if percent > 0 and limit is not None:
        high = _page_floor(request + (limit - request) * percent / 100)
        # At the limit or above, memory.high could never be reached.
        value = MAX if high >= limit else str(high)
        text = (
            f"memory.high is {value if value == MAX else format_bytes(high)}: {percent:g} % of the way from the request of "
            f"{format_bytes(request)} to the limit of {format_bytes(limit)}."
        )
        inputs = {"request_bytes": request, "limit_bytes": limit, "percent": percent}
        yield Knob.MEMORY_HIGH, value, _reason(text, inputs)


def _page_floor(size_bytes: float) -> int:
    return int(size_bytes) // PAGE_BYTES * PAGE_BYTES


def _reason(text: str, inputs: Mapping[str, float]) -> Reason:
    return Reason(rule="memory_qos", text=text, inputs=inputs)


NEVER_KILLED = -1000
"""OOM_SCORE_ADJ_MIN (include/uapi/linux/oom.h): the OOM killer never selects such a process."""
RECLAIMED_BASE_SCORE, ONLINE_SCORE_STEP = 900, 3


def oom_score_adj(priority: int) -> int:
    """Return `oom_score_adj` for an OOM priority: the lower the priority, the higher the score. 901 to 1000 for
    reclaimed pods (priority below 0), 0 to -897 for online and system pods, -1000 for processes that must never be
    killed."""
    if priority >= OOM_PRIORITY_NEVER:
        return NEVER_KILLED
    return RECLAIMED_BASE_SCORE - priority if priority < 0 else -ONLINE_SCORE_STEP * priority


def decide_oom_scores(snapshot: Snapshot) -> Iterator[Decision]:
    """Yield the decision for every listed container that has a cgroup."""
    for pod in snapshot.pods:
        priority = pod.enhancements.oom_priority
        value = oom_score_adj(priority)
        effect = (
            "the OOM killer never selects them"
            if value == NEVER_KILLED
            else "the OOM killer selects the highest score first"
        )
        text = f"oom_score_adj of {pod.qos.value} with oom_priority {priority} is {value}: {effect}."
        reason = Reason(rule="oom_priority", text=text, inputs={"oom_priority": priority})
        for container in pod.containers:
            sample = snapshot.cgroups.get(container.cgroup)
            if sample is not None:
                yield Decision(
                    cgroup=container.cgroup,
                    cgroup_id=sample.id,
                    pod=pod.key,
                    knob=Knob.OOM_SCORE_ADJ,
                    value=str(value),
                    reason=reason,
                )
