"""CPU advice becomes decisions on the right knobs of the right cgroups, and on no others."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from agent.qrm.cpuset.state import CpusetAllocation
from agent.qrm.decisions.cpu import cpu_requests, managed_cgroups
from agent.qrm.decisions.knob_requests import resolve_knob_requests
from agent.qrm.knobs.knob_files import KnobLimits, clamp_value
from api.advice import CpuAdvice, PoolSize, Region, RegionAdvice, RegionKind
from api.decision import Advice, Decision
from api.knobs import Knob, Reason
from api.pod import Pod
from api.snapshot import Snapshot
from tests.builders.nodes import topology
from tests.builders.pods import reclaimed, shared
from tests.builders.snapshots import snapshot

ALL = frozenset(Knob)
WEB = shared("web")
BATCH = reclaimed("batch")


def advice(reclaimable: float, *, idle: bool = True) -> Advice:
    return Advice(
        policy="p", requirement_cores=1.0, reclaimable_cores=reclaimable, idle=idle, action="hold",
        reason=Reason(rule="r", text="t"),
    )  # fmt: skip


def decide(
    given: Advice, observed: Snapshot, knobs: Mapping[str, frozenset[Knob]], placement: CpusetAllocation | None = None
) -> tuple[Decision, ...]:
    return resolve_knob_requests(cpu_requests(given, observed, knobs, placement), observed, knobs)


def values(
    given: Advice,
    pods: list[Pod],
    knobs: frozenset[Knob] = ALL,
    cpus: int = 2,
    cpus_by_cgroup: dict[str, tuple[int, ...]] | None = None,
) -> dict[tuple[str, str], str]:
    observed = snapshot(0, pods, machine=topology(cpus, numa=2 if cpus_by_cgroup and cpus >= 4 else 1))
    placement = None
    if cpus_by_cgroup is not None:
        numa = {cpu.id: cpu.numa for cpu in observed.topology.cpus}
        mems = {cgroup: tuple(sorted({numa[cpu] for cpu in its})) for cgroup, its in cpus_by_cgroup.items()}
        placement = CpusetAllocation(pools=(), cpus=cpus_by_cgroup, mems=mems, reasons={})
    decisions = decide(given, observed, dict.fromkeys(observed.cgroups, knobs), placement)
    return {(decision.cgroup, decision.knob.value): decision.value for decision in decisions}


def test_priority_leaves_online_cgroups_untouched() -> None:
    assert values(advice(2.0), [WEB, BATCH]) == {("/batch", "cpu.idle"): "1", ("/batch", "cpu.max"): "max 100000"}


def test_reclaimable_cpu_becomes_a_quota() -> None:
    assert values(advice(0.35), [BATCH])[("/batch", "cpu.max")] == "35000 100000"


def test_without_cpu_idle_the_lowest_weight_takes_its_place() -> None:
    assert values(advice(2.0), [BATCH], ALL - {Knob.IDLE}) == {
        ("/batch", "cpu.weight"): "1",
        ("/batch", "cpu.max"): "max 100000",
    }


def test_each_cgroup_gets_the_lowest_priority_that_the_kernel_offers() -> None:
    observed = snapshot(0, [BATCH, reclaimed("old"), reclaimed("bare")])
    given = decide(advice(2.0), observed, {"/batch": ALL, "/old": ALL - {Knob.IDLE}, "/bare": frozenset()})
    assert {(d.cgroup, d.knob.value, d.value) for d in given} == {
        ("/batch", "cpu.idle", "1"),
        ("/batch", "cpu.max", "max 100000"),
        ("/old", "cpu.weight", "1"),
        ("/old", "cpu.max", "max 100000"),
        # No knob can limit this cgroup: it gets decisions, so that the refusals report it.
        ("/bare", "cpu.weight", "1"),
        ("/bare", "cpu.max", "max 100000"),
    }


@pytest.mark.parametrize(
    ("reclaimable", "count", "quota"),
    [
        (0.1, 10, "1000 100000"),
        (0.1, 11, "1818 200000"),
        (0.1, 60, "1667 1000000"),
        (0.1, 100, "1000 1000000"),
        (0.6, 60, "1000 100000"),
    ],
)
def test_quotas_add_up_to_the_reclaimable_cpu(reclaimable: float, count: int, quota: str) -> None:
    pods = [reclaimed(f"b{number}") for number in range(count)]
    given = [value for (_, knob), value in values(advice(reclaimable), pods).items() if knob == "cpu.max"]
    assert given == [quota] * count
    limits = KnobLimits(allowed=None, cpu_count=2, empty_inherits_parent=True)
    written = [clamp_value(Knob.QUOTA, value, limits).split() for value in given]
    assert sum(int(us) / int(period) for us, period in written) == pytest.approx(reclaimable, rel=0.001)


@pytest.mark.parametrize(
    ("cpus_by_cgroup", "decided"),
    [
        ({"/web": (0, 1, 2, 3), "/batch": (0, 1, 2, 3)}, {}),
        ({"/web": (0, 2), "/batch": (1, 3)}, {("/web", "cpuset.cpus"): "0,2", ("/batch", "cpuset.cpus"): "1,3"}),
        ({"/web": (0, 1, 2, 3), "/batch": (3,)}, {("/batch", "cpuset.cpus"): "3", ("/batch", "cpuset.mems"): "1"}),
        ({"/web": (), "/batch": (2, 3)}, {("/batch", "cpuset.cpus"): "2-3", ("/batch", "cpuset.mems"): "1"}),
        ({"/batch": (0,)}, {("/batch", "cpuset.cpus"): "0", ("/batch", "cpuset.mems"): "0"}),
    ],
    ids=["the whole node", "apart", "one is confined", "an empty one is none", "one was not placed"],
)
def test_a_container_that_may_not_use_the_whole_node_gets_a_cpuset(
    cpus_by_cgroup: dict[str, tuple[int, ...]], decided: dict[tuple[str, str], str]
) -> None:
    assert values(advice(1.0, idle=False), [WEB, BATCH], cpus=4, cpus_by_cgroup=cpus_by_cgroup) == decided


def test_a_cpuset_is_explained_by_the_region_and_the_pool() -> None:
    """The reason of the whole node is not used."""
    region = Region(name="share", kind=RegionKind.SHARE, pool="share", numa_nodes=(0,), containers=("/web",))
    why = Reason(rule="provision_canonical", text="share: it gets 1.", inputs={"cpus": 1})
    region_advice = RegionAdvice(
        region=region, policy="canonical", controls={}, upper_cores=1, lower_cores=1, reason=why
    )
    given = msgspec.structs.replace(advice(1.0, idle=False), cpu=CpuAdvice(regions=(region_advice,)))
    pool_reason = Reason(rule="pool", text="The container runs on the CPUs of pool share: 0.", inputs={"pool": "share"})
    placement = CpusetAllocation(pools=(), cpus={"/web": (0,), "/batch": (1,)}, mems={}, reasons={"/web": pool_reason})
    web, batch = decide(given, snapshot(0, [WEB, BATCH]), dict.fromkeys(("/web", "/batch"), ALL), placement)
    assert (web.reason.rule, web.reason.text) == ("provision_canonical", f"{why.text} {pool_reason.text}")
    assert web.reason.inputs == {"cpus": 1, "pool": "share"}
    assert batch.reason.rule == "r"


def test_reclaimable_cpu_is_shared_by_request_up_to_each_limit() -> None:
    pods = [reclaimed("a", cpu_request=3), reclaimed("b", cpu_request=1), reclaimed("c", cpu_limit=0.1)]
    quotas = {cgroup: value for (cgroup, knob), value in values(advice(2.5), pods, cpus=4).items() if knob == "cpu.max"}
    assert quotas == {"/a": "150000 100000", "/b": "50000 100000", "/c": "10000 100000"}


@pytest.mark.parametrize(
    ("claims", "quota", "text"),
    [
        ({}, "225000 100000", "t This container has 3 of 4 of the reclaimed pods' weight: 2.25 cores."),
        (
            {"/a": 1 / 3},
            "150000 100000",
            (
                "t This container has 1 of 2 of the reclaimed pods' weight: 1.50 cores. It made online pods wait: its weight is"
                " 33% of its request."
            ),
        ),
    ],
)
def test_the_reason_of_a_quota_has_the_numbers_it_is_computed_from(
    claims: dict[str, float], quota: str, text: str
) -> None:
    observed = snapshot(0, [reclaimed("a", cpu_request=3), reclaimed("b", cpu_request=1)], machine=topology(4))
    given = msgspec.structs.replace(advice(3.0), claims=claims)
    decisions = decide(given, observed, dict.fromkeys(observed.cgroups, ALL))
    (batch,) = (each for each in decisions if (each.cgroup, each.knob) == ("/a", Knob.QUOTA))
    assert (batch.value, batch.reason.text) == (quota, text)
    weight, total = batch.reason.inputs["weight"], batch.reason.inputs["weight_total"]
    assert isinstance(weight, float)
    assert isinstance(total, float)
    assert given.reclaimable_cores * weight / total == pytest.approx(int(quota.split(maxsplit=1)[0]) / 100_000)


def test_the_reason_of_a_quota_says_that_its_own_limit_is_lower() -> None:
    pods = [reclaimed("a", cpu_request=3, cpu_limit=0.5), reclaimed("b", cpu_request=1)]
    observed = snapshot(0, pods, machine=topology(4))
    decisions = decide(advice(3.0), observed, dict.fromkeys(observed.cgroups, ALL))
    (batch,) = (each for each in decisions if (each.cgroup, each.knob) == ("/a", Knob.QUOTA))
    text = "t This container has 3 of 4 of the reclaimed pods' weight: 2.25 cores. Its own limit of 0.5 cores is lower."
    assert (batch.value, batch.reason.text) == ("50000 100000", text)


@pytest.mark.parametrize(
    ("reclaimed_cores", "request_cores", "quota"),
    [
        (3.0, 1.0, "150000 100000"),
        (None, 3.0, "150000 100000"),
        (1.0, 3.0, "100000 100000"),
        (0.0, None, "100000 100000"),
    ],
)
def test_the_weight_is_the_reclaimed_request_or_else_the_cpu_request(
    reclaimed_cores: float | None, request_cores: float | None, quota: str
) -> None:
    """Two CPUs are shared by this pod and one with the default weight of one core."""
    first = reclaimed("a")
    container = msgspec.structs.replace(
        first.containers[0], reclaimed_cpu_cores=reclaimed_cores, cpu_request_cores=request_cores
    )
    pods = [msgspec.structs.replace(first, containers=(container,)), reclaimed("b")]
    assert values(advice(2.0), pods, cpus=4)[("/a", "cpu.max")] == quota


@pytest.mark.parametrize(
    ("limits", "cpus_by_cgroup", "quotas"),
    [
        # two thirds and one third of what the node's quota allows
        ({1: 3.0}, {"/a": (2, 3), "/b": (2, 3)}, {"/a": "200000 100000", "/b": "100000 100000"}),
        # nothing of the other node, where CPUs alone limit
        ({1: 3.0}, {"/a": (2, 3), "/b": (0, 1)}, {"/a": "300000 100000"}),
        # on both: its part of this node's quota, and its CPUs of the other
        ({1: 0.5}, {"/a": (1, 2, 3), "/b": (2, 3)}, {"/a": "133333 100000", "/b": "16667 100000"}),
        # a weight of 2 is split over the nodes as 1 to 3: 1 x 0.5 / 1.5, and all of 3
        ({0: 1.0, 1: 3.0}, {"/a": (0, 1, 2, 3), "/b": (0,)}, {"/a": "333333 100000", "/b": "66667 100000"}),
        ({1: 0.0}, {"/a": (2, 3), "/b": (0, 1)}, {"/a": "0 1000000"}),
        ({}, {"/a": (2, 3), "/b": (0, 1)}, {}),
    ],
)
def test_a_numa_quota_is_split_by_weight(
    limits: dict[int, float], cpus_by_cgroup: dict[str, tuple[int, ...]], quotas: dict[str, str]
) -> None:
    sizes = tuple(PoolSize(pool="reclaim", numa=numa, cpus=0, quota_cores=cores) for numa, cores in limits.items())
    pods = [reclaimed("a", cpu_request=2), reclaimed("b", cpu_request=1), WEB]
    given = msgspec.structs.replace(advice(4.0, idle=False), cpu=CpuAdvice(sizes=sizes))
    decided_values = values(given, pods, cpus=4, cpus_by_cgroup=cpus_by_cgroup)
    assert {cgroup: value for (cgroup, knob), value in decided_values.items() if knob == "cpu.max"} == quotas
    assert not [knob for _, knob in decided_values if knob in ("cpu.idle", "cpu.weight")], (
        "CPUs are shared out, not priorities"
    )


def test_a_container_limit_holds_without_a_node_limit() -> None:
    assert values(advice(2.0), [reclaimed("c", cpu_limit=0.5)])[("/c", "cpu.max")] == "50000 100000"


def test_a_missing_cgroup_gets_no_decision() -> None:
    observed = snapshot(0, [WEB, BATCH])
    cgroups = {path: sample for path, sample in observed.cgroups.items() if path != "/batch"}
    without_batch = msgspec.structs.replace(observed, cgroups=cgroups)
    assert decide(advice(2.0), without_batch, {"/batch": ALL}) == ()


def test_decisions_carry_the_cgroup_id_of_the_snapshot() -> None:
    idle, quota = decide(advice(2.0), snapshot(0, [BATCH], ids={"batch": 4711}), {"/batch": ALL})
    assert (idle.cgroup_id, idle.pod, idle.reason.rule) == (4711, "default/batch", "yield_to_online")
    assert (quota.cgroup_id, quota.pod, quota.reason.rule) == (4711, "default/batch", "r")


def test_only_cgroups_of_listed_pods_are_managed() -> None:
    assert managed_cgroups((WEB, BATCH)) == {"/web", "/batch"}
