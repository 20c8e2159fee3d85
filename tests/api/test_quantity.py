"""Durations as Go writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.quantity import parse_duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", 600), ("1h30m", 5400), ("500ms", 0.5), ("1.5h", 5400), (".5s", 0.5), ("2h0m0s", 7200), ("0", 0),
        ("-1s", -1), ("100us", 1e-4), ("1µs", 1e-6),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "10", "m", "1d", "1m 2s", "10 m", "1..5s", "9" * 400 + "h", "3000000h", "inf", "1e3s", "٣s"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration_s(text)


@given(st.integers(0, 10**6), st.integers(0, 59), st.integers(0, 59))
def test_durations_as_go_prints_them(hours: int, minutes: int, seconds: int) -> None:
    assert parse_duration_s(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds
