"""Every query of the dashboards and of the rules is answered with data by a real Prometheus, and some with known numbers.

`target` is what Prometheus scrapes: here a Server that is fed cycles in which online pods wait for batch work.
"""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from agent.journal.decisions import DecisionJournal
from api.decision import Cycle
from exporters.page.web_server import AgentWebServer
from tests.builders.four_cpu_node import BOOTED_AT_NS, SLOW_WAITS, S, busy_cycle
from tests.builders.full_node import RICH_ABOUT, full_policy_result, full_snapshot, rich_totals
from tests.dashboards.prometheus_server import Prometheus, every_query, prometheus, until

pytestmark = pytest.mark.prometheus
FEED_EVERY_S = 0.2


def suffering(seq: int) -> Cycle:
    """A cycle as of now: the counters of second `seq`, the clock of this machine."""
    finished = busy_cycle(seq, per_second=SLOW_WAITS)
    snapshot = msgspec.structs.replace(full_snapshot(finished.snapshot), wall_time_ns=time.time_ns())
    return full_policy_result(msgspec.structs.replace(finished, snapshot=snapshot, totals=rich_totals(seq)))


async def feed(server: AgentWebServer, bound: list[int], ready: threading.Event, stop: threading.Event) -> None:
    bound.append(await server.start("127.0.0.1", 0))
    started = time.monotonic()
    while not stop.is_set():
        server.publish(suffering(10 + int(time.monotonic() - started)))
        ready.set()
        await asyncio.sleep(FEED_EVERY_S)
    await server.stop()


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """HOST:PORT of a live Server."""
    server = AgentWebServer(journal=DecisionJournal(None), version="1.2.3", about=lambda: RICH_ABOUT)
    bound: list[int] = []
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(feed(server, bound, ready, stop)))
    thread.start()
    assert ready.wait(10)
    yield f"127.0.0.1:{bound[0]}"
    stop.set()
    thread.join()


@pytest.fixture(scope="module")
def scraped(prometheus_binary: str, target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped the target often enough for rates over what happened since."""
    directory: Path = tmp_path_factory.mktemp("prometheus")
    with prometheus(prometheus_binary, target, directory) as server:
        until(lambda: server.query("count_over_time(dioptase_build_info[1m]) >= 8"))
        yield server


def test_every_query_is_answered_with_data(scraped: Prometheus) -> None:
    left = dict(every_query())

    def all_answered() -> bool:
        for name, expr in list(left.items()):
            answer = scraped.query(expr)
            assert all(labels.get("instance", "127.0.0.1").startswith("127.0.0.1") for labels, _ in answer)
            if answer:
                del left[name]
        return not left

    with suppress(AssertionError):
        until(all_answered)
    assert left == {}


def test_a_quantile_is_the_one_that_went_in(scraped: Prometheus) -> None:
    # 80 of 100 waits are of slot 7 and 20 of slot 15 (16.384 to 32.768 ms): the 99th is 19/20 through that slot.
    value = scraped.value('dioptase:online_runq_wait_seconds:p99_rate5m{pod="web"}')
    assert value == pytest.approx(0.016384 + 0.95 * 0.016384, rel=1e-6)


def test_a_rate_is_the_one_that_went_in(scraped: Prometheus) -> None:
    # 2.25 cores, in steps of a second of which a window may catch one more or one less.
    rate = 'sum(rate(dioptase_cgroup_cpu_usage_seconds_total{qos="reclaimed_cores"}[8s]))'
    assert scraped.value(rate) == pytest.approx(2.25, rel=0.3)


def test_the_alert_is_pending_for_the_pod_that_suffers(scraped: Prometheus) -> None:
    ((labels, _),) = until(lambda: scraped.query('ALERTS{alertname="DioptaseOnlineWaitHigh"}'))
    assert (labels["alertstate"], labels["pod"]) == ("pending", "web")
    assert scraped.query('ALERTS{alertname="DioptaseAgentSilent"}') == []


def test_the_scrape_is_whole(scraped: Prometheus, target: str) -> None:
    with urllib.request.urlopen(f"http://{target}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert scraped.value('up{job="dioptase"}') == 1
    assert scraped.value("scrape_samples_post_metric_relabeling") == sum(not line.startswith("#") for line in lines)
    assert scraped.value("dioptase_snapshot_timestamp_seconds") * S > BOOTED_AT_NS


def test_latency_with_and_without_batch_work_are_those_that_went_in(scraped: Prometheus) -> None:
    """99 of 100 waits with batch work are at most 128 us; without it the last of a hundred is 9/10 through 32 to 64 us."""
    exprs = dict(every_query())
    name = "worth: Online p99 with{} batch work (A)"
    assert scraped.value(exprs[name.format("")]) == pytest.approx(128e-6, rel=1e-6)
    assert scraped.value(exprs[name.format("out")]) == pytest.approx((32 + 0.9 * 32) * 1e-6, rel=1e-6)
    assert scraped.value(exprs["worth: Used share of lent CPU (A)"]) == pytest.approx(2.125 / 2.5, rel=1e-6)
