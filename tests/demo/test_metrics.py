from __future__ import annotations

import socket
import struct
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from demo.counters import BUCKETS, CLIENT_CELLS, ClientCell, SharedCounters, bucket_of
from demo.workloads import DemoMetricsServer, demo_metrics_text


def cells() -> list[int]:
    client = [0] * CLIENT_CELLS
    client[bucket_of(3_000_000)] = 7
    client[bucket_of(40_000_000)] = 2
    client[bucket_of(10**12)] = 1
    client[ClientCell.SUM_NS] = 1_101_000_000
    client[ClientCell.LOST] = 1
    return client


def test_the_histogram_is_cumulative_in_seconds_and_consistent() -> None:
    families = {family.name: family for family in text_string_to_metric_families(demo_metrics_text(cells(), 42))}
    histogram = families["demo_request_duration_seconds"]
    assert histogram.type == "histogram"
    buckets = [(float(s.labels["le"]), s.value) for s in histogram.samples if s.name.endswith("_bucket")]
    assert len(buckets) == BUCKETS
    assert [count for bound, count in buckets if bound < 0.003] == [0] * 16
    assert [count for bound, count in buckets if 0.0036 < bound < 0.035] == [7] * 10
    assert buckets[-2][1] == 9
    assert buckets[-1] == (float("inf"), 10)
    values = {sample.name: sample.value for sample in histogram.samples}
    assert values["demo_request_duration_seconds_count"] == 10
    assert values["demo_request_duration_seconds_sum"] == pytest.approx(1.101)
    assert families["demo_requests_lost"].samples[0].value == 1
    assert families["demo_batch_units"].samples[0].value == 42


def test_the_server_shows_what_the_counters_hold_now(tmp_path: Path) -> None:
    client, batch = SharedCounters(tmp_path / "client", CLIENT_CELLS), SharedCounters(tmp_path / "batch", 2)
    server = DemoMetricsServer(client, batch)
    connection = HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        for units in (3, 8):
            batch[1] = units
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            assert answer.getheader("Content-Type", "").startswith("text/plain; version=0.0.4")
            assert f"demo_batch_units_total {units}\n" in answer.read().decode()
        connection.request("GET", "/")
        assert connection.getresponse().status == 404
    finally:
        connection.close()
        server.close()
        client.close()
        batch.close()


@pytest.mark.parametrize("request_text", [b"GET /metrics HTTP/1.1\r\n\r\n", b"GET /met"])
def test_a_client_that_leaves_early_is_no_error_of_the_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], request_text: bytes
) -> None:
    """A scrape that has timed out resets its connection; the server then writes into it, or reads from it."""
    client, batch = SharedCounters(tmp_path / "client", CLIENT_CELLS), SharedCounters(tmp_path / "batch", 2)
    server = DemoMetricsServer(client, batch)
    try:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port)) as left:
                left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                left.sendall(request_text)
        connection = HTTPConnection("127.0.0.1", server.port, timeout=5)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        server.close()
        client.close()
        batch.close()
    assert capfd.readouterr() == ("", "")


def test_a_client_that_sends_nothing_delays_the_end_and_is_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    client, batch = SharedCounters(tmp_path / "client", CLIENT_CELLS), SharedCounters(tmp_path / "batch", 2)
    server = DemoMetricsServer(client, batch)
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        # Connections are accepted in their order.
        connection = HTTPConnection("127.0.0.1", server.port, timeout=5)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 200
        connection.close()
        server.close()
        client.close()
        batch.close()
        assert silent.recv(1) == b"", "the server has disconnected it"
    assert capfd.readouterr() == ("", "")
