"""CPU knobs on version 2: written and read back by the agent's own code, felt by a workload, and put back bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from api.cpu import format_cpu_list
from api.decision import OutcomeStatus
from api.knobs import Knob
from api.units import MIB
from tests.builders.waiting import until
from tests.kernel.knob_cgroups import KnobCgroup
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.vm.workloads import PYTHON, SPIN, KnobWriters, hold, numa_nodes, numbers, on_nodes, ran_on, spin

pytestmark = pytest.mark.vm

PULSES = 12
PULSED = f"""
import sys, time
open(sys.argv[1], "w").close()
time.sleep(0.5)
for _ in range({PULSES}):
    end = time.process_time() + 0.08
    while time.process_time() < end:
        pass
    time.sleep(0.33)
"""
"""Says when it has started; then 80 ms of work at a time, and a pause of more than three periods after it."""


@pytest.fixture
def group() -> Iterator[TestCgroup]:
    with cgroup(require_writable_cgroups(), "cpu") as created:
        yield created


@pytest.fixture
def rivals() -> Iterator[tuple[TestCgroup, TestCgroup]]:
    """Two groups on the same CPU, each of which would take all of it."""
    with ExitStack() as stack:
        pair = [stack.enter_context(cgroup(require_writable_cgroups(), name)) for name in ("less", "more")]
        last = str(max(os.sched_getaffinity(0)))
        for item in pair:
            item.file("cpuset", "cpuset.cpus").write_text(last)
            spin(item)
        yield pair[0], pair[1]


def used(group: TestCgroup) -> int:
    """Microseconds."""
    return numbers(group, "cpu.stat")["usage_usec"]


def shares(pair: tuple[TestCgroup, TestCgroup]) -> tuple[int, int]:
    """Microseconds of CPU that each has had when both have had two seconds together."""
    before = [used(item) for item in pair]
    until(lambda: sum(map(used, pair)) >= sum(before) + 2_000_000, "they run")
    return used(pair[0]) - before[0], used(pair[1]) - before[1]


def test_tasks_run_on_the_cpus_of_their_group_and_on_no_other(agent: KnobWriters, group: TestCgroup) -> None:
    every = os.sched_getaffinity(0)
    group.file("cpuset", "cpuset.cpus").write_text(format_cpu_list(every))
    for _ in range(2 * len(every)):
        group.start(SPIN)
    until(lambda: ran_on(group.processes) == every, "they are spread")
    with agent.turned((group, Knob.CPUSET, "1,3")):
        assert ran_on(group.processes) == {1, 3}
        assert {frozenset(os.sched_getaffinity(process.pid)) for process in group.processes} == {frozenset((1, 3))}
    until(lambda: ran_on(group.processes) == every, "they are spread again")


def test_memory_follows_its_group_to_other_numa_nodes(agent: KnobWriters, group: TestCgroup) -> None:
    first, *_, last = numa_nodes()
    group.file("cpuset", "cpuset.mems").write_text(format_cpu_list(numa_nodes()))
    hold(group, 48 * MIB, cpu=numa_nodes()[first][0])
    until(lambda: on_nodes(group)[first] >= 48 * MIB, "it is where it was touched")
    with agent.turned((group, Knob.MEMS, str(last))):
        until(lambda: on_nodes(group)[last] >= 48 * MIB, "it has moved")
        assert on_nodes(group)[first] < MIB
        assert group.file("cpuset", "cpuset.mems.effective").read_text().strip() == str(last)


@pytest.mark.parametrize(("knob", "value"), [(Knob.CPUSET, "1"), (Knob.MEMS, "0")])
def test_what_was_inherited_is_again_or_is_all_that_there_is_while_tasks_are_in_the_group(
    agent: KnobWriters, group: TestCgroup, knob: Knob, value: str
) -> None:
    with agent.turned((group, knob, value)):
        pass
    assert group.file("cpuset", knob.value).read_text() == "\n"
    spin(group)
    text = group.file("cpuset", f"{knob.value}.effective").read_text()
    agent.actuator.apply([KnobCgroup(group).decide(knob, value)])
    assert group.file("cpuset", f"{knob.value}.effective").read_text() == f"{value}\n"
    (outcome,) = agent.originals.restore(agent.files)
    assert (outcome.status, outcome.before, outcome.after, outcome.error) == (
        OutcomeStatus.APPLIED,
        value,
        text.strip(),
        "",
    )
    assert group.file("cpuset", knob.value).read_text() == text
    assert agent.originals.entries() == ()


def test_a_quota_throttles_in_nearly_every_period_and_gives_no_more_than_it_says(
    agent: KnobWriters, group: TestCgroup
) -> None:
    with agent.turned((group, Knob.QUOTA, "20000 100000")):
        before = numbers(group, "cpu.stat")
        group.start(SPIN)
        group.start(SPIN)
        until(lambda: numbers(group, "cpu.stat")["nr_periods"] >= before["nr_periods"] + 30, "thirty periods")
        after = numbers(group, "cpu.stat")
    periods = after["nr_periods"] - before["nr_periods"]
    assert after["nr_throttled"] - before["nr_throttled"] >= 0.8 * periods
    # Fewer microseconds a period where the timer came late: then periods without a new quota are counted too.
    assert (after["usage_usec"] - before["usage_usec"]) / periods <= 23_000
    unlimited = numbers(group, "cpu.stat")["nr_throttled"]
    start = used(group)
    until(lambda: used(group) >= start + 300_000, "it runs freely")
    assert numbers(group, "cpu.stat")["nr_throttled"] - unlimited <= 1


def test_cpu_is_shared_by_weight(agent: KnobWriters, rivals: tuple[TestCgroup, TestCgroup]) -> None:
    less, more = shares(rivals)
    assert 0.8 <= more / less <= 1.25
    with agent.turned((rivals[0], Knob.WEIGHT, "50"), (rivals[1], Knob.WEIGHT, "200")):
        less, more = shares(rivals)
    assert 3.2 <= more / less <= 5


def test_an_idle_group_gets_only_unused_cpu(agent: KnobWriters, rivals: tuple[TestCgroup, TestCgroup]) -> None:
    with agent.turned((rivals[0], Knob.IDLE, "1")):
        idle, other = shares(rivals)
        assert idle <= other / 50
        rivals[1].processes[0].kill()
        start = used(rivals[0])
        until(lambda: used(rivals[0]) >= start + 500_000, "it has all of the CPU")


def test_what_was_saved_up_is_used_beyond_the_quota(agent: KnobWriters, group: TestCgroup, tmp_path: Path) -> None:
    """Each pulse needs 80 ms; the quota is 50 in 100, and as much can be saved up."""

    def pulse(started: Path) -> tuple[int, int]:
        process = group.start([*PYTHON, PULSED, str(started)])
        until(started.exists, "it has started")
        before = numbers(group, "cpu.stat")
        assert process.wait() == 0
        after = numbers(group, "cpu.stat")
        return after["nr_throttled"] - before["nr_throttled"], after["nr_bursts"] - before["nr_bursts"]

    with agent.turned((group, Knob.QUOTA, "50000 100000")):
        throttled, bursts = pulse(tmp_path / "first")
        assert (throttled >= PULSES // 3, bursts) == (True, 0)
    with agent.turned((group, Knob.QUOTA, "50000 100000"), (group, Knob.BURST, "50000")):
        saved, bursts = pulse(tmp_path / "second")
        assert bursts >= PULSES // 3
        assert saved < throttled / 2
