"""Reporter plugins that start, crash and restart, over real sockets; and the agent as a reporter plugin."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

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
from api.advice import NodeAdvice, OvercommitAdvice
from api.knobs import Reason
from api.pod import RECLAIMED_CPU
from tests.agent.reporter.test_cnr import ADVERTISED, finished
from tests.builders.waiting import until_async

PLUGIN = """
import asyncio, sys
from pathlib import Path
from agent.katalyst.plugin_registration import PluginIdentity, PluginRegistration
from common.grpc_unix import GrpcService, serve_on_socket
from api.proto import reporter_plugin_pb2 as wire

async def main(path, name, value):
    async def get(request, words):
        answer = wire.GetReportContentResponse()
        content = answer.content.add()
        kind = content.groupVersionKind
        kind.group, kind.version, kind.kind = "node.katalyst.kubewharf.io", "v1alpha1", "CustomNodeResource"
        content.field.add(fieldType=wire.Spec, fieldName="NodeResourceProperties", value=value.encode())
        return answer
    service = GrpcService(wire.DESCRIPTOR.services_by_name["ReporterPlugin"], {"GetReportContent": get})
    introduced = PluginRegistration(PluginIdentity(kind="ReporterPlugin", name=name))
    server = await serve_on_socket(Path(path), (service, introduced.service()))
    print("there", flush=True)  # the server ends when it is garbage-collected
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def plugin(path: Path, name: str, rack: str) -> asyncio.subprocess.Process:
    """Start a plugin process and wait for its socket."""
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


def racks(reporters: ReporterPlugins) -> list[str]:
    merged = merge_plugin_fields(build_cnr_report(finished(), metrics=False), reporters.fields())
    return [
        property_["propertyValues"][0]
        for property_ in merged.spec["spec"]["nodeResourceProperties"]
        if property_["propertyName"] == "rack"
    ]


async def test_fields_of_a_plugin_outlive_a_restart_and_then_expire(tmp_path: Path) -> None:
    changes = [0]

    def changed() -> None:
        changes[0] += 1

    reporters = ReporterPlugins(tmp_path, changed, retention_s=2)
    try:
        process = await plugin(tmp_path / "a.sock", "a", "7")
        await until_async(lambda: racks(reporters) == ["7"], step=reporters.scan)
        assert (changes, reporters.problem()) == ([1], None)
        await killed(process)
        # A killed process leaves its socket behind, which refuses connections.
        (tmp_path / "a.sock").unlink()
        await reporters.scan()
        assert racks(reporters) == ["7"]
        process = await plugin(tmp_path / "a.sock", "a", "8")
        await until_async(lambda: racks(reporters) == ["8"], step=reporters.scan)
        await killed(process)
        await until_async(lambda: racks(reporters) == [], step=reporters.scan)
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
        await until_async(lambda: racks(reporters) == ["1", "2"], step=reporters.scan)
    finally:
        reporters.close()
        await killed(first)
        await killed(second)


async def test_a_katalyst_agent_reads_the_report(tmp_path: Path) -> None:
    plugin_server = ReporterPluginServer(tmp_path)
    run = asyncio.create_task(plugin_server.run())
    changes = asyncio.Event()
    watcher = PluginWatcher({REPORTER_PLUGIN_KIND: REPORTER_PLUGIN_VERSIONS}, tmp_path)
    try:
        await until_async(lambda: bool(watcher.plugins(REPORTER_PLUGIN_KIND)), step=watcher.scan)
        assert plugin_server.problem() is None
        plugin_server.publish(finished())
        reporter = ReporterPluginClient(watcher.plugins(REPORTER_PLUGIN_KIND)[0], changes.set)
        watching = asyncio.create_task(reporter.run(60))
        await until_async(lambda: bool(reporter.fields()))
        values = {field.name: msgspec.json.decode(field.value) for field in reporter.fields()}
        assert values["Resources"]["allocatable"][RECLAIMED_CPU] == "5123"
        zones = [(zone["type"], zone["name"], zone["children"]) for zone in values["TopologyZone"]]
        assert [(kind, name, child[0]["resources"]["capacity"][RECLAIMED_CPU]) for kind, name, child in zones] == [
            ("Socket", "0", "2000"),
            ("Socket", "1", "3123"),
        ]
        # The Katalyst agent adds everything else itself; changes are pushed at once.
        assert {name for zone in values["TopologyZone"] for name in zone} == {"type", "name", "children"}
        changes.clear()
        ratios = OvercommitAdvice(cpu_ratio=1.5, memory_ratio=1.0, reason=Reason(rule="r", text="R."))
        changed = finished(msgspec.structs.replace(ADVERTISED, cores=1.0))
        plugin_server.publish(msgspec.structs.replace(changed, node=NodeAdvice(overcommit=ratios)))
        async with asyncio.timeout(10):
            await changes.wait()
        values = {field.name: msgspec.json.decode(field.value) for field in reporter.fields()}
        assert values["Resources"]["allocatable"][RECLAIMED_CPU] == "1000"
        assert values["Annotations"]["katalyst.kubewharf.io/cpu_overcommit_ratio"] == "1.50"
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    assert list(tmp_path.iterdir()) == []


async def test_a_report_without_a_katalyst_agent_is_a_problem(tmp_path: Path) -> None:
    problem = ReporterPluginServer(tmp_path).problem()
    assert problem is not None
    assert problem.reason == f"no Katalyst agent has registered {tmp_path}/dioptase-reporter.sock yet"


def test_a_node_cannot_both_collect_and_offer_reports() -> None:
    values = {"reporterPlugins": "/a"}
    assert msgspec.convert(values, ReportConfig).reporter_plugins == "/a"
    values["offeredIn"] = "/b"
    with pytest.raises(msgspec.ValidationError, match=r"reporterPlugins and offeredIn are both set: .* remove one"):
        msgspec.convert(values, ReportConfig)
