"""Pools get the sizes that the advisor computes from pods allocated before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from agent.advisor.advisor_state import ProvisionInputs, ProvisionState
from agent.advisor.provision.provisioner import provision_cpus
from agent.config.advisor import AdvisorConfig, ProvisionConfig
from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.allowed_cpus import reserve_cpus
from agent.qrm.cpuset.state import CpusetAllocation, CpusetState, with_numa_bindings
from agent.qrm.cpuset.topology_layout import layout_of
from api.advice import CpuAdvice
from api.cpu import Topology
from api.pod import Pod
from api.qos import QoSLevel
from tests.agent.qrm.cpuset.builders import S, bound, dedicated, machine, pod, reclaimed, run
from tests.builders.snapshots import snapshot

CORES = st.sampled_from([0.5, 1.0, 2.0, 3.0])


@st.composite
def pods_that_fit(draw: st.DrawFn) -> tuple[Pod, ...]:
    """Draw so few pods that each gets its request on a node of 48 CPUs."""
    pods = [pod(f"s{n}", cores=draw(CORES)) for n in range(draw(st.integers(0, 3)))]
    pods += [bound(f"n{n}", draw(CORES)) for n in range(draw(st.integers(0, 2)))]
    pods += [dedicated(f"d{n}", float(draw(st.integers(1, 4)))) for n in range(draw(st.integers(0, 1)))]
    pods += [dedicated(f"x{n}", 4.0, numa_exclusive=True) for n in range(draw(st.integers(0, 1)))]
    return (*pods, reclaimed("batch"))


def advise(
    pods: Sequence[Pod],
    topology: Topology,
    placement: CpusetAllocation,
    config: CpuPlacementConfig,
    mode: ProvisionConfig,
) -> CpuAdvice:
    node = layout_of(topology)
    static = reserve_cpus(node, config)
    situation = ProvisionInputs(
        now_ns=100 * S,
        snapshot=snapshot(100.0, pods, machine=topology),
        reserve=Counter(node.cpu[cpu].numa for cpu in static.reserve),
        forbidden=Counter(node.cpu[cpu].numa for cpu in static.interrupt),
        assigned=placement.cpus,
        pools={pool.name: pool.cpus for pool in placement.pools},
    )
    return provision_cpus(situation, ProvisionState(), AdvisorConfig(), mode)[0]


def sizes_by_pool(advice: CpuAdvice) -> Mapping[str, int]:
    sizes: Counter[str] = Counter()
    for size in advice.sizes:
        sizes[size.pool] += size.cpus + sum(size.overlap.values())
    return sizes


@given(
    pods_that_fit(), st.booleans(), st.sampled_from([0, 2, 4]), st.sampled_from(["", "5,29"]), st.sampled_from([1, 2])
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_every_pool_has_the_size_that_the_advisor_gave_it(
    pods: tuple[Pod, ...], overlap: bool, reserved: int, interrupt: str, sockets: int
) -> None:
    topology = machine(sockets, 4 // sockets, 1, 6, 2)
    config = CpuPlacementConfig(reserved_cpus=reserved, interrupt_cpu_list=interrupt)
    first, state = run((), pods, topology, CpusetState(), config)
    assume(not first.rejected)
    bound_pods = with_numa_bindings(pods, state)
    advice = advise(bound_pods, topology, first, config, ProvisionConfig(overlap=overlap))
    second, after = run(advice.sizes, bound_pods, topology, state, config, at_s=1.0)
    dedicated_pods = {f"dedicated-{each.key}" for each in pods if each.qos is QoSLevel.DEDICATED}
    sizes = {name: count for name, count in sizes_by_pool(advice).items() if name not in dedicated_pods and count}
    had = {pool.name: len(pool.cpus) for pool in second.pools}
    assert {name: had.get(name) for name in sizes} == sizes
    for name in dedicated_pods:
        cgroup = f"/{name.rpartition('/')[2]}"
        assert len(second.cpus[cgroup]) == sizes_by_pool(advice)[name]
    third, _ = run(advice.sizes, bound_pods, topology, after, config, at_s=2.0)
    assert third.cpus == second.cpus


def test_reclaim_has_the_advised_cpus_on_each_numa_node() -> None:
    topology = machine(2, 2, 1, 6, 2)
    pods = (pod("web", cores=2.0), bound("near", 4.0), dedicated("db", 4.0, numa_ids=(1,)), reclaimed("batch"))
    first, state = run((), pods, topology)
    bound_pods = with_numa_bindings(pods, state)
    assert [each.bound_numa for each in bound_pods] == [(), (0,), (1,), ()]
    advice = advise(bound_pods, topology, first, CpuPlacementConfig(), ProvisionConfig())
    second, _ = run(advice.sizes, bound_pods, topology, state)
    reclaim_cpus = {size.numa: size.cpus for size in advice.sizes if size.pool == "reclaim"}
    reclaim = next(pool.cpus for pool in second.pools if pool.name == "reclaim")
    numa = {cpu.id: cpu.numa for cpu in topology.cpus}
    there = Counter(numa[cpu] for cpu in reclaim)
    assert reclaim_cpus.keys() == {-1, 0, 1}
    assert (there[2] + there[3], there[0], there[1]) == (reclaim_cpus[-1], reclaim_cpus[0], reclaim_cpus[1])
    assert set(second.mems["/web"]) == {2, 3}
