"""The agent's part that asks the kubelet: opened with its settings, shown as sources, closed without a trace."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from agent.components import ClusterConnection, open_kubelet
from agent.config.config import AgentConfig
from agent.eviction.runner import EvictionRunner
from agent.reporter.cnr_input_collector import CnrInputCollector
from agent.reporter.cnr_inputs import CnrInputs
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.pods.pod_spec import PodParsingContext
from api.decision import ActMode
from api.interfaces import Unavailable
from common.supervised_tasks import SupervisedTasks
from tests.agent.sensors.pods.kubelet_objects import Cgroups, listing, pod
from tests.agent.sensors.pods.test_cri_client import Containerd
from tests.agent.sensors.pods.test_kubelet_client import serving


async def test_pods_are_there_at_once_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "cgroup").mkdir()
    path = Cgroups(tmp_path / "cgroup").make("uid-web", "web-main")
    containerd = Containerd()
    containerd.run("web", "main", "web-main")
    server = await containerd.serve(tmp_path / "c.sock")

    async def kubelet(_request: web.Request) -> web.Response:
        return web.Response(body=listing(pod("web")))

    async with serving(kubelet) as url:
        text = {
            "kubelet": {"url": url, "runtimeSocket": f"unix://{tmp_path}/c.sock", "intervalS": 0.2},
            "eviction": {"pluginSockets": f"{tmp_path}/plugins"},
        }
        async with AsyncExitStack() as stack:
            hierarchy, tasks = Hierarchy(v1={}, v2=tmp_path / "cgroup"), SupervisedTasks(stack)
            config = msgspec.convert(text, AgentConfig)
            inputs = await open_kubelet(config, PodParsingContext(), hierarchy, tasks)
            (actual,) = inputs.pods.read()
            assert [each.cgroup for each in actual.containers] == [path]
            assert [(probe.name, probe.form, probe.problem()) for probe in (*inputs.reporters, *inputs.probes)] == [
                ("kubelet", "http", None),
                ("container-runtime", f"{tmp_path}/c.sock", None),
                ("kubelet-managers", "unknown", None),
            ]
            assert inputs.ended_listing_ns == 10_400_000_000, "twice the interval and the timeout"
            # External eviction plugins receive the text of the kubelet.
            runner = EvictionRunner(config, None)
            await ClusterConnection("", tmp_path, None).join(config, ActMode.ON, runner, tasks, inputs.pods)
            assert runner.pod_details is inputs.pods
            assert b'"name":"web"' in runner.pod_details.manifest("uid-web").replace(b" ", b"")
        assert [task for task in asyncio.all_tasks() if "Tending" in repr(task.get_coro())] == []
    await server.stop()


async def test_one_request_for_the_configuration_serves_the_managers_and_the_report(tmp_path: Path) -> None:
    paths: list[str] = []
    configuration = {"cpuManagerPolicy": "static", "topologyManagerPolicy": "restricted"}

    async def kubelet(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.json_response({"kubeletconfig": configuration} if request.path == "/configz" else {"items": []})

    async with serving(kubelet) as url, AsyncExitStack() as stack:
        text = {"kubelet": {"url": url, "runtimeSocket": "", "rootDir": str(tmp_path)}}
        inputs = await open_kubelet(
            msgspec.convert(text, AgentConfig),
            PodParsingContext(),
            Hierarchy(v1={}, v2=tmp_path),
            SupervisedTasks(stack),
        )
        collector = CnrInputCollector((tmp_path, tmp_path), CnrInputs(), inputs.configuration, None)
        await collector.poll()
        assert (inputs.probes[0].form, collector.inputs.policy) == (
            "cpu static, memory none",
            "RestrictedContainerLevel",
        )
        assert paths.count("/configz") == 1


async def test_a_kubelet_that_is_not_there_is_no_reason_not_to_start(tmp_path: Path) -> None:
    text = {"kubelet": {"url": "http://127.0.0.1:1", "runtimeSocket": ""}}
    async with AsyncExitStack() as stack:
        inputs = await open_kubelet(
            msgspec.convert(text, AgentConfig),
            PodParsingContext(),
            Hierarchy(v1={}, v2=tmp_path),
            SupervisedTasks(stack),
        )
        with pytest.raises(Unavailable, match="connection refused"):
            inputs.pods.read()
        assert inputs.reporters[0].problem() is not None
