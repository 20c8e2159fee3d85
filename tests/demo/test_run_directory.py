"""Tests the temporary directory of a demo: removed at its end, or by the next demo if it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from demo.launch import ROOT
from demo.run_directory import remove_abandoned_directories, run_directory

HOLDER = """
import sys, time
from pathlib import Path
from demo.run_directory import run_directory
with run_directory(Path(sys.argv[1])) as directory:
    (directory / "agent.log").write_text("started")
    print(directory, flush=True)
    time.sleep(60)
"""


def test_the_directory_is_removed_at_the_end_with_what_is_in_it(tmp_path: Path) -> None:
    with run_directory(tmp_path) as directory:
        (directory / "pods.yaml").write_text("pods: []")
        assert directory.parent == tmp_path
        assert directory.stat().st_mode & 0o777 == 0o700
        assert remove_abandoned_directories(tmp_path) == [], "its demo runs"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), run_directory(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_killed_demo_is_removed_by_the_next_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)}) as holder:
        assert holder.stdout is not None
        directory = Path(holder.stdout.readline().strip())
        assert remove_abandoned_directories(tmp_path) == []
        holder.kill()
    assert (directory / "agent.log").exists()
    assert remove_abandoned_directories(tmp_path) == [directory]
    assert list(tmp_path.iterdir()) == []


def test_other_directories_stay(tmp_path: Path) -> None:
    """Those of another program, those without a lock, which an older version may be using, and links to elsewhere."""
    target = tmp_path / "elsewhere"
    target.write_text("keep")
    for name in ("dioptase-demo-old", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other/lock").touch()
    (tmp_path / "dioptase-demo-old/lock").symlink_to(target)
    assert remove_abandoned_directories(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dioptase-demo-old", "elsewhere", "other"]
