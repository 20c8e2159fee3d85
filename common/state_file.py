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
from common.sync_times import SYNC_TIMES


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file durably: write and sync a temporary file, rename it, sync the directory. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with SYNC_TIMES.measure(path.name):
            _write_synced(temporary, data)
            temporary.rename(path)
            sync_directory(path.parent)
    except OSError:
        # Report the first failure. On a full disk, the incomplete file would only take space.
        with suppress(OSError):
            temporary.unlink()
        raise


def quarantine_file(path: Path, reason: str) -> Path:
    """Rename a damaged file to NAME.damaged-N for inspection and return the new name.

    Raises Unavailable with the reason of the damage if renaming fails.
    """
    try:
        return _rename_to_quarantine(path)
    except OSError as error:
        raise Unavailable(
            f"{path} is damaged ({reason}) and cannot be renamed: {error.strerror}",
            f"inspect it and move it away from {path.parent}",
        ) from None


def set_aside(path: Path, damage: StateFileDamaged, consequence: str, unsaved: str) -> tuple[str, Path | None]:
    """Rename a damaged file; return the warning, and the path of the file to write: None if the damaged one stays there.

    `consequence` states what starts from nothing, and `unsaved` what is not saved while the damaged file stays.
    """
    text = f"{consequence}: {path} is damaged: {damage}."
    try:
        return f"{text} It was renamed to {quarantine_file(path, str(damage))}.", path
    except Unavailable as failure:
        return f"{text} {unsaved}: {failure.reason}: {failure.remedy}.", None


def write_failure(what: str, path: Path, error: OSError) -> Unavailable:
    """Return why a file of the state directory cannot be written, with the remedy; `what` is the sentence up to the path."""
    return Unavailable(
        f"{what} {path}: {error.strerror}",
        f"free space in {path.parent} and make it writable, or choose another with --state-dir",
    )


def _rename_to_quarantine(path: Path) -> Path:
    names = {damaged.name for damaged in list_quarantined(path)}
    number = next(n for n in range(1, len(names) + 2) if f"{path.name}.damaged-{n}" not in names)
    quarantined = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(quarantined)
    sync_directory(path.parent)
    return quarantined


def list_quarantined(path: Path) -> tuple[Path, ...]:
    """Damaged versions of this file that have not been removed."""
    return tuple(sorted(path.parent.glob(f"{path.name}.damaged-*")))


def sync_directory(path: Path) -> None:
    """Sync created, renamed and removed entries of a directory to disk. Raises OSError."""
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
"""Struct of a state file, with the fields `version` and `checksum`."""


class StateFileDamaged(Exception):
    """The content of a state file is not what was written; the message describes the difference."""


class _StateVersion(msgspec.Struct, frozen=True):
    version: int


def encode_state(content: msgspec.Struct) -> bytes:
    """Encode a state file with its checksum, the SHA-256 of the file with an empty checksum."""
    body = msgspec.structs.replace(content, checksum="")
    checksum = hashlib.sha256(msgspec.json.encode(body)).hexdigest()
    return msgspec.json.encode(msgspec.structs.replace(body, checksum=checksum)) + b"\n"


def decode_state(data: bytes, kind: type[StateT], version: int) -> StateT:
    """Decode a state file. Raises StateFileDamaged unless every byte is as `encode_state` writes it in this version."""
    try:
        layout = msgspec.json.decode(data, type=_StateVersion).version
        if layout != version:
            raise StateFileDamaged(f"it has layout version {layout}, this program supports {version}")
        content = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateFileDamaged(f"it cannot be read: {error}") from None
    if encode_state(content) != data:
        raise StateFileDamaged(
            "its checksum does not match its content, or it has bytes that this program never writes"
        )
    return content
