"""Available CPUs, the grouping of pods into regions, and the bounds of regions."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import ProvisionState
from agent.advisor.provision.provisioner import provision_cpus
from agent.advisor.provision.regions import build_numa_capacity, pod_bound_nodes, reserve_for_reclaim
from agent.config.advisor import AdvisorConfig, ProvisionConfig
from api.advice import RegionKind
from api.pod import Container, Pod
from api.qos import Enhancements, QoSLevel
from tests.agent.advisor.provision.builders import dedicated, region, shared, situation
from tests.builders.nodes import topology

FRESH = ProvisionState()


@pytest.mark.parametrize(
    ("cpus", "advisor", "config", "expected"),
    [
        ({0: 8, 1: 8}, AdvisorConfig(min_reclaimed_cores=4), ProvisionConfig(), {0: 2, 1: 2}),
        ({0: 8, 1: 8}, AdvisorConfig(min_reclaimed_cores=16), ProvisionConfig(), {0: 8, 1: 8}),
        ({0: 8, 1: 8}, AdvisorConfig(min_reclaimed_cores=100), ProvisionConfig(), {0: 8, 1: 8}),
        (
            dict.fromkeys(range(8), 2),
            AdvisorConfig(min_reclaimed_cores=4),
            ProvisionConfig(),
            dict.fromkeys(range(8), 1),
        ),
        ({0: 32, 1: 32}, AdvisorConfig(), ProvisionConfig(numa_min_reclaimed_ratio=0.05), {0: 2, 1: 2}),
        ({0: 32, 1: 32}, AdvisorConfig(), ProvisionConfig(numa_min_reclaimed_ratio=0.1), {0: 4, 1: 4}),
        ({0: 30, 1: 40}, AdvisorConfig(), ProvisionConfig(numa_min_reclaimed_ratio=0.1), {0: 3, 1: 4}),
        (
            {0: 32, 1: 32},
            AdvisorConfig(),
            ProvisionConfig(numa_min_reclaimed_ratio=0.05, numa_min_reclaimed_cores=3),
            {0: 3, 1: 3},
        ),
        # Nothing configured: 4, and a quarter of small nodes.
        ({0: 48}, AdvisorConfig(), ProvisionConfig(), {0: 4}),
        ({0: 8}, AdvisorConfig(), ProvisionConfig(), {0: 2}),
        ({0: 2}, AdvisorConfig(), ProvisionConfig(), {0: 1}),
    ],
)
def test_reserved_for_reclaim(
    cpus: Mapping[int, int], advisor: AdvisorConfig, config: ProvisionConfig, expected: Mapping[int, int]
) -> None:
    assert reserve_for_reclaim(cpus, advisor, config) == expected


def test_available_cpus_exclude_reserve_and_interrupts() -> None:
    built = build_numa_capacity(topology(48, sockets=2), {0: 1, 1: 1}, {1: 2}, AdvisorConfig(), ProvisionConfig())
    assert built.cpus == {0: 24, 1: 24}
    assert built.available == {0: 23, 1: 21}
    nothing = build_numa_capacity(topology(4, sockets=2), {0: 2}, {1: 5}, AdvisorConfig(), ProvisionConfig())
    assert nothing.available == nothing.reserved_for_reclaim == {0: 0, 1: 0}


def _sidecar(pod: Pod, request: float, limit: float) -> Pod:
    more = Container(
        name="side", cgroup=f"/{pod.name}/side", cpu_request_cores=request, cpu_limit_cores=limit, sidecar=True
    )
    return replace(pod, containers=(*pod.containers, more))


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (shared("a"), [("share", RegionKind.SHARE, (0, 1), False)]),
        (shared("a", pool="batch"), [("batch", RegionKind.SHARE, (0, 1), False)]),
        (shared("a", numa=(1,)), [("share-NUMA1", RegionKind.SHARE, (1,), True)]),
        (shared("a", numa=(7,)), [("share", RegionKind.SHARE, (0, 1), False)]),  # no such node
        (shared("a", numa=(0, 1)), [("share", RegionKind.SHARE, (0, 1), False)]),  # shared pods are bound to one
        (
            dedicated("d", 4, numa=(1, 0)),
            [
                ("dedicated-default/d-NUMA0", RegionKind.DEDICATED, (0,), True),
                ("dedicated-default/d-NUMA1", RegionKind.DEDICATED, (1,), True),
            ],
        ),
        (dedicated("d", 4), [("dedicated-default/d", RegionKind.DEDICATED, (0, 1), False)]),
    ],
)
def test_pods_are_grouped_into_regions(pod: Pod, expected: list[tuple[str, RegionKind, tuple[int, ...], bool]]) -> None:
    advice, _ = provision_cpus(
        situation([pod], cpus=topology(48, sockets=2)), FRESH, AdvisorConfig(), ProvisionConfig()
    )
    assert [
        (item.region.name, item.region.kind, item.region.numa_nodes, item.region.bound) for item in advice.regions
    ] == expected


@pytest.mark.parametrize("level", [QoSLevel.RECLAIMED, QoSLevel.SYSTEM])
def test_other_levels_have_no_region(level: QoSLevel) -> None:
    pod = replace(shared("a", 4), qos=level)
    assert provision_cpus(situation([pod]), FRESH, AdvisorConfig(), ProvisionConfig())[0].regions == ()


def test_a_node_is_bound_only_with_the_enhancement() -> None:
    pod = replace(shared("a", numa=(1,)), enhancements=Enhancements())
    assert pod_bound_nodes(pod, (0, 1)) == ()


BOUNDS = [
    # Share: what is available without what reclaimed pods keep; from 4 on.
    ([shared("a", 4)], "share", (44.0, 4.0, 4.0, 4.0)),
    # The node's reserves go with the NUMA nodes, and are divided among the regions on them.
    ([shared("a", 4), shared("b", 4, numa=(1,))], "share", (22.0, 4.0, 2.0, 2.0)),
    ([shared("b", 4, numa=(1,)), shared("c", 4, numa=(1,), pool="x")], "x-NUMA1", (4.0, 4.0, 1.0, 1.0)),
    # Dedicated: limits; with a NUMA node of its own that node.
    ([dedicated("d", 6, 8, numa=(1,))], "dedicated-default/d-NUMA1", (8.0, 4.0, 2.0, 2.0)),
    ([dedicated("d", 2, 2, numa=(1,))], "dedicated-default/d-NUMA1", (2.0, 2.0, 2.0, 2.0)),
    ([_sidecar(dedicated("d", 6, 8, numa=(1,)), 1, 2)], "dedicated-default/d-NUMA1", (10.0, 4.0, 2.0, 2.0)),
    ([dedicated("d", 6, numa=(0,), exclusive=True)], "dedicated-default/d-NUMA0", (22.0, 4.0, 2.0, 2.0)),
    # Not bound: the NUMA nodes that it has CPUs of.
    ([dedicated("e", 6)], "dedicated-default/e", (6.0, 4.0, 2.0, 2.0)),
]


@pytest.mark.parametrize(("pods", "name", "expected"), BOUNDS)
def test_bounds(pods: list[Pod], name: str, expected: tuple[float, float, float, float]) -> None:
    built = situation(pods, cpus=topology(48, sockets=2), assigned={"/e": (0, 1)})
    result = region(provision_cpus(built, FRESH, AdvisorConfig(), ProvisionConfig())[0], name)
    inputs = result.reason.inputs
    got = (
        result.upper_cores,
        result.lower_cores,
        inputs["reserved_for_allocate_cores"],
        inputs["reserved_for_reclaim_cores"],
    )
    assert got == expected


def test_parts_of_the_reserve_do_not_exceed_it() -> None:
    """Seven regions on three NUMA nodes: 3 x 4/21 each, without a rounding error, which would cost a CPU."""
    pods = [shared(f"p{k}", 1, pool=f"pool{k}") for k in range(7)]
    built = situation(pods, cpus=topology(48, sockets=3))
    advice, _ = provision_cpus(built, FRESH, AdvisorConfig(reserved_for_allocate_cores=7), ProvisionConfig())
    assert [item.reason.inputs["wanted_cpus"] for item in advice.regions] == [2] * 7
