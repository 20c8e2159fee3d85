"""Directories and files of cgroups: opened without following any link, and why that failed in types of its own."""

from __future__ import annotations

import errno
import os
from functools import lru_cache
from pathlib import Path

from api.cpus import parse_cpu_list
from api.ports import Unavailable

GONE = (errno.ENOENT, errno.ENODEV)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST = 1 << 16
"""No knob's text is longer: a cpuset of 8192 CPUs with every second one is 23 KiB."""


class Absent(Unavailable):
    """The cgroup exists, but not in the hierarchy of this knob's controller."""


class Refused(Unavailable):
    """The kernel said no to one operation on one file."""

    def __init__(self, reason: str, remedy: str, code: int) -> None:
        super().__init__(reason, remedy)
        self.code = code


class Forbidden(Refused):
    """Not the value but the one who writes it is refused: privileges, or a read-only mount."""


def text_of(directory: int, file: str) -> str:
    """What the file holds. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        # Every byte has a character of its own in latin-1, so that any text goes back as it came.
        return os.read(fd, _LONGEST).decode("latin-1")
    finally:
        os.close(fd)


def is_cgroup_path(text: str) -> bool:
    """Whether a text can be the path of a cgroup below a mount: absolute, printable, no empty part and no dots."""
    parts = text.split("/")[1:] if text != "/" else []
    return text.startswith("/") and text.isprintable() and not any(part in ("", ".", "..") for part in parts)


@lru_cache(maxsize=4096)
def below(mount: Path, cgroup: str) -> Path:
    """Directory of the cgroup. Raises Refused where the path is none."""
    if not is_cgroup_path(cgroup):
        raise Refused(f"{cgroup!r} is not a cgroup path", "write it like /kubepods/web, without dots", errno.EINVAL)
    return mount.joinpath(*cgroup.split("/")[1:])


def walk(mount: Path, cgroup: str) -> int:
    """Descriptor of the cgroup's directory. Raises Absent and Refused."""
    # One component at a time, so that no link anywhere in the path can lead out of the hierarchy.
    fd = -1
    try:
        fd = os.open(mount, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in below(mount, cgroup).relative_to(mount).parts:
            deeper = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = deeper
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        reason = f"{cgroup}: cannot open it below {mount}: {error.strerror}"
        if error.errno in GONE:
            raise Absent(reason, f"make the cgroup there too: mkdir -p {mount}{cgroup}") from None
        raise refusal(error, reason, mount) from None
    return fd


def refusal(error: OSError, reason: str, mount: Path) -> Refused:
    """What such an error means when something is opened."""
    code = error.errno or 0
    if code == errno.EROFS:
        return Forbidden(reason, f"mount {mount} read-write", code)
    if code in (errno.EACCES, errno.EPERM):
        return Forbidden(reason, "run the agent as root", code)
    if code in (errno.ELOOP, errno.ENOTDIR):
        return Refused(reason, "name a real directory: symbolic links are not followed", code)
    if code in (errno.EMFILE, errno.ENFILE):
        return Refused(reason, "raise the limit of open files (ulimit -n)", code)
    return Refused(reason, "see the kernel's log", code)


def effective(directory: Path, names: tuple[str, ...]) -> tuple[int, ...] | None:
    """The list in the first of these files that is there; None where there is none or it names nothing."""
    for name in names:
        try:
            return parse_cpu_list((directory / name).read_text()) or None
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None
    return None
