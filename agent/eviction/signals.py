"""A killer by signals, for pods of a static file: SIGTERM to every process of the pod's cgroups, SIGKILL after the grace.

A process is held by a pidfd before its cgroup is read for a second time: so no signal reaches one that took the number of
another, or that is not (any more) in the pod's cgroups. A pod in which the agent itself runs is refused. After the grace the
kernel ends all of a cgroup at once where it can (cgroup.kill, version 2, Linux 5.14); else children are hunted until none is
left. A container has left once nobody of those who were asked, or whom they started meanwhile, is in its cgroup: who comes
later is its successor, and stays.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from agent.eviction.situation import NS_PER_S, grace_of, wait_ns
from agent.hierarchy import Hierarchy
from agent.sense.parsers import start_ticks
from api.evictions import Held, KillEvent, KillReason
from api.pods import Pod

SWEEPS = 8
"""So often in one go a cgroup is looked through for those that forked meanwhile; the rest is for the next time."""
REFUSED_NS = 60 * NS_PER_S
"""A pod that cannot be asked is not tried again for so long."""
AT_ONCE = 256
"""Processes that are held at the same time."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ENODEV)


_Process = tuple[int, int]
"""Its number, and its start in ticks since boot: numbers are given again."""


class _Top(msgspec.Struct):
    """One container's cgroup, held open: a new one of the same path is another."""

    fd: int
    asked: set[_Process]
    """Those who have to leave it."""


class _Pending(msgspec.Struct):
    """One pod on its way out, with its containers that are left."""

    pod: Pod
    reason: str
    grace_s: float
    asked_ns: int
    tops: list[_Top]
    failed: bool = False
    exceeded: bool = False

    def over(self, now_ns: int) -> bool:
        """Whether its grace is."""
        return now_ns - self.asked_ns >= self.grace_s * NS_PER_S

    def late(self, now_ns: int) -> bool:
        """Whether it should have been gone long ago."""
        return now_ns - self.asked_ns >= wait_ns(self.grace_s)


class SignalKiller:
    """A Killer (agent.eviction.killer) of the pods on this machine. `close` gives its descriptors back."""

    def __init__(self, hierarchy: Hierarchy, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._hierarchy, self._clock = hierarchy, clock
        self._pending: dict[str, _Pending] = {}
        self._refused: dict[str, int] = {}
        """By pod until when."""
        self._events: list[KillEvent] = []

    @property
    def leaving(self) -> frozenset[str]:
        """Pods that were asked and are not known to be gone."""
        return frozenset(self._pending)

    @property
    def stuck(self) -> frozenset[str]:
        """Pods that cannot be asked, or were and do not go."""
        left = (key for key, each in self._pending.items() if each.failed or each.exceeded)
        return frozenset((*left, *self._refused))

    @property
    def held(self) -> Mapping[str, Held]:
        """Nobody: signals are not refused for now."""
        return {}

    def withdraw(self, pod: str, why: str) -> None:
        """Nothing: nobody is held."""

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        """Ask all processes of the pod to end. Of a pod that was asked before only an earlier deadline counts."""
        now_ns, grace_s = self._clock(), grace_of(pod, grace_s)
        known = self._pending.get(pod.key)
        if known is not None:
            from_start_s = (now_ns - known.asked_ns) / NS_PER_S + grace_s
            if from_start_s < known.grace_s:
                known.grace_s, known.reason = from_start_s, reason
            return
        fds: tuple[int, ...] = ()
        try:
            fds = self._open(pod)
            refusal = _refusal(fds)
            tops = [_Top(fd, _processes(fd)) for fd in fds]
        except OSError as error:
            refusal = f"{error.filename}: {error.strerror}"
        if refusal:
            _close(fds)
            self._refused[pod.key] = now_ns + REFUSED_NS
            self._tell(pod, KillReason.FAILED, f"{refusal}; reason: {reason}")
            return
        pending = _Pending(pod=pod, reason=reason, grace_s=grace_s, asked_ns=now_ns, tops=tops)
        self._pending[pod.key] = pending
        self._tell(pod, KillReason.CREATED, f"Successfully create eviction; reason: {reason}")
        self._act(pending, kill=grace_s <= 0)

    def outcomes(self) -> Sequence[KillEvent]:
        """Events since the last call. Kills who is over the grace, and looks who is gone: to be called every round."""
        now_ns = self._clock()
        self._refused = {key: until_ns for key, until_ns in self._refused.items() if now_ns < until_ns}
        for key, pending in list(self._pending.items()):
            _look(pending)
            if pending.tops and pending.over(now_ns):
                self._act(pending, kill=True)
                _look(pending)
            if not pending.tops:
                del self._pending[key]
                text = f"Evicted pod has been deleted physically; reason: {pending.reason}"
                self._tell(pending.pod, KillReason.SUCCEEDED, text)
            elif pending.late(now_ns) and not pending.exceeded:
                pending.exceeded = True
                since_s = (now_ns - pending.asked_ns) / NS_PER_S
                text = (
                    f"processes are left {since_s:.0f} s after the pod was asked to leave within {pending.grace_s:g} s"
                )
                self._tell(pending.pod, KillReason.EXCEEDED, f"{text}; reason: {pending.reason}")
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Forget everybody; who was asked to leave is not ended any more. Idempotent."""
        while self._pending:
            _close([top.fd for top in self._pending.popitem()[1].tops])

    def _act(self, pending: _Pending, *, kill: bool) -> None:
        """What cannot be signalled is told once, and tried again whenever this is called."""
        for top in pending.tops:
            try:
                if kill:
                    _end(top.fd)
                else:
                    _signal(top.fd, signal.SIGTERM)
                # With those whom they started before they knew.
                top.asked |= _processes(top.fd)
            except OSError as error:
                if not pending.failed:
                    pending.failed = True
                    text = f"processes cannot be signalled: {error.strerror}; reason: {pending.reason}"
                    self._tell(pending.pod, KillReason.FAILED, text)

    def _tell(self, pod: Pod, reason: KillReason, message: str) -> None:
        self._events.append(KillEvent(pod=pod.key, reason=reason, message=message, at_ns=self._clock()))

    def _open(self, pod: Pod) -> tuple[int, ...]:
        """The containers' cgroups that are there, in the hierarchy that identifies them. Never its root."""
        opened = []
        for container in pod.containers:
            parts = [part for part in container.cgroup.split("/") if part]
            if not parts or ".." in parts:
                continue
            try:
                opened.append(os.open(self._hierarchy.primary.joinpath(*parts), _DIRECTORY))
            except FileNotFoundError:
                continue
        return tuple(opened)


def _refusal(fds: Sequence[int]) -> str:
    if not fds:
        return "no cgroup of the pod is there"
    return "the agent itself runs in this pod" if any(os.getpid() in _pids(fd) for fd in fds) else ""


def _look(pending: _Pending) -> None:
    """Forget containers that have left. While one of those who were asked is there, all others are theirs."""
    left = []
    for top in pending.tops:
        try:
            here = _processes(top.fd)
        except OSError:
            left.append(top)
            continue
        if here.isdisjoint(top.asked):
            os.close(top.fd)
        else:
            top.asked |= here
            left.append(top)
    pending.tops = left


def _processes(directory: int) -> set[_Process]:
    """Who is in a cgroup, but for the agent itself. Raises OSError where it cannot be read."""
    return {(pid, _started(pid)) for pid in _pids(directory) if pid != os.getpid()}


def _started(pid: int) -> int:
    """0 where nobody tells: it went meanwhile, or /proc hides it."""
    try:
        return start_ticks(Path(f"/proc/{pid}/stat").read_bytes()) or 0
    except OSError:
        return 0


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _pids(directory: int) -> list[int]:
    """Processes of a cgroup and of all below it now; none once it is removed. Raises OSError."""
    try:
        fd = os.open("cgroup.procs", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise
    try:
        text = b"".join(iter(lambda: os.read(fd, 1 << 16), b""))
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise
    finally:
        os.close(fd)
    # 0 stands for a process of another PID namespace: there is no number to signal it by.
    found = [int(word) for word in text.split() if int(word) > 1]
    with os.scandir(directory) as entries:
        children = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in children:
        try:
            child = os.open(name, _DIRECTORY, dir_fd=directory)
        except OSError as error:
            if error.errno in _GONE:
                continue
            raise
        try:
            found += _pids(child)
        finally:
            os.close(child)
    return found


def _signal(directory: int, number: signal.Signals) -> int:
    """Signal every process that is in the cgroup, and how many there were. Raises OSError where that is not allowed."""
    count, listed = 0, _pids(directory)
    for start in range(0, len(listed), AT_ONCE):
        held: dict[int, int] = {}
        try:
            for pid in listed[start : start + AT_ONCE]:
                try:
                    held[pid] = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
            # The numbers cannot be given to others now: who is listed is who is held.
            for pid in (held.keys() & set(_pids(directory))) - {os.getpid()}:
                try:
                    signal.pidfd_send_signal(held[pid], number)
                except ProcessLookupError:
                    continue
                count += 1
        finally:
            _close(tuple(held.values()))
    return count


def _end(directory: int) -> None:
    """SIGKILL, again while somebody forks faster than it is killed."""
    try:
        fd = os.open("cgroup.kill", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        fd = -1
    try:
        if fd >= 0 and os.getpid() not in _pids(directory):
            os.write(fd, b"1")
            return
        for _ in range(SWEEPS):
            if not _signal(directory, signal.SIGKILL):
                return
    finally:
        if fd >= 0:
            os.close(fd)
