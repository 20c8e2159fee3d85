"""The kubelet's answer: what is read of it, and what comes of answers that no kubelet would give."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.sensors.pods import pod_join
from agent.sensors.pods.pod_join import InvalidPodList, KubeletPod, KubeletPodList, decode_pod_list, qos_class
from tests.agent.sensors.pods.kubelet_objects import container, listing, pod, status_of

NOTHING = KubeletPodList()


def decode_one(**changes: Any) -> KubeletPod:
    (item,) = decode_pod_list(listing(pod("web", **changes)), NOTHING).items.values()
    return item.pod


def test_unneeded_fields_of_a_pod_are_skipped() -> None:
    result = decode_one(
        initContainers=[container("setup"), container("mesh", restartPolicy="Always")],
        initContainerStatuses=[
            status_of("setup", "containerd://s", "terminated"),
            status_of("mesh", "containerd://m"),
        ],
        ephemeralContainers=[{"name": "debugger", "image": "x"}],
        ephemeralContainerStatuses=[status_of("debugger", "containerd://d")],
        priority=7,
    )
    assert (result.uid, result.metadata.namespace, result.spec.priority, result.from_api) == (
        "uid-web",
        "shop",
        7,
        True,
    )
    assert result.running() == {"main": "containerd://web-main", "mesh": "containerd://m", "debugger": "containerd://d"}


def test_an_empty_list_is_null() -> None:
    assert decode_pod_list(b'{"kind":"PodList","metadata":{},"items":null}', NOTHING) == NOTHING


def test_pods_whose_text_stayed_are_the_same_objects_in_whatever_order() -> None:
    first = decode_pod_list(listing(pod("a"), pod("b"), pod("c")), NOTHING)
    second = decode_pod_list(listing(pod("c"), pod("b", priority=9), pod("a")), first)
    same = {uid: second.items[uid].pod is first.items[uid].pod for uid in first.items}
    assert same == {"uid-a": True, "uid-b": False, "uid-c": True}
    assert second.items["uid-b"].pod.spec.priority == 9


def test_a_static_pod_is_known_by_the_hash_of_its_file_and_its_mirror_is_the_same() -> None:
    hash_ = "d7c2f1a05ab8c7e2e5e0c8f1a2b3c4d5"
    static = pod(
        "etcd-n1", hash_, annotations={"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": hash_}
    )
    mirror = pod("etcd-n1", "0a1b-mirror", annotations={"kubernetes.io/config.mirror": hash_})
    both = decode_pod_list(listing(mirror, static), NOTHING).items
    assert list(both) == [hash_]
    assert both[hash_].pod.metadata.uid == hash_
    assert not both[hash_].pod.from_api
    alone = decode_pod_list(listing(mirror), NOTHING).items
    assert list(alone) == [hash_]
    assert not alone[hash_].pod.from_api


def test_a_pod_that_names_another_as_its_mirror_does_not_take_its_place() -> None:
    result = decode_pod_list(
        listing(pod("evil", annotations={"kubernetes.io/config.mirror": "uid-web"}), pod("web")), NOTHING
    )
    assert {uid: item.pod.metadata.name for uid, item in result.items.items()} == {"uid-web": "web"}


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ([{}], "BestEffort"),
        ([{"requests": {"ephemeral-storage": "1Gi"}}], "BestEffort"),
        ([{"requests": {"cpu": "0"}, "limits": {"memory": "0"}}], "BestEffort"),
        ([{"requests": {"cpu": "1"}}], "Burstable"),
        ([{"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1000m", "memory": "1024Mi"}}], "Guaranteed"),
        ([{"limits": {"cpu": "1", "memory": "1Gi"}}], "Guaranteed"),
        ([{"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}], "Burstable"),
        ([{"limits": {"cpu": "1", "memory": "1Gi"}}, {}], "Burstable"),
        ([{"limits": {"cpu": "1"}}], "Burstable"),
    ],
)
def test_the_class_of_a_pod_whose_status_has_none(resources: list[dict[str, Any]], expected: str) -> None:
    containers = [{"name": f"c{index}", "resources": each} for index, each in enumerate(resources)]
    assert qos_class(decode_one(containers=containers, qosClass=None)) == expected


def test_the_class_counts_init_containers_and_not_ephemeral_ones_and_the_whole_pod_first() -> None:
    sure = {"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
    assert qos_class(decode_one(containers=[sure], qosClass="", initContainers=[{"name": "i"}])) == "Burstable"
    assert qos_class(decode_one(containers=[sure], qosClass="", ephemeralContainers=[{"name": "e"}])) == "Guaranteed"
    complete = {"limits": {"cpu": "2", "memory": "2Gi"}}
    assert qos_class(decode_one(containers=[{"name": "a"}], qosClass="", resources=complete)) == "Guaranteed"
    assert qos_class(decode_one(containers=[{"name": "a"}], qosClass="BestEffort", resources=complete)) == "BestEffort"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not a list of pods"),
        (b"<html>", "not a list of pods"),
        (b'{"items": {}}', r"Expected `array \| null`, got `object` - at `\$.items`"),
        (b'{"kind": "Status"}', "missing required field `items`"),
        (b'{"items": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}", "not a list of pods"),
        (b'{"items": [' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"]}", "not a list of pods"),
        (b'{"items": [' + b"{}," * 4096 + b"{}]}", r"Expected `array` of at most length 4096"),
    ],
)
def test_what_is_no_list_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidPodList, match=reason):
        decode_pod_list(body, NOTHING)


def test_a_list_beyond_all_bounds_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_join, "MAX_POD_LIST_BYTES", 1 << 20)
    with pytest.raises(InvalidPodList, match="more than 1 MiB"):
        decode_pod_list(b" " * ((1 << 20) + 1), NOTHING)


def test_a_list_that_goes_on_and_on_costs_no_more_than_one_that_is_full() -> None:
    """Ten million numbers were 750 MiB of objects, and four seconds, before they were counted."""
    body = b'{"items":[' + b"0," * 10_000_000 + b"0]}"
    decode_pod_list(b'{"items":[]}', NOTHING)  # what the first decode_one alone costs
    tracemalloc.start()
    try:
        with pytest.raises(InvalidPodList, match="of at most length 4096"):
            decode_pod_list(body, NOTHING)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_as_many_as_are_taken_are_all_taken() -> None:
    result = decode_pod_list(listing(*(pod(f"p{number}") for number in range(4096))), NOTHING)
    assert len(result.items) == 4096
    assert result.problems == ()


def test_a_pod_beyond_what_the_api_server_has_is_left_out_alone() -> None:
    result = decode_pod_list(listing(pod("a", labels={"x": "y" * (4 << 20)}), pod("b")), NOTHING)
    assert (list(result.items), result.problems) == (
        ["uid-b"],
        ("items[0] (shop/a): it has more than 4 MiB; make it smaller",),
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"priority": "high"}, "items[1].spec.priority: Expected `int | null`, got `str`"),
        ({"containers": []}, "items[1].spec.containers: is empty"),
        ({"labels": {"a": 1}}, "items[1].metadata.labels[...]: Expected `str`, got `int`"),
        ({"containerStatuses": "x"}, "items[1].status.containerStatuses: Expected `array | null`, got `str`"),
        (
            {"annotations": {"kubernetes.io/config.mirror": "../../system.slice"}},
            "items[1].metadata.uid: '../../system.slice' is not a uid",
        ),
    ],
)
def test_an_unreadable_pod_is_reported_by_its_field_and_the_others_stay(changes: dict[str, Any], problem: str) -> None:
    result = decode_pod_list(listing(pod("a"), pod("b", **changes), pod("c")), NOTHING)
    assert set(result.items) == {"uid-a", "uid-c"}
    assert result.problems == (problem,)


def test_three_of_many_problems_are_shown() -> None:
    result = decode_pod_list(listing(*(pod(f"p{n}", priority="x") for n in range(9))), NOTHING)
    assert len(result.problems) == 4
    assert result.problems[-1] == "and 6 more"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
PATHS = [
    ("metadata",), ("metadata", "uid"), ("metadata", "annotations"), ("metadata", "labels"), ("metadata", "deletionTimestamp"),
    ("spec",), ("spec", "containers"), ("spec", "containers", 0), ("spec", "containers", 0, "resources"),
    ("spec", "containers", 0, "resources", "requests"), ("spec", "priority"), ("spec", "initContainers"),
    ("status",), ("status", "phase"), ("status", "qosClass"), ("status", "containerStatuses"),
    ("status", "containerStatuses", 0, "state"), ("status", "containerStatuses", 0, "containerID"),
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_whatever_stands_in_a_field_the_other_pods_are_read(path: tuple[Any, ...], value: Any) -> None:
    strange = pod("strange")
    at: Any = strange
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    result = decode_pod_list(listing(pod("web"), strange), NOTHING)
    assert "uid-web" in result.items
    assert len(result.items) + len(result.problems) == 2
    for item in result.items.values():
        assert qos_class(item.pod) in ("Guaranteed", "Burstable", "BestEffort")
        item.pod.running()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_get_through_but_as_garbage(body: bytes) -> None:
    with suppress(InvalidPodList):
        decode_pod_list(body, NOTHING)


def test_a_thousand_pods_keep_little_memory() -> None:
    """Fifteen kB each, of which names, labels and annotations are kept."""
    long = [{"type": "Ready", "message": "x" * 12_000}]
    body = listing(*(pod(f"p{n}", conditions=long, labels={"app": "x" * 40}) for n in range(1000)))
    assert len(body) > 12_000_000
    tracemalloc.start()
    result = decode_pod_list(body, NOTHING)
    open_count, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(result.items) == 1000
    assert open_count < 8 << 20
    assert most < 16 << 20, "decoding copies no list whole"
