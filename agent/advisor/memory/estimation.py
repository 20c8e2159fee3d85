"""How much memory online containers need: Katalyst's canonical estimate.

A shared or dedicated container needs 1.1 times its anonymous memory and page cache, one of system_cores its anonymous
memory. One that lends nothing, is ramping up or is not measured is taken at its request, at a fallback where it has none. A
pod that has NUMA nodes for itself and does not lend them needs all of their memory.
"""

from __future__ import annotations

from typing import NamedTuple

from agent.advisor.memory.situation import Situation, Unknown
from agent.advisor.memory.stats import node_total, numa_size, sample_of, stat, used_bytes
from agent.config.memory import MemoryConfig
from api.pods import Container, Pod
from api.qos import QoSLevel
from api.samples import CgroupSample


class Need(NamedTuple):
    """What all containers of online and system pods need, in bytes."""

    bytes: float
    used: float
    """Of it: what shared and dedicated containers use by measurement."""
    system_cache: float
    """Page cache of system pods."""
    assumed: int
    """Containers that are there, or may be, and are not measured."""


def need(situation: Situation, config: MemoryConfig) -> Need:
    """The estimate of the node. Raises Unknown."""
    total = node_total(situation.snapshot)
    estimate = used = system_cache = 0.0
    assumed = 0
    for pod in situation.snapshot.pods:
        if pod.qos is QoSLevel.RECLAIMED:
            continue
        for container in pod.containers:
            sample = sample_of(situation.snapshot, container.cgroup, config.stale_s)
            measured = None if sample is None else _measured(pod, sample)
            value = container_bytes(situation, pod, container, measured, config)
            if value is None:
                # One that is not there will need what it asked for; one that is may use more, and so may any that is hidden.
                assumed += container.cgroup in situation.snapshot.cgroups or "/" not in situation.snapshot.cgroups
                value = _request(container, config, total)
            estimate += value
            if sample is not None and pod.qos.online:
                used += used_bytes(sample) or 0
            elif sample is not None:
                system_cache += stat(sample, "file") or 0
    return Need(estimate, used, system_cache, assumed)


def container_bytes(
    situation: Situation, pod: Pod, container: Container, measured: int | None, config: MemoryConfig
) -> float | None:
    """Estimated need of one container that is not reclaimed; None where it should be measured and is not. Raises Unknown."""
    lends = situation.lends(pod)
    if pod.qos is QoSLevel.DEDICATED and pod.enhancements.numa_exclusive and not lends:
        return 0.0 if container.sidecar else _whole_numa(situation, pod, config)
    if not lends or container.cgroup in situation.ramping:
        return _request(container, config, node_total(situation.snapshot))
    if measured is None:
        return None
    return measured * config.usage_margin if pod.qos.online else float(measured)


def _measured(pod: Pod, sample: CgroupSample) -> int | None:
    return used_bytes(sample) if pod.qos.online else stat(sample, "anon")


def _request(container: Container, config: MemoryConfig, total: int) -> float:
    return float(container.memory_request_bytes or config.unknown_need_bytes(total))


def _whole_numa(situation: Situation, pod: Pod, config: MemoryConfig) -> float:
    if not pod.bound_numa:
        raise Unknown(f"the NUMA nodes that {pod.key} has for itself")
    return float(sum(numa_size(situation.snapshot, numa, "MemTotal", config.stale_s) for numa in pod.bound_numa))
