"""Decoding of the iterator's records, and the sampling of loads on a clock of the test."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.interfaces import Unavailable
from api.snapshot import LoadAverages, ThreadStates
from probes import bpf
from probes.threads import NO_THREADS, ThreadsProbe, decode, job

RUNNABLE, UNINTERRUPTIBLE, IOWAIT, SLEEPING = range(4)
SECOND = 10**9


def threads(runnable: int = 0, uninterruptible: int = 0, iowait: int = 0, sleeping: int = 0) -> ThreadStates:
    return ThreadStates(runnable=runnable, uninterruptible=uninterruptible, iowait=iowait, sleeping=sleeping)


def records(*pairs: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("=QQ", *pair) for pair in pairs)


def test_records_are_added_up_by_cgroup_and_kind() -> None:
    raw = records((7, RUNNABLE), (2**40, SLEEPING), (7, IOWAIT), (7, UNINTERRUPTIBLE), (7, RUNNABLE), (2**40, SLEEPING))
    assert decode(raw) == {7: threads(2, 2, 1, 0), 2**40: threads(sleeping=2)}
    assert decode(b"") == {}


@given(st.lists(st.tuples(st.integers(1, 2**64 - 1), st.integers(0, 3))))
def test_no_thread_is_lost_or_counted_twice(pairs: list[tuple[int, int]]) -> None:
    counted = decode(records(*pairs))
    assert set(counted) == {number for number, _ in pairs}
    assert sum(s.runnable + s.uninterruptible + s.sleeping for s in counted.values()) == len(pairs)
    assert sum(s.iowait or 0 for s in counted.values()) == sum(kind == IOWAIT for _, kind in pairs)


def test_the_program_can_be_found_in_the_kernels_list() -> None:
    (program,) = job().forms[0].programs
    assert program.name.startswith("dtse_")
    assert len(program.name) < bpf.NAME_BYTES


class Reported:
    """An iterator and a clock with given values."""

    def __init__(self) -> None:
        self.states: dict[int, ThreadStates] = {}
        self.now_ns = 100 * SECOND
        self.takes_ns = 0
        self.closed = 0

    def records(self) -> bytes:
        self.now_ns += self.takes_ns
        pairs = (
            (number, kind)
            for number, states in self.states.items()
            for kind, count in ((RUNNABLE, states.runnable), (SLEEPING, states.sleeping))
            for _ in range(count)
        )
        return records(*pairs)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def reported() -> Reported:
    return Reported()


@pytest.fixture
def probe(reported: Reported) -> ThreadsProbe:
    return ThreadsProbe(reported.records, reported.close, clock=lambda: reported.now_ns)


def item(probe: ThreadsProbe, number: int, live: Mapping[int, str], *, complete: bool = True) -> float | None:
    load = probe.read(live, complete=complete).cgroups[number].get("load")
    assert load is None or isinstance(load, LoadAverages)
    return None if load is None else load.load1


def test_states_are_those_of_now_and_a_live_cgroup_without_threads_has_none(
    reported: Reported, probe: ThreadsProbe
) -> None:
    reported.states = {7: threads(runnable=3), 9: threads(sleeping=1)}
    assert probe.read({7: "/a", 8: "/b"}).cgroups == {
        7: {"threads_by_state": threads(3)},
        8: {"threads_by_state": NO_THREADS},
    }


def test_a_load_appears_with_the_first_sample_and_changes_with_each_one(
    reported: Reported, probe: ThreadsProbe
) -> None:
    live = {7: "/a"}
    reported.states = {7: threads(runnable=1)}
    values = []
    for _ in range(13):
        values.append(item(probe, 7, live))
        reported.now_ns += SECOND
    assert values == [None] * 5 + [164 / 2048] * 5 + [315 / 2048] * 3


def test_samples_that_were_missed_are_made_up_for_where_the_cgroup_was_there(
    reported: Reported, probe: ThreadsProbe
) -> None:
    reported.states = {7: threads(runnable=1), 8: threads(runnable=1)}
    reported.now_ns += 5 * SECOND
    assert item(probe, 7, {7: "/a"}) == 164 / 2048
    reported.now_ns += 62 * SECOND  # 12 samples, and two seconds into the next one
    live = {7: "/a", 8: "/b"}
    assert item(probe, 7, live) == pytest.approx(1 - (1884 / 2048) ** 13, abs=0.003)
    assert item(probe, 8, live) == 164 / 2048
    reported.now_ns += 3 * SECOND
    assert item(probe, 8, live) == 315 / 2048


def test_a_load_is_dropped_with_its_cgroup_but_not_by_a_listing_that_was_cut_short(
    reported: Reported, probe: ThreadsProbe
) -> None:
    reported.states = {7: threads(runnable=1)}
    live = {7: "/a"}
    reported.now_ns += 5 * SECOND
    assert item(probe, 7, live) == 164 / 2048
    reported.now_ns += 5 * SECOND
    assert 7 not in probe.read({}, complete=False).cgroups
    assert item(probe, 7, live) == 315 / 2048
    reported.now_ns += 5 * SECOND
    assert 7 not in probe.read({}).cgroups
    assert item(probe, 7, live) is None


def test_counting_takes_a_fiftieth_of_the_time_at_most(reported: Reported, probe: ThreadsProbe) -> None:
    """100 ms for all threads of a large node: not again for 4.9 s. A cgroup created meanwhile is not reported to have none."""
    reported.states, reported.takes_ns = {7: threads(runnable=1)}, SECOND // 10
    assert probe.read({7: "/a", 8: "/b"}).cgroups.keys() == {7, 8}
    reported.states, reported.takes_ns = {7: threads(runnable=2), 9: threads(runnable=3)}, 0
    reported.now_ns += 49 * SECOND // 10 - 1
    assert probe.read({7: "/a", 9: "/c"}).cgroups == {7: {"threads_by_state": threads(1)}}
    reported.now_ns += 1
    observed = probe.read({7: "/a", 9: "/c"}).cgroups
    assert {number: values["threads_by_state"] for number, values in observed.items()} == {7: threads(2), 9: threads(3)}


def test_a_closed_probe_says_so(reported: Reported, probe: ThreadsProbe) -> None:
    probe.close()
    probe.close()
    assert reported.closed == 1
    with pytest.raises(Unavailable, match="is closed"):
        probe.read({})
