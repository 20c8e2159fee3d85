"""Fetches /pods and /configz from the kubelet over HTTP, with a deadline and a size limit. Every failure is raised as
Unavailable with a remedy. Tokens and certificates are reread when they rotate."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Self

import aiohttp

from agent.config.kubelet import KubeletConfig
from agent.sensors.pods.pod_join import MAX_POD_LIST_BYTES
from api import VERSION
from api.interfaces import Unavailable
from kube.credentials import ApiAccess, ApiCredentials, CredentialData
from kube.kubeconfig import SERVICE_ACCOUNT

PODS_PATH = "/pods"
CONFIGZ_PATH = "/configz"
_MAX_SHOWN_CHARS = 200
"""Characters of an error response in a message."""
_MAX_ERROR_BYTES = 64 << 10
_HEADERS = {
    "Accept": "application/json",
    # A small answer must not become a large one.
    "Accept-Encoding": "identity",
    "User-Agent": f"dioptase/{VERSION}",
}
_TRANSPORT_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, UnicodeError)
"""Among them UnicodeError, which aiohttp raises for an invalid host name."""


class KubeletClient:
    """Client of one path of one kubelet; an asynchronous context manager."""

    def __init__(self, config: KubeletConfig, path: str = PODS_PATH) -> None:
        self._config, self._path = config, path
        self._access = ApiAccess(config.url, _credentials(config))
        self._session: aiohttp.ClientSession | None = None
        self.url = f"{config.url}{path}"

    async def __aenter__(self) -> Self:
        # trust_env off: no proxy and no .netrc of the environment may receive the token.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._config.timeout_s),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self) -> bytes:
        """Return the body of the answer. Raises Unavailable."""
        assert self._session is not None, "enter the client first"
        context, headers = self._access.context(), {}
        if token := self._access.token():
            headers["Authorization"] = f"Bearer {token}"
        try:
            async with self._session.get(
                self.url,
                headers=headers,
                ssl=True if context is None else context,
                server_hostname=self._access.server_name if context is not None else None,
                allow_redirects=False,
            ) as answer:
                return await self._content(answer)
        except _TRANSPORT_ERRORS as error:
            raise self._failed(error) from error

    async def _content(self, answer: aiohttp.ClientResponse) -> bytes:
        if answer.status != 200:
            message = (await _read_body(answer, _MAX_ERROR_BYTES))[0].decode(errors="replace")
            raise self._refused(answer.status, " ".join(message.split())[:_MAX_SHOWN_CHARS])
        body, is_complete = await _read_body(answer, MAX_POD_LIST_BYTES)
        if not is_complete:
            raise Unavailable(
                f"{self.url} answered with more than {MAX_POD_LIST_BYTES >> 20} MiB",
                "check that kubelet.url is the kubelet's",
            )
        return body

    def _refused(self, status: int, message: str) -> Unavailable:
        reason = f"{self.url} answered {status}" + (f": {message}" if message else "")
        if status == 401:
            self._access.refused()
            remedy = (
                "set kubelet.tokenFile to a token of this cluster, and authentication.webhook.enabled: true in the "
                "kubelet's configuration"
            )
        elif status == 403:
            remedy = (
                f"bind the agent's service account to a ClusterRole that may `get` nodes{self._path}, or before Kubernetes "
                "1.33 nodes/proxy, which allows commands in any pod (the chart: agent.kubelet.right)"
            )
        elif status in (400, 426):
            remedy = "write https:// in kubelet.url: its port speaks TLS"
        else:
            remedy = "check that kubelet.url is the kubelet's, and see its log"
        return Unavailable(reason, remedy)

    def _failed(self, error: Exception) -> Unavailable:
        if isinstance(error, (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError)):
            reason = str(getattr(error, "certificate_error", None) or error.__cause__ or error)
            return Unavailable(
                f"{self.url}: TLS handshake failed, a certificate was rejected: {reason[:_MAX_SHOWN_CHARS]}",
                "set kubelet.caFile to the certificate's CA (/var/lib/kubelet/pki/kubelet.crt if it is self-signed) and "
                "kubelet.serverName to the name in it; or set kubelet.verify: false",
            )
        if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED:
            return Unavailable(
                f"{self.url}: connection refused",
                "start the kubelet, and set kubelet.url to its address; port 10255 needs readOnlyPort",
            )
        if isinstance(error, TimeoutError):
            return Unavailable(
                f"{self.url} did not answer within {self._config.timeout_s:g} s",
                "see the kubelet's log; the request is repeated",
            )
        return Unavailable(
            f"{self.url}: {(str(error) or type(error).__name__)[:_MAX_SHOWN_CHARS]}",
            "check kubelet.url, and that the kubelet runs",
        )


async def _read_body(answer: aiohttp.ClientResponse, max_bytes: int) -> tuple[bytes, bool]:
    """Return the body up to a limit, and whether it is complete."""
    pieces: list[bytes] = []
    size = 0
    async for piece in answer.content.iter_any():
        size += len(piece)
        if size > max_bytes:
            answer.close()
            return b"".join(pieces), False
        pieces.append(piece)
    # Joining a long list blocks the event loop for milliseconds.
    return (await asyncio.to_thread(b"".join, pieces)) if size > 1 << 20 else b"".join(pieces), True


def _credentials(config: KubeletConfig) -> ApiCredentials:
    if config.url.startswith("http:"):
        return ApiCredentials()
    return ApiCredentials(
        authority=_material(config.ca_file, "caFile", SERVICE_ACCOUNT / "ca.crt") if config.verify else None,
        certificate=_material(config.certificate_file, "certificateFile"),
        key=_material(config.key_file, "keyFile"),
        token=_material(config.token_file, "tokenFile", SERVICE_ACCOUNT / "token"),
        verify=config.verify,
        server_name=config.server_name,
    )


def _material(path: str | None, name: str, usual: Path | None = None) -> CredentialData | None:
    chosen = usual if path is None else Path(path) if path else None
    return CredentialData(path=chosen, field=f"kubelet.{name}") if chosen is not None else None
