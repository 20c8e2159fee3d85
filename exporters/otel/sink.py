"""Sends cycles as OpenTelemetry metrics and traces, by OTLP over gRPC or HTTP, from one thread.
A slow or dead collector costs the loop nothing: metrics come from the latest cycle, spans wait in a bounded queue and
are dropped and counted. A failed export is retried with a backoff of up to a minute; one line is logged when sending
begins to fail and one when it works again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from api import VERSION
from api.decision import Cycle
from api.interfaces import Unavailable
from exporters.otel.conventions import CgroupStartTimes
from exporters.otel.encoder import OtlpEncoder
from exporters.otel.environment import PROTOCOL_GRPC, OtlpSettings, OtlpSignal
from exporters.prometheus.families import AgentInfo, MetricsState

log = logging.getLogger(__name__)

MAX_SPANS = 512
MAX_BACKOFF_S = 60.0
FINAL_EXPORT_S, DISCONNECT_S = 1.0, 0.5
"""Time limits in close(): for the last export, and for the thread to end after its connection was closed."""
MAX_RESPONSE_BYTES = 64 << 10
"""Limit of a gRPC response, uncompressed."""
SDK_LOGGERS = ("opentelemetry.exporter.otlp", "opentelemetry.sdk", "urllib3")
"""Loggers that write one or more lines for every failed attempt, which are kept out of the log."""


class ExportResult(NamedTuple):
    """Number of requests that a collector accepted and of those that failed; both 0 if there was nothing to send."""

    arrived: int = 0
    refused: int = 0


class SdkExporter(Protocol):
    """Interface of the SDK's four exporters."""

    def export(self, data: Any, /) -> Any: ...

    def shutdown(self) -> None: ...


class OtelSink:
    """Sink of cycles. `failures` and `dropped_spans` count what did not arrive: dioptase_otel_* in the catalogue."""

    def __init__(self, settings: OtlpSettings, about: Callable[[], AgentInfo] = AgentInfo) -> None:
        """Start the sending thread. Raises Unavailable with a remedy if the exporters reject the environment."""
        self.failures = 0
        self.dropped_spans = 0
        self.traced = settings.traces is not None
        release = VERSION
        since = {"boot": time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME), "agent": time.time_ns()}
        self._encoder = OtlpEncoder(settings.resource, release, since)
        self._newest, self._about = (MetricsState(version=release), CgroupStartTimes()), about
        self._sent: MetricsState | None = None
        # gRPC's core writes about connections to stderr by itself; our own log line has the reason of a failure.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        self._metrics = None if settings.metrics is None else _exporter("metrics", settings.metrics)
        self._spans = None if settings.traces is None else _exporter("traces", settings.traces)
        self._failure_limit_s = 0.0 if settings.metrics is None else settings.metrics.timeout_s
        self._queue: deque[ReadableSpan] = deque(maxlen=MAX_SPANS)
        self._stopping = threading.Event()
        self._exporter_logs = _ExporterLogs()
        jobs = [
            *([_ExportJob(self._send_metrics, settings.metrics.every_s)] if settings.metrics else []),
            *([_ExportJob(self._send_spans, settings.traces.every_s)] if settings.traces else []),
        ]
        self._thread = threading.Thread(target=self._run, args=(jobs,), name="otel", daemon=True)
        self._thread.start()

    def publish(self, finished: Cycle) -> None:
        """Store the cycle for sending; its span is made now, so that the queue holds no snapshots. Never raises."""
        try:
            observed, start_times = self._newest
            self._newest = observed.after(finished, self._about()), start_times.after(finished.snapshot)
            if self._spans is not None:
                self.dropped_spans += len(self._queue) == MAX_SPANS
                self._queue.append(self._encoder.span(finished))
        except Exception:
            log.exception("cycle %d could not be encoded for OpenTelemetry", finished.snapshot.seq)

    def close(self) -> None:
        """Send what is left if the collector accepts it, and return within two seconds. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(FINAL_EXPORT_S)
        for exporter in (self._metrics, self._spans):
            if exporter is not None:
                exporter.shutdown()
        self._thread.join(DISCONNECT_S)
        self._exporter_logs.remove()

    def _run(self, jobs: list[_ExportJob]) -> None:
        while not self._stopping.wait(max(0.0, min(job.due for job in jobs) - time.monotonic())):
            for job in jobs:
                if job.due <= time.monotonic():
                    self._attempt(job)
        for job in jobs:
            if not job.failed:
                self._attempt(job)

    def _attempt(self, job: _ExportJob) -> None:
        try:
            sent = job.send()
        except Exception:
            # A bug of the encoder or the transport must not end the thread; the next attempt starts again.
            sent = ExportResult(refused=1)
            if not job.failed:
                log.exception("the OpenTelemetry export failed because of a bug")
        if sent.refused:
            if not job.failed and not self._stopping.is_set():
                log.warning(
                    "the OpenTelemetry export fails and is retried without further log lines: %s",
                    self._exporter_logs.text,
                )
            self.failures += sent.refused
            job.failed += 1
        elif sent.arrived and job.failed:
            log.info("the OpenTelemetry export succeeded again after %d failures", job.failed)
            job.failed = 0
        # A collector that accepted a part is reachable and gets the next export in time.
        pause_s = 0.0 if sent.arrived else min(job.every_s * 2 ** min(job.failed, 10), MAX_BACKOFF_S)
        job.due = time.monotonic() + max(job.every_s, pause_s)

    def _send_metrics(self) -> ExportResult:
        """Send every request, even after a failed one, until failures have taken the time limit of one export."""
        observed, start_times = self._newest
        if self._metrics is None or observed.latest is None or observed is self._sent:
            return ExportResult()
        self._sent = observed
        arrived = refused = 0
        lost_s = 0.0
        for request in self._encoder.requests(observed, start_times):
            began = time.monotonic()
            if self._metrics.export(request) is MetricExportResult.SUCCESS:
                arrived += 1
                continue
            refused += 1
            lost_s += time.monotonic() - began
            if lost_s >= self._failure_limit_s or self._stopping.is_set():
                break
        return ExportResult(arrived, refused)

    def _send_spans(self) -> ExportResult:
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        if self._spans is None or not batch:
            return ExportResult()
        if self._spans.export(batch) is SpanExportResult.SUCCESS:
            return ExportResult(arrived=1)
        self.dropped_spans += len(batch)
        return ExportResult(refused=1)


def _exporter(kind: str, signal: OtlpSignal) -> SdkExporter:
    """Return the SDK's exporter of one kind of data. Raises Unavailable if it rejects the environment."""
    try:
        return _grpc(kind, signal) if signal.protocol == PROTOCOL_GRPC else _http(kind, signal)
    except Exception as error:
        reason = f"OpenTelemetry export to {signal.endpoint} cannot start: {error}"
        raise Unavailable(reason, "correct the OTEL_EXPORTER_OTLP_* variables, or unset them") from error


def _grpc(kind: str, signal: OtlpSignal) -> SdkExporter:
    # Each protocol costs memory (gRPC 20 MiB, HTTP 5), so only the configured one is imported.
    from grpc import Compression  # noqa: PLC0415
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    compression = Compression.Gzip if signal.compression == "gzip" else Compression.NoCompression
    exporter = OTLPMetricExporter if kind == "metrics" else OTLPSpanExporter
    bounded: Any = (("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),)
    return exporter(signal.endpoint, timeout=signal.timeout_s, compression=compression, channel_options=bounded)


def _http(kind: str, signal: OtlpSignal) -> SdkExporter:
    from opentelemetry.exporter.otlp.proto.http import Compression  # noqa: PLC0415
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from requests import Session  # noqa: PLC0415

    compression = Compression.Gzip if signal.compression == "gzip" else Compression.NoCompression
    session = Session()
    # requests prefers REQUESTS_CA_BUNDLE to the certificate configured for OTLP, and would refuse a collector with a private
    # CA. The environment's proxies are not used either then.
    session.trust_env = not signal.certificate
    # A redirected POST becomes a GET of a log-in page whose status 200 would count as delivered.
    session.max_redirects = 0
    exporter = OTLPMetricExporter if kind == "metrics" else OTLPSpanExporter
    return exporter(signal.endpoint, timeout=signal.timeout_s, compression=compression, session=session)


class _ExportJob:
    """Sending of one kind of data, and the time of the next attempt."""

    def __init__(self, send: Callable[[], ExportResult], every_s: float) -> None:
        self.send, self.every_s = send, every_s
        self.due = time.monotonic() + every_s
        self.failed = 0


class _ExporterLogs(logging.Handler):
    """Keeps the exporters' own messages out of the log, and the newest one for ours."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = "the exporter gave no reason"
        self._passing = ""
        self._loggers = [logging.getLogger(name) for name in SDK_LOGGERS]
        for logger in self._loggers:
            logger.addHandler(self)
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        # The message of a retry has the reason; the final error only says that no attempt succeeded.
        if record.levelno < logging.ERROR:
            self._passing = record.getMessage()
        else:
            self.text = "; ".join(filter(None, (record.getMessage(), self._passing)))
            self._passing = ""

    def remove(self) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)
            logger.propagate = True
