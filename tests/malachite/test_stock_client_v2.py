"""Version 2's documents, which this machine's own cgroups may not have, as the stock client decodes and stores them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.units import MIB
from exporters.malachite.server import MalachiteServer
from tests.exporters.malachite.machine import BUSY, POD, V2, V2_STAT, finished, snapshot
from tests.kernel.real_cgroups import TestCgroup
from tests.malachite import stock_client

pytestmark = [pytest.mark.live, pytest.mark.kernel]


@pytest.fixture
def serving(hierarchy: Hierarchy) -> Iterator[None]:
    """The machine of those tests at its tenth second. The client asks only for cgroups that are there."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = MalachiteServer(V2)
    for second in range(1, 11):
        server.publish(finished(snapshot(second, V2)))
    groups = [TestCgroup(hierarchy, path) for path in ("/kubepods", "/kubepods/besteffort", POD, BUSY)]
    try:
        asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", stock_client.PORT), loop).result(10)
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        for group in reversed(groups):
            group.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_what_the_client_stores_of_version_2(serving: None, program: Path) -> None:
    uid, container = "1", "c1"
    stored = stock_client.run(
        program, pods=[f"{uid}/{container}"], paths=[POD], rounds=1, reclaim="/kubepods/besteffort"
    )
    assert not [line for line in stored.log.splitlines() if line.startswith(("E", "F"))]
    expected = {
        "cpu.usage": 1.5, "cpu.usage.user": 1.25, "cpu.usage.sys": 0.25, "cpu.usage.ratio": 3.0, "cpu.quota": 50_000,
        "cpu.period": 100_000, "cpu.share": 79, "cpu.nr.throttled": 20, "cpu.nr.period": 100,
        "cpu.throttled.time": 400_000, "cpu.nr.runnable": 2, "cpu.nr.uninterruptible": 1, "cpu.nr.iowait": 1,
        "cpu.load.1min": 2.5, "cpu.load.5min": 2.0, "cpu.load.15min": 1.5, "cpu.load.runnable": 2.25,
        "mem.usage": 64 * MIB, "mem.usage.kern": 3 * MIB, "mem.rss": V2_STAT["anon"], "mem.cache": V2_STAT["file"],
        "mem.shmem": V2_STAT["shmem"], "mem.swap": MIB, "mem.swap.limit": 2.0**64, "mem.dirty": V2_STAT["file_dirty"],
        "mem.writeback": V2_STAT["file_writeback"], "mem.pgfault": 3000, "mem.pgmajfault": 30,
        "mem.kswapdstall": V2_STAT["pgsteal_kswapd"], "mem.pgsteal": V2_STAT["pgsteal"],
        "mem.pgscan": V2_STAT["pgscan"], "mem.workingsetrefault": 7, "mem.workingsetactivate": 2,
        "mem.psiavg60": 2.0, "mem.inactiveanon": V2_STAT["inactive_anon"], "mem.oom": 2,
        "mem.inactivefile": V2_STAT["inactive_file"], "net.tcp.send.bytes": 30_000, "net.tcp.recv.packets": 20,
    }  # fmt: skip
    assert {name: stored.container(uid, f"{name}.container") for name in expected} == expected
    numa = {
        (node, kind): stored.container_numa(uid, node, f"mem.{kind}.numa.container")
        for node in (0, 1)
        for kind in ("total", "file", "anon")
    }
    assert numa == {
        (0, "total"): 40 * MIB, (0, "file"): 20 * MIB, (0, "anon"): 20 * MIB,
        (1, "total"): 10 * MIB, (1, "file"): 0, (1, "anon"): 10 * MIB,
    }  # fmt: skip
    pod = {
        "cpu.nr.runnable": 3, "cpu.load.1min": 3.0, "cpu.quota": -1, "cpu.period": 100_000,
        "net.tcp.send.byte": 5 * 3000, "net.tcp.recv.pps": 5 * 2,
    }  # fmt: skip
    assert {name: stored.cgroup(POD, f"{name}.cgroup") for name in pod} == pod
    assert stored.numa(1, "mem.frag.high_order_score.numa") == 75.0
    assert stored.cpu(3, "cpu.schedwait.cpu") == 2000.0
    assert stored.device("vda", "io.disk.type") == 4.0
    assert stored.network("eth0", "net.speed") == 10_000.0
    assert stored.node("scaling.cur.freq.khz") == 2_500_000.0
