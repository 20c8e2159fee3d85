"""The same cycles over both protocols of OTLP, with TLS, headers, compression and retries by the standard variables."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.interfaces import Unavailable
from api.metrics import AGENT_METRICS
from exporters.otel import encoder
from exporters.otel.environment import OtlpSignal, read_otlp_settings
from exporters.otel.sink import MAX_SPANS, OtelSink
from exporters.otel.startup import start_otel
from exporters.prometheus.families import cycle_trace_ids
from tests.builders.four_cpu_node import busy_cycle
from tests.builders.full_node import RICH_ABOUT, full_cycle
from tests.builders.waiting import until
from tests.exporters.certificates import Authority
from tests.exporters.otel.otlp_receivers import COLLECTORS, Collected, Tls

PATIENCE_S = 20
QUICK = {"OTEL_METRIC_EXPORT_INTERVAL": "100", "OTEL_BSP_SCHEDULE_DELAY": "100"}
Collect = Callable[..., Collected]


@pytest.fixture(params=sorted(COLLECTORS))
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def collect(protocol: str) -> Iterator[Collect]:
    running: list[Any] = []

    def run(tls: Tls | None = None) -> Any:
        running.append(COLLECTORS[protocol](tls=tls))
        return running[-1]

    yield run
    for collector in running:
        collector.stop()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, protocol: str) -> Callable[..., dict[str, str]]:
    """The variables, in the process' own environment too, where the SDK's exporters look."""

    def given(port: int, *, scheme: str = "http", **more: str) -> dict[str, str]:
        named = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{scheme}://localhost:{port}", "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        } | QUICK | more  # fmt: skip
        for name, value in named.items():
            monkeypatch.setenv(name, value)
        return named

    return given


def started(environ: dict[str, str]) -> OtelSink:
    sink = start_otel(environ, lambda: RICH_ABOUT)
    assert sink is not None
    return sink


def names_of(collected: Collected) -> set[str]:
    """Of every metric that came, in however many requests."""
    names: set[str] = set()
    deadline = time.monotonic() + PATIENCE_S
    while not names >= {row.otel_name for row in AGENT_METRICS} | {"container.disk.io"}:
        received = collected.metrics.get(timeout=max(0.0, deadline - time.monotonic()))
        names |= {metric.name for scope in received.scope_metrics for metric in scope.metrics}
    return names


def test_every_row_and_the_span_arrive(collect: Collect, environment: Any) -> None:
    collected = collect()
    sink = started(environment(collected.port))
    finished = full_cycle(2)
    sink.publish(finished)
    names = names_of(collected)
    span = collected.traces.get(timeout=PATIENCE_S).scope_spans[0].spans[0]
    sink.close()
    assert {"system.cpu.time", "container.cpu.time", "system.memory.usage"} <= names
    assert (int.from_bytes(span.trace_id), int.from_bytes(span.span_id)) == cycle_trace_ids(finished.snapshot)
    assert (sink.failures, sink.dropped_spans) == (0, 0)


def test_headers_and_compression_are_those_of_the_environment(collect: Collect, environment: Any) -> None:
    collected = collect()
    environ = environment(
        collected.port, OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20abc,x-tenant=edge",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
    )  # fmt: skip
    sink = started(environ)
    sink.publish(busy_cycle(2))
    collected.metrics.get(timeout=PATIENCE_S)
    headers = collected.headers.get(timeout=PATIENCE_S)
    sink.close()
    assert (headers["authorization"], headers["x-tenant"]) == ("Bearer abc", "edge")
    if environ["OTEL_EXPORTER_OTLP_PROTOCOL"] != "grpc":  # gRPC's library unpacks before anyone could look
        assert headers["content-encoding"] == "gzip"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def test_tls_with_an_authority_and_a_client_certificate_of_our_own(
    collect: Collect, environment: Any, authority: Authority
) -> None:
    certificate, key = authority.issue("collector")
    client, client_key = authority.issue("agent")
    collected = collect(Tls(certificate, key, authority.certificate))
    environ = environment(
        collected.port, scheme="https", OTEL_EXPORTER_OTLP_CERTIFICATE=str(authority.certificate),
        OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE=str(client), OTEL_EXPORTER_OTLP_CLIENT_KEY=str(client_key),
    )  # fmt: skip
    sink = started(environ)
    sink.publish(busy_cycle(2))
    collected.metrics.get(timeout=PATIENCE_S)
    collected.traces.get(timeout=PATIENCE_S)
    sink.close()
    assert sink.failures == 0


def test_a_collector_of_another_authority_gets_nothing(
    collect: Collect, environment: Any, authority: Authority, tmp_path: Path
) -> None:
    collected = collect(Tls(*authority.issue("collector")))
    other = Authority(tmp_path, "other")
    environ = environment(
        collected.port, scheme="https", OTEL_EXPORTER_OTLP_CERTIFICATE=str(other.certificate),
        OTEL_EXPORTER_OTLP_TIMEOUT="500",
    )  # fmt: skip
    sink = started(environ)
    sink.publish(busy_cycle(2))
    until(lambda: sink.failures >= 2)
    sink.close()
    assert collected.headers.empty()


def test_what_a_collector_cannot_take_just_now_is_sent_again(collect: Collect, environment: Any) -> None:
    collected = collect()
    collected.refusals = 1
    sink = started(environment(collected.port, OTEL_TRACES_EXPORTER="none"))
    sink.publish(busy_cycle(2))
    assert collected.metrics.get(timeout=PATIENCE_S).scope_metrics
    until(lambda: collected.headers.qsize() >= 2)
    sink.close()
    assert sink.failures == 0, "the retry belongs to the same export"


def test_a_portion_that_is_refused_for_good_costs_itself_alone(collect: Collect, environment: Any) -> None:
    collected = collect()
    collected.rejections = 1
    sink = started(environment(collected.port, OTEL_TRACES_EXPORTER="none"))
    sink.publish(busy_cycle(2, cgroups=400))
    names: set[str] = set()
    while "dioptase.build.info" not in names:
        received = collected.metrics.get(timeout=PATIENCE_S)
        names |= {metric.name for scope in received.scope_metrics for metric in scope.metrics}
    until(lambda: sink.failures)
    sink.close()
    assert "dioptase.cgroup.cpu.usage" not in names, "it was in the first"
    assert sink.failures == 1


def test_portions_do_not_wait_one_after_the_other_for_a_collector_that_hangs(
    environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "POINTS_PER_REQUEST", 500)
    with socket.create_server(("127.0.0.1", 0)) as accepts_and_says_nothing:
        port = accepts_and_says_nothing.getsockname()[1]
        sink = started(environment(port, OTEL_EXPORTER_OTLP_TIMEOUT="200", OTEL_TRACES_EXPORTER="none"))
        sink.publish(busy_cycle(2, cgroups=400))
        until(lambda: sink.failures)
        sink.close()
    assert sink.failures <= 2, "of more than ten"


def test_a_collector_that_hangs_costs_its_counter_alone(environment: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as accepts_and_says_nothing:
        sink = started(environment(accepts_and_says_nothing.getsockname()[1], OTEL_EXPORTER_OTLP_TIMEOUT="200"))
        for seq in range(2, 700):
            sink.publish(busy_cycle(seq))
        until(lambda: sink.failures >= 2)
        sink.close()
        assert not sink._thread.is_alive()
        assert sink.dropped_spans >= 700 - 2 - MAX_SPANS


ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
VARIABLES = (
    ENDPOINT, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TIMEOUT",
    "OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_EXPORTER_OTLP_CERTIFICATE", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME",
    "OTEL_SDK_DISABLED", "OTEL_METRIC_EXPORT_INTERVAL", "OTEL_TRACES_EXPORTER", "POD_NAME",
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
)  # fmt: skip


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({ENDPOINT: "http://c:4318/"}, "http://c:4318/v1/metrics"),
        ({ENDPOINT: "http://c:4318/otlp"}, "http://c:4318/otlp/v1/metrics"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "https://c/ingest"}, "https://c/ingest"),
    ],
)
def test_http_endpoints_get_the_path_of_the_signal_unless_it_is_their_own(more: dict[str, str], expected: str) -> None:
    settings = read_otlp_settings({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"} | more)
    assert settings is not None
    assert settings.metrics is not None
    assert settings.metrics.endpoint == expected


def test_a_signal_may_have_its_own_protocol_timeout_and_compression() -> None:
    settings = read_otlp_settings({
        ENDPOINT: "http://c:4317", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces", "OTEL_EXPORTER_OTLP_TIMEOUT": "3000",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "700", "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "gzip",
    })  # fmt: skip
    assert settings is not None
    assert settings.metrics == OtlpSignal(
        endpoint="http://c:4317", protocol="grpc", compression="gzip", every_s=60.0, timeout_s=3.0
    )
    assert settings.traces == OtlpSignal(
        endpoint="http://c:4318/v1/traces", protocol="http/protobuf", compression="none", every_s=5.0, timeout_s=0.7
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "brotli"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere.crt"),
        ("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", "/nowhere.key"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a=b,rubbish"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "-1"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "LowMemory"),
        ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "base2_exponential_bucket_histogram"),
        ("OTEL_METRICS_EXPORTER", "prometheus"),
        ("OTEL_METRICS_EXPORTER", "otlp,console"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
    ],
)
def test_a_setting_that_cannot_hold_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(Unavailable, match=name) as refused:
        read_otlp_settings({ENDPOINT: "http://localhost:1", name: value})
    assert refused.value.remedy


def test_default_settings_are_accepted_and_unknown_exporters_refused_without_an_endpoint() -> None:
    queried = {
        ENDPOINT: "http://localhost:1", "OTEL_METRICS_EXPORTER": "OTLP", "OTEL_TRACES_EXPORTER": "none",
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "Cumulative",
        "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "explicit_bucket_histogram",
    }  # fmt: skip
    settings = read_otlp_settings(queried)
    assert settings is not None
    assert (settings.metrics is None, settings.traces) == (False, None)
    delta = {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"}
    assert read_otlp_settings(queried | delta | {"OTEL_METRICS_EXPORTER": "none", "OTEL_TRACES_EXPORTER": "otlp"}), (
        "of no metrics"
    )
    with pytest.raises(Unavailable, match="OTEL_METRICS_EXPORTER is 'console'") as refused:
        read_otlp_settings({"OTEL_METRICS_EXPORTER": "console"})
    assert refused.value.remedy == "set it to otlp or none"


HOLDABLE = st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.characters(
    min_codepoint=0xDC80, max_codepoint=0xDCFF, categories=["Cs"]
)
"""What os.environ can have: text, and surrogates for bytes that are none."""


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text(HOLDABLE, max_size=20)))
@settings(deadline=None, max_examples=300)
def test_no_environment_breaks_the_reading(environ: dict[str, str]) -> None:
    reason, settings = "OTEL_", None
    try:
        settings = read_otlp_settings(environ)
    except Unavailable as refused:
        reason = refused.reason
    assert "OTEL_" in reason
    for value in (settings.resource if settings else {}).values():
        value.encode()


def test_an_http_endpoint_without_a_scheme_is_refused() -> None:
    with pytest.raises(Unavailable, match="OTEL_EXPORTER_OTLP_ENDPOINT is 'collector:4318'"):
        read_otlp_settings({ENDPOINT: "collector:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
