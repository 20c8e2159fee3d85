"""HTTP endpoints of the controller: `/healthz`, `/readyz` and `/metrics`. Read only."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from common.http.listener import connection_of
from controller.metrics import ControllerExposition

Authorizer = Callable[[str, str, str], Awaitable[tuple[int, str, str] | None]]
"""Function from Authorization header, path and connection to HTTP status, error and remedy of a rejection, else None."""
RESPONSE_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}


def build_application(
    exposition: ControllerExposition,
    unsynced: Callable[[], str],
    authorize: Authorizer | None = None,
    max_body_bytes: int = 0,
) -> web.Application:
    """`unsynced` returns the missing resources, empty if ready; `authorize` checks requests for metrics. `max_body_bytes`
    limits the requests of routes that are added to the application.

    `/healthz` succeeds whenever it is answered: all work runs on the same event loop, and a bug ends the process.
    """

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n", headers=RESPONSE_HEADERS)

    async def readyz(_request: web.Request) -> web.Response:
        missing = unsynced()
        return web.Response(status=503 if missing else 200, text=f"{missing or 'ok'}\n", headers=RESPONSE_HEADERS)

    async def metrics(request: web.Request) -> web.Response:
        if (refusal := await unauthorized(request, authorize)) is not None:
            return refusal
        body, content_type = exposition.render(request.headers.get("Accept", ""), time.monotonic())
        response = web.Response(body=body, headers={**RESPONSE_HEADERS, "Content-Type": content_type})
        response.enable_compression()
        return response

    app = web.Application(client_max_size=max_body_bytes)
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    return app


async def unauthorized(request: web.Request, authorize: Authorizer | None) -> web.Response | None:
    """Return the response to a request whose token may not read its path; None if it may, or if tokens are not reviewed."""
    if authorize is None:
        return None
    authorization = request.headers.get("Authorization", "")
    refusal = await authorize(authorization, request.path, connection_of(request))
    if refusal is None:
        return None
    status, error, remedy = refusal
    challenge = {"WWW-Authenticate": 'Bearer realm="dioptase"'} if status == 401 else {}
    return web.Response(status=status, text=f"{error}: {remedy}\n", headers={**RESPONSE_HEADERS, **challenge})
