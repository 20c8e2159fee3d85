"""Who made whom wait, against workloads whose truth can be computed: on one CPU, whoever is always runnable waits exactly
while others run, so each neighbour's part is what the kernel's own books say that it ran."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import msgspec
import pytest

from api.facts import Blame, Wait
from api.ports import Unavailable
from cli.probes.screen import cgroup_paths
from probes.blame import beside, open_blame
from probes.groups import ROOT_ID
from probes.loader import Form, Job, load
from probes.maps import possible_cpus
from probes.runqlat import RunqLat, job, open_waits
from tests.kernel.probing import LAST_CPU, PINNED, Schedstat, eventually, probe
from tests.kernel.support import TestCgroup, cgroup, require_writable_cgroups
from tests.kernel.test_runqlat import Hog

pytestmark = pytest.mark.kernel

MS = 1_000_000
FORMS = ("tp_btf", "raw_tp")
WINDOW_S = 3.0
SHARES = 16 * 1024
"""Weight of every cgroup here, so that they have their CPU nearly for themselves however busy the machine is."""
NOTHING = Blame(by_cgroup={}, throttled_ns=0, higher_class_ns=0, other_ns=0)
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
"""Passes on what it gets. Two of them play table tennis once somebody throws the ball in."""


class Shot(NamedTuple):
    """Everything of some cgroups at one moment, by path."""

    blames: Mapping[str, Blame]
    waits: Mapping[str, Wait]
    ran_ns: Mapping[str, int]
    throttled_ns: Mapping[str, int]
    at_ns: int


def live(*groups: TestCgroup) -> dict[int, str]:
    return {ROOT_ID: "/", **{group.id: group.path for group in groups}}


def shoot(source: RunqLat, groups: Sequence[TestCgroup]) -> Shot:
    listed = live(*groups)
    blames, waits = source.blames(listed), source.read(listed)
    return Shot(
        {group.path: blames[group.id] for group in groups},
        {group.path: waits[group.id] for group in groups},
        {group.path: usage_ns(group) for group in groups},
        {group.path: throttled_ns(group) for group in groups},
        time.monotonic_ns(),
    )


def usage_ns(group: TestCgroup) -> int:
    if group.hierarchy.mode == "v2":
        return 1000 * _stat(group, "usage_usec")
    return int(group.file("cpuacct", "cpuacct.usage").read_text())


def throttled_ns(group: TestCgroup) -> int:
    """Of its own quota; groups below are throttled with it, and their files do not say so."""
    return 1000 * _stat(group, "throttled_usec") if group.hierarchy.mode == "v2" else _stat(group, "throttled_time")


def _stat(group: TestCgroup, name: str) -> int:
    lines = group.file("cpu", "cpu.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def weigh(group: TestCgroup, shares: int) -> None:
    if group.hierarchy.mode == "v2":
        group.file("cpu", "cpu.weight").write_text(f"{round(shares * 100 / 1024)}\n")
    else:
        group.file("cpu", "cpu.shares").write_text(f"{shares}\n")


def limit(group: TestCgroup, quota_us: int = 20_000, period_us: int = 100_000) -> None:
    if group.hierarchy.mode == "v2":
        group.file("cpu", "cpu.max").write_text(f"{quota_us} {period_us}\n")
        return
    group.file("cpu", "cpu.cfs_period_us").write_text(f"{period_us}\n")
    group.file("cpu", "cpu.cfs_quota_us").write_text(f"{quota_us}\n")


def pin(group: TestCgroup, cpu: int = LAST_CPU) -> subprocess.Popen[bytes]:
    return group.start([sys.executable, "-c", PINNED, str(cpu)])


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


def grown(before: Blame, after: Blame) -> Blame:
    return Blame(
        by_cgroup={path: ns - before.by_cgroup.get(path, 0) for path, ns in after.by_cgroup.items()},
        throttled_ns=after.throttled_ns - before.throttled_ns,
        higher_class_ns=after.higher_class_ns - before.higher_class_ns,
        other_ns=after.other_ns - before.other_ns,
    )


def parts(blame: Blame) -> int:
    return sum(blame.by_cgroup.values()) + blame.throttled_ns + blame.higher_class_ns + blame.other_ns


class Watched(NamedTuple):
    """What a window of time brought."""

    before: Shot
    after: Shot

    def blame(self, group: TestCgroup) -> Blame:
        return grown(self.before.blames[group.path], self.after.blames[group.path])

    def waited(self, group: TestCgroup) -> int:
        return self.after.waits[group.path].sum_ns - self.before.waits[group.path].sum_ns

    def ran(self, group: TestCgroup) -> int:
        return self.after.ran_ns[group.path] - self.before.ran_ns[group.path]

    def throttled(self, group: TestCgroup) -> int:
        return self.after.throttled_ns[group.path] - self.before.throttled_ns[group.path]

    @property
    def elapsed(self) -> int:
        return self.after.at_ns - self.before.at_ns


def watch(source: RunqLat, groups: Sequence[TestCgroup], *, also: Sequence[TestCgroup] = ()) -> Watched:
    """A window of time once all groups wait for each other; `also` are groups without tasks of their own."""
    assert eventually(lambda: all(source.read(live(*groups))[group.id].count > 20 for group in groups))
    time.sleep(0.5)
    before = shoot_at_arrival(source, [*groups, *also])
    time.sleep(WINDOW_S)
    return Watched(before, shoot_at_arrival(source, [*groups, *also]))


def shoot_at_arrival(source: RunqLat, groups: Sequence[TestCgroup]) -> Shot:
    """Just after a task of the first group has come in: what others took of the wait that goes on is not counted yet."""
    first = groups[0]

    def arrivals() -> int:
        return source.read(live(*groups), {first.id}, complete=False)[first.id].count

    before, deadline = arrivals(), time.monotonic() + 5
    while arrivals() == before and time.monotonic() < deadline:
        time.sleep(0.001)
    return shoot(source, groups)


@contextmanager
def several(*names: str) -> Iterator[list[TestCgroup]]:
    hierarchy = require_writable_cgroups()
    with ExitStack() as stack:
        groups = [stack.enter_context(cgroup(hierarchy, name)) for name in names]
        for group in groups:
            weigh(group, SHARES)
        yield groups


@pytest.fixture(params=FORMS)
def source(request: pytest.FixtureRequest) -> Iterator[RunqLat]:
    with probe(request.param) as opened:
        assert opened.form == request.param
        assert opened.blaming, [str(refusal) for refusal in opened.refused]
        yield opened


@pytest.mark.parametrize("shares", [(1, 2), (1, 2, 4)], ids=["two", "three"])
def test_each_neighbour_is_to_blame_for_what_it_ran(source: RunqLat, shares: tuple[int, ...]) -> None:
    """Within 5 % of what the kernel says that each burner ran. Together they ran all that the victim waited, but for what
    the rest of the machine took of this CPU meanwhile."""
    with several("victim", *(f"burner{k}" for k in range(len(shares)))) as (victim, *burners):
        pin(victim)
        for burner, weight in zip(burners, shares, strict=True):
            weigh(burner, weight * SHARES)
            pin(burner)
        # Where the machine is so busy that this test waits itself, the two readings of a window are not of one moment.
        for _ in range(3):
            seen = watch(source, [victim, *burners])
            blame = seen.blame(victim)
            errors = [abs(blame.by_cgroup[burner.path] / seen.ran(burner) - 1) for burner in burners]
            if max(errors) < 0.05:
                break
    assert max(errors) < 0.05
    assert blame.by_cgroup.get(victim.path, 0) < 0.01 * seen.elapsed
    assert parts(blame) == pytest.approx(seen.elapsed - seen.ran(victim), rel=0.05)
    assert blame.throttled_ns == 0
    assert [seen.ran(burner) for burner in burners] == sorted(seen.ran(burner) for burner in burners)


def test_parts_add_up_to_the_waits_to_the_nanosecond(source: RunqLat) -> None:
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


def test_waits_of_a_quota_are_nobody_elses_doing(source: RunqLat) -> None:
    """20 ms of each 100 ms for one that wants it all. The kernel says how long it was throttled; what it waited besides is
    what it had to wait for others while its quota lasted."""
    with several("quota") as (alone,):
        limit(alone)
        pin(alone)
        seen = watch(source, [alone])
    blame = seen.blame(alone)
    assert seen.throttled(alone) > 0.2 * seen.elapsed
    assert blame.throttled_ns == pytest.approx(seen.throttled(alone), rel=0.05)
    contended = seen.elapsed - seen.ran(alone) - seen.throttled(alone)
    assert parts(blame) - blame.throttled_ns == pytest.approx(contended, abs=0.05 * seen.elapsed)


def test_a_neighbour_is_not_to_blame_for_what_it_ran_while_the_quota_was_used_up(source: RunqLat) -> None:
    """The neighbour has the CPU most of the time, and most of that time does not matter to the victim."""
    with several("quota", "neighbour") as (victim, neighbour):
        limit(victim)
        pin(victim)
        pin(neighbour)
        seen = watch(source, [victim, neighbour])
    blame = seen.blame(victim)
    assert seen.throttled(victim) > 0.2 * seen.elapsed
    assert blame.throttled_ns == pytest.approx(seen.throttled(victim), rel=0.05)
    contended = seen.elapsed - seen.ran(victim) - seen.throttled(victim)
    rest = sum(ns for path, ns in blame.by_cgroup.items() if path != neighbour.path)
    rest += blame.higher_class_ns + blame.other_ns
    assert blame.by_cgroup[neighbour.path] + rest == pytest.approx(contended, abs=0.05 * seen.elapsed)
    assert blame.by_cgroup[neighbour.path] < 0.75 * seen.ran(neighbour)
    assert seen.blame(neighbour).by_cgroup[victim.path] == pytest.approx(seen.ran(victim), rel=0.05)
    assert seen.blame(neighbour).throttled_ns == 0


def test_several_tasks_of_one_quota_are_throttled_each_by_itself(source: RunqLat) -> None:
    """Three of them on one CPU: at any time each runs, waits for the others, or is throttled with them."""
    with several("quota") as (group,):
        limit(group)
        for _ in range(3):
            pin(group)
        seen = watch(source, [group])
    blame = seen.blame(group)
    assert seen.throttled(group) > 0.2 * seen.elapsed
    assert blame.throttled_ns == pytest.approx(3 * seen.throttled(group), rel=0.06)
    assert blame.by_cgroup[group.path] == pytest.approx(2 * seen.ran(group), rel=0.12)


def test_groups_below_a_quota_are_held_back_by_it_and_not_by_each_other(source: RunqLat) -> None:
    """Leaves are told apart, and time throttled by the quota of the group above is not blamed on the sibling that used it."""
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
        seen = watch(source, leaves, also=[parent])
    held = seen.throttled(parent)
    assert held > 0.2 * seen.elapsed
    first, second = leaves
    for victim, sibling in ((first, second), (second, first)):
        blame = seen.blame(victim)
        assert blame.by_cgroup[sibling.path] == pytest.approx(seen.ran(sibling), rel=0.08)
        assert blame.throttled_ns == pytest.approx(held, rel=0.1)
        assert parts(blame) == pytest.approx(seen.elapsed - seen.ran(victim), rel=0.05)


def test_real_time_tasks_are_told_from_neighbours(source: RunqLat) -> None:
    with several("victim", "neighbour") as (victim, neighbour):
        pin(victim)
        pin(neighbour)
        # In the root cgroup: real-time tasks inside a version 1 cgroup need a budget of its own.
        fifo = subprocess.Popen([sys.executable, "-c", FIFO_HALF, str(LAST_CPU)])
        try:
            assert eventually(lambda: os.sched_getscheduler(fifo.pid) == os.SCHED_FIFO)
            time.sleep(0.5)
            before, stat = shoot_at_arrival(source, [victim, neighbour]), Schedstat(fifo.pid)
            time.sleep(WINDOW_S)
            seen, ran = Watched(before, shoot_at_arrival(source, [victim, neighbour])), stat.growth()[0]
        finally:
            fifo.kill()
            fifo.wait()
    for group, other in ((victim, neighbour), (neighbour, victim)):
        blame = seen.blame(group)
        assert blame.higher_class_ns == pytest.approx(ran, rel=0.08)
        assert blame.by_cgroup[other.path] == pytest.approx(seen.ran(other), rel=0.05)
        assert "/" not in blame.by_cgroup or blame.by_cgroup["/"] < 0.5 * ran


def test_tasks_of_one_cgroup_wait_for_each_other(source: RunqLat) -> None:
    with several("crowd") as (crowd,):
        for _ in range(3):
            pin(crowd)
        seen = watch(source, [crowd])
    blame = seen.blame(crowd)
    assert blame.by_cgroup[crowd.path] == pytest.approx(2 * seen.ran(crowd), rel=0.08)


def test_neighbours_that_swap_the_cpu_all_the_time_do_not_hide(source: RunqLat) -> None:
    """Two cgroups pass a byte back and forth, tens of thousands of changes of hands while the victim waits once: more than
    the CPU remembers one by one."""
    with several("victim", "ping", "pong") as (victim, ping, pong):
        pin(victim)
        play(ping, pong)
        seen = watch(source, [victim, ping, pong])
    blame = seen.blame(victim)
    assert parts(blame) == pytest.approx(seen.elapsed - seen.ran(victim), rel=0.05)
    for player in (ping, pong):
        assert blame.by_cgroup[player.path] == pytest.approx(seen.ran(player), rel=0.08)


def test_a_task_that_is_moved_while_it_waits_leaves_that_part_to_the_cpu_that_it_waited_on(source: RunqLat) -> None:
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
        seen = Watched(before, shoot(source, [group]))
    blame = seen.blame(group)
    assert 9 * MS * (times - 1) <= blame.higher_class_ns <= 45 * MS * times
    assert parts(blame) == pytest.approx(seen.waited(group), abs=MS)


def test_on_all_cpus_little_is_left_without_a_name(source: RunqLat) -> None:
    """Six burners of three cgroups on all CPUs, so that the scheduler moves them: what it cannot tell stays small."""
    with several(*"abc") as groups:
        for group in groups:
            group.burn(2)
        assert eventually(lambda: all(source.read(live(*groups))[group.id].count > 20 for group in groups))
        time.sleep(0.5)
        before, listed = source.blames(cgroup_paths()), cgroup_paths()
        time.sleep(WINDOW_S)
        waits, after = source.read(listed), source.blames(listed)
        found = [grown(before[group.id], after[group.id]) for group in groups]
        sums = [(waits[group.id].sum_ns, parts(after[group.id])) for group in groups]
    for blame, (waited, split) in zip(found, sums, strict=True):
        assert blame.other_ns < 0.1 * parts(blame)
        assert split == pytest.approx(waited, rel=0.01), (
            "one reading: but for what ended meanwhile they are the same waits"
        )


def test_culprits_that_come_and_go_leave_every_number_growing(source: RunqLat) -> None:
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "victim") as victim, cgroup(hierarchy, "steady") as steady:
        pin(victim)
        pin(steady)
        assert eventually(lambda: source.read(live(victim, steady))[victim.id].count > 20)
        latest = source.blames(live(victim, steady))[victim.id]
        told_ns = 0
        for turn in range(6):
            guest = TestCgroup(hierarchy, f"/dioptase-test-{os.getpid()}-guest{turn}")
            try:
                pin(guest)
                with_guest = live(victim, steady, guest)
                assert eventually(lambda: source.blames(with_guest)[victim.id].by_cgroup.get(guest.path, 0) > 30 * MS)  # noqa: B023
                seen = source.blames(with_guest)[victim.id]
                _check_growth(latest, seen)
                told_ns += seen.by_cgroup[guest.path]
            finally:
                guest.close()
            latest = seen
            for _ in range(3):
                seen = source.blames(live(victim, steady))[victim.id]
                _check_growth(latest, seen, gone=guest.path)
                latest = seen
        for process in (*victim.processes, *steady.processes):
            process.kill()
            process.wait()
        shot = shoot(source, [victim, steady])
    # What was told of the guests went with them, and did not move to the rest.
    assert parts(shot.blames[victim.path]) == pytest.approx(shot.waits[victim.path].sum_ns - told_ns, abs=MS)
    assert shot.blames[victim.path].other_ns < told_ns / 2
    assert set(shot.blames[victim.path].by_cgroup) <= {"/", victim.path, steady.path}


def _check_growth(before: Blame, after: Blame, gone: str = "") -> None:
    assert after.other_ns >= before.other_ns
    assert after.throttled_ns >= before.throttled_ns
    assert after.higher_class_ns >= before.higher_class_ns
    assert set(before.by_cgroup) - set(after.by_cgroup) <= {gone}
    assert gone not in after.by_cgroup
    assert all(after.by_cgroup[path] >= ns for path, ns in before.by_cgroup.items() if path != gone)


def _with(form: str, **constants: int) -> Job:
    made = job((form,), possible_cpus(), blame=True)
    return msgspec.structs.replace(made, forms=made.forms[:1], constants={**made.constants, **constants})


def test_a_full_table_of_pairs_says_so_and_the_parts_still_add_up() -> None:
    """Four pairs on each CPU, for five cgroups on one that all wait for each other."""
    with probe(*FORMS) as example:
        form = example.form
    with several(*"abcde") as groups, load(_with(form, PAIR_BITS=2)) as loaded:
        source = RunqLat(loaded)
        for group in groups:
            pin(group)
        time.sleep(1.5)
        for group in groups:
            group.processes[0].kill()
            group.processes[0].wait()
        shot = shoot(source, groups)
        problem = beside(source).problem()
        assert problem is not None
        assert "parts of waits found no place" in problem.reason
        source.close()
    for group in groups:
        assert parts(shot.blames[group.path]) == shot.waits[group.path].sum_ns > 20 * MS
    assert sum(len(shot.blames[group.path].by_cgroup) for group in groups) <= 4 * possible_cpus()
    assert sum(shot.blames[group.path].other_ns for group in groups) > 20 * MS


def _older(form: Form) -> Form:
    kept = {name: field for name, field in form.optional.items() if name not in ("THROTTLED_SINCE", "THROTTLED_NS")}
    return msgspec.structs.replace(form, optional=kept)


@pytest.mark.parametrize("form", FORMS)
def test_kernels_without_clocks_of_throttling_end_it_when_the_first_task_is_back(form: str) -> None:
    """Linux before 6.6 has throttle_count alone: what is contended after a throttle counts as throttled then."""
    with probe(form):
        pass
    whole = _with(form)
    older = msgspec.structs.replace(whole, forms=[_older(whole.forms[0])])
    with several("quota", "neighbour") as (victim, neighbour), load(older) as loaded:
        source = RunqLat(loaded)
        limit(victim)
        pin(victim)
        pin(neighbour)
        seen = watch(source, [victim, neighbour])
        source.close()
    blame = seen.blame(victim)
    assert 0.95 * seen.throttled(victim) <= blame.throttled_ns <= 1.4 * seen.throttled(victim)
    assert parts(blame) == pytest.approx(seen.elapsed - seen.ran(victim), rel=0.05)
    assert 0 < blame.by_cgroup[neighbour.path] < seen.ran(neighbour)


def test_a_form_that_cannot_know_blames_nobody() -> None:
    with probe("classic") as source:
        assert not source.blaming
        with pytest.raises(Unavailable, match="does not tell who had the CPU") as caught:
            beside(source)
        assert "tp_btf" in caught.value.remedy
        with pytest.raises(Unavailable, match="does not tell who had the CPU"):
            source.blames({})


def test_latency_can_be_had_without_blame() -> None:
    with probe("tp_btf", "raw_tp") as example:
        form = example.form
    source = open_waits(forms=(form,), blame=False)
    try:
        assert not source.blaming
    finally:
        source.close()


def test_the_probe_gives_blame_to_cgroups_and_leaves_closing_to_the_waits() -> None:
    with several("quiet") as (quiet,), probe(*FORMS) as source:
        found = beside(source)
        assert (found.name, found.form) == ("blame", source.form)
        seen = found.read(live(quiet))
        assert seen.cgroups[quiet.id] == {"blame": NOTHING}
        assert isinstance(seen.cgroups[ROOT_ID]["blame"], Blame)
        assert found.problem() is None
        found.close()
        with pytest.raises(Unavailable, match="the probe blame is closed"):
            found.read(live(quiet))
        assert source.read(live(quiet)), "the waits go on"
        found = beside(source)
        source.close()
        with pytest.raises(Unavailable, match="the probe runqlat is closed"):
            found.read(live(quiet))


def test_alone_it_has_a_program_of_its_own_and_closes_it() -> None:
    with probe(*FORMS):
        pass
    found = open_blame()
    assert found.form in FORMS
    assert ROOT_ID in found.read({ROOT_ID: "/"}).cgroups
    found.close()
    found.close()
    with pytest.raises(Unavailable, match="is closed"):
        found.read({ROOT_ID: "/"})
    with pytest.raises(Unavailable, match="does not tell who had the CPU"):
        open_blame(forms=("classic",))
