"""Translates one configuration object of the cluster into settings, or raises DynamicConfigRefused. Pure.
Objects are validated here even though the API server checks them: a cluster's CRD may be older or looser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

import msgspec

from agent.dynamic_config.mappings import admin_qos, strategies, transparent_offloading
from agent.dynamic_config.mappings.field_mapping import FieldMapping, SettingPath, UnusedField, get_field
from api.katalyst.admin_qos import AdminQoSConfig
from api.katalyst.irq_tuning import IRQTuningConfig
from api.katalyst.node_configs import (
    AuthConfig,
    MemoryBandwidthConfig,
    PowerManagementConfig,
    StrategyGroupStatus,
    TransparentMemoryOffloadingConfig,
)
from common.validation import describe_validation_error

GROUP, VERSION = "config.katalyst.kubewharf.io", "v1alpha1"
_ROLLOUT_STATUS_FIELDS = frozenset(
    ("targetNodes", "canaryNodes", "updatedTargetNodes", "updatedNodes", "currentHash", "collisionCount",
     "observedGeneration", "conditions")
)  # fmt: skip
"""How far a rollout is; no configuration."""
MAX_TEXT_CHARS, MAX_ENTRIES, MAX_TOTAL_ENTRIES = 4096, 4096, 8192
"""Characters of a text, entries of a list or map, and of all of them together. What is obeyed is in memory, on disk and on the
page of every node, and is made sense of between two rounds."""


class DynamicConfigRefused(ValueError):
    """An object that cannot be obeyed; the message names the field and the remedy."""


class MappedValue(NamedTuple):
    """What one setting is to be, and the field that says so."""

    value: Any
    field: str


class Translation(NamedTuple):
    """`settings` by path; `unused` are fields that nothing here obeys, with the reason."""

    settings: Mapping[SettingPath, MappedValue]
    unused: tuple[str, ...]


class ConfigKind(NamedTuple):
    """How objects of one kind are read."""

    kind: str
    root: tuple[str, ...]
    """Where in the object the configuration is."""
    type: type[msgspec.Struct]
    rules: tuple[FieldMapping, ...] = ()
    unused: tuple[UnusedField, ...] = ()
    all_unused: str = ""
    """Why nothing of it is obeyed, where nothing is; such objects need not be fetched."""


_CONFIG = ("spec", "config")
CONFIG_KINDS: Mapping[str, ConfigKind] = {
    f"{each.kind.lower()}s": each
    for each in (
        ConfigKind(
            "AdminQoSConfiguration", _CONFIG, AdminQoSConfig,
            (*admin_qos.ADMIN_QOS_MAPPINGS, *admin_qos.EVICTION_MAPPINGS), (*admin_qos.ADMIN_QOS_UNUSED, *admin_qos.EVICTION_UNUSED),
        ),
        ConfigKind("TransparentMemoryOffloadingConfiguration", _CONFIG, TransparentMemoryOffloadingConfig, transparent_offloading.OFFLOADING_MAPPINGS),
        ConfigKind("StrategyGroup", ("status",), StrategyGroupStatus, strategies.STRATEGY_MAPPINGS),
        ConfigKind(
            "PowerManagementConfiguration", _CONFIG, PowerManagementConfig, strategies.POWER_MAPPINGS, strategies.POWER_UNUSED
        ),
        ConfigKind("AuthConfiguration", _CONFIG, AuthConfig, all_unused=strategies.AUTH_UNUSED_REASON),
        ConfigKind("IRQTuningConfiguration", _CONFIG, IRQTuningConfig, all_unused=strategies.IRQ_UNUSED_REASON),
        ConfigKind("MemoryBandwidthConfiguration", _CONFIG, MemoryBandwidthConfig, all_unused=strategies.BANDWIDTH_UNUSED_REASON),
    )
}  # fmt: skip
"""By the name of the resource. The order is that of precedence: where two kinds set one setting, the later one counts."""


def translate_object(grammar: ConfigKind, body: Any) -> Translation:
    """The settings that an object says. `body` is the whole object as decoded JSON. Raises Refused."""
    said, where = body, ".".join(grammar.root)
    for name in grammar.root:
        said = said.get(name) if isinstance(said, Mapping) else None
    _check_size(said, where)
    config = _convert_config(grammar, said, where)
    settings: dict[SettingPath, MappedValue] = {}
    for rule in grammar.rules:
        found = get_field(config, rule.field)
        if found is None:
            continue
        try:
            settings |= {path: MappedValue(value, rule.field) for path, value in rule.put(found)}
        except ValueError as error:
            raise DynamicConfigRefused(f"{where}.{rule.field}: {error}") from None
    return Translation(settings, tuple(_unused_fields(grammar, config, said)))


def _check_size(said: Any, where: str) -> None:
    """Raises Refused for what is out of proportion, wherever in the object, known or not."""
    left, entries = [(said, where)], 0
    while left:
        part, path = left.pop()
        if isinstance(part, str) and len(part) > MAX_TEXT_CHARS:
            raise DynamicConfigRefused(
                f"{path}: has {len(part)} characters, and at most {MAX_TEXT_CHARS} are taken: shorten it"
            )
        if isinstance(part, Mapping | list | tuple) and len(part) > MAX_ENTRIES:
            raise DynamicConfigRefused(
                f"{path}: has {len(part)} entries, and at most {MAX_ENTRIES} are taken: leave some out"
            )
        entries += len(part) if isinstance(part, Mapping | list | tuple) else 0
        if entries > MAX_TOTAL_ENTRIES:
            raise DynamicConfigRefused(
                f"{where}: has more than {MAX_TOTAL_ENTRIES} entries in its lists and maps together: leave some out"
            )
        if isinstance(part, Mapping):
            left += [(value, f"{path}.{name:.60}") for name, value in part.items()]
        elif isinstance(part, list | tuple):
            left += [(value, f"{path}[{number}]") for number, value in enumerate(part)]


def _convert_config(grammar: ConfigKind, said: Any, where: str) -> Mapping[str, Any]:
    """The configuration as its type has it: numbers that were written as 3.0 are whole, and what is null is absent."""
    if said is None:
        return {}
    try:
        typed = msgspec.convert(said, grammar.type)
    except msgspec.ValidationError as error:
        found = describe_validation_error(error, said, grammar.type)
        raise DynamicConfigRefused(
            f"{where}: {found[11:]}" if found.startswith("top level: ") else f"{where}.{found}"
        ) from None
    builtins: Mapping[str, Any] = msgspec.to_builtins(typed)
    return builtins


def _unused_fields(grammar: ConfigKind, config: Mapping[str, Any], raw: Any) -> Iterator[str]:
    if grammar.all_unused:
        yield f"all of it: {grammar.all_unused}"
        return
    told: set[str] = set()
    for each in grammar.unused:
        # A field's own reason goes before that of the whole section.
        if get_field(config, each.field) is not None and not any(field.startswith(each.field) for field in told):
            told.add(each.field)
            yield f"{each.field}: {each.why}"
    if grammar.kind == "StrategyGroup":
        yield from (
            f"enabledStrategies: {each}"
            for each in strategies.unknown_strategies(config.get("enabledStrategies") or ())
        )
    yield from (
        f"{path}: no such field is known here"
        for path in _unknown_fields(raw, grammar.type)
        if path not in _ROLLOUT_STATUS_FIELDS
    )


def _unknown_fields(document: Any, kind: Any, path: str = "") -> Iterator[str]:
    """Names that the type does not have: of a newer Katalyst's, or mistakes that a loose CRD let through."""
    struct = next((part for part in (kind, *get_args(kind)) if hasattr(part, "__struct_fields__")), None)
    if struct is None or not isinstance(document, Mapping):
        return
    fields = {each.encode_name: each.type for each in msgspec.structs.fields(struct)}
    for name, value in document.items():
        below = f"{path}.{name:.60}".lstrip(".")
        if name in fields:
            yield from _unknown_fields(value, fields[name], below)
        elif value is not None:
            yield below
