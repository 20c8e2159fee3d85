"""Katalyst's canonical estimate, pools and headroom: the numbers of its tutorial and of its own tests."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState, ContainerDemand
from agent.advisor.cpu_estimate import estimate_container_cores
from agent.advisor.engine import advise_cpu
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from api.pod import Container
from tests.agent.advisor.cycles import advice_of, advise_cycles, evaluate_cycles
from tests.builders.nodes import run_queue_latency as waits
from tests.builders.nodes import topology
from tests.builders.pods import shared
from tests.builders.snapshots import snapshot

CONFIG = AdvisorConfig(policy="canonical")


@pytest.mark.parametrize(
    ("request_cores", "usage", "load1", "ramping", "expected"),
    [
        (4.0, 2.0, None, True, 4.0),  # ramping up: the request
        (4.0, 2.0, None, False, 2.5),  # steady: use x 1.25
        (4.0, 2.0, 3.1, False, 3.1),  # load above use
        (4.0, None, None, False, 4.0),  # not measured: the request
        (None, None, None, False, 4.0),  # neither measured nor requested
        (None, 0.0, 0.0, False, 0.0),  # measured idle
    ],
)
def test_estimate_of_a_container(
    request_cores: float | None, usage: float | None, load1: float | None, ramping: bool, expected: float
) -> None:
    container = Container(name="c", cgroup="/c", cpu_request_cores=request_cores)
    state = ContainerDemand(
        cgroup_id=1, first_seen_ns=0, last_seen_ns=0, ramping=ramping, usage_cores=usage, load1=load1
    )
    assert estimate_container_cores(container, state, CONFIG) == pytest.approx(expected)


def test_load_has_the_time_of_its_last_measurement() -> None:
    """One task runs and two wait; from the 60th second on run-queue latency is not measured."""
    cycles = [
        snapshot(
            second, [shared("web", cpu_request=2)], machine=48, usage_s={"web": float(second)},
            latency={"web": waits({2_000_000: second})} if second < 60 else {},
        )
        for second in range(100)
    ]  # fmt: skip
    _, state = evaluate_cycles(cycles, AgentConfig(advisor=CONFIG))
    (web,) = state.advisor.containers.values()
    assert web.load1 == pytest.approx(3.0, rel=0.3)
    assert (web.load_at_ns, web.last_seen_ns) == (cycles[59].taken_at_ns, cycles[99].taken_at_ns)


@pytest.mark.parametrize(
    ("usage_per_s", "waiting", "share", "headroom"),
    [
        (None, 0, 4, 44.0),  # tutorial: nothing runs, 48 - 4 reserved
        (1.0, 0, 6, 42.0),  # one busy thread: ceil(4 + 1.25)
        (1.0, 2, 7, 41.0),  # one runs and two wait on the pool's CPUs: load 3, ceil(4 + 3)
        (3.0, 0, 8, 40.0),  # tutorial: load 3 that really runs, ceil(4 + 3.75)
    ],
)
def test_tutorial_of_a_48_core_node(usage_per_s: float | None, waiting: int, share: int, headroom: float) -> None:
    pods = [] if usage_per_s is None else [shared("shared-normal-pod", cpu_request=2)]
    # Katalyst steps down by 2 CPUs each 30 s at most: the pool starts large and needs minutes to shrink.
    cycles = [
        snapshot(
            second,
            pods,
            machine=48,
            usage_s={"shared-normal-pod": second * (usage_per_s or 0.0)},
            latency={"shared-normal-pod": waits({waiting * 1_000_000: second})},
        )
        for second in range(400)
    ]
    advice = advice_of(evaluate_cycles(cycles, AgentConfig(advisor=CONFIG))[0][-1])
    sizes = {pool.name: len(pool.cpus) for pool in advice.pools}
    assert (sizes["share"], sizes["reclaim"]) == (share, 48 - share)
    assert advice.headroom_cores == pytest.approx(headroom)


@pytest.mark.parametrize(("cpus", "share"), [(2, 1), (4, 2), (8, 6), (12, 8), (48, 44)])
def test_with_smt_no_core_serves_both_pools_even_at_the_maximum_size(cpus: int, share: int) -> None:
    node = topology(cpus, threads=2)
    cycles = [snapshot(second, [shared("web")], machine=node, usage_s={"web": 100.0 * second}) for second in range(12)]
    before = set[int]()
    for result in evaluate_cycles(cycles, AgentConfig(advisor=CONFIG))[0]:
        pools = {pool.name: set(pool.cpus) for pool in advice_of(result).pools}
        assert pools["share"] | pools["reclaim"] == set(node.ids)
        assert before <= pools["share"], "a pool that grows keeps what it has"
        before = pools["share"]
    assert len(before) == share
    cores = {name: {cpu.core for cpu in node.cpus if cpu.id in pools[name]} for name in ("share", "reclaim")}
    if cpus > 2:
        assert not cores["share"] & cores["reclaim"]


def test_a_later_pod_ramps_up_at_its_request() -> None:
    first, second = shared("a", cpu_request=2), shared("b", cpu_request=7)
    cycles = [snapshot(at, [first, second][: at + 1], machine=48, usage_s={"a": 0.0, "b": 0.0}) for at in range(40)]
    requirement = [advice.requirement_cores for advice in advise_cycles(cycles, CONFIG)]
    # In the first cycle nothing is measured yet, so that the request counts.
    assert requirement[:31] == [2.0] + [7.0] * 30
    assert requirement[31] == 0.0


def test_one_failed_read_of_the_cgroups_forgets_no_demand() -> None:
    config = AdvisorConfig(policy="canonical", min_ramp_down_period_s=0)
    web = shared("web", cpu_request=0.5)
    cycles = [snapshot(at, [web], machine=16, usage_s={"web": 8.0 * at}) for at in range(30)]
    cycles[20] = replace(cycles[20], cgroups={})
    results, _ = evaluate_cycles(cycles, AgentConfig(advisor=config))
    sizes = [len(pool.cpus) for result in results for pool in advice_of(result).pools if pool.name == "share"]
    assert sizes[10:] == [12] * 20, "ceil(8 x 1.25 + 4) is 14, and 12 is all that the reclaim pool leaves"


def test_a_listed_container_without_cgroup_needs_nothing_after_half_a_minute() -> None:
    web = shared("web", cpu_request=0.5)
    shots = [snapshot(at, [web] if at < 10 else [], machine=16, usage_s={"web": 2.0 * at}) for at in range(45)]
    cycles = [replace(shot, pods=(web,)) for shot in shots]
    need = [advice.requirement_cores for advice in advise_cycles(cycles, CONFIG)]
    assert (need[9], need[20], need[38], need[40]) == (2.5, 2.5, 2.5, 0.0)


def test_disabling_reclaim_leaves_reclaimed_pods_the_minimum() -> None:
    config = AdvisorConfig(policy="canonical", enable_reclaim=False)
    (advice,) = advise_cycles([snapshot(0, [], machine=48)], config)
    assert advice.reclaimable_cores == 4.0
    assert advice.headroom_cores == 0.0


def test_policy_none_advises_nothing() -> None:
    advice, memory = advise_cpu(snapshot(0, []), AdvisorConfig(policy="none"), AdvisorState(), 0)
    assert advice is None
    assert memory.previous is not None


@pytest.mark.parametrize("policy", ["canonical", "latency"])
def test_an_unreadable_tree_keeps_demand_and_stops_growth(policy: str) -> None:
    """48 CPUs, 16 in use: the need is 20, plus 4 for bursts. From 20 s on nothing can be read, and a pod is added."""
    config = msgspec.convert({"policy": policy, "headroom": {"policy": "estimate"}}, AdvisorConfig)
    web, new = shared("web", cpu_request=16), shared("new", cpu_request=3)
    cycles = [
        snapshot(at, [web], machine=48, usage_s={"web": 16.0 * at}, latency={"web": waits({10: 1000 * at})})
        for at in range(140)
    ]
    unread = [replace(shot, cgroups={}, pods=(web,) if at < 130 else (web, new)) for at, shot in enumerate(cycles)]
    results, _ = evaluate_cycles([*cycles[:20], *unread[20:]], AgentConfig(advisor=config))
    advices = [advice_of(result) for result in results]
    need, headroom = [a.requirement_cores for a in advices], [a.headroom_cores for a in advices]
    reclaimable = [a.reclaimable_cores for a in advices]
    assert need[19:] == pytest.approx([20.0] * 111 + [23.0] * 10)
    assert headroom[19] == pytest.approx(24.0)
    assert headroom[19:130] == pytest.approx([headroom[19]] * 111)
    assert max(reclaimable[20:]) <= reclaimable[19]
