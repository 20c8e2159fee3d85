"""Katalyst's cases of NodeResourceTopology (numbered as there), all policies, assumed pods, and a property: the same result as
trying every set of zones of every node."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.scheduler.numa_topology import (
    MAX_SCORE,
    PluginPolicy,
    ScoringStrategy,
    TopologyPod,
    TopologyPolicy,
    TopologyRules,
    assumed_charge,
    explain_topology,
    filter_topology,
    parse_topology_policy,
    score_topology,
)
from tests.controller.scheduler.numa_nodes import (
    C_SCORED,
    CPU,
    D_SCORED,
    GI,
    GPU,
    MEMORY,
    NAMES,
    A,
    B,
    C,
    D,
    E,
    NumaNode,
    amounts,
    dedicated_pod,
    guaranteed_pod,
    numa_node,
    obvious_fit,
    topology_pod,
    topology_rules,
    zone_state,
)

NATIVE, DYNAMIC = PluginPolicy.NATIVE, PluginPolicy.DYNAMIC
SINGLE, SINGLE_POD, NUMERIC = "SingleNUMANodeContainerLevel", "SingleNUMANodePodLevel", "NumericContainerLevel"
RESTRICTED, RESTRICTED_POD, BEST_EFFORT = "RestrictedContainerLevel", "RestrictedPodLevel", "BestEffortContainerLevel"
BIG, SMALL = amounts(4, 8), amounts(2, 4)
ALIGNED, WITH_GPU = (CPU, MEMORY), (CPU, MEMORY, GPU)
EXCLUSIVE = {"exclusive": True}


@pytest.mark.parametrize(
    ("plugin", "policy", "aligned", "pod", "expected"),
    [
        pytest.param(NATIVE, SINGLE, ALIGNED, guaranteed_pod(BIG), "A.C..", id="9"),
        pytest.param(NATIVE, SINGLE, ALIGNED, guaranteed_pod(SMALL, SMALL), "ABCDE", id="10"),
        pytest.param(NATIVE, SINGLE_POD, ALIGNED, guaranteed_pod(SMALL, SMALL), "A.C..", id="11"),
        pytest.param(NATIVE, NUMERIC, ALIGNED, guaranteed_pod(BIG), "ABCDE", id="12-a-stock-kubelet-has-no-numeric"),
        pytest.param(NATIVE, SINGLE, ALIGNED, guaranteed_pod(amounts(0.35, 8)), "ABCDE", id="13"),
        pytest.param(NATIVE, SINGLE, ALIGNED, guaranteed_pod(amounts(4, 8, other=200 * GI)), "A.C..", id="14"),
        pytest.param(DYNAMIC, SINGLE, ALIGNED, dedicated_pod(BIG), "A.C..", id="15"),
        pytest.param(DYNAMIC, NUMERIC, ALIGNED, dedicated_pod(amounts(4, 8, 6)), "A.C..", id="16"),
        pytest.param(DYNAMIC, NUMERIC, WITH_GPU, dedicated_pod(amounts(4, 8, 6)), ".....", id="17-six-gpus-need-two-zones"),
        pytest.param(DYNAMIC, NUMERIC, ALIGNED, dedicated_pod(amounts(4, 8, 3)), "A.C..", id="18"),
        pytest.param(DYNAMIC, NUMERIC, WITH_GPU, dedicated_pod(amounts(4, 8, 3)), "A.C..", id="19"),
        pytest.param(DYNAMIC, NUMERIC, ALIGNED, dedicated_pod(SMALL, SMALL), "ABCDE", id="main-container-alone"),
        pytest.param(
            DYNAMIC, NUMERIC, WITH_GPU, dedicated_pod(amounts(2, 4, 3), amounts(2, 4, 3)), "A.CDE", id="aligned-gpu-of-main"
        ),
        pytest.param(DYNAMIC, SINGLE, ALIGNED, dedicated_pod(SMALL, **EXCLUSIVE), "ABCDE", id="20"),
        pytest.param(DYNAMIC, NUMERIC, ALIGNED, dedicated_pod(BIG, **EXCLUSIVE), "ABC.E", id="21"),
        pytest.param(DYNAMIC, NUMERIC, ALIGNED, dedicated_pod(SMALL, SMALL, **EXCLUSIVE), "ABCDE", id="22-main-container"),
        pytest.param(DYNAMIC, SINGLE, ALIGNED, dedicated_pod(BIG, binding=False), "ABCDE", id="without-binding"),
        pytest.param(DYNAMIC, SINGLE, ALIGNED, guaranteed_pod(BIG), "ABCDE", id="not-dedicated"),
        pytest.param(NATIVE, "None", ALIGNED, guaranteed_pod(BIG), "ABCDE", id="none"),
        pytest.param(NATIVE, "none", ALIGNED, guaranteed_pod(BIG), "ABCDE", id="default-of-the-definition"),
        pytest.param(NATIVE, BEST_EFFORT, ALIGNED, guaranteed_pod(amounts(400, 8)), "ABCDE", id="best-effort"),
        # B, D and E need two zones by their capacity; E has two free ones, D has them in two sockets, which a kubelet accepts.
        pytest.param(NATIVE, RESTRICTED, ALIGNED, guaranteed_pod(BIG), "ABCDE", id="restricted"),
        pytest.param(NATIVE, RESTRICTED, ALIGNED, guaranteed_pod(SMALL, BIG), "A....", id="restricted-second"),
        pytest.param(NATIVE, RESTRICTED_POD, ALIGNED, guaranteed_pod(SMALL, SMALL), "ABCDE", id="restricted-pod"),
        # CPU fits into one zone of A and C, memory needs two: their sets differ, so that none is preferred.
        pytest.param(NATIVE, RESTRICTED, ALIGNED, guaranteed_pod(amounts(4, 9)), ".....", id="restricted-unequal"),
        pytest.param(DYNAMIC, RESTRICTED, ALIGNED, dedicated_pod(BIG), "A.C..", id="restricted-binding-is-one-zone"),
    ],
)  # fmt: skip
def test_filter(plugin: PluginPolicy, policy: str, aligned: Any, pod: TopologyPod, expected: str) -> None:
    nodes = (A, B, C, D, E)
    rules = topology_rules(plugin, aligned)
    fits = filter_topology(zone_state(nodes, [policy] * 5), pod, rules)
    assert "".join(name if fit else "." for name, fit in zip("ABCDE", fits, strict=True)) == expected
    assert [obvious_fit(node, policy, pod, rules) for node in nodes] == fits.tolist()


MOST, LEAST, BALANCED = ScoringStrategy.MOST, ScoringStrategy.LEAST, ScoringStrategy.BALANCED
LEAST_ZONES = ScoringStrategy.LEAST_ZONES
WITH_ONE_GPU = amounts(2, 4, 1)


@pytest.mark.parametrize(
    ("plugin", "policy", "strategy", "pod", "expected"),
    [
        pytest.param(NATIVE, SINGLE, MOST, guaranteed_pod(BIG), (100, 0, 0, 0), id="23"),
        pytest.param(NATIVE, SINGLE, LEAST, guaranteed_pod(SMALL), (50, 0, 33, 0), id="24"),
        pytest.param(NATIVE, SINGLE, BALANCED, guaranteed_pod(SMALL), (100, 100, 100, 100), id="25"),
        pytest.param(NATIVE, SINGLE, BALANCED, guaranteed_pod(amounts(1, 6)), (87, 0, 77, 0), id="26-unequal-shares"),
        pytest.param(NATIVE, SINGLE, MOST, guaranteed_pod(amounts(0.35, 8)), (100, 100, 100, 100), id="27"),
        pytest.param(NATIVE, SINGLE, MOST, topology_pod(SMALL), (100, 100, 100, 100), id="27-not-guaranteed"),
        pytest.param(DYNAMIC, SINGLE, MOST, dedicated_pod(WITH_ONE_GPU), (50, 100, 66, 100), id="28"),
        pytest.param(DYNAMIC, SINGLE, LEAST, dedicated_pod(WITH_ONE_GPU), (50, 0, 33, 0), id="29"),
        pytest.param(DYNAMIC, SINGLE, MOST, dedicated_pod(WITH_ONE_GPU, **EXCLUSIVE), (50, 100, 0, 100), id="30"),
        pytest.param(DYNAMIC, SINGLE, LEAST, dedicated_pod(WITH_ONE_GPU, **EXCLUSIVE), (50, 0, 0, 0), id="31"),
        pytest.param(DYNAMIC, NUMERIC, MOST, dedicated_pod(amounts(3, 6, 1), **EXCLUSIVE), (75, 75, 0, 75), id="32"),
        pytest.param(DYNAMIC, SINGLE, LEAST, dedicated_pod(SMALL, binding=False), (100, 100, 100, 100), id="33"),
        pytest.param(NATIVE, NUMERIC, MOST, guaranteed_pod(SMALL), (0, 0, 0, 0), id="unsupported-policy"),
        pytest.param(NATIVE, "None", MOST, guaranteed_pod(SMALL), (0, 0, 0, 0), id="no-policy"),
        # Katalyst scores 0 at pod level, because it counts no resource there.
        pytest.param(NATIVE, SINGLE_POD, MOST, guaranteed_pod(*[amounts(1, 2)] * 2), (50, 100, 66, 100), id="pod-level"),
        # Katalyst counts 1500m as two CPUs.
        pytest.param(DYNAMIC, SINGLE, MOST, dedicated_pod(amounts(1.5, 3)), (37, 75, 50, 75), id="fractional"),
        # a: mean of 50 and 25. The second container finds what the first one leaves; Katalyst scores each as if it were alone.
        pytest.param(NATIVE, SINGLE, MOST, guaranteed_pod(SMALL, amounts(1, 2)), (37, 75, 83, 75), id="mean-of-containers"),
        pytest.param(NATIVE, SINGLE, LEAST_ZONES, guaranteed_pod(BIG), (100, 0, 0, 0), id="one-zone"),
        pytest.param(NATIVE, RESTRICTED, LEAST_ZONES, guaranteed_pod(BIG), (100, 88, 0, 88), id="two-zones"),
        pytest.param(NATIVE, BEST_EFFORT, LEAST_ZONES, guaranteed_pod(BIG), (100, 88, 88, 88), id="more-than-preferred"),
        pytest.param(NATIVE, BEST_EFFORT, LEAST_ZONES, guaranteed_pod(amounts(8, 16)), (88, 0, 0, 64), id="four-zones"),
    ],
)  # fmt: skip
def test_score(
    plugin: PluginPolicy, policy: str, strategy: ScoringStrategy, pod: TopologyPod, expected: tuple[int, ...]
) -> None:
    rules = topology_rules(plugin, ALIGNED, strategy)
    state = zone_state((A, B, C_SCORED, D_SCORED), [policy] * 4, zone_count=8)
    assert tuple(score_topology(state, pod, rules).tolist()) == expected


def test_weights_of_resources() -> None:
    rules = msgspec.structs.replace(topology_rules(NATIVE), weights=np.array([3, 1, 1, 1]))
    assert score_topology(zone_state([A], [SINGLE]), guaranteed_pod(amounts(4, 4)), rules).tolist() == [
        87
    ]  # (3*100 + 50) / 4


def test_nodes_with_different_policies_are_independent() -> None:
    policies = [SINGLE, "None", RESTRICTED, BEST_EFFORT, SINGLE_POD, "NumericPodLevel"]
    state = zone_state([B] * 6, policies)
    assert filter_topology(state, guaranteed_pod(BIG), topology_rules(NATIVE)).tolist() == [
        False,
        True,
        True,
        True,
        False,
        True,
    ]
    assert score_topology(state, guaranteed_pod(BIG), topology_rules(NATIVE)).tolist() == [0, 0, 100, 100, 0, 0]


@pytest.mark.parametrize(
    ("text", "policy", "pod_level"),
    [
        (SINGLE, TopologyPolicy.SINGLE, False),
        (SINGLE_POD, TopologyPolicy.SINGLE, True),
        (RESTRICTED_POD, TopologyPolicy.RESTRICTED, True),
        (BEST_EFFORT, TopologyPolicy.BEST_EFFORT, False),
        (NUMERIC, TopologyPolicy.NUMERIC, False),
        ("None", TopologyPolicy.NONE, False),
        ("none", TopologyPolicy.NONE, False),
        ("NumericContainerLevelX", TopologyPolicy.NONE, False),
        ("", TopologyPolicy.NONE, False),
    ],
)
def test_policy_names(text: str, policy: TopologyPolicy, *, pod_level: bool) -> None:
    assert parse_topology_policy(text) == (policy, pod_level)


@pytest.mark.parametrize(
    ("pod", "rules", "expected"),
    [
        pytest.param(dedicated_pod(SMALL), topology_rules(DYNAMIC), [SMALL, SMALL], id="whole-request-in-every-zone"),
        pytest.param(
            dedicated_pod(SMALL, **EXCLUSIVE), topology_rules(DYNAMIC), [amounts(4, 8, 4)] * 2, id="exclusive-takes-all"
        ),
        pytest.param(guaranteed_pod(SMALL, SMALL), topology_rules(NATIVE), [BIG, BIG], id="all-containers"),
        pytest.param(topology_pod(SMALL), topology_rules(NATIVE), [amounts()] * 2, id="not-aligned"),
    ],
)
def test_an_assumed_pod_occupies_every_zone(pod: TopologyPod, rules: TopologyRules, expected: list[Any]) -> None:
    state = zone_state([A], [SINGLE])
    charge = assumed_charge(state.allocatable[0], pod, rules)
    assert [tuple(zone) for zone in charge.tolist()] == expected
    assert charge is not state.allocatable[0]


def test_assumed_pods_block_zones_until_their_own_is_reported() -> None:
    rules, pod = topology_rules(DYNAMIC), dedicated_pod(amounts(3, 6))
    before = zone_state([A], [SINGLE])
    charge = assumed_charge(before.allocatable[0], pod, rules)
    assumed = msgspec.structs.replace(before, assumed=before.assumed + charge)
    assert filter_topology(assumed, pod, rules).tolist() == [False]
    allocated = before.allocated.copy()
    allocated[0, 1] = amounts(3, 6)
    reported = msgspec.structs.replace(before, allocated=allocated)
    assert filter_topology(reported, pod, rules).tolist() == [True]
    exclusive = dedicated_pod(amounts(1, 2), **EXCLUSIVE)
    assert filter_topology(reported, exclusive, rules).tolist() == [True]
    assert filter_topology(assumed, exclusive, rules).tolist() == [False]


def test_the_reason_has_the_numbers() -> None:
    state = zone_state([A, C, D], [SINGLE, SINGLE, NUMERIC], zone_count=8)
    pod, rules = guaranteed_pod(amounts(5, 8)), topology_rules(NATIVE)
    assert explain_topology(state, pod, rules, 1, NAMES) == (
        "no set of NUMA nodes fits (policy single): cpu: requested 5000, largest free 4000 in a NUMA node, 7000 in all;"
        " memory: requested 8589934592, largest free 8589934592 in a NUMA node, 15032385536 in all; reduce the request"
    )
    assert explain_topology(state, guaranteed_pod(SMALL), rules, 1, NAMES) == ""
    text = explain_topology(state, dedicated_pod(BIG, **EXCLUSIVE), topology_rules(DYNAMIC), 2, NAMES)
    assert text.startswith("no set of NUMA nodes fits (policy numeric, 2 NUMA nodes without pods): cpu: requested 4000")


POLICIES = st.sampled_from(
    [SINGLE, SINGLE_POD, RESTRICTED, RESTRICTED_POD, BEST_EFFORT, NUMERIC, "NumericPodLevel", "None"]
)
REQUESTS = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 5), st.integers(0, 2))


@st.composite
def nodes(draw: st.DrawFn) -> NumaNode:
    """Draw a node with zones that differ, and allocations that may exceed them."""
    sockets = draw(st.sampled_from([(0,), (0, 0), (0, 1), (0, 0, 1, 1), (0, 0, 0, 1, 1, 1)]))
    zone = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3), st.just(0))
    used = st.one_of(
        st.just((0, 0, 0, 0)), st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2), st.just(0))
    )
    columns = [tuple(draw(items) for _ in sockets) for items in (zone, used, used)]
    reported = (draw(st.booleans()), True, draw(st.booleans()), False)
    return NumaNode(sockets=sockets, capacity=columns[0], allocated=columns[1], assumed=columns[2], reported=reported)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(nodes(), POLICIES), min_size=1, max_size=6), st.lists(REQUESTS, min_size=1, max_size=3),
    st.booleans(), st.booleans(), st.sampled_from([ALIGNED, WITH_GPU, (CPU,), ()]),
)  # fmt: skip
def test_the_result_is_that_of_trying_every_set(
    drawn: list[tuple[NumaNode, str]], containers: list[tuple[int, ...]], dynamic: bool, exclusive: bool, aligned: Any
) -> None:
    rules = topology_rules(DYNAMIC if dynamic else NATIVE, aligned)
    pod = topology_pod(*containers, dedicated=True, binding=True, exclusive=exclusive, guaranteed=True, whole_cpus=True)
    state = zone_state([node for node, _ in drawn], [policy for _, policy in drawn], zone_count=8)
    expected = [obvious_fit(node, policy, pod, rules) for node, policy in drawn]
    assert filter_topology(state, pod, rules).tolist() == expected
    for strategy in ScoringStrategy:
        score = score_topology(state, pod, msgspec.structs.replace(rules, strategy=strategy))
        assert ((score >= 0) & (score <= MAX_SCORE)).all()
        assert not score[~np.array(expected)].any()


def test_a_single_node_state_without_zones_rejects_aligned_pods() -> None:
    node = numa_node((0,), amounts(4, 8))
    state = zone_state([node], [SINGLE])
    empty = msgspec.structs.replace(state, zones=np.zeros_like(state.zones))
    assert filter_topology(empty, guaranteed_pod(SMALL), topology_rules(NATIVE)).tolist() == [False]
