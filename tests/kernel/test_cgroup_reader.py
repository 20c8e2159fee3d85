"""The cgroup reader on this kernel: CPU time that can be disputed, and groups that vanish, return and swarm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.hierarchy import Hierarchy
from tests.agent.sensors import kernel_trees
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel
BURN = """
import resource, sys, time
spent = resource.getrusage(resource.RUSAGE_SELF)
print(spent.ru_utime + spent.ru_stime, file=open(sys.argv[1], "w"))
while time.process_time() < 1.0: pass
"""
HOLD = """
import sys, time
held = bytearray(64 << 20)
for page in range(0, len(held), 4096): held[page] = 1
open(sys.argv[1], "w").close()
time.sleep(60)
"""
CHURN = """
import os, random, sys
random.seed(7)
parent, there = sys.argv[1], set()
print("go", flush=True)
while True:
    name = f"{parent}/g{random.randrange(30)}"
    (os.rmdir if name in there else os.mkdir)(name)
    there ^= {name}
"""


@pytest.fixture
def reader() -> Iterator[CgroupReader]:
    created = CgroupReader(require_writable_cgroups())
    yield created
    created.close()


def primary(group: TestCgroup, name: str = "") -> Path:
    return group.hierarchy.primary / group.path.lstrip("/") / name


def below(group: TestCgroup, paths: Iterator[str] | dict[str, object]) -> set[str]:
    return {path for path in paths if path.startswith(f"{group.path}/")}


def test_cpu_time_is_what_wait4_accounts(reader: CgroupReader, tmp_path: Path) -> None:
    """The group is charged from the moment the process joins: between all that it spent and what it spent as BURN."""
    with cgroup(require_writable_cgroups(), "burn") as group:
        before = reader.read()[group.path]
        assert (before.cpu_usage_ns, before.threads, before.id) == (0, 0, group.id)
        process = group.start([sys.executable, "-c", BURN, str(tmp_path / "spent")])
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        spent_s = usage.ru_utime + usage.ru_stime
        earlier_s = float((tmp_path / "spent").read_text())
        used_ns = reader.read()[group.path].cpu_usage_ns
        assert used_ns is not None
        # 20 ms: leaving the process behind costs after the last look that wait4 takes.
        assert spent_s - earlier_s <= used_ns / 1e9 <= spent_s + 0.02


def test_threads_and_memory_are_those_of_the_tasks(reader: CgroupReader, tmp_path: Path) -> None:
    """One thread that touched and holds 64 MiB, in an interpreter that takes less than 32 MiB more."""
    with cgroup(require_writable_cgroups(), "hold") as group:
        process = group.start([sys.executable, "-c", HOLD, str(tmp_path / "ready")])
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.02)
        sample = reader.read()[group.path]
        assert sample.threads == 1
        assert sample.memory_bytes is not None
        assert 64 << 20 <= sample.memory_bytes < 96 << 20


def test_a_group_made_again_at_the_same_path_is_another_one(reader: CgroupReader, tmp_path: Path) -> None:
    with cgroup(require_writable_cgroups(), "again") as group:
        group.start([sys.executable, "-c", BURN, str(tmp_path / "spent")]).wait()
        before = reader.read()[group.path]
        assert before.cpu_usage_ns is not None
        assert before.cpu_usage_ns > 9e8
        for directory in group.dirs:
            directory.rmdir()
            directory.mkdir()
        after = reader.read()[group.path]
        assert after.id == group.id != before.id
        assert (after.cpu_usage_ns, after.threads) == (0, 0)


def test_a_group_that_goes_while_another_comes_is_seen_at_once(reader: CgroupReader) -> None:
    """The number of children stays the same, so only looking at each child can tell."""
    with cgroup(require_writable_cgroups(), "swap") as group:
        primary(group, "old/inner").mkdir(parents=True)
        assert below(group, reader.read()) == {f"{group.path}/old", f"{group.path}/old/inner"}
        primary(group, "old/inner").rmdir()
        primary(group, "old").rmdir()
        primary(group, "new").mkdir()
        samples = reader.read()
        assert below(group, samples) == {f"{group.path}/new"}
        assert samples[f"{group.path}/new"].id == primary(group, "new").stat().st_ino
        primary(group, "new").rmdir()
        assert below(group, reader.read()) == set()
        assert reader.problems() == ()


def test_descriptors_of_groups_that_are_gone_are_given_back(reader: CgroupReader) -> None:
    reader.read()
    before = kernel_trees.open_files()
    with cgroup(require_writable_cgroups(), "fds"):
        reader.read()
        assert kernel_trees.open_files() > before
    reader.read()
    assert kernel_trees.open_files() == before


def test_names_that_are_not_utf8_are_read(reader: CgroupReader) -> None:
    with cgroup(require_writable_cgroups(), "names") as group:
        odd = primary(group, os.fsdecode(b'caf\xe9 "x"'))
        odd.mkdir()
        try:
            sample = reader.read()[f'{group.path}/caf\\xe9 "x"']
        finally:
            odd.rmdir()
        assert sample.throttled_periods == 0


def test_a_swarm_of_groups_neither_stops_the_reader_nor_fools_it(reader: CgroupReader) -> None:
    """While groups come and go as fast as the kernel lets them, no path ever shows a former group's id."""
    with ExitStack() as stack:
        group = stack.enter_context(cgroup(require_writable_cgroups(), "churn"))
        churn = subprocess.Popen([sys.executable, "-c", CHURN, str(primary(group))], stdout=subprocess.PIPE)
        assert churn.stdout is not None
        stack.callback(churn.stdout.close)
        stack.callback(churn.wait)
        stack.callback(churn.kill)
        churn.stdout.readline()
        path_of: dict[int, str] = {}
        for _ in range(300):
            samples = reader.read()
            assert group.path in samples
            for path in below(group, samples):
                assert path_of.setdefault(samples[path].id, path) == path
        assert len(path_of) > 100, "the swarm did swarm"
        churn.kill()
        churn.wait()
        left = {
            f"{group.path}/{entry.name}": entry.stat().st_ino for entry in primary(group).iterdir() if entry.is_dir()
        }
        samples = reader.read()
        assert {path: samples[path].id for path in below(group, samples)} == left
        for path in left:
            primary(group, path.rpartition("/")[2]).rmdir()


@pytest.mark.parametrize("without", ["pids", "nothing"])
def test_threads_that_come_and_go_are_counted(without: str) -> None:
    """On version 1 a descriptor of `tasks` shows an old list as long as it is read once a second. With slow files due in
    each cycle, the reader reopens it, although the tasks that joined may not have run yet."""
    hierarchy = require_writable_cgroups()
    first_fds = {name: mount for name, mount in hierarchy.v1.items() if name != without}
    reader = CgroupReader(Hierarchy(v1=first_fds, v2=hierarchy.v2))
    with cgroup(hierarchy, "threads") as group:
        counts = []
        turns = iter(range(0, 60_000_000_000, 10_000_000_000))
        for _ in range(3):
            counts.append(reader.read(next(turns))[group.path].threads)
            process = group.start(["sleep", "60"])
            while str(process.pid) not in (group.dirs[-1] / "cgroup.procs").read_text().split():
                assert process.poll() is None
                time.sleep(0.01)
        for process in group.processes:
            process.kill()
            process.wait()
        counts.append(reader.read(next(turns))[group.path].threads)
    reader.close()
    assert counts == [0, 1, 2, 0]


def test_a_group_that_wakes_below_one_that_slept_is_seen_at_once(reader: CgroupReader) -> None:
    """Files are not read while the parent's sum is unchanged; a cgroup that runs between two readings is noticed."""
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "pod"), ExitStack() as inner:
        web = TestCgroup(hierarchy, f"/dioptase-test-{os.getpid()}-pod/web")
        inner.callback(web.close)
        (burner,) = web.burn()
        usage = web.file("cpu", "cpu.stat") if hierarchy.mode == "v2" else web.file("cpuacct", "cpuacct.usage")

        def used_ns() -> int:
            words = usage.read_text().split()
            return int(words[0]) if len(words) == 1 else 1000 * int(words[1])

        observed = []
        for expected in (signal.SIGCONT, signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP) * 2:
            burner.send_signal(expected)
            for _ in range(3):
                time.sleep(0.05)
                earliest = used_ns()
                sample = reader.read()[web.path]
                assert sample.cpu_usage_ns is not None
                assert earliest <= sample.cpu_usage_ns <= used_ns()
                observed.append(sample.cpu_usage_ns)
        stopped = [a == b for a, b in pairwise(observed)]
        assert set(stopped) == {False, True}, "it ran and it slept"
