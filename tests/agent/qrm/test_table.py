"""The notation of knobs and its translation to the files of both cgroup versions."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent.qrm.table import CFS_PERIOD, CFS_QUOTA, TABLE, canonical, shares_of, weight_of
from api.cpus import format_cpu_list
from api.knobs import Knob

VALUES = {
    Knob.CPUSET: st.sets(st.integers(0, 512), max_size=40).map(format_cpu_list),
    Knob.WEIGHT: st.integers(1, 10_000).map(str),
    Knob.QUOTA: st.one_of(
        st.just("max 100000"),
        st.tuples(st.integers(1_000, 10**12), st.integers(1_000, 1_000_000)).map(lambda pair: f"{pair[0]} {pair[1]}"),
    ),
    Knob.IDLE: st.sampled_from(("0", "1")),
}


@pytest.mark.parametrize(
    ("knob", "text", "expected"),
    [
        (Knob.CPUSET, "0,1,2,8\n", "0-2,8"),
        (Knob.CPUSET, "3,1-2", "1-3"),
        (Knob.CPUSET, "\n", ""),
        (Knob.WEIGHT, "0100\n", "100"),
        (Knob.WEIGHT, "0", "0"),
        (Knob.QUOTA, "50000", "50000 100000"),
        (Knob.QUOTA, "50000 50000\n", "50000 50000"),
        (Knob.QUOTA, "max 25000\n", "max 100000"),
        (Knob.QUOTA, "max", "max 100000"),
        (Knob.IDLE, "1\n", "1"),
    ],
)
def test_equal_meanings_have_one_spelling(knob: Knob, text: str, expected: str) -> None:
    assert canonical(knob, text) == expected


@pytest.mark.parametrize(
    ("knob", "text"),
    [
        (Knob.CPUSET, "0-"),
        (Knob.CPUSET, "9000"),
        (Knob.WEIGHT, "-5"),
        (Knob.WEIGHT, ""),
        (Knob.WEIGHT, "1.5"),
        (Knob.WEIGHT, "٣"),
        (Knob.WEIGHT, "9" * 5000),
        (Knob.QUOTA, ""),
        (Knob.QUOTA, "-1 100000"),
        (Knob.QUOTA, "max 100000 3"),
        (Knob.QUOTA, "50000 max"),
        (Knob.IDLE, "2"),
        (Knob.IDLE, ""),
    ],
)
def test_what_means_nothing_is_refused_by_name(knob: Knob, text: str) -> None:
    with pytest.raises(ValueError, match=knob.value):
        canonical(knob, text)


@given(st.sampled_from(sorted(TABLE)), st.text(max_size=30))
def test_any_text_is_either_canonical_or_a_value_error(knob: Knob, text: str) -> None:
    try:
        once = canonical(knob, text)
    except ValueError:
        return
    assert canonical(knob, once) == once


@given(st.data(), st.sampled_from(sorted(TABLE)), st.sampled_from(("v1", "v2")))
def test_what_is_encoded_decodes_to_the_same_value(data: st.DataObject, knob: Knob, version: str) -> None:
    value = data.draw(VALUES[knob])
    place = getattr(TABLE[knob], version)
    held = {CFS_QUOTA: "-1\n", CFS_PERIOD: "100000\n"} if len(place.files) == 2 else {}
    held.update({file: f"{text}\n" for file, text in place.encode(value).items()})
    assert canonical(knob, place.decode(held)) == value


@pytest.mark.parametrize(
    ("weight", "shares"), [(1, 10), (2, 20), (39, 399), (100, 1024), (200, 2048), (9999, 102_390), (10_000, 102_400)]
)
def test_weights_become_shares_as_in_the_kernel(weight: int, shares: int) -> None:
    assert shares_of(weight) == shares
    assert weight_of(shares) == weight


@pytest.mark.parametrize(
    ("shares", "weight"),
    [(2, 0), (3, 0), (5, 0), (6, 1), (102, 10), (512, 50), (1024, 100), (88761, 8668), (262_144, 25_600)],
)
def test_shares_read_as_version_two_shows_them(shares: int, weight: int) -> None:
    assert weight_of(shares) == weight


PAIR = st.tuples(st.integers(1_000, 400_000), st.sampled_from((1_000, 10_000, 50_000, 100_000, 1_000_000)))


@given(PAIR, PAIR)
def test_no_ratio_on_the_way_lies_outside_the_old_and_the_new(old: tuple[int, int], new: tuple[int, int]) -> None:
    assume(old != new)
    held = {CFS_QUOTA: str(old[0]), CFS_PERIOD: str(old[1])}
    wanted = {CFS_QUOTA: str(new[0]), CFS_PERIOD: str(new[1])}
    low, high = sorted((old[0] / old[1], new[0] / new[1]))
    for file, text in TABLE[Knob.QUOTA].v1.steps(held, wanted):
        held[file] = text
        ratio = int(held[CFS_QUOTA]) / int(held[CFS_PERIOD])
        assert held[CFS_QUOTA] == "-1" or low <= ratio <= high
    assert held == wanted


def test_lifting_a_quota_leaves_the_period_alone() -> None:
    place = TABLE[Knob.QUOTA].v1
    held = {CFS_QUOTA: "5000", CFS_PERIOD: "50000"}
    assert place.steps(held, place.encode("max 100000")) == ((CFS_QUOTA, "-1"),)
