"""Holds the originals and the reserved CPUs of containers that the runtime creates with values of the agent.
The NRI plugin adds them before the cgroup exists; once it exists, they are journalled before a cycle reads its files.
Reserved CPUs are merged into the CPU state, so that no cycle assigns them to other containers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.restore import failure_outcome, key_of
from agent.qrm.actuator.writer import KnobWriter, OriginalValue, RawValue, cgroup_directory
from agent.qrm.cpuset.state import CpusetEntry, CpusetState
from agent.qrm.knobs.knob_files import MEMORY_LIMIT_FILE, MEMORY_MIGRATE_FILE, MEMSW_LIMIT_FILE, canonical
from api.decision import Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable, Vanished
from api.knobs import Knob

MAX_RESERVATION_S = 60.0
"""A reservation that no cycle has taken over expires after this time."""
MAX_RESERVATIONS = 4096


class _Reservation(NamedTuple):
    at_s: float
    entries: Mapping[str, CpusetEntry]
    """By container name."""


class CpuReservations:
    """CPUs of new containers, added from any thread, until a cycle has them in its state."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reservations: dict[str, _Reservation] = {}

    def reserve(self, uid: str, entries: Mapping[str, CpusetEntry], now_s: float) -> None:
        """Reserve the CPUs of these containers of a pod; a container that has a reservation keeps it."""
        with self._lock:
            self._reservations = {
                pod: reservation
                for pod, reservation in self._reservations.items()
                if now_s - reservation.at_s < MAX_RESERVATION_S
            }
            if entries and (uid in self._reservations or len(self._reservations) < MAX_RESERVATIONS):
                before = self._reservations[uid].entries if uid in self._reservations else {}
                self._reservations[uid] = _Reservation(now_s, {**entries, **before})

    def merge_into(self, state: CpusetState) -> CpusetState:
        """Return the state with the reservations it lacks; a container that has an entry keeps it."""
        with self._lock:
            reservations = dict(self._reservations)
        missing = {
            uid: new.entries for uid, new in reservations.items() if not new.entries.keys() <= state.pod(uid).keys()
        }
        if not missing:
            return state
        merged = {uid: {**entries, **state.pod(uid)} for uid, entries in missing.items()}
        return msgspec.structs.replace(state, pod_entries={**state.pod_entries, **merged})

    def drop_merged(self, state: CpusetState) -> None:
        """Drop the reservations that this state contains."""
        with self._lock:
            self._reservations = {
                uid: reservation
                for uid, reservation in self._reservations.items()
                if not reservation.entries.keys() <= state.pod(uid).keys()
            }


SHARES_FILE = "cpu.shares"
MAX_PENDING_S = 120.0
"""A pending cgroup that does not appear within this time is dropped: its container was created and never started."""
UNLISTED_GRACE_S = 20.0
"""A new cgroup may be missing in the pod list for this time, because starting a container takes long."""
MAX_PENDING = 4096
WRITE_GRACE_S = 2.0
"""A runtime writes the values of a new cgroup within this time after creating it."""
NOT_WRITTEN_YET = "the runtime has not written its values yet: the next cycle applies the decision"
WRITTEN_OTHERWISE = "the kernel shows another value than the runtime received: look for another plugin of the runtime"


class _PendingCgroup(NamedTuple):
    """Arguments of `PendingOriginals.add`."""

    at_s: float
    originals: Mapping[Knob, str]
    existing: bool
    given: Mapping[Knob, str]
    outcomes: Mapping[Knob, Outcome]


class PendingOriginals:
    """Originals of cgroups to be created, added from any thread and journalled by the thread of the cycle."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._pending: dict[str, _PendingCgroup] = {}
        self._unwritten: dict[str, float] = {}
        self._unlisted: dict[str, float] = {}
        self._outcomes: list[Outcome] = []
        self.reservations = CpuReservations()

    def add(
        self,
        cgroup: str,
        originals: Mapping[Knob, str],
        now_s: float,
        *,
        existing: bool = False,
        given: Mapping[Knob, str] | None = None,
        outcomes: Mapping[Knob, Outcome] | None = None,
    ) -> None:
        """Add the owner's values of knobs that the runtime sets to other values. Values are in version 2 notation; a
        weight is in cpu.shares, because several share counts are one weight. `existing` means that the owner changes
        a cgroup that exists. `given` are values that an earlier agent set at the creation: a knob that holds another
        value belongs to its owner again. `outcomes` are reported once the runtime has written."""
        with self._lock:
            self._pending = {
                path: pending for path, pending in self._pending.items() if now_s - pending.at_s < MAX_PENDING_S
            }
            self._unwritten.pop(cgroup, None)
            if originals and len(self._pending) < MAX_PENDING:
                self._pending[cgroup] = _PendingCgroup(now_s, originals, existing, given or {}, outcomes or {})
                if not existing:
                    self._unlisted[cgroup] = now_s

    def unlisted(self, decided: Collection[str], now_s: float) -> frozenset[str]:
        """Return new cgroups without a decision so far: the pod list is late, so they must not be restored yet."""
        with self._lock:
            self._unlisted = {
                cgroup: at_s
                for cgroup, at_s in self._unlisted.items()
                if cgroup not in decided and now_s - at_s < UNLISTED_GRACE_S
            }
            return frozenset(self._unlisted)

    def pending(self, since_s: float) -> Mapping[str, Mapping[Knob, str]]:
        """Return the originals added since then whose cgroups the runtime has not created yet."""
        with self._lock:
            return {cgroup: pending.originals for cgroup, pending in self._pending.items() if pending.at_s >= since_s}

    def outcome_if_unwritten(self, decision: Decision) -> Outcome | None:
        """Return an outcome that defers the decision if the runtime is about to write to the cgroup; None otherwise.
        The present values would be mistaken for the owner's, and those of the runtime for external modifications."""
        if decision.cgroup not in self._unwritten:
            return None
        return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, error=NOT_WRITTEN_YET)

    def adopt(self, files: KnobWriter, journal: OriginalsJournal) -> int:
        """Journal the originals of cgroups that exist by now; return their number. Raises Unavailable if the journal
        cannot be written; they stay pending then."""
        with self._lock:
            pending_cgroups = dict(self._pending)
            self._unwritten = {
                cgroup: since_s for cgroup, since_s in self._unwritten.items() if cgroup in pending_cgroups
            }
        count = 0
        for cgroup, pending in pending_cgroups.items():
            try:
                cgroup_id = cgroup_directory(files.hierarchy.primary, cgroup).stat(follow_symlinks=False).st_ino
                if not _is_written(files, cgroup, cgroup_id, pending):
                    since_s = self._unwritten.setdefault(cgroup, self._clock())
                    if self._clock() < since_s + WRITE_GRACE_S:
                        continue
                entries = [_original(files, cgroup, cgroup_id, knob, pending) for knob in pending.originals]
            except (OSError, Vanished):
                continue
            except Unavailable:
                entries = []  # the cgroup has other files than expected: no value in it is the agent's
            changed = [entry for entry in entries if entry is not None]
            changed += _coupled_swap_limits(changed, files)
            recorded = _record_new(changed, files, journal, pending.existing)
            self._outcomes += [
                _adopted_outcome(pending.outcomes[entry.knob], entry, files)
                for entry in recorded
                if entry.knob in pending.outcomes
            ]
            count += 1
            self._unwritten.pop(cgroup, None)
            with self._lock:
                if self._pending.get(cgroup) is pending:
                    del self._pending[cgroup]
        return count

    def outcomes(self) -> tuple[Outcome, ...]:
        """Return the outcomes of cgroups adopted since the last call; for the thread that adopts."""
        outcomes, self._outcomes = tuple(self._outcomes), []
        return outcomes


def _is_written(files: KnobWriter, cgroup: str, cgroup_id: int, pending: _PendingCgroup) -> bool:
    """Return whether each knob holds the value that the runtime was given. Raises Unavailable and Vanished."""
    return all(
        files.read(cgroup, cgroup_id, knob) == canonical(knob, outcome.decision.value)
        for knob, outcome in pending.outcomes.items()
    )


def _record_new(
    entries: Sequence[OriginalValue], files: KnobWriter, journal: OriginalsJournal, replace: bool
) -> list[OriginalValue]:
    new = [entry for entry in entries if replace or journal.find(entry.cgroup, entry.cgroup_id, entry.knob) is None]
    if not new:
        return []
    journal.record(*new, replace={key_of(entry) for entry in new} if replace else ())
    for entry in new:
        with suppress(Unavailable, Vanished):
            journal.last_written.record(entry, files.read_raw(entry.cgroup, entry.cgroup_id, entry.knob).texts)
    return new


def _adopted_outcome(outcome: Outcome, entry: OriginalValue, files: KnobWriter) -> Outcome:
    """Return the outcome with the id of the new cgroup and the value that the kernel shows there."""
    decision = msgspec.structs.replace(outcome.decision, cgroup_id=entry.cgroup_id)
    try:
        after = files.read(entry.cgroup, entry.cgroup_id, entry.knob)
    except (Unavailable, Vanished) as error:
        return failure_outcome(decision, error, before=outcome.before, clamped_from=outcome.clamped_from)
    if after == canonical(entry.knob, decision.value):
        return msgspec.structs.replace(outcome, decision=decision, after=after)
    return msgspec.structs.replace(
        outcome, decision=decision, status=OutcomeStatus.MISMATCH, after=after, error=WRITTEN_OTHERWISE
    )


def _coupled_swap_limits(entries: Sequence[OriginalValue], files: KnobWriter) -> list[OriginalValue]:
    """Return originals of the limits of memory and swap that the runtime sets together with a memory limit from NRI.

    containerd sets both to the same value (containerd/nri, pkg/runtime-tools/generate/generate.go). On version 1 the kernel
    refuses a memory limit above the limit of both: without this original the memory limit could not be restored.
    """
    coupled = list[OriginalValue]()
    for entry in entries if files.version == "v1" else ():
        limit = entry.raw.texts.get(MEMORY_LIMIT_FILE) if entry.knob is Knob.MEMORY_MAX else None
        if limit is None:
            continue
        with suppress(Unavailable, Vanished):  # Without swap accounting there is no such file.
            raw = files.read_raw(entry.cgroup, entry.cgroup_id, Knob.SWAP_MAX)
            present = files.read_raw(entry.cgroup, entry.cgroup_id, Knob.MEMORY_MAX).texts[MEMORY_LIMIT_FILE]
            if raw.texts[MEMSW_LIMIT_FILE] == present:
                texts = {**raw.texts, MEMSW_LIMIT_FILE: limit}
                raw = RawValue(directory_id=raw.directory_id, texts=texts)
                coupled.append(msgspec.structs.replace(entry, knob=Knob.SWAP_MAX, raw=raw))
    return coupled


def _original(
    files: KnobWriter, cgroup: str, cgroup_id: int, knob: Knob, pending: _PendingCgroup
) -> OriginalValue | None:
    """Return the journal entry; None if the knob holds the owner's value, or one that the agent did not set."""
    raw, value = files.read_raw(cgroup, cgroup_id, knob), pending.originals[knob]
    if knob in pending.given and files.decode(cgroup, knob, raw) != pending.given[knob]:
        return None
    owner_texts = {SHARES_FILE: f"{value}\n"} if knob is Knob.WEIGHT else files.texts_after_write(cgroup, knob, value)
    # The owner sets no period and no memory migration flag: those stay as the kernel created them.
    texts = {**raw.texts, **{file: text for file, text in owner_texts.items() if file != MEMORY_MIGRATE_FILE}}
    if texts == raw.texts:
        return None
    return OriginalValue(
        cgroup=cgroup, cgroup_id=cgroup_id, knob=knob, raw=RawValue(directory_id=raw.directory_id, texts=texts)
    )
