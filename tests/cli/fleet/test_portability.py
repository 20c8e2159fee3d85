"""`kubectl dioptase` on a person's own machine, which may run macOS or Windows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("api", "kube", "probes", "agent", "exporters", "controller", "cli", "demo")


def imported(start: str) -> set[str]:
    """What is in memory once it is imported, of ours."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    result, left = {start}, [start]
    while left:
        new = graph.find_modules_directly_imported_by(left.pop()) - result
        result |= new
        left += new
    return result


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_it_uses_no_name_that_another_system_lacks(platform: str, tmp_path: Path) -> None:
    """As typeshed knows of each name of the standard library where it is. (Modules: by a contract in pyproject.toml.)"""
    modules = imported("cli.kubectl")
    assert {"cli.fleet.api_server", "kube.client", "kube.credentials", "api.snapshot"} <= modules
    assert not {"exporters.page.web_server", "agent.sensors.cgroup.cgroup_files"} & modules
    files = [ROOT / f"{module.replace('.', '/')}.py" for module in sorted(modules)]
    command = [sys.executable, "-m", "mypy", "--platform", platform, "--cache-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, *map(str, (file for file in files if file.exists()))],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("Success: no issues found in "), done.stdout + done.stderr
