"""Counters per cgroup, with software events in the place of hardware ones: clocks against CPU time, page faults one by one.

The program, the map of events and the reader are those of hardware counters; only the numbers that perf_event_open gets differ.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from api.interfaces import ProbeReading, Unavailable
from api.snapshot import CpuCounters
from probes import bpf
from probes.counters import EVENTS, FORMS, OPTIONAL_EVENT, CountersProbe, countable_events, online_cpus, open_counters
from probes.perf_event import SOFTWARE, PerfEvent, open_on_cpu, read_count
from probes.registry import BY_NAME
from probes.remedies import REMEDIES
from tests.builders.waiting import until
from tests.kernel.open_probes import LAST_CPU, PINNED, having, opened, probe_fixture, started_in
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_root, require_writable_cgroups

pytestmark = pytest.mark.kernel

MS = 1_000_000
CLOCKS = {"cycles": PerfEvent(SOFTWARE, 0), "instructions": PerfEvent(SOFTWARE, 1), "misses": PerfEvent(SOFTWARE, 2)}
"""PERF_COUNT_SW_CPU_CLOCK, _TASK_CLOCK (both in nanoseconds) and _PAGE_FAULTS."""
TRY = """
import json
from api.interfaces import Unavailable
from tests.kernel.test_counters import CLOCKS
from probes.counters import open_counters
try:
    with_it = open_counters(events=CLOCKS)
    print(json.dumps([with_it.form]))
    with_it.close()
except Unavailable as error:
    print(json.dumps([error.reason, error.remedy]))
"""
PAGES = 16384
TOUCH = f"""import mmap, resource
memory = mmap.mmap(-1, {PAGES} * 4096)
memory.madvise(15)  # MADV_NOHUGEPAGE
for page in range({PAGES}):
    memory[page * 4096] = 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


probe = probe_fixture(partial(open_counters, events=CLOCKS), FORMS)


def counters_of(observed: ProbeReading, group: TestCgroup) -> CpuCounters:
    values = observed.cgroups[group.id]["counters"]
    assert isinstance(values, CpuCounters)
    return values


def by_cpu(observed: ProbeReading) -> dict[int, CpuCounters]:
    values = observed.node["cpu_counters"]
    assert isinstance(values, dict)
    return values


def cpu_time_ns(group: TestCgroup) -> int:
    """The kernel's own books."""
    if group.hierarchy.mode == "v2":
        words = group.file("cpu", "cpu.stat").read_text().split()
        return 1000 * int(words[words.index("usage_usec") + 1])
    return int(group.file("cpuacct", "cpuacct.usage").read_text())


def stolen_ns() -> int:
    """What the hypervisor took from all CPUs: clocks go on in it, and no cgroup has used it. In ticks of 10 ms."""
    return 10 * MS * int(Path("/proc/stat").read_text().split(maxsplit=9)[8])


def end(group: TestCgroup) -> None:
    """So that no turn goes on any more."""
    for process in group.processes:
        process.kill()
        process.wait()


def end_turns() -> None:
    """Run a task on every CPU, also idle ones: counts are updated at switches only."""
    allowed = os.sched_getaffinity(0)
    for cpu in online_cpus():
        os.sched_setaffinity(0, {cpu})
    os.sched_setaffinity(0, allowed)


def test_clocks_are_the_cpu_time_of_each_cgroup(probe: CountersProbe) -> None:
    """One has a CPU for itself or nearly so, the other shares one with two of its own and uses less in between."""
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "one") as alone, cgroup(hierarchy, "two") as two, cgroup(hierarchy, "none") as none:
        live, stolen_before = {group.id: group.path for group in (alone, two, none)}, stolen_ns()
        alone.burn(1)
        two.start([sys.executable, "-c", PINNED, str(LAST_CPU)])
        two.start([sys.executable, "-c", PINNED, str(LAST_CPU)])
        two.start([sys.executable, "-c", "import time\nwhile True: time.sleep(0.001)"])
        until(lambda: all(cpu_time_ns(group) > 700 * MS for group in (alone, two)))
        for group in (alone, two):
            end(group)
        observed = probe.read(live)
        assert counters_of(observed, none) == CpuCounters(cycles=0, instructions=0, misses=0)
        stolen = stolen_ns() - stolen_before + 10 * MS
        for group in (alone, two):
            counted, used = counters_of(observed, group), cpu_time_ns(group)
            # A process is in the middle of a turn when it joins its cgroup.
            for clock in (counted.cycles, counted.instructions):
                assert clock is not None
                assert 0.97 * used - 20 * MS <= clock <= 1.03 * used + 20 * MS + stolen
    assert probe.problem() is None


def test_events_go_to_the_cgroup_whose_task_made_them(probe: CountersProbe) -> None:
    """A fault for each of 16,384 pages, and those of starting Python; a neighbour that only computes has no part in them."""
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "touching") as touching, cgroup(hierarchy, "computing") as computing:
        live = {group.id: group.path for group in (touching, computing)}
        computing.start([sys.executable, "-c", PINNED, str(LAST_CPU)])
        time.sleep(0.5)
        before = counters_of(probe.read(live), computing).misses
        process = started_in(touching, TOUCH, prefix=["taskset", "-c", str(LAST_CPU)])
        output, _ = process.communicate(timeout=30)
        end(computing)
        observed = probe.read(live)
        faults, after = counters_of(observed, touching).misses, counters_of(observed, computing).misses
    assert before is not None
    assert after is not None
    assert faults is not None
    assert PAGES < faults <= 1.02 * int(output)
    assert after - before < 100


def test_idle_time_is_counted_for_no_cgroup(probe: CountersProbe) -> None:
    """What all cgroups have together, and the idle time of /proc/stat, are the time that there was."""

    def look() -> tuple[int, int, int, int]:
        end_turns()
        observed = probe.read({})
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        idle = (int(words[4]) + int(words[5])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        groups = (
            counters for values in observed.cgroups.values() if isinstance(counters := values["counters"], CpuCounters)
        )
        here = sum(of.cycles for of in by_cpu(observed).values())
        return sum(of.cycles for of in groups), idle, here, time.monotonic_ns() * len(online_cpus())

    before = look()
    time.sleep(3.0)
    used, idle, everything, elapsed = (now - then for now, then in zip(look(), before, strict=True))
    assert everything == pytest.approx(elapsed, rel=0.1)
    assert used + idle == pytest.approx(everything, rel=0.1)


def test_counts_only_grow(probe: CountersProbe) -> None:
    with cgroup(require_writable_cgroups(), "growing") as group:
        live = {group.id: group.path}
        group.burn(2)
        observed = [probe.read(live) for _ in range(8) if time.sleep(0.15) is None]
        of_group = [counters_of(each, group) for each in observed]
    assert all(earlier.cycles <= later.cycles for earlier, later in pairwise(of_group))
    assert all(
        by_cpu(earlier)[cpu].cycles <= by_cpu(later)[cpu].cycles
        for earlier, later in pairwise(observed)
        for cpu in by_cpu(earlier)
    )
    assert of_group[-1].cycles > of_group[0].cycles


def test_a_cpu_without_events_is_reported_and_not_estimated(probe: CountersProbe) -> None:
    with cgroup(require_writable_cgroups(), "blind") as group:
        live = {group.id: group.path}
        probe.read(live)
        assert probe.problem() is None
        bpf.delete(probe._loaded.maps["instructions"][0], LAST_CPU.to_bytes(4, sys.byteorder))
        group.start(["taskset", "-c", str(LAST_CPU), sys.executable, "-c", "for _ in range(10 ** 7): pass"]).wait()
        observed = probe.read(live)
        assert counters_of(observed, group).cycles < cpu_time_ns(group) / 2
    problem = probe.problem()
    assert problem is not None
    assert problem.reason.endswith(f"runs were not counted: the counters of these CPUs cannot be read: {LAST_CPU}")


def test_it_holds_no_descriptor_of_an_event(probe: CountersProbe) -> None:
    here = Path("/proc/self/fd")
    assert {str((here / str(fd)).readlink()) for fd in probe._loaded.descriptors} >= {"anon_inode:bpf-map"}
    held = {str(entry.readlink()) for entry in here.iterdir() if entry.is_symlink()}
    assert "anon_inode:[perf_event]" not in held
    until(lambda: by_cpu(probe.read({})).keys() == set(online_cpus()), "and yet each CPU counts")


def test_without_hardware_counters_it_says_so() -> None:
    require_root()
    with suppress(Unavailable):
        countable_events(EVENTS, online_cpus()[0])
        pytest.skip("this machine has hardware counters")
    with pytest.raises(Unavailable, match=r"^this machine has no hardware counters: ") as refused:
        open_counters()
    assert "hypervisors often hide them" in refused.value.remedy


def test_a_loop_of_python_takes_a_plausible_number_of_cycles_an_instruction() -> None:
    with (
        opened(open_counters, lacking="this machine has no hardware counters") as source,
        cgroup(require_writable_cgroups(), "computing") as group,
    ):
        group.burn(1)
        time.sleep(1.0)
        end(group)
        counted = counters_of(source.read({group.id: group.path}), group)
    assert 0.1 < counted.cycles / counted.instructions < 10


def test_the_third_counter_is_left_out_where_there_is_none() -> None:
    require_root()
    nonsense = PerfEvent(SOFTWARE, 1 << 20)
    assert OPTIONAL_EVENT not in countable_events({**CLOCKS, OPTIONAL_EVENT: nonsense}, online_cpus()[0])
    with pytest.raises(Unavailable, match="this machine has no hardware counters"):
        countable_events({**CLOCKS, "cycles": nonsense}, online_cpus()[0])
    with opened(partial(open_counters, events={**CLOCKS, OPTIONAL_EVENT: nonsense})) as source:
        until(lambda: {of.misses for of in by_cpu(source.read({})).values()} == {None})


def test_a_counter_that_stands_still_is_no_counter() -> None:
    """As on virtual machines whose hypervisor shows counters and does not count: emulation faults never happen on x86."""
    require_root()
    stuck = PerfEvent(SOFTWARE, 8)
    fd = open_on_cpu(stuck, online_cpus()[0])
    try:
        if read_count(fd):
            pytest.skip("this machine emulates instructions")
    finally:
        os.close(fd)
    with pytest.raises(Unavailable, match="the counter of instructions on CPU 0 does not grow"):
        countable_events({**CLOCKS, "instructions": stuck}, 0)


def test_it_needs_what_its_row_of_the_registry_says() -> None:
    """The common test of the registry skips this probe on machines without hardware counters."""
    with opened(partial(open_counters, events=CLOCKS)) as source:
        form = source.form
    row = BY_NAME["counters"]
    assert json.loads(having(row.capabilities, TRY)) == [form]
    for left_out in row.capabilities:
        reason, remedy = json.loads(having(tuple(name for name in row.capabilities if name != left_out), TRY))
        assert "Operation not permitted" in reason
        assert remedy == REMEDIES["permission"]


def test_a_closed_probe_says_so(probe: CountersProbe) -> None:
    probe.close()
    probe.close()
    with pytest.raises(Unavailable, match="is closed"):
        probe.read({})
