"""The cgroup reader on declared trees: the same numbers on version 1, version 2 and hybrid, and what is missing is None."""

from __future__ import annotations

import ast
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.sensors.cgroup.cgroup_files import FIELD_TABLE
from agent.sensors.cgroup.cgroup_reader import MAX_PAUSE_READS, CgroupReader
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.interfaces import Unavailable
from api.snapshot import CgroupLimits, CgroupSample
from tests.agent.sensors import kernel_trees
from tests.agent.sensors.expected_fields import FIELDS, STALLED, V1, V2, values

GROUPS = (".", "kubepods", "kubepods/pod1", "kubepods/pod1/web", "system")
PATHS = {"/", "/kubepods", "/kubepods/pod1", "/kubepods/pod1/web", "/system"}
MEMORY = {
    "memory_bytes", "swap_bytes", "kernel_memory_bytes", "kernel_tcp_bytes", "memory_stat", "numa_stat", "memory_events"
}  # fmt: skip


def read(hierarchy: Hierarchy) -> dict[str, CgroupSample]:
    reader = CgroupReader(hierarchy)
    samples = reader.read()
    reader.close()
    return samples


def test_version_1_has_everything_but_pressure(tmp_path: Path) -> None:
    samples = read(kernel_trees.v1(tmp_path, GROUPS))
    assert samples.keys() == PATHS
    for path, sample in samples.items():
        assert values(sample) == V1
        assert (sample.path, sample.wait) == (path, None)
        assert sample.id == (tmp_path / "cpu" / path.lstrip("/")).stat().st_ino


def test_version_2_has_everything(tmp_path: Path) -> None:
    samples = read(kernel_trees.v2(tmp_path, GROUPS))
    assert samples.keys() == PATHS
    for path, sample in samples.items():
        assert values(sample) == V2
        assert sample.id == (tmp_path / "unified" / path.lstrip("/")).stat().st_ino


def test_hybrid_takes_pressure_from_the_unified_group_of_the_same_path(tmp_path: Path) -> None:
    samples = read(kernel_trees.hybrid(tmp_path, GROUPS, (".", "kubepods/pod1/web", "unknown-to-v1")))
    assert samples.keys() == PATHS
    assert values(samples["/kubepods/pod1/web"]) == values(samples["/"]) == V1 | STALLED
    assert values(samples["/system"]) == V1
    assert samples["/system"].id == (tmp_path / "cpu/system").stat().st_ino


def test_controllers_that_are_mounted_together_are_one_tree(tmp_path: Path) -> None:
    kernel_trees.make(tmp_path, {"web/cpu.stat": kernel_trees.V1_CPU_STAT, "web/cpuacct.usage": "5\n"})
    samples = read(Hierarchy(v1={"cpu": tmp_path, "cpuacct": tmp_path}, v2=None))
    assert values(samples["/web"]) == {
        "periods": 40,
        "throttled_periods": 8,
        "throttled_ns": 320_000_000,
        "cpu_usage_ns": 5,
    }
    assert values(samples["/"]) == {}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_threads_are_counted_where_the_pids_controller_is_missing(tmp_path: Path, version: str) -> None:
    hierarchy = (kernel_trees.v1 if version == "v1" else kernel_trees.v2)(tmp_path, ("web",))
    for file in tmp_path.rglob("pids.current"):
        file.unlink()
    assert read(hierarchy)["/web"].threads == 2


def test_controllers_and_groups_that_come_later_are_found(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.hybrid(tmp_path, ("web",), ()))
    for _ in range(MAX_PAUSE_READS):
        assert reader.read()["/web"].cpu_pressure is None
    kernel_trees.v2(tmp_path, ("web",))
    assert any(reader.read()["/web"].cpu_pressure == STALLED["cpu_pressure"] for _ in range(MAX_PAUSE_READS + 1))
    shutil.rmtree(tmp_path / "pids/web")
    reader.close()


def test_numbers_are_read_each_time_and_malformed_ones_are_none(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.v1(tmp_path, ("web",)))
    before = reader.read(0, 0)["/web"]
    assert reader.read(1, 1)["/web"] is before, "what has not changed is not built again"
    (tmp_path / "cpuacct/web/cpuacct.usage").write_text("2500000000\n")
    (tmp_path / "cpu/web/cpu.stat").write_text("nr_periods many\nnr_throttled 9\n")
    after = reader.read()["/web"]
    assert (after.cpu_usage_ns, after.periods, after.throttled_periods) == (2_500_000_000, None, 9)
    assert (after.throttled_ns, after.id) == (None, before.id)
    reader.close()


def test_groups_come_and_go(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.v1(tmp_path, ("a", "b/c")))
    assert reader.read().keys() == {"/", "/a", "/b", "/b/c"}
    shutil.rmtree(tmp_path / "cpu/a")
    kernel_trees.v1(tmp_path, ("d", "b/e"))
    assert reader.read().keys() == {"/", "/b", "/b/c", "/b/e", "/d"}, "as many children as before, and others"
    shutil.rmtree(tmp_path / "cpu/b")
    assert reader.read().keys() == {"/", "/d"}
    assert reader.problems() == ()
    reader.close()


def test_a_group_with_another_inode_under_the_same_path_is_another_group(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.v1(tmp_path, ("web", "web/child")))
    before = reader.read()
    (tmp_path / "cpu/web").rename(tmp_path / "old")
    kernel_trees.v1(tmp_path, ("web",))
    after = reader.read()
    assert after.keys() == {"/", "/web"}
    assert after["/web"].id == (tmp_path / "cpu/web").stat().st_ino != before["/web"].id
    reader.close()


def test_names_of_any_bytes_are_read_and_shown(tmp_path: Path) -> None:
    hierarchy = kernel_trees.v1(tmp_path, (".",))
    for name in (b"caf\xe9", rb"caf\xe9", b"a\nb", b'it\'s "so"', "größe".encode()):
        group = tmp_path / "cpu" / os.fsdecode(name)
        group.mkdir()
        (group / "cpu.stat").write_text(kernel_trees.V1_CPU_STAT)
    samples = read(hierarchy)
    assert samples.keys() == {"/", r"/caf\xe9", r"/caf\x5cxe9", r"/a\x0ab", '/it\'s "so"', "/größe"}
    assert {sample.periods for sample in samples.values()} == {40}


def test_version_2_files_are_not_read_if_version_1_has_the_controller(tmp_path: Path) -> None:
    reader = CgroupReader(kernel_trees.hybrid(tmp_path, ("web",), ("web",)))
    sample = reader.read()["/web"]
    assert sample.limits.memory_high_bytes is None
    assert not any(name.startswith("local.") for name in sample.memory_events)
    reader.close()


def test_older_kernels_count_io_of_the_group_alone(tmp_path: Path) -> None:
    hierarchy = kernel_trees.v1(tmp_path, ("web",))
    for file in (tmp_path / "blkio/web").iterdir():
        file.rename(file.with_name(file.name.removesuffix("_recursive")))
    assert values(read(hierarchy)["/web"]) == V1


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    before = kernel_trees.open_files()
    reader = CgroupReader(kernel_trees.hybrid(tmp_path, ("a", "b"), ("a",)))
    reader.read()
    assert kernel_trees.open_files() > before
    shutil.rmtree(tmp_path / "cpu/a")
    reader.read()
    reader.close()
    reader.close()
    assert kernel_trees.open_files() == before


def test_a_missing_hierarchy_costs_its_fields_and_is_reported(tmp_path: Path) -> None:
    hierarchy = kernel_trees.v1(tmp_path, ("web",))
    shutil.rmtree(tmp_path / "memory")
    reader = CgroupReader(hierarchy)
    web = reader.read()["/web"]
    assert values(web).keys() == V1.keys() - MEMORY
    assert (web.limits.memory_max_bytes, web.limits.quota_us) == (None, 200_000)
    (problem,) = reader.problems()
    assert "memory: No such file or directory" in problem.error
    assert not problem.ok
    reader.close()


def test_a_machine_without_the_tree_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file or directory"):
        CgroupReader(Hierarchy(v1={}, v2=tmp_path / "none"))


def without_privileges(look: Callable[[], str]) -> str:
    """Return the result of `look` in a child without privileges. Skips without root."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to drop privileges")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            reported = look()
        except BaseException as error:  # noqa: BLE001 - reported to the parent, which asserts
            reported = f"{type(error).__name__}: {error}"
        os.write(writing, reported.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reported = pipe.read().decode()
    os.waitpid(child, 0)
    return reported


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that everybody may enter, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_without_privileges_fields_are_none_and_one_line_tells(open_path: Path) -> None:
    hierarchy = kernel_trees.v1(open_path, ("web", "shut/inner"))
    (open_path / "memory/web/memory.usage_in_bytes").chmod(0o600)
    (open_path / "cpu/shut").chmod(0o700)

    def look() -> str:
        reader = CgroupReader(hierarchy)
        reader.read()
        samples = reader.read()
        (problem,) = reader.problems()
        reported = [
            sorted(samples),
            sorted(values(samples["/web"])),
            sorted(values(samples["/shut"])),
            problem.error,
            problem.remedy,
        ]
        return repr(reported)

    paths, web, shut, error, remedy = ast.literal_eval(without_privileges(look))
    assert paths == ["/", "/shut", "/web"]
    assert web == sorted(V1.keys() - {"memory_bytes"})
    assert shut == [], "the same group in the other hierarchies is not there"
    assert error.startswith("9 cgroup files cannot be read")
    assert "Permission denied" in error
    assert remedy == "run the agent as root"


def test_without_the_root_there_is_no_reading(open_path: Path) -> None:
    hierarchy = kernel_trees.v2(open_path, ("a",))
    (open_path / "unified").chmod(0o700)
    reported = without_privileges(lambda: str(CgroupReader(hierarchy).read()))
    assert reported.startswith("Unavailable: the root of the cgroup tree cannot be read")


def test_every_field_of_a_sample_is_in_the_table() -> None:
    fields = CgroupSample.__struct_fields__
    of_probes = fields[fields.index("files_read_at_ns") :]
    assert set(fields) - {"path", "id", "wait", *of_probes} == FIELDS
    assert {f"limits.{name}" for name in CgroupLimits.__struct_fields__} <= FIELD_TABLE.keys()
