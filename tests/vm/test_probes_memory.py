"""Reclaim, kswapd and OOM kills on version 2 with two NUMA nodes, in every form at once and in the kernel's own books."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.triggers.psi_triggers import open_psi_trigger
from api.interfaces import ProbeReading
from api.snapshot import Kswapd, OomVictim, ReclaimLatency
from api.units import MIB
from probes.per_cgroup_probe import ROOT_CGROUP_ID
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, limit_memory
from tests.kernel.test_oomkill import HOG as ENDLESS
from tests.vm.conftest import Programs
from tests.vm.workloads import fires, free_bytes, generations, numbers, vmstat

pytestmark = pytest.mark.vm_probes

FIELDS = ("wakeups", "scanned_pages", "reclaimed_pages", "active_ns")
HIGH, USED = 64 * MIB, 128 * MIB
TOUCH = """
import mmap, sys
size = int(sys.argv[1])
block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
line = b"z" * (1 << 20)
for _ in range(size >> 20): block.write(line)
"""
"""Fills so much memory, a megabyte at a time."""


class Squeezed:
    """A cgroup that had twice what memory.high lets it have, after it has ended."""

    def __init__(self, programs: Programs, hierarchy: Hierarchy, group: TestCgroup, other: TestCgroup) -> None:
        probes = programs("kswapd")
        live = {ROOT_CGROUP_ID: "/", group.id: group.path, other.id: other.path}
        before = {form: probe.read(live).cgroups for form, probe in probes.items()}
        group.file("memory", "memory.high").write_text(str(HIGH))
        trigger = open_psi_trigger(group.file("memory", "memory.pressure"), 50_000, 1_000_000)
        self.quiet = fires(trigger, 1.0)
        assert group.start([sys.executable, "-c", TOUCH, str(USED)]).wait() == 0
        self.fired = fires(trigger, 1.0)
        trigger.close()
        self.events = numbers(group, "memory.events")
        after = {form: probe.read(live).cgroups for form, probe in probes.items()}
        self.reclaims = {
            form: [observed[of.id]["reclaim"] for of in (group, other)] for form, observed in after.items()
        }
        # memory.high's own worker is a kernel thread, and those are the root's.
        self.by_worker = {
            form: after[form][ROOT_CGROUP_ID]["reclaim"].limit.count
            - before[form][ROOT_CGROUP_ID]["reclaim"].limit.count
            for form in probes
        }
        reader = CgroupReader(hierarchy)
        self.sample = reader.read()[group.path]
        reader.close()


@pytest.fixture(scope="module")
def squeezed(programs: Programs, hierarchy: Hierarchy) -> Iterator[Squeezed]:
    with cgroup(hierarchy, "squeezed") as group, cgroup(hierarchy, "beside-it") as other:
        yield Squeezed(programs, hierarchy, group, other)


@pytest.mark.parametrize("form", ["tp_btf", "raw_tp"])
def test_each_high_event_is_a_reclaim_that_the_probe_saw(squeezed: Squeezed, form: str) -> None:
    reclaim, other = squeezed.reclaims[form]
    assert isinstance(reclaim, ReclaimLatency)
    assert isinstance(other, ReclaimLatency)
    assert squeezed.events["high"] >= 10
    assert reclaim.limit.count + squeezed.by_worker[form] == squeezed.events["high"]
    assert reclaim.limit.slots is not None
    assert sum(reclaim.limit.slots) == reclaim.limit.count
    assert reclaim.reclaimed_pages * 4096 >= USED - HIGH - 4 * MIB, "what does not fit has to go"
    assert (other.limit.count, other.reclaimed_pages) == (0, 0)


def test_the_agent_reads_the_same_events(squeezed: Squeezed) -> None:
    sample = squeezed.sample
    assert sample.memory_events["high"] == squeezed.events["high"]
    assert squeezed.events["max"] == squeezed.events["oom_kill"] == 0
    assert sample.limits.memory_high_bytes == HIGH


def test_reclaim_is_memory_pressure_that_fires_a_trigger(squeezed: Squeezed) -> None:
    assert (squeezed.quiet, squeezed.fired) == (False, True)


def nodes_of(reading: ProbeReading) -> Mapping[int, Kswapd]:
    result = reading.node["kswapd"]
    assert isinstance(result, dict)
    return result


def test_a_hog_bound_to_node_1_wakes_its_kswapd_alone_and_is_named(programs: Programs, hierarchy: Hierarchy) -> None:
    """It takes all that is free there and 150 MiB more. Sums over the nodes are those of /proc/vmstat."""
    probes = programs("kswapd")
    with cgroup(hierarchy, "hog") as group, cgroup(hierarchy, "beside-hog") as result:
        group.file("cpuset", "cpuset.mems").write_text("1")
        live = {ROOT_CGROUP_ID: "/", group.id: group.path, result.id: result.path}
        before = {form: probe.read(live) for form, probe in probes.items()}
        books = vmstat()
        assert group.start([sys.executable, "-c", TOUCH, str(free_bytes(1) + 150 * MIB)]).wait() == 0
        still = [vmstat()]

        def rests() -> bool:
            still.append(vmstat())
            return all(still[-1][name] == still[-2][name] for name in ("pageoutrun", "pgsteal_kswapd", "pgscan_kswapd"))

        until(lambda: not time.sleep(0.5) and rests(), "kswapd is done when the hog is gone")
        books = {name: now - books[name] for name, now in still[-1].items()}
        after = {form: probe.read(live) for form, probe in probes.items()}
        assert probes.keys() == {"tp_btf", "raw_tp"}
        for form in probes:
            grown = {
                number: {name: getattr(now, name) - getattr(nodes_of(before[form])[number], name) for name in FIELDS}
                for number, now in nodes_of(after[form]).items()
            }
            assert grown.keys() == {0, 1}
            assert grown[0]["wakeups"] == 0, grown
            assert grown[1]["wakeups"] > 0
            assert grown[1]["wakeups"] == books["pageoutrun"]
            assert grown[1]["active_ns"] > 0
            assert grown[1]["reclaimed_pages"] == books["pgsteal_kswapd"]
            scanned, samples = grown[1]["scanned_pages"], books["pgscan_kswapd"]
            if generations():
                # The books count what was taken off a list; what was only sorted, and looked at twice, apart.
                assert samples <= scanned <= 2 * (samples + books["pgrefill"])
            else:
                assert 0.9 * samples <= scanned <= samples
            named, other = (after[form].cgroups[of.id]["reclaim"] for of in (group, result))
            assert isinstance(named, ReclaimLatency)
            assert isinstance(other, ReclaimLatency)
            assert named.kswapd_wakeups > 0
            assert other.kswapd_wakeups == other.direct.count == 0


def test_an_oom_kill_is_counted_for_its_cgroup_in_every_form(programs: Programs, hierarchy: Hierarchy) -> None:
    probes = programs("oomkill")
    assert probes.keys() == {"tp_btf", "raw_tp", "fentry", "kprobe"}
    with cgroup(hierarchy, "over") as group, cgroup(hierarchy, "beside-over") as other:
        live = {group.id: group.path, other.id: other.path}
        limit_memory(group, 24 * MIB)
        hog = group.start([sys.executable, "-c", ENDLESS])
        assert hog.wait() == -signal.SIGKILL
        assert numbers(group, "memory.events")["oom_kill"] == 1
        for form, probe in probes.items():
            observed = probe.read(live)
            assert {number: observed.cgroups[number]["oom_kills"] for number in live} == {group.id: 1, other.id: 0}, (
                form
            )
            (victim,) = (each for each in observed.node["oom_victims"] if each.cgroup == group.path)
            assert isinstance(victim, OomVictim)
            assert (victim.pid, victim.command) == (hog.pid, Path(sys.executable).name[:15])
