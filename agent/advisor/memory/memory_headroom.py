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
from api.knobs import Reason, ReasonInputs
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.quantity import format_bytes, format_count
from api.snapshot import UNLIMITED, CgroupSample
from api.units import GIB


class MemoryNeed(NamedTuple):
    """Estimated need of all containers of online and system pods, in bytes."""

    bytes: float
    used: float
    """Measured use of shared and dedicated containers, as a part of it."""
    system_cache: float
    """Page cache of system pods."""
    assumed: int
    """Containers that exist, or may exist, and are not measured."""


def estimate_memory_need(inputs: MemoryInputs, config: MemoryConfig) -> MemoryNeed:
    """Return the estimate of the node. Raises InputMissing."""
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
                # A container without a cgroup will need its request; an unmeasured one may already use more.
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
    """Return the estimated need of a container that is not reclaimed; None if it is not measured. Raises InputMissing."""
    reclaimable = inputs.is_reclaimable(pod)
    if pod.qos is QoSLevel.DEDICATED and pod.enhancements.numa_exclusive and not reclaimable:
        return 0.0 if container.sidecar else _exclusive_numa_bytes(inputs, pod, config)
    if not reclaimable or container.cgroup in inputs.ramping:
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
        raise InputMissing(f"the NUMA nodes that {pod.key} uses exclusively")
    return float(sum(numa_meminfo(inputs.snapshot, numa, "MemTotal", config.stale_s) for numa in pod.bound_numa))


_WATERMARK_SCALE = 10_000
"""Unit of vm.watermark_scale_factor: ten-thousandths (mm/page_alloc.c)."""


class MemoryHeadroom(NamedTuple):
    """Memory headroom in bytes; None if inputs are missing."""

    bytes: float | None
    by_numa: Mapping[int, float]
    reason: Reason
    assumed: int = 0
    """Containers that are not measured."""


def compute_memory_headroom(inputs: MemoryInputs, config: MemoryConfig, before: float | None) -> MemoryHeadroom:
    """Return the headroom by the configured policy; `before` is that of the previous cycle."""
    if config.policy == "none" or not inputs.enable_reclaim:
        rule = "memory_headroom_none" if config.policy == "none" else "memory_reclaim_disabled"
        cause = "The memory policy is none" if config.policy == "none" else "Reclaiming is disabled"
        zero = dict.fromkeys(inputs.snapshot.topology.numa_nodes, 0.0)
        return MemoryHeadroom(0.0, zero, Reason(rule=rule, text=f"{cause}: the memory headroom is 0."))
    policy = canonical_headroom if config.policy == "canonical" else numa_aware_headroom
    try:
        headroom = policy(inputs, config)
    except InputMissing as missing:
        text = f"Not known: {missing}. No memory headroom is computed."
        return MemoryHeadroom(
            None, {}, Reason(rule="memory_inputs_missing", text=text, inputs={"missing": str(missing)})
        )
    if not headroom.assumed or before is None or headroom.bytes is None or headroom.bytes <= before:
        return headroom
    ratio = before / headroom.bytes
    text = f"{format_count(headroom.assumed, 'container')} not measured: the memory headroom stays at {format_bytes(before)}."
    reason = Reason(rule="memory_headroom_frozen", text=text, threshold=before, inputs=headroom.reason.inputs)
    return MemoryHeadroom(
        before, {numa: size * ratio for numa, size in headroom.by_numa.items()}, reason, headroom.assumed
    )


def canonical_headroom(inputs: MemoryInputs, config: MemoryConfig) -> MemoryHeadroom:
    """Return allocatable memory less the estimated need of online pods. Raises InputMissing."""
    total = node_memory_bytes(inputs.snapshot)
    allocatable = total - config.reserve_bytes(total)
    need = estimate_memory_need(inputs, config)
    reason_inputs: ReasonInputs = {
        "total_bytes": total,
        "allocatable_bytes": allocatable,
        "need_bytes": round(need.bytes),
        "unmeasured_containers": need.assumed,
    }
    buffer = 0.0
    if config.util_based.enable:
        buffer = _free_buffer(inputs, config, need, reason_inputs)
    size = min(max(allocatable - need.bytes, 0.0) + buffer, float(allocatable))
    text = f"{format_bytes(allocatable)} of {format_bytes(total)} are allocatable"
    text += f" and online pods need {format_bytes(need.bytes)}"
    text += f", with a buffer of {format_bytes(buffer)}" if config.util_based.enable else ""
    by_numa: dict[int, float] = {}
    try:
        by_numa = _spread_by_numa(inputs, config, size)
    except InputMissing as missing:
        reason_inputs["by_numa_missing"] = str(missing)
    reason = Reason(
        rule="memory_headroom_canonical",
        text=f"{text}: memory headroom is {format_bytes(size)}.",
        threshold=allocatable,
        inputs=reason_inputs,
    )
    return MemoryHeadroom(size, by_numa, reason, need.assumed)


def _free_buffer(inputs: MemoryInputs, config: MemoryConfig, need: MemoryNeed, reason_inputs: ReasonInputs) -> float:
    """Headroom from memory that is free although it is estimated to be needed. Raises InputMissing."""
    snapshot, util = inputs.snapshot, config.util_based
    total, free = node_memory_bytes(snapshot), node_meminfo(snapshot, "MemFree")
    # Twice the watermark, so that kswapd wakes less often.
    system = free * util.free_based_ratio - total * 2 * watermark_scale_factor(snapshot) / _WATERMARK_SCALE
    extra = need.bytes - need.used + need.system_cache
    buffer = max(system - extra, 0.0)
    reason_inputs |= {"free_bytes": free, "system_buffer_bytes": round(system), "extra_bytes": round(extra)}
    per_gib = len(snapshot.topology.cpus) / (total / GIB)
    if util.cache_based_ratio and util.cpu_memory_ratio_low < per_gib < util.cpu_memory_ratio_high:
        spare = sum(node_meminfo(snapshot, name) for name in ("Buffers", "Cached", "SReclaimable"))
        # As in free(1): memory that is neither free nor used is cache. It counts only if something is used.
        cache = spare * util.cache_based_ratio if total > free + spare else 0.0
        reason_inputs |= {"cache_buffer_bytes": round(cache)}
        buffer = max(buffer, cache)
    return buffer + config.static_bytes(total)


def _spread_by_numa(inputs: MemoryInputs, config: MemoryConfig, size: float) -> dict[int, float]:
    """The headroom by NUMA node, in proportion to memory there that is free, droppable, or used by reclaimed pods.

    The only node has all of it. Raises InputMissing.
    """
    snapshot, numa_nodes = inputs.snapshot, inputs.snapshot.topology.numa_nodes
    if len(numa_nodes) == 1:
        return {numa_nodes[0]: size}
    weights = dict.fromkeys(numa_nodes, 0.0)
    used = reclaimed_bytes_by_numa(snapshot, inputs.root.path, inputs.root.members, config.stale_s)
    for numa in reclaimable_numa_nodes(inputs):
        cache = numa_meminfo(snapshot, numa, "Inactive(file)", config.stale_s) * config.util_based.cache_based_ratio
        weights[numa] = numa_meminfo(snapshot, numa, "MemFree", config.stale_s) + cache + used.get(numa, 0)
    total = sum(weights.values())
    return {numa: size * weight / total for numa, weight in weights.items()} if total else {}


def numa_aware_headroom(inputs: MemoryInputs, config: MemoryConfig) -> MemoryHeadroom:
    """Return free memory of the reclaimable NUMA nodes plus the requests of reclaimed pods. Raises InputMissing."""
    snapshot, util = inputs.snapshot, config.util_based
    reclaimable_nodes = reclaimable_numa_nodes(inputs)
    free = {
        numa: numa_meminfo(snapshot, numa, "MemFree", config.stale_s)
        + numa_meminfo(snapshot, numa, "Inactive(file)", config.stale_s) * util.cache_based_ratio
        for numa in reclaimable_nodes
    }
    reclaimable = sum(free.values())
    total = sum(numa_meminfo(snapshot, numa, "MemTotal", config.stale_s) for numa in reclaimable_nodes)
    watermark = total * watermark_scale_factor(snapshot) / _WATERMARK_SCALE
    count = len(snapshot.topology.numa_nodes)
    reserve = config.reserve_bytes(node_memory_bytes(snapshot)) * len(reclaimable_nodes) / count
    reserved_requests = _online_requests(inputs) * util.request_based_ratio
    available = max(reclaimable - watermark - reserve - reserved_requests, 0.0)
    by_numa = dict.fromkeys(snapshot.topology.numa_nodes, 0.0)
    for numa, size in free.items():
        by_numa[numa] = size * available / reclaimable if reclaimable else 0.0
    requested = _add_requests(inputs, reclaimable_nodes, by_numa)
    caps = _numa_caps(inputs, config, reclaimable_nodes)
    by_numa = {numa: min(size, caps.get(numa, inf)) for numa, size in by_numa.items()}
    size = sum(by_numa.values())
    text = (
        f"{format_bytes(reclaimable)} are free or droppable on {len(reclaimable_nodes)} of {count} NUMA nodes,"
        f" {format_bytes(watermark + reserve + reserved_requests)} of it are reserved,"
        f" and reclaimed pods request {format_bytes(requested)}:"
        f" memory headroom is {format_bytes(size)}."
    )
    reason_inputs: ReasonInputs = {
        "reclaimable_bytes": round(reclaimable),
        "watermark_bytes": round(watermark),
        "reserve_bytes": round(reserve),
        "online_requests_kept_bytes": round(reserved_requests),
        "reclaimed_requests_bytes": round(requested),
        "cap_bytes": round(sum(caps.values())) if caps and inf not in caps.values() else None,
    }
    return MemoryHeadroom(
        size, by_numa, Reason(rule="memory_headroom_numa_aware", text=text, threshold=watermark, inputs=reason_inputs)
    )


def _online_requests(inputs: MemoryInputs) -> int:
    return sum(
        container.memory_request_bytes or 0
        for pod in inputs.snapshot.pods
        if pod.qos is not QoSLevel.RECLAIMED and (not pod.enhancements.numa_exclusive or inputs.is_reclaimable(pod))
        for container in pod.containers
    )


def _reclaimed_containers(inputs: MemoryInputs) -> Iterator[tuple[Pod, Container, CgroupSample]]:
    """Reclaimed containers with a cgroup: the requests of the others are still free."""
    for pod in inputs.snapshot.pods:
        if pod.qos is QoSLevel.RECLAIMED:
            for container in pod.containers:
                sample = inputs.snapshot.cgroups.get(container.cgroup)
                if sample is not None:
                    yield pod, container, sample


def _add_requests(inputs: MemoryInputs, reclaimable_nodes: tuple[int, ...], by_numa: dict[int, float]) -> float:
    """Add the requests of reclaimed containers to their bound nodes, or evenly to all; return their sum."""
    total = 0.0
    for pod, container, _ in _reclaimed_containers(inputs):
        size = container.reclaimed_memory_bytes or container.memory_request_bytes or 0
        nodes = [numa for numa in pod.bound_numa if numa in by_numa] or reclaimable_nodes
        for numa in nodes:
            by_numa[numa] += size / len(nodes)
        total += size if nodes else 0
    return total


def _numa_caps(inputs: MemoryInputs, config: MemoryConfig, reclaimable_nodes: tuple[int, ...]) -> dict[int, float]:
    """Upper bounds by NUMA node: a multiple of the reclaim root's limit. Raises InputMissing."""
    rate = config.util_based.max_oversold_rate
    if not rate:
        return {}
    bound = {numa for pod, _, _ in _reclaimed_containers(inputs) for numa in pod.bound_numa}
    caps = {
        numa: _memory_limit(inputs, inputs.numa_roots[numa]) * rate for numa in bound if inputs.numa_roots.get(numa)
    }
    others = [numa for numa in reclaimable_nodes if numa not in caps]
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
