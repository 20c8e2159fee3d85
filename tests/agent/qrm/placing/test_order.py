"""Writes of cpusets against a kernel that refuses what version 1 refuses: an empty set, or more than the cgroup above has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.qrm.placing.order import steps
from api.cpus import format_cpu_list, parse_cpu_list

PATHS = ("/", "/a", "/b", "/a/c", "/a/d", "/a/c/e")


def above(path: str, paths: tuple[str, ...] = PATHS) -> str | None:
    upper = path.rpartition("/")[0]
    while upper and upper not in paths:
        upper = upper.rpartition("/")[0]
    return None if path == "/" else upper or "/"


@st.composite
def trees(draw: st.DrawFn) -> dict[str, frozenset[int]]:
    """CPUs of every cgroup, each inside the one above."""
    made: dict[str, frozenset[int]] = {}
    for path in PATHS:
        upper = above(path)
        room = sorted(made[upper]) if upper is not None else list(range(8))
        made[path] = frozenset(draw(st.sets(st.sampled_from(room), min_size=1)))
    return made


@given(trees(), trees())
def test_the_kernel_accepts_every_write(before: dict[str, frozenset[int]], after: dict[str, frozenset[int]]) -> None:
    now = dict(before)
    for path, cpus in steps(before, after):
        upper = above(path)
        assert cpus
        assert upper is None or cpus <= now[upper], f"{path} would have more than {upper}"
        below = [child for child in PATHS if above(child) == path]
        assert all(now[child] <= cpus for child in below), f"a child of {path} would have more"
        now[path] = cpus
    assert now == after
    assert steps(after, after) == ()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"/x": "0-3", "/y": "4"}, {"/x": "0-1", "/y": "2-4"}, "/x 0-1, /y 2-4"),
        ({"/x": "4", "/y": "0-3"}, {"/x": "2-4", "/y": "0-1"}, "/y 0-1, /x 2-4"),  # who gives up goes first
        ({"/p": "0-3", "/p/x": "0-3"}, {"/p": "4-5", "/p/x": "4"}, "/p 0-5, /p/x 4, /p 4-5"),
        ({"/p": "0-3", "/p/x": "0-1"}, {"/p": "0-3", "/p/x": "2"}, "/p/x 2"),
        ({}, {"/new": "0-1"}, "/new 0-1"),
        ({"/x": "0"}, {"/x": "0"}, ""),
    ],
)
def test_order(before: dict[str, str], after: dict[str, str], expected: str) -> None:
    def sets(texts: dict[str, str]) -> dict[str, frozenset[int]]:
        return {path: frozenset(parse_cpu_list(text)) for path, text in texts.items()}

    assert ", ".join(f"{path} {format_cpu_list(cpus)}" for path, cpus in steps(sets(before), sets(after))) == expected
