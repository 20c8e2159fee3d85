"""One snapshot from all sources: what each gives, and that one which fails costs its own part and is seen to fail."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import msgspec
import pytest

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from api.interfaces import Unavailable
from api.pod import Container
from api.qos import QoSLevel
from api.snapshot import CgroupSample, RunqLatency, Snapshot
from tests.agent.sensors import kernel_trees
from tests.agent.sensors.sensor_machine import WEB, Machine, status


def test_everything_is_in_one_snapshot(machine: Machine) -> None:
    snapshot = machine.sensor().snapshot(7, 1000, 2000)
    assert (snapshot.seq, snapshot.taken_at_ns, snapshot.wall_time_ns, snapshot.boot_id) == (7, 1000, 2000, "b7c1")
    assert snapshot.topology.ids == (0, 1)
    assert snapshot.pods == (WEB,)
    assert snapshot.node.load == (0.84, 1.82, 1.08)
    assert snapshot.cgroups.keys() == {"/", "/web"}
    web = snapshot.cgroups["/web"]
    assert (web.id, web.cpu_usage_ns, web.wait) == (machine.web_id, 1_500_000_000, RunqLatency(sum_ns=5, count=1))
    assert all(source.ok and source.duration_ns >= 0 for source in snapshot.sources)
    assert {source.name for source in snapshot.sources} == {
        "pods",
        "topology",
        "node",
        "cgroups",
        "waits",
        "indicators",
    }
    assert status(snapshot, "waits").detail == "tp_btf"
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot) == snapshot


def test_a_cgroup_without_waits_has_none_and_not_zero(machine: Machine) -> None:
    machine.waits.answer = lambda live: {}
    assert machine.sensor().snapshot(1, 1, 1).cgroups["/web"].wait is None


def test_a_probe_reads_everything_per_snapshot_and_the_requested_cgroups_in_between(machine: Machine) -> None:
    batch = msgspec.structs.replace(
        WEB, uid="b", name="batch", qos=QoSLevel.RECLAIMED, containers=(Container(name="b", cgroup="/batch"),)
    )
    kernel_trees.v1(machine.root, ("batch",))
    machine.pods.answer = lambda: (WEB, batch)
    sensor = machine.sensor()
    sensor.snapshot(1, 1, 1)
    sensor.read_runq_latency({machine.web_id})
    assert machine.waits.requests == [(None, True), ({machine.web_id}, False)]


def test_a_list_with_gaps_is_not_called_complete(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_reader: CgroupReader, *_: int) -> dict[str, CgroupSample]:
        raise Unavailable("the root of the cgroup tree cannot be read", "mount it")

    kernel_trees.v1(machine.root, ("other",))
    machine.sensor(limit=2).snapshot(1, 1, 1)
    sensor = machine.sensor()
    sensor.snapshot(1, 1, 1)
    monkeypatch.setattr(CgroupReader, "read", refuse)
    assert not status(sensor.snapshot(2, 2, 2), "cgroups").ok
    assert [complete for _, complete in machine.waits.requests] == [False, True, False]


def test_switches_that_were_lost_turn_the_waits_bad_and_keep_the_rest(machine: Machine) -> None:
    machine.waits.lost = Unavailable("3 switches were not counted", "remove cgroups")
    snapshot = machine.sensor().snapshot(1, 1, 1)
    waits = status(snapshot, "waits")
    assert (waits.ok, waits.error, waits.remedy) == (False, "3 switches were not counted", "remove cgroups")
    assert waits.detail == "tp_btf"
    assert snapshot.cgroups["/web"].wait == RunqLatency(sum_ns=5, count=1)


def test_what_was_lost_long_ago_is_counted_and_no_problem(machine: Machine) -> None:
    machine.waits.lost_events = 3
    waits = status(machine.sensor().snapshot(1, 1, 1), "waits")
    assert (waits.ok, waits.error, waits.lost_events) == (True, "", 3)


def test_a_zero_of_a_cgroup_without_cpu_controller_is_its_ancestors_and_not_known(machine: Machine) -> None:
    zero = RunqLatency(sum_ns=0, count=0, slots=(0,) * 27)
    machine.waits.answer = lambda live: dict.fromkeys(live, zero)
    assert machine.sensor().snapshot(1, 1, 1).cgroups["/web"].wait == zero
    (machine.root / "cpu/web/cpu.stat").write_text("usage_usec 1\n")
    (machine.root / "unified/web/cpu.stat").write_text("usage_usec 1\n")
    assert machine.sensor().snapshot(1, 1, 1).cgroups["/web"].wait is None


def test_waits_that_cannot_be_had_say_why_in_every_snapshot(machine: Machine) -> None:
    def refuse(_live: Mapping[int, str]) -> Mapping[int, RunqLatency]:
        raise Unavailable("the kernel refuses BPF", "grant CAP_BPF")

    machine.waits.answer = refuse
    sensor = machine.sensor()
    for seq in (1, 2):
        snapshot = sensor.snapshot(seq, seq, seq)
        waits = status(snapshot, "waits")
        assert (waits.ok, waits.error, waits.remedy) == (False, "the kernel refuses BPF", "grant CAP_BPF")
        assert snapshot.cgroups["/web"].wait is None
        assert status(snapshot, "cgroups").ok
    assert sensor.read_runq_latency({machine.web_id}) == {}


def test_a_bug_in_a_source_is_seen_and_costs_only_its_part(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    def bug(_live: Mapping[int, str]) -> Mapping[int, RunqLatency]:
        raise KeyError("slot 27")

    machine.waits.answer = bug
    sensor = machine.sensor()
    for seq in (1, 2, 3):
        snapshot = sensor.snapshot(seq, seq, seq)
        assert sensor.read_runq_latency({machine.web_id}) == {}
    waits = status(snapshot, "waits")
    assert (waits.ok, waits.error) == (False, "KeyError: 'slot 27'")
    assert "bug" in waits.remedy
    assert snapshot.cgroups["/web"].cpu_usage_ns == 1_500_000_000
    assert len(caplog.records) == 1, "logged once, shown each time"


def test_cpus_that_come_and_go_change_the_topology(machine: Machine) -> None:
    sensor = machine.sensor()
    assert sensor.snapshot(1, 1, 1).topology.ids == (0, 1)
    kernel_trees.make(machine.root / "sys", {"devices/system/cpu/online": "1\n"})
    assert sensor.snapshot(2, 2, 2).topology.ids == (1,)


def test_a_machine_that_loses_everything_still_gives_snapshots(machine: Machine) -> None:
    sensor = machine.sensor()
    sensor.snapshot(1, 1, 1)
    for name in ("proc", "sys", "cpuacct", "memory", "pids", "unified"):
        shutil.rmtree(machine.root / name)
    shutil.rmtree(machine.root / "cpu/web")
    (machine.root / "cpu/cpu.stat").unlink()
    snapshot = sensor.snapshot(2, 2, 2)
    assert snapshot.cgroups.keys() == {"/"}
    assert snapshot.seq == 2
