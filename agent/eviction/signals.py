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

from agent.eviction.eviction_inputs import grace_period_s, termination_wait_ns
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.parsers import start_ticks
from api.eviction import EvictionBlock, EvictionEvent, EvictionEventReason
from api.pod import Pod
from api.units import NS_PER_S

MAX_KILL_SWEEPS = 8
"""Sweeps of one kill over processes that fork meanwhile; the rest is left for the next call."""
REFUSED_RETRY_NS = 60 * NS_PER_S
"""Wait before a pod whose eviction was refused is tried again."""
MAX_PIDFDS = 256
"""Process descriptors that are open at the same time."""
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GONE_ERRNOS = (errno.ENOENT, errno.ENODEV)


_Process = tuple[int, int]
"""PID and start time in ticks since boot, because PIDs are reused."""


class _OpenCgroup(msgspec.Struct):
    """The open cgroup of one container: a new cgroup with the same path is another one."""

    fd: int
    targets: set[_Process]
    """Processes that must leave the cgroup."""


class _PodTermination(msgspec.Struct):
    """The eviction of one pod, with its remaining containers."""

    pod: Pod
    reason: str
    grace_s: float
    started_ns: int
    open_cgroups: list[_OpenCgroup]
    failed: bool = False
    exceeded: bool = False

    def over(self, now_ns: int) -> bool:
        """Return whether the grace is over."""
        return now_ns - self.started_ns >= self.grace_s * NS_PER_S

    def is_overdue(self, now_ns: int) -> bool:
        """Return whether the pod exceeded its deadline."""
        return now_ns - self.started_ns >= termination_wait_ns(self.grace_s)


class SignalEvictor:
    """A PodEvictor (agent.eviction.runner) by signals to the processes of a pod on this machine."""

    def __init__(self, hierarchy: Hierarchy, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._hierarchy, self._clock = hierarchy, clock
        self._pending: dict[str, _PodTermination] = {}
        self._refused: dict[str, int] = {}
        """Refused pods, and until when they are not tried again."""
        self._events: list[EvictionEvent] = []

    @property
    def terminating(self) -> frozenset[str]:
        """Pods that received SIGTERM and may still exist."""
        return frozenset(self._pending)

    @property
    def stuck(self) -> frozenset[str]:
        """Pods that cannot be signalled, or that exceeded their deadline."""
        left = (key for key, each in self._pending.items() if each.failed or each.exceeded)
        return frozenset((*left, *self._refused))

    @property
    def blocked(self) -> Mapping[str, EvictionBlock]:
        """Empty: no signal is refused for now."""
        return {}

    def cancel(self, pod: str, reason: str) -> None:
        """Do nothing: no pod is blocked."""

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        """Send SIGTERM to all processes of the pod. For a pod under eviction only an earlier deadline has an effect."""
        now_ns, grace_s = self._clock(), grace_period_s(pod, grace_s)
        earlier = self._pending.get(pod.key)
        if earlier is not None:
            from_start_s = (now_ns - earlier.started_ns) / NS_PER_S + grace_s
            if from_start_s < earlier.grace_s:
                earlier.grace_s, earlier.reason = from_start_s, reason
            return
        fds: tuple[int, ...] = ()
        try:
            fds = self._open(pod)
            refusal = _refusal_reason(fds)
            cgroups = [_OpenCgroup(fd, _read_processes(fd)) for fd in fds]
        except OSError as error:
            refusal = f"{error.filename}: {error.strerror}"
        if refusal:
            _close_fds(fds)
            self._refused[pod.key] = now_ns + REFUSED_RETRY_NS
            self._tell(pod, EvictionEventReason.FAILED, f"{refusal}; reason: {reason}")
            return
        pending = _PodTermination(pod=pod, reason=reason, grace_s=grace_s, started_ns=now_ns, open_cgroups=cgroups)
        self._pending[pod.key] = pending
        self._tell(pod, EvictionEventReason.CREATED, f"Successfully create eviction; reason: {reason}")
        self._act(pending, kill=grace_s <= 0)

    def outcomes(self) -> Sequence[EvictionEvent]:
        """Return the events since the last call. Kills pods whose grace is over, so it must be called in every cycle."""
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
                since_s = (now_ns - pending.started_ns) / NS_PER_S
                text = f"processes remain {since_s:.0f} s after SIGTERM, grace period {pending.grace_s:g} s"
                self._tell(pending.pod, EvictionEventReason.EXCEEDED, f"{text}; reason: {pending.reason}")
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all descriptors; pods under eviction receive no SIGKILL any more. Idempotent."""
        while self._pending:
            _close_fds([cgroup.fd for cgroup in self._pending.popitem()[1].open_cgroups])

    def _act(self, pending: _PodTermination, *, kill: bool) -> None:
        """Signal all remaining containers. A failure is recorded once, and retried with every call."""
        for cgroup in pending.open_cgroups:
            try:
                if kill:
                    _kill_cgroup(cgroup.fd)
                else:
                    _signal_cgroup(cgroup.fd, signal.SIGTERM)
                # Including processes that forked before they received the signal.
                cgroup.targets |= _read_processes(cgroup.fd)
            except OSError as error:
                if not pending.failed:
                    pending.failed = True
                    text = f"processes cannot be signalled: {error.strerror}; reason: {pending.reason}"
                    self._tell(pending.pod, EvictionEventReason.FAILED, text)

    def _tell(self, pod: Pod, reason: EvictionEventReason, message: str) -> None:
        self._events.append(EvictionEvent(pod=pod.key, reason=reason, message=message, at_ns=self._clock()))

    def _open(self, pod: Pod) -> tuple[int, ...]:
        """Open the existing cgroups of the containers, in the hierarchy that identifies them; never its root."""
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
    """Close containers without a signalled process. While one remains, all processes of the cgroup are targets."""
    left = []
    for cgroup in pending.open_cgroups:
        try:
            here = _read_processes(cgroup.fd)
        except OSError:
            left.append(cgroup)
            continue
        if here.isdisjoint(cgroup.targets):
            os.close(cgroup.fd)
        else:
            cgroup.targets |= here
            left.append(cgroup)
    pending.open_cgroups = left


def _read_processes(directory: int) -> set[_Process]:
    """Return the processes of a cgroup without the agent itself. Raises OSError if it cannot be read."""
    return {(pid, _start_ticks(pid)) for pid in _read_pids(directory) if pid != os.getpid()}


def _start_ticks(pid: int) -> int:
    """Return 0 if the process has ended, or /proc hides it (hidepid)."""
    try:
        return start_ticks(Path(f"/proc/{pid}/stat").read_bytes()) or 0
    except OSError:
        return 0


def _close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _read_pids(directory: int) -> list[int]:
    """Return the processes of a cgroup and its descendants; none once it is removed. Raises OSError."""
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
    # cgroup.procs shows 0 for a process of another PID namespace, which has no PID here to signal.
    pids = [int(word) for word in text.split() if int(word) > 1]
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
            pids += _read_pids(child)
        finally:
            os.close(child)
    return pids


def _signal_cgroup(directory: int, number: signal.Signals) -> int:
    """Signal every process of the cgroup and return their number. Raises OSError if that is not permitted."""
    count, listed = 0, _read_pids(directory)
    for start in range(0, len(listed), MAX_PIDFDS):
        held: dict[int, int] = {}
        try:
            for pid in listed[start : start + MAX_PIDFDS]:
                try:
                    held[pid] = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
            # An open pidfd keeps its PID from being reused: a PID that is listed again is the same process.
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
    """Send SIGKILL to every process of the cgroup, repeatedly if processes fork meanwhile."""
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
