"""The simulated node: distribution of CPU, run-queue latency, and conservation of CPU time."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.config.config import AgentConfig
from agent.offline.simulation import workloads
from agent.offline.simulation.simulator import IDLE_DELAY_S, SLICE_S, Simulation, run_simulation
from agent.offline.simulation.workloads import (
    LOAD_KINDS,
    SimulationPlan,
    build_batch_job,
    build_node,
    build_service,
    build_topology,
)
from api.decision import Decision
from api.knobs import Knob, Reason
from api.rates import compute_rates

WHY = Reason(rule="test", text="test")


def decision(cgroup: str, knob: Knob, value: str) -> Decision:
    return Decision(cgroup=cgroup, cgroup_id=1, pod="sim/x", knob=knob, value=value, reason=WHY)


def plan(online_cores: float, batch_cores: float, cpus: int = 4) -> SimulationPlan:
    web = replace(build_service("web", "flat", online_cores), load=lambda _at_s: 1.0)
    return SimulationPlan(
        topology=build_topology(cpus, 1, 1), memory_bytes=1 << 34, services=(web, build_batch_job("batch", batch_cores))
    )


def used(simulation: Simulation, seconds: float = 10.0) -> dict[str, float]:
    before = simulation.step(seconds)
    change = compute_rates(before, simulation.step(seconds))
    assert change is not None
    result = {path.rpartition("/")[2]: rate.cpu_cores or 0.0 for path, rate in change.cgroups.items() if path != "/"}
    assert change.node.busy_cores == pytest.approx(sum(result.values()))
    return result


@pytest.mark.parametrize(
    ("online", "greedy", "knobs", "web", "rest"),
    [
        (1.0, 2.0, {}, 1.0, 2.0),
        # demand besides the backlog of the previous step: 3 cores and 6
        (2.0, 6.0, {}, 4 / 3, 8 / 3),
        (3.0, 6.0, {Knob.IDLE: "1"}, 3.0, 1.0),
        (3.0, 6.0, {Knob.IDLE: "1", Knob.QUOTA: "50000 100000"}, 3.0, 0.5),
        (1.0, 6.0, {Knob.CPUSET: "3"}, 1.0, 1.0),
        (3.0, 6.0, {Knob.CPUSET: "2-3", Knob.IDLE: "1"}, 3.0, 0.5),
    ],
    ids=["room for both", "in proportion", "what is left", "a limit", "a CPU of its own", "the rest of two CPUs"],
)
def test_distribution_of_cpu(online: float, greedy: float, knobs: dict[Knob, str], web: float, rest: float) -> None:
    simulation = Simulation(plan(online, greedy))
    simulation.apply(decision("/pods/batch", knob, value) for knob, value in knobs.items())
    got = used(simulation)
    assert got["batch"] == pytest.approx(rest, rel=0.01)
    assert got["web"] == pytest.approx(web, rel=0.01)


@pytest.mark.parametrize(("idle", "delay_s"), [("1", IDLE_DELAY_S), ("0", SLICE_S)])
def test_latency_by_batch_work_is_attributed_to_it(idle: str, delay_s: float) -> None:
    """Batch work has 3 of 4 CPUs, so three quarters of the 1,000 requests a second, half a millisecond each, meet it."""
    simulation = Simulation(plan(0.5, 3.0))
    simulation.apply([decision("/pods/batch", Knob.IDLE, idle)])
    before, after = (simulation.step(10.0).cgroups["/pods/web"].blame for _ in range(2))
    assert before is not None
    assert after is not None
    met = after.by_cgroup["/pods/batch"] - before.by_cgroup["/pods/batch"]
    assert met / 1e9 == pytest.approx(10 * 1000 * 0.75 * delay_s, rel=0.01)


def test_delayed_work_is_done_later_or_abandoned() -> None:
    """6 cores' worth on 4 CPUs for 30 s: 2 are short in every second. The queue grows to five seconds of the peak and no
    further: 30 core seconds, done in 7.5 s without other demand, in which there is no shortage."""
    built = plan(6.0, 0.0)
    web = replace(built.services[0], load=lambda at_s: float(at_s < 30))
    simulation = Simulation(replace(built, services=(web, built.services[1])))
    shortage, done = [], []
    for _ in range(9):
        sample = simulation.step(5.0).cgroups["/pods/web"]
        shortage.append(simulation.shortage_s)
        done.append((sample.cpu_usage_ns or 0) / 1e9)
    assert shortage == pytest.approx([10.0] * 6 + [0.0] * 3)
    assert done == pytest.approx([20, 40, 60, 80, 100, 120, 140, 150, 150])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(1, 1), (2, 1), (7, 1), (48, 2), (64, 8)]),
    st.lists(st.sampled_from(sorted(LOAD_KINDS)), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from(["latency", "canonical", "none"]),
)
def test_cpu_time_is_conserved(size: tuple[int, int], kinds: list[str], online: int, policy: str) -> None:
    """No CPU is used twice, counters grow, and no service gets more than its demand."""
    built = build_node(*size, kinds, online=online, seed=1)
    config = msgspec.convert({"advisor": {"policy": policy}}, AgentConfig)
    before = None
    for finished, fact, mark in run_simulation(built, config, seconds=100, interval_s=5):
        snapshot = finished.snapshot
        assert fact.online_cores + fact.batch_cores <= size[0] * (1 + 1e-9)
        assert 0 <= mark.reclaimable_cores <= size[0]
        for path, sample in snapshot.cgroups.items():
            if before is not None and sample.wait is not None:
                assert min(b - a for a, b in zip(before[path].wait.slots, sample.wait.slots, strict=True)) >= 0
        before = snapshot.cgroups


def test_machines_are_numbered_as_linux_does() -> None:
    cpus = workloads.build_topology(16, 4).cpus
    assert [(c.core, c.numa, c.socket) for c in cpus[:8]] == [
        (0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 1, 0), (4, 2, 1), (5, 2, 1), (6, 3, 1), (7, 3, 1),
    ]  # fmt: skip
    assert [(c.id, c.core) for c in cpus if c.core == 3] == [(3, 3), (11, 3)]
    with pytest.raises(ValueError, match="cannot be divided"):
        workloads.build_topology(10, 4)
