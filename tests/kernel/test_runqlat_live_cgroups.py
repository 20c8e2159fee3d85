"""What a list of live cgroups does to the probe's answer: zeros for those that never waited, places kept, places missing."""

from __future__ import annotations

import os
import subprocess

import msgspec
import pytest

from api.snapshot import RunqLatency
from probes.loader import load
from probes.maps import cpu_id_limit
from probes.per_cgroup_probe import ROOT_CGROUP_ID
from probes.runqlat import RunqLatencyProbe, job
from tests.kernel.open_probes import probe
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel

FORMS = ("tp_btf", "raw_tp", "classic")
NAP = ["/bin/sleep", "0.01"]
"""Gets a CPU at least once after it joined: when its sleep ends."""
ZERO = RunqLatency(sum_ns=0, count=0, slots=(0,) * 27)


def test_a_live_cgroup_that_never_ran_has_waited_zero_times() -> None:
    """So that its first waits are a growth of something, and a quiet cgroup is known to be quiet."""
    hierarchy = require_writable_cgroups()
    with probe(*FORMS) as source, cgroup(hierarchy, "quiet") as quiet:
        live = {ROOT_CGROUP_ID: "/", quiet.id: quiet.path}
        assert source.read(live)[quiet.id] == ZERO
        assert quiet.id not in source.read({ROOT_CGROUP_ID: "/"}), "not listed: nothing is known of it"
        quiet.start(NAP).wait()
        assert source.read(live)[quiet.id].count > 0
        assert source.problem() is None


def test_only_the_wanted_are_read() -> None:
    hierarchy = require_writable_cgroups()
    with probe(*FORMS) as source, cgroup(hierarchy, "one") as single, cgroup(hierarchy, "two") as two:
        live = {ROOT_CGROUP_ID: "/", single.id: single.path, two.id: two.path}
        for group in (single, two):
            group.start(NAP).wait()
        everything = source.read(live)
        assert everything.keys() >= live.keys()
        assert source.read(live, {single.id}).keys() == {single.id}
        assert source.read(live, {single.id})[single.id].count >= everything[single.id].count > 0
        assert source.read(live, {two.id + 10**9}) == {}, "wanted, but it does not exist"
        assert source.read(live, frozenset()) == {}


def test_an_incomplete_listing_drops_no_cgroup() -> None:
    hierarchy = require_writable_cgroups()
    with probe(*FORMS) as source, cgroup(hierarchy, "unlisted") as group:
        group.start(NAP).wait()
        first = source.read({group.id: group.path})[group.id]
        for _ in range(4):
            source.read({ROOT_CGROUP_ID: "/"}, complete=False)
        assert source.read({ROOT_CGROUP_ID: "/"}, complete=False)[group.id].count >= first.count > 0
        for _ in range(2):
            source.read({ROOT_CGROUP_ID: "/"})
        assert group.id not in source.read({ROOT_CGROUP_ID: "/"}), "two complete listings do forget it"


def test_a_full_table_says_so_and_calls_nothing_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 places for 24 cgroups that ran: at least 8 have no place, and theirs may be the waits that were lost."""
    hierarchy = require_writable_cgroups()
    with probe(*FORMS) as example:
        form = example.form
    small = job((form,), cpu_id_limit())
    small = msgspec.structs.replace(small, constants={**small.constants, "CGROUP_SLOTS": 16})
    with load(small) as loaded:
        source = RunqLatencyProbe(loaded)
        groups = [TestCgroup(hierarchy, f"/dioptase-test-{os.getpid()}-over-{n}") for n in range(24)]
        try:
            assert source.problem() is None
            for group in groups:
                group.start(NAP).wait()
            waits = source.read({group.id: group.path for group in groups})
            assert ZERO not in waits.values()
            assert 14 <= len(waits) <= 16, "nearly all slots are taken"
            assert waits.keys() & {group.id for group in groups}
            problem = source.problem()
            assert problem is not None
            assert int(problem.reason.split()[0]) == source.lost().full >= 24 - 16
            assert "no slot in the table of 16" in problem.reason
            assert "remove unused cgroups" in problem.remedy
            monkeypatch.setattr("probes.lost_events.RECENT_S", 0.0)
            assert source.problem() is None, "what is long past is no problem, and stays counted"
            assert (source.lost_events or 0) >= source.lost().full
        finally:
            for group in groups:
                group.close()


def test_whatever_was_not_counted_is_lost_and_what_the_kernel_left_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot for all tasks: nearly every wait of the classic form finds another task's stamp there."""
    with probe("classic"):
        pass
    small = job(("classic",), cpu_id_limit())
    small = msgspec.structs.replace(small, constants={**small.constants, "TASK_SLOTS": 1})
    with load(small) as loaded:
        source = RunqLatencyProbe(loaded)
        programs = source.stats()
        monkeypatch.setattr(
            source, "stats", lambda: {name: info._replace(missed=1000) for name, info in programs.items()}
        )
        for _ in range(50):
            subprocess.run(["true"], check=True)
        source.read({ROOT_CGROUP_ID: "/"})
        counted = (source.lost_events or 0) - 1000 * len(programs)
        assert 10 < counted <= source.lost().task_slot + source.lost().backwards
        assert source.problem() is None, "no remedy exists"
        programs = {}
        source.read({ROOT_CGROUP_ID: "/"})
        assert (source.lost_events or 0) >= 3000 + counted, "the kernel is not read each time"
        source.close()
