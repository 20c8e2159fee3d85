"""Creates the temporary directory of one demo, and removes those that killed demos left.
A demo holds a lock on a file of its directory. The kernel releases it when the process ends, however that happens.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "dioptase-demo-"
LOCK_FILE = "lock"


@contextmanager
def run_directory(parent: Path) -> Iterator[Path]:
    """Create a directory below `parent` for as long as the context lasts; it is locked and removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    unlocked = directory / "new"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Under its final name the file is locked at any time, so that no other demo takes it for one of a killed demo.
        unlocked.rename(directory / LOCK_FILE)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned_directories(parent: Path) -> list[Path]:
    """Remove the directories below `parent` whose demo was killed, and return them. Directories of other users, and those
    without a lock file, stay."""
    removed = []
    for directory in sorted(parent.glob(f"{PREFIX}*")):
        try:
            descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return removed
