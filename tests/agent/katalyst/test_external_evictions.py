"""External plugins from their socket to a victim: tokens and names, and plugins that hang, fail or die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.advisor.engine import PolicyState
from agent.config.config import AgentConfig
from agent.eviction.runner import EvictionRunner
from agent.katalyst import external_evictions
from agent.katalyst.external_evictions import ExternalEvictionPlugins
from agent.katalyst.plugin_registration import PluginIdentity, PluginRegistration
from agent.katalyst.pod_message import encode_pod
from api.eviction import EvictionResult
from api.pod import Pod
from api.proto import eviction_plugin_pb2 as wire
from common.grpc_unix import GrpcService, serve_on_socket
from tests.agent.eviction.builders import S, pod, situation
from tests.agent.eviction.test_runner import FakePodEvictor
from tests.agent.katalyst.test_eviction_plugin_clients import SERVICE, handlers, hard
from tests.builders.four_cpu_node import busy_cycle

BATCH, OTHER = pod("batch"), pod("other")
CRITICAL = pod("critical", priority=2_000_000_000)
SPARED = pod("spared", labels={"spare": "me"})
GOING = pod("going", terminating=True)
PODS = (BATCH, OTHER, CRITICAL, SPARED, GOING)
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

    def __init__(self, directory: Path, **eviction: object) -> None:
        answers = {"eviction": {"pluginSockets": str(directory), "skippedLabels": ["spare"], "burst": 10, **eviction}}
        config = msgspec.convert(answers, AgentConfig)
        self.killer, self.at_s = FakePodEvictor(), 100
        self.evictor = EvictionRunner(config, self.killer)
        self.external_findings = ExternalEvictionPlugins(config.eviction, lambda: self.at_s * S)
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
        return [key for key, _ in self.killer.evictions]


async def test_a_named_pod_is_evicted_unless_it_is_protected_or_gone(tmp_path: Path) -> None:
    requests: list[Any] = []
    manager = Manager(tmp_path)
    answer = naming(BATCH, CRITICAL, SPARED, GOING, pod("stranger"))
    async with offered(tmp_path, requests=requests, GetEvictPods=answer):
        result = await manager.run_cycle()
        assert [(each.pod, each.plugin) for each in result.victims] == [("default/batch", "external")]
        assert result.victims[0].reason.text == "too loud"
        await manager.run_cycle()
    assert manager.evicted == ["default/batch"], "once, although it is named again"
    shown = {item.metadata.name for item in requests[0].active_pods}
    assert shown == {"batch", "other"}, "protected and terminating pods are not sent"


async def test_a_threshold_has_to_last_as_long_as_the_plugin_says(tmp_path: Path) -> None:
    """The answer of hard() has a grace period of 20 s and a condition of the node."""
    manager = Manager(tmp_path)
    top = wire.GetTopEvictionPodsResponse(target_pods=[encode_pod(OTHER)])
    async with offered(tmp_path, ThresholdMet=hard(), GetTopEvictionPods=top):
        asked_at = []
        for _ in range(5):
            result = await manager.run_cycle()
            asked_at.append((manager.at_s, manager.evicted))
    assert next(at_s for at_s, requests in asked_at if requests) == 130, "106 s and 20, at the next round"
    assert manager.evicted == ["default/other"]
    assert [(item.condition.name, item.condition.effects) for item in result.conditions] == [
        ("MemoryPressure", ("NoSchedule",))
    ]


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
async def test_a_dry_run_is_one_for_plugins_of_others_too(tmp_path: Path, dry: str) -> None:
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


async def test_a_token_that_is_taken_out_of_the_file_counts_no_more(tmp_path: Path) -> None:
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
    trouble = manager.external_findings.problem()
    assert trouble is not None
    assert why in trouble.reason
    assert (manager.evicted, requests) == ([], [])


async def test_one_that_hangs_holds_up_no_round_and_no_other_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_evictions, "ANSWER_TIMEOUT_S", 1.0)
    manager = Manager(tmp_path)
    async with (
        offered(tmp_path, "hangs", ThresholdMet="hang", GetEvictPods=naming(OTHER)),
        offered(tmp_path, "works too", GetEvictPods=naming(BATCH)),
    ):
        looking = asyncio.create_task(manager.external_findings.poll())
        deadline = time.monotonic() + 20
        while not manager.evicted:
            assert time.monotonic() < deadline
            assert not looking.done(), "the other one is heard although the first hangs"
            await asyncio.sleep(0.01)
            manager.evaluate()
            manager.at_s -= 6
            manager.evictor = _again(manager)
        await looking
        result = manager.evaluate()
    assert set(manager.evicted) == {"default/batch"}, "a plugin that does not answer all calls has no findings"
    assert "did not answer within 1 s" in {each.plugin: each.reason.text for each in result.thresholds}["hangs"]


def _again(manager: Manager) -> EvictionRunner:
    """A manager without a past, so that it judges at once."""
    evictor = EvictionRunner(manager.evictor._agent_config, manager.killer)
    evictor.external_findings = manager.external_findings.findings
    return evictor


async def test_one_that_died_finds_nothing_any_more_and_what_it_found_becomes_old(tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    async with offered(tmp_path, GetEvictPods=naming(BATCH)):
        await manager.external_findings.poll()
    # The plugin is gone before the next cycle; its findings are valid for 15 s.
    result = manager.evaluate(after_s=16)
    assert [(each.plugin, each.reason.rule) for each in result.thresholds] == [("external", "input_missing")]
    await manager.external_findings.poll()
    assert manager.evaluate().thresholds == ()
    assert manager.evicted == []


async def test_a_failing_plugin_evicts_no_pod(tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    async with offered(tmp_path, GetEvictPods=naming(BATCH), ThresholdMet=RuntimeError("a bug of external")):
        result = await manager.run_cycle()
    assert [each.reason.rule for each in result.thresholds] == ["plugin_failed"]
    status = manager.evictor.status(result, 0)
    assert (status.ok, manager.evicted) == (False, [])
