"""Checks that a Unix socket can only be served by a user that may act for this node: root, the agent's own user, or, for
plugins and advisors, a user that the settings name. A plugin decides about evictions, CPUs and the Node, so another user's
socket, or a socket in a directory where another user could put one, is not used: the same rule as for the state directory.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from api.interfaces import Unavailable

_CREDENTIALS = struct.Struct("=iII")
"""Fields of `struct ucred`, which SO_PEERCRED returns (unix(7)): pid, uid and gid."""
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
SocketIdentity = tuple[int, int, int]
"""Device, inode and time of the last change of a socket file. Another process that listens there makes another file."""


def check_socket_directory(directory: Path, trusted_uids: Collection[int] | None = None) -> None:
    """Raise Unavailable unless only trusted users can create, rename or remove files in the directory.

    Its parents are checked too, because their owners can rename it; they may be writable if they are sticky, as /tmp is.
    Raises OSError if it cannot be read.
    """
    trusted, target = _trusted(trusted_uids), _resolve(directory)
    for step in _steps(directory):
        status = step.lstat()
        if status.st_uid not in trusted:
            raise Unavailable(
                f"{directory} is not trusted: {step} belongs to uid {status.st_uid}",
                _remedy(f"make it root's: chown root {step}", trusted_uids),
            )
        is_sticky = bool(status.st_mode & stat.S_ISVTX) and step != target
        if not stat.S_ISLNK(status.st_mode) and status.st_mode & _WRITABLE_BY_OTHERS and not is_sticky:
            raise Unavailable(
                f"{directory} is not trusted: {step} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})",
                f"remove the permission: chmod go-w {step}; or choose a directory of its own",
            )


def check_socket(path: Path, trusted_uids: Collection[int] | None = None) -> SocketIdentity:
    """Raise Unavailable unless the directory and the socket file belong to trusted users; return which file it is.

    Raises OSError if there is none.
    """
    check_socket_directory(path.parent, trusted_uids)
    if path.is_symlink():
        check_socket_directory(_resolve(path).parent, trusted_uids)
    status = path.stat()
    if status.st_uid not in _trusted(trusted_uids):
        raise Unavailable(
            f"{path} is not trusted: the socket belongs to uid {status.st_uid}",
            _remedy("run the program that serves it as root", trusted_uids),
        )
    return status.st_dev, status.st_ino, status.st_ctime_ns


def check_listener(path: Path, trusted_uids: Collection[int] | None = None) -> None:
    """Connect, and raise Unavailable unless a trusted user's process listens on the socket. Raises OSError without one."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0)  # a full backlog would block connect(2)
        probe.connect(str(path))
        check_peer(probe, path, trusted_uids)


def check_peer(connection: socket.socket, path: Path, trusted_uids: Collection[int] | None = None) -> None:
    """Raise Unavailable unless the process at the other end has a trusted uid.

    For the end that connected, the kernel returns the credentials of the process that called listen (unix(7)).
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(credentials)
    if uid not in _trusted(trusted_uids):
        raise Unavailable(
            f"{path} is not trusted: the process that listens there has uid {uid}",
            _remedy("run it as root", trusted_uids),
        )


def _trusted(trusted_uids: Collection[int] | None) -> frozenset[int]:
    return frozenset((0, os.geteuid(), *(trusted_uids or ())))


def _remedy(text: str, trusted_uids: Collection[int] | None) -> str:
    return text if trusted_uids is None else f"{text}; or name its user in sockets.trustedUids"


def _resolve(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a loop of links


def _steps(directory: Path) -> Iterator[Path]:
    """Yield the directory, its parents, and those of its target if there are symbolic links among them."""
    absolute = Path(os.path.abspath(directory))  # noqa: PTH100 - resolve() would hide the links
    yield from (absolute, *absolute.parents)
    target = _resolve(absolute)
    if target != absolute:
        yield from (target, *target.parents)
