"""PSI triggers: the kernel wakes the agent when tasks of a cgroup stalled for too long, without any polling.

The kernel takes windows of half a second to ten; without CAP_SYS_RESOURCE they must be multiples of two seconds (Linux
6.4), and then averages are updated every two seconds too. `some` counts time in which at least one task stalled.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from api.ports import Unavailable

STALL_US, WINDOW_US = 150_000, 1_000_000
"""What the agent asks for: an online cgroup in which some task stalled for 15 % of a second starts a round."""
UNPRIVILEGED_STEP_US = 2_000_000
"""Windows that any process may use are multiples of this (kernel/sched/psi.c, psi_trigger_create)."""
_REMEDIES = {
    errno.ENOENT: "boot with psi=1 on a kernel with CONFIG_PSI, and make the cgroup in the unified hierarchy",
    errno.ENODEV: "the cgroup is gone: nothing to do",
    errno.EOPNOTSUPP: "boot with psi=1",
    errno.EACCES: "run the agent as root",
    errno.EPERM: "run the agent as root, or grant CAP_SYS_RESOURCE",
    errno.EROFS: "mount the unified cgroup hierarchy read-write",
    errno.EBUSY: "another trigger exists on this descriptor: report it",
}


class PsiTrigger:
    """One trigger. The descriptor becomes readable with POLLPRI when it fires, and with POLLERR when its cgroup is gone.

    At most one event per window; closing the descriptor ends it.
    """

    def __init__(self, fd: int, path: Path, stall_us: int, window_us: int) -> None:
        self._fd = fd
        self.path, self.stall_us, self.window_us = path, stall_us, window_us

    def fileno(self) -> int:
        """The descriptor to poll; -1 once closed."""
        return self._fd

    def close(self) -> None:
        """Give the trigger back to the kernel. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_trigger(path: Path, stall_us: int, window_us: int) -> PsiTrigger:
    """Fire when tasks stalled for stall_us within window_us. `path` is a pressure file, of the node or of a cgroup.

    Where the kernel refuses the window, the next multiple of two seconds is used, with the stall in proportion.
    Raises Unavailable.
    """
    if not 0 < stall_us <= window_us:
        raise ValueError(f"a stall of {stall_us} us does not fit into a window of {window_us} us")
    wider_us = -(-window_us // UNPRIVILEGED_STEP_US) * UNPRIVILEGED_STEP_US
    try:
        return _open(path, stall_us, window_us)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM) or wider_us == window_us:
            raise _unavailable(path, error) from None
    try:
        return _open(path, stall_us * wider_us // window_us, wider_us)
    except OSError as error:
        raise _unavailable(path, error) from None


def _open(path: Path, stall_us: int, window_us: int) -> PsiTrigger:
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # /proc/pressure cuts off the last byte, which is meant to be the NUL.
        os.write(fd, f"some {stall_us} {window_us}\0".encode())
    except OSError:
        os.close(fd)
        raise
    return PsiTrigger(fd, path, stall_us, window_us)


def _unavailable(path: Path, error: OSError) -> Unavailable:
    remedy = _REMEDIES.get(error.errno or 0, "see kernel documentation, accounting/psi.rst")
    return Unavailable(f"no pressure trigger on {path}: {error.strerror}", remedy)
