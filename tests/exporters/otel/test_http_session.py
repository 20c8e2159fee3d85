"""Collectors by HTTP that are broken, or are something else: what they answer is no delivery, and costs next to nothing."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from requests import Session
from requests.exceptions import RequestException

from exporters.otel import http_session
from exporters.otel.http_session import MAX_BODY_BYTES, bounded_session
from exporters.otel.startup import start_otel
from tests.builders.four_cpu_node import busy_cycle

Answers = Callable[[socket.socket], None]
PATIENCE_S = 20
BOMB_BYTES = 1 << 28


class Collector:
    """Accepts every request and sends a given response."""

    def __init__(self, answer: Answers) -> None:
        self.heads: list[bytes] = []
        self.connections = 0
        answers = answer

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(handler) -> None:  # noqa: N805
                self.connections += 1
                super().setup()

            def do_POST(handler) -> None:  # noqa: N805
                self.heads.append(bytes(handler.headers))
                handler.rfile.read(int(handler.headers["Content-Length"]))
                with contextlib.suppress(OSError):
                    answers(handler.connection)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collect() -> Iterator[Callable[[Answers], Collector]]:
    running: list[Collector] = []

    def run(answer: Answers) -> Collector:
        running.append(Collector(answer))
        return running[-1]

    yield run
    for collector in running:
        collector.server.shutdown()
        collector.server.server_close()


@pytest.fixture
def bounded() -> Iterator[Session]:
    with bounded_session(trust_env=False) as created:
        yield created


def full(text: bytes) -> Answers:
    return lambda connection: connection.sendall(text)


def endless(first: bytes, more: bytes, pause_s: float = 0.0) -> Answers:
    def answer(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(more)
            time.sleep(pause_s)

    return answer


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirection_is_a_failure_that_says_where_to(
    collect: Callable[[Answers], Collector], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"HTTP/1.1 {status} Elsewhere\r\nLocation: https://other/v1/metrics\r\nContent-Length: 0\r\n\r\n"
    collector = collect(full(head.encode()))
    with caplog.at_level(logging.WARNING):
        sink = start_otel({
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_METRIC_EXPORT_INTERVAL": "100", "OTEL_TRACES_EXPORTER": "none",
        })  # fmt: skip
        assert sink is not None
        sink.publish(busy_cycle(2))
        deadline = time.monotonic() + PATIENCE_S
        while not sink.failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sink.close()
    message = next(text for text in caplog.messages if "export fails" in text)
    assert f"HTTP {status}" in message
    assert "'https://other/v1/metrics'" in message


def test_of_a_long_answer_little_is_read(collect: Callable[[Answers], Collector], bounded: Session) -> None:
    head = b"HTTP/1.1 400 No\r\nContent-Length: 3000000000\r\n\r\n"
    collector = collect(endless(head, bytes(1 << 16)))
    answer = bounded.post(collector.url, b"x", timeout=PATIENCE_S)
    assert (answer.status_code, len(answer.content)) == (400, MAX_BODY_BYTES)


def test_an_answer_is_not_unpacked(collect: Callable[[Answers], Collector], bounded: Session) -> None:
    """260 KiB expand to a quarter of a GiB; compression was not requested."""
    bomb = gzip.compress(bytes(BOMB_BYTES))
    head = f"HTTP/1.1 400 No\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()
    collector = collect(full(head + bomb))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = bounded.post(collector.url, b"x", timeout=PATIENCE_S)
    assert len(answer.content) <= MAX_BODY_BYTES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < BOMB_BYTES / 1024 / 4
    assert b"Accept-Encoding: identity" in collector.heads[0]


@pytest.mark.parametrize(
    "answer",
    [
        endless(b"HTTP/1.1 200 OK\r\nX: ", b"y", 0.1),
        endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.1),
        endless(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"z", 0.1),
        endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nz\r\n", 0.1),
    ],
    ids=["head", "interim", "body", "chunks"],
)
def test_an_answer_that_trickles_ends_at_the_deadline(
    collect: Callable[[Answers], Collector], bounded: Session, answer: Answers
) -> None:
    """Every byte comes well within the timeout: without one for the whole this never returns."""
    with pytest.raises(RequestException, match="timed out"):
        bounded.post(collect(answer).url, b"x", timeout=0.7)


def test_interim_answers_have_an_end(
    collect: Callable[[Answers], Collector], bounded: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_session, "MAX_EXCHANGE_BYTES", 1 << 16)
    collector = collect(endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100))
    with pytest.raises(RequestException, match="longer than 65536 bytes"):
        bounded.post(collector.url, b"x", timeout=PATIENCE_S)


def test_a_connection_serves_one_export_after_another(
    collect: Callable[[Answers], Collector], bounded: Session
) -> None:
    collector = collect(full(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"))
    assert [bounded.post(collector.url, b"x", timeout=PATIENCE_S).content for _ in range(3)] == [b"ok"] * 3
    assert (len(collector.heads), collector.connections) == (3, 1)
