"""Opens and locks the state directory of the agent, after checking that no other user can change its content.
`StateDirLocked` is raised while another process holds the lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from agent.qrm.actuator.originals import FILE_NAME, HOLDER_NAME, OriginalsJournal, StateDirLocked
from api.interfaces import Unavailable
from common.disk_writer import INLINE_WRITER, FileWriter


def open_originals(state_dir: Path, boot_id: str, disk: FileWriter = INLINE_WRITER) -> OriginalsJournal:
    """Open the journal of that directory, created if needed, locked until `close` or the end of the process. Raises
    StateDirLocked if another process holds the lock, Unavailable if the directory cannot be used or another user
    could change its content: originals are written to cgroups exactly as stored there."""
    try:
        # Not mkdir(parents=True), which creates parent directories with the umask's permissions.
        for directory in (*reversed(state_dir.parents), state_dir):
            if not directory.is_dir():
                directory.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(
            f"state directory {state_dir} cannot be used: {error.strerror}", "choose another with --state-dir"
        ) from None
    try:
        _check_trust(state_dir, os.fstat(lock))
    except Unavailable:
        os.close(lock)
        raise
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise Unavailable(
                f"{state_dir} cannot be locked: {error.strerror}", "choose a local file system with --state-dir"
            ) from None
        holder = _lock_holder(state_dir)
        raise StateDirLocked(
            f"state directory {state_dir} is in use by {holder}", f"stop {holder} or choose another with --state-dir"
        ) from None
    unwritable = ""
    try:
        with open(state_dir / HOLDER_NAME, "w", opener=_open_no_follow) as holder_file:
            holder_file.write(f"{os.getpid()}\n")
    except OSError as error:
        if error.errno == errno.ELOOP:
            os.close(lock)
            raise Unavailable(f"{state_dir / HOLDER_NAME} is a symbolic link", "remove that link") from None
        unwritable = f"{state_dir} cannot be written: {error.strerror}; no knob can be changed until it can"
    try:
        originals = OriginalsJournal(state_dir / FILE_NAME, boot_id, lock=lock, disk=disk)
    except Unavailable:
        os.close(lock)
        raise
    originals.messages += (unwritable,) if unwritable else ()
    return originals


def default_state_dir(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """Return /var/lib/dioptase for root, else $XDG_STATE_HOME/dioptase or ~/.local/state/dioptase."""
    if (os.geteuid() if uid is None else uid) == 0:
        return Path("/var/lib/dioptase")
    state_home = environ.get("XDG_STATE_HOME", "")
    # The XDG base directory specification demands that relative paths are ignored.
    if Path(state_home).is_absolute():
        return Path(state_home) / "dioptase"
    return Path(environ.get("HOME") or Path.home()) / ".local/state/dioptase"


def demo_state_dir(state_dir: Path) -> Path:
    """Return the demo's directory, below the agent's, so that both can run on one machine."""
    return state_dir / "demo"


def read_boot_id(proc: Path = Path("/proc")) -> str:
    """Return the kernel's id of this boot."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def _lock_holder(state_dir: Path) -> str:
    # The holder writes its PID after it has the lock; on a full disk the file stays empty.
    try:
        pid = (state_dir / HOLDER_NAME).read_text().strip()
    except OSError:
        pid = ""
    return f"process {pid}" if pid.isdigit() else "another process"


def _check_trust(state_dir: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise Unavailable(
            f"state directory {state_dir} belongs to another user (uid {status.st_uid})",
            f"choose another with --state-dir, or make it yours: chown {os.geteuid()} {state_dir}",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unavailable(
            f"state directory {state_dir} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})",
            f"choose one of its own with --state-dir, or remove the permission: chmod go-w {state_dir}",
        )


def _open_no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
