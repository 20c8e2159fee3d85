"""TLS context and bearer token for the API server, reloaded when the files behind them rotate.
A replacement that cannot be read leaves the previous credentials in force.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkstemp

import msgspec

from api.interfaces import Unavailable

FILE_CHECK_INTERVAL_S = 30.0
"""How often files are looked at. A projected token is replaced when a fifth of its life is left, many minutes at least."""
LOGIN_RETRY_S = 5.0
"""Credentials that were refused sooner after they were given are no good, and asking again would give the same."""
MAX_CREDENTIAL_BYTES = 1 << 20
FileStamps = tuple[tuple[int, int, int], ...]


class CredentialData(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are known, or a file of them that may be replaced. `field` names where that was said."""

    data: bytes = b""
    path: Path | None = None
    field: str = ""

    def read(self) -> bytes:
        """The bytes as they are now. Raises Unavailable that names field and file."""
        if self.path is None:
            return self.data
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_CREDENTIAL_BYTES + 1)
        except OSError as error:
            raise Unavailable(f"{self.named()}: cannot be read: {error.strerror}", "name a file that can") from error
        if not content.strip() or len(content) > MAX_CREDENTIAL_BYTES:
            what = f"has more than {MAX_CREDENTIAL_BYTES} bytes" if content.strip() else "is empty"
            raise Unavailable(f"{self.named()}: {what}", "name another file, or wait until it is written")
        return content

    def named(self) -> str:
        """Field and file, for people."""
        return ": ".join(part for part in (self.field, str(self.path or "")) if part)


class ApiCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is told of us, and what we want to see of it."""

    authority: CredentialData | None = None
    """None trusts what the system trusts."""
    certificate: CredentialData | None = None
    key: CredentialData | None = None
    """Of the certificate; there are both or none."""
    token: CredentialData | None = None
    verify: bool = True
    server_name: str = ""
    """That its certificate must have, where it is not the address's."""
    proxy: str | None = None
    """URL of the HTTP proxy in front of the API server."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers of every request: impersonation."""


class IssuedCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """What a program that logs in gave: a token, a certificate with its key, or both."""

    token: CredentialData | None = None
    certificate: CredentialData | None = None
    key: CredentialData | None = None
    expires_wall_s: float | None = None
    """CLOCK_REALTIME when it ends; None until the API server refuses it."""


class ApiAccess:
    """One API server and the credentials for it. Files are followed; a bad new one leaves the last good one in force.

    Where `login` is given, it is asked for credentials before the first request, and again when they end or are refused.
    """

    def __init__(
        self,
        server: str,
        credentials: ApiCredentials,
        namespace: str = "default",
        clock: Callable[[], float] = time.monotonic,
        *,
        login: Callable[[], IssuedCredentials] | None = None,
    ) -> None:
        self.server, self.namespace, self._parts, self._clock = server, namespace, credentials, clock
        self._login, self._granted = login, IssuedCredentials()
        self._granted_at: float | None = None
        self._context: ssl.SSLContext | None = None
        self._token = ""
        self._seen: dict[str, FileStamps] = {}
        self._look_at: dict[str, float] = {}

    @property
    def proxy(self) -> str | None:
        """URL of the HTTP proxy in front of the API server."""
        return self._parts.proxy

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers of every request."""
        return self._parts.headers

    @property
    def server_name(self) -> str | None:
        """The name that its certificate must have, where that is not the address's."""
        return self._parts.server_name or None

    def context(self) -> ssl.SSLContext | None:
        """TLS towards the server; None where the address is plain HTTP. The same object until a file behind it changes.

        Raises Unavailable when there is none that works.
        """
        if not self.server.startswith("https:"):
            return None
        self._log_in()
        parts = [part for part in (self._parts.authority, self._parts.certificate, self._parts.key) if part]
        if self._changed("tls", parts):
            try:
                self._context = _tls_context(self._parts)
            except Unavailable:
                if self._context is None:
                    self._forget("tls")
                    raise
        return self._context

    def token(self) -> str:
        """What to send as bearer token; empty where there is none. Raises Unavailable when it cannot be read or sent."""
        self._log_in()
        part = self._parts.token
        if part is None:
            return ""
        if self._changed("token", [part]):
            try:
                self._token = _read_token(part)
            except Unavailable:
                if not self._token:
                    self._forget("token")
                    raise
        return self._token

    def refused(self) -> None:
        """The server did not know us: look at the files before the next request, whenever that is."""
        self._look_at.clear()
        # Of many requests that were refused at once, the first has the program asked.
        if self._granted_at is not None and self._clock() >= self._granted_at + LOGIN_RETRY_S:
            self._granted_at = None

    def _log_in(self) -> None:
        if self._login is None:
            return
        ends = self._granted.expires_wall_s
        if self._granted_at is not None and (ends is None or time.time() < ends):
            return
        given = self._login()
        self._granted, self._granted_at = given, self._clock()
        self._parts = msgspec.structs.replace(
            self._parts, token=given.token, certificate=given.certificate, key=given.key
        )
        self._seen.clear()
        self._look_at.clear()

    def _changed(self, what: str, parts: list[CredentialData]) -> bool:
        # First the clock, so that a request costs no system calls.
        now = self._clock()
        if now < self._look_at.get(what, -1.0):
            return False
        self._look_at[what] = now + FILE_CHECK_INTERVAL_S
        stamp = tuple(_file_stamp(part.path) for part in parts)
        if self._seen.get(what) == stamp:
            return False
        self._seen[what] = stamp
        return True

    def _forget(self, what: str) -> None:
        self._seen.pop(what, None)
        self._look_at.pop(what, None)


def _tls_context(parts: ApiCredentials) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not parts.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif parts.authority is None:
        context.load_default_certs()
    else:
        try:
            context.load_verify_locations(cadata=parts.authority.read().decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError) as error:
            raise Unavailable(f"{parts.authority.named()}: has no certificates", "write PEM certificates") from error
    if parts.certificate is not None and parts.key is not None:
        certificate, key = parts.certificate.read(), parts.key.read()
        with _temporary_path(certificate) as one, _temporary_path(key) as other:
            try:
                # The callback keeps OpenSSL from asking for the password of an encrypted key on the terminal.
                context.load_cert_chain(one, other, password=lambda: "")
            except ssl.SSLError as error:
                named = f"{parts.certificate.named()} and {parts.key.named()}"
                reason = (error.reason or str(error)).replace("_", " ").lower()
                raise Unavailable(
                    f"{named}: no certificate and its key: {reason}", "write both as PEM, the key without password"
                ) from error
    return context


@contextmanager
def _temporary_path(content: bytes) -> Iterator[str]:
    """A path to these bytes, for as long as it takes: OpenSSL takes certificates by path alone, and a key belongs to nobody
    else. It is on no disk where the system has files in memory, and only Linux does."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("pem")
        try:
            os.write(fd, content)
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        with temporary_pem_file(content) as path:
            yield path


@contextmanager
def temporary_pem_file(content: bytes) -> Iterator[str]:
    """The same in a file that only its owner may read, and that is gone afterwards."""
    fd, path = mkstemp(suffix=".pem")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        yield path
    finally:
        Path(path).unlink()


def _read_token(part: CredentialData) -> str:
    try:
        token = part.read().decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token or any(not "!" <= letter <= "~" for letter in token):
        raise Unavailable(f"{part.named()}: no token: it has letters that cannot be sent", "write the token alone")
    return token


def _file_stamp(path: Path | None) -> tuple[int, int, int]:
    if path is None:
        return (0, 0, 0)
    try:
        status = path.stat()  # follows the links of a mounted secret
    except OSError:
        return (0, 0, 0)
    return status.st_mtime_ns, status.st_ino, status.st_size
