"""Lowers the CPU quota and the memory limit of each reclaimed container to the container's own limits. Pure.
The kubelet ignores limits of extended resources such as `resource.katalyst.kubewharf.io/reclaimed_millicpu`, so that a
reclaimed pod would have none. Koordinator's runtime hook BatchResource writes the same two files
(pkg/koordlet/runtimehooks/hooks/batchresource); Katalyst enforces no such limit. A lower value of a policy stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from agent.qrm.knobs.knob_files import format_quota, quota_ratio
from agent.qrm.knobs.notation import MAX, PAGE_BYTES
from api.advice import KnobRequest
from api.knobs import Knob, Reason
from api.pod import Container
from api.quantity import format_bytes
from api.snapshot import Snapshot, reclaimed_containers
from api.units import MIB

_RULE = "container_limit"
MIN_MEMORY_BYTES = 4 * MIB
"""A smaller memory limit is ignored: every container uses more, so that the kernel would kill it at once. `1` in place of
`1Gi` is the usual cause."""


def enforce_container_limits(requests: Sequence[KnobRequest], snapshot: Snapshot) -> tuple[KnobRequest, ...]:
    """Return the requests with quotas and memory limits of reclaimed containers lowered to the container's own limit,
    followed by a request for every own limit."""
    limits: dict[tuple[str, Knob], KnobRequest] = {
        (request.cgroup, request.knob): request
        for container in reclaimed_containers(snapshot)
        for request in _own_limits(container, len(snapshot.topology.cpus))
    }
    return (*(_lowered(request, limits) for request in requests), *limits.values())


def _own_limits(container: Container, cpus: int) -> Iterator[KnobRequest]:
    cores, size = container.cpu_limit_cores, container.memory_limit_bytes
    if cores and (not cpus or cores < cpus):  # a quota of all CPUs limits nothing, but costs the kernel its accounting
        text = f"The container's CPU limit is {cores:g} cores."
        reason = Reason(rule=_RULE, text=text, threshold=cores, inputs={"limit_cores": cores})
        yield KnobRequest(cgroup=container.cgroup, knob=Knob.QUOTA, value=format_quota(cores), reason=reason)
    if size and size >= MIN_MEMORY_BYTES:
        text = f"The container's memory limit is {format_bytes(size)}."
        reason = Reason(rule=_RULE, text=text, threshold=float(size), inputs={"limit_bytes": size})
        # The kernel counts whole pages, and rounds a limit down (mm/page_counter.c, page_counter_memparse()).
        value = str(max(size // PAGE_BYTES, 1) * PAGE_BYTES)
        yield KnobRequest(cgroup=container.cgroup, knob=Knob.MEMORY_MAX, value=value, reason=reason)


def _lowered(request: KnobRequest, limits: Mapping[tuple[str, Knob], KnobRequest]) -> KnobRequest:
    own = limits.get((request.cgroup, request.knob))
    if own is None or _size(own) >= _size(request):
        return request
    reason = msgspec.structs.replace(
        request.reason,
        text=f"{request.reason.text} {own.reason.text}",
        inputs={**request.reason.inputs, **own.reason.inputs},
    )
    return msgspec.structs.replace(request, value=own.value, reason=reason)


def _size(request: KnobRequest) -> float:
    """Return the value of a quota in cores, or of a memory limit in bytes."""
    if request.knob is Knob.QUOTA:
        return quota_ratio(request.value)
    return float("inf") if request.value == MAX else float(request.value)
