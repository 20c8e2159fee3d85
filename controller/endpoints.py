"""HTTP endpoints of the controller: `/healthz`, `/readyz` and `/metrics`. Read only."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from controller.metrics import ControllerExposition

Authorizer = Callable[[str, str, str], Awaitable[tuple[int, str, str] | None]]
"""By Authorization header, path and address: HTTP's status, error and remedy of a request that is refused."""
RESPONSE_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}


def build_application(
    exposition: ControllerExposition, waiting: Callable[[], str], admit: Authorizer | None = None
) -> web.Application:
    """`waiting` says what is not there yet, and is empty when all is; `admit` judges whoever asks for metrics.

    `/healthz` is well whenever it is answered: it is answered by the loop that all work runs in, and a bug ends the process.
    """

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n", headers=RESPONSE_HEADERS)

    async def readyz(_request: web.Request) -> web.Response:
        said = waiting()
        return web.Response(status=503 if said else 200, text=f"{said or 'ok'}\n", headers=RESPONSE_HEADERS)

    async def metrics(request: web.Request) -> web.Response:
        if admit is not None:
            said = request.headers.get("Authorization", "")
            if refusal := await admit(said, request.path, request.remote or ""):
                status, error, remedy = refusal
                known = {} if status != 401 else {"WWW-Authenticate": 'Bearer realm="dioptase"'}
                return web.Response(status=status, text=f"{error}: {remedy}\n", headers={**RESPONSE_HEADERS, **known})
        body, content_type = exposition.render(request.headers.get("Accept", ""), time.monotonic())
        shown = web.Response(body=body, headers={**RESPONSE_HEADERS, "Content-Type": content_type})
        shown.enable_compression()
        return shown

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    return app
