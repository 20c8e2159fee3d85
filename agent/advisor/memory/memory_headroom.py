"""Computes the memory headroom for reclaimed pods: Katalyst's policies none, canonical and numa-aware.
`canonical` subtracts the estimated need of online pods; `numa_aware` counts free and droppable memory per NUMA
node. Headroom is None if an input is missing, and does not grow while a container is not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import NamedTuple

from agent.advisor.memory.memory_inputs import (
    InputMissing,
    MemoryInputs,
    format_bytes,
    format_count,
    fresh_sample,
    node_meminfo,
    node_memory_bytes,
    numa_meminfo,
    read_stat,
    reclaimable_numa_nodes,
    reclaimed_bytes_by_numa,
    used_bytes,
    watermark_scale_factor,
)
from agent.config.memory import MemoryConfig
from agent.config.units import GIB
from api.knobs import Reason
from api.measurements import UNLIMITED
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import CgroupSample


class MemoryNeed(NamedTuple):
    """What all containers of online and system pods need, in bytes."""

    bytes: float
    used: float
    """Of it: what shared and dedicated containers use by measurement."""
    system_cache: float
    """Page cache of system pods."""
    assumed: int
    """Containers that are there, or may be, and are not measured."""


def estimate_memory_need(inputs: MemoryInputs, config: MemoryConfig) -> MemoryNeed:
    """The estimate of the node. Raises Unknown."""
    total = node_memory_bytes(inputs.snapshot)
    estimate = used = system_cache = 0.0
    assumed = 0
    for pod in inputs.snapshot.pods:
        if pod.qos is QoSLevel.RECLAIMED:
            continue
        for container in pod.containers:
            sample = fresh_sample(inputs.snapshot, container.cgroup, config.stale_s)
            measured = None if sample is None else _measured_bytes(pod, sample)
            value = estimate_container_bytes(inputs, pod, container, measured, config)
            if value is None:
                # One that is not there will need what it asked for; one that is may use more, and so may any that is hidden.
                assumed += container.cgroup in inputs.snapshot.cgroups or "/" not in inputs.snapshot.cgroups
                value = _requested_bytes(container, config, total)
            estimate += value
            if sample is not None and pod.qos.online:
                used += used_bytes(sample) or 0
            elif sample is not None:
                system_cache += read_stat(sample, "file") or 0
    return MemoryNeed(estimate, used, system_cache, assumed)


def estimate_container_bytes(
    inputs: MemoryInputs, pod: Pod, container: Container, measured: int | None, config: MemoryConfig
) -> float | None:
    """Estimated need of one container that is not reclaimed; None where it should be measured and is not. Raises Unknown."""
    lends = inputs.lends(pod)
    if pod.qos is QoSLevel.DEDICATED and pod.enhancements.numa_exclusive and not lends:
        return 0.0 if container.sidecar else _exclusive_numa_bytes(inputs, pod, config)
    if not lends or container.cgroup in inputs.ramping:
        return _requested_bytes(container, config, node_memory_bytes(inputs.snapshot))
    if measured is None:
        return None
    return measured * config.usage_margin if pod.qos.online else float(measured)


def _measured_bytes(pod: Pod, sample: CgroupSample) -> int | None:
    return used_bytes(sample) if pod.qos.online else read_stat(sample, "anon")


def _requested_bytes(container: Container, config: MemoryConfig, total: int) -> float:
    return float(container.memory_request_bytes or config.unknown_need_bytes(total))


def _exclusive_numa_bytes(inputs: MemoryInputs, pod: Pod, config: MemoryConfig) -> float:
    if not pod.bound_numa:
        raise InputMissing(f"the NUMA nodes that {pod.key} has for itself")
    return float(sum(numa_meminfo(inputs.snapshot, numa, "MemTotal", config.stale_s) for numa in pod.bound_numa))


_WATERMARK_SCALE = 10_000
"""vm.watermark_scale_factor counts in ten-thousandths (mm/page_alloc.c)."""
Inputs = dict[str, float | int | str | None]


class MemoryHeadroom(NamedTuple):
    """What can be promised, in bytes; None where inputs are missing."""

    bytes: float | None
    by_numa: Mapping[int, float]
    reason: Reason
    assumed: int = 0
    """Containers of which nothing is known."""


def compute_memory_headroom(inputs: MemoryInputs, config: MemoryConfig, before: float | None) -> MemoryHeadroom:
    """The configured policy's answer; `before` is the one of the round before."""
    if config.policy == "none" or not inputs.enable_reclaim:
        rule = "memory_headroom_none" if config.policy == "none" else "memory_reclaim_disabled"
        why = "The memory policy is none" if config.policy == "none" else "Reclaiming is switched off"
        zero = dict.fromkeys(inputs.snapshot.topology.numa_nodes, 0.0)
        return MemoryHeadroom(0.0, zero, Reason(rule=rule, text=f"{why}: no memory is promised."))
    policy = canonical_headroom if config.policy == "canonical" else numa_aware_headroom
    try:
        found = policy(inputs, config)
    except InputMissing as missing:
        text = f"Not known: {missing}. No memory is promised."
        return MemoryHeadroom(
            None, {}, Reason(rule="memory_inputs_missing", text=text, inputs={"missing": str(missing)})
        )
    if not found.assumed or before is None or found.bytes is None or found.bytes <= before:
        return found
    part = before / found.bytes
    text = f"{format_count(found.assumed, 'container')} not measured: no more than the {format_bytes(before)} of before is promised."
    verdict = Reason(rule="memory_headroom_frozen", text=text, threshold=before, inputs=found.reason.inputs)
    return MemoryHeadroom(before, {numa: size * part for numa, size in found.by_numa.items()}, verdict, found.assumed)


def canonical_headroom(situation: MemoryInputs, config: MemoryConfig) -> MemoryHeadroom:
    """What can be allocated less the online pods' estimated need. Raises Unknown."""
    total = node_memory_bytes(situation.snapshot)
    most = total - config.reserve_bytes(total)
    need = estimate_memory_need(situation, config)
    inputs: Inputs = {
        "total_bytes": total,
        "allocatable_bytes": most,
        "need_bytes": round(need.bytes),
        "unmeasured_containers": need.assumed,
    }
    buffer = 0.0
    if config.util_based.enable:
        buffer = _free_buffer(situation, config, need, inputs)
    size = min(max(most - need.bytes, 0.0) + buffer, float(most))
    text = f"Of {format_bytes(total)} {format_bytes(most)} can be allocated and online pods need {format_bytes(need.bytes)}"
    text += f", with a buffer of {format_bytes(buffer)}" if config.util_based.enable else ""
    by_numa: dict[int, float] = {}
    try:
        by_numa = _spread_by_numa(situation, config, size)
    except InputMissing as missing:
        inputs["by_numa_missing"] = str(missing)
    verdict = Reason(
        rule="memory_headroom_canonical",
        text=f"{text}: {format_bytes(size)} are promised.",
        threshold=most,
        inputs=inputs,
    )
    return MemoryHeadroom(size, by_numa, verdict, need.assumed)


def _free_buffer(situation: MemoryInputs, config: MemoryConfig, need: MemoryNeed, inputs: Inputs) -> float:
    """What is promised of memory that is free although it is estimated to be needed. Raises Unknown."""
    snapshot, util = situation.snapshot, config.util_based
    total, free = node_memory_bytes(snapshot), node_meminfo(snapshot, "MemFree")
    # Twice the watermark, so that kswapd is woken less often.
    system = free * util.free_based_ratio - total * 2 * watermark_scale_factor(snapshot) / _WATERMARK_SCALE
    extra = need.bytes - need.used + need.system_cache
    buffer = max(system - extra, 0.0)
    inputs |= {"free_bytes": free, "system_buffer_bytes": round(system), "extra_bytes": round(extra)}
    per_gib = len(snapshot.topology.cpus) / (total / GIB)
    if util.cache_based_ratio and util.cpu_memory_ratio_low < per_gib < util.cpu_memory_ratio_high:
        spare = sum(node_meminfo(snapshot, name) for name in ("Buffers", "Cached", "SReclaimable"))
        # As in free(1): what is neither free nor used is cache. It counts where anything is used at all.
        cache = spare * util.cache_based_ratio if total > free + spare else 0.0
        inputs |= {"cache_buffer_bytes": round(cache)}
        buffer = max(buffer, cache)
    return buffer + config.static_bytes(total)


def _spread_by_numa(inputs: MemoryInputs, config: MemoryConfig, size: float) -> dict[int, float]:
    """The promise by NUMA node, in proportion to what is free there, or could be, or is used by reclaimed pods already.

    All of it on the only node. Raises Unknown.
    """
    snapshot, numa_nodes = inputs.snapshot, inputs.snapshot.topology.numa_nodes
    if len(numa_nodes) == 1:
        return {numa_nodes[0]: size}
    weights = dict.fromkeys(numa_nodes, 0.0)
    used = reclaimed_bytes_by_numa(snapshot, inputs.root.path, inputs.root.members, config.stale_s)
    for numa in reclaimable_numa_nodes(inputs):
        cache = numa_meminfo(snapshot, numa, "Inactive(file)", config.stale_s) * config.util_based.cache_based_ratio
        weights[numa] = numa_meminfo(snapshot, numa, "MemFree", config.stale_s) + cache + used.get(numa, 0)
    whole = sum(weights.values())
    return {numa: size * weight / whole for numa, weight in weights.items()} if whole else {}


def numa_aware_headroom(situation: MemoryInputs, config: MemoryConfig) -> MemoryHeadroom:
    """What is free on the NUMA nodes of which something may be lent, and what reclaimed pods requested. Raises Unknown."""
    snapshot, util = situation.snapshot, config.util_based
    open_nodes = reclaimable_numa_nodes(situation)
    free = {
        numa: numa_meminfo(snapshot, numa, "MemFree", config.stale_s)
        + numa_meminfo(snapshot, numa, "Inactive(file)", config.stale_s) * util.cache_based_ratio
        for numa in open_nodes
    }
    reclaimable = sum(free.values())
    total = sum(numa_meminfo(snapshot, numa, "MemTotal", config.stale_s) for numa in open_nodes)
    watermark = total * watermark_scale_factor(snapshot) / _WATERMARK_SCALE
    count = len(snapshot.topology.numa_nodes)
    reserve = config.reserve_bytes(node_memory_bytes(snapshot)) * len(open_nodes) / count
    kept = _online_requests(situation) * util.request_based_ratio
    available = max(reclaimable - watermark - reserve - kept, 0.0)
    by_numa = dict.fromkeys(snapshot.topology.numa_nodes, 0.0)
    for numa, size in free.items():
        by_numa[numa] = size * available / reclaimable if reclaimable else 0.0
    requested = _add_requests(situation, open_nodes, by_numa)
    caps = _numa_caps(situation, config, open_nodes)
    by_numa = {numa: min(size, caps.get(numa, inf)) for numa, size in by_numa.items()}
    size = sum(by_numa.values())
    text = (
        f"{format_bytes(reclaimable)} are free or can be on {len(open_nodes)} of {count} NUMA nodes,"
        f" {format_bytes(watermark + reserve + kept)} of it are kept, and reclaimed pods requested {format_bytes(requested)}:"
        f" {format_bytes(size)} are promised."
    )
    inputs: Inputs = {
        "reclaimable_bytes": round(reclaimable),
        "watermark_bytes": round(watermark),
        "reserve_bytes": round(reserve),
        "online_requests_kept_bytes": round(kept),
        "reclaimed_requests_bytes": round(requested),
        "cap_bytes": round(sum(caps.values())) if caps and inf not in caps.values() else None,
    }
    return MemoryHeadroom(
        size, by_numa, Reason(rule="memory_headroom_numa_aware", text=text, threshold=watermark, inputs=inputs)
    )


def _online_requests(inputs: MemoryInputs) -> int:
    """What the pods on these nodes requested, those apart that have nodes for themselves which are left out."""
    return sum(
        container.memory_request_bytes or 0
        for pod in inputs.snapshot.pods
        if pod.qos is not QoSLevel.RECLAIMED and (not pod.enhancements.numa_exclusive or inputs.lends(pod))
        for container in pod.containers
    )


def _reclaimed_containers(inputs: MemoryInputs) -> Iterator[tuple[Pod, Container, CgroupSample]]:
    """Reclaimed containers that are there: what others requested is still free."""
    for pod in inputs.snapshot.pods:
        if pod.qos is QoSLevel.RECLAIMED:
            for container in pod.containers:
                sample = inputs.snapshot.cgroups.get(container.cgroup)
                if sample is not None:
                    yield pod, container, sample


def _add_requests(inputs: MemoryInputs, open_nodes: tuple[int, ...], by_numa: dict[int, float]) -> float:
    """Requests of reclaimed containers, on the nodes they are bound to or evenly on all; their sum."""
    whole = 0.0
    for pod, container, _ in _reclaimed_containers(inputs):
        size = container.reclaimed_memory_bytes or container.memory_request_bytes or 0
        nodes = [numa for numa in pod.bound_numa if numa in by_numa] or open_nodes
        for numa in nodes:
            by_numa[numa] += size / len(nodes)
        whole += size if nodes else 0
    return whole


def _numa_caps(inputs: MemoryInputs, config: MemoryConfig, open_nodes: tuple[int, ...]) -> dict[int, float]:
    """By NUMA node: so many times the reclaim root's limit is promised at most. Raises Unknown."""
    rate = config.util_based.max_oversold_rate
    if not rate:
        return {}
    bound = {numa for pod, _, _ in _reclaimed_containers(inputs) for numa in pod.bound_numa}
    caps = {
        numa: _memory_limit(inputs, inputs.numa_roots[numa]) * rate for numa in bound if inputs.numa_roots.get(numa)
    }
    others = [numa for numa in open_nodes if numa not in caps]
    if others and inputs.root.path:
        share = _memory_limit(inputs, inputs.root.path) * rate / len(others)
        caps.update(dict.fromkeys(others, share))
    return caps


def _memory_limit(inputs: MemoryInputs, path: str) -> float:
    sample = inputs.snapshot.cgroups.get(path)
    limit = None if sample is None else sample.limits.memory_max_bytes
    if limit is None:
        raise InputMissing(f"the memory limit of {path}")
    return inf if limit >= UNLIMITED else float(limit)
