"""Annotations of the Node over a real socket: which are taken, when they are unknown, and how garbage is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from agent.config.config import AgentConfig
from agent.dynamic_config import follow
from agent.dynamic_config.node_annotations import NodeAnnotations
from tests.builders.api_server import FakeApiServer
from tests.builders.waiting import until_async

NODE = "/api/v1/nodes/n1"
ALERT = {"x.io/power-alert": "s0", "x.io/power-budget": "80", "x.io/power-alert-time": "2026-01-02T03:04:05Z"}
CONFIG = msgspec.convert({"power": {"enable": True, "annotationPrefix": "x.io"}}, AgentConfig)


def node(annotations: Mapping[str, str]) -> dict[str, Any]:
    return {"metadata": {"name": "n1", "annotations": dict(annotations)}}


@asynccontextmanager
async def following(server: FakeApiServer) -> AsyncIterator[NodeAnnotations]:
    async with server.client() as client:
        source = NodeAnnotations(client, "n1", CONFIG)
        task = asyncio.create_task(source.run())
        yield source
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_alert_is_taken_changed_and_removed() -> None:
    ratio = {"katalyst.kubewharf.io/cpu_overcommit_ratio": "2"}
    server = FakeApiServer({NODE: node({**ALERT, **ratio, "power-alert": "p0", "other": "secret"})})
    async with following(server) as source:
        assert source.latest() is None, "not known before the first answer"
        await until_async(lambda: source.latest() == {**ALERT, **ratio})
        server.put(NODE, node({**ALERT, "x.io/power-budget": "60"}))
        await until_async(lambda: (source.latest() or {}).get("x.io/power-budget") == "60")
        server.put(NODE, node({"other": "secret"}))
        await until_async(lambda: source.latest() == {})
        assert source.problem() is None
        server.delete(NODE)
        await until_async(lambda: source.latest() is None)
        problem = source.problem()
        assert problem is not None
        assert problem.reason == "there is no Node n1"


async def test_an_invalid_alert_is_reported_with_its_annotation() -> None:
    server = FakeApiServer({NODE: node({**ALERT, "x.io/power-budget": "much"})})
    async with following(server) as source:
        await until_async(lambda: source.latest() is not None)
        problem = source.problem()
        assert problem is not None
        assert problem.reason == (
            "Node n1: annotation x.io/power-budget: 'much' is not a number of watts above 0: the power alert changes nothing"
        )
        server.put(NODE, node(ALERT))
        await until_async(lambda: source.problem() is None)


async def test_without_permission_the_annotations_stay_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "STARTUP_GRACE_S", -1.0)
    server = FakeApiServer({NODE: node(ALERT)})
    server.refuse["/api/v1/nodes"] = 403
    async with following(server) as source:
        await until_async(lambda: bool(server.requests))
        assert source.latest() is None
        problem = source.problem()
        assert problem is not None
        assert "of Node n1 were never received" in problem.reason
        assert "role allows list and watch of nodes" in problem.remedy
