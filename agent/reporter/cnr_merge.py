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
RESERVED_FIELDS = {"Conditions": "they are the controller's"}
"""Fields that no plugin is let write: their lists have one owner."""
METADATA_FIELDS = ("Labels", "Annotations")
"""Of metadata a plugin may say these alone."""
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
"""By Go's name of a field: its name on the wire, and what it may hold."""


class MergedCnr(msgspec.Struct, frozen=True, kw_only=True):
    """The object as it is to be, as far as this node says so."""

    spec: Mapping[str, Any]
    """Body of an apply of the object, without taints."""
    taints: tuple[QosTaint, ...]
    status: Mapping[str, Any]
    """Of one of its status; empty while ours is not known."""
    refused: tuple[str, ...] = ()
    """What plugins said that cannot be: who, which field, and why."""


def merge_plugin_fields(own: CnrReport, fields: Iterable[ReportedField]) -> MergedCnr:
    """Everything in one. A field that cannot be is left out, and said; what the same plugin says else stays."""
    said: dict[ObjectSection, dict[str, Any]] = {
        ObjectSection.SPEC: dict(own.spec_body()["spec"]),
        ObjectSection.STATUS: dict(own.status_body().get("status", {})),
        ObjectSection.METADATA: {},
    }
    taints, refused = {taint_identity(one): one for one in own.taints}, []
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
            into = said[field.part]
            into[name] = _merge_values(into.get(name), value)
    status = said[ObjectSection.STATUS]
    if zones := status.get("topologyZone"):
        status["topologyZone"] = merge_zones(zones)
    metadata = {"metadata": said[ObjectSection.METADATA]} if said[ObjectSection.METADATA] else {}
    return MergedCnr(
        spec={**metadata, "spec": said[ObjectSection.SPEC]},
        taints=tuple(taints.values()),
        # Without ours the list of zones would be theirs alone, and what is lent would be taken away.
        status={} if own.status is None else {"status": status},
        refused=tuple(refused),
    )


def merge_zones(zones: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Zones of one type and name as one, in the order of their first mention, and so below them."""
    by_name: dict[Any, dict[str, Any]] = {}
    for zone in zones:
        there = by_name.setdefault((zone["type"], zone["name"]), {"type": zone["type"], "name": zone["name"]})
        for name, value in zone.items():
            there[name] = _ZONE_MERGES[name](there[name], value) if name in there and name in _ZONE_MERGES else value
    for zone in by_name.values():
        if zone.get("children"):
            zone["children"] = merge_zones(zone["children"])
    return list(by_name.values())


def _decode_field(field: ReportedField) -> tuple[str, Any, str]:
    """Its name on the wire and its value; or why it cannot be."""
    if (field.group, field.version, field.kind) != (GROUP, VERSION, KIND):
        return "", None, f"is of a {field.kind}.{field.version}.{field.group}, and only {KIND}s are reported here"
    if field.part is ObjectSection.STATUS and field.name in RESERVED_FIELDS:
        return "", None, f"cannot be said by a plugin: {RESERVED_FIELDS[field.name]}"
    if (field.part, field.name) not in _FIELD_TYPES:
        known = ", ".join(
            sorted(name for part, name in _FIELD_TYPES if part is field.part and name not in RESERVED_FIELDS)
        )
        return "", None, f"is no field; choose from {known}"
    name, kind = _FIELD_TYPES[field.part, field.name]
    value = msgspec.json.decode(field.value)
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return "", None, f"is not what it should be: {error}"
    return name, value, ""


def _merge_values(there: Any, new: Any) -> Any:
    if isinstance(there, list) and isinstance(new, list):
        return [*there, *new]
    if isinstance(there, Mapping) and isinstance(new, Mapping):
        return {
            **there,
            **{name: _merge_values(there.get(name), value) for name, value in new.items() if value is not None},
        }
    return new


def _merge_resources(there: Any, new: Any) -> Any:
    """Amounts by name, the first word counting; packages and pools strung together."""
    if isinstance(there, list) and isinstance(new, list):
        return [*there, *new]
    if not isinstance(there, Mapping) or not isinstance(new, Mapping):
        return new if there is None else there
    return {
        **there,
        **{name: _merge_resources(there[name], value) if name in there else value for name, value in new.items()},
    }


def _merge_by_name(
    *keys: str, join: Callable[[Any, Any], Any] | None = None, within: str = ""
) -> Callable[[Any, Any], Any]:
    def joined(there: Any, new: Any) -> list[Any]:
        found = {tuple(one.get(key) for key in keys): one for one in there or ()}
        for one in new or ():
            key = tuple(one.get(name) for name in keys)
            if key not in found:
                found[key] = one
            elif join is not None:
                found[key] = {**found[key], within: join(found[key].get(within) or {}, one.get(within) or {})}
        return list(found.values())

    return joined


_ZONE_MERGES: Mapping[str, Callable[[Any, Any], Any]] = {
    "resources": lambda there, new: _merge_resources(there or {}, new or {}),
    "attributes": _merge_by_name("name"),
    "allocations": _merge_by_name("consumer", join=_merge_resources, within="requests"),
    "siblings": _merge_by_name("type", "name"),
    "children": lambda there, new: [*(there or ()), *(new or ())],
}
