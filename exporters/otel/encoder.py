"""Encodes metric families as OpenTelemetry metrics, and each cycle as one span with events.
Pure. Requests are split into portions of at most `POINTS_PER_REQUEST` points, about 1 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from api.cpu import format_cpu_list
from api.decision import Cycle, OutcomeStatus
from api.text import encodable
from exporters.otel.conventions import (
    SCHEMA_URL,
    CgroupStartTimes,
    OtelInstrument,
    container_instruments,
    node_instruments,
    shared_resource_attributes,
)
from exporters.otel.span_events import AttributeValue, decision_attributes, step_events
from exporters.prometheus.families import MetricsState, cycle_trace_ids, metric_families
from exporters.prometheus.metric_family import Labels, MetricDistribution, MetricFamily

UCUM_UNITS = {"seconds": "s", "bytes": "By", "cores": "{core}", "hertz": "Hz", "joules": "J", "mbit": "Mbit/s"}
"""Units in UCUM. Metrics without a unit keep none: Prometheus would translate `1` to a ratio."""
MAX_SPAN_EVENTS = 128
"""Maximum number of events of a span, the default of OpenTelemetry; decisions that changed a value come first."""
POINTS_PER_REQUEST = 4000
"""Points per request, about 1 MiB: collectors refuse requests over 4 MiB by default."""
FAILURES = (OutcomeStatus.REFUSED, OutcomeStatus.MISMATCH)


class OtlpEncoder:
    """Encodes states as OTLP requests, with the resource and the start times of counters."""

    def __init__(self, resource: Mapping[str, str], release: str, since: Mapping[str, int]) -> None:
        """`since` has the instants of boot and of the agent's start, in nanoseconds of CLOCK_REALTIME."""
        self.resource = Resource(dict(resource), SCHEMA_URL)
        self._shared_attributes = shared_resource_attributes(resource)
        self.scope = InstrumentationScope("dioptase", release, SCHEMA_URL)
        self.since = since

    def requests(self, observed: MetricsState, start_times: CgroupStartTimes) -> Iterator[MetricsData]:
        """Yield the latest cycle in requests that a collector accepts. All at once they are tens of MiB."""
        portion: list[tuple[Resource, list[Metric]]] = []
        room = POINTS_PER_REQUEST
        for resource, metrics in self._metrics(observed, start_times):
            points = sum(len(metric.data.data_points) for metric in metrics)
            if portion and points > room:
                yield self._wrapped(portion)
                portion, room = [], POINTS_PER_REQUEST
            if portion and portion[-1][0] is resource:
                portion[-1][1].extend(metrics)
            else:
                portion.append((resource, metrics))
            room -= points
        if portion:
            yield self._wrapped(portion)

    def _metrics(
        self, observed: MetricsState, start_times: CgroupStartTimes
    ) -> Iterator[tuple[Resource, list[Metric]]]:
        """Yield the metrics of agent and node, and then those of each container, which is a resource of its own."""
        assert observed.latest is not None
        snapshot = observed.latest.snapshot
        now, boot = snapshot.wall_time_ns, self.since["boot"]
        start_times_by_label = {
            encodable(path): min(at_ns, now)
            for path, sample in snapshot.cgroups.items()
            if (at_ns := start_times.by_id.get(sample.id)) is not None
        }
        for family in metric_families(observed):
            row, since = family.metric, self.since[family.metric.since]
            for portion in _split_family(family):
                data = _data(portion, since, start_times_by_label, now)
                yield self.resource, [Metric(row.otel_name, row.help, UCUM_UNITS.get(row.unit, ""), data)]
        for instrument in node_instruments(snapshot):
            for start in range(0, len(instrument.points), POINTS_PER_REQUEST):
                part = instrument._replace(points=instrument.points[start : start + POINTS_PER_REQUEST])
                yield self.resource, [_instrument_metric(part, boot, now)]
        for owned, shown in container_instruments(snapshot, observed.about.max_cgroups):
            since = start_times_by_label.get(encodable(owned.sample.path), boot)
            resource = Resource(self._shared_attributes | owned.attributes, SCHEMA_URL)
            yield resource, [_instrument_metric(instrument, since, now) for instrument in shown]

    def _wrapped(self, portion: list[tuple[Resource, list[Metric]]]) -> MetricsData:
        return MetricsData(
            [
                ResourceMetrics(resource, [ScopeMetrics(self.scope, metrics, SCHEMA_URL)], SCHEMA_URL)
                for resource, metrics in portion
            ]
        )

    def span(self, finished: Cycle) -> ReadableSpan:
        """Return the span of a cycle, from its snapshot until its decisions had been carried out."""
        trace_id, span_id = cycle_trace_ids(finished.snapshot)
        began = finished.snapshot.wall_time_ns
        ended = began + finished.duration_ns
        used = tuple(step_events(finished))
        changed_first = sorted(finished.done, key=lambda outcome: outcome.status is OutcomeStatus.UNCHANGED)
        failed = [outcome.error for outcome in finished.done if outcome.status in FAILURES]
        return ReadableSpan(
            name="round",
            context=SpanContext(trace_id, span_id, False, TraceFlags(TraceFlags.SAMPLED)),  # noqa: FBT003
            resource=self.resource,
            attributes=dict(_encodable(_cycle_attributes(finished))),
            events=(
                *(Event(step, dict(_encodable(attributes)), ended) for step, attributes in used),
                *(
                    Event("decision", dict(_encodable(decision_attributes(o))), ended)
                    for o in changed_first[: MAX_SPAN_EVENTS - len(used)]
                ),
            ),
            status=Status(StatusCode.ERROR, encodable(failed[0])) if failed else Status(),
            start_time=began,
            end_time=ended,
            instrumentation_scope=self.scope,
        )


def _split_family(family: MetricFamily) -> Iterator[MetricFamily]:
    """Yield portions of a family, because that of a full node can exceed a request."""
    size = POINTS_PER_REQUEST
    for start in range(0, max(len(family.points), len(family.distributions)), size):
        end = start + size
        yield MetricFamily(family.metric, family.points[start:end], family.distributions[start:end])


def _data(
    family: MetricFamily, since: int, start_times_by_label: Mapping[str, int], now: int
) -> Sum | Gauge | Histogram:
    """Return the data of a family; `start_times_by_label` has the cgroups that were created after `since`."""
    names = family.metric.labels
    if family.metric.kind == "histogram":
        distributions = [
            _distribution(names, d, _start(d.owner, since, start_times_by_label), now) for d in family.distributions
        ]
        return Histogram(distributions, AggregationTemporality.CUMULATIVE)
    counts = family.metric.kind == "counter"
    points = [
        NumberDataPoint(
            dict(zip(names, p.labels, strict=True)), _start(p.owner, since, start_times_by_label), now, p.value
        )
        for p in family.points
    ]
    return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True) if counts else Gauge(points)


def _start(owner: Labels, since: int, start_times_by_label: Mapping[str, int]) -> int:
    return start_times_by_label.get(owner[0], since) if owner else since


def _instrument_metric(instrument: OtelInstrument, since: int, now: int) -> Metric:
    points = [NumberDataPoint(attributes, since, now, value) for attributes, value in instrument.points]
    counts = instrument.kind == "counter"
    data = Gauge(points) if instrument.kind == "gauge" else Sum(points, AggregationTemporality.CUMULATIVE, counts)
    return Metric(instrument.name, instrument.description, instrument.unit, data)


def _distribution(names: tuple[str, ...], shown: MetricDistribution, since: int, now: int) -> HistogramDataPoint:
    counts = shown.cumulative
    return HistogramDataPoint(
        attributes=dict(zip(names, shown.labels, strict=True)),
        start_time_unix_nano=since,
        time_unix_nano=now,
        count=counts[-1],
        sum=shown.sum_s,
        bucket_counts=[after - before for before, after in zip((0, *counts), counts, strict=False)],
        explicit_bounds=shown.bounds_s,
        min=None,  # type: ignore[arg-type] # optional in the protocol; a histogram does not know its extremes
        max=None,  # type: ignore[arg-type]
    )


def _cycle_attributes(finished: Cycle) -> dict[str, AttributeValue | None]:
    advice = finished.advice
    about: dict[str, AttributeValue | None] = {
        "dioptase.seq": finished.snapshot.seq,
        "dioptase.trigger": finished.trigger,
        "dioptase.act": finished.act.value,
        "dioptase.outcomes": len(finished.done),
        "dioptase.banner": list(finished.startup_warnings),
    }
    if advice is None:
        return about
    return about | {
        "dioptase.policy": advice.policy,
        "dioptase.action": advice.action,
        "dioptase.rule": advice.reason.rule,
        "dioptase.reason": advice.reason.text,
        "dioptase.threshold": advice.reason.threshold,
        "dioptase.pools": [f"{pool.name} {format_cpu_list(pool.cpus)}" for pool in advice.pools],
        "dioptase.lent_cores": advice.reclaimable_cores,
        "dioptase.requirement_cores": advice.requirement_cores,
        "dioptase.headroom_cores": advice.headroom_cores,
        "dioptase.advertised_cores": None if advice.reported_headroom is None else advice.reported_headroom.cores,
        "dioptase.idle": advice.idle,
    }


def _encodable(attributes: Mapping[str, AttributeValue | None]) -> Iterator[tuple[str, AttributeValue]]:
    """Yield attributes that have a value, as text that is valid in the protocol."""
    for name, value in attributes.items():
        if isinstance(value, str):
            yield name, encodable(value)
        elif isinstance(value, list):
            yield name, list(map(encodable, value))
        elif value is not None:
            yield name, value
