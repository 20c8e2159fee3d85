"""Reporter plugins over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.katalyst.plugin_watcher import DiscoveredPlugin
from agent.katalyst.reporter_plugins import ReporterPluginClient, collect_fields, decode_fields
from api.interfaces import Unavailable
from api.node_resources import ObjectSection
from api.proto import reporter_plugin_pb2 as wire
from common.grpc_unix import GrpcService, serve_on_socket
from tests.builders.waiting import until_async

SERVICE = wire.DESCRIPTOR.services_by_name["ReporterPlugin"]
GOLDEN = json.loads((Path(__file__).resolve().parents[2] / "golden" / "protocols.json").read_text())
S = 1_000_000_000


def content(value: str = "[]", name: str = "TopologyZone") -> wire.GetReportContentResponse:
    response = wire.GetReportContentResponse()
    content_ = response.content.add()
    content_.groupVersionKind.group, content_.groupVersionKind.version = "node.katalyst.kubewharf.io", "v1alpha1"
    content_.groupVersionKind.kind = "CustomNodeResource"
    content_.field.add(fieldType=wire.Status, fieldName=name, value=value.encode())
    return response


def test_what_a_stock_plugin_reports() -> None:
    answer = wire.GetReportContentResponse.FromString(
        bytes.fromhex(GOLDEN["reporterplugin.v1alpha1.GetReportContentResponse"])
    )
    (field,) = decode_fields("p", answer)
    assert (field.group, field.version, field.kind) == ("node.katalyst.kubewharf.io", "v1alpha1", "CustomNodeResource")
    assert (field.part, field.name, bytes(field.value)) == (ObjectSection.STATUS, "TopologyZone", b"[]")


async def test_pushed_fields_are_used_at_once_and_old_ones_expire(tmp_path: Path) -> None:
    answer, pushes, now, changes = content("1"), asyncio.Queue[wire.GetReportContentResponse](), [0], [0]

    async def get(_request: Any, _words: Mapping[str, str]) -> Any:
        return answer

    async def watch(_request: Any, _words: Mapping[str, str]) -> AsyncIterator[Any]:
        while True:
            yield await pushes.get()

    server = await serve_on_socket(
        tmp_path / "p.sock", (GrpcService(SERVICE, {"GetReportContent": get, "ListAndWatchReportContent": watch}),)
    )

    def changed() -> None:
        changes[0] += 1

    reporter = ReporterPluginClient(
        DiscoveredPlugin(kind="ReporterPlugin", name="p", socket=server.path, inode=1), changed, lambda: now[0]
    )
    run = asyncio.create_task(reporter.run(30))
    await until_async(lambda: bool(reporter.fields()))
    assert bytes(reporter.fields()[0].value) == b"1"
    await pushes.put(content("2"))
    await until_async(lambda: bytes(reporter.fields()[0].value) == b"2")
    await pushes.put(content("2"))
    await pushes.put(content("{", name="Broken"))
    await until_async(lambda: reporter.problem is not None)
    assert reporter.problem is not None
    assert "content[0].field[0].value is not JSON: b'{'" in reporter.problem.reason
    assert bytes(collect_fields([reporter])[0].value) == b"2", "the previous fields stay"
    assert changes == [2]
    now[0] = 61 * S
    assert reporter.fields() == ()
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    await server.stop()


async def test_a_plugin_without_a_stream_is_polled(tmp_path: Path) -> None:
    answer = content("1")

    async def get(_request: Any, _words: Mapping[str, str]) -> Any:
        return answer

    server = await serve_on_socket(tmp_path / "p.sock", (GrpcService(SERVICE, {"GetReportContent": get}),))
    reporter = ReporterPluginClient(
        DiscoveredPlugin(kind="ReporterPlugin", name="p", socket=server.path, inode=1), lambda: None, lambda: 0
    )
    run = asyncio.create_task(reporter.run(0.02))
    await until_async(lambda: bool(reporter.fields()))
    answer.content[0].field[0].value = b"2"
    await until_async(lambda: bytes(reporter.fields()[0].value) == b"2")
    await server.stop()
    await until_async(lambda: reporter.problem is not None)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda content: setattr(content.groupVersionKind, "kind", ""), r"content\[0\]\.groupVersionKind has no kind"),
        (lambda content: content.field[0].MergeFromString(b"\x08\x09"), r"field\[0\]\.fieldType is 9"),
        (
            lambda content: setattr(content.field[0], "fieldName", "status.x"),
            r"fieldName 'status\.x' is no exported field name",
        ),
        (lambda content: content.field.extend([content.field[0]] * 1000), "more than 1000 fields"),
        (lambda content: setattr(content.field[0], "value", b" " * (5 << 20)), "or 4 MiB are reported"),
    ],
)
def test_an_invalid_answer_names_its_field(change: Any, text: str) -> None:
    answer = content()
    change(answer.content[0])
    with pytest.raises(Unavailable, match=text):
        decode_fields("p", answer)


@given(st.binary(max_size=300))
def test_arbitrary_values_are_decoded_or_refused(data: bytes) -> None:
    answer = content()
    answer.content[0].field[0].value = data
    try:
        decode_fields("p", answer)
    except Unavailable as error:
        assert len(error.reason) < 500  # noqa: PT017 - either outcome is right
