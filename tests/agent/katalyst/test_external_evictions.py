"""External plugins from their socket to a victim: tokens, names, thresholds, conditions and dry runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.advisor.engine import PolicyState
from agent.config.config import AgentConfig
from agent.eviction.eviction_records import EvictionRecords
from agent.eviction.runner import EvictionRunner
from agent.katalyst.external_evictions import ExternalEvictionPlugins, RecordLoader, no_records
from agent.katalyst.plugin_registration import PluginIdentity, PluginRegistration
from agent.katalyst.pod_message import encode_pod
from api.eviction import EvictionResult
from api.pod import Pod
from api.proto import eviction_plugin_pb2 as wire
from common.grpc_unix import GrpcService, serve_on_socket
from tests.agent.eviction.builders import S, pod, situation
from tests.agent.eviction.test_runner import FakePodEvictor
from tests.agent.katalyst.test_eviction_plugin_clients import SERVICE, handlers, hard
from tests.builders.api_server import FakeApiServer
from tests.builders.four_cpu_node import busy_cycle

BATCH, OTHER = pod("batch"), pod("other")
CRITICAL = pod("critical", priority=2_000_000_000)
SKIPPED = pod("spared", labels={"spare": "me"})
TERMINATING = pod("going", terminating=True)
PODS = (BATCH, OTHER, CRITICAL, SKIPPED, TERMINATING)
TOKEN = "Basic dXNlcjpwYXNzd29yZA=="


def naming(*pods: Pod) -> wire.GetEvictPodsResponse:
    """Return an answer that requires the eviction of these pods."""
    answers = wire.GetEvictPodsResponse()
    for each in pods:
        answers.evict_pods.add(pod=encode_pod(each), reason="too loud", force_evict=True)
    return answers


@asynccontextmanager
async def offered(
    directory: Path, name: str = "external", requests: list[Any] | None = None, **answers: Any
) -> AsyncIterator[None]:
    """A plugin that registers and answers on one socket."""
    usual = {
        "ThresholdMet": wire.ThresholdMetResponse(), "GetEvictPods": wire.GetEvictPodsResponse(),
        "GetTopEvictionPods": wire.GetTopEvictionPodsResponse(), **answers,
    }  # fmt: skip
    services = (
        PluginRegistration(PluginIdentity(kind="EvictionPlugin", name=name)).service(),
        GrpcService(SERVICE, handlers(usual, [] if requests is None else requests)),
    )
    server = await serve_on_socket(directory / f"{len(name)}.sock", services)
    try:
        yield
    finally:
        await server.stop()


class Manager:
    """The eviction manager of a node with these pods, and the plugins at the sockets."""

    def __init__(self, directory: Path, records: RecordLoader = no_records, **eviction: object) -> None:
        answers = {"eviction": {"pluginSockets": str(directory), "skippedLabels": ["spare"], "burst": 10, **eviction}}
        config = msgspec.convert(answers, AgentConfig)
        self.pod_evictor, self.at_s = FakePodEvictor(), 100
        self.evictor = EvictionRunner(config, self.pod_evictor)
        self.external_findings = ExternalEvictionPlugins(config.eviction, lambda: self.at_s * S, records=records)
        self.evictor.external_findings = self.external_findings.findings
        self.snapshot = situation(self.at_s, PODS).snapshot
        self.external_findings.publish(msgspec.structs.replace(busy_cycle(), snapshot=self.snapshot))

    async def run_cycle(self) -> EvictionResult:
        """Poll the sockets once, then run one cycle."""
        await self.external_findings.poll()
        return self.evaluate()

    def evaluate(self, after_s: int = 6) -> EvictionResult:
        self.at_s += after_s
        self.snapshot = situation(self.at_s, PODS).snapshot
        return self.evictor.run_cycle(self.snapshot, None, PolicyState(), self.at_s * S)

    @property
    def evicted(self) -> list[str]:
        return [key for key, _ in self.pod_evictor.evictions]


async def test_a_named_pod_is_evicted_unless_it_is_protected_or_terminating(tmp_path: Path) -> None:
    requests: list[Any] = []
    manager = Manager(tmp_path)
    answer = naming(BATCH, CRITICAL, SKIPPED, TERMINATING, pod("stranger"))
    async with offered(tmp_path, requests=requests, GetEvictPods=answer):
        result = await manager.run_cycle()
        assert [(each.pod, each.plugin) for each in result.victims] == [("default/batch", "external")]
        assert result.victims[0].reason.text == "too loud"
        await manager.run_cycle()
    assert manager.evicted == ["default/batch"], "once, although it is named again"
    shown = {item.metadata.name for item in requests[0].active_pods}
    assert shown == {"batch", "other"}, "protected and terminating pods are not sent"


async def test_a_threshold_has_to_last_for_the_plugins_grace_period(tmp_path: Path) -> None:
    """The answer of hard() has a grace period of 20 s and a condition of the node."""
    manager = Manager(tmp_path)
    top = wire.GetTopEvictionPodsResponse(target_pods=[encode_pod(OTHER)])
    async with offered(tmp_path, ThresholdMet=hard(), GetTopEvictionPods=top):
        evicted_at = []
        for _ in range(5):
            result = await manager.run_cycle()
            evicted_at.append((manager.at_s, manager.evicted))
    assert next(at_s for at_s, requests in evicted_at if requests) == 130, "106 s and 20, at the next round"
    assert manager.evicted == ["default/other"]
    assert [(item.condition.name, item.condition.effects) for item in result.conditions] == [
        ("MemoryPressure", ("NoSchedule",))
    ]


async def test_the_plugin_receives_the_disruption_budget_of_its_candidate(tmp_path: Path) -> None:
    """From the API server to the GetTopEvictionPods request on the socket."""
    budget = {
        "metadata": {"name": "b", "namespace": "default"},
        "spec": {"selector": {}},
        "status": {"disruptionsAllowed": 2, "currentHealthy": 9, "desiredHealthy": 7, "expectedPods": 10},
    }
    server = FakeApiServer({"/apis/policy/v1/namespaces/default/poddisruptionbudgets/b": budget})
    requests: list[Any] = []
    met = hard()
    met.candidate_pods.append(encode_pod(BATCH))
    async with server.client() as client, offered(tmp_path, requests=requests, ThresholdMet=met):
        records = EvictionRecords(client, lambda _uid: "default/Deployment/batch", lambda: False)
        await Manager(tmp_path, records.load).run_cycle()
    assert [pod.metadata.uid for pod in requests[-1].active_pods] == [BATCH.uid]
    (record,) = requests[-1].candidate_eviction_records
    assert (record.uid, record.has_pdb, record.disruptions_allowed, record.expected_pods) == (BATCH.uid, True, 2, 10)
    assert [bucket.count for bucket in record.buckets.list] == [0] * 13


async def test_a_condition_of_get_evict_pods_applies_without_pods(tmp_path: Path) -> None:
    answer = wire.GetEvictPodsResponse(
        condition=wire.Condition(condition_name="DiskSlow", effects=["NoExecute"], met_condition=True)
    )
    manager = Manager(tmp_path)
    async with offered(tmp_path, GetEvictPods=answer):
        result = await manager.run_cycle()
    conditions = [(each.condition.name, each.condition.kind, each.condition.effects) for each in result.conditions]
    assert (conditions, result.victims) == ([("DiskSlow", "node", ("NoExecute",))], ())


@pytest.mark.parametrize("dry", ["*", "external"])
async def test_dry_run_applies_to_external_plugins(tmp_path: Path, dry: str) -> None:
    manager = Manager(tmp_path, dryRun=[dry])
    async with offered(tmp_path, GetEvictPods=naming(BATCH)):
        result = await manager.run_cycle()
    assert [(each.pod, each.dry_run) for each in result.victims] == [("default/batch", True)]
    assert manager.evicted == []


@pytest.mark.parametrize(
    ("tokens_text", "token", "accepted"),
    [
        (None, None, True),
        (f"# ours\n{TOKEN}\n", TOKEN, True),
        (TOKEN, "Basic bm9ib2R5", False),
        (TOKEN, None, False),
        (TOKEN, "", False),
        ("", "", False),
        ("gone", TOKEN, False),
    ],
)
async def test_with_a_token_file_only_listed_plugins_are_accepted(
    tmp_path: Path, tokens_text: str | None, token: str | None, accepted: bool
) -> None:
    settings = {}
    if tokens_text is not None:
        settings["pluginTokensFile"] = str(tmp_path / "tokens")
        if tokens_text != "gone":
            (tmp_path / "tokens").write_text(tokens_text)
    answers = {} if token is None else {"GetToken": wire.GetTokenResponse(token=token)}
    manager = Manager(tmp_path / "socks", **settings)
    async with offered(tmp_path / "socks", GetEvictPods=naming(BATCH), **answers):
        result = await manager.run_cycle()
    assert (manager.evicted == ["default/batch"]) is accepted
    assert (manager.external_findings.problem() is None) is accepted
    if not accepted:
        (threshold,) = {each.reason.text for each in result.thresholds}
        assert threshold == f"its token is not in {tmp_path}/tokens; its findings evict no pod."


async def test_a_token_that_is_removed_from_the_file_is_rejected(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN)
    manager = Manager(tmp_path / "socks", pluginTokensFile=str(tokens))
    async with offered(tmp_path / "socks", GetToken=wire.GetTokenResponse(token=TOKEN)):
        await manager.run_cycle()
        assert manager.external_findings.problem() is None
        tokens.write_text("another\n")
        await manager.run_cycle()
        assert manager.external_findings.problem() is not None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rss-overuse-eviction-plugin", "rss-overuse-eviction-plugin: its name is that of a built-in plugin"),
        ("x" * 129, "its name is too long"),
        ("a|b", "has invalid characters"),
        ("a\nb", "has invalid characters"),
    ],
)
async def test_a_plugin_with_an_invalid_name_is_not_polled(tmp_path: Path, name: str, why: str) -> None:
    requests: list[Any] = []
    manager = Manager(tmp_path)
    async with offered(tmp_path, name, requests, GetEvictPods=naming(BATCH)):
        await manager.run_cycle()
    problem = manager.external_findings.problem()
    assert problem is not None
    assert why in problem.reason
    assert (manager.evicted, requests) == ([], [])


async def test_findings_of_a_removed_plugin_expire(tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    async with offered(tmp_path, GetEvictPods=naming(BATCH)):
        await manager.external_findings.poll()
    # The plugin is gone before the next cycle; its findings are valid for 15 s.
    result = manager.evaluate(after_s=16)
    assert [(each.plugin, each.reason.rule) for each in result.thresholds] == [("external", "input_missing")]
    await manager.external_findings.poll()
    assert manager.evaluate().thresholds == ()
    assert manager.evicted == []
