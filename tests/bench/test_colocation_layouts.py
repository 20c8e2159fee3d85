"""The kernel's own files of the cgroups that the benchmark makes as a kubelet would."""

from __future__ import annotations

from pathlib import Path
from posixpath import dirname

import pytest

from api.interfaces import Unavailable
from bench.colocation_layouts import CellCgroups, kubelet_cgroups, kubelet_root
from demo.launch import launch_in_cgroups
from tests.kernel.real_cgroups import require_writable_cgroups

pytestmark = [pytest.mark.kernel, pytest.mark.vm]
SHARES = {"container": 512, "pod": 512, "class": 512 + 102, "kubepods": 2048}
WEIGHTS = {"container": 20, "pod": 20, "class": 24, "kubepods": 79}


def weights_above(groups: CellCgroups, container: str, file: str) -> dict[str, int]:
    """Return the weight of a container in a class of its own, and of each cgroup above it up to `kubepods`."""
    names, path, values = list(SHARES), container, {}
    for name in names:
        values[name] = int((groups.directories(path)[0] / file).read_text())
        path = dirname(path)
    return values


def test_the_kernel_has_the_weights_of_a_kubelet_and_processes_are_in_every_hierarchy() -> None:
    """On a node of two CPUs: 500m online and 100m for the agent are 614 shares; a BestEffort batch pod has the least."""
    hierarchy = require_writable_cgroups()
    file, expected, least = ("cpu.weight", WEIGHTS, 1) if hierarchy.mode == "v2" else ("cpu.shares", SHARES, 2)
    directories: list[Path] = []
    try:
        with (
            kubelet_root(hierarchy, 2),
            kubelet_cgroups(hierarchy, 2, online="Burstable", batch="BestEffort") as groups,
        ):
            directories = groups.directories(groups.batch)
            assert weights_above(groups, groups.online, file) == expected
            assert [weights_above(groups, groups.batch, file)[name] for name in ("container", "pod", "class")] == [
                least
            ] * 3
            process = launch_in_cgroups(["sleep", "infinity"], procs=groups.procs(groups.batch))
            try:
                while not all((directory / "cgroup.procs").read_text() for directory in directories):
                    assert process.poll() is None
            finally:
                process.kill()
                process.wait()
    except Unavailable as error:
        if "another run uses" in error.reason:
            pytest.skip(error.reason)
        raise
    assert not any(directory.exists() for directory in directories)
