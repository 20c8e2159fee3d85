"""Threads by state against processes whose state is known, and load averages against /proc/loadavg."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.interfaces import ProbeReading
from api.snapshot import LoadAverages, ThreadStates
from probes import bpf
from probes.load_average import DECAYS, FIXED_POINT_ONE, FSHIFT, fixed_power_int
from probes.loader import Loaded, load
from probes.threads import ITERATOR_NAME, NO_THREADS, ThreadsProbe, decode, job, make_probe, open_threads
from tests.builders.waiting import until
from tests.kernel.open_probes import opened
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel

SLOW_S = 120.0
"""For two dozen processes to start on an emulated machine."""
VFORK = """
import os, sys
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
"""
"""The child shares the parent's memory until it becomes another program, so the parent sleeps uninterruptibly; and the child
cannot become one before another process writes to the FIFO that it opens first."""
ZOMBIE = """
import os, time
if os.fork() == 0: os._exit(0)
time.sleep(600)
"""
READ_DISK = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
buffer = mmap.mmap(-1, 1 << 20)
while True:
    if os.preadv(fd, [buffer], 0) == 0: break
"""


@pytest.fixture
def probe() -> Iterator[ThreadsProbe]:
    with opened(open_threads) as source:
        yield source


@contextmanager
def vforked(group: TestCgroup, count: int, fifo: Path) -> Iterator[None]:
    """`count` processes in uninterruptible sleep, and as many children that sleep."""
    os.mkfifo(fifo)
    parents = [group.start([sys.executable, "-c", VFORK, str(fifo)]) for _ in range(count)]
    try:
        yield
    finally:
        # Children that are not there yet come to an end too, as long as the FIFO is written to.
        until(lambda: _released(fifo, parents), seconds=SLOW_S)


def _released(fifo: Path, parents: list[subprocess.Popen[bytes]]) -> bool:
    with suppress(OSError):
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    return all(parent.poll() is not None for parent in parents)


def states_of(observed: ProbeReading, group: TestCgroup) -> ThreadStates:
    counts = observed.cgroups[group.id]["threads_by_state"]
    assert isinstance(counts, ThreadStates)
    return counts


def test_three_burn_five_sleep_and_two_wait_for_their_children(probe: ThreadsProbe, tmp_path: Path) -> None:
    hierarchy = require_writable_cgroups()
    # The two children of the uninterruptible ones sleep as well.
    expected = ThreadStates(runnable=3, uninterruptible=2, iowait=0, sleeping=5 + 2)
    with cgroup(hierarchy, "states") as group, cgroup(hierarchy, "empty") as empty:
        for _ in range(5):
            group.start(["sleep", "600"])
        live = {group.id: group.path, empty.id: empty.path}

        def look() -> tuple[ThreadStates, ThreadStates]:
            observed = probe.read(live)
            time.sleep(0.01)
            return states_of(observed, group), states_of(observed, empty)

        with vforked(group, 2, tmp_path / "fifo"):
            until(lambda: states_of(probe.read(live), group).uninterruptible == 2, seconds=SLOW_S)
            group.burn(3)
            # A process that has just started may wait for its program's pages; then it is 20 times in a row as expected.
            until(lambda: all(look() == (expected, NO_THREADS) for _ in range(20)), look, seconds=SLOW_S)
            listed = group.file("cpu", "tasks" if "cpu" in hierarchy.v1 else "cgroup.threads").read_text().split()
            assert len(listed) == 3 + 5 + 2 + 2
        until(lambda: states_of(probe.read(live), group).uninterruptible == 0)


def test_a_thread_counts_where_it_is_even_if_its_cpu_weight_comes_from_above(probe: ThreadsProbe) -> None:
    """On version 2 the inner cgroup does not have the cpu controller, because the outer one does not give it."""
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "outer") as outer:
        inner = TestCgroup(hierarchy, f"{outer.path}/inner")
        try:
            inner.start(["sleep", "600"])
            live = {outer.id: outer.path, inner.id: inner.path}
            until(lambda: states_of(probe.read(live), inner).sleeping == 1)
            assert states_of(probe.read(live), outer).sleeping == 0
        finally:
            inner.close()


def test_the_dead_are_not_counted(probe: ThreadsProbe) -> None:
    with cgroup(require_writable_cgroups(), "zombie") as group:
        parent = group.start([sys.executable, "-c", ZOMBIE])
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        until(lambda: any(_is_zombie(child) for child in children.read_text().split()))
        counts = states_of(probe.read({group.id: group.path}), group)
    assert (counts.runnable, counts.uninterruptible, counts.sleeping) == (0, 0, 1)


def _is_zombie(pid: str) -> bool:
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_a_thread_that_reads_from_a_disk_is_in_iowait(tmp_path: Path) -> None:
    """One thread that does nothing else: most of the time in iowait, never more than it is uninterruptible."""
    file = tmp_path / "data"
    file.write_bytes(os.urandom(4 << 20))
    os.sync()
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"{tmp_path} is not on a disk that can be read directly: {error.strerror}")
    with opened(open_threads) as probe, cgroup(require_writable_cgroups(), "reads") as group:
        reader = group.start([sys.executable, "-c", READ_DISK, str(file)])
        live = {group.id: group.path}
        until(lambda: bool(states_of(probe.read(live), group).iowait))
        observed = [states_of(probe.read(live), group) for _ in range(200) if time.sleep(0.003) is None]
        assert reader.poll() is None
    assert all(each.runnable + each.uninterruptible + each.sleeping == 1 for each in observed)
    assert all(each.iowait == each.uninterruptible for each in observed)
    assert sum(each.iowait or 0 for each in observed) > 20


@pytest.fixture
def census() -> Iterator[Loaded]:
    with opened(open_threads):
        pass
    loaded = load(job())
    yield loaded
    loaded.close()


def test_every_thread_of_the_machine_is_counted_once(census: Loaded) -> None:
    """Those that /proc lists before and after, and at most a few more that were there only in between."""
    before = _threads_of_proc()
    counted = sum(
        each.runnable + each.uninterruptible + each.sleeping for each in decode(census.records(ITERATOR_NAME)).values()
    )
    after = _threads_of_proc()
    assert len(before & after) <= counted <= len(before | after) + 10


def _threads_of_proc() -> set[str]:
    """All that are not dead, but for processes that a sandbox hides from everybody's looks, root's and BPF's too."""
    counts = set()
    for stat in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        try:
            (stat.parent / "ns/pid").readlink()
            text = stat.read_text(errors="replace")
        except OSError:
            continue
        if text.rpartition(") ")[2][:1] not in ("Z", "X"):
            counts.add(stat.parent.name)
    return counts


def test_loads_add_up_to_the_nodes_own(census: Loaded, tmp_path: Path) -> None:
    """Twenty uninterruptible threads for three samples are 20 * (1 - 0.92**3) = 4.4 of load. What /proc/loadavg had before
    decays meanwhile; the rest of it must be the sum over all cgroups here. The node takes its samples at other instants:
    each thread that happens to run in one and not in the other makes a difference of 0.08, and eighteen are allowed."""
    hierarchy, samples = require_writable_cgroups(), 3
    with cgroup(hierarchy, "load") as group, vforked(group, 20, tmp_path / "fifo"):
        until(
            lambda: decode(census.records(ITERATOR_NAME)).get(group.id, NO_THREADS).uninterruptible == 20,
            seconds=SLOW_S,
        )
        earlier = node_load()
        until(lambda: node_load() != earlier, "the node takes a sample every five seconds")
        probe, before, began = make_probe(census), node_load(), time.monotonic()
        while time.monotonic() - began < 5 * samples + 0.5:
            time.sleep(0.02)
            observed = probe.read(every_cgroup(hierarchy))
        loads = {number: values["load"] for number, values in observed.cgroups.items() if "load" in values}
        node = node_load() - before * fixed_power_int(DECAYS[0], FSHIFT, samples) / FIXED_POINT_ONE
        own = loads[group.id]
    assert isinstance(own, LoadAverages)
    assert own.load1 == pytest.approx(20 * (1 - (DECAYS[0] / FIXED_POINT_ONE) ** samples), abs=0.01)
    assert own.runnable1 == 0
    assert sum(each.load1 for each in loads.values() if isinstance(each, LoadAverages)) == pytest.approx(node, abs=1.5)


def every_cgroup(hierarchy: Hierarchy) -> dict[int, str]:
    root = hierarchy.primary
    return {Path(path).stat().st_ino: path.removeprefix(str(root)) or "/" for path, _, _ in os.walk(root)}


def node_load() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


def test_statistics_count_a_run_for_each_thread(census: Loaded) -> None:
    held = bpf.enable_stats()
    try:
        before = census.stats()[ITERATOR_NAME].run_count
        counted = sum(
            each.runnable + each.uninterruptible + each.sleeping
            for each in decode(census.records(ITERATOR_NAME)).values()
        )
        runs = census.stats()[ITERATOR_NAME].run_count - before
    finally:
        os.close(held)
    assert counted <= runs, "zombies are looked at as well, and the end is"
