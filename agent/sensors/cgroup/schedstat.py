"""Measures run-queue latency without BPF: sums of /proc/TID/schedstat per cgroup. Gives total wait and number of
timeslices, no histogram, for threads directly in the requested cgroups. It misses threads that start and end between
two reads and the wait of a thread that is still queued. Costs one read per thread."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from agent.sensors import parsers
from agent.sensors.cgroup.cgroup_files import UNCACHEABLE_FILES
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.kernel_files import DescriptorBudget, KernelFile
from api.interfaces import Unavailable, Vanished
from api.snapshot import RunqLatency
from api.text import cgroup_name_to_bytes

HOST_PID_REMEDY = (
    "let the agent see the host's processes: run it outside of a container, or with the host's PID namespace"
)


class SchedstatRunqLatency:
    """A RunqLatencySource (api.interfaces) of form `schedstat`. If the kernel does not count, every `read` raises."""

    form = "schedstat"
    lost_events = None

    def __init__(self, proc: Path, hierarchy: Hierarchy) -> None:
        self._counting = any(_own_schedstat(proc) or ())
        self._proc, self._root = proc, os.fsencode(hierarchy.primary)
        self._list_name = b"tasks" if "cpu" in hierarchy.v1 else b"cgroup.threads"
        self._hz = os.sysconf("SC_CLK_TCK")
        self._budget = DescriptorBudget()
        self._groups: dict[int, _CgroupSums] = {}

    def read(
        self,
        live: Mapping[int, str],
        cgroup_ids: Collection[int] | None = None,
        *,
        complete: bool = True,  # noqa: ARG002 - without a path there is nothing to read, whatever else exists
    ) -> Mapping[int, RunqLatency]:
        """Return the run-queue latency of the requested live cgroups. Raises Unavailable if none of their threads can
        be read.

        Once read, a cgroup's sums are retained while it exists. A request for all cgroups reads every thread.
        """
        if not self._counting:
            raise Unavailable(f"{self._proc}/self/schedstat has no counts", "use a kernel with CONFIG_SCHED_INFO")
        for cgroup_id in self._groups.keys() - live.keys():
            self._groups.pop(cgroup_id).close()
        waits: dict[int, RunqLatency] = {}
        failures: list[str] = []
        for cgroup_id in live if cgroup_ids is None else live.keys() & cgroup_ids:
            path = live[cgroup_id]
            if cgroup_id not in self._groups:
                keep = self._list_name not in UNCACHEABLE_FILES
                self._groups[cgroup_id] = _CgroupSums(KernelFile(self._budget, self._list_path(path), keep=keep))
            group = self._groups[cgroup_id]
            try:
                text = group.listing.read()
            except Vanished:
                continue
            except OSError as error:
                failures.append(f"{group.listing.name}: {error.strerror}")
                continue
            tids = parsers.task_ids(text)
            if text and not tids:
                failures.append(f"the threads of {path} are in another PID namespace")
                continue
            self._update(group, tids)
            waits[cgroup_id] = RunqLatency(sum_ns=group.sum_ns, count=group.count)
        if failures and not waits:
            raise Unavailable(failures[0], HOST_PID_REMEDY)
        return waits

    def problem(self) -> Unavailable | None:
        """Return None: what cannot be read raises in `read`."""
        return None

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        while self._groups:
            self._groups.popitem()[1].close()

    def _list_path(self, path: str) -> bytes:
        rel = cgroup_name_to_bytes(path).strip(b"/")
        return b"/".join(part for part in (self._root, rel, self._list_name) if part)

    def _update(self, group: _CgroupSums, tids: tuple[int, ...]) -> None:
        now_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * self._hz)
        for tid in group.members.keys() - set(tids):
            group.members.pop(tid).file.close()
        for tid in tids:
            member = group.members.get(tid)
            if member is not None and not self._advance(group, member):
                group.members.pop(tid).file.close()
                member = None  # it ended, and another thread may have its id by now
            if member is None:
                self._admit(group, tid)
        group.read_at_ticks = now_ticks

    def _advance(self, group: _CgroupSums, member: _Thread) -> bool:
        opened = self._budget.opened
        counts = _read_counts(member.file)
        if counts is None:
            return False
        if self._budget.opened != opened and self._start_ticks(member.tid) != member.start_ticks:
            return False
        group.sum_ns += max(counts[0] - member.wait_ns, 0)
        group.count += max(counts[1] - member.slices, 0)
        member.wait_ns, member.slices = counts
        return True

    def _admit(self, group: _CgroupSums, tid: int) -> None:
        start_ticks = self._start_ticks(tid)
        file = KernelFile(self._budget, os.fsencode(self._proc / str(tid) / "schedstat"))
        counts = _read_counts(file)
        if counts is None:
            return  # the thread ended
        group.members[tid] = _Thread(tid, file, start_ticks, *counts)
        started_here = start_ticks is not None and start_ticks >= (group.read_at_ticks or 0)
        if group.read_at_ticks is None or started_here:
            group.sum_ns += counts[0]
            group.count += counts[1]

    def _start_ticks(self, tid: int) -> int | None:
        try:
            return parsers.start_ticks((self._proc / str(tid) / "stat").read_bytes())
        except OSError:
            return None


class _Thread:
    # One thread of a cgroup and its counters at the last read.
    __slots__ = ("file", "slices", "start_ticks", "tid", "wait_ns")

    def __init__(self, tid: int, file: KernelFile, start_ticks: int | None, wait_ns: int, slices: int) -> None:
        self.tid, self.file, self.start_ticks = tid, file, start_ticks
        self.wait_ns, self.slices = wait_ns, slices


class _CgroupSums:
    # Sums over all threads that were ever read in one cgroup.
    __slots__ = ("count", "listing", "members", "read_at_ticks", "sum_ns")

    def __init__(self, listing: KernelFile) -> None:
        self.listing = listing
        self.members: dict[int, _Thread] = {}
        self.sum_ns = self.count = 0
        self.read_at_ticks: int | None = None

    def close(self) -> None:
        self.listing.close()
        for member in self.members.values():
            member.file.close()


def _read_counts(file: KernelFile) -> tuple[int, int] | None:
    # None: the thread ended, or access is denied.
    try:
        counts = parsers.schedstat(file.read())
    except (Vanished, OSError):
        return None
    return counts and counts[1:]


def _own_schedstat(proc: Path) -> tuple[int, int, int] | None:
    try:
        return parsers.schedstat((proc / "self/schedstat").read_bytes())
    except OSError:
        return None
