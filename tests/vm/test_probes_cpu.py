"""Waits, blame, throttles and threads of known workloads on version 2, in every form at once and in the kernel's own books."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.hierarchy import Hierarchy
from agent.sense.cgroups import CgroupReader
from agent.sense.psi import open_trigger
from agent.sense.schedstat import SchedstatWaits
from api.facts import Blame, Durations, Load, Wait
from api.histograms import BOUNDS_NS, slot_of
from api.load import DECAYS, FIXED_1, SAMPLE_NS
from probes.groups import ROOT_ID
from probes.loader import Compiler, load, sharing
from probes.threads import ProcWalk, TaskIterator, Threads, job
from tests.kernel.blaming import limit, parts
from tests.kernel.probing import LAST_CPU, PINNED, Schedstat, eventually, started_in
from tests.kernel.support import BURN, TestCgroup, cgroup
from tests.kernel.test_triggers import wait_ready
from tests.vm.conftest import Programs

pytestmark = pytest.mark.vm

MS = 1_000_000
PERIODS = 25
"""Throttled periods that are waited for."""
STARTED_S = 120.0
SPINNERS, SLEEPERS, SAMPLES = 3, 4, 12


def pinned(group: TestCgroup, count: int = 1) -> list[int]:
    """Processes that want all of the last CPU."""
    return [group.start([sys.executable, "-c", PINNED, str(LAST_CPU)]).pid for _ in range(count)]


def end(*groups: TestCgroup) -> None:
    for process in (process for group in groups for process in group.processes):
        process.kill()
        process.wait()


def near(value: float, expected: float, rel: float) -> bool:
    return abs(value - expected) <= rel * expected


class Pair:
    """Two cgroups that shared one CPU for a while, and what everybody says of their waits now that they have ended."""

    def __init__(self, programs: Programs, hierarchy: Hierarchy, first: TestCgroup, second: TestCgroup) -> None:
        self.groups = (first, second)
        self.probes = programs("runqlat")
        files = SchedstatWaits(Path("/proc"), hierarchy)
        live = {first.id: first.path, second.id: second.path}
        self.live = {ROOT_ID: "/", **live}
        files.read(live)
        pids = [pinned(group)[0] for group in self.groups]
        best = self.probes["tp_btf"]
        assert eventually(lambda: all(best.read(self.live)[number].count > 20 for number in live), STARTED_S)
        began, window = time.monotonic_ns(), [Schedstat(pid) for pid in pids]
        time.sleep(3.0)
        self.window = [stat.growth() for stat in window]
        self.elapsed = time.monotonic_ns() - began
        self.by_files = files.read(live)
        self.kernel = [tuple(map(int, Path(f"/proc/{pid}/schedstat").read_text().split())) for pid in pids]
        end(*self.groups)
        files.close()
        self.waits = {form: probe.read(self.live) for form, probe in self.probes.items()}

    def of(self, form: str) -> list[Wait]:
        return [self.waits[form][group.id] for group in self.groups]


@pytest.fixture(scope="module")
def pair(programs: Programs, hierarchy: Hierarchy) -> Iterator[Pair]:
    with cgroup(hierarchy, "one") as first, cgroup(hierarchy, "other") as second:
        yield Pair(programs, hierarchy, first, second)


def test_a_pair_on_one_cpu_waits_for_what_it_does_not_run(pair: Pair) -> None:
    for ran, waited, _ in pair.window:
        assert near(ran + waited, pair.elapsed, 0.05), "it wants the CPU all the time"
        assert waited > 0.3 * pair.elapsed, "half of it is the other one's"


def test_typed_and_raw_tracepoints_see_the_same_waits_to_the_nanosecond(pair: Pair) -> None:
    assert pair.of("tp_btf") == pair.of("raw_tp")


def test_their_sums_are_those_of_the_kernel(pair: Pair) -> None:
    """/proc/PID/schedstat, whose third number counts turns; read a moment before the pair was ended."""
    for wait, (_, waited, runs) in zip(pair.of("tp_btf"), pair.kernel, strict=True):
        assert near(wait.sum_ns, waited, 0.1)
        assert near(wait.count, runs, 0.1)


def test_our_own_stamps_agree_within_a_tenth(pair: Pair) -> None:
    for ours, kernels in zip(pair.of("classic"), pair.of("tp_btf"), strict=True):
        assert near(ours.sum_ns, kernels.sum_ns, 0.1)
        assert near(ours.count, kernels.count, 0.1)


def test_so_does_the_form_without_any_program(pair: Pair) -> None:
    for group, wait in zip(pair.groups, pair.of("tp_btf"), strict=True):
        assert near(pair.by_files[group.id].sum_ns, wait.sum_ns, 0.1)


def test_each_is_to_blame_for_the_others_waits(pair: Pair) -> None:
    """The parts add up to the waits exactly, in both forms that know them."""
    for form in ("tp_btf", "raw_tp"):
        blames = pair.probes[form].blames(pair.live)
        for group, other in (pair.groups, pair.groups[::-1]):
            blame, wait = blames[group.id], pair.waits[form][group.id]
            assert isinstance(blame, Blame)
            assert parts(blame) == wait.sum_ns
            assert blame.by_cgroup[other.path] > 0.8 * wait.sum_ns
            assert blame.throttled_ns == 0


class Throttled:
    """A cgroup with a fifth of a CPU that wanted all of one, after it has ended."""

    def __init__(self, programs: Programs, hierarchy: Hierarchy, group: TestCgroup) -> None:
        probes = programs("throttles")
        reader, files = CgroupReader(hierarchy), group.file("cpu", "cpu.stat")
        limit(group)
        started_in(group, BURN, prefix=("taskset", "--cpu-list", str(LAST_CPU)))
        assert eventually(lambda: numbers(files)["nr_throttled"] >= PERIODS, STARTED_S)
        end(group)
        self.stat: dict[str, int] = {}

        def settled() -> bool:
            before, self.stat = self.stat, numbers(files)
            return before == self.stat

        # The timer of the quota ends the last throttle, and runs out.
        assert eventually(lambda: not time.sleep(0.3) and settled(), STARTED_S)
        self.sample = reader.read()[group.path]
        reader.close()
        live = {group.id: group.path}
        found = {form: probe.read(live).cgroups[group.id]["throttles"] for form, probe in probes.items()}
        self.by_form: Mapping[str, Durations] = found


def numbers(path: Path) -> dict[str, int]:
    words = path.read_text().split()
    return {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}


@pytest.fixture(scope="module")
def throttled(programs: Programs, hierarchy: Hierarchy) -> Iterator[Throttled]:
    with cgroup(hierarchy, "throttled") as group:
        yield Throttled(programs, hierarchy, group)


def test_the_kernels_file_is_what_the_agent_reads(throttled: Throttled) -> None:
    sample, stat = throttled.sample, throttled.stat
    assert (sample.periods, sample.throttled_periods) == (stat["nr_periods"], stat["nr_throttled"])
    assert sample.throttled_ns == stat["throttled_usec"] * 1000
    assert PERIODS <= stat["nr_throttled"] <= stat["nr_periods"]


def test_functions_of_the_kernel_say_exactly_what_its_file_says(throttled: Throttled) -> None:
    """Throttled periods, and their time to the microsecond: fentry with fexit, and a kprobe with a kretprobe."""
    by_function = [throttled.by_form[form] for form in ("fentry", "kprobe")]
    assert by_function[0] == by_function[1]
    assert by_function[0].sum_ns // 1000 == throttled.stat["throttled_usec"]
    assert abs(by_function[0].count - throttled.stat["nr_throttled"]) <= 1


def test_so_do_switches_but_for_the_last_throttle(throttled: Throttled, series: str) -> None:
    """They count a throttle when its cgroup runs again on that CPU, so not the last one, nor what was before the first look."""
    found = [throttled.by_form[form] for form in ("tp_btf", "raw_tp") if form in throttled.by_form]
    if series == "6.1":
        assert not found, "the kernel keeps the sum that they need since 6.6"
        return
    assert found[0] == found[1]
    assert throttled.stat["nr_throttled"] - 3 <= found[0].count <= throttled.stat["nr_throttled"]
    missing_us = throttled.stat["throttled_usec"] - found[0].sum_ns // 1000
    assert 0 <= missing_us <= 300_000


def test_most_throttles_last_four_fifths_of_a_period(throttled: Throttled) -> None:
    """80 ms of 100 lie in the slot up to 131 ms; one that begins late in its period is shorter."""
    slots = throttled.by_form["fentry"].slots
    assert slots is not None
    slot = slot_of(80 * MS)
    assert BOUNDS_NS[slot] == 131_072_000
    assert sum(slots[slot + 1 :]) == 0
    assert slots[slot] >= 0.6 * sum(slots)


@contextmanager
def known_threads(hierarchy: Hierarchy) -> Iterator[TestCgroup]:
    with cgroup(hierarchy, "threads") as group:
        group.burn(SPINNERS)
        for _ in range(SLEEPERS):
            group.start(["sleep", "600"])
        yield group


def test_threads_by_the_iterator_and_by_proc(compiler: Compiler, hierarchy: Hierarchy) -> None:
    """Three burn and four sleep. A minute of samples on a clock of our own, five seconds apart, makes a load of
    3 * (1 - 0.92**12) by the kernel's arithmetic."""
    now_ns = 0
    with known_threads(hierarchy) as group, sharing(compiler):
        live = {group.id: group.path}
        iterator = TaskIterator(load(job()))
        for census in (iterator, ProcWalk(Path("/proc"))):

            def as_expected(census: TaskIterator | ProcWalk = census) -> bool:
                found = census.count(live)[group.id]
                return (found.runnable, found.uninterruptible, found.sleeping) == (SPINNERS, 0, SLEEPERS)

            assert eventually(lambda: all(as_expected() for _ in range(5)), STARTED_S), census.count(live)
        probe = Threads(iterator, clock=lambda: now_ns)
        for _ in range(SAMPLES):
            now_ns += SAMPLE_NS
            seen = probe.read(live)
        probe.close()
    found = seen.cgroups[group.id]["load"]
    assert isinstance(found, Load)
    assert found.runnable_one == found.one
    assert found.one == pytest.approx(SPINNERS * (1 - (DECAYS[0] / FIXED_1) ** SAMPLES), abs=0.02)


def test_waiting_for_the_cpu_is_pressure_that_fires_a_trigger(hierarchy: Hierarchy) -> None:
    """Two that share a CPU: one of them waits always, which is `some` pressure of the cgroup all the time."""
    with cgroup(hierarchy, "pressed") as group:
        file = group.file("cpu", "cpu.pressure")
        trigger = open_trigger(file, 150_000, 1_000_000)
        assert not wait_ready(trigger.fileno(), 1.0), "nothing runs there yet"
        pinned(group, 2)
        assert wait_ready(trigger.fileno(), STARTED_S)
        trigger.close()
