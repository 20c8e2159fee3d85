"""The steps of a round as events of its span, in the order in which they are taken: what each policy was given, and what it
made of that. Pure, and free of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator

from api.advice import RegionAdvice
from api.decisions import Outcome, Round
from api.evictions import KillEvent, Met, Threshold, Victim
from api.knobs import Verdict
from api.memory_advice import MemoryAdvice

Value = str | int | float | bool | list[str]
Attributes = dict[str, Value | None]
MOST_OF_A_KIND = 16
"""Regions, rejected pods, thresholds, victims and kills that have an event, so that decisions have room."""


def steps(finished: Round) -> Iterator[tuple[str, Attributes]]:
    """Name and attributes of each: regions, pods whose wish was rejected, memory, evictions and what became of earlier ones."""
    advice, evictions = finished.advice, finished.evictions
    if advice is not None:
        for one in advice.cpu.regions[:MOST_OF_A_KIND]:
            yield "region", _region(one)
        for pod, verdict in sorted(advice.rejected.items())[:MOST_OF_A_KIND]:
            yield "rejected", {"dioptase.pod": pod, **why(verdict)}
    if finished.memory is not None:
        yield "memory", _memory(finished.memory)
    if evictions is not None:
        met = [threshold for threshold in evictions.thresholds if threshold.met is not Met.NOT_MET]
        for threshold in met[:MOST_OF_A_KIND]:
            yield "threshold", _threshold(threshold)
        for victim in evictions.victims[:MOST_OF_A_KIND]:
            yield "victim", _victim(victim)
    for kill in finished.kills[:MOST_OF_A_KIND]:
        yield "kill", _kill(kill)


def decided(outcome: Outcome) -> Attributes:
    """One decision, and what came of it."""
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
        **why(decision.verdict),
    }


def why(verdict: Verdict) -> Attributes:
    """The rule, its threshold and its inputs."""
    return {
        "dioptase.rule": verdict.rule,
        "dioptase.reason": verdict.text,
        "dioptase.threshold": verdict.threshold,
        **{f"dioptase.input.{name}": value for name, value in verdict.inputs.items()},
    }


def _region(one: RegionAdvice) -> Attributes:
    signals = {
        f"dioptase.signal.{signal.name}.{which}": value
        for signal in one.signals
        for which, value in (("current", signal.current), ("target", signal.target))
    }
    return {
        "dioptase.region": one.region.name,
        "dioptase.pool": one.region.pool,
        "dioptase.policy": one.policy,
        "dioptase.lower_cores": one.lower_cores,
        "dioptase.upper_cores": one.upper_cores,
        **{f"dioptase.control.{control.value}": value for control, value in one.controls.items()},
        **signals,
        **why(one.verdict),
    }


def _memory(advice: MemoryAdvice) -> Attributes:
    conditions = {
        f"dioptase.numa.{numa}.condition": found.state.value for numa, found in advice.numa_conditions.items()
    }
    return {
        "dioptase.policy": advice.policy,
        "dioptase.headroom_bytes": advice.headroom_bytes,
        "dioptase.condition": advice.condition.state.value,
        "dioptase.shortfall_bytes": advice.condition.target_bytes,
        **conditions,
        **why(advice.headroom_verdict),
    }


def _threshold(threshold: Threshold) -> Attributes:
    return {
        "dioptase.plugin": threshold.plugin,
        "dioptase.met": threshold.met.value,
        "dioptase.scope": threshold.scope,
        "dioptase.observed": threshold.observed,
        **why(threshold.verdict),
        "dioptase.threshold": threshold.value,
    }


def _victim(victim: Victim) -> Attributes:
    return {
        "dioptase.pod": victim.pod,
        "dioptase.plugin": victim.plugin,
        "dioptase.dry_run": victim.dry_run,
        "dioptase.forced": victim.forced,
        "dioptase.grace_s": victim.grace_s,
        **why(victim.verdict),
    }


def _kill(kill: KillEvent) -> Attributes:
    return {
        "dioptase.pod": kill.pod,
        "dioptase.kill": kill.reason.value,
        "dioptase.reason": kill.message,
        "dioptase.warning": kill.warning,
    }
