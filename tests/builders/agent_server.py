"""The agent's HTTP server on a thread of its own, showing rounds that a test hands it; for `top`, `explain` and the page."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence

from agent.journal.evictions import EvictionJournal
from api.decision import Cycle, JournalEntry
from common.http.token_review import TokenReviewer
from common.http.web_config import WebConfig
from exporters.page.web_server import AgentWebServer
from tests.builders.colocation_run import MemoryJournal


class AgentServer:
    """What a reader sees of an agent: it can be shown rounds, go away, and come back on the same port."""

    def __init__(
        self,
        entries: Sequence[JournalEntry] = (),
        web_config: WebConfig | None = None,
        tokens: TokenReviewer | None = None,
        node_name: str = "",
    ) -> None:
        self.journal = MemoryJournal(entries)
        self.evictions = EvictionJournal(None)
        self.port = 0
        self._web_config, self._tokens, self._node_name = web_config, tokens, node_name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: AgentWebServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Listen; on the same port as before, with nothing remembered."""
        self._server = AgentWebServer(
            journal=self.journal, evictions=self.evictions, version="test", web_config=self._web_config,
            tokens=self._tokens, node_name=self._node_name,
        )  # fmt: skip
        started = asyncio.run_coroutine_threadsafe(self._server.start("127.0.0.1", self.port), self._loop)
        self.port = started.result(10)

    def show(self, rounds: Iterable[Cycle]) -> None:
        assert self._server is not None
        for finished in rounds:
            self.evictions.publish(finished)
            self._server.publish(finished)

    def go_away(self) -> None:
        if self._server is not None:
            asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(10)
            self._server = None

    def close(self) -> None:
        self.go_away()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
