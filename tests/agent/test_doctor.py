"""What the agent's own checks say of sources that are files."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import doctor
from agent.hierarchy import detect
from api.ports import Unavailable


def test_what_only_some_machines_have_is_told_and_is_nothing_wrong(tmp_path: Path) -> None:
    try:
        detect()
    except Unavailable as missing:
        pytest.skip(missing.reason)
    checks = doctor.checks(tmp_path, Path("/proc"), tmp_path / "no-sys")
    (files,) = (check for check in checks if check.name == "node files")
    assert files.ok
    optional = {check.detail: check for check in checks if check.name.startswith("optional: ")}
    assert optional["no energy counters of RAPL can be read"].name == "optional: energy"
    # What a cgroup of somebody else has needs none.
    assert all(check.ok and (check.remedy or check.detail.startswith("there, ")) for check in optional.values())
    assert {"sysfs has no NUMA nodes", "no energy counters of RAPL can be read"} <= optional.keys()
