"""The pressure triggers of whatever pods are online now, waited for as one descriptor."""

from __future__ import annotations

import select
from collections.abc import Iterable
from pathlib import Path

from agent.sense.psi import PsiTrigger, open_trigger
from api.ports import Unavailable


class TriggerSet:
    """A changing set of triggers behind one epoll descriptor.

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
