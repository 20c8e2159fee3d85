"""The endpoint of the latest evaluation."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from common.http.listener import HttpListener
from controller.descheduler.descheduling_report import DeschedulerHalt, DeschedulingReport, HotNodeReport
from controller.descheduler.plan_endpoint import PLAN_PATH, add_plan_endpoint

HOT = HotNodeReport(node="n1", reasons=("r",), hot_reports=2, state="s", skipped={"default/p": "why"})
REPORT = DeschedulingReport(at="2027-01-15T08:00:00Z", dry_run=True, halt=DeschedulerHalt.TARGETS, hot_nodes=(HOT,))


@pytest.mark.parametrize(
    ("report", "status", "expected"),
    [
        (None, 503, {"error": "this replica has no evaluation"}),
        (REPORT, 200, {"dryRun": True, "halt": "targets", "staleCount": 0}),
    ],
)
async def test_the_leader_explains_its_latest_evaluation(
    report: DeschedulingReport | None, status: int, expected: dict[str, object]
) -> None:
    async def refuse(_authorization: str, _path: str, _connection: str) -> tuple[int, str, str] | None:
        raise AssertionError("from loopback no token is needed")

    app = web.Application()
    add_plan_endpoint(app, lambda: report, refuse)
    listener = HttpListener(app)
    ((host, port),) = await listener.open("127.0.0.1", 0, "--listen")
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session, session.get(PLAN_PATH) as answer:
        body = await answer.json()
        assert answer.status == status
    await listener.close()
    assert body.items() >= expected.items()
    if report is not None:
        (hot,) = body["hotNodes"]
        assert (hot["hotReports"], hot["skipped"]) == (2, {"default/p": "why"})
