"""Builds the view of decisions: changed knobs, the shadow policy, advice for the node, evictions. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.advice import NodeAdvice
from api.decision import Advice, Cycle, Outcome
from api.eviction import EvictionThreshold, ThresholdMet
from api.metrics import NS_PER_S
from exporters.prometheus.decision_families import NOT_EVALUATED_RULES, THRESHOLD_LEVELS


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
    terminating: tuple[str, ...] = msgspec.field(default=(), name="leaving")
    """Pods that were asked to leave, and are still here."""
    held: Mapping[str, str] = {}
    """Pods that have to leave and stay for now, and why: budget, refused, unreachable or busy."""


def eviction_view(finished: Cycle) -> EvictionView | None:
    """None where no eviction plugin is configured."""
    found, now_ns = finished.evictions, finished.snapshot.taken_at_ns
    if found is None:
        return None
    thresholds = [_threshold_view(each, now_ns) for each in found.thresholds]
    thresholds.sort(
        key=lambda each: (-THRESHOLD_LEVELS[ThresholdMet(each.met)], not each.judged, each.observed is None)
    )
    return EvictionView(
        thresholds=tuple(thresholds),
        conditions=tuple(
            ConditionView(
                name=each.condition.name,
                kind=each.condition.kind,
                effects=each.condition.effects,
                plugin=each.plugin,
                age_s=_seconds_since(each.since_ns, now_ns),
                last_met_s=_seconds_since(each.last_met_ns, now_ns),
            )
            for each in found.conditions
        ),
        victims=tuple(
            VictimView(
                pod=each.pod,
                plugin=each.plugin,
                scope=each.scope,
                text=each.reason.text,
                forced=each.forced,
                grace_s=each.grace_s,
                notify=each.notify,
                dry_run=each.dry_run,
            )
            for each in found.victims
        ),
        waiting=found.waiting,
        terminating=found.terminating,
        held={pod: why.value for pod, why in found.held.items()},
    )


def _threshold_view(threshold: EvictionThreshold, now_ns: int) -> ThresholdView:
    return ThresholdView(
        plugin=threshold.plugin,
        scope=threshold.scope,
        subject=threshold.subject,
        met=threshold.met.value,
        value=threshold.value,
        observed=threshold.observed,
        operator=threshold.operator,
        judged=threshold.reason.rule not in NOT_EVALUATED_RULES,
        text=threshold.reason.text,
        rule=threshold.reason.rule,
        inputs=threshold.reason.inputs,
        met_s=None if threshold.since_ns is None else _seconds_since(threshold.since_ns, now_ns),
        tolerance_s=threshold.tolerance_s,
        dry_run=threshold.dry_run,
    )


def _seconds_since(then_ns: int, now_ns: int) -> float:
    return max(now_ns - then_ns, 0) / NS_PER_S


class ChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """One decision that did something, or would have, or failed to."""

    pod: str
    cgroup: str
    knob: str
    before: str | None
    value: str
    status: str
    rule: str
    text: str
    error: str


class ShadowView(msgspec.Struct, frozen=True, kw_only=True):
    """What a second policy would have made of the round."""

    policy: str
    action: str
    reason: str
    reclaimable_cores: float = msgspec.field(name="lent_cores")
    headroom_cores: float | None


class NodeAdviceView(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of the node as a whole."""

    topic: str
    """`power` or `overcommit`."""
    rule: str
    text: str


def shadow_view(advice: Advice | None) -> ShadowView | None:
    if advice is None:
        return None
    return ShadowView(
        policy=advice.policy,
        action=advice.action,
        reason=advice.reason.text,
        reclaimable_cores=advice.reclaimable_cores,
        headroom_cores=advice.headroom_cores,
    )


def node_advice_views(node: NodeAdvice | None) -> tuple[NodeAdviceView, ...]:
    if node is None:
        return ()
    said = {"power": node.power, "overcommit": node.overcommit}
    return tuple(
        NodeAdviceView(topic=topic, rule=answer.reason.rule, text=answer.reason.text)
        for topic, answer in said.items()
        if answer is not None
    )


def change_view(outcome: Outcome) -> ChangeView:
    """A decision and what came of it, flattened for a table."""
    decision = outcome.decision
    return ChangeView(
        pod=decision.pod,
        cgroup=decision.cgroup,
        knob=decision.knob.value,
        before=outcome.before,
        value=decision.value,
        status=outcome.status.value,
        rule=decision.reason.rule,
        text=decision.reason.text,
        error=outcome.error,
    )
