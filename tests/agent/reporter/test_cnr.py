"""A round as a CustomNodeResource, whole in a golden file, and its parts by number."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.reporter.cnr import CnrReport, build_cnr_report, condition_taints, merge_cnr_taints
from agent.reporter.cnr_inputs import cores_quantity, reclaimed_allocatable
from agent.reporter.topology_zones import pod_requests
from api.advice import CpuAdvice, Headroom, Region, RegionAdvice, RegionKind
from api.cpu import Cpu, Topology
from api.decision import ActMode, Advice, Cycle, Pool
from api.eviction import ActiveCondition, EvictionCondition, EvictionResult
from api.katalyst.cnr import CustomNodeResource, CustomNodeResourceStatus, QosTaint
from api.knobs import Reason
from api.measurements import Interface, Machine, NumaNode
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY, Container, Pod
from api.qos import QoSLevel
from api.snapshot import CgroupSample, NodeSample, Snapshot

GIB = 1 << 30
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
    one = Cycle(
        snapshot=snapshot(2),
        previous=snapshot(1),
        act=ActMode.ON,
        trigger="tick",
        advice=advice(reported_headroom),
        evictions=EvictionResult(conditions=(shown("MemoryPressure", "reclaimed_cores/NoSchedule"),)),
    )
    return msgspec.structs.replace(one, **changes)


def whole(one: CnrReport) -> dict[str, Any]:
    return {
        "apiVersion": "node.katalyst.kubewharf.io/v1alpha1",
        "kind": "CustomNodeResource",
        "metadata": {"name": "n1"},
        "spec": {**one.spec_body()["spec"], "taints": merge_cnr_taints((), one.taints)},
        **one.status_body(),
    }


def test_the_whole_object(golden: Callable[[str, str], None]) -> None:
    made = whole(build_cnr_report(finished(), metrics=True))
    golden("cnr.json", json.dumps(made, indent=1) + "\n")
    # It fits its own type, and nothing of it is lost on the way.
    typed = msgspec.convert(made, CustomNodeResource)
    assert json.loads(msgspec.json.encode(typed)) == json.loads(json.dumps(made))


def status(one: Cycle, *, metrics: bool = False) -> CustomNodeResourceStatus:
    found = build_cnr_report(one, metrics=metrics).status
    assert found is not None
    return found


def test_a_promise_is_rounded_down_in_whole_and_in_parts() -> None:
    found = status(finished())
    assert found.resources is not None
    assert found.resources.allocatable == {RECLAIMED_CPU: "5123", RECLAIMED_MEMORY: str(10 * GIB)}
    zones = found.topology_zone or ()
    parts = [(zone.children or ())[0].resources for zone in zones]
    assert [part.allocatable[RECLAIMED_CPU] for part in parts if part and part.allocatable] == ["2000", "3123"]


def test_cpus_that_no_pod_is_given_are_capacity_and_not_allocatable() -> None:
    first = ((status(finished()).topology_zone or ())[0].children or ())[0]
    assert first.resources is not None
    assert (first.resources.capacity or {})["cpu"] == "4"
    assert (first.resources.allocatable or {})["cpu"] == "3"
    assert [(one.name, one.value) for one in first.attributes or ()] == [("reserved_cpu_list", "0")]


def test_a_pod_on_several_nodes_counts_in_part_on_each_and_one_that_is_bound_to_none_on_none() -> None:
    by_zone = {
        numa.name: {one.consumer: one.requests for one in numa.allocations or ()}
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


def test_while_it_is_not_known_what_can_be_lent_what_was_said_before_stands() -> None:
    filling = Headroom(reason=VERDICT)
    assert build_cnr_report(finished(filling), metrics=True).status is None
    assert build_cnr_report(finished(filling), metrics=True).status_body() == {}


def test_an_agent_that_decides_nothing_lends_nothing() -> None:
    found = status(msgspec.structs.replace(finished(advice=None), act=ActMode.OFF))
    assert found.resources is None
    assert len(found.topology_zone or ()) == 2


def test_a_dry_run_shows_the_node_and_lends_nothing_of_it() -> None:
    dry = msgspec.structs.replace(finished(), act=ActMode.DRY_RUN)
    lent, shown = build_cnr_report(dry, metrics=False).status, build_cnr_report(dry, metrics=False, lends=False).status
    assert lent is not None
    assert shown is not None
    assert (lent.resources is None, shown.resources) == (False, None)
    text = msgspec.json.encode(shown.topology_zone).decode()
    assert '"memory"' in text
    assert '"allocatable":{"resource.katalyst' not in text
    filling = Headroom(reason=VERDICT)
    assert build_cnr_report(finished(filling), metrics=False, lends=False).status is not None, (
        "what was lent before is taken back"
    )


def test_a_round_that_failed_leaves_what_was_said() -> None:
    assert build_cnr_report(msgspec.structs.replace(finished(advice=None), act=ActMode.ON), metrics=True).status is None


def test_what_is_used() -> None:
    used = status(finished(), metrics=True).node_metric_status
    assert used is not None
    assert used.update_time == "2026-01-01T00:00:02Z"
    assert used.node_metric is not None
    assert used.node_metric.generic_usage == {"memory": str(12 * GIB)}
    groups = {group.qos_level: (group.generic_usage, group.pod_list) for group in used.group_metric or ()}
    assert groups[QoSLevel.RECLAIMED] == ({"cpu": "1500m", "memory": str(3 * GIB)}, ("shop/batch",))
    assert groups[QoSLevel.SHARED] == ({"cpu": "2500m", "memory": str(5 * GIB)}, ("shop/free", "shop/web"))


@pytest.mark.parametrize(
    ("conditions", "found"),
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
def test_conditions_become_taints_of_reclaimed_pods_alone(conditions: Any, found: list[str]) -> None:
    made = condition_taints(EvictionResult(conditions=conditions))
    assert [f"{one.key.removeprefix('node.katalyst.kubewharf.io/')}/{one.effect}" for one in made] == found
    assert all(one.qos_level is QoSLevel.RECLAIMED for one in made)


OURS = {"key": "node.katalyst.kubewharf.io/A", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}
LIFECYCLE = {
    "key": "node.kubernetes.io/unschedulable",
    "effect": "NoSchedule",
    "qosLevel": "reclaimed_cores",
    "timeAdded": "t",
    "odd": 1,
}
WANTED = QosTaint(key="node.katalyst.kubewharf.io/A", effect="NoSchedule", qos_level=QoSLevel.RECLAIMED)


@pytest.mark.parametrize(
    ("there", "wanted", "after"),
    [
        ([], (), None),
        ([LIFECYCLE], (), None),
        ([LIFECYCLE, OURS], (WANTED,), None),
        ([LIFECYCLE], (WANTED,), [LIFECYCLE, OURS]),
        ([OURS, LIFECYCLE], (), [LIFECYCLE]),
        ([{**OURS, "effect": "NoExecute"}, LIFECYCLE], (WANTED,), [LIFECYCLE, OURS]),
        ([{}], (WANTED,), [{}, OURS]),
    ],
)
def test_taints_of_others_stay_as_they_came(there: list[Any], wanted: Any, after: list[Any] | None) -> None:
    assert merge_cnr_taints(there, wanted) == after


@pytest.mark.parametrize(
    ("cores", "text"), [(0, "0"), (4, "4"), (0.5, "500m"), (1.0009, "1"), (2.9999999999, "3"), (12.25, "12250m")]
)
def test_one_spelling_of_an_amount(cores: float, text: str) -> None:
    assert cores_quantity(cores) == text


@given(st.floats(0, 8192), st.floats(0, 2**50))
def test_a_promise_is_never_more_than_was_found(cores: float, memory: float) -> None:
    found = reclaimed_allocatable(cores, memory)
    assert cores * 1000 - 1 <= int(found[RECLAIMED_CPU]) <= cores * 1000 + 1e-5
    assert memory - 1 < int(found[RECLAIMED_MEMORY]) <= memory


def test_a_pod_that_asked_for_nothing_has_no_requests() -> None:
    assert pod_requests(pod("x", QoSLevel.SHARED)) == {}
