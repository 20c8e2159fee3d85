"""What was last found in each decided knob, so that one that is decided anew as it was is not read in every round.

Who asks for the same as before is told so from memory for `RECHECK_NS` at most; then the knob is read again, and what
has drifted is written again. Re-reading is spread over that time, so that it does not fall on one round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import msgspec

from agent.qrm.knobs import Original
from agent.qrm.limits import STEPPED
from agent.qrm.restore import CHANGED_BY, GROUP_OF, LISTS
from api.decisions import Decision, Outcome, Status
from api.knobs import Knob

RECHECK_NS = 4_000_000_000
"""With a round every second a knob that drifted is found within 5 s."""
SeenKey = tuple[str, int, Knob]


class Last(msgspec.Struct, frozen=True):
    """How a knob was found or left."""

    asked: str
    value: str
    clamped_from: str | None
    due_ns: int


class Seen:
    """The decided knobs of the last round."""

    def __init__(self) -> None:
        self._last: dict[SeenKey, Last] = {}

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

    def as_left(self, decision: Decision) -> Outcome | None:
        """The outcome of a decision whose knob was found just as it had been left for the same one; None where limits
        may have moved meanwhile."""
        last = self._last.get(_key(decision))
        if last is None or last.asked != decision.value or last.clamped_from is not None or decision.knob in LISTS:
            return None
        return _unchanged(decision, last)

    def drifted(self, decision: Decision, before: str, value: str) -> bool:
        """Whether the knob has changed since it was found or left as the same decision wanted it."""
        last = self._last.get(_key(decision))
        return last is not None and last.value == value != before

    def note(self, asked: Mapping[int, str], outcomes: Mapping[int, Outcome], now_ns: int | None) -> None:
        """Remember what these outcomes found or left, by the value that was asked for before it was bounded."""
        written = {_scope(outcome.decision) for outcome in outcomes.values() if outcome.status is Status.APPLIED}
        for index, outcome in outcomes.items():
            key, value = _key(outcome.decision), _settled(outcome)
            moved = outcome.status is Status.UNCHANGED and key[2] not in LISTS and _scope(outcome.decision) in written
            if value is None or moved:
                self._last.pop(key, None)
                continue
            wait_ns = RECHECK_NS if key in self._last else RECHECK_NS * (crc32(key[0].encode()) % 1024) // 1024
            due_ns = 0 if now_ns is None else now_ns + wait_ns
            self._last[key] = Last(asked[index], value, outcome.clamped_from, due_ns)

    def forget(self, of: Decision | Original, knob: Knob) -> None:
        """Have that knob of the same cgroup looked at again."""
        self._last.pop((of.cgroup, of.cgroup_id, knob), None)


def _key(decision: Decision) -> SeenKey:
    return decision.cgroup, decision.cgroup_id, decision.knob


def _scope(decision: Decision) -> tuple[str, int]:
    knob = CHANGED_BY.get(decision.knob, decision.knob)
    # What is done once is in no group, and never remembered.
    return "" if knob in LISTS else decision.cgroup, GROUP_OF.get(knob, -1)


def _settled(outcome: Outcome) -> str | None:
    """The value that nothing more has to be done about; None where the next round has to look again."""
    stepping = outcome.decision.knob in STEPPED and outcome.clamped_from is not None
    if outcome.status not in (Status.APPLIED, Status.UNCHANGED) or outcome.error or stepping:
        return None
    return outcome.after


def _unchanged(decision: Decision, last: Last) -> Outcome:
    if last.clamped_from is not None:
        decision = msgspec.structs.replace(decision, value=last.value)
    return Outcome(
        decision=decision,
        status=Status.UNCHANGED,
        before=last.value,
        after=last.value,
        clamped_from=last.clamped_from,
    )
