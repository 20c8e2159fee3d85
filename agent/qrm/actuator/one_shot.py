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

from agent.qrm.actuator.plan import USAGE_FILES
from agent.qrm.actuator.restore import failure_outcome
from agent.qrm.actuator.writer import KernelRefused, KnobWriter
from agent.qrm.knobs.notation import MAX_NUMA_NODES, parse_number
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.cpu import parse_cpu_list
from api.decision import Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable, Vanished
from api.knobs import Knob
from api.text import quote

TIME_LIMIT_S = 30.0
"""Katalyst's limit for dropping the page cache of a container. No further chunk is started after it."""
CHUNK_BYTES = 64 << 20
"""Size of one reclaim request: the kernel cannot be interrupted within one."""
IN_PROGRESS = "in progress: the outcome is reported when the operation has finished"
_MIGRATE_PAGES = {"x86_64": 256, "aarch64": 238}
"""System call numbers."""
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class OneShotWorker:
    """Queue and thread of one-shot operations; at most one operation per cgroup is in progress."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._requests: SimpleQueue[Decision] = SimpleQueue()
        self._done: SimpleQueue[Outcome] = SimpleQueue()
        self._busy: set[str] = set()
        self._thread: threading.Thread | None = None

    def submit(self, decision: Decision) -> Outcome:
        """Start the operation, unless one is in progress for this cgroup; the outcome says that it is in progress."""
        if decision.cgroup not in self._busy:
            self._busy.add(decision.cgroup)
            self._requests.put(decision)
            if self._thread is None:
                # A daemon thread, so that a write that blocks in the kernel does not keep the agent from exiting.
                self._thread = threading.Thread(target=self._run, name="once", daemon=True)
                self._thread.start()
        return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, error=IN_PROGRESS)

    def finished(self) -> tuple[Outcome, ...]:
        """Return the outcomes of operations that finished since the last call."""
        outcomes = []
        while not self._done.empty():
            outcomes.append(self._done.get())
            self._busy.discard(outcomes[-1].decision.cgroup)
        return tuple(outcomes)

    def _run(self) -> None:
        # The thread has descriptors of its own: the cycle may close one of its own while this thread reads.
        files: KnobWriter | None = None
        while True:
            decision = self._requests.get()
            try:
                files = files or KnobWriter(self._hierarchy)
                outcome = run_one_shot(decision, files)
            except Exception as error:  # noqa: BLE001 - without an outcome the cgroup would be busy for ever
                outcome = _unexpected_failure(decision, error)
            self._done.put(outcome)


def _unexpected_failure(decision: Decision, error: Exception) -> Outcome:
    if isinstance(error, Unavailable):
        return failure_outcome(decision, error)
    return Outcome(
        decision=decision,
        status=OutcomeStatus.REFUSED,
        error=f"{decision.cgroup}: {decision.knob.value} failed with an unexpected error: {quote(error)}: report it as a bug",
    )


def run_one_shot(decision: Decision, files: KnobWriter, limit_s: float = TIME_LIMIT_S) -> Outcome:
    """Run the operation and return its outcome."""
    before: int | None = None
    operation, measure = _OPERATIONS[decision.knob]
    try:
        before = measure(decision, files)
        note = operation(decision, files, time.monotonic() + limit_s)
        after = measure(decision, files)
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
        files.write_one_shot(decision.cgroup, decision.cgroup_id, decision.knob, "0")
        return ""
    try:
        return _reclaim_in_chunks(decision, files, deadline_s, lambda size: f"{size} swappiness=0")
    except KernelRefused as error:
        if error.code != errno.EINVAL:
            raise
    # Before Linux 6.9 memory.reclaim takes no swappiness; without swap none is needed.
    if _has_swap():
        raise Unavailable(
            f"{decision.cgroup}: this kernel cannot drop page cache without swapping",
            "use Linux 6.9 or newer, or disable swap",
        )
    return _reclaim_in_chunks(decision, files, deadline_s, str)


def _reclaim_in_chunks(decision: Decision, files: KnobWriter, deadline_s: float, line: Callable[[int], str]) -> str:
    requested = left = int(decision.value)
    while left > 0:
        chunk = min(left, CHUNK_BYTES)
        try:
            files.write_one_shot(decision.cgroup, decision.cgroup_id, decision.knob, line(chunk))
        except KernelRefused as error:
            if error.code != errno.EAGAIN:
                raise
            return f"partial: the kernel could reclaim less than the requested {requested} bytes"
        left -= chunk
        if left > 0 and time.monotonic() >= deadline_s:
            return f"partial: {left} of {requested} bytes were left at the time limit"
    return ""


def _migrate(decision: Decision, files: KnobWriter, deadline_s: float) -> str:
    call = _MIGRATE_PAGES.get(platform.machine())
    if call is None:
        raise Unavailable(
            f"the system call number of migrate_pages is unknown on {platform.machine()}",
            "do not configure page migration",
        )
    source, target = (_node_mask(parse_cpu_list(words)) for words in decision.value.split())
    libc = ctypes.CDLL(None, use_errno=True)
    remaining, processes = 0, files.processes(decision.cgroup, decision.cgroup_id)
    for done, pid in enumerate(processes):
        if time.monotonic() >= deadline_s:
            return f"partial: {len(processes) - done} of {len(processes)} processes were left at the time limit"
        result = libc.syscall(call, pid, MAX_NUMA_NODES + 1, source, target)
        code = ctypes.get_errno()
        if result < 0 and code != errno.ESRCH:
            raise KernelRefused(
                f"{decision.cgroup}: cannot migrate pages of process {pid}: {os.strerror(code)}",
                "name NUMA nodes that have memory and that the process may use",
                code,
            )
        remaining += max(result, 0)
    return f"partial: {remaining} pages could not be moved" if remaining else ""


def _node_mask(nodes: Iterable[int]) -> ctypes.Array[ctypes.c_ulong]:
    mask = (ctypes.c_ulong * (MAX_NUMA_NODES // _BITS))()
    for node in nodes:
        mask[node // _BITS] |= 1 << node % _BITS
    return mask


def _used_bytes(decision: Decision, files: KnobWriter) -> int:
    return parse_number(files.read_text(decision.cgroup, decision.cgroup_id, "memory", USAGE_FILES[files.version]))


def _bytes_on_source(decision: Decision, files: KnobWriter) -> int:
    """Return the bytes of anonymous memory and page cache on the source nodes."""
    source = {f"N{node}" for node in parse_cpu_list(decision.value.split()[0])}
    text = files.read_text(decision.cgroup, decision.cgroup_id, "memory", "memory.numa_stat")
    kinds, unit = (
        (("hierarchical_total",), os.sysconf("SC_PAGE_SIZE")) if files.version == "v1" else (("anon", "file"), 1)
    )
    words = [line.split() for line in text.splitlines()]
    pairs = [pair.partition("=") for line in words if line and line[0].partition("=")[0] in kinds for pair in line]
    return sum(parse_number(value) for node, _, value in pairs if node in source) * unit


def _has_swap() -> bool:
    return len(Path("/proc/swaps").read_text().splitlines()) > 1


_OPERATIONS: dict[Knob, tuple[Callable[[Decision, KnobWriter, float], str], Callable[[Decision, KnobWriter], int]]] = {
    Knob.MEMORY_RECLAIM: (_reclaim, _used_bytes),
    Knob.DROP_CACHE: (_drop_cache, _used_bytes),
    Knob.MIGRATE_PAGES: (_migrate, _bytes_on_source),
}
