"""Reporter plugins that come, crash, come back and stay away, over real sockets; and ours as a plugin of somebody else."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.config.report import ReportConfig
from agent.katalyst.plugin_watcher import PluginWatcher
from agent.katalyst.reporter_plugin_server import ReporterPluginServer
from agent.katalyst.reporter_plugins import (
    REPORTER_PLUGIN_KIND,
    REPORTER_PLUGIN_VERSIONS,
    ReporterPluginClient,
    ReporterPlugins,
)
from agent.reporter.cnr import build_cnr_report
from agent.reporter.cnr_merge import merge_plugin_fields
from api.pod import RECLAIMED_CPU
from tests.agent.reporter.test_cnr import ADVERTISED, finished

PLUGIN = """
import asyncio, sys
from pathlib import Path
from agent.katalyst.plugin_registration import PluginIdentity, PluginRegistration
from common.grpc_unix import GrpcService, serve_on_socket
from api.proto import reporter_plugin_pb2 as wire

async def main(path, name, value):
    async def get(request, words):
        answer = wire.GetReportContentResponse()
        one = answer.content.add()
        kind = one.groupVersionKind
        kind.group, kind.version, kind.kind = "node.katalyst.kubewharf.io", "v1alpha1", "CustomNodeResource"
        one.field.add(fieldType=wire.Spec, fieldName="NodeResourceProperties", value=value.encode())
        return answer
    service = GrpcService(wire.DESCRIPTOR.services_by_name["ReporterPlugin"], {"GetReportContent": get})
    introduced = PluginRegistration(PluginIdentity(kind="ReporterPlugin", name=name))
    server = await serve_on_socket(Path(path), (service, introduced.service()))
    print("there", flush=True)  # the server lives as long as somebody holds it
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def plugin(path: Path, name: str, rack: str) -> asyncio.subprocess.Process:
    """A process of its own, whose socket is there."""
    value = json.dumps([{"propertyName": "rack", "propertyValues": [rack]}])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PLUGIN, str(path), name, value, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        assert await process.stdout.readline() == b"there\n"
    return process


async def killed(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def until(what: Callable[[], bool], look: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not what():
            await look()
            await asyncio.sleep(0.02)


def racks(reporters: ReporterPlugins) -> list[str]:
    whole = merge_plugin_fields(build_cnr_report(finished(), metrics=False), reporters.fields())
    return [
        one["propertyValues"][0]
        for one in whole.spec["spec"]["nodeResourceProperties"]
        if one["propertyName"] == "rack"
    ]


async def test_what_a_plugin_says_stands_while_it_may_be_restarted_and_no_longer(tmp_path: Path) -> None:
    changes = [0]

    def changed() -> None:
        changes[0] += 1

    reporters = ReporterPlugins(tmp_path, changed, forget_s=2)
    try:
        process = await plugin(tmp_path / "a.sock", "a", "7")
        await until(lambda: racks(reporters) == ["7"], reporters.look)
        assert (changes, reporters.problem()) == ([1], None)
        await killed(process)
        # Its socket is left behind by a kill, and nobody answers there.
        (tmp_path / "a.sock").unlink()
        await reporters.look()
        assert racks(reporters) == ["7"]
        process = await plugin(tmp_path / "a.sock", "a", "8")
        await until(lambda: racks(reporters) == ["8"], reporters.look)
        await killed(process)
        await until(lambda: racks(reporters) == [], reporters.look)
        problem = reporters.problem()
        assert problem is not None
        assert "no server answers" in problem.reason
    finally:
        reporters.close()


async def test_two_plugins_in_the_order_of_their_names(tmp_path: Path) -> None:
    reporters = ReporterPlugins(tmp_path, lambda: None)
    second = await plugin(tmp_path / "1.sock", "b", "2")
    first = await plugin(tmp_path / "2.sock", "a", "1")
    try:
        await until(lambda: racks(reporters) == ["1", "2"], reporters.look)
    finally:
        reporters.close()
        await killed(first)
        await killed(second)


async def test_a_plugin_of_another_kind_is_its_managers(tmp_path: Path) -> None:
    process = await plugin(tmp_path / "a.sock", "a", "7")
    try:
        other = PluginWatcher({"EvictionPlugin": ("v1alpha1",)}, tmp_path)
        await other.look()
        assert (other.plugins("ReporterPlugin"), other.problems()) == ((), ())
        ours_ = PluginWatcher({REPORTER_PLUGIN_KIND: REPORTER_PLUGIN_VERSIONS}, tmp_path)
        await ours_.look()
        assert [one.name for one in ours_.plugins(REPORTER_PLUGIN_KIND)] == ["a"]
    finally:
        await killed(process)


async def test_ours_is_a_plugin_of_somebody_else(tmp_path: Path) -> None:
    offered = ReporterPluginServer(tmp_path)
    run = asyncio.create_task(offered.run())
    changes = asyncio.Event()
    watcher = PluginWatcher({REPORTER_PLUGIN_KIND: REPORTER_PLUGIN_VERSIONS}, tmp_path)
    try:
        await until(lambda: bool(watcher.plugins(REPORTER_PLUGIN_KIND)), watcher.look)
        assert offered.problem() is None
        offered.publish(finished())
        reporter = ReporterPluginClient(watcher.plugins(REPORTER_PLUGIN_KIND)[0], changes.set)
        hearing = asyncio.create_task(reporter.run(60))
        await until(lambda: bool(reporter.fields()), lambda: asyncio.sleep(0))
        said = {field.name: msgspec.json.decode(field.value) for field in reporter.fields()}
        assert said["Resources"]["allocatable"][RECLAIMED_CPU] == "5123"
        zones = [(zone["type"], zone["name"], zone["children"]) for zone in said["TopologyZone"]]
        assert [(kind, name, child[0]["resources"]["capacity"][RECLAIMED_CPU]) for kind, name, child in zones] == [
            ("Socket", "0", "2000"),
            ("Socket", "1", "3123"),
        ]
        # Everything else that agent says itself; and it is told of a change at once.
        assert {name for zone in said["TopologyZone"] for name in zone} == {"type", "name", "children"}
        changes.clear()
        offered.publish(finished(msgspec.structs.replace(ADVERTISED, cores=1.0)))
        async with asyncio.timeout(10):
            await changes.wait()
        said = {field.name: msgspec.json.decode(field.value) for field in reporter.fields()}
        assert said["Resources"]["allocatable"][RECLAIMED_CPU] == "1000"
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    assert list(tmp_path.iterdir()) == []


async def test_nobody_asks_for_what_is_offered(tmp_path: Path) -> None:
    problem = ReporterPluginServer(tmp_path).problem()
    assert problem is not None
    assert problem.reason == f"no Katalyst agent has asked at {tmp_path}/dioptase-reporter.sock yet"


def test_only_one_writes_the_object() -> None:
    said = {"reporterPlugins": "/a"}
    assert msgspec.convert(said, ReportConfig).reporter_plugins == "/a"
    said["offeredIn"] = "/b"
    with pytest.raises(msgspec.ValidationError, match="merges the plugins; remove one"):
        msgspec.convert(said, ReportConfig)
