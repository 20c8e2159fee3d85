"""Rounds as OpenTelemetry metrics and traces by OTLP over gRPC; the only door to opentelemetry.

Metrics are the families that Prometheus gets too, with the instant of the snapshot behind them; each round is one span
of the length it took, and each decision one event in it. All sending is done by one thread. A collector that is slow,
dead or refuses costs the loop nothing: metrics are taken from the newest round, spans wait in a bounded queue and are
then dropped and counted, and one line is logged when sending begins to fail and one when it works again.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.grpc import exporter as otlp
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from api.decisions import Outcome, Round
from api.decisions import Status as OutcomeStatus
from api.ports import Unavailable
from api.text import printable
from exporters.families import About, Distribution, Family, Observed, families
from exporters.otel import Settings

log = logging.getLogger(__name__)

UNITS = {"seconds": "s", "bytes": "By", "cores": "{core}"}
"""UCUM. What has no unit keeps none: `1` would make Prometheus' translation call it a ratio."""
MAX_EVENTS = 128
"""Events of one span, OpenTelemetry's own default; what changed something comes first."""
MAX_SPANS = 512
POINTS_PER_REQUEST = 4000
"""About 1 MiB; collectors refuse requests over 4 MiB unless told otherwise."""
MAX_PAUSE_S = 60.0
FLUSH_S, HANG_UP_S = 1.0, 0.5
"""What close() grants the last export, and the thread to notice that its connection is gone."""
FAILURES = (OutcomeStatus.REFUSED, OutcomeStatus.MISMATCH)
Value = str | int | float | bool | list[str]


class OtelSink:
    """Sink of rounds. `failures` and `dropped_spans` say what did not arrive: dioptase_otel_* in the catalogue."""

    def __init__(self, settings: Settings, about: Callable[[], About] = About) -> None:
        """Start the sending thread. Raises Unavailable with a remedy where the exporters refuse the environment."""
        self.failures = 0
        self.dropped_spans = 0
        release = version("dioptase")
        attributes = {"service.name": settings.service, "service.version": release, "host.name": socket.gethostname()}
        self._resource = Resource.create(attributes)
        self._scope = InstrumentationScope("dioptase", release)
        self._since = {"boot": time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME), "agent": time.time_ns()}
        self._observed, self._about = Observed(version=release), about
        self._sent: Observed | None = None
        self._metrics, self._spans = _exporters(settings)
        self._queue: deque[ReadableSpan] = deque(maxlen=MAX_SPANS)
        self._stopping = threading.Event()
        self._words = _LastWords()
        jobs = [
            *([_Job(self._send_metrics, settings.metrics_every_s)] if self._metrics else []),
            *([_Job(self._send_spans, settings.spans_every_s)] if self._spans else []),
        ]
        self._thread = threading.Thread(target=self._run, args=(jobs,), name="otel", daemon=True)
        self._thread.start()

    def publish(self, finished: Round) -> None:
        """Remember the round; the span is made now, so that the queue holds no snapshots. Never raises."""
        try:
            self._observed = self._observed.after(finished, self._about())
            if self._spans is not None:
                self.dropped_spans += len(self._queue) == MAX_SPANS
                self._queue.append(span(finished, self._resource, self._scope))
        except Exception:
            log.exception("round %d could not be handed to OpenTelemetry", finished.snapshot.seq)

    def close(self) -> None:
        """Send what is left where somebody takes it, and be gone within two seconds."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(FLUSH_S)
        for exporter in (self._metrics, self._spans):
            if exporter is not None:
                exporter.shutdown(timeout_millis=0)
        self._thread.join(HANG_UP_S)
        self._words.remove()

    def _run(self, jobs: list[_Job]) -> None:
        while not self._stopping.wait(max(0.0, min(job.due for job in jobs) - time.monotonic())):
            for job in jobs:
                if job.due <= time.monotonic():
                    self._attempt(job)
        for job in jobs:
            if not job.failed:
                self._attempt(job)

    def _attempt(self, job: _Job) -> None:
        try:
            arrived = job.send()
        except Exception:
            # Whatever the encoder or the transport trips over, the next attempt starts afresh.
            arrived = False
            if not job.failed:
                log.exception("OpenTelemetry export broke")
        if arrived is False:
            if not job.failed and not self._stopping.is_set():
                log.warning("OpenTelemetry export fails, and goes on trying silently: %s", self._words.text)
            self.failures += 1
            job.failed += 1
        elif arrived and job.failed:
            log.info("OpenTelemetry export works again after %d failures", job.failed)
            job.failed = 0
        pause_s = min(job.every_s * 2 ** min(job.failed, 10), MAX_PAUSE_S)
        job.due = time.monotonic() + max(job.every_s, pause_s)

    def _send_metrics(self) -> bool | None:
        observed = self._observed
        if self._metrics is None or observed.latest is None or observed is self._sent:
            return None
        self._sent = observed
        data = metrics_data(observed, self._resource, self._scope, self._since)
        return self._metrics.export(data) is MetricExportResult.SUCCESS

    def _send_spans(self) -> bool | None:
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        if self._spans is None or not batch:
            return None
        if self._spans.export(batch) is SpanExportResult.SUCCESS:
            return True
        self.dropped_spans += len(batch)
        return False


def _exporters(settings: Settings) -> tuple[OTLPMetricExporter | None, OTLPSpanExporter | None]:
    # gRPC's core writes about connections to stderr by itself; what matters of that is in our own log line.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    metrics = spans = None
    try:
        if settings.metrics_to:
            metrics = OTLPMetricExporter(
                settings.metrics_to, timeout=settings.metrics_timeout_s, max_export_batch_size=POINTS_PER_REQUEST
            )
        if settings.traces_to:
            spans = OTLPSpanExporter(settings.traces_to, timeout=settings.traces_timeout_s)
    except Exception as error:
        reason = f"OpenTelemetry export to {settings.metrics_to or settings.traces_to} cannot start: {error}"
        raise Unavailable(reason, "correct the OTEL_EXPORTER_OTLP_* variables, or unset them") from error
    return metrics, spans


class _Job:
    """One kind of data: how it is sent, and when next. `send` says whether it arrived, or None if there was nothing."""

    def __init__(self, send: Callable[[], bool | None], every_s: float) -> None:
        self.send, self.every_s = send, every_s
        self.due = time.monotonic() + every_s
        self.failed = 0


class _LastWords(logging.Handler):
    """Takes the exporters' own complaints, one or more for every attempt, out of the log and keeps the newest."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = "no reason given"
        otlp.logger.addHandler(self)
        otlp.logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()

    def remove(self) -> None:
        otlp.logger.removeHandler(self)
        otlp.logger.propagate = True


def metrics_data(
    observed: Observed, resource: Resource, scope: InstrumentationScope, since: Mapping[str, int]
) -> MetricsData:
    """The families of the newest round; `since` has the instants of boot and of the agent's start."""
    assert observed.latest is not None
    now = observed.latest.snapshot.wall_time_ns
    metrics = [
        Metric(
            name=family.metric.otel_name,
            description=family.metric.help,
            unit=UNITS.get(family.metric.unit, ""),
            data=_data(family, since[family.metric.since], now),
        )
        for family in families(observed)
    ]
    scoped = ScopeMetrics(scope=scope, metrics=metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource=resource, scope_metrics=[scoped], schema_url="")])


def _data(family: Family, since: int, now: int) -> Sum | Gauge | Histogram:
    names = family.metric.labels
    if family.metric.kind == "histogram":
        distributions = [_distribution(names, d, since, now) for d in family.distributions]
        return Histogram(distributions, AggregationTemporality.CUMULATIVE)
    counts = family.metric.kind == "counter"
    points = [NumberDataPoint(dict(zip(names, p.labels, strict=True)), since, now, p.value) for p in family.points]
    return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True) if counts else Gauge(points)


def _distribution(names: tuple[str, ...], shown: Distribution, since: int, now: int) -> HistogramDataPoint:
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


def span(finished: Round, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    """One round: it began when its snapshot was taken and ended when its decisions had been carried out."""
    ids = RandomIdGenerator()
    began = finished.snapshot.wall_time_ns
    ended = began + finished.duration_ns
    changed_first = sorted(finished.outcomes, key=lambda outcome: outcome.status is OutcomeStatus.UNCHANGED)
    failed = [outcome.error for outcome in finished.outcomes if outcome.status in FAILURES]
    return ReadableSpan(
        name="round",
        context=SpanContext(ids.generate_trace_id(), ids.generate_span_id(), False, TraceFlags(TraceFlags.SAMPLED)),  # noqa: FBT003
        resource=resource,
        attributes=dict(_kept(_about(finished))),
        events=tuple(Event("decision", dict(_kept(_decided(o))), ended) for o in changed_first[:MAX_EVENTS]),
        status=Status(StatusCode.ERROR, printable(failed[0])) if failed else Status(),
        start_time=began,
        end_time=ended,
        instrumentation_scope=scope,
    )


def _about(finished: Round) -> dict[str, Value | None]:
    advice = finished.advice
    about: dict[str, Value | None] = {
        "dioptase.seq": finished.snapshot.seq,
        "dioptase.trigger": finished.trigger,
        "dioptase.act": finished.act.value,
        "dioptase.outcomes": len(finished.outcomes),
        "dioptase.banner": list(finished.banner),
    }
    if advice is None:
        return about
    return about | {
        "dioptase.policy": advice.policy,
        "dioptase.action": advice.action,
        "dioptase.rule": advice.verdict.rule,
        "dioptase.reason": advice.verdict.text,
        "dioptase.threshold": advice.verdict.threshold,
        "dioptase.lent_cores": advice.lent_cores,
        "dioptase.requirement_cores": advice.requirement_cores,
        "dioptase.headroom_cores": advice.headroom_cores,
        "dioptase.idle": advice.idle,
    }


def _decided(outcome: Outcome) -> dict[str, Value | None]:
    decision, verdict = outcome.decision, outcome.decision.verdict
    return {
        "dioptase.pod": decision.pod,
        "dioptase.cgroup": decision.cgroup,
        "dioptase.knob": decision.knob.value,
        "dioptase.value": decision.value,
        "dioptase.status": outcome.status.value,
        "dioptase.before": outcome.before,
        "dioptase.after": outcome.after,
        "dioptase.clamped_from": outcome.clamped_from,
        "dioptase.error": outcome.error or None,
        "dioptase.rule": verdict.rule,
        "dioptase.reason": verdict.text,
        "dioptase.threshold": verdict.threshold,
        **{f"dioptase.input.{name}": value for name, value in verdict.inputs.items()},
    }


def _kept(attributes: Mapping[str, Value | None]) -> Iterator[tuple[str, Value]]:
    """Attributes that have a value, in text that the protocol can carry."""
    for name, value in attributes.items():
        if isinstance(value, str):
            yield name, printable(value)
        elif isinstance(value, list):
            yield name, list(map(printable, value))
        elif value is not None:
            yield name, value
