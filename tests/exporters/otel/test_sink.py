"""A real OTLP receiver on a loopback port gets the numbers of a cycle; a dead one costs nothing but a log line."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, Metric, ResourceMetrics
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.semconv.schemas import Schemas

from api.decision import OutcomeStatus
from api.interfaces import Unavailable
from api.metrics import RUNQ_LATENCY_BOUNDS_S
from api.units import MIB
from exporters.otel.conventions import node_instruments
from exporters.otel.encoder import POINTS_PER_REQUEST, OtlpEncoder
from exporters.otel.sink import MAX_SPANS, OtelSink
from exporters.otel.startup import start_otel
from exporters.prometheus.families import MetricsState, metric_families
from tests.builders.four_cpu_node import ABOUT, BATCH_ID, MS, S, bare_cycle, busy_cycle, outcome
from tests.builders.full_node import full_cycle
from tests.builders.waiting import until
from tests.exporters.otel.otlp_receivers import GrpcCollector

PATIENCE_S = 20


@pytest.fixture
def receiver() -> Iterator[GrpcCollector]:
    receiver = GrpcCollector()
    yield receiver
    receiver.stop()


def sink_to(port: int, **environ: str) -> OtelSink:
    quick = {"OTEL_METRIC_EXPORT_INTERVAL": "100", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    sink = start_otel({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"} | quick | environ, lambda: ABOUT)
    assert sink is not None
    return sink


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def plain(attributes: Any) -> dict[str, Any]:
    def value(pair: KeyValue) -> Any:
        kind = pair.value.WhichOneof("value")
        if kind == "array_value":
            return [item.string_value for item in pair.value.array_value.values]
        return getattr(pair.value, kind)

    return {pair.key: value(pair) for pair in attributes}


def by_name(received: ResourceMetrics) -> dict[str, Metric]:
    (scope,) = received.scope_metrics
    assert scope.scope.name == "dioptase"
    return {metric.name: metric for metric in scope.metrics}


def point(points: Any, **labels: str) -> Any:
    (actual,) = [p for p in points if labels.items() <= plain(p.attributes).items()]
    return actual


def boot_time_s() -> int:
    return next(
        int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
    )


def test_metrics_arrive_with_their_numbers_kinds_units_and_start_times(receiver: GrpcCollector) -> None:
    before_ns = time.time_ns()
    sink = sink_to(receiver.port)
    sink.publish(busy_cycle(2))
    received = receiver.metrics.get(timeout=PATIENCE_S)
    sink.close()
    metrics = by_name(received)
    shown = metric_families(MetricsState(version="1").after(busy_cycle(2), ABOUT))
    conventional = node_instruments(busy_cycle(2).snapshot)
    assert set(metrics) == {family.metric.otel_name for family in shown} | {also.name for also in conventional}

    usage = metrics["dioptase.cgroup.cpu.usage"]
    assert (usage.unit, usage.sum.is_monotonic) == ("s", True)
    assert usage.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    web = point(usage.sum.data_points, pod="web")
    assert plain(web.attributes) == {
        "cgroup": "/web", "namespace": "default", "pod": "web", "container": "web", "qos": "shared_cores",
    }  # fmt: skip
    assert web.as_double == 3.0
    assert web.time_unix_nano == 1_700_000_002 * 10**9
    assert abs(web.start_time_unix_nano / 1e9 - boot_time_s()) < 5

    periods = point(metrics["dioptase.cgroup.cpu.throttled.periods"].sum.data_points, pod="web")
    assert periods.as_int == 4
    decisions = metrics["dioptase.decisions"].sum.data_points
    refused = point(decisions, outcome="refused")
    assert refused.as_int == 1
    assert before_ns <= refused.start_time_unix_nano <= time.time_ns()
    assert point(metrics["dioptase.reclaim.lent"].gauge.data_points).as_double == 2.5
    assert metrics["dioptase.reclaim.lent"].unit == "{core}"
    assert point(metrics["dioptase.act.mode"].gauge.data_points, mode="on").as_int == 1


def test_a_cgroup_that_is_made_again_counts_from_then_on(receiver: GrpcCollector) -> None:
    first, second = busy_cycle(2).snapshot, busy_cycle(3).snapshot
    again = msgspec.structs.replace(first.cgroups["/web"], id=555)
    made_again = msgspec.structs.replace(second, cgroups={**second.cgroups, "/web": again})
    sink = sink_to(receiver.port, OTEL_METRIC_EXPORT_INTERVAL="600000", OTEL_TRACES_EXPORTER="none")
    for snapshot in (first, made_again, msgspec.structs.replace(made_again, wall_time_ns=made_again.wall_time_ns + S)):
        sink.publish(msgspec.structs.replace(busy_cycle(3), snapshot=snapshot))
    sink.close()
    metrics = by_name(receiver.metrics.get(timeout=PATIENCE_S))
    for name in ("dioptase.cgroup.cpu.usage", "dioptase.cgroup.runq.wait"):
        data = metrics[name].sum if metrics[name].HasField("sum") else metrics[name].histogram
        assert point(data.data_points, pod="web").start_time_unix_nano == first.wall_time_ns, name
        assert point(data.data_points, pod="web").time_unix_nano == first.wall_time_ns + 2 * S
    usage = metrics["dioptase.cgroup.cpu.usage"].sum.data_points
    assert abs(point(usage, pod="batch").start_time_unix_nano / 1e9 - boot_time_s()) < 5
    node = metrics["dioptase.node.cpu"].sum.data_points[0]
    assert abs(node.start_time_unix_nano / 1e9 - boot_time_s()) < 5


def test_each_container_has_a_resource_of_its_own(receiver: GrpcCollector) -> None:
    first, second = busy_cycle(2).snapshot, busy_cycle(3).snapshot
    again = msgspec.structs.replace(second.cgroups["/batch"], id=555)
    snapshot = msgspec.structs.replace(second, cgroups={**second.cgroups, "/batch": again})
    named = "team=edge,k8s.pod.name=dioptase-x,k8s.node.name=n1,container.id=c0ffee"
    sink = sink_to(receiver.port, OTEL_METRIC_EXPORT_INTERVAL="600000", OTEL_RESOURCE_ATTRIBUTES=named, POD_UID="9b2f")
    sink.publish(busy_cycle(2))
    sink.publish(msgspec.structs.replace(busy_cycle(3), snapshot=snapshot))
    sink.close()
    agent, web, batch = (receiver.metrics.get(timeout=PATIENCE_S) for _ in range(3))
    assert receiver.headers.qsize() == 2, "one request for all metrics and one for the spans"
    reported = plain(agent.resource.attributes)
    assert (reported["service.instance.id"], reported["k8s.pod.name"]) == ("9b2f", "dioptase-x")
    assert not any(name.startswith(("container.", "k8s.")) for name in by_name(agent))
    for received, pod in ((web, "web"), (batch, "batch")):
        identity = {"k8s.namespace.name": "default", "k8s.pod.name": pod, "k8s.container.name": pod}
        of_host = {name: reported[name] for name in ("host.name", "host.arch", "host.id") if name in reported}
        assert plain(received.resource.attributes) == of_host | {"team": "edge", "k8s.node.name": "n1"} | identity
        metrics = by_name(received)
        assert all(name.startswith(("container.", "k8s.container.")) for name in metrics)
        assert plain(point(metrics["container.cpu.time"].sum.data_points).attributes) == identity
    began = point(by_name(batch)["container.cpu.time"].sum.data_points).start_time_unix_nano
    assert began == first.wall_time_ns, "it was made again"
    assert abs(point(by_name(web)["container.cpu.time"].sum.data_points).start_time_unix_nano / 1e9 - boot_time_s()) < 5


def test_the_conventions_release_is_named(receiver: GrpcCollector) -> None:
    sink = sink_to(receiver.port)
    sink.publish(busy_cycle(2))
    for received in (receiver.metrics.get(timeout=PATIENCE_S), receiver.traces.get(timeout=PATIENCE_S)):
        scopes = received.scope_metrics if isinstance(received, ResourceMetrics) else received.scope_spans
        assert received.schema_url == Schemas.V1_44_0.value
        assert {scope.schema_url for scope in scopes} == {Schemas.V1_44_0.value}
    sink.close()


def test_waits_are_real_histograms_with_explicit_bounds(receiver: GrpcCollector) -> None:
    sink = sink_to(receiver.port)
    sink.publish(busy_cycle(2))
    histogram = by_name(receiver.metrics.get(timeout=PATIENCE_S))["dioptase.cgroup.runq.wait"].histogram
    sink.close()
    web = point(histogram.data_points, pod="web")
    assert histogram.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    assert tuple(web.explicit_bounds) == RUNQ_LATENCY_BOUNDS_S
    assert {k: n for k, n in enumerate(web.bucket_counts) if n} == {3: 180, 7: 18, 14: 2}
    assert len(web.bucket_counts) == len(RUNQ_LATENCY_BOUNDS_S) + 1
    assert (web.count, web.sum) == (200, pytest.approx(0.036512))
    assert not web.HasField("min")
    assert not web.HasField("max")


def test_a_cycle_is_a_span_and_each_decision_an_event(receiver: GrpcCollector) -> None:
    sink = sink_to(receiver.port)
    sink.publish(busy_cycle(2))
    received = receiver.traces.get(timeout=PATIENCE_S)
    sink.close()
    resource = plain(received.resource.attributes)
    assert (resource["service.name"], resource["host.name"]) == ("dioptase", socket.gethostname())
    assert resource["service.version"]
    (shown,) = received.scope_spans[0].spans
    assert shown.name == "round"
    assert len(shown.trace_id) == 16
    assert shown.start_time_unix_nano == 1_700_000_002 * 10**9
    assert shown.end_time_unix_nano - shown.start_time_unix_nano == 12 * MS
    about = plain(shown.attributes)
    assert {name.removeprefix("dioptase."): value for name, value in about.items()} == {
        "seq": 2, "trigger": "tick", "act": "on", "policy": "latency", "action": "grow", "rule": "wait_below_target",
        "reason": "online pods wait 128 us at p99, below the target of 1000 us: lend half a core more",
        "threshold": 1000.0, "lent_cores": 2.5, "requirement_cores": 1.5, "headroom_cores": 0.25, "idle": True,
        "pools": ["share 0-3", "reclaim 2-3"], "outcomes": 3, "banner": list(busy_cycle(2).startup_warnings),
    }  # fmt: skip
    events = [plain(event.attributes) for event in shown.events]
    assert [(e["dioptase.knob"], e["dioptase.status"]) for e in events] == [
        ("cpuset.cpus", "applied"), ("cpu.max", "refused"), ("cpu.idle", "unchanged"),
    ]  # fmt: skip
    assert events[0]["dioptase.pod"] == "default/batch"
    assert (events[0]["dioptase.before"], events[0]["dioptase.after"]) == ("3", "2-3")
    assert events[0]["dioptase.input.wait_p99_us"] == 128.0
    assert "dioptase.input.indicator" not in events[0]
    assert {event.time_unix_nano for event in shown.events} == {shown.end_time_unix_nano}
    assert (shown.status.code, shown.status.message) == (2, "cpu.max: invalid argument")


def test_cycles_have_traces_of_their_own_and_the_least_of_them_arrives_too(receiver: GrpcCollector) -> None:
    sink = sink_to(receiver.port, OTEL_BSP_SCHEDULE_DELAY="60000")
    for seq in range(1, 6):
        sink.publish(bare_cycle(seq))
    sink.close()
    spans = receiver.traces.get(timeout=PATIENCE_S).scope_spans[0].spans
    assert [plain(shown.attributes)["dioptase.seq"] for shown in spans] == [1, 2, 3, 4, 5]
    assert len({shown.trace_id for shown in spans}) == 5
    assert {shown.status.code for shown in spans} == {0}


def test_the_steps_behind_the_decisions_are_events_too() -> None:
    shown = OtlpEncoder({}, "1", {}).span(full_cycle(2))
    names = [event.name for event in shown.events]
    assert names[:7] == ["region", "rejected", "memory", "threshold", "threshold", "victim", "victim"]
    assert names[7:10] == ["kill", "kill", "decision"]
    region, rejected, memory, threshold = (dict(event.attributes or {}) for event in shown.events[:4])
    assert region["dioptase.region"] == "share-NUMA0"
    assert region["dioptase.control.non-reclaimed-cpu-requirement"] == 3.0
    assert region["dioptase.signal.cpu_sched_wait.target"] == 400.0
    assert region["dioptase.input.cpus"] == 3
    assert rejected["dioptase.rule"] == "dedicated_needs_numa_binding"
    assert memory["dioptase.headroom_bytes"] == 3072 * MIB
    assert memory["dioptase.numa.0.condition"] == "tune_memcg"
    assert (threshold["dioptase.observed"], threshold["dioptase.threshold"]) == (64 * MIB, 96 * MIB)
    assert [dict(event.attributes or {}) for event in shown.events[7:9]] == [
        {
            "dioptase.pod": "default/batch",
            "dioptase.kill": "EvictCreated",
            "dioptase.reason": "Successfully create eviction; reason: x",
            "dioptase.warning": False,
        },
        {
            "dioptase.pod": "default/stuck",
            "dioptase.kill": "EvictExceededGracePeriod",
            "dioptase.reason": "processes are left 45 s after",
            "dioptase.warning": True,
        },
    ]


def test_a_span_has_at_most_128_events_changes_first() -> None:
    same = tuple(outcome(value=str(i), status=OutcomeStatus.UNCHANGED) for i in range(200))
    finished = busy_cycle(2, outcomes=(*same, outcome(value="changed")))
    shown = OtlpEncoder({}, "1", {}).span(finished)
    assert len(shown.events) == 128
    assert shown.events[0].attributes is not None
    assert shown.events[0].attributes["dioptase.value"] == "changed"
    assert shown.attributes is not None
    assert shown.attributes["dioptase.outcomes"] == 201


@pytest.mark.parametrize("hostile", ['quote"', "back\\slash", "new\nline", "größe ☃", "\x00\x01"])
def test_any_text_arrives_as_it_is(receiver: GrpcCollector, hostile: str) -> None:
    assert hostile_round_trip(receiver, f"/{hostile}") == f"/{hostile}"


def test_bytes_that_are_not_utf8_arrive_escaped(receiver: GrpcCollector) -> None:
    assert hostile_round_trip(receiver, "/caf\udce9") == "/caf\\xe9"


def hostile_round_trip(receiver: GrpcCollector, path: str) -> str:
    """The name of a cgroup as both signals show it."""
    finished = busy_cycle(2)
    batch = msgspec.structs.replace(finished.snapshot.cgroups["/batch"], path=path)
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups={path: batch})
    decision = msgspec.structs.replace(outcome().decision, cgroup=path, cgroup_id=BATCH_ID)
    sink = sink_to(receiver.port)
    sink.publish(
        msgspec.structs.replace(
            finished, snapshot=snapshot, outcomes=(msgspec.structs.replace(outcome(), decision=decision),)
        )
    )
    metrics = by_name(receiver.metrics.get(timeout=PATIENCE_S))
    shown: Span = receiver.traces.get(timeout=PATIENCE_S).scope_spans[0].spans[0]
    sink.close()
    (threads,) = metrics["dioptase.cgroup.threads"].gauge.data_points
    name = plain(threads.attributes)["cgroup"]
    assert plain(shown.events[0].attributes)["dioptase.cgroup"] == name
    return str(name)


def test_more_points_than_a_collector_takes_at_once_are_split(receiver: GrpcCollector) -> None:
    sink = sink_to(receiver.port)
    sink.publish(busy_cycle(2, cgroups=400))
    requests: list[int] = []
    names: set[str] = set()
    while "dioptase.build.info" not in names:
        metrics = by_name(receiver.metrics.get(timeout=PATIENCE_S))
        names |= set(metrics)
        requests.append(sum(len(getattr(m, m.WhichOneof("data")).data_points) for m in metrics.values()))
    sink.close()
    # 402 cgroups of 13 points and one of 9, and some for the node: more than one request, none over 4,000.
    assert len(requests) > 1
    assert max(requests) <= POINTS_PER_REQUEST
    assert sum(requests) > 402 * 13
    assert sink.failures == 0


def test_a_dead_collector_costs_one_log_line_and_a_bounded_queue(caplog: pytest.LogCaptureFixture) -> None:
    # The SDK drops a message that it logged in the same 20 s: in this process, that of the test before.
    for duplicates in logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").filters:
        vars(duplicates).clear()
    with caplog.at_level(logging.INFO):
        sink = sink_to(closed_port(), OTEL_EXPORTER_OTLP_TIMEOUT="500")
        for seq in range(1, MAX_SPANS + 90):
            sink.publish(bare_cycle(seq))
        until(lambda: sink.publish(bare_cycle(1)) or sink.failures >= 4)
        sink.close()
    assert sink.dropped_spans >= MAX_SPANS
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 2, "one for metrics and one for spans"
    assert all("UNAVAILABLE" in record.getMessage() for record in warnings)
    assert not sink._thread.is_alive()


def test_a_silent_collector_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as accepts_and_says_nothing:
        sink = sink_to(accepts_and_says_nothing.getsockname()[1], OTEL_EXPORTER_OTLP_TIMEOUT="600000")
        sink.publish(busy_cycle(2))
        time.sleep(0.3)
        sink.close()
        assert not sink._thread.is_alive()


def test_sending_resumes_when_the_collector_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    port = closed_port()
    with caplog.at_level(logging.INFO):
        sink = sink_to(port, OTEL_EXPORTER_OTLP_TIMEOUT="500")
        sink.publish(busy_cycle(2))
        until(lambda: sink.failures >= 2)
        receiver = GrpcCollector(port)
        sink.publish(busy_cycle(3))
        metrics = by_name(receiver.metrics.get(timeout=PATIENCE_S))
        until(lambda: "succeeded again after" in caplog.text)
        sink.close()
        receiver.stop()
    assert point(metrics["dioptase.cgroup.cpu.usage"].sum.data_points, pod="web").as_double == 4.5


@pytest.mark.parametrize(
    "environ", [{}, {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"}]
)
def test_without_an_endpoint_nothing_is_started(environ: Mapping[str, str]) -> None:
    assert start_otel(environ) is None


def test_without_an_endpoint_nothing_of_opentelemetry_is_loaded() -> None:
    loaded = "bool({'opentelemetry', 'grpc'} & {*sys.modules})"
    program = f"import sys; from exporters.otel.startup import start_otel; start_otel({{}}); sys.exit({loaded})"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=True)


def test_each_signal_may_have_its_own_endpoint_or_none(receiver: GrpcCollector) -> None:
    sink = start_otel(
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{receiver.port}", "OTEL_SERVICE_NAME": "edge"}
    )
    assert sink is not None
    sink.publish(busy_cycle(2))
    sink.close()
    received = receiver.traces.get(timeout=PATIENCE_S)
    assert plain(received.resource.attributes)["service.name"] == "edge"
    assert receiver.metrics.empty()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_METRIC_EXPORT_INTERVAL", "soon"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
    ],
)
def test_a_setting_that_cannot_hold_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(Unavailable, match=name) as refused:
        start_otel({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", name: value})
    assert refused.value.remedy


def test_a_variable_that_the_sdk_stumbles_over_when_it_is_imported_is_refused_by_name() -> None:
    """In a process of its own, because it is imported but once."""
    program = (
        "import os\nfrom api.interfaces import Unavailable\nfrom exporters.otel.startup import start_otel\n"
        "try:\n    start_otel(os.environ)\nexcept Unavailable as error:\n    print(error.reason, error.remedy, sep='; ')"
    )
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "soon"}
    lines = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[3], env=environ, check=True, capture_output=True
    )
    assert lines.stdout.decode() == (
        "OpenTelemetry cannot start: OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be a non-negative integer but got soon; "
        "correct that variable, or unset it\n"
    )


def test_what_the_exporters_refuse_is_said_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_GRPC_CREDENTIAL_PROVIDER", "nobody")
    with pytest.raises(Unavailable, match="cannot start") as refused:
        start_otel({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://localhost:1"})
    assert "unset" in refused.value.remedy


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirection_is_a_failed_export(status: int) -> None:
    """A client that follows it gets a log-in page with status 200, and believes the data was delivered."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Location", "/login")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sink = start_otel({
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_METRIC_EXPORT_INTERVAL": "100", "OTEL_TRACES_EXPORTER": "none",
    })  # fmt: skip
    assert sink is not None
    sink.publish(busy_cycle(2))
    until(lambda: sink.failures)
    sink.close()
    server.shutdown()
    server.server_close()


def test_a_long_answer_is_not_taken(receiver: GrpcCollector, caplog: pytest.LogCaptureFixture) -> None:
    receiver.answer_bytes = 1 << 20
    with caplog.at_level(logging.WARNING):
        sink = sink_to(receiver.port, OTEL_TRACES_EXPORTER="none")
        sink.publish(busy_cycle(2))
        until(lambda: sink.failures)
        sink.close()
    assert any("RESOURCE_EXHAUSTED" in text and "vs. 65536" in text for text in caplog.messages)
