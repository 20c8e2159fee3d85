"""Decisions as OCI resources: at most the request, nothing outside the parent cgroup."""

from __future__ import annotations

from typing import Any

import pytest

from agent.nri.oci_resources import (
    ContainerBounds,
    clamp_values,
    knobs_in_resources,
    original_values,
    requested_values,
    to_oci_resources,
)
from api.knobs import Knob
from api.proto import nri_pb2 as wire

V1 = ContainerBounds(cpus=frozenset(range(4)), mems=frozenset({0, 1}))
V2 = ContainerBounds(cpus=frozenset(range(4)), mems=frozenset({0, 1}), unified=True)


def resources(
    *, shares: int = 0, quota: int = 0, period: int = 0, cpus: str = "", mems: str = "", memory: int = 0, **unified: str
) -> Any:
    message = wire.LinuxResources(unified={key.replace("_", "."): value for key, value in unified.items()})
    message.cpu.shares.value, message.cpu.quota.value, message.cpu.period.value = shares, quota, period
    message.cpu.cpus, message.cpu.mems, message.memory.limit.value = cpus, mems, memory
    return message


OWN = resources(shares=204, quota=50_000, period=100_000, memory=1 << 30)


def test_requested_values() -> None:
    assert requested_values(OWN, V1) == {
        Knob.QUOTA: "50000 100000",
        Knob.CPUSET: "0-3",
        Knob.MEMS: "0-1",
        Knob.MEMORY_MAX: "1073741824",
        Knob.WEIGHT: "20",
    }
    assert requested_values(resources(memory_low="4096"), V2) == {
        Knob.QUOTA: "max 100000",
        Knob.CPUSET: "",
        Knob.MEMS: "",
        Knob.MEMORY_MAX: "max",
        Knob.MEMORY_HIGH: "max",
        Knob.MEMORY_LOW: "4096",
        Knob.MEMORY_MIN: "0",
    }


@pytest.mark.parametrize(
    ("desired", "own", "bounds", "expected"),
    [
        ({Knob.CPUSET: "3"}, OWN, V1, {Knob.CPUSET: "3"}),
        ({Knob.CPUSET: "3,7"}, OWN, V1, {Knob.CPUSET: "3"}),
        ({Knob.CPUSET: "7"}, OWN, V1, {}),
        ({Knob.CPUSET: "0-3"}, OWN, V1, {}),
        ({Knob.CPUSET: "3"}, OWN, ContainerBounds(), {}),
        # The kubelet's CPU manager has chosen.
        ({Knob.CPUSET: "3", Knob.MEMS: "1"}, resources(cpus="1-2"), V1, {Knob.MEMS: "1"}),
        ({Knob.MEMS: "1"}, resources(mems="0"), V1, {}),
        ({Knob.IDLE: "1"}, OWN, V1, {Knob.WEIGHT: "1"}),
        ({Knob.IDLE: "0", Knob.WEIGHT: "300"}, OWN, V1, {Knob.WEIGHT: "300"}),
        ({Knob.IDLE: "1"}, OWN, V2, {}),
        ({Knob.QUOTA: "20000 100000"}, OWN, V1, {Knob.QUOTA: "20000 100000"}),
        ({Knob.QUOTA: "max 100000"}, OWN, V1, {}),
        ({Knob.QUOTA: "80000 100000"}, OWN, V1, {}),
        ({Knob.QUOTA: "150000 100000"}, resources(), ContainerBounds(cores=1.0), {Knob.QUOTA: "100000 100000"}),
        ({Knob.QUOTA: "max 100000"}, resources(), V1, {}),
        ({Knob.MEMORY_MAX: "1000"}, OWN, V1, {Knob.MEMORY_MAX: "1000"}),
        ({Knob.MEMORY_MAX: "9999999999"}, OWN, V1, {}),
        ({Knob.MEMORY_MAX: "max"}, OWN, V1, {}),
        ({Knob.MEMORY_HIGH: "5000"}, OWN, V1, {}),
        ({Knob.MEMORY_HIGH: "5000"}, OWN, V2, {Knob.MEMORY_HIGH: "5000"}),
        # The kubelet (MemoryQoS) protects or limits the container more.
        ({Knob.MEMORY_HIGH: "5000"}, resources(memory_high="4096"), V2, {}),
        ({Knob.MEMORY_HIGH: "max"}, resources(memory_high="4096"), V2, {}),
        (
            {Knob.MEMORY_LOW: "0", Knob.MEMORY_MIN: "8192"},
            resources(memory_low="1", memory_min="2"),
            V2,
            {Knob.MEMORY_MIN: "8192"},
        ),
    ],
)
def test_values_are_clamped_to_the_request_and_the_parent(
    desired: dict[Knob, str], own: Any, bounds: ContainerBounds, expected: dict[Knob, str]
) -> None:
    assert clamp_values(desired, requested_values(own, bounds), own, bounds) == expected


def test_values_as_oci_resources() -> None:
    message = to_oci_resources({Knob.CPUSET: "2-3", Knob.MEMS: "1", Knob.WEIGHT: "1", Knob.QUOTA: "20000 100000"})
    assert (message.cpu.cpus, message.cpu.mems, message.cpu.shares.value) == ("2-3", "1", 10)
    assert (message.cpu.quota.value, message.cpu.period.value, message.HasField("memory")) == (20_000, 100_000, False)
    message = to_oci_resources({Knob.QUOTA: "max 100000", Knob.MEMORY_MAX: "4096", Knob.MEMORY_LOW: "1"})
    assert (message.cpu.quota.value, message.memory.limit.value, dict(message.unified)) == (
        -1,
        4096,
        {"memory.low": "1"},
    )
    assert not message.cpu.HasField("shares")


def test_the_original_weight_is_restored_as_shares() -> None:
    requested = requested_values(OWN, V1)
    assert original_values((Knob.WEIGHT, Knob.CPUSET), requested, OWN) == {Knob.WEIGHT: "204", Knob.CPUSET: "0-3"}
    assert original_values((Knob.WEIGHT,), requested, resources()) == {Knob.WEIGHT: "1024"}


def test_an_update_contains_only_what_changes() -> None:
    assert knobs_in_resources(resources(cpus="0")) == {Knob.CPUSET}
    assert knobs_in_resources(OWN) == {Knob.WEIGHT, Knob.QUOTA, Knob.MEMORY_MAX}
    assert knobs_in_resources(resources(memory_high="max")) == {Knob.MEMORY_HIGH}
