"""Plugins of others from their socket to a victim: who is heeded, and what those cannot do who hang, lie or die."""

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
from agent.katalyst.messages import encode_pod
from agent.katalyst.plugin_registration import PluginIdentity, PluginRegistration
from api.eviction import EvictionResult
from api.pod import Pod
from api.proto import eviction_plugin_pb2 as wire
from common.grpc_unix import GrpcService, serve_on_socket
from tests.agent.eviction.builders import S, pod, situation
from tests.agent.eviction.test_runner import Remembering
from tests.agent.katalyst.test_eviction_plugin_clients import SERVICE, handlers, hard
from tests.builders.four_cpu_node import busy_cycle

BATCH, OTHER = pod("batch"), pod("other")
CRITICAL = pod("critical", priority=2_000_000_000)
SPARED = pod("spared", labels={"spare": "me"})
GOING = pod("going", terminating=True)
PODS = (BATCH, OTHER, CRITICAL, SPARED, GOING)
TOKEN = "Basic dXNlcjpwYXNzd29yZA=="


def naming(*pods: Pod) -> wire.GetEvictPodsResponse:
    """These must leave."""
    said = wire.GetEvictPodsResponse()
    for each in pods:
        said.evict_pods.add(pod=encode_pod(each), reason="too loud", force_evict=True)
    return said


@asynccontextmanager
async def offered(
    directory: Path, name: str = "theirs", asked: list[Any] | None = None, **said: Any
) -> AsyncIterator[None]:
    """A plugin that registers and answers on one socket."""
    usual = {
        "ThresholdMet": wire.ThresholdMetResponse(), "GetEvictPods": wire.GetEvictPodsResponse(),
        "GetTopEvictionPods": wire.GetTopEvictionPodsResponse(), **said,
    }  # fmt: skip
    services = (
        PluginRegistration(PluginIdentity(kind="EvictionPlugin", name=name)).service(),
        GrpcService(SERVICE, handlers(usual, [] if asked is None else asked)),
    )
    server = await serve_on_socket(directory / f"{len(name)}.sock", services)
    try:
        yield
    finally:
        await server.stop()


class Manager:
    """The eviction manager of a node with these pods, and those who sit at the sockets."""

    def __init__(self, directory: Path, **eviction: object) -> None:
        said = {"eviction": {"pluginSockets": str(directory), "skippedLabels": ["spare"], "burst": 10, **eviction}}
        config = msgspec.convert(said, AgentConfig)
        self.killer, self.at_s = Remembering(), 100
        self.evictor = EvictionRunner(config, self.killer)
        self.external_findings = ExternalEvictionPlugins(config.eviction, lambda: self.at_s * S)
        self.evictor.external_findings = self.external_findings.findings
        self.snapshot = situation(self.at_s, PODS).snapshot
        self.external_findings.publish(msgspec.structs.replace(busy_cycle(), snapshot=self.snapshot))

    async def run_cycle(self) -> EvictionResult:
        """One look at the sockets, and one round after it."""
        await self.external_findings.look()
        return self.judged()

    def judged(self, after_s: int = 6) -> EvictionResult:
        self.at_s += after_s
        self.snapshot = situation(self.at_s, PODS).snapshot
        return self.evictor.run_cycle(self.snapshot, None, PolicyState(), self.at_s * S)

    @property
    def asked(self) -> list[str]:
        return [key for key, _ in self.killer.evictions]


async def test_whom_a_plugin_names_leaves_but_for_those_who_are_protected_or_not_here(tmp_path: Path) -> None:
    asked: list[Any] = []
    manager = Manager(tmp_path)
    named = naming(BATCH, CRITICAL, SPARED, GOING, pod("stranger"))
    async with offered(tmp_path, asked=asked, GetEvictPods=named):
        found = await manager.run_cycle()
        assert [(each.pod, each.plugin) for each in found.victims] == [("default/batch", "theirs")]
        assert found.victims[0].reason.text == "too loud"
        await manager.run_cycle()
    assert manager.asked == ["default/batch"], "once, although it is named again"
    shown = {one.metadata.name for one in asked[0].active_pods}
    assert shown == {"batch", "other"}, "who is protected or going is not shown"


async def test_a_threshold_has_to_last_as_long_as_the_plugin_says(tmp_path: Path) -> None:
    """hard() is tolerated for 20 s; it names a condition for the node."""
    manager = Manager(tmp_path)
    top = wire.GetTopEvictionPodsResponse(target_pods=[encode_pod(OTHER)])
    async with offered(tmp_path, ThresholdMet=hard(), GetTopEvictionPods=top):
        asked_at = []
        for _ in range(5):
            found = await manager.run_cycle()
            asked_at.append((manager.at_s, manager.asked))
    assert next(at_s for at_s, asked in asked_at if asked) == 130, "106 s and 20, at the next round"
    assert manager.asked == ["default/other"]
    assert [(one.condition.name, one.condition.effects) for one in found.conditions] == [
        ("MemoryPressure", ("NoSchedule",))
    ]


@pytest.mark.parametrize("dry", ["*", "theirs"])
async def test_a_dry_run_is_one_for_plugins_of_others_too(tmp_path: Path, dry: str) -> None:
    manager = Manager(tmp_path, dryRun=[dry])
    async with offered(tmp_path, GetEvictPods=naming(BATCH)):
        found = await manager.run_cycle()
    assert [(each.pod, each.dry_run) for each in found.victims] == [("default/batch", True)]
    assert manager.asked == []


@pytest.mark.parametrize(
    ("known", "said", "heeded"),
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
async def test_with_a_file_of_tokens_only_who_is_in_there_is_heeded(
    tmp_path: Path, known: str | None, said: str | None, heeded: bool
) -> None:
    settings = {}
    if known is not None:
        settings["pluginTokensFile"] = str(tmp_path / "tokens")
        if known != "gone":
            (tmp_path / "tokens").write_text(known)
    answers = {} if said is None else {"GetToken": wire.GetTokenResponse(token=said)}
    manager = Manager(tmp_path / "socks", **settings)
    async with offered(tmp_path / "socks", GetEvictPods=naming(BATCH), **answers):
        found = await manager.run_cycle()
    assert (manager.asked == ["default/batch"]) is heeded
    assert (manager.external_findings.problem() is None) is heeded
    if not heeded:
        (threshold,) = {each.reason.text for each in found.thresholds}
        assert threshold == f"its token is not in {tmp_path}/tokens; nobody is evicted for what it finds."


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
        ("rss-overuse-eviction-plugin", "rss-overuse-eviction-plugin: its name is that of a plugin of ours"),
        ("x" * 129, "its name is too long"),
        ("a|b", "has characters that no name has"),
        ("a\nb", "has characters that no name has"),
    ],
)
async def test_a_name_that_will_not_do_is_not_asked(tmp_path: Path, name: str, why: str) -> None:
    asked: list[Any] = []
    manager = Manager(tmp_path)
    async with offered(tmp_path, name, asked, GetEvictPods=naming(BATCH)):
        await manager.run_cycle()
    trouble = manager.external_findings.problem()
    assert trouble is not None
    assert why in trouble.reason
    assert (manager.asked, asked) == ([], [])


async def test_one_that_hangs_holds_up_no_round_and_no_other_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_evictions, "ANSWER_TIMEOUT_S", 1.0)
    manager = Manager(tmp_path)
    async with (
        offered(tmp_path, "hangs", ThresholdMet="hang", GetEvictPods=naming(OTHER)),
        offered(tmp_path, "works too", GetEvictPods=naming(BATCH)),
    ):
        looking = asyncio.create_task(manager.external_findings.look())
        deadline = time.monotonic() + 20
        while not manager.asked:
            assert time.monotonic() < deadline
            assert not looking.done(), "the other one is heard although the first hangs"
            await asyncio.sleep(0.01)
            manager.judged()
            manager.at_s -= 6
            manager.evictor = _again(manager)
        await looking
        found = manager.judged()
    assert set(manager.asked) == {"default/batch"}, "what one says that does not answer all counts for nothing"
    assert "did not answer within 1 s" in {each.plugin: each.reason.text for each in found.thresholds}["hangs"]


def _again(manager: Manager) -> EvictionRunner:
    """A manager without a past, so that it judges at once."""
    evictor = EvictionRunner(manager.evictor._agent_config, manager.killer)
    evictor.external_findings = manager.external_findings.findings
    return evictor


async def test_one_that_died_finds_nothing_any_more_and_what_it_found_becomes_old(tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    async with offered(tmp_path, GetEvictPods=naming(BATCH)):
        await manager.external_findings.look()
    # It is gone before a round came; its word counts for 15 s.
    found = manager.judged(after_s=16)
    assert [(each.plugin, each.reason.rule) for each in found.thresholds] == [("theirs", "input_missing")]
    await manager.external_findings.look()
    assert manager.judged().thresholds == ()
    assert manager.asked == []


async def test_one_that_fails_evicts_nobody(tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    async with offered(tmp_path, GetEvictPods=naming(BATCH), ThresholdMet=RuntimeError("a bug of theirs")):
        found = await manager.run_cycle()
    assert [each.reason.rule for each in found.thresholds] == ["plugin_failed"]
    status = manager.evictor.status(found, 0)
    assert (status.ok, manager.asked) == (False, [])
