"""Provision policies `rama` and `dynamic-quota`, and the inputs and proposals that all policies share.
`rama` runs one controller per indicator on ln(current) - ln(target); the indicator that asks for most
protection decides. `dynamic-quota` sets the quota that brings the CPU usage of a NUMA node to its target. A
policy returns a proposal, or the reason why it does not apply; then the next configured policy is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log

import msgspec

from agent.advisor.advisor_state import IndicatorController, RegionState
from agent.advisor.provision.regions import RegionBounds
from agent.config.advisor import AdvisorConfig, RamaGains
from api.advice import ControlKnob, IndicatorState, Region
from api.knobs import Reason


class RegionInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One region, as its policy sees it."""

    region: Region
    bounds: RegionBounds
    need: float
    """Canonical estimate in cores."""
    knob: tuple[ControlKnob, float]
    """What is turned, and where it stands: the quota of reclaimed pods where they have one, otherwise the requirement."""
    enable_reclaim: bool = True
    signals: tuple[IndicatorState, ...] = ()
    unknown: frozenset[str] = frozenset()
    """Indicators that were followed and still have a target, and no value this time."""
    target_reason: Reason | None = None
    """How predictions moved the targets of the signals; None where none are followed."""
    memory: RegionState = RegionState()
    reclaim_cpus: int = 0
    """CPUs that reclaimed pods may run on in the region's NUMA nodes."""
    reclaim_use_cores: float | None = None
    """What they use of them."""


class RegionProposal(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy wants of the region's controls, before any regulation."""

    policy: str
    controls: Mapping[ControlKnob, float]
    text: str
    """The formula with its numbers, as a part of a sentence."""
    inputs: Mapping[str, float | int | str | None] = {}
    controllers: Mapping[str, IndicatorController] = {}


PolicyAnswer = RegionProposal | str


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Those of all policies."""

    advisor: AdvisorConfig
    gains: Mapping[str, RamaGains]


INDICATOR_UNITS = {"cpu_sched_wait": " us", "request_p99_ms": " ms"}
"""Of indicators that are no ratios."""


def propose_rama(inputs: RegionInputs, settings: PolicySettings) -> PolicyAnswer:
    """The knob, moved by the running total of the worst indicator, within the bounds of the region."""
    if not inputs.enable_reclaim:
        return "reclaiming is switched off"
    if inputs.bounds.reserved_for_allocate:
        return f"{inputs.bounds.reserved_for_allocate:g} cores are reserved for allocation, rama needs that to be 0"
    control, value = inputs.knob
    followed = [signal for signal in inputs.signals if signal.name in settings.gains]
    if not followed:
        return _hold_control(inputs)
    controllers = {
        signal.name: update_controller(
            inputs.memory.controllers.get(signal.name, IndicatorController()),
            signal,
            value,
            inputs.bounds.upper,
            settings.gains[signal.name],
            settings.advisor,
        )
        for signal in followed
    }
    sign, worst = (1, max) if control is ControlKnob.REQUIREMENT else (-1, min)
    candidates = {
        name: min(max(value + sign * controller.total, inputs.bounds.lower), inputs.bounds.upper)
        for name, controller in controllers.items()
    }
    dominant = worst(candidates, key=lambda name: candidates[name])
    signal = next(signal for signal in followed if signal.name == dominant)
    gone = {name: inputs.memory.controllers[name] for name in inputs.unknown if name in inputs.memory.controllers}
    turned, note = candidates[dominant], ""
    if gone and worst(turned, value) != turned:
        turned, note = value, f"; {', '.join(sorted(gone))} is not known any more, so it stays at {value:.2f}"
    moved = value + sign * controllers[dominant].total
    if moved != candidates[dominant]:
        note = f", its {'most' if moved > candidates[dominant] else 'least'}{note}"
    unit = INDICATOR_UNITS.get(dominant, "")
    return RegionProposal(
        policy="rama",
        controls={control: turned},
        text=f"{dominant} is {signal.current:.4g}{unit}, its target {signal.target:.4g}{unit}: {control.value} moves from "
        f"{value:.2f} by {sign * controllers[dominant].total:+.2f} to {candidates[dominant]:.2f} cores{note}",
        inputs=_signal_inputs(followed, dominant, value),
        controllers={**gone, **controllers},
    )


def _hold_control(inputs: RegionInputs) -> PolicyAnswer:
    """Where indicators were followed before and are not known now, nothing more is lent on their account."""
    control, value = inputs.knob
    if inputs.memory.policy != "rama":
        return "no indicator has a value, a target and gains"
    held = max(value, inputs.need) if control is ControlKnob.REQUIREMENT else value
    return RegionProposal(
        policy="rama",
        controls={control: held},
        text=f"no indicator is known any more: {control.value} stays at {held:.2f} cores",
        controllers=inputs.memory.controllers,
    )


def update_controller(
    before: IndicatorController,
    signal: IndicatorState,
    knob: float,
    upper: float,
    gains: RamaGains,
    config: AdvisorConfig,
) -> IndicatorController:
    """One step of an indicator's controller: what is to be added to a requirement of `knob`, or taken from a quota."""
    error = log(signal.current) - log(signal.target)
    relative = (signal.current - signal.target) / signal.target
    step = 0.0
    if relative > gains.dead_above or relative < -gains.dead_below:
        grown = abs(error) - abs(before.error)
        away = 1 if error >= 0 else -1
        direction = away if grown >= 0 else -away
        derivative = gains.derivative_up if direction > 0 else gains.derivative_down
        step = (gains.up if error >= 0 else gains.down) * upper * error + direction * derivative * abs(grown)
    total = (before.total if before.knob == knob else 0.0) + step
    total = min(max(total, -float(config.max_ramp_down_cores)), float(config.max_ramp_up_cores))
    return IndicatorController(knob=knob, total=total, error=error)


def _signal_inputs(signals: list[IndicatorState], dominant: str, knob: float) -> Mapping[str, float | int | str | None]:
    found: dict[str, float | int | str | None] = {"dominant": dominant, "knob_cores": round(knob, 3)}
    for signal in signals:
        found[signal.name] = round(signal.current, 4)
        found[f"{signal.name}_target"] = round(signal.target, 4)
    return found


USAGE_INDICATOR = "cpu_usage_ratio"


def propose_dynamic_quota(inputs: RegionInputs, settings: PolicySettings) -> PolicyAnswer:  # noqa: ARG001 - every policy has this form
    """Quota = CPUs of reclaimed pods x (target - current) + what they use, at least what is reserved for them."""
    if not inputs.enable_reclaim:
        return "reclaiming is switched off"
    if not inputs.region.bound:
        return "it is not bound to a NUMA node"
    signal = next((signal for signal in inputs.signals if signal.name == USAGE_INDICATOR), None)
    cpus, used = inputs.reclaim_cpus, inputs.reclaim_use_cores
    if signal is None or used is None:
        return _hold_reclaim_quota(inputs)
    reserved = inputs.bounds.reserved_for_reclaim
    quota = max(cpus * (signal.target - signal.current) + used, reserved)
    return RegionProposal(
        policy="dynamic-quota",
        controls={ControlKnob.RECLAIM_QUOTA: quota},
        text=f"reclaimed pods on {cpus} CPUs use {used:.2f} cores while {USAGE_INDICATOR} is {signal.current:.3g}, its target "
        f"{signal.target:.3g}: their quota is max({cpus} x ({signal.target:.3g} - {signal.current:.3g}) + {used:.2f}, "
        f"{reserved:g}) = {quota:.2f} cores",
        inputs={
            USAGE_INDICATOR: round(signal.current, 4),
            f"{USAGE_INDICATOR}_target": round(signal.target, 4),
            "reclaim_cpus": cpus,
            "reclaim_use_cores": round(used, 3),
        },
    )


def _hold_reclaim_quota(inputs: RegionInputs) -> PolicyAnswer:
    """Without its inputs a quota that was given stays as it is."""
    held = inputs.memory.quota_cores
    if inputs.memory.policy != "dynamic-quota" or held is None:
        return f"{USAGE_INDICATOR} or the use of reclaimed pods is not known"
    return RegionProposal(
        policy="dynamic-quota",
        controls={ControlKnob.RECLAIM_QUOTA: held},
        text=f"{USAGE_INDICATOR} or the use of reclaimed pods is not known any more: their quota stays at {held:.2f} cores",
    )
