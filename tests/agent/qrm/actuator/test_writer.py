"""Knob files of both cgroup versions: the right file, the right cgroup, the right failure."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from agent.qrm.actuator.writer import MAX_OPEN_DIRECTORIES, CgroupAbsent, KernelRefused, KnobWriter, WriteForbidden
from agent.qrm.knobs.knob_files import KNOB_SPECS
from api.interfaces import Unavailable, Vanished
from api.knobs import Knob
from tests.agent.qrm.actuator.trees import MODES, Tree

WRITTEN = {
    (Knob.CPUSET, "1-2"): ({"cpuset.cpus": "1-2\n"}, {"cpuset.cpus": "1-2\n"}),
    (Knob.CPUSET, ""): ({"cpuset.cpus": "\n"}, {"cpuset.cpus": "\n"}),
    (Knob.WEIGHT, "10"): ({"cpu.shares": "102\n"}, {"cpu.weight": "10\n"}),
    (Knob.QUOTA, "20000 50000"): (
        {"cpu.cfs_quota_us": "20000\n", "cpu.cfs_period_us": "50000\n"},
        {"cpu.max": "20000 50000\n"},
    ),
    (Knob.QUOTA, "max 100000"): ({"cpu.cfs_quota_us": "-1\n"}, {"cpu.max": "max 100000\n"}),
    (Knob.IDLE, "1"): ({"cpu.idle": "1\n"}, {"cpu.idle": "1\n"}),
    (Knob.BURST, "5000"): ({"cpu.cfs_burst_us": "5000\n"}, {"cpu.max.burst": "5000\n"}),
    (Knob.MEMS, "1"): ({"cpuset.mems": "1\n", "cpuset.memory_migrate": "1\n"}, {"cpuset.mems": "1\n"}),
    (Knob.MEMORY_MAX, "8192"): ({"memory.limit_in_bytes": "8192\n"}, {"memory.max": "8192\n"}),
    (Knob.MEMORY_HIGH, "4096"): (None, {"memory.high": "4096\n"}),
    (Knob.MEMORY_LOW, "4096"): (None, {"memory.low": "4096\n"}),
    (Knob.MEMORY_MIN, "max"): (None, {"memory.min": "max\n"}),
    (Knob.SWAP_MAX, "0"): (None, {"memory.swap.max": "0\n"}),
    (Knob.IO_WEIGHT, "50"): ({"blkio.bfq.weight": "50\n"}, {"io.weight": "default 50\n"}),
    (Knob.IO_MAX, "8:16 rbps=max wbps=1048576 riops=max wiops=max"): (
        {"blkio.throttle.write_bps_device": "8:16 1048576\n", "blkio.throttle.read_bps_device": ""},
        {"io.max": "8:16 rbps=max wbps=1048576 riops=max wiops=max\n"},
    ),
    (Knob.NET_CLASS, "65537"): ({"net_cls.classid": "65537\n"}, None),
}


OpenTree = Callable[[str], tuple[Tree, int, KnobWriter]]


@pytest.fixture
def open_tree(tmp_path: Path) -> Iterator[OpenTree]:
    """Return a function that makes a tree of a mode with the cgroup /batch: tree, cgroup id and writer."""
    with ExitStack() as stack:

        def open_one(mode: str) -> tuple[Tree, int, KnobWriter]:
            tree = Tree(tmp_path, mode)
            cgroup_id = tree.make("/batch")
            return tree, cgroup_id, stack.enter_context(closing(KnobWriter(tree.hierarchy)))

        yield open_one


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("knob", "value"), WRITTEN)
def test_a_value_is_written_to_the_files_of_each_version(
    open_tree: OpenTree, mode: str, knob: Knob, value: str
) -> None:
    tree, cgroup_id, files = open_tree(mode)
    expected = WRITTEN[knob, value][mode == "v2"]
    assert files.available(knob, "/batch") is (expected is not None or knob is Knob.SWAP_MAX)
    if expected is None:
        with pytest.raises(Unavailable):
            files.write("/batch", cgroup_id, knob, value)
        return
    files.write("/batch", cgroup_id, knob, value)
    assert {name: tree.file("/batch", name).read_text() for name in expected} == expected
    assert files.read("/batch", cgroup_id, knob) == value


@pytest.mark.parametrize("mode", MODES)
def test_defaults_read_alike_on_both_versions(open_tree: OpenTree, mode: str) -> None:
    _, cgroup_id, files = open_tree(mode)
    read = {knob: files.read("/batch", cgroup_id, knob) for knob in KNOB_SPECS if files.available(knob, "/batch")}
    common = {
        Knob.WEIGHT: "100",
        Knob.QUOTA: "max 100000",
        Knob.BURST: "0",
        Knob.IDLE: "0",
        Knob.MEMORY_MAX: "max",
        Knob.SWAP_MAX: "max",
        Knob.IO_WEIGHT: "100",
        Knob.IO_MAX: "",
    }
    v1 = {Knob.CPUSET: "0-3", Knob.MEMS: "0-1", Knob.NET_CLASS: "0"}
    v2 = {Knob.CPUSET: "", Knob.MEMS: "", Knob.MEMORY_HIGH: "max", Knob.MEMORY_LOW: "0", Knob.MEMORY_MIN: "0"}
    assert read == {**common, **(v2 if mode == "v2" else v1)}
    assert (files.allowed_above("/batch"), files.cpu_count()) == ((0, 1, 2, 3), 4)
    assert files.allowed_above("/batch", Knob.MEMS) == (0, 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_new_cgroup_on_the_old_path_is_another_one(open_tree: OpenTree, mode: str) -> None:
    tree, old, files = open_tree(mode)
    assert files.read("/batch", old, Knob.WEIGHT) == "100"
    tree.remove("/batch")
    with pytest.raises(Vanished):
        files.read("/batch", old, Knob.WEIGHT)
    new = tree.make("/batch")
    assert new != old
    for knob in filter(lambda knob: files.available(knob, "/batch"), KNOB_SPECS):
        with pytest.raises(Vanished):
            files.write("/batch", old, knob, "8:0 rbps=1" if knob is Knob.IO_MAX else "1")
    assert files.read("/batch", new, Knob.WEIGHT) == "100"


def test_a_directory_of_another_controller_has_an_identity_too(open_tree: OpenTree, tmp_path: Path) -> None:
    _, cgroup_id, files = open_tree("v1")
    raw = files.read_raw("/batch", cgroup_id, Knob.CPUSET)
    assert raw.directory_id == (tmp_path / "cpuset/batch").stat().st_ino != cgroup_id
    assert files.read_raw("/batch", cgroup_id, Knob.CPUSET, raw.directory_id) == raw
    with pytest.raises(Vanished):
        files.read_raw("/batch", cgroup_id, Knob.CPUSET, raw.directory_id + 1)


def test_a_cgroup_missing_in_one_hierarchy_is_reported(open_tree: OpenTree, tmp_path: Path) -> None:
    _, cgroup_id, files = open_tree("v1")
    for file in (tmp_path / "cpuset/batch").iterdir():
        file.unlink()
    (tmp_path / "cpuset/batch").rmdir()
    with pytest.raises(CgroupAbsent) as caught:
        files.read("/batch", cgroup_id, Knob.CPUSET)
    assert f"mkdir -p {tmp_path}/cpuset/batch" in caught.value.remedy
    with pytest.raises(Vanished):
        files.read_raw("/batch", cgroup_id, Knob.CPUSET, directory_id=1)


def test_a_kernel_without_a_file_lacks_the_knob(open_tree: OpenTree) -> None:
    tree, cgroup_id, files = open_tree("v2")
    assert files.available(Knob.IDLE, "/batch")
    tree.file("/batch", "cpu.idle").unlink()
    assert not files.available(Knob.IDLE, "/batch")
    assert files.available(Knob.WEIGHT, "/batch")
    assert not files.available(Knob.WEIGHT, "/nowhere")
    with pytest.raises(Unavailable, match=r"/batch: cannot read cpu\.idle: No such file"):
        files.read("/batch", cgroup_id, Knob.IDLE)


def test_without_a_cpuset_controller_the_knob_is_unavailable(open_tree: OpenTree) -> None:
    tree, cgroup_id, files = open_tree("v1")
    del tree.hierarchy.v1["cpuset"]
    assert not files.available(Knob.CPUSET, "/batch")
    assert files.allowed_above("/batch") is None
    assert files.cpu_count() == os.cpu_count()
    with pytest.raises(Unavailable, match="no cpuset controller"):
        files.read("/batch", cgroup_id, Knob.CPUSET)


@pytest.mark.parametrize("garbage", ["", "\0\0", "lots\n", "-7\n", "9" * 4000, "\xff"])
def test_garbage_in_a_file_is_reported_and_quoted(open_tree: OpenTree, garbage: str) -> None:
    tree, cgroup_id, files = open_tree("v2")
    tree.file("/batch", "cpu.weight").write_text(garbage)
    with pytest.raises(Unavailable, match=r"/batch: cpu\.weight holds .{2,64}, which is no"):
        files.read("/batch", cgroup_id, Knob.WEIGHT)


def test_symbolic_links_are_not_followed(open_tree: OpenTree, tmp_path: Path) -> None:
    tree, cgroup_id, files = open_tree("v1")
    victim = tmp_path / "victim"
    victim.write_text("untouched\n")
    tree.file("/batch", "cpu.shares").unlink()
    tree.file("/batch", "cpu.shares").symlink_to(victim)
    (tmp_path / "cpuset/batch").rename(tmp_path / "elsewhere")
    (tmp_path / "cpuset/batch").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "cpu/link").symlink_to(tmp_path / "cpu/batch")
    with pytest.raises(KernelRefused, match="symbolic links"):
        files.write("/batch", cgroup_id, Knob.WEIGHT, "7")
    with pytest.raises(KernelRefused) as caught:
        files.write("/batch", cgroup_id, Knob.CPUSET, "1")
    assert "symbolic links are not followed" in caught.value.remedy
    with pytest.raises(Vanished):
        files.write("/link", cgroup_id, Knob.IDLE, "1")
    assert victim.read_text() == "untouched\n"
    assert (tmp_path / "elsewhere/cpuset.cpus").read_text() == "0-3\n"


@pytest.mark.parametrize("path", ["batch", "/../batch", "/a//b", "/a/./b", "/a/", "/a\0b", "/a\udc80"])
def test_paths_that_are_no_cgroups_are_refused(tmp_path: Path, path: str) -> None:
    files = KnobWriter(Tree(tmp_path, "v2").hierarchy)
    with pytest.raises(KernelRefused, match="is not a cgroup path"):
        files.read(path, 1, Knob.WEIGHT)
    files.close()


def test_descriptors_are_limited_and_closed(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "v2")
    ids = {f"/g{number}": tree.make(f"/g{number}") for number in range(MAX_OPEN_DIRECTORIES + 20)}
    files = KnobWriter(tree.hierarchy)
    gc.collect()  # so that descriptors of other tests are closed before, not in between
    before = _descriptors()
    for path, cgroup_id in ids.items():
        assert files.read(path, cgroup_id, Knob.WEIGHT) == "100"
    assert _descriptors() == before + MAX_OPEN_DIRECTORIES
    assert files.read("/g0", ids["/g0"], Knob.WEIGHT) == "100"
    files.close()
    assert _descriptors() == before


def test_descriptors_of_removed_cgroups_are_closed_in_later_cycles(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "v2")
    ids = {f"/g{number}": tree.make(f"/g{number}") for number in range(20)}
    files = KnobWriter(tree.hierarchy)
    gc.collect()
    before = _descriptors()
    with files.one_cycle():
        for path, cgroup_id in ids.items():
            files.read(path, cgroup_id, Knob.WEIGHT)
    assert _descriptors() == before + 20
    for number in range(5, 20):
        tree.remove(f"/g{number}")
    for _ in range(3):
        with files.one_cycle():
            assert files.read("/g0", ids["/g0"], Knob.WEIGHT) == "100"
    assert _descriptors() == before + 5
    files.close()
    assert _descriptors() == before


@pytest.mark.parametrize("cached", [False, True])
def test_running_out_of_descriptors_is_a_refusal_with_a_remedy(open_tree: OpenTree, *, cached: bool) -> None:
    _, cgroup_id, files = open_tree("v2")
    if cached:
        files.read("/batch", cgroup_id, Knob.WEIGHT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open("/", os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(KernelRefused) as caught:
            files.read("/batch", cgroup_id, Knob.WEIGHT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not isinstance(caught.value, WriteForbidden)
    assert "ulimit -n" in caught.value.remedy


@pytest.mark.parametrize(
    ("file", "text", "weight", "written"),
    [("blkio.bfq.weight", "200\n", "200", "1000"), ("blkio.weight", "500\n", "100", "500")],
)
def test_the_weight_is_that_of_the_disk_scheduler(
    open_tree: OpenTree, file: str, text: str, weight: str, written: str
) -> None:
    tree, cgroup_id, files = open_tree("v1")
    tree.file("/batch", "blkio.bfq.weight").unlink()
    tree.file("/batch", file).write_text(text)
    assert files.read("/batch", cgroup_id, Knob.IO_WEIGHT) == weight
    least, most = files.weights("/batch", Knob.IO_WEIGHT)
    assert (least, most) == ((1, 1000) if "bfq" in file else (2, 200))
    files.write("/batch", cgroup_id, Knob.IO_WEIGHT, str(min(most, 1000 if "bfq" in file else 100)))
    assert tree.file("/batch", file).read_text() == f"{written}\n"


def test_weights_of_single_disks_are_left_alone(open_tree: OpenTree) -> None:
    tree, cgroup_id, files = open_tree("v2")
    tree.file("/batch", "io.weight").write_text("default 300\n8:16 50\n")
    assert files.read("/batch", cgroup_id, Knob.IO_WEIGHT) == "300"
    assert files.read_raw("/batch", cgroup_id, Knob.IO_WEIGHT).texts == {"io.weight": "default 300\n"}
