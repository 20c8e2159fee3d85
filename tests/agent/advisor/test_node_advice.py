"""Overcommit ratios: Katalyst's own cases, bounds of the formula, and unmeasured inputs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.advisor.node_advice import PodLoad, compute_overcommit, overcommit_ratio
from agent.config.advisor import OvercommitConfig
from api.overcommit import CPU_RATIO_KEY, MEMORY_RATIO_KEY
from api.units import GIB

CONFIG = OvercommitConfig()
TEN = {CPU_RATIO_KEY: "10", MEMORY_RATIO_KEY: "10"}


def load(cpu: tuple[float | None, float | None], memory: tuple[float | None, float | None]) -> PodLoad:
    """Requested and used, in cores and GiB."""
    return PodLoad(
        cpu_request_cores=cpu[0],
        cpu_used_cores=cpu[1],
        memory_request_bytes=None if memory[0] is None else memory[0] * GIB,
        memory_used_bytes=None if memory[1] is None else memory[1] * GIB,
    )


@pytest.mark.parametrize(
    ("pods", "static", "cpu", "memory"),
    [
        # Katalyst's own, of 16 cores and 32 GiB: little used, much used, nothing requested
        ([load((2, 0.5), (4, 1))] * 2, TEN, 1.6, 1.17),
        ([load((4, 3), (8, 7)), load((4, 2), (8, 6))], TEN, 1.0, 1.0),
        ([load((None, 3), (None, 6))] * 2, TEN, 1.0, 1.0),
        # the node's own ratio bounds; without one, or with one that is none, nothing is overcommitted
        ([load((2, 0.5), (4, 1))] * 2, {CPU_RATIO_KEY: "1.5", MEMORY_RATIO_KEY: "1.1"}, 1.5, 1.1),
        ([load((2, 0.5), (4, 1))] * 2, {}, 1.0, 1.0),
        ([load((2, 0.5), (4, 1))] * 2, {CPU_RATIO_KEY: "much", MEMORY_RATIO_KEY: "0.3"}, 1.0, 1.0),
        ([load((2, 0.5), (4, 1))] * 2, {CPU_RATIO_KEY: "nan", MEMORY_RATIO_KEY: "inf"}, 1.0, 1.0),
        # not measured: all that it requests; neither measured nor requested: no ratio
        ([load((2, None), (4, None))] * 2, TEN, 1.0, 1.0),
        ([load((2, 0.5), (4, 1)), load((None, None), (None, None))], TEN, 1.0, 1.0),
        # of a node without pods
        ([], TEN, 1.0, 1.0),
    ],
)
def test_ratios(pods: list[PodLoad], static: dict[str, str], cpu: float, memory: float) -> None:
    result = compute_overcommit(pods, 16, 32 * GIB, static, CONFIG)
    assert result.cpu_ratio == pytest.approx(cpu, abs=0.01)
    assert result.memory_ratio == pytest.approx(memory, abs=0.01)


def test_the_measured_load_counts_if_it_is_higher_than_the_estimate() -> None:
    assert overcommit_ratio(100, 40, 20, 0.9, 0.4) == pytest.approx(1.8)  # ((90 - 20) / .5 + 40) / 100
    assert overcommit_ratio(100, 40, 10, 0.9, 0.4) == pytest.approx(
        2.4
    )  # ((90 - 10) / .4 + 40) / 100: .25 is below the estimate
    assert overcommit_ratio(16, 4, 3, 0.6, 0.4) == 1.0  # ((9.6 - 3) / .75 + 4) / 16 is .8
    assert overcommit_ratio(100, 40, 60, 0.9, 0.4) == 1.0  # more used than requested: a load of 1 at most


def test_an_unknown_resource_is_not_overcommitted() -> None:
    result = compute_overcommit([load((2, 0.5), (4, 1))], None, None, TEN, CONFIG)
    assert (result.cpu_ratio, result.memory_ratio) == (1.0, 1.0)
    assert "CPU: the capacity or the use is not known" in result.reason.text


def test_the_reason_contains_the_numbers() -> None:
    result = compute_overcommit([load((2, 0.5), (4, 1))] * 2, 16, 32 * GIB, {CPU_RATIO_KEY: "1.5"}, CONFIG)
    assert (
        "CPU: 1.00 cores used of 4.00 cores requested and 16.00 cores allocatable: "
        "overcommit ratio 1.50, bounded by the node's 1.50."
    ) in result.reason.text
    assert result.reason.inputs["cpu_static_ratio"] == 1.5


@given(st.floats(1, 500), st.floats(0.01, 500), st.floats(0, 500), st.floats(0.01, 1), st.floats(0.01, 1))
def test_ratios_are_at_least_one_and_fall_with_use(
    allocatable: float, requested: float, used: float, target: float, estimated: float
) -> None:
    result = overcommit_ratio(allocatable, requested, used, target, estimated)
    assert result >= 1
    assert overcommit_ratio(allocatable, requested, used + 1, target, estimated) <= result + 1e-9
