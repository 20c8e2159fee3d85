"""Waits, blame, throttles and threads of known workloads on version 2, in every form at once and in the kernel's own books."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.cgroup.schedstat import SchedstatRunqLatency
from agent.sensors.triggers.psi_triggers import open_psi_trigger
from api.histogram import BOUNDS_NS, slot_of
from api.snapshot import Blame, Durations, LoadAverages, RunqLatency
from probes.load_average import DECAYS, FIXED_POINT_ONE, SAMPLE_INTERVAL_NS
from probes.loader import load
from probes.per_cgroup_probe import ROOT_CGROUP_ID
from probes.threads import ITERATOR_NAME, NO_THREADS, decode, job, make_probe
from tests.builders.waiting import until
from tests.kernel.blame_window import limit, parts
from tests.kernel.open_probes import LAST_CPU, PINNED, Schedstat, started_in
from tests.kernel.real_cgroups import BURN, TestCgroup, cgroup
from tests.vm.conftest import Programs
from tests.vm.workloads import fires, numbers

pytestmark = pytest.mark.vm_probes

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
    """Two cgroups that shared one CPU for three seconds, and what everybody says of that. Before and after they stand still
    while it is read, so that there is one window of time for all."""

    def __init__(self, programs: Programs, hierarchy: Hierarchy, first: TestCgroup, second: TestCgroup) -> None:
        self.groups = (first, second)
        self.probes = programs("runqlat")
        self.live = {ROOT_CGROUP_ID: "/", first.id: first.path, second.id: second.path}
        self._files = SchedstatRunqLatency(Path("/proc"), hierarchy)
        self.pids = [pinned(group)[0] for group in self.groups]
        until(self._shared, seconds=STARTED_S)
        self._tell(signal.SIGSTOP, "T")
        before, window = self._read(), [Schedstat(pid) for pid in self.pids]
        began = time.monotonic_ns()
        self._tell(signal.SIGCONT, "R")
        time.sleep(3.0)
        self._tell(signal.SIGSTOP, "T")
        self.elapsed = time.monotonic_ns() - began
        self.kernel, self.after = [stat.growth() for stat in window], self._read()
        self._files.close()
        self.grown = {
            form: [
                (now.sum_ns - earlier.sum_ns, now.count - earlier.count)
                for now, earlier in zip(self.after[form], before[form], strict=True)
            ]
            for form in self.after
        }

    def _shared(self) -> bool:
        """Whether both want the same CPU by now."""
        waits = self.probes["tp_btf"].read(self.live)
        return all(os.sched_getaffinity(pid) == {LAST_CPU} for pid in self.pids) and all(
            waits[group.id].sum_ns > 300 * MS for group in self.groups
        )

    def _tell(self, number: int, state: str) -> None:
        for pid in self.pids:
            os.kill(pid, number)
        until(lambda: all(f") {state} " in Path(f"/proc/{pid}/stat").read_text() for pid in self.pids))

    def _read(self) -> dict[str, list[RunqLatency]]:
        observed = {form: probe.read(self.live) for form, probe in (*self.probes.items(), ("schedstat", self._files))}
        return {form: [waits[group.id] for group in self.groups] for form, waits in observed.items()}


@pytest.fixture(scope="module")
def pair(programs: Programs, hierarchy: Hierarchy) -> Iterator[Pair]:
    with cgroup(hierarchy, "one") as first, cgroup(hierarchy, "other") as second:
        yield Pair(programs, hierarchy, first, second)


def test_a_pair_on_one_cpu_waits_for_what_it_does_not_run(pair: Pair) -> None:
    """Excludes other tasks that wanted the CPU, and the times in which the two were stopped."""
    for ran, waited, _ in pair.kernel:
        assert near(ran + waited, pair.elapsed, 0.2)
        assert near(waited, pair.elapsed / 2, 0.4), "half of it is the other one's"


@pytest.mark.parametrize("form", ["tp_btf", "raw_tp", "schedstat"])
def test_waits_are_the_kernels_own_to_the_nanosecond(pair: Pair, form: str) -> None:
    """Time waited and turns of /proc/PID/schedstat, by the same stamps."""
    assert pair.grown[form] == [(waited, turns) for _, waited, turns in pair.kernel]
    assert all(turns > 50 for _, _, turns in pair.kernel)


def test_our_own_stamps_agree_within_a_tenth(pair: Pair) -> None:
    for (sum_ns, count), (_, waited, turns) in zip(pair.grown["classic"], pair.kernel, strict=True):
        assert near(sum_ns, waited, 0.1)
        assert near(count, turns, 0.1)


def test_each_is_to_blame_for_the_others_waits(pair: Pair) -> None:
    """The parts add up to the waits exactly, in both forms that know them."""
    for form in ("tp_btf", "raw_tp"):
        waits = pair.probes[form].read(pair.live)
        blames = pair.probes[form].read_blame(pair.live)
        for group, other in (pair.groups, pair.groups[::-1]):
            blame, wait = blames[group.id], waits[group.id]
            assert isinstance(blame, Blame)
            assert parts(blame) == wait.sum_ns
            assert blame.by_cgroup[other.path] > 0.7 * wait.sum_ns
            assert blame.throttled_ns == 0


class Throttled:
    """A cgroup with a fifth of a CPU that wanted all of one, after it has ended."""

    def __init__(self, programs: Programs, hierarchy: Hierarchy, group: TestCgroup) -> None:
        probes = programs("throttles")
        reader = CgroupReader(hierarchy)
        limit(group)
        started_in(group, BURN, prefix=("taskset", "--cpu-list", str(LAST_CPU)))
        until(lambda: numbers(group, "cpu.stat")["nr_throttled"] >= PERIODS, seconds=STARTED_S)
        end(group)
        self.stat: dict[str, int] = {}

        def settled() -> bool:
            before, self.stat = self.stat, numbers(group, "cpu.stat")
            return before == self.stat

        # The timer of the quota ends the last throttle, and runs out.
        until(lambda: not time.sleep(0.3) and settled(), seconds=STARTED_S)
        self.sample = reader.read()[group.path]
        reader.close()
        live = {group.id: group.path}
        result = {form: probe.read(live).cgroups[group.id]["throttles"] for form, probe in probes.items()}
        self.by_form: Mapping[str, Durations] = result


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
    """The time to the microsecond: fentry with fexit, and a kprobe with a kretprobe. A throttle is a throttled period, but for
    a timer that comes late, as it does under emulation: then one throttle lasts for several (13 for 26 on a busy host)."""
    by_function = [throttled.by_form[form] for form in ("fentry", "kprobe")]
    assert by_function[0] == by_function[1]
    assert by_function[0].sum_ns // 1000 == throttled.stat["throttled_usec"]
    assert 0.3 * throttled.stat["nr_throttled"] <= by_function[0].count <= throttled.stat["nr_throttled"] + 1


def test_so_do_switches_but_for_the_last_throttle(throttled: Throttled, series: str) -> None:
    """They count a throttle when its cgroup runs again on that CPU, so not the last one, nor what was before the first look."""
    results = [throttled.by_form[form] for form in ("tp_btf", "raw_tp") if form in throttled.by_form]
    if series == "6.1":
        assert not results, "the kernel keeps the sum that they need since 6.6"
        return
    assert results[0] == results[1]
    exact, slots = throttled.by_form["fentry"].slots, results[0].slots
    assert exact is not None
    assert slots is not None
    missing = [each - item for each, item in zip(exact, slots, strict=True)]
    assert min(missing) >= 0
    assert sum(missing) <= 3
    assert results[0].sum_ns // 1000 <= throttled.stat["throttled_usec"]


def test_throttles_of_one_period_last_four_fifths_of_it(throttled: Throttled) -> None:
    """80 ms of 100 lie in the slot up to 131 ms; one that begins late in its period is shorter, and a late timer makes it
    longer: on a busy host 4 of 13 lay there."""
    slots = throttled.by_form["fentry"].slots
    assert slots is not None
    slot = slot_of(80 * MS)
    assert BOUNDS_NS[slot] == 131_072_000
    assert slots[slot] >= 0.2 * sum(slots)


@contextmanager
def known_threads(hierarchy: Hierarchy) -> Iterator[TestCgroup]:
    with cgroup(hierarchy, "threads") as group:
        group.burn(SPINNERS)
        for _ in range(SLEEPERS):
            group.start(["sleep", "600"])
        yield group


def test_threads_by_state(programs: Programs, hierarchy: Hierarchy) -> None:
    """Three burn and four sleep. A minute of samples on a clock of our own, five seconds apart, makes a load of
    3 * (1 - 0.92**12) by the kernel's arithmetic."""
    now_ns = 0
    loaded = programs.compiled(lambda: load(job()))
    probe = make_probe(loaded, clock=lambda: now_ns)
    with known_threads(hierarchy) as group:
        live = {group.id: group.path}

        states = NO_THREADS

        def as_expected() -> bool:
            nonlocal states
            states = decode(loaded.records(ITERATOR_NAME)).get(group.id, NO_THREADS)
            return (states.runnable, states.uninterruptible, states.sleeping) == (SPINNERS, 0, SLEEPERS)

        until(lambda: all(as_expected() for _ in range(5)), lambda: f"three run and four sleep: {states}", STARTED_S)
        for _ in range(SAMPLES):
            now_ns += SAMPLE_INTERVAL_NS
            cgroups = probe.read(live).cgroups[group.id]["load"]
    probe.close()
    assert isinstance(cgroups, LoadAverages)
    # At a sample or two one of them may wait for a page of its program, which is load, but is not runnable.
    assert cgroups.load1 - 0.4 < cgroups.runnable1 <= cgroups.load1
    assert cgroups.load1 == pytest.approx(SPINNERS * (1 - (DECAYS[0] / FIXED_POINT_ONE) ** SAMPLES), abs=0.02)


def test_waiting_for_the_cpu_is_pressure_that_fires_a_trigger(hierarchy: Hierarchy) -> None:
    """Two that share a CPU: one of them waits always, which is `some` pressure of the cgroup all the time."""
    with cgroup(hierarchy, "pressed") as group:
        file = group.file("cpu", "cpu.pressure")
        trigger = open_psi_trigger(file, 150_000, 1_000_000)
        assert not fires(trigger, 1.0), "nothing runs there yet"
        pinned(group, 2)
        assert fires(trigger, STARTED_S)
        trigger.close()
