"""The agent while cgroups come and go: no error, no growth. A short form of `python -m bench.soak`."""

from __future__ import annotations

import pytest

from bench.soak import run_soak
from tests.kernel.real_cgroups import require_writable_cgroups

pytestmark = [pytest.mark.live, pytest.mark.kernel]


def test_churning_cgroups_neither_stop_the_agent_nor_make_it_grow() -> None:
    run = run_soak(require_writable_cgroups(), at_rest=200, rate=150, seconds=4.0)
    assert run.faults() == []
    assert run.rate > 50, "the churn did churn"
