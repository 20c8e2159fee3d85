"""Blame against computable workloads: on one CPU, a task that is always runnable waits exactly while others run.
Each neighbour's part is therefore the CPU time that the kernel accounts for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from api.snapshot import Blame
from cli.probe.commands import cgroup_paths
from probes.btf import Btf, BtfError
from probes.runqlat import RunqLatencyProbe
from tests.builders.waiting import until
from tests.kernel.blame_window import (
    FORMS,
    MS,
    SHARES,
    WINDOW_S,
    Watched,
    grown,
    limit,
    live,
    parts,
    pin,
    several,
    shoot,
    shoot_at_arrival,
    throttled_ns,
    watch,
    weigh,
)
from tests.kernel.open_probes import LAST_CPU, Schedstat, probe
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.kernel.test_runqlat import Hog

pytestmark = pytest.mark.kernel

FIFO_HALF = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
while True:
    end = time.monotonic() + 0.010
    while time.monotonic() < end: pass
    time.sleep(0.010)
"""
PASS = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
reader, writer = int(sys.argv[2]), int(sys.argv[3])
while os.read(reader, 1): os.write(writer, b"x")
"""
"""Passes on what it gets. Two of them play table tennis once the first byte is written."""

DIG = """
import mmap, os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
random, page = os.open("/dev/urandom", os.O_RDONLY), mmap.mmap(-1, 1 << 20)
while True: os.readv(random, [page] * 1000)
"""
"""Stays in the kernel for seconds at a time, where no quota can stop it since Linux 6.18."""


@pytest.fixture(params=FORMS)
def source(request: pytest.FixtureRequest) -> Iterator[RunqLatencyProbe]:
    with probe(request.param) as opened:
        assert opened.form == request.param
        assert opened.has_blame, [str(refusal) for refusal in opened.refused]
        yield opened


def play(first: TestCgroup, second: TestCgroup) -> None:
    """Two processes that pass a byte back and forth on one CPU, each in a cgroup of its own."""
    ends = [os.pipe(), os.pipe()]
    for group, (reader, _), (_, writer) in ((first, *ends), (second, *reversed(ends))):
        argv = [sys.executable, "-c", PASS, str(LAST_CPU), str(reader), str(writer)]
        player = subprocess.Popen(argv, pass_fds=[reader, writer])
        group.processes.append(player)
        for directory in group.dirs:
            (directory / "cgroup.procs").write_text(str(player.pid))
    os.write(ends[0][1], b"x")
    for fd in (*ends[0], *ends[1]):
        os.close(fd)


@pytest.mark.parametrize("shares", [(1, 2), (1, 2, 4)], ids=["two", "three"])
def test_each_neighbour_is_to_blame_for_what_it_ran(source: RunqLatencyProbe, shares: tuple[int, ...]) -> None:
    """Within 5 % of what the kernel says that each burner ran. Together they ran all that the victim waited, but for what
    the rest of the machine took of this CPU meanwhile."""
    with several("victim", *(f"burner{k}" for k in range(len(shares)))) as (victim, *burners):
        pin(victim)
        for burner, weight in zip(burners, shares, strict=True):
            weigh(burner, weight * SHARES)
            pin(burner)
        # Where the machine is so busy that this test waits itself, the two readings of a window are not of one moment.
        for _ in range(5):
            window = watch(source, [victim, *burners])
            if window.before.late_ns + window.after.late_ns < 0.02 * min(window.ran(burner) for burner in burners):
                break
    blame = window.blame(victim)
    for burner in burners:
        assert blame.by_cgroup[burner.path] == pytest.approx(window.ran(burner), rel=0.05)
    assert blame.by_cgroup.get(victim.path, 0) < 0.01 * window.elapsed
    assert parts(blame) == pytest.approx(window.elapsed - window.ran(victim), rel=0.05)
    assert blame.throttled_ns == 0
    assert [window.ran(burner) for burner in burners] == sorted(window.ran(burner) for burner in burners)


def test_parts_add_up_to_the_waits_to_the_nanosecond(source: RunqLatencyProbe) -> None:
    """Of cgroups whose tasks have ended: nothing is counted between the two reads."""
    with several("one", "two", "quota") as groups:
        limit(groups[2])
        for group in groups:
            group.burn(2)
            pin(group)
        time.sleep(1.5)
        for group in groups:
            for process in group.processes:
                process.kill()
                process.wait()
        shot = shoot(source, groups)
    for group in groups:
        assert parts(shot.blames[group.path]) == shot.waits[group.path].sum_ns > 20 * MS


def test_throttled_time_is_blamed_on_no_other_cgroup(source: RunqLatencyProbe) -> None:
    """20 ms of each 100 ms for one that wants it all. The kernel says how long it was throttled; what it waited besides is
    what it had to wait for others while its quota lasted."""
    with several("quota") as (alone,):
        limit(alone)
        pin(alone)
        window = watch(source, [alone])
    blame = window.blame(alone)
    assert window.throttled(alone) > 0.2 * window.elapsed
    assert blame.throttled_ns == pytest.approx(window.throttled(alone), rel=0.05)
    contended = window.elapsed - window.ran(alone) - window.throttled(alone)
    assert parts(blame) - blame.throttled_ns == pytest.approx(contended, abs=0.05 * window.elapsed)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_quota_did_before_the_probe_was_opened_is_no_part_of_any_wait(form: str) -> None:
    """The kernel's clock of a group that was throttled for 0.3 s, whose quota is lifted now, says so for ever."""
    with several("quota", "neighbour") as (victim, neighbour):
        limit(victim)
        pin(victim)
        pin(neighbour)
        until(lambda: throttled_ns(victim) > 300 * MS)
        limit(victim, -1)
        time.sleep(0.3)
        with probe(form) as source:
            until(lambda: source.read(live(victim))[victim.id].count > 5)
            blame = source.read_blame(live(victim, neighbour))[victim.id]
    assert blame.throttled_ns == 0
    assert parts(blame) > 5 * MS


def test_a_neighbour_is_not_to_blame_for_what_it_ran_while_the_quota_was_used_up(source: RunqLatencyProbe) -> None:
    """The neighbour has the CPU most of the time, and most of that time does not matter to the victim."""
    with several("quota", "neighbour") as (victim, neighbour):
        limit(victim)
        pin(victim)
        pin(neighbour)
        window = watch(source, [victim, neighbour])
    blame = window.blame(victim)
    assert window.throttled(victim) > 0.2 * window.elapsed
    assert blame.throttled_ns == pytest.approx(window.throttled(victim), rel=0.05)
    contended = window.elapsed - window.ran(victim) - window.throttled(victim)
    rest = sum(ns for path, ns in blame.by_cgroup.items() if path != neighbour.path)
    rest += blame.higher_class_ns + blame.other_ns
    assert blame.by_cgroup[neighbour.path] + rest == pytest.approx(contended, abs=0.05 * window.elapsed)
    assert blame.by_cgroup[neighbour.path] < 0.75 * window.ran(neighbour)
    assert window.blame(neighbour).by_cgroup[victim.path] == pytest.approx(window.ran(victim), rel=0.05)
    assert window.blame(neighbour).throttled_ns == 0


def test_several_tasks_of_one_quota_are_throttled_each_by_itself(source: RunqLatencyProbe) -> None:
    """Three of them on one CPU: at any time each runs, waits for the others, or is throttled with them."""
    with several("quota") as (group,):
        limit(group)
        for _ in range(3):
            pin(group)
        window = watch(source, [group])
    blame = window.blame(group)
    assert window.throttled(group) > 0.2 * window.elapsed
    assert blame.throttled_ns == pytest.approx(3 * window.throttled(group), rel=0.06)
    assert blame.by_cgroup[group.path] == pytest.approx(2 * window.ran(group), rel=0.12)


def test_a_task_that_is_not_throttled_with_its_group_waits_for_the_running_task(source: RunqLatencyProbe) -> None:
    """One task is throttled and the other one, in the kernel, is not: it waits exactly while the neighbour runs."""
    try:
        Btf.read().field("task_struct", "throttled")
    except BtfError as error:
        pytest.skip(f"this kernel throttles all tasks of a group at once: {error}")
    with several("quota", "neighbour") as (victim, neighbour):
        limit(victim)
        pin(neighbour)
        pin(victim)
        victim.start([sys.executable, "-c", DIG, str(LAST_CPU)])
        window = watch(source, [neighbour, victim])
    blame = window.blame(victim)
    assert window.ran(victim) > 0.3 * window.elapsed, "more than its quota"
    assert blame.by_cgroup[neighbour.path] > 0.8 * window.ran(neighbour)


def test_groups_below_a_quota_are_held_back_by_it_and_not_by_each_other(source: RunqLatencyProbe) -> None:
    """Leaves are distinguished, and time throttled by the quota above is not blamed on the sibling that used it."""
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "parent") as parent, ExitStack() as stack:
        if hierarchy.mode == "v2":
            parent.file("cpu", "cgroup.subtree_control").write_text("+cpu")
        leaves = []
        for name in ("a", "b"):
            leaf = TestCgroup(hierarchy, f"{parent.path}/{name}")
            stack.callback(leaf.close)
            leaves.append(leaf)
        weigh(parent, SHARES)
        limit(parent, 40_000)
        for leaf in leaves:
            pin(leaf)
        window = watch(source, leaves, also=[parent])
    held = window.throttled(parent)
    assert held > 0.2 * window.elapsed
    first, second = leaves
    for victim, sibling in ((first, second), (second, first)):
        blame = window.blame(victim)
        assert blame.by_cgroup[sibling.path] == pytest.approx(window.ran(sibling), rel=0.08)
        assert blame.throttled_ns == pytest.approx(held, rel=0.1)
        assert parts(blame) == pytest.approx(window.elapsed - window.ran(victim), rel=0.05)


def test_real_time_tasks_are_distinguished_from_neighbours(source: RunqLatencyProbe) -> None:
    with several("victim", "neighbour") as (victim, neighbour):
        pin(victim)
        pin(neighbour)
        # In the root cgroup: real-time tasks inside a version 1 cgroup need a budget of its own.
        fifo = subprocess.Popen([sys.executable, "-c", FIFO_HALF, str(LAST_CPU)])
        try:
            until(lambda: os.sched_getscheduler(fifo.pid) == os.SCHED_FIFO)
            time.sleep(0.5)
            before, stat = shoot_at_arrival(source, [victim, neighbour]), Schedstat(fifo.pid)
            time.sleep(WINDOW_S)
            window, ran = Watched(before, shoot_at_arrival(source, [victim, neighbour])), stat.growth()[0]
        finally:
            fifo.kill()
            fifo.wait()
    for group, other in ((victim, neighbour), (neighbour, victim)):
        blame = window.blame(group)
        assert blame.higher_class_ns == pytest.approx(ran, rel=0.08)
        assert blame.by_cgroup[other.path] == pytest.approx(window.ran(other), rel=0.05)
        assert "/" not in blame.by_cgroup or blame.by_cgroup["/"] < 0.5 * ran


def test_tasks_of_one_cgroup_wait_for_each_other(source: RunqLatencyProbe) -> None:
    with several("crowd") as (crowd,):
        for _ in range(3):
            pin(crowd)
        window = watch(source, [crowd])
    blame = window.blame(crowd)
    assert blame.by_cgroup[crowd.path] == pytest.approx(2 * window.ran(crowd), rel=0.08)


def test_neighbours_that_swap_the_cpu_all_the_time_do_not_hide(source: RunqLatencyProbe) -> None:
    """Two cgroups pass a byte back and forth, tens of thousands of changes of hands while the victim waits once: more than
    the CPU remembers one by one."""
    with several("victim", "ping", "pong") as (victim, ping, pong):
        pin(victim)
        play(ping, pong)
        window = watch(source, [victim, ping, pong])
    blame = window.blame(victim)
    assert parts(blame) == pytest.approx(window.elapsed - window.ran(victim), rel=0.05)
    for player in (ping, pong):
        assert blame.by_cgroup[player.path] == pytest.approx(window.ran(player), rel=0.08)


def test_a_task_that_is_moved_while_it_waits_leaves_that_part_to_the_cpu_that_it_waited_on(
    source: RunqLatencyProbe,
) -> None:
    """A real-time task holds the CPU for 40 ms; after 10 of them the waiting one is sent to another CPU."""
    others, times = os.sched_getaffinity(0) - {LAST_CPU}, 10
    if not others:
        pytest.skip("needs two CPUs")
    with several("moved") as (group,):
        workload = Hog(group, fifo=False, hold_s=0.040, times=times)
        assert workload.ready
        before = shoot(source, [group])
        for _ in workload.holdings():
            time.sleep(0.010)
            os.sched_setaffinity(workload.sleeper.pid, others)
            time.sleep(0.045)
            os.sched_setaffinity(workload.sleeper.pid, {LAST_CPU})
        workload.finish()
        window = Watched(before, shoot(source, [group]))
    blame = window.blame(group)
    assert 9 * MS * (times - 1) <= blame.higher_class_ns <= 45 * MS * times
    assert parts(blame) == pytest.approx(window.waited(group), abs=MS)


def test_on_all_cpus_little_is_left_without_a_name(source: RunqLatencyProbe) -> None:
    """Six burners of three cgroups on all CPUs, so that the scheduler moves them: what it cannot tell stays small."""
    with several(*"abc") as groups:
        for group in groups:
            group.burn(2)
        until(lambda: all(source.read(live(*groups))[group.id].count > 20 for group in groups))
        time.sleep(0.5)
        before, listed = source.read_blame(cgroup_paths()), cgroup_paths()
        time.sleep(WINDOW_S)
        waits, after = source.read(listed), source.read_blame(listed)
        growth = [grown(before[group.id], after[group.id]) for group in groups]
        sums = [(waits[group.id].sum_ns, parts(after[group.id])) for group in groups]
    for blame, (waited, split) in zip(growth, sums, strict=True):
        assert blame.other_ns < 0.1 * parts(blame)
        assert split == pytest.approx(waited, rel=0.01), (
            "one reading: but for what ended meanwhile they are the same waits"
        )


def test_numbers_only_grow_while_aggressors_come_and_go(source: RunqLatencyProbe) -> None:
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "victim") as victim, cgroup(hierarchy, "steady") as steady:
        pin(victim)
        pin(steady)
        until(lambda: source.read(live(victim, steady))[victim.id].count > 20)
        latest = source.read_blame(live(victim, steady))[victim.id]
        blamed_ns = 0
        for turn in range(6):
            guest = TestCgroup(hierarchy, f"/dioptase-test-{os.getpid()}-guest{turn}")
            try:
                pin(guest)
                with_guest = live(victim, steady, guest)
                path = guest.path

                def blamed(live_: dict[int, str] = with_guest, path: str = path) -> bool:
                    return source.read_blame(live_)[victim.id].by_cgroup.get(path, 0) > 30 * MS

                until(blamed)
                window = source.read_blame(with_guest)[victim.id]
                _check_growth(latest, window)
                blamed_ns += window.by_cgroup[guest.path]
            finally:
                guest.close()
            latest = window
            for _ in range(3):
                window = source.read_blame(live(victim, steady))[victim.id]
                _check_growth(latest, window, removed=guest.path)
                latest = window
        for process in (*victim.processes, *steady.processes):
            process.kill()
            process.wait()
        shot = shoot(source, [victim, steady])
    # What was reported for the guests is removed with them and not added to the rest; nor is what they did between the
    # last reading and their end.
    rest_ns = shot.waits[victim.path].sum_ns - blamed_ns
    assert rest_ns - blamed_ns / 2 <= parts(shot.blames[victim.path]) <= rest_ns + MS
    assert shot.blames[victim.path].other_ns < blamed_ns / 2
    assert set(shot.blames[victim.path].by_cgroup) <= {"/", victim.path, steady.path}


def _check_growth(before: Blame, after: Blame, removed: str = "") -> None:
    assert after.other_ns >= before.other_ns
    assert after.throttled_ns >= before.throttled_ns
    assert after.higher_class_ns >= before.higher_class_ns
    assert set(before.by_cgroup) - set(after.by_cgroup) <= {removed}
    assert removed not in after.by_cgroup
    assert all(after.by_cgroup[path] >= ns for path, ns in before.by_cgroup.items() if path != removed)
