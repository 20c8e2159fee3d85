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
from api.units import NS_PER_S
from cli.top.charts import is_online
from exporters.view.cycle_view import View, evaluated_p99_us
from exporters.view.decision_view import ConditionView, NodeAdviceView, ShadowView, ThresholdView

RECLAIM_POOL = "reclaim"
MEMORY_TARGET = "memory"
"""Target that stands for the node's memory."""


class ReclaimableCpu(msgspec.Struct, frozen=True, kw_only=True):
    """CPU for reclaimed pods, in cores; None where inputs are missing."""

    reclaimable_cores: float | None = msgspec.field(name="lent_cores")
    requirement_cores: float | None
    headroom: Headroom | None
    reported_headroom: Headroom | None = msgspec.field(name="advertised")


class PoolExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of CPUs, as advised in the latest cycle."""

    name: str
    cpus: str
    sizes: tuple[PoolSize, ...] = ()
    regions: tuple[RegionAdvice, ...] = ()
    """Regions whose pods run on the pool, with their advice."""
    lending: ReclaimableCpu | None = None
    """Only of the pool of reclaimed pods."""


class PodExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of one pod."""

    pod: str
    qos: str
    regions: tuple[RegionAdvice, ...] = ()
    """Regions of its containers; empty if no region covers the pod."""
    lending: ReclaimableCpu | None = None
    """Only of a reclaimed pod: the CPU that it shares with all reclaimed pods."""
    rejected: Reason | None = None
    """Why its request for CPUs or network bandwidth cannot be met."""
    cards: tuple[NicBandwidth, ...] = ()
    """Network cards on which it has a bandwidth guarantee."""
    problems: tuple[str, ...] = ()
    """Problems of its labels and annotations."""
    untouched: bool = False
    """Whether the journal has no decision on any of its existing cgroups."""
    past: int | None = None
    """Number of the newest decision on a removed cgroup: of an earlier container, or of an earlier pod of the same name."""


def explain_pools(target: str | None, view: View) -> tuple[PoolExplanation, ...]:
    """Return the pools of this name, or with a region of this name; all pools without a target."""
    names = sorted({*view.pools, *(size.pool for size in view.sizes)})
    return tuple(
        pool for name in names if target in ((pool := _explain_pool(name, view)).name, None, *_region_names(pool))
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
        regions=tuple(advice for advice in view.regions if advice.region.pool == name),
        lending=_reclaimable_cpu(view) if name == RECLAIM_POOL else None,
    )


def _region_names(pool: PoolExplanation) -> tuple[str, ...]:
    return tuple(advice.region.name for advice in pool.regions)


def explain_pods(
    names: Collection[str], touched: Collection[str], view: View, snapshot: Snapshot
) -> tuple[PodExplanation, ...]:
    """Return the pods of these names, sorted; `touched` are the pods whose knob histories are shown too."""
    return tuple(
        PodExplanation(
            pod=pod.key,
            qos=pod.qos.value,
            regions=tuple(advice for advice in view.regions if _covers_pod(advice, pod)),
            lending=_reclaimable_cpu(view) if pod.qos is QoSLevel.RECLAIMED else None,
            rejected=view.rejected.get(pod.key),
            cards=tuple(card for card in view.cards if pod.key in card.pods),
            problems=pod.problems,
            untouched=pod.key not in touched,
        )
        for pod in sorted(snapshot.pods, key=lambda pod: pod.key)
        if pod.key in names
    )


def pods_with_problems(view: View, snapshot: Snapshot) -> frozenset[str]:
    """Return the pods with a rejected request or with invalid labels and annotations."""
    return frozenset(view.rejected).union(pod.key for pod in snapshot.pods if pod.problems)


def explain_memory(target: str | None, view: View) -> MemoryAdvice | None:
    """Return the memory advice, if the target is memory, the pool of reclaimed pods, or None."""
    return view.memory if target in (None, MEMORY_TARGET, RECLAIM_POOL) else None


def _covers_pod(advice: RegionAdvice, pod: Pod) -> bool:
    return any(container.cgroup in advice.region.containers for container in pod.containers)


class SourceReadTime(msgspec.Struct, frozen=True, kw_only=True):
    """Read time of a part of a source that is older than the rest of it."""

    source: str
    """Name of the source in the snapshot."""
    what: str
    read_at_ns: int
    """CLOCK_REALTIME in nanoseconds; of several parts the oldest."""


def older_readings(snapshot: Snapshot) -> tuple[SourceReadTime, ...]:
    """Return the read times of the node's rarely read files, of those of pods' cgroups, and of the pods' own metrics."""
    paths = [container.cgroup for pod in snapshot.pods for container in pod.containers]
    samples = [sample for path in paths if (sample := snapshot.cgroups.get(path)) is not None]
    node_ns = snapshot.node.files_read_at_ns
    # Indicators carry CLOCK_MONOTONIC, which cannot be set.
    set_ns = snapshot.wall_time_ns - snapshot.taken_at_ns
    readings = (
        ("node", "zones, vmstat, NUMA nodes, disks and file systems", [] if node_ns is None else [node_ns]),
        (
            "cgroups",
            "memory.stat, numa_stat and io.stat of pods",
            [sample.files_read_at_ns for sample in samples if sample.files_read_at_ns is not None],
        ),
        ("indicators", "the oldest", [each.sampled_at_ns + set_ns for each in snapshot.indicators.values()]),
    )
    return tuple(SourceReadTime(source=source, what=what, read_at_ns=min(at)) for source, what, at in readings if at)


MAX_EARLIER = 3
MAX_EVENTS = 8
IN_FORCE_STATUSES = (OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED)


class KnobHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions on one knob of one cgroup."""

    pod: str
    cgroup: str
    knob: str
    value: str | None
    """The kernel's value as the agent last read it; None if no decision ever read it."""
    newest: JournalEntry
    in_force: JournalEntry | None
    """The decision that wrote the value, if it is not the newest one: that one was dry-run, refused or met another cgroup."""
    earlier: tuple[JournalEntry, ...]
    """Up to three decisions before it, newest first."""
    later: JournalEntry | None = None
    """Only for a target #EVENT: the newest decision on this knob, if it is another one."""
    removed: bool = msgspec.field(default=False, name="gone")
    """Whether the cgroup no longer exists: it belonged to an earlier container, or to an earlier pod of the same name."""


class PodEvictions(msgspec.Struct, frozen=True, kw_only=True):
    """Evictions of one pod."""

    pod: str
    terminating: bool = msgspec.field(name="leaving")
    """Whether the pod has been evicted and still runs."""
    entries: tuple[EvictionEntry, ...]
    """The latest events, newest first."""


class LongestWait(msgspec.Struct, frozen=True, kw_only=True):
    """Run-queue latency of the online container with the highest p99 of a cycle, as policies evaluate it."""

    pod: str
    p99_us: float
    interval_s: float
    """Time since the previous cycle, within which the waits ended."""


class LatestCycle(msgspec.Struct, frozen=True, kw_only=True):
    """The latest cycle; every explanation ends with it."""

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
    """Parts of the sources that are older than the cycle."""
    wait: LongestWait | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `dioptase explain`."""

    now: LatestCycle
    knobs: tuple[KnobHistory, ...] = ()
    pods: tuple[PodExplanation, ...] = ()
    """The pods of the target; without a target those with problems."""
    pools: tuple[PoolExplanation, ...] = ()
    memory: MemoryAdvice | None = None
    evictions: tuple[PodEvictions, ...] = ()
    thresholds: tuple[ThresholdView, ...] = ()
    """Thresholds of the eviction plugin that is the target; otherwise those that are met."""
    conditions: tuple[ConditionView, ...] = ()
    """Conditions in force, with the taint of each: those of the plugin that is the target, or without a target all."""

    @property
    def has_content(self) -> bool:
        return bool(
            self.knobs or self.pods or self.pools or self.memory or self.evictions or self.thresholds or self.conditions
        )


def explain_target(
    target: str | None,
    view: View,
    entries: Sequence[JournalEntry],
    snapshot: Snapshot,
    now_ns: int,
    evictions: Sequence[EvictionEntry] = (),
) -> Explanation:
    """Explain a pod, a cgroup, a knob, a pool, a region, memory or an eviction plugin; everything without a target.

    Entries are oldest first. `now_ns` is CLOCK_REALTIME in nanoseconds.
    """
    histories = knob_histories(_entries_until(target, entries), snapshot)
    present = {pod.key for pod in snapshot.pods}
    # The name of an existing pod means that pod: decisions on an earlier pod of the same name are shown separately.
    earlier_histories = [
        history
        for history in histories
        if history.removed and history.pod in present and target and _is_pod(history.pod, target)
    ]
    about = [pod for pod in snapshot.pods if target is not None and _is_about_pod(pod, target)]
    knobs = tuple(
        history
        for history in histories
        if (target is None or is_about_target(history, target) or _is_above_any(history, about))
        and history not in earlier_histories
    )
    if _event_number(target) is not None:
        knobs = tuple(msgspec.structs.replace(history, later=_later_entry(history, entries)) for history in knobs)
    pod_names = pods_with_problems(view, snapshot)
    if target is not None:
        pod_names = frozenset(pod.key for pod in about)
    age_s = (now_ns - snapshot.wall_time_ns) / NS_PER_S
    now = LatestCycle(
        seq=snapshot.seq, wall_time_ns=snapshot.wall_time_ns, age_s=age_s, act=view.act, policy=view.policy,
        action=view.action, rule=view.rule, text=view.reason, threshold=view.threshold, shadow=view.shadow,
        answers=view.answers, forecasts=view.forecasts, sources=snapshot.sources, readings=older_readings(snapshot),
        wait=_longest_wait(view),
    )  # fmt: skip
    with_decisions = {history.pod for history in knobs if not history.removed}
    thresholds = view.evictions.thresholds if view.evictions is not None else ()
    return Explanation(
        now=now,
        knobs=knobs,
        pods=tuple(
            _with_last_decision(pod, earlier_histories)
            for pod in explain_pods(pod_names, with_decisions, view, snapshot)
        ),
        pools=explain_pools(target, view),
        memory=explain_memory(target, view),
        evictions=_eviction_histories(target, view, evictions),
        thresholds=tuple(t for t in thresholds if target == t.plugin or (target is None and t.met != "not-met")),
        conditions=tuple(
            condition
            for condition in (view.evictions.conditions if view.evictions is not None else ())
            if target in (None, condition.plugin, condition.name)
        ),
    )


def _longest_wait(view: View) -> LongestWait | None:
    waits = [(p99, c.pod) for c in view.containers if is_online(c) and (p99 := evaluated_p99_us(c)) is not None]
    if not waits or view.interval_ms is None:
        return None
    p99_us, pod = max(waits)
    return LongestWait(pod=pod, p99_us=p99_us, interval_s=view.interval_ms / 1000)


def _with_last_decision(pod: PodExplanation, earlier_histories: Sequence[KnobHistory]) -> PodExplanation:
    """Add the newest decision on a removed cgroup of the pod's name."""
    newest = max((history.newest.seq for history in earlier_histories if history.pod == pod.pod), default=None)
    return msgspec.structs.replace(pod, past=newest)


def _eviction_histories(target: str | None, view: View, evicted: Sequence[EvictionEntry]) -> tuple[PodEvictions, ...]:
    terminating = view.evictions.terminating if view.evictions is not None else ()
    by_pod: dict[str, list[EvictionEntry]] = {pod: [] for pod in terminating}
    for entry in evicted:
        by_pod.setdefault(entry.pod, []).append(entry)
    return tuple(
        PodEvictions(pod=pod, terminating=pod in terminating, entries=tuple(reversed(by_pod[pod][-MAX_EVENTS:])))
        for pod in sorted(by_pod)
        if target is None or _is_pod(pod, target) or any(e.victim and e.victim.plugin == target for e in by_pod[pod])
    )


def _event_number(target: str | None) -> int | None:
    """Parse the number of a decision, as in `#17`."""
    digits = (target or "").removeprefix("#")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None


def _entries_until(target: str | None, entries: Sequence[JournalEntry]) -> Sequence[JournalEntry]:
    """Return the entries up to the one that the target names by its number, or all entries."""
    event = _event_number(target)
    return entries if event is None else [entry for entry in entries if entry.seq <= event]


def _later_entry(history: KnobHistory, entries: Sequence[JournalEntry]) -> JournalEntry | None:
    """Return the newest decision on the same knob after the newest one of this history."""
    later = [
        entry for entry in entries if entry.seq > history.newest.seq and _knob_key(entry) == _knob_key(history.newest)
    ]
    return later[-1] if later else None


def _knob_key(entry: JournalEntry) -> tuple[str, str, str]:
    decision = entry.outcome.decision
    return (decision.pod, decision.cgroup, decision.knob.value)


def knob_histories(entries: Sequence[JournalEntry], snapshot: Snapshot | None = None) -> list[KnobHistory]:
    """Return one history per knob and cgroup, by pod and knob; marks removed cgroups if a snapshot is given."""
    by_knob: dict[tuple[str, str, str], list[JournalEntry]] = {}
    for entry in entries:
        by_knob.setdefault(_knob_key(entry), []).append(entry)
    histories = [_knob_history(key, by_knob[key]) for key in sorted(by_knob)]
    if snapshot is None:
        return histories
    return [msgspec.structs.replace(history, removed=_is_removed(history.newest, snapshot)) for history in histories]


def _is_removed(entry: JournalEntry, snapshot: Snapshot) -> bool:
    """Whether the cgroup of this entry existed once and does not now, or another cgroup has taken its path."""
    decision = entry.outcome.decision
    # Node knobs have no cgroup id, nor has a decision that read nothing. A decision for a container that is being created
    # carries the time of the latest cycle, whose snapshot does not have the cgroup yet.
    if not decision.cgroup_id or not snapshot.cgroups or entry.wall_time_ns >= snapshot.wall_time_ns:
        return False
    there = snapshot.cgroups.get(decision.cgroup)
    return there is None or there.id != decision.cgroup_id


def _knob_history(key: tuple[str, str, str], entries: Sequence[JournalEntry]) -> KnobHistory:
    pod, cgroup, knob = key
    newest = entries[-1]
    in_force = next((entry for entry in reversed(entries) if entry.outcome.status in IN_FORCE_STATUSES), None)
    outcome = newest.outcome
    value = outcome.after if outcome.after is not None else outcome.before
    if value is None and in_force is not None and outcome.status is not OutcomeStatus.VANISHED:
        value = in_force.outcome.after if in_force.outcome.after is not None else in_force.outcome.decision.value
    return KnobHistory(
        pod=pod,
        cgroup=cgroup,
        knob=knob,
        value=value,
        newest=newest,
        in_force=None if in_force is newest else in_force,
        earlier=tuple(reversed(entries[:-1]))[:MAX_EARLIER],
    )


def is_about_target(history: KnobHistory, target: str) -> bool:
    """Whether the target names this knob, its pod, its cgroup or its newest decision."""
    names = {knob.name.lower(): knob.value for knob in Knob}
    return (
        history.knob == names.get(target.lower(), target)
        or _is_pod(history.pod, target)
        or _is_cgroup(history.cgroup, target)
        or history.newest.seq == _event_number(target)
    )


def _is_about_pod(pod: Pod, target: str) -> bool:
    return _is_pod(pod.key, target) or any(_is_cgroup(container.cgroup, target) for container in pod.containers)


def _is_above_any(history: KnobHistory, pods: Sequence[Pod]) -> bool:
    """Whether the cgroup of a QoS class or of all reclaimed pods contains one of these pods, so that its knobs apply to it."""
    return not history.pod and any(
        container.cgroup.startswith(f"{history.cgroup}/") for pod in pods for container in pod.containers
    )


def _is_pod(pod: str, target: str) -> bool:
    return target in (pod, pod.partition("/")[2])


def _is_cgroup(cgroup: str, target: str) -> bool:
    """Whether the target is the cgroup itself or an ancestor of it."""
    return target.startswith("/") and (cgroup + "/").startswith(target.rstrip("/") + "/")


def known_targets(view: View, entries: Sequence[JournalEntry]) -> dict[str, list[str]]:
    """Return the valid targets by kind."""
    return {
        "pods": sorted({c.pod for c in view.containers} | {e.outcome.decision.pod for e in entries} - {""}),
        "cgroups": sorted({c.cgroup for c in view.containers} | {e.outcome.decision.cgroup for e in entries}),
        "knobs": sorted({e.outcome.decision.knob.value for e in entries}) or [knob.value for knob in Knob],
        "pools": sorted({*view.pools, *(size.pool for size in view.sizes)}),
        "regions": sorted(advice.region.name for advice in view.regions),
        "plugins": sorted({t.plugin for t in view.evictions.thresholds}) if view.evictions is not None else [],
        "more": [] if view.memory is None else [MEMORY_TARGET],
    }
