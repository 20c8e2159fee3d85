"""Reporter plugins of this node, as Katalyst's agent would have them: found in a directory, heard, and forgotten."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from agent.plugins import Plugin, PluginWatcher
from agent.report.protocol.remote import ASK_S, FORGET_S, KIND, VERSIONS, RemoteReporter, gathered
from api.ports import Seen, Unavailable
from api.reports import ReportedField

log = logging.getLogger(__name__)
LOOK_S = 5.0
S = 1_000_000_000


class Reporters:
    """All of them, and a source of its own (api.ports.Probe) that says how they fare. `changed` is called whenever one has
    something new to say, or is forgotten."""

    name, form = "reporter-plugins", "sockets"
    lost_events = None

    def __init__(self, directory: Path, changed: Callable[[], None], forget_s: float = FORGET_S) -> None:
        self._watcher = PluginWatcher({KIND: VERSIONS}, directory)
        self._changed, self._forget_ns, self._ask_s = changed, round(forget_s * S), min(ASK_S, forget_s / 4)
        self._heard: dict[Plugin, tuple[RemoteReporter, asyncio.Task[None]]] = {}
        self._gone: dict[str, tuple[RemoteReporter, int]] = {}
        """By name, and until when what they said stands."""

    def fields(self) -> tuple[ReportedField, ...]:
        """What they report, those that are gone since less than a minute too: they may only be restarted."""
        gone = [reporter for reporter, _ in self._gone.values()]
        return gathered([*gone, *(reporter for reporter, _ in self._heard.values())])

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:  # noqa: ARG002 - as every source is asked
        return Seen()

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

    async def run(self, every_s: float = LOOK_S) -> None:
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
        there, now_ns = self._watcher.plugins(KIND), time.monotonic_ns()
        for plugin in [one for one in self._heard if one not in there]:
            reporter, task = self._heard.pop(plugin)
            task.cancel()
            self._gone[plugin.name] = reporter, now_ns + self._forget_ns
        for plugin in there:
            if (ended := self._ended(plugin)) is not None:
                log.error("asking reporter plugin %s ended by a bug; it is begun again", plugin.name, exc_info=ended)
                del self._heard[plugin]
            if plugin not in self._heard:
                reporter = RemoteReporter(plugin, self._heard_of(plugin.name), forget_s=self._forget_ns / S)
                self._heard[plugin] = reporter, asyncio.create_task(reporter.run(self._ask_s))
        for name in [name for name, (_, until_ns) in self._gone.items() if until_ns <= now_ns]:
            del self._gone[name]
            self._changed()

    def _ended(self, plugin: Plugin) -> BaseException | None:
        """The bug that ended asking it; None where there was none."""
        task = self._heard[plugin][1] if plugin in self._heard else None
        return None if task is None or not task.done() or task.cancelled() else task.exception()

    def _heard_of(self, name: str) -> Callable[[], None]:
        def changed() -> None:
            self._gone.pop(name, None)  # it is back, and says itself what is so
            self._changed()

        return changed
