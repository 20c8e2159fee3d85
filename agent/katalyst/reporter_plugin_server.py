"""Reports reclaimable resources to a Katalyst agent on this node, as one of its reporter plugins.
The Katalyst agent then writes the CustomNodeResource object, and this agent does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent.katalyst.plugin_registration import PluginEndpoint, PluginIdentity, PluginRegistration
from agent.reporter.cnr import build_cnr_report
from agent.reporter.cnr_merge import GROUP, KIND, VERSION
from api.decision import Cycle
from api.interfaces import Unavailable
from api.katalyst.cnr import TopologyZone, ZoneResources
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.proto import reporter_plugin_pb2 as wire
from common.grpc_unix import GrpcHandler, GrpcService

PLUGIN_NAME, PLUGIN_SOCKET = "dioptase-reporter", "dioptase-reporter.sock"
_SERVICE = wire.DESCRIPTOR.services_by_name["ReporterPlugin"]
_RECLAIMED_RESOURCES = (RECLAIMED_CPU, RECLAIMED_MEMORY)


class ReporterPluginServer:
    """Sink of cycles and health component."""

    name, form = "offered-report", "socket"
    lost_events = None

    def __init__(self, directory: Path, *, reports_reclaimable: bool = True) -> None:
        """`directory` is where the Katalyst agent looks for plugin sockets. Without `reports_reclaimable`, as in a dry run, the
        report has no reclaimable resources."""
        self._reports_reclaimable = reports_reclaimable
        self._annotations: Mapping[str, str] = {}
        self._content = wire.GetReportContentResponse()
        self._changed = asyncio.Event()
        self._registration = PluginRegistration(PluginIdentity(kind="ReporterPlugin", name=PLUGIN_NAME))
        handlers: dict[str, GrpcHandler] = {"GetReportContent": self._get, "ListAndWatchReportContent": self._watch}
        self._endpoint = PluginEndpoint(directory / PLUGIN_SOCKET, self._registration, GrpcService(_SERVICE, handlers))

    def publish(self, cycle: Cycle) -> None:
        """Take the headroom of this cycle. An unknown headroom keeps the previous report."""
        report = build_cnr_report(cycle, metrics=False, reports_reclaimable=self._reports_reclaimable)
        status = report.status
        if status is None:
            return
        self._annotations = report.annotations or self._annotations
        content = _encode_content(status.resources, status.topology_zone or (), self._annotations)
        if content != self._content:
            self._content = content
            # Watchers wait on the old event; the next wait uses the new one.
            self._changed.set()
            self._changed = asyncio.Event()

    def problem(self) -> Unavailable | None:
        """Return why no Katalyst agent takes the report; None if one does."""
        if self._endpoint.problem is not None:
            return self._endpoint.problem
        if self._registration.registered is None:
            return Unavailable(
                f"no Katalyst agent has registered {self._endpoint.path} yet",
                "set report.offeredIn to the directory that it watches",
            )
        if not self._registration.registered:
            return Unavailable(f"the Katalyst agent rejects the report: {self._registration.error}", "see its log")
        return None

    async def run(self) -> None:
        """Serve the socket until cancelled."""
        await self._endpoint.run()

    async def _get(self, _request: Any, _metadata: Mapping[str, str]) -> Any:
        return self._content

    async def _watch(self, _request: Any, _metadata: Mapping[str, str]) -> AsyncIterator[Any]:
        while True:
            changed = self._changed
            if self._content.content:
                yield self._content
            await changed.wait()


def _encode_content(
    resources: ZoneResources | None, zones: Iterable[TopologyZone], annotations: Mapping[str, str]
) -> wire.GetReportContentResponse:
    """Encode the reclaimable resources of the node and of its zones, and the overcommit annotations. Everything else is
    known to the Katalyst agent, which concatenates lists of its reporters."""
    response = wire.GetReportContentResponse()
    content = response.content.add()
    kind = content.groupVersionKind
    kind.group, kind.version, kind.kind = GROUP, VERSION, KIND
    if resources is not None:
        content.field.add(fieldType=wire.Status, fieldName="Resources", value=msgspec.json.encode(resources))
    if reclaimed := [zone for zone in map(_reclaimed_zone, zones) if zone.children]:
        content.field.add(fieldType=wire.Status, fieldName="TopologyZone", value=msgspec.json.encode(reclaimed))
    if annotations:
        content.field.add(fieldType=wire.Metadata, fieldName="Annotations", value=msgspec.json.encode(annotations))
    return response


def _reclaimed_zone(zone: TopologyZone) -> TopologyZone:
    amounts = {} if zone.resources is None else zone.resources.allocatable or {}
    reclaimed = {name: amounts[name] for name in _RECLAIMED_RESOURCES if name in amounts}
    children = tuple(child for child in map(_reclaimed_zone, zone.children or ()) if child.resources or child.children)
    return TopologyZone(
        type=zone.type,
        name=zone.name,
        resources=ZoneResources(allocatable=reclaimed, capacity=reclaimed) if reclaimed else None,
        children=children or None,
    )
