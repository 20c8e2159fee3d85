"""Reclaimable NUMA nodes around pods that are not reclaimable, on two sockets of two NUMA nodes each."""

from __future__ import annotations

import pytest

from agent.advisor.headroom.reclaim_exclusion import (
    DisableReclaimLevel,
    ReclaimConstraint,
    apply_constraints,
    numa_nodes_of_bound_pods,
)
from api.cpu import Cpu, Topology
from api.pod import Container, Pod
from api.qos import QoSLevel

NODE = Topology(cpus=tuple(Cpu(id=i, core=i, socket=i // 8, numa=i // 4) for i in range(16)))


def tenant(
    numa: tuple[int, ...] = (1,), *, level: DisableReclaimLevel = DisableReclaimLevel.POD, exclusive: bool = False
) -> ReclaimConstraint:
    return ReclaimConstraint(pod="a/b", numa_nodes=numa, reclaimable=False, level=level, exclusive=exclusive)


@pytest.mark.parametrize(
    ("actual", "left"),
    [
        (
            ReclaimConstraint(pod="a/b", numa_nodes=(1,), exclusive=True, level=DisableReclaimLevel.NODE),
            (0, 1, 2, 3),
        ),  # may be lent from
        (tenant(), (0, 1, 2, 3)),  # level Pod says something of exclusive pods alone
        (tenant(exclusive=True), (0, 2, 3)),
        (tenant(level=DisableReclaimLevel.NUMA), (0, 2, 3)),
        (tenant((1, 2), level=DisableReclaimLevel.NUMA), (0, 3)),
        (tenant(level=DisableReclaimLevel.SOCKET), (2, 3)),
        (tenant((1, 2), level=DisableReclaimLevel.SOCKET), ()),
        (tenant(level=DisableReclaimLevel.NODE), ()),
        (tenant((), level=DisableReclaimLevel.NODE), ()),
        (ReclaimConstraint(pod="a/b", numa_nodes=(2,), bound_pool="flink"), (0, 1)),
        (ReclaimConstraint(pod="a/b", numa_nodes=(2,), bound_pool="flink-NUMA2"), (0, 1)),
        (ReclaimConstraint(pod="a/b", numa_nodes=(2,), bound_pool="share-NUMA2"), (0, 1, 2, 3)),
    ],
)
def test_levels_and_pools(actual: ReclaimConstraint, left: tuple[int, ...]) -> None:
    result = apply_constraints(NODE, [actual], ("flink",))
    assert (result.numa_nodes, result.unknown) == (left, ())
    assert set(result.refused) == {0, 1, 2, 3} - set(left)
    assert all("a/b" in why for why in result.refused.values())


@pytest.mark.parametrize(
    "result",
    [
        tenant((), level=DisableReclaimLevel.NUMA),
        tenant((), level=DisableReclaimLevel.SOCKET),
        tenant((), exclusive=True),
        ReclaimConstraint(pod="a/b", bound_pool="flink"),
    ],
)
def test_numa_nodes_of_an_unreclaimable_pod_must_be_known(result: ReclaimConstraint) -> None:
    assert apply_constraints(NODE, [result, result], ("flink",)).unknown == ("a/b",)


def test_bound_nodes_are_those_of_results_and_of_dedicated_cpus() -> None:
    def pod(name: str, qos: QoSLevel, bound: tuple[int, ...] = ()) -> Pod:
        containers = (Container(name="c", cgroup=f"/{name}"),)
        return Pod(uid=name, namespace="a", name=name, qos=qos, containers=containers, bound_numa=bound)

    pods = [
        pod("shared", QoSLevel.SHARED),
        pod("snb", QoSLevel.SHARED, (0,)),
        pod("rnb", QoSLevel.RECLAIMED, (3, 9)),
        pod("dedicated", QoSLevel.DEDICATED),
        pod("system", QoSLevel.SYSTEM, (2,)),
    ]
    cpus = {"/dedicated": (4, 5, 99), "/shared": (8, 9)}
    assert numa_nodes_of_bound_pods(pods, cpus, NODE) == (0, 1, 3)
