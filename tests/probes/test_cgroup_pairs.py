"""What is made of the table of pairs; that the table is filled rightly is in tests/kernel/test_blame.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes import wakeups
from probes.cgroup_pairs import MAX_PAIR_TABLE_BYTES, PairAccounts, PairEntries, ResolvedPairs, pair_bits
from probes.per_cgroup_probe import RETIRED_TAG, CgroupTags
from probes.wakeups import job

TAGS = {10: 1001, 20: 1002, 30: 1003}
"""Cgroup id by tag."""
LIVE = {1001: "/a", 1002: "/b", 1003: "/c"}


def pairs(*entries: tuple[int, int, int]) -> PairEntries:
    """Entries as (tag of the victim, tag of the culprit, ns)."""
    columns = [np.array([entry[k] for entry in entries], np.uint64) for k in range(3)]
    return PairEntries(np.arange(len(entries)), columns[0], columns[1], columns[2])


def resolve(
    accounts: PairAccounts, entries: Sequence[tuple[int, int, int]], tags: Mapping[int, int], live: Mapping[int, str]
) -> ResolvedPairs:
    existing = np.array([*tags], np.uint64), np.array([*tags.values()], np.uint64)
    return accounts.resolve(pairs(*entries), CgroupTags(*existing), live)


@pytest.mark.parametrize(("cpus", "bits"), [(1, 13), (2, 13), (32, 13), (33, 12), (64, 12), (128, 11), (8192, 5)])
def test_the_table_stays_within_4_mib_on_every_machine(cpus: int, bits: int) -> None:
    assert pair_bits(cpus) == bits
    assert 16 * cpus << bits <= MAX_PAIR_TABLE_BYTES == 4 << 20


def test_one_pair_on_several_cpus_is_one_sum() -> None:
    actual = resolve(PairAccounts(8), [(10, 20, 5), (20, 10, 100), (10, 20, 7), (10, 10, 1)], TAGS, LIVE)
    assert actual.by_path == {1001: {"/a": 1, "/b": 12}, 1002: {"/a": 100}}
    assert actual.unattributed == {}
    assert actual.reclaimable.nonzero()[0].tolist() == []


def test_two_tags_of_one_cgroup_are_one_aggressor() -> None:
    """Its cpu controller was switched off and on again."""
    actual = resolve(PairAccounts(8), [(10, 20, 5), (10, 21, 6)], {**TAGS, 21: 1002}, LIVE)
    assert actual.by_path == {1001: {"/b": 11}}


def test_only_the_low_halves_of_tags_are_in_the_table() -> None:
    actual = resolve(PairAccounts(8), [(10, 20, 5)], {(7 << 32) + 10: 1001, (9 << 32) + 20: 1002}, LIVE)
    assert actual.by_path == {1001: {"/b": 5}}


def test_the_root_has_a_name_even_where_it_is_not_listed() -> None:
    actual = resolve(PairAccounts(8), [(10, 2, 5)], {10: 1001, 2: 1}, {1001: "/a"})
    assert actual.by_path == {1001: {"/": 5}}


def test_a_removed_aggressor_moves_to_the_rest_and_its_entries_are_freed() -> None:
    accounts = PairAccounts(8)
    assert resolve(accounts, [(10, 20, 50), (10, 30, 8)], TAGS, LIVE).by_path == {1001: {"/b": 50, "/c": 8}}
    removed = resolve(accounts, [(10, 20, 60), (10, 30, 8)], TAGS, {1001: "/a", 1003: "/c"})
    assert (removed.by_path, removed.unattributed) == ({1001: {"/c": 8}}, {1001: 10})
    assert removed.reclaimable.nonzero()[0].tolist() == []
    forgotten = resolve(accounts, [(10, 20, 61), (10, 30, 8)], {10: 1001, 30: 1003}, LIVE)
    assert (forgotten.by_path, forgotten.unattributed) == ({1001: {"/c": 8}}, {1001: 11})
    assert forgotten.reclaimable.nonzero()[0].tolist() == [], "the kernel may still be adding to it"
    quiet = resolve(accounts, [(10, 20, 61), (10, 30, 8)], {10: 1001, 30: 1003}, LIVE)
    assert (quiet.unattributed, quiet.reclaimable.nonzero()[0].tolist()) == ({1001: 11}, [0])
    accounts.forget(np.array([0]))
    later = resolve(accounts, [(10, 30, 9)], {10: 1001, 30: 1003}, LIVE)
    assert (later.by_path, later.unattributed) == ({1001: {"/c": 9}}, {1001: 11})


def test_a_removed_victim_is_dropped_with_all_its_pairs() -> None:
    accounts = PairAccounts(8)
    for _ in range(2):
        resolve(accounts, [(10, 99, 4)], TAGS, LIVE)
    after_removal = resolve(accounts, [(10, 20, 50)], {20: 1002}, {1002: "/b"})
    assert (after_removal.by_path, after_removal.unattributed, after_removal.reclaimable.nonzero()[0].tolist()) == (
        {},
        {},
        [0],
    )


def test_an_aggressor_is_named_from_the_next_listing_on_and_earlier_time_stays_in_the_rest() -> None:
    accounts = PairAccounts(8)
    assert resolve(accounts, [(10, 20, 30)], TAGS, {1001: "/a"}).unattributed == {1001: 30}
    named = resolve(accounts, [(10, 20, 45)], TAGS, LIVE)
    assert (named.by_path, named.unattributed) == ({1001: {"/b": 15}}, {1001: 30})
    missed = resolve(accounts, [(10, 20, 46)], TAGS, {1001: "/a"})
    assert (missed.by_path, missed.unattributed) == ({}, {1001: 31})
    again = resolve(accounts, [(10, 20, 50)], TAGS, LIVE)
    assert (again.by_path, again.unattributed) == ({1001: {"/b": 4}}, {1001: 31})


def test_retired_slots_have_no_cgroup() -> None:
    actual = resolve(PairAccounts(8), [(10, 20, 5)], {10: 1001, RETIRED_TAG: 0}, LIVE)
    assert (actual.by_path, actual.unattributed) == ({}, {1001: 5})


def test_an_aggressor_that_was_dropped_too_early_is_named_again_for_new_time() -> None:
    """It was missing from two listings although it lives, or had no place while the table was full."""
    accounts = PairAccounts(8)
    resolve(accounts, [(10, 20, 50)], TAGS, LIVE)
    assert resolve(accounts, [(10, 20, 60)], {10: 1001}, LIVE).unattributed == {1001: 10}
    again = resolve(accounts, [(10, 20, 75)], TAGS, LIVE)
    assert (again.by_path, again.unattributed) == ({1001: {"/b": 15}}, {1001: 10})


def test_an_entry_may_be_a_row_of_a_sum_and_a_histogram() -> None:
    """Two CPUs have one pair; then its waker ends, and what is new moves over slot by slot."""
    accounts, tags = PairAccounts((8, 3)), (np.array([10, 20], np.uint64), np.array([1001, 1002], np.uint64))

    def rows(*values: list[int]) -> PairEntries:
        actual = np.array(values, np.uint64)
        return PairEntries(np.arange(2), np.full(2, 10, np.uint64), np.full(2, 20, np.uint64), actual)

    first = accounts.resolve(rows([50, 1, 2], [7, 1, 0]), CgroupTags(*tags), LIVE)
    assert (first.by_path, first.unattributed) == ({1001: {"/b": [57, 2, 2]}}, {})
    later = accounts.resolve(rows([60, 1, 3], [7, 1, 0]), CgroupTags(*tags), {1001: "/a"})
    assert (later.by_path, later.unattributed) == ({}, {1001: [10, 0, 1]})
    forgotten = accounts.resolve(rows([60, 1, 3], [7, 1, 1]), CgroupTags(tags[0][:1], tags[1][:1]), LIVE)
    assert (forgotten.by_path, forgotten.unattributed) == ({}, {1001: [10, 0, 2]})
    assert forgotten.reclaimable.tolist() == [True, False], "the second one has grown, if by a slot alone"


@pytest.mark.parametrize(("cpus", "bits"), [(2, 13), (8, 13), (16, 12), (128, 9)])
def test_a_table_with_histograms_stays_within_its_own_bound(cpus: int, bits: int) -> None:
    created = job(("tp_btf",), cpus).constants
    assert created["PAIR_BITS"] == bits
    assert (16 + 8 * created["PAIR_SLOTS"]) * cpus << bits <= wakeups.MAX_WAKEUP_PAIR_BYTES == 16 << 20


def test_an_empty_table_has_no_pairs() -> None:
    assert resolve(PairAccounts(8), [], {}, {}).by_path == {}


CELLS = [(10, 20), (10, 30), (10, 40), (20, 10)]
STEPS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(CELLS), st.integers(1, 10**12)),
        st.sets(st.sampled_from([1001, 1002, 1003])),
        st.sets(st.sampled_from([20, 30])),
    ),
    max_size=12,
)


@given(STEPS)
def test_no_time_is_lost_and_the_rest_never_falls(
    steps: list[tuple[dict[tuple[int, int], int], set[int], set[int]]],
) -> None:
    """Growth of pairs, which cgroups are listed, and which tags are retired; 40 never had a slot.

    Time reported under a path ends with it, as the counters of a removed cgroup do.
    """
    accounts, table, retired = PairAccounts(8), dict[tuple[int, int], int](), set[int]()
    total, rest, ended, reported = 0, 0, 0, dict[str, int]()
    for growth, listed, retire in steps:
        retired |= retire
        for pair, ns in growth.items():
            if retired.isdisjoint(pair):
                table[pair] = table.get(pair, 0) + ns
                total += ns if pair[0] == 10 else 0
        entries = pairs(*((*pair, ns) for pair, ns in table.items()))._replace(
            at=np.array([CELLS.index(pair) for pair in table], np.intp)
        )
        tags = {tag: number for tag, number in TAGS.items() if tag not in retired}
        existing = CgroupTags(np.array([*tags], np.uint64), np.array([*tags.values()], np.uint64))
        actual = accounts.resolve(entries, existing, {number: LIVE[number] for number in listed})
        accounts.forget(entries.at[actual.reclaimable])
        for at in entries.at[actual.reclaimable].tolist():
            del table[CELLS[at]]
        named = actual.by_path.get(1001, {})
        ended += sum(ns for aggressor, ns in reported.items() if aggressor not in named)
        reported = named
        assert sum(named.values()) + actual.unattributed.get(1001, 0) + ended == total
        assert actual.unattributed.get(1001, 0) >= rest
        rest = actual.unattributed.get(1001, 0)
