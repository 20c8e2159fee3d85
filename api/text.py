r"""Converts cgroup names, file names and structs to text and JSON that any reader can display.
Names are bytes to the kernel: bytes that are not UTF-8 arrive as lone surrogates, which no JSON, protobuf or
exposition may contain; they leave as `\\xNN`. Cgroup names are encoded reversibly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec

_SURROGATE = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape every byte that was not UTF-8: `/a\\udcff` becomes `/a\\xff`."""
    return text if text.isascii() else _SURROGATE.sub(_escape_surrogate, text)


def to_json(value: object) -> bytes:
    """Encode a value as JSON, escaping bytes of names that are not UTF-8."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_printable_values(msgspec.to_builtins(value)))


def literal_choices(kind: Any, field: str) -> tuple[str, ...]:
    """Choices of a Struct field such as `advisor.policy` if its type is a Literal; else empty."""
    for name in field.split("."):
        kind = next((part for part in get_args(kind) if _is_struct(part)), kind)  # of `Struct | None`
        fields = msgspec.structs.fields(kind) if _is_struct(kind) else ()
        kind = next((each.type for each in fields if each.encode_name == name), None)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _escape_surrogate(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def _printable_values(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_printable_values(key): _printable_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable_values(item) for item in value]
    return value


_AMBIGUOUS_ESCAPE = re.compile(r"\\(?=x(?:[01][0-9a-f]|5c|7f|[89a-f][0-9a-f]))")
_ESCAPED_BYTE = re.compile(rb"\\x([01][0-9a-f]|5c|7f|[89a-f][0-9a-f])")


def cgroup_name_to_text(name: bytes) -> str:
    """Decode the name or path of a cgroup reversibly into printable text."""
    text = name.decode(errors="surrogateescape")
    if text.isprintable() and "\\" not in text:
        return text
    text = _AMBIGUOUS_ESCAPE.sub(r"\\x5c", text)
    return "".join(char if char.isprintable() else _escape_char(char) for char in text)


def cgroup_name_to_bytes(text: str) -> bytes:
    """Inverse of `cgroup_name_to_text`."""
    return _ESCAPED_BYTE.sub(lambda match: bytes.fromhex(match[1].decode()), text.encode(errors="surrogateescape"))


def _escape_char(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode(errors="surrogateescape"))


def join_first(items: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Return the first items as one text, and how many more there are."""
    more = [f"and {len(items) - limit} more"] if len(items) > limit else []
    return separator.join([*items[:limit], *more])
