"""Provides a requests session for OTLP over HTTP: one deadline for a whole exchange, and bounded responses.
Redirections are errors. Only this module imports requests and urllib3.
"""

from __future__ import annotations

import io
import time
from http.client import HTTPResponse
from socket import socket
from typing import Any

from requests import PreparedRequest, Response, Session
from requests.adapters import HTTPAdapter
from requests.exceptions import RequestException
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, Timeout
from urllib3.connection import HTTPConnection, HTTPSConnection

MAX_BODY_BYTES = 64 << 10
MAX_EXCHANGE_BYTES = 256 << 10
"""Maximum size of an exchange with head, interim responses and chunk framing: bounds endless `100 Continue`."""
MAX_LOCATION_CHARS = 200
"""Maximum number of reported characters of a Location."""


def bounded_session(*, trust_env: bool) -> Session:
    """Return a session with a total deadline and bounded responses; `trust_env` is that of requests."""
    session = Session()
    session.trust_env = trust_env
    session.headers["Accept-Encoding"] = "identity"
    for scheme in ("http://", "https://"):
        session.mount(scheme, _Adapter())
    return session


class _BoundedReader(io.RawIOBase):
    """Reads from a socket until a deadline, up to MAX_EXCHANGE_BYTES."""

    def __init__(self, connected: socket) -> None:
        self._socket, self._raw = connected, connected.makefile("rb", buffering=0)
        timeout_s = connected.gettimeout()
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._left = MAX_EXCHANGE_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read into the buffer. Raises TimeoutError after the deadline, and OSError if the response is too long."""
        if self._left <= 0:
            raise OSError(f"the answer is longer than {MAX_EXCHANGE_BYTES} bytes")
        if self._deadline is not None:
            remaining_s = self._deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(remaining_s)
        count = self._raw.readinto(memoryview(buffer)[: self._left])
        self._left -= count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _BoundedResponse(HTTPResponse):
    """Response that is read within the rest of the timeout."""

    def __init__(self, sock: socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp.close()
        self.fp = io.BufferedReader(_BoundedReader(sock))


class _Connection(HTTPConnection):
    response_class = _BoundedResponse


class _TlsConnection(HTTPSConnection):
    response_class = _BoundedResponse


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


POOLS = {"http": _Pool, "https": _TlsPool}


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **more: Any) -> None:
        super().init_poolmanager(*args, **more)
        self.poolmanager.pool_classes_by_scheme = POOLS

    def proxy_manager_for(self, *args: Any, **more: Any) -> Any:
        manager = super().proxy_manager_for(*args, **more)
        manager.pool_classes_by_scheme = POOLS
        return manager

    def send(
        self,
        request: PreparedRequest,
        stream: bool = False,  # noqa: ARG002
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: dict[str, str] | None = None,
    ) -> Response:
        """Return the response with its body cut at a bound, not decompressed. Raises RequestException, also for redirections."""
        within: Any = Timeout(total=timeout)
        answer = super().send(request, stream=True, timeout=within, verify=verify, cert=cert, proxies=proxies)
        try:
            body = answer.raw.read(MAX_BODY_BYTES, decode_content=False)
        except Exception as error:
            raise RequestException(f"HTTP {answer.status_code}, and then: {error}", request=request) from error
        finally:
            answer.raw.close()  # closes the connection unless the response was read to its end and the connection was returned to the pool
        if 300 <= answer.status_code < 400:
            where = answer.headers.get("Location", "nowhere")[:MAX_LOCATION_CHARS]
            raise RequestException(
                f"HTTP {answer.status_code}: redirected to {where!r}, and redirections are not followed",
                request=request,
            )
        answer.raw = io.BytesIO(body)
        return answer
