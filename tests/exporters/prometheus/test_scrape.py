"""A real Prometheus scrapes a node where every name is hostile, and keeps the exemplars."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bcrypt
import msgspec
import pytest

from agent.journal.decisions import DecisionJournal
from api.decision import Cycle
from api.text import encodable
from common.http.web_config import WebConfig
from common.yaml_guard import check_yaml
from exporters.page.web_server import AgentWebServer
from exporters.prometheus.families import cycle_trace_ids
from tests.builders.full_node import RICH_ABOUT, full_cycle
from tests.dashboards.prometheus_server import Prometheus, prometheus, until
from tests.exporters.certificates import Authority

pytestmark = pytest.mark.prometheus
NAMES = (
    "/new\nline",
    '/quo"te',
    "/back\\slash",
    "/sp ace",
    "/größe ☃",
    "/caf\udce9",
    '/{le="1"} 5 # {a="b"} 1',
    "/\x01\x7f\r\u2028",
    "/#,=",
)
FEED_EVERY_S = 0.2


def hostile(seq: int) -> Cycle:
    """A rich cycle as of now; the web pod's cgroup once under each hostile name, each blaming the next."""
    finished = full_cycle(seq)
    snapshot = finished.snapshot
    web = snapshot.cgroups["/web"]
    assert web.blame is not None
    named = {
        name: msgspec.structs.replace(
            web,
            path=name,
            id=2000 + place,
            blame=msgspec.structs.replace(web.blame, by_cgroup={NAMES[place - 1]: 10**9}),
        )
        for place, name in enumerate(NAMES)
    }
    snapshot = msgspec.structs.replace(snapshot, cgroups={**snapshot.cgroups, **named}, wall_time_ns=time.time_ns())
    return msgspec.structs.replace(finished, snapshot=snapshot)


@contextmanager
def serving(server: AgentWebServer) -> Iterator[tuple[int, list[Cycle]]]:
    """A live Server: its port, and the cycles that it was given."""
    bound: list[int] = []
    given: list[Cycle] = []
    ready, stop = threading.Event(), threading.Event()

    async def feed() -> None:
        bound.append(await server.start("127.0.0.1", 0))
        started = time.monotonic()
        while not stop.is_set():
            given.append(hostile(10 + int(time.monotonic() - started)))
            server.publish(given[-1])
            ready.set()
            await asyncio.sleep(FEED_EVERY_S)
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(feed()))
    thread.start()
    assert ready.wait(20)
    yield bound[0], given
    stop.set()
    thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, list[Cycle]]]:
    """HOST:PORT, and the cycles."""
    with serving(AgentWebServer(journal=DecisionJournal(None), version="1.2.3", about=lambda: RICH_ABOUT)) as (
        port,
        given,
    ):
        yield f"127.0.0.1:{port}", given


@pytest.fixture(scope="module")
def scraped(
    prometheus_binary: str, server: tuple[str, list[Cycle]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    directory: Path = tmp_path_factory.mktemp("prometheus")
    with prometheus(prometheus_binary, server[0], directory, "--enable-feature=exemplar-storage") as running:
        until(lambda: running.query("count_over_time(dioptase_build_info[1m]) >= 3"))
        yield running
        assert (directory / "log").read_text() == "", "Prometheus has nothing to complain about"


def test_the_scrape_succeeds_and_every_name_is_there(scraped: Prometheus) -> None:
    assert scraped.value('up{job="dioptase"}') == 1
    actual = {labels["cgroup"] for labels, _ in scraped.query("dioptase_cgroup_threads")}
    assert actual == {"/web", "/batch", "/", *map(encodable, NAMES)}
    culprits = {
        labels["culprit"] for labels, _ in scraped.query('dioptase_cgroup_blame_seconds_total{cause="neighbour"}')
    }
    assert culprits == {"/web", "/batch", *map(encodable, NAMES)}


def test_the_format_was_openmetrics_and_its_exemplars_name_the_cycles(
    scraped: Prometheus, server: tuple[str, list[Cycle]]
) -> None:
    def exemplars(query: str) -> list[dict[str, object]]:
        now = time.time()
        requests = urllib.parse.urlencode({"query": query, "start": now - 60, "end": now + 1})
        with urllib.request.urlopen(f"{scraped.url}/api/v1/query_exemplars?{requests}", timeout=10) as answer:
            return [item for series in json.load(answer)["data"] for item in series["exemplars"]]

    ids = {f"{cycle_trace_ids(finished.snapshot)[0]:032x}" for finished in server[1]}
    waits = until(lambda: exemplars('dioptase_cgroup_runq_wait_seconds_bucket{pod="web"}'))
    assert {str(item["labels"]["trace_id"]) for item in waits} <= ids  # type: ignore[index]
    assert {float(str(item["value"])) for item in waits} == {0.016384}
    assert until(lambda: exemplars("dioptase_decisions_total"))


def test_a_real_prometheus_comes_in_by_tls_with_a_certificate_and_a_password(
    prometheus_binary: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    for name in ("server", "client"):
        authority.issue(name)
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(10)).decode()
    (tmp_path / "web.yml").write_text(f"""
tls_server_config:
  cert_file: server.crt
  key_file: server.key
  client_ca_file: ca.crt
  client_auth_type: RequireAndVerifyClientCert
  min_version: TLS13
basic_auth_users: {{prometheus: "{hashed}"}}
""")
    scrape = f"""
  scheme: https
  tls_config: {{ca_file: {tmp_path}/ca.crt, cert_file: {tmp_path}/client.crt, key_file: {tmp_path}/client.key}}
  basic_auth: {{username: prometheus, password: secret}}
"""
    config = WebConfig(tmp_path / "web.yml", check_yaml)
    with (
        serving(AgentWebServer(journal=DecisionJournal(None), version="1.2.3", web_config=config)) as (port, _),
        prometheus(prometheus_binary, f"localhost:{port}", tmp_path, scrape=scrape) as running,
    ):
        until(lambda: running.query('up{job="dioptase"} == 1'))
        assert running.query("dioptase_build_info")
