"""Originals of cgroups that were made with values of the agent's already: what they would have had, told before they are there.

Whoever was asked before a container is made (agent/nri) says what its owner wanted. Once the cgroup exists that becomes its
original, before a round reads it: what is in its files then is the agent's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from agent.qrm.knobs import KnobFiles, Original, RawValue, canonical
from agent.qrm.originals import Originals
from agent.qrm.paths import below
from agent.qrm.places import MIGRATE
from agent.qrm.plans import failed
from agent.qrm.promised import Promised
from agent.qrm.restore import key_of
from api.decisions import Decision, Outcome, Status
from api.knobs import Knob
from api.ports import Unavailable, Vanished

SHARES = "cpu.shares"
LONGEST_S = 120.0
"""So long after it was told a cgroup may come into being: a container that is made and never started has none."""
LISTED_S = 20.0
"""So long after it was told a cgroup may be missing in the list of pods: what is slow is the start of the container."""
MOST = 4096
SETTLED_S = 2.0
"""A runtime makes a cgroup, and then writes what it was answered: that is done so soon after."""
MAKING = "the runtime has not written yet what it was told: the next round has its turn"
OTHERWISE = "the kernel shows another value than the one that the runtime was told: look for another plugin of it"


class _Told(NamedTuple):
    at_s: float
    values: Mapping[Knob, str]
    anew: bool
    given: Mapping[Knob, str]
    done: Mapping[Knob, Outcome]


class Foretold:
    """Told from any thread; adopted by the one that writes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._told: dict[str, _Told] = {}
        self._making: dict[str, float] = {}
        self._coming: dict[str, float] = {}
        self._outcomes: list[Outcome] = []
        self.promised = Promised()
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
            self._told = {path: told for path, told in self._told.items() if now_s - told.at_s < LONGEST_S}
            self._making.pop(cgroup, None)
            if values and len(self._told) < MOST:
                self._told[cgroup] = _Told(now_s, values, anew, given or {}, done or {})
                if not anew:
                    self._coming[cgroup] = now_s

    def coming(self, decided: Collection[str], now_s: float) -> frozenset[str]:
        """Those that were made a moment ago and that no round has decided on yet, as far as `decided` says: whoever lists pods
        knows of them a little later, and what they were made with is not to be taken back until then."""
        with self._lock:
            self._coming = {
                cgroup: at_s
                for cgroup, at_s in self._coming.items()
                if cgroup not in decided and now_s - at_s < LISTED_S
            }
            return frozenset(self._coming)

    def pending(self, since_s: float) -> Mapping[str, Mapping[Knob, str]]:
        """What was told since then of those that the runtime had not made yet when it was last looked."""
        with self._lock:
            return {cgroup: told.values for cgroup, told in self._told.items() if told.at_s >= since_s}

    def awaiting(self, decision: Decision) -> Outcome | None:
        """What becomes of a decision on a cgroup that its runtime is about to write to: whatever is there now would be taken
        for its owner's, and what the runtime writes for somebody else's. None for all others."""
        if decision.cgroup not in self._making:
            return None
        return Outcome(decision=decision, status=Status.UNCHANGED, error=MAKING)

    def adopt(self, files: KnobFiles, originals: Originals) -> int:
        """Journal the originals of those that are made by now; how many cgroups that were. Raises Unavailable where the journal
        cannot be written: then they stay told."""
        with self._lock:
            told = dict(self._told)
            self._making = {cgroup: since_s for cgroup, since_s in self._making.items() if cgroup in told}
        done = 0
        for cgroup, one in told.items():
            try:
                cgroup_id = below(files.hierarchy.primary, cgroup).stat(follow_symlinks=False).st_ino
                if not _is_written(files, cgroup, cgroup_id, one):
                    since_s = self._making.setdefault(cgroup, self._clock())
                    if self._clock() < since_s + SETTLED_S:
                        continue
                found = [_original(files, cgroup, cgroup_id, knob, one) for knob in one.values]
            except (OSError, Vanished):
                continue
            except Unavailable:
                found = []  # made otherwise than anybody could know: nothing of it was ours
            new = _journal([entry for entry in found if entry is not None], files, originals, anew=one.anew)
            self._outcomes += [_come(one.done[entry.knob], entry, files) for entry in new if entry.knob in one.done]
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


def _is_written(files: KnobFiles, cgroup: str, cgroup_id: int, one: _Told) -> bool:
    """Whether each knob holds what the runtime was answered. Raises Unavailable and Vanished."""
    return all(
        files.read(cgroup, cgroup_id, knob) == canonical(knob, outcome.decision.value)
        for knob, outcome in one.done.items()
    )


def _journal(found: list[Original], files: KnobFiles, originals: Originals, *, anew: bool) -> list[Original]:
    """Those that were not known."""
    new = [entry for entry in found if anew or originals.find(entry.cgroup, entry.cgroup_id, entry.knob) is None]
    if not new:
        return []
    originals.record(*new, replace={key_of(entry) for entry in new} if anew else ())
    for entry in new:
        with suppress(Unavailable, Vanished):
            originals.hands.note(entry, files.read_raw(entry.cgroup, entry.cgroup_id, entry.knob).texts)
    return new


def _come(told: Outcome, entry: Original, files: KnobFiles) -> Outcome:
    """What was told, with the cgroup that it came to be of and what the kernel shows there."""
    decision = msgspec.structs.replace(told.decision, cgroup_id=entry.cgroup_id)
    try:
        after = files.read(entry.cgroup, entry.cgroup_id, entry.knob)
    except (Unavailable, Vanished) as error:
        return failed(decision, error, before=told.before, clamped_from=told.clamped_from)
    if after == canonical(entry.knob, decision.value):
        return msgspec.structs.replace(told, decision=decision, after=after)
    return msgspec.structs.replace(told, decision=decision, status=Status.MISMATCH, after=after, error=OTHERWISE)


def _original(files: KnobFiles, cgroup: str, cgroup_id: int, knob: Knob, one: _Told) -> Original | None:
    """None where the file holds what the owner wanted: somebody has put it back; or what is not ours."""
    raw, value = files.read_raw(cgroup, cgroup_id, knob), one.values[knob]
    if knob in one.given and files.decode(cgroup, knob, raw) != one.given[knob]:
        return None
    told = {SHARES: f"{value}\n"} if knob is Knob.WEIGHT else files.shown(cgroup, knob, value)
    # What a limit is counted by, or whether memory follows, the owner has not asked for: it is as the kernel made it.
    texts = {**raw.texts, **{file: text for file, text in told.items() if file != MIGRATE}}
    if texts == raw.texts:
        return None
    return Original(
        cgroup=cgroup,
        cgroup_id=cgroup_id,
        knob=knob,
        raw=RawValue(directory_id=raw.directory_id, texts=texts),
    )
