"""Malformed kernel texts, and what parsers may return for them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from hypothesis import strategies as st


def garbage(alphabet: str) -> st.SearchStrategy[bytes]:
    """Any bytes, and texts of characters that the parser looks for."""
    return st.binary(max_size=200) | st.text(alphabet + "0123456789 \n\t\0-", max_size=200).map(str.encode)


def damaged(text: bytes) -> st.SearchStrategy[bytes]:
    """A real text with a piece of it replaced."""
    ends = st.tuples(st.integers(0, len(text)), st.integers(0, len(text)), st.binary(max_size=6))
    pieces = ends | st.tuples(st.integers(0, len(text)), st.integers(0, len(text)), st.just(b"9" * 21))
    return pieces.map(lambda cut: text[: min(cut[:2])] + cut[2] + text[max(cut[:2]) :])


def numbers_in(value: Any) -> list[float]:
    """Every number in a value, however deep."""
    if isinstance(value, (int, float)):
        return [value]
    if hasattr(value, "__struct_fields__"):
        value = [getattr(value, name) for name in value.__struct_fields__]
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    return [number for item in value or () for number in numbers_in(item)] if isinstance(value, (list, tuple)) else []


def assert_sane(value: Any, at_least: int = 0) -> None:
    """Whatever a parser says is finite, not negative, and small enough to be written down."""
    assert all(math.isfinite(number) and at_least <= number < 2**64 for number in numbers_in(value))
    msgspec.msgpack.encode(value)
