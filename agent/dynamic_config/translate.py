"""Translates one configuration object of the cluster into settings, or raises DynamicConfigRefused. Pure. Objects are
validated here even though the API server checks them: a cluster's CRD may be older or looser."""

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
"""Fields about the rollout, not configuration."""
MAX_TEXT_CHARS, MAX_ENTRIES, MAX_TOTAL_ENTRIES = 4096, 4096, 8192
"""Limits of characters of a text, entries of a list or map, and entries of the whole object: applied objects are in
memory, on disk and on the page of every node, and are translated on the event loop."""


class DynamicConfigRefused(ValueError):
    """An invalid object; the message names the field and the remedy."""


class MappedValue(NamedTuple):
    """Value of a setting, and the field that sets it."""

    value: Any
    field: str


class Translation(NamedTuple):
    """Settings by path; `unused` are fields without effect, with the reason."""

    settings: Mapping[SettingPath, MappedValue]
    unused: tuple[str, ...]


class ConfigKind(NamedTuple):
    """How objects of one kind are read."""

    kind: str
    root: tuple[str, ...]
    """Path of the configuration in the object."""
    type: type[msgspec.Struct]
    rules: tuple[FieldMapping, ...] = ()
    unused: tuple[UnusedField, ...] = ()
    all_unused: str = ""
    """Why the whole kind has no effect; such objects are not fetched."""


_CONFIG = ("spec", "config")
CONFIG_KINDS: Mapping[str, ConfigKind] = {
    f"{each.kind.lower()}s": each
    for each in (
        ConfigKind(
            "AdminQoSConfiguration", _CONFIG, AdminQoSConfig,
            (*admin_qos.ADMIN_QOS_MAPPINGS, *admin_qos.EVICTION_MAPPINGS),
            (*admin_qos.ADMIN_QOS_UNUSED, *admin_qos.EVICTION_UNUSED),
        ),
        ConfigKind(
            "TransparentMemoryOffloadingConfiguration", _CONFIG, TransparentMemoryOffloadingConfig,
            transparent_offloading.OFFLOADING_MAPPINGS,
        ),
        ConfigKind("StrategyGroup", ("status",), StrategyGroupStatus, strategies.STRATEGY_MAPPINGS),
        ConfigKind(
            "PowerManagementConfiguration", _CONFIG, PowerManagementConfig, strategies.POWER_MAPPINGS, strategies.POWER_UNUSED
        ),
        ConfigKind("AuthConfiguration", _CONFIG, AuthConfig, all_unused=strategies.AUTH_UNUSED_REASON),
        ConfigKind("IRQTuningConfiguration", _CONFIG, IRQTuningConfig, all_unused=strategies.IRQ_UNUSED_REASON),
        ConfigKind(
            "MemoryBandwidthConfiguration", _CONFIG, MemoryBandwidthConfig, all_unused=strategies.BANDWIDTH_UNUSED_REASON
        ),
    )
}  # fmt: skip
"""By resource name, in order of precedence: if two kinds set one setting, the later one counts."""


def translate_object(kind: ConfigKind, body: Any) -> Translation:
    """Return the settings of an object. `body` is the decoded JSON object. Raises DynamicConfigRefused."""
    section, where = body, ".".join(kind.root)
    for name in kind.root:
        section = section.get(name) if isinstance(section, Mapping) else None
    _check_size(section, where)
    config = _convert_config(kind, section, where)
    settings: dict[SettingPath, MappedValue] = {}
    for mapping in kind.rules:
        value = get_field(config, mapping.field)
        if value is None:
            continue
        try:
            settings |= {path: MappedValue(value, mapping.field) for path, value in mapping.put(value)}
        except ValueError as error:
            raise DynamicConfigRefused(f"{where}.{mapping.field}: {error}") from None
    return Translation(settings, tuple(_unused_fields(kind, config, section)))


def _check_size(document: Any, where: str) -> None:
    """Raise DynamicConfigRefused if any part of the object exceeds a limit, known or not."""
    pending, entries = [(document, where)], 0
    while pending:
        part, path = pending.pop()
        if isinstance(part, str) and len(part) > MAX_TEXT_CHARS:
            raise DynamicConfigRefused(f"{path}: has {len(part)} characters, more than {MAX_TEXT_CHARS}: shorten it")
        if isinstance(part, Mapping | list | tuple) and len(part) > MAX_ENTRIES:
            raise DynamicConfigRefused(f"{path}: has {len(part)} entries, more than {MAX_ENTRIES}: remove some")
        entries += len(part) if isinstance(part, Mapping | list | tuple) else 0
        if entries > MAX_TOTAL_ENTRIES:
            raise DynamicConfigRefused(
                f"{where}: has more than {MAX_TOTAL_ENTRIES} entries in its lists and maps: remove some"
            )
        if isinstance(part, Mapping):
            pending += [(value, f"{path}.{name:.60}") for name, value in part.items()]
        elif isinstance(part, list | tuple):
            pending += [(value, f"{path}[{number}]") for number, value in enumerate(part)]


def _convert_config(kind: ConfigKind, section: Any, where: str) -> Mapping[str, Any]:
    """Return the configuration as its type: numbers such as 3.0 become integers, null fields are dropped."""
    if section is None:
        return {}
    try:
        typed = msgspec.convert(section, kind.type)
    except msgspec.ValidationError as error:
        problem = describe_validation_error(error, section, kind.type)
        raise DynamicConfigRefused(
            f"{where}: {problem[11:]}" if problem.startswith("top level: ") else f"{where}.{problem}"
        ) from None
    builtins: Mapping[str, Any] = msgspec.to_builtins(typed)
    return builtins


def _unused_fields(kind: ConfigKind, config: Mapping[str, Any], raw: Any) -> Iterator[str]:
    if kind.all_unused:
        yield f"the whole object: {kind.all_unused}"
        return
    reported: set[str] = set()
    for each in kind.unused:
        # A field's own reason precedes that of its section.
        if get_field(config, each.field) is not None and not any(field.startswith(each.field) for field in reported):
            reported.add(each.field)
            yield f"{each.field}: {each.why}"
    if kind.kind == "StrategyGroup":
        yield from (
            f"enabledStrategies: {each}"
            for each in strategies.unknown_strategies(config.get("enabledStrategies") or ())
        )
    yield from (
        f"{path}: is not a known field"
        for path in _unknown_fields(raw, kind.type)
        if path not in _ROLLOUT_STATUS_FIELDS
    )


def _unknown_fields(document: Any, kind: Any, path: str = "") -> Iterator[str]:
    """Yield fields that the type lacks: those of a newer Katalyst, or mistakes that a loose CRD let through."""
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
