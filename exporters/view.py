"""What a person sees of one round: the page and `dioptase top` draw this same object, and nothing else.

Pure: rounds in, a View out. Units are a person's: cores, microseconds, ratios. Every managed container is in it, and of
all other cgroups those that run, wait or reclaim most or hold most memory: a View of thousands of cgroups stays small.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest

import msgspec

from api.advice import CardBandwidth, Headroom, PoolSize, RegionAdvice
from api.cpus import format_cpu_list
from api.decisions import Advice, Outcome, Round, Status
from api.forecasts import Outlook
from api.histograms import BOUNDS_NS
from api.knobs import Verdict
from api.memory_advice import MemoryAdvice
from api.node_advice import NodeAdvice
from api.rates import Rates, members, rates
from api.samples import CgroupSample, Snapshot, SourceStatus
from exporters.cgroup_view import NS_PER_US, ContainerView, ReclaimView, managed, past_of, reclaim_view, unmanaged
from exporters.cgroups import working_set
from exporters.evictions import EvictionView, eviction_view
from exporters.node_view import NodeView, node_view

BOUNDS_US: tuple[int, ...] = tuple(bound // NS_PER_US for bound in BOUNDS_NS)
MOST_OTHERS = 24
"""Cgroups without a listed pod that are shown: the page has them on one screen."""
LARGEST, FULLEST = 6, 2
"""So many of them have a place for the memory they hold, and for how near they are to their limit, however quiet they are."""
LEAST_DEMAND = 0.0005
"""Cores used, waited for or spent in reclaim; a cgroup below is not worth a line."""
LEAST_HELD_BYTES = 1 << 20


class ChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """One decision that did something, or would have, or failed to."""

    pod: str
    cgroup: str
    knob: str
    before: str | None
    value: str
    status: str
    rule: str
    text: str
    error: str


class ShadowView(msgspec.Struct, frozen=True, kw_only=True):
    """What a second policy would have made of the round."""

    policy: str
    action: str
    reason: str
    lent_cores: float
    headroom_cores: float | None


class AnswerView(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of the node as a whole."""

    topic: str
    """`power` or `overcommit`."""
    rule: str
    text: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One round for the eye."""

    seq: int
    taken_at_ms: int
    """CLOCK_MONOTONIC: how long ago a round was is told by it, for the wall clock may be set forwards and back."""
    wall_time_ms: int
    """CLOCK_REALTIME, to be shown; no arithmetic is done on it."""
    act: str
    trigger: str
    interval_ms: float | None
    round_ms: float
    policy: str
    action: str
    rule: str
    reason: str
    threshold: float | None = None
    """What the rule compared with, in the unit that `reason` names (rules `wait_*`: milliseconds)."""
    node_cpus: int
    busy_cores: float | None
    steal_cores: float | None
    cpu_pressure_ratio: float | None
    lent_cores: float | None
    """What reclaimed pods may use now."""
    reclaimed_cores: float | None
    """What they used since the previous round."""
    requirement_cores: float | None
    headroom: Headroom | None = None
    """What can be promised to reclaimed pods in all, what they use now included,"""
    advertised: Headroom | None = None
    """and what the node advertises of it."""
    shadow: ShadowView | None = None
    answers: tuple[AnswerView, ...] = ()
    """Of the node as a whole, as far as that is switched on."""
    forecasts: tuple[Outlook, ...] = ()
    """What online work will use at the most within an hour, and how earlier forecasts of it fared."""
    pools: Mapping[str, str]
    """CPU list of each pool."""
    sizes: tuple[PoolSize, ...] = ()
    """How large each is to be, by NUMA node,"""
    regions: tuple[RegionAdvice, ...] = ()
    """and what the online pods on it get, with the reasons."""
    rejected: Mapping[str, Verdict] = {}
    """Pods whose wish for CPUs or network bandwidth cannot be fulfilled, and why."""
    cards: tuple[CardBandwidth, ...] = ()
    """Network cards whose speed is known, and what they are promised to whom."""
    memory: MemoryAdvice | None = None
    """What is advised of memory; what it wishes of cgroups is among the changes."""
    node: NodeView = NodeView()
    containers: tuple[ContainerView, ...]
    others: tuple[ContainerView, ...] = ()
    """Cgroups of no listed pod that run, wait or reclaim most, those first, and then quiet ones that hold most memory;
    `cpu_cores` is without the groups below."""
    other_cgroups: int = 0
    """How many there are of them in all."""
    changes: tuple[ChangeView, ...]
    evictions: EvictionView | None = None
    """None where no eviction plugin is configured."""
    sources: tuple[SourceStatus, ...]
    banner: tuple[str, ...]
    bounds_us: tuple[int, ...] = BOUNDS_US


def build(finished: Round) -> View:
    """The view of a round; rates are absent in the first one."""
    snapshot, previous, advice = finished.snapshot, finished.previous, finished.advice
    change = rates(previous, snapshot) if previous else None
    rate_of = change.cgroups if change else {}
    parts = members(snapshot.cgroups, [container.cgroup for pod in snapshot.pods for container in pod.containers])
    containers = tuple(
        managed(pod, container, snapshot, previous, rate_of.get(container.cgroup), parts.get(container.cgroup, ()))
        for pod in snapshot.pods
        for container in pod.containers
    )
    reclaimed = [c.cpu_cores for c in containers if c.qos == "reclaimed_cores" and c.cpu_cores is not None]
    ours = {c.cgroup for c in containers}
    reclaims = _reclaims(snapshot, previous, change) if previous and change else {}
    ended = [rate.wait for rate in change.cgroups.values() if rate.wait is not None] if change else []
    return View(
        seq=snapshot.seq,
        taken_at_ms=snapshot.taken_at_ns // 1_000_000,
        wall_time_ms=snapshot.wall_time_ns // 1_000_000,
        act=finished.act.value,
        trigger=finished.trigger,
        interval_ms=change.node.interval_ns / 1e6 if change else None,
        round_ms=finished.duration_ns / 1e6,
        policy=advice.policy if advice else "",
        action=advice.action if advice else "",
        rule=advice.verdict.rule if advice else "",
        reason=advice.verdict.text if advice else "",
        threshold=advice.verdict.threshold if advice else None,
        node_cpus=len(snapshot.topology.cpus),
        busy_cores=change.node.busy_cores if change else None,
        steal_cores=change.node.steal_cores if change else None,
        cpu_pressure_ratio=change.node.cpu_pressure_ratio if change else None,
        lent_cores=advice.lent_cores if advice else None,
        reclaimed_cores=sum(reclaimed) if reclaimed else None,
        requirement_cores=advice.requirement_cores if advice else None,
        headroom=advice.headroom if advice else None,
        advertised=advice.advertised if advice else None,
        shadow=_shadow(finished.shadow),
        answers=_answers(finished.node),
        forecasts=finished.forecasts,
        pools={pool.name: format_cpu_list(pool.cpus) for pool in advice.pools} if advice else {},
        sizes=advice.cpu.sizes if advice else (),
        regions=advice.cpu.regions if advice else (),
        rejected=advice.rejected if advice else {},
        cards=advice.cards if advice else (),
        memory=_without_wishes(finished.memory),
        node=node_view(snapshot, previous, change.node.interval_ns if change else None, ended, reclaims.values()),
        containers=containers,
        others=_others(snapshot, previous, change, reclaims, ours) if previous and change else (),
        other_cgroups=sum(path not in ours for path in snapshot.cgroups),
        changes=tuple(change_view(o) for o in finished.done if o.status is not Status.UNCHANGED),
        evictions=eviction_view(finished),
        sources=snapshot.sources,
        banner=finished.banner,
    )


def _shadow(advice: Advice | None) -> ShadowView | None:
    if advice is None:
        return None
    return ShadowView(
        policy=advice.policy,
        action=advice.action,
        reason=advice.verdict.text,
        lent_cores=advice.lent_cores,
        headroom_cores=advice.headroom_cores,
    )


def _answers(node: NodeAdvice | None) -> tuple[AnswerView, ...]:
    if node is None:
        return ()
    said = {"power": node.power, "overcommit": node.overcommit}
    return tuple(
        AnswerView(topic=topic, rule=answer.verdict.rule, text=answer.verdict.text)
        for topic, answer in said.items()
        if answer is not None
    )


def _without_wishes(memory: MemoryAdvice | None) -> MemoryAdvice | None:
    return None if memory is None else msgspec.structs.replace(memory, wishes=())


def past(view: View) -> View:
    """What five minutes of rounds are kept of: the pictures over time need no more, and memory is dear."""
    node = msgspec.structs.replace(view.node, zones=(), oom_victims=())
    return msgspec.structs.replace(
        view,
        node=node,
        forecasts=(),
        containers=tuple(map(past_of, view.containers)),
        others=tuple(map(past_of, view.others)),
        sizes=(),
        regions=(),
        rejected={},
        cards=(),
        memory=None,
        evictions=None,
        headroom=None,
        advertised=None,
    )


def change_view(outcome: Outcome) -> ChangeView:
    """A decision and what came of it, flattened for a table."""
    decision = outcome.decision
    return ChangeView(
        pod=decision.pod,
        cgroup=decision.cgroup,
        knob=decision.knob.value,
        before=outcome.before,
        value=decision.value,
        status=outcome.status.value,
        rule=decision.verdict.rule,
        text=decision.verdict.text,
        error=outcome.error,
    )


def _reclaims(snapshot: Snapshot, previous: Snapshot, change: Rates) -> dict[str, ReclaimView]:
    found = {}
    for path, rate in change.cgroups.items():
        after = snapshot.cgroups[path].reclaim
        view = reclaim_view(previous.cgroups[path].reclaim, after, rate.interval_ns) if after is not None else None
        if view is not None:
            found[path] = view
    return found


def _others(
    snapshot: Snapshot, previous: Snapshot, change: Rates, reclaims: Mapping[str, ReclaimView], ours: set[str]
) -> tuple[ContainerView, ...]:
    own = _own({path: rate.cpu_cores for path, rate in change.cgroups.items() if rate.cpu_cores is not None})

    wanted = {path: 0.0 for path in change.cgroups if path not in ours}
    for path in wanted:
        stalled = reclaims.get(path)
        stalled_s = (stalled.direct_ms + stalled.limit_ms) / 1000 if stalled else 0.0
        demand = own.get(path, 0.0) + (change.cgroups[path].wait_cores or 0.0) + stalled_s
        if demand >= LEAST_DEMAND:
            wanted[path] = demand
    sizes = {path: size for path in change.cgroups if (size := _size(snapshot.cgroups[path])) is not None}
    held = _own(sizes)
    busy = sorted((path for path, cores in wanted.items() if cores), key=lambda path: (-wanted[path], path))
    large = nlargest(LARGEST, (path for path in wanted if held.get(path, 0) >= LEAST_HELD_BYTES), key=held.__getitem__)
    limits = {path: snapshot.cgroups[path].limits.memory_max_bytes for path in wanted}
    full = {path: sizes[path] / limit for path, limit in limits.items() if limit and path in sizes}
    places = busy[: MOST_OTHERS - LARGEST - FULLEST]
    shown = list(dict.fromkeys((*places, *large, *nlargest(FULLEST, full, key=full.__getitem__), *busy)))[:MOST_OTHERS]
    return tuple(
        unmanaged(snapshot.cgroups[path], previous.cgroups.get(path), change.cgroups[path], own.get(path))
        for path in sorted(shown, key=lambda path: (-wanted[path], -held.get(path, 0), path))
    )


def _size(sample: CgroupSample) -> int | None:
    """The working set; all of the memory where memory.stat was not read yet."""
    held = working_set(sample)
    return sample.memory_bytes if held is None else held


def _own(used: Mapping[str, float]) -> dict[str, float]:
    """What each cgroup has without the groups below it: the kernel's counters include those, run-queue waits do not."""
    own = dict(used)
    for path, amount in used.items():
        if amount and path != "/":
            parent = path.rpartition("/")[0] or "/"
            if parent in own:
                own[parent] -= amount
    # The files are read one after the other, so a difference may come out below zero.
    return {path: max(amount, 0.0) for path, amount in own.items()}
