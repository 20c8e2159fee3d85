"""Arms PSI triggers of online pods: the kernel wakes the agent when a cgroup stalls, without polling. The kernel
accepts windows of 0.5 to 10 s; without CAP_SYS_RESOURCE they must be multiples of 2 s (Linux 6.4, kernel/sched/psi.c).
All triggers are polled through one epoll descriptor, because asyncio cannot wait for POLLPRI."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Mapping
from pathlib import Path

from api.interfaces import Unavailable

STALL_US, WINDOW_US = 150_000, 1_000_000
"""A cycle starts when some task of an online cgroup stalled for 15 % of a second."""
UNPRIVILEGED_STEP_US = 2_000_000
"""Windows of unprivileged processes are multiples of this (kernel/sched/psi.c, psi_trigger_create)."""
_REMEDIES = {
    errno.ENOENT: "boot with psi=1 on a kernel with CONFIG_PSI, and make the cgroup in the unified hierarchy",
    errno.ENODEV: "the cgroup was removed: nothing to do",
    errno.EOPNOTSUPP: "boot with psi=1",
    errno.EACCES: "run the agent as root",
    errno.EPERM: "run the agent as root, or grant CAP_SYS_RESOURCE",
    errno.EROFS: "mount the unified cgroup hierarchy read-write",
    errno.EBUSY: "another trigger exists on this descriptor: report it",
}


class PsiTrigger:
    """One trigger. The descriptor becomes readable with POLLPRI when it fires, and with POLLERR when its cgroup is
    removed.

    At most one event per window; closing the descriptor removes the trigger.
    """

    def __init__(self, fd: int, path: Path, stall_us: int, window_us: int) -> None:
        self._fd = fd
        self.path, self.stall_us, self.window_us = path, stall_us, window_us

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 once closed."""
        return self._fd

    def close(self) -> None:
        """Remove the trigger from the kernel. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_psi_trigger(path: Path, stall_us: int, window_us: int) -> PsiTrigger:
    """Return a trigger that fires when tasks stalled for stall_us within window_us. `path` is a pressure file of the
    node or a cgroup.

    If the kernel refuses the window, the next multiple of two seconds is used, with the stall in proportion. Raises
    Unavailable.
    """
    if not 0 < stall_us <= window_us:
        raise ValueError(f"a stall of {stall_us} us does not fit into a window of {window_us} us")
    wider_us = -(-window_us // UNPRIVILEGED_STEP_US) * UNPRIVILEGED_STEP_US
    try:
        return _write_trigger(path, stall_us, window_us)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM) or wider_us == window_us:
            raise _unavailable(path, error) from None
    try:
        return _write_trigger(path, stall_us * wider_us // window_us, wider_us)
    except OSError as error:
        raise _unavailable(path, error) from None


def _write_trigger(path: Path, stall_us: int, window_us: int) -> PsiTrigger:
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # The kernel replaces the last byte by NUL (kernel/sched/psi.c, psi_write).
        os.write(fd, f"some {stall_us} {window_us}\0".encode())
    except OSError:
        os.close(fd)
        raise
    return PsiTrigger(fd, path, stall_us, window_us)


def _unavailable(path: Path, error: OSError) -> Unavailable:
    remedy = _REMEDIES.get(error.errno or 0, "see kernel documentation, accounting/psi.rst")
    return Unavailable(f"no pressure trigger on {path}: {error.strerror}", remedy)


_Key = tuple[str, int]
"""Path and id of a cgroup: another cgroup at the same path gets its own trigger."""


class PsiTriggerSet:
    """A changing set of triggers behind one epoll descriptor.

    An asyncio loop cannot wait for POLLPRI, but an epoll that does is itself readable when one of its descriptors is
    ready.
    """

    def __init__(self, root: Path, *, stall_us: int, window_us: int) -> None:
        """`root` is the mount point of the unified hierarchy: only its cgroups have pressure files."""
        self._root, self._stall_us, self._window_us = root, stall_us, window_us
        self._epoll = select.epoll()
        self._armed: dict[_Key, PsiTrigger] = {}
        self._by_fd: dict[int, _Key] = {}
        self._refused: set[_Key] = set()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def watch(self, cgroups: Mapping[str, int]) -> None:
        """Arm triggers of new paths and ids, and disarm those no longer in the mapping.

        A pressure file that refused is not tried again for the same cgroup; a missing one may still appear.
        """
        keys = set(cgroups.items())
        for key in self._armed.keys() - keys:
            self._disarm(key)
        self._refused &= keys
        for key in keys - self._armed.keys() - self._refused:
            path = self._root / key[0].lstrip("/") / "cpu.pressure"
            try:
                trigger = open_psi_trigger(path, self._stall_us, self._window_us)
            except Unavailable:
                if os.access(path, os.F_OK):
                    self._refused.add(key)
                continue
            self._armed[key] = trigger
            self._by_fd[trigger.fileno()] = key
            self._epoll.register(trigger.fileno(), select.EPOLLPRI)

    def fired(self) -> bool:
        """Return whether a trigger fired; call it when `fileno` is readable. Triggers of removed cgroups are dropped."""
        # A poll clears the event of a PSI trigger (kernel/sched/psi.c, psi_trigger_poll), and waiting for `fileno` polls
        # the triggers up to the first that is ready (fs/eventpoll.c, __ep_eventpoll_poll). So an alarm may be gone by
        # now: without a removed cgroup as the cause of the wake-up, or with other triggers still armed, assume one.
        dead = {fd for fd, event in self._epoll.poll(0) if event & select.EPOLLERR}
        for fd in dead:
            self._disarm(self._by_fd[fd])
        return not dead or bool(self._armed)

    def close(self) -> None:
        """Disarm all. Idempotent."""
        for key in list(self._armed):
            self._disarm(key)
        self._epoll.close()

    def _disarm(self, key: _Key) -> None:
        trigger = self._armed.pop(key)
        del self._by_fd[trigger.fileno()]
        self._epoll.unregister(trigger.fileno())
        trigger.close()
