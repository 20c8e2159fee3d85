"""Answers a power alert of the Node: Katalyst's power-aware plugin with its strategy `evict first`.
Watts are whole numbers. s0 lowers frequencies until the budget is met; p0 evicts reclaimed pods, then lowers
power by at most 10 % if the node is busy; p1 and p2 do nothing. An operation in the annotations (evict,
freqcap, noop) replaces the action of the level.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from enum import IntEnum
from math import ceil, e, isfinite

import msgspec

from agent.config.advisor import PowerConfig
from api.advice import PowerAction, PowerActionKind
from api.knobs import Reason
from api.rates import delta
from api.snapshot import Snapshot

NS_PER_S = 1_000_000_000
_NS_PER_US = 1000
_PLATFORM, _DRAM = "psys", "dram"
RESPONSE_S: Mapping[str, int] = {"s0": 120, "p0": 1800, "p1": 3600, "p2": 14400}
"""By level: how soon after the alert the budget has to be met."""


class PowerOperation(IntEnum):
    """What the alert asks for (power-internal-op)."""

    AUTO = 0
    THROTTLE = 1
    """Katalyst does nothing for it; neither is anything done here."""
    EVICT = 2
    FREQ_CAP = 4
    NOOP = 8


class PowerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A power alert as the node's annotations have it."""

    level: str
    """s0, p0, p1, p2, or one that nobody knows."""
    budget_watts: int
    alert_time_ns: int
    """CLOCK_REALTIME."""
    operation: PowerOperation = PowerOperation.AUTO


class PowerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when an alert is answered."""

    now_ns: int
    wall_time_ns: int
    spec: PowerSpec | None
    """None where there is no alert."""
    watts: float | None
    """What the node draws (`watts`)."""
    cpu_ratio: float | None = None
    """Busy share of the node. Where it is not known frequencies are lowered, within the same bounds, as Katalyst does."""
    pods: int = 0
    """All that run here,"""
    evictable: int = 0
    """and those of reclaimed_cores."""


class PowerState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of earlier answers to the same alert."""

    acted_ns: int | None = None
    capped: bool = False
    """Whether power has to be let go when the alert is over."""
    lowering: bool = False
    """Whether the previous answer was a cap: only then is what changed since its effect."""
    lowered_percent: int = 0
    """By caps so far, in all."""
    last_watts: int | None = None


def parse_power_spec(annotations: Mapping[str, str], prefix: str) -> PowerSpec | None:
    """The alert of a node's annotations; None without one. Raises ValueError that names the annotation."""
    start = f"{prefix}/" if prefix else ""
    level = annotations.get(f"{start}power-alert", "").lower()
    if not level:
        return None
    budget = _parse_watts(annotations, f"{start}power-budget")
    key = f"{start}power-internal-op"
    code = annotations.get(key, "0")
    try:
        operation = PowerOperation(int(code))
    except ValueError:
        raise ValueError(f"annotation {key}: {code!r} is none of 0, 1, 2, 4 and 8") from None
    key = f"{start}power-alert-time"
    when: datetime | None = None
    with suppress(ValueError):
        when = datetime.fromisoformat(annotations.get(key, ""))
    if when is None or when.tzinfo is None:
        raise ValueError(f"annotation {key}: {annotations.get(key, '')!r} is not a time such as 2026-01-02T03:04:05Z")
    return PowerSpec(
        level=level, budget_watts=int(budget), operation=operation, alert_time_ns=round(when.timestamp()) * NS_PER_S
    )


def mean_watts(before: Snapshot, now: Snapshot) -> float | None:
    """Mean power between two snapshots by RAPL: of the platform where it is metered, else of packages and memory.

    None without counters, and where one of them is new or has wrapped around.
    """
    elapsed_ns = now.taken_at_ns - before.taken_at_ns
    if elapsed_ns <= 0 or not now.node.power_uj:
        return None
    spent: dict[str, int] = {}
    for domain, energy in now.node.power_uj.items():
        change = delta(before.node.power_uj.get(domain), energy)
        if change is None:
            return None
        spent[domain] = change
    if _PLATFORM in spent:
        total = spent[_PLATFORM]
    else:
        metered = [n for n in spent if n.rpartition("/")[2] == _DRAM or (n.startswith("package") and "/" not in n)]
        if not metered:
            return None
        total = sum(spent[name] for name in metered)
    return total * _NS_PER_US / elapsed_ns


def evict_percent(budget_watts: int, watts_now: int, left_s: float) -> int:
    """Percent of pods to evict for an excess of power, 1 at least and 100 at most."""
    excess = 100 - budget_watts * 100 // watts_now
    tens_of_minutes = int(int(left_s / 60) / 10)
    return int(min(max(excess * (e / 2) ** -tens_of_minutes, 1.0), 100.0))


def advise_power(inputs: PowerInputs, memory: PowerState, config: PowerConfig) -> tuple[PowerAction, PowerState]:
    """What to do now; `noop` between two periods, and where an input is missing."""
    spec, now_ns = inputs.spec, inputs.now_ns
    if spec is None:
        if memory.capped:
            text = "The power alert is over: frequencies are let go."
            return _plain_action(PowerActionKind.RESET, "power_alert_over", text), PowerState()
        return _noop_action("power_no_alert", "There is no power alert."), PowerState()
    if memory.acted_ns is not None and now_ns < memory.acted_ns:
        memory = PowerState(capped=memory.capped)  # of another boot: what was lowered then is no longer
    if memory.acted_ns is not None and now_ns - memory.acted_ns < config.period_s * NS_PER_S:
        return _noop_action("power_settling", f"Less than {config.period_s:g} s since the previous answer."), memory
    if spec.operation is PowerOperation.NOOP:
        return _noop_action("power_told_noop", "The alert asks for nothing to be done."), memory
    if spec.level not in RESPONSE_S:
        return _noop_action("power_unknown_level", f"Nobody knows the alert level {spec.level!r}."), memory
    measured = inputs.watts
    if measured is None or not isfinite(measured) or measured < 1:
        return _noop_action("power_unknown", "What the node draws is not known, so nothing is done about it."), memory
    now_watts = int(measured)
    memory = msgspec.structs.replace(
        memory, acted_ns=now_ns, last_watts=now_watts, lowered_percent=_lowered_percent(memory, now_watts)
    )
    if now_watts <= spec.budget_watts:
        text = f"The node draws {now_watts} W, within its budget of {spec.budget_watts} W."
        return _noop_action("power_within_budget", text), msgspec.structs.replace(memory, lowering=False)
    action = _select_action(inputs, spec, now_watts, memory, config)
    cap = action.kind is PowerActionKind.CAP
    if action.kind is not PowerActionKind.NOOP:
        action = msgspec.structs.replace(action, at_ns=now_ns)
    return action, msgspec.structs.replace(memory, lowering=cap, capped=memory.capped or cap)


def _lowered_percent(memory: PowerState, now_watts: int) -> int:
    """What caps have lowered power by, in percent; what rose meanwhile was not their effect."""
    before = memory.last_watts
    if not memory.lowering or before is None or now_watts >= before:
        return memory.lowered_percent
    return memory.lowered_percent + (before - now_watts) * 100 // before


def _select_action(
    inputs: PowerInputs, spec: PowerSpec, now_watts: int, memory: PowerState, config: PowerConfig
) -> PowerAction:
    over = f"The node draws {now_watts} W of {spec.budget_watts} W at alert {spec.level}"
    match _resolve_operation(inputs, spec, memory, config):
        case PowerOperation.EVICT:
            return _evict_action(inputs, spec, now_watts, over)
        case PowerOperation.FREQ_CAP:
            return _cap_action(spec, now_watts, memory, config, over)
        case _:
            return _noop_action("power_nothing_to_do", f"{over}: nothing is done at this level, or nothing can be.")


def _resolve_operation(inputs: PowerInputs, spec: PowerSpec, memory: PowerState, config: PowerConfig) -> PowerOperation:
    """What the alert asks for, or what its level means."""
    if spec.operation is not PowerOperation.AUTO:
        return spec.operation
    if spec.level == "s0":
        return PowerOperation.FREQ_CAP
    if spec.level != "p0":
        return PowerOperation.NOOP
    if inputs.evictable > 0:
        return PowerOperation.EVICT
    idle = inputs.cpu_ratio is not None and inputs.cpu_ratio <= config.voluntary_cpu_ratio
    return (
        PowerOperation.NOOP if idle or memory.lowered_percent >= config.voluntary_percent else PowerOperation.FREQ_CAP
    )


def _evict_action(situation: PowerInputs, spec: PowerSpec, now_watts: int, over: str) -> PowerAction:
    left_s = (spec.alert_time_ns - situation.wall_time_ns) / NS_PER_S + RESPONSE_S[spec.level]
    percent = evict_percent(spec.budget_watts, now_watts, left_s)
    count = min(ceil(situation.pods * percent / 100), situation.evictable)
    text = f"{over}, with {left_s / 60:.0f} min left: {percent} % of {situation.pods} pods go, {count} reclaimed ones."
    if count == 0:
        return _noop_action("power_nobody_to_evict", f"{text} There are none.")
    inputs = {"watts": now_watts, "left_s": round(left_s, 1), "pods": situation.pods, "evictable": situation.evictable}
    return PowerAction(
        kind=PowerActionKind.EVICT,
        percent=percent,
        count=count,
        current_watts=now_watts,
        reason=Reason(rule="power_evict", text=text, threshold=spec.budget_watts, inputs=inputs),
    )


def _cap_action(spec: PowerSpec, now_watts: int, memory: PowerState, config: PowerConfig, over: str) -> PowerAction:
    """A cap to the budget at s0; at other levels no lower than what is left of the percentage that may be lowered."""
    target = spec.budget_watts
    text = f"{over}: power is capped to {target} W."
    if spec.level != "s0":
        left = max(config.voluntary_percent - memory.lowered_percent, 0)
        if left == 0:
            return _noop_action(
                "power_lowered_enough", f"{over}, and caps have lowered it by {memory.lowered_percent} % already."
            )
        target = max((100 - left) * now_watts // 100, target)
        text = f"{over}: power is capped to {target} W, {left} % lower at most."
    inputs = {"watts": now_watts, "lowered_percent": memory.lowered_percent, "budget_watts": spec.budget_watts}
    return PowerAction(
        kind=PowerActionKind.CAP,
        target_watts=target,
        current_watts=now_watts,
        reason=Reason(rule="power_cap", text=text, threshold=spec.budget_watts, inputs=inputs),
    )


def _plain_action(kind: PowerActionKind, rule: str, text: str) -> PowerAction:
    return PowerAction(kind=kind, reason=Reason(rule=rule, text=text))


def _noop_action(rule: str, text: str) -> PowerAction:
    return _plain_action(PowerActionKind.NOOP, rule, text)


def _parse_watts(annotations: Mapping[str, str], key: str) -> float:
    text = annotations.get(key, "")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < 0:
        raise ValueError(f"annotation {key}: {text!r} is not a number of watts")
    return value


def check_power_annotations(annotations: Mapping[str, str], prefix: str) -> str:
    """What is wrong with a power alert among the node's annotations; empty where all is well."""
    try:
        parse_power_spec(annotations, prefix)
    except ValueError as error:
        return str(error)
    return ""
