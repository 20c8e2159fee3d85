"""Text on its way out: file names and cgroup paths are bytes, and what is not UTF-8 in them must not stop a reader.

Python hands such bytes over as lone surrogates, which no JSON, protobuf or exposition may contain; they leave as `\\xNN`.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args, get_origin

import msgspec

_SURROGATE = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """The same text with every byte that was not UTF-8 spelled out: `/a\\udcff` becomes `/a\\xff`."""
    return text if text.isascii() else _SURROGATE.sub(_spell, text)


def to_json(value: object) -> bytes:
    """JSON of a value of ours, whatever bytes the names in it are made of."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_repaired(msgspec.to_builtins(value)))


def choices(kind: Any, field: str) -> tuple[str, ...]:
    """What a field such as `advisor.policy` of a Struct may be where its type lists it; empty where it does not."""
    for name in field.split("."):
        kind = next((part for part in get_args(kind) if _is_struct(part)), kind)  # of `Struct | None`
        fields = msgspec.structs.fields(kind) if _is_struct(kind) else ()
        kind = next((each.type for each in fields if each.encode_name == name), None)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _spell(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def _repaired(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_repaired(key): _repaired(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_repaired(item) for item in value]
    return value
