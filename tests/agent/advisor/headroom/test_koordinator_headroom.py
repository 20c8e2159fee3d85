"""Koordinator's sums: its own conformance cases, and every branch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.advisor.headroom.koordinator_headroom import (
    KoordinatorBudget,
    KoordinatorDemand,
    KoordinatorTier,
    batch_amount,
    koordinator_headroom,
    mid_amount,
)
from agent.config.advisor import KoordinatorHeadroomConfig
from tests.builders.nodes import topology


def prod(used: float | None, request: float | None = None, **fields: Any) -> KoordinatorDemand:
    return KoordinatorDemand(tier=KoordinatorTier.PROD, used=used, request=request, **fields)


@pytest.mark.parametrize(
    ("budget", "policy", "percent", "threshold", "expected"),
    [
        # Koordinator's own: 100 - 40 - 10 - 20; nothing left; requests of memory
        (KoordinatorBudget(capacity=100, system_used=7, reserved=10, demands=[prod(20)]), "usage", 60, None, 30),
        (KoordinatorBudget(capacity=10, system_used=2, demands=[prod(5)]), "usage", 60, None, 0),
        (KoordinatorBudget(capacity=200, system_used=None, reserved=10, demands=[prod(None, 60)]), "request", 65, None, 60),
        # the system uses more than is reserved
        (KoordinatorBudget(capacity=100, system_used=15, reserved=10, demands=[prod(20)]), "usage", 60, None, 25),
        # batch and free do not count, mid does, and so does a terminated pod with measured use
        (KoordinatorBudget(capacity=100, system_used=0, demands=[
            KoordinatorDemand(tier=KoordinatorTier.BATCH, used=9), KoordinatorDemand(tier=KoordinatorTier.FREE, used=9),
            KoordinatorDemand(tier=KoordinatorTier.MID, used=5), prod(6)]), "usage", 60, None, 49),
        # not measured yet: its request, by either policy
        (KoordinatorBudget(capacity=100, system_used=0, demands=[prod(None, 8), prod(2, 4)]), "usage", 60, None, 50),
        (KoordinatorBudget(capacity=100, system_used=0, demands=[prod(None, 8), prod(2, 4)]), "maxUsageRequest", 60, None, 48),
        (KoordinatorBudget(capacity=100, system_used=0, demands=[prod(7, 4)]), "maxUsageRequest", 60, None, 53),
        (KoordinatorBudget(capacity=100, system_used=0, demands=[prod(3, None)]), "maxUsageRequest", 60, None, 57),
        # an exclusive pod takes its CPU request, used or not
        (KoordinatorBudget(capacity=100, system_used=0, demands=[prod(1, 16, exclusive=True)]), "usage", 60, None, 44),
        # without a request there is nothing to subtract by requests
        (KoordinatorBudget(capacity=100, system_used=0, demands=[prod(7, None)]), "request", 60, None, 60),
        # bounded
        (KoordinatorBudget(capacity=100, system_used=0, demands=[prod(10)]), "usage", 60, 20, 20),
    ],
)  # fmt: skip
def test_batch(
    budget: KoordinatorBudget, policy: str, percent: float, threshold: float | None, expected: float
) -> None:
    assert batch_amount(budget, policy, percent, threshold).value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "threshold", "unallocated", "static", "expected"),
    [
        # Koordinator's own: min(min(30, 20) + 3, 100)
        ({"prod_reclaimable": 30, "node_used": 80, "demands": [prod(0, 80)], "system_used": 5}, 100, 20, None, 23),
        ({"prod_reclaimable": 30, "node_used": 80}, 100, 0, None, 20),
        ({"prod_reclaimable": 10, "node_used": 80}, 100, 0, None, 10),
        ({"prod_reclaimable": 10, "node_used": 120}, 100, 0, None, 0),  # more used than there is
        ({"prod_reclaimable": 50, "node_used": 0}, 40, 0, None, 40),
        # requests beyond the node leave nothing unallocated
        ({"prod_reclaimable": 10, "node_used": 0, "demands": [prod(0, 130)], "system_used": 5}, 100, 50, None, 10),
        ({"reserved": 30, "prod_reclaimable": 0, "node_used": 0, "system_used": 5}, 100, 50, None, 35),
        ({}, 100, 0, 25.0, 25),
        ({}, 10, 0, 25.0, 10),
    ],
)
def test_mid(
    fields: dict[str, Any], threshold: float, unallocated: float, static: float | None, expected: float
) -> None:
    budget = KoordinatorBudget(**{"capacity": 100, "system_used": None, **fields})
    assert mid_amount(budget, threshold, unallocated, static).value == pytest.approx(expected)


@pytest.mark.parametrize(
    "amount",
    [
        batch_amount(KoordinatorBudget(capacity=100, system_used=None, reserved=10, demands=[prod(20)]), "usage", 60),
        batch_amount(KoordinatorBudget(capacity=100, system_used=0, demands=[prod(None)]), "usage", 60),
        batch_amount(KoordinatorBudget(capacity=100, system_used=0, demands=[prod(None)]), "maxUsageRequest", 60),
        mid_amount(KoordinatorBudget(capacity=100, system_used=0, node_used=5), 100),
        mid_amount(KoordinatorBudget(capacity=100, system_used=0, prod_reclaimable=5), 100),
        mid_amount(KoordinatorBudget(capacity=100, system_used=None, prod_reclaimable=5, node_used=5), 100, 20),
    ],
)
def test_a_missing_input_gives_no_new_headroom(amount: Any) -> None:
    assert amount.value is None
    assert amount.reason.rule.endswith("_unknown")
    assert "Not known" in amount.reason.text


def test_the_reason_contains_the_formula_with_numbers() -> None:
    amount = batch_amount(KoordinatorBudget(capacity=100, system_used=7, reserved=10, demands=[prod(20)]), "usage", 60)
    assert (
        amount.reason.text == "Batch is 30.00 cores = 100.00 cores - 40.00 cores margin - 10.00 cores system"
        " - 20.00 cores by pods above batch (usage)."
    )


def test_headroom_of_both_resources_by_both_policies() -> None:
    node = topology(100, sockets=2)
    cpu = KoordinatorBudget(
        capacity=100, system_used=7, reserved=10, demands=[prod(20)], prod_reclaimable=30, node_used=80
    )
    memory = KoordinatorBudget(
        capacity=200, system_used=4, reserved=10, demands=[prod(30, 60)], prod_reclaimable=9, node_used=50
    )
    config = KoordinatorHeadroomConfig(memory_policy="request", mid_static_memory_percent=5)
    result = koordinator_headroom("koordinator-batch", cpu, memory, node, config)
    assert (result.cores, result.cores_by_numa, result.memory_bytes) == (30, {0: 15, 1: 15}, 60)
    assert "CPU: Batch is 30" in result.reason.text
    assert "Memory: Batch is 60" in result.reason.text
    result = koordinator_headroom("koordinator-mid", cpu, memory, node, config)
    assert (result.cores, result.cores_by_numa, result.memory_bytes) == (20, {0: 10, 1: 10}, 10)
    unmeasured = KoordinatorBudget(capacity=100, system_used=None)
    result = koordinator_headroom("koordinator-batch", unmeasured, None, node, config)
    assert (result.cores, result.cores_by_numa, result.memory_bytes) == (None, {}, None)


demands = st.lists(
    st.builds(
        KoordinatorDemand,
        tier=st.sampled_from(KoordinatorTier),
        request=st.floats(0, 100),
        used=st.none() | st.floats(0, 100),
        exclusive=st.booleans(),
    ),
    max_size=6,
)


@given(st.floats(1, 256), demands, st.floats(0, 300), st.sampled_from(["usage", "request", "maxUsageRequest"]))
def test_never_negative_never_above_the_capacity_and_less_with_every_pod(
    capacity: float, pods: list[KoordinatorDemand], system: float, policy: str
) -> None:
    with_all = batch_amount(KoordinatorBudget(capacity=capacity, system_used=system, demands=pods), policy, 60).value
    without_one = batch_amount(
        KoordinatorBudget(capacity=capacity, system_used=system, demands=pods[1:]), policy, 60
    ).value
    assert with_all is not None
    assert without_one is not None
    assert 0 <= with_all <= without_one <= capacity
    result = mid_amount(
        KoordinatorBudget(capacity=capacity, system_used=system, demands=pods, prod_reclaimable=500, node_used=system),
        100,
        50,
    )
    assert result.value is not None
    assert 0 <= result.value <= capacity
