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
"""Interval of checks for changed files. A projected token is replaced when a fifth of its life is left, at least minutes."""
LOGIN_RETRY_S = 5.0
"""Minimum time between two logins: credentials that are refused sooner are invalid, and a new login would return the same."""
MAX_CREDENTIAL_BYTES = 1 << 20
FileStamps = tuple[tuple[int, int, int], ...]


class CredentialData(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, or a file of them that may be replaced. `field` is where they are configured, for messages."""

    data: bytes = b""
    path: Path | None = None
    field: str = ""

    def read(self) -> bytes:
        """Return the current bytes. Raises Unavailable that names field and file."""
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
        """Return field and file, for messages."""
        return ": ".join(part for part in (self.field, str(self.path or "")) if part)


class ApiCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials for an API server, and how its own certificate is verified."""

    authority: CredentialData | None = None
    """CA certificates; None trusts those of the system."""
    certificate: CredentialData | None = None
    key: CredentialData | None = None
    """Key of the certificate; both are set or neither."""
    token: CredentialData | None = None
    verify: bool = True
    """False skips TLS verification: the credentials are sent to any server that answers."""
    server_name: str = ""
    """Name in the server's certificate; empty if it is that of the address."""
    proxy: str | None = None
    """URL of the HTTP proxy in front of the API server."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers of every request: impersonation."""


class IssuedCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials of a login: a token, a certificate with its key, or both."""

    token: CredentialData | None = None
    certificate: CredentialData | None = None
    key: CredentialData | None = None
    expires_wall_s: float | None = None
    """CLOCK_REALTIME when they expire; None if they are valid until the API server refuses them."""


class ApiAccess:
    """One API server and its credentials. Changed files are read again; an invalid one leaves the last valid one in force.

    `login` is called before the first request, and again when its credentials expire or are refused.
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
        self._stamps: dict[str, FileStamps] = {}
        self._check_due_s: dict[str, float] = {}

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
        """Name in the server's certificate; None if it is that of the address."""
        return self._parts.server_name or None

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context, the same object until a file of it changes; None for plain HTTP. Raises Unavailable."""
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
        """Return the bearer token; empty without one. Raises Unavailable if it cannot be read or sent."""
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
        """Check the files, or log in, before the next request, because the server answered 401."""
        self._check_due_s.clear()
        # Many requests may be refused at once: only the first leads to a login.
        if self._granted_at is not None and self._clock() >= self._granted_at + LOGIN_RETRY_S:
            self._granted_at = None

    def _log_in(self) -> None:
        if self._login is None:
            return
        expires_s = self._granted.expires_wall_s
        if self._granted_at is not None and (expires_s is None or time.time() < expires_s):
            return
        self._granted = issued = self._login()
        self._granted_at = self._clock()
        self._parts = msgspec.structs.replace(
            self._parts, token=issued.token, certificate=issued.certificate, key=issued.key
        )
        self._stamps.clear()
        self._check_due_s.clear()

    def _changed(self, what: str, parts: list[CredentialData]) -> bool:
        # First the clock, so that a request costs no system calls.
        now = self._clock()
        if now < self._check_due_s.get(what, -1.0):
            return False
        self._check_due_s[what] = now + FILE_CHECK_INTERVAL_S
        stamp = tuple(_file_stamp(part.path) for part in parts)
        if self._stamps.get(what) == stamp:
            return False
        self._stamps[what] = stamp
        return True

    def _forget(self, what: str) -> None:
        self._stamps.pop(what, None)
        self._check_due_s.pop(what, None)


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
        with _temporary_path(certificate) as certificate_path, _temporary_path(key) as key_path:
            try:
                # The callback keeps OpenSSL from prompting for the password of an encrypted key on the terminal.
                context.load_cert_chain(certificate_path, key_path, password=lambda: "")
            except ssl.SSLError as error:
                named = f"{parts.certificate.named()} and {parts.key.named()}"
                reason = (error.reason or str(error)).replace("_", " ").lower()
                raise Unavailable(
                    f"{named}: no certificate and its key: {reason}", "write both as PEM, the key without password"
                ) from error
    return context


@contextmanager
def _temporary_path(content: bytes) -> Iterator[str]:
    """Yield a path of these bytes, because OpenSSL reads certificates and keys by path only. On Linux it is on no disk."""
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
    """Yield the path of a file with these bytes that only its owner may read, and remove it afterwards."""
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
