"""Collectors on a loopback port: OTLP as its protobufs define it, over gRPC and over HTTP, with TLS if requested."""

from __future__ import annotations

import asyncio
import gzip
import queue
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans


class Tls(NamedTuple):
    """What a collector shows of itself, and whose clients it lets in."""

    certificate: Path
    key: Path
    clients: Path | None = None


class Collected:
    """What came: one item for every resource of every request, and the headers of every request."""

    def __init__(self) -> None:
        self.metrics: queue.Queue[ResourceMetrics] = queue.Queue()
        self.traces: queue.Queue[ResourceSpans] = queue.Queue()
        self.headers: queue.Queue[dict[str, str]] = queue.Queue()
        self.refusals = 0
        """So many requests are turned away first, as not possible just now."""

        self.rejections = 0
        """So many requests are turned away first, for good."""

    def turned_away(self) -> bool:
        self.refusals -= 1
        return self.refusals >= 0

    def rejected(self) -> bool:
        self.rejections -= 1
        return self.rejections >= 0


class GrpcCollector(Collected):
    """The two services of OTLP over gRPC."""

    def __init__(self, port: int = 0, tls: Tls | None = None) -> None:
        super().__init__()
        self.server = grpc.server(ThreadPoolExecutor(2))
        self.answer_bytes = 0
        """Length of what is said of every request for metrics."""
        collected = self

        class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                collected.took(context)
                for resource in request.resource_metrics:
                    collected.metrics.put(resource)
                answer = metrics_service_pb2.ExportMetricsServiceResponse()
                answer.partial_success.error_message = "x" * collected.answer_bytes
                return answer

        class Traces(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                collected.took(context)
                for resource in request.resource_spans:
                    collected.traces.put(resource)
                return trace_service_pb2.ExportTraceServiceResponse()

        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), self.server)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), self.server)
        if tls is None:
            self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        else:
            clients = None if tls.clients is None else tls.clients.read_bytes()
            credentials = grpc.ssl_server_credentials(
                [(tls.key.read_bytes(), tls.certificate.read_bytes())], clients, clients is not None
            )
            self.port = self.server.add_secure_port(f"127.0.0.1:{port}", credentials)
        self.server.start()

    def took(self, context: Any) -> None:
        self.headers.put(dict(context.invocation_metadata()))
        if self.turned_away():
            context.abort(grpc.StatusCode.UNAVAILABLE, "come again")
        if self.rejected():
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not this one")

    def stop(self) -> None:
        self.server.stop(None).wait()


class HttpCollector(Collected):
    """POST /v1/metrics and /v1/traces."""

    def __init__(self, port: int = 0, tls: Tls | None = None) -> None:
        super().__init__()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])
        self._tls = None if tls is None else _context(tls)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        app = web.Application(client_max_size=16 << 20)
        app.router.add_post("/v1/metrics", self._metrics)
        app.router.add_post("/v1/traces", self._traces)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, self._listener, ssl_context=self._tls).start()
        self._ready.set()
        await self._stopping.wait()
        await runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        message = metrics_service_pb2.ExportMetricsServiceRequest()
        if not await self._took(request, message):
            return web.Response(status=503, headers={"Retry-After": "0"})
        if self.rejected():
            return web.Response(status=400)
        for resource in message.resource_metrics:
            self.metrics.put(resource)
        return _answer(metrics_service_pb2.ExportMetricsServiceResponse())

    async def _traces(self, request: web.Request) -> web.Response:
        message = trace_service_pb2.ExportTraceServiceRequest()
        if not await self._took(request, message):
            return web.Response(status=503, headers={"Retry-After": "0"})
        if self.rejected():
            return web.Response(status=400)
        for resource in message.resource_spans:
            self.traces.put(resource)
        return _answer(trace_service_pb2.ExportTraceServiceResponse())

    async def _took(self, request: web.Request, message: Any) -> bool:
        self.headers.put({name.lower(): value for name, value in request.headers.items()})
        assert request.content_type == "application/x-protobuf"
        body = await request.read()
        message.ParseFromString(gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body)
        return not self.turned_away()


def _answer(message: Any) -> web.Response:
    return web.Response(body=message.SerializeToString(), content_type="application/x-protobuf")


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key)
    if tls.clients is not None:
        context.load_verify_locations(tls.clients)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


COLLECTORS = {"grpc": GrpcCollector, "http/protobuf": HttpCollector}
