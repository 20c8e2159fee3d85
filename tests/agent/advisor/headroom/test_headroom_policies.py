"""Headroom of regions and of the reclaim pool: Katalyst's own numbers, excluded NUMA nodes, and missing inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.headroom.headroom_policies import (
    ReclaimPoolInputs,
    RegionNeed,
    assemble_headroom,
    headroom_refusal,
    region_headroom,
    utilisation_headroom,
)
from agent.advisor.headroom.reclaim_exclusion import ReclaimableNodes
from agent.config.advisor import CpuUtilBasedConfig, HeadroomConfig
from api.advice import NOT_NUMA_BOUND
from api.cpu import Topology
from tests.builders.nodes import topology

NODE = topology(96, sockets=2)
ALL = ReclaimableNodes(numa_nodes=(0, 1))


def util(**fields: Any) -> HeadroomConfig:
    return HeadroomConfig(util=CpuUtilBasedConfig(enable=True, **{"max_oversold_rate": 1.5, **fields}))


def situation(
    cpus: Mapping[int, range], busy: float, used: float | None, *, node: Topology = NODE, **fields: Any
) -> ReclaimPoolInputs:
    return ReclaimPoolInputs(
        **{  # the fields of a case take precedence
            "topology": node,
            "cpus": {numa: tuple(part) for numa, part in cpus.items()},
            "busy": dict.fromkeys(node.ids, busy),
            "use_cores": {NOT_NUMA_BOUND: used},
            "reclaimable_nodes": ALL,
            **fields,
        }
    )


TEN = {0: range(10)}


@pytest.mark.parametrize(
    ("case", "config", "expected"),
    [
        # target .6, 10 CPUs at .3, 3 used of 10: 10 + 10 x .3
        (situation(TEN, 0.3, 3, last_cores={0: 10}), util(), 13),
        # the same where reclaimed pods are bound to the node
        (situation(TEN, 0.3, None, use_cores={0: 3.0}, bound=(0,), last_cores={0: 10}), util(), 13),
        # a quota of 5 cores: supply 5, of which .6 is used; 1.5 x 5, rounded up
        (situation(TEN, 0.3, 3, last_cores={0: 10}, quota_cores={NOT_NUMA_BOUND: 5}), util(), 8),
        # overlap: supply 2 idle + 1 used; 1.5 x 3 rounded up
        (situation(TEN, 0.8, 1, last_cores={0: 10}), util(), 5),
        # without utilisation: what is idle and what is used
        (situation(TEN, 0.3, 3, last_cores={0: 10}), HeadroomConfig(), 10),
        # nothing used: 1.2 x 10
        (situation(TEN, 0.0, 0, last_cores={0: 10}), util(max_oversold_rate=1.2), 12),
        # above the maximum of .8: 15 - 10 x .1
        (situation(TEN, 0.9, 9, last_cores={0: 15}), util(maximum=0.8), 14),
        # between target and maximum: as it was
        (situation(TEN, 0.7, 7, last_cores={0: 12}), util(maximum=0.8), 12),
        # never more than the CPUs of the NUMA nodes
        (situation({0: range(44), 1: range(49, 86)}, 0.3, 28.8, last_cores={0: 43, 1: 43}), util(maximum=0.8), 96),
        (situation({0: range(44)}, 0.3, 28.8, last_cores={0: 86}), util(maximum=0.8), 48),
        (situation({0: range(44)}, 0.0, 0, last_cores={0: 86}), util(max_capacity_rate=0.5), 24),
        # supply 69.7 on two NUMA nodes: 34 each without utilisation; rounded up to 70 and 35 each with it
        (situation({0: range(10), 1: range(49, 96)}, 0.3, 29.8), HeadroomConfig(), 68),
        (situation({0: range(10), 1: range(49, 96)}, 0.3, 29.8), util(maximum=0.8), 70),
        # a bound NUMA node is rounded up; the rest down
        (situation({0: range(10), 1: range(48, 58)}, 0.35, 0, use_cores={0: 0.0, NOT_NUMA_BOUND: 0.0}, bound=(0,)),
         HeadroomConfig(), 7 + 6),
        # nothing idle, nothing used: no supply, whatever the previous headroom
        (situation(TEN, 1.0, 0, last_cores={0: 10}), util(), 0),
        # NUMA nodes that are not reclaimable
        (situation({0: range(10), 1: range(48, 60)}, 0.0, 0, reclaimable_nodes=ReclaimableNodes(numa_nodes=(1,))),
         HeadroomConfig(), 12),
        (situation(TEN, 0.0, 0, reclaimable_nodes=ReclaimableNodes(numa_nodes=(), refused={0: "level Node"})),
         HeadroomConfig(), 0),
    ],
)  # fmt: skip
def test_katalysts_cases_and_every_branch(case: ReclaimPoolInputs, config: HeadroomConfig, expected: float) -> None:
    result = assemble_headroom(case, config)
    assert result.cores == expected
    assert sum(result.cores_by_numa.values()) == expected
    assert set(result.cores_by_numa) == {0, 1}


@pytest.mark.parametrize(
    ("case", "word"),
    [
        (situation(TEN, 0.3, None), "the CPU use of reclaimed pods"),
        (situation({}, 0.3, 3), "no reclaim pool"),
        # known of the nodes without bound pods, unknown of the bound one: neither gets a headroom
        (situation({0: range(4), 1: range(48, 52)}, 0.3, 3, bound=(1,)), "NUMA node 1: the CPU use of reclaimed pods"),
    ],
)
def test_a_missing_input_makes_headroom_unknown(case: ReclaimPoolInputs, word: str) -> None:
    result = assemble_headroom(case, util())
    assert result.cores is None
    assert result.cores_by_numa == {}
    assert word in result.reason.text
    assert result.reason.rule == "headroom_unknown"


def test_no_headroom_while_reclaim_is_disabled_or_unknown() -> None:
    assert headroom_refusal((0, 1), ALL, enable_reclaim=True) is None
    off = headroom_refusal((0, 1), ALL, enable_reclaim=False)
    assert off is not None
    assert (off.cores, off.cores_by_numa, off.memory_bytes) == (0, {0: 0, 1: 0}, 0)
    unknown = headroom_refusal((0, 1), ReclaimableNodes(numa_nodes=(0, 1), unknown=("a/b",)), enable_reclaim=True)
    assert unknown is not None
    assert (unknown.cores, unknown.cores_by_numa, unknown.reason.rule) == (None, {}, "headroom_unknown")
    assert "a/b" in unknown.reason.text


def test_an_unmeasured_cpu_counts_as_busy() -> None:
    case = replace(situation(TEN, 0, 0), busy={0: 0.0, 1: 0.5})
    assert assemble_headroom(case, HeadroomConfig(whole_cores=False)).cores == 1.5


def test_headroom_of_a_small_node_has_fractions_of_cores() -> None:
    node = topology(2)
    case = situation({0: range(2)}, 0.35, 0.25, node=node, reclaimable_nodes=ReclaimableNodes(numa_nodes=(0,)))
    assert assemble_headroom(case, HeadroomConfig()).cores == pytest.approx(1.55)
    assert assemble_headroom(case, HeadroomConfig(whole_cores=True)).cores == 1


def test_the_reason_contains_the_numbers() -> None:
    reason = assemble_headroom(situation(TEN, 0.3, 3, last_cores={0: 10}), util()).reason
    assert "supply 10.00 cores. Utilisation is 0.30, target 0.6; previous headroom 10.00, new 13.00." in reason.text
    assert reason.inputs["unbound_supply_cores"] == 10
    refused = ReclaimableNodes(numa_nodes=(1,), refused={0: "reclaim is disabled for a/b at level NUMA"})
    reason = assemble_headroom(situation(TEN, 0.3, 3, reclaimable_nodes=refused), util()).reason
    assert "NUMA node 0 is not reclaimable: reclaim is disabled for a/b at level NUMA." in reason.text


cases = st.fixed_dictionaries(
    {
        "numa": st.integers(1, 4),
        "per_numa": st.integers(1, 24),
        "pool": st.floats(0.1, 1.0),
        "busy": st.floats(0, 1.5),
        "used": st.floats(0, 200),
        "last": st.floats(0, 300),
        "bound": st.sets(st.integers(0, 3)),
        "whole": st.booleans(),
        "util": st.booleans(),
        "quota": st.none() | st.floats(0, 100),
        "maximum": st.sampled_from([0.0, 0.8]),
    }
)


@given(cases)
def test_headroom_never_exceeds_the_cpus_and_parts_add_up(case: dict[str, Any]) -> None:
    numa, size = case["numa"], case["per_numa"]
    node = topology(numa * size, sockets=numa)
    cpus = {
        n: [cpu.id for cpu in node.cpus if cpu.numa == n][: max(round(size * case["pool"]), 1)] for n in range(numa)
    }
    result = assemble_headroom(
        ReclaimPoolInputs(
            topology=node,
            cpus={n: tuple(part) for n, part in cpus.items()},
            busy=dict.fromkeys(node.ids, case["busy"]),
            use_cores=dict.fromkeys((*range(numa), NOT_NUMA_BOUND), case["used"]),
            quota_cores={} if case["quota"] is None else dict.fromkeys((*range(numa), NOT_NUMA_BOUND), case["quota"]),
            bound=case["bound"],
            reclaimable_nodes=ReclaimableNodes(numa_nodes=tuple(range(numa))),
            last_cores=dict.fromkeys(range(numa), case["last"]),
        ),
        HeadroomConfig(
            whole_cores=case["whole"], util=CpuUtilBasedConfig(enable=case["util"], maximum=case["maximum"])
        ),
    )
    assert result.cores is not None
    assert sum(result.cores_by_numa.values()) == pytest.approx(result.cores, abs=1e-5)
    for n, cores in result.cores_by_numa.items():
        assert 0 <= cores <= size + 1e-6, n


@given(st.floats(0, 64), st.floats(0, 1), st.floats(0, 200))
def test_utilisation_headroom_never_exceeds_the_oversold_rate(supply: float, share: float, last: float) -> None:
    cores = utilisation_headroom(supply, supply * share, last, 64, CpuUtilBasedConfig(enable=True))
    assert min(supply, 64) - 1e-9 <= cores <= min(supply * 1.2, 64) + 1e-9


NEED = RegionNeed(name="share", upper_cores=90, estimate_cores=0)


@pytest.mark.parametrize("policy", ["canonical", "numa-dedicated", "numa-exclusive"])
@pytest.mark.parametrize(("allocate", "reclaim", "expected"), [(0, 0, 90), (10, 0, 80), (0, 10, 100)])
def test_katalysts_vectors(policy: str, allocate: float, reclaim: float, expected: float) -> None:
    need = replace(NEED, reserved_for_allocate_cores=allocate, reserved_for_reclaim_cores=reclaim)
    assert region_headroom(need, policy)[0] == expected


@pytest.mark.parametrize(
    ("policy", "estimate", "reclaimable", "expected", "rule"),
    [
        ("none", 0.0, True, 0.0, "region_none"),
        ("none", None, True, 0.0, "region_none"),
        ("canonical", 100.0, True, 0.0, "region_canonical"),
        ("canonical", 30.0, False, 60.0, "region_canonical"),  # the assembler excludes what is not reclaimable
        ("canonical", None, True, None, "region_unknown"),
        ("numa-dedicated", 30.0, True, 60.0, "region_numa_dedicated"),
        ("numa-dedicated", None, True, None, "region_unknown"),
        ("numa-dedicated", None, False, 0.0, "region_reclaim_off"),
    ],
)
def test_every_branch(
    policy: str, estimate: float | None, reclaimable: bool, expected: float | None, rule: str
) -> None:
    cores, reason = region_headroom(replace(NEED, estimate_cores=estimate, reclaimable=reclaimable), policy)
    assert cores == (None if expected is None else pytest.approx(expected))
    assert reason.rule == rule


def test_the_reason_of_a_region_contains_the_numbers() -> None:
    reason = region_headroom(RegionNeed(name="dedicated-a/b", upper_cores=20, estimate_cores=7.5), "canonical")[1]
    assert "dedicated-a/b leaves 12.50 cores: upper bound 20.00, less 7.50 needed" in reason.text


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(KeyError, match="adaptive"):
        region_headroom(NEED, "adaptive")
