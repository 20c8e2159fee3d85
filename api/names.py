r"""Cgroup names are bytes to the kernel; here they become text that any reader can show, store and turn back.

A name of printable characters is itself. Every other byte is spelled `\xNN`, and a backslash is `\x5c` where it would
be mistaken for such a spelling: systemd's own `\x2d` stays as it is, and no two names ever look the same.
"""

from __future__ import annotations

import re

_AMBIGUOUS = re.compile(r"\\(?=x(?:[01][0-9a-f]|5c|7f|[89a-f][0-9a-f]))")
_SPELLED = re.compile(rb"\\x([01][0-9a-f]|5c|7f|[89a-f][0-9a-f])")


def to_text(name: bytes) -> str:
    """How a cgroup's name or path is written everywhere outside of the kernel."""
    text = name.decode(errors="surrogateescape")
    if text.isprintable() and "\\" not in text:
        return text
    text = _AMBIGUOUS.sub(r"\\x5c", text)
    return "".join(char if char.isprintable() else _spelled(char) for char in text)


def to_bytes(text: str) -> bytes:
    """The name that `to_text` was given."""
    return _SPELLED.sub(lambda match: bytes.fromhex(match[1].decode()), text.encode(errors="surrogateescape"))


def _spelled(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode(errors="surrogateescape"))
