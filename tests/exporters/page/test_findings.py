"""Findings of the doctor over HTTP: computed on request, and shared by all requests within a minute."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import aiohttp
import msgspec
import pytest

from agent.components import node_checks
from agent.journal.decisions import DecisionJournal
from api.diagnostics import DoctorCheck, DoctorReport
from exporters.page import web_server
from exporters.page.web_server import AgentWebServer, CachedFindings

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


async def test_what_is_old_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "FINDINGS_TTL_S", 0)
    looking = Looking()
    cached = CachedFindings("1.2", looking)
    await cached.findings_json()
    await cached.findings_json()
    assert looking.times == 2


async def test_the_server_tells_it_and_one_without_says_so(tmp_path: Path) -> None:
    for checks, status in ((lambda: node_checks(tmp_path), 200), (None, 404)):
        server = AgentWebServer(journal=DecisionJournal(None), version="1.2", checks=checks)
        port = await server.start("127.0.0.1", 0)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/api/v1/doctor") as answer:
                assert answer.status == status
                body = await answer.read()
            async with session.get(f"http://127.0.0.1:{port}/api/v1/doctor?x=1") as refused:
                assert refused.status == 400
        await server.stop()
        if checks is not None:
            actual = msgspec.json.decode(body, type=DoctorReport)
            assert actual.version == "1.2"
            assert {"privileges", "cgroups", "state directory"} <= {check.name for check in actual.checks}
