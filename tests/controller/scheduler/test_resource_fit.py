"""Katalyst's numeric cases of QoSAwareNodeResourcesFit and of balanced allocation, and what is not copied from it."""

from __future__ import annotations

import numpy as np
import pytest

from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.plugin_chain import PluginChain
from controller.scheduler.resource_fit import BalancedAllocation, FitSettings, ResourceFit, ShapePoint
from controller.scheduler.scheduling_pod import parse_scheduling_pod
from tests.controller.scheduler.objects import NOW_S, UNIT, a_cnr, a_pod, a_state, pod_of

ROW = np.array([0])


def filled(cnr: bool = True) -> ClusterState:
    """Node n1 with two pods of 2000/2U and 3000/3U; its CustomNodeResource offers 9000/12U."""
    state = ClusterState()
    for name, amount in (("one", 2), ("two", 3)):
        state.apply_pod(None, a_pod(name, amount * 1000, amount * UNIT, node="n1"), None)
    if cnr:
        state.apply_cnr("n1", a_cnr("n1", 9000, 12 * UNIT))
    return state


def rejection(state: ClusterState, millicpu: object, memory: object, level: str = "reclaimed_cores") -> str:
    chain = PluginChain((ResourceFit(FitSettings()),))
    outcome = chain.filter(parse_scheduling_pod(a_pod("new", millicpu, memory, level=level)), state.nodes, ROW, NOW_S)
    return "" if outcome.passes[0] else chain.reason(outcome, 0).message


@pytest.mark.parametrize(
    ("cnr", "millicpu", "memory", "expected"),
    [
        (False, 3000, 3 * UNIT, "node(s) without a CustomNodeResource offer no reclaimed resources"),
        (True, 3000, 3 * UNIT, ""),
        (True, 3000, 30 * UNIT, "Insufficient resource.katalyst.kubewharf.io/reclaimed_memory"),
        (True, 4000, 7 * UNIT, ""),
        (True, "4k", None, ""),
        (True, 4001, 1, "Insufficient resource.katalyst.kubewharf.io/reclaimed_millicpu"),
        (True, "4000500m", 1, "Insufficient resource.katalyst.kubewharf.io/reclaimed_millicpu"),
        (False, None, None, ""),
        (False, 0, 0, ""),
    ],
    ids=["1", "2", "3", "an equal amount fits", "4k", "one too many", "fractions round up", "nothing", "zero"],
)
def test_fit(cnr: bool, millicpu: object, memory: object, expected: str) -> None:
    assert rejection(filled(cnr), millicpu, memory) == expected


def test_a_pod_without_the_level_that_requests_reclaimed_resources_is_checked_too() -> None:
    assert rejection(filled(), 4001, 1, level="") == "Insufficient resource.katalyst.kubewharf.io/reclaimed_millicpu"


def score(settings: FitSettings, state: ClusterState, millicpu: int = 3000, memory: int = 3 * UNIT) -> float:
    pod = parse_scheduling_pod(a_pod("new", millicpu, memory))
    result = ResourceFit(settings).score(pod, state.nodes, ROW, NOW_S)
    assert result is not None
    return float(result[0])


SHAPE = (ShapePoint(utilization=0, score=10), ShapePoint(utilization=50, score=5), ShapePoint(utilization=100, score=0))


@pytest.mark.parametrize(
    ("settings", "millicpu", "memory", "expected"),
    [
        # 4 of the facts: (11*30 + 33*70)/100
        ({"strategy": "LeastAllocated"}, 3000, 3 * UNIT, 26),
        # 8000*100//9000 = 88 and 8*100//12 = 66: (88*30 + 66*70)//100
        ({"strategy": "MostAllocated"}, 3000, 3 * UNIT, 72),
        # More than the capacity: Least 0, Most as full.
        ({"strategy": "LeastAllocated"}, 5000, 3 * UNIT, 23),
        ({"strategy": "MostAllocated"}, 5000, 3 * UNIT, 76),
        # 88 % and 66 % of the default shape, rounded: (88*30 + 66*70)/100 = 72.6
        ({"strategy": "RequestedToCapacityRatio"}, 3000, 3 * UNIT, 73),
        # 50 + -50*(88-50)//50 = 50-38 = 12 and 50-16 = 34: (12*30 + 34*70)/100 = 27.4
        ({"strategy": "RequestedToCapacityRatio", "shape": SHAPE}, 3000, 3 * UNIT, 27),
        # CPU is full and scores 0, so that only memory counts: 34
        ({"strategy": "RequestedToCapacityRatio", "shape": SHAPE}, 4000, 3 * UNIT, 34),
    ],
)
def test_scores(settings: dict[str, object], millicpu: int, memory: int, expected: int) -> None:
    weighted = FitSettings(cpu_weight=30, memory_weight=70, **settings)  # type: ignore[arg-type]
    assert score(weighted, filled(), millicpu, memory) == expected


def test_a_node_that_offers_nothing_scores_nothing_and_a_pod_without_requests_counts_with_defaults() -> None:
    assert score(FitSettings(), a_state(("n1", 0, 0))) == 0
    # 100 millicpu of 1000 and 200 MiB of 1 GiB: (90 + 80)//2
    assert score(FitSettings(), a_state(("n1", 1000, 1 << 30)), 0, 0) == 85


@pytest.mark.parametrize(
    ("settings", "offers", "expected"),
    [
        # 3000 of 9000 are requested; the node offers no memory, so that CPU alone counts.
        (FitSettings(strategy="LeastAllocated"), (9000, 0), 66),
        (FitSettings(strategy="MostAllocated"), (9000, 0), 33),
        (FitSettings(strategy="RequestedToCapacityRatio"), (9000, 0), 33),
        # Katalyst's shape gives a score for full resources, which one that is not offered is not.
        (FitSettings(strategy="RequestedToCapacityRatio"), (0, 0), 0),
        (FitSettings(strategy="MostAllocated", cpu_weight=30, memory_weight=70), (0, 3 << 30), 33),
    ],
)
def test_a_resource_that_a_node_does_not_offer_has_no_weight(
    settings: FitSettings, offers: tuple[int, int], expected: int
) -> None:
    """As in Katalyst (resource_allocation.go, score: only allocatable amounts above 0 are filled in)."""
    state = a_state(("n1", *offers))
    assert score(settings, state, 3000, 1 << 30) == expected
    pod = parse_scheduling_pod(a_pod("new", 3000, 1 << 30))
    balance = BalancedAllocation(FitSettings()).score(pod, state.nodes, ROW, NOW_S)
    assert balance is not None
    assert balance[0] == 100, "of one resource there is no deviation"


@pytest.mark.parametrize(
    ("millicpu", "memory", "expected"),
    [
        # 8/9 and 8/12: (1 - (0.8889-0.6667)/2)*100 = 88.9
        (3000, 3 * UNIT, 88),
        # Both full
        (9000, 12 * UNIT, 100),
        # 5/9 and 1, clamped: (1 - 0.4444/2)*100 = 77.8
        (0, 30 * UNIT, 77),
    ],
)
def test_balanced_allocation(millicpu: int, memory: int, expected: int) -> None:
    pod = parse_scheduling_pod(a_pod("new", millicpu, memory))
    result = BalancedAllocation(FitSettings()).score(pod, filled().nodes, ROW, NOW_S)
    assert result is not None
    assert result[0] == expected


def test_other_pods_are_left_to_the_stock_scores() -> None:
    pod = parse_scheduling_pod(pod_of("online", {"containers": [{"resources": {"requests": {"cpu": "2"}}}]}))
    assert ResourceFit(FitSettings()).score(pod, filled().nodes, ROW, NOW_S) is None
    assert BalancedAllocation(FitSettings()).score(pod, filled().nodes, ROW, NOW_S) is None


def test_a_shape_needs_rising_utilizations() -> None:
    with pytest.raises(ValueError, match="list at least one, each larger than the one before"):
        FitSettings(shape=(ShapePoint(utilization=50, score=1), ShapePoint(utilization=50, score=2)))
