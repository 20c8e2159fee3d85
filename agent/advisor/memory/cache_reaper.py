"""Selects cgroups to reclaim memory from: page cache of reclaimed containers (cache reaper), dying cgroups.
Cache is dropped only below the critical watermark, largest first, no more than missing; a request in flight
counts. Dying cgroups keep pages charged to their parent (cgroup-v2.rst, nr_dying_descendants); reclaim of the
parent is opt-in.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from mmap import PAGESIZE
from typing import NamedTuple

from agent.advisor.memory.memory_inputs import (
    CacheDropRequest,
    InputMissing,
    MemoryAdvisorState,
    MemoryInputs,
    bytes_by_numa,
    droppable_cache_bytes,
    fresh_sample,
    has_elapsed,
    node_memory_bytes,
    numa_meminfo,
)
from agent.config.memory import MemoryConfig
from api.advice import NOT_NUMA_BOUND, KnobRequest, MemoryCondition, MemoryPressure
from api.knobs import Knob, Reason, ReasonInputs
from api.qos import QoSLevel
from api.quantity import format_bytes, format_count
from api.snapshot import CgroupSample


class ReapResult(NamedTuple):
    """Cache drop requests, and the state for the next cycle."""

    knob_requests: tuple[KnobRequest, ...]
    cache_drops: Mapping[str, CacheDropRequest]
    """By cgroup: requests so far."""
    busy: frozenset[str]
    """Cgroups with a request whose effect is not visible yet."""
    reason: Reason


class _CacheCandidate(NamedTuple):
    sample: CgroupSample
    cache: Mapping[int, int]
    """By NUMA node, and the total as NOT_NUMA_BOUND."""
    waiting: int
    """Bytes of requests whose effect is not visible yet."""
    is_eligible: bool
    """Whether a new request is allowed now."""


def reap_cache(
    inputs: MemoryInputs, config: MemoryConfig, conditions: Mapping[int, MemoryCondition], before: MemoryAdvisorState
) -> ReapResult:
    """Return the cache drop requests; `conditions` are those of NUMA nodes, and the node's as NOT_NUMA_BOUND."""
    cgroups = inputs.snapshot.cgroups
    drops = {
        path: drop
        for path, drop in before.cache_drops.items()
        if path in cgroups and cgroups[path].id == drop.cgroup_id
    }
    busy = {path for path, drop in drops.items() if not _has_new_reading(drop, cgroups[path], inputs, config)}
    short = {
        place: condition for place, condition in conditions.items() if condition.state is MemoryPressure.DROP_CACHE
    }
    if not config.reaper.enable or not short:
        return ReapResult((), drops, frozenset(busy), _idle_reason(config, conditions))
    candidates, unmeasured = _cache_candidates(inputs, config, drops, before)
    chosen: dict[str, int] = {}
    for place, condition in sorted(short.items()):
        try:
            total = _memory_size(inputs, config, place)
        except InputMissing:
            continue  # without the memory size the condition is unknown too
        _select_containers(candidates, place, condition.target_bytes, total * config.reaper.min_cache_ratio, chosen)
    worst = short[min(short)]
    total = sum(chosen.values())
    reason = Reason(
        rule="memory_reap_cache",
        text=f"{worst.reason.text} Drop {format_bytes(total)} of page cache"
        f" of {format_count(len(chosen), 'reclaimed container')}.",
        threshold=worst.reason.threshold,
        inputs={
            "target_bytes": worst.target_bytes,
            "asked_bytes": total,
            "asked_before_bytes": sum(candidate.waiting for candidate in candidates.values()),
            "unmeasured_containers": unmeasured,
            "min_cache_ratio": config.reaper.min_cache_ratio,
        },
    )
    requests = tuple(
        KnobRequest(cgroup=path, knob=Knob.DROP_CACHE, value=str(size), reason=reason) for path, size in chosen.items()
    )
    for path, size in chosen.items():
        sample = candidates[path].sample
        drops[path] = CacheDropRequest(
            cgroup_id=sample.id, at_ns=inputs.now_ns, read_at_ns=sample.files_read_at_ns, bytes=size
        )
    return ReapResult(requests, drops, frozenset(busy | chosen.keys()), reason)


def _idle_reason(config: MemoryConfig, conditions: Mapping[int, MemoryCondition]) -> Reason:
    unknown = [
        condition.reason for _, condition in sorted(conditions.items()) if condition.state is MemoryPressure.UNKNOWN
    ]
    if not config.reaper.enable:
        return Reason(rule="memory_reap_disabled", text="The cache reaper is disabled: no page cache is dropped.")
    if unknown:
        text = f"{unknown[0].text} No page cache is dropped."
        return Reason(rule="memory_reap_unknown", text=text, inputs=unknown[0].inputs)
    return Reason(rule="memory_reap_not_needed", text="There is enough free memory: no page cache is dropped.")


def _has_new_reading(drop: CacheDropRequest, sample: CgroupSample, inputs: MemoryInputs, config: MemoryConfig) -> bool:
    """Whether the cgroup was read since the request; without a read time, whether the interval has passed."""
    if drop.read_at_ns is None or inputs.now_ns < drop.at_ns:
        return has_elapsed(inputs.now_ns, drop.at_ns, config.reaper.interval_s)
    return drop.read_at_ns != sample.files_read_at_ns


def _cache_candidates(
    inputs: MemoryInputs, config: MemoryConfig, drops: Mapping[str, CacheDropRequest], before: MemoryAdvisorState
) -> tuple[dict[str, _CacheCandidate], int]:
    """Main containers of reclaimed pods by cgroup, and the number of those that are not measured."""
    candidates: dict[str, _CacheCandidate] = {}
    unmeasured = 0
    for pod in inputs.snapshot.pods:
        if pod.qos is not QoSLevel.RECLAIMED:
            continue
        for container in pod.containers:
            if container.sidecar or container.cgroup not in inputs.snapshot.cgroups:
                continue
            sample = fresh_sample(inputs.snapshot, container.cgroup, config.stale_s)
            size = None if sample is None else droppable_cache_bytes(sample)
            if sample is None or size is None:
                unmeasured += 1
                continue
            cache = {NOT_NUMA_BOUND: size, **(bytes_by_numa(sample, "cache") or {})}
            offload = before.offloaded.get(container.cgroup)
            pending = offload is not None and offload.read_at_ns == sample.files_read_at_ns is not None
            waiting = int(offload.target_bytes) if offload is not None and pending else 0
            drop = drops.get(container.cgroup)
            if drop is None:
                candidates[container.cgroup] = _CacheCandidate(sample, cache, waiting, is_eligible=True)
                continue
            settled = _has_new_reading(drop, sample, inputs, config)
            is_eligible = settled and has_elapsed(inputs.now_ns, drop.at_ns, config.reaper.interval_s)
            candidates[container.cgroup] = _CacheCandidate(
                sample, cache, waiting if settled else waiting + drop.bytes, is_eligible=is_eligible
            )
    return candidates, unmeasured


def _select_containers(
    candidates: Mapping[str, _CacheCandidate], place: int, target: int, minimum: float, chosen: dict[str, int]
) -> None:
    sizes = {path: candidate.cache.get(place, 0) for path, candidate in candidates.items()}
    left = target
    for path, candidate in candidates.items():
        left -= min(candidate.waiting + chosen.get(path, 0), sizes[path])
    order = sorted(sizes, key=lambda path: (-sizes[path], path))
    for path in order:
        if left <= 0 or sizes[path] < minimum or not sizes[path]:
            return
        if candidates[path].is_eligible and path not in chosen:
            chosen[path] = min(max(sizes[path] - candidates[path].waiting, 0), left)
            left -= chosen[path]


def _memory_size(inputs: MemoryInputs, config: MemoryConfig, place: int) -> int:
    snapshot = inputs.snapshot
    return (
        node_memory_bytes(snapshot)
        if place == NOT_NUMA_BOUND
        else numa_meminfo(snapshot, place, "MemTotal", config.stale_s)
    )


_BATCH_PAGES = 64
"""Pages that each CPU may have charged in advance (MEMCG_CHARGE_BATCH, include/linux/memcontrol.h)."""


class DyingResult(NamedTuple):
    """Reclaim requests, and the time of the last evaluation."""

    knob_requests: tuple[KnobRequest, ...]
    at_ns: int | None
    reasons: tuple[Reason, ...] = ()


def reclaim_dying_cgroups(inputs: MemoryInputs, config: MemoryConfig, before_ns: int | None) -> DyingResult:
    """Request reclaim, once per interval, in cgroups whose removed children still have memory charged."""
    settings, snapshot = config.offloading, inputs.snapshot
    if not settings.dying or not has_elapsed(inputs.now_ns, before_ns, settings.dying_interval_s):
        return DyingResult((), before_ns)
    groups = [path for path in snapshot.cgroups if is_dying_parent(path, config)]
    members: dict[str, list[int | None]] = {path: [] for path in groups}
    for path, sample in snapshot.cgroups.items():
        above = members.get(path.rpartition("/")[0])
        if above is not None:
            above.append(sample.memory_bytes)
    noise = _BATCH_PAGES * PAGESIZE * len(snapshot.topology.cpus)
    requests, unknown = [], []
    for path, sizes in sorted(members.items()):
        charged = snapshot.cgroups[path].memory_bytes
        measured = [size for size in sizes if size is not None]
        if charged is None or len(measured) < len(sizes):
            unknown.append(_unmeasured_reason(path))  # a child that is not measured is alive
            continue
        left = charged - sum(measured)
        if left > noise:
            text = f"{path} has {format_bytes(left)} charged that no live child uses: reclaim it."
            reason_inputs: ReasonInputs = {
                "group_bytes": charged,
                "members_bytes": sum(measured),
            }
            reason = Reason(rule="memory_dying_reclaim", text=text, threshold=noise, inputs=reason_inputs)
            requests.append(KnobRequest(cgroup=path, knob=Knob.MEMORY_RECLAIM, value=str(left), reason=reason))
    return DyingResult(tuple(requests), inputs.now_ns, (*(request.reason for request in requests), *unknown))


def _unmeasured_reason(path: str) -> Reason:
    text = f"The memory of {path} or of a child is not known: memory of removed children is not reclaimed."
    return Reason(rule="memory_dying_unknown", text=text, inputs={"missing": "memory", "cgroup": path})


def is_dying_parent(path: str, config: MemoryConfig) -> bool:
    """Return whether the settings allow reclaim of the memory that removed children left in this cgroup."""
    settings = config.offloading
    return settings.dying and any(_matches_pattern(path, each) for each in settings.dying_cgroups)


def _matches_pattern(path: str, pattern: str) -> bool:
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)
