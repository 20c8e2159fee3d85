"""Reports reclaimable resources to a Katalyst agent on this node, as one of its reporter plugins.
That agent then writes the CustomNodeResource object, and this agent does not.
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
from api.interfaces import ProbeReading, Unavailable
from api.katalyst.cnr import TopologyZone, ZoneResources
from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.proto import reporter_plugin_pb2 as wire
from common.grpc_unix import GrpcHandler, GrpcService

PLUGIN_NAME, PLUGIN_SOCKET = "dioptase-reporter", "dioptase-reporter.sock"
_SERVICE = wire.DESCRIPTOR.services_by_name["ReporterPlugin"]
_RECLAIMED_RESOURCES = (RECLAIMED_CPU, RECLAIMED_MEMORY)


class ReporterPluginServer:
    """Sink of rounds and a source of its own (api.interfaces.Probe)."""

    name, form = "offered-report", "socket"
    lost_events = None

    def __init__(self, directory: Path, *, lends: bool = True) -> None:
        """Where that agent looks for plugins; it is offered nothing unless this node `lends`."""
        self._lends = lends
        self._content = wire.GetReportContentResponse()
        self._changed = asyncio.Event()
        self._introduced = PluginRegistration(PluginIdentity(kind="ReporterPlugin", name=PLUGIN_NAME))
        handlers: dict[str, GrpcHandler] = {"GetReportContent": self._get, "ListAndWatchReportContent": self._watch}
        self._presence = PluginEndpoint(directory / PLUGIN_SOCKET, self._introduced, GrpcService(_SERVICE, handlers))

    def publish(self, finished: Cycle) -> None:
        """Take what this round advertises; never waits. What is not known yet leaves everything as it is."""
        status = build_cnr_report(finished, metrics=False, lends=self._lends).status
        if status is None:
            return
        content = _encode_content(status.resources, status.topology_zone or ())
        if content != self._content:
            self._content = content
            # Who watches has the old event, and waits for the new one from then on.
            self._changed.set()
            self._changed = asyncio.Event()

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

    def problem(self) -> Unavailable | None:
        """Why nobody is told; None where somebody is."""
        if self._presence.problem is not None:
            return self._presence.problem
        if self._introduced.registered is None:
            return Unavailable(
                f"no Katalyst agent has asked at {self._presence.path} yet", "name the directory that it watches"
            )
        if not self._introduced.registered:
            return Unavailable(f"the Katalyst agent does not take our report: {self._introduced.error}", "see its log")
        return None

    def close(self) -> None:
        """The socket is taken away by `run` when that is cancelled."""

    async def run(self) -> None:
        """Be there until cancelled."""
        await self._presence.run()

    async def _get(self, _request: Any, _words: Mapping[str, str]) -> Any:
        return self._content

    async def _watch(self, _request: Any, _words: Mapping[str, str]) -> AsyncIterator[Any]:
        while True:
            changed = self._changed
            if self._content.content:
                yield self._content
            await changed.wait()


def _encode_content(resources: ZoneResources | None, zones: Iterable[TopologyZone]) -> wire.GetReportContentResponse:
    """Resources, and of the zones what is lent: everything else that agent knows itself, and strings lists together."""
    said = wire.GetReportContentResponse()
    one = said.content.add()
    one.groupVersionKind.group, one.groupVersionKind.version, one.groupVersionKind.kind = GROUP, VERSION, KIND
    if resources is not None:
        one.field.add(fieldType=wire.Status, fieldName="Resources", value=msgspec.json.encode(resources))
    if lent := [zone for zone in map(_reclaimed_zone, zones) if zone.children]:
        one.field.add(fieldType=wire.Status, fieldName="TopologyZone", value=msgspec.json.encode(lent))
    return said


def _reclaimed_zone(zone: TopologyZone) -> TopologyZone:
    amounts = {} if zone.resources is None else zone.resources.allocatable or {}
    promised = {name: amounts[name] for name in _RECLAIMED_RESOURCES if name in amounts}
    children = tuple(child for child in map(_reclaimed_zone, zone.children or ()) if child.resources or child.children)
    return TopologyZone(
        type=zone.type,
        name=zone.name,
        resources=ZoneResources(allocatable=promised, capacity=promised) if promised else None,
        children=children or None,
    )
