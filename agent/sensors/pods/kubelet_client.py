"""Fetches /pods and /configz from the kubelet over HTTP, with a deadline and a size limit.
Every failure is raised as Unavailable with a remedy. Tokens and certificates are reread when they rotate.
"""

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
"""Characters of a refusal that are shown."""
_MAX_ERROR_BYTES = 64 << 10
_HEADERS = {
    "Accept": "application/json",
    # A small answer must not become a large one.
    "Accept-Encoding": "identity",
    "User-Agent": f"dioptase/{VERSION}",
}
_TRANSPORT_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, UnicodeError)
"""UnicodeError is of a host that is no name."""


class KubeletClient:
    """One kubelet. To be entered and left in an event loop: `async with Kubelet(config) as kubelet`."""

    def __init__(self, config: KubeletConfig, path: str = PODS_PATH) -> None:
        self._config, self._path = config, path
        self._access = ApiAccess(config.url, _credentials(config))
        self._session: aiohttp.ClientSession | None = None
        self.url = f"{config.url}{path}"

    async def __aenter__(self) -> Self:
        # Neither proxies nor passwords of the environment: the token goes to the kubelet that was named.
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
        """The answer as it was sent. Raises Unavailable."""
        assert self._session is not None, "enter the kubelet first"
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
            said = (await _read_body(answer, _MAX_ERROR_BYTES))[0].decode(errors="replace")
            raise self._refused(answer.status, " ".join(said.split())[:_MAX_SHOWN_CHARS])
        body, whole = await _read_body(answer, MAX_POD_LIST_BYTES)
        if not whole:
            raise Unavailable(
                f"{self.url} answered with more than {MAX_POD_LIST_BYTES >> 20} MiB",
                "see whether kubelet.url is the kubelet's",
            )
        return body

    def _refused(self, status: int, said: str) -> Unavailable:
        what = f"{self.url} answered {status}" + (f": {said}" if said else "")
        if status == 401:
            self._access.refused()
            remedy = (
                "name in kubelet.tokenFile a token of this cluster, and see that the kubelet takes them: "
                "authentication.webhook.enabled in its configuration"
            )
        elif status == 403:
            remedy = (
                "bind the agent's service account to a ClusterRole that may `get` the resource nodes/proxy, "
                f"or from Kubernetes 1.33 on nodes{self._path}"
            )
        elif status in (400, 426):
            remedy = "write https:// in kubelet.url: its port speaks TLS"
        else:
            remedy = "see whether kubelet.url is the kubelet's, and its log"
        return Unavailable(what, remedy)

    def _failed(self, error: Exception) -> Unavailable:
        if isinstance(error, (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError)):
            said = str(getattr(error, "certificate_error", None) or error.__cause__ or error)
            return Unavailable(
                f"{self.url}: its certificate is not believed, or ours is not taken: {said[:_MAX_SHOWN_CHARS]}",
                "name in kubelet.caFile who signed it (/var/lib/kubelet/pki/kubelet.crt where it did itself), in "
                "kubelet.serverName the name in it; or write kubelet.verify: false",
            )
        if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED:
            return Unavailable(
                f"{self.url}: nobody listens there",
                "see that the kubelet runs, and write its address in kubelet.url; port 10255 is off unless readOnlyPort is set",
            )
        if isinstance(error, TimeoutError):
            return Unavailable(
                f"{self.url} did not answer within {self._config.timeout_s:g} s",
                "see why the kubelet hangs; it is asked again",
            )
        return Unavailable(
            f"{self.url}: {(str(error) or type(error).__name__)[:_MAX_SHOWN_CHARS]}",
            "see that kubelet.url is the kubelet's, and that it runs",
        )


async def _read_body(answer: aiohttp.ClientResponse, most: int) -> tuple[bytes, bool]:
    """The body up to so many bytes, and whether that is all of it."""
    pieces: list[bytes] = []
    size = 0
    async for piece in answer.content.iter_any():
        size += len(piece)
        if size > most:
            answer.close()
            return b"".join(pieces), False
        pieces.append(piece)
    # Joining the pieces of a long list takes milliseconds that others may want.
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
