"""A node's CustomNodeConfig followed over a real socket: what is fetched, what is not, and an unreachable API server."""

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
from tests.builders.api_server import client_of, status_response

ADMIN = "adminqosconfigurations"
CNC = "/apis/config.katalyst.kubewharf.io/v1alpha1/customnodeconfigs"
OBJECT = f"/apis/config.katalyst.kubewharf.io/v1alpha1/namespaces/kube-system/{ADMIN}/all"


class Cluster:
    """Plays an API server with one CustomNodeConfig and one object."""

    def __init__(self, content: str = "") -> None:
        """With `content`, the hash of an object without reclaimable resources is in the CustomNodeConfig."""
        self.version = 1
        self.targets: list[dict[str, Any]] | None = []
        self.objects: dict[str, Any] = {}
        self.requests: list[str] = []
        self.changed = asyncio.Event()
        if content:
            self.set_fields(enableReclaim=False)
            self.name_hashes(content)

    def name_hashes(self, *hashes: str, resource: str = ADMIN) -> None:
        """Set the hashes in the CustomNodeConfig."""
        kind = {"group": "config.katalyst.kubewharf.io", "version": "v1alpha1", "resource": resource}
        self.put(
            [
                {"configType": kind, "configName": "all", "configNamespace": "kube-system", "hash": item}
                for item in hashes
            ]
        )

    def put(self, targets: list[dict[str, Any]] | None) -> None:
        self.version, self.targets = self.version + 1, targets
        self.changed.set()

    def set_fields(self, **fields: Any) -> None:
        """Set the fields of the object."""
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
            self.requests.append(request.path)
            result = self.objects.get(request.path)
            if result is None:
                return status_response(404, '{"kind":"Status","reason":"NotFound","code":404,"message":"not found"}')
            complete = {"metadata": {"name": "all", "namespace": "kube-system"}, **result}
            return status_response(200, msgspec.json.encode(complete).decode())
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
    async with client_of(cluster.answer) as client:
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


def reason(follower: CustomNodeConfigFollower) -> str:
    problem = follower.problem()
    return "" if problem is None else problem.reason


def rules(tmp_path: Path) -> DynamicConfig:
    return DynamicConfig({}, AgentConfig(), lambda _: "", LastGoodFile(tmp_path, "n1"))


async def test_an_object_is_fetched_when_its_hash_changes_and_only_then(tmp_path: Path) -> None:
    cluster = Cluster("h1")
    previous = rules(tmp_path)
    async with following(cluster, previous) as (follower, configs):
        await until(lambda: configs, "the first object is applied")
        assert configs[-1].advisor.enable_reclaim is False
        cluster.name_hashes("h1")
        await asyncio.sleep(0.05)
        assert cluster.requests == [OBJECT]
        cluster.set_fields(enableReclaim=True)
        cluster.name_hashes("h2")
        await until(lambda: len(configs) == 2, "the second content is applied")
        assert configs[-1].advisor.enable_reclaim is True
        assert len(cluster.requests) == 2
        assert follower.problem() is None
        cluster.name_hashes()
        await until(lambda: len(configs) == 3, "nothing is applied any longer")
        assert configs[-1] == AgentConfig()
    assert LastGoodFile(tmp_path, "n1").load() == {}


async def test_a_restart_does_not_fetch_saved_objects_again(tmp_path: Path) -> None:
    cluster = Cluster("h1")
    async with following(cluster, rules(tmp_path)) as (_, configs):
        await until(lambda: configs, "applied")
        # While the rollout is under way the object has moved on; this node keeps its version.
        cluster.set_fields(enableReclaim=True)
    await until(lambda: LastGoodFile(tmp_path, "n1").load(), "it is on disk")
    again = rules(tmp_path)
    assert again.config.advisor.enable_reclaim is False
    async with following(cluster, again) as (follower, configs):
        await until(lambda: follower.problem() is None, "heard of")
        await asyncio.sleep(0.05)
    assert (configs, len(cluster.requests)) == ([], 1)


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
def test_whether_an_object_has_the_content_of_the_nodes_hash(status: dict[str, Any], expected: bool) -> None:
    assert (
        has_other_content(UnstructuredObject(metadata=KubeMetadata(name="all", generation=4), status=status), "h1")
        is expected
    )


async def test_a_node_without_saved_configuration_does_not_apply_a_canarys_content_early(
    tmp_path: Path,
) -> None:
    cluster = Cluster()
    cluster.set_fields(enableReclaim=False)
    cluster.objects[OBJECT]["status"] = {"currentHash": "h2"}
    cluster.name_hashes("h1")
    async with following(cluster, rules(tmp_path)) as (follower, configs):
        await until(lambda: follower.problem() is not None, "it says so")
        assert "its content no longer has the hash h1 of this node's CustomNodeConfig" in reason(follower)
        assert configs == [], "nothing of it is applied"
        cluster.name_hashes("h2")
        await until(lambda: configs, "its turn comes")
        assert configs[-1].advisor.enable_reclaim is False
        assert follower.problem() is None


async def test_an_invalid_object_and_a_missing_one_are_reported_and_the_last_good_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(follow, "FETCH_BACKOFF", Backoff(first_s=0.01, max_s=0.02))
    cluster = Cluster("h1")
    previous = rules(tmp_path)
    async with following(cluster, previous) as (follower, configs):
        await until(lambda: configs, "applied")
        cluster.set_fields(enableReclaim="no")
        cluster.name_hashes("h2")
        await until(lambda: follower.problem() is not None, "refused")
        assert "enableReclaim: Expected `bool" in reason(follower)
        assert previous.config.advisor.enable_reclaim is False
        reported = follower.effective()
        assert (reported.node, [item.hash for item in reported.objects]) == ("n1", ["h1", "h2"])
        requests = len(cluster.requests)
        await asyncio.sleep(0.1)
        assert len(cluster.requests) == requests, "the same bad content is not fetched again and again"
        cluster.objects.clear()
        cluster.name_hashes("h3")
        await until(lambda: follower._failure, "not there")
        assert "cannot be fetched: 404 NotFound" in follower._failure
        cluster.set_fields(enableReclaim=True)
        await until(lambda: previous.config.advisor.enable_reclaim, "it is fetched again until it exists")
        assert follower.problem() is None


async def test_an_unknown_kind_is_logged_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.name_hashes("h1", resource="evictionconfigurations")
    async with following(cluster, rules(tmp_path)) as (follower, configs):
        await until(lambda: "evictionconfigurations.v1alpha1" in caplog.text, "named")
        assert (follower.problem(), configs, cluster.requests) == (None, [], [])


async def test_a_node_without_custom_node_config_retains_its_configuration_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "CHECK_INTERVAL_S", 0.02)
    cluster = Cluster("h1")
    previous = rules(tmp_path)
    async with following(cluster, previous) as (follower, configs):
        await until(lambda: configs, "applied")
        cluster.put(None)
        await until(lambda: follower.problem() is not None, "said")
        assert reason(follower) == "there is no CustomNodeConfig n1"
        assert previous.config.advisor.enable_reclaim is False
        monkeypatch.setattr(follow, "RETENTION_S", 0.0)
        await until(lambda: len(configs) == 2, "forgotten")
        assert configs[-1] == AgentConfig()


async def test_passwords_without_use_are_not_fetched(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.name_hashes("h1", resource="authconfigurations")
    async with following(cluster, rules(tmp_path)) as (follower, configs):
        await until(lambda: configs, "known")
        assert (cluster.requests, follower.problem(), configs) == ([], None, [AgentConfig()])
        assert follower.effective().objects[0].unused[0].startswith("the whole object: the file of --web-config")


async def test_the_configuration_stays_while_the_api_server_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous = rules(tmp_path)

    async def refuse(_request: web.Request) -> web.StreamResponse:
        return status_response(503, "no")

    async with client_of(refuse) as client:
        follower = CustomNodeConfigFollower(client, "n1", previous)
        assert await follower.check_once() is False
        assert follower.problem() is None, "it has only just started"
        monkeypatch.setattr(follow, "STARTUP_GRACE_S", -1.0)
        assert reason(follower) == "CustomNodeConfig n1 was never received"
