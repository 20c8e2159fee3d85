"""Turns one cycle and the totals since the start into metric families, by the rows of the catalogue.
Pure. Prometheus and OpenTelemetry both render these families. The kernel's nanoseconds and microseconds become
seconds in this package and nowhere else. A fact that is None has no sample, and a row without samples is left out.
Limits show the value that the actuator has read back in the same cycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b

import msgspec

from api.advice import NodeAdvice, PowerActionKind
from api.colocation import ColocationTotals, totals_since
from api.decision import ActMode, Cycle, Outcome, OutcomeStatus
from api.knobs import Knob
from api.metric_profiles import MetricProfile, has_metric
from api.metrics import AGENT_METRICS_BY_NAME
from api.snapshot import UNLIMITED, CgroupLimits, Snapshot
from api.text import encodable
from api.units import NS_PER_S
from exporters.prometheus.cgroup_families import cgroup_families, count_dropped
from exporters.prometheus.decision_families import (
    VictimCounts,
    advice_families,
    colocation_families,
    count_kills,
    eviction_families,
    forecast_families,
    headroom_families,
)
from exporters.prometheus.late_series import LateSeries
from exporters.prometheus.metric_family import (
    Exemplar,
    Labels,
    MetricDistribution,
    MetricFamily,
    MetricPoint,
    point_family,
)
from exporters.prometheus.node_families import MAX_INTERFACES, node_families
from exporters.prometheus.profile_filter import SeriesScope


def cycle_trace_ids(snapshot: Snapshot) -> tuple[int, int]:
    """Trace id (128 bits) and span id (64 bits) of the cycle of this snapshot; never zero."""
    seed = f"{snapshot.boot_id}/{snapshot.seq}/{snapshot.wall_time_ns}".encode(errors="surrogateescape")
    digest = blake2b(seed, digest_size=24).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1


def exemplar_labels(snapshot: Snapshot, *, traced: bool) -> tuple[tuple[str, str], ...]:
    """Labels of the exemplars of a cycle, below 128 characters; trace and span only if spans are sent."""
    own = (("round", str(snapshot.seq)),)
    if not traced:
        return own
    trace_id, span_id = cycle_trace_ids(snapshot)
    return (("trace_id", f"{trace_id:032x}"), ("span_id", f"{span_id:016x}"), *own)


_READ_BACK = (OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED)


def with_limits_read_back(finished: Cycle) -> Snapshot:
    """Return the snapshot of the cycle with every limit that its outcomes have read back."""
    snapshot = finished.snapshot
    changed: dict[str, CgroupLimits] = {}
    for outcome in finished.done:
        path, sample = outcome.decision.cgroup, snapshot.cgroups.get(outcome.decision.cgroup)
        if sample is None or outcome.status not in _READ_BACK or outcome.after is None:
            continue
        before = changed.get(path, sample.limits)
        after = msgspec.structs.replace(before, **_limit_fields(outcome))
        if after != before:
            changed[path] = after
    if not changed:
        return snapshot
    cgroups = dict(snapshot.cgroups)
    for path, limits in changed.items():
        cgroups[path] = msgspec.structs.replace(cgroups[path], limits=limits)
    return msgspec.structs.replace(snapshot, cgroups=cgroups)


def _limit_fields(outcome: Outcome) -> Mapping[str, int | str | bool]:
    knob, text = outcome.decision.knob, outcome.after or ""
    if knob is Knob.QUOTA:
        quota, _, period = text.partition(" ")
        return {"quota_us": -1 if quota == "max" else int(quota), "period_us": int(period)}
    if knob is Knob.IDLE:
        return {"idle": text == "1"}
    if knob is Knob.CPUSET:
        return {"cpus": text}
    if knob is Knob.MEMORY_MAX:
        return {"memory_max_bytes": UNLIMITED if text == "max" else int(text)}
    return {}


MAX_CGROUPS_WITH_SERIES = 512
"""Maximum number of cgroups with series; exporters.maxCgroups in the settings."""


class RecordingState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the recording."""

    writable: bool
    size_bytes: int
    cycles: int
    lost_cycles: int


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the agent that are not part of a cycle; None has no sample."""

    interval_s: float | None = None
    runq_latency_target_s: float | None = None
    journal_writable: bool | None = None
    """None if decisions are kept in memory only."""
    otel_failures: int | None = None
    """Failed exports; None if nothing is sent to OpenTelemetry."""
    otel_dropped_spans: int | None = None
    traced: bool = False
    """Whether cycles are sent as spans, so that exemplars can refer to them."""
    syncs: Mapping[str, tuple[int, float]] = {}
    """Number of synced writes of state files, and their time in seconds, by file."""
    sync_pending_s: float | None = None
    """Age of the oldest such write that is under way; 0 if none is, None if the agent writes no files."""
    recording: RecordingState | None = None
    earlier_totals: ColocationTotals | None = None
    """Totals of colocation of the agents before this one; None if it began with none."""
    metric_profile: MetricProfile = MetricProfile.FULL
    max_cgroups: int = MAX_CGROUPS_WITH_SERIES
    api_requests: Mapping[tuple[str, str, str], int] = {}
    """Requests by method, resource and status; empty without a cluster."""
    nri_answers: Mapping[str, int] = {}
    """Responses by kind; empty without a container runtime."""
    applied_configs: Mapping[Labels, bool] = {}
    """Applied state by kind, key and hash of the object."""
    calls: Mapping[tuple[str, str, str], int] = {}
    """Calls over sockets by side, method and code; empty if no socket is used."""
    advice_ages_s: Mapping[tuple[str, str], float] = {}
    """Age of advice by direction (`given` or `taken`) and resource."""
    peers: Mapping[str, int] = {}
    """Number of peers of our sockets by role."""

    @property
    def scope(self) -> SeriesScope:
        """What limits the series of cgroups."""
        return SeriesScope(self.metric_profile, self.max_cgroups)


class EventTally(msgspec.Struct, frozen=True):
    """Number of events of one kind, and the latest cycle with one."""

    count: int
    latest: Exemplar


class MetricsState(msgspec.Struct, frozen=True, kw_only=True):
    """State of an exporter: the latest cycle, and counters over all cycles since the start."""

    version: str
    about: AgentInfo = AgentInfo()
    latest: Cycle | None = None
    decisions: Mapping[Labels, EventTally] = {}
    """Decisions by knob, rule and outcome."""
    repairs: Mapping[Labels, EventTally] = {}
    """Repairs by knob."""
    cycles: Mapping[Labels, EventTally] = {}
    """Cycles by trigger and action; the action is empty without advice."""
    victims: VictimCounts = VictimCounts()
    kills: Mapping[Labels, int] = {}
    """Kills by Katalyst's reason."""
    dropped: Mapping[str, int] = {}
    """Series dropped because of a limit, summed over cycles."""

    def after(self, finished: Cycle, about: AgentInfo | None = None) -> MetricsState:
        """Return a copy with one more cycle; the old value may still be in use by a renderer."""
        info = self.about if about is None else about
        snapshot = finished.snapshot
        exemplar = Exemplar(exemplar_labels(snapshot, traced=info.traced), 1, snapshot.wall_time_ns)
        decisions, repairs = dict(self.decisions), dict(self.repairs)
        for outcome in finished.done:
            decision = outcome.decision
            _count_event(decisions, (decision.knob.value, decision.reason.rule, outcome.status.value), exemplar)
            if outcome.repaired:
                _count_event(repairs, (decision.knob.value,), exemplar)
        cycles = dict(self.cycles)
        _count_event(cycles, (finished.trigger, finished.advice.action if finished.advice else ""), exemplar)
        now = _dropped_series(snapshot, info.scope)
        return MetricsState(
            version=self.version,
            about=info,
            latest=finished,
            decisions=decisions,
            repairs=repairs,
            cycles=cycles,
            victims=self.victims.after(finished),
            kills=count_kills(self.kills, finished),
            dropped={what: self.dropped.get(what, 0) + count for what, count in now.items()},
        )


def metric_families(observed: MetricsState, late: LateSeries | None = None) -> Iterator[MetricFamily]:
    """Yield every family of the metric profile that has values, by scope.

    `late` has the series that have started, for formats without the start time of a counter (late_series.py).
    """
    profile = observed.about.metric_profile
    for family in _every_family(observed, late):
        if (family.points or family.distributions) and has_metric(profile, family.metric):
            yield family


def _every_family(observed: MetricsState, late: LateSeries | None) -> Iterator[MetricFamily]:
    finished, about = observed.latest, observed.about
    if finished is not None:
        snapshot = finished.snapshot
        trace = exemplar_labels(snapshot, traced=about.traced)
        yield from node_families(snapshot)
        in_force = with_limits_read_back(finished)
        yield from cgroup_families(in_force, finished, trace, about.scope, late)
        yield _indicators(snapshot)
        yield from _advice_totals(finished)
        yield from advice_families(finished)
        if finished.evictions is not None:
            yield from eviction_families(finished.evictions)
        yield from forecast_families(finished.forecasts)
        if finished.totals is not None:
            totals, earlier = finished.totals, about.earlier_totals
            yield from colocation_families(totals if earlier is None else totals_since(totals, earlier))
    yield _tallies("dioptase_decisions_total", observed.decisions)
    yield _tallies("dioptase_knob_repairs_total", observed.repairs)
    yield _tallies("dioptase_rounds_total", observed.cycles)
    yield point_family("dioptase_eviction_victims_total", observed.victims.counts.items())
    yield point_family("dioptase_eviction_kills_total", observed.kills.items())
    if finished is not None:
        yield from _agent_families(finished)
    yield from _agent_info_families(about)
    yield point_family(
        "dioptase_exporter_dropped_total", (((what,), count) for what, count in observed.dropped.items())
    )
    yield point_family("dioptase_build_info", [((observed.version,), 1)])


def _count_event(tallies: dict[Labels, EventTally], key: Labels, exemplar: Exemplar) -> None:
    before = tallies.get(key)
    tallies[key] = EventTally(before.count + 1 if before else 1, exemplar)


def _tallies(name: str, tallies: Mapping[Labels, EventTally]) -> MetricFamily:
    shown = (
        MetricPoint((), tuple(map(encodable, key)), tally.count, tally.latest) for key, tally in sorted(tallies.items())
    )
    return MetricFamily(AGENT_METRICS_BY_NAME[name], points=tuple(shown))


def _dropped_series(snapshot: Snapshot, scope: SeriesScope) -> Mapping[str, int]:
    return {**count_dropped(snapshot, scope), "interface": max(0, len(snapshot.node.interfaces) - MAX_INTERFACES)}


def _indicators(snapshot: Snapshot) -> MetricFamily:
    return MetricFamily(
        AGENT_METRICS_BY_NAME["dioptase_indicator_latency_seconds"],
        distributions=tuple(
            MetricDistribution((), _namespace_and_name(key), indicator.bounds_s, indicator.buckets, indicator.sum_s)
            for key, indicator in snapshot.indicators.items()
        ),
    )


def _namespace_and_name(key: str) -> tuple[str, str]:
    namespace, _, name = encodable(key).partition("/")
    return namespace, name


def _advice_totals(finished: Cycle) -> Iterator[MetricFamily]:
    if (shadow := finished.shadow) is not None:
        yield point_family("dioptase_shadow_requirement_cores", [((shadow.policy,), shadow.requirement_cores)])
        yield point_family("dioptase_shadow_headroom_cores", [((shadow.policy,), shadow.headroom_cores)])
        yield point_family("dioptase_shadow_lent_cores", [((shadow.policy,), shadow.reclaimable_cores)])
    if finished.node is not None:
        yield from _node_advice(finished.node)
    advice = finished.advice
    if advice is None:
        return
    yield point_family("dioptase_pool_cpus", (((pool.name,), len(pool.cpus)) for pool in advice.pools))
    yield point_family("dioptase_share_requirement_cores", [((), advice.requirement_cores)])
    yield from headroom_families(advice)
    yield point_family("dioptase_reclaim_lent_cores", [((), advice.reclaimable_cores)])
    if (verdict := advice.quota_verdict) is not None:
        name = "helped" if verdict.helped else "did_not_help"
        trials = (("with", verdict.with_quota_ns), ("without", verdict.without_quota_ns))
        yield point_family(
            "dioptase_quota_trial_runq_wait_seconds", (((name, quota), ns / NS_PER_S) for quota, ns in trials)
        )


def _node_advice(node: NodeAdvice) -> Iterator[MetricFamily]:
    if (power := node.power) is not None:
        yield point_family(
            "dioptase_power_action", (((kind.value,), int(kind is power.kind)) for kind in PowerActionKind)
        )
        cap = None if node.power_cap is None else node.power_cap.target_watts
        yield point_family("dioptase_power_cap_watts", [((), cap)])
        yield point_family("dioptase_power_evict_pods", [((), power.count)])
    if (families := node.overcommit) is not None:
        ratios = {"cpu": families.cpu_ratio, "memory": families.memory_ratio}
        yield point_family("dioptase_overcommit_ratio", (((resource,), ratio) for resource, ratio in ratios.items()))


def _agent_families(finished: Cycle) -> Iterator[MetricFamily]:
    snapshot = finished.snapshot
    yield point_family("dioptase_round_duration_seconds", [((), finished.duration_ns / NS_PER_S)])
    yield point_family("dioptase_snapshot_timestamp_seconds", [((), snapshot.wall_time_ns / NS_PER_S)])
    yield point_family("dioptase_act_mode", (((mode.value,), int(mode is finished.act)) for mode in ActMode))
    yield point_family("dioptase_source_up", (((s.name, s.detail), int(s.ok)) for s in snapshot.sources))
    yield point_family(
        "dioptase_source_duration_seconds", (((s.name,), s.duration_ns / NS_PER_S) for s in snapshot.sources)
    )
    yield point_family("dioptase_source_lost_events_total", (((s.name,), s.lost_events) for s in snapshot.sources))
    yield point_family("dioptase_limitations", [((), len(finished.startup_warnings))])


def _agent_info_families(about: AgentInfo) -> Iterator[MetricFamily]:
    writable, recording = about.journal_writable, about.recording
    yield point_family("dioptase_round_interval_seconds", [((), about.interval_s)])
    yield point_family("dioptase_latency_target_seconds", [((), about.runq_latency_target_s)])
    yield point_family("dioptase_journal_writable", [((), None if writable is None else int(writable))])
    syncs = sorted(about.syncs.items())
    yield point_family("dioptase_state_syncs_total", (((file,), count) for file, (count, _) in syncs))
    yield point_family("dioptase_state_sync_seconds_total", (((file,), seconds) for file, (_, seconds) in syncs))
    yield point_family("dioptase_state_sync_pending_seconds", [((), about.sync_pending_s)])
    yield point_family("dioptase_api_requests_total", list(about.api_requests.items()))
    yield point_family(
        "dioptase_nri_containers_total", (((answer,), count) for answer, count in about.nri_answers.items())
    )
    yield point_family("dioptase_protocol_calls_total", list(about.calls.items()))
    yield point_family("dioptase_advice_age_seconds", list(about.advice_ages_s.items()))
    yield point_family("dioptase_protocol_peers", (((role,), count) for role, count in about.peers.items()))
    yield point_family(
        "dioptase_config_obeyed", ((labels, int(held)) for labels, held in about.applied_configs.items())
    )
    yield point_family("dioptase_otel_failures_total", [((), about.otel_failures)])
    yield point_family("dioptase_otel_dropped_spans_total", [((), about.otel_dropped_spans)])
    if recording is not None:
        yield point_family("dioptase_recording_writable", [((), int(recording.writable))])
        yield point_family("dioptase_recording_size_bytes", [((), recording.size_bytes)])
        yield point_family("dioptase_recording_rounds_total", [((), recording.cycles)])
        yield point_family("dioptase_recording_lost_rounds_total", [((), recording.lost_cycles)])
