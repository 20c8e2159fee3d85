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
from agent.advisor.provision.region_indicators import CPU_USAGE_RATIO
from agent.advisor.provision.regions import RegionBounds
from agent.config.advisor import AdvisorConfig, RamaGains
from api.advice import ControlKnob, IndicatorState, Region
from api.knobs import Reason, ReasonInputs


class RegionInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a region's policy."""

    region: Region
    bounds: RegionBounds
    need: float
    """Canonical estimate in cores."""
    knob: tuple[ControlKnob, float]
    """The control and its current value: the quota of reclaimed pods if they have one, else the requirement."""
    enable_reclaim: bool = True
    signals: tuple[IndicatorState, ...] = ()
    unknown: frozenset[str] = frozenset()
    """Indicators with a target that had a value before and have none now."""
    target_reason: Reason | None = None
    """How predictions moved the targets of the signals; None without signals."""
    state: RegionState = RegionState()
    reclaim_cpus: int = 0
    """CPUs that reclaimed pods may run on in the region's NUMA nodes."""
    reclaim_use_cores: float | None = None
    """CPU use of reclaimed pods on these CPUs."""


class RegionProposal(msgspec.Struct, frozen=True, kw_only=True):
    """Values that a policy proposes for the region's controls, before any regulation."""

    policy: str
    controls: Mapping[ControlKnob, float]
    text: str
    """The formula with its numbers, as a part of a sentence."""
    inputs: Mapping[str, float | int | str | None] = {}
    controllers: Mapping[str, IndicatorController] = {}


PolicyAnswer = RegionProposal | str


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all policies share."""

    advisor: AdvisorConfig
    gains: Mapping[str, RamaGains]


INDICATOR_UNITS = {"cpu_sched_wait": " us", "request_p99_ms": " ms"}
"""Units of the indicators that are not ratios."""


def propose_rama(inputs: RegionInputs, settings: PolicySettings) -> PolicyAnswer:
    """Move the control by the accumulated total of the worst indicator, within the bounds of the region."""
    if not inputs.enable_reclaim:
        return "reclaiming is disabled"
    if inputs.bounds.reserved_for_allocate:
        return f"{inputs.bounds.reserved_for_allocate:g} cores are reserved for allocation, but rama requires 0"
    control, value = inputs.knob
    followed = [signal for signal in inputs.signals if signal.name in settings.gains]
    if not followed:
        return _hold_control(inputs)
    controllers = {
        signal.name: update_controller(
            inputs.state.controllers.get(signal.name, IndicatorController()),
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
    missing = {name: inputs.state.controllers[name] for name in inputs.unknown if name in inputs.state.controllers}
    chosen, note = candidates[dominant], ""
    if missing and worst(chosen, value) != chosen:
        chosen, note = value, f"; {', '.join(sorted(missing))} has no value any more, so it stays at {value:.2f}"
    unbounded = value + sign * controllers[dominant].total
    if unbounded != candidates[dominant]:
        note = f", its {'maximum' if unbounded > candidates[dominant] else 'minimum'}{note}"
    unit = INDICATOR_UNITS.get(dominant, "")
    return RegionProposal(
        policy="rama",
        controls={control: chosen},
        text=f"{dominant} is {signal.current:.4g}{unit}, its target {signal.target:.4g}{unit}: {control.value} moves from "
        f"{value:.2f} by {sign * controllers[dominant].total:+.2f} to {candidates[dominant]:.2f} cores{note}",
        inputs=_signal_inputs(followed, dominant, value),
        controllers={**missing, **controllers},
    )


def _hold_control(inputs: RegionInputs) -> PolicyAnswer:
    """Without any of the indicators it had before, the policy stops growth of reclaimable CPU."""
    control, value = inputs.knob
    if inputs.state.policy != "rama":
        return "no indicator has a value, a target and gains"
    retained = max(value, inputs.need) if control is ControlKnob.REQUIREMENT else value
    return RegionProposal(
        policy="rama",
        controls={control: retained},
        text=f"no indicator has a value any more: {control.value} stays at {retained:.2f} cores",
        controllers=inputs.state.controllers,
    )


def update_controller(
    before: IndicatorController,
    signal: IndicatorState,
    knob: float,
    upper: float,
    gains: RamaGains,
    config: AdvisorConfig,
) -> IndicatorController:
    """Return the next state of an indicator's controller; `total` is added to a requirement, or subtracted from a quota."""
    error = log(signal.current) - log(signal.target)
    relative = (signal.current - signal.target) / signal.target
    step = 0.0
    if relative > gains.dead_above or relative < -gains.dead_below:
        growth = abs(error) - abs(before.error)
        outward = 1 if error >= 0 else -1
        direction = outward if growth >= 0 else -outward
        derivative = gains.derivative_up if direction > 0 else gains.derivative_down
        step = (gains.up if error >= 0 else gains.down) * upper * error + direction * derivative * abs(growth)
    total = (before.total if before.knob == knob else 0.0) + step
    total = min(max(total, -float(config.max_ramp_down_cores)), float(config.max_ramp_up_cores))
    return IndicatorController(knob=knob, total=total, error=error)


def _signal_inputs(signals: list[IndicatorState], dominant: str, knob: float) -> Mapping[str, float | int | str | None]:
    result: ReasonInputs = {"dominant": dominant, "knob_cores": round(knob, 3)}
    for signal in signals:
        result[signal.name] = round(signal.current, 4)
        result[f"{signal.name}_target"] = round(signal.target, 4)
    return result


def propose_dynamic_quota(inputs: RegionInputs, settings: PolicySettings) -> PolicyAnswer:  # noqa: ARG001 - one signature
    """Quota = CPUs of reclaimed pods x (target - current) + their use, and at least the CPUs reserved for them."""
    if not inputs.enable_reclaim:
        return "reclaiming is disabled"
    if not inputs.region.bound:
        return "it is not bound to a NUMA node"
    signal = next((signal for signal in inputs.signals if signal.name == CPU_USAGE_RATIO), None)
    cpus, used = inputs.reclaim_cpus, inputs.reclaim_use_cores
    if signal is None or used is None:
        return _hold_reclaim_quota(inputs)
    reserved = inputs.bounds.reserved_for_reclaim
    quota = max(cpus * (signal.target - signal.current) + used, reserved)
    return RegionProposal(
        policy="dynamic-quota",
        controls={ControlKnob.RECLAIM_QUOTA: quota},
        text=f"reclaimed pods on {cpus} CPUs use {used:.2f} cores while {CPU_USAGE_RATIO} is {signal.current:.3g}, its target "
        f"{signal.target:.3g}: their quota is max({cpus} x ({signal.target:.3g} - {signal.current:.3g}) + {used:.2f}, "
        f"{reserved:g}) = {quota:.2f} cores",
        inputs={
            CPU_USAGE_RATIO: round(signal.current, 4),
            f"{CPU_USAGE_RATIO}_target": round(signal.target, 4),
            "reclaim_cpus": cpus,
            "reclaim_use_cores": round(used, 3),
        },
    )


def _hold_reclaim_quota(inputs: RegionInputs) -> PolicyAnswer:
    """Without its inputs, an existing quota is retained."""
    retained = inputs.state.quota_cores
    if inputs.state.policy != "dynamic-quota" or retained is None:
        return f"{CPU_USAGE_RATIO} or the CPU use of reclaimed pods is not measured"
    return RegionProposal(
        policy="dynamic-quota",
        controls={ControlKnob.RECLAIM_QUOTA: retained},
        text=f"{CPU_USAGE_RATIO} or the CPU use of reclaimed pods is not measured any more:"
        f" their quota stays at {retained:.2f} cores",
    )
