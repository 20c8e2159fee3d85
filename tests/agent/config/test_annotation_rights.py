"""What a pod may state about itself: annotations with effects beyond its request need a right of namespace or class."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from agent.advisor.headroom.reclaim_exclusion import apply_constraints, build_constraints
from agent.advisor.memory.memory_offloading import pod_offload_settings
from agent.config.annotation_rights import Right, pod_rights
from agent.config.memory import OffloadingConfig, OffloadingLayerConfig
from agent.config.qos import ALL_RIGHTS, RightsConfig
from agent.qrm.decisions.memory_controls import NEVER_KILLED, oom_score_adj
from agent.sensors.pods.pod_join import KubeletPodList, decode_pod_list, pod_from_kubelet
from agent.sensors.pods.pod_spec import PodParsingContext
from api.annotations import PROFILE_KEY
from api.pod import Pod
from api.qos import CPU_KEY, MEMORY_KEY, QOS_LEVEL_KEY, AnnotationMapping, QoSLevel
from tests.agent.advisor.memory.builders import situation
from tests.agent.qrm.cpuset.builders import machine
from tests.builders import snapshots

DEFAULT = RightsConfig()


def listed(
    annotations: dict[str, str],
    *,
    rights: RightsConfig = DEFAULT,
    namespace: str = "team-a",
    priority_class: str = "",
    cpu: str = "10m",
    labels: dict[str, str] | None = None,
    dialect: AnnotationMapping | None = None,
) -> Pod:
    """Return the pod as it comes from the kubelet's list."""
    metadata = {"name": "web", "namespace": namespace, "uid": "u1", "annotations": annotations, "labels": labels or {}}
    spec: dict[str, Any] = {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu} if cpu else {}}}]}
    if priority_class:
        spec |= {"priorityClassName": priority_class, "priority": 100}
    body = json.dumps({"items": [{"metadata": metadata, "spec": spec}]}).encode()
    (item,) = decode_pod_list(body, KubeletPodList()).items.values()
    context = PodParsingContext(rights=rights, dialect=dialect or AnnotationMapping())
    return pod_from_kubelet(item.pod, {"c": "/web"}, context)


def holders(right: Right, **names: list[str]) -> RightsConfig:
    return msgspec.convert({right.value: names}, RightsConfig)


NODE_PROFILE = {PROFILE_KEY: '{"disableReclaimLevel": "Node"}'}


def test_a_pod_of_10m_cannot_disable_reclaiming_on_the_node() -> None:
    """`disableReclaimLevel: Node` on a pod of 10m reduced the reclaimable CPU of a node of 64 CPUs from 39 cores to 3.2."""
    topology = machine(2, 2, 1, 16, 1)
    pod = listed(NODE_PROFILE)
    assert pod.profile.disable_reclaim_level == "Pod"
    snapshot = snapshots.snapshot(0, (pod,), machine=topology)
    assert apply_constraints(topology, build_constraints(snapshot, {}), ()).numa_nodes == (0, 1, 2, 3)
    (problem,) = pod.problems
    assert problem == (
        "annotation dioptase.io/service-profile: disableReclaimLevel: Node needs the right disableReclaimLevel; add "
        "namespace team-a to qos.rights.disableReclaimLevel; until then it is Pod"
    )
    allowed = listed(NODE_PROFILE, rights=holders(Right.DISABLE_RECLAIM_LEVEL, namespaces=["team-a"]))
    assert (allowed.profile.disable_reclaim_level, allowed.problems) == ("Node", ())
    snapshot = snapshots.snapshot(0, (allowed,), machine=topology)
    assert apply_constraints(topology, build_constraints(snapshot, {}), ()).numa_nodes == ()


@pytest.mark.parametrize("level", ["NUMA", "Socket"])
def test_levels_above_the_pod_need_the_right_too(level: str) -> None:
    """On a machine with one NUMA node, both are the whole node."""
    pod = listed({PROFILE_KEY: json.dumps({"disableReclaimLevel": level})})
    assert pod.profile.disable_reclaim_level == "Pod"


def test_an_annotation_does_not_switch_offloading_on_where_the_operator_left_it_off() -> None:
    text = '{"memoryOffloading": {"enable": true, "enableSwap": true, "policy": "senpai"}}'
    pod = listed({PROFILE_KEY: text})
    profiles = {pod.key: msgspec.convert(pod.profile.memory_offloading, OffloadingLayerConfig)}
    settings = pod_offload_settings(pod, situation((pod,), profiles=profiles), OffloadingConfig())
    assert (settings.enable, settings.enable_swap) == (False, False)
    assert "memoryOffloading: needs the right memoryOffloading; add namespace team-a" in pod.problems[0]
    allowed = listed({PROFILE_KEY: text}, rights=ALL_RIGHTS)
    assert allowed.profile.memory_offloading == {"enable": True, "enableSwap": True, "policy": "senpai"}
    off = listed({PROFILE_KEY: '{"memoryOffloading": {"enable": false}}'})
    assert (off.profile.memory_offloading, off.problems) == ({"enable": False}, ())


def test_an_annotation_does_not_make_a_pod_unkillable() -> None:
    pod = listed({MEMORY_KEY: '{"oom_priority": "300"}'})
    assert (pod.enhancements.oom_priority, oom_score_adj(pod.enhancements.oom_priority)) == (0, 0)
    (problem,) = pod.problems
    assert problem == (
        f"annotation {MEMORY_KEY}: oom_priority: needs the right oomPriority; add namespace team-a to "
        "qos.rights.oomPriority; until then it is ignored"
    )
    allowed = listed({MEMORY_KEY: '{"oom_priority": "300"}'}, rights=ALL_RIGHTS)
    assert oom_score_adj(allowed.enhancements.oom_priority) == NEVER_KILLED
    assert listed({MEMORY_KEY: '{"oom_priority": "-300"}'}).problems == ()


@pytest.mark.parametrize(
    ("annotations", "cpu", "level"),
    [
        ({QOS_LEVEL_KEY: "system_cores"}, "1", QoSLevel.SHARED),
        ({QOS_LEVEL_KEY: "dedicated_cores"}, "1m", QoSLevel.SHARED),
        ({QOS_LEVEL_KEY: "dedicated_cores"}, "2500m", QoSLevel.SHARED),
        # What a pod requests, it may have.
        ({QOS_LEVEL_KEY: "dedicated_cores"}, "3", QoSLevel.DEDICATED),
        # The allocation gives it no CPUs of its own.
        ({QOS_LEVEL_KEY: "dedicated_cores"}, "", QoSLevel.DEDICATED),
        ({QOS_LEVEL_KEY: "reclaimed_cores"}, "", QoSLevel.RECLAIMED),
    ],
)  # fmt: skip
def test_levels_beyond_the_request_need_a_right(annotations: dict[str, str], cpu: str, level: QoSLevel) -> None:
    pod = listed(annotations, cpu=cpu)
    assert pod.qos is level
    assert any("needs the right" in problem for problem in pod.problems) is (level is QoSLevel.SHARED)
    assert listed(annotations, cpu=cpu, namespace="kube-system").qos.value == annotations[QOS_LEVEL_KEY]


def test_koordinators_labels_need_the_same_rights() -> None:
    assert listed({}, labels={"koordinator.sh/qosClass": "SYSTEM"}).qos is QoSLevel.SHARED
    assert listed({}, labels={"koordinator.sh/qosClass": "LSR"}, cpu="500m").qos is QoSLevel.SHARED
    assert listed({}, labels={"koordinator.sh/qosClass": "LSR"}, cpu="2").qos is QoSLevel.DEDICATED


def test_pools_and_exclusive_nodes_need_a_right_wherever_they_are_written() -> None:
    wants = {"numa_binding": "true", "numa_exclusive": "true", "numa_share": "false"}
    for stated in (
        {MEMORY_KEY: json.dumps(wants), CPU_KEY: '{"cpuset_pool": "own"}'},
        {CPU_KEY: json.dumps({**wants, "cpuset_pool": "own"})},
        {**wants, "cpuset_pool": "own"},
    ):
        shared = listed(stated, cpu="1")
        dedicated = listed({QOS_LEVEL_KEY: "dedicated_cores", **stated}, cpu="1")
        assert (shared.enhancements.cpuset_pool, shared.enhancements.numa_share) == ("", True)
        assert (dedicated.enhancements.numa_exclusive, dedicated.enhancements.numa_binding) == (False, True)
        named = {Right(problem.split("needs the right ")[1].split(";")[0]) for problem in dedicated.problems
                 if "needs the right" in problem}  # fmt: skip
        assert named == {Right.NUMA_EXCLUSIVE, Right.CPUSET_POOL}
    harmless = {**wants, "numa_exclusive": "false", "numa_share": "true", "cpuset_pool": "share"}
    assert not any("right" in problem for problem in listed(harmless, cpu="1").problems)


def test_namespace_and_priority_class_of_the_kubelets_list_decide() -> None:
    rights = holders(Right.OOM_PRIORITY, namespaces=["team-b"], priorityClasses=["payments"])
    text = {MEMORY_KEY: '{"oom_priority": "50"}'}
    assert listed(text, rights=rights).enhancements.oom_priority == 0
    assert listed(text, rights=rights, namespace="team-b").enhancements.oom_priority == 50
    assert listed(text, rights=rights, namespace="kube-system").enhancements.oom_priority == 0, (
        "the list replaces the default"
    )
    by_class = listed(text, rights=rights, priority_class="payments")
    assert (by_class.enhancements.oom_priority, by_class.priority_class) == (50, "payments")
    other = listed(text, rights=rights, priority_class="batch")
    assert "add namespace team-a or priority class batch to qos.rights.oomPriority" in other.problems[0]
    # A pod cannot name them in an annotation.
    claimed = {**text, "namespace": "team-b", "priorityClassName": "payments"}
    assert listed(claimed, rights=rights).enhancements.oom_priority == 0


def test_a_priority_class_of_every_cluster_gives_no_right() -> None:
    """Every user may name it unless a ResourceQuota forbids it."""
    assert pod_rights(DEFAULT, "team-a", "system-node-critical").held == frozenset()
    assert pod_rights(DEFAULT, "kube-system", "").held == frozenset(Right)
    any_class = holders(Right.CPUSET_POOL, namespaces=[], priorityClasses=["*"])
    assert Right.CPUSET_POOL in pod_rights(any_class, "team-a", "batch").held
    assert Right.CPUSET_POOL not in pod_rights(any_class, "team-a", "").held


def test_defaults_of_the_operator_need_no_right() -> None:
    dialect = AnnotationMapping(defaults={"oom_priority": "50"})
    assert listed({}, dialect=dialect).enhancements.oom_priority == 50
    stated = listed({MEMORY_KEY: '{"oom_priority": "99"}'}, dialect=dialect)
    assert stated.enhancements.oom_priority == 50, "the pod's own value is ignored"
