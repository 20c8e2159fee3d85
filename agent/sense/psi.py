"""Pressure triggers: the kernel wakes the agent when tasks of a cgroup have stalled too long, instead of being asked.

A trigger is text written to a PSI file and lives as long as the descriptor (Documentation/accounting/psi.rst). Without
CAP_SYS_RESOURCE the kernel takes only windows that are multiples of two seconds, since those cost it nothing extra.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterable
from pathlib import Path

from api.ports import Unavailable

UNPRIVILEGED_WINDOW_US = 2_000_000


class PsiTrigger:
    """One armed trigger; `fileno()` becomes ready for POLLPRI when it fires, for POLLERR when its cgroup is gone."""

    def __init__(self, fd: int, window_us: int) -> None:
        self._fd = fd
        self.window_us = window_us

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Disarm. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_trigger(path: Path, stall_us: int, window_us: int) -> PsiTrigger:
    """Arm a trigger for `some` stall of so long within the window; the share is kept where the window must be longer.

    Raises Unavailable where the file is not there or the kernel refuses both windows.
    """
    fallback = max(UNPRIVILEGED_WINDOW_US, window_us)
    refused = ""
    for window in dict.fromkeys((window_us, fallback)):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}", _remedy(error.errno)) from None
        try:
            os.write(fd, f"some {stall_us * window // window_us} {window}\0".encode())
        except OSError as error:
            os.close(fd)
            refused = f"{path}: a trigger over {window / 1e6:g} s is refused: {error.strerror}"
            continue
        return PsiTrigger(fd, window)
    raise Unavailable(refused, "Linux 5.2 or newer with PSI enabled; CAP_SYS_RESOURCE allows windows below 2 s")


def _remedy(code: int | None) -> str:
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "run the agent as root with the cgroup file system mounted read-write"
    return "boot with psi=1 (CONFIG_PSI); a cgroup has pressure files in the unified hierarchy only"


class TriggerSet:
    """The pressure triggers of a changing set of cgroups, waited for as one descriptor.

    asyncio cannot wait for POLLPRI, but an epoll that can is itself readable when something in it is ready.
    """

    def __init__(self, root: Path, *, stall_us: int, window_us: int) -> None:
        """`root` is the mount point of the unified hierarchy: only there have cgroups pressure files."""
        self._root, self._stall_us, self._window_us = root, stall_us, window_us
        self._epoll = select.epoll()
        self._armed: dict[str, PsiTrigger] = {}
        self._by_fd: dict[int, str] = {}
        self._refused: set[str] = set()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def watch(self, cgroups: Iterable[str]) -> None:
        """Arm what is new and disarm what is no longer wanted; one that refused is not asked again while wanted."""
        wanted = set(cgroups)
        for cgroup in set(self._armed) - wanted:
            self._disarm(cgroup)
        self._refused &= wanted
        for cgroup in wanted - set(self._armed) - self._refused:
            path = self._root / cgroup.lstrip("/") / "cpu.pressure"
            try:
                trigger = open_trigger(path, self._stall_us, self._window_us)
            except Unavailable:
                self._refused.add(cgroup)
                continue
            self._armed[cgroup] = trigger
            self._by_fd[trigger.fileno()] = cgroup
            self._epoll.register(trigger.fileno(), select.EPOLLPRI)

    def fired(self) -> bool:
        """Called when `fileno` is readable: whether a trigger fired. One whose cgroup is gone is dropped instead.

        The kernel clears an event as soon as anybody polls for it, and waiting for `fileno` has polled: finding nothing
        ready is what a trigger that fired looks like from here.
        """
        dead = {fd for fd, event in self._epoll.poll(0) if event & select.EPOLLERR}
        for fd in dead:
            self._disarm(self._by_fd[fd])
        return not dead

    def close(self) -> None:
        """Disarm all. Idempotent."""
        for cgroup in list(self._armed):
            self._disarm(cgroup)
        self._epoll.close()

    def _disarm(self, cgroup: str) -> None:
        trigger = self._armed.pop(cgroup)
        del self._by_fd[trigger.fileno()]
        self._epoll.unregister(trigger.fileno())
        trigger.close()
