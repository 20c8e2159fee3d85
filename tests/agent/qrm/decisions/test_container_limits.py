"""Limits of reclaimed containers: quota and memory limit, combined with every policy and loosened by none."""

from __future__ import annotations

import msgspec
import pytest

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.qrm.decisions.container_limits import enforce_container_limits
from agent.qrm.decisions.cpu import compose_decisions
from api.advice import KnobRequest
from api.decision import Decision
from api.knobs import Knob, Reason
from api.snapshot import Snapshot
from api.units import MIB
from tests.builders.pods import reclaimed, shared
from tests.builders.settings import parse_config
from tests.builders.snapshots import snapshot

BATCH = reclaimed("batch", cpu_request=0.5, cpu_limit=0.5, memory_limit=128 * MIB)
WEB = shared("web", cpu_request=2, cpu_limit=4, memory_limit=64 * MIB)
REASON = Reason(rule="r", text="The policy says so.", inputs={"lent_cores": 2})
KNOBS = frozenset({Knob.CPUSET, Knob.MEMS, Knob.IDLE, Knob.QUOTA, Knob.MEMORY_MAX})


def observe() -> Snapshot:
    return snapshot(10, (BATCH, WEB), machine=8, usage_s={"web": 10, "batch": 1})


def decide(settings: str) -> dict[Knob, Decision]:
    observed = observe()
    config = parse_config(settings.encode(), "test")
    result, _ = evaluate_policy(observed, config, PolicyState(), observed.taken_at_ns)
    decisions = compose_decisions(result, observed, dict.fromkeys(observed.cgroups, KNOBS))
    assert not any(each.cgroup == "/web" and each.knob in (Knob.QUOTA, Knob.MEMORY_MAX) for each in decisions)
    return {each.knob: each for each in decisions if each.cgroup == "/batch"}


@pytest.mark.parametrize(
    "settings",
    ["advisor: {policy: latency}", "advisor: {policy: canonical}", "advisor: {policy: none}"],
)
def test_every_policy_enforces_half_a_core_and_128_mebibytes(settings: str) -> None:
    decided = decide(settings)
    assert decided[Knob.QUOTA].value == "50000 100000"
    assert decided[Knob.MEMORY_MAX].value == str(128 * MIB)
    assert "128.0 MiB" in decided[Knob.MEMORY_MAX].reason.text
    assert "0.5 cores" in decided[Knob.QUOTA].reason.text


def request(value: str, knob: Knob = Knob.QUOTA, cgroup: str = "/batch") -> KnobRequest:
    return KnobRequest(cgroup=cgroup, knob=knob, value=value, reason=REASON)


@pytest.mark.parametrize(
    ("knob", "value", "result"),
    [
        (Knob.QUOTA, "max 100000", "50000 100000"),
        (Knob.QUOTA, "50001 100000", "50000 100000"),
        (Knob.QUOTA, "50000 100000", "50000 100000"),
        (Knob.QUOTA, "20000 100000", "20000 100000"),
        (Knob.QUOTA, "200000 1000000", "200000 1000000"),
        (Knob.MEMORY_MAX, "max", str(128 * MIB)),
        (Knob.MEMORY_MAX, str(64 * MIB), str(64 * MIB)),
    ],
)
def test_the_stricter_limit_counts(knob: Knob, value: str, result: str) -> None:
    first, *own = enforce_container_limits([request(value, knob)], observe())
    assert first.value == result
    assert first.reason.text.startswith("The policy says so.")
    assert first.reason.inputs["lent_cores"] == 2
    assert [each.cgroup for each in own] == ["/batch", "/batch"]


def test_other_containers_are_left_alone() -> None:
    given = [request("max 100000", cgroup="/web"), request("max 100000", cgroup="/kubepods/besteffort")]
    assert list(enforce_container_limits(given, observe()))[:2] == given


def own_limits(cores: float | None, size: int | None, machine: int = 2) -> list[tuple[Knob, str]]:
    container = msgspec.structs.replace(BATCH.containers[0], memory_limit_bytes=size, cpu_limit_cores=cores)
    observed = snapshot(10, (msgspec.structs.replace(BATCH, containers=(container,)),), machine=machine)
    return [(each.knob, each.value) for each in enforce_container_limits((), observed)]


def test_limits_are_whole_pages() -> None:
    assert own_limits(None, 5 * MIB + 10_000) == [(Knob.MEMORY_MAX, str(5 * MIB + 8192))]


@pytest.mark.parametrize(("cores", "quotas"), [(1.99, ["199000 100000"]), (2.0, []), (2.01, []), (64.0, []), (1e9, [])])
def test_a_cpu_limit_of_all_cpus_of_the_node_needs_no_quota(cores: float, quotas: list[str]) -> None:
    assert own_limits(cores, None) == [(Knob.QUOTA, value) for value in quotas]


@pytest.mark.parametrize(("size", "limits"), [(1, []), (4 * MIB - 1, []), (4 * MIB, [str(4 * MIB)])])
def test_a_memory_limit_below_4_mib_is_ignored(size: int, limits: list[str]) -> None:
    assert own_limits(None, size) == [(Knob.MEMORY_MAX, value) for value in limits]
