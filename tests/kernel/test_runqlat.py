"""Run-queue waits against arithmetic and against the kernel's own accounting, on real cgroups with known workloads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from api.histogram import BOUNDS_NS, slot_of
from api.interfaces import Unavailable
from api.rates import runq_latency_delta
from api.snapshot import RunqLatency
from probes import bpf
from probes.loader import load
from probes.maps import cpu_id_limit
from probes.per_cgroup_probe import ROOT_CGROUP_ID
from probes.runqlat import FORMS, RunqLatencyProbe, job, open_runqlat
from tests.builders.waiting import until
from tests.kernel.blame_window import weigh
from tests.kernel.open_probes import LAST_CPU, PINNED, Schedstat, probe, probe_fixture
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel

MS = 1_000_000
NOTHING = RunqLatency(sum_ns=0, count=0, slots=(0,) * 27)
SLEEPER = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
if int(sys.argv[2]): os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
print("ready", flush=True)
while os.read(0, 1): pass
"""
"""Blocks on its standard input: each byte there is one wakeup, and one wait until it runs."""
NAPPING = """
import time
while True:
    time.sleep(0.002)
    end = time.thread_time() + 0.0005
    while time.thread_time() < end: pass
"""


NAPPER = """
import sys, time
for _ in range(int(sys.argv[1])):
    end = time.thread_time() + 0.0007
    while time.thread_time() < end: pass
    print("asleep", flush=True)
    time.sleep(0.04)
"""


def growth(before: Mapping[int, RunqLatency], after: Mapping[int, RunqLatency], cgroup_id: int) -> RunqLatency:
    change = runq_latency_delta(before.get(cgroup_id, NOTHING), after[cgroup_id])
    assert change is not None
    return change


source = probe_fixture(open_runqlat, FORMS)


def test_two_burners_on_one_cpu_wait_for_each_other(source: RunqLatencyProbe) -> None:
    """A burner is always runnable, so what it did not run of T it waited; two of equal weight get the same share."""
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "a") as first, cgroup(hierarchy, "b") as second:
        groups = (first, second)
        burners = [group.start([sys.executable, "-c", PINNED, str(LAST_CPU)]) for group in groups]
        until(lambda: all(group.id in source.read({}) for group in groups))
        time.sleep(0.5)
        before, started = source.read({}), time.monotonic_ns()
        stats = [Schedstat(burner.pid) for burner in burners]
        time.sleep(2.5)
        after, elapsed = source.read({}), time.monotonic_ns() - started
        kernel = [stat.growth() for stat in stats]
        waits = [growth(before, after, group.id) for group in groups]
    for wait, (ran, waited, runs) in zip(waits, kernel, strict=True):
        assert wait.sum_ns == pytest.approx(elapsed - ran, rel=0.05)
        assert wait.sum_ns == pytest.approx(waited, rel=0.05)
        assert wait.count == pytest.approx(runs, rel=0.05, abs=5)
        assert wait.slots is not None
        assert sum(wait.slots) == wait.count
    assert waits[0].sum_ns == pytest.approx(waits[1].sum_ns, rel=0.15)


class Hog:
    """A real-time program that wakes a sleeper on its own CPU and then keeps that CPU for a known time."""

    CODE = """
import os, sys, time
cpu, sleeper, hold_s, times = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
os.sched_setaffinity(0, {cpu})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
for _ in range(times):
    time.sleep(0.06)
    os.write(sleeper, b"x")
    print("holding", flush=True)
    end = time.monotonic() + hold_s
    while time.monotonic() < end: pass
"""

    def __init__(self, group: TestCgroup, *, fifo: bool, hold_s: float, times: int) -> None:
        reader, writer = os.pipe()
        # The sleeper is started by hand: its standard input is the hog's to write to.
        self.sleeper = subprocess.Popen(
            [sys.executable, "-c", SLEEPER, str(LAST_CPU), str(int(fifo))], stdin=reader, stdout=subprocess.PIPE
        )
        group.processes.append(self.sleeper)
        for directory in group.dirs:
            (directory / "cgroup.procs").write_text(str(self.sleeper.pid))
        assert self.sleeper.stdout is not None
        self.ready = self.sleeper.stdout.readline() == b"ready\n"
        self.hog = subprocess.Popen(
            [sys.executable, "-c", self.CODE, str(LAST_CPU), str(writer), str(hold_s), str(times)],
            pass_fds=[writer],
            stdout=subprocess.PIPE,
        )
        group.processes.append(self.hog)
        os.close(reader)
        os.close(writer)

    def holdings(self) -> Iterator[bytes]:
        """One line each time that the hog has woken the sleeper and taken the CPU."""
        assert self.hog.stdout is not None
        yield from self.hog.stdout

    def finish(self) -> None:
        assert self.hog.wait() == 0
        assert self.sleeper.wait() == 0
        for process in (self.hog, self.sleeper):
            assert process.stdout is not None
            process.stdout.close()


def require_fifo(group: TestCgroup) -> None:
    """Real-time tasks inside a version 1 cgroup need a budget of its own."""
    budget = group.file("cpu", "cpu.rt_runtime_us")
    if budget.exists():
        try:
            budget.write_text("100000")
        except OSError as error:
            pytest.skip(f"{budget} gives no real-time budget: {error.strerror}")


@pytest.mark.parametrize("fifo", [False, True], ids=["normal", "fifo"])
def test_a_cpu_held_for_20_ms_puts_the_wait_into_its_slot(source: RunqLatencyProbe, fifo: bool) -> None:
    """20 ms lies in (16.384, 32.768]; a FIFO sleeper shows that the run queue is found for every scheduling class."""
    times = 15
    with cgroup(require_writable_cgroups(), "held") as group:
        if fifo:
            require_fifo(group)
        workload = Hog(group, fifo=fifo, hold_s=0.020, times=times)
        assert workload.ready
        before = source.read({})
        assert len(list(workload.holdings())) == times
        workload.finish()
        wait = growth(before, source.read({}), group.id)
    assert wait.slots is not None
    slot = slot_of(20 * MS)
    assert BOUNDS_NS[slot] == 32_768_000
    assert times - 2 <= wait.slots[slot] <= times
    assert sum(wait.slots[slot + 1 :]) <= 2
    assert 19 * MS * (times - 2) <= wait.sum_ns <= 35 * MS * times


def test_a_task_moved_while_it_waits_keeps_its_whole_wait(source: RunqLatencyProbe) -> None:
    """The scheduler stamps it again on the other CPU; the 10 ms before that must not be lost."""
    others = os.sched_getaffinity(0) - {LAST_CPU}
    if not others:
        pytest.skip("needs two CPUs")
    times = 10
    with cgroup(require_writable_cgroups(), "moved") as group:
        workload = Hog(group, fifo=False, hold_s=0.040, times=times)
        assert workload.ready
        before, waited = source.read({}), 0
        stat = Path(f"/proc/{workload.sleeper.pid}/stat")
        for _ in workload.holdings():
            time.sleep(0.010)
            # The hog may have been preempted for it: then it sleeps again, and is moved in its sleep.
            waited += stat.read_text().rpartition(")")[2].split()[0] == "R"
            os.sched_setaffinity(workload.sleeper.pid, others)
            time.sleep(0.045)
            os.sched_setaffinity(workload.sleeper.pid, {LAST_CPU})
        workload.finish()
        wait = growth(before, source.read({}), group.id)
    assert waited >= times // 2
    # Between the look at it and the move it may have run after all. Where what was waited before a move is lost, none is long.
    full_wait = 0.7 * waited
    assert 9 * MS * full_wait <= wait.sum_ns <= 45 * MS * times
    assert wait.slots is not None
    assert sum(wait.slots[slot_of(9 * MS) :]) >= full_wait


def move_in_its_sleep(group: TestCgroup, cpus: Sequence[int]) -> None:
    """A process that naps 100 times between burners, sent to the other CPU in each nap."""
    for cpu in cpus:
        group.start([sys.executable, "-c", PINNED, str(cpu)])
    napper = subprocess.Popen([sys.executable, "-c", NAPPER, "100"], stdout=subprocess.PIPE)
    group.processes.append(napper)
    for directory in group.dirs:
        (directory / "cgroup.procs").write_text(str(napper.pid))
    assert napper.stdout is not None
    with napper.stdout as naps:
        for turn, _ in enumerate(naps):
            os.sched_setaffinity(napper.pid, {cpus[turn % 2]})
    assert napper.wait() == 0


@pytest.mark.parametrize("form", ["tp_btf", "raw_tp"])
def test_a_task_moved_in_its_sleep_has_not_waited(form: str) -> None:
    """Since Linux 6.12 a task may sleep on in the run queue; moving it there stamps it as if it waited, for 40 ms here."""
    cpus = sorted(os.sched_getaffinity(0))[-2:]
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    hierarchy = require_writable_cgroups()
    with probe(form) as source, cgroup(hierarchy, "napper") as group:
        # The burners' waits for other work on this machine would count as well.
        weigh(group, 100 * 1024)
        before, lost = source.read({}), source.lost().asleep
        move_in_its_sleep(group, cpus)
        wait, lost = growth(before, source.read({}), group.id), source.lost().asleep - lost
    if lost < 3:
        pytest.skip(f"this kernel kept a sleeping task in the run queue {lost} times only")
    assert wait.slots is not None
    assert BOUNDS_NS[slot_of(40 * MS) - 1] < 33 * MS
    assert sum(wait.slots[slot_of(40 * MS) :]) < lost / 2
    assert wait.count >= 100 - lost


@pytest.mark.parametrize("form", ["tp_btf", "raw_tp"])
def test_a_seat_that_is_taken_over_from_a_task_moved_in_its_sleep_is_a_loss(form: str) -> None:
    """One task slot for all tasks: the next task overwrites it, and the mark that the stamp counts sleep is lost."""
    cpus = sorted(os.sched_getaffinity(0))[-2:]
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    with probe(form):
        pass
    small = job((form,), cpu_id_limit())
    small = msgspec.structs.replace(small, constants={**small.constants, "TASK_SLOTS": 1})
    with load(small) as loaded, cgroup(require_writable_cgroups(), "napper") as group:
        if "dtse_rql_move" not in loaded.programs:
            pytest.skip("this kernel takes sleeping tasks out of the run queue")
        source = RunqLatencyProbe(loaded)
        move_in_its_sleep(group, cpus)
        source.read({})
        lost = source.lost()
    assert lost.task_slot > max(3, lost.asleep)
    assert (source.lost_events or 0) >= lost.task_slot


def test_forms_see_the_same_waits() -> None:
    """Of one load at one time, with tasks that move: same sums, same long waits. Short ones differ as runqlat.py says."""
    hierarchy = require_writable_cgroups()
    with probe("tp_btf") as stamped, probe("classic") as classic, cgroup(hierarchy, "busy") as busy:
        busy.burn(3)
        for _ in range(2):
            busy.start([sys.executable, "-c", NAPPING])
        sources = (stamped, classic)
        until(lambda: all(busy.id in source.read({}) for source in sources))
        time.sleep(0.5)
        before = [source.read({}) for source in sources]
        time.sleep(3)
        after = [source.read({}) for source in sources]
        burner_waits, kernel_waits = (growth(b, a, busy.id) for b, a in zip(before, after, strict=True))
    assert burner_waits.sum_ns == pytest.approx(kernel_waits.sum_ns, rel=0.03)
    assert burner_waits.count == pytest.approx(kernel_waits.count, rel=0.03)
    assert burner_waits.slots is not None
    assert kernel_waits.slots is not None
    # Waits near the bound of slot 7 fall to either side: on a busy machine 4.6 % of these did.
    assert sum(burner_waits.slots[7:]) == pytest.approx(sum(kernel_waits.slots[7:]), rel=0.08)


def _own_cgroups() -> list[str]:
    return Path("/proc/self/cgroup").read_text().splitlines()


def test_tasks_outside_every_cgroup_count_as_the_roots(source: RunqLatencyProbe) -> None:
    """A new session gets an autogroup, whose task group has no cgroup."""
    groups = {c: path for _, names, path in (line.split(":", 2) for line in _own_cgroups()) for c in names.split(",")}
    here = groups.get("cpu", groups.get(""))
    if here != "/":
        pytest.skip(f"the tests run inside the cgroup {here}, not in the root")
    before = source.read({})
    nap = "import time\nfor _ in range(300): time.sleep(0.001)"
    subprocess.run([sys.executable, "-c", nap], start_new_session=True, check=True)
    assert growth(before, source.read({}), ROOT_CGROUP_ID).count >= 300


def test_a_dead_cgroup_is_forgotten_after_two_listings_and_its_place_used_again() -> None:
    hierarchy = require_writable_cgroups()
    with probe("tp_btf", "raw_tp", "classic") as source:
        with cgroup(hierarchy, "dead") as dead:
            number = dead.id
            dead.start([sys.executable, "-c", "pass"]).wait()
            assert number in source.read({number: dead.path})
            assert number in source.read({number: dead.path})
        listing = {ROOT_CGROUP_ID: "/"}
        assert number in source.read(listing)
        assert number in source.read(listing), "the same listing twice is one listing"
        assert number in source.read(dict(listing)), "retired in this read, gone from the next"
        assert number not in source.read(dict(listing))
        assert number not in source.read({}), "an empty listing says nothing"


def test_counters_survive_listings_that_have_their_cgroup_again() -> None:
    hierarchy = require_writable_cgroups()
    with probe("tp_btf", "raw_tp", "classic") as source, cgroup(hierarchy, "late") as late:
        late.start([sys.executable, "-c", "pass"]).wait()
        first = source.read({ROOT_CGROUP_ID: "/"})[late.id]
        assert source.read({late.id: late.path})[late.id].count >= first.count
        assert source.read({ROOT_CGROUP_ID: "/"})[late.id].count >= first.count


def test_statistics_count_every_run(source: RunqLatencyProbe) -> None:
    held = bpf.enable_stats()
    try:
        before, waits = source.stats()["dtse_runqlat"], source.read({})
        time.sleep(0.5)
        after, waits_after = source.stats()["dtse_runqlat"], source.read({})
    finally:
        os.close(held)
    counted = sum(w.count for w in waits_after.values()) - sum(w.count for w in waits.values())
    assert after.run_count - before.run_count >= counted * 0.95 > 0
    assert after.run_time_ns > before.run_time_ns


def test_a_closed_probe_says_so(source: RunqLatencyProbe) -> None:
    source.close()
    source.close()
    with pytest.raises(Unavailable, match="is closed"):
        source.read({})
