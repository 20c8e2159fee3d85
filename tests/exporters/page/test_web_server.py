"""The server on a real socket: what it serves, what it refuses, and that nothing comes out of publish()."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import random
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from agent.components import node_checks
from agent.journal.decisions import DecisionJournal
from api.decision import Cycle, JournalEntry, OutcomeStatus
from api.diagnostics import DoctorCheck, DoctorReport
from api.interfaces import Unavailable
from api.knobs import Knob
from api.snapshot import ComponentHealth
from common.http import responses
from exporters.page import web_server
from exporters.page.web_server import AgentWebServer, CachedFindings, ViewHistory
from exporters.prometheus.families import AgentInfo
from exporters.view.cycle_view import View, build_view
from tests.builders.four_cpu_node import bare_cycle, busy_cycle, outcome


@pytest.fixture
def page(tmp_path: Path) -> Path:
    directory = tmp_path / "page"
    directory.mkdir()
    (directory / "index.html").write_text("<!doctype html><title>größe</title>")
    (directory / "live.js").write_text("export const one = 1;\n")
    (directory / "notes.txt").write_text("not a kind of file that the page is made of")
    (tmp_path / "secret.js").write_text("secret")
    return directory


class Client:
    """One session against one server; bodies come back as the server sent them."""

    def __init__(self, server: AgentWebServer, port: int) -> None:
        self.server, self.port = server, port
        self.session = aiohttp.ClientSession(auto_decompress=False)

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        wire = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self.session.request(method, url, headers=wire, skip_auto_headers=["Accept-Encoding"]) as answer:
            return answer.status, dict(answer.headers), await answer.read()

    async def json(self, path: str) -> Any:
        status, headers, body = await self.get(path)
        assert (status, headers["Content-Type"]) == (200, "application/json")
        return json.loads(body)

    async def problem(self, path: str, status: int, method: str = "GET", **headers: str) -> tuple[str, str]:
        got, answered, body = await self.get(path, method, **headers)
        assert (got, answered["Content-Type"]) == (status, "application/json")
        problem = json.loads(body)
        return problem["error"], problem["remedy"]


@asynccontextmanager
async def serving(host: str = "127.0.0.1", **options: Any) -> AsyncIterator[Client]:
    """A server with these options and a client of it."""
    server = AgentWebServer(**{"journal": DecisionJournal(None), "version": "1"} | options)
    client = Client(server, await server.start(host, 0))
    yield client
    await client.session.close()
    await server.stop()


@pytest.fixture
def journal() -> DecisionJournal:
    return DecisionJournal(None)


@pytest.fixture
async def client(page: Path, journal: DecisionJournal) -> AsyncIterator[Client]:
    async with serving(journal=journal, version="1.2.3", page=page) as client:
        yield client


async def test_the_view_is_that_of_the_latest_cycle(client: Client) -> None:
    for seq in (2, 3):
        client.server.publish(busy_cycle(seq))
    _, _, body = await client.get("/api/v1/view")
    assert msgspec.json.decode(body, type=View) == build_view(busy_cycle(3))


async def test_history_holds_what_came_after_and_no_more_than_five_minutes(client: Client) -> None:
    assert await client.json("/api/v1/history") == []
    for seq in range(2, 312):
        client.server.publish(busy_cycle(seq))
    shown = await client.json("/api/v1/history")
    assert [view["seq"] for view in shown] == list(range(12, 312))
    assert [view["seq"] for view in await client.json("/api/v1/history?after=309")] == [310, 311]
    assert await client.json("/api/v1/history?after=311") == []
    status, headers, packed = await client.get("/api/v1/history", Accept_Encoding="gzip")
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    assert json.loads(gzip.decompress(packed)) == shown


async def test_decisions_come_from_the_journal(client: Client, journal: DecisionJournal) -> None:
    for seq in range(2, 7):
        journal.publish(busy_cycle(seq, outcomes=(outcome(value=str(seq)),)))
    _, _, body = await client.get("/api/v1/decisions?after=1&limit=3")
    entries = msgspec.json.decode(body, type=list[JournalEntry])
    assert entries == list(journal.entries(after=1, limit=3))
    assert [entry.outcome.decision.value for entry in entries] == ["4", "5", "6"]


@pytest.mark.parametrize(
    ("requests", "values"),
    [
        ("knob=cpu.idle", ["1", "1", "1"]),
        ("knob=cpu.max&status=refused", ["3", "5"]),
        ("pod=default/batch&limit=2", ["5", "1"]),
        ("rule=no_such", []),
        ("status=applied&after=3", ["1", "1"]),
    ],
)
async def test_decisions_can_be_filtered(
    client: Client, journal: DecisionJournal, requests: str, values: list[str]
) -> None:
    for seq in (3, 4, 5):
        status = OutcomeStatus.APPLIED if seq == 4 else OutcomeStatus.REFUSED
        idle = outcome(Knob.IDLE, "1", before=str(seq))
        journal.publish(busy_cycle(seq, outcomes=(outcome(Knob.QUOTA, str(seq), status), idle)))
    _, _, body = await client.get(f"/api/v1/decisions?{requests}")
    actual = msgspec.json.decode(body, type=list[JournalEntry])
    assert [entry.outcome.decision.value for entry in actual] == values


async def test_the_snapshot_is_every_fact(client: Client) -> None:
    client.server.publish(busy_cycle(2))
    snapshot = await client.json("/api/v1/snapshot")
    assert snapshot["cgroups"]["/web"]["cpu_usage_ns"] == 3_000_000_000
    assert snapshot["pods"][1]["qos"] == "reclaimed_cores"


async def test_a_name_that_is_not_utf8_stops_no_reader(client: Client) -> None:
    finished = busy_cycle(2)
    web = msgspec.structs.replace(finished.snapshot.cgroups["/web"], path="/caf\udce9")
    finished = msgspec.structs.replace(
        finished, snapshot=msgspec.structs.replace(finished.snapshot, cgroups={web.path: web})
    )
    client.server.publish(finished)
    assert list((await client.json("/api/v1/snapshot"))["cgroups"]) == ["/caf\\xe9"]
    assert b'cgroup="/caf\\\\xe9"' in (await client.get("/metrics"))[2]


async def test_metrics_in_both_formats_plain_and_gzipped(client: Client) -> None:
    client.server.publish(busy_cycle(2))
    status, headers, text = await client.get("/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "Content-Encoding" not in headers
    assert b"\ndioptase_reclaim_lent_cores 2.5\n" in text
    _, headers, packed = await client.get("/metrics", Accept_Encoding="deflate, gzip;q=0.5")
    assert headers["Content-Encoding"] == "gzip"
    assert len(packed) < len(text) / 5
    assert gzip.decompress(packed) == text
    assert (await client.get("/metrics", Accept_Encoding="gzip;q=0"))[2] == text
    _, headers, text = await client.get("/metrics", Accept="application/openmetrics-text;version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith(b"# EOF\n")


class Unread(asyncio.Transport):
    """A connection whose reader takes nothing until it is released, and then everything."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("path", ["/metrics", "/api/v1/snapshot", "/api/v1/view"])
async def test_of_what_a_slow_reader_asks_for_little_is_held(client: Client, path: str) -> None:
    client.server.publish(
        msgspec.structs.replace(busy_cycle(2, cgroups=1000), startup_warnings=("a node lacks much, " * 30_000,))
    )
    full = (await client.get(path))[2]
    assert len(full) > 8 * responses.CHUNK_BYTES
    assert client.server._listener is not None
    connections = client.server._listener._runner.server
    assert connections is not None
    connection, unread = connections(), Unread()
    connection.connection_made(unread)
    connection.pause_writing()
    connection.data_received(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    while not unread.written:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert len(unread.written) < 3 * responses.CHUNK_BYTES
    connection.resume_writing()
    while not unread.written.endswith(full[-20:]):
        await asyncio.sleep(0.01)
    head, _, body = bytes(unread.written).partition(b"\r\n\r\n")
    assert f"\r\nContent-Length: {len(body)}\r\n".encode() in head
    assert b"\r\nCache-Control: no-cache" in head
    if path != "/metrics":  # in which this process tells of itself
        assert body == full
    connection.connection_lost(None)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
@pytest.mark.parametrize(("stale_s", "status"), [(0.01, 503), (36.0, 200)])
async def test_health_follows_the_age_of_the_last_cycle(path: str, stale_s: float, status: int) -> None:
    async with serving(stale_s=stale_s) as client:
        assert (await client.problem(path, 503))[0] == "no cycle has finished yet"
        client.server.publish(bare_cycle())
        await asyncio.sleep(0.02)
        answered, _, body = await client.get(path)
    assert answered == status
    if status == 200:
        assert 0.02 <= json.loads(body)["age_s"] < 36
    else:
        assert json.loads(body)["error"].startswith("the latest cycle finished 0.0")
        assert "log" in json.loads(body)["remedy"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_health_names_failed_sources_and_what_the_node_lacks(client: Client, path: str) -> None:
    client.server.publish(busy_cycle(2))
    health = await client.json(path)
    assert health["failed"] == [
        {
            "source": "psi",
            "error": "/proc/pressure/cpu: operation not supported",
            "remedy": "boot the kernel with psi=1",
        }
    ]
    assert health["banner"] == list(busy_cycle(2).startup_warnings)


def failing(seq: int, *names: str) -> Cycle:
    """A cycle in which these sources failed, each with its reason."""
    finished = busy_cycle(seq)
    broken = (ComponentHealth(name=name, ok=False, error=f"no {name}", remedy="repair it") for name in names)
    snapshot = msgspec.structs.replace(finished.snapshot, sources=(*finished.snapshot.sources, *broken))
    return msgspec.structs.replace(finished, snapshot=snapshot)


@pytest.mark.parametrize("stage", ["pods", "topology", "node", "cgroups", "advisor", "actuator"])
async def test_an_agent_that_does_not_see_decide_or_act_lives_and_is_not_ready(client: Client, stage: str) -> None:
    client.server.publish(failing(2, stage))
    assert await client.problem("/readyz", 503) == (f"{stage}: no {stage}", "repair it")
    alive = await client.json("/healthz")
    assert {"source": stage, "error": f"no {stage}", "remedy": "repair it"} in alive["failed"]
    client.server.publish(busy_cycle(3))
    assert (await client.get("/readyz"))[0] == 200


async def test_only_required_sources_make_the_agent_unready(client: Client) -> None:
    client.server.publish(failing(2, "pods", "cnr", "dynamic-config", "waits", "advisor"))
    assert await client.problem("/readyz", 503) == ("pods: no pods; advisor: no advisor", "repair it")
    client.server.publish(failing(3, "cnr", "dynamic-config", "events", "waits", "kubelet"))
    assert (await client.get("/readyz"))[0] == 200


async def test_metrics_say_what_the_agent_knows_of_itself_when_a_cycle_is_published() -> None:
    existing = [AgentInfo(journal_writable=True), AgentInfo(journal_writable=False, otel_failures=2)]
    async with serving(about=lambda: existing.pop(0)) as client:
        client.server.publish(busy_cycle(2))
        text = (await client.get("/metrics"))[2]
        assert b"\ndioptase_journal_writable 1\n" in text
        assert b"dioptase_otel_failures" not in text, "nothing is sent, so nothing can fail"
        client.server.publish(busy_cycle(3))
        text = (await client.get("/metrics"))[2]
        assert b"\ndioptase_journal_writable 0\n" in text
        assert b"\ndioptase_otel_failures_total 2\n" in text


@pytest.mark.parametrize("path", ["/api/v1/view", "/api/v1/snapshot"])
async def test_before_the_first_cycle_requests_are_refused_with_a_remedy(client: Client, path: str) -> None:
    assert await client.problem(path, 503) == ("no cycle has finished yet", "retry after a second")


@pytest.mark.parametrize(
    ("query", "error", "remedy"),
    [
        ("history?after=x", "after: 'x' is not a whole number", "write it as in after=0"),
        ("history?after=-1", "after: '-1' is not a whole number", "write it as in after=0"),
        ("history?after=", "after: '' is not a whole number", "write it as in after=0"),
        ("history?after=%D9%A1", "after: '\u0661' is not a whole number", "write it as in after=0"),
        ("history?after=1_0", "after: '1_0' is not a whole number", "write it as in after=0"),
        ("history?after=1&after=2", "after: set twice", "set it once"),
        ("history?since=1", "since: unknown parameter", "use after"),
        ("decisions?limit=0", "limit: 0 is out of range", "use a number from 1 to 2000"),
        ("decisions?limit=2001", "limit: 2001 is out of range", "use a number from 1 to 2000"),
        (
            "decisions?limt=1",
            "limt: unknown parameter",
            "use after or limit or pod or cgroup or knob or rule or status",
        ),
        ("decisions?pod=a&pod=b", "pod: set twice", "set it once"),
        ("view?x=1", "x: unknown parameter", "leave it out: this path takes no parameters"),
    ],
)
async def test_a_bad_query_is_refused_by_name_with_the_remedy(
    client: Client, query: str, error: str, remedy: str
) -> None:
    assert await client.problem(f"/api/v1/{query}", 400) == (error, remedy)


async def test_the_page_and_its_files_have_types_and_a_strict_policy(client: Client) -> None:
    status, headers, body = await client.get("/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert body.decode() == "<!doctype html><title>größe</title>"
    assert headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Content-Type-Options"] == "nosniff"
    _, headers, body = await client.get("/static/live.js")
    assert headers["Content-Type"] == "text/javascript; charset=utf-8"
    assert headers["Content-Security-Policy"].startswith("default-src 'self';")
    status, _, _ = await client.get("/static/live.js", If_None_Match=headers["Etag"])
    assert status == 304


async def test_every_file_of_the_real_page_is_served() -> None:
    async with serving() as client:
        for file in web_server.PAGE_DIRECTORY.iterdir():
            status, headers, body = await client.get(f"/static/{file.name}")
            assert (status, body) == (200, file.read_bytes())
            assert headers["Content-Type"].partition(";")[0] == responses.CONTENT_TYPES[file.suffix]
        assert (await client.get("/"))[2] == (web_server.PAGE_DIRECTORY / "index.html").read_bytes()


@pytest.mark.parametrize(
    "path", ["/static/", "/static/nothing.js", "/static/notes.txt", "/static/..%2Fsecret.js", "/static/%2e%2e/secret.js",
             "/secret.js", "/api/v1", "/api/v1/nothing", "//"],
)  # fmt: skip
async def test_nothing_else_is_served(client: Client, path: str) -> None:
    error, remedy = await client.problem(path, 404)
    assert error.endswith("is not served")
    assert "/metrics" in remedy


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_nothing_can_be_changed(client: Client, method: str) -> None:
    assert await client.problem("/api/v1/view", 405, method) == (
        f"{method} is not served",
        "use GET: this server is read only",
    )


async def test_head_is_get_without_the_body(client: Client) -> None:
    client.server.publish(busy_cycle(2))
    for path in ("/metrics", "/", "/api/v1/view", "/api/v1/history"):
        status, _, body = await client.get(path, "HEAD")
        assert (status, body) == (200, b"")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9102", "127.0.0.1.evil.example", "localhost.evil", "[x]"]
)
async def test_a_foreign_name_for_loopback_is_refused(client: Client, host: str) -> None:
    error, remedy = await client.problem("/api/v1/snapshot", 403, Host=host)
    assert error == f"Host {host!r} is not a name of this machine's loopback"
    assert "--listen" in remedy


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:80", "[::1]:9102", "[::1]"])
async def test_loopback_by_its_own_names_is_served(client: Client, host: str) -> None:
    client.server.publish(busy_cycle(2))
    assert (await client.get("/api/v1/view", Host=host))[0] == 200


async def test_a_server_on_loopback_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with serving():
        pass
    assert caplog.messages == []


async def test_any_name_is_served_where_the_server_was_opened_to_the_network(caplog: pytest.LogCaptureFixture) -> None:
    async with serving("0.0.0.0") as client:
        (message,) = caplog.messages
        assert message.startswith("every client that reaches 0.0.0.0 can read all data of this agent: add a --web-conf")
        client.server.publish(busy_cycle(2))
        assert (await client.get("/api/v1/view", Host="node-1.example"))[0] == 200
        await client.server.stop()


async def test_a_port_in_use_is_unavailable_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(Unavailable) as refused:
            await AgentWebServer(journal=DecisionJournal(None), version="1").start("127.0.0.1", port)
    assert refused.value.reason.startswith(f"cannot listen on 127.0.0.1:{port}: ")
    assert "--listen" in refused.value.remedy


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no.such.name.invalid", 0), ("127.0.0.1", 65536), ("a..b", 0)]
)
async def test_an_address_that_cannot_be_had_is_unavailable(host: str, port: int) -> None:
    with pytest.raises(Unavailable, match=r"cannot listen on "):
        await AgentWebServer(journal=DecisionJournal(None), version="1").start(host, port)


async def test_what_is_no_http_leaves_no_traceback_in_the_log(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    assert caplog.records == []


async def test_publish_never_raises_and_health_tells(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    broken = msgspec.structs.replace(busy_cycle(2), outcomes=(None,))
    with caplog.at_level(logging.ERROR):
        client.server.publish(broken)
    assert "cycle 2 could not be published" in caplog.text
    assert (await client.problem("/readyz", 503))[0] == "no cycle has finished yet"
    assert (await client.get("/healthz"))[0] == 200, "rounds come, and do their work"
    client.server.publish(busy_cycle(3))
    assert (await client.json("/api/v1/view"))["seq"] == 3


async def test_bodies_are_computed_while_every_thread_of_the_default_executor_hangs(client: Client) -> None:
    """A name server or a disk that hangs occupies its threads for seconds; a scrape must not wait for it."""
    release = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    blocked = asyncio.create_task(asyncio.to_thread(release.wait, 10))
    try:
        async with asyncio.timeout(5):
            for path in ("/metrics", "/api/v1/decisions"):
                assert (await client.get(path))[0] == 200, path
    finally:
        release.set()
        await blocked


LACK = DoctorCheck(name="pressure", ok=False, detail="none", remedy="psi=1")


class Looking:
    """Checks that count their runs, and wait until they may end."""

    def __init__(self) -> None:
        self.times = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self) -> tuple[DoctorCheck, ...]:
        self.times += 1
        assert self.go_on.wait(10)
        return (LACK,)


async def test_concurrent_requests_share_one_computation() -> None:
    looking = Looking()
    looking.go_on.clear()
    cached = CachedFindings("1.2", looking)
    waiting = [asyncio.create_task(cached.findings_json()) for _ in range(20)]
    await asyncio.sleep(0)
    looking.go_on.set()
    texts = set(await asyncio.gather(*waiting))
    assert [msgspec.json.decode(text, type=DoctorReport) for text in texts] == [
        DoctorReport(version="1.2", checks=(LACK,))
    ]
    assert looking.times == 1


async def test_clients_that_disconnect_start_no_further_computation() -> None:
    looking = Looking()
    looking.go_on.clear()
    cached = CachedFindings("1.2", looking)
    for _ in range(5):
        request = asyncio.create_task(cached.findings_json())
        await asyncio.sleep(0.01)
        request.cancel()
    looking.go_on.set()
    assert LACK.name.encode() in await cached.findings_json()
    assert looking.times == 1


async def test_what_is_old_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "FINDINGS_TTL_S", 0)
    looking = Looking()
    cached = CachedFindings("1.2", looking)
    await cached.findings_json()
    await cached.findings_json()
    assert looking.times == 2


async def test_the_server_sends_findings_if_it_has_checks(tmp_path: Path) -> None:
    for checks, status in ((lambda: node_checks(tmp_path), 200), (None, 404)):
        async with serving(version="1.2", checks=checks) as client:
            answered, _, body = await client.get("/api/v1/doctor")
            assert answered == status
            assert (await client.get("/api/v1/doctor?x=1"))[0] == 400
        if checks is not None:
            actual = msgspec.json.decode(body, type=DoctorReport)
            assert actual.version == "1.2"
            assert {"privileges", "cgroups", "state directory"} <= {check.name for check in actual.checks}


def retained(history: ViewHistory, after: int = 0) -> list[bytes]:
    return list(history.after(after))


def test_the_oldest_cycles_make_room() -> None:
    history = ViewHistory(cycles=3)
    for seq in range(1, 6):
        history.add(seq, b"%d" % seq)
    assert retained(history) == [b"3", b"4", b"5"]
    assert retained(history, after=4) == [b"5"]


def test_size_bounds_what_is_kept_but_never_the_newest() -> None:
    noise = random.Random(1)
    history = ViewHistory(max_bytes=10_000)
    for seq in range(1, 8):
        history.add(seq, noise.randbytes(3_000))
    assert len(retained(history)) == 3
    history.add(8, noise.randbytes(50_000))
    assert [len(view) for view in retained(history)] == [50_000]
