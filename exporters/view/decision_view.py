"""Builds the view of decisions: changed knobs, the shadow policy, advice for the node, evictions. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.advice import NodeAdvice
from api.decision import Advice, Cycle, Outcome
from api.eviction import EvictionThreshold, ThresholdMet
from api.units import NS_PER_S
from exporters.prometheus.decision_families import NOT_EVALUATED_RULES, THRESHOLD_LEVELS


class ThresholdView(msgspec.Struct, frozen=True, kw_only=True):
    """One threshold of a plugin and its latest evaluation."""

    plugin: str
    scope: str
    subject: str
    met: str
    value: float | None
    observed: float | None
    operator: str
    """Comparison of `observed` with `value` that meets the threshold."""
    evaluated: bool = msgspec.field(name="judged")
    """False if an input was missing or the plugin failed."""
    text: str
    rule: str
    inputs: Mapping[str, float | int | str | None]
    met_s: float | None
    """Time for which it has been met without interruption."""
    tolerance_s: float
    dry_run: bool


class ConditionView(msgspec.Struct, frozen=True, kw_only=True):
    """Condition or taint of the node that keeps the scheduler away."""

    name: str
    kind: str
    effects: tuple[str, ...]
    plugin: str
    age_s: float
    last_met_s: float
    """Time since its threshold was last met."""
    ends_in_s: float = 0.0
    """Time until it and its taint end, unless the threshold is met again."""


class VictimView(msgspec.Struct, frozen=True, kw_only=True):
    """One pod that is evicted in this cycle, would be evicted in a dry run, or is only notified."""

    pod: str
    plugin: str
    scope: str
    text: str
    forced: bool
    grace_s: float | None
    notify: bool
    dry_run: bool


class EvictionView(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the eviction manager in one cycle."""

    thresholds: tuple[ThresholdView, ...]
    """Thresholds: met ones first, then evaluated ones."""
    conditions: tuple[ConditionView, ...] = ()
    victims: tuple[VictimView, ...] = ()
    waiting: tuple[str, ...] = ()
    terminating: tuple[str, ...] = msgspec.field(default=(), name="leaving")
    """Pods whose eviction was requested and that still exist."""
    held: Mapping[str, str] = {}
    """Pods whose eviction is blocked, with the cause: budget, refused, unreachable or busy."""


def eviction_view(finished: Cycle) -> EvictionView | None:
    """Return None if no eviction plugin is configured."""
    result, now_ns = finished.evictions, finished.snapshot.taken_at_ns
    if result is None:
        return None
    thresholds = [_threshold_view(item, now_ns) for item in result.thresholds]
    thresholds.sort(
        key=lambda item: (-THRESHOLD_LEVELS[ThresholdMet(item.met)], not item.evaluated, item.observed is None)
    )
    return EvictionView(
        thresholds=tuple(thresholds),
        conditions=tuple(
            ConditionView(
                name=item.condition.name,
                kind=item.condition.kind,
                effects=item.condition.effects,
                plugin=item.plugin,
                age_s=_seconds_since(item.since_ns, now_ns),
                last_met_s=_seconds_since(item.last_met_ns, now_ns),
                ends_in_s=_seconds_since(now_ns, item.ends_ns),
            )
            for item in result.conditions
        ),
        victims=tuple(
            VictimView(
                pod=item.pod,
                plugin=item.plugin,
                scope=item.scope,
                text=item.reason.text,
                forced=item.forced,
                grace_s=item.grace_s,
                notify=item.notify,
                dry_run=item.dry_run,
            )
            for item in result.victims
        ),
        waiting=result.waiting,
        terminating=result.terminating,
        held={pod: why.value for pod, why in result.held.items()},
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
        evaluated=threshold.reason.rule not in NOT_EVALUATED_RULES,
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
    """One decision that changed a value, would have changed it, or failed."""

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
    """Advice of the shadow policy."""

    policy: str
    action: str
    reason: str
    reclaimable_cores: float = msgspec.field(name="lent_cores")
    headroom_cores: float | None


class NodeAdviceView(msgspec.Struct, frozen=True, kw_only=True):
    """Advice for the node as a whole."""

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
    advice_by_topic = {"power": node.power, "overcommit": node.overcommit}
    return tuple(
        NodeAdviceView(topic=topic, rule=answer.reason.rule, text=answer.reason.text)
        for topic, answer in advice_by_topic.items()
        if answer is not None
    )


def change_view(outcome: Outcome) -> ChangeView:
    """Return a decision and its outcome, flattened for a table."""
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
