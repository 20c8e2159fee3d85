"""Eviction plugins over real sockets: what they find is the manager's to judge, and what they get wrong is said."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.katalyst import external_evictions
from agent.katalyst.external_evictions import EvictionPluginClients, decode_threshold
from agent.katalyst.messages import encode_pod
from agent.katalyst.plugin_watcher import DiscoveredPlugin
from api.eviction import ThresholdMet
from api.pod import Container, Pod
from api.proto import core_v1_pb2 as core
from api.proto import eviction_plugin_pb2 as wire
from api.qos import QoSLevel
from common.grpc_unix import GrpcHandler, GrpcServer, GrpcService, HandlerRefusal, serve_on_socket

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


def handlers(said: Mapping[str, Any], asked: list[Any]) -> dict[str, GrpcHandler]:
    def answering(name: str) -> GrpcHandler:
        async def answer(request: Any, _words: Mapping[str, str]) -> Any:
            asked.append(request)
            if isinstance(said[name], Exception):
                raise said[name]
            if said[name] == "hang":
                await asyncio.sleep(60)
            return said[name]

        return answer

    return {name: answering(name) for name in said}


async def plugin(path: Path, asked: list[Any], **said: Any) -> tuple[GrpcServer, DiscoveredPlugin]:
    usual = {"ThresholdMet": wire.ThresholdMetResponse(), "GetEvictPods": wire.GetEvictPodsResponse(), **said}
    server = await serve_on_socket(path, (GrpcService(SERVICE, handlers(usual, asked)),))
    return server, DiscoveredPlugin(kind="EvictionPlugin", name=path.stem, socket=path, inode=1)


def hard() -> wire.ThresholdMetResponse:
    made = wire.ThresholdMetResponse(
        threshold_value=5,
        observed_value=10,
        threshold_operator=wire.GREATER_THAN,
        met_type=wire.HARD_MET,
        eviction_scope="memory",
    )
    made.grace_period_seconds = 20
    made.condition.CopyFrom(
        wire.Condition(condition_name="MemoryPressure", effects=["NoSchedule", "Nonsense"], met_condition=True)
    )
    return made


async def test_a_hard_threshold_asks_for_one_pod(tmp_path: Path) -> None:
    top = wire.GetTopEvictionPodsResponse(target_pods=[encode_pod(PODS[1]), core.Pod()])
    top.deletion_options.grace_period_seconds = 60
    asked: list[Any] = []
    server, its = await plugin(
        tmp_path / "p.sock",
        asked,
        ThresholdMet=hard(),
        GetTopEvictionPods=top,
        GetToken=wire.GetTokenResponse(token="t"),
    )
    remotes = EvictionPluginClients(lambda: 0)
    await remotes.run_cycle((its,), PODS)
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
    assert [(one.pod.name, one.grace_s) for one in finding.candidates] == [("two", 60.0)], (
        "one that is not here cannot leave"
    )
    assert (asked[-1].topN, asked[-1].eviction_scope, len(asked[-1].active_pods)) == (1, "memory", 2)
    assert remotes.token("p") == "t"
    await server.stop()


async def test_a_soft_one_asks_for_all_and_candidates_come_with_their_records(tmp_path: Path) -> None:
    said = wire.ThresholdMetResponse(met_type=wire.SOFT_MET, candidate_pods=[encode_pod(PODS[0])])
    asked: list[Any] = []
    server, its = await plugin(
        tmp_path / "p.sock", asked, ThresholdMet=said, GetTopEvictionPods=wire.GetTopEvictionPodsResponse()
    )
    record = wire.EvictionRecord(uid="u-one", has_pdb=True)
    remotes = EvictionPluginClients(lambda: 0)
    await remotes.run_cycle((its,), PODS, {"u-one": record, "u-two": wire.EvictionRecord(uid="u-two")})
    assert remotes.findings()[0].threshold.met is ThresholdMet.SOFT
    assert asked[-1].topN == 0
    assert [one.metadata.uid for one in asked[-1].active_pods] == ["u-one"]
    assert list(asked[-1].candidate_eviction_records) == [record]
    await server.stop()


async def test_pods_that_are_named_for_themselves(tmp_path: Path) -> None:
    """Those that must leave apart from those that may; a grace below nothing is the pod's own."""
    direct = wire.GetEvictPodsResponse()
    direct.evict_pods.add(
        pod=encode_pod(PODS[0]), reason="too old", force_evict=True
    ).deletion_options.grace_period_seconds = -1
    direct.evict_pods.add(pod=encode_pod(PODS[1]), reason="too big").deletion_options.grace_period_seconds = 0
    direct.evict_pods.add(pod=core.Pod(), reason="a pod of elsewhere", force_evict=True)
    server, its = await plugin(tmp_path / "p.sock", [], GetEvictPods=direct)
    remotes = EvictionPluginClients(lambda: 0)
    await remotes.run_cycle((its,), PODS)
    idle, forced, soft = remotes.findings()
    assert idle.threshold.met is ThresholdMet.NOT_MET
    assert [(one.pod.name, one.text, one.grace_s) for one in forced.candidates] == [("one", "too old", None)]
    assert [(one.pod.name, one.text, one.grace_s) for one in soft.candidates] == [("two", "too big", 0.0)]
    assert (forced.forced, forced.direct, soft.forced) == (True, True, False)
    await server.stop()


async def test_who_hangs_refuses_or_is_gone_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_evictions, "ANSWER_TIMEOUT_S", 0.3)
    now = [0]
    remotes = EvictionPluginClients(lambda: now[0])
    hangs, one = await plugin(tmp_path / "hangs.sock", [], ThresholdMet="hang")
    refuses, two = await plugin(tmp_path / "refuses.sock", [], GetEvictPods=HandlerRefusal("no pods today"))
    works, three = await plugin(tmp_path / "works.sock", [])
    gone = DiscoveredPlugin(kind="EvictionPlugin", name="gone", socket=tmp_path / "gone.sock", inode=1)
    async with asyncio.timeout(20):
        await remotes.run_cycle((one, two, three, gone), PODS)
    rules = {one.threshold.plugin: one.threshold.reason for one in remotes.findings()}
    assert {name: verdict.rule for name, verdict in rules.items()} == {
        "hangs": "plugin_failed", "refuses": "plugin_failed", "works": "threshold_not_met", "gone": "plugin_failed"
    }  # fmt: skip
    assert "did not answer within 0.3 s; nobody is evicted" in rules["hangs"].text
    assert "no pods today" in rules["refuses"].text
    now[0] = 16 * S
    assert {one.threshold.reason.rule for one in remotes.findings()} == {"input_missing"}
    for server in (hangs, refuses, works):
        await server.stop()


NONSENSE = [
    wire.ThresholdMetResponse(met_type=wire.HARD_MET, threshold_value=float("nan")),
    wire.ThresholdMetResponse(met_type=wire.HARD_MET, observed_value=float("inf")),
    wire.ThresholdMetResponse(met_type=wire.HARD_MET, grace_period_seconds=1 << 62),
    wire.ThresholdMetResponse.FromString(b"\x20\x63"),
]


@pytest.mark.parametrize("said", NONSENSE, ids=("nan", "inf", "a grace of ages", "a kind of its own"))
def test_a_threshold_that_makes_no_sense_is_not_met(said: wire.ThresholdMetResponse) -> None:
    threshold = decode_threshold("p", said)
    assert (threshold.met, threshold.reason.rule) == (ThresholdMet.NOT_MET, "plugin_failed")


def test_conditions_of_a_cnr_say_for_whom() -> None:
    said = wire.Condition(condition_type=wire.CNR_CONDITION, condition_name="x", met_condition=True)
    said.effects.append("reclaimed_cores/NoSchedule")
    found = external_evictions.decode_condition(said)
    assert found is not None
    assert (found.kind, found.effects) == ("cnr", ("reclaimed_cores/NoSchedule",))
    said.met_condition = False
    assert external_evictions.decode_condition(said) is None


def test_what_plugins_are_shown_of_a_pod() -> None:
    made = core.Pod.FromString(encode_pod(PODS[0]).SerializeToString())
    (container,) = made.spec.containers
    assert (made.metadata.uid, made.spec.priority, made.status.phase) == ("u-one", -3, "Running")
    assert {name: one.string for name, one in container.resources.requests.items()} == {
        "cpu": "1500m",
        "memory": "4096",
        "resource.katalyst.kubewharf.io/reclaimed_millicpu": "2000",
    }
    assert container.resources.limits["cpu"].string == "2"
