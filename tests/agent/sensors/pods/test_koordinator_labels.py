"""Koordinator's words at the door: what each means here, and what has no counterpart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sensors.pods import koordinator_labels
from agent.sensors.pods.static_pods import PodsError, parse_pods
from api.pod import Pod
from api.qos import CPU_KEY, QOS_LEVEL_KEY, BurstPolicy, QoSLevel

CLASS = "koordinator.sh/qosClass"
BURST, MEMORY_QOS = "koordinator.sh/cpuBurst", "koordinator.sh/memoryQOS"
SPEC, STATUS, NUMA, EXTENDED = (
    "scheduling.koordinator.sh/resource-spec",
    "scheduling.koordinator.sh/resource-status",
    "scheduling.koordinator.sh/numa-topology-spec",
    "node.koordinator.sh/extended-resource-spec",
)
BATCH_CPU, BATCH_MEMORY, MID_CPU, MID_MEMORY = (
    f"kubernetes.io/{tier}-{kind}" for tier in ("batch", "mid") for kind in ("cpu", "memory")
)


def parsed(
    name: str = "",
    *,
    requests: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
    **fields: Any,
) -> Pod:
    """A pod of that QoS class."""
    pod = {
        "name": "a",
        "labels": ({CLASS: name} if name else {}) | (labels or {}),
        "containers": [{"cgroup": "/a", "resources": {"requests": requests or {}, "limits": limits or {}}}],
    }
    (result,) = parse_pods(json.dumps({"pods": [pod | fields]}), "f")
    return result


@pytest.mark.parametrize(
    ("name", "level", "priority", "binding"),
    [
        ("LSE", QoSLevel.DEDICATED, 9500, True),
        ("LSR", QoSLevel.DEDICATED, 9500, True),
        ("LS", QoSLevel.SHARED, 9500, False),
        ("BE", QoSLevel.RECLAIMED, 5500, False),
        ("SYSTEM", QoSLevel.SYSTEM, 9500, False),
        ("", QoSLevel.SHARED, 0, False),
    ],
)
def test_classes_are_levels(name: str, level: QoSLevel, priority: int, binding: bool) -> None:
    pod = parsed(name)
    assert (pod.qos, pod.priority, pod.enhancements.numa_binding) == (level, priority, binding)
    reclaimable = (
        f"label {CLASS}: idle CPU of an LSE pod is reclaimable here, which Koordinator never allows; use LSR",
    )
    assert pod.problems == (reclaimable if name == "LSE" else ())


@pytest.mark.parametrize(
    ("fields", "level", "priority"),
    [
        ({"priorityClassName": "koord-batch"}, QoSLevel.RECLAIMED, 5500),
        ({"priorityClassName": "koord-prod"}, QoSLevel.SHARED, 9500),
        ({"priorityClassName": "koord-mid"}, QoSLevel.RECLAIMED, 7500),
        ({"priorityClassName": "koord-mid", "requests": {MID_CPU: 1000}}, QoSLevel.SHARED, 7500),
        ({"priorityClassName": "koord-free"}, QoSLevel.RECLAIMED, 3500),
        ({"priorityClassName": "koord-free", "requests": {"cpu": 1}}, QoSLevel.SHARED, 3500),
        ({"labels": {"koordinator.sh/priority-class": "koord-batch"}}, QoSLevel.RECLAIMED, 5500),
        ({"labels": {"koordinator.sh/priority-class": "koord-batch"}, "priority": 5001}, QoSLevel.RECLAIMED, 5001),
        ({"labels": {"koordinator.sh/priority-class": "koord-prod"}, "priorityClassName": "koord-batch"},
         QoSLevel.SHARED, 9500),
        ({"requests": {BATCH_CPU: 1000}}, QoSLevel.RECLAIMED, 5500),
        ({"requests": {"koordinator.sh/batch-cpu": 1000}}, QoSLevel.RECLAIMED, 5500),
        ({"priority": 5500}, QoSLevel.SHARED, 5500),
        ({"priority": 5999, "annotations": {BURST: "{}"}}, QoSLevel.RECLAIMED, 5999),
        ({"priority": 6000, "annotations": {BURST: "{}"}}, QoSLevel.SHARED, 6000),
        ({"requests": {BATCH_CPU: "1k"},
          "annotations": {EXTENDED: json.dumps({"containers": {"a": {"requests": {BATCH_CPU: "1k"}}}})}},
         QoSLevel.RECLAIMED, 5500),
    ],
)  # fmt: skip
def test_without_a_class_priority_and_resources_tell(fields: dict[str, Any], level: QoSLevel, priority: int) -> None:
    pod = parsed(**fields)
    assert (pod.qos, pod.priority, pod.problems) == (level, priority, ())


def test_katalysts_own_annotations_count_more() -> None:
    own = {QOS_LEVEL_KEY: "shared_cores", CPU_KEY: '{"cpu_burst_policy": "static", "cpu_burst_percent": "20"}'}
    pod = parsed("LSR", annotations=own | {BURST: '{"policy": "none"}'})
    assert (pod.qos, pod.enhancements.burst_policy) == (QoSLevel.SHARED, BurstPolicy.STATIC)
    assert (pod.enhancements.burst_percent, pod.enhancements.numa_binding) == (20.0, False)
    (problem,) = pod.problems
    assert problem.startswith(
        f"label {CLASS}: LSR means dedicated_cores, Katalyst's annotation says shared_cores and cou"
    )
    agreed = parsed("LSR", annotations={QOS_LEVEL_KEY: "dedicated_cores"})
    assert (agreed.qos, agreed.enhancements.numa_binding, agreed.problems) == (QoSLevel.DEDICATED, True, ())
    unbound = parsed("LSR", annotations={"katalyst.kubewharf.io/memory_enhancement": '{"numa_binding": "false"}'})
    assert not unbound.enhancements.numa_binding


def test_a_class_that_is_none_is_an_error_unless_katalyst_says_the_level() -> None:
    reported = f"label {CLASS}: 'best' is not a QoS class; use one of LSE, LSR, LS, BE, SYSTEM"
    with pytest.raises(PodsError) as caught:
        parsed("best")
    assert str(caught.value) == f"f: pods[0].{reported.replace('label ', 'labels: ')} (pod 'a')"
    pod = parsed("best", annotations={QOS_LEVEL_KEY: "reclaimed_cores"})
    assert (pod.qos, pod.problems) == (QoSLevel.RECLAIMED, (reported,))


NUMBERS = ("reclaimed_cpu_cores", "reclaimed_memory_bytes", "cpu_request_cores", "cpu_limit_cores", "memory_request_bytes",
           "memory_limit_bytes")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "requests", "limits", "numbers"),
    [
        ("BE", {BATCH_CPU: 1500}, {}, (1.5, None, None, None, None, None)),
        ("BE", {BATCH_CPU: "2k", BATCH_MEMORY: "1Gi"}, {BATCH_CPU: "2k", BATCH_MEMORY: "1Gi"},
         (2.0, 1 << 30, None, 2.0, None, 1 << 30)),
        ("BE", {}, {BATCH_CPU: 500}, (0.5, None, None, 0.5, None, None)),
        ("BE", {"koordinator.sh/batch-cpu": 500, "koordinator.sh/batch-memory": 4096}, {},
         (0.5, 4096, None, None, None, None)),
        ("BE", {MID_CPU: 500, BATCH_CPU: 700}, {}, (0.7, None, None, None, None, None)),
        ("BE", {MID_CPU: 500}, {}, (0.5, None, None, None, None, None)),
        ("BE", {BATCH_CPU: 700, "resource.katalyst.kubewharf.io/reclaimed_millicpu": 300}, {},
         (0.3, None, None, None, None, None)),
        ("BE", {BATCH_CPU: 0}, {BATCH_CPU: 0}, (0.0, None, None, None, None, None)),
        ("LS", {MID_CPU: 500, MID_MEMORY: 4096}, {MID_CPU: 500}, (None, None, 0.5, 0.5, 4096, None)),
        ("LS", {MID_CPU: 500, "cpu": 3}, {}, (None, None, 3.0, None, None, None)),
    ],
)  # fmt: skip
def test_resources(name: str, requests: dict[str, Any], limits: dict[str, Any], numbers: tuple[Any, ...]) -> None:
    pod = parsed(name, requests=requests, limits=limits)
    assert tuple(getattr(pod.containers[0], field) for field in NUMBERS) == numbers
    assert pod.problems == ()


def test_the_annotation_that_repeats_resources_limits_a_container_and_requests_nothing() -> None:
    spec = {"containers": {"a": {"requests": {BATCH_CPU: "1k", BATCH_MEMORY: 4096}, "limits": {BATCH_CPU: 1000}}}}
    pod = parsed("BE", annotations={EXTENDED: json.dumps(spec)}, requests={BATCH_MEMORY: 8192})
    (container,) = pod.containers
    assert (container.reclaimed_cpu_cores, container.cpu_limit_cores) == (None, 1.0)
    assert container.reclaimed_memory_bytes == 8192
    (problem,) = pod.problems
    assert problem.startswith(
        f"container a: annotation {EXTENDED}: {BATCH_CPU}: the container does not request it, so no"
    )


@pytest.mark.parametrize("kind", ["requests", "limits"])
@pytest.mark.parametrize("level", [QoSLevel.SHARED, QoSLevel.DEDICATED])
def test_an_annotation_requests_no_cpus(level: QoSLevel, kind: str) -> None:
    """A dedicated pod without any request had 16 of 64 CPUs to itself, and a shared one ended all lending."""
    spec = {"containers": {"a": {kind: {MID_CPU: "16000", MID_MEMORY: "64Gi"}}}}
    pod = parsed(annotations={EXTENDED: json.dumps(spec), QOS_LEVEL_KEY: level.value})
    assert {getattr(pod.containers[0], field) for field in NUMBERS} == {None}
    assert [problem for problem in pod.problems if MID_CPU in problem]


@pytest.mark.parametrize(
    ("annotations", "field", "value"),
    [
        ({BURST: '{"policy": "none"}'}, "burst_policy", BurstPolicy.CLOSED),
        ({BURST: '{"policy": "cpuBurstOnly"}'}, "burst_policy", BurstPolicy.STATIC),
        ({BURST: '{"policy": "cpuBurstOnly"}'}, "burst_percent", 100.0),
        ({BURST: '{"policy": "cpuBurstOnly", "cpuBurstPercent": 30}'}, "burst_percent", 30.0),
        ({BURST: '{"policy": "auto", "cpuBurstPercent": 200}'}, "burst_percent", 100.0),
        ({BURST: '{"policy": "auto"}'}, "burst_policy", BurstPolicy.DYNAMIC),
        ({BURST: '{"policy": "cfsQuotaBurstOnly"}'}, "burst_policy", BurstPolicy.DYNAMIC),
        ({BURST: '{"policy": "cfsQuotaBurstOnly"}'}, "burst_percent", None),
        ({MEMORY_QOS: '{"policy": "none"}'}, "oom_priority", 0),
        ({SPEC: '{"preferredCPUBindPolicy": "FullPCPUs"}'}, "full_cores", True),
        ({SPEC: '{"requiredCPUBindPolicy": "FullPCPUs"}'}, "full_cores", True),
        ({SPEC: '{"preferredCPUExclusivePolicy": "PCPULevel"}'}, "full_cores", True),
        ({SPEC: '{"preferredCPUBindPolicy": "Default", "preferredCPUExclusivePolicy": "None"}'}, "full_cores", False),
        ({NUMA: '{"numaTopologyPolicy": "SingleNUMANode"}'}, "numa_number", 1),
        ({NUMA: '{"numaTopologyPolicy": "Restricted"}'}, "numa_binding", True),
        ({NUMA: '{"numaTopologyPolicy": ""}'}, "numa_binding", False),
        ({"scheduling.koordinator.sh/gang": "x"}, "numa_binding", False),
    ],
)
def test_annotations_are_enhancements(annotations: dict[str, str], field: str, value: object) -> None:
    pod = parsed("LS", annotations=annotations)
    assert getattr(pod.enhancements, field) == value
    assert pod.problems == ()


def test_the_numa_nodes_that_its_scheduler_chose() -> None:
    status = {"numaNodeResources": [{"node": 1, "resources": {"cpu": "4"}}, {"node": 0}]}
    assert parsed("LSR", annotations={STATUS: json.dumps(status)}).bound_numa == (0, 1)
    own = {"katalyst.kubewharf.io/numa_bind_result": "3"}
    assert parsed("LSR", annotations={STATUS: json.dumps(status), **own}).bound_numa == (3,)


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("BE", {"priorityClassName": "koord-prod"}, f"label {CLASS}: BE is not allowed with koord-prod; it is treated as BE"),
        ("BE", {"priority": 9001}, f"label {CLASS}: BE is not allowed with koord-prod"),
        ("LSR", {"priority": 7999}, f"label {CLASS}: LSR is not allowed with koord-mid"),
        ("LSR", {"priority": 3000}, f"label {CLASS}: LSR is not allowed with koord-free"),
        ("LSR", {"requests": {"cpu": "1500m"}}, f"label {CLASS}: LSR pods get whole CPUs and this one requests a fraction"),
        ("LS", {"requests": {BATCH_CPU: 5}}, f"container a: resource {BATCH_CPU}: is for QoS class BE only, this pod has shar"),
        ("LS", {"labels": {"koordinator.sh/priority-class": "gold"}}, "label koordinator.sh/priority-class: 'gold' is not a"),
        ("LS", {"labels": {"koordinator.sh/priority": "5"}}, "label koordinator.sh/priority: has no counterpart here and is i"),
        ("LS", {"annotations": {"koordinator.sh/networkQOS": "{}"}}, "annotation koordinator.sh/networkQOS: has no counterpa"),
        ("LS", {"annotations": {"koordinator.sh/oom-score-adj": "5"}}, "annotation koordinator.sh/oom-score-adj: has no count"),
        ("LS", {"annotations": {MEMORY_QOS: '{"policy": "auto"}'}}, f"annotation {MEMORY_QOS}: has no counterpart here"),
        ("LS", {"annotations": {MEMORY_QOS: '{"lowLimitPercent": 5}'}}, f"annotation {MEMORY_QOS}: has no counterpart here"),
        ("LS", {"annotations": {BURST: '{"policy": "fast"}'}}, f"annotation {BURST}: policy: 'fast' is invalid; use one"),
        ("LS", {"annotations": {BURST: '{"policy": ["none"]}'}}, f"annotation {BURST}: policy: ['none'] is invalid; use one"),
        ("LS", {"annotations": {BURST: '{"policy": "auto", "cfsQuotaBurstPercent": 300}'}},
         f"annotation {BURST}: cfsQuotaBurstPercent: is set for the whole node here, and ignored; remove it"),
        ("LS", {"annotations": {BURST: '{"policy": "auto", "cpuBurstPercent": -1}'}},
         f"annotation {BURST}: cpuBurstPercent: -1 is not a percentage; write 0 to 10000"),
        ("LS", {"annotations": {BURST: "auto"}}, f"annotation {BURST}: 'auto' is not a JSON object and is ignored; write it"),
        ("LS", {"annotations": {SPEC: "[]"}}, f"annotation {SPEC}: '[]' is not a JSON object and is ignored"),
        ("LS", {"annotations": {SPEC: '{"preferredCPUBindPolicy": "SpreadByPCPUs"}'}},
         f"annotation {SPEC}: preferredCPUBindPolicy: 'SpreadByPCPUs' has no counterpart here and is ignored; there are Def"),
        ("LS", {"annotations": {SPEC: '{"preferredCPUExclusivePolicy": "NUMANodeLevel"}'}},
         f"annotation {SPEC}: preferredCPUExclusivePolicy: 'NUMANodeLevel' has no counterpart"),
        ("LS", {"annotations": {NUMA: '{"numaTopologyPolicy": "BestEffort"}'}},
         f"annotation {NUMA}: numaTopologyPolicy: 'BestEffort' has no counterpart here and is ignored; there are Restricted"),
        ("LS", {"annotations": {STATUS: '{"cpuset": "0-3"}'}}, f"annotation {STATUS}: cpuset: has no counterpart here"),
        ("LS", {"annotations": {STATUS: '{"numaNodeResources": [{"node": -1}]}'}},
         f"annotation {STATUS}: numaNodeResources: names no NUMA node; write"),
        ("LS", {"annotations": {STATUS: '{"numaNodeResources": 1}'}}, f"annotation {STATUS}: numaNodeResources: names no NUMA"),
        ("BE", {"annotations": {EXTENDED: '{"containers": 5}'}}, f"annotation {EXTENDED}: cannot be read and is ignored: Exp"),
        ("BE", {"annotations": {EXTENDED: json.dumps({"containers": {"a": {"requests": {BATCH_CPU: "5m"}}}})}},
         f"annotation {EXTENDED}: cannot be read and is ignored: {BATCH_CPU} is not a whole number; use one"),
    ],
)  # fmt: skip
def test_keys_without_counterpart_are_reported(name: str, fields: dict[str, Any], problem: str) -> None:
    pod = parsed(name, **fields)
    assert pod.qos is koordinator_labels.LEVELS_BY_QOS_CLASS[name]
    assert len(pod.problems) == 1
    assert pod.problems[0].startswith(problem)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ("policy", "cpuset", "cpuBurstPercent", "numaNodeResources", "node", "containers", "requests")
            )
            | st.sampled_from(("requiredCPUBindPolicy", "numaTopologyPolicy", "a", BATCH_CPU)),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
keys = st.sampled_from(
    (BURST, MEMORY_QOS, SPEC, STATUS, NUMA, EXTENDED, *koordinator_labels.UNSUPPORTED_KEYS, QOS_LEVEL_KEY)
)


@given(
    st.dictionaries(keys, anything.map(json.dumps) | st.text(max_size=20), max_size=4), st.sampled_from(("", "BE", "x"))
)
def test_no_text_raises_anything_but_the_named_error(annotations: dict[str, str], name: str) -> None:
    try:
        problems = parsed(name, annotations=annotations).problems
    except PodsError as error:
        problems = (str(error),)
    assert all(len(problem) < 600 for problem in problems)
