"""How far a node's requests may exceed what it has: Katalyst's overcommit-aware plugin (realtime advisor).

    ratio = ((allocatable x target - used) / load + requested) / allocatable, at least 1
    load  = used / requested of the pods that are there, at most 1 and at least what new pods are taken to use

The static ratios of the Node, set by whoever runs the cluster, are upper bounds; without one nothing is overcommitted.
A pod that is not measured is taken to use all that it requests. Katalyst takes it to use nothing, so that a node whose
metrics fail would be overcommitted the most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from agent.config.overcommit import OvercommitConfig
from api.knobs import Verdict
from api.node_advice import Overcommit
from api.pods import Pod

GIB = 1 << 30
_PREFIX = "katalyst.kubewharf.io/"
CPU_RATIO_KEY = f"{_PREFIX}cpu_overcommit_ratio"
MEMORY_RATIO_KEY = f"{_PREFIX}memory_overcommit_ratio"


class PodLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One pod: what it requests and what it uses; None where nothing is requested or nothing is measured."""

    pod: str
    """`namespace/name`."""
    cpu_request_cores: float | None = None
    cpu_used_cores: float | None = None
    """The largest of use, load1 and load5."""
    memory_request_bytes: float | None = None
    memory_used_bytes: float | None = None
    """Resident."""


class _Load(msgspec.Struct, frozen=True, kw_only=True):
    """All pods together, of one resource; `used` is None where nothing can be said of some pod."""

    requested: float
    used: float | None


def overcommit(
    pods: Sequence[PodLoad],
    allocatable_cores: float | None,
    allocatable_bytes: float | None,
    static: Mapping[str, str],
    config: OvercommitConfig,
) -> Overcommit:
    """Ratios of CPU and memory. `static` is the Node's annotations: an absent or unreadable ratio there is 1."""
    cpu = _sum([(pod.cpu_request_cores, pod.cpu_used_cores) for pod in pods])
    memory = _sum([(pod.memory_request_bytes, pod.memory_used_bytes) for pod in pods])
    found_cpu = _ratio_of(cpu, allocatable_cores, config.target_cpu, config.estimated_cpu)
    found_memory = _ratio_of(memory, allocatable_bytes, config.target_memory, config.estimated_memory)
    most_cpu, most_memory = _static(static, CPU_RATIO_KEY), _static(static, MEMORY_RATIO_KEY)
    text = (
        f"{_told('CPU', cpu, allocatable_cores, found_cpu, most_cpu, ' cores')}"
        f" {_told('Memory', memory, allocatable_bytes, found_memory, most_memory, ' GiB')}"
    )
    verdict = Verdict(
        rule="overcommit_realtime",
        text=text,
        threshold=config.target_cpu,
        inputs={
            "cpu_requested_cores": cpu.requested,
            "cpu_used_cores": cpu.used,
            "cpu_allocatable_cores": allocatable_cores,
            "cpu_static_ratio": most_cpu,
            "memory_requested_bytes": memory.requested,
            "memory_used_bytes": memory.used,
            "memory_allocatable_bytes": allocatable_bytes,
            "memory_static_ratio": most_memory,
        },
    )
    return Overcommit(cpu_ratio=min(found_cpu, most_cpu), memory_ratio=min(found_memory, most_memory), verdict=verdict)


def ratio(allocatable: float, requested: float, used: float, target: float, estimated: float) -> float:
    """Katalyst's formula; 1 where nothing is requested or nothing is there."""
    if requested <= 0 or allocatable <= 0:
        return 1.0
    load = max(min(used / requested, 1.0), estimated)
    return max(((allocatable * target - used) / load + requested) / allocatable, 1.0)


def cnr_annotations(found: Overcommit, cpu_manager: str, memory_manager: str, pods: Sequence[Pod]) -> dict[str, str]:
    """What goes to the CNR's metadata; the managers are the kubelet's policies (`static`, `None`)."""
    pinned = 0 if cpu_manager.lower() == "none" else sum(guaranteed_cpus(pod) for pod in pods)
    return {
        CPU_RATIO_KEY: f"{found.cpu_ratio:.2f}",
        MEMORY_RATIO_KEY: f"{found.memory_ratio:.2f}",
        f"{_PREFIX}overcommit_cpu_manager": cpu_manager,
        f"{_PREFIX}overcommit_memory_manager": memory_manager,
        f"{_PREFIX}guaranteed_cpus": str(pinned),
    }


def guaranteed_cpus(pod: Pod) -> int:
    """CPUs that the kubelet's static policy pins for a pod: whole-numbered requests of a Guaranteed one."""
    for container in pod.containers:
        limits = (container.cpu_limit_cores, container.memory_limit_bytes)
        requests = (container.cpu_request_cores, container.memory_request_bytes)
        if None in limits or limits != requests:
            return 0
    requested = [container.cpu_request_cores or 0.0 for container in pod.containers]
    return sum(int(cores) for cores in requested if cores == int(cores))


def _sum(pods: Sequence[tuple[float | None, float | None]]) -> _Load:
    used: float | None = 0.0
    for request, measured in pods:
        taken = request if measured is None else measured
        used = None if used is None or taken is None else used + taken
    return _Load(requested=sum(request or 0.0 for request, _ in pods), used=used)


def _ratio_of(load: _Load, allocatable: float | None, target: float, estimated: float) -> float:
    if allocatable is None or load.used is None:
        return 1.0
    return ratio(allocatable, load.requested, load.used, target, estimated)


def _static(node: Mapping[str, str], key: str) -> float:
    try:
        value = float(node.get(key, "1"))
    except ValueError:
        return 1.0
    return value if 1.0 <= value < float("inf") else 1.0


def _told(name: str, load: _Load, allocatable: float | None, found: float, most: float, unit: str) -> str:
    if allocatable is None or load.used is None:
        return f"{name}: what is there or what is used is not known, so nothing is overcommitted."
    scale = GIB if unit == " GiB" else 1
    used, requested, there = (f"{value / scale:.4g}" for value in (load.used, load.requested, allocatable))
    text = f"{name}: {used} used of {requested} requested on {there}{unit}: {min(found, most):.2f}"
    return f"{text}, bounded by the node's {most:.2f}." if most < found else f"{text}."
