"""Hands changed values over from an agent that ends to its successor, and restores them if no successor starts in time.
The journals of originals stay in the state directory. `handover.json` beside them has the deadline. No process remains on the
node between two agents, so the next start of an agent's container enforces the deadline: a start that fails after the deadline
restores all values before it exits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from agent import components
from agent.config.config import AgentConfig
from agent.journal.log import CycleLog
from agent.qrm.actuator.originals import OriginalsJournal, restore_all
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.qrm.actuator.thread_slices import FILE_NAME as SLICE_ORIGINALS
from agent.qrm.actuator.thread_slices import open_thread_slices
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import Hierarchy, detect_hierarchy
from api.decision import ActMode, Cycle, Outcome
from api.interfaces import CycleSink, Unavailable
from common.disk_writer import DiskWriter
from common.files import read_small_file
from common.state_file import StateFileDamaged, decode_state, encode_state, replace_file

if TYPE_CHECKING:
    from kube.client import KubeClient

log = logging.getLogger("dioptase")
FILE_NAME = "handover.json"
VERSION = 1
MAX_FILE_BYTES = 1 << 16
DEADLINE_S = 300.0
"""Time for a successor to start. The kubelet waits at most as long between two starts of a failing container (pkg/kubelet/
kubelet.go, MaxContainerBackOff, since 1.33 MaxCrashLoopBackOff): values are restored at the latest after twice this time."""
RECORD_TIMEOUT_S = 15.0
"""Time that the end of the agent waits for the file, a part of its termination grace period of 60 s."""
PROC, SYS = Path("/proc"), Path("/sys")


class HandoverRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file."""

    version: int
    boot_id: str
    deadline_s: float
    """Deadline in seconds of CLOCK_BOOTTIME, which continues while the machine is suspended and which no program can set."""
    checksum: str = ""


def boot_time_s() -> float:
    """Return the seconds since the boot, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HandoverFile:
    """The file in a locked state directory."""

    def __init__(self, state_dir: Path, boot_id: str, clock: Callable[[], float] = boot_time_s) -> None:
        self.path, self._boot_id, self._clock = state_dir / FILE_NAME, boot_id, clock

    def write(self) -> None:
        """Save that values are handed over from now on. Raises Unavailable."""
        record = HandoverRecord(version=VERSION, boot_id=self._boot_id, deadline_s=self._clock() + DEADLINE_S)
        try:
            replace_file(self.path, encode_state(record))
        except OSError as error:
            raise Unavailable(
                f"the handover cannot be recorded in {self.path}: {error.strerror}",
                f"free space in {self.path.parent} and make it writable",
            ) from None

    def remaining_s(self) -> float | None:
        """Return the seconds until the deadline, negative after it; None without a handover in this boot.

        If the file cannot be read, the deadline counts as over, so that the values are restored.
        """
        try:
            record = decode_state(read_small_file(self.path, MAX_FILE_BYTES), HandoverRecord, VERSION)
        except FileNotFoundError:
            return None
        except (OSError, StateFileDamaged) as error:
            log.warning("%s cannot be read: %s. The handover counts as expired", self.path, error)
            return -1.0
        return record.deadline_s - self._clock() if record.boot_id == self._boot_id else None

    def remove(self) -> None:
        """Delete the file: a successor has adopted the values, or they are restored. A failure is logged."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be deleted: %s", self.path, error.strerror)


class OwnDaemonSet(msgspec.Struct, frozen=True, kw_only=True):
    """The DaemonSet that the agent's pod belongs to."""

    key: str
    """`NAMESPACE/NAME`."""
    node_state_dir: str
    """Path of the state directory on the node, which the pod template has to mount."""


class JournalledParts(Protocol):
    """The parts of an agent that own changed values and their journals."""

    @property
    def act(self) -> ActMode: ...
    @property
    def originals(self) -> OriginalsJournal | None: ...
    @property
    def files(self) -> KnobWriter: ...
    @property
    def hierarchy(self) -> Hierarchy: ...
    @property
    def state(self) -> components.StateLocation: ...


async def find_obstacle(own: OwnDaemonSet | None, client: KubeClient | None, node: str) -> str:
    """Return why no agent will follow on this node; empty if one will. `client` is None without an API server."""
    if own is None or client is None:
        return "The agent has no DaemonSet, or no API server."
    from agent.reporter.successor import find_successor_obstacle  # noqa: PLC0415 - the client of the API server

    return await find_successor_obstacle(client, own.key, node, own.node_state_dir)


async def hand_over(
    obstacle_of_successor: Callable[[], Awaitable[str]],
    parts: JournalledParts,
    latest: Cycle | None,
    journal: CycleSink,
    late_outcomes: tuple[Outcome, ...] = (),
) -> bool:
    """Leave all values in force for the next agent on this node, if one will follow; return whether they are left.

    `obstacle_of_successor` returns why none will follow; if it fails, none is expected. `late_outcomes` are outcomes of the
    runtime since the last cycle.
    """
    if parts.originals is None:
        return False
    try:
        obstacle = await obstacle_of_successor() or await _record_handover(HandoverFile(*parts.state))
    except Exception as error:
        # This process ends: the values must be restored also after a defect in what looks for a successor.
        log.exception("The search for a successor failed")
        obstacle = f"{type(error).__name__}: {error}"
    if obstacle:
        log.info("No agent follows on this node, so all values are restored. %s", obstacle)
        return False
    if latest is not None:
        end = msgspec.structs.replace(latest, trigger="end", advice=None, runtime_outcomes=late_outcomes, outcomes=())
        journal.publish(end)
    log.info(
        "Handed over %d changed values: the next agent on this node continues with them", len(parts.originals.entries())
    )
    return True


async def _record_handover(file: HandoverFile) -> str:
    """Write the file; return why that failed, empty if it did not. In a thread of its own, because a disk that hangs must hold
    up neither the event loop nor the end of the process."""
    disk, failures = DiskWriter("handover"), list[Unavailable]()

    def write() -> None:
        try:
            file.write()
        except Unavailable as error:
            failures.append(error)

    disk.submit(FILE_NAME, write)
    if not await asyncio.to_thread(disk.close, RECORD_TIMEOUT_S):
        return f"{file.path} could not be written within {RECORD_TIMEOUT_S:g} s: check the disk of {file.path.parent}"
    # Without a writable state directory the successor would run dry.
    return "".join(f"{error.reason}: {error.remedy}" for error in failures)


def restore_earlier_values(requested: ActMode, parts: JournalledParts) -> tuple[str, ...]:
    """Restore the values that an earlier agent left changed, unless this agent was started to act; return startup warnings.

    An agent that acts continues with these values, and restores them or hands them over when it ends. One that was started to
    act and cannot restores only values that were handed over to it. An agent without the lock of the state directory restores
    nothing, because the agent that holds the lock may be acting.
    """
    if parts.originals is None:
        return ()
    count, handover = len(parts.originals.entries()), HandoverFile(*parts.state)
    handed_over = handover.remaining_s() is not None
    if requested is ActMode.ON and (parts.act is ActMode.ON or not handed_over):
        remedy = "This agent continues with them and restores them when it ends."
        if handed_over:
            log.info("The previous agent handed over %d changed values. This agent continues with them", count)
            return ()
        if parts.act is not ActMode.ON:
            remedy = (
                "This agent runs as with --act dry-run and does not restore them: stop it and run `dioptase reset`."
            )
        return (f"An earlier agent left {count} values changed. {remedy}",) if count else ()
    remaining, warnings = restore_journals(parts.originals, parts.files, parts.hierarchy, parts.state)
    if not remaining:
        handover.remove()
    if remaining is None:
        return warnings
    if not remaining:
        return (
            *warnings,
            "Restored the values that an earlier agent left changed, because this agent does not act.",
        )
    text = f"{remaining} values that an earlier agent left changed could not be restored"
    return (*warnings, f"{text}: stop this agent and run `dioptase reset`.")


def end_handover(parts: JournalledParts) -> None:
    """Delete the record of a handover to this agent. Called when everything is open: a start that fails before restores the
    values after the deadline."""
    if parts.originals is not None and parts.act is ActMode.ON:
        HandoverFile(*parts.state).remove()


def restore_journals(
    originals: OriginalsJournal, files: KnobWriter, hierarchy: Hierarchy, state: components.StateLocation
) -> tuple[int | None, tuple[str, ...]]:
    """Restore what the journals of the state directory hold; return the number of values that could not be restored, None if
    there were no journals, and warnings. The caller holds the lock of the directory."""
    slices = node_knobs = None
    warnings: tuple[str, ...] = ()
    if (state[0] / SLICE_ORIGINALS).exists():
        slices, warnings = open_thread_slices(ActMode.ON, hierarchy, state, enabled=True)
    # Groups in resctrl alone are no reason to restore: an agent with another state directory may have created them.
    if any((state[0] / name).exists() for name in (components.NODE_ORIGINALS, components.OOM_ORIGINALS)):
        node_knobs, more = components.open_node_knobs(AgentConfig(), ActMode.ON, hierarchy, state, SYS)
        warnings += more
    others = tuple(part for part in (slices, node_knobs) if part is not None)
    if not originals.entries() and not others:
        return None, warnings
    return restore_all(originals, files, others, None, CycleLog()), warnings


def restore_expired_handover(state_dir: Path, proc: Path = PROC, clock: Callable[[], float] = boot_time_s) -> None:
    """Restore the values that an earlier agent handed over, if the deadline has passed. Called when an agent cannot start.
    Never raises, so that the caller reports why the agent cannot start."""
    try:
        if not (state_dir / FILE_NAME).exists():
            return
        boot_id = read_boot_id(proc)
        originals = open_originals(state_dir, boot_id)
        with closing(originals):
            file = HandoverFile(state_dir, boot_id, clock)
            remaining_s = file.remaining_s()
            if remaining_s is not None and remaining_s > 0:
                log.warning(
                    "Values of the previous agent stay in force for %.0f s more: correct the error below, or run "
                    "`dioptase reset`", remaining_s,
                )  # fmt: skip
                return
            _restore_and_remove(file, originals, proc, (state_dir, boot_id))
    except (Unavailable, OSError) as error:
        log.warning("Values of the previous agent could not be restored: %s", error)


def end_before_first_cycle(
    state_dir: Path, *, is_followed: bool, proc: Path = PROC, clock: Callable[[], float] = boot_time_s
) -> None:
    """End an agent that was stopped while it started: restore the values that an earlier agent left changed, or hand them over
    again if an agent of the same DaemonSet may follow (`is_followed`). Never raises.

    The handover that this agent may have taken already is over, so that nothing else would restore them.
    """
    try:
        if not state_dir.is_dir():
            return
        boot_id = read_boot_id(proc)
        with closing(open_originals(state_dir, boot_id)) as originals:
            file, state = HandoverFile(state_dir, boot_id, clock), (state_dir, boot_id)
            if not is_followed:
                _restore_and_remove(file, originals, proc, state)
            elif file.remaining_s() is None and _has_journals(originals, state):
                file.write()
    except (Unavailable, OSError) as error:
        log.warning("Values of the previous agent could not be restored: %s", error)


def _has_journals(originals: OriginalsJournal, state: components.StateLocation) -> bool:
    names = (SLICE_ORIGINALS, components.NODE_ORIGINALS, components.OOM_ORIGINALS)
    return bool(originals.entries()) or any((state[0] / name).exists() for name in names)


def _restore_and_remove(
    file: HandoverFile, originals: OriginalsJournal, proc: Path, state: components.StateLocation
) -> None:
    """Restore what the journals hold, and remove the handover if nothing is left. Raises Unavailable."""
    hierarchy = detect_hierarchy(proc)
    with closing(KnobWriter(hierarchy)) as files:
        unrestored, warnings = restore_journals(originals, files, hierarchy, state)
    for warning in warnings:
        log.warning("%s", warning)
    if not unrestored:
        file.remove()
