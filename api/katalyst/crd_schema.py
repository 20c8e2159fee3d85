"""Generates CustomResourceDefinitions with structural OpenAPI v3 schemas from the structs of api.katalyst.
A type that a structural schema cannot express raises TypeError that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import inspect

from api.katalyst.kinds import KatalystKind, KindVersion

PRESERVE_UNKNOWN_FIELDS = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING = "x-kubernetes-int-or-string"
FieldDocs = Mapping[tuple[type, str], str]
"""Descriptions of fields by struct and Python field name."""
_SCALARS = {
    inspect.BoolType: "boolean",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "string",
}
_BOUNDS = {"ge": "minimum", "le": "maximum", "pattern": "pattern"}


def openapi_schema(resource: type, docs: FieldDocs) -> dict[str, Any]:
    """OpenAPI schema of a kind. The API server validates apiVersion, kind and metadata itself."""
    info = inspect.type_info(resource)
    assert isinstance(info, inspect.StructType)
    schema = _schema_of_struct(info, docs)
    schema["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
    }
    required = [name for name in schema.pop("required") if name not in ("apiVersion", "kind", "metadata")]
    return schema | ({"required": required} if required else {})


def _schema_of_type(info: inspect.Type, docs: FieldDocs) -> dict[str, Any]:
    match info:
        case inspect.Metadata(type=inner, extra_json_schema=marks):
            marks = marks or {}
            # TopologyZone is recursive, which a structural schema cannot express: its elements stay undescribed.
            if marks.get(PRESERVE_UNKNOWN_FIELDS) and not isinstance(inner, inspect.DictType):
                return dict(marks)
            return _schema_of_type(inner, docs) | marks
        case inspect.StructType():
            return _schema_of_struct(info, docs)
        case inspect.VarTupleType():
            min_items = {"minItems": info.min_length} if info.min_length else {}
            return {"type": "array", "items": _schema_of_type(info.item_type, docs), **min_items}
        case inspect.DictType(value_type=inspect.AnyType()):
            return {"type": "object"}
        case inspect.DictType():
            return {"type": "object", "additionalProperties": _schema_of_type(info.value_type, docs)}
        case inspect.LiteralType():
            return _schema_of_enum(list(info.values))
        case inspect.EnumType():
            return _schema_of_enum([member.value for member in info.cls])
        case inspect.UnionType():
            return _schema_of_union(info, docs)
    for kind, name in _SCALARS.items():
        if isinstance(info, kind):
            bounds = {word: getattr(info, key, None) for key, word in _BOUNDS.items()}
            return {"type": name} | {word: bound for word, bound in bounds.items() if bound is not None}
    raise TypeError(f"{info} has no structural schema; use text, numbers, structs, tuples of one type or dicts")


def _schema_of_union(info: inspect.UnionType, docs: FieldDocs) -> dict[str, Any]:
    """Schema of an optional type, or of the only union that structural schemas support: an integer or a string."""
    parts = [part for part in info.types if not isinstance(part, inspect.NoneType)]
    if len(parts) == 1:
        return _schema_of_type(parts[0], docs)
    nodes = {node.get("type"): node for node in (_schema_of_type(part, docs) for part in parts)}
    if set(nodes) != {"integer", "string"}:
        raise TypeError(f"{info} is neither one type nor a number or text")
    either = {"anyOf": [{"type": "integer"}, {"type": "string"}], INT_OR_STRING: True}
    return either | {word: bound for word, bound in nodes["string"].items() if word != "type"}


def _schema_of_enum(values: list[Any]) -> dict[str, Any]:
    return {"type": "string" if isinstance(values[0], str) else "integer", "enum": values}


def _schema_of_struct(info: inspect.StructType, docs: FieldDocs) -> dict[str, Any]:
    properties, required = {}, []
    for field in info.fields:
        try:
            node = _schema_of_type(field.type, docs)
        except TypeError as error:
            raise TypeError(f"{info.cls.__name__}.{field.name}: {error}") from None
        text = next((docs[cls, field.name] for cls in info.cls.__mro__ if (cls, field.name) in docs), None)
        words = [word for word in (node.get("description"), text) if word]
        properties[field.encode_name] = node | ({"description": " ".join(words)} if words else {})
        if field.required:
            required.append(field.encode_name)
    description = (info.cls.__doc__ or "").partition("\n\n")[0].strip()
    schema = {"type": "object", "description": description, "properties": properties}
    return schema | ({"required": required} if required else {})


def crd_manifest(kind: KatalystKind, docs: FieldDocs) -> dict[str, Any]:
    """CustomResourceDefinition of a kind; `docs` are the descriptions of its fields."""
    names: dict[str, Any] = {
        "kind": kind.kind,
        "listKind": f"{kind.kind}List",
        "plural": kind.plural,
        "singular": kind.kind.lower(),
    }
    if kind.short_name:
        names["shortNames"] = [kind.short_name]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kind.name},
        "spec": {
            "group": kind.group,
            "names": names,
            "scope": kind.scope,
            "versions": [_crd_version(version, version is kind.versions[-1], docs) for version in kind.versions],
        },
    }


def _crd_version(version: KindVersion, stored: bool, docs: FieldDocs) -> dict[str, Any]:
    subresources: dict[str, Any] = {"status": {}}
    if version.scale:
        subresources["scale"] = {
            "specReplicasPath": version.scale.spec_replicas,
            "statusReplicasPath": version.scale.status_replicas,
            "labelSelectorPath": version.scale.selector,
        }
    columns = [{"name": column.name, "type": column.type, "jsonPath": column.path} for column in version.columns]
    return {
        "name": version.name,
        "served": True,
        "storage": stored,
        "subresources": subresources,
        **({"additionalPrinterColumns": columns} if columns else {}),
        "schema": {"openAPIV3Schema": openapi_schema(version.type, docs)},
    }
