"""What settings mean on nodes of every size."""

from __future__ import annotations

import pytest

from agent.config import AdvisorConfig


@pytest.mark.parametrize(("cpus", "reserve", "reclaim"), [(48, 4, 4), (16, 4, 4), (8, 2, 2), (2, 0.5, 1), (1, 0.25, 1)])
def test_small_nodes_reserve_a_quarter(cpus: int, reserve: float, reclaim: int) -> None:
    assert AdvisorConfig().reserve_cores(cpus) == reserve
    assert AdvisorConfig().reclaim_reserve_cores(cpus, 1) == reclaim


def test_what_is_configured_holds_on_small_nodes_too() -> None:
    config = AdvisorConfig(reserved_for_allocate_cores=4, min_reclaimed_cores=16)
    assert config.reserve_cores(2) == 2
    assert config.reclaim_reserve_cores(16, 2) == 16
