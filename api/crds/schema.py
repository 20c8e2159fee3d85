"""Structural OpenAPI v3 schemas, as CustomResourceDefinitions hold them, of types made of api.crds.meta.Part. Pure.

Every node says its type, nothing refers to anything, and what is bounded in the type is bounded in the schema. Only
what Python has and a structural schema has words for is taken; anything else is a TypeError that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import inspect

OPEN = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING = "x-kubernetes-int-or-string"
Docs = Mapping[tuple[type, str], str]
"""What is said of the fields of a type, by their names in Python."""
_SCALARS = {
    inspect.BoolType: "boolean",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "string",
}
_BOUNDS = {"ge": "minimum", "le": "maximum", "pattern": "pattern"}


def schema_of(resource: type, docs: Docs) -> dict[str, Any]:
    """The schema of a kind. Metadata is the API server's own matter, and what it says of itself everybody knows."""
    info = inspect.type_info(resource)
    assert isinstance(info, inspect.StructType)
    made = _object(info, docs)
    made["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
    required = [name for name in made.pop("required") if name not in ("apiVersion", "kind", "metadata")]
    return made | ({"required": required} if required else {})


def _node(info: inspect.Type, docs: Docs) -> dict[str, Any]:
    """The schema of one type."""
    match info:
        case inspect.Metadata(type=inner, extra_json_schema=marks):
            marks = marks or {}
            # A list that is open is not described: an element can be what the list is an element of.
            if marks.get(OPEN) and not isinstance(inner, inspect.DictType):
                return dict(marks)
            return _node(inner, docs) | marks
        case inspect.StructType():
            return _object(info, docs)
        case inspect.VarTupleType():
            least = {"minItems": info.min_length} if info.min_length else {}
            return {"type": "array", "items": _node(info.item_type, docs), **least}
        case inspect.DictType(value_type=inspect.AnyType()):
            return {"type": "object"}
        case inspect.DictType():
            return {"type": "object", "additionalProperties": _node(info.value_type, docs)}
        case inspect.LiteralType():
            return _choice(list(info.values))
        case inspect.EnumType():
            return _choice([member.value for member in info.cls])
        case inspect.UnionType():
            return _union(info, docs)
    for kind, name in _SCALARS.items():
        if isinstance(info, kind):
            bounds = {word: getattr(info, key, None) for key, word in _BOUNDS.items()}
            return {"type": name} | {word: bound for word, bound in bounds.items() if bound is not None}
    raise TypeError(f"{info} has no structural schema; use text, numbers, structs, tuples of one type or dicts")


def _union(info: inspect.UnionType, docs: Docs) -> dict[str, Any]:
    """Of something that may be absent, its schema; of text or a number, the one form of it that schemas have."""
    parts = [part for part in info.types if not isinstance(part, inspect.NoneType)]
    if len(parts) == 1:
        return _node(parts[0], docs)
    nodes = {node.get("type"): node for node in (_node(part, docs) for part in parts)}
    if set(nodes) != {"integer", "string"}:
        raise TypeError(f"{info} is neither one type nor a number or text")
    either = {"anyOf": [{"type": "integer"}, {"type": "string"}], INT_OR_STRING: True}
    return either | {word: bound for word, bound in nodes["string"].items() if word != "type"}


def _choice(values: list[Any]) -> dict[str, Any]:
    return {"type": "string" if isinstance(values[0], str) else "integer", "enum": values}


def _object(info: inspect.StructType, docs: Docs) -> dict[str, Any]:
    properties, required = {}, []
    for field in info.fields:
        try:
            node = _node(field.type, docs)
        except TypeError as error:
            raise TypeError(f"{info.cls.__name__}.{field.name}: {error}") from None
        said = next((docs[cls, field.name] for cls in info.cls.__mro__ if (cls, field.name) in docs), None)
        words = [word for word in (node.get("description"), said) if word]
        properties[field.encode_name] = node | ({"description": " ".join(words)} if words else {})
        if field.required:
            required.append(field.encode_name)
    description = (info.cls.__doc__ or "").partition("\n\n")[0].strip()
    made = {"type": "object", "description": description, "properties": properties}
    return made | ({"required": required} if required else {})
