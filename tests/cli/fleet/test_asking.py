"""Many agents behind one API server: what one of them answers costs what it may cost, and no other its answer."""

from __future__ import annotations

from aiohttp import web

from cli.fleet.asking import OF_MANY_BYTES, Asker
from cli.fleet.members import Member
from tests.kube.test_client import asking

LETTERS = OF_MANY_BYTES - 2


async def test_of_many_each_has_its_room_and_one_alone_has_more() -> None:
    async def agent(request: web.Request) -> web.Response:
        letters = LETTERS + ("talkative" in request.path)
        return web.Response(text=f'"{"x" * letters}"', content_type="application/json")

    quiet, talkative = (Member(node=name, namespace="d", pod=name) for name in ("quiet", "talkative"))
    async with asking(agent) as client:
        asker = Asker(client, "reader")
        one, other = await asker.all([quiet, talkative], "/api/v1/view", str)
        assert (one.problem, len(one.answer or "")) == ("", LETTERS)
        assert other.answer is None
        assert "more than 16777216 bytes" in other.problem + other.remedy
        assert len((await asker.one(talkative, "/api/v1/snapshot", str)).answer or "") == LETTERS + 1
