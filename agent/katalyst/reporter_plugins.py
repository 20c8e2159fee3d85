"""Discovers reporter plugins, polls and watches each of them, and collects the fields that they report.
Fields of a plugin that disappeared are retained for `RETENTION_S`, because it may only be restarting.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from agent.katalyst.plugin_watcher import DiscoveredPlugin, PluginWatcher
from api.interfaces import Unavailable
from api.node_resources import ObjectSection, ReportedField
from api.proto import reporter_plugin_pb2 as wire
from api.text import quote
from api.units import NS_PER_S
from common.grpc_unix import GrpcClient, MethodNotOffered

log = logging.getLogger(__name__)
REPORTER_PLUGIN_KIND = "ReporterPlugin"
REPORTER_PLUGIN_VERSIONS = ("v1alpha1",)
POLL_INTERVAL_S = 5.0
"""Interval of GetReportContent; messages of a stream are used at once."""
SCAN_INTERVAL_S = 5.0
RETENTION_S = 60.0
"""Time for which fields of a removed plugin are retained, because it may only be restarting."""
MAX_FIELDS = 1000
MAX_BYTES = 4 << 20
_SERVICE = wire.DESCRIPTOR.services_by_name["ReporterPlugin"]
_PARTS = {wire.Spec: ObjectSection.SPEC, wire.Status: ObjectSection.STATUS, wire.Metadata: ObjectSection.METADATA}
_GO_FIELD_NAME = re.compile(r"[A-Z][A-Za-z0-9]{0,99}", re.ASCII)


class ReporterPluginClient:
    """Client of one plugin; `changed` is called whenever its fields change."""

    def __init__(
        self,
        plugin: DiscoveredPlugin,
        changed: Callable[[], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
        retention_s: float = RETENTION_S,
    ) -> None:
        self.plugin, self._changed, self._now_ns, self._retention_s = plugin, changed, now_ns, retention_s
        self._fields: tuple[ReportedField, ...] = ()
        self._answered_ns: int | None = None
        self.problem: Unavailable | None = None
        """Why the last call failed or was rejected; None otherwise."""

    def fields(self) -> tuple[ReportedField, ...]:
        """Return the latest fields; empty after the retention without an answer."""
        fresh = self._answered_ns is not None and self._now_ns() - self._answered_ns <= self._retention_s * NS_PER_S
        return self._fields if fresh else ()

    async def run(self, every_s: float = POLL_INTERVAL_S) -> None:
        """Poll and watch until cancelled."""
        client = GrpcClient(self.plugin.socket, _SERVICE, trusted_uids=self.plugin.trusted_uids)
        watching = asyncio.create_task(self._watch(client, every_s))
        try:
            while True:
                await self._poll(client)
                await asyncio.sleep(every_s)
                if watching.done():
                    watching.result()  # Raise the exception of a bug; without the stream method polling goes on.
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await client.close()

    async def _poll(self, client: GrpcClient) -> None:
        try:
            self._accept(await client.call("GetReportContent", wire.Empty()))
        except Unavailable as error:
            self._failed(error)

    async def _watch(self, client: GrpcClient, every_s: float) -> None:
        while True:
            try:
                async for answer in client.stream("ListAndWatchReportContent", wire.Empty()):
                    self._accept(answer)
            except MethodNotOffered:
                return  # The plugin is polled instead.
            except Unavailable as error:
                self._failed(error)
            await asyncio.sleep(every_s)

    def _accept(self, answer: Any) -> None:
        try:
            fields = decode_fields(self.plugin.name, answer)
        except Unavailable as error:
            self._failed(error)
            return
        self._answered_ns, self.problem = self._now_ns(), None
        if fields != self._fields:
            self._fields = fields
            self._changed()

    def _failed(self, error: Unavailable) -> None:
        if self.problem is None or self.problem.reason != error.reason:
            log.warning("reporter plugin %s: %s", self.plugin.name, error.reason)
        self.problem = error


def decode_fields(plugin: str, answer: Any) -> tuple[ReportedField, ...]:
    """Return the fields of a GetReportContentResponse in its order. Raises Unavailable, naming the first invalid field."""
    fields: list[ReportedField] = []
    size = 0
    for index, content in enumerate(answer.content):
        kind = content.groupVersionKind
        where = f"content[{index}]"
        if not kind.kind or not kind.version:
            raise _invalid_report(plugin, f"{where}.groupVersionKind has no kind or no version")
        for number, field in enumerate(content.field):
            path = f"{where}.field[{number}]"
            size += len(field.value)
            if len(fields) >= MAX_FIELDS or size > MAX_BYTES:
                raise _invalid_report(
                    plugin, f"{path}: more than {MAX_FIELDS} fields or {MAX_BYTES >> 20} MiB are reported"
                )
            if field.fieldType not in _PARTS:
                raise _invalid_report(plugin, f"{path}.fieldType is {field.fieldType}")
            if not _GO_FIELD_NAME.fullmatch(field.fieldName):
                raise _invalid_report(
                    plugin, f"{path}.fieldName {quote(field.fieldName)} is no exported field name of Go"
                )
            try:
                msgspec.json.decode(field.value)
            except (msgspec.DecodeError, ValueError, RecursionError):
                raise _invalid_report(plugin, f"{path}.value is not JSON: {quote(field.value)}") from None
            fields.append(
                ReportedField(
                    plugin=plugin,
                    group=kind.group,
                    version=kind.version,
                    kind=kind.kind,
                    part=_PARTS[field.fieldType],
                    name=field.fieldName,
                    value=msgspec.Raw(field.value),
                )
            )
    return tuple(fields)


def collect_fields(reporters: Sequence[ReporterPluginClient]) -> tuple[ReportedField, ...]:
    """Return the fields of all plugins in the order of their names, so that merging them is deterministic."""
    ordered = sorted(reporters, key=lambda reporter: reporter.plugin.name)
    return tuple(field for reporter in ordered for field in reporter.fields())


def _invalid_report(plugin: str, what: str) -> Unavailable:
    return Unavailable(f"reporter plugin {plugin}: {what}", "check its version; until then its previous report is used")


class ReporterPlugins:
    """Discovers the plugins of a directory and runs one client for each. `changed` is called whenever a field changes or the
    fields of a removed plugin expire."""

    name, form = "reporter-plugins", "sockets"
    lost_events = None

    def __init__(
        self,
        directory: Path,
        changed: Callable[[], None],
        retention_s: float = RETENTION_S,
        trusted_uids: tuple[int, ...] = (),
    ) -> None:
        kinds = {REPORTER_PLUGIN_KIND: REPORTER_PLUGIN_VERSIONS}
        self._watcher = PluginWatcher(kinds, directory, trusted_uids=trusted_uids)
        self._changed, self._retention_s = changed, retention_s
        self._clients: dict[DiscoveredPlugin, tuple[ReporterPluginClient, asyncio.Task[None]]] = {}
        self._removed: dict[str, tuple[ReporterPluginClient, int]] = {}
        """Clients of removed plugins by name, and the expiry of their fields."""

    def fields(self) -> tuple[ReportedField, ...]:
        """Return the fields of all plugins, including recently removed ones."""
        removed = [reporter for reporter, _ in self._removed.values()]
        return collect_fields([*removed, *(reporter for reporter, _ in self._clients.values())])

    def problem(self) -> Unavailable | None:
        """Return the problem of one plugin or socket; None if there is none."""
        for reporter, _ in self._clients.values():
            if reporter.problem is not None:
                return reporter.problem
        return next((Unavailable(text, "fix or remove that plugin") for text in self._watcher.problems()), None)

    def close(self) -> None:
        """Stop the clients."""
        for _, task in self._clients.values():
            task.cancel()
        self._clients.clear()

    async def run(self, every_s: float = SCAN_INTERVAL_S) -> None:
        """Scan until cancelled."""
        try:
            while True:
                await self.scan()
                await asyncio.sleep(every_s)
        finally:
            self.close()

    async def scan(self) -> None:
        """Start clients of new plugins, stop those of removed ones, and drop expired fields."""
        await self._watcher.scan()
        plugins, now_ns = self._watcher.plugins(REPORTER_PLUGIN_KIND), time.monotonic_ns()
        for plugin in [plugin for plugin in self._clients if plugin not in plugins]:
            reporter, task = self._clients.pop(plugin)
            task.cancel()
            self._removed[plugin.name] = reporter, now_ns + round(self._retention_s * NS_PER_S)
        for plugin in plugins:
            if (ended := self._ended(plugin)) is not None:
                log.error(
                    "the client of reporter plugin %s ended because of a bug and is restarted",
                    plugin.name,
                    exc_info=ended,
                )
                del self._clients[plugin]
            if plugin not in self._clients:
                on_change = partial(self._on_change, plugin.name)
                reporter = ReporterPluginClient(plugin, on_change, retention_s=self._retention_s)
                poll_s = min(POLL_INTERVAL_S, self._retention_s / 4)
                self._clients[plugin] = reporter, asyncio.create_task(reporter.run(poll_s))
        for name in [name for name, (_, until_ns) in self._removed.items() if until_ns <= now_ns]:
            del self._removed[name]
            self._changed()

    def _ended(self, plugin: DiscoveredPlugin) -> BaseException | None:
        """Return the exception that ended the client; None if it runs."""
        task = self._clients[plugin][1] if plugin in self._clients else None
        return None if task is None or not task.done() or task.cancelled() else task.exception()

    def _on_change(self, name: str) -> None:
        self._removed.pop(name, None)  # The plugin is back and reports its own fields.
        self._changed()
