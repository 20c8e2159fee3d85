"""Which cgroups are read where there are more than the limit: pods' always, the deepest of the others last."""

from __future__ import annotations

import shutil
from pathlib import Path

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from tests.agent.sensors import kernel_trees


def test_the_limit_leaves_out_the_deepest_and_is_reported(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.v1(tmp_path, ("a/deep/deeper", "b", "c")), limit=4)
    assert reader.read().keys() == {"/", "/a", "/b", "/c"}
    assert reader.skipped == 1
    assert "at least 1 cgroups beyond the limit of 4" in reader.problems()[0].error
    assert "maxCgroups" in reader.problems()[0].remedy
    shutil.rmtree(tmp_path / "cpu/b")
    assert "/a/deep" in reader.read().keys() | reader.read().keys(), "room again"
    assert reader.skipped == 1, "/a/deep/deeper"
    reader.close()


def managed_last(root: Path, limit: int) -> tuple[CgroupReader, str]:
    """A tree that is full of others, with the one managed pod in the last and deepest place."""
    hierarchy = kernel_trees.v1(root, tuple(f"slice{i}/other{j}" for i in range(4) for j in range(4)))
    kernel_trees.v1(root, ("slice3/pod/web",))
    return CgroupReader(hierarchy, limit=limit), "/slice3/pod/web"


def test_the_limit_never_strikes_managed_cgroups(tmp_path: Path) -> None:
    reader, web = managed_last(tmp_path, limit=6)
    reader.manage([web])
    samples = reader.read()
    assert len(samples) == 6
    assert {"/", "/slice3", "/slice3/pod", web} < samples.keys()
    assert samples[web].memory_bytes == 65536
    reader.close()


def test_others_make_room_when_a_pod_is_managed_later(tmp_path: Path) -> None:
    reader, web = managed_last(tmp_path, limit=6)
    before = reader.read(0, 0)
    assert web not in before
    reader.manage([web])
    after = reader.read(1, 1)
    assert web in after
    assert len(after) == 6
    assert after["/slice0"] is before["/slice0"], "unchanged cgroups are not read again"
    reader.manage([])
    assert len(reader.read()) == 6
    reader.close()


def test_more_managed_cgroups_than_the_limit_are_all_read_and_no_others(tmp_path: Path) -> None:
    reader, _ = managed_last(tmp_path, limit=3)
    expected = {f"/slice{i}/other{j}" for i in (0, 2) for j in range(4)}
    reader.manage(expected)
    assert reader.read().keys() == {"/", "/slice0", "/slice2", *expected}
    assert reader.skipped == 2, "slice1 and slice3"
    reader.close()


def test_room_is_kept_for_a_managed_cgroup_that_is_yet_to_come(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.v1(tmp_path, ("a", "b", "c")), limit=4)
    reader.manage(["/pod"])
    assert reader.read().keys() == {"/", "/a", "/b"}
    kernel_trees.v1(tmp_path, ("pod",))
    assert reader.read().keys() == {"/", "/a", "/b", "/pod"}
    reader.close()
