"""Names that are not UTF-8 leave as escapes; everything else leaves as it is."""

from __future__ import annotations

import json
import os

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.snapshot import CgroupSample
from api.text import cgroup_name_to_bytes, cgroup_name_to_text, limit_sentences, printable, quote, to_json


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/plain", "/plain"),
        ("/größe", "/größe"),
        (os.fsdecode(b"/a\xff\xfe"), "/a\\xff\\xfe"),
        ("/high\ud800", "/high\\ud800"),
        ("", ""),
        ("a\nb\r\x1b[31m", "a\\nb\\r\\x1b[31m"),
        ("\x9b2J\x7f\x00", "\\x9b2J\\x7f\\x00"),
        ("\u202egnp\u2028", "\\u202egnp\\u2028"),
        ("C:\\new", "C:\\new"),
    ],
)
def test_what_cannot_be_printed_is_spelled_out(given: str, expected: str) -> None:
    assert printable(given) == expected


@given(st.text(max_size=50), st.integers(1, 60))
def test_shown_text_is_printable_bounded_and_shown_again_as_it_is(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert shown.isprintable()
    assert len(shown) <= max(limit, 3)
    assert printable(shown) == shown
    if text.isprintable() and len(text) <= limit:
        assert shown == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("web", "'web'"),
        ("a\n\x1b", "'a\\n\\x1b'"),
        ("x" * 1_000_000, "'" + "x" * 79),
        (b"\xff", "b'\\xff'"),
        (7, "7"),
        ({"a": ["\u202e"]}, "{'a': ['\\u202e']}"),
        (10**5000, "a int that is too large to show"),
    ],
    ids=["text", "control", "long", "bytes", "number", "nested", "giant"],
)
def test_a_quoted_value_is_bounded(value: object, text: str) -> None:
    assert quote(value) == text


def test_a_value_that_is_too_deep_to_show_is_named() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert quote(value) == "a list that is too large to show"
    while value:  # freeing it would recurse as deeply
        value = value.pop()  # type: ignore[assignment]


def test_sentences_are_counted_and_cut() -> None:
    assert limit_sentences(("a", "b\n", "c" * 20), 3, 10) == ("a", "b\\n", "ccccccc...")
    assert limit_sentences(map(str, range(5)), 2) == ("0", "1", "and 3 more")


def test_json_of_a_cgroup_with_a_broken_name() -> None:
    sample = CgroupSample(path=os.fsdecode(b"/\xe9"), id=7)
    decoded = json.loads(to_json({"cgroups": {sample.path: sample}, "list": (sample.path,)}))
    assert decoded["cgroups"]["/\\xe9"]["path"] == "/\\xe9"
    assert decoded["cgroups"]["/\\xe9"]["id"] == 7
    assert decoded["list"] == ["/\\xe9"]


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
    assert cgroup_name_to_text(name) == text
    assert cgroup_name_to_bytes(text) == name


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode(errors="surrogatepass")))
@example(b"\\" * 3 + b"x5c")
@example(b"\\x\\x41\xff\\xff")
@example(b"\xed\xb3\xbf")
def test_every_name_comes_back_and_can_be_shown(name: bytes) -> None:
    text = cgroup_name_to_text(name)
    assert cgroup_name_to_bytes(text) == name
    assert text.isprintable()
    assert msgspec.json.decode(msgspec.json.encode(text)) == text
