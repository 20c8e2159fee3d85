"""One round as metrics: what the exporters know, and every row of the catalogue that it fills.

Pure. Prometheus and OpenTelemetry both render what comes out of here, so a person sees in either exactly what the advisor
saw. The kernel's nanoseconds and microseconds become seconds here (with nodes.py, cgroups.py, points.py) and nowhere else.
A fact that is None has no sample; a row without samples is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from api.catalogue import BY_NAME, NS_PER_S
from api.decisions import Act, Round
from api.node_advice import NodeAdvice, PowerKind
from api.samples import Snapshot
from api.text import printable
from exporters.advised import advised_families
from exporters.cgroups import cgroup_families, dropped
from exporters.evictions import Victims, eviction_families, kills_after
from exporters.forecasts import forecast_families
from exporters.in_force import with_limits_in_force
from exporters.nodes import MOST_INTERFACES, node_families
from exporters.points import Distribution, Exemplar, Family, Labels, Point, points
from exporters.promised import promised_families
from exporters.traces import exemplar_labels

MAX_CGROUPS = 512
"""With series of their own, about 200 each; exporters.maxCgroups in the settings."""


class RecordingState(msgspec.Struct, frozen=True, kw_only=True):
    """How the recording fares."""

    writable: bool
    size_bytes: int
    rounds: int
    lost_rounds: int


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent knows of itself and no round says; None has no sample."""

    interval_s: float | None = None
    target_wait_s: float | None = None
    journal_writable: bool | None = None
    """None where decisions are kept in memory only."""
    otel_failures: int | None = None
    """None where nothing is sent to OpenTelemetry, as for the spans."""
    otel_dropped_spans: int | None = None
    traced: bool = False
    """Whether rounds are sent as spans, so that exemplars may name them."""
    recording: RecordingState | None = None
    max_cgroups: int = MAX_CGROUPS
    api_requests: Mapping[tuple[str, str, str], int] = {}
    """By method, resource and status; nothing where there is no cluster."""
    nri_answers: Mapping[str, int] = {}
    """By answer; nothing where no container runtime asks."""
    obeyed: Mapping[Labels, bool] = {}
    """By kind, key and hash of the object."""
    calls: Mapping[tuple[str, str, str], int] = {}
    """Over sockets, by side, method and code; nothing where none are used."""
    advice_ages_s: Mapping[tuple[str, str], float] = {}
    """By `given` or `taken` and resource."""
    peers: Mapping[str, int] = {}
    """Of our sockets, by what they are to us."""


class Tally(msgspec.Struct, frozen=True):
    """How often something happened, and the latest round in which it did."""

    count: int
    latest: Exemplar


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What an exporter knows: the newest round, and what all rounds since it started add up to."""

    version: str
    about: About = About()
    latest: Round | None = None
    decisions: Mapping[Labels, Tally] = {}
    """By knob, rule and outcome."""
    repairs: Mapping[Labels, Tally] = {}
    """By knob."""
    rounds: Mapping[Labels, Tally] = {}
    """By trigger and action; the action is empty where nothing was advised."""
    victims: Victims = Victims()
    kills: Mapping[Labels, int] = {}
    """By Katalyst's reason."""
    dropped: Mapping[str, int] = {}
    """What a limit kept from being shown, added up over rounds."""

    def after(self, finished: Round, about: About | None = None) -> Observed:
        """The same with one more round; the old value stays as it is for whoever is rendering it."""
        known = self.about if about is None else about
        snapshot = finished.snapshot
        exemplar = Exemplar(exemplar_labels(snapshot, traced=known.traced), 1, snapshot.wall_time_ns)
        decisions, repairs = dict(self.decisions), dict(self.repairs)
        for outcome in finished.done:
            decision = outcome.decision
            _count(decisions, (decision.knob.value, decision.verdict.rule, outcome.status.value), exemplar)
            if outcome.repaired:
                _count(repairs, (decision.knob.value,), exemplar)
        rounds = dict(self.rounds)
        _count(rounds, (finished.trigger, finished.advice.action if finished.advice else ""), exemplar)
        now = _dropped(snapshot, known.max_cgroups)
        return Observed(
            version=self.version,
            about=known,
            latest=finished,
            decisions=decisions,
            repairs=repairs,
            rounds=rounds,
            victims=self.victims.after(finished),
            kills=kills_after(self.kills, finished),
            dropped={what: self.dropped.get(what, 0) + count for what, count in now.items()},
        )


def families(observed: Observed) -> Iterator[Family]:
    """Every row of the catalogue that has something to show, by scope."""
    for family in _all(observed):
        if family.points or family.distributions:
            yield family


def _all(observed: Observed) -> Iterator[Family]:
    finished, about = observed.latest, observed.about
    if finished is not None:
        snapshot = finished.snapshot
        trace = exemplar_labels(snapshot, traced=about.traced)
        yield from node_families(snapshot)
        in_force = with_limits_in_force(finished)
        yield from cgroup_families(in_force, finished.previous, trace, about.max_cgroups)
        yield _indicators(snapshot)
        yield from _advice(finished)
        yield from advised_families(finished)
        if finished.evictions is not None:
            yield from eviction_families(finished.evictions)
        yield from forecast_families(finished.forecasts)
    yield _tallies("dioptase_decisions_total", observed.decisions)
    yield _tallies("dioptase_knob_repairs_total", observed.repairs)
    yield _tallies("dioptase_rounds_total", observed.rounds)
    yield points("dioptase_eviction_victims_total", observed.victims.counts.items())
    yield points("dioptase_eviction_kills_total", observed.kills.items())
    if finished is not None:
        yield from _agent(finished)
    yield from _about(about)
    yield points("dioptase_exporter_dropped_total", (((what,), count) for what, count in observed.dropped.items()))
    yield points("dioptase_build_info", [((observed.version,), 1)])


def _count(tallies: dict[Labels, Tally], key: Labels, exemplar: Exemplar) -> None:
    before = tallies.get(key)
    tallies[key] = Tally(before.count + 1 if before else 1, exemplar)


def _tallies(name: str, tallies: Mapping[Labels, Tally]) -> Family:
    shown = (Point((), tuple(map(printable, key)), tally.count, tally.latest) for key, tally in sorted(tallies.items()))
    return Family(BY_NAME[name], points=tuple(shown))


def _dropped(snapshot: Snapshot, max_cgroups: int) -> Mapping[str, int]:
    return {**dropped(snapshot, max_cgroups), "interface": max(0, len(snapshot.node.interfaces) - MOST_INTERFACES)}


def _indicators(snapshot: Snapshot) -> Family:
    return Family(
        BY_NAME["dioptase_indicator_latency_seconds"],
        distributions=tuple(
            Distribution((), _split(key), indicator.bounds_s, indicator.buckets, indicator.sum_s)
            for key, indicator in snapshot.indicators.items()
        ),
    )


def _split(key: str) -> tuple[str, str]:
    namespace, _, name = printable(key).partition("/")
    return namespace, name


def _advice(finished: Round) -> Iterator[Family]:
    if (shadow := finished.shadow) is not None:
        yield points("dioptase_shadow_requirement_cores", [((shadow.policy,), shadow.requirement_cores)])
        yield points("dioptase_shadow_headroom_cores", [((shadow.policy,), shadow.headroom_cores)])
        yield points("dioptase_shadow_lent_cores", [((shadow.policy,), shadow.lent_cores)])
    if finished.node is not None:
        yield from _whole_node(finished.node)
    advice = finished.advice
    if advice is None:
        return
    yield points("dioptase_pool_cpus", (((pool.name,), len(pool.cpus)) for pool in advice.pools))
    yield points("dioptase_share_requirement_cores", [((), advice.requirement_cores)])
    yield from promised_families(advice)
    yield points("dioptase_reclaim_lent_cores", [((), advice.lent_cores)])


def _whole_node(node: NodeAdvice) -> Iterator[Family]:
    if (power := node.power) is not None:
        yield points("dioptase_power_action", (((kind.value,), int(kind is power.kind)) for kind in PowerKind))
        cap = power.target_watts if power.kind is PowerKind.CAP else None
        yield points("dioptase_power_cap_watts", [((), cap)])
        yield points("dioptase_power_evict_pods", [((), power.count)])
    if (found := node.overcommit) is not None:
        ratios = {"cpu": found.cpu_ratio, "memory": found.memory_ratio}
        yield points("dioptase_overcommit_ratio", (((resource,), ratio) for resource, ratio in ratios.items()))


def _agent(finished: Round) -> Iterator[Family]:
    snapshot = finished.snapshot
    yield points("dioptase_round_duration_seconds", [((), finished.duration_ns / NS_PER_S)])
    yield points("dioptase_snapshot_timestamp_seconds", [((), snapshot.wall_time_ns / NS_PER_S)])
    yield points("dioptase_act_mode", (((mode.value,), int(mode is finished.act)) for mode in Act))
    yield points("dioptase_source_up", (((s.name, s.detail), int(s.ok)) for s in snapshot.sources))
    yield points("dioptase_source_duration_seconds", (((s.name,), s.duration_ns / NS_PER_S) for s in snapshot.sources))
    yield points("dioptase_source_lost_events_total", (((s.name,), s.lost_events) for s in snapshot.sources))
    yield points("dioptase_limitations", [((), len(finished.banner))])


def _about(about: About) -> Iterator[Family]:
    writable, recording = about.journal_writable, about.recording
    yield points("dioptase_round_interval_seconds", [((), about.interval_s)])
    yield points("dioptase_latency_target_seconds", [((), about.target_wait_s)])
    yield points("dioptase_journal_writable", [((), None if writable is None else int(writable))])
    yield points("dioptase_api_requests_total", list(about.api_requests.items()))
    yield points("dioptase_nri_containers_total", (((answer,), count) for answer, count in about.nri_answers.items()))
    yield points("dioptase_protocol_calls_total", list(about.calls.items()))
    yield points("dioptase_advice_age_seconds", list(about.advice_ages_s.items()))
    yield points("dioptase_protocol_peers", (((role,), count) for role, count in about.peers.items()))
    yield points("dioptase_config_obeyed", ((labels, int(held)) for labels, held in about.obeyed.items()))
    yield points("dioptase_otel_failures_total", [((), about.otel_failures)])
    yield points("dioptase_otel_dropped_spans_total", [((), about.otel_dropped_spans)])
    if recording is not None:
        yield points("dioptase_recording_writable", [((), int(recording.writable))])
        yield points("dioptase_recording_size_bytes", [((), recording.size_bytes)])
        yield points("dioptase_recording_rounds_total", [((), recording.rounds)])
        yield points("dioptase_recording_lost_rounds_total", [((), recording.lost_rounds)])
