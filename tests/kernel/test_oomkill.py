"""A process that wants more than its cgroup may have is killed, once, and known by name; other cgroups are not."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from api.interfaces import ProbeReading
from api.snapshot import OomVictim
from probes.oomkill import OomKillProbe, open_oomkill
from tests.kernel.open_probes import opened, probe_fixture
from tests.kernel.real_cgroups import TestCgroup, cgroup, limit_memory, require_writable_cgroups

pytestmark = pytest.mark.kernel

HOG = "blocks = []\nwhile True: blocks.append(bytearray(b'x') * (1 << 20))"
TRACEPOINTS = ("tp_btf", "raw_tp")
"""Forms that run at tracepoints. Where functions can be probed, in a VM, tests/vm/test_probes_memory.py does that."""
LACKING = "mark_victim of this kernel passes (s32"
COMMAND = Path(sys.executable).name[:15]


probe = probe_fixture(open_oomkill, TRACEPOINTS, lacking=LACKING)


def die(group: TestCgroup) -> int:
    """Kill one process of this cgroup by its limit; its number."""
    limit_memory(group, 24 << 20)
    hog = group.start([sys.executable, "-c", HOG])
    assert hog.wait() == -signal.SIGKILL
    return hog.pid


def kernels_count(group: TestCgroup) -> int:
    name = "memory.events" if group.hierarchy.mode == "v2" else "memory.oom_control"
    kills = re.search(r"^oom_kill (\d+)$", group.file("memory", name).read_text(), re.MULTILINE)
    assert kills is not None
    return int(kills[1])


def victims(observed: ProbeReading) -> list[OomVictim]:
    kills = observed.node["oom_victims"]
    assert isinstance(kills, tuple)
    return [each for each in kills if f"dioptase-test-{os.getpid()}-" in each.cgroup or each.cgroup.startswith("id ")]


def test_one_process_over_its_limit_is_one_kill(probe: OomKillProbe) -> None:
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "over") as group, cgroup(hierarchy, "sibling") as sibling:
        live = {group.id: group.path, sibling.id: sibling.path}
        assert probe.read(live).cgroups == {key: {"oom_kills": 0} for key in live}
        earlier = time.time_ns()
        pid = die(group)
        later = time.time_ns()
        observed = probe.read(live)
        assert observed.cgroups[group.id] == {"oom_kills": 1}
        assert kernels_count(group) == 1
        assert observed.cgroups[sibling.id] == {"oom_kills": 0}
    (victim,) = victims(observed)
    assert (victim.cgroup, victim.pid, victim.command) == (group.path, pid, COMMAND)
    assert earlier - 1_000_000 <= victim.wall_time_ns <= later + 1_000_000
    assert probe.problem() is None


def test_victims_keep_their_order_and_the_path_that_the_listing_before_had(probe: OomKillProbe) -> None:
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "known") as live_before, cgroup(hierarchy, "never-listed") as unknown:
        listing = {live_before.id: live_before.path}
        probe.read(listing)
        pids, ids = [die(live_before), die(unknown), die(live_before)], (live_before.id, unknown.id)
    observed = probe.read({1: "/"})
    assert [victim.pid for victim in victims(observed)] == pids
    assert [victim.cgroup for victim in victims(observed)] == [live_before.path, f"id {ids[1]}", live_before.path]
    assert [observed.cgroups[number] for number in ids] == [{"oom_kills": 2}, {"oom_kills": 1}]
    assert not probe.read({1: "/"}).cgroups.keys() & set(ids), "gone from two listings"
    assert [victim.pid for victim in victims(probe.read({}))] == pids


def test_more_kills_than_the_ring_holds_are_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.oomkill.RING_VICTIMS", 2)
    hierarchy = require_writable_cgroups()
    with opened(open_oomkill, lacking=LACKING) as probe, cgroup(hierarchy, "many") as group:
        live = {group.id: group.path, 1: "/"}
        probe.read(live)
        pids = [die(group) for _ in range(3)]
        observed, problem = probe.read(live), probe.problem()
        assert kernels_count(group) == 3
        monkeypatch.setattr("probes.lost_events.RECENT_S", 0.0)
        assert (probe.problem(), probe.lost_events) == (None, 1), "past, and still counted"
        later = [probe.read(dict(live)) for _ in range(2)][1]
        assert later.cgroups == {group.id: {"oom_kills": 2}, 1: {"oom_kills": 0}}
        assert observed.cgroups == {group.id: {"oom_kills": 2}}, "of others it is not known that they had none"
    assert [victim.pid for victim in victims(observed)] == pids[1:]
    assert problem is not None
    assert problem.reason == "1 kills were not attributed: more than 2 happened between two reads"
