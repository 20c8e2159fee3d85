"""Canonical notation of knob values and its conversion to the files of both cgroup versions."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent.qrm.knobs.knob_files import (
    CFS_PERIOD,
    CFS_QUOTA,
    KNOB_ORDER,
    KNOB_SPECS,
    MEMORY_LIMIT_FILE,
    MEMORY_MIGRATE_FILE,
    MEMS_FILE,
    MEMSW_LIMIT_FILE,
    ONE_SHOT_FILES,
    UNSUPPORTED,
    KnobCodec,
    canonical,
)
from agent.qrm.knobs.notation import IO_KEYS, PAGE_BYTES, format_io, shares_to_weight, weight_to_shares
from api.cpu import format_cpu_list
from api.knobs import ONE_SHOT_KNOBS, Knob

SIZE = st.one_of(st.just("max"), st.integers(0, 2**40).map(lambda pages: str(pages * PAGE_BYTES)))
DEVICE = st.tuples(st.integers(0, 999), st.integers(0, 99)).map(lambda pair: f"{pair[0]}:{pair[1]}")
IO = st.dictionaries(DEVICE, st.dictionaries(st.sampled_from(IO_KEYS), st.integers(1, 2**31), min_size=1), max_size=4)
VALUES = {
    Knob.CPUSET: st.sets(st.integers(0, 512), max_size=40).map(format_cpu_list),
    Knob.WEIGHT: st.integers(1, 10_000).map(str),
    Knob.QUOTA: st.one_of(
        st.just("max 100000"),
        st.tuples(st.integers(1_000, 10**12), st.integers(1_000, 1_000_000)).map(lambda pair: f"{pair[0]} {pair[1]}"),
    ),
    Knob.IDLE: st.sampled_from(("0", "1")),
    Knob.MEMS: st.sets(st.integers(0, 63), max_size=8).map(format_cpu_list),
    Knob.BURST: st.integers(0, 10**9).map(str),
    **dict.fromkeys((Knob.MEMORY_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN, Knob.SWAP_MAX), SIZE),
    Knob.IO_WEIGHT: st.integers(2, 200).map(str),
    Knob.IO_MAX: IO.map(format_io),
    Knob.NET_CLASS: st.integers(0, 2**32 - 1).map(str),
}
ELSEWHERE = {
    Knob.WBT,
    Knob.IO_COST_QOS,
    Knob.IO_COST_MODEL,
    Knob.SCHEMATA,
    Knob.POWER_LIMIT,
    Knob.OOM_SCORE_ADJ,
    Knob.SLICE,
}
"""Knobs of the node, of processes and of threads, which no file of a cgroup has."""
PLACES = [(knob, place) for knob, row in KNOB_SPECS.items() for place in (*row.v1, *row.v2)]
HELD = {CFS_QUOTA: "-1\n", CFS_PERIOD: "100000\n", MEMORY_LIMIT_FILE: "8589934592\n"}


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
        (Knob.MEMS, "0,1\n", "0-1"),
        (Knob.MEMORY_MAX, "8191", "4096"),
        (Knob.MEMORY_MAX, "9223372036854771712\n", "max"),
        (Knob.MEMORY_LOW, "max\n", "max"),
        (Knob.IO_MAX, "8:16 wbps=max rbps=1048576\n8:0 riops=max\n", "8:16 rbps=1048576 wbps=max riops=max wiops=max"),
        (Knob.IO_MAX, "9:0 riops=4294967295 wiops=7", "9:0 rbps=max wbps=max riops=max wiops=7"),
        (Knob.NET_CLASS, "4294967295", "4294967295"),
        (Knob.MEMORY_RECLAIM, "4097\n", "4097"),
        (Knob.MIGRATE_PAGES, "0,1 2", "0-1 2"),
    ],
)
def test_equal_values_have_one_canonical_text(knob: Knob, text: str, expected: str) -> None:
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
        (Knob.MEMORY_MAX, "-1"),
        (Knob.MEMORY_HIGH, "1G"),
        (Knob.MEMS, "1024"),
        (Knob.IO_MAX, "8:16 bps=5"),
        (Knob.IO_MAX, "sda rbps=5"),
        (Knob.IO_MAX, "8:16 rbps=5\n8:16 wbps=5"),
        (Knob.NET_CLASS, "4294967296"),
        (Knob.MEMORY_RECLAIM, "0"),
        (Knob.MIGRATE_PAGES, "0"),
    ],
)
def test_invalid_values_are_refused_with_the_knob_s_name(knob: Knob, text: str) -> None:
    with pytest.raises(ValueError, match=knob.value):
        canonical(knob, text)


@given(st.sampled_from([knob for knob in Knob if knob not in ELSEWHERE]), st.text(max_size=30))
def test_any_text_is_either_canonical_or_a_value_error(knob: Knob, text: str) -> None:
    try:
        once = canonical(knob, text)
    except ValueError:
        return
    assert canonical(knob, once) == once


@given(st.data(), st.sampled_from(PLACES))
def test_an_encoded_value_decodes_to_itself(data: st.DataObject, given: tuple[Knob, KnobCodec]) -> None:
    knob, place = given
    value = data.draw(VALUES[knob])
    held = {file: HELD.get(file, "") for file in (*place.files, *place.context_files)}
    if knob is Knob.IO_MAX:
        held.update(place.encode(value))
    else:
        held.update(
            {file: f"{text}\n" for file, text in place.steps({**held, MEMORY_MIGRATE_FILE: "0"}, place.encode(value))}
        )
    assert canonical(knob, place.decode(held)) == value


@given(IO, IO)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_io_limits_can_change_from_any_to_any_value(
    version: str, old: dict[str, dict[str, int]], new: dict[str, dict[str, int]]
) -> None:
    (place,) = getattr(KNOB_SPECS[Knob.IO_MAX], version)
    held = dict(place.encode(format_io(old)))
    for file, line in place.steps(held, place.encode(format_io(new))):
        # As the kernel does it: one device a write, and what is unlimited is not shown.
        device = line.split()[0]
        lines = [other for other in held[file].splitlines() if other.split()[0] != device]
        held[file] = "\n".join([*lines, line])
    assert place.decode(held) == format_io(new)


def test_every_knob_has_a_codec_or_a_reason_and_an_order() -> None:
    assert set(KNOB_SPECS) == set(Knob) - ONE_SHOT_KNOBS - ELSEWHERE == set(KNOB_ORDER)
    assert set(ONE_SHOT_FILES) == ONE_SHOT_KNOBS
    for knob in set(Knob) - ELSEWHERE:
        for number, version in enumerate(("v1", "v2")):
            there = getattr(KNOB_SPECS[knob], version) if knob in KNOB_SPECS else ONE_SHOT_FILES[knob][number]
            assert bool(there) is ((knob, version) not in UNSUPPORTED), (knob, version)


@pytest.mark.parametrize(
    ("weight", "shares"), [(1, 10), (2, 20), (39, 399), (100, 1024), (200, 2048), (9999, 102_390), (10_000, 102_400)]
)
def test_weights_convert_to_shares_as_in_the_kernel(weight: int, shares: int) -> None:
    assert weight_to_shares(weight) == shares
    assert shares_to_weight(shares) == weight


@pytest.mark.parametrize(
    ("shares", "weight"),
    [(2, 0), (3, 0), (5, 0), (6, 1), (102, 10), (512, 50), (1024, 100), (88761, 8668), (262_144, 25_600)],
)
def test_shares_convert_to_the_weight_of_version_two(shares: int, weight: int) -> None:
    assert shares_to_weight(shares) == weight


PAIR = st.tuples(st.integers(1_000, 400_000), st.sampled_from((1_000, 10_000, 50_000, 100_000, 1_000_000)))


@given(PAIR, PAIR)
def test_no_intermediate_quota_ratio_is_outside_old_and_new(old: tuple[int, int], new: tuple[int, int]) -> None:
    assume(old != new)
    held = {CFS_QUOTA: str(old[0]), CFS_PERIOD: str(old[1])}
    target = {CFS_QUOTA: str(new[0]), CFS_PERIOD: str(new[1])}
    low, high = sorted((old[0] / old[1], new[0] / new[1]))
    for file, text in KNOB_SPECS[Knob.QUOTA].v1[0].steps(held, target):
        held[file] = text
        ratio = int(held[CFS_QUOTA]) / int(held[CFS_PERIOD])
        assert held[CFS_QUOTA] == "-1" or low <= ratio <= high
    assert held == target


def test_lifting_a_quota_leaves_the_period_alone() -> None:
    place = KNOB_SPECS[Knob.QUOTA].v1[0]
    held = {CFS_QUOTA: "5000", CFS_PERIOD: "50000"}
    assert place.steps(held, place.encode("max 100000")) == ((CFS_QUOTA, "-1"),)


def test_the_migrate_flag_is_set_before_nodes_change_and_cleared_after_they_are_restored() -> None:
    (place,) = KNOB_SPECS[Knob.MEMS].v1
    first = {MEMS_FILE: "0-1\n", MEMORY_MIGRATE_FILE: "0\n"}
    assert place.steps(first, place.encode("1")) == ((MEMORY_MIGRATE_FILE, "1"), (MEMS_FILE, "1"))
    assert place.steps({MEMS_FILE: "1\n", MEMORY_MIGRATE_FILE: "1\n"}, place.encode("0")) == ((MEMS_FILE, "0"),)
    assert place.steps({MEMS_FILE: "0\n", MEMORY_MIGRATE_FILE: "1\n"}, first) == (
        (MEMS_FILE, "0-1\n"),
        (MEMORY_MIGRATE_FILE, "0\n"),
    )


def test_version_one_counts_swap_from_memory() -> None:
    (place,) = KNOB_SPECS[Knob.SWAP_MAX].v1
    held = {MEMORY_LIMIT_FILE: "999424\n", MEMSW_LIMIT_FILE: "9223372036854771712\n"}
    assert place.decode(held) == "max"
    assert place.steps(held, place.encode("8192")) == ((MEMSW_LIMIT_FILE, "1007616"),)
    assert place.decode({**held, MEMSW_LIMIT_FILE: "1007616"}) == "8192"
    with pytest.raises(ValueError, match=r"set memory\.max first"):
        place.steps({**held, MEMORY_LIMIT_FILE: "9223372036854771712"}, place.encode("0"))
