"""OpenTelemetry's own names carry the right numbers, and are those of its package of conventions."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import opentelemetry.semconv
import pytest

from agent.sensors.node.node_network import TCP_STATES
from api.cpu import Topology
from api.snapshot import CgroupSample, NodeSample, Snapshot
from api.units import MIB
from exporters.otel.conventions import (
    MAX_START_TIMES,
    CgroupStartTimes,
    OtelInstrument,
    container_instruments,
    node_instruments,
    shared_resource_attributes,
)
from exporters.prometheus.families import MAX_CGROUPS_WITH_SERIES
from tests.builders.four_cpu_node import bare_cycle
from tests.builders.full_node import full_cycle

PACKAGE = Path(opentelemetry.semconv.__path__[0]) / "_incubating"


def instruments(snapshot: Snapshot, most: int) -> list[OtelInstrument]:
    """Those of the node, and those of all containers together."""
    merged = {instrument.name: instrument for instrument in node_instruments(snapshot)}
    for _, of_container in container_instruments(snapshot, most):
        for instrument in of_container:
            before = merged.get(instrument.name)
            points = (*(before.points if before else ()), *instrument.points)
            merged[instrument.name] = instrument._replace(points=points)
    return list(merged.values())


def shown(seq: int = 2) -> dict[str, OtelInstrument]:
    return {
        instrument.name: instrument for instrument in instruments(full_cycle(seq).snapshot, MAX_CGROUPS_WITH_SERIES)
    }


def value(name: str, **attributes: str | int) -> float:
    """The one point that has these attributes, their dots written as underscores twice."""
    expected = {key.replace("__", "."): given for key, given in attributes.items()}
    (actual,) = [number for own, number in shown()[name].points if expected.items() <= own.items()]
    return actual


def documented() -> dict[str, tuple[str, str]]:
    """Instrument and unit of every metric that is not deprecated, from the docstrings of the conventions' package."""
    existing = {}
    for stem in ("system", "container", "k8s"):
        tree = ast.parse((PACKAGE / "metrics" / f"{stem}_metrics.py").read_text())
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                text = str(after.value.value)
                lines = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
                if "Deprecated" not in text:
                    existing[ast.literal_eval(node.value)] = (lines["Instrument"], lines["Unit"])
    return existing


def test_names_kinds_and_units_are_those_of_the_conventions() -> None:
    existing = documented()
    assert len(existing) > 40
    kinds = {"counter": "counter", "updown": "updowncounter", "gauge": "gauge"}
    for instrument in shown().values():
        assert existing[instrument.name] == (kinds[instrument.kind], instrument.unit), instrument.name


def test_attributes_are_those_of_the_conventions() -> None:
    existing = {
        str(ast.literal_eval(node.value))
        for stem in ("system", "cpu", "disk", "network", "container", "k8s")
        for node in ast.parse((PACKAGE / "attributes" / f"{stem}_attributes.py").read_text()).body
        if isinstance(node, ast.AnnAssign)
    }
    used = {key for instrument in shown().values() for attributes, _ in instrument.points for key in attributes}
    assert used - existing == set()
    assert "cpu.mode" in used


def enumerated() -> dict[str, set[str]]:
    """The values of every attribute that the conventions list values of: `A_B_C`, and its class `ABCValues`."""
    existing = {}
    for stem in ("system", "cpu", "disk", "network"):
        body = ast.parse((PACKAGE / "attributes" / f"{stem}_attributes.py").read_text()).body
        lists = {
            node.name.removesuffix("Values").lower(): {
                str(ast.literal_eval(value.value)) for value in node.body if isinstance(value, ast.Assign)
            }
            for node in body
            if isinstance(node, ast.ClassDef)
        }
        for node in body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                values = lists.get(node.target.id.replace("_", "").lower())
                if values is not None:
                    existing[str(ast.literal_eval(node.value))] = values  # type: ignore[arg-type]
    return existing


def test_listed_values_are_those_of_the_conventions() -> None:
    finished = full_cycle(2)
    states = dict.fromkeys((*TCP_STATES.values(), "established", "time_wait"), 1)
    node = msgspec.structs.replace(finished.snapshot.node, tcp_states=states)
    snapshot = msgspec.structs.replace(finished.snapshot, node=node)
    used: dict[str, set[str]] = {}
    for instrument in instruments(snapshot, MAX_CGROUPS_WITH_SERIES):
        for attributes, _ in instrument.points:
            for key, given in attributes.items():
                used.setdefault(key, set()).add(str(given))
    existing = enumerated()
    unknown = {key: used[key] - existing[key] for key in used.keys() & existing.keys()}
    assert {key: values for key, values in unknown.items() if values} == {"cpu.mode": {"softirq"}}
    assert used["network.connection.state"] == existing["network.connection.state"] - {"closed"}
    assert used.keys() & existing.keys() > {"disk.io.direction", "network.io.direction", "system.memory.state"}


def test_the_numbers_are_those_of_the_snapshot() -> None:
    assert value("system.cpu.time", cpu__logical_number=3, cpu__mode="user") == 1.25
    assert value("system.cpu.frequency", cpu__logical_number=0) == 2.5e9
    assert value("system.memory.usage", system__memory__state="used") == (8192 - 4096 - 64 - 2048) * MIB
    assert value("system.memory.linux.slab.usage", system__memory__linux__slab__state="reclaimable") == 128 * MIB
    assert value("system.paging.faults", system__paging__fault__type="minor") == 2 * (5000 - 10)
    assert value("system.disk.operation_time", system__device="vda", disk__io__direction="write") == pytest.approx(
        0.024
    )
    assert (
        value("system.network.packet.dropped", network__interface__name="eth0", network__io__direction="transmit") == 2
    )
    web = {"k8s__pod__name": "web", "k8s__namespace__name": "default", "k8s__container__name": "web"}
    assert value("container.cpu.time", cpu__mode="system", **web) == 1.0
    assert value("container.memory.working_set", **web) == 44 * MIB
    assert value("container.memory.rss", **web) == 32 * MIB
    assert value("container.paging.faults", system__paging__fault__type="major", **web) == 6
    assert value("container.disk.io", system__device="vda", disk__io__direction="read", **web) == 2 * MIB


def test_what_a_pod_asks_for_is_named_as_kubernetes_does() -> None:
    web = {"k8s__pod__name": "web"}
    assert value("k8s.container.cpu.request.desired", **web) == 2.0
    assert value("k8s.container.memory.request.desired", **web) == 256 * MIB
    assert "k8s.container.cpu.limit.desired" not in shown(), "no pod has one"


def test_cpu_time_without_modes_is_sent_as_one() -> None:
    finished = full_cycle(2)
    web = msgspec.structs.replace(finished.snapshot.cgroups["/web"], cpu_user_ns=None)
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups={"/web": web})
    ((attributes, number),) = next(i.points for i in instruments(snapshot, 9) if i.name == "container.cpu.time")
    assert ("cpu.mode" in attributes, number) == (False, 3.0)


def test_states_of_memory_add_up_to_the_whole() -> None:
    assert sum(number for _, number in shown()["system.memory.usage"].points) == 8192 * MIB


def test_the_container_and_pod_are_named_as_kubernetes_does() -> None:
    finished = full_cycle(2)
    pod = finished.snapshot.pods[0]
    identity = "0123456789abcdef" * 4
    path = f"/kubepods.slice/cri-containerd-{identity}.scope"
    container = msgspec.structs.replace(pod.containers[0], cgroup=path)
    pod = msgspec.structs.replace(pod, uid="9b2f-uid", containers=(container,))
    sample = finished.snapshot.cgroups["/web"]
    snapshot = msgspec.structs.replace(finished.snapshot, pods=(pod,), cgroups={path: sample})
    usage = next(i for i in instruments(snapshot, 10) if i.name == "container.memory.usage")
    assert usage.points[0][0] == {
        "k8s.namespace.name": "default", "k8s.pod.name": "web", "k8s.pod.uid": "9b2f-uid", "k8s.container.name": "web",
        "container.id": identity,
    }  # fmt: skip


def test_of_the_agents_own_resource_a_container_shares_what_is_true_of_both() -> None:
    both = {"host.name": "n1", "host.id": "4f", "k8s.node.name": "n1", "k8s.cluster.name": "c", "team": "edge"}
    own = {
        "service.name": "dioptase", "service.instance.id": "9b2f", "os.name": "the image's", "container.id": "c0ffee",
        "k8s.pod.uid": "9b2f", "k8s.pod.name": "dioptase-x", "k8s.namespace.name": "dioptase", "k8s.daemonset.name": "d",
    }  # fmt: skip
    assert shared_resource_attributes(both | own) == both


def test_what_is_not_known_is_not_sent() -> None:
    assert [i.name for i in instruments(bare_cycle().snapshot, 10)] == ["system.cpu.logical.count"]
    finished = full_cycle(2)
    node = NodeSample(meminfo={"MemFree": 5}, vmstat={"pgfault": 3})
    snapshot = msgspec.structs.replace(finished.snapshot, node=node)
    by_name = {i.name: i.points for i in instruments(snapshot, 10)}
    assert by_name["system.memory.usage"] == (({"system.memory.state": "free"}, 5),)
    assert "system.paging.faults" not in by_name


def test_containers_are_bounded() -> None:
    usage = next(i for i in instruments(full_cycle(2).snapshot, 1) if i.name == "container.memory.usage")
    assert [attributes["k8s.pod.name"] for attributes, _ in usage.points] == ["web"]


def after(start_times: CgroupStartTimes, at_ns: int, *ids: int) -> CgroupStartTimes:
    cgroups = {f"/{each}": CgroupSample(path=f"/{each}", id=each) for each in ids}
    return start_times.after(
        Snapshot(
            seq=1, taken_at_ns=0, wall_time_ns=at_ns, boot_id="", topology=Topology(cpus=()), node=NodeSample(),
            cgroups=cgroups,
        )
    )  # fmt: skip


def test_a_cgroup_counts_from_the_cycle_before_the_one_that_has_it_unless_that_is_the_first() -> None:
    start_times = after(after(after(CgroupStartTimes(), 10, 1, 2), 20, 1, 3), 30, 1, 3, 4)
    assert start_times.by_id == {1: None, 2: None, 3: 10, 4: 20}


def test_what_is_out_of_sight_for_a_cycle_is_not_born_again() -> None:
    start_times = after(after(after(CgroupStartTimes(), 10, 1), 20, 1, 7), 30, 1)
    assert after(after(start_times, 40), 50, 1, 7).by_id == {1: None, 7: 10}


def test_a_first_cycle_without_cgroups_is_none() -> None:
    assert after(after(CgroupStartTimes(), 10), 20, 1).by_id == {1: None}


def test_what_is_gone_is_forgotten_when_it_becomes_much() -> None:
    start_times = after(CgroupStartTimes(), 10, 1)
    for each in range(2, 3 * MAX_START_TIMES, 100):
        start_times = after(start_times, each, 1, *range(each, each + 100))
        assert len(start_times.by_id) <= MAX_START_TIMES + 100
    assert start_times.by_id[1] is None
    assert start_times.by_id[each] == each - 100


def test_nothing_new_costs_no_copy() -> None:
    start_times = after(CgroupStartTimes(), 10, 1, 2)
    assert after(start_times, 20, 1, 2).by_id is start_times.by_id
