"""Holds the originals and the reserved CPUs of containers that the runtime creates with values of the agent.
The NRI plugin reports them before the cgroup exists; once it exists, they are journalled before a cycle reads its
files. Reserved CPUs are merged into the CPU state, so that no cycle assigns them to other containers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.plan import failure_outcome
from agent.qrm.actuator.restore import key_of
from agent.qrm.actuator.writer import KnobWriter, OriginalValue, RawValue, cgroup_directory
from agent.qrm.cpuset.state import CpusetEntry, CpusetState
from agent.qrm.knobs.knob_files import MEMORY_MIGRATE_FILE, canonical
from api.decision import Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable, Vanished
from api.knobs import Knob

MAX_RESERVATION_S = 60.0
"""So long after it was made a promise waits for the next round."""
MAX_RESERVATIONS = 4096


class _Reservation(NamedTuple):
    at_s: float
    entries: Mapping[str, CpusetEntry]
    """By name of the container."""


class CpuReservations:
    """Made from any thread, for the one that judges rounds. From then on it is in the state, and held as what is there is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, _Reservation] = {}

    def make(self, uid: str, entries: Mapping[str, CpusetEntry], now_s: float) -> None:
        """What the containers of this pod have."""
        with self._lock:
            self._made = {pod: made for pod, made in self._made.items() if now_s - made.at_s < MAX_RESERVATION_S}
            if entries and (uid in self._made or len(self._made) < MAX_RESERVATIONS):
                before = self._made[uid].entries if uid in self._made else {}
                self._made[uid] = _Reservation(now_s, {**entries, **before})

    def kept(self, state: CpusetState) -> CpusetState:
        """The state with what was promised and is not in it yet: a container that has a place keeps that one."""
        with self._lock:
            made = dict(self._made)
        return _with_reservations(state, made) if made else state

    def taken(self, state: CpusetState) -> None:
        """This state, which was `kept`, is known to everybody from now on."""
        with self._lock:
            self._made = {
                uid: made for uid, made in self._made.items() if not made.entries.keys() <= state.pod(uid).keys()
            }


def _with_reservations(state: CpusetState, made: Mapping[str, _Reservation]) -> CpusetState:
    entries = dict(state.pod_entries)
    for uid, promise in made.items():
        if not promise.entries.keys() <= state.pod(uid).keys():
            entries[uid] = {**promise.entries, **state.pod(uid)}
    return msgspec.structs.replace(state, pod_entries=entries)


SHARES_FILE = "cpu.shares"
MAX_PENDING_S = 120.0
"""So long after it was told a cgroup may come into being: a container that is made and never started has none."""
UNLISTED_GRACE_S = 20.0
"""So long after it was told a cgroup may be missing in the list of pods: what is slow is the start of the container."""
MAX_PENDING = 4096
WRITE_GRACE_S = 2.0
"""A runtime makes a cgroup, and then writes what it was answered: that is done so soon after."""
NOT_WRITTEN_YET = "the runtime has not written yet what it was told: the next round has its turn"
WRITTEN_OTHERWISE = (
    "the kernel shows another value than the one that the runtime was told: look for another plugin of it"
)


class _PendingCgroup(NamedTuple):
    at_s: float
    values: Mapping[Knob, str]
    anew: bool
    given: Mapping[Knob, str]
    done: Mapping[Knob, Outcome]


class PendingOriginals:
    """Told from any thread; adopted by the one that writes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._told: dict[str, _PendingCgroup] = {}
        self._making: dict[str, float] = {}
        self._coming: dict[str, float] = {}
        self._outcomes: list[Outcome] = []
        self.promised = CpuReservations()
        """CPUs that they were made with."""

    def tell(
        self,
        cgroup: str,
        values: Mapping[Knob, str],
        now_s: float,
        *,
        anew: bool = False,
        given: Mapping[Knob, str] | None = None,
        done: Mapping[Knob, Outcome] | None = None,
    ) -> None:
        """What the owner of this cgroup wanted of each knob that is made with another value: in version 2's notation, but of
        the weight the very shares, of which several are one weight. `anew` if he wants it only now, and the cgroup is there.
        Where it was told long ago, what it was made with is `given`: a knob that holds something else is its owner's again.
        What will have been `done` once the runtime has written it is told as an outcome then."""
        with self._lock:
            self._told = {path: told for path, told in self._told.items() if now_s - told.at_s < MAX_PENDING_S}
            self._making.pop(cgroup, None)
            if values and len(self._told) < MAX_PENDING:
                self._told[cgroup] = _PendingCgroup(now_s, values, anew, given or {}, done or {})
                if not anew:
                    self._coming[cgroup] = now_s

    def coming(self, decided: Collection[str], now_s: float) -> frozenset[str]:
        """Those that were made a moment ago and that no round has decided on yet, as far as `decided` says: whoever lists pods
        knows of them a little later, and what they were made with is not to be taken back until then."""
        with self._lock:
            self._coming = {
                cgroup: at_s
                for cgroup, at_s in self._coming.items()
                if cgroup not in decided and now_s - at_s < UNLISTED_GRACE_S
            }
            return frozenset(self._coming)

    def pending(self, since_s: float) -> Mapping[str, Mapping[Knob, str]]:
        """What was told since then of those that the runtime had not made yet when it was last looked."""
        with self._lock:
            return {cgroup: told.values for cgroup, told in self._told.items() if told.at_s >= since_s}

    def outcome_if_unwritten(self, decision: Decision) -> Outcome | None:
        """What becomes of a decision on a cgroup that its runtime is about to write to: whatever is there now would be taken
        for its owner's, and what the runtime writes for somebody else's. None for all others."""
        if decision.cgroup not in self._making:
            return None
        return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, error=NOT_WRITTEN_YET)

    def adopt(self, files: KnobWriter, originals: OriginalsJournal) -> int:
        """Journal the originals of those that are made by now; how many cgroups that were. Raises Unavailable where the journal
        cannot be written: then they stay told."""
        with self._lock:
            told = dict(self._told)
            self._making = {cgroup: since_s for cgroup, since_s in self._making.items() if cgroup in told}
        done = 0
        for cgroup, one in told.items():
            try:
                cgroup_id = cgroup_directory(files.hierarchy.primary, cgroup).stat(follow_symlinks=False).st_ino
                if not _is_written(files, cgroup, cgroup_id, one):
                    since_s = self._making.setdefault(cgroup, self._clock())
                    if self._clock() < since_s + WRITE_GRACE_S:
                        continue
                found = [_pending_original(files, cgroup, cgroup_id, knob, one) for knob in one.values]
            except (OSError, Vanished):
                continue
            except Unavailable:
                found = []  # made otherwise than anybody could know: nothing of it was ours
            new = _record_new([entry for entry in found if entry is not None], files, originals, anew=one.anew)
            self._outcomes += [
                _adopted_outcome(one.done[entry.knob], entry, files) for entry in new if entry.knob in one.done
            ]
            done += 1
            self._making.pop(cgroup, None)
            with self._lock:
                if self._told.get(cgroup) is one:
                    del self._told[cgroup]
        return done

    def outcomes(self) -> tuple[Outcome, ...]:
        """What came of those that were adopted since this was last asked; by the thread that adopts."""
        come, self._outcomes = tuple(self._outcomes), []
        return come


def _is_written(files: KnobWriter, cgroup: str, cgroup_id: int, one: _PendingCgroup) -> bool:
    """Whether each knob holds what the runtime was answered. Raises Unavailable and Vanished."""
    return all(
        files.read(cgroup, cgroup_id, knob) == canonical(knob, outcome.decision.value)
        for knob, outcome in one.done.items()
    )


def _record_new(
    found: list[OriginalValue], files: KnobWriter, originals: OriginalsJournal, *, anew: bool
) -> list[OriginalValue]:
    """Those that were not known."""
    new = [entry for entry in found if anew or originals.find(entry.cgroup, entry.cgroup_id, entry.knob) is None]
    if not new:
        return []
    originals.record(*new, replace={key_of(entry) for entry in new} if anew else ())
    for entry in new:
        with suppress(Unavailable, Vanished):
            originals.last_written.note(entry, files.read_raw(entry.cgroup, entry.cgroup_id, entry.knob).texts)
    return new


def _adopted_outcome(told: Outcome, entry: OriginalValue, files: KnobWriter) -> Outcome:
    """What was told, with the cgroup that it came to be of and what the kernel shows there."""
    decision = msgspec.structs.replace(told.decision, cgroup_id=entry.cgroup_id)
    try:
        after = files.read(entry.cgroup, entry.cgroup_id, entry.knob)
    except (Unavailable, Vanished) as error:
        return failure_outcome(decision, error, before=told.before, clamped_from=told.clamped_from)
    if after == canonical(entry.knob, decision.value):
        return msgspec.structs.replace(told, decision=decision, after=after)
    return msgspec.structs.replace(
        told, decision=decision, status=OutcomeStatus.MISMATCH, after=after, error=WRITTEN_OTHERWISE
    )


def _pending_original(
    files: KnobWriter, cgroup: str, cgroup_id: int, knob: Knob, one: _PendingCgroup
) -> OriginalValue | None:
    """None where the file holds what the owner wanted: somebody has put it back; or what is not ours."""
    raw, value = files.read_raw(cgroup, cgroup_id, knob), one.values[knob]
    if knob in one.given and files.decode(cgroup, knob, raw) != one.given[knob]:
        return None
    told = {SHARES_FILE: f"{value}\n"} if knob is Knob.WEIGHT else files.shown(cgroup, knob, value)
    # What a limit is counted by, or whether memory follows, the owner has not asked for: it is as the kernel made it.
    texts = {**raw.texts, **{file: text for file, text in told.items() if file != MEMORY_MIGRATE_FILE}}
    if texts == raw.texts:
        return None
    return OriginalValue(
        cgroup=cgroup,
        cgroup_id=cgroup_id,
        knob=knob,
        raw=RawValue(directory_id=raw.directory_id, texts=texts),
    )
