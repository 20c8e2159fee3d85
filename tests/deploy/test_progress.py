"""Commands that take minutes print what they do and how long it takes, before they do it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("target", "steps"), [("run", 1), ("cluster", 2)])
def test_make_announces_each_installation_of_python_packages(target: str, steps: int) -> None:
    """`make run` installs once, `make cluster` also what tests need."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "pip install" in line or line.startswith("echo ")]
    announced = [number for number, line in enumerate(lines) if line.startswith('echo "installing Python packages')]
    assert len(announced) == steps
    for number in announced:
        assert "minute" in lines[number]
        assert "pip install" in lines[number + 1]
    assert "pip install" not in lines[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="without root no packages are installed")
@pytest.mark.parametrize(("code", "last"), [(0, ""), (1, "Unable to locate package python3-bpfcc")])
def test_the_installation_of_packages_is_announced_with_its_time(tmp_path: Path, code: int, last: str) -> None:
    for name, script in (("dpkg-query", "exit 1"), ("apt-get", f"echo '{last}'; exit {code}")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "true"}
    command = [ROOT / "deploy/install-packages", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "installing python3-bpfcc with apt-get: up to some minutes, once\n"
    assert last in done.stderr
