"""Kept files: what stays open, what is opened again, and what happens when descriptors run out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.sensors.kernel_files import FIRST_READ_BYTES, DescriptorBudget, KernelFile, MultiReadKernelFile
from api.interfaces import Vanished
from tests.agent.sensors import kernel_trees


def open_file(path: Path, budget: DescriptorBudget | None = None) -> KernelFile:
    return KernelFile(budget or DescriptorBudget(), os.fsencode(path))


def test_a_kept_file_is_opened_once_and_read_from_its_start_each_time(tmp_path: Path) -> None:
    path, budget = tmp_path / "f", DescriptorBudget()
    path.write_text("1\n")
    file = open_file(path, budget)
    assert file.read() == b"1\n"
    path.write_text("22\n")
    assert file.read() == b"22\n"
    assert (budget.open_files, budget.opened) == (1, 1)
    file.close()
    file.close()
    assert budget.open_files == 0
    assert file.read() == b"22\n", "a closed file opens itself again"


@pytest.mark.parametrize("size", [0, 1, FIRST_READ_BYTES - 1, FIRST_READ_BYTES, FIRST_READ_BYTES + 1, 300_000])
def test_long_texts_are_read_to_their_end(tmp_path: Path, size: int) -> None:
    (tmp_path / "f").write_bytes(b"x" * size)
    file = open_file(tmp_path / "f")
    assert [len(file.read()), len(file.read())] == [size, size]


def test_long_texts_of_this_kernel_are_whole() -> None:
    """/proc/zoneinfo comes in pieces shorter than a page; each read of a descriptor starts again."""
    file = MultiReadKernelFile(DescriptorBudget(), b"/proc/zoneinfo", long=True)
    for _ in range(2):
        zones = [line for line in file.read().split(b"\n") if line.startswith(b"Node")]
        assert zones == [line for line in Path("/proc/zoneinfo").read_bytes().split(b"\n") if line.startswith(b"Node")]


def test_a_file_that_is_not_there_has_vanished_and_may_come_back(tmp_path: Path) -> None:
    file = open_file(tmp_path / "f")
    with pytest.raises(Vanished, match="No such file"):
        file.read()
    (tmp_path / "f").write_text("7")
    assert file.read() == b"7"


def test_a_thread_that_ended_has_vanished() -> None:
    """/proc/PID answers ESRCH through a descriptor that outlived the process: never the numbers of its successor."""
    process = subprocess.Popen(["sleep", "60"])
    file = open_file(Path(f"/proc/{process.pid}/stat"))
    assert file.read().startswith(f"{process.pid} (".encode())
    process.kill()
    process.wait()
    with pytest.raises(Vanished):
        file.read()


def test_what_is_no_text_file_is_an_error_and_leaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    os.mkfifo(tmp_path / "p")
    before = kernel_trees.open_files()
    for name, code in (("d", IsADirectoryError), ("p", OSError)):
        with pytest.raises(code):
            open_file(tmp_path / name).read()
    assert kernel_trees.open_files() == before


def test_dropping_the_last_reference_closes_the_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("1")
    budget = DescriptorBudget()
    file = open_file(tmp_path / "f", budget)
    file.read()
    del file
    assert budget.open_files == 0


LIMITS = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
from agent.sensors.kernel_files import DescriptorBudget, KernelFile
budget = DescriptorBudget()
files = [KernelFile(budget, os.fsencode(sys.argv[1])) for _ in range(700)]
texts = {file.read() for _ in range(2) for file in files}
print(texts == {b"42"}, budget.open_files, budget.opened, budget.short, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "reported"),
    [
        # 512 descriptors are left for others: 700 files need 1212.
        (1024, 4096, "True 700 700 False 4096"),
        (1024, 1100, "True 588 812 True 1100"),
        (600, 600, "True 88 1312 True 600"),
    ],
)
def test_the_soft_limit_is_raised_and_beyond_the_hard_one_files_are_opened_for_each_read(
    tmp_path: Path, soft: int, hard: int, reported: str
) -> None:
    (tmp_path / "f").write_text("42")
    argv = [sys.executable, "-c", LIMITS, str(tmp_path / "f"), str(soft), str(hard)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == reported
