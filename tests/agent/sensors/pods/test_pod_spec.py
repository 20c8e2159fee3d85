"""One pod as it was written down: levels, enhancements, resources, sidecars, priority, and what cannot hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sensors.pods.pod_spec import PodParsingContext
from agent.sensors.pods.static_pods import PodsError, parse_pods
from api.pod import NET_BANDWIDTH, Container, Pod
from api.qos import MAIN_CONTAINER_KEY, MEMORY_KEY, QOS_LEVEL_KEY, AnnotationMapping, QoSLevel

WEB = "pods[0].containers[0]"
MILLICPU, MEMORY = (f"resource.katalyst.kubewharf.io/reclaimed_{kind}" for kind in ("millicpu", "memory"))


def parsed(context: PodParsingContext | None = None, **fields: object) -> Pod:
    pod = {"name": "web", "containers": [{"cgroup": "/web"}], **fields}
    (result,) = parse_pods(json.dumps({"pods": [pod]}), "f", context or PodParsingContext())
    return result


def asking(requests: dict[str, object] | None = None, limits: dict[str, object] | None = None) -> Container:
    resources = {"requests": requests or {}, "limits": limits or {}}
    return parsed(containers=[{"cgroup": "/web", "resources": resources}]).containers[0]


def refusal(**fields: object) -> str:
    with pytest.raises(PodsError) as caught:
        parsed(**fields)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_pod_has_everything_that_was_written_down() -> None:
    pod = parsed(
        labels={"app": "web"},
        priority=7,
        annotations={
            QOS_LEVEL_KEY: "dedicated_cores",
            MEMORY_KEY: '{"numa_binding": "true", "numa_exclusive": "true"}',
            "katalyst.kubewharf.io/numa_bind_result": "1",
        },
    )
    assert (pod.qos, pod.labels, pod.priority, pod.bound_numa) == (QoSLevel.DEDICATED, {"app": "web"}, 7, (1,))
    assert (pod.enhancements.numa_exclusive, pod.enhancements.oom_priority, pod.problems) == (True, 100, ())


def test_an_invalid_annotation_is_reported_and_the_pod_stays() -> None:
    pod = parsed(annotations={MEMORY_KEY: '{"oom_priority": 5}', "katalyst.kubewharf.io/numa_bind_result": "x"})
    assert pod.enhancements.oom_priority == 0
    assert [problem.partition(": ")[0] for problem in pod.problems] == [
        f"annotation {MEMORY_KEY}",
        "annotation katalyst.kubewharf.io/numa_bind_result",
    ]


def test_the_door_knows_the_dialect_of_the_cluster_and_the_nodes_of_the_machine() -> None:
    context = PodParsingContext(
        dialect=AnnotationMapping(selectors={QoSLevel.RECLAIMED: {"tier": "offline"}}, numa_ids_key="corp/nodes"),
        numa_nodes=(0,),
    )
    pod = parsed(context, annotations={"tier": "offline", "numa_binding": "true", "corp/nodes": "3"})
    assert (pod.qos, pod.enhancements.numa_ids) == (QoSLevel.RECLAIMED, (3,))
    assert pod.problems == ("annotation corp/nodes: this machine has no NUMA node 3; name others",)
    with pytest.raises(
        PodsError, match=r"f: pods\[0\]\.annotations: katalyst.*'shared_cores' contradicts tier, which.*; remove"
    ):
        parsed(context, annotations={"tier": "offline", QOS_LEVEL_KEY: "shared_cores"})


@pytest.mark.parametrize(
    ("requests", "limits", "cores", "memory"),
    [
        ({MILLICPU: "2k"}, {}, 2.0, None),
        ({MILLICPU: 500}, {}, 0.5, None),
        ({MILLICPU: "1500", MEMORY: "1Gi"}, {MILLICPU: "1500"}, 1.5, 1 << 30),
        ({}, {MILLICPU: "2k", MEMORY: "4096"}, 2.0, 4096),
        ({MILLICPU: 0}, {}, 0.0, None),
        ({"cpu": 3, "memory": "1Mi"}, {}, None, None),
    ],
)
def test_reclaimed_resources(
    requests: dict[str, object], limits: dict[str, object], cores: float | None, memory: int | None
) -> None:
    result = asking(requests, limits)
    assert (result.reclaimed_cpu_cores, result.reclaimed_memory_bytes) == (cores, memory)
    assert result.cpu_limit_cores is None


@pytest.mark.parametrize(
    ("limits", "cores", "memory"),
    [
        ({MILLICPU: "500", MEMORY: "128Mi"}, 0.5, 128 << 20),
        ({MILLICPU: "2k", "cpu": "500m", MEMORY: "1Gi", "memory": "128Mi"}, 0.5, 128 << 20),
        ({MILLICPU: "500", "cpu": "2", MEMORY: "128Mi", "memory": "1Gi"}, 0.5, 128 << 20),
        ({MILLICPU: "0", MEMORY: "0"}, None, None),
        ({}, None, None),
    ],
)
def test_limits_of_reclaimed_resources_are_limits_of_a_reclaimed_pod(
    limits: dict[str, object], cores: float | None, memory: int | None
) -> None:
    """The kubelet enforces no limit of an extended resource."""
    container = {"name": "c", "cgroup": "/c", "resources": {"limits": limits}}
    batch = parsed(containers=[container], annotations={QOS_LEVEL_KEY: "reclaimed_cores"}).containers[0]
    online = parsed(containers=[container]).containers[0]
    assert (batch.cpu_limit_cores, batch.memory_limit_bytes) == (cores, memory)
    assert online.cpu_limit_cores == (None if "cpu" not in limits else {"500m": 0.5, "2": 2.0}[str(limits["cpu"])])


def test_network_bandwidth_is_in_megabits() -> None:
    result = [asking({NET_BANDWIDTH: "1k"}, {}), asking({}, {NET_BANDWIDTH: 25}), asking({}, {})]
    assert [container.net_bandwidth_mbit for container in result] == [1000, 25, None]


@pytest.mark.parametrize(
    ("requests", "limits", "message"),
    [
        (
            {MILLICPU: "500m"},
            {},
            f".requests.{MILLICPU}: '500m' is not a whole number of thousandths of a CPU; write one",
        ),
        ({NET_BANDWIDTH: 0.5}, {}, f".requests.{NET_BANDWIDTH}: 0.5 is not a whole number of Mbit/s; write one"),
        ({MEMORY: 0.5}, {}, f".requests.{MEMORY}: 0.5 is not a whole number of bytes; write one"),
        ({MILLICPU: "1k"}, {MILLICPU: "2k"}, f".requests.{MILLICPU}: 1000 differs from the limit 2000; set both"),
        ({"cpu": True}, {}, ".requests.cpu: True is not a quantity; write a number such as"),
        ({"cpu": [1]}, {}, ".requests.cpu: [1] is not a quantity"),
        (
            {},
            {"nvidia.com/gpu": 1},
            ".limits: object contains unknown field `nvidia.com/gpu`; choose from cpu, memory, res",
        ),
        ({MEMORY: "999999999999999999Pi"}, {}, f".requests.{MEMORY}: 999999999999999999Pi is more than any machine"),
    ],
)  # fmt: skip
def test_resources_that_cannot_hold_are_refused(
    requests: dict[str, object], limits: dict[str, object], message: str
) -> None:
    with pytest.raises(PodsError) as caught:
        asking(requests, limits)
    assert str(caught.value).startswith(f"f: {WEB}.resources{message}")


def sidecars(*, init: bool = False, **fields: object) -> dict[str, bool]:
    containers = [{"name": name, "cgroup": f"/{name}"} for name in ("a", "b")]
    extra = [{"name": "log", "cgroup": "/log", "restartPolicy": "Always"}] if init else []
    pod = parsed(containers=containers, initContainers=extra, **fields)  # type: ignore[arg-type]
    return {container.name: container.sidecar for container in pod.containers}


def test_the_first_container_or_the_one_that_is_named_is_main_and_all_others_go_along() -> None:
    assert sidecars() == {"a": False, "b": True}
    assert sidecars(annotations={MAIN_CONTAINER_KEY: "b"}) == {"a": True, "b": False}
    assert sidecars(init=True) == {"a": False, "b": True, "log": True}


@pytest.mark.parametrize("name", ["c", "log"])
def test_an_unknown_main_container_is_reported(name: str) -> None:
    init = [{"name": "log", "cgroup": "/log", "restartPolicy": "Always"}]
    pod = parsed(
        containers=[{"name": "a", "cgroup": "/a"}], initContainers=init, annotations={MAIN_CONTAINER_KEY: name}
    )
    assert [container.sidecar for container in pod.containers] == [False, True]
    expected = (
        f"annotation {MAIN_CONTAINER_KEY}: there is no container '{name}'; name one of the pod's; until then it is a"
    )
    assert pod.problems == (expected,)


@pytest.mark.parametrize(
    ("fields", "priority", "problem"),
    [
        ({}, 0, ""),
        ({"priority": -5}, -5, ""),
        ({"priorityClassName": "system-node-critical"}, 2_000_001_000, ""),
        ({"priorityClassName": "gold", "priority": 9}, 9, ""),
        ({"priorityClassName": "gold"}, 0, "priorityClassName: 'gold' is known to the cluster only; set priority too"),
    ],
)  # fmt: skip
def test_priority(fields: dict[str, object], priority: int, problem: str) -> None:
    pod = parsed(**fields)  # type: ignore[arg-type]
    assert pod.priority == priority
    assert "".join(pod.problems).startswith(problem)
    assert bool(pod.problems) is bool(problem)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": {"a": 1}}, "pods[0].labels['a']: 1 is not text; write it in quotes"),
        ({"labels": []}, "pods[0].labels: expected `object`, got `array`"),
        ({"priority": "high"}, "pods[0].priority: expected `int | null`, got `str`"),
        ({"priority": 1 << 31}, "pods[0].priority: expected `int` <= 2147483647"),
        ({"initContainers": [{"name": "a", "cgroup": "/a"}]}, "pods[0].containers[0].name: is missing; name each container"),
        ({"containers": [{"name": "a", "cgroup": "/a", "restartPolicy": "Always"}]},
         f"{WEB}.restartPolicy: is for sidecars among the init containers, with the value Always; other init"),
        ({"containers": [{"name": "a", "cgroup": "/a"}], "initContainers": [{"name": "b", "cgroup": "/b"}]},
         "pods[0].initContainers[0].restartPolicy: is for sidecars among the init containers"),
        ({"containers": [{"name": "a", "cgroup": "/a"}],
          "initContainers": [{"name": "b", "cgroup": "/a", "restartPolicy": "Always"}]},
         "pods[0].initContainers[0].cgroup: /a is already the cgroup of pods[0].containers[0]"),
        ({"initContainer": []}, "pods[0]: object contains unknown field `initContainer`"),
        ({"annotations": {"koordinator.sh/x": 1}}, "pods[0].annotations['koordinator.sh/x']: 1 is not text"),
        ({"labels": {"koordinator.sh/qosClass": "best"}},
         "pods[0].labels: koordinator.sh/qosClass: 'best' is not a QoS class; use one of LSE, LSR, LS, BE, SYSTEM"),
    ],
)  # fmt: skip
def test_what_cannot_hold_is_refused_with_field_and_remedy(fields: dict[str, object], message: str) -> None:
    assert refusal(**fields).startswith(f"f: {message}")


def test_the_documented_file_is_one() -> None:
    document = (Path(__file__).parents[4] / "docs/operations.md").read_text()
    result = re.search(r"## pods\.yaml\n\n```yaml\n(.*?)```", document, re.DOTALL)
    assert result is not None
    web, batch = parse_pods(result[1], "docs")
    assert (web.problems, batch.problems) == ((), ())
    assert batch.containers[0].reclaimed_cpu_cores == 2.0


plain = st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    plain | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(("cpu", "memory", MILLICPU, "kubernetes.io/batch-cpu", "requests", "limits", "name", "cgroup",
                         "resources", "restartPolicy", QOS_LEVEL_KEY, MEMORY_KEY, MAIN_CONTAINER_KEY)),
        inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
fields = st.sampled_from(
    ("name", "namespace", "labels", "annotations", "priority", "priorityClassName", "containers", "initContainers")
)
resources = st.fixed_dictionaries({}, optional={"requests": values, "limits": values})
containers = st.lists(
    st.fixed_dictionaries({"cgroup": st.sampled_from(("/a", "/b"))}, optional={"resources": resources, "name": values}),
    max_size=2,
)


@given(
    st.fixed_dictionaries({"name": st.just("web"), "containers": containers | values}), st.dictionaries(fields, values)
)
def test_no_pod_raises_anything_but_the_named_error(pod: dict[str, Any], more: dict[str, Any]) -> None:
    try:
        reported = [repr(result) for result in parse_pods(json.dumps({"pods": [more | pod]}), "f")]
    except PodsError as error:
        reported = [str(error)]
    assert reported[0].startswith(("f: ", "Pod("))
