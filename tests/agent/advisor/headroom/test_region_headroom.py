"""Headroom of one region: Katalyst's own numbers, and missing inputs."""

from __future__ import annotations

import pytest

from agent.advisor.headroom.headroom_policies import RegionNeed, region_headroom

NEED = RegionNeed(name="share", upper_cores=90, estimate_cores=0)


@pytest.mark.parametrize("policy", ["canonical", "numa-dedicated", "numa-exclusive"])
@pytest.mark.parametrize(("allocate", "reclaim", "expected"), [(0, 0, 90), (10, 0, 80), (0, 10, 100)])
def test_katalysts_vectors(policy: str, allocate: float, reclaim: float, expected: float) -> None:
    need = RegionNeed(
        name="r",
        upper_cores=90,
        estimate_cores=0,
        reserved_for_allocate_cores=allocate,
        reserved_for_reclaim_cores=reclaim,
    )
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
    need = RegionNeed(name="r", upper_cores=90, estimate_cores=estimate, reclaimable=reclaimable)
    cores, reason = region_headroom(need, policy)
    assert cores == (None if expected is None else pytest.approx(expected))
    assert reason.rule == rule


def test_the_reason_contains_the_numbers() -> None:
    reason = region_headroom(RegionNeed(name="dedicated-a/b", upper_cores=20, estimate_cores=7.5), "canonical")[1]
    assert "dedicated-a/b leaves 12.50 cores: upper bound 20.00, less 7.50 needed" in reason.text


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(KeyError, match="adaptive"):
        region_headroom(NEED, "adaptive")
