"""Discovers reporter plugins, polls and watches each of them, and collects the fields that they report.
Fields of a plugin that disappeared are kept for `RETENTION_S`, because it may only be restarting.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.katalyst.plugin_watcher import DiscoveredPlugin, PluginWatcher
from api.interfaces import ProbeReading, Unavailable
from api.node_resources import ObjectSection, ReportedField
from api.proto import reporter_plugin_pb2 as wire
from common.grpc_unix import GrpcClient, MethodNotOffered

log = logging.getLogger(__name__)
REPORTER_PLUGIN_KIND = "ReporterPlugin"
REPORTER_PLUGIN_VERSIONS = ("v1alpha1",)
POLL_INTERVAL_S = 5.0
"""Between two questions; what a plugin pushes is taken at once."""
RETENTION_S = 60.0
"""What a plugin reported that is gone stays for so long: it may only be restarted."""
MAX_FIELDS = 1000
MAX_BYTES = 4 << 20
NS_PER_S = 1_000_000_000
_SERVICE = wire.DESCRIPTOR.services_by_name["ReporterPlugin"]
_PARTS = {wire.Spec: ObjectSection.SPEC, wire.Status: ObjectSection.STATUS, wire.Metadata: ObjectSection.METADATA}
_GO_FIELD_NAME = re.compile(r"[A-Z][A-Za-z0-9]{0,99}", re.ASCII)


class ReporterPluginClient:
    """One plugin. `changed` is called whenever it has something new to report."""

    def __init__(
        self,
        plugin: DiscoveredPlugin,
        changed: Callable[[], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
        forget_s: float = RETENTION_S,
    ) -> None:
        self.plugin, self._changed, self._now_ns, self._forget_s = plugin, changed, now_ns, forget_s
        self._fields: tuple[ReportedField, ...] = ()
        self._heard_ns: int | None = None
        self.problem: Unavailable | None = None
        """Why it was not heard, or not understood, last; None where it was."""

    def fields(self) -> tuple[ReportedField, ...]:
        """What it reported last; nothing any more when it was not heard for a minute."""
        fresh = self._heard_ns is not None and self._now_ns() - self._heard_ns <= self._forget_s * NS_PER_S
        return self._fields if fresh else ()

    async def run(self, every_s: float = POLL_INTERVAL_S) -> None:
        """Ask and listen until cancelled."""
        peer = GrpcClient(self.plugin.socket, _SERVICE)
        listening = asyncio.create_task(self._listen(peer, every_s))
        try:
            while True:
                await self._ask(peer)
                await asyncio.sleep(every_s)
                if listening.done():
                    listening.result()  # where it did not end because it is only asked, by a bug, which ends this too
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await peer.close()

    async def _ask(self, peer: GrpcClient) -> None:
        try:
            self._take(await peer.call("GetReportContent", wire.Empty()))
        except Unavailable as error:
            self._failed(error)

    async def _listen(self, peer: GrpcClient, every_s: float) -> None:
        while True:
            try:
                async for answer in peer.stream("ListAndWatchReportContent", wire.Empty()):
                    self._take(answer)
            except MethodNotOffered:
                return  # it is asked instead
            except Unavailable as error:
                self._failed(error)
            await asyncio.sleep(every_s)

    def _take(self, answer: Any) -> None:
        try:
            fields = decode_fields(self.plugin.name, answer)
        except Unavailable as error:
            self._failed(error)
            return
        self._heard_ns, self.problem = self._now_ns(), None
        if fields != self._fields:
            self._fields = fields
            self._changed()

    def _failed(self, error: Unavailable) -> None:
        if self.problem is None or self.problem.reason != error.reason:
            log.warning("reporter plugin %s: %s", self.plugin.name, error.reason)
        self.problem = error


def decode_fields(plugin: str, answer: Any) -> tuple[ReportedField, ...]:
    """What a GetReportContentResponse says, in its order. Raises Unavailable that names the field; then nothing is taken."""
    found: list[ReportedField] = []
    size = 0
    for index, content in enumerate(answer.content):
        kind = content.groupVersionKind
        where = f"content[{index}]"
        if not kind.kind or not kind.version:
            raise _invalid_report(plugin, f"{where}.groupVersionKind has no kind or no version")
        for number, field in enumerate(content.field):
            its = f"{where}.field[{number}]"
            size += len(field.value)
            if len(found) >= MAX_FIELDS or size > MAX_BYTES:
                raise _invalid_report(
                    plugin, f"{its}: more than {MAX_FIELDS} fields or {MAX_BYTES >> 20} MiB are reported"
                )
            if field.fieldType not in _PARTS:
                raise _invalid_report(plugin, f"{its}.fieldType is {field.fieldType}")
            if not _GO_FIELD_NAME.fullmatch(field.fieldName):
                raise _invalid_report(plugin, f"{its}.fieldName {field.fieldName!r:.80} is no name of a field in Go")
            try:
                msgspec.json.decode(field.value)
            except (msgspec.DecodeError, ValueError, RecursionError):
                raise _invalid_report(plugin, f"{its}.value is not JSON: {field.value[:80]!r}") from None
            found.append(
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
    return tuple(found)


def collect_fields(reporters: Sequence[ReporterPluginClient]) -> tuple[ReportedField, ...]:
    """What all of them report, in the order of their names: who merges it sees the same every time."""
    ordered = sorted(reporters, key=lambda reporter: reporter.plugin.name)
    return tuple(field for reporter in ordered for field in reporter.fields())


def _invalid_report(plugin: str, what: str) -> Unavailable:
    return Unavailable(f"reporter plugin {plugin}: {what}", "what it reported before stands; see its version")


SCAN_INTERVAL_S = 5.0
_NS_PER_S = 1_000_000_000


class ReporterPlugins:
    """All of them, and a source of its own (api.interfaces.Probe) that says how they fare. `changed` is called whenever one has
    something new to say, or is forgotten."""

    name, form = "reporter-plugins", "sockets"
    lost_events = None

    def __init__(self, directory: Path, changed: Callable[[], None], forget_s: float = RETENTION_S) -> None:
        self._watcher = PluginWatcher({REPORTER_PLUGIN_KIND: REPORTER_PLUGIN_VERSIONS}, directory)
        self._changed, self._forget_ns, self._ask_s = (
            changed,
            round(forget_s * _NS_PER_S),
            min(POLL_INTERVAL_S, forget_s / 4),
        )
        self._heard: dict[DiscoveredPlugin, tuple[ReporterPluginClient, asyncio.Task[None]]] = {}
        self._gone: dict[str, tuple[ReporterPluginClient, int]] = {}
        """By name, and until when what they said stands."""

    def fields(self) -> tuple[ReportedField, ...]:
        """What they report, those that are gone since less than a minute too: they may only be restarted."""
        gone = [reporter for reporter, _ in self._gone.values()]
        return collect_fields([*gone, *(reporter for reporter, _ in self._heard.values())])

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

    def problem(self) -> Unavailable | None:
        """What is wrong with one of them; None where all are well."""
        for reporter, _ in self._heard.values():
            if reporter.problem is not None:
                return reporter.problem
        return next((Unavailable(text, "mend or remove that plugin") for text in self._watcher.problems()), None)

    def close(self) -> None:
        """Stop listening."""
        for _, task in self._heard.values():
            task.cancel()
        self._heard.clear()

    async def run(self, every_s: float = SCAN_INTERVAL_S) -> None:
        """Until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(every_s)
        finally:
            self.close()

    async def look(self) -> None:
        """See who came, who went, and who is to be forgotten."""
        await self._watcher.look()
        there, now_ns = self._watcher.plugins(REPORTER_PLUGIN_KIND), time.monotonic_ns()
        for plugin in [one for one in self._heard if one not in there]:
            reporter, task = self._heard.pop(plugin)
            task.cancel()
            self._gone[plugin.name] = reporter, now_ns + self._forget_ns
        for plugin in there:
            if (ended := self._ended(plugin)) is not None:
                log.error("asking reporter plugin %s ended by a bug; it is begun again", plugin.name, exc_info=ended)
                del self._heard[plugin]
            if plugin not in self._heard:
                reporter = ReporterPluginClient(
                    plugin, self._heard_of(plugin.name), forget_s=self._forget_ns / _NS_PER_S
                )
                self._heard[plugin] = reporter, asyncio.create_task(reporter.run(self._ask_s))
        for name in [name for name, (_, until_ns) in self._gone.items() if until_ns <= now_ns]:
            del self._gone[name]
            self._changed()

    def _ended(self, plugin: DiscoveredPlugin) -> BaseException | None:
        """The bug that ended asking it; None where there was none."""
        task = self._heard[plugin][1] if plugin in self._heard else None
        return None if task is None or not task.done() or task.cancelled() else task.exception()

    def _heard_of(self, name: str) -> Callable[[], None]:
        def changed() -> None:
            self._gone.pop(name, None)  # it is back, and says itself what is so
            self._changed()

        return changed
