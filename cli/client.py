"""HTTP client of one agent for `top`, `explain` and `config`: short timeouts, typed answers, no proxy.
Every failure is `Unavailable` with a remedy. `AgentHistory` keeps the last five minutes up to date by polling.
"""

from __future__ import annotations

import base64
import http.client
import ssl
from http import HTTPStatus
from typing import NamedTuple, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import unquote_to_bytes, urlsplit, urlunsplit
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

import msgspec

from api.decision import JournalEntry
from api.diagnostics import EffectiveConfiguration
from api.eviction import EvictionEntry
from api.interfaces import Unavailable
from api.snapshot import Snapshot
from cli.options import DEFAULT_URL
from exporters.view.cycle_view import View

HISTORY_SPAN_MS = 300_000
MAX_ENTRIES = 200
_MAX_BODY = 256 << 20
KUBECTL_HINT = "use kubectl dioptase for an agent that the chart installed"
T = TypeVar("T")


class _ErrorBody(msgspec.Struct):
    """Body of an agent's error response."""

    error: str
    remedy: str


class RequestedServer(NamedTuple):
    """The kind of server that is expected at a URL, for errors."""

    name: str
    remedy: str
    """What to do if it does not answer."""


AGENT = RequestedServer(
    "agent",
    f"start it with dioptase agent or dioptase demo, or name another one with --url ({DEFAULT_URL} is the default)",
)


class AgentClient:
    """Requests to one agent, or to another `server`. Every failure is an Unavailable with a remedy."""

    def __init__(
        self, url: str, timeout_s: float = 2.0, *, verify: bool = True, server: RequestedServer = AGENT
    ) -> None:
        """`verify: False` skips TLS verification: any server that answers at `url` is believed."""
        self._server = server
        self.url, authorization = _split_credentials(url.rstrip("/"))
        self._timeout_s = timeout_s
        context = None if verify else ssl._create_unverified_context()  # noqa: S323 - the caller has decided
        # The agent is on this node, which no proxy reaches.
        self._opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
        self._opener.addheaders = [("Authorization", authorization)] if authorization else []

    def view(self) -> View:
        return self._get("/api/v1/view", View)

    def history(self, after: int = 0) -> list[View]:
        return self._get(f"/api/v1/history?after={after}", list[View])

    def decisions(self, after: int = 0, limit: int = MAX_ENTRIES) -> list[JournalEntry]:
        return self._get(f"/api/v1/decisions?after={after}&limit={limit}", list[JournalEntry])

    def evictions(self, limit: int = MAX_ENTRIES) -> list[EvictionEntry]:
        return self._get(f"/api/v1/evictions?limit={limit}", list[EvictionEntry])

    def configuration(self) -> EffectiveConfiguration:
        return self._get("/api/v1/config", EffectiveConfiguration)

    def snapshot(self) -> Snapshot:
        return self._get("/api/v1/snapshot", Snapshot)

    def read(self, path: str) -> bytes:
        """Return the body of the response at that path. Raises Unavailable for every status but 200, and without a response."""
        try:
            with self._opener.open(self.url + path, timeout=self._timeout_s) as response:
                body: bytes = response.read(_MAX_BODY)
                return body
        except HTTPError as error:
            with error:
                raise _error_answer(self.url, error) from error
        except URLError as error:
            raise _no_answer(self.url, error.reason, self._server) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _no_answer(self.url, error, self._server) from error

    def _get(self, path: str, kind: type[T]) -> T:
        body = self.read(path)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            remedy = f"look at {self.url}{path}: an agent of this version must listen there"
            raise Unavailable(f"{self.url}{path} is not a response of an agent: {error}", remedy) from error


def _split_credentials(url: str) -> tuple[str, str]:
    """Return the URL without credentials, and the Authorization header for its USER:PASSWORD ("" if it has none)."""
    parts = urlsplit(url)
    user, at, address = parts.netloc.rpartition("@")
    if not at:
        return url, ""
    encoded = base64.b64encode(unquote_to_bytes(user)).decode()
    return urlunsplit(parts._replace(netloc=address)), f"Basic {encoded}"


def _no_answer(url: str, error: object, server: RequestedServer) -> Unavailable:
    """Return why no response came, with the remedy that fits the kind of failure."""
    remedy = server.remedy
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = (
            "name the authority that signed its certificate: SSL_CERT_FILE=authority.crt, and the host as in the certificate; "
            f"{KUBECTL_HINT}"
        )
    elif isinstance(error, ssl.SSLError):
        remedy = f"if it has no --web-config with a certificate, use {url.replace('https:', 'http:', 1)}; "
        remedy += "top and explain cannot present a client certificate"
    elif isinstance(error, (ConnectionResetError, http.client.HTTPException)) and url.startswith("http:"):
        remedy = f"if it has a --web-config with a certificate, use {url.replace('http:', 'https:', 1)}; {KUBECTL_HINT}"
    return Unavailable(f"the {server.name} at {url} does not answer: {_error_text(error)}", remedy)


def _error_answer(url: str, error: HTTPError) -> Unavailable:
    if error.code == HTTPStatus.UNAUTHORIZED and error.headers.get("WWW-Authenticate", "").startswith("Bearer"):
        return Unavailable(f"{url} requires the token of a service account", KUBECTL_HINT)
    if error.code == HTTPStatus.UNAUTHORIZED:
        scheme, _, address = url.partition("://")
        return Unavailable(f"{url} requires a user and a password", f"--url {scheme}://USER:PASSWORD@{address}")
    try:
        problem = msgspec.json.decode(error.read(1 << 16), type=_ErrorBody)
    except (msgspec.DecodeError, OSError, UnicodeDecodeError):
        return Unavailable(f"{url} answers {error.code} {error.reason}", "name the agent's address with --url")
    return Unavailable(f"the agent at {url} has no data: {problem.error}", problem.remedy)


def _error_text(error: object) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


class AgentHistory:
    """The latest five minutes of one agent, updated by `poll`; a restarted agent begins a new history."""

    def __init__(self, client: AgentClient) -> None:
        self.client = client
        self.view: View | None = None
        self.history: list[View] = []
        self.entries: list[JournalEntry] = []
        """Oldest first."""
        self.failure: Unavailable | None = None
        self.failures = 0
        """Number of failed polls since the last successful one."""

    def poll(self) -> list[JournalEntry]:
        """Fetch new cycles and decisions; return the new decisions, oldest first. Sets `failure` instead of raising."""
        try:
            new = self._poll()
        except Unavailable as error:
            self.failure = error
            self.failures += 1
            return []
        self.failure, self.failures = None, 0
        return new

    def _poll(self) -> list[JournalEntry]:
        view = self.client.view()
        last = self.history[-1] if self.history else None
        if last and _is_restarted(last, view):
            self.history, self.entries, last = [], [], None
        if last is None or view.seq > last.seq + 1:
            self.history += self.client.history(last.seq if last else 0)
        if not self.history or self.history[-1].seq < view.seq:
            self.history.append(view)
        self.history = [cycle for cycle in self.history if view.taken_at_ms - cycle.taken_at_ms <= HISTORY_SPAN_MS]
        self.view = view
        new = self.client.decisions(after=self.entries[-1].seq if self.entries else 0)
        self.entries = (self.entries + new)[-MAX_ENTRIES:]
        return new


def _is_restarted(last: View, view: View) -> bool:
    """Whether another agent process made `view`: within one, sequence numbers and CLOCK_MONOTONIC never decrease."""
    if view.seq == last.seq:
        return view.taken_at_ms != last.taken_at_ms
    return view.seq < last.seq or view.taken_at_ms < last.taken_at_ms
