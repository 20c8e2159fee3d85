"""Conditions as taints of the Node, written without changing taints of other owners."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agent.reporter.node_taints import NodeTaints, desired_node_taints
from api.eviction import (
    ActiveCondition,
    EvictionCondition,
    EvictionResult,
    EvictionThreshold,
    ThresholdMet,
    recorded_taints,
)
from api.knobs import Reason
from tests.builders.api_server import FakeApiServer
from tests.builders.four_cpu_node import busy_cycle
from tests.builders.health import problem_of

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
        # Conditions of kind `cnr` become taints of the CustomNodeResource.
        (EvictionCondition(name="a", kind="cnr", effects=("reclaimed_cores/NoSchedule",)), set()),
        # A name that no taint key can have would make the API server refuse all taints.
        (EvictionCondition(name="a b"), set()),
        (EvictionCondition(name="a/b"), set()),
        (EvictionCondition(name="x" * 63), {("x" * 63, "NoSchedule")}),
        (EvictionCondition(name="x" * 64), set()),
        (EvictionCondition(name=""), set()),
        (EvictionCondition(name="-a"), set()),
    ],
)
def test_taints_of_conditions(condition: EvictionCondition, taints: set[tuple[str, str]]) -> None:
    assert desired_node_taints(in_force(condition)) == {(f"{PREFIX}{name}", effect) for name, effect in taints}


def test_without_an_evaluation_the_taints_are_unknown() -> None:
    assert desired_node_taints(None) is None


NODE = "/api/v1/nodes/n1"
PRESSED = msgspec.structs.replace(busy_cycle(), evictions=in_force(EvictionCondition(name="MemoryPressure")))
CALM = msgspec.structs.replace(busy_cycle(), evictions=EvictionResult())


RECORD = "dioptase.io/node-taints"


def node_with(*taints: dict[str, str], record: str | None = None) -> FakeApiServer:
    annotations = {} if record is None else {"annotations": {RECORD: record}}
    metadata = {"name": "n1", "resourceVersion": "1", **annotations}
    return FakeApiServer({NODE: {"metadata": metadata, "spec": {"taints": list(taints)}}})


def record_of(server: FakeApiServer) -> Any:
    return server.objects[NODE]["metadata"].get("annotations", {}).get(RECORD)


def stored(server: FakeApiServer) -> Any:
    return server.objects[NODE]["spec"]["taints"]


async def test_a_condition_is_written_checked_and_removed() -> None:
    server = node_with(OTHERS)
    async with server.client() as client:
        taints = NodeTaints(client, "n1")
        await taints.sync(0)
        assert server.requests == [], "nothing was evaluated yet"
        taints.publish(PRESSED)
        await taints.sync(5)
        assert stored(server) == [OTHERS, MEMORY]
        assert record_of(server) == f"{PREFIX}MemoryPressure:NoSchedule"
        await taints.sync(10)
        assert [request.method for request in server.requests] == ["GET", "PATCH"]
        # Another client removes the taint; it is back within a minute.
        server.put(NODE, {"metadata": {"name": "n1"}, "spec": {"taints": [OTHERS]}})
        await taints.sync(66)
        assert stored(server) == [OTHERS, MEMORY]
        taints.publish(CALM)
        await taints.sync(70)
        assert (stored(server), record_of(server), taints.problem()) == ([OTHERS], None, None)
        before = len(server.requests)
        await taints.sync(1000)
        assert len(server.requests) == before, "without conditions no request is sent"


async def test_taints_of_a_killed_agent_are_removed_by_the_next_one_and_those_of_an_agent_that_ends_by_itself() -> None:
    server = node_with(OTHERS, MEMORY, record=f"{PREFIX}MemoryPressure:NoSchedule")
    async with server.client() as client:
        taints = NodeTaints(client, "n1")
        taints.publish(CALM)
        await taints.sync(0)
        assert server.requests == [], "no plugin is enabled, and the role need not allow reading Nodes"
        threshold = EvictionThreshold(plugin="p", met=ThresholdMet.NOT_MET, reason=Reason(rule="r", text="t"))
        taints.publish(msgspec.structs.replace(CALM, evictions=EvictionResult(thresholds=(threshold,))))
        await taints.sync(0)
        assert stored(server) == [OTHERS]
        taints.publish(PRESSED)
        await taints.sync(5)
        await taints.withdraw()
        assert stored(server) == [OTHERS]


async def test_taints_that_a_stock_katalyst_agent_added_stay() -> None:
    cpu = {"key": f"{PREFIX}CPUPressure", "effect": "NoSchedule"}
    server = node_with(cpu, MEMORY)
    async with server.client() as client:
        taints = NodeTaints(client, "n1")
        taints.publish(PRESSED)
        await taints.sync(0)
        assert [request.method for request in server.requests] == ["GET"], "the desired taint is there already"
        await taints.withdraw()
        assert (stored(server), record_of(server)) == ([cpu, MEMORY], None)


@pytest.mark.parametrize(("rivals", "written"), [(2, True), (3, False)])
async def test_concurrent_writers_lose_nothing(rivals: int, written: bool) -> None:
    server = node_with(OTHERS)
    server.rivals = rivals
    async with server.client() as client:
        taints = NodeTaints(client, "n1")
        taints.publish(PRESSED)
        await taints.sync(0)
        assert (MEMORY in stored(server), taints.problem() is None) == (written, written)
        await taints.sync(100)
        assert stored(server) == [OTHERS, MEMORY]


async def test_a_missing_permission_is_named() -> None:
    server = node_with(OTHERS)
    server.refuse["GET"] = 403
    async with server.client() as client:
        taints = NodeTaints(client, "n1")
        taints.publish(PRESSED)
        await taints.sync(0)
        problem = problem_of(taints)
        assert problem.reason == "conditions cannot be written as taints of Node n1: 403: refused by the test"
        assert problem.remedy == "give the agent's role get and patch of nodes (the chart: --set agent.evictions=true)"
        await taints.withdraw()


def test_a_record_names_only_taints_that_an_agent_adds() -> None:
    """A kubelet may annotate its Node, but may not remove a taint from it: the record must not do so for it."""
    text = "node-role.kubernetes.io/control-plane:NoSchedule,node.katalyst.kubewharf.io/MemoryPressure:NoSchedule,x:NoExecute"
    assert recorded_taints({"dioptase.io/node-taints": text}) == {
        ("node.katalyst.kubewharf.io/MemoryPressure", "NoSchedule")
    }
