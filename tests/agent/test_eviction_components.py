"""The eviction manager's ways out of the process: which killer works where, and what is opened for which settings."""

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
from common.supervised_tasks import SupervisedTasks
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
        # What pods of a file are, the API server does not know.
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
        ({}, True, True, False, ["evicting", "node-taints"]),
        ({}, True, True, True, ["evicting", "node-taints", "writable-layers"]),
        ({}, False, True, False, []),
        ({"pluginSockets": "/nowhere"}, False, False, False, ["eviction-plugins"]),
        ({"pluginSockets": "/nowhere", "killer": SIGNALS}, True, True, False, ["node-taints", "eviction-plugins"]),
    ],
)
async def test_what_works_beside_the_rounds(
    settings: dict[str, Any], acting: bool, there: bool, layers: bool, parts: list[str]
) -> None:
    """In a dry run nothing is written to the Node; plugins at sockets judge there as well."""
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
        opened = await open_eviction_components(
            EvictionRunner(settings_config, killer),
            settings_config,
            client,
            "n1",
            SupervisedTasks(stack),
            kubelet=layers,
        )
        assert [each.name for each in opened.sources] == parts
        assert [each.problem() for each in opened.sources] == [None] * len(parts)
        if isinstance(killer, EvictorByQosLevel):
            assert isinstance(killer.eviction_methods[API], ApiEvictionMethod)
            assert isinstance(killer.requests, ApiEvictor)


async def test_without_a_runtime_nobody_can_stop_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "find_runtime_socket", lambda _path: None)
    settings_config = config(killer=STOP)
    async with AsyncExitStack() as stack:
        killer = open_pod_evictor(settings_config.eviction, HERE, node="", kubelet=True)
        with pytest.raises(Unavailable, match="no container runtime is there"):
            await open_eviction_components(
                EvictionRunner(settings_config, killer), settings_config, None, "", SupervisedTasks(stack), kubelet=True
            )
