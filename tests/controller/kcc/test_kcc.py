"""Assignment of configurations to nodes: tables of cases, and properties for every input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.kcc import ownership
from controller.kcc.rollout_plan import RolloutInputs, RolloutPlan, plan_rollout, with_entry
from controller.kcc.targets import FINALIZER, LEGACY_FINALIZERS, InvalidTarget, canary_cutoff, config_hash
from controller.kinds import Cnc, CncStatus, GroupVersionResource, Kcc, KccSpec, KccStatus
from kube.objects import KubeMetadata, UnstructuredObject, parse_timestamp

GVR = GroupVersionResource(group="config.katalyst.kubewharf.io", version="v1alpha1", resource="adminqosconfigurations")
OTHER = msgspec.structs.replace(GVR, resource="authconfigurations")
NOW = parse_timestamp("2026-01-31T12:00:00Z")
ALLOWED = {0: frozenset({"zone"}), 10: frozenset({"zone", "kind"})}
KIND = msgspec.to_builtins(GVR)


def config_object(
    name: str, spec: Mapping[str, Any] | None = None, config: object = None, *,
    deleted: bool = False, finalizers: tuple[str, ...] = (FINALIZER,), at: str = "2026-01-31T11:00:00Z",
    status: Mapping[str, Any] | None = None,
) -> UnstructuredObject:  # fmt: skip
    metadata = KubeMetadata(
        name=name, namespace="kat", uid=f"u-{name}", generation=3, creation_timestamp=at, finalizers=finalizers,
        deletion_timestamp="2026-01-31T11:59:00Z" if deleted else None,
    )  # fmt: skip
    return UnstructuredObject(
        metadata=metadata, spec={**(spec or {}), "config": {"x": 1} if config is None else config}, status=status or {}
    )


def selecting(zone: str, priority: int = 0, **spec: object) -> dict[str, object]:
    return {"nodeLabelSelector": f"zone={zone}", "priority": priority, **spec}


def ephemeral(*names: str, lasts: str = "2h") -> dict[str, object]:
    return {"ephemeralSelector": {"nodeNames": list(names), "lastDuration": lasts}}


def node(zone: str = "", entry: Mapping[str, Any] | None = None, **labels: str) -> Cnc:
    metadata = KubeMetadata(labels={**({"zone": zone} if zone else {}), **labels})
    return Cnc(metadata=metadata, status=CncStatus(katalyst_custom_config_list=() if entry is None else (entry,)))


def entry(name: str, config: object = None) -> dict[str, Any]:
    return {
        "configType": KIND,
        "configName": name,
        "configNamespace": "kat",
        "hash": config_hash({"x": 1} if config is None else config, {}),
    }


def assigned_names(result: RolloutPlan) -> dict[str, str | None]:
    return {name: None if assigned is None else assigned["configName"] for name, assigned in result.entries.items()}


def condition_of(result: RolloutPlan, name: str) -> tuple[str, str]:
    condition = result.statuses[f"kat/{name}"]["conditions"][-1]
    return condition["reason"], condition["message"]


NODES = {"n1": node("a"), "n2": node("b"), "n3": node("a", kind="gpu")}


def plan(
    objects: list[UnstructuredObject], nodes: Mapping[str, Cnc] = NODES, *, now_s: float = NOW, **more: Any
) -> RolloutPlan:
    """Plan the rollout of these objects."""
    by_key = {f"kat/{each.metadata.name}": each for each in objects}
    return plan_rollout(RolloutInputs(gvr=GVR, allowed=ALLOWED, objects=by_key, nodes=nodes, **more), now_s)


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ([], {}),
        ([config_object("g")], {"n1": "g", "n2": "g", "n3": "g"}),
        ([config_object("g"), config_object("a", selecting("a"))], {"n1": "a", "n2": "g", "n3": "a"}),
        ([config_object("a", selecting("a"))], {"n1": "a", "n3": "a"}),
        (
            [config_object("g"), config_object("a", selecting("a")), config_object("top", selecting("a", 10))],
            {"n1": "top", "n2": "g", "n3": "top"},
        ),
        (
            [config_object("g"), config_object("a", selecting("a")), config_object("e", ephemeral("n1", "n9"))],
            {"n1": "e", "n2": "g", "n3": "a"},
        ),
        (
            [config_object("g"), config_object("deleted", selecting("a"), deleted=True)],
            {"n1": "g", "n2": "g", "n3": "g"},
        ),
        ([config_object("g", {"paused": True})], {}),
        ([config_object("g"), config_object("a", selecting("a", paused=True))], {"n2": "g"}),
        ([config_object("g", {"updateStrategy": {"rollingUpdate": {"canary": 2}}})], {"n1": "g", "n2": "g"}),
        (
            [config_object("g", {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"canary": "34%"}}})],
            {"n1": "g"},
        ),
        (
            [config_object("g"), config_object("a", selecting("a", updateStrategy={"rollingUpdate": {"canary": 1}}))],
            {"n1": "a", "n2": "g"},
        ),
        ([config_object("g"), config_object("old", ephemeral("n1", lasts="1h"))], {"n1": "g", "n2": "g", "n3": "g"}),
    ],
)
def test_assignment_of_objects_to_nodes(objects: list[UnstructuredObject], expected: dict[str, str]) -> None:
    assert assigned_names(plan(objects)) == expected


@pytest.mark.parametrize(
    ("spec", "reason", "message"),
    [
        (
            {"nodeLabelSelector": "zone=a", **ephemeral("n1")},
            "ValidateFailed",
            "cannot be combined with ephemeralSelector.nodeNames",
        ),
        (
            {"ephemeralSelector": {"nodeNames": ["n1"]}},
            "ValidateFailed",
            "spec.ephemeralSelector.lastDuration: is required with nodeNames",
        ),
        ({"ephemeralSelector": {"lastDuration": "1h"}}, "ValidateFailed", "lastDuration: requires nodeNames"),
        (
            {"nodeLabelSelector": "zone=a", "ephemeralSelector": {"lastDuration": "1h"}},
            "ValidateFailed",
            "requires nodeNames",
        ),
        (ephemeral("n1", lasts="soon"), "ValidateFailed", "'soon' is no duration such as 90s"),
        ({"nodeLabelSelector": "rack=a"}, "ValidateFailed", "label rack is not allowed for priority 0, only zone"),
        (
            selecting("a", 7),
            "ValidateFailed",
            "spec.priority: 7 has no nodeLabelSelectorAllowedKeyList in the KCC, which lists 0, 10",
        ),
        (
            {"nodeLabelSelector": "zone>a"},
            "ValidateFailed",
            "spec.nodeLabelSelector: 'zone>a' is no part of a selector",
        ),
        ({"nodeLabelSelector": 7}, "ValidateFailed", "Expected str, got int - at spec.nodeLabelSelector"),
        ({"priority": 2**40}, "ValidateFailed", "at spec.priority"),
        ({"updateStrategy": {"type": "OnDelete"}}, "ValidateFailed", "at spec.updateStrategy.type"),
        (
            {"updateStrategy": {"rollingUpdate": {"canary": "some"}}},
            "CalculateCanaryCutoffFailed",
            "'some' is invalid; write 3 or 10%",
        ),
        ({"updateStrategy": {"rollingUpdate": {"canary": "1.5%"}}}, "CalculateCanaryCutoffFailed", "canary"),
    ],
)
def test_an_invalid_object_halts_its_kind(spec: dict[str, object], reason: str, message: str) -> None:
    result = plan([config_object("bad", spec), config_object("g")])
    actual_reason, actual_message = condition_of(result, "bad")
    assert (actual_reason, result.invalid) == (reason, ("kat/bad",))
    assert message in actual_message
    assert result.entries == {}
    assert condition_of(result, "g") == ("Normal", "not rolled out while kat/bad is invalid")
    assert "targetNodes" not in result.statuses["kat/g"], "the counts of nodes stay as they were"
    assert "currentHash" not in result.statuses["kat/bad"], "an invalid object has no hash"


def test_an_invalid_configuration_has_no_hash() -> None:
    result = plan([config_object("bad", config=[1])])
    assert condition_of(result, "bad") == ("HashFailed", "Expected object | null, got array - at spec.config")


def test_a_configuration_that_is_nested_too_deep_stops_its_kind_and_not_the_controller() -> None:
    deep: object = 1
    for _ in range(200_000):
        deep = {"a": deep}
    result = plan([config_object("bad", config=deep)])
    assert condition_of(result, "bad")[0] == "HashFailed"


@pytest.mark.parametrize(
    ("first_spec", "second_spec", "message"),
    [
        ({}, {}, "both apply to all nodes"),
        (
            selecting("a"),
            {"nodeLabelSelector": "zone in (a,b)"},
            "a node can match both selectors, and both have priority 0",
        ),
        (selecting("a"), {"nodeLabelSelector": "zone!=b"}, "both have priority 0"),
        (ephemeral("n1", "n2"), ephemeral("n2", "n3"), "both name node n2"),
    ],
)
def test_conflicting_objects_are_both_invalid(
    first_spec: dict[str, object], second_spec: dict[str, object], message: str
) -> None:
    result = plan([config_object("one", first_spec), config_object("two", second_spec)])
    assert result.invalid == ("kat/one", "kat/two")
    assert message in condition_of(result, "one")[1]
    assert condition_of(result, "two")[1].startswith("conflicts with kat/one: ")
    assert result.entries == {}


def test_objects_without_conflicts() -> None:
    objects = [
        config_object("g"),
        config_object("a", selecting("a")),
        config_object("b", selecting("b")),
        config_object("top", selecting("a", 10)),
        config_object("e", ephemeral("n1")),
        config_object("f", ephemeral("n2")),
    ]
    assert plan(objects).invalid == ()


def test_an_object_that_cannot_be_read_stops_its_kind_too() -> None:
    result = plan([config_object("g")], unreadable={"kat/odd": "Expected `object`"})
    assert (result.entries, result.invalid) == ({}, ("kat/odd",))


def test_a_deleted_object_loses_its_finalizer_after_its_nodes_have_moved() -> None:
    objects = [config_object("g"), config_object("a", selecting("a"), {"x": 2}, deleted=True)]
    nodes = {"n1": node("a", entry("a", {"x": 2})), "n2": node("b", entry("g"))}
    first = plan(objects, nodes)
    assert (assigned_names(first), first.finalizers) == ({"n1": "g"}, {})
    moved = plan(objects, {"n1": node("a", entry("g")), "n2": nodes["n2"]})
    assert (assigned_names(moved), moved.finalizers) == ({}, {"kat/a": ()})


def test_entries_of_deleted_objects_are_removed_even_while_others_are_paused() -> None:
    nodes = {"n1": node("a", entry("deleted")), "n2": node("b", entry("g"))}
    assert assigned_names(plan([config_object("g", {"paused": True})], nodes)) == {"n1": None}
    assert assigned_names(plan([], nodes)) == {"n1": None, "n2": None}


def test_an_invalid_object_does_not_block_the_deletion_of_others() -> None:
    result = plan(
        [config_object("bad", {"priority": "x"}), config_object("a", deleted=True)], {"n1": node(entry=entry("a"))}
    )
    assert result.finalizers == {"kat/a": ()}
    assert result.entries == {}


def test_finalizers_of_other_writers_are_kept() -> None:
    before = ("someone/else", LEGACY_FINALIZERS[0])
    result = plan([config_object("g", finalizers=before)], {})
    assert result.finalizers == {"kat/g": ("someone/else", FINALIZER)}
    deleted = plan([config_object("g", finalizers=(*before, FINALIZER), deleted=True)], {})
    assert deleted.finalizers == {"kat/g": ("someone/else",)}


def test_temporary_objects_expire() -> None:
    objects = [
        config_object("e", ephemeral("n1", lasts="90m")),
        config_object("f", ephemeral("n2", lasts="2h")),
        config_object("over", ephemeral("n3", lasts="60m")),
    ]
    result = plan(objects)
    assert result.expired == ("kat/over",)
    assert result.wake_at_s == parse_timestamp("2026-01-31T12:30:00Z")
    assert plan(objects, now_s=NOW + 1800).expired == ("kat/e", "kat/over")


def test_the_status_counts_updated_nodes_and_not_planned_ones() -> None:
    spec = {"updateStrategy": {"rollingUpdate": {"canary": 2}}}
    nodes = {
        "n1": node(entry=entry("g")),
        "n2": node(entry=entry("g", {"x": 0})),
        "n3": node(entry=entry("g", {"x": 0})),
        "n4": node(),
    }
    result = plan([config_object("g", spec)], nodes)
    assert assigned_names(result) == {"n2": "g"}
    condition = {
        "type": "Valid",
        "status": "True",
        "reason": "Normal",
        "message": "",
        "lastTransitionTime": "2026-01-31T12:00:00Z",
    }
    written = {
        "observedGeneration": 3, "currentHash": entry("g")["hash"], "targetNodes": 4, "canaryNodes": 2,
        "updatedTargetNodes": 1, "updatedNodes": 1, "conditions": [condition],
    }  # fmt: skip
    assert result.statuses == {"kat/g": written}
    again = plan([config_object("g", spec, status=written)], nodes, now_s=NOW + 600)
    assert again.statuses == {}, "nothing is written twice, and the condition keeps its time"
    bad = plan([config_object("g", {"priority": "x"}, status=written)], nodes, now_s=NOW + 600)
    assert bad.statuses["kat/g"]["conditions"][0]["lastTransitionTime"] == "2026-01-31T12:10:00Z"
    assert "targetNodes" not in bad.statuses["kat/g"], "unknown numbers are not written"


def test_the_hash_is_updated_while_the_kind_is_halted() -> None:
    status = {"currentHash": config_hash({"x": 1}, {}), "observedGeneration": 2, "targetNodes": 4}
    edited, bad = config_object("g", config={"x": 2}, status=status), config_object("bad", {"priority": "x"})
    status_fields = plan([edited, bad]).statuses["kat/g"]
    assert (status_fields["currentHash"], status_fields["observedGeneration"]) == (config_hash({"x": 2}, {}), 3)
    assert "targetNodes" not in status_fields


@pytest.mark.parametrize(
    ("canary", "nodes", "expected"),
    [(None, 7, 7), (0, 7, 0), (3, 7, 3), (9, 7, 7), (-1, 7, 0), ("0%", 7, 0), ("10%", 9, 0), ("10%", 10, 1), ("29%", 7, 2),
     ("100%", 7, 7), ("250%", 7, 7), ("-5%", 7, 0), ("50%", 0, 0)],
)  # fmt: skip
def test_cutoffs(canary: int | str | None, nodes: int, expected: int) -> None:
    assert canary_cutoff(canary, nodes) == expected


@pytest.mark.parametrize("canary", ["", "%", "5", "5 %", "٣%", "--5%", "9" * 40 + "%"])
def test_an_invalid_canary_is_rejected(canary: str) -> None:
    with pytest.raises(InvalidTarget, match="canary"):
        canary_cutoff(canary, 5)


def test_the_hash_is_that_of_canonical_json() -> None:
    """Equals `printf '{"a":{"b":[1,2.5],"c":null},"z":"u"}' | sha256sum`."""
    assert config_hash({"z": "u", "a": {"c": None, "b": [1, 2.5]}}, {}) == "252fd6575629"
    assert config_hash({}, {"targetNodes": 3, "conditions": []}) == config_hash({}, {})
    assert config_hash({}, {"enabledStrategies": [1]}) != config_hash({}, {})


@pytest.mark.parametrize(
    ("before", "new", "expected"),
    [
        ([], {"hash": "n"}, [{"hash": "n"}]),
        ([{"configType": "o", "hash": "x"}], {"hash": "n"}, [{"configType": "o", "hash": "x"}, {"hash": "n"}]),
        (
            [{"configType": KIND, "hash": "x", "added": 1}, {"configType": "o"}],
            {"hash": "n"},
            [{"configType": KIND, "hash": "n", "added": 1}, {"configType": "o"}],
        ),
        ([{"configType": KIND}, {"configType": "o"}, {"configType": KIND}], None, [{"configType": "o"}]),
    ],
)
def test_entries_of_other_kinds_and_unknown_fields_stay(before: list[Any], new: Any, expected: list[Any]) -> None:
    assert with_entry(tuple(before), GVR, new) == expected


SPECS = st.one_of(
    st.just({}),
    st.builds(selecting, st.sampled_from("ab"), st.sampled_from([0, 10])),
    st.lists(st.sampled_from(["n1", "n2"]), min_size=1, unique=True).map(lambda names: ephemeral(*names)),
).flatmap(
    lambda spec: st.sampled_from(
        [spec, {**spec, "paused": True}, {**spec, "updateStrategy": {"rollingUpdate": {"canary": 1}}}]
    )
)


@given(
    st.lists(st.tuples(SPECS, st.booleans(), st.integers(0, 3)), max_size=5),
    st.dictionaries(
        st.sampled_from(["n1", "n2", "n3"]),
        st.tuples(st.sampled_from("abc"), st.sampled_from([None, "o0", "o1", "deleted"])),
    ),
)
def test_a_plan_is_idempotent(specs: list[Any], nodes: dict[str, Any]) -> None:
    objects = [config_object(f"o{i}", spec, {"x": x}, deleted=deleted) for i, (spec, deleted, x) in enumerate(specs)]
    before = {name: node(zone, entry(current) if current else None) for name, (zone, current) in nodes.items()}
    first = plan(objects, before)
    after = {
        name: msgspec.structs.replace(
            cnc,
            status=CncStatus(
                katalyst_custom_config_list=tuple(
                    with_entry(cnc.status.katalyst_custom_config_list, GVR, first.entries[name])
                )
            ),
        )
        if name in first.entries
        else cnc
        for name, cnc in before.items()
    }
    second = plan(objects, after)
    assert second.entries == {}
    if not first.invalid:
        deleted = {f"kat/{each.metadata.name}" for each in objects if each.metadata.deletion_timestamp}
        assert {key for key in deleted if second.finalizers.get(key) != ()} == set(), (
            "a deleted object loses its finalizer after one plan"
        )


def kcc(
    name: str,
    gvr: GroupVersionResource = GVR,
    *,
    at: str = "2026-01-01T00:00:00Z",
    priorities: tuple[int, ...] = (0,),
    deleted: bool = False,
) -> Kcc:
    lists = [{"priority": priority, "keyList": ["zone"]} for priority in priorities]
    metadata = KubeMetadata(
        name=name,
        namespace="kat",
        creation_timestamp=at,
        deletion_timestamp=at if deleted else None,
        finalizers=(ownership.FINALIZER,),
    )
    spec = msgspec.convert({"targetType": gvr, "nodeLabelSelectorAllowedKeyList": lists}, KccSpec, from_attributes=True)
    return Kcc(metadata=metadata, spec=spec)


@pytest.mark.parametrize(
    ("kccs", "targets", "expected"),
    [
        ([kcc("a")], {}, [("Normal", "")]),
        ([kcc("a", priorities=(0, 1, 0))], {}, [("PrioritySelectorKeyInvalid", "duplicated priority: [0]")]),
        (
            [kcc("a", msgspec.structs.replace(GVR, group="apps"))],
            {},
            [("TargetTypeNotAllowed", "group 'apps' is not allowed, only config.katalyst.kubewharf.io")],
        ),
        (
            [kcc("a")],
            {"missing": True},
            [("TargetTypeNotExist", f"the API server has no {GVR.name}; install its CustomResourceDefinition")],
        ),
        (
            [kcc("a"), kcc("b")],
            {},
            [("Normal", ""), ("TargetTypeOverlap", f"{GVR.name} belongs to kat/a; delete one of the two")],
        ),
        (
            [kcc("a", at="2026-01-02T00:00:00Z"), kcc("b")],
            {},
            [("TargetTypeOverlap", f"{GVR.name} belongs to kat/b; delete one of the two"), ("Normal", "")],
        ),
        (
            [kcc("a", msgspec.structs.replace(GVR, resource="pods/exec"))],
            {},
            [
                (
                    "TargetTypeNotExist",
                    "spec.targetType.resource: 'pods/exec' is invalid; write it in lower case, as `kubectl api-resources` does",
                )
            ],
        ),
        ([kcc("a"), kcc("b", OTHER)], {}, [("Normal", ""), ("Normal", "")]),
        (
            [kcc("a", deleted=True)],
            {"count": 2},
            [("Terminating", f"2 objects of {GVR.name} are left; delete them first")],
        ),
    ],
)
def test_ownership_of_a_kind(kccs: list[Kcc], targets: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    resolved = ownership.resolve_owners(
        {f"kat/{each.metadata.name}": each for each in kccs}, lambda _: ownership.TargetSummary(**targets)
    )
    assert [resolved.reasons[f"kat/{each.metadata.name}"] for each in kccs] == expected


@pytest.mark.parametrize(
    ("deleted", "before", "left", "expected"),
    [
        (False, (), 0, (ownership.FINALIZER,)),
        (False, (ownership.FINALIZER,), 0, None),
        (True, (ownership.FINALIZER, "x"), 1, None),
        (True, (ownership.FINALIZER, "x"), 0, ("x",)),
        (True, ("x",), 1, None),
    ],
)
def test_a_kcc_stays_while_objects_of_its_kind_are_left(
    deleted: bool, before: tuple[str, ...], left: int, expected: tuple[str, ...] | None
) -> None:
    stored = kcc("a", deleted=deleted)
    stored = msgspec.structs.replace(stored, metadata=msgspec.structs.replace(stored.metadata, finalizers=before))
    assert ownership.planned_finalizers(stored, left) == expected


def test_the_status_of_a_kcc_is_written_once() -> None:
    stored = kcc("a")
    written = ownership.changed_status(stored, ("Normal", ""), {"kat/b", "kat/a"}, NOW)
    assert written["invalidTargetConfigList"] == ["kat/a", "kat/b"]
    assert [(each["status"], each["reason"]) for each in written["conditions"]] == [("True", "Normal")]
    again = msgspec.structs.replace(stored, status=msgspec.convert(written, KccStatus))
    assert ownership.changed_status(again, ("Normal", ""), {"kat/b", "kat/a"}, NOW + 60) == {}
    assert ownership.changed_status(again, ("Normal", ""), (), NOW + 60) == {"invalidTargetConfigList": []}
