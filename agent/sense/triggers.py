"""The pressure triggers of whatever pods are online now, waited for as one descriptor."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from pathlib import Path

from agent.sense.psi import PsiTrigger, open_trigger
from api.ports import Unavailable

_Key = tuple[str, int]
"""Path and id of a cgroup: another one at the same path gets a trigger of its own."""


class TriggerSet:
    """A changing set of triggers behind one epoll descriptor.

    asyncio cannot wait for POLLPRI, but an epoll that can is itself readable when something in it is ready.
    """

    def __init__(self, root: Path, *, stall_us: int, window_us: int) -> None:
        """`root` is the mount point of the unified hierarchy: only there have cgroups pressure files."""
        self._root, self._stall_us, self._window_us = root, stall_us, window_us
        self._epoll = select.epoll()
        self._armed: dict[_Key, PsiTrigger] = {}
        self._by_fd: dict[int, _Key] = {}
        self._refused: set[_Key] = set()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def watch(self, cgroups: Mapping[str, int]) -> None:
        """Arm what is new among these paths and ids, and disarm what is no longer wanted.

        A pressure file that refused is not asked again for the same cgroup; one that is not there may still come.
        """
        wanted = set(cgroups.items())
        for key in self._armed.keys() - wanted:
            self._disarm(key)
        self._refused &= wanted
        for key in wanted - self._armed.keys() - self._refused:
            path = self._root / key[0].lstrip("/") / "cpu.pressure"
            try:
                trigger = open_trigger(path, self._stall_us, self._window_us)
            except Unavailable:
                if os.access(path, os.F_OK):
                    self._refused.add(key)
                continue
            self._armed[key] = trigger
            self._by_fd[trigger.fileno()] = key
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
        for key in list(self._armed):
            self._disarm(key)
        self._epoll.close()

    def _disarm(self, key: _Key) -> None:
        trigger = self._armed.pop(key)
        del self._by_fd[trigger.fileno()]
        self._epoll.unregister(trigger.fileno())
        trigger.close()
