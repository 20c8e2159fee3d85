"""What a knob may be set to on a machine."""

from __future__ import annotations

import pytest

from agent.qrm.knobs.knob_files import KnobLimits, clamp_value
from api.knobs import Knob

V1 = KnobLimits(allowed=(0, 1, 2, 3), cpu_count=4, empty_inherits_parent=False)
V2 = KnobLimits(allowed=(0, 1, 2, 3), cpu_count=4, empty_inherits_parent=True)
BLIND = KnobLimits(allowed=None, cpu_count=4, empty_inherits_parent=True)


@pytest.mark.parametrize(
    ("knob", "requested", "limits", "expected"),
    [
        (Knob.CPUSET, "2-5", V1, "2-3"),
        (Knob.CPUSET, "1", V1, "1"),
        (Knob.CPUSET, "", V1, "0-3"),
        (Knob.CPUSET, "", V2, ""),
        (Knob.CPUSET, "7", BLIND, "7"),
        (Knob.WEIGHT, "0", V1, "1"),
        (Knob.WEIGHT, "10001", V1, "10000"),
        (Knob.WEIGHT, "77", V1, "77"),
        (Knob.QUOTA, "399999 100000", V1, "399999 100000"),
        (Knob.QUOTA, "400000 100000", V1, "max 100000"),
        (Knob.QUOTA, "10 100000", V1, "1000 100000"),
        (Knob.QUOTA, "1000000 2000000", V1, "500000 1000000"),
        (Knob.QUOTA, "250 500", V1, "1000 1000"),
        (Knob.QUOTA, "1500 500", V1, "3000 1000"),
        (Knob.QUOTA, "5 0", V1, "max 100000"),
        (Knob.QUOTA, "max 100000", V1, "max 100000"),
        (Knob.IDLE, "1", V1, "1"),
    ],
)
def test_values_are_clamped_to_the_limits(knob: Knob, requested: str, limits: KnobLimits, expected: str) -> None:
    assert clamp_value(knob, requested, limits) == expected


def test_cpus_outside_the_parent_are_refused_and_not_replaced() -> None:
    with pytest.raises(ValueError, match=r"none of the CPUs 6-7 .* 0-3"):
        clamp_value(Knob.CPUSET, "6-7", V1)


@pytest.mark.parametrize(
    ("requested", "own", "expected"),
    [
        ("max 100000", "50000 100000", "50000 100000"),
        ("80000 100000", "50000 100000", "50000 100000"),
        ("40000 100000", "50000 100000", "40000 100000"),
        ("80000 100000", "10000 50000", "10000 50000"),
        ("max 100000", "max 100000", "max 100000"),
    ],
)
def test_the_owner_s_quota_is_never_exceeded(requested: str, own: str, expected: str) -> None:
    limits = KnobLimits(allowed=None, cpu_count=4, empty_inherits_parent=False, own_quota=own)
    assert clamp_value(Knob.QUOTA, requested, limits) == expected
