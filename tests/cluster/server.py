"""The API server for tests: plain requests by the standard library, independent of the product's client."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.cluster.daemons import PATIENCE

JSON, MERGE, APPLY = "application/json", "application/merge-patch+json", "application/apply-patch+yaml"


class Refused(Exception):
    """The API server refused a request."""

    def __init__(self, status: int, body: str) -> None:
        self.status, self.body = status, body
        try:
            self.status_body: dict[str, Any] = json.loads(body)
        except ValueError:
            self.status_body = {}
        super().__init__(f"{status}: {self.status_body.get('message', body[:500])}")


class Server:
    """One API server, with a client certificate; each request uses a new connection."""

    def __init__(self, url: str, authority: Path, certificate: Path, key: Path) -> None:
        self._address = urlsplit(url)
        self._context = ssl.create_default_context(cafile=str(authority))
        self._context.load_cert_chain(certificate, key)

    def text(
        self, method: str, path: str, body: Any = None, kind: str = JSON, seconds: float = 30, user: str = ""
    ) -> str:
        """Return the response, optionally as another `user`. Raises Refused, and OSError without a response."""
        connection = http.client.HTTPSConnection(
            str(self._address.hostname), self._address.port, context=self._context, timeout=seconds * PATIENCE
        )
        try:
            result = None if body is None else json.dumps(body)
            headers = {"Content-Type": kind, "Accept": "application/json, */*"}
            headers |= {"Impersonate-User": user} if user else {}
            connection.request(method, path, result, headers)
            answer = connection.getresponse()
            content = answer.read().decode()
            if answer.status >= 300:
                raise Refused(answer.status, content)
            return content
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: Any = None, kind: str = JSON, seconds: float = 30) -> Any:
        """Return the decoded response. Raises as `text`."""
        return json.loads(self.text(method, path, body, kind, seconds))

    def refusal(self, method: str, path: str, body: Any = None, kind: str = JSON) -> Refused | None:
        """Send a request; return the refusal, or None if it was accepted."""
        try:
            self.text(method, path, body, kind)
        except Refused as error:
            return error
        return None
