"""Caches what each decided knob held last, and which knobs the kernel offers for each cgroup.
An unchanged decision is answered from the cache for at most `RECHECK_NS`, then the knob is read again; re-reads
are spread over that time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from zlib import crc32

import msgspec

from agent.qrm.actuator.plan import STEPPED_KNOBS
from agent.qrm.actuator.writer import KnobWriter, OriginalValue
from agent.qrm.knobs.knob_files import CHANGED_BY, GROUP_OF, KNOB_SPECS, LIST_KNOBS, ONE_SHOT_FILES, UNSUPPORTED
from api.decision import Decision, Outcome, OutcomeStatus
from api.knobs import Knob

RECHECK_NS = 4_000_000_000
"""With a round every second a knob that drifted is found within 5 s."""
CacheKey = tuple[str, int, Knob]


class CachedValue(msgspec.Struct, frozen=True):
    """How a knob was found or left."""

    asked: str
    value: str
    clamped_from: str | None
    due_ns: int


class RecheckCache:
    """The decided knobs of the last round."""

    def __init__(self) -> None:
        self._last: dict[CacheKey, CachedValue] = {}

    def recall(self, decisions: Sequence[Decision], now_ns: int | None) -> Mapping[int, Outcome]:
        """Outcomes of those decisions that need no look at the kernel, by their index. Without a time there are none.

        A decision that is new makes those be looked at again whose limits depend on its own: others of its group in its
        cgroup, and every other list of the same kind.
        """
        keys = [_key(decision) for decision in decisions]
        self._last = {key: self._last[key] for key in keys if key in self._last}
        if now_ns is None:
            return {}
        fresh = {
            _scope(decision)
            for decision, key in zip(decisions, keys, strict=True)
            if key not in self._last or self._last[key].asked != decision.value
        }
        return {
            index: _unchanged(decision, self._last[keys[index]])
            for index, decision in enumerate(decisions)
            if _scope(decision) not in fresh and now_ns < self._last[keys[index]].due_ns
        }

    def unchanged_outcome(self, decision: Decision) -> Outcome | None:
        """The outcome of a decision whose knob was found just as it had been left for the same one; None where limits
        may have moved meanwhile."""
        last = self._last.get(_key(decision))
        if last is None or last.asked != decision.value or last.clamped_from is not None or decision.knob in LIST_KNOBS:
            return None
        return _unchanged(decision, last)

    def drifted(self, decision: Decision, before: str, value: str) -> bool:
        """Whether the knob has changed since it was found or left as the same decision wanted it."""
        last = self._last.get(_key(decision))
        return last is not None and last.value == value != before

    def note(self, asked: Mapping[int, str], outcomes: Mapping[int, Outcome], now_ns: int | None) -> None:
        """Remember what these outcomes found or left, by the value that was asked for before it was bounded."""
        written = {_scope(outcome.decision) for outcome in outcomes.values() if outcome.status is OutcomeStatus.APPLIED}
        for index, outcome in outcomes.items():
            key, value = _key(outcome.decision), _stable_value(outcome)
            moved = (
                outcome.status is OutcomeStatus.UNCHANGED
                and key[2] not in LIST_KNOBS
                and _scope(outcome.decision) in written
            )
            if value is None or moved:
                self._last.pop(key, None)
                continue
            wait_ns = RECHECK_NS if key in self._last else RECHECK_NS * (crc32(key[0].encode()) % 1024) // 1024
            due_ns = 0 if now_ns is None else now_ns + wait_ns
            self._last[key] = CachedValue(asked[index], value, outcome.clamped_from, due_ns)

    def forget(self, of: Decision | OriginalValue, knob: Knob) -> None:
        """Have that knob of the same cgroup looked at again."""
        self._last.pop((of.cgroup, of.cgroup_id, knob), None)


def _key(decision: Decision) -> CacheKey:
    return decision.cgroup, decision.cgroup_id, decision.knob


def _scope(decision: Decision) -> tuple[str, int]:
    knob = CHANGED_BY.get(decision.knob, decision.knob)
    # What is done once is in no group, and never remembered.
    return "" if knob in LIST_KNOBS else decision.cgroup, GROUP_OF.get(knob, -1)


def _stable_value(outcome: Outcome) -> str | None:
    """The value that nothing more has to be done about; None where the next round has to look again."""
    stepping = outcome.decision.knob in STEPPED_KNOBS and outcome.clamped_from is not None
    if outcome.status not in (OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED) or outcome.error or stepping:
        return None
    return outcome.after


def _unchanged(decision: Decision, last: CachedValue) -> Outcome:
    if last.clamped_from is not None:
        decision = msgspec.structs.replace(decision, value=last.value)
    return Outcome(
        decision=decision,
        status=OutcomeStatus.UNCHANGED,
        before=last.value,
        after=last.value,
        clamped_from=last.clamped_from,
    )


RECHECK_ALL_CYCLES = 60
"""Rounds after which every cgroup is asked again,"""
RECHECK_LACKING_CYCLES = 5
"""and those that lack a knob which others have."""


class AvailableKnobs:
    """What was found when it was last asked."""

    def __init__(self, files: KnobWriter) -> None:
        self._files = files
        self._asked = 0
        self._known: dict[str, frozenset[Knob]] = {}

    def of(self, cgroups: Collection[str]) -> Mapping[str, frozenset[Knob]]:
        """The knobs of each of these cgroups."""
        self._asked += 1
        known = {} if self._asked % RECHECK_ALL_CYCLES == 0 else self._known
        most = max(map(len, known.values()), default=0)
        again = self._asked % RECHECK_LACKING_CYCLES == 0
        self._known = {
            cgroup: known[cgroup]
            if cgroup in known and (len(known[cgroup]) == most or not again)
            else self._available(cgroup)
            for cgroup in cgroups
        }
        return self._known

    def _available(self, cgroup: str) -> frozenset[Knob]:
        possible = (knob for knob in (*KNOB_SPECS, *ONE_SHOT_FILES) if (knob, self._files.version) not in UNSUPPORTED)
        return frozenset(knob for knob in possible if self._files.available(knob, cgroup))
