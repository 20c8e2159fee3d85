"""Evicts pods of a static pods file by signals: SIGTERM to all their processes, SIGKILL after the grace.
Processes are held by a pidfd before their cgroup is read again, so that no signal reaches a reused process ID.
SIGKILL uses `cgroup.kill` where the kernel has it (cgroup v2, Linux 5.14). It refuses the pod that runs the agent.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from agent.eviction.eviction_inputs import NS_PER_S, grace_period_s, termination_wait_ns
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.parsers import start_ticks
from api.eviction import EvictionBlock, EvictionEvent, EvictionEventReason
from api.pod import Pod

MAX_KILL_SWEEPS = 8
"""So often in one go a cgroup is looked through for those that forked meanwhile; the rest is for the next time."""
REFUSED_RETRY_NS = 60 * NS_PER_S
"""A pod that cannot be asked is not tried again for so long."""
MAX_PIDFDS = 256
"""Processes that are held at the same time."""
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GONE_ERRNOS = (errno.ENOENT, errno.ENODEV)


_Process = tuple[int, int]
"""Its number, and its start in ticks since boot: numbers are given again."""


class _OpenCgroup(msgspec.Struct):
    """One container's cgroup, held open: a new one of the same path is another."""

    fd: int
    asked: set[_Process]
    """Those who have to leave it."""


class _PodTermination(msgspec.Struct):
    """One pod on its way out, with its containers that are left."""

    pod: Pod
    reason: str
    grace_s: float
    asked_ns: int
    open_cgroups: list[_OpenCgroup]
    failed: bool = False
    exceeded: bool = False

    def over(self, now_ns: int) -> bool:
        """Whether its grace is."""
        return now_ns - self.asked_ns >= self.grace_s * NS_PER_S

    def is_overdue(self, now_ns: int) -> bool:
        """Whether it should have been gone long ago."""
        return now_ns - self.asked_ns >= termination_wait_ns(self.grace_s)


class SignalEvictor:
    """A Killer (agent.eviction.runner) of the pods on this machine. `close` gives its descriptors back."""

    def __init__(self, hierarchy: Hierarchy, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._hierarchy, self._clock = hierarchy, clock
        self._pending: dict[str, _PodTermination] = {}
        self._refused: dict[str, int] = {}
        """By pod until when."""
        self._events: list[EvictionEvent] = []

    @property
    def terminating(self) -> frozenset[str]:
        """Pods that were asked and are not known to be gone."""
        return frozenset(self._pending)

    @property
    def stuck(self) -> frozenset[str]:
        """Pods that cannot be asked, or were and do not go."""
        left = (key for key, each in self._pending.items() if each.failed or each.exceeded)
        return frozenset((*left, *self._refused))

    @property
    def blocked(self) -> Mapping[str, EvictionBlock]:
        """Nobody: signals are not refused for now."""
        return {}

    def cancel(self, pod: str, why: str) -> None:
        """Nothing: nobody is held."""

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        """Ask all processes of the pod to end. Of a pod that was asked before only an earlier deadline counts."""
        now_ns, grace_s = self._clock(), grace_period_s(pod, grace_s)
        known = self._pending.get(pod.key)
        if known is not None:
            from_start_s = (now_ns - known.asked_ns) / NS_PER_S + grace_s
            if from_start_s < known.grace_s:
                known.grace_s, known.reason = from_start_s, reason
            return
        fds: tuple[int, ...] = ()
        try:
            fds = self._open(pod)
            refusal = _refusal_reason(fds)
            tops = [_OpenCgroup(fd, _read_processes(fd)) for fd in fds]
        except OSError as error:
            refusal = f"{error.filename}: {error.strerror}"
        if refusal:
            _close_fds(fds)
            self._refused[pod.key] = now_ns + REFUSED_RETRY_NS
            self._tell(pod, EvictionEventReason.FAILED, f"{refusal}; reason: {reason}")
            return
        pending = _PodTermination(pod=pod, reason=reason, grace_s=grace_s, asked_ns=now_ns, open_cgroups=tops)
        self._pending[pod.key] = pending
        self._tell(pod, EvictionEventReason.CREATED, f"Successfully create eviction; reason: {reason}")
        self._act(pending, kill=grace_s <= 0)

    def outcomes(self) -> Sequence[EvictionEvent]:
        """Events since the last call. Kills who is over the grace, and looks who is gone: to be called every round."""
        now_ns = self._clock()
        self._refused = {key: until_ns for key, until_ns in self._refused.items() if now_ns < until_ns}
        for key, pending in list(self._pending.items()):
            _drop_terminated_containers(pending)
            if pending.open_cgroups and pending.over(now_ns):
                self._act(pending, kill=True)
                _drop_terminated_containers(pending)
            if not pending.open_cgroups:
                del self._pending[key]
                text = f"Evicted pod has been deleted physically; reason: {pending.reason}"
                self._tell(pending.pod, EvictionEventReason.SUCCEEDED, text)
            elif pending.is_overdue(now_ns) and not pending.exceeded:
                pending.exceeded = True
                since_s = (now_ns - pending.asked_ns) / NS_PER_S
                text = (
                    f"processes are left {since_s:.0f} s after the pod was asked to leave within {pending.grace_s:g} s"
                )
                self._tell(pending.pod, EvictionEventReason.EXCEEDED, f"{text}; reason: {pending.reason}")
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Forget everybody; who was asked to leave is not ended any more. Idempotent."""
        while self._pending:
            _close_fds([top.fd for top in self._pending.popitem()[1].open_cgroups])

    def _act(self, pending: _PodTermination, *, kill: bool) -> None:
        """What cannot be signalled is told once, and tried again whenever this is called."""
        for top in pending.open_cgroups:
            try:
                if kill:
                    _kill_cgroup(top.fd)
                else:
                    _signal_cgroup(top.fd, signal.SIGTERM)
                # With those whom they started before they knew.
                top.asked |= _read_processes(top.fd)
            except OSError as error:
                if not pending.failed:
                    pending.failed = True
                    text = f"processes cannot be signalled: {error.strerror}; reason: {pending.reason}"
                    self._tell(pending.pod, EvictionEventReason.FAILED, text)

    def _tell(self, pod: Pod, reason: EvictionEventReason, message: str) -> None:
        self._events.append(EvictionEvent(pod=pod.key, reason=reason, message=message, at_ns=self._clock()))

    def _open(self, pod: Pod) -> tuple[int, ...]:
        """The containers' cgroups that are there, in the hierarchy that identifies them. Never its root."""
        opened = []
        for container in pod.containers:
            parts = [part for part in container.cgroup.split("/") if part]
            if not parts or ".." in parts:
                continue
            try:
                opened.append(os.open(self._hierarchy.primary.joinpath(*parts), _DIRECTORY_FLAGS))
            except FileNotFoundError:
                continue
        return tuple(opened)


def _refusal_reason(fds: Sequence[int]) -> str:
    if not fds:
        return "no cgroup of the pod is there"
    return "the agent itself runs in this pod" if any(os.getpid() in _read_pids(fd) for fd in fds) else ""


def _drop_terminated_containers(pending: _PodTermination) -> None:
    """Forget containers that have left. While one of those who were asked is there, all others are theirs."""
    left = []
    for top in pending.open_cgroups:
        try:
            here = _read_processes(top.fd)
        except OSError:
            left.append(top)
            continue
        if here.isdisjoint(top.asked):
            os.close(top.fd)
        else:
            top.asked |= here
            left.append(top)
    pending.open_cgroups = left


def _read_processes(directory: int) -> set[_Process]:
    """Who is in a cgroup, but for the agent itself. Raises OSError where it cannot be read."""
    return {(pid, _start_ticks(pid)) for pid in _read_pids(directory) if pid != os.getpid()}


def _start_ticks(pid: int) -> int:
    """0 where nobody tells: it went meanwhile, or /proc hides it."""
    try:
        return start_ticks(Path(f"/proc/{pid}/stat").read_bytes()) or 0
    except OSError:
        return 0


def _close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _read_pids(directory: int) -> list[int]:
    """Processes of a cgroup and of all below it now; none once it is removed. Raises OSError."""
    try:
        fd = os.open("cgroup.procs", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        if error.errno in _GONE_ERRNOS:
            return []
        raise
    try:
        text = b"".join(iter(lambda: os.read(fd, 1 << 16), b""))
    except OSError as error:
        if error.errno in _GONE_ERRNOS:
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
            child = os.open(name, _DIRECTORY_FLAGS, dir_fd=directory)
        except OSError as error:
            if error.errno in _GONE_ERRNOS:
                continue
            raise
        try:
            found += _read_pids(child)
        finally:
            os.close(child)
    return found


def _signal_cgroup(directory: int, number: signal.Signals) -> int:
    """Signal every process that is in the cgroup, and how many there were. Raises OSError where that is not allowed."""
    count, listed = 0, _read_pids(directory)
    for start in range(0, len(listed), MAX_PIDFDS):
        held: dict[int, int] = {}
        try:
            for pid in listed[start : start + MAX_PIDFDS]:
                try:
                    held[pid] = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
            # The numbers cannot be given to others now: who is listed is who is held.
            for pid in (held.keys() & set(_read_pids(directory))) - {os.getpid()}:
                try:
                    signal.pidfd_send_signal(held[pid], number)
                except ProcessLookupError:
                    continue
                count += 1
        finally:
            _close_fds(tuple(held.values()))
    return count


def _kill_cgroup(directory: int) -> None:
    """SIGKILL, again while somebody forks faster than it is killed."""
    try:
        fd = os.open("cgroup.kill", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        fd = -1
    try:
        if fd >= 0 and os.getpid() not in _read_pids(directory):
            os.write(fd, b"1")
            return
        for _ in range(MAX_KILL_SWEEPS):
            if not _signal_cgroup(directory, signal.SIGKILL):
                return
    finally:
        if fd >= 0:
            os.close(fd)
