"""A source reports what a machine lacks to answer power alerts."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.sensors.node.rapl import PowerCapSupport
from tests.agent.sensors.kernel_trees import make

METER = "class/powercap/intel-rapl:0/energy_uj"
LIMIT = "class/powercap/intel-rapl:0/constraint_0_power_limit_uw"
CPUFREQ = "devices/system/cpu/cpufreq/policy0/scaling_max_freq"


@pytest.mark.parametrize(
    ("files", "form", "lacks"),
    [
        ((), "none", "/sys/class/powercap/intel-rapl:*/energy_uj"),
        ((LIMIT, CPUFREQ), "RAPL power limit and frequency limit of cpufreq", "cannot be measured"),
        ((METER,), "none", "no /sys/devices/system/cpu/cpufreq/policy*/scaling_max_freq"),
        ((METER, LIMIT), "RAPL power limit", ""),
        ((METER, CPUFREQ), "frequency limit of cpufreq", ""),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, files: tuple[str, ...], form: str, lacks: str) -> None:
    make(tmp_path, dict.fromkeys(files, "1\n"))
    caps = PowerCapSupport(tmp_path)
    assert caps.form == form
    problem = caps.problem()
    assert (problem is None) is (not lacks)
    if problem is not None:
        assert lacks in problem.reason
        assert "power" in problem.remedy
