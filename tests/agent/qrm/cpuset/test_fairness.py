"""Fairness between random tenants on random nodes: no pod has more exclusive CPUs than it requests, and pods that share have at
least their requests, in whatever order pods are created, deleted and changed, and whatever pool sizes an advisor gives.

`DIOPTASE_RANDOM_NODES` is the number of nodes. The gate tries the same 150 each time, `tests/run properties` 10,000 fresh ones.
"""

from __future__ import annotations

import os

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.config.qrm import CpuPlacementConfig
from agent.qrm.cpuset.allowed_cpus import reserve_cpus
from agent.qrm.cpuset.fair_shares import ceil_cores, is_named_pool, requested_pod_cores
from agent.qrm.cpuset.state import DEDICATED, FALLBACK, CpusetAllocation, CpusetState
from agent.qrm.cpuset.topology_layout import layout_of
from api.advice import PoolSize
from api.cpu import Topology
from api.pod import Container, Pod
from api.qos import Enhancements, QoSLevel
from tests.agent.qrm.cpuset.builders import machines, pod, run

NODES = int(os.environ.get("DIOPTASE_RANDOM_NODES", "150"))
RANDOM_NODES = settings(
    deadline=None, max_examples=NODES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
REQUESTS = (None, 0.0, 0.001, 0.01, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 7.5, 15.0, 16.0, 30.0)
MAX_STEPS = 14


@st.composite
def tenant_pods(draw: st.DrawFn, number: int) -> Pod:
    """Draw an online pod with every annotation that moves CPUs."""
    wants = Enhancements(
        numa_binding=draw(st.integers(0, 3)) > 0,
        numa_exclusive=draw(st.booleans()),
        numa_share=draw(st.integers(0, 3)) > 0,
        full_cores=draw(st.integers(0, 3)) == 0,
        distribute_evenly=draw(st.integers(0, 5)) == 0,
        numa_number=draw(st.sampled_from([None, None, 1, 2, 3])),
        numa_ids=draw(st.sampled_from([None, None, None, (0,), (1,), (0, 1)])),
        cpuset_pool=draw(st.sampled_from(["", "", "batch", "flink", f"own-{number}"])),
    )
    tenant = pod(
        f"p{number}",
        draw(st.sampled_from([QoSLevel.SHARED, QoSLevel.DEDICATED])),
        draw(st.sampled_from(REQUESTS)),
        wants,
    )
    if draw(st.integers(0, 3)) == 0:
        request = draw(st.sampled_from(REQUESTS))
        sidecar = Container(name="s", cgroup=f"/{tenant.name}-s", sidecar=True, cpu_request_cores=request)
        tenant = msgspec.structs.replace(tenant, containers=(*tenant.containers, sidecar))
    return tenant


@st.composite
def advised_sizes(draw: st.DrawFn) -> tuple[PoolSize, ...]:
    """Draw sizes of an advisor, right or wrong; often none, so that requests decide."""
    names = draw(st.sets(st.sampled_from(["share", "batch", "flink", "reclaim"])))
    return tuple(PoolSize(pool=name, cpus=draw(st.integers(0, 80))) for name in sorted(names))


def resized(tenant: Pod, cores: float | None) -> Pod:
    """Return the pod with another request of its main container, as after a resize in place."""
    main = msgspec.structs.replace(tenant.containers[0], cpu_request_cores=cores)
    return msgspec.structs.replace(tenant, containers=(main, *tenant.containers[1:]))


def check_fair(
    placement: CpusetAllocation,
    state: CpusetState,
    pods: list[Pod],
    usable: frozenset[int],
    sizes: tuple[PoolSize, ...] = (),
) -> None:
    cpus = {pool.name: set(pool.cpus) for pool in placement.pools}
    pools = {name: len(held) for name, held in cpus.items()}
    requests: dict[str, float] = {}
    for each in pods:
        owners = {entry.owner_pool_name for entry in state.pod(each.uid).values()}
        assert len(owners) == 1, each.name
        (owner,) = owners
        main = each.containers[0]
        if owner == DEDICATED:
            assert len(placement.cpus[main.cgroup]) <= ceil_cores(main.cpu_request_cores or 0.0), each.name
        else:
            requests[owner] = requests.get(owner, 0.0) + requested_pod_cores(each)
    for pool, cores in requests.items():
        with_rejected = cores + (requests.get(FALLBACK, 0.0) if pool == "share" else 0.0)
        # What an advisor lends returns on demand; what another online pool has does not.
        is_advised = any(size.pool != "reclaim" for size in sizes)
        # A pool without requests, such as that of a NUMA node whose pods request nothing, shares what it has.
        idle = {"reclaim", FALLBACK, *(name for name, requested in requests.items() if not requested)}
        held_by_requests = set().union(*(held for name, held in cpus.items() if name not in idle))
        lendable = usable - state.exclusive_cpus() - held_by_requests
        # Only a wrong advisor sizes a pool without pods. It has one CPU, because no pool is empty.
        without_pods = [name for name in cpus if is_named_pool(name) and name not in (*requests, FALLBACK)]
        spare = (len(lendable) if is_advised else 0) + sum(pools[name] for name in without_pods)
        assert pools[pool] + spare >= round(with_rejected, 6), (
            pool,
            with_rejected,
            pools,
        )
        if is_named_pool(pool) and pool != FALLBACK:
            # A CPU that another online pool has too is there for the pods of that pool, even while it has none: where pools are
            # more than CPUs, all have all of them.
            shared = set().union(*(held for name, held in cpus.items() if name not in (pool, FALLBACK, "reclaim")))
            assert len(cpus[pool] - shared) <= ceil_cores(cores), (pool, cores, pools)


@given(machines(), st.data())
@RANDOM_NODES
def test_tenants_have_what_they_request_and_no_more_to_themselves(topology: Topology, data: st.DataObject) -> None:
    config = CpuPlacementConfig(ramp_up_s=0, reserved_cpus=data.draw(st.sampled_from([0, 0, 2, 4])))
    usable = reserve_cpus(layout_of(topology), config).usable
    running: list[Pod] = []
    state = CpusetState()
    for number in range(data.draw(st.integers(1, MAX_STEPS))):
        action = data.draw(st.sampled_from(["add", "add", "add", "remove", "resize"]))
        before = list(running)
        if action == "add":
            running.append(data.draw(tenant_pods(number)))
        elif running:
            index = data.draw(st.integers(0, len(running) - 1))
            removed = running.pop(index)
            # A shared pod stays on the NUMA node that it is bound to when it grows in place, even if that is too small.
            is_bound = removed.qos is QoSLevel.SHARED and removed.enhancements.numa_binding
            if action == "resize" and not is_bound:
                running.append(resized(removed, data.draw(st.sampled_from(REQUESTS))))
        # As the kubelet: pods are admitted while their requests fit into what is allocatable.
        if sum(map(requested_pod_cores, running)) > len(usable):
            running = before
        sizes = data.draw(advised_sizes())
        placement, state = run(sizes, running, topology, state, config, at_s=float(number))
        usable = frozenset(topology.ids) - state.pool("reserve")
        check_fair(placement, state, running, usable, sizes)


@given(machines(), st.data())
@RANDOM_NODES
def test_the_order_of_arrival_changes_no_bound(topology: Topology, data: st.DataObject) -> None:
    config = CpuPlacementConfig(ramp_up_s=0)
    pods: list[Pod] = []
    for number in range(data.draw(st.integers(2, MAX_STEPS))):
        tenant = data.draw(tenant_pods(number))
        if sum(map(requested_pod_cores, (*pods, tenant))) <= len(topology.cpus):
            pods.append(tenant)
    for order in (pods, pods[::-1], data.draw(st.permutations(pods))):
        state = CpusetState()
        for count in range(1, len(order) + 1):
            placement, state = run((), order[:count], topology, state, config, at_s=float(count))
        if pods:
            check_fair(placement, state, list(order), frozenset(topology.ids))
