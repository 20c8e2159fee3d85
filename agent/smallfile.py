"""Read a file that a person or an earlier run left, without ever waiting for it: only regular files, only so much."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_small(path: Path, limit: int) -> bytes:
    """The content, at most `limit` + 1 bytes so that the caller sees when there is more.

    Raises OSError; what is no regular file is one too (EINVAL), because opening a pipe would wait for its writer and
    stop every round meanwhile.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with open(fd, "rb", closefd=False) as file:
            return file.read(limit + 1)
    finally:
        os.close(fd)
