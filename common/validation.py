"""Describes msgspec validation errors: the field's full path, the problem and the valid values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum, EnumType
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_ERROR_LOCATION = re.compile(r"(.*) - at (`key` in )?`\$(.*)`", re.DOTALL)
_INVALID_VALUE = re.compile(r"Invalid enum value '(.*)'", re.DOTALL)
_MAX_SHOWN_LETTERS = 40
"""Limit for keys of unknown length."""


def describe_validation_error(error: msgspec.ValidationError, document: object, kind: Any) -> str:
    """Describe the error in one sentence: the field, the problem and, if the type lists them, the valid values.

    `document` is the decoded document that is not a valid `kind`.
    """
    located = _ERROR_LOCATION.fullmatch(str(error))
    reason, of_key, steps = (located[1], located[2], located[3]) if located else (str(error), None, "")
    path, kind, document = _follow(_PATH_STEP.findall(steps), document, kind)
    if of_key:
        kind, reason = _container_args(kind)[0], f"a key: {reason}"
        path += f".{_invalid_key(document, kind)}"
    unknown = _UNKNOWN_FIELD.fullmatch(reason)
    listed = _field_names(kind) if unknown or "missing required" in reason else _choices(kind)
    if unknown:
        close = get_close_matches(unknown[1], listed, 1)
        reason = f"Object contains unknown field `{unknown[1][:_MAX_SHOWN_LETTERS]}`"
        reason += f", did you mean `{close[0]}`?" if close else f", choose from {', '.join(listed)}"
    elif listed and ((value := _INVALID_VALUE.search(reason)) or not isinstance(document, str)):
        reason = reason if value is None else reason.replace(value[1], value[1][:_MAX_SHOWN_LETTERS])
        reason += f", choose from {', '.join(listed)}"
    if isinstance(document, (bool, int, float)) and reason.startswith("Expected `str"):
        reason += "; put it in quotes"  # YAML decodes off, 19:00 and 8:16 as booleans or numbers
    return f"{path.lstrip('.') or 'top level'}: {reason}"


def _follow(steps: Sequence[tuple[str, str]], document: object, kind: Any) -> tuple[str, Any, object]:
    """Resolve msgspec's path: return it in the words of the file, with the type and the value at its end."""
    path = ""
    for name, item in steps:
        if name:
            kind = next(each.type for each in msgspec.structs.fields(_struct(kind)) if each.encode_name == name)
            document = document.get(name) if isinstance(document, Mapping) else None
            path += f".{name}"
        elif item == "...":
            # msgspec does not report the key of a mapping; find the first value that does not decode.
            kind = _container_args(kind)[1]
            key, document = next(_invalid_items(document, kind), ("?", None))
            path += f".{key:.{_MAX_SHOWN_LETTERS}}"
        else:
            parts = _container_args(kind)
            kind = parts[0] if parts[-1] is Ellipsis else parts[min(int(item), len(parts) - 1)]
            document = document[int(item)] if isinstance(document, Sequence) and int(item) < len(document) else None
            path += f"[{item}]"
    return path, kind, document


def _invalid_items(document: object, kind: Any) -> Iterator[tuple[str, object]]:
    for key, value in document.items() if isinstance(document, Mapping) else ():
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            yield str(key), value


def _invalid_key(document: object, kind: Any) -> str:
    for key in document if isinstance(document, Mapping) else ():
        try:
            msgspec.convert(key, kind)
        except msgspec.ValidationError:
            return str(key)[:_MAX_SHOWN_LETTERS]
    return "?"


def _container_args(kind: Any) -> tuple[Any, ...]:
    """Type arguments: K and V of `Mapping[K, V] | None`, T and the ellipsis of `tuple[T, ...]`."""
    lists = (part for part in _alternatives(kind) if get_args(part) and get_origin(part) is not Literal)
    return next(map(get_args, lists), (kind, kind))


def _struct(kind: Any) -> Any:
    """Struct type of `Struct | None`."""
    return next((part for part in _alternatives(kind) if hasattr(part, "__struct_fields__")), kind)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Members of a union without annotations: T and None of `Annotated[T, ...] | None`."""
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return tuple(each for part in get_args(kind) for each in _alternatives(part))
    return (kind,)


def _field_names(kind: Any) -> tuple[str, ...]:
    kind = _struct(kind)
    return tuple(kind.__struct_encode_fields__) if hasattr(kind, "__struct_fields__") else ()


def _choices(kind: Any) -> tuple[str, ...]:
    """Values that the type lists, empty if it lists none."""
    if isinstance(kind, EnumType):
        return tuple(str(member.value) for member in list[Enum](kind))
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return tuple(
        choice for part in get_args(kind) if get_args(part) or isinstance(part, EnumType) for choice in _choices(part)
    )
