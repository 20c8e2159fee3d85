"""Real guests that fail: each failure is detected, and none of the guests stays running."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.waiting import until
from tests.vm.__main__ import REPORT, main
from tests.vm.machine import LOST, QEMU, ROOT
from tests.vm.test_machine import alive

pytestmark = pytest.mark.vm_host

NAMED = "for disk in /sys/block/vd*; do cat $disk/serial; echo; done; cat /sys/devices/system/node/online; nproc; id -u"


def boot(out: Path, *words: str) -> tuple[int, str]:
    """Exit status of `python -m tests.vm`, and what the console said."""
    status = main(["--out", str(out), "--memory", "1024", *words])
    return status, (out / "console.log").read_text(errors="replace")


def test_a_guest_that_is_well_brings_its_own_status_back(tmp_path: Path) -> None:
    status, console = boot(
        tmp_path, "--", "sh", "-c", f"{NAMED}; grep -c ' /sys/fs/cgroup cgroup2 ' /proc/mounts; exit 7"
    )
    assert status == 7
    assert "swap\ndata\n" in console
    assert "\n0-1\n4\n0\n1\n" in console, "two NUMA nodes, four CPUs, root, one hierarchy of version 2"


def test_a_panic_is_a_failure(tmp_path: Path) -> None:
    status, console = boot(tmp_path, "--", "sh", "-c", "echo 0 > /run/out/before; echo c > /proc/sysrq-trigger; exit 0")
    assert status == LOST
    assert "Kernel panic - not syncing: sysrq triggered crash" in console
    assert (tmp_path / "before").exists(), "what was brought back before is not lost"


def test_a_hang_is_a_failure(tmp_path: Path) -> None:
    status, console = boot(tmp_path, "--timeout", "30", "--", "sh", "-c", "echo it begins; sleep 3600; exit 0")
    assert status == LOST
    assert "it begins" in console, "it was not the boot that took so long"


def test_a_status_that_is_lost_is_a_failure(tmp_path: Path) -> None:
    status, console = boot(tmp_path, "--", "umount", "-l", "/run/out")
    assert status == LOST
    assert "GUEST ready" in console


def test_results_that_are_lost_are_a_failure(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    torn = f"echo '<testsuites>' > /run/out/{REPORT}; exit 0"
    status, _ = boot(tmp_path / "out", "--junit-xml", str(report), "--", "sh", "-c", torn)
    assert status == LOST
    assert not report.exists()


def test_a_killed_process_leaves_no_machine_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.vm", "--out", str(tmp_path), "--", "sleep", "3600"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as runner:
        assert runner.stdout is not None
        while b"GUEST ready" not in runner.stdout.readline():
            assert runner.poll() is None
        machines = children(runner.pid)
        assert [name for _, name in machines] == [QEMU[:15]]
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    until(lambda: not alive(machines[0][0]), "the machine is gone")


def children(pid: int) -> list[tuple[int, str]]:
    """Process ids and names of a process' children."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [(int(child), Path(f"/proc/{child}/comm").read_text().strip()) for child in text]
