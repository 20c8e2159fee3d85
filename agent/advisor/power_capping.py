"""Answers a power alert of the Node: Katalyst's power-aware plugin with its strategy `evict first`.
Watts are whole numbers. s0 caps power to the budget; p0 evicts reclaimed pods, then lowers power by at most 10 % if the
node is busy; p1 and p2 do nothing. An operation in the annotations (evict, freqcap, noop) replaces the action of the
level. A cap stays in force until the alert is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from enum import IntEnum
from math import ceil, e, isfinite

import msgspec
from msgspec.structs import replace

from agent.config.advisor import PowerConfig
from api.advice import PowerAction, PowerActionKind, PowerCap
from api.knobs import Reason
from api.rates import delta
from api.snapshot import Snapshot
from api.text import quote
from api.units import NS_PER_S, NS_PER_US

_PLATFORM, _DRAM, _PACKAGE = "psys", "dram", "package"
RESPONSE_S: Mapping[str, int] = {"s0": 120, "p0": 1800, "p1": 3600, "p2": 14400}
"""By level: seconds after the alert within which the budget has to be met."""


class PowerOperation(IntEnum):
    """Operation that the alert requests (power-internal-op)."""

    AUTO = 0
    THROTTLE = 1
    """Does nothing, as in Katalyst."""
    EVICT = 2
    FREQ_CAP = 4
    NOOP = 8


class PowerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A power alert from the node's annotations."""

    level: str
    """One of s0, p0, p1, p2, or an unknown level."""
    budget_watts: int
    alert_time_ns: int
    """CLOCK_REALTIME."""
    operation: PowerOperation = PowerOperation.AUTO


class PowerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of the answer to a power alert."""

    now_ns: int
    wall_time_ns: int
    spec: PowerSpec | None
    """None without an alert."""
    unknown: Reason | None = None
    """Why it is not known whether there is an alert: then nothing changes."""
    watts: float | None
    """Mean power of the node (`node_watts`)."""
    package_watts: tuple[float, ...] = ()
    """Mean power of each processor package."""
    cpu_ratio: float | None = None
    """Busy share of the node. If it is not measured, frequencies are lowered within the same bounds, as in Katalyst."""
    pods: int = 0
    """Number of pods on the node."""
    evictable: int = 0
    """Number of reclaimed_cores pods among them."""


class PowerState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the answers to one alert."""

    acted_ns: int | None = None
    cap: PowerCap | None = None
    """The cap in force, released when the alert is over."""
    lowering: bool = False
    """Whether the previous answer was a cap: only then is a decrease since its effect."""
    lowered_percent: int = 0
    """Total decrease by caps so far."""
    last_watts: int | None = None


def power_annotation_keys(prefix: str) -> tuple[str, str, str, str]:
    """Return the keys of an alert's level, budget, time and operation."""
    start = f"{prefix}/" if prefix else ""
    return f"{start}power-alert", f"{start}power-budget", f"{start}power-alert-time", f"{start}power-internal-op"


def parse_power_spec(annotations: Mapping[str, str], prefix: str) -> PowerSpec | None:
    """Return the alert of a node's annotations; None without one. Raises ValueError that names the annotation."""
    level_key, budget_key, time_key, operation_key = power_annotation_keys(prefix)
    level = annotations.get(level_key, "").lower()
    if not level:
        return None
    budget = _parse_watts(annotations, budget_key)
    code, time = annotations.get(operation_key, "0"), annotations.get(time_key, "")
    try:
        operation = PowerOperation(int(code))
    except ValueError:
        raise ValueError(f"annotation {operation_key}: {quote(code)} is not one of 0, 1, 2, 4, 8") from None
    when: datetime | None = None
    with suppress(ValueError):
        when = datetime.fromisoformat(time)
    if when is None or when.tzinfo is None:
        raise ValueError(f"annotation {time_key}: {quote(time)} is not a time such as 2026-01-02T03:04:05Z")
    return PowerSpec(
        level=level, budget_watts=int(budget), operation=operation, alert_time_ns=round(when.timestamp()) * NS_PER_S
    )


def domain_watts(before: Snapshot, now: Snapshot) -> Mapping[str, float]:
    """Return the mean power between two snapshots by RAPL domain.

    Empty without counters, and if one of them is new or has wrapped around.
    """
    elapsed_ns = now.taken_at_ns - before.taken_at_ns
    watts: dict[str, float] = {}
    for domain, energy in now.node.power_uj.items():
        change = delta(before.node.power_uj.get(domain), energy)
        if change is None or elapsed_ns <= 0:
            return {}
        watts[domain] = change * NS_PER_US / elapsed_ns
    return watts


def node_watts(watts: Mapping[str, float]) -> float | None:
    """Return the power of the platform if it is metered, else of packages and memory; None if none is metered."""
    if _PLATFORM in watts:
        return watts[_PLATFORM]
    memory = [power for domain, power in watts.items() if domain.rpartition("/")[2] == _DRAM]
    metered = (*package_watts(watts), *memory)
    return sum(metered) if metered else None


def package_watts(watts: Mapping[str, float]) -> tuple[float, ...]:
    """Return the power of each processor package."""
    return tuple(power for domain, power in watts.items() if domain.startswith(_PACKAGE) and "/" not in domain)


def package_limit(target_watts: int, total_watts: float, packages: Sequence[float]) -> int:
    """Return the limit of every package, in watts, with which the node draws `target_watts` under its present load.

    Packages that draw less keep their power, and so does the rest of the node. At least 1; 0 without packages.
    """
    budget = target_watts - max(total_watts - sum(packages), 0.0)
    limit = 0.0
    for number, power in enumerate(sorted(packages)):
        limit = budget / (len(packages) - number)
        if power >= limit:
            break
        budget -= power
    return max(int(limit), 1) if packages else 0


def evict_percent(budget_watts: int, watts_now: int, left_s: float) -> int:
    """Return the percentage of pods to evict for an excess of power, between 1 and 100."""
    excess = 100 - budget_watts * 100 // watts_now
    tens_of_minutes = int(int(left_s / 60) / 10)
    return int(min(max(excess * (e / 2) ** -tens_of_minutes, 1.0), 100.0))


def advise_power(inputs: PowerInputs, state: PowerState, config: PowerConfig) -> tuple[PowerAction, PowerState]:
    """Return the action for this cycle; `noop` between two periods, and if an input is missing."""
    spec, now_ns = inputs.spec, inputs.now_ns
    if inputs.unknown is not None:
        return _noop_action(inputs.unknown.rule, inputs.unknown.text), state
    if spec is None:
        if state.cap is not None:
            text = "The power alert is over: the power cap is released."
            return PowerAction(
                kind=PowerActionKind.RESET, reason=Reason(rule="power_alert_over", text=text)
            ), PowerState()
        return _noop_action("power_no_alert", "There is no power alert."), PowerState()
    if state.acted_ns is not None and now_ns < state.acted_ns:
        state = PowerState(cap=state.cap)  # the clock of another boot
    if state.acted_ns is not None and now_ns - state.acted_ns < config.period_s * NS_PER_S:
        return _noop_action("power_settling", f"Less than {config.period_s:g} s since the previous answer."), state
    if spec.operation is PowerOperation.NOOP:
        return _noop_action("power_told_noop", "The alert requests no action."), state
    if spec.level not in RESPONSE_S:
        return _noop_action("power_unknown_level", f"The alert level {quote(spec.level)} is unknown."), state
    measured = inputs.watts
    if measured is None or not isfinite(measured) or measured < 1:
        return _noop_action("power_unknown", "The power of the node is not measured: no action is taken."), state
    now_watts = int(measured)
    state = replace(state, acted_ns=now_ns, last_watts=now_watts, lowered_percent=_lowered_percent(state, now_watts))
    if now_watts <= spec.budget_watts:
        text = f"The node draws {now_watts} W, within its budget of {spec.budget_watts} W."
        return _noop_action("power_within_budget", text), replace(state, lowering=False)
    action = _select_action(inputs, spec, now_watts, state, config)
    if action.kind is not PowerActionKind.NOOP:
        action = replace(action, at_ns=now_ns)
    if action.kind is not PowerActionKind.CAP:
        return action, replace(state, lowering=False)
    limit = package_limit(action.target_watts, measured, inputs.package_watts)
    cap = PowerCap(target_watts=action.target_watts, package_watts=limit, reason=action.reason)
    return action, replace(state, lowering=True, cap=cap)


def _lowered_percent(state: PowerState, now_watts: int) -> int:
    """Total decrease by caps in percent; an increase since the last cap does not count."""
    before = state.last_watts
    if not state.lowering or before is None or now_watts >= before:
        return state.lowered_percent
    return state.lowered_percent + (before - now_watts) * 100 // before


def _select_action(
    inputs: PowerInputs, spec: PowerSpec, now_watts: int, state: PowerState, config: PowerConfig
) -> PowerAction:
    over = f"The node draws {now_watts} W of {spec.budget_watts} W at alert {spec.level}"
    match _resolve_operation(inputs, spec, state, config):
        case PowerOperation.EVICT:
            return _evict_action(inputs, spec, now_watts, over)
        case PowerOperation.FREQ_CAP:
            return _cap_action(spec, now_watts, state, config, over)
        case _:
            return _noop_action("power_nothing_to_do", f"{over}: this level has no action, or none is possible.")


def _resolve_operation(inputs: PowerInputs, spec: PowerSpec, state: PowerState, config: PowerConfig) -> PowerOperation:
    """The operation of the alert, or the one that its level implies."""
    if spec.operation is not PowerOperation.AUTO:
        return spec.operation
    if spec.level == "s0":
        return PowerOperation.FREQ_CAP
    if spec.level != "p0":
        return PowerOperation.NOOP
    if inputs.evictable > 0:
        return PowerOperation.EVICT
    idle = inputs.cpu_ratio is not None and inputs.cpu_ratio <= config.voluntary_cpu_ratio
    return PowerOperation.NOOP if idle or state.lowered_percent >= config.voluntary_percent else PowerOperation.FREQ_CAP


def _evict_action(inputs: PowerInputs, spec: PowerSpec, now_watts: int, over: str) -> PowerAction:
    left_s = (spec.alert_time_ns - inputs.wall_time_ns) / NS_PER_S + RESPONSE_S[spec.level]
    percent = evict_percent(spec.budget_watts, now_watts, left_s)
    count = min(ceil(inputs.pods * percent / 100), inputs.evictable)
    text = f"{over}, {left_s / 60:.0f} min left: evict {percent} % of {inputs.pods} pods, {count} of them reclaimed."
    if count == 0:
        return _noop_action("power_nobody_to_evict", f"{text} No reclaimed pod is left to evict.")
    observed = {"watts": now_watts, "left_s": round(left_s, 1), "pods": inputs.pods, "evictable": inputs.evictable}
    return PowerAction(
        kind=PowerActionKind.EVICT,
        percent=percent,
        count=count,
        current_watts=now_watts,
        reason=Reason(rule="power_evict", text=text, threshold=spec.budget_watts, inputs=observed),
    )


def _cap_action(spec: PowerSpec, now_watts: int, state: PowerState, config: PowerConfig, over: str) -> PowerAction:
    """Cap to the budget at s0; at other levels within the percentage that may be lowered."""
    target = spec.budget_watts
    text = f"{over}: cap power to {target} W."
    if spec.level != "s0":
        left = max(config.voluntary_percent - state.lowered_percent, 0)
        if left == 0:
            return _noop_action(
                "power_lowered_enough",
                f"{over}; caps have already lowered it by {state.lowered_percent} %, the maximum.",
            )
        target = max((100 - left) * now_watts // 100, target)
        text = f"{over}: cap power to {target} W, at most {left} % lower."
    inputs = {"watts": now_watts, "lowered_percent": state.lowered_percent, "budget_watts": spec.budget_watts}
    return PowerAction(
        kind=PowerActionKind.CAP,
        target_watts=target,
        current_watts=now_watts,
        reason=Reason(rule="power_cap", text=text, threshold=spec.budget_watts, inputs=inputs),
    )


def _noop_action(rule: str, text: str) -> PowerAction:
    return PowerAction(kind=PowerActionKind.NOOP, reason=Reason(rule=rule, text=text))


def _parse_watts(annotations: Mapping[str, str], key: str) -> float:
    text = annotations.get(key, "")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value <= 0:
        raise ValueError(f"annotation {key}: {quote(text)} is not a number of watts above 0")
    return value


def check_power_annotations(annotations: Mapping[str, str], prefix: str) -> str:
    """Return what is wrong with the power alert in the node's annotations; empty without a problem."""
    try:
        parse_power_spec(annotations, prefix)
    except ValueError as error:
        return str(error)
    return ""
