"""Files that survive a crash at any point: replaced as a whole, and set aside where they are not what was written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from api.ports import Unavailable


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


def set_aside(path: Path, reason: str) -> Path:
    """Rename to NAME.damaged-N, of which a person may want to see each; returns the new name. Raises Unavailable, with the
    reason why it is damaged."""
    try:
        return _set_aside(path)
    except OSError as error:
        raise Unavailable(
            f"{path} is damaged ({reason}) and cannot be set aside: {error.strerror}",
            f"look at it and move it away from {path.parent}",
        ) from None


def _set_aside(path: Path) -> Path:
    taken = {found.name for found in damaged(path)}
    number = next(n for n in range(1, len(taken) + 2) if f"{path.name}.damaged-{n}" not in taken)
    aside = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(aside)
    sync_directory(path.parent)
    return aside


def damaged(path: Path) -> tuple[Path, ...]:
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
