"""Maps StrategyGroup and PowerManagementConfiguration to settings, and names the kinds that the agent ignores. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """Decode a JSON list of objects in a text, with the settings' names."""
    try:
        entries = msgspec.json.decode(text, type=list[kind])  # type: ignore[valid-type]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{parameter} is not a JSON list of objects with {', '.join(kind.__struct_fields__)}: {error}"
        ) from None
    return [
        {{"net": "below"}.get(name, name): value for name, value in msgspec.structs.asdict(each).items()}
        for each in entries
    ]


def unknown_strategies(enabled: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a message for each strategy without an implementation here; `none` is no strategy."""
    names = {"none", "borwein_v2", "borwein_v3", "metric_threshold", "numa_cpu_pressure_eviction"}
    return [
        f"{each['name']:.80}: is not one of the strategies {_KNOWN_STRATEGIES}"
        for each in enabled
        if each["name"] not in names
    ]


def _map_power(setting: str) -> Callable[[bool], SettingValues]:
    def switch_off(disabled: bool) -> SettingValues:
        # The answer to power alerts needs an annotation prefix, which only the settings file has.
        if disabled:
            yield ("power", setting), False

    return switch_off


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
POWER_MAPPINGS: tuple[FieldMapping, ...] = (
    FieldMapping("disablePowerAdvisor", ("power.enable",), _map_power("enable")),
    FieldMapping("disablePowerCapping", ("power.capping",), _map_power("capping")),
)
POWER_UNUSED: tuple[UnusedField, ...] = (
    UnusedField("powerReductionRatio", "Katalyst's own agent ignores it too; see power.voluntaryPercent"),
)
AUTH_UNUSED_REASON = "the file of --web-config defines accounts and passwords of this agent; the object is not fetched"
IRQ_UNUSED_REASON = "the kernel and irqbalance place interrupts"
BANDWIDTH_UNUSED_REASON = "only knobs.resctrl divides memory bandwidth"
