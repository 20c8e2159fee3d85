"""Opens and reads regular files without blocking.
Opening a FIFO would wait for its writer and stop the cycle, and a device may have no end, so anything that is not a
regular file raises OSError (EINVAL, or EISDIR for a directory).
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def read_small_file(path: Path, limit: int) -> bytes:
    """Read at most `limit` + 1 bytes, so that the caller can detect a larger file. Raises OSError."""
    with open_regular_file(path) as file:
        return file.read(limit + 1)


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))
