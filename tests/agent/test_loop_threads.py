"""The objects that the cycle thread and the event loop share: the sensor and the admitted containers."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
import pytest

from agent.config.qrm import CpuPlacementConfig
from agent.katalyst.admission import AdmissionInputs
from agent.katalyst.peers import ComponentStatus
from agent.katalyst.resource_plugin import ResourcePluginServer
from agent.qrm.cpuset.allocate import allocate_cpusets
from agent.qrm.cpuset.state import CpusetEntry, CpusetState
from agent.sensors.node.node_reader import NodeReader
from agent.sensors.pods.pod_indicators import PodIndicatorScraper
from agent.sensors.snapshot import Sensor
from api.interfaces import Unavailable
from api.snapshot import RunqLatency
from tests.agent.katalyst.builders import node, pod
from tests.agent.sensors.sensor_machine import Machine, status


class SlowLatencies:
    """A run-queue latency source whose full read takes until `release`."""

    form, lost_events = "tp_btf", None

    def __init__(self) -> None:
        self.reading, self.release = threading.Event(), threading.Event()

    def read(
        self, _live: Mapping[int, str], cgroup_ids: Collection[int] | None = None, *, complete: bool = True
    ) -> Mapping[int, RunqLatency]:
        if cgroup_ids is None:
            self.reading.set()
            assert self.release.wait(10)
        return {}

    def problem(self) -> Unavailable | None:
        return None

    def close(self) -> None: ...


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_latency_watch_skips_a_look_while_a_snapshot_reads_the_same_probe(machine: Machine) -> None:
    latencies = SlowLatencies()
    sensor = machine.sensor(waits=latencies)
    cycle = threading.Thread(target=sensor.snapshot, args=(1, 1, 1))
    cycle.start()
    assert latencies.reading.wait(10)
    assert sensor.read_runq_latency([1]) is None, "the event loop does not wait for the snapshot"
    latencies.release.set()
    cycle.join(10)
    assert sensor.read_runq_latency([1]) == {}


def test_health_of_the_event_loop_is_read_there_and_shown_in_the_next_snapshot(machine: Machine) -> None:
    threads: list[str] = []

    def problem() -> Unavailable:
        threads.append(threading.current_thread().name)
        return Unavailable("a task failed", "see the log")

    tasks = ComponentStatus("tasks", "asyncio", problem)
    sensor = Sensor(
        cgroups=machine.sensor()._cgroups,
        node=NodeReader(machine.root / "proc", machine.root / "sys", live=False),
        sys=machine.root / "sys",
        pods=machine.pods,
        waits=machine.waits,
        indicators=PodIndicatorScraper(),
        loop_reporters=(tasks,),
    )
    sensor.read_loop_reporters()
    cycle = threading.Thread(target=lambda: snapshots.append(sensor.snapshot(1, 1, 1)))
    snapshots = []
    cycle.start()
    cycle.join(10)
    assert threads == [threading.current_thread().name]
    assert (status(snapshots[0], "tasks").ok, status(snapshots[0], "tasks").error) == (False, "a task failed")


def test_a_container_that_is_admitted_while_a_cycle_is_evaluated_keeps_its_cpus() -> None:
    """The cycle's snapshot lists the pod, but its CPU assignment was evaluated before the admission."""
    config = CpuPlacementConfig(ramp_up_s=0, reserved_cpus=2)
    other, web = pod("other", cores=4), pod("web", cores=4)
    _allocation, state = allocate_cpusets((), (other,), node(), CpusetState(policy_name="dynamic"), config, 5)
    inputs = AdmissionInputs(
        topology=node(), pods=(other,), sizes=(), state=state, config=config, memory_by_numa={0: 1, 1: 1}
    )
    server = ResourcePluginServer(now_ns=lambda: 7)
    server.update(inputs)
    entry = CpusetEntry(owner_pool_name="dedicated", allocation_result="3-6", container_name="main")
    server._admitted[web.uid], server._since_ns[web.uid] = web, 7
    server._entries[web.uid] = {"main": entry}
    server.update(msgspec.structs.replace(inputs, pods=(other, web)))
    assert server.merge_into(state).pod(web.uid) == {"main": entry}
    server.update(msgspec.structs.replace(inputs, pods=(other, web), state=server.merge_into(state)))
    assert server.merge_into(state).pod(web.uid) == {}, "the state has it, so the admission is not kept twice"
