"""State files that survive a crash: checksummed JSON, written to a temporary file, synced and renamed.
A damaged file is renamed to NAME.damaged-N; it is never used in part and never deleted.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from api.interfaces import Unavailable


def replace_file(path: Path, data: bytes) -> None:
    """Have this content on disk when it returns: temporary file, fsync, rename, fsync of the directory. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        _write_synced(temporary, data)
        temporary.rename(path)
        sync_directory(path.parent)
    except OSError:
        # The first failure is the one to report; on a full disk the half-written file only takes space.
        with suppress(OSError):
            temporary.unlink()
        raise


def quarantine_file(path: Path, reason: str) -> Path:
    """Rename to NAME.damaged-N, of which a person may want to see each; returns the new name. Raises Unavailable, with the
    reason why it is damaged."""
    try:
        return _rename_to_quarantine(path)
    except OSError as error:
        raise Unavailable(
            f"{path} is damaged ({reason}) and cannot be set aside: {error.strerror}",
            f"look at it and move it away from {path.parent}",
        ) from None


def _rename_to_quarantine(path: Path) -> Path:
    taken = {found.name for found in list_quarantined(path)}
    number = next(n for n in range(1, len(taken) + 2) if f"{path.name}.damaged-{n}" not in taken)
    aside = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(aside)
    sync_directory(path.parent)
    return aside


def list_quarantined(path: Path) -> tuple[Path, ...]:
    """What was set aside of this file and not removed since."""
    return tuple(sorted(path.parent.glob(f"{path.name}.damaged-*")))


def sync_directory(path: Path) -> None:
    """Have what was created, renamed or removed in it on disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_synced(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        written = 0
        while written < len(data):
            written += os.write(fd, data[written:])
        os.fsync(fd)
    finally:
        os.close(fd)


StateT = TypeVar("StateT", bound=msgspec.Struct)
"""A file's struct: `version` and `checksum` are two of its fields."""


class StateFileDamaged(Exception):
    """The file is not what was written; the text says in which way."""


class _StateVersion(msgspec.Struct, frozen=True):
    version: int


def encode_state(content: msgspec.Struct) -> bytes:
    """The file, with its checksum: SHA-256 over the file with nothing in this place."""
    body = msgspec.structs.replace(content, checksum="")
    checksum = hashlib.sha256(msgspec.json.encode(body)).hexdigest()
    return msgspec.json.encode(msgspec.structs.replace(body, checksum=checksum)) + b"\n"


def decode_state(data: bytes, kind: type[StateT], version: int) -> StateT:
    """What was written. Raises Damaged unless every byte is as `sealed` wrote it in this version of the layout."""
    try:
        found = msgspec.json.decode(data, type=_StateVersion).version
        if found != version:
            raise StateFileDamaged(f"it has layout version {found}, this program knows {version}")
        content = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateFileDamaged(f"it cannot be read: {error}") from None
    if encode_state(content) != data:
        raise StateFileDamaged(
            "its checksum does not match its content, or it has bytes that this program never writes"
        )
    return content
