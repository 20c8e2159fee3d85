"""Runs one-shot operations on cgroups in a thread: reclaim memory, drop page cache, migrate pages.
They may block in the kernel, so a later cycle reports the outcome. There is no original to restore. `before` and
`after` of an outcome are bytes used by the cgroup, or for a migration bytes on the source nodes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue

from agent.qrm.actuator.plan import USAGE_FILES, failure_outcome
from agent.qrm.actuator.writer import KernelRefused, KnobWriter
from agent.qrm.knobs.notation import MAX_NUMA_NODES, parse_number
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.cpu import parse_cpu_list
from api.decision import Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable, Vanished
from api.knobs import Knob

TIME_LIMIT_S = 30.0
"""Katalyst gives a container so long to drop its page cache. No further piece is begun after it."""
CHUNK_BYTES = 64 << 20
"""So much is asked of the kernel at a time: it cannot be told to stop within one."""
IN_PROGRESS = "under way: what came of it follows when it is done"
_MIGRATE_PAGES = {"x86_64": 256, "aarch64": 238}
"""The system call's number."""
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class OneShotWorker:
    """At most one thing is under way for a cgroup; whoever asks for another meanwhile is told so."""

    def __init__(self, hierarchy: Hierarchy, limit_s: float = TIME_LIMIT_S) -> None:
        self._hierarchy, self._limit_s = hierarchy, limit_s
        self._asked: SimpleQueue[Decision] = SimpleQueue()
        self._done: SimpleQueue[Outcome] = SimpleQueue()
        self._busy: set[str] = set()
        self._thread: threading.Thread | None = None

    def submit(self, decision: Decision) -> Outcome:
        """Have it done. The outcome says only that it is under way."""
        if decision.cgroup not in self._busy:
            self._busy.add(decision.cgroup)
            self._asked.put(decision)
            if self._thread is None:
                # It must not keep an agent alive whose write the kernel holds up.
                self._thread = threading.Thread(target=self._run, name="once", daemon=True)
                self._thread.start()
        return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, error=IN_PROGRESS)

    def finished(self) -> tuple[Outcome, ...]:
        """What was done since this was last asked."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
            self._busy.discard(found[-1].decision.cgroup)
        return tuple(found)

    def _run(self) -> None:
        # Descriptors are not shared between threads: one may be closed while the other reads.
        files = KnobWriter(self._hierarchy)
        while True:
            self._done.put(run_one_shot(self._asked.get(), files, self._limit_s))


def run_one_shot(decision: Decision, files: KnobWriter, limit_s: float = TIME_LIMIT_S) -> Outcome:
    """Do it now, and say what it did."""
    before: int | None = None
    work, use = _OPERATIONS[decision.knob]
    try:
        before = use(decision, files)
        note = work(decision, files, time.monotonic() + limit_s)
        after = use(decision, files)
    except (Unavailable, Vanished) as error:
        return failure_outcome(decision, error, before=None if before is None else str(before))
    except (OSError, ValueError) as error:
        return Outcome(
            decision=decision, status=OutcomeStatus.REFUSED, error=f"{decision.cgroup}: {error}: see the kernel's log"
        )
    return Outcome(decision=decision, status=OutcomeStatus.APPLIED, before=str(before), after=str(after), error=note)


def _reclaim(decision: Decision, files: KnobWriter, deadline_s: float) -> str:
    return _reclaim_in_chunks(decision, files, deadline_s, str)


def _drop_cache(decision: Decision, files: KnobWriter, deadline_s: float) -> str:
    if files.version == "v1":
        files.act(decision.cgroup, decision.cgroup_id, decision.knob, "0")
        return ""
    try:
        return _reclaim_in_chunks(decision, files, deadline_s, lambda size: f"{size} swappiness=0")
    except KernelRefused as error:
        if error.code != errno.EINVAL:
            raise
    # Before Linux 6.9 nothing can be said about swapping: without swap there is nothing to say.
    if _has_swap():
        raise Unavailable(
            f"{decision.cgroup}: this kernel cannot drop page cache without swapping", "Linux 6.9 or newer, or no swap"
        )
    return _reclaim_in_chunks(decision, files, deadline_s, str)


def _reclaim_in_chunks(decision: Decision, files: KnobWriter, deadline_s: float, line: Callable[[int], str]) -> str:
    asked = left = int(decision.value)
    while left > 0:
        piece = min(left, CHUNK_BYTES)
        try:
            files.act(decision.cgroup, decision.cgroup_id, decision.knob, line(piece))
        except KernelRefused as error:
            if error.code != errno.EAGAIN:
                raise
            return f"partial: the kernel found less than the {asked} bytes that were asked for"
        left -= piece
        if left > 0 and time.monotonic() >= deadline_s:
            return f"partial: {left} of {asked} bytes were left when the time was over"
    return ""


def _migrate(decision: Decision, files: KnobWriter, deadline_s: float) -> str:
    call = _MIGRATE_PAGES.get(platform.machine())
    if call is None:
        raise Unavailable(
            f"no number of migrate_pages is known for {platform.machine()}", "let the pages be where they are"
        )
    source, target = (_node_mask(parse_cpu_list(words)) for words in decision.value.split())
    libc = ctypes.CDLL(None, use_errno=True)
    stuck, processes = 0, files.processes(decision.cgroup, decision.cgroup_id)
    for count, pid in enumerate(processes):
        if time.monotonic() >= deadline_s:
            return f"partial: {len(processes) - count} of {len(processes)} processes were left when the time was over"
        result = libc.syscall(call, pid, MAX_NUMA_NODES + 1, source, target)
        code = ctypes.get_errno()
        if result < 0 and code != errno.ESRCH:
            raise KernelRefused(
                f"{decision.cgroup}: cannot migrate pages of process {pid}: {os.strerror(code)}",
                "name NUMA nodes that have memory and that the process may use",
                code,
            )
        stuck += max(result, 0)
    return f"partial: {stuck} pages could not be moved" if stuck else ""


def _node_mask(nodes: Iterable[int]) -> ctypes.Array[ctypes.c_ulong]:
    mask = (ctypes.c_ulong * (MAX_NUMA_NODES // _BITS))()
    for node in nodes:
        mask[node // _BITS] |= 1 << node % _BITS
    return mask


def _used_bytes(decision: Decision, files: KnobWriter) -> int:
    return parse_number(files.read_text(decision.cgroup, decision.cgroup_id, "memory", USAGE_FILES[files.version]))


def _bytes_on_source(decision: Decision, files: KnobWriter) -> int:
    """Bytes of anonymous memory and page cache on the nodes that are to be left."""
    source = {f"N{node}" for node in parse_cpu_list(decision.value.split()[0])}
    text = files.read_text(decision.cgroup, decision.cgroup_id, "memory", "memory.numa_stat")
    kinds, unit = (
        (("hierarchical_total",), os.sysconf("SC_PAGE_SIZE")) if files.version == "v1" else (("anon", "file"), 1)
    )
    words = [line.split() for line in text.splitlines()]
    pairs = [pair.partition("=") for line in words if line and line[0].partition("=")[0] in kinds for pair in line]
    return sum(parse_number(value) for node, _, value in pairs if node in source) * unit


def _has_swap(path: Path = Path("/proc/swaps")) -> bool:
    return len(path.read_text().splitlines()) > 1


_OPERATIONS: dict[Knob, tuple[Callable[[Decision, KnobWriter, float], str], Callable[[Decision, KnobWriter], int]]] = {
    Knob.MEMORY_RECLAIM: (_reclaim, _used_bytes),
    Knob.DROP_CACHE: (_drop_cache, _used_bytes),
    Knob.MIGRATE_PAGES: (_migrate, _bytes_on_source),
}
