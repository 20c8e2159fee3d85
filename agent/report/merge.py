"""What reporter plugins say of the node's CustomNodeResource, laid over what we say of it, by Katalyst's rules. Pure.

Ours comes first and the plugins follow by their names. Of one field lists are strung together, objects merged name by name, and
of anything else the last word counts; then topology zones of one type and name become one, in which the first word counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from agent.report.cnr import Ours, identity
from api.crds.meta import ObjectMeta
from api.crds.node import CustomNodeResourceSpec, CustomNodeResourceStatus, Taint
from api.reports import Part, ReportedField

GROUP, VERSION, KIND = "node.katalyst.kubewharf.io", "v1alpha1", "CustomNodeResource"
OTHERS = {"Conditions": "they are the controller's"}
"""Fields that no plugin is let write: their lists have one owner."""
LABELLED = ("Labels", "Annotations")
"""Of metadata a plugin may say these alone."""
_MODELS: Mapping[Part, type[msgspec.Struct]] = {
    Part.SPEC: CustomNodeResourceSpec,
    Part.STATUS: CustomNodeResourceStatus,
    Part.METADATA: ObjectMeta,
}
_TYPES = {
    (part, f"{field.encode_name[0].upper()}{field.encode_name[1:]}"): (field.encode_name, field.type)
    for part, model in _MODELS.items()
    for field in msgspec.structs.fields(model)
    if part is not Part.METADATA or field.encode_name.capitalize() in LABELLED
}
"""By Go's name of a field: its name on the wire, and what it may hold."""


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """The object as it is to be, as far as this node says so."""

    spec: Mapping[str, Any]
    """Body of an apply of the object, without taints."""
    taints: tuple[Taint, ...]
    status: Mapping[str, Any]
    """Of one of its status; empty while ours is not known."""
    refused: tuple[str, ...] = ()
    """What plugins said that cannot be: who, which field, and why."""


def merged(own: Ours, fields: Iterable[ReportedField]) -> Whole:
    """Everything in one. A field that cannot be is left out, and said; what the same plugin says else stays."""
    said: dict[Part, dict[str, Any]] = {
        Part.SPEC: dict(own.spec_body()["spec"]),
        Part.STATUS: dict(own.status_body().get("status", {})),
        Part.METADATA: {},
    }
    taints, refused = {identity(one): one for one in own.taints}, []
    for field in fields:
        name, value, why = _read(field)
        if why:
            refused.append(f"reporter plugin {field.plugin}: {field.part} {field.name} {why}")
        elif value is None:
            continue
        elif name == "taints":
            for taint in msgspec.convert(value, tuple[Taint, ...]):
                taints.setdefault(identity(taint), taint)
        else:
            into = said[field.part]
            into[name] = _merge(into.get(name), value)
    status = said[Part.STATUS]
    if zones := status.get("topologyZone"):
        status["topologyZone"] = one_each(zones)
    metadata = {"metadata": said[Part.METADATA]} if said[Part.METADATA] else {}
    return Whole(
        spec={**metadata, "spec": said[Part.SPEC]},
        taints=tuple(taints.values()),
        # Without ours the list of zones would be theirs alone, and what is lent would be taken away.
        status={} if own.status is None else {"status": status},
        refused=tuple(refused),
    )


def one_each(zones: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Zones of one type and name as one, in the order of their first mention, and so below them."""
    by_name: dict[Any, dict[str, Any]] = {}
    for zone in zones:
        there = by_name.setdefault((zone["type"], zone["name"]), {"type": zone["type"], "name": zone["name"]})
        for name, value in zone.items():
            there[name] = _JOINS[name](there[name], value) if name in there and name in _JOINS else value
    for zone in by_name.values():
        if zone.get("children"):
            zone["children"] = one_each(zone["children"])
    return list(by_name.values())


def _read(field: ReportedField) -> tuple[str, Any, str]:
    """Its name on the wire and its value; or why it cannot be."""
    if (field.group, field.version, field.kind) != (GROUP, VERSION, KIND):
        return "", None, f"is of a {field.kind}.{field.version}.{field.group}, and only {KIND}s are reported here"
    if field.part is Part.STATUS and field.name in OTHERS:
        return "", None, f"cannot be said by a plugin: {OTHERS[field.name]}"
    if (field.part, field.name) not in _TYPES:
        known = ", ".join(sorted(name for part, name in _TYPES if part is field.part and name not in OTHERS))
        return "", None, f"is no field; choose from {known}"
    name, kind = _TYPES[field.part, field.name]
    value = msgspec.json.decode(field.value)
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return "", None, f"is not what it should be: {error}"
    return name, value, ""


def _merge(there: Any, new: Any) -> Any:
    if isinstance(there, list) and isinstance(new, list):
        return [*there, *new]
    if isinstance(there, Mapping) and isinstance(new, Mapping):
        return {**there, **{name: _merge(there.get(name), value) for name, value in new.items() if value is not None}}
    return new


def _resources(there: Any, new: Any) -> Any:
    """Amounts by name, the first word counting; packages and pools strung together."""
    if isinstance(there, list) and isinstance(new, list):
        return [*there, *new]
    if not isinstance(there, Mapping) or not isinstance(new, Mapping):
        return new if there is None else there
    return {
        **there,
        **{name: _resources(there[name], value) if name in there else value for name, value in new.items()},
    }


def _named(*keys: str, join: Callable[[Any, Any], Any] | None = None, within: str = "") -> Callable[[Any, Any], Any]:
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


_JOINS: Mapping[str, Callable[[Any, Any], Any]] = {
    "resources": lambda there, new: _resources(there or {}, new or {}),
    "attributes": _named("name"),
    "allocations": _named("consumer", join=_resources, within="requests"),
    "siblings": _named("type", "name"),
    "children": lambda there, new: [*(there or ()), *(new or ())],
}
