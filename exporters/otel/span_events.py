"""Describes the steps and decisions of a cycle as span events: name and attributes. Pure; must not import opentelemetry."""

from __future__ import annotations

from collections.abc import Iterator

from api.advice import MemoryAdvice, RegionAdvice
from api.decision import Cycle, Outcome
from api.eviction import EvictionEvent, EvictionThreshold, EvictionVictim, ThresholdMet
from api.knobs import Reason

AttributeValue = str | int | float | bool | list[str]
SpanAttributes = dict[str, AttributeValue | None]
MAX_EVENTS_PER_KIND = 16
"""Maximum number of events per kind except decisions, which must not be crowded out."""


def step_events(finished: Cycle) -> Iterator[tuple[str, SpanAttributes]]:
    """Yield name and attributes of events: regions, rejected pods, memory, evictions and outcomes of earlier evictions."""
    advice, evictions = finished.advice, finished.evictions
    if advice is not None:
        for region in advice.cpu.regions[:MAX_EVENTS_PER_KIND]:
            yield "region", _region(region)
        for pod, verdict in sorted(advice.rejected.items())[:MAX_EVENTS_PER_KIND]:
            yield "rejected", {"dioptase.pod": pod, **reason_attributes(verdict)}
    if finished.memory is not None:
        yield "memory", _memory(finished.memory)
    if evictions is not None:
        met = [threshold for threshold in evictions.thresholds if threshold.met is not ThresholdMet.NOT_MET]
        for threshold in met[:MAX_EVENTS_PER_KIND]:
            yield "threshold", _threshold(threshold)
        for victim in evictions.victims[:MAX_EVENTS_PER_KIND]:
            yield "victim", _victim(victim)
    for kill in finished.kills[:MAX_EVENTS_PER_KIND]:
        yield "kill", _kill(kill)


def decision_attributes(outcome: Outcome) -> SpanAttributes:
    """Return the attributes of one decision and its outcome."""
    decision = outcome.decision
    return {
        "dioptase.pod": decision.pod,
        "dioptase.cgroup": decision.cgroup,
        "dioptase.knob": decision.knob.value,
        "dioptase.value": decision.value,
        "dioptase.status": outcome.status.value,
        "dioptase.before": outcome.before,
        "dioptase.after": outcome.after,
        "dioptase.clamped_from": outcome.clamped_from,
        "dioptase.repaired": True if outcome.repaired else None,
        "dioptase.error": outcome.error or None,
        **reason_attributes(decision.reason),
    }


def reason_attributes(reason: Reason) -> SpanAttributes:
    """Return the attributes of a rule, its threshold and its inputs."""
    return {
        "dioptase.rule": reason.rule,
        "dioptase.reason": reason.text,
        "dioptase.threshold": reason.threshold,
        **{f"dioptase.input.{name}": value for name, value in reason.inputs.items()},
    }


def _region(region: RegionAdvice) -> SpanAttributes:
    signals = {
        f"dioptase.signal.{signal.name}.{which}": value
        for signal in region.signals
        for which, value in (("current", signal.current), ("target", signal.target))
    }
    return {
        "dioptase.region": region.region.name,
        "dioptase.pool": region.region.pool,
        "dioptase.policy": region.policy,
        "dioptase.lower_cores": region.lower_cores,
        "dioptase.upper_cores": region.upper_cores,
        **{f"dioptase.control.{control.value}": value for control, value in region.controls.items()},
        **signals,
        **reason_attributes(region.reason),
    }


def _memory(advice: MemoryAdvice) -> SpanAttributes:
    conditions = {
        f"dioptase.numa.{numa}.condition": condition.state.value for numa, condition in advice.numa_conditions.items()
    }
    return {
        "dioptase.policy": advice.policy,
        "dioptase.headroom_bytes": advice.headroom_bytes,
        "dioptase.condition": advice.condition.state.value,
        "dioptase.shortfall_bytes": advice.condition.target_bytes,
        **conditions,
        **reason_attributes(advice.headroom_reason),
    }


def _threshold(threshold: EvictionThreshold) -> SpanAttributes:
    return {
        "dioptase.plugin": threshold.plugin,
        "dioptase.met": threshold.met.value,
        "dioptase.scope": threshold.scope,
        "dioptase.observed": threshold.observed,
        **reason_attributes(threshold.reason),
        "dioptase.threshold": threshold.value,
    }


def _victim(victim: EvictionVictim) -> SpanAttributes:
    return {
        "dioptase.pod": victim.pod,
        "dioptase.plugin": victim.plugin,
        "dioptase.dry_run": victim.dry_run,
        "dioptase.forced": victim.forced,
        "dioptase.grace_s": victim.grace_s,
        **reason_attributes(victim.reason),
    }


def _kill(kill: EvictionEvent) -> SpanAttributes:
    return {
        "dioptase.pod": kill.pod,
        "dioptase.kill": kill.reason.value,
        "dioptase.reason": kill.message,
        "dioptase.warning": kill.warning,
    }
