"""What is done to a cgroup once instead of being set: memory given up, page cache dropped, memory moved between NUMA nodes.

The kernel may take its time over it, so one thread does it, one cgroup after another, and a round learns later what came
of it. There is no original and nothing to put back: whoever kills the agent ends the system call and leaves the group with
what it had given up by then. `before` and `after` of an outcome are the bytes that the group used (of a migration: those on
the nodes that it leaves); that the kernel found less than was asked for is a remark and no failure.
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

from agent.hierarchy import Hierarchy
from agent.qrm.knobs import KnobFiles, Refused
from agent.qrm.limits import USE
from agent.qrm.notation import MOST_NODES, number
from agent.qrm.plans import failed
from api.cpus import parse_cpu_list
from api.decisions import Decision, Outcome, Status
from api.knobs import Knob
from api.ports import Unavailable, Vanished

LIMIT_S = 30.0
"""Katalyst gives a container so long to drop its page cache. No further piece is begun after it."""
PIECE_BYTES = 64 << 20
"""So much is asked of the kernel at a time: it cannot be told to stop within one."""
UNDER_WAY = "under way: what came of it follows when it is done"
_MIGRATE_PAGES = {"x86_64": 256, "aarch64": 238}
"""The system call's number."""
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class Once:
    """At most one thing is under way for a cgroup; whoever asks for another meanwhile is told so."""

    def __init__(self, hierarchy: Hierarchy, limit_s: float = LIMIT_S) -> None:
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
        return Outcome(decision=decision, status=Status.UNCHANGED, error=UNDER_WAY)

    def finished(self) -> tuple[Outcome, ...]:
        """What was done since this was last asked."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
            self._busy.discard(found[-1].decision.cgroup)
        return tuple(found)

    def _run(self) -> None:
        # Descriptors are not shared between threads: one may be closed while the other reads.
        files = KnobFiles(self._hierarchy)
        while True:
            self._done.put(carry_out(self._asked.get(), files, self._limit_s))


def carry_out(decision: Decision, files: KnobFiles, limit_s: float = LIMIT_S) -> Outcome:
    """Do it now, and say what it did."""
    before: int | None = None
    work, use = _WORK[decision.knob]
    try:
        before = use(decision, files)
        note = work(decision, files, time.monotonic() + limit_s)
        after = use(decision, files)
    except (Unavailable, Vanished) as error:
        return failed(decision, error, before=None if before is None else str(before))
    except (OSError, ValueError) as error:
        return Outcome(
            decision=decision, status=Status.REFUSED, error=f"{decision.cgroup}: {error}: see the kernel's log"
        )
    return Outcome(decision=decision, status=Status.APPLIED, before=str(before), after=str(after), error=note)


def _reclaim(decision: Decision, files: KnobFiles, deadline_s: float) -> str:
    return _in_pieces(decision, files, deadline_s, str)


def _drop(decision: Decision, files: KnobFiles, deadline_s: float) -> str:
    if files.version == "v1":
        files.act(decision.cgroup, decision.cgroup_id, decision.knob, "0")
        return ""
    try:
        return _in_pieces(decision, files, deadline_s, lambda size: f"{size} swappiness=0")
    except Refused as error:
        if error.code != errno.EINVAL:
            raise
    # Before Linux 6.9 nothing can be said about swapping: without swap there is nothing to say.
    if _swaps():
        raise Unavailable(
            f"{decision.cgroup}: this kernel cannot drop page cache without swapping", "Linux 6.9 or newer, or no swap"
        )
    return _in_pieces(decision, files, deadline_s, str)


def _in_pieces(decision: Decision, files: KnobFiles, deadline_s: float, line: Callable[[int], str]) -> str:
    asked = left = int(decision.value)
    while left > 0:
        piece = min(left, PIECE_BYTES)
        try:
            files.act(decision.cgroup, decision.cgroup_id, decision.knob, line(piece))
        except Refused as error:
            if error.code != errno.EAGAIN:
                raise
            return f"partial: the kernel found less than the {asked} bytes that were asked for"
        left -= piece
        if left > 0 and time.monotonic() >= deadline_s:
            return f"partial: {left} of {asked} bytes were left when the time was over"
    return ""


def _migrate(decision: Decision, files: KnobFiles, deadline_s: float) -> str:
    call = _MIGRATE_PAGES.get(platform.machine())
    if call is None:
        raise Unavailable(
            f"no number of migrate_pages is known for {platform.machine()}", "let the pages be where they are"
        )
    source, target = (_mask(parse_cpu_list(words)) for words in decision.value.split())
    libc = ctypes.CDLL(None, use_errno=True)
    stuck, processes = 0, files.processes(decision.cgroup, decision.cgroup_id)
    for count, pid in enumerate(processes):
        if time.monotonic() >= deadline_s:
            return f"partial: {len(processes) - count} of {len(processes)} processes were left when the time was over"
        result = libc.syscall(call, pid, MOST_NODES + 1, source, target)
        code = ctypes.get_errno()
        if result < 0 and code != errno.ESRCH:
            raise Refused(
                f"{decision.cgroup}: cannot migrate pages of process {pid}: {os.strerror(code)}",
                "name NUMA nodes that have memory and that the process may use",
                code,
            )
        stuck += max(result, 0)
    return f"partial: {stuck} pages could not be moved" if stuck else ""


def _mask(nodes: Iterable[int]) -> ctypes.Array[ctypes.c_ulong]:
    mask = (ctypes.c_ulong * (MOST_NODES // _BITS))()
    for node in nodes:
        mask[node // _BITS] |= 1 << node % _BITS
    return mask


def _used(decision: Decision, files: KnobFiles) -> int:
    return number(files.read_text(decision.cgroup, decision.cgroup_id, "memory", USE[files.version]))


def _on_source(decision: Decision, files: KnobFiles) -> int:
    """Bytes of anonymous memory and page cache on the nodes that are to be left."""
    source = {f"N{node}" for node in parse_cpu_list(decision.value.split()[0])}
    text = files.read_text(decision.cgroup, decision.cgroup_id, "memory", "memory.numa_stat")
    kinds, unit = (
        (("hierarchical_total",), os.sysconf("SC_PAGE_SIZE")) if files.version == "v1" else (("anon", "file"), 1)
    )
    words = [line.split() for line in text.splitlines()]
    pairs = [pair.partition("=") for line in words if line and line[0].partition("=")[0] in kinds for pair in line]
    return sum(number(value) for node, _, value in pairs if node in source) * unit


def _swaps(path: Path = Path("/proc/swaps")) -> bool:
    return len(path.read_text().splitlines()) > 1


_WORK: dict[Knob, tuple[Callable[[Decision, KnobFiles, float], str], Callable[[Decision, KnobFiles], int]]] = {
    Knob.MEMORY_RECLAIM: (_reclaim, _used),
    Knob.DROP_CACHE: (_drop, _used),
    Knob.MIGRATE_PAGES: (_migrate, _on_source),
}
