"""docs/settings.md, made from the types of the settings: `python -m agent.reference docs/settings.md`.

A Struct that one field holds is a section, named as in the settings file. One that stands in a list or a map, or that
several fields hold, is described once, and those fields refer to it.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import inspect as types

from agent.config import Config
from agent.examples import EXAMPLES

HEAD = """# Settings

Made from `agent/config/` and `agent/examples.py` by `python -m agent.reference docs/settings.md`; change those, not this.

`dioptase agent --config FILE` reads them from one YAML file. All are optional, and none has to be set for a node to be
looked after. A file is refused as a whole, before anything is changed, with file, field and what to do: fields that nobody
knows or that are there twice, values of another type or out of bounds, values that contradict each other, and values that
this node cannot hold, such as a CPU that is to be reserved and is not there. [operations.md](operations.md) has the rest of
what a person runs the agent with: options, the pods file, TLS, OpenTelemetry.

- The name of a setting is its path in the file: `advisor.latency.targetWaitMs` is written
  `advisor: {latency: {targetWaitMs: 5}}`. `NAME` in a path stands for a key of a map, `[]` for an item of a list.
- Brackets hold the name that Katalyst has for it (where the section says so, Koordinator or oomd).
- Units are in the names: `S` and `Ms` and `Us` for seconds, milli- and microseconds, `Cores` for CPUs' worth of time, `Bytes`,
  `Mib`, `Mbit`; a `Ratio` is a part of one, `Percent` of a hundred.
- Values that YAML takes for something else than text need quotes: `policy: "off"`, `start: "19:00"`.
- A default of *unset* depends on the node or leaves it to others; the text says how.
"""
_LONGEST_DEFAULT = 40
"""Letters; longer defaults stand below their table."""
_PLAIN = re.compile(r"[A-Za-z_/.][\w/.-]*( [A-Za-z][\w/.-]*)*", re.ASCII)
_WORDS = frozenset(("true", "false", "null", "yes", "no", "on", "off"))
"""YAML reads them as something else than text."""


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """A Struct to be described: under which path, and of which part of the file."""

    path: str
    kind: types.StructType


def reference() -> str:
    """The whole document."""
    places = {place.kind.cls: place for place in _places()}
    return HEAD + "".join(_section(place, places) for place in places.values())


def documented(kind: type) -> Mapping[str, str]:
    """The docstring of each field of a Struct: the text that follows it in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            text = ast.literal_eval(after.value)
            found[field.target.id] = " ".join(text.split())
    return found


def flow(value: object) -> str:
    """A value as YAML of one line."""
    if isinstance(value, msgspec.Struct):
        value = {key: item for key, item in _set(value) if item != _default(type(value), key)}
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{flow(key)}: {flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, str):
        return str(value) if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else json.dumps(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value)


def _set(value: msgspec.Struct) -> Iterator[tuple[str, object]]:
    for field in msgspec.structs.fields(value):
        yield field.encode_name, getattr(value, field.name)


def _default(kind: type[msgspec.Struct], key: str) -> object:
    field = next(field for field in msgspec.structs.fields(kind) if field.encode_name == key)
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default


def _places() -> Sequence[_Place]:
    """Every Struct, each once: sections in the order of the fields, with what they refer to behind them."""
    top = types.type_info(Config)
    assert isinstance(top, types.StructType)
    direct, other = Counter[type](), Counter[type]()
    _count(top, direct, other)
    found: dict[type, _Place] = {}

    def visit(kind: types.StructType, path: str) -> None:
        found[kind.cls] = _Place(path=path, kind=kind)
        for field in kind.fields:
            below = f"{path}.{field.encode_name}".lstrip(".")
            for inner, suffix in _inside(field.type):
                if inner.cls in found or (suffix and direct[inner.cls] == 1):
                    continue
                shared = direct[inner.cls] > 1 or (not direct[inner.cls] and other[inner.cls] > 1)
                visit(inner, inner.cls.__name__.removesuffix("Config") if shared else below + suffix)

    visit(top, "")
    return tuple(found.values())


def _count(kind: types.StructType, direct: Counter[type], other: Counter[type]) -> None:
    for field in kind.fields:
        for inner, suffix in _inside(field.type):
            known = direct[inner.cls] + other[inner.cls]
            (other if suffix else direct)[inner.cls] += 1
            if not known:
                _count(inner, direct, other)


def _inside(kind: types.Type) -> Iterator[tuple[types.StructType, str]]:
    """The Structs of a field, with what follows the field's name in the path of what they hold; nothing: a section."""
    if isinstance(kind, types.StructType):
        yield kind, ""
    elif isinstance(kind, types.UnionType):
        yield from ((inner, "?") for part in kind.types for inner, _ in _inside(part))
    elif isinstance(kind, types.DictType):
        yield from ((inner, ".NAME") for inner, _ in _inside(kind.value_type))
    elif isinstance(kind, types.VarTupleType):
        yield from ((inner, "[]") for inner, _ in _inside(kind.item_type))


def _section(place: _Place, places: Mapping[type, _Place]) -> str:
    """A heading, what it is for, an example where it begins a part of the file, and a row for each setting."""
    texts, rows, long = documented(place.kind.cls), "", ""
    prefix = f"{place.path}." if place.path else ""
    for field in place.kind.fields:
        if isinstance(field.type, types.StructType) and places[field.type.cls].path == prefix + field.encode_name:
            continue
        default = _shown(field)
        if len(default) > _LONGEST_DEFAULT:
            long += f"\nThe default of `{prefix}{field.encode_name}`:\n\n```yaml\n{_spread(field)}```\n"
            default = "below"
        name = f"`{prefix}{field.encode_name}`"
        values, text = _values(field.type, places), texts.get(field.name, "").replace("|", "\\|")
        rows += f"| {name} | {default} | {values} | {text} |\n"
    head, about = _heading(place), inspect.cleandoc(place.kind.cls.__doc__ or "")
    example = EXAMPLES.get(place.path, "")
    result = f"\n{head}\n\n{about}\n" + "".join(
        f"\n```yaml\n{text}```\n" for text in filter(None, example.split("---\n"))
    )
    if rows:
        result += f"\n| setting | default | values | meaning |\n| --- | --- | --- | --- |\n{rows}{long}"
    return result


def _heading(place: _Place) -> str:
    if not place.path:
        return "## The agent"
    return f"{'##' if place.path in Config.__struct_encode_fields__ else '###'} `{place.path}`"


def _anchor(path: str) -> str:
    return re.sub(r"[^\w-]", "", path.lower()) or "the-agent"


def _shown(field: types.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{flow(field.default_factory())}`"
    if field.default is msgspec.NODEFAULT:
        return "must be set"
    return "unset" if field.default is None else f"`{flow(field.default)}`"


def _spread(field: types.Field) -> str:
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    name = field.encode_name
    if isinstance(value, Mapping):
        return f"{name}:\n" + "".join(f"  {flow(key)}: {flow(item)}\n" for key, item in value.items())
    if isinstance(value, str):
        return f"{name}: {flow(value)}\n"
    assert isinstance(value, tuple)
    return f"{name}:\n" + "".join(f"- {flow(item)}\n" for item in value)


def _values(kind: types.Type, places: Mapping[type, _Place]) -> str:
    """What a setting may be, in words."""
    match kind:
        case types.UnionType():
            parts = [part for part in kind.types if not isinstance(part, types.NoneType)]
            return " or ".join(_values(part, places) for part in parts)
        case types.BoolType():
            return "`true`, `false`"
        case types.IntType() | types.FloatType():
            what = "whole number" if isinstance(kind, types.IntType) else "number"
            return ", ".join(filter(None, (what, _bounds(kind))))
        case types.StrType():
            # A bar would end the cell, in code too.
            pattern = (kind.pattern or "").replace("|", "\\|")
            return f"text that matches `{pattern}`" if pattern else "text"
        case types.EnumType():
            return ", ".join(f"`{member.value}`" for member in kind.cls)
        case types.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case types.VarTupleType():
            return f"list of: {_values(kind.item_type, places)}"
        case types.DictType():
            return f"map, from {_values(kind.key_type, places)} to {_values(kind.value_type, places)}"
        case types.StructType():
            path = places[kind.cls].path
            return f"as [`{path}`](#{_anchor(path)})"
    raise TypeError(f"a setting of type {kind} has no words here: add them")


def _bounds(kind: types.IntType | types.FloatType) -> str:
    low, high = kind.ge, kind.le
    if low is not None and high is not None:
        return f"{_number(low)} to {_number(high)}"
    return ", ".join(
        f"{word} {_number(bound)}"
        for word, bound in (("above", kind.gt), ("at least", low), ("below", kind.lt), ("at most", high))
        if bound is not None
    )


def _number(value: float) -> str:
    whole = int(value)
    if whole > 1 << 20 and whole & (whole - 1) == 0:
        return f"2^{whole.bit_length() - 1}"
    return f"{whole}" if whole == value else f"{value:g}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
