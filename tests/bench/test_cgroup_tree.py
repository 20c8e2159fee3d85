"""The cgroups of a benchmark are removed at its end, also when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.interfaces import Unavailable
from bench.cgroup_tree import cgroup_mounts, make_cgroup, own_cgroup, remove_tree
from demo.launch import ROOT, launch_in_cgroups
from tests.builders.waiting import until
from tests.kernel.real_cgroups import require_writable_cgroups

pytestmark = pytest.mark.kernel
NAME = f"dioptase-test-tree-{os.getpid()}"
BENCHMARK = """
import sys, time
from bench.cgroup_tree import cgroup_mounts, make_cgroup, own_cgroup
from demo.launch import launch_in_cgroups
mounts = cgroup_mounts()
with own_cgroup(sys.argv[1], {}, mounts) as directories:
    for directory in directories:
        make_cgroup(directory / "pod", {}, leaf=True)
    launch_in_cgroups(["sleep", "infinity"], procs=[directory / "pod" / "cgroup.procs" for directory in directories])
    print("running", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def directories() -> Iterator[list[Path]]:
    require_writable_cgroups()
    paths = [mount / NAME for mount in cgroup_mounts()]
    yield paths
    remove_tree(paths, timeout_s=0)


def test_nothing_is_left_after_kill_9(directories: list[Path]) -> None:
    benchmark = subprocess.Popen([sys.executable, "-c", BENCHMARK, NAME], cwd=ROOT, stdout=subprocess.PIPE)
    assert benchmark.stdout is not None
    assert benchmark.stdout.readline() == b"running\n"
    assert all((directory / "pod").is_dir() for directory in directories)
    benchmark.kill()
    benchmark.wait()
    benchmark.stdout.close()
    until(lambda: not any(directory.exists() for directory in directories))


def test_a_second_run_is_refused_and_leaves_the_first_alone(directories: list[Path]) -> None:
    with own_cgroup(NAME, {"cpu.shares": "3072", "cpu.weight": "118"}, cgroup_mounts()):
        with pytest.raises(Unavailable, match="another run uses the cgroup"), own_cgroup(NAME, {}, cgroup_mounts()):
            pass
        weights = {name: (d / name).read_text() for d in directories for name in ("cpu.shares",) if (d / name).exists()}
        assert weights in ({}, {"cpu.shares": "3072\n"})
    assert not any(directory.exists() for directory in directories)


def test_what_an_earlier_run_has_left_is_removed_with_its_processes(directories: list[Path]) -> None:
    for directory in directories:
        make_cgroup(directory, {}, leaf=True)
    orphan = launch_in_cgroups(["sleep", "infinity"], procs=[directory / "cgroup.procs" for directory in directories])
    until(lambda: str(orphan.pid) in (directories[0] / "cgroup.procs").read_text().split())
    with own_cgroup(NAME, {}, cgroup_mounts()):
        assert orphan.wait(10) == -9
        assert (directories[0] / "cgroup.procs").read_text() == ""
