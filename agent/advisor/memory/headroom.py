"""How much memory can be promised to reclaimed pods: Katalyst's policies none, canonical and numa-aware.

`canonical`: what the online pods' estimated need leaves, in all; with utilBased on, a part of what is free, too. `numa_aware`:
what is free, and cache that could be, on the NUMA nodes that nobody has for himself, and what reclaimed pods requested already.
Where an input is missing nothing is promised (None); where a container's use had to be assumed, not more than before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import NamedTuple

from agent.advisor.memory import estimation
from agent.advisor.memory.situation import Situation, Unknown, available_numa
from agent.advisor.memory.stats import (
    counted,
    human,
    node_size,
    node_total,
    numa_size,
    reclaimed_on_numa,
    scale_factor,
)
from agent.config.memory import GIB, MemoryConfig
from api.facts import UNLIMITED
from api.knobs import Verdict
from api.pods import Container, Pod
from api.qos import QoSLevel
from api.samples import CgroupSample

_SCALE = 10_000
"""vm.watermark_scale_factor counts in ten-thousandths (mm/page_alloc.c)."""
Inputs = dict[str, float | int | str | None]


class Promise(NamedTuple):
    """What can be promised, in bytes; None where inputs are missing."""

    bytes: float | None
    by_numa: Mapping[int, float]
    verdict: Verdict
    assumed: int = 0
    """Containers of which nothing is known."""


def promise(situation: Situation, config: MemoryConfig, before: float | None) -> Promise:
    """The configured policy's answer; `before` is the one of the round before."""
    if config.policy == "none" or not situation.enable_reclaim:
        rule = "memory_headroom_none" if config.policy == "none" else "memory_reclaim_disabled"
        why = "The memory policy is none" if config.policy == "none" else "Reclaiming is switched off"
        zero = dict.fromkeys(situation.snapshot.topology.numa_nodes, 0.0)
        return Promise(0.0, zero, Verdict(rule=rule, text=f"{why}: no memory is promised."))
    policy = canonical if config.policy == "canonical" else numa_aware
    try:
        found = policy(situation, config)
    except Unknown as missing:
        text = f"Not known: {missing}. No memory is promised."
        return Promise(None, {}, Verdict(rule="memory_inputs_missing", text=text, inputs={"missing": str(missing)}))
    if not found.assumed or before is None or found.bytes is None or found.bytes <= before:
        return found
    part = before / found.bytes
    text = (
        f"{counted(found.assumed, 'container')} not measured: no more than the {human(before)} of before is promised."
    )
    verdict = Verdict(rule="memory_headroom_frozen", text=text, threshold=before, inputs=found.verdict.inputs)
    return Promise(before, {numa: size * part for numa, size in found.by_numa.items()}, verdict, found.assumed)


def canonical(situation: Situation, config: MemoryConfig) -> Promise:
    """What can be allocated less the online pods' estimated need. Raises Unknown."""
    total = node_total(situation.snapshot)
    most = total - config.reserve_bytes(total)
    need = estimation.need(situation, config)
    inputs: Inputs = {
        "total_bytes": total,
        "allocatable_bytes": most,
        "need_bytes": round(need.bytes),
        "unmeasured_containers": need.assumed,
    }
    buffer = 0.0
    if config.util_based.enable:
        buffer = _buffer(situation, config, need, inputs)
    size = min(max(most - need.bytes, 0.0) + buffer, float(most))
    text = f"Of {human(total)} {human(most)} can be allocated and online pods need {human(need.bytes)}"
    text += f", with a buffer of {human(buffer)}" if config.util_based.enable else ""
    by_numa: dict[int, float] = {}
    try:
        by_numa = _spread(situation, config, size)
    except Unknown as missing:
        inputs["by_numa_missing"] = str(missing)
    verdict = Verdict(
        rule="memory_headroom_canonical", text=f"{text}: {human(size)} are promised.", threshold=most, inputs=inputs
    )
    return Promise(size, by_numa, verdict, need.assumed)


def _buffer(situation: Situation, config: MemoryConfig, need: estimation.Need, inputs: Inputs) -> float:
    """What is promised of memory that is free although it is estimated to be needed. Raises Unknown."""
    snapshot, util = situation.snapshot, config.util_based
    total, free = node_total(snapshot), node_size(snapshot, "MemFree")
    # Twice the watermark, so that kswapd is woken less often.
    system = free * util.free_based_ratio - total * 2 * scale_factor(snapshot) / _SCALE
    extra = need.bytes - need.used + need.system_cache
    buffer = max(system - extra, 0.0)
    inputs |= {"free_bytes": free, "system_buffer_bytes": round(system), "extra_bytes": round(extra)}
    per_gib = len(snapshot.topology.cpus) / (total / GIB)
    if util.cache_based_ratio and util.cpu_memory_ratio_low < per_gib < util.cpu_memory_ratio_high:
        spare = sum(node_size(snapshot, name) for name in ("Buffers", "Cached", "SReclaimable"))
        # As in free(1): what is neither free nor used is cache. It counts where anything is used at all.
        cache = spare * util.cache_based_ratio if total > free + spare else 0.0
        inputs |= {"cache_buffer_bytes": round(cache)}
        buffer = max(buffer, cache)
    return buffer + config.static_bytes(total)


def _spread(situation: Situation, config: MemoryConfig, size: float) -> dict[int, float]:
    """The promise by NUMA node, in proportion to what is free there, or could be, or is used by reclaimed pods already.

    All of it on the only node. Raises Unknown.
    """
    snapshot, numa_nodes = situation.snapshot, situation.snapshot.topology.numa_nodes
    if len(numa_nodes) == 1:
        return {numa_nodes[0]: size}
    weights = dict.fromkeys(numa_nodes, 0.0)
    used = reclaimed_on_numa(snapshot, situation.root.path, situation.root.members, config.stale_s)
    for numa in available_numa(situation):
        cache = numa_size(snapshot, numa, "Inactive(file)", config.stale_s) * config.util_based.cache_based_ratio
        weights[numa] = numa_size(snapshot, numa, "MemFree", config.stale_s) + cache + used.get(numa, 0)
    whole = sum(weights.values())
    return {numa: size * weight / whole for numa, weight in weights.items()} if whole else {}


def numa_aware(situation: Situation, config: MemoryConfig) -> Promise:
    """What is free on the NUMA nodes of which something may be lent, and what reclaimed pods requested. Raises Unknown."""
    snapshot, util = situation.snapshot, config.util_based
    open_nodes = available_numa(situation)
    free = {
        numa: numa_size(snapshot, numa, "MemFree", config.stale_s)
        + numa_size(snapshot, numa, "Inactive(file)", config.stale_s) * util.cache_based_ratio
        for numa in open_nodes
    }
    reclaimable = sum(free.values())
    total = sum(numa_size(snapshot, numa, "MemTotal", config.stale_s) for numa in open_nodes)
    watermark = total * scale_factor(snapshot) / _SCALE
    count = len(snapshot.topology.numa_nodes)
    reserve = config.reserve_bytes(node_total(snapshot)) * len(open_nodes) / count
    kept = _online_requests(situation) * util.request_based_ratio
    available = max(reclaimable - watermark - reserve - kept, 0.0)
    by_numa = dict.fromkeys(snapshot.topology.numa_nodes, 0.0)
    for numa, size in free.items():
        by_numa[numa] = size * available / reclaimable if reclaimable else 0.0
    requested = _add_requests(situation, open_nodes, by_numa)
    caps = _caps(situation, config, open_nodes)
    by_numa = {numa: min(size, caps.get(numa, inf)) for numa, size in by_numa.items()}
    size = sum(by_numa.values())
    text = (
        f"{human(reclaimable)} are free or can be on {len(open_nodes)} of {count} NUMA nodes,"
        f" {human(watermark + reserve + kept)} of it are kept, and reclaimed pods requested {human(requested)}:"
        f" {human(size)} are promised."
    )
    inputs: Inputs = {
        "reclaimable_bytes": round(reclaimable),
        "watermark_bytes": round(watermark),
        "reserve_bytes": round(reserve),
        "online_requests_kept_bytes": round(kept),
        "reclaimed_requests_bytes": round(requested),
        "cap_bytes": round(sum(caps.values())) if caps and inf not in caps.values() else None,
    }
    return Promise(
        size, by_numa, Verdict(rule="memory_headroom_numa_aware", text=text, threshold=watermark, inputs=inputs)
    )


def _online_requests(situation: Situation) -> int:
    """What the pods on these nodes requested, those apart that have nodes for themselves which are left out."""
    return sum(
        container.memory_request_bytes or 0
        for pod in situation.snapshot.pods
        if pod.qos is not QoSLevel.RECLAIMED and (not pod.enhancements.numa_exclusive or situation.lends(pod))
        for container in pod.containers
    )


def _reclaimed(situation: Situation) -> Iterator[tuple[Pod, Container, CgroupSample]]:
    """Reclaimed containers that are there: what others requested is still free."""
    for pod in situation.snapshot.pods:
        if pod.qos is QoSLevel.RECLAIMED:
            for container in pod.containers:
                sample = situation.snapshot.cgroups.get(container.cgroup)
                if sample is not None:
                    yield pod, container, sample


def _add_requests(situation: Situation, open_nodes: tuple[int, ...], by_numa: dict[int, float]) -> float:
    """Requests of reclaimed containers, on the nodes they are bound to or evenly on all; their sum."""
    whole = 0.0
    for pod, container, _ in _reclaimed(situation):
        size = container.reclaimed_memory_bytes or container.memory_request_bytes or 0
        nodes = [numa for numa in pod.bound_numa if numa in by_numa] or open_nodes
        for numa in nodes:
            by_numa[numa] += size / len(nodes)
        whole += size if nodes else 0
    return whole


def _caps(situation: Situation, config: MemoryConfig, open_nodes: tuple[int, ...]) -> dict[int, float]:
    """By NUMA node: so many times the reclaim root's limit is promised at most. Raises Unknown."""
    rate = config.util_based.max_oversold_rate
    if not rate:
        return {}
    bound = {numa for pod, _, _ in _reclaimed(situation) for numa in pod.bound_numa}
    caps = {
        numa: _limit(situation, situation.numa_roots[numa]) * rate for numa in bound if situation.numa_roots.get(numa)
    }
    others = [numa for numa in open_nodes if numa not in caps]
    if others and situation.root.path:
        share = _limit(situation, situation.root.path) * rate / len(others)
        caps.update(dict.fromkeys(others, share))
    return caps


def _limit(situation: Situation, path: str) -> float:
    sample = situation.snapshot.cgroups.get(path)
    limit = None if sample is None else sample.limits.memory_max_bytes
    if limit is None:
        raise Unknown(f"the memory limit of {path}")
    return inf if limit >= UNLIMITED else float(limit)
