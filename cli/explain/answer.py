"""Collects what is known about a pod, cgroup, knob, pool, region, plugin or memory from one agent's data. Pure.
From a knob it leads to the decisions, the reason of the newest one, and the sources of its inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from api.advice import Headroom, MemoryAdvice, NicBandwidth, PoolSize, RegionAdvice
from api.decision import JournalEntry, OutcomeStatus
from api.eviction import EvictionEntry
from api.forecast import Forecast
from api.knobs import Knob, Reason
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import ComponentHealth, Snapshot
from exporters.view.cycle_view import View
from exporters.view.decision_view import NodeAdviceView, ShadowView, ThresholdView

RECLAIM_POOL = "reclaim"
MEMORY_TARGET = "memory"
"""What a person asks for who asks about memory as a whole."""


class ReclaimableCpu(msgspec.Struct, frozen=True, kw_only=True):
    """What reclaimed pods have of the CPU. Cores; None where inputs are missing."""

    reclaimable_cores: float | None = msgspec.field(name="lent_cores")
    requirement_cores: float | None
    headroom: Headroom | None
    reported_headroom: Headroom | None = msgspec.field(name="advertised")


class PoolExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of CPUs, as the latest round advised it."""

    name: str
    cpus: str
    sizes: tuple[PoolSize, ...] = ()
    regions: tuple[RegionAdvice, ...] = ()
    """Whose pods run on it, and what they get."""
    lending: ReclaimableCpu | None = None
    """Of the pool of reclaimed pods alone."""


class PodExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as it stands."""

    pod: str
    qos: str
    regions: tuple[RegionAdvice, ...] = ()
    """That its containers are provided for in; none of a pod that nothing is provided for."""
    lending: ReclaimableCpu | None = None
    """Of a reclaimed pod alone: what it has a part in."""
    rejected: Reason | None = None
    """Why its wish for CPUs or network bandwidth cannot be fulfilled."""
    cards: tuple[NicBandwidth, ...] = ()
    """Network cards that it is promised bandwidth of."""
    problems: tuple[str, ...] = ()
    """What its labels and annotations say that cannot be taken as said."""
    untouched: bool = False
    """Whether the journal has no decision on a cgroup of it that is there."""
    past: int | None = None
    """The newest decision on a cgroup that is gone, of an earlier container of it or an earlier pod that had its name."""

    @property
    def troubled(self) -> bool:
        return self.rejected is not None or bool(self.problems)


def explain_pools(target: str | None, view: View) -> tuple[PoolExplanation, ...]:
    """Those that are called so, or that a region of that name is on; all where nothing is asked for."""
    names = sorted({*view.pools, *(size.pool for size in view.sizes)})
    return tuple(
        story for name in names if target in ((story := _explain_pool(name, view)).name, None, *_region_names(story))
    )


def _reclaimable_cpu(view: View) -> ReclaimableCpu:
    return ReclaimableCpu(
        reclaimable_cores=view.reclaimable_cores,
        requirement_cores=view.requirement_cores,
        headroom=view.headroom,
        reported_headroom=view.reported_headroom,
    )


def _explain_pool(name: str, view: View) -> PoolExplanation:
    return PoolExplanation(
        name=name,
        cpus=view.pools.get(name, ""),
        sizes=tuple(size for size in view.sizes if size.pool == name),
        regions=tuple(one for one in view.regions if one.region.pool == name),
        lending=_reclaimable_cpu(view) if name == RECLAIM_POOL else None,
    )


def _region_names(story: PoolExplanation) -> tuple[str, ...]:
    return tuple(one.region.name for one in story.regions)


def explain_pods(
    wanted: Collection[str], touched: Collection[str], view: View, snapshot: Snapshot
) -> tuple[PodExplanation, ...]:
    """The pods of these names, in their order; `touched` are those of which a knob is told about."""
    return tuple(
        PodExplanation(
            pod=pod.key,
            qos=pod.qos.value,
            regions=tuple(one for one in view.regions if _covers_pod(one, pod)),
            lending=_reclaimable_cpu(view) if pod.qos is QoSLevel.RECLAIMED else None,
            rejected=view.rejected.get(pod.key),
            cards=tuple(card for card in view.cards if pod.key in card.pods),
            problems=pod.problems,
            untouched=pod.key not in touched,
        )
        for pod in sorted(snapshot.pods, key=lambda pod: pod.key)
        if pod.key in wanted
    )


def pods_with_problems(view: View, snapshot: Snapshot) -> frozenset[str]:
    """Pods of which something could not be done or understood."""
    return frozenset(view.rejected).union(pod.key for pod in snapshot.pods if pod.problems)


def explain_memory(target: str | None, view: View) -> MemoryAdvice | None:
    """What is advised of memory, where everything or memory, or the pool that it is promised to, is asked for."""
    return view.memory if target in (None, MEMORY_TARGET, RECLAIM_POOL) else None


def _covers_pod(one: RegionAdvice, pod: Pod) -> bool:
    return any(container.cgroup in one.region.containers for container in pod.containers)


class SourceReadTime(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a source that is older than the rest of it."""

    source: str
    """Its name in the snapshot."""
    what: str
    read_at_ns: int
    """CLOCK_REALTIME; of several, when the oldest of them was read."""


def older_readings(snapshot: Snapshot) -> tuple[SourceReadTime, ...]:
    """Of the node's rare files, of those of listed pods' cgroups, and of what pods say of themselves, where there are any."""
    paths = [container.cgroup for pod in snapshot.pods for container in pod.containers]
    samples = [sample for path in paths if (sample := snapshot.cgroups.get(path)) is not None]
    node_ns = snapshot.node.files_read_at_ns
    # Pods are asked on the clock that nobody sets.
    set_ns = snapshot.wall_time_ns - snapshot.taken_at_ns
    found = (
        ("node", "zones, vmstat, NUMA nodes, disks and file systems", [] if node_ns is None else [node_ns]),
        (
            "cgroups",
            "memory.stat, numa_stat and io.stat of pods",
            [sample.files_read_at_ns for sample in samples if sample.files_read_at_ns is not None],
        ),
        ("indicators", "the oldest", [each.sampled_at_ns + set_ns for each in snapshot.indicators.values()]),
    )
    return tuple(SourceReadTime(source=source, what=what, read_at_ns=min(at)) for source, what, at in found if at)


MAX_EARLIER = 3
MAX_EVENTS = 8
IN_FORCE_STATUSES = (OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED)


class KnobHistory(msgspec.Struct, frozen=True, kw_only=True):
    """One knob of one cgroup."""

    pod: str
    cgroup: str
    knob: str
    value: str | None
    """What the kernel holds as far as the agent saw; None where no decision ever read it."""
    newest: JournalEntry
    in_force: JournalEntry | None
    """The decision that made the value, where the newest did not: it was dry, refused or met another cgroup."""
    earlier: tuple[JournalEntry, ...]
    """Up to three before it, newest first."""
    later: JournalEntry | None = None
    """Where a decision was asked for by its number: the newest one on this knob, if that is another."""
    gone: bool = False
    """Whether that cgroup is not there any more: an earlier container's, or an earlier pod's that had the same name."""


class EvictionHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one pod's evictions."""

    pod: str
    terminating: bool = msgspec.field(name="leaving")
    """Whether it was asked to leave and is still here."""
    entries: tuple[EvictionEntry, ...]
    """The latest ones, newest first."""


class LatestCycle(msgspec.Struct, frozen=True, kw_only=True):
    """The latest round, which every explanation ends in."""

    seq: int
    wall_time_ns: int
    age_s: float
    act: str
    policy: str
    action: str
    rule: str
    text: str
    threshold: float | None
    shadow: ShadowView | None
    answers: tuple[NodeAdviceView, ...]
    forecasts: tuple[Forecast, ...]
    sources: tuple[ComponentHealth, ...]
    readings: tuple[SourceReadTime, ...]
    """What of them is older than the round."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was asked for."""

    now: LatestCycle
    knobs: tuple[KnobHistory, ...] = ()
    pods: tuple[PodExplanation, ...] = ()
    """Those that were asked for; without a target those in trouble."""
    pools: tuple[PoolExplanation, ...] = ()
    memory: MemoryAdvice | None = None
    evictions: tuple[EvictionHistory, ...] = ()
    thresholds: tuple[ThresholdView, ...] = ()
    """Of the eviction plugin that was asked for; else those that are met."""

    @property
    def found(self) -> bool:
        return bool(self.knobs or self.pods or self.pools or self.memory or self.evictions or self.thresholds)


def explain_target(
    target: str | None,
    view: View,
    entries: Sequence[JournalEntry],
    snapshot: Snapshot,
    now_ns: int,
    evictions: Sequence[EvictionEntry] = (),
) -> Explanation:
    """What is known about a pod, a cgroup, a knob, a pool, a region, memory or an eviction plugin; of everything where no
    target is given.

    Entries are oldest first. `now_ns` is CLOCK_REALTIME.
    """
    known = knob_histories(_entries_until(target, entries), snapshot)
    here = {pod.key for pod in snapshot.pods}
    # Who asks about a pod that is here means this one: what was decided of another that had its name is told by itself.
    past = [story for story in known if story.gone and story.pod in here and target and _is_pod(story.pod, target)]
    knobs = tuple(story for story in known if (target is None or is_about_target(story, target)) and story not in past)
    if _event_number(target) is not None:
        knobs = tuple(msgspec.structs.replace(story, later=_later_entry(story, entries)) for story in knobs)
    wanted = pods_with_problems(view, snapshot)
    if target is not None:
        wanted = frozenset(pod.key for pod in snapshot.pods if _is_about_pod(pod, target))
    age_s = (now_ns - snapshot.wall_time_ns) / 1e9
    now = LatestCycle(
        seq=snapshot.seq, wall_time_ns=snapshot.wall_time_ns, age_s=age_s, act=view.act, policy=view.policy,
        action=view.action, rule=view.rule, text=view.reason, threshold=view.threshold, shadow=view.shadow,
        answers=view.answers, forecasts=view.forecasts, sources=snapshot.sources, readings=older_readings(snapshot),
    )  # fmt: skip
    touched = {story.pod for story in knobs if not story.gone}
    thresholds = view.evictions.thresholds if view.evictions is not None else ()
    return Explanation(
        now=now,
        knobs=knobs,
        pods=tuple(_with_last_decision(each, past) for each in explain_pods(wanted, touched, view, snapshot)),
        pools=explain_pools(target, view),
        memory=explain_memory(target, view),
        evictions=_eviction_histories(target, view, evictions),
        thresholds=tuple(t for t in thresholds if target == t.plugin or (target is None and t.met != "not-met")),
    )


def _with_last_decision(pod: PodExplanation, past: Sequence[KnobHistory]) -> PodExplanation:
    """With the newest decision of those on cgroups of its name that are gone."""
    newest = max((story.newest.seq for story in past if story.pod == pod.pod), default=None)
    return msgspec.structs.replace(pod, past=newest)


def _eviction_histories(
    target: str | None, view: View, evicted: Sequence[EvictionEntry]
) -> tuple[EvictionHistory, ...]:
    leaving = view.evictions.terminating if view.evictions is not None else ()
    by_pod: dict[str, list[EvictionEntry]] = {pod: [] for pod in leaving}
    for entry in evicted:
        by_pod.setdefault(entry.pod, []).append(entry)
    return tuple(
        EvictionHistory(pod=pod, terminating=pod in leaving, entries=tuple(reversed(by_pod[pod][-MAX_EVENTS:])))
        for pod in sorted(by_pod)
        if target is None or _is_pod(pod, target) or any(e.victim and e.victim.plugin == target for e in by_pod[pod])
    )


def _event_number(target: str | None) -> int | None:
    """The number of a decision, as in `#17`."""
    digits = (target or "").removeprefix("#")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None


def _entries_until(target: str | None, entries: Sequence[JournalEntry]) -> Sequence[JournalEntry]:
    """All entries, or those that one was preceded by where it is asked for by its number: its story as it was then."""
    event = _event_number(target)
    return entries if event is None else [entry for entry in entries if entry.seq <= event]


def _later_entry(story: KnobHistory, entries: Sequence[JournalEntry]) -> JournalEntry | None:
    """The newest decision on that knob after the story's own."""
    same = [entry for entry in entries if entry.seq > story.newest.seq and _knob_key(entry) == _knob_key(story.newest)]
    return same[-1] if same else None


def _knob_key(entry: JournalEntry) -> tuple[str, str, str]:
    decision = entry.outcome.decision
    return (decision.pod, decision.cgroup, decision.knob.value)


def knob_histories(entries: Sequence[JournalEntry], snapshot: Snapshot | None = None) -> list[KnobHistory]:
    """One story per knob and cgroup, in order of pod and knob; of cgroups that the snapshot does not have any more, as such."""
    by_knob: dict[tuple[str, str, str], list[JournalEntry]] = {}
    for entry in entries:
        by_knob.setdefault(_knob_key(entry), []).append(entry)
    found = [_knob_history(key, by_knob[key]) for key in sorted(by_knob)]
    if snapshot is None:
        return found
    return [msgspec.structs.replace(story, gone=_is_removed(story.newest, snapshot)) for story in found]


def _is_removed(entry: JournalEntry, snapshot: Snapshot) -> bool:
    """Whether the cgroup of that entry was there once and is not now, or another one took its path."""
    decision = entry.outcome.decision
    # The node's knobs have no cgroup, and who read none knows of none. What is decided for a container that is just made has
    # the time of the latest round, which was too early to see it.
    if not decision.cgroup_id or not snapshot.cgroups or entry.wall_time_ns >= snapshot.wall_time_ns:
        return False
    there = snapshot.cgroups.get(decision.cgroup)
    return there is None or there.id != decision.cgroup_id


def _knob_history(key: tuple[str, str, str], entries: Sequence[JournalEntry]) -> KnobHistory:
    pod, cgroup, knob = key
    newest = entries[-1]
    made = next((entry for entry in reversed(entries) if entry.outcome.status in IN_FORCE_STATUSES), None)
    outcome = newest.outcome
    value = outcome.after if outcome.after is not None else outcome.before
    if value is None and made is not None and outcome.status is not OutcomeStatus.VANISHED:
        value = made.outcome.after if made.outcome.after is not None else made.outcome.decision.value
    return KnobHistory(
        pod=pod,
        cgroup=cgroup,
        knob=knob,
        value=value,
        newest=newest,
        in_force=None if made is newest else made,
        earlier=tuple(reversed(entries[:-1]))[:MAX_EARLIER],
    )


def is_about_target(story: KnobHistory, target: str) -> bool:
    """Whether a person who says `target` means this knob."""
    names = {knob.name.lower(): knob.value for knob in Knob}
    return (
        story.knob == names.get(target.lower(), target)
        or _is_pod(story.pod, target)
        or _is_cgroup(story.cgroup, target)
        or story.newest.seq == _event_number(target)
    )


def _is_about_pod(pod: Pod, target: str) -> bool:
    return _is_pod(pod.key, target) or any(_is_cgroup(container.cgroup, target) for container in pod.containers)


def _is_pod(pod: str, target: str) -> bool:
    return target in (pod, pod.partition("/")[2])


def _is_cgroup(cgroup: str, target: str) -> bool:
    """The cgroup itself or one above it."""
    return target.startswith("/") and (cgroup + "/").startswith(target.rstrip("/") + "/")


def known_targets(view: View, entries: Sequence[JournalEntry]) -> dict[str, list[str]]:
    """What there is to ask about, by kind."""
    return {
        "pods": sorted({c.pod for c in view.containers} | {e.outcome.decision.pod for e in entries} - {""}),
        "cgroups": sorted({c.cgroup for c in view.containers} | {e.outcome.decision.cgroup for e in entries}),
        "knobs": sorted({e.outcome.decision.knob.value for e in entries}) or [knob.value for knob in Knob],
        "pools": sorted({*view.pools, *(size.pool for size in view.sizes)}),
        "regions": sorted(one.region.name for one in view.regions),
        "plugins": sorted({t.plugin for t in view.evictions.thresholds}) if view.evictions is not None else [],
        "more": [] if view.memory is None else [MEMORY_TARGET],
    }
