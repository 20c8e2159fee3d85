"""The probe's pure parts; what it measures is in tests/kernel/test_kswapd.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.histogram import SLOT_COUNT
from api.snapshot import Durations, Kswapd
from probes import bpf
from probes.kswapd import (
    _FORMS,
    FORMS,
    NO_RECLAIM,
    TASK_SLOTS,
    decode,
    decode_nodes,
    job,
    nodes_with_memory,
    silent_lru_gen,
)

COUNTS = st.lists(st.integers(0, 2**40), min_size=SLOT_COUNT, max_size=SLOT_COUNT)


@given(COUNTS, COUNTS, st.integers(0, 2**63), st.integers(0, 2**63))
def test_a_row_is_two_histograms_then_pages_and_wakeups(direct: list[int], limit: list[int], a: int, b: int) -> None:
    reclaim = decode({7: [a, *direct, b, *limit, a + 1, b + 1]})[7]
    assert reclaim.direct == Durations(sum_ns=a, count=sum(direct), slots=tuple(direct))
    assert reclaim.limit == Durations(sum_ns=b, count=sum(limit), slots=tuple(limit))
    assert (reclaim.reclaimed_pages, reclaim.kswapd_wakeups) == (a + 1, b + 1)


def test_a_row_of_zeros_is_nothing() -> None:
    assert decode({7: [0] * (2 * SLOT_COUNT + 4)}) == {7: NO_RECLAIM}


def test_nodes_keep_their_numbers() -> None:
    rows = [[11, 0, 1, 2, 3, 4], [12, 99, 5, 6, 7, 8]]
    assert decode_nodes((0, 2), rows) == {
        0: Kswapd(wakeups=1, active_ns=2, scanned_pages=3, reclaimed_pages=4),
        2: Kswapd(wakeups=5, active_ns=6, scanned_pages=7, reclaimed_pages=8),
    }


@pytest.mark.parametrize(("text", "nodes"), [("0-1\n", (0, 1)), ("0,2\n", (0, 2)), ("\n", (0,)), ("what\n", (0,))])
def test_nodes_are_those_with_memory(tmp_path: Path, text: str, nodes: tuple[int, ...]) -> None:
    assert nodes_with_memory(tmp_path) == (0,)
    (tmp_path / "devices/system/node").mkdir(parents=True)
    (tmp_path / "devices/system/node/has_memory").write_text(text)
    assert nodes_with_memory(tmp_path) == nodes
    assert job(FORMS, nodes).constants["NODES"] > max(nodes)


def test_program_names_are_unique_and_short_enough_for_the_kernel() -> None:
    assert tuple(_FORMS) == FORMS
    for form in _FORMS.values():
        names = [program.name for program in form.programs]
        assert len(set(names)) == len(names)
        assert all(name.startswith("dtse_") and len(name) < bpf.NAME_BYTES for name in names)


def test_seats_are_a_power_of_two_because_the_source_masks_with_them() -> None:
    assert TASK_SLOTS & (TASK_SLOTS - 1) == 0


@pytest.mark.parametrize(
    ("runs", "scanned", "mask", "message"),
    [(10, 0, "0x0007\n", True), (9, 0, "0x0007\n", False), (99, 1, "0x0007\n", False), (99, 0, "0x0000\n", False)],
)
def test_an_lru_that_does_not_tell_is_a_problem(
    tmp_path: Path, runs: int, scanned: int, mask: str, message: bool
) -> None:
    """Where the file is missing or makes no sense, as on kernels without that LRU, nothing is wrong."""
    quiet = Kswapd(wakeups=0, active_ns=0, scanned_pages=0, reclaimed_pages=0)
    numa = {0: quiet, 1: Kswapd(wakeups=runs, active_ns=5, scanned_pages=scanned, reclaimed_pages=0)}
    assert silent_lru_gen(numa, tmp_path / "enabled") is None
    (tmp_path / "enabled").write_text("y\n")
    assert silent_lru_gen(numa, tmp_path / "enabled") is None
    (tmp_path / "enabled").write_text(mask)
    problem = silent_lru_gen(numa, tmp_path / "enabled")
    assert (problem is not None) == message
    assert problem is None or problem.reason.startswith("kswapd ran 10 times without a scanned page")
