"""Clients of eviction plugins over real sockets: findings, and the reports of invalid answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.eviction.eviction_inputs import EvictionBucket, PodEvictionRecord
from agent.katalyst import external_evictions
from agent.katalyst.external_evictions import EvictionPluginClients, decode_threshold
from agent.katalyst.plugin_watcher import DiscoveredPlugin
from agent.katalyst.pod_message import PodEncoder, encode_pod
from api.eviction import ThresholdMet
from api.pod import Container, Pod
from api.proto import core_v1_pb2 as core
from api.proto import eviction_plugin_pb2 as wire
from api.qos import QoSLevel
from common.grpc_unix import GrpcHandler, GrpcServer, GrpcService, HandlerRefusal, serve_on_socket
from tests.builders.waiting import until_async

SERVICE = wire.DESCRIPTOR.services_by_name["EvictionPlugin"]
S = 1_000_000_000


def pod(name: str, qos: QoSLevel = QoSLevel.RECLAIMED) -> Pod:
    container = Container(
        name="main",
        cgroup=f"/{name}",
        cpu_request_cores=1.5,
        cpu_limit_cores=2,
        reclaimed_cpu_cores=2.0,
        memory_request_bytes=4096,
    )
    return Pod(
        uid=f"u-{name}",
        namespace="ns",
        name=name,
        qos=qos,
        containers=(container,),
        priority=-3,
        annotations={"a": "b"},
    )


PODS = (pod("one"), pod("two"))


def handlers(answers: Mapping[str, Any], requests: list[Any]) -> dict[str, GrpcHandler]:
    def answering(name: str) -> GrpcHandler:
        async def answer(request: Any, _words: Mapping[str, str]) -> Any:
            requests.append(request)
            if isinstance(answers[name], Exception):
                raise answers[name]
            if answers[name] == "hang":
                await asyncio.sleep(60)
            return answers[name]

        return answer

    return {name: answering(name) for name in answers}


async def plugin(path: Path, requests: list[Any], **answers: Any) -> tuple[GrpcServer, DiscoveredPlugin]:
    usual = {"ThresholdMet": wire.ThresholdMetResponse(), "GetEvictPods": wire.GetEvictPodsResponse(), **answers}
    server = await serve_on_socket(path, (GrpcService(SERVICE, handlers(usual, requests)),))
    return server, DiscoveredPlugin(kind="EvictionPlugin", name=path.stem, socket=path, inode=1)


def hard() -> wire.ThresholdMetResponse:
    message = wire.ThresholdMetResponse(
        threshold_value=5,
        observed_value=10,
        threshold_operator=wire.GREATER_THAN,
        met_type=wire.HARD_MET,
        eviction_scope="memory",
    )
    message.grace_period_seconds = 20
    message.condition.CopyFrom(
        wire.Condition(condition_name="MemoryPressure", effects=["NoSchedule", "Nonsense"], met_condition=True)
    )
    return message


async def test_a_hard_threshold_requests_one_pod(tmp_path: Path) -> None:
    top = wire.GetTopEvictionPodsResponse(target_pods=[encode_pod(PODS[1]), core.Pod()])
    top.deletion_options.grace_period_seconds = 60
    requests: list[Any] = []
    server, discovered = await plugin(
        tmp_path / "p.sock",
        requests,
        ThresholdMet=hard(),
        GetTopEvictionPods=top,
        GetToken=wire.GetTokenResponse(token="t"),
    )
    remotes = EvictionPluginClients(lambda: 0)
    await remotes.run_cycle((discovered,), PODS)
    (finding,) = remotes.findings()
    threshold = finding.threshold
    assert (threshold.met, threshold.value, threshold.observed, threshold.scope) == (
        ThresholdMet.HARD,
        5.0,
        10.0,
        "memory",
    )
    assert (threshold.operator, threshold.tolerance_s) == (">", 20.0)
    assert threshold.condition is not None
    assert (threshold.condition.name, threshold.condition.kind, threshold.condition.effects) == (
        "MemoryPressure", "node", ("NoSchedule",)
    )  # fmt: skip
    assert [(item.pod.name, item.grace_s) for item in finding.candidates] == [("two", 60.0)], (
        "a pod that is not on the node cannot be evicted"
    )
    assert (requests[-1].topN, requests[-1].eviction_scope, len(requests[-1].active_pods)) == (1, "memory", 2)
    assert remotes.token("p") == "t"
    await server.stop()


async def test_a_soft_threshold_requests_all_candidates(tmp_path: Path) -> None:
    answers = wire.ThresholdMetResponse(met_type=wire.SOFT_MET, candidate_pods=[encode_pod(PODS[0])])
    requests: list[Any] = []
    server, discovered = await plugin(
        tmp_path / "p.sock", requests, ThresholdMet=answers, GetTopEvictionPods=wire.GetTopEvictionPodsResponse()
    )
    remotes = EvictionPluginClients(lambda: 0)
    await remotes.run_cycle((discovered,), PODS)
    assert remotes.findings()[0].threshold.met is ThresholdMet.SOFT
    assert requests[-1].topN == 0
    assert [item.metadata.uid for item in requests[-1].active_pods] == ["u-one"]
    await server.stop()


async def test_pods_named_without_a_threshold(tmp_path: Path) -> None:
    """Pods that must be evicted precede those that may be; a negative grace period is the pod's own."""
    direct = wire.GetEvictPodsResponse()
    direct.evict_pods.add(
        pod=encode_pod(PODS[0]), reason="too old", force_evict=True
    ).deletion_options.grace_period_seconds = -1
    direct.evict_pods.add(pod=encode_pod(PODS[1]), reason="too big").deletion_options.grace_period_seconds = 0
    direct.evict_pods.add(pod=core.Pod(), reason="a pod of elsewhere", force_evict=True)
    server, discovered = await plugin(tmp_path / "p.sock", [], GetEvictPods=direct)
    remotes = EvictionPluginClients(lambda: 0)
    await remotes.run_cycle((discovered,), PODS)
    idle, forced, soft = remotes.findings()
    assert idle.threshold.met is ThresholdMet.NOT_MET
    assert [(item.pod.name, item.text, item.grace_s) for item in forced.candidates] == [("one", "too old", None)]
    assert [(item.pod.name, item.text, item.grace_s) for item in soft.candidates] == [("two", "too big", 0.0)]
    assert (forced.forced, forced.direct, soft.forced) == (True, True, False)
    await server.stop()


async def test_a_plugin_that_hangs_refuses_fails_or_is_gone_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that does not answer all calls has no findings, even if it named pods."""
    monkeypatch.setattr(external_evictions, "ANSWER_TIMEOUT_S", 1.0)
    now, named = [0], wire.GetEvictPodsResponse()
    named.evict_pods.add(pod=encode_pod(PODS[0]), reason="too old", force_evict=True)
    clients = EvictionPluginClients(lambda: now[0])
    opened = [
        await plugin(tmp_path / "hangs.sock", [], GetEvictPods=named, ThresholdMet="hang"),
        await plugin(tmp_path / "refuses.sock", [], GetEvictPods=HandlerRefusal("no pods today")),
        await plugin(tmp_path / "fails.sock", [], GetEvictPods=named, ThresholdMet=RuntimeError("a bug")),
        await plugin(tmp_path / "works.sock", []),
    ]
    missing = DiscoveredPlugin(kind="EvictionPlugin", name="gone", socket=tmp_path / "gone.sock", inode=1)

    def rules() -> dict[str, str]:
        return {item.threshold.plugin: item.threshold.reason.rule for item in clients.findings()}

    async with asyncio.TaskGroup() as group:
        polling = group.create_task(clients.run_cycle((*(discovered for _, discovered in opened), missing), PODS))
        await until_async(lambda: rules().get("works") == "threshold_not_met")
        assert not polling.done(), "the findings of the others are available while one hangs"
    assert rules() == {
        "hangs": "plugin_failed", "refuses": "plugin_failed", "fails": "plugin_failed", "works": "threshold_not_met",
        "gone": "plugin_failed",
    }  # fmt: skip
    assert not any(item.candidates for item in clients.findings())
    texts = {item.threshold.plugin: item.threshold.reason.text for item in clients.findings()}
    assert "did not answer within 1 s; it evicts no pod" in texts["hangs"]
    assert "no pods today" in texts["refuses"]
    now[0] = 16 * S
    assert set(rules().values()) == {"input_missing"}
    for server, _ in opened:
        await server.stop()


NONSENSE = [
    wire.ThresholdMetResponse(met_type=wire.HARD_MET, threshold_value=float("nan")),
    wire.ThresholdMetResponse(met_type=wire.HARD_MET, observed_value=float("inf")),
    wire.ThresholdMetResponse(met_type=wire.HARD_MET, grace_period_seconds=1 << 62),
    wire.ThresholdMetResponse.FromString(b"\x20\x63"),
]


@pytest.mark.parametrize("answers", NONSENSE, ids=("nan", "inf", "grace period", "met_type"))
def test_an_invalid_threshold_is_not_met(answers: wire.ThresholdMetResponse) -> None:
    threshold = decode_threshold("p", answers)
    assert (threshold.met, threshold.reason.rule) == (ThresholdMet.NOT_MET, "plugin_failed")


def test_conditions_of_a_cnr_name_their_qos_level() -> None:
    answers = wire.Condition(condition_type=wire.CNR_CONDITION, condition_name="x", met_condition=True)
    answers.effects.append("reclaimed_cores/NoSchedule")
    condition = external_evictions.decode_condition(answers)
    assert condition is not None
    assert (condition.kind, condition.effects) == ("cnr", ("reclaimed_cores/NoSchedule",))
    answers.met_condition = False
    assert external_evictions.decode_condition(answers) is None


MANIFEST = {
    "metadata": {
        "name": "one", "namespace": "ns", "uid": "u-one", "creationTimestamp": "2026-11-23T10:00:00Z",
        "labels": {"app": "one"}, "annotations": {"a": "b"},
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "one-7d9f", "uid": "o1", "controller": True}
        ],
    },
    "spec": {
        "nodeName": "n1", "hostNetwork": True, "priority": -3, "terminationGracePeriodSeconds": 45, "serviceAccountName": "sa",
        "containers": [
            {"name": "main", "image": "i:1", "resources": {"requests": {"cpu": "1500m"}, "limits": {"memory": "1Gi"}}}
        ],
        "initContainers": [{"name": "proxy", "restartPolicy": "Always"}],
        "volumes": [{"name": "data", "emptyDir": {}}],
    },
    "status": {
        "phase": "Pending", "qosClass": "Burstable", "podIP": "10.0.0.7", "startTime": "2026-11-23T10:00:01Z",
        "conditions": [{"type": "Ready", "status": "False", "reason": "ContainersNotReady",
                        "lastTransitionTime": "2026-11-23T10:00:02Z"}],
        "containerStatuses": [{"name": "main", "ready": False, "restartCount": 3, "containerID": "containerd://abc",
                               "state": {"running": {"startedAt": "2026-11-23T10:00:03Z"}},
                               "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}],
        "initContainerStatuses": [{"name": "proxy", "ready": True, "state": {"running": {}}}],
    },
}  # fmt: skip
TEN_O_CLOCK_S = 1_795_428_000
"""2026-11-23T10:00:00Z."""


@pytest.fixture(scope="module")
def requested_pods(tmp_path_factory: pytest.TempPathFactory) -> dict[str, core.Pod]:
    """The first pod of each request that a plugin receives from a node with a kubelet, by method."""

    async def poll() -> list[Any]:
        requests: list[Any] = []
        path, text = tmp_path_factory.mktemp("sockets") / "p.sock", msgspec.json.encode(MANIFEST)
        server, discovered = await plugin(
            path, requests, ThresholdMet=hard(), GetTopEvictionPods=wire.GetTopEvictionPodsResponse()
        )
        clients = EvictionPluginClients(lambda: 0, lambda uid: text if uid == "u-one" else b"")
        await clients.run_cycle((discovered,), PODS)
        await server.stop()
        return requests

    return {
        type(request).__name__: request.active_pods[0]
        for request in asyncio.run(poll())
        if hasattr(request, "active_pods")
    }


@pytest.mark.parametrize("request_name", ["GetEvictPodsRequest", "GetThresholdMetRequest", "GetTopEvictionPodsRequest"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata.uid", "u-one"),
        ("metadata.labels[app]", "one"),
        ("metadata.annotations[a]", "b"),
        ("metadata.creationTimestamp.seconds", TEN_O_CLOCK_S),
        ("metadata.ownerReferences.0.kind", "ReplicaSet"),
        ("metadata.ownerReferences.0.name", "one-7d9f"),
        ("metadata.ownerReferences.0.controller", True),
        ("spec.nodeName", "n1"),
        ("spec.hostNetwork", True),
        ("spec.priority", -3),
        ("spec.terminationGracePeriodSeconds", 45),
        ("spec.containers.0.image", "i:1"),
        ("spec.containers.0.resources.requests[cpu].string", "1500m"),
        ("spec.containers.0.resources.limits[memory].string", "1Gi"),
        ("spec.initContainers.0.restartPolicy", "Always"),
        ("status.phase", "Pending"),
        ("status.qosClass", "Burstable"),
        ("status.podIP", "10.0.0.7"),
        ("status.startTime.seconds", TEN_O_CLOCK_S + 1),
        ("status.conditions.0.reason", "ContainersNotReady"),
        ("status.conditions.0.lastTransitionTime.seconds", TEN_O_CLOCK_S + 2),
        ("status.containerStatuses.0.restartCount", 3),
        ("status.containerStatuses.0.containerID", "containerd://abc"),
        ("status.containerStatuses.0.state.running.startedAt.seconds", TEN_O_CLOCK_S + 3),
        ("status.containerStatuses.0.lastState.terminated.exitCode", 137),
        ("status.initContainerStatuses.0.ready", True),
    ],
)
def test_plugins_receive_pods_as_the_kubelet_lists_them(
    requested_pods: dict[str, core.Pod], request_name: str, field: str, value: object
) -> None:
    message: Any = requested_pods[request_name]
    for part in field.split("."):
        name, _, key = part.partition("[")
        message = message[int(name)] if name.isdigit() else getattr(message, name)
        message = message[key.rstrip("]")] if key else message
    assert message == value


def test_an_empty_container_state_is_present() -> None:
    message = encode_pod(PODS[0], msgspec.json.encode(MANIFEST))
    assert message.status.initContainerStatuses[0].state.HasField("running")


@pytest.mark.parametrize(
    "manifest", [b"", b"[]", b"{", b'{"spec": {"priority": "high"}}', b'{"metadata": {"creationTimestamp": "today"}}']
)
def test_a_pod_without_a_valid_manifest_has_the_fields_of_its_own(manifest: bytes) -> None:
    message = core.Pod.FromString(encode_pod(PODS[0], manifest).SerializeToString())
    (container,) = message.spec.containers
    assert (message.metadata.uid, message.spec.priority, message.status.phase) == ("u-one", -3, "Running")
    assert {name: item.string for name, item in container.resources.requests.items()} == {
        "cpu": "1500m",
        "memory": "4096",
        "resource.katalyst.kubewharf.io/reclaimed_millicpu": "2000",
    }
    assert container.resources.limits["cpu"].string == "2"


def test_a_message_is_encoded_again_only_if_the_kubelets_text_changed() -> None:
    texts = [msgspec.json.encode(MANIFEST)]
    encoder = PodEncoder(lambda _uid: texts[-1])
    (first,) = encoder.encode(PODS[:1])
    assert encoder.encode(PODS[:1])[0] is first
    texts.append(texts[0].replace(b"Pending", b"Running"))
    assert encoder.encode(PODS[:1])[0].status.phase == "Running"


RECORD = PodEvictionRecord(
    has_budget=True, buckets=(EvictionBucket(time_s=36_000, duration_s=600, count=2),),
    disruptions_allowed=1, current_healthy=9, desired_healthy=8, expected_pods=10,
)  # fmt: skip


@pytest.mark.parametrize(
    ("candidates", "uids"), [(["one"], ["u-one"]), (["one", "two"], ["u-one"]), (["elsewhere"], []), ([], [])]
)
async def test_candidate_pods_of_a_threshold_come_with_their_eviction_records(
    tmp_path: Path, candidates: list[str], uids: list[str]
) -> None:
    """The budgets of pod `two` cannot be listed; a plugin that names no candidates receives no records."""
    loaded: list[list[str]] = []

    async def load(pods: Sequence[Pod]) -> Mapping[str, PodEvictionRecord]:
        loaded.append([each.uid for each in pods])
        return {each.uid: RECORD for each in pods if each.name != "two"}

    met = wire.ThresholdMetResponse(
        met_type=wire.HARD_MET, candidate_pods=[encode_pod(pod(name)) for name in candidates]
    )
    requests: list[Any] = []
    server, discovered = await plugin(
        tmp_path / "p.sock", requests, ThresholdMet=met, GetTopEvictionPods=wire.GetTopEvictionPodsResponse()
    )
    await EvictionPluginClients(lambda: 0, records=load).run_cycle((discovered,), PODS)
    await server.stop()
    records = requests[-1].candidate_eviction_records
    assert [record.uid for record in records] == uids
    assert loaded == [[f"u-{name}" for name in candidates]] * bool(set(candidates) & {"one", "two"})
    for record in records:
        assert record == wire.EvictionRecord(
            uid="u-one", has_pdb=True, disruptions_allowed=1, current_healthy=9, desired_healthy=8, expected_pods=10,
            buckets=wire.Buckets(list=[wire.Bucket(time=36_000, duration=600, count=2)]),
        )  # fmt: skip
