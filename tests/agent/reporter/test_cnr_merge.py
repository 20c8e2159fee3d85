"""Fields of plugins merged with those of the agent by Katalyst's rules; no field can invalidate the object."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.reporter.cnr import build_cnr_report
from agent.reporter.cnr_merge import MergedCnr, merge_plugin_fields, merge_zones
from api.katalyst.cnr import CustomNodeResourceStatus
from api.node_resources import ObjectSection, ReportedField
from api.pod import RECLAIMED_CPU
from tests.agent.reporter.test_cnr import finished

GROUP = "node.katalyst.kubewharf.io"
OWN = build_cnr_report(finished(), metrics=False)


def field(name: str, value: Any, part: ObjectSection = ObjectSection.STATUS, **changes: Any) -> ReportedField:
    reported = ReportedField(
        plugin="p",
        group=GROUP,
        version="v1alpha1",
        kind="CustomNodeResource",
        part=part,
        name=name,
        value=msgspec.Raw(json.dumps(value).encode()),
    )
    return msgspec.structs.replace(reported, **changes)


def merge(*fields: ReportedField) -> MergedCnr:
    return merge_plugin_fields(OWN, fields)


def numa(*path: str, of: MergedCnr) -> dict[str, Any]:
    zones = of.status["status"]["topologyZone"]
    for name in path:
        (zone,) = [zone for zone in zones if zone["name"] == name]
        zones = zone.get("children", [])
    merged: dict[str, Any] = zone
    return merged


def test_without_plugins_the_report_is_unchanged() -> None:
    assert merge() == MergedCnr(spec=OWN.spec_body(), taints=OWN.taints, status=OWN.status_body())


def test_lists_are_concatenated() -> None:
    merged = merge(
        field("NodeResourceProperties", [{"propertyName": "rack", "propertyValues": ["7"]}], ObjectSection.SPEC)
    )
    names = [item["propertyName"] for item in merged.spec["spec"]["nodeResourceProperties"]]
    assert names == ["numa", "cpu", "memory", "nbw", "cpu_codename", "is_vm", "rack"]


def test_amounts_are_merged_by_name_and_the_last_value_wins() -> None:
    fields = [
        field("Resources", {"allocatable": {"x.io/a": "1", RECLAIMED_CPU: "7"}}),
        field("Resources", {"allocatable": {"x.io/a": 2}, "capacity": {"x.io/b": "3"}}),
    ]
    merged = merge(*fields).status["status"]["resources"]
    assert (merged["allocatable"]["x.io/a"], merged["allocatable"][RECLAIMED_CPU]) == (2, "7")
    assert (merged["capacity"]["x.io/b"], merged["capacity"][RECLAIMED_CPU]) == ("3", "5123")


def test_zones_are_merged_by_name_and_the_first_value_wins() -> None:
    node = {
        "type": "Numa",
        "name": "1",
        "resources": {"allocatable": {"cpu": "99", "x.io/gpu": "2"}, "capacity": {"x.io/gpu": "2"}},
        "attributes": [{"name": "numa_distance", "value": "21"}],
        "allocations": [{"consumer": "shop/db/uid-db", "requests": {"x.io/gpu": "1", "cpu": "99"}}],
        "children": [{"type": "GPU", "name": "gpu-0"}],
    }
    merged = merge(
        field("TopologyZone", [{"type": "Socket", "name": "1", "children": [node]}, {"type": "X", "name": "1"}])
    )
    zone = next(item for item in numa("1", of=_only(merged, "Socket"))["children"] if item["name"] == "1")
    assert zone["resources"]["allocatable"] == {
        "cpu": "4",
        "memory": str(16 << 30),
        RECLAIMED_CPU: "3123",
        "resource.katalyst.kubewharf.io/reclaimed_memory": str(6 << 30),
        "x.io/gpu": "2",
    }
    assert [item["name"] for item in zone["attributes"]] == ["numa_distance"]
    given = {item["consumer"]: item["requests"] for item in zone["allocations"]}
    assert given["shop/db/uid-db"] == {"cpu": "2", "memory": str(4 << 30), "x.io/gpu": "1"}
    assert [(item["type"], item["name"]) for item in zone["children"]] == [
        ("L3CacheGroup", "0"),
        ("L3CacheGroup", "1"),
        ("GPU", "gpu-0"),
    ]
    assert [item["type"] for item in merged.status["status"]["topologyZone"]] == ["Socket", "Socket", "X"]
    # The result fits the definition.
    msgspec.convert(merged.status["status"], CustomNodeResourceStatus)


def _only(merged: MergedCnr, kind: str) -> MergedCnr:
    zones = [item for item in merged.status["status"]["topologyZone"] if item["type"] == kind]
    return msgspec.structs.replace(merged, status={"status": {"topologyZone": zones}})


def test_taints_and_labels() -> None:
    taint = {"key": "x.io/a", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}
    merged = merge(
        field("Taints", [taint, taint], ObjectSection.SPEC),
        field("Labels", {"a": "b"}, ObjectSection.METADATA),
        field("Annotations", {"c": "d"}, ObjectSection.METADATA),
        field("Annotations", {"e": "f"}, ObjectSection.METADATA),
    )
    assert [item.key for item in merged.taints] == ["node.katalyst.kubewharf.io/MemoryPressure", "x.io/a"]
    assert merged.spec["metadata"] == {"labels": {"a": "b"}, "annotations": {"c": "d", "e": "f"}}
    assert "taints" not in merged.spec["spec"]


@pytest.mark.parametrize(
    ("invalid", "why"),
    [
        (field("TopologyZone", 5), "Expected `array | null`"),
        (field("TopologyZone", [{"type": "Numa"}]), "missing required field `name`"),
        (field("Resources", {"allocatable": {"a": "many"}}), "matching regex"),
        (field("Nonsense", 1), "no field; choose from NodeMetricStatus, Resources, TopologyPolicy, TopologyZone"),
        (field("Conditions", []), "the lifecycle controller owns"),
        (field("Finalizers", ["x"], ObjectSection.METADATA), "choose from Annotations, Labels"),
        (field("Resources", {}, kind="Node"), r"Node.v1alpha1.node.katalyst.kubewharf.io; only CustomNode"),
        (field("Taints", [{"key": "a"}], ObjectSection.SPEC), "effect"),
    ],
)
def test_an_invalid_field_is_left_out_and_reported(invalid: ReportedField, why: str) -> None:
    merged = merge(invalid, field("TopologyPolicy", "NumericPodLevel"))
    (refused,) = merged.refused
    assert refused.startswith(f"reporter plugin p: {invalid.part} {invalid.name} ")
    assert why in refused
    expected = merge_plugin_fields(OWN, [field("TopologyPolicy", "NumericPodLevel")])
    assert (merged.spec, merged.status) == (expected.spec, expected.status)
    assert merged.status["status"]["topologyPolicy"] == "NumericPodLevel"


def test_nothing_is_null() -> None:
    assert merge(field("TopologyZone", None), field("Resources", {"allocatable": None})).status == OWN.status_body()


def test_status_fields_of_plugins_wait_for_the_agents_status() -> None:
    unknown = msgspec.structs.replace(OWN, status=None)
    assert merge_plugin_fields(unknown, [field("TopologyZone", [{"type": "X", "name": "1"}])]).status == {}


NAMES = st.sampled_from(["TopologyZone", "Resources", "NodeResourceProperties", "Taints", "TopologyPolicy", "Labels"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "0", "Numa", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "name", "children", "resources", "allocatable", "attributes", "value"]), inner
        )
    ),
    max_leaves=8,
)


@given(st.lists(st.tuples(NAMES, st.sampled_from(list(ObjectSection)), JSON), max_size=4))
def test_the_merged_object_always_fits_its_definition(fields: list[tuple[str, ObjectSection, Any]]) -> None:
    merged = merge(*(field(name, value, part) for name, part, value in fields))
    msgspec.convert(merged.status["status"], CustomNodeResourceStatus)
    once = merged.status["status"]["topologyZone"]
    assert merge_zones(once) == once
