"""TLS and basic authentication by the web configuration file of Prometheus' exporter-toolkit.
Unsupported fields are rejected by name. Protection cannot be lost by accident: an empty section is rejected, and a
section in effect must not be missing after a reload; `{}` disables it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from api.interfaces import Unavailable
from api.text import literal_choices, quote
from common.files import open_regular_file

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
"""Interval at which the file and its certificates are checked for changes."""
MAX_FILE_BYTES = 1 << 20
MAX_BCRYPT_COST = 16
"""Limit for bcrypt's cost, the binary logarithm of its rounds; a check at cost 16 takes seconds."""
BCRYPT_HASH = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
TLS_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
CLIENT_VERIFY_MODES = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
WEB_CONFIG_REMEDY = "correct the web configuration file; docs/operations.md lists what it may hold"


class TlsServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Certificate, key and verification of client certificates."""

    cert_file: str
    key_file: str
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    client_ca_file: str = ""
    min_version: Literal["TLS12", "TLS13"] = "TLS12"


class WebConfigDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the web configuration file."""

    tls_server_config: TlsServerConfig | None = None
    basic_auth_users: Mapping[str, str] = {}


class WebSecurity(msgspec.Struct, frozen=True):
    """TLS context and users in effect."""

    tls: ssl.SSLContext | None = None
    users: Mapping[str, str] = {}
    """Hashes (bcrypt) by user name; empty disables authentication."""


class WebConfig:
    """Web configuration file and the files it names."""

    def __init__(self, path: Path, check: Callable[[str], None]) -> None:
        """`check` raises ValueError unless the text is one plain YAML document without repeated keys."""
        self._path, self._check = path, check
        self._files: tuple[Path, ...] = (path,)
        self._loaded = self._stamps()
        self._sections_in_effect: tuple[str, ...] = ()

    async def follow(self, apply: Callable[[WebSecurity], Awaitable[None]]) -> None:
        """Load and apply the files whenever they change, until cancelled.

        The previous configuration stays in effect while a file is invalid, for example half-written, or `apply` raises.
        """
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            stamps = self._stamps()
            if stamps == self._loaded:
                continue
            self._loaded = stamps
            try:
                await apply(await asyncio.to_thread(self.load))
            except Unavailable as error:
                log.error("the web configuration was not changed: %s: %s", error.reason, error.remedy)
            except Exception:
                log.exception("the web configuration was not changed")
            else:
                log.info("the web configuration was reloaded")

    def load(self) -> WebSecurity:
        """Read the files. Raises Unavailable that names the file and the problem."""
        try:
            document = self._document()
            tls = document.tls_server_config
            self._files = (self._path, *(() if tls is None else tuple(self._named(tls))))
            self._loaded = self._stamps()
            users = dict(self._users(document.basic_auth_users))
            web = WebSecurity(None if tls is None else self._context(tls), users)
        except OSError as error:
            name = getattr(error, "filename", None) or self._path
            raise Unavailable(f"{name}: cannot be used: {error.strerror or error}", WEB_CONFIG_REMEDY) from error
        except ValueError as error:
            raise Unavailable(f"{self._path}: {error}", WEB_CONFIG_REMEDY) from error
        sections = {"tls_server_config": web.tls is not None, "basic_auth_users": bool(web.users)}
        self._sections_in_effect = tuple(section for section, enabled in sections.items() if enabled)
        return web

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        """Modification times, inodes and sizes of the files; zeros for a missing file."""
        return tuple(_file_stamp(path) for path in self._files)

    def _document(self) -> WebConfigDocument:
        text = _read_bounded(self._path).decode()
        self._check(text)
        sections = msgspec.yaml.decode(text)
        if sections is None:
            raise ValueError("it is empty; to use neither TLS nor passwords, write {}")
        if isinstance(sections, dict):
            sections = {name: section for name, section in self._checked_sections(sections) if section != {}}
        try:
            return msgspec.convert(sections, WebConfigDocument)
        except msgspec.ValidationError as error:
            reason, _, where = str(error).partition(" - at `$.")
            field = where.rstrip("`").replace("[...]", "") or "top level"
            listed = literal_choices(WebConfigDocument, field)
            raise ValueError(f"{field}: {reason}" + (f", choose from {', '.join(listed)}" if listed else "")) from None

    def _checked_sections(self, sections: dict[str, object]) -> Iterator[tuple[str, object]]:
        """Yield the sections; raise ValueError if one was lost, for example because the file is being written."""
        for name in self._sections_in_effect:
            if sections and name not in sections:
                raise ValueError(f"{name} is in effect, but missing now; to disable it, write `{name}: {{}}`")
        for name, section in sections.items():
            if section is None:
                raise ValueError(f"{name}: it is empty; to disable it, write `{name}: {{}}`")
            yield name, section

    def _named(self, tls: TlsServerConfig) -> Iterator[Path]:
        for name in (tls.cert_file, tls.key_file, tls.client_ca_file):
            if name:
                yield self._path.parent / name

    def _context(self, tls: TlsServerConfig) -> ssl.SSLContext:
        verify = CLIENT_VERIFY_MODES[tls.client_auth_type]
        if verify is not ssl.CERT_NONE and not tls.client_ca_file:
            raise ValueError(f"client_auth_type is {tls.client_auth_type}, but client_ca_file is missing")
        if verify is ssl.CERT_NONE and tls.client_ca_file:
            raise ValueError("client_ca_file is set, but client_auth_type admits every client; set that too")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = TLS_VERSIONS[tls.min_version]
        certificate, key, *authorities = self._named(tls)
        for path in (certificate, key, *authorities):
            _read_bounded(path)  # ssl does not report which file it could not read, and would block on a FIFO
        try:
            # Without the callback, OpenSSL asks for the password of an encrypted key on the terminal.
            context.load_cert_chain(certificate, key, password=lambda: "")
        except ssl.SSLError as error:
            raise ValueError(f"{certificate} and {key} are no certificate and its key: {_ssl_reason(error)}") from None
        for path in authorities:
            try:
                context.load_verify_locations(path)
            except ssl.SSLError as error:
                raise ValueError(f"{path} has no certificates: {_ssl_reason(error)}") from None
        context.verify_mode = verify
        return context

    def _users(self, users: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        for name, hashed in users.items():
            if not name or ":" in name:
                raise ValueError(
                    f"basic_auth_users: {quote(name)} is no user name: it must not be empty or contain a colon"
                )
            match = BCRYPT_HASH.fullmatch(hashed)
            if match is None:
                raise ValueError(f"basic_auth_users: {name}: not a bcrypt hash; make one with htpasswd -nBC 12 {name}")
            if not 4 <= int(match[1]) <= MAX_BCRYPT_COST:
                raise ValueError(
                    f"basic_auth_users: {name}: a cost of {match[1]}; use 4 to {MAX_BCRYPT_COST}, such as 12"
                )
            yield name, hashed


def _read_bounded(path: Path) -> bytes:
    with open_regular_file(path) as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return text


def _file_stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116 - once a second, for every file
    except OSError:
        return (0, 0, 0)
    return status.st_mtime_ns, status.st_ino, status.st_size


def _ssl_reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
