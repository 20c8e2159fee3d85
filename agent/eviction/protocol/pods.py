"""A pod of ours as the core/v1 Pod that eviction plugins are shown. Pure.

It has what the agent knows: names, labels, annotations, priority, requests and limits. Resource names are Kubernetes' own,
and Katalyst's for what reclaimed pods ask for.
"""

from __future__ import annotations

from typing import Any

from api.pods import NET_BANDWIDTH, RECLAIMED_CPU, RECLAIMED_MEMORY, Container, Pod
from api.proto import core_v1_pb2 as core

CPU, MEMORY = "cpu", "memory"


def to_wire(pod: Pod) -> Any:
    """The message; a pod that is listed is taken for a running one."""
    made = core.Pod()
    made.metadata.name, made.metadata.namespace, made.metadata.uid = pod.name, pod.namespace, pod.uid
    made.metadata.labels.update(pod.labels)
    made.metadata.annotations.update(pod.annotations)
    made.spec.priority = pod.priority
    made.status.phase = "Running"
    for container in pod.containers:
        wire = made.spec.containers.add(name=container.name)
        for name, text in _requests(container).items():
            wire.resources.requests[name].string = text
        for name, text in _limits(container).items():
            wire.resources.limits[name].string = text
    return made


def _requests(container: Container) -> dict[str, str]:
    amounts = {
        CPU: _milli(container.cpu_request_cores),
        MEMORY: _whole(container.memory_request_bytes),
        RECLAIMED_CPU: _whole(None if container.reclaimed_cpu_cores is None else container.reclaimed_cpu_cores * 1000),
        RECLAIMED_MEMORY: _whole(container.reclaimed_memory_bytes),
        NET_BANDWIDTH: _whole(container.net_bandwidth_mbit),
    }
    return {name: text for name, text in amounts.items() if text is not None}


def _limits(container: Container) -> dict[str, str]:
    amounts = {CPU: _milli(container.cpu_limit_cores), MEMORY: _whole(container.memory_limit_bytes)}
    return {name: text for name, text in amounts.items() if text is not None}


def _milli(cores: float | None) -> str | None:
    if cores is None:
        return None
    milli = round(cores * 1000)
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"


def _whole(amount: float | None) -> str | None:
    return None if amount is None else str(round(amount))
