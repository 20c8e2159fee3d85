"""Offloading policies against numbers computed by hand from Katalyst's formulas and oomd's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.advisor.memory import memory_offloading

TARGETS = memory_offloading.RefaultTargets(accuracy=0.99, efficiency=0.6, max_probe=0.01)
SENPAI = memory_offloading.SenpaiLaw(0.01, 100e6, 10e9, 0.01, 1.0, 10.0, 20.0)


@pytest.mark.parametrize(
    ("avg60", "expected"), [(0.0, 10.0), (0.05, 5.0), (0.09, 1.0), (0.1, 0.0), (0.2, 0.0), (50.0, 0.0)]
)
def test_psi(avg60: float, expected: float) -> None:
    assert memory_offloading.psi_target(1000.0, avg60, 0.01, 0.1) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pages", "last", "expected"),
    [
        (
            memory_offloading.ReclaimedPages(0, 0, 0),
            0.0,
            50.0,
        ),  # nothing was reclaimed, which is no fault: a tenth of what is inactive
        (memory_offloading.ReclaimedPages(100, 90, 0), 60.0, 63.0),  # well: 5 % more
        (memory_offloading.ReclaimedPages(100, 90, 0), 40.0, 50.0),  # or a tenth of what is inactive, whichever is more
        (memory_offloading.ReclaimedPages(100, 90, 0), 99.0, 100.0),  # and never more than 1 % of the use
        (memory_offloading.ReclaimedPages(100, 100, 1), 60.0, 63.0),  # accuracy 0.99 is enough
        (memory_offloading.ReclaimedPages(200, 200, 3), 60.0, 59.1),  # 0.985 is not: 60 x 0.985
        (memory_offloading.ReclaimedPages(100, 60, 0), 60.0, 63.0),  # efficiency 0.6 is enough
        (
            memory_offloading.ReclaimedPages(100, 59, 0),
            60.0,
            60.0,
        ),  # 0.59 is not, but what came was right: no more than the last time
        (memory_offloading.ReclaimedPages(100, 100, 100), 60.0, 0.0),
        (memory_offloading.ReclaimedPages(100, 100, 250), 60.0, 0.0),  # more came back than went: never negative
        (memory_offloading.ReclaimedPages(100, 0, 5), 60.0, 63.0),  # nothing was reclaimed
    ],
)
def test_refault(pages: memory_offloading.ReclaimedPages, last: float, expected: float) -> None:
    assert memory_offloading.refault_target(
        last, pages, inactive=500.0, usage=10_000.0, targets=TARGETS
    ) == pytest.approx(expected)


def test_refault_starts_without_inactive_pages() -> None:
    """It starts with a tenth of 1 % of the use and then grows as usual."""
    quiet = memory_offloading.ReclaimedPages(0, 0, 0)
    assert memory_offloading.refault_target(0.0, quiet, inactive=0.0, usage=10_000.0, targets=TARGETS) == pytest.approx(
        10
    )
    assert memory_offloading.refault_target(
        40.0, quiet, inactive=0.0, usage=10_000.0, targets=TARGETS
    ) == pytest.approx(42)
    assert memory_offloading.refault_target(0.0, quiet, inactive=0.0, usage=0.0, targets=TARGETS) == 0


@pytest.mark.parametrize(
    ("stall_s", "size", "new_size", "requests"),
    [
        (0.0, 1e9, 0.99e9, 0.01e9),  # no stall at all: the largest probe
        (0.001, 1e9, 0.99e9, 0.01e9),  # ten times below the aim: just so
        (0.005, 1e9, 1e9 - 0.04 * 0.01e9, 0.04 * 0.01e9),  # twice below: (2/10)^2 of it
        (0.01, 1e9, 1.0025e9, 0.0),  # at the aim: back off by (1/20)^2
        (0.1, 1e9, 1.25e9, 0.0),  # ten times above: (10/20)^2
        (0.2, 1e9, 2e9, 0.0),  # twenty times: all of it
        (5.0, 1e9, 2e9, 0.0),
        (0.2, 8e9, 10e9, 0.0),  # the size aimed at is bounded
        (0.0, 0.5e9, 0.495e9, 0.01e9),  # far below what is used: step by step all the same
        (0.0, 3e9, 0.99e9, 0.01e9),  # shrunk by itself
    ],
)
def test_senpai(stall_s: float, size: float, new_size: float, requests: float) -> None:
    result = memory_offloading.senpai_target(1e9, size, stall_s, SENPAI)
    assert result == (pytest.approx(new_size), pytest.approx(requests))


@pytest.mark.parametrize("usage", [50e6, 100e6])
def test_senpai_leaves_small_groups_alone(usage: float) -> None:
    assert memory_offloading.senpai_target(usage, usage, 0.0, SENPAI)[1] == 0.0


@pytest.mark.parametrize(
    ("cache", "mapped", "inactive", "reserved", "expected"),
    [
        (200 << 20, 100 << 20, 0, None, 50 << 20),  # twice what is mapped: there is something to give
        ((200 << 20) - 1, 100 << 20, 0, None, 0),  # less: it is in use
        (20 << 20, 0, 0, None, 40 << 20),  # twice the cache that is not mapped
        (0, 0, 0, None, 1 << 20),  # a MiB is always allowed
        (1000 << 20, 100 << 20, 350 << 20, 100 << 20, 50 << 20),  # Katalyst's own: 350 - 2 x 100 - 100
        (1000 << 20, 100 << 20, 330 << 20, 100 << 20, 30 << 20),
        (1000 << 20, 100 << 20, 280 << 20, 100 << 20, 0),
    ],
)
def test_without_swap(cache: float, mapped: float, inactive: float, reserved: float | None, expected: float) -> None:
    assert memory_offloading.limit_without_swap(50 << 20, cache, mapped, inactive, reserved) == expected


sizes = st.floats(0, 1e13, allow_nan=False)
counts = st.integers(0, 10**9)


@given(sizes, sizes, st.floats(0, 100), counts, counts, counts, sizes)
def test_targets_are_between_zero_and_the_probe(
    usage: float, last: float, avg60: float, scanned: int, stolen: int, activated: int, inactive: float
) -> None:
    assert 0 <= memory_offloading.psi_target(usage, avg60, 0.01, 0.1) <= usage * 0.01
    requests = memory_offloading.refault_target(
        last, memory_offloading.ReclaimedPages(scanned, stolen, activated), inactive, usage, TARGETS
    )
    assert 0 <= requests <= max(last, usage * 0.01)
    size, requests = memory_offloading.senpai_target(usage, last, avg60 / 100, SENPAI)
    assert 0 <= requests <= usage * 0.01
    assert 0 <= size <= max(usage, last, 10e9)
