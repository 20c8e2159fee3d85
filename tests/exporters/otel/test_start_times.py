"""When counters of cgroups began."""

from __future__ import annotations

from api.cpu import Topology
from api.snapshot import CgroupSample, NodeSample, Snapshot
from exporters.otel.conventions import MAX_START_TIMES, CgroupStartTimes


def after(start_times: CgroupStartTimes, at_ns: int, *ids: int) -> CgroupStartTimes:
    cgroups = {f"/{each}": CgroupSample(path=f"/{each}", id=each) for each in ids}
    return start_times.after(
        Snapshot(
            seq=1, taken_at_ns=0, wall_time_ns=at_ns, boot_id="", topology=Topology(cpus=()), node=NodeSample(),
            cgroups=cgroups,
        )
    )  # fmt: skip


def test_a_cgroup_counts_from_the_round_before_the_one_that_has_it_unless_that_is_the_first() -> None:
    start_times = after(after(after(CgroupStartTimes(), 10, 1, 2), 20, 1, 3), 30, 1, 3, 4)
    assert start_times.by_id == {1: None, 2: None, 3: 10, 4: 20}


def test_what_is_out_of_sight_for_a_round_is_not_born_again() -> None:
    start_times = after(after(after(CgroupStartTimes(), 10, 1), 20, 1, 7), 30, 1)
    assert after(after(start_times, 40), 50, 1, 7).by_id == {1: None, 7: 10}


def test_a_first_round_without_cgroups_is_none() -> None:
    assert after(after(CgroupStartTimes(), 10), 20, 1).by_id == {1: None}


def test_what_is_gone_is_forgotten_when_it_becomes_much() -> None:
    start_times = after(CgroupStartTimes(), 10, 1)
    for each in range(2, 3 * MAX_START_TIMES, 100):
        start_times = after(start_times, each, 1, *range(each, each + 100))
        assert len(start_times.by_id) <= MAX_START_TIMES + 100
    assert start_times.by_id[1] is None
    assert start_times.by_id[each] == each - 100


def test_nothing_new_costs_no_copy() -> None:
    start_times = after(CgroupStartTimes(), 10, 1, 2)
    assert after(start_times, 20, 1, 2).by_id is start_times.by_id
