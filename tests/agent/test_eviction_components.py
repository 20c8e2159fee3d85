"""Eviction methods by settings, and the components that the eviction manager needs."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent import components
from agent.components import open_eviction_components, open_pod_evictor
from agent.config.config import AgentConfig
from agent.eviction.api_evictor import ApiEvictionMethod, ApiEvictor
from agent.eviction.evictor_by_qos_level import EvictorByQosLevel
from agent.eviction.runner import EvictionRunner
from agent.eviction.signals import SignalEvictor
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.interfaces import Unavailable
from api.qos import QoSLevel
from kube.client import KubeClient
from kube.credentials import ApiAccess, ApiCredentials
from tests.agent.eviction.builders import pod

HERE = Hierarchy(v1={}, v2=Path("/nowhere"))
API, DELETE, STOP, SIGNALS = "eviction-api-killer", "deletion-api-killer", "container-killer", "signals"


def config(**eviction: Any) -> AgentConfig:
    return msgspec.convert({"eviction": eviction}, AgentConfig)


@pytest.mark.parametrize(
    ("settings", "node", "kubelet", "names"),
    [
        # The API server does not know the pods of a file.
        ({}, "", False, None),
        ({}, "n1", False, None),
        ({}, "", True, None),
        ({}, "n1", True, [API, API]),
        ({"killer": SIGNALS}, "n1", True, None),
        ({"killer": DELETE}, "n1", True, [DELETE, DELETE]),
        ({"killer": STOP}, "", True, [STOP, STOP]),
        ({"killers": {"reclaimed_cores": DELETE}}, "n1", True, [DELETE, API]),
        ({"killer": SIGNALS, "killers": {"shared_cores": API}}, "n1", True, [SIGNALS, API]),
    ],
)
async def test_which_killer_works_for_reclaimed_and_shared_pods(
    settings: dict[str, Any], node: str, kubelet: bool, names: list[str] | None
) -> None:
    killer = open_pod_evictor(config(**settings).eviction, HERE, node=node, kubelet=kubelet)
    if names is None:
        assert isinstance(killer, SignalEvictor)
    else:
        assert isinstance(killer, EvictorByQosLevel)
        assert [killer.method_name(pod("x", level)) for level in (QoSLevel.RECLAIMED, QoSLevel.SHARED)] == names
    killer.close()


@pytest.mark.parametrize(
    ("settings", "node", "kubelet", "reason"),
    [
        ({"killer": API}, "n1", False, "eviction-api-killer needs --kubelet"),
        ({"killer": DELETE}, "", True, "deletion-api-killer needs --node"),
        ({"killer": API}, "", False, "eviction-api-killer needs --kubelet and --node"),
        ({"killers": {"dedicated_cores": STOP}}, "n1", False, "container-killer needs --kubelet"),
    ],
)
async def test_a_killer_that_cannot_work_here_is_refused(
    settings: dict[str, Any], node: str, kubelet: bool, reason: str
) -> None:
    with pytest.raises(Unavailable) as raised:
        open_pod_evictor(config(**settings).eviction, HERE, node=node, kubelet=kubelet)
    assert raised.value.reason == f"eviction.killer: {reason}"


@pytest.mark.parametrize(
    ("settings", "acting", "there", "layers", "parts"),
    [
        ({}, True, True, False, ["evictor", "node-taints"]),
        ({}, True, True, True, ["evictor", "node-taints", "writable-layers"]),
        ({}, False, True, False, []),
        ({"pluginSockets": "/nowhere"}, False, False, False, ["eviction-plugins"]),
        ({"pluginSockets": "/nowhere", "killer": SIGNALS}, True, True, False, ["node-taints", "eviction-plugins"]),
    ],
)
async def test_the_settings_decide_which_components_are_opened(
    settings: dict[str, Any], acting: bool, there: bool, layers: bool, parts: list[str]
) -> None:
    """A dry run writes nothing to the Node, and evaluates plugins at sockets."""
    settings_config = msgspec.convert(
        {"eviction": settings, "kubelet": {"runtimeSocket": "/nowhere/c.sock"}}, AgentConfig
    )
    async with AsyncExitStack() as stack:
        client = (
            await stack.enter_async_context(KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "t"))
            if there
            else None
        )
        killer = open_pod_evictor(settings_config.eviction, HERE, node="n1", kubelet=True) if acting else None
        opened = open_eviction_components(
            EvictionRunner(settings_config, killer), settings_config, client, "n1", stack, kubelet=layers
        )
        assert [each.name for each in opened.reporters] == parts
        assert [each.problem() for each in opened.reporters] == [None] * len(parts)
        if isinstance(killer, EvictorByQosLevel):
            assert isinstance(killer.eviction_methods[API], ApiEvictionMethod)
            assert isinstance(killer.requests, ApiEvictor)


class ListedPods:
    """A pod source with one listed pod, `u1`, of a Deployment."""

    def manifest(self, uid: str) -> bytes:
        return b"{}" if uid == "u1" else b""

    def workload(self, uid: str) -> str:
        return "default/Deployment/web" if uid == "u1" else ""


async def test_eviction_records_need_an_api_server_and_a_kubelet() -> None:
    settings = config(pluginSockets="/nowhere", numaCpu={"scorers": ["WorkloadEvictionFrequency"]})
    names = {}
    for pods in (ListedPods(), None):
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "t"))
            runner = EvictionRunner(settings, None)
            runner.pod_details = pods
            opened = open_eviction_components(runner, settings, client, "n1", stack, kubelet=False)
            names[pods is None] = [each.name for each in opened.reporters]
    assert names == {True: ["eviction-plugins"], False: ["eviction-records", "eviction-plugins"]}


async def test_without_a_runtime_containers_cannot_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "find_runtime_socket", lambda _path: None)
    settings_config = config(killer=STOP)
    async with AsyncExitStack() as stack:
        killer = open_pod_evictor(settings_config.eviction, HERE, node="", kubelet=True)
        with pytest.raises(Unavailable, match="there is no container runtime"):
            open_eviction_components(
                EvictionRunner(settings_config, killer), settings_config, None, "", stack, kubelet=True
            )
