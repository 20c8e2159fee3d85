"""Quotas of namespaces: guaranteed amounts, maxima, and borrowing of what others leave."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.elastic_quota import ElasticQuotas
from controller.scheduler.plugin_chain import PluginChain
from controller.scheduler.scheduler_kinds import ElasticQuota
from controller.scheduler.scheduling_pod import SchedulingPod, parse_scheduling_pod
from tests.controller.scheduler.objects import NOW_S, a_pod, a_state

GIB = 1 << 30
MAX = f"the namespace's quota: {RECLAIMED_CPU} is at its max"
BORROWED = f"the namespace borrows: free {RECLAIMED_CPU} is guaranteed to others"


def a_quota(least: Any = None, most: Any = None) -> ElasticQuota:
    spec = {field: {RECLAIMED_CPU: value} for field, value in (("min", least), ("max", most)) if value is not None}
    return msgspec.convert({"spec": spec}, ElasticQuota)


def a_pod_of(namespace: str, millicpu: int, name: str = "new") -> SchedulingPod:
    pod = parse_scheduling_pod(a_pod(name, millicpu, 0))
    return pod._replace(key=f"{namespace}/{name}", uid=f"{namespace}-{name}")


def two_teams() -> tuple[ClusterState, ElasticQuotas]:
    """Ten cores on two nodes; team a has min 4 and max 8 and uses 3, team b has min 3 and uses 1, team c has no quota."""
    state = a_state(("n1", 5000, GIB), ("n2", 5000, GIB))
    quotas = ElasticQuotas(state.namespace_requests)
    quotas.apply("a/quota", a_quota("4k", "8k"))
    quotas.apply("b/quota", a_quota("3k"))
    state.assume(a_pod_of("a", 3000, "used"), "n1", NOW_S)
    state.assume(a_pod_of("b", 1000, "used"), "n2", NOW_S)
    return state, quotas


def rejection(state: ClusterState, quotas: ElasticQuotas, pod: SchedulingPod) -> str:
    chain, rows = PluginChain((quotas,)), state.nodes.rows_of(["n1", "n2"])
    outcome = chain.filter(pod, state.nodes, rows, NOW_S)
    assert outcome.passes.all() or not outcome.passes.any(), "a quota is the same on every node"
    return "" if outcome.passes[0] else chain.reason(outcome, 1).message


@pytest.mark.parametrize(
    ("namespace", "millicpu", "expected"),
    [
        # 6 cores are free, of which 2 are guaranteed to b: 1 is a's own, 3 can be borrowed.
        ("a", 1000, ""),
        ("a", 4000, ""),
        ("a", 4001, BORROWED),
        ("a", 5001, MAX),
        # 1 core of the free ones is guaranteed to a: 2 are b's own, 3 can be borrowed.
        ("b", 2000, ""),
        ("b", 5000, ""),
        ("b", 5001, BORROWED),
        # Without a quota nothing is guaranteed: 3 can be borrowed.
        ("c", 3000, ""),
        ("c", 3001, BORROWED),
        ("c", 0, ""),
    ],
)
def test_a_namespace_uses_its_own_and_borrows_what_nothing_else_is_guaranteed(
    namespace: str, millicpu: int, expected: str
) -> None:
    assert rejection(*two_teams(), a_pod_of(namespace, millicpu)) == expected


def test_a_guarantee_counts_even_if_others_have_borrowed_it() -> None:
    state, quotas = two_teams()
    state.assume(a_pod_of("c", 6000, "used"), "n1", NOW_S)
    assert rejection(state, quotas, a_pod_of("b", 1000)) == "", "the fit of each node decides"


def test_the_end_of_a_pod_returns_its_part_and_an_invalid_quota_is_reported() -> None:
    state, quotas = two_teams()
    state.release("a-used", "n1")
    assert "a" not in state.namespace_requests
    assert rejection(state, quotas, a_pod_of("a", 8000)) == BORROWED
    quotas.apply("b/quota", a_quota("lots"))
    assert quotas.problems["b/quota"].startswith(f"spec.min.{RECLAIMED_CPU}: 'lots' is not a quantity")
    assert rejection(state, quotas, a_pod_of("a", 8000)) == ""
    quotas.apply("b/quota", None)
    quotas.apply("a/quota", None)
    assert not quotas.problems
    assert rejection(state, quotas, a_pod_of("a", 9000)) == ""


def test_an_explanation_names_use_and_bounds() -> None:
    state, quotas = two_teams()
    row = state.nodes.row("n1")
    assert row is not None
    assert quotas.describe(a_pod_of("a", 6000), state.nodes, row, NOW_S).startswith(
        "reclaimed_millicpu: requests 6000, namespace a uses 3000, min 4000, max 8000; "
        f"{RECLAIMED_MEMORY.rpartition('/')[2]}: requests 0, namespace a uses 0, min 0, no max"
    )


def test_pods_that_name_a_node_themselves_take_only_what_that_node_offers_from_borrowers() -> None:
    """Any user can set spec.nodeName: 100 cores on n1, and on a node that does not exist, stopped all borrowing."""
    state, quotas = two_teams()
    for node in ("n1", "no-such-node"):
        state.assume(a_pod_of("attacker", 100_000, f"on-{node}"), node, NOW_S)
    # n2 has 4 cores free; 1 is guaranteed to a and 2 to b.
    assert rejection(state, quotas, a_pod_of("c", 1000)) == ""
    assert rejection(state, quotas, a_pod_of("c", 1001)) == BORROWED
