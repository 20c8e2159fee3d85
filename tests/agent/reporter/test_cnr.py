"""A cycle as a CustomNodeResource: complete in a golden file, and its parts by number."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.reporter.cnr import CnrReport, build_cnr_report, condition_taints, merge_taints
from agent.reporter.cnr_inputs import cores_quantity, reclaimed_allocatable
from agent.reporter.topology_zones import pod_requests
from api.advice import CpuAdvice, Headroom, Region, RegionAdvice, RegionKind
from api.cpu import Cpu, Topology
from api.decision import ActMode, Advice, Cycle, Pool
from api.eviction import ActiveCondition, EvictionCondition, EvictionResult
from api.katalyst.cnr import CustomNodeResource, CustomNodeResourceStatus, QosTaint
from api.knobs import Reason
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY, Container, Pod
from api.qos import QoSLevel
from api.snapshot import CgroupSample, Interface, Machine, NodeSample, NumaNode, Snapshot
from api.units import GIB
from tests.builders.interference_node import interference_cycles

S = 1_000_000_000
WALL_NS = 1_767_225_600 * S
"""2026-01-01T00:00:00Z."""
VERDICT = Reason(rule="r", text="t")


def pod(name: str, qos: QoSLevel, *, numa: tuple[int, ...] = (), **container: Any) -> Pod:
    parts = (Container(name="main", cgroup=f"/{name}", **container),)
    return Pod(uid=f"uid-{name}", namespace="shop", name=name, qos=qos, containers=parts, bound_numa=numa)


WEB = pod("web", QoSLevel.SHARED, numa=(0,), cpu_request_cores=1.5, memory_request_bytes=GIB)
DB = pod("db", QoSLevel.DEDICATED, cpu_request_cores=4.0, memory_request_bytes=8 * GIB)
BATCH = pod("batch", QoSLevel.RECLAIMED, numa=(1,), reclaimed_cpu_cores=2.5, reclaimed_memory_bytes=2 * GIB)
FREE = pod("free", QoSLevel.SHARED, cpu_request_cores=1.0)


def topology() -> Topology:
    """Two sockets with a NUMA node each, of four CPUs; the second has two caches."""
    return Topology(cpus=tuple(Cpu(id=i, core=i, socket=i // 4, numa=i // 4, l3=0 if i < 6 else 1) for i in range(8)))


def snapshot(seconds: int) -> Snapshot:
    numa = {
        n: NumaNode(
            cpus=tuple(range(4 * n, 4 * n + 4)),
            distances={n: 10, 1 - n: 21},
            meminfo={"MemTotal": 16 * GIB, "MemFree": (10 - n) * GIB},
        )
        for n in (0, 1)
    }
    return Snapshot(
        seq=seconds,
        taken_at_ns=seconds * S,
        wall_time_ns=WALL_NS + seconds * S,
        boot_id="b",
        topology=topology(),
        node=NodeSample(
            memory_total_bytes=32 * GIB,
            memory_available_bytes=20 * GIB,
            machine=Machine(codename="AMD_K19Zen4", is_vm=False),
            numa=numa,
            interfaces={
                "eth0": Interface(received={}, sent={}, speed_mbit=25_000),
                "lo": Interface(received={}, sent={}),
            },
        ),
        cgroups={
            f"/{name}": CgroupSample(path=f"/{name}", id=i, cpu_usage_ns=seconds * S * i // 2, memory_bytes=i * GIB)
            for i, name in enumerate(("web", "db", "batch", "free"), 1)
        },
        pods=(WEB, DB, BATCH, FREE),
    )


ADVERTISED = Headroom(
    cores=5.1239,
    cores_by_numa={0: 2.0, 1: 3.1239},
    memory_bytes=10 * GIB + 0.7,
    memory_by_numa={0: 4 * GIB, 1: 6 * GIB + 0.7},
    reason=VERDICT,
)
DEDICATED = Region(
    name="dedicated-shop/db",
    kind=RegionKind.DEDICATED,
    pool="dedicated",
    numa_nodes=(0, 1),
    bound=True,
    pods=("shop/db",),
)


def advice(reported_headroom: Headroom | None) -> Advice:
    region = RegionAdvice(
        region=DEDICATED, policy="canonical", controls={}, upper_cores=8, lower_cores=4, reason=VERDICT
    )
    return Advice(
        policy="canonical",
        cpu=CpuAdvice(regions=(region,)),
        pools=(Pool(name="reserve", cpus=(0,)), Pool(name="share", cpus=(1, 2, 3))),
        requirement_cores=4.0,
        reported_headroom=reported_headroom,
        reclaimable_cores=4.0,
        idle=True,
        action="hold",
        reason=VERDICT,
    )


def shown(name: str, *effects: str, kind: Any = "cnr") -> ActiveCondition:
    return ActiveCondition(
        condition=EvictionCondition(name=name, kind=kind, effects=effects), plugin="p", since_ns=0, last_met_ns=0
    )


def finished(reported_headroom: Headroom | None = ADVERTISED, **changes: Any) -> Cycle:
    item = Cycle(
        snapshot=snapshot(2),
        previous=snapshot(1),
        act=ActMode.ON,
        trigger="tick",
        advice=advice(reported_headroom),
        evictions=EvictionResult(conditions=(shown("MemoryPressure", "reclaimed_cores/NoSchedule"),)),
    )
    return msgspec.structs.replace(item, **changes)


def cnr_object(report: CnrReport) -> dict[str, Any]:
    return {
        "apiVersion": "node.katalyst.kubewharf.io/v1alpha1",
        "kind": "CustomNodeResource",
        "metadata": {"name": "n1"},
        "spec": {**report.spec_body()["spec"], "taints": [msgspec.to_builtins(taint) for taint in report.taints]},
        **report.status_body(),
    }


def test_the_whole_object(golden: Callable[[str, str], None]) -> None:
    document = cnr_object(build_cnr_report(finished(), metrics=True))
    golden("cnr.json", json.dumps(document, indent=1) + "\n")
    # The object decodes as CustomNodeResource without losing fields.
    typed = msgspec.convert(document, CustomNodeResource)
    assert json.loads(msgspec.json.encode(typed)) == json.loads(json.dumps(document))


def status(item: Cycle, *, metrics: bool = False) -> CustomNodeResourceStatus:
    result = build_cnr_report(item, metrics=metrics).status
    assert result is not None
    return result


def test_reported_amounts_are_rounded_down_for_node_and_numa_nodes() -> None:
    result = status(finished())
    assert result.resources is not None
    assert result.resources.allocatable == {RECLAIMED_CPU: "5123", RECLAIMED_MEMORY: str(10 * GIB)}
    zones = result.topology_zone or ()
    parts = [(zone.children or ())[0].resources for zone in zones]
    assert [part.allocatable[RECLAIMED_CPU] for part in parts if part and part.allocatable] == ["2000", "3123"]


def test_reserved_cpus_are_capacity_and_not_allocatable() -> None:
    first = ((status(finished()).topology_zone or ())[0].children or ())[0]
    assert first.resources is not None
    assert (first.resources.capacity or {})["cpu"] == "4"
    assert (first.resources.allocatable or {})["cpu"] == "3"
    assert [(item.name, item.value) for item in first.attributes or ()] == [("reserved_cpu_list", "0")]


def test_a_pod_on_several_numa_nodes_counts_in_part_on_each_and_unbound_pods_on_none() -> None:
    by_zone = {
        numa.name: {item.consumer: item.requests for item in numa.allocations or ()}
        for socket in status(finished()).topology_zone or ()
        for numa in socket.children or ()
    }
    half = {"cpu": "2", "memory": str(4 * GIB)}
    assert by_zone == {
        "0": {"shop/db/uid-db": half, "shop/web/uid-web": {"cpu": "1500m", "memory": str(GIB)}},
        "1": {
            "shop/batch/uid-batch": {RECLAIMED_CPU: "2500", RECLAIMED_MEMORY: str(2 * GIB)},
            "shop/db/uid-db": half,
        },
    }


def test_with_an_unknown_headroom_the_previous_status_stays() -> None:
    filling = Headroom(reason=VERDICT)
    assert build_cnr_report(finished(filling), metrics=True).status is None
    assert build_cnr_report(finished(filling), metrics=True).status_body() == {}


def test_an_agent_with_act_off_reports_nothing_as_reclaimable() -> None:
    result = status(msgspec.structs.replace(finished(advice=None), act=ActMode.OFF))
    assert result.resources is None
    assert len(result.topology_zone or ()) == 2


def test_a_dry_run_reports_the_node_and_nothing_as_reclaimable() -> None:
    dry = msgspec.structs.replace(finished(), act=ActMode.DRY_RUN)
    reclaimable, shown = (
        build_cnr_report(dry, metrics=False).status,
        build_cnr_report(dry, metrics=False, reports_reclaimable=False).status,
    )
    assert reclaimable is not None
    assert shown is not None
    assert (reclaimable.resources is None, shown.resources) == (False, None)
    text = msgspec.json.encode(shown.topology_zone).decode()
    assert '"memory"' in text
    assert '"allocatable":{"resource.katalyst' not in text
    filling = Headroom(reason=VERDICT)
    assert build_cnr_report(finished(filling), metrics=False, reports_reclaimable=False).status is not None, (
        "the previous amounts are removed"
    )


def test_a_failed_cycle_leaves_the_previous_status() -> None:
    assert build_cnr_report(msgspec.structs.replace(finished(advice=None), act=ActMode.ON), metrics=True).status is None


def test_usage_of_nodes_and_qos_levels() -> None:
    used = status(finished(), metrics=True).node_metric_status
    assert used is not None
    assert used.update_time == "2026-01-01T00:00:02Z"
    assert used.node_metric is not None
    assert used.node_metric.generic_usage == {"memory": str(12 * GIB)}
    groups = {group.qos_level: (group.generic_usage, group.pod_list) for group in used.group_metric or ()}
    assert groups[QoSLevel.RECLAIMED] == ({"cpu": "1500m", "memory": str(3 * GIB)}, ("shop/batch",))
    assert groups[QoSLevel.SHARED] == ({"cpu": "2500m", "memory": str(5 * GIB)}, ("shop/free", "shop/web"))


def test_usage_of_a_node_has_the_indicators_of_harm_that_are_measured() -> None:
    """All waits are of 2 ms, in the slot from 1024 to 2048 us: 99 % of the way is 2037 us."""
    cycles = interference_cycles(5)
    usage = [status(cycle, metrics=True).node_metric_status for cycle in (cycles[0], cycles[-1])]
    first, latest = (each.node_metric.generic_usage or {} for each in usage if each is not None and each.node_metric)
    harm = {"dioptase.io/cpu_pressure": "300m", "dioptase.io/memory_pressure": "120m"}
    assert {name: value for name, value in first.items() if "/" in name} == harm
    assert {name: value for name, value in latest.items() if "/" in name} == {
        **harm, "dioptase.io/runq_latency_p99": "2037u", "dioptase.io/reclaimed_interference": "240m",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("conditions", "result"),
    [
        ((), []),
        ((shown("A", "reclaimed_cores/NoSchedule", "reclaimed_cores/NoExecute"),), ["A/NoExecute", "A/NoSchedule"]),
        ((shown("A", "shared_cores/NoSchedule"),), []),
        ((shown("A", "NoSchedule"),), []),
        ((shown("A", "reclaimed_cores/Sometimes"),), []),
        ((shown("A", "reclaimed_cores/NoSchedule", kind="node"),), []),
        (
            (shown("B", "reclaimed_cores/NoSchedule"), shown("A", "reclaimed_cores/NoSchedule")),
            ["A/NoSchedule", "B/NoSchedule"],
        ),
    ],
)
def test_conditions_become_taints_of_reclaimed_pods_alone(conditions: Any, result: list[str]) -> None:
    document = condition_taints(EvictionResult(conditions=conditions))
    assert [f"{item.key.removeprefix('node.katalyst.kubewharf.io/')}/{item.effect}" for item in document] == result
    assert all(item.qos_level is QoSLevel.RECLAIMED for item in document)


OWN_TAINT = {"key": "node.katalyst.kubewharf.io/A", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}
LIFECYCLE = {
    "key": "node.kubernetes.io/unschedulable",
    "effect": "NoSchedule",
    "qosLevel": "reclaimed_cores",
    "timeAdded": "t",
    "odd": 1,
}
DESIRED_TAINT = QosTaint(key="node.katalyst.kubewharf.io/A", effect="NoSchedule", qos_level=QoSLevel.RECLAIMED)


@pytest.mark.parametrize(
    ("current", "desired", "after"),
    [
        ([], (), None),
        ([LIFECYCLE], (), None),
        ([LIFECYCLE, OWN_TAINT], (DESIRED_TAINT,), None),
        ([LIFECYCLE], (DESIRED_TAINT,), [LIFECYCLE, OWN_TAINT]),
        ([OWN_TAINT, LIFECYCLE], (), [LIFECYCLE]),
        ([{**OWN_TAINT, "effect": "NoExecute"}, LIFECYCLE], (DESIRED_TAINT,), [LIFECYCLE, OWN_TAINT]),
        ([{}], (DESIRED_TAINT,), [{}, OWN_TAINT]),
        # A value or time set by another client stays.
        ([{**OWN_TAINT, "value": "x"}], (DESIRED_TAINT,), None),
    ],
)
def test_taints_of_other_owners_stay_unchanged(current: list[Any], desired: Any, after: list[Any] | None) -> None:
    assert merge_taints(current, map(msgspec.to_builtins, desired)) == after


@pytest.mark.parametrize(
    ("cores", "text"), [(0, "0"), (4, "4"), (0.5, "500m"), (1.0009, "1"), (2.9999999999, "3"), (12.25, "12250m")]
)
def test_an_amount_has_one_spelling(cores: float, text: str) -> None:
    assert cores_quantity(cores) == text


@given(st.floats(0, 8192), st.floats(0, 2**50))
def test_reported_amounts_never_exceed_the_headroom(cores: float, memory: float) -> None:
    result = reclaimed_allocatable(cores, memory)
    assert cores * 1000 - 1 <= int(result[RECLAIMED_CPU]) <= cores * 1000 + 1e-5
    assert memory - 1 < int(result[RECLAIMED_MEMORY]) <= memory


def test_a_pod_without_requests_has_none_in_its_allocation() -> None:
    assert pod_requests(pod("x", QoSLevel.SHARED)) == {}
