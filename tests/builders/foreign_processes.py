"""Processes of another user that serve sockets, for tests as root."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOREIGN_UID = 65534
LISTENER = """
import os, socket, sys
os.setgroups([]); os.setresgid(*[int(sys.argv[2])] * 3); os.setresuid(*[int(sys.argv[2])] * 3)
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); listener.listen()
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(*command: str) -> Iterator[None]:
    """Run a Python command until the block ends; it has printed `ready` when the block begins."""
    process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.communicate()


@contextmanager
def foreign_listener(path: Path, uid: int = FOREIGN_UID) -> Iterator[None]:
    """A process of this user that listens on the socket and answers nothing."""
    with running("-c", LISTENER, str(path), str(uid)):
        yield


@contextmanager
def foreign_plugin(path: Path, uid: int = FOREIGN_UID) -> Iterator[None]:
    """An eviction plugin of this user that names the pod `uid-batch`."""
    with running("-m", "tests.builders.foreign_plugin", str(path), str(uid)):
        yield


@contextmanager
def directory_for_everybody() -> Iterator[Path]:
    """A directory like /tmp, in one that every user can search: pytest's own are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="dioptase-") as parent:
        Path(parent).chmod(0o755)
        directory = Path(parent) / "plugins"
        directory.mkdir()
        directory.chmod(0o1777)
        yield directory
