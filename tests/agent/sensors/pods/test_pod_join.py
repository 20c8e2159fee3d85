"""Answers of kubelet and runtime joined: which pods exist, with which containers, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config.eviction import EvictionConfig
from agent.eviction.victims import is_protected
from agent.sensors.pods.pod_join import (
    KubeletPodList,
    NodePods,
    PodEntry,
    PodJoinContext,
    RunningContainer,
    RuntimeContainers,
    decode_pod_list,
    join_pods,
    pod_from_kubelet,
)
from agent.sensors.pods.pod_spec import PodParsingContext
from api.pod import Pod
from api.qos import QoSLevel
from tests.agent.sensors.pods.kubelet_objects import QOS, Cgroups, container, listing, pod, status_of

RECLAIMED = {QOS: "reclaimed_cores"}


@pytest.fixture
def cgroups(tmp_path: Path) -> Cgroups:
    return Cgroups(tmp_path)


def node_of(cgroups: Cgroups) -> PodJoinContext:
    return PodJoinContext(parsing=PodParsingContext(), exists=cgroups.exists)


def runs(*containers: tuple[str, str, str]) -> RuntimeContainers:
    """Containers as (uid of the pod, name, id)."""
    listed = [
        RunningContainer(pod_uid=uid, pod=f"shop/{uid.removeprefix('uid-')}", name=name, id=id_, created_at_ns=1)
        for uid, name, id_ in containers
    ]
    return RuntimeContainers(running={(item.pod_uid, item.name): item for item in listed})


def joined(
    cgroups: Cgroups,
    pods: list[dict[str, Any]],
    looked: RuntimeContainers | None = None,
    before: NodePods | None = None,
) -> NodePods:
    previous = before.entries if before is not None else {}
    return join_pods(decode_pod_list(listing(*pods), KubeletPodList()), looked, previous, node_of(cgroups))


def homes(result: NodePods) -> dict[str, dict[str, str]]:
    return {pod.key: {each.name: each.cgroup for each in pod.containers} for pod in result.pods()}


def test_a_pod_has_the_containers_that_run_and_what_they_ask_for(cgroups: Cgroups) -> None:
    main = cgroups.make("uid-web", "web-main")
    result = joined(cgroups, [pod("web", annotations=RECLAIMED, labels={"app": "web"}, priority=5)])
    (web,) = result.pods()
    assert (web.uid, web.key, web.qos, web.priority) == ("uid-web", "shop/web", QoSLevel.RECLAIMED, 5)
    assert (web.labels, web.problems) == ({"app": "web"}, ())
    (only,) = web.containers
    assert (only.name, only.cgroup, only.sidecar) == ("main", main, False)
    assert (only.cpu_request_cores, only.memory_request_bytes) == (0.5, 64 << 20)
    assert only.cpu_limit_cores is None, "Kubernetes takes a limit of 0 for none"
    assert web.grace_s is None
    patient = joined(cgroups, [pod("web", terminationGracePeriodSeconds=90)])
    assert [each.grace_s for each in patient.pods()] == [90.0]


@pytest.mark.parametrize(("given_s", "grace_s"), [(5, 5.0), (3600, 3600.0), (0, 0.0), (None, 90.0)])
def test_the_deletion_sets_the_grace_period(cgroups: Cgroups, given_s: int | None, grace_s: float) -> None:
    cgroups.make("uid-web", "web-main")
    reported = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": given_s}
    (web,) = joined(cgroups, [pod("web", terminationGracePeriodSeconds=90, **reported)]).pods()
    assert (web.terminating, web.grace_s) == (True, grace_s)


@pytest.mark.parametrize(
    ("answer", "address"),
    [
        ({"podIP": "10.88.0.7"}, "10.88.0.7"),
        ({"podIP": "fd00::7"}, "fd00::7"),
        ({"podIP": "192.0.2.1", "hostNetwork": True}, "127.0.0.1"),
        ({}, None),
        ({"podIP": "127.0.0.1"}, None),
        ({"podIP": "::ffff:127.0.0.1"}, None),
        ({"podIP": "169.254.169.254"}, None),
        ({"podIP": "0.0.0.0"}, None),
        ({"podIP": "x.example/"}, None),
    ],
)
def test_its_address_is_what_the_kubelet_says_and_no_loopback_that_is_not_its_own(
    cgroups: Cgroups, answer: dict[str, Any], address: str | None
) -> None:
    cgroups.make("uid-web", "web-main")
    (web,) = joined(cgroups, [pod("web", **answer)]).pods()
    assert web.address == address


def test_a_new_pod_is_there_before_its_containers(cgroups: Cgroups) -> None:
    fresh = pod("web", containerStatuses=None, phase="Pending")
    first = joined(cgroups, [fresh], runs())
    assert homes(first) == {"shop/web": {}}
    path = cgroups.make("uid-web", "4f53")
    second = joined(cgroups, [fresh], runs(("uid-web", "main", "4f53")), first)
    assert homes(second) == {"shop/web": {"main": path}}, "the runtime says it before the pod's status does"


def test_init_sidecar_and_ephemeral_containers_are_there_while_they_run(cgroups: Cgroups) -> None:
    complete = pod(
        "web",
        containers=[container("main"), container("helper")],
        initContainers=[container("setup"), container("mesh", restartPolicy="Always")],
        ephemeralContainers=[{"name": "debugger"}],
    )
    names = ("main", "helper", "setup", "mesh", "debugger")
    paths = {name: cgroups.make("uid-web", name) for name in names}
    started = joined(cgroups, [complete], runs(*(("uid-web", name, name) for name in ("setup", "mesh"))))
    assert homes(started) == {"shop/web": {"mesh": paths["mesh"], "setup": paths["setup"]}}
    assert [each.sidecar for each in started.pods()[0].containers] == [True, True], "the main one is yet to come"
    working = joined(cgroups, [complete], runs(*(("uid-web", name, name) for name in names if name != "setup")))
    (web,) = working.pods()
    assert [(each.name, each.sidecar) for each in web.containers] == [
        ("main", False), ("helper", True), ("mesh", True), ("debugger", True),
    ]  # fmt: skip
    assert web.containers[3].cpu_request_cores is None, "an ephemeral container asks for nothing"


def test_a_restarted_container_is_followed_to_its_new_cgroup(cgroups: Cgroups) -> None:
    cgroups.make("uid-web", "web-main")
    new = cgroups.make("uid-web", "second")
    first = joined(cgroups, [pod("web")], runs(("uid-web", "main", "web-main")))
    second = joined(cgroups, [pod("web")], runs(("uid-web", "main", "second")), first)
    assert homes(second) == {"shop/web": {"main": new}}


def test_the_runtimes_word_on_a_cgroup_comes_first(cgroups: Cgroups, tmp_path: Path) -> None:
    cgroups.make("uid-web", "web-main")
    (tmp_path / "elsewhere").mkdir()
    reported = RunningContainer(
        pod_uid="uid-web", pod="shop/web", name="main", id="web-main", created_at_ns=1, cgroup="/elsewhere"
    )
    assert homes(joined(cgroups, [pod("web")], RuntimeContainers(running={("uid-web", "main"): reported}))) == {
        "shop/web": {"main": "/elsewhere"}
    }


def test_a_pod_stays_the_same_object_while_nothing_of_it_changes(cgroups: Cgroups) -> None:
    for name in ("a", "b"):
        cgroups.make(f"uid-{name}", f"{name}-main")
    first = joined(cgroups, [pod("a"), pod("b")])
    second = joined(cgroups, [pod("b", priority=3), pod("a")], before=first)
    assert second.entries["uid-a"].pod is first.entries["uid-a"].pod
    assert second.entries["uid-b"].pod.priority == 3


def test_an_empty_pod_list_removes_no_running_pod(cgroups: Cgroups) -> None:
    web, removed = cgroups.make("uid-web", "web-main"), cgroups.make("uid-gone", "gone-main")
    both = runs(("uid-web", "main", "web-main"), ("uid-gone", "main", "gone-main"))
    first = joined(cgroups, [pod("web"), pod("gone")], both)
    cgroups.remove(removed)
    for looked in (runs(("uid-web", "main", "web-main")), None):
        after = joined(cgroups, [], looked, first)
        assert homes(after) == {"shop/web": {"main": web}}
        assert not after.unlisted_pods
    cgroups.remove(web)
    assert homes(joined(cgroups, [], None, first)) == {}


def test_without_a_runtime_what_was_known_goes_on_while_its_cgroup_is_there(cgroups: Cgroups) -> None:
    """The API server is away, so that statuses stay as they were before this container came; and the runtime is away too."""
    path = cgroups.make("uid-web", "newer")
    late = pod("web", containerStatuses=None)
    first = joined(cgroups, [late], runs(("uid-web", "main", "newer")))
    assert homes(joined(cgroups, [late], None, first)) == {"shop/web": {"main": path}}
    cgroups.remove(path)
    assert homes(joined(cgroups, [late], None, first)) == {"shop/web": {}}


@pytest.mark.parametrize(
    "changes", [{"phase": "Succeeded"}, {"phase": "Failed"}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}]
)
def test_a_pod_that_ends_stays_until_its_last_container_has(cgroups: Cgroups, changes: dict[str, Any]) -> None:
    path = cgroups.make("uid-web", "web-main")
    ending = pod("web", **changes)
    first = joined(cgroups, [ending], runs(("uid-web", "main", "web-main")))
    assert homes(first) == {"shop/web": {"main": path}}
    assert first.pods()[0].terminating is ("deletionTimestamp" in changes)
    assert homes(joined(cgroups, [ending], runs(), first)) == {}


def test_of_two_pods_with_one_name_the_one_that_stays_counts(cgroups: Cgroups) -> None:
    """After a deletion by force the next pod of a StatefulSet begins while the last one still ends."""
    old, new = cgroups.make("uid-old", "o"), cgroups.make("uid-new", "n")
    both = runs(("uid-old", "main", "o"), ("uid-new", "main", "n"))
    first = joined(cgroups, [pod("db-0", "uid-old")], both)
    assert homes(first) == {"shop/db-0": {"main": old}}
    for listed in (
        [pod("db-0", "uid-old", deletionTimestamp="2026-01-01T00:00:00Z"), pod("db-0", "uid-new")],
        [pod("db-0", "uid-new")],
    ):
        assert homes(joined(cgroups, listed, both, first)) == {"shop/db-0": {"main": new}}


def test_unlisted_running_pods_and_containers_without_cgroup_are_reported(cgroups: Cgroups) -> None:
    result = joined(cgroups, [pod("web")], runs(("uid-web", "main", "web-main"), ("uid-orphan", "main", "x")))
    assert result.unlisted_pods == {"uid-orphan": "shop/orphan"}
    assert result.containers_without_cgroup == {"shop/web/main"}
    assert homes(result) == {"shop/web": {}}


@pytest.mark.parametrize(
    ("annotations", "problem"),
    [
        ({QOS: "best_cores"}, "best_cores"),
        ({"katalyst.kubewharf.io/memory_enhancement": '{"numa_binding": 1}'}, "memory_enhancement"),
        ({"kubernetes.io/main-container-name": "nobody"}, "nobody"),
    ],
)
def test_hostile_annotations_cost_no_pod_its_place(cgroups: Cgroups, annotations: dict[str, str], problem: str) -> None:
    path = cgroups.make("uid-web", "web-main")
    result = joined(cgroups, [pod("web", annotations=annotations)])
    assert homes(result) == {"shop/web": {"main": path}}
    (web,) = result.pods()
    assert web.qos is QoSLevel.SHARED, "a pod with invalid annotations is protected"
    assert problem in " ".join(web.problems)


@pytest.mark.parametrize(
    ("changes", "safe"),
    [
        ({}, False),
        ({"annotations": {"kubernetes.io/config.source": "file"}}, True),
        ({"annotations": {"keep": "me"}}, True),
        ({"labels": {"keep": "me"}}, True),
    ],
)
def test_a_pod_with_invalid_annotations_keeps_its_labels(
    cgroups: Cgroups, changes: dict[str, dict[str, str]], safe: bool
) -> None:
    """A static pod, and those with a key that the settings name, are never evicted, whatever else they say."""
    cgroups.make("uid-web", "web-main")
    answer = {**changes, "annotations": {QOS: "best_cores", **changes.get("annotations", {})}}
    (web,) = joined(cgroups, [pod("web", **answer)]).pods()
    assert "best_cores" in " ".join(web.problems)
    assert is_protected(web, EvictionConfig(skipped_annotations=("keep",), skipped_labels=("keep",))) is safe


def test_an_invalid_quantity_is_reported_and_ignored(cgroups: Cgroups) -> None:
    cgroups.make("uid-web", "web-main")
    strange = container("main", resources={"requests": {"cpu": "many", "memory": "1Gi"}})
    (web,) = joined(cgroups, [pod("web", containers=[strange], qosClass="Burstable")]).pods()
    assert web.containers[0].memory_request_bytes is None
    (problem,) = web.problems
    assert problem.startswith("container main: resources.requests.cpu: 'many' is not a quantity; write a number")
    assert problem.endswith("; until then its requests are ignored")


@pytest.mark.parametrize(
    ("complete", "cores", "memory"),
    [
        # Of the pod-level request, the sidecar has its own request.
        ({"requests": {"cpu": "2", "memory": "1Gi"}}, {"main": 1.75, "log": 0.25}, {"main": 1 << 30, "log": 0}),
        # Kubernetes takes a limit alone for the request too.
        ({"limits": {"cpu": "1"}}, {"main": 0.75, "log": 0.25}, {"main": None, "log": None}),
        # The pod-level request is below the containers': none of theirs is cut.
        ({"requests": {"cpu": "100m"}}, {"main": 0.0, "log": 0.25}, {"main": None, "log": None}),
        ({"requests": {"cpu": "lots", "memory": "1Gi"}}, {"main": None, "log": 0.25}, {"main": None, "log": None}),
        (None, {"main": None, "log": 0.25}, {"main": None, "log": None}),
    ],
)
def test_pod_level_requests_are_split_among_the_containers(
    cgroups: Cgroups, complete: Any, cores: dict[str, float | None], memory: dict[str, int | None]
) -> None:
    spec = {
        "containers": [container("main", resources={}), container("log", resources={"requests": {"cpu": "250m"}})],
        # A transient container has no part in the pod-level request.
        "initContainers": [container("before", resources={"requests": {"cpu": "1"}})],
        "resources": complete,
    }
    for name in ("log", "before"):
        cgroups.make("uid-web", name)
    result = joined(cgroups, [pod("web", **spec)], runs(("uid-web", "log", "log"), ("uid-web", "before", "before")))
    (web,) = result.pods()
    assert [item.name for item in web.waiting] == ["main"]
    staying = {item.name: item for item in (*web.containers, *web.waiting) if item.name != "before"}
    assert {name: item.cpu_request_cores for name, item in staying.items()} == cores
    assert {name: item.memory_request_bytes for name, item in staying.items()} == memory
    assert {item.cpu_limit_cores for item in staying.values()} == {None}, "the limit is that of the pod's own cgroup"
    assert next(item.cpu_request_cores for item in web.containers if item.name == "before") == 1.0
    assert bool(web.problems) is (complete is not None and "lots" in str(complete))


def test_a_pod_with_an_invalid_name_is_reported_and_left_out(cgroups: Cgroups) -> None:
    result = joined(cgroups, [pod("a b", "uid-1"), pod("web")])
    assert list(homes(result)) == ["shop/web"]
    assert result.problems == (
        "shop/a b: metadata.name: 'a b' is not a name; use letters, digits, '-', '.' and '_', at most 253",
    )


def test_statuses_say_what_runs_where_no_runtime_does(cgroups: Cgroups) -> None:
    running, ended = cgroups.make("uid-web", "r"), cgroups.make("uid-web", "e")
    statuses = [status_of("main", "containerd://r"), status_of("helper", "containerd://e", "terminated")]
    two = pod("web", containers=[container("main"), container("helper")], containerStatuses=statuses)
    assert homes(joined(cgroups, [two])) == {"shop/web": {"main": running}}
    assert ended


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([QOS, "katalyst.kubewharf.io/cpu_enhancement", "koordinator.sh/qosClass", "x"])
        | st.text(max_size=20),
        st.text(max_size=40),
        max_size=5,
    )
)
def test_whatever_labels_and_annotations_say_it_is_a_pod(answer: dict[str, str]) -> None:
    answer.pop("kubernetes.io/config.mirror", None)
    (item,) = decode_pod_list(listing(pod("web", annotations=answer, labels=answer)), KubeletPodList()).items.values()
    result = pod_from_kubelet(item.pod, {"main": "/web"}, PodParsingContext())
    assert isinstance(result, Pod)
    assert [each.cgroup for each in result.containers] == ["/web"]
    assert PodEntry(b"", {}, item.pod, result).pod.uid == "uid-web"


NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.tuples(
        st.sets(NAMES),  # listed by the kubelet, which may have been restarted or be wrong
        st.sets(NAMES),  # running
        st.booleans(),  # whether the runtime answers
    ),
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_a_pod_that_was_listed_once_stays_while_it_runs(steps: list[tuple[set[str], set[str], bool]]) -> None:
    there: set[str] = set()
    node = PodJoinContext(parsing=PodParsingContext(), exists=lambda path: path == "/kubepods" or path in there)
    result, previous = NodePods(), set[str]()
    for listed, running, answers in steps:
        there = {f"/kubepods/burstable/poduid-{name}/{name}-main" for name in running}
        looked = runs(*((f"uid-{name}", "main", f"{name}-main") for name in sorted(running))) if answers else None
        pods = decode_pod_list(listing(*(pod(name) for name in sorted(listed))), KubeletPodList())
        result = join_pods(pods, looked, result.entries, node)
        previous = (previous & running) | listed
        assert {each.name for each in result.pods()} == previous
        assert {c.cgroup for each in result.pods() for c in each.containers} == {
            path for path in there if path.rpartition("/")[2].removesuffix("-main") in previous
        }
        assert set(result.unlisted_pods.values()) == (
            {f"shop/{name}" for name in running - previous} if answers else set()
        )


PENDING = {"type": "PodResizePending", "status": "True", "reason": "Infeasible"}
SMALL = {"requests": {"cpu": "10m", "memory": "1Mi"}}


@pytest.mark.parametrize(
    ("status", "container_status", "cores"),
    [
        ({"conditions": [PENDING]}, {"resources": SMALL}, 0.01),
        ({"conditions": [PENDING]}, {"allocatedResources": {"cpu": "10m"}, "resources": {}}, 0.01),
        ({"conditions": [PENDING]}, {"resources": {"requests": {"cpu": "?"}}}, 0.0),
        ({"conditions": [PENDING]}, {}, 0.0),
        ({"resize": "Infeasible"}, {"allocatedResources": {"cpu": "10m"}}, 0.01),
        ({"observedGeneration": 1}, {"resources": SMALL}, 0.01),
        # Without the kubelet's resizes there is nothing to compare with.
        ({"observedGeneration": 1}, {}, 1000.0),
        ({"observedGeneration": 2}, {"resources": SMALL}, 1000.0),
        ({"conditions": [PENDING | {"status": "False"}]}, {"resources": SMALL}, 1000.0),
        ({"resize": "InProgress"}, {"allocatedResources": {"cpu": "10m"}}, 1000.0),
    ],
)
def test_a_resize_that_the_kubelet_has_not_granted_requests_nothing(
    cgroups: Cgroups, status: dict[str, Any], container_status: dict[str, Any], cores: float
) -> None:
    """A pod of 10m with a resize in place to 1000 CPUs ended all lending and took the CPUs of dedicated pods."""
    cgroups.make("uid-web", "web-main")
    web = pod("web", containers=[container("main", resources={"requests": {"cpu": "1000"}})])
    web["metadata"]["generation"] = 2
    web["status"] |= status
    web["status"]["containerStatuses"][0] |= container_status
    (parsed,) = joined(cgroups, [web]).pods()
    assert parsed.containers[0].cpu_request_cores == cores
    assert any("has not granted 1000" in problem for problem in parsed.problems) is (cores < 1000)


def test_a_resize_that_asks_for_less_counts_at_once(cgroups: Cgroups) -> None:
    cgroups.make("uid-web", "web-main")
    web = pod("web", containers=[container("main", resources={"requests": {"cpu": "1"}})])
    web["status"]["conditions"] = [PENDING]
    web["status"]["containerStatuses"][0]["resources"] = {"requests": {"cpu": "4"}}
    (parsed,) = joined(cgroups, [web]).pods()
    assert (parsed.containers[0].cpu_request_cores, parsed.problems) == (1.0, ())
