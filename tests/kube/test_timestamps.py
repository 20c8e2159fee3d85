"""Times as Kubernetes writes them."""

from __future__ import annotations

import pytest

from kube.objects import format_timestamp, parse_timestamp


def test_moments() -> None:
    assert parse_timestamp("2026-01-31T09:30:00Z") == 1769851800
    assert parse_timestamp("2026-01-31T10:30:00.250000+01:00") == 1769851800.25
    assert format_timestamp(1769851800.25) == "2026-01-31T09:30:00Z"
    assert format_timestamp(1769851800.25, micro=True) == "2026-01-31T09:30:00.250000Z"


@pytest.mark.parametrize("text", ["", "now", "2026-01-31", "2026-01-31T09:30:00", "2026-13-01T00:00:00Z"])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(ValueError, match="time"):
        parse_timestamp(text)
