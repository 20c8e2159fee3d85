"""Cgroup names are bytes: all of them come out as text, and back as the same bytes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.names import to_bytes, to_text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"kubepods/pod1-2_3.slice", "kubepods/pod1-2_3.slice"),
        ("größe".encode(), "größe"),
        (rb"system-serial\x2dgetty.slice", r"system-serial\x2dgetty.slice"),
        (b'it\'s "quoted"', 'it\'s "quoted"'),
        (b"a\nb", r"a\x0ab"),
        (b"\x1b[31mred", r"\x1b[31mred"),
        (b"caf\xe9", r"caf\xe9"),
        (rb"caf\xe9", r"caf\x5cxe9"),
        (rb"\x5c", r"\x5cx5c"),
        ("\u202egnp".encode(), r"\xe2\x80\xaegnp"),
    ],
)
def test_names_are_written(name: bytes, text: str) -> None:
    assert to_text(name) == text
    assert to_bytes(text) == name


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode(errors="surrogatepass")))
@example(b"\\" * 3 + b"x5c")
@example(b"\\x\\x41\xff\\xff")
@example(b"\xed\xb3\xbf")
def test_every_name_comes_back_and_can_be_shown(name: bytes) -> None:
    text = to_text(name)
    assert to_bytes(text) == name
    assert text.isprintable()
    assert msgspec.json.decode(msgspec.json.encode(text)) == text
