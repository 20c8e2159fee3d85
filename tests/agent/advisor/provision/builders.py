"""Builders of pods, demands and inputs for CPU provision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.advisor.advisor_state import ContainerDemand, ProvisionInputs
from api.advice import CpuAdvice, PoolSize, RegionAdvice
from api.cpu import Topology
from api.pod import Pod
from api.qos import Enhancements, QoSLevel
from tests.builders import pods
from tests.builders.nodes import S, topology
from tests.builders.snapshots import snapshot


def shared(name: str, request: float | None = None, limit: float | None = None, **more: Any) -> Pod:
    return _pod(name, QoSLevel.SHARED, request, limit, **more)


def dedicated(name: str, request: float | None = None, limit: float | None = None, **more: Any) -> Pod:
    return _pod(name, QoSLevel.DEDICATED, request, request if limit is None else limit, **more)


def _pod(
    name: str,
    qos: QoSLevel,
    request: float | None,
    limit: float | None,
    *,
    numa: tuple[int, ...] = (),
    exclusive: bool = False,
    pool: str = "",
) -> Pod:
    enhancements = Enhancements(numa_binding=bool(numa), numa_exclusive=exclusive, cpuset_pool=pool)
    return pods.pod(
        name, qos, uid=name, cpu_request=request, cpu_limit=limit, enhancements=enhancements, bound_numa=numa
    )


def steady(usage: float | None, *, load1: float | None = None, ramping: bool = False) -> ContainerDemand:
    """Return the demand of a container that was measured for a while."""
    return ContainerDemand(
        cgroup_id=100, first_seen_ns=0, last_seen_ns=0, ramping=ramping, usage_cores=usage, load1=load1, load5=load1
    )


def situation(
    pods: Sequence[Pod],
    *,
    cpus: int | Topology = 48,
    at_s: float = 1000.0,
    usage: Mapping[str, float | None] | None = None,
    **more: Any,
) -> ProvisionInputs:
    """Return provision inputs; a pod that is not in `usage` counts with its request."""
    needs = {f"/{name}": steady(cores) for name, cores in (usage or {}).items()}
    nodes = topology(cpus) if isinstance(cpus, int) else cpus
    return ProvisionInputs(
        now_ns=round(at_s * S), snapshot=snapshot(at_s, pods, machine=nodes), **({"needs": needs} | more)
    )


def cpus_of(advice: CpuAdvice) -> dict[str | tuple[str, int], int]:
    """Return sizes by pool, or by pool and NUMA node for bound pools."""
    return {(size.pool if size.numa < 0 else (size.pool, size.numa)): size.cpus for size in advice.sizes}


def reclaim_pool(advice: CpuAdvice, numa: int = -1) -> PoolSize:
    return next(size for size in advice.sizes if size.pool == "reclaim" and size.numa == numa)


def region(advice: CpuAdvice, name: str) -> RegionAdvice:
    return next(item for item in advice.regions if item.region.name == name)
