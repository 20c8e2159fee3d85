"""A node's CustomNodeConfig followed over a real socket: what is fetched, what is not, and what if nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from agent.config.config import AgentConfig
from agent.dynamic_config import follow
from agent.dynamic_config.follow import CustomNodeConfigFollower, DynamicConfig, has_other_content
from agent.dynamic_config.last_good import LastGoodFile
from common.backoff import Backoff
from kube.objects import KubeMetadata, UnstructuredObject
from tests.kube.test_client import asking, status_response

ADMIN = "adminqosconfigurations"
CNC = "/apis/config.katalyst.kubewharf.io/v1alpha1/customnodeconfigs"
OBJECT = f"/apis/config.katalyst.kubewharf.io/v1alpha1/namespaces/kube-system/{ADMIN}/all"


class Cluster:
    """Plays an API server with one CustomNodeConfig and one object."""

    def __init__(self) -> None:
        self.version = 1
        self.targets: list[dict[str, Any]] | None = []
        self.objects: dict[str, Any] = {}
        self.asked: list[str] = []
        self.changed = asyncio.Event()

    def tell(self, *hashes: str, resource: str = ADMIN) -> None:
        """What the CustomNodeConfig says from now on."""
        kind = {"group": "config.katalyst.kubewharf.io", "version": "v1alpha1", "resource": resource}
        self.put(
            [{"configType": kind, "configName": "all", "configNamespace": "kube-system", "hash": one} for one in hashes]
        )

    def put(self, targets: list[dict[str, Any]] | None) -> None:
        self.version, self.targets = self.version + 1, targets
        self.changed.set()

    def say(self, **fields: Any) -> None:
        """What the object says from now on."""
        self.objects[OBJECT] = {"spec": {"config": {"reclaimedResourceConfig": fields}}}

    def _cnc(self) -> dict[str, Any]:
        return {
            "apiVersion": "config.katalyst.kubewharf.io/v1alpha1",
            "kind": "CustomNodeConfig",
            "metadata": {"name": "n1", "resourceVersion": str(self.version)},
            "status": {"katalystCustomConfigList": self.targets},
        }

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != CNC:
            self.asked.append(request.path)
            found = self.objects.get(request.path)
            if found is None:
                return status_response(404, '{"kind":"Status","reason":"NotFound","code":404,"message":"not found"}')
            whole = {"metadata": {"name": "all", "namespace": "kube-system"}, **found}
            return status_response(200, msgspec.json.encode(whole).decode())
        assert request.query["fieldSelector"] == "metadata.name=n1", "of a thousand nodes' only its own is watched"
        if request.query.get("watch") != "true":
            items = [] if self.targets is None else [self._cnc()]
            return status_response(
                200, msgspec.json.encode({"metadata": {"resourceVersion": str(self.version)}, "items": items}).decode()
            )
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await self.changed.wait()
            self.changed.clear()
            line = {"type": "DELETED" if self.targets is None else "MODIFIED", "object": self._cnc()}
            await response.write(msgspec.json.encode(line) + b"\n")


@asynccontextmanager
async def following(
    cluster: Cluster, rules: DynamicConfig
) -> AsyncIterator[tuple[CustomNodeConfigFollower, list[AgentConfig]]]:
    configs: list[AgentConfig] = []
    async with asking(cluster.answer) as client:
        follower = CustomNodeConfigFollower(client, "n1", rules)
        task = asyncio.create_task(follower.run(configs.append))
        try:
            yield follower, configs
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def until(held: Any, what: str) -> None:
    for _ in range(500):
        if held():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


def rules(tmp_path: Path) -> DynamicConfig:
    return DynamicConfig({}, AgentConfig(), lambda _: "", LastGoodFile(tmp_path, "n1"))


async def test_an_object_is_fetched_when_its_hash_changes_and_only_then(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.say(enableReclaim=False)
    cluster.tell("h1")
    known = rules(tmp_path)
    async with following(cluster, known) as (follower, configs):
        await until(lambda: configs, "the first object is obeyed")
        assert configs[-1].advisor.enable_reclaim is False
        cluster.tell("h1")
        await asyncio.sleep(0.05)
        assert cluster.asked == [OBJECT]
        cluster.say(enableReclaim=True)
        cluster.tell("h2")
        await until(lambda: len(configs) == 2, "the second content is obeyed")
        assert configs[-1].advisor.enable_reclaim is True
        assert len(cluster.asked) == 2
        assert follower.problem() is None
        cluster.tell()
        await until(lambda: len(configs) == 3, "nothing is obeyed any longer")
        assert configs[-1] == AgentConfig()
    assert LastGoodFile(tmp_path, "n1").load() == {}


async def test_a_restart_fetches_nothing_that_it_has(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.say(enableReclaim=False)
    cluster.tell("h1")
    async with following(cluster, rules(tmp_path)) as (_, configs):
        await until(lambda: configs, "obeyed")
        # While the rollout is under way the object has moved on; this node is to have what it was told.
        cluster.say(enableReclaim=True)
    await until(lambda: LastGoodFile(tmp_path, "n1").load(), "it is on disk")
    again = rules(tmp_path)
    assert again.config.advisor.enable_reclaim is False
    async with following(cluster, again) as (follower, configs):
        await until(lambda: follower.problem() is None, "heard of")
        await asyncio.sleep(0.05)
    assert (configs, len(cluster.asked)) == ([], 1)


VALID, INVALID = ([{"type": "Valid", "status": status}] for status in ("True", "False"))


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, False),
        ({"conditions": VALID}, False),
        ({"currentHash": "h1"}, False),
        ({"currentHash": "h1", "observedGeneration": 4, "conditions": VALID}, False),
        ({"currentHash": "h2", "observedGeneration": 4, "conditions": VALID}, True),
        ({"currentHash": "h1", "observedGeneration": 3, "conditions": VALID}, True),
        ({"currentHash": "h1", "observedGeneration": 4, "conditions": INVALID}, True),
    ],
)
def test_whether_an_object_says_what_a_node_is_told(status: dict[str, Any], expected: bool) -> None:
    assert (
        has_other_content(UnstructuredObject(metadata=KubeMetadata(name="all", generation=4), status=status), "h1")
        is expected
    )


async def test_a_node_that_lost_what_it_was_told_does_not_get_the_content_of_canaries_before_its_turn(
    tmp_path: Path,
) -> None:
    cluster = Cluster()
    cluster.say(enableReclaim=False)
    cluster.objects[OBJECT]["status"] = {"currentHash": "h2"}
    cluster.tell("h1")
    async with following(cluster, rules(tmp_path)) as (follower, configs):
        await until(lambda: follower.problem() is not None, "it says so")
        problem = follower.problem()
        assert problem is not None
        assert "its content is no longer the h1 of this node's CustomNodeConfig" in problem.reason
        assert configs == [], "nothing of it is obeyed"
        cluster.tell("h2")
        await until(lambda: configs, "its turn comes")
        assert configs[-1].advisor.enable_reclaim is False
        assert follower.problem() is None


async def test_a_bad_object_and_one_that_is_not_there_are_said_and_the_last_good_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(follow, "FETCH_BACKOFF", Backoff(first_s=0.01, max_s=0.02))
    cluster = Cluster()
    cluster.say(enableReclaim=False)
    cluster.tell("h1")
    known = rules(tmp_path)
    async with following(cluster, known) as (follower, configs):
        await until(lambda: configs, "obeyed")
        cluster.say(enableReclaim="no")
        cluster.tell("h2")
        await until(lambda: follower.problem() is not None, "refused")
        problem = follower.problem()
        assert problem is not None
        assert "enableReclaim: Expected `bool" in problem.reason
        assert known.config.advisor.enable_reclaim is False
        told = follower.effective()
        assert (told.node, [one.hash for one in told.objects]) == ("n1", ["h1", "h2"])
        asked = len(cluster.asked)
        await asyncio.sleep(0.1)
        assert len(cluster.asked) == asked, "the same bad content is not fetched again and again"
        cluster.objects.clear()
        cluster.tell("h3")
        await until(lambda: follower._failure, "not there")
        assert "cannot be fetched: 404 NotFound" in follower._failure
        cluster.say(enableReclaim=True)
        await until(lambda: known.config.advisor.enable_reclaim, "it is asked for again until it is there")
        assert follower.problem() is None


async def test_a_kind_that_nobody_knows_here_is_named_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster()
    cluster.tell("h1", resource="evictionconfigurations")
    async with following(cluster, rules(tmp_path)) as (follower, configs):
        await until(lambda: "evictionconfigurations.v1alpha1" in caplog.text, "named")
        assert (follower.problem(), configs, cluster.asked) == (None, [], [])


async def test_a_node_without_a_custom_node_config_keeps_what_it_has_and_then_forgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "CHECK_INTERVAL_S", 0.02)
    cluster = Cluster()
    cluster.say(enableReclaim=False)
    cluster.tell("h1")
    known = rules(tmp_path)
    async with following(cluster, known) as (follower, configs):
        await until(lambda: configs, "obeyed")
        cluster.put(None)
        await until(lambda: follower.problem() is not None, "said")
        problem = follower.problem()
        assert problem is not None
        assert problem.reason == "there is no CustomNodeConfig n1"
        assert known.config.advisor.enable_reclaim is False
        monkeypatch.setattr(follow, "RETENTION_S", 0.0)
        await until(lambda: len(configs) == 2, "forgotten")
        assert configs[-1] == AgentConfig()


async def test_passwords_that_nobody_here_asks_for_are_not_fetched(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.tell("h1", resource="authconfigurations")
    async with following(cluster, rules(tmp_path)) as (follower, configs):
        await until(lambda: configs, "known")
        assert (cluster.asked, follower.problem(), configs) == ([], None, [AgentConfig()])
        assert follower.effective().objects[0].unused[0].startswith("the whole object: the file of --web-config")


async def test_while_nobody_answers_what_was_obeyed_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = rules(tmp_path)

    async def refuse(_request: web.Request) -> web.StreamResponse:
        return status_response(503, "no")

    async with asking(refuse) as client:
        follower = CustomNodeConfigFollower(client, "n1", known)
        assert await follower.check_once() is False
        assert follower.problem() is None, "it has only just begun"
        monkeypatch.setattr(follow, "STARTUP_GRACE_S", -1.0)
        problem = follower.problem()
        assert problem is not None
        assert problem.reason == "CustomNodeConfig n1 was never received"
