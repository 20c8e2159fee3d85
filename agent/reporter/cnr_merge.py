"""Merges the fields of reporter plugins into the agent's CustomNodeResource, by Katalyst's rules.
It is pure. Lists are concatenated, objects merged by name, and of other values the last plugin wins; zones are
merged by type and name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from agent.reporter.cnr import CnrReport, taint_identity
from api.katalyst.cnr import CustomNodeResourceSpec, CustomNodeResourceStatus, QosTaint
from api.katalyst.meta import ObjectMeta
from api.node_resources import ObjectSection, ReportedField

GROUP, VERSION, KIND = "node.katalyst.kubewharf.io", "v1alpha1", "CustomNodeResource"
RESERVED_FIELDS = {"Conditions": "the lifecycle controller owns them"}
"""Status fields that plugins must not write, with the reason: the list has a single owner."""
METADATA_FIELDS = ("Labels", "Annotations")
"""Metadata fields that plugins may write."""
_MODELS: Mapping[ObjectSection, type[msgspec.Struct]] = {
    ObjectSection.SPEC: CustomNodeResourceSpec,
    ObjectSection.STATUS: CustomNodeResourceStatus,
    ObjectSection.METADATA: ObjectMeta,
}
_FIELD_TYPES = {
    (part, f"{field.encode_name[0].upper()}{field.encode_name[1:]}"): (field.encode_name, field.type)
    for part, model in _MODELS.items()
    for field in msgspec.structs.fields(model)
    if part is not ObjectSection.METADATA or field.encode_name.capitalize() in METADATA_FIELDS
}
"""JSON name and type of each field, by section and Go name."""


class MergedCnr(msgspec.Struct, frozen=True, kw_only=True):
    """Desired CustomNodeResource: the agent's fields merged with those of plugins."""

    spec: Mapping[str, Any]
    """Body of an apply of the object; taints are written separately."""
    taints: tuple[QosTaint, ...]
    status: Mapping[str, Any]
    """Body of an apply of the status; empty while the agent's own status is unknown."""
    refused: tuple[str, ...] = ()
    """Plugin fields left out: plugin, field and reason."""


def merge_plugin_fields(own: CnrReport, fields: Iterable[ReportedField]) -> MergedCnr:
    """Merge plugin fields into the agent's report. An invalid field is left out and listed in `refused`; other fields of the
    same plugin stay."""
    body = own.spec_body()
    sections: dict[ObjectSection, dict[str, Any]] = {
        ObjectSection.SPEC: dict(body["spec"]),
        ObjectSection.STATUS: dict(own.status_body().get("status", {})),
        ObjectSection.METADATA: dict(body.get("metadata", {})),
    }
    taints, refused = {taint_identity(taint): taint for taint in own.taints}, []
    for field in fields:
        name, value, why = _decode_field(field)
        if why:
            refused.append(f"reporter plugin {field.plugin}: {field.part} {field.name} {why}")
        elif value is None:
            continue
        elif name == "taints":
            for taint in msgspec.convert(value, tuple[QosTaint, ...]):
                taints.setdefault(taint_identity(taint), taint)
        else:
            section = sections[field.part]
            section[name] = _merge_values(section.get(name), value)
    status = sections[ObjectSection.STATUS]
    if zones := status.get("topologyZone"):
        status["topologyZone"] = merge_zones(zones)
    metadata = {"metadata": sections[ObjectSection.METADATA]} if sections[ObjectSection.METADATA] else {}
    return MergedCnr(
        spec={**metadata, "spec": sections[ObjectSection.SPEC]},
        taints=tuple(taints.values()),
        # An apply with the zones of plugins only would remove the reclaimable resources from the object.
        status={} if own.status is None else {"status": status},
        refused=tuple(refused),
    )


def merge_zones(zones: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge zones of the same type and name recursively, in the order of first mention."""
    by_name: dict[Any, dict[str, Any]] = {}
    for zone in zones:
        merged = by_name.setdefault((zone["type"], zone["name"]), {"type": zone["type"], "name": zone["name"]})
        for name, value in zone.items():
            merged[name] = _ZONE_MERGES[name](merged[name], value) if name in merged and name in _ZONE_MERGES else value
    for zone in by_name.values():
        if zone.get("children"):
            zone["children"] = merge_zones(zone["children"])
    return list(by_name.values())


def _decode_field(field: ReportedField) -> tuple[str, Any, str]:
    """Return the JSON name, the value, and a reason; with a reason the field is invalid."""
    if (field.group, field.version, field.kind) != (GROUP, VERSION, KIND):
        return "", None, f"is of kind {field.kind}.{field.version}.{field.group}; only {KIND} is reported here"
    if field.part is ObjectSection.STATUS and field.name in RESERVED_FIELDS:
        return "", None, f"must not be written by a plugin: {RESERVED_FIELDS[field.name]}"
    if (field.part, field.name) not in _FIELD_TYPES:
        names = ", ".join(
            sorted(name for part, name in _FIELD_TYPES if part is field.part and name not in RESERVED_FIELDS)
        )
        return "", None, f"is no field; choose from {names}"
    name, kind = _FIELD_TYPES[field.part, field.name]
    value = msgspec.json.decode(field.value)
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return "", None, f"is invalid: {error}"
    return name, value, ""


def _merge_values(current: Any, new: Any) -> Any:
    if isinstance(current, list) and isinstance(new, list):
        return [*current, *new]
    if isinstance(current, Mapping) and isinstance(new, Mapping):
        return {
            **current,
            **{name: _merge_values(current.get(name), value) for name, value in new.items() if value is not None},
        }
    return new


def _merge_resources(current: Any, new: Any) -> Any:
    """Merge amounts by name, where the first value wins, and concatenate lists (packages, pools)."""
    if isinstance(current, list) and isinstance(new, list):
        return [*current, *new]
    if not isinstance(current, Mapping) or not isinstance(new, Mapping):
        return new if current is None else current
    return {
        **current,
        **{name: _merge_resources(current[name], value) if name in current else value for name, value in new.items()},
    }


def _merge_by_name(
    *keys: str, join: Callable[[Any, Any], Any] | None = None, within: str = ""
) -> Callable[[Any, Any], Any]:
    def joined(current: Any, new: Any) -> list[Any]:
        by_key = {tuple(item.get(key) for key in keys): item for item in current or ()}
        for item in new or ():
            key = tuple(item.get(name) for name in keys)
            if key not in by_key:
                by_key[key] = item
            elif join is not None:
                by_key[key] = {**by_key[key], within: join(by_key[key].get(within) or {}, item.get(within) or {})}
        return list(by_key.values())

    return joined


_ZONE_MERGES: Mapping[str, Callable[[Any, Any], Any]] = {
    "resources": lambda current, new: _merge_resources(current or {}, new or {}),
    "attributes": _merge_by_name("name"),
    "allocations": _merge_by_name("consumer", join=_merge_resources, within="requests"),
    "siblings": _merge_by_name("type", "name"),
    "children": lambda current, new: [*(current or ()), *(new or ())],
}
