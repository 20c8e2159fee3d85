"""HTTP basic authentication against bcrypt hashes with bounded CPU cost.
Results are cached, checks run one at a time and at most one per client address is pending; unknown users take as long
as existing ones. The only importer of bcrypt.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from api.interfaces import Unavailable

MAX_CACHED_RESULTS = 100
"""Limit for correct passwords, and separately for wrong ones."""
MAX_PASSWORD_BYTES = 72
"""Length after which bcrypt ignores a password."""
MAX_PENDING_CHECKS = 16
"""Limit of queued checks: 4 s at cost 12, less than a scraper's timeout."""
RETRY_AFTER_S = 5
"""Seconds after which a rejected client may retry."""


class TooManyChecks(Exception):
    """Too many password checks are pending, or one of this client address."""


class PasswordChecker:
    """Checks passwords of the configured users and caches the results."""

    def __init__(self, users: Mapping[str, str]) -> None:
        """Raise Unavailable if bcrypt, which is loaded only here, is not installed."""
        try:
            import bcrypt  # noqa: PLC0415
        except ImportError as error:
            raise Unavailable(
                f"basic_auth_users needs the bcrypt library: {error}", "reinstall dioptase, or remove the users"
            ) from error
        self._check = bcrypt.checkpw
        self._users = {name: hashed.encode() for name, hashed in users.items()}
        self._fallback_hash = next(iter(self._users.values()))
        self._salt = secrets.token_bytes(16)
        self._results: dict[bool, OrderedDict[bytes, None]] = {True: OrderedDict(), False: OrderedDict()}
        self._checks: dict[bytes, asyncio.Future[bool]] = {}
        self._addresses: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "passwords")

    def close(self) -> None:
        """Stop the thread; pending checks raise TooManyChecks. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def authenticates(self, authorization: str, address: str) -> bool:
        """Whether an Authorization header from this address has a user's password. Raises TooManyChecks."""
        credentials = _parse_basic_authorization(authorization)
        if credentials is None:
            return False
        name, password = credentials
        hashed = self._users.get(name)
        key = hashlib.blake2b(
            b"\0".join((name.encode(errors="surrogatepass"), hashed or b"", password)), key=self._salt, digest_size=32
        ).digest()
        for result, cached in self._results.items():
            if key in cached:
                cached.move_to_end(key)
                return result
        check = self._checks.get(key)
        if check is None:
            if len(self._checks) >= MAX_PENDING_CHECKS or address in self._addresses:
                raise TooManyChecks
            check = asyncio.get_running_loop().run_in_executor(self._thread, self._matches, hashed, password)
            self._checks[key] = check
            self._addresses.add(address)
            check.add_done_callback(partial(self._finish, key, address))
        try:
            return await asyncio.shield(check)  # other requests may wait for the same check
        except asyncio.CancelledError:
            if check.cancelled():
                raise TooManyChecks from None
            raise

    def _finish(self, key: bytes, address: str, check: asyncio.Future[bool]) -> None:
        del self._checks[key]
        self._addresses.discard(address)
        if check.cancelled() or check.exception() is not None:
            return
        cached = self._results[check.result()]
        cached[key] = None
        while len(cached) > MAX_CACHED_RESULTS:
            cached.popitem(last=False)

    def _matches(self, hashed: bytes | None, password: bytes) -> bool:
        try:
            return self._check(password[:MAX_PASSWORD_BYTES], hashed or self._fallback_hash) and hashed is not None
        except ValueError:  # bcrypt rejects a NUL byte, which no hashed password contains
            return False


def _parse_basic_authorization(authorization: str) -> tuple[str, bytes] | None:
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(encoded.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
    name, colon, password = decoded.partition(b":")
    return (name.decode(errors="replace"), password) if colon else None
