"""Times as Kubernetes writes them."""

from __future__ import annotations

import pytest

from kube.moments import moment, stamp


def test_moments() -> None:
    assert moment("2026-01-31T09:30:00Z") == 1769851800
    assert moment("2026-01-31T10:30:00.250000+01:00") == 1769851800.25
    assert stamp(1769851800.25) == "2026-01-31T09:30:00Z"
    assert stamp(1769851800.25, micro=True) == "2026-01-31T09:30:00.250000Z"


@pytest.mark.parametrize("text", ["", "now", "2026-01-31", "2026-01-31T09:30:00", "2026-13-01T00:00:00Z"])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(ValueError, match="time"):
        moment(text)
