r"""Formats text that came from outside, and converts cgroup names, file names and structs to text and JSON.
`printable`, `quote` and `limit_sentences` are the only formatters of text that a pod, a peer or a client wrote: no log
line, problem, reason, event, journal entry, page or terminal gets it any other way. Cgroup names are encoded reversibly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec

MAX_QUOTED_CHARS = 80
"""Characters of a quoted value that a message shows."""
MAX_SENTENCE_CHARS = 600
"""Characters of one problem of a pod."""
MAX_MESSAGE_CHARS = 4096
"""Characters of one reason, remedy or line of the log."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def printable(text: str, max_chars: int | None = None) -> str:
    r"""Return the text with every character escaped that a terminal, a log or a reader could take for something else.

    Line breaks become `\n`, the escape character `\x1b`, the override of the writing direction `\u202e`, and a byte of a
    name that is not UTF-8 `\xff`. With `max_chars` a longer text ends in `...` after so many characters.
    """
    if max_chars is not None and len(text) > max_chars:
        text = f"{text[: max(max_chars - 3, 0)]}..."
    if text.isprintable():
        return text
    shown = "".join(char if char.isprintable() else _escape_unprintable(char) for char in text)
    return shown if max_chars is None or len(shown) <= max_chars else f"{shown[: max(max_chars - 3, 0)]}..."


def encodable(text: str) -> str:
    r"""Return the text with every byte of a name that is not UTF-8 escaped: `/a\udcff` becomes `/a\xff`.

    For formats with escapes of their own, such as JSON, protobuf and Prometheus' exposition: only surrogates are impossible in
    them, and any other character arrives as it is.
    """
    return text if text.isascii() else _SURROGATE.sub(lambda match: _escape_unprintable(match[0]), text)


def quote(value: object, max_chars: int = MAX_QUOTED_CHARS) -> str:
    """Return a value in the quotes of Python, escaped as by `printable` and cut after `max_chars` characters."""
    if isinstance(value, (str, bytes)):
        value = value[:max_chars]
    try:
        return printable(repr(value)[:max_chars])
    except (RecursionError, ValueError):  # nested too deeply, or a number of more than 4300 digits
        return f"a {type(value).__name__} that is too large to show"


def limit_sentences(
    sentences: Iterable[str], max_sentences: int, max_chars: int = MAX_SENTENCE_CHARS
) -> tuple[str, ...]:
    """Return the first sentences, printable and with at most `max_chars` characters each, and how many more there are."""
    listed = tuple(sentences)
    shown = tuple(printable(sentence, max_chars) for sentence in listed[:max_sentences])
    return (*shown, f"and {len(listed) - max_sentences} more") if len(listed) > max_sentences else shown


def make_printable(struct: msgspec.Struct, *names: str) -> None:
    """Make these texts of a struct printable, for `__post_init__`. Most are already, and are only looked at."""
    for name in names:
        text = getattr(struct, name)
        if len(text) > MAX_MESSAGE_CHARS or not text.isprintable():
            msgspec.structs.force_setattr(struct, name, printable(text, MAX_MESSAGE_CHARS))


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


def _escape_unprintable(char: str) -> str:
    # Bytes that are not UTF-8 arrive as surrogates (PEP 383).
    code = ord(char)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else char.encode("unicode_escape").decode()


def _printable_values(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
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
