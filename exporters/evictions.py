"""What the eviction manager judged, for metrics and for the eye: thresholds, conditions, victims. Pure.

Nothing of it is there where no eviction plugin is configured. A threshold that could not be judged has no numbers, never a
zero; how many there are of them is a number of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from api.catalogue import NS_PER_S
from api.decisions import Round
from api.evictions import Evictions, Held, KillReason, Met, Threshold
from exporters.points import Family, Labels, points

LEVELS = {Met.NOT_MET: 0, Met.SOFT: 1, Met.HARD: 2}
NOT_JUDGED = frozenset(("input_missing", "plugin_failed"))
"""Rules of thresholds that could not be judged (agent/eviction/judgement.py)."""


class ThresholdView(msgspec.Struct, frozen=True, kw_only=True):
    """What one plugin looked at, and how it judged it."""

    plugin: str
    scope: str
    subject: str
    met: str
    value: float | None
    observed: float | None
    operator: str
    """How `observed` relates to `value` when it is met."""
    judged: bool
    """False where an input was missing or the plugin failed."""
    text: str
    rule: str
    inputs: Mapping[str, float | int | str | None]
    met_s: float | None
    """For so long it has been met without a break."""
    tolerance_s: float
    dry_run: bool


class ConditionView(msgspec.Struct, frozen=True, kw_only=True):
    """What the node shows so that the scheduler keeps away."""

    name: str
    kind: str
    effects: tuple[str, ...]
    plugin: str
    age_s: float
    last_met_s: float
    """How long ago its threshold was met last."""


class VictimView(msgspec.Struct, frozen=True, kw_only=True):
    """One pod that has to leave in this round, would have to, or is only told."""

    pod: str
    plugin: str
    scope: str
    text: str
    forced: bool
    grace_s: float | None
    notify: bool
    dry_run: bool


class EvictionView(msgspec.Struct, frozen=True, kw_only=True):
    """The eviction manager's answer for one round."""

    thresholds: tuple[ThresholdView, ...]
    """Those that are met first, then those that are judged."""
    conditions: tuple[ConditionView, ...] = ()
    victims: tuple[VictimView, ...] = ()
    waiting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    """Pods that were asked to leave, and are still here."""
    held: Mapping[str, str] = {}
    """Pods that have to leave and stay for now, and why: budget, refused, unreachable or busy."""


def eviction_view(finished: Round) -> EvictionView | None:
    """None where no eviction plugin is configured."""
    found, now_ns = finished.evictions, finished.snapshot.taken_at_ns
    if found is None:
        return None
    thresholds = [_threshold(each, now_ns) for each in found.thresholds]
    thresholds.sort(key=lambda each: (-LEVELS[Met(each.met)], not each.judged, each.observed is None))
    return EvictionView(
        thresholds=tuple(thresholds),
        conditions=tuple(
            ConditionView(
                name=each.condition.name,
                kind=each.condition.kind,
                effects=each.condition.effects,
                plugin=each.plugin,
                age_s=_since(each.since_ns, now_ns),
                last_met_s=_since(each.last_met_ns, now_ns),
            )
            for each in found.conditions
        ),
        victims=tuple(
            VictimView(
                pod=each.pod,
                plugin=each.plugin,
                scope=each.scope,
                text=each.verdict.text,
                forced=each.forced,
                grace_s=each.grace_s,
                notify=each.notify,
                dry_run=each.dry_run,
            )
            for each in found.victims
        ),
        waiting=found.waiting,
        leaving=found.leaving,
        held={pod: why.value for pod, why in found.held.items()},
    )


def _threshold(threshold: Threshold, now_ns: int) -> ThresholdView:
    return ThresholdView(
        plugin=threshold.plugin,
        scope=threshold.scope,
        subject=threshold.subject,
        met=threshold.met.value,
        value=threshold.value,
        observed=threshold.observed,
        operator=threshold.operator,
        judged=threshold.verdict.rule not in NOT_JUDGED,
        text=threshold.verdict.text,
        rule=threshold.verdict.rule,
        inputs=threshold.verdict.inputs,
        met_s=None if threshold.since_ns is None else _since(threshold.since_ns, now_ns),
        tolerance_s=threshold.tolerance_s,
        dry_run=threshold.dry_run,
    )


def _since(then_ns: int, now_ns: int) -> float:
    return max(now_ns - then_ns, 0) / NS_PER_S


def eviction_families(found: Evictions) -> Iterator[Family]:
    """The rows of one round."""
    worst: dict[Labels, Threshold] = {}
    blind: dict[Labels, int] = {}
    for each in found.thresholds:
        blind.setdefault((each.plugin,), 0)
        if each.verdict.rule in NOT_JUDGED:
            blind[(each.plugin,)] += 1
            continue
        key = (each.plugin, each.scope, each.subject)
        known = worst.get(key)
        if known is None or LEVELS[each.met] > LEVELS[known.met]:
            worst[key] = each
    yield points("dioptase_eviction_threshold", ((key, each.value) for key, each in worst.items()))
    yield points("dioptase_eviction_observed", ((key, each.observed) for key, each in worst.items()))
    yield points("dioptase_eviction_met", ((key, LEVELS[each.met]) for key, each in worst.items()))
    yield points("dioptase_eviction_not_judged", blind.items())
    shown = {(each.condition.name, each.condition.kind): 1 for each in found.conditions}
    yield points("dioptase_eviction_condition", shown.items())
    yield points("dioptase_eviction_leaving_pods", [((), len(found.leaving))])
    held = {(why.value,): 0 for why in Held}
    for why in found.held.values():
        held[(why.value,)] += 1
    yield points("dioptase_eviction_held_pods", held.items())


class Victims(msgspec.Struct, frozen=True):
    """Who had to leave since the agent started, and in a dry run would have had to."""

    counts: Mapping[Labels, int] = {}
    """By plugin and whether it ran dry."""
    dry: frozenset[tuple[str, str]] = frozenset()
    """Plugin and uid of pods that are here still because it ran dry."""

    def after(self, finished: Round) -> Victims:
        """With those of one more round. Plugins begin at zero. Who is only told is none, and of a pod that stays although it
        would have had to leave its plugin says so again and again: it counts once."""
        found = finished.evictions
        if found is None:
            return self
        here = {pod.uid for pod in finished.snapshot.pods}
        dry = {each for each in self.dry if each[1] in here}
        counts = {(each.plugin, _word(each.dry_run)): 0 for each in found.thresholds} | dict(self.counts)
        for victim in found.victims:
            one = (victim.plugin, victim.uid)
            if victim.notify or one in dry:
                continue
            if victim.dry_run:
                dry.add(one)
            key = (victim.plugin, _word(victim.dry_run))
            counts[key] = counts.get(key, 0) + 1
        return Victims(counts, frozenset(dry))


def kills_after(before: Mapping[Labels, int], finished: Round) -> Mapping[Labels, int]:
    """Events of evictions by reason, with those of one more round; each reason begins at zero."""
    if finished.evictions is None and not finished.kills:
        return before
    counts = {(reason.value,): 0 for reason in KillReason} | dict(before)
    for kill in finished.kills:
        counts[(kill.reason.value,)] += 1
    return counts


def _word(value: bool) -> str:
    return "true" if value else "false"
