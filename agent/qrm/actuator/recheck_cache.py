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
from agent.sensors.cgroup.pod_cgroup_paths import is_qos_cgroup
from api.decision import Decision, Outcome, OutcomeStatus
from api.knobs import Knob

RECHECK_NS = 4_000_000_000
"""With one cycle per second, a drifted knob is found within 5 s."""
CacheKey = tuple[str, int, Knob]


class CachedValue(msgspec.Struct, frozen=True):
    """Last known value of a knob, and the value that was requested."""

    requested: str
    value: str
    clamped_from: str | None
    due_ns: int


class RecheckCache:
    """Values of the knobs decided in the last cycle."""

    def __init__(self) -> None:
        self._last: dict[CacheKey, CachedValue] = {}

    def recall(self, decisions: Sequence[Decision], now_ns: int | None) -> Mapping[int, Outcome]:
        """Return by index the outcomes of decisions that need no reading; none without a time. A new decision
        invalidates those whose limits depend on it: knobs of the same group in its cgroup, and all lists of the same
        kind."""
        keys = [_key(decision) for decision in decisions]
        self._last = {key: self._last[key] for key in keys if key in self._last}
        if now_ns is None:
            return {}
        changed_scopes = {
            _scope(decision)
            for decision, key in zip(decisions, keys, strict=True)
            if key not in self._last or self._last[key].requested != decision.value
        }
        return {
            index: _unchanged(decision, self._last[keys[index]])
            for index, decision in enumerate(decisions)
            if _scope(decision) not in changed_scopes and now_ns < self._last[keys[index]].due_ns
        }

    def unchanged_outcome(self, decision: Decision) -> Outcome | None:
        """Return the outcome of a decision whose knob still holds the value last written for it. None where limits
        may have changed meanwhile."""
        last = self._last.get(_key(decision))
        if (
            last is None
            or last.requested != decision.value
            or last.clamped_from is not None
            or decision.knob in LIST_KNOBS
        ):
            return None
        return _unchanged(decision, last)

    def drifted(self, decision: Decision, before: str, value: str) -> bool:
        """Return whether the knob lost the value that the same decision had set."""
        last = self._last.get(_key(decision))
        return last is not None and last.value == value != before

    def note(self, requested: Mapping[int, str], outcomes: Mapping[int, Outcome], now_ns: int | None) -> None:
        """Store the values of these outcomes, by the value that was requested before clamping."""
        written = {_scope(outcome.decision) for outcome in outcomes.values() if outcome.status is OutcomeStatus.APPLIED}
        for index, outcome in outcomes.items():
            key, value = _key(outcome.decision), _stable_value(outcome)
            affected = (
                outcome.status is OutcomeStatus.UNCHANGED
                and key[2] not in LIST_KNOBS
                and _scope(outcome.decision) in written
            )
            if value is None or affected:
                self._last.pop(key, None)
                continue
            interval_ns = RECHECK_NS if key in self._last else RECHECK_NS * (crc32(key[0].encode()) % 1024) // 1024
            # The kubelet writes the weights of its classes every minute, and systemd clears cpu.idle for it.
            cached = now_ns is not None and not (key[2] is Knob.IDLE and is_qos_cgroup(key[0]))
            due_ns = now_ns + interval_ns if now_ns is not None and cached else 0
            self._last[key] = CachedValue(requested[index], value, outcome.clamped_from, due_ns)

    def forget(self, of: Decision | OriginalValue, knob: Knob) -> None:
        """Drop the cached value, so that the knob is read in the next cycle."""
        self._last.pop((of.cgroup, of.cgroup_id, knob), None)


def _key(decision: Decision) -> CacheKey:
    return decision.cgroup, decision.cgroup_id, decision.knob


def _scope(decision: Decision) -> tuple[str, int]:
    knob = CHANGED_BY.get(decision.knob, decision.knob)
    # One-shot operations are in no group and never cached.
    return "" if knob in LIST_KNOBS else decision.cgroup, GROUP_OF.get(knob, -1)


def _stable_value(outcome: Outcome) -> str | None:
    """Return the value of a finished decision; None if the next cycle has to read the knob."""
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
"""Cycles after which every cgroup is probed again."""
RECHECK_LACKING_CYCLES = 5
"""Cycles after which cgroups that lack a knob of others are probed again."""


class AvailableKnobs:
    """Cache of the knobs that the kernel offers for each cgroup."""

    def __init__(self, files: KnobWriter, every: frozenset[Knob] = frozenset()) -> None:
        """`every` are knobs that every cgroup has, because they belong to its threads."""
        self._files, self._every = files, every
        self._calls = 0
        self._knobs: dict[str, frozenset[Knob]] = {}

    def of(self, cgroups: Collection[str]) -> Mapping[str, frozenset[Knob]]:
        """Return the knobs of each of these cgroups."""
        self._calls += 1
        previous = {} if self._calls % RECHECK_ALL_CYCLES == 0 else self._knobs
        max_count = max(map(len, previous.values()), default=0)
        recheck_lacking = self._calls % RECHECK_LACKING_CYCLES == 0
        self._knobs = {
            cgroup: previous[cgroup]
            if cgroup in previous and (len(previous[cgroup]) == max_count or not recheck_lacking)
            else self._available(cgroup)
            for cgroup in cgroups
        }
        return self._knobs

    def _available(self, cgroup: str) -> frozenset[Knob]:
        possible = (knob for knob in (*KNOB_SPECS, *ONE_SHOT_FILES) if (knob, self._files.version) not in UNSUPPORTED)
        return self._every.union(knob for knob in possible if self._files.available(knob, cgroup))
