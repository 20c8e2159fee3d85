from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.interfaces import Unavailable
from demo.cgroups import CgroupInUse, DemoCgroups
from demo.launch import launch_in_cgroups, module_command
from tests.kernel.real_cgroups import require_writable_cgroups

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def hierarchy() -> Iterator[Hierarchy]:
    actual = require_writable_cgroups()
    yield actual
    for mount in {*actual.v1.values(), *([actual.v2] if actual.v2 else [])}:
        for name in names():
            if (mount / name).exists():
                (mount / name).rmdir()


def names() -> tuple[str, str]:
    return f"dioptase-test-demo-{os.getpid()}-online", f"dioptase-test-demo-{os.getpid()}-batch"


def make(hierarchy: Hierarchy) -> DemoCgroups:
    return DemoCgroups.make(hierarchy.v1, hierarchy.v2, names())


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.mark.kernel
def test_cgroups_are_made_everywhere_and_removed_with_nothing_left(hierarchy: Hierarchy) -> None:
    groups = make(hierarchy)
    created = [directory for name in names() for directory in groups.directories(name)]
    assert created[0].parent == hierarchy.primary
    assert all(directory.is_dir() for directory in created)
    if hierarchy.mode != "v2":
        assert hierarchy.v1["cpuset"] in groups.mounts
        assert all((d / "cpuset.cpus").read_text().strip() for d in created if (d / "cpuset.cpus").exists())
    assert groups.knobs >= 4
    assert groups.changed_knobs() == {}
    groups.remove()
    assert not any(directory.exists() for directory in created)


@pytest.mark.kernel
def test_a_process_is_inside_before_its_program_starts(hierarchy: Hierarchy, tmp_path: Path) -> None:
    groups, out = make(hierarchy), tmp_path / "out"
    show = "import sys; open(sys.argv[1], 'w').write(open('/proc/self/cgroup').read())"
    process = launch_in_cgroups([sys.executable, "-c", show, str(out)], procs=groups.procs(names()[0]))
    try:
        assert process.wait(30) == 0
    finally:
        end(process)
        groups.remove()
    joined = [line.split(":")[1] for line in out.read_text().splitlines() if line.endswith(f":/{names()[0]}")]
    expected = {"v2": 1, "v1": len(groups.mounts), "hybrid": len(groups.mounts)}[hierarchy.mode]
    assert len(joined) == expected, out.read_text()


@pytest.mark.kernel
def test_a_knob_that_is_not_put_back_is_noticed(hierarchy: Hierarchy) -> None:
    groups = make(hierarchy)
    try:
        batch = groups.directories(names()[1])[0]
        knob, value = ("cpu.weight", "7") if hierarchy.mode == "v2" else ("cpu.shares", "70")
        before = (batch / knob).read_text().strip()
        (batch / knob).write_text(value)
        assert groups.changed_knobs() == {batch / knob: (before, value)}
        (batch / knob).write_text(before)
        assert groups.changed_knobs() == {}
    finally:
        groups.remove()


@pytest.mark.kernel
def test_a_second_demo_is_refused_while_the_first_one_runs(hierarchy: Hierarchy) -> None:
    groups = make(hierarchy)
    try:
        with pytest.raises(CgroupInUse, match="another demo is running"):
            make(hierarchy)
        assert groups.directories(names()[1])[0].exists()
    finally:
        groups.remove()


@pytest.mark.kernel
def test_a_foreign_process_is_left_alone_and_named(hierarchy: Hierarchy) -> None:
    directory = hierarchy.primary / names()[1]
    directory.mkdir()
    process = launch_in_cgroups(SLEEP, procs=[directory / "cgroup.procs"])
    try:
        while not (directory / "cgroup.procs").read_text():
            assert process.poll() is None
        with pytest.raises(CgroupInUse, match=rf"/{names()[1]} holds .* {process.pid} \("):
            make(hierarchy)
        assert process.poll() is None
        assert not (hierarchy.primary / names()[0]).exists()
    finally:
        end(process)


@pytest.mark.kernel
def test_cgroups_of_a_killed_demo_are_created_again(hierarchy: Hierarchy, tmp_path: Path) -> None:
    directory = hierarchy.primary / names()[1]
    directory.mkdir()
    (directory / "cpu.idle").write_text("1")
    orphan = launch_in_cgroups(
        [*module_command("demo.batch"), "--burners", "1", "--counters", str(tmp_path / "c")],
        procs=[directory / "cgroup.procs"],
    )
    while len((directory / "cgroup.procs").read_text().split()) < 2:
        assert orphan.poll() is None
    groups = make(hierarchy)
    try:
        assert orphan.wait(10) == -signal.SIGKILL
        assert (directory / "cpu.idle").read_text().strip() == "0"
        assert any(f"removed cgroup /{names()[1]}" in note for note in groups.notes)
        assert any(f"ended process {orphan.pid}," in note for note in groups.notes)
    finally:
        end(orphan)
        groups.remove()


def unified(tmp_path: Path, offered: str, enabled: str) -> Path:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text(offered)
    (root / "cgroup.subtree_control").write_text(enabled)
    return root


def test_version_2_enables_only_what_is_missing_and_says_so(tmp_path: Path) -> None:
    root = unified(tmp_path, "cpuset cpu io memory pids", "cpu io memory cpuset")
    groups = DemoCgroups.make({}, root, ("a", "b"))
    assert (root / "cgroup.subtree_control").read_text() == "+pids"
    assert groups.mounts == (root,)
    assert groups.notes == [f"enabled controller pids in {root}/cgroup.subtree_control"]
    groups.remove()
    assert (root / "cgroup.subtree_control").read_text() == "-pids"
    assert not (root / "a").exists()


def test_version_2_leaves_a_controller_enabled_that_a_newcomer_may_need(tmp_path: Path) -> None:
    root = unified(tmp_path, "cpuset cpu memory pids", "cpu memory cpuset")
    groups = DemoCgroups.make({}, root, ("a", "b"))
    (root / "kubepods").mkdir()
    groups.remove()
    assert (root / "cgroup.subtree_control").read_text() == "+pids"
    assert "kubepods" in groups.notes[-1]


def test_version_2_without_a_cpu_controller_is_unavailable_with_a_remedy(tmp_path: Path) -> None:
    root = unified(tmp_path, "memory pids", "")
    with pytest.raises(Unavailable, match="does not offer cpu") as caught:
        DemoCgroups.make({}, root, ("a", "b"))
    assert "delegate" in caught.value.remedy
    assert (root / "cgroup.subtree_control").read_text() == ""


def test_losing_the_race_for_the_lock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between mkdir and lock another demo may take the directory for a leftover and make its own."""

    def raced(descriptor: int, _: int) -> None:
        (tmp_path / "a").rmdir()
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()

    monkeypatch.setattr("fcntl.flock", raced)
    with pytest.raises(CgroupInUse):
        DemoCgroups.make({"cpu": tmp_path}, None, ("a", "b"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_tree_that_cannot_be_written_is_unavailable_with_a_remedy() -> None:
    with pytest.raises(Unavailable, match="cgroups cannot be created: /proc/a: ") as caught:
        DemoCgroups.make({"cpu": Path("/proc")}, None, ("a", "b"))
    assert "root" in caught.value.remedy
