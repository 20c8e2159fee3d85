"""A source reports what a machine lacks to answer power alerts."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.sensors.node.rapl import PowerCapSupport
from tests.agent.sensors.kernel_trees import make

METER = "class/powercap/intel-rapl:0/energy_uj"
OFF = "class/powercap/intel-rapl:0/enabled"
LIMIT = "class/powercap/intel-rapl:0/constraint_0_power_limit_uw"
NAME = "class/powercap/intel-rapl:0/name"
DRAM = "class/powercap/intel-rapl:0:0/constraint_0_power_limit_uw"


@pytest.mark.parametrize(
    ("files", "capping", "form", "lacks"),
    [
        ((), True, "none", "/sys/class/powercap/intel-rapl:*/energy_uj"),
        ((LIMIT,), True, "RAPL power limit", "cannot be measured"),
        ((METER,), True, "none", "no /sys/class/powercap/intel-rapl:*/constraint_0_power_limit_uw of a package"),
        ((METER,), False, "none", ""),
        ((METER, LIMIT), True, "RAPL power limit", ""),
        ((METER, LIMIT, OFF), True, "none", "`enabled` is 1"),
        ((METER, DRAM), True, "none", "of a package"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, files: tuple[str, ...], capping: bool, form: str, lacks: str) -> None:
    make(tmp_path, dict.fromkeys(files, "1\n") | {NAME: "package-0\n"} | ({OFF: "0\n"} if OFF in files else {}))
    caps = PowerCapSupport(tmp_path, capping=capping)
    assert caps.form == form
    problem = caps.problem()
    assert (problem is None) is (not lacks)
    if problem is not None:
        assert lacks in problem.reason
        assert "power" in problem.remedy


def test_a_package_that_is_enabled_later_is_seen(tmp_path: Path) -> None:
    make(tmp_path, {METER: "1\n", LIMIT: "1\n", NAME: "package-0\n", OFF: "0\n"})
    caps = PowerCapSupport(tmp_path, capping=True)
    assert caps.problem() is not None
    (tmp_path / OFF).write_text("1\n")
    assert caps.problem() is None
    assert caps.form == "RAPL power limit"
