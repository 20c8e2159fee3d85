"""Loads over time: known points of each shape, and repeatability of every second."""

from __future__ import annotations

import pytest

from agent.offline.simulation.workloads import DAY_S, LOAD_KINDS, NOISE, build_load, seeded_uniform


@pytest.mark.parametrize(
    ("kind", "at_s", "level"),
    [
        ("diurnal", 4 * 3600, 0.2),
        ("diurnal", 16 * 3600, 1.0),
        ("diurnal", 10 * 3600, 0.6),
        ("weekly", 16 * 3600, 1.0),
        ("weekly", 5 * DAY_S + 16 * 3600, 0.5),
        ("weekly", 7 * DAY_S + 10 * 3600, 0.6),
        ("step", 3599, 0.2),
        ("step", 3600, 0.8),
        ("ramp", 0, 0.1),
        ("ramp", 3600, 0.55),
        ("flat", 12345, 0.5),
    ],
)
def test_shapes(kind: str, at_s: float, level: float) -> None:
    assert build_load(kind, 1)(at_s) == pytest.approx(level, rel=NOISE + 1e-9)


@pytest.mark.parametrize("kind", sorted(LOAD_KINDS))
def test_every_load_is_a_part_of_its_peak_and_the_same_again(kind: str) -> None:
    first = [build_load(kind, 7)(second) for second in range(0, 20_000, 7)]
    assert all(0 <= level <= 1 for level in first)
    assert first == [build_load(kind, 7)(second) for second in range(0, 20_000, 7)]
    assert first != [build_load(kind, 8)(second) for second in range(0, 20_000, 7)]


def test_bursts_rise_at_once_and_decay() -> None:
    """About three windows of five have a burst of at least one and a half times the base load."""
    levels = [build_load("bursty", 3)(second) for second in range(30_000)]
    windows = [max(levels[start : start + 300]) for start in range(0, 30_000, 300)]
    assert 0.45 <= sum(top > 0.45 for top in windows) / len(windows) <= 0.75
    assert sum(level < 0.27 for level in levels) / len(levels) > 0.5


def test_random_numbers_are_spread_evenly() -> None:
    drawn = [seeded_uniform(5, number) for number in range(10_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.01)
    assert sum(value < 0.1 for value in drawn) == pytest.approx(1000, abs=100)
