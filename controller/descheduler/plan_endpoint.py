"""HTTP endpoint of the descheduler: its latest evaluation. Read only."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from common.http.listener import connection_of
from common.http.request_guard import HttpProblem, is_loopback
from controller.descheduler.descheduling_report import DeschedulingReport
from controller.endpoints import RESPONSE_HEADERS, Authorizer, unauthorized

PLAN_PATH = "/dioptase/descheduler"
_JSON_HEADERS = {**RESPONSE_HEADERS, "Content-Type": "application/json"}


def add_plan_endpoint(
    app: web.Application, report: Callable[[], DeschedulingReport | None], authorize: Authorizer | None
) -> None:
    """Serve the report at PLAN_PATH; `report` returns None while this replica does not lead or has evaluated nothing yet."""

    async def answer(request: web.Request) -> web.Response:
        # From loopback, which needs a shell in this pod or the right to forward its ports, no token is needed.
        is_local = is_loopback(connection_of(request).rpartition(":")[0])
        if not is_local and (refusal := await unauthorized(request, authorize)) is not None:
            return refusal
        latest = report()
        if latest is None:
            problem = HttpProblem(
                "this replica has no evaluation",
                "ask the leader, which the controller's Lease names, or try again in a minute",
            )
            return web.Response(status=503, body=msgspec.json.encode(problem), headers=_JSON_HEADERS)
        return web.Response(body=msgspec.json.encode(latest), headers=_JSON_HEADERS)

    app.add_routes([web.get(PLAN_PATH, answer)])
