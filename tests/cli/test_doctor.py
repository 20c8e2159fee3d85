"""The table of `dioptase doctor` without a terminal: unbroken words, a line per check."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import cli.doctor
from agent.doctor import host_checks
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.diagnostics import DoctorCheck


def test_a_pipe_gets_a_line_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "available in /kubepods/burstable/" + "x" * 200
    findings = (
        DoctorCheck(name="cpu.max", ok=True, detail=long),
        DoctorCheck(name="pressure", ok=False, detail="no /proc/pressure", remedy="boot with psi=1"),
    )
    monkeypatch.setattr(cli.doctor.node, "check_host", lambda _state_dir, **_: findings)
    monkeypatch.setattr(cli.doctor.kernel, "probe_checks", lambda: ())
    done = CliRunner().invoke(cli.doctor.doctor, [])
    assert done.exit_code == 1
    _, first, second, _, total = done.output.splitlines()
    assert (first.split(None, 2)[2], first[-1]) == (long, "x")
    assert second.endswith("boot with psi=1")
    assert total == "1 of 2 missing"


def test_what_this_machine_lacks_without_need_is_not_said_to_be_there() -> None:
    """Five findings: one needed and missing, two optional ones lacking, one optional and one needed one there."""
    there = (
        DoctorCheck(name="cpus", ok=True, detail="2"),
        DoctorCheck(name="optional: io.cost", ok=True, detail="there"),
    )
    lacking = tuple(
        DoctorCheck(name=f"optional: {n}", ok=True, detail="none", remedy="load it") for n in ("energy", "l3")
    )
    missing = DoctorCheck(name="pressure", ok=False, detail="none", remedy="psi=1")
    assert cli.doctor.doctor_summary((*there, *lacking)) == (
        "4 checked, nothing that is needed is missing; of what is optional this machine lacks 2, marked -"
    )
    assert cli.doctor.doctor_summary((*there, *lacking, missing)) == (
        "1 of 5 missing; of what is optional this machine lacks 2, marked -"
    )
    assert cli.doctor.doctor_summary(there) == "2 checked, nothing that is needed is missing"


def test_checks_without_a_result_are_not_reported_as_present(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unasked = host_checks._check_knobs(Hierarchy(v1={}, v2=tmp_path), [])
    monkeypatch.setattr(cli.doctor.node, "check_host", lambda _state_dir, **_: unasked)
    monkeypatch.setattr(cli.doctor.kernel, "probe_checks", lambda: (DoctorCheck(name="cpus", ok=True, detail="2"),))
    done = CliRunner().invoke(cli.doctor.doctor, [])
    _, knobs, cpus, _, total = done.output.splitlines()
    assert (done.exit_code, knobs.split()[:2], cpus.split()[:2]) == (0, ["-", "knobs"], ["ok", "cpus"])
    assert knobs.endswith("name your pods with --pods")
    assert total == "1 checked, nothing that is needed is missing; 1 not checked, marked -"
