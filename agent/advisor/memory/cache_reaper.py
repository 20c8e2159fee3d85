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
    format_bytes,
    format_count,
    fresh_sample,
    has_elapsed,
    node_memory_bytes,
    numa_meminfo,
)
from agent.config.memory import MemoryConfig
from api.advice import NOT_NUMA_BOUND, KnobRequest, MemoryCondition, MemoryPressure
from api.knobs import Knob, Reason
from api.qos import QoSLevel
from api.snapshot import CgroupSample


class ReapResult(NamedTuple):
    """Who is to drop cache, and what to remember of it."""

    knob_requests: tuple[KnobRequest, ...]
    asked: Mapping[str, CacheDropRequest]
    busy: frozenset[str]
    """Those who were told, now or before, and of whom it is not seen yet what they gave."""
    reason: Reason


class _CacheCandidate(NamedTuple):
    sample: CgroupSample
    cache: Mapping[int, int]
    """By NUMA node, and as UNBOUND in all."""
    waiting: int
    """Bytes that it was told to give up and that are not seen yet."""
    may: bool
    """Whether it may be asked now."""


def reap_cache(
    inputs: MemoryInputs, config: MemoryConfig, conditions: Mapping[int, MemoryCondition], before: MemoryAdvisorState
) -> ReapResult:
    """Cache to drop; `conditions` are those of NUMA nodes and, as UNBOUND, the node's."""
    cgroups = inputs.snapshot.cgroups
    asked = {path: ask for path, ask in before.asked.items() if path in cgroups and cgroups[path].id == ask.cgroup_id}
    busy = {path for path, ask in asked.items() if not _has_new_reading(ask, cgroups[path], inputs, config)}
    short = {where: it for where, it in conditions.items() if it.state is MemoryPressure.DROP_CACHE}
    if not config.reaper.enable or not short:
        return ReapResult((), asked, frozenset(busy), _idle_reason(config, conditions))
    candidates, unmeasured = _cache_candidates(inputs, config, asked, before)
    chosen: dict[str, int] = {}
    for where, condition in sorted(short.items()):
        try:
            total = _memory_size(inputs, config, where)
        except InputMissing:
            continue  # without the memory's size the condition is unknown, too
        _select_containers(candidates, where, condition.target_bytes, total * config.reaper.min_cache_ratio, chosen)
    worst = short[min(short)]
    whole = sum(chosen.values())
    verdict = Reason(
        rule="memory_reap_cache",
        text=f"{worst.reason.text} {format_count(len(chosen), 'reclaimed container')} must drop {format_bytes(whole)} of cache.",
        threshold=worst.reason.threshold,
        inputs={
            "target_bytes": worst.target_bytes,
            "asked_bytes": whole,
            "asked_before_bytes": sum(candidate.waiting for candidate in candidates.values()),
            "unmeasured_containers": unmeasured,
            "min_cache_ratio": config.reaper.min_cache_ratio,
        },
    )
    wishes = tuple(
        KnobRequest(cgroup=path, knob=Knob.DROP_CACHE, value=str(size), reason=verdict) for path, size in chosen.items()
    )
    for path, size in chosen.items():
        sample = candidates[path].sample
        asked[path] = CacheDropRequest(
            cgroup_id=sample.id, at_ns=inputs.now_ns, read_at_ns=sample.files_read_at_ns, bytes=size
        )
    return ReapResult(wishes, asked, frozenset(busy | chosen.keys()), verdict)


def _idle_reason(config: MemoryConfig, conditions: Mapping[int, MemoryCondition]) -> Reason:
    """Why no cache is dropped at all."""
    unknown = [it.reason for _, it in sorted(conditions.items()) if it.state is MemoryPressure.UNKNOWN]
    if not config.reaper.enable:
        return Reason(rule="memory_reap_disabled", text="The cache reaper is switched off: no cache is dropped.")
    if unknown:
        text = f"{unknown[0].text} No cache is dropped for it."
        return Reason(rule="memory_reap_unknown", text=text, inputs=unknown[0].inputs)
    return Reason(rule="memory_reap_not_needed", text="Memory is not short: no cache is dropped.")


def _has_new_reading(ask: CacheDropRequest, sample: CgroupSample, inputs: MemoryInputs, config: MemoryConfig) -> bool:
    """Whether the cgroup was read since it was told; where nobody says when, whether it had the time."""
    if ask.read_at_ns is None or inputs.now_ns < ask.at_ns:
        return has_elapsed(inputs.now_ns, ask.at_ns, config.reaper.interval_s)
    return ask.read_at_ns != sample.files_read_at_ns


def _cache_candidates(
    inputs: MemoryInputs, config: MemoryConfig, asked: Mapping[str, CacheDropRequest], before: MemoryAdvisorState
) -> tuple[dict[str, _CacheCandidate], int]:
    """Reclaimed main containers, by cgroup, and how many of them are not measured."""
    found: dict[str, _CacheCandidate] = {}
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
            given = before.offloaded.get(container.cgroup)
            unseen = given is not None and given.read_at_ns == sample.files_read_at_ns is not None
            waiting = int(given.target_bytes) if given is not None and unseen else 0
            ask = asked.get(container.cgroup)
            if ask is None:
                found[container.cgroup] = _CacheCandidate(sample, cache, waiting, may=True)
                continue
            seen = _has_new_reading(ask, sample, inputs, config)
            may = seen and has_elapsed(inputs.now_ns, ask.at_ns, config.reaper.interval_s)
            found[container.cgroup] = _CacheCandidate(sample, cache, waiting if seen else waiting + ask.bytes, may=may)
    return found, unmeasured


def _select_containers(
    candidates: Mapping[str, _CacheCandidate], where: int, target: int, least: float, chosen: dict[str, int]
) -> None:
    """Add to the chosen ones, by cgroup, until what they give makes up for what is missing there."""
    sizes = {path: candidate.cache.get(where, 0) for path, candidate in candidates.items()}
    left = target
    for path, candidate in candidates.items():
        left -= min(candidate.waiting + chosen.get(path, 0), sizes[path])
    order = sorted(sizes, key=lambda path: (-sizes[path], path))
    for path in order:
        if left <= 0 or sizes[path] < least or not sizes[path]:
            return
        if candidates[path].may and path not in chosen:
            chosen[path] = min(max(sizes[path] - candidates[path].waiting, 0), left)
            left -= chosen[path]


def _memory_size(inputs: MemoryInputs, config: MemoryConfig, where: int) -> int:
    snapshot = inputs.snapshot
    return (
        node_memory_bytes(snapshot)
        if where == NOT_NUMA_BOUND
        else numa_meminfo(snapshot, where, "MemTotal", config.stale_s)
    )


_BATCH_PAGES = 64
"""What each CPU may have charged in advance (MEMCG_CHARGE_BATCH, include/linux/memcontrol.h): no sign of anything."""


class DyingResult(NamedTuple):
    """What is to be reclaimed, and when that was last looked at."""

    knob_requests: tuple[KnobRequest, ...]
    at_ns: int | None
    reasons: tuple[Reason, ...] = ()


def reclaim_dying_cgroups(situation: MemoryInputs, config: MemoryConfig, before_ns: int | None) -> DyingResult:
    """Groups whose removed members still hold memory, once in the interval."""
    settings, snapshot = config.offloading, situation.snapshot
    if not settings.dying or not has_elapsed(situation.now_ns, before_ns, settings.dying_interval_s):
        return DyingResult((), before_ns)
    groups = [path for path in snapshot.cgroups if is_dying_parent(path, config)]
    members: dict[str, list[int | None]] = {path: [] for path in groups}
    for path, sample in snapshot.cgroups.items():
        above = members.get(path.rpartition("/")[0])
        if above is not None:
            above.append(sample.memory_bytes)
    noise = _BATCH_PAGES * PAGESIZE * len(snapshot.topology.cpus)
    wishes, unknown = [], []
    for path, sizes in sorted(members.items()):
        whole = snapshot.cgroups[path].memory_bytes
        known = [size for size in sizes if size is not None]
        if whole is None or len(known) < len(sizes):
            unknown.append(_unmeasured_reason(path))  # a member that is not measured is not dead
            continue
        left = whole - sum(known)
        if left > noise:
            text = f"{path} is charged with {format_bytes(left)} that no living member has: it is reclaimed."
            inputs: dict[str, float | int | str | None] = {"group_bytes": whole, "members_bytes": sum(known)}
            verdict = Reason(rule="memory_dying_reclaim", text=text, threshold=noise, inputs=inputs)
            wishes.append(KnobRequest(cgroup=path, knob=Knob.MEMORY_RECLAIM, value=str(left), reason=verdict))
    return DyingResult(tuple(wishes), situation.now_ns, (*(wish.reason for wish in wishes), *unknown))


def _unmeasured_reason(path: str) -> Reason:
    text = f"Not known: the memory of {path} or of a member. What removed members left there is not reclaimed."
    return Reason(rule="memory_dying_unknown", text=text, inputs={"missing": "memory", "cgroup": path})


def is_dying_parent(path: str, config: MemoryConfig) -> bool:
    """Whether the settings say that what removed members left in this cgroup is to be reclaimed."""
    settings = config.offloading
    return settings.dying and any(_matches_pattern(path, each) for each in settings.dying_cgroups)


def _matches_pattern(path: str, pattern: str) -> bool:
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)
