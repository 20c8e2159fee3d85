"""`dioptase demo` as a person starts it without a terminal: the real agent, the kernel's own waits, real cgroups."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.agent_process import free_port
from tests.kernel.real_cgroups import require_writable_cgroups

pytestmark = pytest.mark.live


def test_the_demo_reclaims_cpu_explains_it_and_restores_everything(tmp_path: Path) -> None:
    hierarchy = require_writable_cgroups()
    command = [str(Path(sys.executable).with_name("dioptase")), "demo", "--duration", "15"]
    ran = subprocess.run(
        [*command, "--listen", f"127.0.0.1:{free_port()}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    text = ran.stdout + ran.stderr
    if "another demo is running" in text:
        pytest.skip("another dioptase demo is running on this machine")
    assert ran.returncode == 0, text
    assert re.search(r"applied +demo/batch +cpu\.idle", text), text
    changes = re.search(r"^changes +(\d+) \(.*cpu\.idle 1", text, re.M)
    assert changes is not None, text
    assert int(changes[1]) == len(re.findall(r" applied +demo/", text))
    reclaimable = re.search(r"^CPU lent +([\d.]+) of (\d+) cores .* used ([\d.]+)$", text, re.M)
    assert reclaimable is not None, text
    assert 0 < float(reclaimable[3]) <= float(reclaimable[2])
    adjacent = re.search(r"^with batch +([\d,]+) +(\d+) .* ([\d,]+)$", text, re.M)
    assert adjacent is not None, text
    assert int(adjacent[1].replace(",", "")) > 1000
    assert int(adjacent[3].replace(",", "")) > 100
    assert "none differs) and removed" in text
    assert not list(hierarchy.primary.glob("dioptase-demo-*"))
