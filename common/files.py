"""Opens and reads regular files without blocking.
Opening a FIFO would wait for its writer and stop the cycle, so anything that is not a regular file raises OSError
(EINVAL).
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def read_small_file(path: Path, limit: int) -> bytes:
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


def open_regular_file(path: Path) -> BinaryIO:
    """The file, for reading. Raises OSError; what is no regular file is one too (EINVAL).

    Opening a pipe waits for its writer, and the end of a device may never come.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    number, reason = (
        (errno.EISDIR, os.strerror(errno.EISDIR)) if stat.S_ISDIR(mode) else (errno.EINVAL, "not a regular file")
    )
    raise OSError(number, reason, str(path))
