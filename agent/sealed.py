"""Files of one JSON object with a version and a checksum, of which every byte is as it was written, or nothing is used."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
"""A file's struct: `version` and `checksum` are two of its fields."""


class Damaged(Exception):
    """The file is not what was written; the text says in which way."""


class _AnyVersion(msgspec.Struct, frozen=True):
    version: int


def sealed(content: msgspec.Struct) -> bytes:
    """The file, with its checksum: SHA-256 over the file with nothing in this place."""
    body = msgspec.structs.replace(content, checksum="")
    checksum = hashlib.sha256(msgspec.json.encode(body)).hexdigest()
    return msgspec.json.encode(msgspec.structs.replace(body, checksum=checksum)) + b"\n"


def unsealed(data: bytes, kind: type[T], version: int) -> T:
    """What was written. Raises Damaged unless every byte is as `sealed` wrote it in this version of the layout."""
    try:
        found = msgspec.json.decode(data, type=_AnyVersion).version
        if found != version:
            raise Damaged(f"it has layout version {found}, this program knows {version}")
        content = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"it cannot be read: {error}") from None
    if sealed(content) != data:
        raise Damaged("its checksum does not match its content, or it has bytes that this program never writes")
    return content
