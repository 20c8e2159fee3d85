"""Open a file that somebody else left, without ever waiting for it: only regular files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
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
