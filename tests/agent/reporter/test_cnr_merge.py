"""What plugins report beside what we do: Katalyst's rules by example, and nothing that one of them says spoils the object."""

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


def said(name: str, value: Any, part: ObjectSection = ObjectSection.STATUS, **changes: Any) -> ReportedField:
    one = ReportedField(
        plugin="p",
        group=GROUP,
        version="v1alpha1",
        kind="CustomNodeResource",
        part=part,
        name=name,
        value=msgspec.Raw(json.dumps(value).encode()),
    )
    return msgspec.structs.replace(one, **changes)


def whole(*fields: ReportedField) -> MergedCnr:
    return merge_plugin_fields(OWN, fields)


def numa(*path: str, of: MergedCnr) -> dict[str, Any]:
    zones = of.status["status"]["topologyZone"]
    for name in path:
        (zone,) = [zone for zone in zones if zone["name"] == name]
        zones = zone.get("children", [])
    found: dict[str, Any] = zone
    return found


def test_without_plugins_it_is_ours_to_the_letter() -> None:
    assert whole() == MergedCnr(spec=OWN.spec_body(), taints=OWN.taints, status=OWN.status_body())


def test_lists_are_strung_together() -> None:
    found = whole(
        said("NodeResourceProperties", [{"propertyName": "rack", "propertyValues": ["7"]}], ObjectSection.SPEC)
    )
    names = [one["propertyName"] for one in found.spec["spec"]["nodeResourceProperties"]]
    assert names == ["numa", "cpu", "memory", "nbw", "cpu_codename", "is_vm", "rack"]


def test_amounts_are_merged_by_name_and_the_last_word_counts() -> None:
    fields = [
        said("Resources", {"allocatable": {"x.io/a": "1", RECLAIMED_CPU: "7"}}),
        said("Resources", {"allocatable": {"x.io/a": 2}, "capacity": {"x.io/b": "3"}}),
    ]
    found = whole(*fields).status["status"]["resources"]
    assert (found["allocatable"]["x.io/a"], found["allocatable"][RECLAIMED_CPU]) == (2, "7")
    assert (found["capacity"]["x.io/b"], found["capacity"][RECLAIMED_CPU]) == ("3", "5123")


def test_zones_of_one_name_are_one_and_the_first_word_counts_in_them() -> None:
    node = {
        "type": "Numa",
        "name": "1",
        "resources": {"allocatable": {"cpu": "99", "x.io/gpu": "2"}, "capacity": {"x.io/gpu": "2"}},
        "attributes": [{"name": "numa_distance", "value": "21"}],
        "allocations": [{"consumer": "shop/db/uid-db", "requests": {"x.io/gpu": "1", "cpu": "99"}}],
        "children": [{"type": "GPU", "name": "gpu-0"}],
    }
    found = whole(
        said("TopologyZone", [{"type": "Socket", "name": "1", "children": [node]}, {"type": "X", "name": "1"}])
    )
    zone = next(one for one in numa("1", of=_only(found, "Socket"))["children"] if one["name"] == "1")
    assert zone["resources"]["allocatable"] == {
        "cpu": "4",
        "memory": str(16 << 30),
        RECLAIMED_CPU: "3123",
        "resource.katalyst.kubewharf.io/reclaimed_memory": str(6 << 30),
        "x.io/gpu": "2",
    }
    assert [one["name"] for one in zone["attributes"]] == ["numa_distance"]
    given = {one["consumer"]: one["requests"] for one in zone["allocations"]}
    assert given["shop/db/uid-db"] == {"cpu": "2", "memory": str(4 << 30), "x.io/gpu": "1"}
    assert [(one["type"], one["name"]) for one in zone["children"]] == [
        ("L3CacheGroup", "0"),
        ("L3CacheGroup", "1"),
        ("GPU", "gpu-0"),
    ]
    assert [one["type"] for one in found.status["status"]["topologyZone"]] == ["Socket", "Socket", "X"]
    # What comes of it fits the definition.
    msgspec.convert(found.status["status"], CustomNodeResourceStatus)


def _only(found: MergedCnr, kind: str) -> MergedCnr:
    zones = [one for one in found.status["status"]["topologyZone"] if one["type"] == kind]
    return msgspec.structs.replace(found, status={"status": {"topologyZone": zones}})


def test_taints_and_labels() -> None:
    taint = {"key": "x.io/a", "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}
    found = whole(
        said("Taints", [taint, taint], ObjectSection.SPEC),
        said("Labels", {"a": "b"}, ObjectSection.METADATA),
        said("Annotations", {"c": "d"}, ObjectSection.METADATA),
        said("Annotations", {"e": "f"}, ObjectSection.METADATA),
    )
    assert [one.key for one in found.taints] == ["node.katalyst.kubewharf.io/MemoryPressure", "x.io/a"]
    assert found.spec["metadata"] == {"labels": {"a": "b"}, "annotations": {"c": "d", "e": "f"}}
    assert "taints" not in found.spec["spec"]


@pytest.mark.parametrize(
    ("field", "why"),
    [
        (said("TopologyZone", 5), "Expected `array | null`"),
        (said("TopologyZone", [{"type": "Numa"}]), "missing required field `name`"),
        (said("Resources", {"allocatable": {"a": "many"}}), "matching regex"),
        (said("Nonsense", 1), "no field; choose from NodeMetricStatus, Resources, TopologyPolicy, TopologyZone"),
        (said("Conditions", []), "the controller's"),
        (said("Finalizers", ["x"], ObjectSection.METADATA), "choose from Annotations, Labels"),
        (said("Resources", {}, kind="Node"), r"Node.v1alpha1.node.katalyst.kubewharf.io, and only CustomNode"),
        (said("Taints", [{"key": "a"}], ObjectSection.SPEC), "effect"),
    ],
)
def test_what_cannot_be_is_left_out_and_said(field: ReportedField, why: str) -> None:
    found = whole(field, said("TopologyPolicy", "NumericPodLevel"))
    (refused,) = found.refused
    assert refused.startswith(f"reporter plugin p: {field.part} {field.name} ")
    assert why in refused
    kept = merge_plugin_fields(OWN, [said("TopologyPolicy", "NumericPodLevel")])
    assert (found.spec, found.status) == (kept.spec, kept.status)
    assert found.status["status"]["topologyPolicy"] == "NumericPodLevel"


def test_nothing_is_null() -> None:
    assert whole(said("TopologyZone", None), said("Resources", {"allocatable": None})).status == OWN.status_body()


def test_what_plugins_say_of_the_status_waits_for_ours() -> None:
    unknown = msgspec.structs.replace(OWN, status=None)
    assert merge_plugin_fields(unknown, [said("TopologyZone", [{"type": "X", "name": "1"}])]).status == {}


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
def test_whatever_they_say_the_object_fits_its_definition(fields: list[tuple[str, ObjectSection, Any]]) -> None:
    found = whole(*(said(name, value, part) for name, part, value in fields))
    msgspec.convert(found.status["status"], CustomNodeResourceStatus)
    once = found.status["status"]["topologyZone"]
    assert merge_zones(once) == once
