"""Changes of the in-memory copy by lists and events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kube.objects import KubeMetadata, PartialObjectMetadata
from kube.watch import ObjectChange, ObjectStore, is_superseded_by


def object_named(name: str, version: str, node: str = "") -> PartialObjectMetadata:
    return PartialObjectMetadata(metadata=KubeMetadata(name=name, resource_version=version, labels={"node": node}))


def on_node(object_: PartialObjectMetadata) -> str:
    return object_.metadata.labels["node"]


def test_a_list_reports_what_was_created_changed_and_deleted_between_watches() -> None:
    store: ObjectStore[PartialObjectMetadata] = ObjectStore()
    a1, a2, b1, c1 = object_named("a", "1"), object_named("a", "2"), object_named("b", "1"), object_named("c", "3")
    assert store.replace({"a": a1, "b": b1}) == [ObjectChange("a", None, a1), ObjectChange("b", None, b1)]
    assert store.replace({"a": a1, "b": b1}) == []
    assert store.replace({"a": a2, "c": c1}) == [
        ObjectChange("b", b1, None),
        ObjectChange("a", a1, a2),
        ObjectChange("c", None, c1),
    ]


def test_an_object_that_can_no_longer_be_decoded_is_retained() -> None:
    store: ObjectStore[PartialObjectMetadata] = ObjectStore()
    store.replace({"a": object_named("a", "1")})
    assert store.replace({}, keep={"a"}) == []
    assert "a" in store


def test_the_same_version_is_no_change_and_an_unknown_deletion_none() -> None:
    store: ObjectStore[PartialObjectMetadata] = ObjectStore()
    assert store.put("a", object_named("a", "1")) is not None
    assert store.put("a", object_named("a", "1")) is None
    assert store.drop("b") is None


@pytest.mark.parametrize(
    ("current", "written", "expected"),
    [
        (("u1", "9"), ("u1", "10"), True),
        (("u1", "10"), ("u1", "10"), False),
        (("u1", "11"), ("u1", "10"), False),  # the watch has delivered a later write
        (None, ("u1", "10"), False),  # it was deleted meanwhile, and would never be removed
        (("u2", "9"), ("u1", "10"), False),  # and another has its name
        (("u1", "x"), ("u1", "10"), True),
    ],
)
def test_the_result_of_a_write_counts_unless_a_newer_version_is_known(
    current: tuple[str, str] | None, written: tuple[str, str], expected: bool
) -> None:
    objects = [
        None if it is None else PartialObjectMetadata(metadata=KubeMetadata(uid=it[0], resource_version=it[1]))
        for it in (current, written)
    ]
    assert objects[1] is not None
    assert is_superseded_by(objects[0], objects[1]) is expected


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["", "n1", "n2", None]))))
def test_the_index_equals_a_search_of_all_objects(steps: list[tuple[str, str | None]]) -> None:
    store = ObjectStore(on_node)
    for version, (key, node) in enumerate(steps):
        if node is None:
            store.drop(key)
        else:
            store.put(key, object_named(key, str(version), node))
    for node in ("n1", "n2", "n3"):
        names = sorted(object_.metadata.name for object_ in store.group(node))
        assert names == sorted(key for key, object_ in store.items() if on_node(object_) == node)
