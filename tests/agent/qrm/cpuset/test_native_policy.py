"""The kubelet's static policy: containers with exclusive CPUs, the selected CPUs, and the shared rest."""

from __future__ import annotations

import msgspec
import pytest

from agent.config.qrm import CpuPlacementConfig, NativeConfig
from agent.qrm.cpuset.state import CpusetState
from api.pod import Container, Pod
from tests.agent.qrm.cpuset.builders import cpus, dedicated, machine, pod, pools, run

NODE = machine(2, 1, 1, 4, 2)
"""0-3,8-11 and 4-7,12-15; CPU n and n + 8 are one core."""


def guaranteed(name: str, cores: float) -> Pod:
    return pod(name, cores=cores, cpu_limit=cores, memory_request=1 << 30, memory_limit=1 << 30)


def native(*, reserved: int = 0, **fields: object) -> CpuPlacementConfig:
    return CpuPlacementConfig(policy="native", reserved_cpus=reserved, native=NativeConfig(**fields))


def change(each: Pod, **fields: object) -> Pod:
    container = msgspec.structs.replace(each.containers[0], **fields)
    return msgspec.structs.replace(each, containers=(container,))


@pytest.mark.parametrize(
    ("each", "own"),
    [
        (guaranteed("a", 2.0), "0,8"),
        (guaranteed("a", 1.0), "0"),
        (guaranteed("a", 1.5), None),
        (guaranteed("a", 0.0), None),
        (change(guaranteed("a", 2.0), cpu_limit_cores=3.0), None),
        (change(guaranteed("a", 2.0), cpu_limit_cores=None), None),
        (change(guaranteed("a", 2.0), memory_limit_bytes=None), None),
        (change(guaranteed("a", 2.0), memory_request_bytes=1), None),
        (pod("a", cores=2.0), None),
    ],
)
def test_guaranteed_containers_with_whole_cpus_have_them_alone(each: Pod, own: str | None) -> None:
    placement, _ = run((), (each, pod("b")), NODE, config=native())
    assert cpus(placement)["/a"] == (own or "0-15")
    assert not own or not set(placement.cpus["/a"]) & set(placement.cpus["/b"])
    assert placement.reasons["/a"].rule == ("native_exclusive" if own else "native_shared")


def test_one_burstable_container_makes_the_pod_burstable() -> None:
    both = guaranteed("a", 2.0)
    both = msgspec.structs.replace(
        both, containers=(*both.containers, Container(name="d", cgroup="/d", cpu_request_cores=1.0))
    )
    placement, _ = run((), (both,), NODE, config=native())
    assert set(cpus(placement).values()) == {"0-15"}


@pytest.mark.parametrize(
    ("fields", "cores", "expected"),
    [
        ({}, 4.0, "0-1,8-9"),
        ({}, 10.0, "0-4,8-12"),
        ({"allocation": "distributed"}, 4.0, "0-1,8-9"),  # one node holds it
        ({"allocation": "distributed"}, 10.0, "0-2,4-6,8-9,12-13"),  # five of each: two cores and a half
        ({"allocation": "distributed", "full_physical_cores": True}, 12.0, "0-2,4-6,8-10,12-14"),
        ({"full_physical_cores": True}, 6.0, "0-2,8-10"),
    ],
)
def test_packed_distributed_and_whole_cores(fields: dict[str, object], cores: float, expected: str) -> None:
    placement, _ = run((), (guaranteed("a", cores),), NODE, config=native(**fields))
    assert cpus(placement)["/a"] == expected


@pytest.mark.parametrize(
    ("fields", "cores", "reason"),
    [
        (
            {"full_physical_cores": True},
            3.0,
            "requests 3 CPUs, which is no multiple of the 2 threads of a physical core",
        ),
        ({}, 17.0, "requests 17 exclusive CPUs, 16 are left"),
        ({"reserved": 4}, 13.0, "requests 13 exclusive CPUs, 12 are left"),
        ({"reserved": 1, "full_physical_cores": True}, 16.0, "requests 16 exclusive CPUs, 14 are left"),
    ],
)
def test_a_request_without_room_is_rejected_and_the_container_shares(
    fields: dict[str, object], cores: float, reason: str
) -> None:
    placement, _ = run((), (guaranteed("a", cores),), NODE, config=native(**fields))
    assert placement.rejected["default/a"].text == f"default/a: c {reason}."
    assert cpus(placement)["/a"] == "0-15"


def test_reserved_cpus_are_shared_and_never_exclusive() -> None:
    placement, _ = run((), (guaranteed("a", 12.0), pod("b")), NODE, config=native(reserved=4))
    assert pools(placement) == {"reserve": "0-1,4-5", "share": "0-1,4-5"}
    assert cpus(placement)["/b"] == "0-1,4-5"


def test_exclusive_cpus_are_retained_while_a_container_restarts() -> None:
    config = native()
    a, b = guaranteed("b", 2.0), guaranteed("a", 2.0)
    _, state = run((), (a,), NODE, config=config)
    placement, state = run((), (a, b), NODE, state, config)
    assert cpus(placement) == {"/b": "0,8", "/a": "1,9"}
    without, state = run((), (b, guaranteed("c", 2.0)), NODE, state, config, at_s=1.0)
    assert cpus(without) == {"/a": "1,9", "/c": "2,10"}
    later, _ = run((), (b, guaranteed("c", 2.0), guaranteed("d", 2.0)), NODE, state, config, at_s=400.0)
    assert cpus(later)["/d"] == "0,8"


def test_the_state_of_the_other_policy_is_not_used() -> None:
    _, state = run((), (dedicated("db", 8.0),), NODE)
    placement, after = run((), (guaranteed("a", 2.0),), NODE, state, native())
    assert cpus(placement)["/a"] == "0,8"
    assert after.policy_name == "native"
    placement, _ = run((), (guaranteed("a", 2.0),), NODE, after)
    assert pools(placement)["share"] == "0,8"
    assert isinstance(after, CpusetState)
