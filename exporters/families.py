"""One round as metrics: the only place that says which fact becomes which row of the catalogue.

Pure. Prometheus and OpenTelemetry both render what comes out of here, so a person sees in either exactly what the advisor
saw. The kernel's nanoseconds and microseconds become seconds here and nowhere else. A fact that is None has no sample;
a row without samples is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import msgspec

from api.catalogue import BY_NAME, NS_PER_S, US_PER_S, WAIT_BOUNDS_S, Metric
from api.decisions import Act, Round
from api.facts import CpuTimes, Pressure, Wait
from api.samples import CgroupSample, NodeSample, Snapshot
from api.text import printable

Number = int | float
Owner = tuple[str, str, str, str]
NOBODY: Owner = ("", "", "", "")
"""Namespace, pod, container and QoS level of a cgroup that no listed pod owns."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent knows of itself and no round says; None has no sample."""

    interval_s: float | None = None
    target_wait_s: float | None = None
    journal_writable: bool | None = None
    """None where decisions are kept in memory only."""
    otel_failures: int | None = None
    """None where nothing is sent to OpenTelemetry, as for the spans."""
    otel_dropped_spans: int | None = None


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What an exporter knows: the newest round, and what all rounds since it started add up to."""

    version: str
    about: About = About()
    latest: Round | None = None
    decisions: Mapping[tuple[str, str, str], int] = {}
    """How often each (knob, rule, outcome) came out."""
    rounds: Mapping[tuple[str, str], int] = {}
    """How many rounds there were of each (trigger, action); the action is empty where nothing was advised."""

    def after(self, finished: Round, about: About | None = None) -> Observed:
        """The same with one more round; the old value stays as it is for whoever is rendering it."""
        decisions = dict(self.decisions)
        for outcome in finished.outcomes:
            decision = outcome.decision
            key = (decision.knob.value, decision.verdict.rule, outcome.status.value)
            decisions[key] = decisions.get(key, 0) + 1
        rounds = dict(self.rounds)
        turn = (finished.trigger, finished.advice.action if finished.advice else "")
        rounds[turn] = rounds.get(turn, 0) + 1
        return Observed(
            version=self.version,
            about=self.about if about is None else about,
            latest=finished,
            decisions=decisions,
            rounds=rounds,
        )


class Point(NamedTuple):
    """One number of a counter or gauge; `labels` are values in the order of the catalogue row's names."""

    labels: tuple[str, ...]
    value: Number


class Distribution(NamedTuple):
    """One histogram: cumulative counts, one per inclusive upper bound and a last one for everything."""

    labels: tuple[str, ...]
    bounds_s: tuple[float, ...]
    cumulative: tuple[int, ...]
    sum_s: float


class Family(NamedTuple):
    """One row of the catalogue with all it has to show; points or distributions, by the row's kind."""

    metric: Metric
    points: tuple[Point, ...] = ()
    distributions: tuple[Distribution, ...] = ()


CGROUP_FACTS: tuple[tuple[str, Callable[[CgroupSample], Number | None]], ...] = (
    ("dioptase_cgroup_cpu_usage_seconds_total", lambda c: _seconds(c.cpu_usage_ns)),
    ("dioptase_cgroup_cpu_periods_total", lambda c: c.periods),
    ("dioptase_cgroup_cpu_throttled_periods_total", lambda c: c.throttled_periods),
    ("dioptase_cgroup_cpu_throttled_seconds_total", lambda c: _seconds(c.throttled_ns)),
    ("dioptase_cgroup_threads", lambda c: c.threads),
    ("dioptase_cgroup_memory_usage_bytes", lambda c: c.memory_bytes),
)


def families(observed: Observed) -> Iterator[Family]:
    """Every row of the catalogue that has something to show, in the catalogue's order within each part."""
    for family in _all(observed):
        if family.points or family.distributions:
            yield family


def _all(observed: Observed) -> Iterator[Family]:
    finished = observed.latest
    if finished is not None:
        yield from _node(finished.snapshot)
        yield from _cgroups(finished.snapshot)
        yield _indicators(finished.snapshot)
        yield from _advice(finished)
    yield _points("dioptase_decisions_total", ((key, count) for key, count in sorted(observed.decisions.items())))
    yield _points("dioptase_rounds_total", ((key, count) for key, count in sorted(observed.rounds.items())))
    if finished is not None:
        yield from _agent(finished)
    yield from _about(observed.about)
    yield _points("dioptase_build_info", [((observed.version,), 1)])


def _points(name: str, samples: Iterable[tuple[tuple[str, ...], Number | None]]) -> Family:
    points = (Point(tuple(map(printable, labels)), value) for labels, value in samples if value is not None)
    return Family(BY_NAME[name], points=tuple(points))


def _node(snapshot: Snapshot) -> Iterator[Family]:
    node = snapshot.node
    yield _points("dioptase_node_cpu_seconds_total", _modes(node.cpu) if node.cpu else ())
    yield _points("dioptase_node_cpus", [((), len(snapshot.topology.cpus))])
    yield _points("dioptase_node_load1", [((), node.load[0] if node.load else None)])
    yield _points("dioptase_node_memory_total_bytes", [((), node.memory_total_bytes)])
    yield _points("dioptase_node_memory_available_bytes", [((), node.memory_available_bytes)])
    yield _points("dioptase_node_pressure_seconds_total", _stalls((), node))


def _modes(times: CpuTimes) -> Iterator[tuple[tuple[str], Number]]:
    for field in times.__struct_fields__:
        yield (field.removesuffix("_ns"),), getattr(times, field) / NS_PER_S


def _stalls(
    owner: tuple[str, ...], sample: NodeSample | CgroupSample
) -> Iterator[tuple[tuple[str, ...], float | None]]:
    pressures: tuple[tuple[str, Pressure | None], ...] = (
        ("cpu", sample.cpu_pressure),
        ("memory", sample.memory_pressure),
        ("io", sample.io_pressure),
    )
    for resource, pressure in pressures:
        if pressure is not None:
            yield (*owner, resource, "some"), pressure.some_us / US_PER_S
            yield (*owner, resource, "full"), None if pressure.full_us is None else pressure.full_us / US_PER_S


def _cgroups(snapshot: Snapshot) -> Iterator[Family]:
    owners: dict[str, Owner] = {
        container.cgroup: (pod.namespace, pod.name, container.name, pod.qos.value)
        for pod in snapshot.pods
        for container in pod.containers
    }
    labelled = [
        (tuple(map(printable, (path, *owners.get(path, NOBODY)))), sample) for path, sample in snapshot.cgroups.items()
    ]
    for name, fact in CGROUP_FACTS:
        points = (Point(labels, value) for labels, sample in labelled if (value := fact(sample)) is not None)
        yield Family(BY_NAME[name], points=tuple(points))
    stalls = (stall for labels, sample in labelled for stall in _stalls(labels, sample))
    yield _points("dioptase_cgroup_pressure_seconds_total", stalls)
    waits = (_waits(labels, sample.wait) for labels, sample in labelled if sample.wait is not None)
    yield Family(BY_NAME["dioptase_cgroup_runq_wait_seconds"], distributions=tuple(waits))


def _waits(labels: tuple[str, ...], wait: Wait) -> Distribution:
    """Slots and count are read one after the other while tasks switch, so the slots alone say how many there were."""
    if wait.slots is None:
        return Distribution(labels, (), (wait.count,), wait.sum_ns / NS_PER_S)
    return Distribution(labels, WAIT_BOUNDS_S, tuple(accumulate(wait.slots)), wait.sum_ns / NS_PER_S)


def _indicators(snapshot: Snapshot) -> Family:
    return Family(
        BY_NAME["dioptase_indicator_latency_seconds"],
        distributions=tuple(
            Distribution(_split(key), indicator.bounds_s, indicator.buckets, indicator.sum_s)
            for key, indicator in snapshot.indicators.items()
        ),
    )


def _split(key: str) -> tuple[str, str]:
    namespace, _, name = printable(key).partition("/")
    return namespace, name


def _advice(finished: Round) -> Iterator[Family]:
    advice = finished.advice
    if advice is None:
        return
    yield _points("dioptase_pool_cpus", (((pool.name,), len(pool.cpus)) for pool in advice.pools))
    yield _points("dioptase_share_requirement_cores", [((), advice.requirement_cores)])
    yield _points("dioptase_reclaim_headroom_cores", [((), advice.headroom_cores)])
    yield _points("dioptase_reclaim_lent_cores", [((), advice.lent_cores)])


def _agent(finished: Round) -> Iterator[Family]:
    snapshot = finished.snapshot
    yield _points("dioptase_round_duration_seconds", [((), finished.duration_ns / NS_PER_S)])
    yield _points("dioptase_snapshot_timestamp_seconds", [((), snapshot.wall_time_ns / NS_PER_S)])
    yield _points("dioptase_act_mode", (((mode.value,), int(mode is finished.act)) for mode in Act))
    yield _points("dioptase_source_up", (((s.name, s.detail), int(s.ok)) for s in snapshot.sources))
    yield _points("dioptase_source_duration_seconds", (((s.name,), s.duration_ns / NS_PER_S) for s in snapshot.sources))
    yield _points("dioptase_limitations", [((), len(finished.banner))])


def _about(about: About) -> Iterator[Family]:
    writable = about.journal_writable
    yield _points("dioptase_round_interval_seconds", [((), about.interval_s)])
    yield _points("dioptase_latency_target_seconds", [((), about.target_wait_s)])
    yield _points("dioptase_journal_writable", [((), None if writable is None else int(writable))])
    yield _points("dioptase_otel_failures_total", [((), about.otel_failures)])
    yield _points("dioptase_otel_dropped_spans_total", [((), about.otel_dropped_spans)])


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / NS_PER_S
