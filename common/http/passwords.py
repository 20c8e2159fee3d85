"""HTTP basic authentication against bcrypt hashes with bounded CPU cost.
Results are cached, one check runs at a time, one per client address; an unknown user costs the same time as a known
one. The only importer of bcrypt.
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
"""Right passwords, and as many wrong ones."""
MAX_PASSWORD_BYTES = 72
"""bcrypt looks at no more of a password."""
MAX_PENDING_CHECKS = 16
"""Checks that may be under way: 4 s at cost 12, within the time that a scraper waits."""
RETRY_AFTER_S = 5
"""When whoever was turned away may come again."""


class TooManyChecks(Exception):
    """Too many passwords wait to be checked, or one of this address."""


class PasswordChecker:
    """The users that may ask, and what was found out about the passwords they gave."""

    def __init__(self, users: Mapping[str, str]) -> None:
        """Raises Unavailable where bcrypt is not installed; it is loaded only for this."""
        try:
            import bcrypt  # noqa: PLC0415
        except ImportError as error:
            raise Unavailable(
                f"basic_auth_users needs the bcrypt library: {error}", "install dioptase anew, or leave users out"
            ) from error
        self._check = bcrypt.checkpw
        self._users = {name: hashed.encode() for name, hashed in users.items()}
        self._nobodys = next(iter(self._users.values()))
        self._salt = secrets.token_bytes(16)
        self._known: dict[bool, OrderedDict[bytes, None]] = {True: OrderedDict(), False: OrderedDict()}
        self._checks: dict[bytes, asyncio.Future[bool]] = {}
        self._addresses: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "passwords")

    def close(self) -> None:
        """Give the thread back; whoever waits for a check is told to come again. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def authenticates(self, authorization: str, address: str) -> bool:
        """Whether this Authorization header, which came from that address, has a user's password. Raises Busy."""
        given = _parse_basic_authorization(authorization)
        if given is None:
            return False
        name, password = given
        hashed = self._users.get(name)
        key = hashlib.blake2b(
            b"\0".join((name.encode(errors="surrogatepass"), hashed or b"", password)), key=self._salt, digest_size=32
        ).digest()
        for answer, remembered in self._known.items():
            if key in remembered:
                remembered.move_to_end(key)
                return answer
        check = self._checks.get(key)
        if check is None:
            if len(self._checks) >= MAX_PENDING_CHECKS or address in self._addresses:
                raise TooManyChecks
            check = asyncio.get_running_loop().run_in_executor(self._thread, self._matches, hashed, password)
            self._checks[key] = check
            self._addresses.add(address)
            check.add_done_callback(partial(self._finish, key, address))
        try:
            return await asyncio.shield(check)  # others may wait for it too
        except asyncio.CancelledError:
            if check.cancelled():
                raise TooManyChecks from None
            raise

    def _finish(self, key: bytes, address: str, check: asyncio.Future[bool]) -> None:
        del self._checks[key]
        self._addresses.discard(address)
        if check.cancelled() or check.exception() is not None:
            return
        remembered = self._known[check.result()]
        remembered[key] = None
        while len(remembered) > MAX_CACHED_RESULTS:
            remembered.popitem(last=False)

    def _matches(self, hashed: bytes | None, password: bytes) -> bool:
        try:
            return self._check(password[:MAX_PASSWORD_BYTES], hashed or self._nobodys) and hashed is not None
        except ValueError:  # a NUL in the password, which no hash was made of
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
