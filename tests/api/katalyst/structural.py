"""What apiextensions.k8s.io/v1 asks of a definition before it serves it, and of an object before it stores it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Node = dict[str, Any]
INT_OR_STRING = "x-kubernetes-int-or-string"
OPEN = "x-kubernetes-preserve-unknown-fields"
LIST_TYPE, LIST_KEYS, MAP_TYPE = "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type"
EITHER = [{"type": "integer"}, {"type": "string"}]
ALLOWED_KEYWORDS = {
    "type", "description", "properties", "required", "items", "additionalProperties", "enum", "format", "pattern",
    "minimum", "maximum", "minItems", "default", "anyOf", INT_OR_STRING, OPEN, LIST_TYPE, LIST_KEYS, MAP_TYPE,
}  # fmt: skip
"""Keywords that are used. $ref, definitions, uniqueItems, nullable and the rest are not among them."""
PYTHON = {"string": str, "boolean": bool, "integer": int, "number": (int, float), "array": list, "object": dict}
OF_TYPE = {
    "object": {"properties", "required", "additionalProperties", OPEN, MAP_TYPE},
    "array": {"items", "minItems", LIST_TYPE, LIST_KEYS},
    "string": {"pattern", "enum", "format"},
    "integer": {"minimum", "maximum", "enum", "format"},
    "number": {"minimum", "maximum"},
    "boolean": set(),
}


def nodes(schema: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every node below and itself, each with where it is."""
    yield path, schema
    for name, node in schema.get("properties", {}).items():
        yield from nodes(node, f"{path}.{name}")
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            yield from nodes(schema[word], f"{path}[]")


def faults(schema: Node) -> list[str]:
    """Why the API server would refuse the schema, or keep less of an object than it says."""
    faults = [f"{path}: {fault}" for path, node in nodes(schema) if path != ".metadata" for fault in _faults(node)]
    meta = schema.get("properties", {}).get("metadata")
    if schema.get("type") != "object":
        faults.append("the root is no object")
    if meta != {"type": "object"}:
        faults.append(f".metadata: restricts what is not its own: {meta}")
    return faults


def _faults(node: Node) -> Iterator[str]:
    if unknown := node.keys() - ALLOWED_KEYWORDS:
        yield f"unknown keywords {sorted(unknown)}"
    kind = node.get("type")
    if node.get(INT_OR_STRING):
        if kind or node.get("anyOf") != EITHER or not node.keys() <= {"anyOf", INT_OR_STRING, "pattern", "description"}:
            yield "a number or text has a type, or more than a pattern"
        return
    if "anyOf" in node:
        yield "anyOf but for a number or text"
    if kind is None and node.get(OPEN):
        if node.keys() - {OPEN, "description"}:
            yield "open, and says more all the same"
        return
    if kind not in OF_TYPE:
        yield f"type {kind!r}"
        return
    if strange := node.keys() - OF_TYPE[kind] - {"type", "description", "default"}:
        yield f"{sorted(strange)} of a {kind}"
    yield from _faults_of_object(node) if kind == "object" else _faults_of_array(node) if kind == "array" else ()
    if "enum" in node and not all(_is(kind, value) for value in node["enum"]):
        yield f"enum {node['enum']} of another type"
    if "pattern" in node:
        re.compile(node["pattern"])
    if "default" in node:
        yield from (f"default {problem}" for problem in problems(node, node["default"], pruned=True))


def _faults_of_object(node: Node) -> Iterator[str]:
    if "properties" in node and "additionalProperties" in node:
        yield "properties and additionalProperties"
    if not node.keys() & {"properties", "additionalProperties", OPEN}:
        yield "an object of which nothing would be kept"
    if missing := set(node.get("required", [])) - node.get("properties", {}).keys():
        yield f"requires {sorted(missing)}, which it does not know"
    if "required" in node and not node["required"]:
        yield "requires nothing, at length"


def _faults_of_array(node: Node) -> Iterator[str]:
    if not isinstance(node.get("items"), dict):
        yield "an array of anything"
        return
    keyed = node.get(LIST_TYPE) == "map"
    if keyed != (LIST_KEYS in node):
        yield "a keyed list without keys, or keys of another list"
    for key in node.get(LIST_KEYS, []):
        field = node["items"].get("properties", {}).get(key, {})
        if field.get("type") not in ("string", "integer", "boolean"):
            yield f"key {key} is no scalar field of the elements"
        if key not in node["items"].get("required", []) and "default" not in field:
            yield f"key {key} may be absent"


def problems(node: Node, value: Any, *, pruned: bool = False, path: str = "") -> Iterator[str]:
    """Why the API server would refuse the value, or, `pruned`, drop something in it."""
    if node.get(INT_OR_STRING):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            yield f"{path}: {value!r} is neither a whole number nor text"
        elif isinstance(value, str) and not re.search(node.get("pattern", ""), value):
            yield f"{path}: {value!r} does not match"
        return
    kind = node.get("type")
    if kind is None:
        return
    if not _is(kind, value):
        yield f"{path}: {value!r} is no {kind}"
        return
    if value not in node.get("enum", [value]):
        yield f"{path}: {value!r} is none of {node['enum']}"
    if kind == "string" and not re.search(node.get("pattern", ""), value):
        yield f"{path}: {value!r} does not match"
    if kind in ("integer", "number") and not node.get("minimum", value) <= value <= node.get("maximum", value):
        yield f"{path}: {value!r} is out of bounds"
    if kind == "array":
        yield from _problems_of_array(node, value, pruned, path)
    if kind == "object":
        yield from _problems_of_object(node, value, pruned, path)


def _problems_of_array(node: Node, value: Any, pruned: bool, path: str) -> Iterator[str]:
    if len(value) < node.get("minItems", 0):
        yield f"{path}: too short"
    keys = [tuple(element[key] for key in node[LIST_KEYS]) for element in value] if LIST_KEYS in node else []
    if len(set(keys)) < len(keys):
        yield f"{path}: the same key twice"
    for position, element in enumerate(value):
        yield from problems(node["items"], element, pruned=pruned, path=f"{path}[{position}]")


def _problems_of_object(node: Node, value: Any, pruned: bool, path: str) -> Iterator[str]:
    for name in node.get("required", []):
        if name not in value:
            yield f"{path}.{name}: missing"
    for name, part in value.items():
        below = node.get("properties", {}).get(name, node.get("additionalProperties"))
        if below is not None:
            yield from problems(below, part, pruned=pruned, path=f"{path}.{name}")
        elif pruned and not node.get(OPEN):
            yield f"{path}.{name}: unknown"


def _is(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, PYTHON[kind])  # type: ignore[arg-type]
