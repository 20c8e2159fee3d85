"""What the agent's own checks say of sources that are files."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.doctor import host_checks
from agent.sensors.cgroup.hierarchy import Hierarchy, detect_hierarchy
from api.interfaces import Unavailable


def test_what_only_some_machines_have_is_told_and_is_nothing_wrong(tmp_path: Path) -> None:
    try:
        detect_hierarchy()
    except Unavailable as missing:
        pytest.skip(missing.reason)
    checks = host_checks.check_host(tmp_path, Path("/proc"), tmp_path / "no-sys")
    (files,) = (check for check in checks if check.name == "node files")
    assert files.ok
    optional = {check.detail: check for check in checks if check.name.startswith("optional: ")}
    assert optional["no energy counters of RAPL can be read"].name == "optional: energy"
    # What a cgroup of somebody else has needs none.
    assert all(check.ok and (check.remedy or check.detail.startswith("there, ")) for check in optional.values())
    assert {"sysfs has no NUMA nodes", "no energy counters of RAPL can be read"} <= optional.keys()


@pytest.mark.parametrize(
    ("made", "pods", "detail"),
    [
        (["dioptase-test-1", "system.slice", "pod"], ["/pod"], "there, asked of /pod"),
        (["dioptase-test-1", "system.slice"], ["/gone"], "there, asked of /system.slice"),
        (["dioptase-test-1"], [], "not checked: there is neither a pod's cgroup nor a usual one to ask"),
    ],
)
def test_knobs_are_asked_of_pods_then_of_what_is_usual_and_of_no_stranger(
    tmp_path: Path, made: list[str], pods: list[str], detail: str
) -> None:
    for name in made:
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpu.max").write_text("max 100000\n")
    checks = host_checks._check_knobs(Hierarchy(v1={}, v2=tmp_path), pods)
    assert detail in {check.detail for check in checks}
    assert not any("dioptase-test-1" in check.detail for check in checks)
