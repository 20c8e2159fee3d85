"""Layouts as BCC describes them, and the arithmetic of reading; real maps are in tests/kernel/test_maps.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.maps import _contiguous_runs, cpu_id_limit, dtype_of, possible_cpus, sum_over_cpus

HIST = ["hist", [["sum_ns", "unsigned long long"], ["slots", "unsigned long long", [27]]], "struct_packed"]


def test_scalars_and_structs_have_the_sizes_of_c() -> None:
    assert dtype_of("unsigned int").itemsize == 4
    assert dtype_of(HIST).itemsize == 8 * 28
    padded = dtype_of(["pair", [["small", "unsigned char"], ["large", "unsigned long long"]], "struct"])
    assert padded.itemsize == 16
    assert padded.fields is not None
    assert padded.fields["large"][1] == 8


def test_a_packed_struct_has_the_padding_that_bcc_spells_out() -> None:
    members = [["small", "unsigned char"], ["__pad_1", "char", [7]], ["large", "unsigned long long"]]
    packed = dtype_of(["pair", members, "struct_packed"])
    assert packed.itemsize == 16
    assert packed.fields is not None
    assert packed.fields["large"][1] == 8


def test_structs_nest() -> None:
    inner = ["inner", [["a", "unsigned int"], ["b", "unsigned int"]], "struct"]
    outer = dtype_of(["outer", [["first", "unsigned long long"], ["inner", inner[1], "struct"]], "struct"])
    raw = np.array([(1, (2, 3))], outer)
    assert raw["inner"]["b"].tolist() == [3]
    assert raw.tobytes() == (1).to_bytes(8, "little") + (2).to_bytes(4, "little") + (3).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ("long double", "'long double' is not supported"),
        (["u", [["a", "int"]], "union"], "C type u: only structs"),
        (["s", [["bits", "unsigned int", 3]], "struct"], "struct s: member 'bits' is a bitfield or union"),
        (["s", [["either", [["a", "int"]], "union"]], "struct"], "member 'either' is a bitfield or union"),
    ],
)
def test_what_cannot_be_read_is_named(description: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dtype_of(description)


def test_totals_add_up_over_cpus_and_keep_elements_apart() -> None:
    values = np.zeros((2, 3), dtype_of(HIST))
    values["sum_ns"] = [[1, 2, 3], [10, 20, 30]]
    values["slots"][0, :, 26] = [5, 0, 2]
    counters = sum_over_cpus(values)
    assert counters.shape == (2, 28)
    assert counters[:, 0].tolist() == [6, 60]
    assert counters[:, 27].tolist() == [7, 0]


def test_values_that_cpus_share_are_their_own_totals() -> None:
    values = np.zeros(2, dtype_of(HIST))
    values["sum_ns"] = [6, 60]
    assert sum_over_cpus(values)[:, 0].tolist() == [6, 60]
    assert sum_over_cpus(values).shape == (2, 28)
    assert sum_over_cpus(np.array([3, 4], dtype_of("unsigned long long"))).tolist() == [[3], [4]]


def test_totals_do_not_overflow_where_counters_do_not() -> None:
    values = np.zeros((1, 2), dtype_of(HIST))
    values["sum_ns"] = 2**62
    assert sum_over_cpus(values)[0, 0] == 2**63


@given(st.lists(st.integers(0, 300), unique=True).map(sorted), st.integers(1, 100))
def test_runs_cover_every_place_once_and_bridge_short_gaps_only(places: list[int], bridge: int) -> None:
    runs = list(_contiguous_runs(places, bridge))
    covered = [place for first, last in runs for place in range(first, last + 1)]
    assert len(covered) == len(set(covered))
    assert set(places) <= set(covered)
    assert all(first in places and last in places for first, last in runs)
    assert all(after[0] - before[1] > bridge for before, after in pairwise(runs))


def test_possible_cpus_are_counted_not_the_online_ones(tmp_path: Path) -> None:
    directory = tmp_path / "devices/system/cpu"
    directory.mkdir(parents=True)
    (directory / "possible").write_text("0-3,8-127\n")
    assert possible_cpus(tmp_path) == 124
    assert cpu_id_limit(tmp_path) == 128, "programs look up by number"
