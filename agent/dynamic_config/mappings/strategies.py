"""Maps StrategyGroup and PowerManagementConfiguration to settings, and names the kinds that the agent ignores. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agent.dynamic_config.mappings.field_mapping import PLUGINS_PATH, FieldMapping, SettingValues, UnusedField

_KNOWN_STRATEGIES = "borwein_v2, borwein_v3, metric_threshold and numa_cpu_pressure_eviction"


class _StrategySlot(msgspec.Struct, frozen=True):
    net: float
    offset: float


class _StrategyTime(msgspec.Struct, frozen=True):
    start: str
    end: str
    offset: float


_PARAMETERS: Mapping[str, tuple[type[Any], str]] = {
    "strategy_slots": (_StrategySlot, "slots"),
    "strategy_special_time": (_StrategyTime, "specialTimes"),
}


def _map_strategies(enabled: Sequence[Mapping[str, Any]]) -> SettingValues:
    for strategy in enabled:
        name, parameters = strategy["name"], strategy.get("parameters") or {}
        if name in ("borwein_v2", "borwein_v3"):
            yield ("inference", "strategy"), name
            for parameter, (kind, setting) in _PARAMETERS.items():
                if text := parameters.get(parameter):
                    yield ("inference", setting), _decode_entries(parameter, text, kind)
        elif name == "numa_cpu_pressure_eviction":
            yield (*PLUGINS_PATH, "numa-cpu-pressure-plugin"), True
        elif name == "metric_threshold":
            yield ("advisor", "provision", "targets", "getter"), "metric-threshold"


def _decode_entries(parameter: str, text: str, kind: type[Any]) -> list[Mapping[str, Any]]:
    """A list of JSON objects in a text, with their numbers under the names of the settings."""
    try:
        found = msgspec.json.decode(text, type=list[kind])  # type: ignore[valid-type]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{parameter} is no JSON list of objects with {', '.join(kind.__struct_fields__)}: {error}"
        ) from None
    return [
        {{"net": "below"}.get(name, name): value for name, value in msgspec.structs.asdict(each).items()}
        for each in found
    ]


def unknown_strategies(enabled: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names that nothing here answers to; `none` is nobody."""
    known = {"none", "borwein_v2", "borwein_v3", "metric_threshold", "numa_cpu_pressure_eviction"}
    return [
        f"{each['name']:.80}: only {_KNOWN_STRATEGIES} are strategies here"
        for each in enabled
        if each["name"] not in known
    ]


def _map_power(disabled: bool) -> SettingValues:
    # Switching it on takes an annotation prefix, which only the settings file has.
    if disabled:
        yield ("power", "enable"), False


STRATEGY_MAPPINGS: tuple[FieldMapping, ...] = (
    FieldMapping(
        "enabledStrategies",
        (
            "inference.strategy",
            "inference.slots",
            "inference.specialTimes",
            "eviction.plugins",
            "advisor.provision.targets.getter",
        ),
        _map_strategies,
    ),
)
POWER_MAPPINGS: tuple[FieldMapping, ...] = (FieldMapping("disablePowerAdvisor", ("power.enable",), _map_power),)
POWER_UNUSED: tuple[UnusedField, ...] = (
    UnusedField(
        "disablePowerCapping", "caps are written by whoever is told to; power.enable is all there is to switch off"
    ),
    UnusedField("powerReductionRatio", "Katalyst's own agent does not use it either; see power.voluntaryPercent"),
)
AUTH_UNUSED_REASON = (
    "who may ask this agent, and with which password, stands in the file of --web-config; it is not even fetched"
)
IRQ_UNUSED_REASON = "interrupts are left where the kernel and irqbalance put them"
BANDWIDTH_UNUSED_REASON = "memory bandwidth is divided by knobs.resctrl alone"
