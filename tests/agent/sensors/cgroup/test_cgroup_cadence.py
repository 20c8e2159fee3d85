"""When slow files are read: each cgroup at its own phase, with the time of the read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.hierarchy import Hierarchy
from tests.agent.sensors import kernel_trees
from tests.agent.sensors.expected_fields import V1, values

S = 1_000_000_000


def test_each_cgroup_has_a_turn_of_its_own_within_every_period(tmp_path: Path) -> None:
    """100 cgroups, ticks of a second: all slow files are read in the first, then a fifth of them in each."""
    reader = CgroupReader(kernel_trees.v1(tmp_path, tuple(f"g{i}" for i in range(100))))
    assert {sample.files_read_at_ns for sample in reader.read(0, 7).values()} == {7}
    turns: dict[str, list[int]] = {}
    for second in range(1, 16):
        for path, sample in reader.read(second * S, 1000 + second).items():
            if sample.files_read_at_ns == 1000 + second:
                turns.setdefault(path, []).append(second)
    per_second = [sum(second in seconds for seconds in turns.values()) for second in range(1, 16)]
    assert all(19 <= count <= 22 for count in per_second), per_second
    assert all(b - a == 5 for seconds in turns.values() for a, b in pairwise(seconds))
    reader.close()


def test_slow_files_are_as_old_as_the_sample_says_and_limits_older(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.v1(tmp_path, ("web",)))
    reader.read(0, 100)
    (tmp_path / "memory/web/memory.oom_control").write_text("oom_kill 3\n")
    (tmp_path / "cpu/web/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpuacct/web/cpuacct.usage").write_text("9\n")
    observed = [reader.read(second * S, 100 + second)["/web"] for second in range(1, 16)]
    assert {sample.cpu_usage_ns for sample in observed} == {9}
    for second, sample in enumerate(observed, 1):
        assert sample.files_read_at_ns is not None
        fresh = sample.files_read_at_ns > 100
        assert sample.memory_events == {"oom_kill": 3 if fresh else 2}
        assert sample.files_read_at_ns >= 100 + second - 5
    assert (observed[0].limits.quota_us, observed[-1].limits.quota_us) == (200_000, -1)
    reader.close()


def test_fresh_limits_are_never_older_than_the_sample_says(tmp_path: Path) -> None:
    """20 cgroups with turns of their own, and a quota that is another every second."""
    names = tuple(f"g{number}" for number in range(20))
    reader = CgroupReader(kernel_trees.v1(tmp_path, names), fresh_limits=True)
    for second in range(40):
        for name in names:
            (tmp_path / f"cpu/{name}/cpu.cfs_quota_us").write_text(f"{100_000 + second}\n")
        samples = reader.read(second * S, second)
        for name in names:
            sample = samples[f"/{name}"]
            assert sample.limits.quota_us is not None
            assert sample.files_read_at_ns == sample.limits.quota_us - 100_000 > second - 5
    reader.close()


def test_slow_files_of_a_new_cgroup_are_read_at_once_where_it_is_managed(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.v1(tmp_path, (".",)))
    reader.manage(["/pod/web"])
    reader.read(0, 0)
    kernel_trees.v1(tmp_path, ("pod/web", "other"))
    samples = reader.read(S, 5)
    assert values(samples["/pod/web"]) == V1
    assert (samples["/other"].files_read_at_ns, samples["/other"].memory_stat) == (None, {})
    assert values(reader.read(6 * S, 6)["/other"]) == V1
    reader.close()


def test_limits_of_a_new_cgroup_are_known_as_soon_as_its_other_slow_files(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.v1(tmp_path, (".",)))
    reader.read(0, 0)
    names = tuple(f"new{number}" for number in range(20))
    kernel_trees.v1(tmp_path, names)
    unread = {f"/{name}" for name in names}
    for second in range(1, 7):
        for path, sample in reader.read(second * S, second).items():
            assert (sample.files_read_at_ns is None) == (sample.limits.quota_us is None), path
            if sample.files_read_at_ns is not None:
                unread.discard(path)
    assert not unread, "within a period of slow files"
    reader.close()


def test_a_turn_that_was_missed_is_not_made_up_for(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.v1(tmp_path, (".",)))
    reader.read(0, 0)
    assert reader.read(3600 * S, 1)["/"].files_read_at_ns == 1
    assert reader.read(3600 * S + 1, 2)["/"].files_read_at_ns == 1
    assert reader.read(3605 * S, 3)["/"].files_read_at_ns == 3
    reader.close()


def test_how_cpu_time_is_shared_out_is_read_when_its_sum_has_changed(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.v1(tmp_path, (".", "web")))
    root, web = tmp_path / "cpuacct", tmp_path / "cpuacct/web"
    before = reader.read()["/web"]
    (web / "cpuacct.usage_percpu").write_text("1000000000 600000000 \n")
    (web / "cpuacct.stat").write_text("user 101\nsystem 50\n")
    (root / "cpuacct.usage").write_text("1700000000\n")
    assert reader.read()["/web"] is before, "their sum is what it was: they were not looked at"
    (web / "cpuacct.usage").write_text("1600000000\n")
    (root / "cpuacct.usage").write_text("1800000000\n")
    after = reader.read()["/web"]
    reader.close()
    assert (after.cpu_usage_ns, after.per_cpu_ns, after.cpu_user_ns) == (
        1_600_000_000,
        (1_000_000_000, 600_000_000),
        1_010_000_000,
    )


@pytest.mark.parametrize(
    ("version", "clock", "threads", "memory"),
    [
        (kernel_trees.v1, "cpuacct/{}cpuacct.usage", "pids/web/pids.current", "memory/web/memory.usage_in_bytes"),
        (kernel_trees.v2, "unified/{}cpu.stat", "unified/web/pids.current", "unified/web/memory.current"),
    ],
    ids=["version 1", "version 2"],
)
def test_an_idle_cgroup_is_read_with_the_slow_files(
    tmp_path: Path, version: Callable[[Path, tuple[str, ...]], Hierarchy], clock: str, threads: str, memory: str
) -> None:
    """Task migration and reclaim change threads and memory of an idle cgroup: read within 5 s."""
    reader = CgroupReader(version(tmp_path, (".", "web")))

    def read_sample(now_ns: int) -> tuple[int | None, int | None]:
        sample = reader.read(now_ns, 0)["/web"]
        return sample.threads, sample.memory_bytes

    before = read_sample(0)
    (tmp_path / threads).write_text("7\n")
    (tmp_path / memory).write_text("9\n")
    five = [read_sample(second * S) for second in range(1, 6)]
    assert (five[-1], {*five}) == ((7, 9), {before, (7, 9)})
    (tmp_path / threads).write_text("11\n")
    (tmp_path / memory).write_text("12\n")
    for group in ("", "web/"):
        file = tmp_path / clock.format(group)
        file.write_text(file.read_text().replace("1500", "1600"))
    assert read_sample(5 * S + 1) == (11, 12), "a task ran: read at once"
    reader.close()


def test_without_a_clock_everything_is_read_every_time(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.v1(tmp_path, ("web",)))
    (tmp_path / "cpuacct/web/cpuacct.usage").unlink()
    reader.read(0, 0)
    (tmp_path / "pids/web/pids.current").write_text("7\n")
    (tmp_path / "cpuacct/web/cpuacct.stat").write_text("user 1\nsystem 2\n")
    sample = reader.read(1, 0)["/web"]
    reader.close()
    assert (sample.threads, sample.cpu_user_ns) == (7, 10_000_000)


CALM = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


@pytest.mark.parametrize(
    ("above", "own", "looked_at"),
    [
        (CALM.format(1), CALM.format(1), False),
        (CALM.format(2), CALM.format(1), True),
        (CALM.format(1), CALM.format(1).replace("avg300=0.00", "avg300=0.01", 1), True),
        (None, CALM.format(1), True),
    ],
    ids=["nothing happened", "something happened above", "averages go on sinking", "no file above"],
)
def test_sums_are_looked_at_where_those_above_have_grown(
    tmp_path: Path, above: str | None, own: str, looked_at: bool
) -> None:
    """Whatever a group stalls for, all above it stall for: where their total stands still, so does its own."""
    hierarchy = kernel_trees.v2(tmp_path, ("pod", "pod/web"))
    pod, web = tmp_path / "unified/pod/io.pressure", tmp_path / "unified/pod/web/io.pressure"
    pod.write_text(CALM.format(1))
    web.write_text(own)
    if above is None:
        pod.unlink()
    reader = CgroupReader(hierarchy)
    reader.read()
    if above is not None:
        pod.write_text(above)
    web.write_text(CALM.format(7_000_000))
    sample = reader.read()["/pod/web"]
    reader.close()
    assert sample.io_pressure is not None
    assert (sample.io_pressure.some_us == 7_000_000) is looked_at
