"""Policy `rama`: a controller for each indicator turns the requirement (or the quota of reclaimed pods) towards its target.

The error is ln(current) - ln(target); outside of a dead band it moves a running total, gains times the region's upper bound
at a time. The indicator that asks for most protection decides; while one that was followed is not known, nothing more is lent.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log

from agent.advisor.provision.policies import Answer, Case, Proposal, Settings
from agent.advisor.provision.situation import Controller
from agent.config import AdvisorConfig
from agent.config.provision import Gains
from api.advice import Control, Signal

UNITS = {"cpu_sched_wait": " us", "request_p99_ms": " ms"}
"""Of indicators that are no ratios."""


def rama(case: Case, settings: Settings) -> Answer:
    """The knob, moved by the running total of the worst indicator, within the bounds of the region."""
    if not case.enable_reclaim:
        return "reclaiming is switched off"
    if case.bounds.reserved_for_allocate:
        return f"{case.bounds.reserved_for_allocate:g} cores are reserved for allocation, rama needs that to be 0"
    control, value = case.knob
    followed = [signal for signal in case.signals if signal.name in settings.gains]
    if not followed:
        return _unknown(case)
    controllers = {
        signal.name: adjust(
            case.memory.controllers.get(signal.name, Controller()),
            signal,
            value,
            case.bounds.upper,
            settings.gains[signal.name],
            settings.advisor,
        )
        for signal in followed
    }
    sign, worst = (1, max) if control is Control.REQUIREMENT else (-1, min)
    candidates = {
        name: min(max(value + sign * controller.total, case.bounds.lower), case.bounds.upper)
        for name, controller in controllers.items()
    }
    dominant = worst(candidates, key=lambda name: candidates[name])
    signal = next(signal for signal in followed if signal.name == dominant)
    gone = {name: case.memory.controllers[name] for name in case.unknown if name in case.memory.controllers}
    turned, note = candidates[dominant], ""
    if gone and worst(turned, value) != turned:
        turned, note = value, f"; {', '.join(sorted(gone))} is not known any more, so it stays at {value:.2f}"
    moved = value + sign * controllers[dominant].total
    if moved != candidates[dominant]:
        note = f", its {'most' if moved > candidates[dominant] else 'least'}{note}"
    unit = UNITS.get(dominant, "")
    return Proposal(
        policy="rama",
        controls={control: turned},
        text=f"{dominant} is {signal.current:.4g}{unit}, its target {signal.target:.4g}{unit}: {control.value} moves from "
        f"{value:.2f} by {sign * controllers[dominant].total:+.2f} to {candidates[dominant]:.2f} cores{note}",
        inputs=_inputs(followed, dominant, value),
        controllers={**gone, **controllers},
    )


def _unknown(case: Case) -> Answer:
    """Where indicators were followed before and are not known now, nothing more is lent on their account."""
    control, value = case.knob
    if case.memory.policy != "rama":
        return "no indicator has a value, a target and gains"
    held = max(value, case.need) if control is Control.REQUIREMENT else value
    return Proposal(
        policy="rama",
        controls={control: held},
        text=f"no indicator is known any more: {control.value} stays at {held:.2f} cores",
        controllers=case.memory.controllers,
    )


def adjust(
    before: Controller, signal: Signal, knob: float, upper: float, gains: Gains, config: AdvisorConfig
) -> Controller:
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
    return Controller(knob=knob, total=total, error=error)


def _inputs(signals: list[Signal], dominant: str, knob: float) -> Mapping[str, float | int | str | None]:
    found: dict[str, float | int | str | None] = {"dominant": dominant, "knob_cores": round(knob, 3)}
    for signal in signals:
        found[signal.name] = round(signal.current, 4)
        found[f"{signal.name}_target"] = round(signal.target, 4)
    return found
