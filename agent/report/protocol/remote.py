"""Reporter plugins at sockets: asked once when they come, and listened to as long as they speak."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from agent.plugins import Plugin
from agent.rpc import NotOffered, Peer
from api.ports import Unavailable
from api.proto import reporter_plugin_pb2 as wire
from api.reports import Part, ReportedField

log = logging.getLogger(__name__)
KIND = "ReporterPlugin"
VERSIONS = ("v1alpha1",)
ASK_S = 5.0
"""Between two questions; what a plugin pushes is taken at once."""
FORGET_S = 60.0
"""What a plugin reported that is gone stays for so long: it may only be restarted."""
MOST_FIELDS = 1000
MOST_BYTES = 4 << 20
S = 1_000_000_000
_SERVICE = wire.DESCRIPTOR.services_by_name["ReporterPlugin"]
_PARTS = {wire.Spec: Part.SPEC, wire.Status: Part.STATUS, wire.Metadata: Part.METADATA}
_NAME = re.compile(r"[A-Z][A-Za-z0-9]{0,99}", re.ASCII)


class RemoteReporter:
    """One plugin. `changed` is called whenever it has something new to report."""

    def __init__(
        self,
        plugin: Plugin,
        changed: Callable[[], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
        forget_s: float = FORGET_S,
    ) -> None:
        self.plugin, self._changed, self._now_ns, self._forget_s = plugin, changed, now_ns, forget_s
        self._fields: tuple[ReportedField, ...] = ()
        self._heard_ns: int | None = None
        self.problem: Unavailable | None = None
        """Why it was not heard, or not understood, last; None where it was."""

    def fields(self) -> tuple[ReportedField, ...]:
        """What it reported last; nothing any more when it was not heard for a minute."""
        fresh = self._heard_ns is not None and self._now_ns() - self._heard_ns <= self._forget_s * S
        return self._fields if fresh else ()

    async def run(self, every_s: float = ASK_S) -> None:
        """Ask and listen until cancelled."""
        peer = Peer(self.plugin.socket, _SERVICE)
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

    async def _ask(self, peer: Peer) -> None:
        try:
            self._take(await peer.call("GetReportContent", wire.Empty()))
        except Unavailable as error:
            self._failed(error)

    async def _listen(self, peer: Peer, every_s: float) -> None:
        while True:
            try:
                async for answer in peer.stream("ListAndWatchReportContent", wire.Empty()):
                    self._take(answer)
            except NotOffered:
                return  # it is asked instead
            except Unavailable as error:
                self._failed(error)
            await asyncio.sleep(every_s)

    def _take(self, answer: Any) -> None:
        try:
            fields = read(self.plugin.name, answer)
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


def read(plugin: str, answer: Any) -> tuple[ReportedField, ...]:
    """What a GetReportContentResponse says, in its order. Raises Unavailable that names the field; then nothing is taken."""
    found: list[ReportedField] = []
    size = 0
    for index, content in enumerate(answer.content):
        kind = content.groupVersionKind
        where = f"content[{index}]"
        if not kind.kind or not kind.version:
            raise _wrong(plugin, f"{where}.groupVersionKind has no kind or no version")
        for number, field in enumerate(content.field):
            its = f"{where}.field[{number}]"
            size += len(field.value)
            if len(found) >= MOST_FIELDS or size > MOST_BYTES:
                raise _wrong(plugin, f"{its}: more than {MOST_FIELDS} fields or {MOST_BYTES >> 20} MiB are reported")
            if field.fieldType not in _PARTS:
                raise _wrong(plugin, f"{its}.fieldType is {field.fieldType}")
            if not _NAME.fullmatch(field.fieldName):
                raise _wrong(plugin, f"{its}.fieldName {field.fieldName!r:.80} is no name of a field in Go")
            try:
                msgspec.json.decode(field.value)
            except (msgspec.DecodeError, ValueError, RecursionError):
                raise _wrong(plugin, f"{its}.value is not JSON: {field.value[:80]!r}") from None
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


def gathered(reporters: Sequence[RemoteReporter]) -> tuple[ReportedField, ...]:
    """What all of them report, in the order of their names: who merges it sees the same every time."""
    ordered = sorted(reporters, key=lambda reporter: reporter.plugin.name)
    return tuple(field for reporter in ordered for field in reporter.fields())


def _wrong(plugin: str, what: str) -> Unavailable:
    return Unavailable(f"reporter plugin {plugin}: {what}", "what it reported before stands; see its version")
