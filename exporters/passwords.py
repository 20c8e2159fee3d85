"""HTTP basic authentication against bcrypt hashes, without letting whoever guesses passwords take the node's CPU.

A check takes a quarter of a second at cost 12, by design. So answers are remembered, as exporter-toolkit does: a scraper
with the right password pays once. Checks run in a thread, one at a time. A name that nobody has is checked too, against
somebody else's hash, so that the time an answer takes does not tell which names exist.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping

from api.ports import Unavailable

MOST_REMEMBERED = 100
LONGEST_BYTES = 72
"""bcrypt looks at no more of a password."""
MOST_WAITING = 32
"""Checks that may queue; whoever comes on top is told to come again."""


class Busy(Exception):
    """Too many passwords wait to be checked."""


class Passwords:
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
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0

    async def admits(self, authorization: str) -> bool:
        """Whether this Authorization header has a user's password. Raises Busy."""
        given = _parse(authorization)
        if given is None:
            return False
        name, password = given
        hashed = self._users.get(name)
        key = hashlib.blake2b(
            b"\0".join((name.encode(errors="surrogatepass"), hashed or b"", password)), key=self._salt, digest_size=32
        ).digest()
        known = self._known.get(key)
        if known is None:
            known = await self._find_out(hashed or self._nobodys, password) and hashed is not None
            self._known[key] = known
            while len(self._known) > MOST_REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known

    async def _find_out(self, hashed: bytes, password: bytes) -> bool:
        if self._waiting >= MOST_WAITING:
            raise Busy
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                return await asyncio.to_thread(self._matches, hashed, password)
        finally:
            self._waiting -= 1

    def _matches(self, hashed: bytes, password: bytes) -> bool:
        try:
            return self._check(password[:LONGEST_BYTES], hashed)
        except ValueError:  # a NUL in the password, which no hash was made of
            return False


def _parse(authorization: str) -> tuple[str, bytes] | None:
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(encoded.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
    name, colon, password = decoded.partition(b":")
    return (name.decode(errors="replace"), password) if colon else None
