"""Whose page cache is dropped when memory is short: Katalyst's cache reaper.

Only where the node or a NUMA node is below its critical watermark, only of reclaimed pods' main containers, only of those
with a cache that is worth it, the largest first, and no more than is missing. What was asked for and is not seen yet counts
as given: it is not asked for again, of this container or another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agent.advisor.memory.situation import Situation, Unknown, elapsed
from agent.advisor.memory.state import Asked, MemoryState
from agent.advisor.memory.stats import cache_bytes, counted, human, node_total, numa_size, on_numa, sample_of
from agent.config.memory import MemoryConfig
from api.advice import UNBOUND, Wish
from api.knobs import Knob, Verdict
from api.memory_advice import MemoryCondition, MemoryPressure
from api.qos import QoSLevel
from api.samples import CgroupSample


class Reaped(NamedTuple):
    """Who is to drop cache, and what to remember of it."""

    wishes: tuple[Wish, ...]
    asked: Mapping[str, Asked]
    busy: frozenset[str]
    """Those who were told, now or before, and of whom it is not seen yet what they gave."""
    verdict: Verdict


class _Candidate(NamedTuple):
    sample: CgroupSample
    cache: Mapping[int, int]
    """By NUMA node, and as UNBOUND in all."""
    waiting: int
    """Bytes that it was told to give up and that are not seen yet."""
    may: bool
    """Whether it may be asked now."""


def reap(
    situation: Situation, config: MemoryConfig, conditions: Mapping[int, MemoryCondition], before: MemoryState
) -> Reaped:
    """Cache to drop; `conditions` are those of NUMA nodes and, as UNBOUND, the node's."""
    cgroups = situation.snapshot.cgroups
    asked = {path: ask for path, ask in before.asked.items() if path in cgroups and cgroups[path].id == ask.cgroup_id}
    busy = {path for path, ask in asked.items() if not _seen(ask, cgroups[path], situation, config)}
    short = {where: it for where, it in conditions.items() if it.state is MemoryPressure.DROP_CACHE}
    if not config.reaper.enable or not short:
        return Reaped((), asked, frozenset(busy), _idle(config, conditions))
    candidates, unmeasured = _candidates(situation, config, asked, before)
    chosen: dict[str, int] = {}
    for where, condition in sorted(short.items()):
        try:
            total = _total(situation, config, where)
        except Unknown:
            continue  # without the memory's size the condition is unknown, too
        _choose(candidates, where, condition.target_bytes, total * config.reaper.min_cache_ratio, chosen)
    worst = short[min(short)]
    whole = sum(chosen.values())
    verdict = Verdict(
        rule="memory_reap_cache",
        text=f"{worst.verdict.text} {counted(len(chosen), 'reclaimed container')} must drop {human(whole)} of cache.",
        threshold=worst.verdict.threshold,
        inputs={
            "target_bytes": worst.target_bytes,
            "asked_bytes": whole,
            "asked_before_bytes": sum(candidate.waiting for candidate in candidates.values()),
            "unmeasured_containers": unmeasured,
            "min_cache_ratio": config.reaper.min_cache_ratio,
        },
    )
    wishes = tuple(
        Wish(cgroup=path, knob=Knob.DROP_CACHE, value=str(size), verdict=verdict) for path, size in chosen.items()
    )
    for path, size in chosen.items():
        sample = candidates[path].sample
        asked[path] = Asked(cgroup_id=sample.id, at_ns=situation.now_ns, read_at_ns=sample.files_read_at_ns, bytes=size)
    return Reaped(wishes, asked, frozenset(busy | chosen.keys()), verdict)


def _idle(config: MemoryConfig, conditions: Mapping[int, MemoryCondition]) -> Verdict:
    """Why no cache is dropped at all."""
    unknown = [it.verdict for _, it in sorted(conditions.items()) if it.state is MemoryPressure.UNKNOWN]
    if not config.reaper.enable:
        return Verdict(rule="memory_reap_disabled", text="The cache reaper is switched off: no cache is dropped.")
    if unknown:
        text = f"{unknown[0].text} No cache is dropped for it."
        return Verdict(rule="memory_reap_unknown", text=text, inputs=unknown[0].inputs)
    return Verdict(rule="memory_reap_not_needed", text="Memory is not short: no cache is dropped.")


def _seen(ask: Asked, sample: CgroupSample, situation: Situation, config: MemoryConfig) -> bool:
    """Whether the cgroup was read since it was told; where nobody says when, whether it had the time."""
    if ask.read_at_ns is None or situation.now_ns < ask.at_ns:
        return elapsed(situation.now_ns, ask.at_ns, config.reaper.interval_s)
    return ask.read_at_ns != sample.files_read_at_ns


def _candidates(
    situation: Situation, config: MemoryConfig, asked: Mapping[str, Asked], before: MemoryState
) -> tuple[dict[str, _Candidate], int]:
    """Reclaimed main containers, by cgroup, and how many of them are not measured."""
    found: dict[str, _Candidate] = {}
    unmeasured = 0
    for pod in situation.snapshot.pods:
        if pod.qos is not QoSLevel.RECLAIMED:
            continue
        for container in pod.containers:
            if container.sidecar or container.cgroup not in situation.snapshot.cgroups:
                continue
            sample = sample_of(situation.snapshot, container.cgroup, config.stale_s)
            size = None if sample is None else cache_bytes(sample)
            if sample is None or size is None:
                unmeasured += 1
                continue
            cache = {UNBOUND: size, **(on_numa(sample, "cache") or {})}
            given = before.offloaded.get(container.cgroup)
            unseen = given is not None and given.read_at_ns == sample.files_read_at_ns is not None
            waiting = int(given.target_bytes) if given is not None and unseen else 0
            ask = asked.get(container.cgroup)
            if ask is None:
                found[container.cgroup] = _Candidate(sample, cache, waiting, may=True)
                continue
            seen = _seen(ask, sample, situation, config)
            may = seen and elapsed(situation.now_ns, ask.at_ns, config.reaper.interval_s)
            found[container.cgroup] = _Candidate(sample, cache, waiting if seen else waiting + ask.bytes, may=may)
    return found, unmeasured


def _choose(
    candidates: Mapping[str, _Candidate], where: int, target: int, least: float, chosen: dict[str, int]
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


def _total(situation: Situation, config: MemoryConfig, where: int) -> int:
    snapshot = situation.snapshot
    return node_total(snapshot) if where == UNBOUND else numa_size(snapshot, where, "MemTotal", config.stale_s)
