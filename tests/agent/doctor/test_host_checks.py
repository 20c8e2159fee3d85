"""What the agent's own checks say of sources that are files."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.doctor import host_checks
from agent.sensors.cgroup.hierarchy import Hierarchy, detect_hierarchy
from api.interfaces import Unavailable


def test_missing_optional_hardware_is_reported_and_is_no_failure(tmp_path: Path) -> None:
    try:
        detect_hierarchy()
    except Unavailable as missing:
        pytest.skip(missing.reason)
    checks = host_checks.check_host(tmp_path, Path("/proc"), tmp_path / "no-sys")
    (files,) = (check for check in checks if check.name == "node files")
    assert files.ok
    optional = {check.detail: check for check in checks if check.name.startswith("optional: ")}
    assert optional["no energy counters of RAPL can be read"].name == "optional: energy"
    # A knob that is available needs no remedy.
    assert all(check.ok and (check.remedy or check.detail.startswith("available in ")) for check in optional.values())
    assert {"sysfs has no NUMA nodes", "no energy counters of RAPL can be read"} <= optional.keys()


@pytest.mark.parametrize(
    ("cgroups", "pods", "detail"),
    [
        (["dioptase-test-1", "system.slice", "pod"], ["/pod"], "available in /pod"),
        (["dioptase-test-1", "system.slice"], ["/gone"], "available in /system.slice"),
        (["dioptase-test-1"], [], "not checked: there is neither a pod's cgroup nor a common one"),
    ],
)
def test_knobs_are_checked_in_pods_then_in_common_cgroups_and_nowhere_else(
    tmp_path: Path, cgroups: list[str], pods: list[str], detail: str
) -> None:
    for name in cgroups:
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpu.max").write_text("max 100000\n")
    checks = host_checks._check_knobs(Hierarchy(v1={}, v2=tmp_path), pods)
    assert detail in {check.detail for check in checks}
    assert not any("dioptase-test-1" in check.detail for check in checks)
