"""Properties of every allocation, for any machine, pods, pool sizes and previous state."""

from __future__ import annotations

import random

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.state import CpusetAllocation, CpusetState
from api.advice import PoolSize
from api.cpu import Topology
from api.pod import Pod
from api.qos import QoSLevel
from tests.agent.qrm.cpuset.builders import CONFIGS, S, machine, machines, pod, run, size, some_pods, some_sizes

MANY = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])


def sets(placement: CpusetAllocation) -> dict[str, set[int]]:
    return {pool.name: set(pool.cpus) for pool in placement.pools}


def check(placement: CpusetAllocation, pods: tuple[Pod, ...], topology: Topology) -> None:
    """Check that every container has CPUs of the node, and none that are reserved, for interrupts or exclusive to others."""
    pools, online = sets(placement), set(topology.ids)
    containers = {container.cgroup for pod in pods for container in pod.containers}
    assert placement.cpus.keys() == placement.mems.keys() == placement.reasons.keys() == containers
    assert all(pools.values())
    assert all(given and set(given) <= online for given in placement.cpus.values())
    assert all(given and set(given) <= set(topology.numa_nodes) for given in placement.mems.values())
    static = {name: pools.pop(name, set()) for name in ("reserve", "interrupt")}
    assert not static["reserve"] & static["interrupt"]
    for name, cpus in pools.items():
        assert not cpus & (static["reserve"] | static["interrupt"]), name
    numa = {cpu.id: cpu.numa for cpu in topology.cpus}
    for cgroup, has in placement.cpus.items():
        assert not static["interrupt"].intersection(has), cgroup
        assert {numa[cpu] for cpu in has} <= set(placement.mems[cgroup])


@given(some_sizes(), some_pods(), machines(), CONFIGS)
@MANY
def test_every_container_has_cpus_and_none_of_the_reserved_ones(
    sizes: tuple[PoolSize, ...], pods: tuple[Pod, ...], topology: Topology, config: CpuPlacementConfig
) -> None:
    placement, state = run(sizes, pods, topology, config=config)
    check(placement, pods, topology)
    again, _ = run(sizes, pods, topology, state, config)
    check(again, pods, topology)


@given(some_sizes(), some_pods(), machines(), CONFIGS, st.randoms(use_true_random=False))
@MANY
def test_equal_inputs_in_any_order_give_equal_allocations(
    sizes: tuple[PoolSize, ...],
    pods: tuple[Pod, ...],
    topology: Topology,
    config: CpuPlacementConfig,
    shuffler: random.Random,
) -> None:
    first, state = run(sizes, pods, topology, config=config)
    second, after = run(sizes, pods, topology, state, config, at_s=1.0)
    assert (second.pools, second.cpus, second.mems) == (first.pools, first.cpus, first.mems)
    assert after == state
    mixed_pods, mixed_sizes = list(pods), list(sizes)
    shuffler.shuffle(mixed_pods)
    shuffler.shuffle(mixed_sizes)
    mixed, mixed_state = run(mixed_sizes, mixed_pods, topology, config=config)
    assert (mixed, mixed_state) == (first, state)


@given(some_pods(), machines(), CONFIGS)
@MANY
def test_dedicated_containers_share_cpus_only_with_their_pod_and_reclaim(
    pods: tuple[Pod, ...], topology: Topology, config: CpuPlacementConfig
) -> None:
    placement, state = run((), pods, topology, config=config)
    owned: dict[int, str] = {}
    for each in pods:
        if each.qos is QoSLevel.DEDICATED and any(e.bound_numa for e in state.pod(each.uid).values()):
            for container in each.containers:
                for cpu in placement.cpus[container.cgroup]:
                    assert owned.setdefault(cpu, each.key) == each.key
    left = (
        set(topology.ids)
        - set(owned)
        - {cpu for name in ("reserve", "interrupt") for cpu in sets(placement).get(name, ())}
    )
    if left:
        for name, cpus in sets(placement).items():
            if name not in ("reserve", "interrupt"):
                assert not cpus & owned.keys(), name


@given(
    machines(), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=6)
)
@MANY
def test_pools_are_disjoint_have_their_size_and_move_as_little_as_possible(
    topology: Topology, rounds: list[tuple[int, int, int]]
) -> None:
    cpus = len(topology.cpus)
    state, before = CpusetState(), dict[str, set[int]]()
    for share, batch, reclaim in rounds:
        if share + batch + reclaim > cpus:
            continue
        sizes = (size("share", share), size("batch", batch), size("reclaim", reclaim))
        placement, state = run(sizes, (), topology, state)
        pools = sets(placement)
        assert len(pools["share"]) == share
        assert len(pools["batch"]) == batch
        assert not pools["share"] & pools["batch"]
        if reclaim:
            assert len(pools["reclaim"]) == reclaim
            assert not pools["reclaim"] & (pools["share"] | pools["batch"])
        if before:
            for name, count in (("share", share), ("batch", batch)):
                assert len(pools[name] & before[name]) == min(count, len(before[name])), name
            # Reclaim gives up only what the others need beyond the unused CPUs.
            idle = cpus - len(before["share"] | before["batch"] | before["reclaim"])
            released = sum(max(len(before[n]) - w, 0) for n, w in (("share", share), ("batch", batch)))
            needed = sum(max(w - len(before[n]), 0) for n, w in (("share", share), ("batch", batch)))
            alone = before["reclaim"] - before["share"] - before["batch"]
            forced = max(needed - idle - released, 0)
            assert len(pools["reclaim"] & before["reclaim"]) >= min(reclaim, len(alone) - forced)
        before = pools


@given(some_sizes(), some_pods(), machines(), st.data())
@MANY
def test_offline_cpus_are_replaced_and_all_others_stay(
    sizes: tuple[PoolSize, ...], pods: tuple[Pod, ...], topology: Topology, data: st.DataObject
) -> None:
    """After CPU hotplug, a dedicated pod that lost no CPU keeps its CPUs, even if others have to move, unless shared pods
    request what is left."""
    config = CpuPlacementConfig(reserved_cpus=data.draw(st.integers(0, 4)))
    first, state = run(sizes, pods, topology, config=config)
    offline = data.draw(st.sets(st.sampled_from(topology.ids), max_size=len(topology.ids) - 1))
    less = Topology(cpus=tuple(cpu for cpu in topology.cpus if cpu.id not in offline))
    smaller, shrunk = run(sizes, pods, less, state, config, at_s=1.0)
    check(smaller, pods, less)
    back, _ = run(sizes, pods, topology, shrunk, config, at_s=2.0)
    check(back, pods, topology)
    if not offline:
        assert smaller.cpus == first.cpus
    reserved = sets(smaller).get("reserve", set())
    for each in pods:
        had = {c.cgroup: set(first.cpus[c.cgroup]) for c in each.containers}
        entries = state.pod(each.uid).values()
        alone = any(e.owner_pool_name == "dedicated" and not e.exclusive for e in entries)
        reason = smaller.rejected.get(each.key)
        alone = alone and (reason is None or reason.rule != "dedicated_exceeds_free_requests")
        if alone and not set().union(*had.values()) & (offline | reserved):
            assert {cgroup: set(smaller.cpus[cgroup]) for cgroup in had} == had


@given(machines(), st.integers(1, 20), st.sets(st.integers(0, 255), max_size=12))
@MANY
def test_a_pool_keeps_its_online_cpus(topology: Topology, share: int, offline: set[int]) -> None:
    sizes = (size("share", share), size("reclaim", 1))
    less = Topology(cpus=tuple(cpu for cpu in topology.cpus if cpu.id not in offline))
    if len(less.cpus) <= share:
        return
    first, state = run(sizes, (), topology)
    second, _ = run(sizes, (), less, state)
    assert sets(first)["share"] - offline <= sets(second)["share"]
    assert len(sets(second)["share"]) == share


@given(some_pods(), machines(), CONFIGS)
@MANY
def test_the_native_policy_has_the_same_properties(
    pods: tuple[Pod, ...], topology: Topology, config: CpuPlacementConfig
) -> None:
    config = msgspec.structs.replace(config, policy="native")
    guaranteed = tuple(
        msgspec.structs.replace(
            each,
            containers=tuple(
                msgspec.structs.replace(
                    c, cpu_limit_cores=c.cpu_request_cores, memory_request_bytes=1, memory_limit_bytes=1
                )
                for c in each.containers
            ),
        )
        for each in pods
    )
    placement, state = run((), guaranteed, topology, config=config)
    containers = [c for each in guaranteed for c in each.containers]
    assert placement.cpus.keys() == {c.cgroup for c in containers}
    assert all(given and set(given) <= set(topology.ids) for given in placement.cpus.values())
    again, after = run((), guaranteed, topology, state, config, at_s=1.0)
    assert (again.pools, again.cpus, after) == (placement.pools, placement.cpus, state)
    other, _ = run((), guaranteed[::-1], topology, config=config)
    assert other.cpus == placement.cpus


def test_ramp_up_and_residual_pods_end_by_time() -> None:
    topology = machine(1, 1, 1, 8, 1)
    _, state = run((), (), topology)
    web = pod("web", cores=2.0)
    for at_s, expected in ((10.0, 8), (39.9, 8), (40.0, 2)):
        placement, state = run((), (web,), topology, state, at_s=at_s)
        assert len(placement.cpus["/web"]) == expected, at_s
    _, state = run((), (), topology, state, at_s=50.0)
    assert state.residual == {"u-web": 50 * S}
    _, state = run((), (), topology, state, at_s=349.9)
    assert "u-web" in state.pod_entries
    _, state = run((), (), topology, state, at_s=350.0)
    assert "u-web" not in state.pod_entries
    assert state.residual == {}
