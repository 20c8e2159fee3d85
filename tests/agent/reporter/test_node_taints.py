"""Conditions as taints of the Node, written without changing taints of other owners."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp import web

from agent.reporter.cnr import merge_taints
from agent.reporter.node_taints import NodeTaints, desired_node_taints
from api.eviction import ActiveCondition, EvictionCondition, EvictionResult, EvictionThreshold, ThresholdMet
from api.knobs import Reason
from tests.builders.api_server import client_of
from tests.builders.four_cpu_node import busy_cycle

PREFIX = "node.katalyst.kubewharf.io/"
MEMORY = {"key": f"{PREFIX}MemoryPressure", "effect": "NoSchedule"}
OTHERS = {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}


def in_force(*conditions: EvictionCondition) -> EvictionResult:
    shown = (ActiveCondition(condition=each, plugin="p", since_ns=0, last_met_ns=0) for each in conditions)
    return EvictionResult(conditions=tuple(shown))


@pytest.mark.parametrize(
    ("condition", "taints"),
    [
        (EvictionCondition(name="MemoryPressure"), {("MemoryPressure", "NoSchedule")}),
        (
            EvictionCondition(name="a", effects=("NoExecute", "PreferNoSchedule")),
            {("a", "NoExecute"), ("a", "PreferNoSchedule")},
        ),
        (EvictionCondition(name="a", effects=("Nonsense",)), set()),
        # Those of a CustomNodeResource go there.
        (EvictionCondition(name="a", kind="cnr", effects=("reclaimed_cores/NoSchedule",)), set()),
        # What no key can be would have the API server refuse all the others too.
        (EvictionCondition(name="a b"), set()),
        (EvictionCondition(name="a/b"), set()),
        (EvictionCondition(name="x" * 63), {("x" * 63, "NoSchedule")}),
        (EvictionCondition(name="x" * 64), set()),
        (EvictionCondition(name=""), set()),
        (EvictionCondition(name="-a"), set()),
    ],
)
def test_which_taints_conditions_are(condition: EvictionCondition, taints: set[tuple[str, str]]) -> None:
    assert desired_node_taints(in_force(condition)) == {(f"{PREFIX}{name}", effect) for name, effect in taints}


def test_where_nothing_is_judged_nothing_is_known() -> None:
    assert desired_node_taints(None) is None


@pytest.mark.parametrize(
    ("current", "names", "result"),
    [
        ([], [], None),
        ([OTHERS], [], None),
        ([OTHERS], [("MemoryPressure", "NoSchedule")], [OTHERS, MEMORY]),
        ([OTHERS, MEMORY], [("MemoryPressure", "NoSchedule")], None),
        ([MEMORY, OTHERS], [], [OTHERS]),
        ([MEMORY], [("MemoryPressure", "NoExecute")], [{**MEMORY, "effect": "NoExecute"}]),
        # A value or time set by another client stays.
        ([{**MEMORY, "value": "x"}], [("MemoryPressure", "NoSchedule")], None),
    ],
)
def test_taints_of_others_stay_as_they_are(
    current: list[dict[str, Any]], names: list[tuple[str, str]], result: list[dict[str, Any]] | None
) -> None:
    desired = [{"key": f"{PREFIX}{name}", "effect": effect} for name, effect in names]
    assert merge_taints(current, desired) == result


class Server:
    """One Node, which another client may write between a read and a patch."""

    def __init__(self) -> None:
        self.version, self.taints, self.rivals = 1, [OTHERS], 0
        self.requests: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request.method)
        if request.method == "PATCH":
            body = await request.json()
            if self.rivals:
                self.rivals, self.version = self.rivals - 1, self.version + 1
            if body["metadata"]["resourceVersion"] != str(self.version):
                return web.json_response({"code": 409, "reason": "Conflict"}, status=409)
            self.taints, self.version = body["spec"]["taints"], self.version + 1
        return web.json_response(
            {"metadata": {"name": "n1", "resourceVersion": str(self.version)}, "spec": {"taints": self.taints}}
        )


async def test_a_condition_is_written_looked_after_and_taken_away() -> None:
    server = Server()
    round_ = busy_cycle()
    pressed = msgspec.structs.replace(round_, evictions=in_force(EvictionCondition(name="MemoryPressure")))
    calm = msgspec.structs.replace(round_, evictions=EvictionResult())
    async with client_of(server.answer) as client:
        taints = NodeTaints(client, "n1")
        await taints.sync(0)
        assert server.requests == [], "nothing was judged yet"
        taints.publish(pressed)
        await taints.sync(5)
        assert server.taints == [OTHERS, MEMORY]
        await taints.sync(10)
        assert server.requests == ["GET", "PATCH"]
        # Another client removes the taint; it is back within a minute.
        server.taints = [OTHERS]
        await taints.sync(66)
        assert server.taints == [OTHERS, MEMORY]
        taints.publish(calm)
        await taints.sync(70)
        assert (server.taints, taints.problem()) == ([OTHERS], None)
        before = len(server.requests)
        await taints.sync(1000)
        assert len(server.requests) == before, "without conditions no request is sent"


async def test_what_a_killed_agent_left_is_taken_away_by_the_next_and_what_is_in_force_when_one_ends() -> None:
    server = Server()
    server.taints = [OTHERS, MEMORY]
    async with client_of(server.answer) as client:
        taints = NodeTaints(client, "n1")
        taints.publish(msgspec.structs.replace(busy_cycle(), evictions=EvictionResult()))
        await taints.sync(0)
        assert server.requests == [], "no plugin judges here, and the role need not allow to look"
        evaluated = EvictionResult(
            thresholds=(EvictionThreshold(plugin="p", met=ThresholdMet.NOT_MET, reason=Reason(rule="r", text="t")),)
        )
        taints.publish(msgspec.structs.replace(busy_cycle(), evictions=evaluated))
        await taints.sync(0)
        assert server.taints == [OTHERS]
        taints.publish(
            msgspec.structs.replace(busy_cycle(), evictions=in_force(EvictionCondition(name="MemoryPressure")))
        )
        await taints.sync(5)
        await taints.withdraw()
        assert server.taints == [OTHERS]


@pytest.mark.parametrize(("rivals", "written"), [(2, True), (3, False)])
async def test_concurrent_writers_lose_nothing(rivals: int, written: bool) -> None:
    server = Server()
    server.rivals = rivals
    async with client_of(server.answer) as client:
        taints = NodeTaints(client, "n1")
        taints.publish(
            msgspec.structs.replace(busy_cycle(), evictions=in_force(EvictionCondition(name="MemoryPressure")))
        )
        await taints.sync(0)
        assert (MEMORY in server.taints, taints.problem() is None) == (written, written)
        await taints.sync(100)
        assert MEMORY in server.taints


async def test_a_role_that_lacks_it_is_named() -> None:
    async def refuse(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"code": 403, "reason": "Forbidden", "message": "no"}, status=403)

    async with client_of(refuse) as client:
        taints = NodeTaints(client, "n1")
        taints.publish(
            msgspec.structs.replace(busy_cycle(), evictions=in_force(EvictionCondition(name="MemoryPressure")))
        )
        await taints.sync(0)
        trouble = taints.problem()
        assert trouble is not None
        assert (trouble.reason, trouble.remedy) == (
            "conditions cannot be written as taints of Node n1: 403 Forbidden: no",
            "give the agent's role get and patch of nodes",
        )
        await taints.withdraw()
