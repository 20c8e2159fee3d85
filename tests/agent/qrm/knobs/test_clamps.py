"""Clamps of knob values to the limits of the machine and of the owner."""

from __future__ import annotations

import pytest

from agent.qrm.knobs.knob_files import KnobLimits, clamp_value
from agent.qrm.knobs.notation import format_io, parse_io
from api.knobs import Knob

V1 = KnobLimits(allowed=(0, 1, 2, 3), cpu_count=4, empty_inherits_parent=False)
V2 = KnobLimits(allowed=(0, 1, 2, 3), cpu_count=4, empty_inherits_parent=True)
UNKNOWN = KnobLimits(allowed=None, cpu_count=4)
HALF_CPU = KnobLimits(cpu_count=4, own_quota="50000 100000")


@pytest.mark.parametrize(
    ("knob", "requested", "limits", "expected"),
    [
        (Knob.CPUSET, "2-5", V1, "2-3"),
        (Knob.CPUSET, "1", V1, "1"),
        (Knob.CPUSET, "", V1, "0-3"),
        (Knob.CPUSET, "", V2, ""),
        (Knob.CPUSET, "7", UNKNOWN, "7"),
        (Knob.MEMS, "1-3", KnobLimits(allowed=(0, 1)), "1"),
        (Knob.MEMS, "", KnobLimits(allowed=(0, 1), empty_inherits_parent=False), "0-1"),
        (Knob.WEIGHT, "0", V1, "1"),
        (Knob.WEIGHT, "10001", V1, "10000"),
        (Knob.WEIGHT, "77", V1, "77"),
        (Knob.IO_WEIGHT, "5000", KnobLimits(weights=(1, 1000)), "1000"),
        (Knob.QUOTA, "399999 100000", V1, "399999 100000"),
        (Knob.QUOTA, "400000 100000", V1, "max 100000"),
        (Knob.QUOTA, "10 100000", V1, "1000 100000"),
        (Knob.QUOTA, "1000000 2000000", V1, "500000 1000000"),
        (Knob.QUOTA, "250 500", V1, "1000 1000"),
        (Knob.QUOTA, "1500 500", V1, "3000 1000"),
        (Knob.QUOTA, "5 0", V1, "max 100000"),
        (Knob.QUOTA, "max 100000", V1, "max 100000"),
        # The owner's quota is never exceeded.
        (Knob.QUOTA, "max 100000", HALF_CPU, "50000 100000"),
        (Knob.QUOTA, "80000 100000", HALF_CPU, "50000 100000"),
        (Knob.QUOTA, "40000 100000", HALF_CPU, "40000 100000"),
        (Knob.QUOTA, "80000 100000", KnobLimits(cpu_count=4, own_quota="10000 50000"), "10000 50000"),
        (Knob.BURST, "90000", KnobLimits(quota="50000 100000"), "50000"),
        (Knob.BURST, "90000", KnobLimits(), "90000"),
        (Knob.IDLE, "1", V1, "1"),
        # Limits are at most the owner's, and at least what the kernel can reclaim at once.
        (Knob.MEMORY_MAX, "4096", KnobLimits(own="max", floor_bytes=8192), "8192"),
        (Knob.MEMORY_MAX, "4096", KnobLimits(own="6000", floor_bytes=8192), "6000"),
        (Knob.MEMORY_MAX, "max", KnobLimits(own="8192"), "8192"),
        (Knob.MEMORY_HIGH, "16384", KnobLimits(own="8192"), "8192"),
        (Knob.SWAP_MAX, "0", KnobLimits(own="max"), "0"),
        # Protections are at least the owner's.
        (Knob.MEMORY_LOW, "0", KnobLimits(own="8192"), "8192"),
        (Knob.MEMORY_MIN, "max", KnobLimits(own="8192"), "max"),
        (Knob.NET_CLASS, "7", KnobLimits(), "7"),
    ],
)
def test_values_are_clamped_to_the_limits(knob: Knob, requested: str, limits: KnobLimits, expected: str) -> None:
    assert clamp_value(knob, requested, limits) == expected


def test_cpus_outside_the_parent_are_refused_and_not_replaced() -> None:
    with pytest.raises(ValueError, match=r"none of the CPUs 6-7 .* 0-3"):
        clamp_value(Knob.CPUSET, "6-7", V1)


def test_disk_limits_have_a_minimum_and_never_exceed_the_owner_s() -> None:
    limits = KnobLimits(own="8:0 rbps=max wiops=100\n8:16 wbps=70000")
    clamped = clamp_value(Knob.IO_MAX, "8:0 rbps=1 wiops=5000", limits)
    assert parse_io(clamped) == {"8:0": {"rbps": 65_536, "wiops": 100}, "8:16": {"wbps": 70_000}}
    assert clamped == format_io(parse_io(clamped))
