"""Waits from schedstat on a declared /proc: sums that only grow, whatever threads do, and what is said when they cannot be."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.cgroup.schedstat import SchedstatRunqLatency
from api.interfaces import Unavailable
from api.snapshot import RunqLatency
from tests.agent.sensors import kernel_trees

LIVE = {101: "/web", 102: "/batch"}


class Host:
    """A fake machine whose threads are written down one by one."""

    def __init__(self, root: Path, hierarchy: Hierarchy) -> None:
        self.proc, self.cgroups = root / "proc", hierarchy.primary
        self.list_name = "cgroup.threads" if hierarchy.mode == "v2" else "tasks"
        kernel_trees.make(self.proc, {"self/schedstat": "1000 0 1\n"})
        self.source = SchedstatRunqLatency(self.proc, hierarchy)

    def thread(self, tid: int, wait_ns: int, slices: int, *, age_s: float = 1000.0) -> None:
        start_ticks = max(int((time.clock_gettime(time.CLOCK_BOOTTIME) - age_s) * 100), 0)
        directory = self.proc / str(tid)
        if directory.exists():
            (directory / "schedstat").write_text(f"5 {wait_ns} {slices}\n")
            return
        fields = " ".join(str(n) for n in range(4, 22))
        kernel_trees.make(
            directory, {"schedstat": f"5 {wait_ns} {slices}\n", "stat": f"{tid} (a b) S {fields} {start_ticks} 0\n"}
        )

    def end(self, tid: int) -> None:
        shutil.rmtree(self.proc / str(tid))

    def members(self, path: str, *tids: int) -> None:
        kernel_trees.make(self.cgroups, {f"{path.strip('/')}/{self.list_name}": "".join(f"{tid}\n" for tid in tids)})

    def read(self) -> RunqLatency | None:
        return self.source.read(LIVE, {101}).get(101)


@pytest.fixture(params=["v1", "v2"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    make = kernel_trees.v1 if request.param == "v1" else kernel_trees.v2
    return Host(tmp_path, make(tmp_path, (".",)))


def test_threads_are_added_up(host: Host) -> None:
    host.thread(11, 5_000, 2)
    host.thread(12, 7_000, 3)
    host.members("/web", 11, 12)
    assert host.read() == RunqLatency(sum_ns=12_000, count=5)
    host.thread(11, 6_000, 4)
    assert host.read() == RunqLatency(sum_ns=13_000, count=7)
    assert host.source.form == "schedstat"


def test_what_an_ended_thread_waited_stays(host: Host) -> None:
    host.thread(11, 5_000, 2)
    host.thread(12, 7_000, 3)
    host.members("/web", 11, 12)
    host.read()
    host.end(12)
    host.members("/web", 11)
    host.thread(11, 5_500, 3)
    assert host.read() == RunqLatency(sum_ns=12_500, count=6)
    host.end(11)
    assert host.read() == RunqLatency(sum_ns=12_500, count=6), "still listed, but gone"


def test_a_thread_born_since_counts_from_its_birth(host: Host) -> None:
    host.members("/web")
    assert host.read() == RunqLatency(sum_ns=0, count=0)
    host.thread(13, 9_000, 1, age_s=-1)
    host.members("/web", 13)
    assert host.read() == RunqLatency(sum_ns=9_000, count=1)


def test_a_thread_that_moved_in_brings_nothing_of_its_past(host: Host) -> None:
    host.members("/web")
    host.read()
    host.thread(14, 9_000_000, 100, age_s=500)
    host.members("/web", 14)
    assert host.read() == RunqLatency(sum_ns=0, count=0)
    host.thread(14, 9_000_500, 101)
    assert host.read() == RunqLatency(sum_ns=500, count=1)


def test_a_number_that_was_used_again_is_another_thread(tmp_path: Path) -> None:
    """A fake file system lets a kept descriptor live on, so here each read opens, as it does without descriptors."""
    host = Host(tmp_path, kernel_trees.v1(tmp_path, (".",)))
    host.thread(11, 5_000, 2)
    host.members("/web", 11)
    host.read()
    for group in host.source._groups.values():
        group.members[11].file.close()
    host.end(11)
    host.thread(11, 6_000, 1, age_s=-1)
    assert host.read() == RunqLatency(sum_ns=11_000, count=3), "5,000 of the first and 6,000 of the second"


def test_only_wanted_and_live_cgroups_are_read(host: Host) -> None:
    host.thread(11, 5_000, 2)
    host.members("/web", 11)
    host.members("/batch", 11)
    assert host.source.read(LIVE, {101}).keys() == {101}
    assert host.source.read(LIVE, set()) == {}
    assert host.source.read(LIVE).keys() == {101, 102}
    assert host.source.read({102: "/batch"}).keys() == {102}
    assert host.source.read({102: "/batch", 103: "/gone"}).keys() == {102}
    host.source.close()
    host.source.close()


def test_what_is_not_wanted_for_a_while_keeps_its_sums(host: Host) -> None:
    host.thread(11, 5_000, 2)
    host.members("/web", 11)
    host.members("/batch")
    host.read()
    host.end(11)
    host.members("/web")
    host.source.read(LIVE, {102})
    assert host.read() == RunqLatency(sum_ns=5_000, count=2)


def test_a_cgroup_without_threads_has_waited_zero_times(host: Host) -> None:
    host.members("/web")
    assert host.source.read(LIVE, {101}) == {101: RunqLatency(sum_ns=0, count=0)}


def test_another_cgroup_at_the_same_path_starts_at_zero(host: Host) -> None:
    host.thread(11, 5_000, 2)
    host.members("/web", 11)
    host.read()
    host.members("/web")
    assert host.source.read({201: "/web"}) == {201: RunqLatency(sum_ns=0, count=0)}


@pytest.mark.parametrize("own", [None, "0 0 0\n", "garbage\n"])
def test_a_kernel_that_does_not_count_is_reported_each_time(tmp_path: Path, own: str | None) -> None:
    if own is not None:
        kernel_trees.make(tmp_path, {"self/schedstat": own})
    source = SchedstatRunqLatency(tmp_path, kernel_trees.v1(tmp_path, ("web",)))
    for _ in range(2):
        with pytest.raises(Unavailable, match="has no counts") as caught:
            source.read(LIVE)
        assert "CONFIG_SCHED_INFO" in caught.value.remedy


def test_threads_of_another_pid_namespace_are_reported(host: Host) -> None:
    host.members("/web", 0, 0)
    with pytest.raises(Unavailable, match="PID namespace") as caught:
        host.read()
    assert "PID namespace" in caught.value.remedy


def test_damaged_files_neither_raise_nor_shrink_the_sums(host: Host) -> None:
    host.thread(11, 5_000, 2)
    host.members("/web", 11)
    before = host.read()
    (host.proc / "11/schedstat").write_text("4 what")
    assert host.read() == before
    host.thread(11, 4_000, 1)
    after = host.read()
    assert after is not None
    assert before is not None
    assert after.sum_ns >= before.sum_ns
