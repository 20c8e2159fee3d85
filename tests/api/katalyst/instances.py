"""Objects that a schema allows, by hypothesis: what an API server could hand us."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from tests.api.katalyst.structural import INT_OR_STRING, LIST_KEYS, OPEN, Node

NAMES = st.text("abcdefghijklmnopqrstuvwxyz.-_/0123456789", min_size=1, max_size=8)
ANYTHING = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
# A year has four digits.
MOMENTS = st.integers(-(3 * 10**10), 10**11).map(lambda s: f"{datetime.fromtimestamp(s, UTC):%Y-%m-%dT%H:%M:%SZ}")
TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
LARGEST = 2**63 - 1


def instances(node: Node, least: bool = False) -> st.SearchStrategy[Any]:
    """Values that the node allows; `least` has only what has to be there."""
    if node.get(INT_OR_STRING):
        return _text(node) | st.integers(-(2**31), LARGEST)
    if "enum" in node:
        return st.sampled_from(node["enum"])
    match node.get("type"):
        case "string":
            return _text(node)
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(node.get("minimum", -(2**31)), node.get("maximum", 2**31))
        case "number":
            return st.floats(node.get("minimum"), node.get("maximum"), allow_nan=False, allow_infinity=False)
        case "array":
            return _lists(node, least)
        case "object" if node.get(OPEN):
            return st.dictionaries(NAMES, ANYTHING, max_size=2)
        case "object" if "additionalProperties" in node:
            return st.dictionaries(NAMES, instances(node["additionalProperties"], least), max_size=2)
        case "object":
            return _objects(node, least)
    # The one node without a type: zones within a zone.
    return st.lists(st.fixed_dictionaries({"type": NAMES, "name": NAMES}), max_size=2)


def _text(node: Node) -> st.SearchStrategy[str]:
    if node.get("format") == "date-time":
        return MOMENTS
    if "pattern" not in node:
        return TEXT
    # The API server's digits are ASCII, and its `$` does not fit before a line's end.
    pattern = re.compile(node["pattern"], re.ASCII)
    return st.from_regex(pattern, fullmatch=True).filter(str.isprintable)


def _lists(node: Node, least: bool) -> st.SearchStrategy[Any]:
    keys = node.get(LIST_KEYS)
    return st.lists(
        instances(node["items"], least),
        min_size=node.get("minItems", 0),
        max_size=max(node.get("minItems", 0), 0 if least else 2),
        unique_by=(lambda element: tuple(element[key] for key in keys)) if keys else None,
    )


def _objects(node: Node, least: bool) -> st.SearchStrategy[Any]:
    required = set(node.get("required", []))
    properties = {name: instances(below, least) for name, below in node.get("properties", {}).items()}
    return st.fixed_dictionaries(
        {name: strategy for name, strategy in properties.items() if name in required},
        optional={} if least else {name: strategy for name, strategy in properties.items() if name not in required},
    )


METADATA = st.fixed_dictionaries(
    {"name": NAMES},
    optional={
        "namespace": NAMES,
        "uid": NAMES,
        "resourceVersion": NAMES,
        "generation": st.integers(1, LARGEST),
        "creationTimestamp": MOMENTS,
        "labels": st.dictionaries(NAMES, TEXT, max_size=2),
        "annotations": st.dictionaries(NAMES, TEXT, max_size=2),
        "finalizers": st.lists(NAMES, max_size=2),
        "ownerReferences": st.lists(
            st.fixed_dictionaries(dict.fromkeys(("apiVersion", "kind", "name", "uid"), NAMES)), max_size=2
        ),
    },
)


def objects(schema: Node, api_version: str, kind: str, least: bool = False) -> st.SearchStrategy[Any]:
    """Whole objects of a kind."""
    body = {name: node for name, node in schema["properties"].items() if name not in ("apiVersion", "kind", "metadata")}
    spec = instances({"type": "object", "properties": body, "required": schema.get("required", [])}, least)
    head = st.fixed_dictionaries({"apiVersion": st.just(api_version), "kind": st.just(kind), "metadata": METADATA})
    return st.builds(lambda first, rest: first | rest, head, spec)


def fullest(node: Node) -> Any:
    """One value of the node in which every field is said."""
    if node.get(INT_OR_STRING):
        return 1
    if "enum" in node:
        return node["enum"][-1]
    match node.get("type"):
        case "array":
            return [fullest(node["items"])]
        case "object" if node.get(OPEN):
            return {"any": [{"thing": 1}]}
        case "object" if "additionalProperties" in node:
            return {"key": fullest(node["additionalProperties"])}
        case "object":
            return {name: fullest(below) for name, below in node.get("properties", {}).items()}
        case None:
            return [{"type": "Numa", "name": "0", "children": []}]
        case kind:
            return {
                "string": "2026-01-31T12:00:00Z" if node.get("format") == "date-time" else "1",
                "boolean": False,
                "integer": node.get("minimum", 0),
                "number": node.get("minimum", 0),
            }[kind]
