"""The threads that write the agent's files: no other thread waits for the disk of the state directory.
Originals have a thread of their own, because writes of knobs wait for them. The other thread writes records, which nothing
waits for.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from pathlib import Path

from agent.journal.decisions import DecisionJournal
from agent.journal.evictions import EvictionJournal
from agent.qrm.actuator.originals import OriginalsJournal, StateDirLocked
from agent.qrm.actuator.state_dir import open_originals
from api.interfaces import Unavailable
from common.disk_writer import DiskWriter

log = logging.getLogger("dioptase")
CLOSE_TIMEOUT_S = 5.0
"""Time that the end of the agent waits for each thread. Both must end within the grace period of the pod: 60 s in the chart."""


class StateWriters:
    """The two writer threads: one for originals and the CPU state, one for records."""

    def __init__(self) -> None:
        self.originals, self.records = DiskWriter("originals"), DiskWriter("records")

    def open_journal(
        self, state_dir: Path, boot_id: str, stack: AsyncExitStack, *, required: bool
    ) -> tuple[OriginalsJournal | None, tuple[str, ...]]:
        """Open the journal of originals, which locks the state directory, and return it with warnings. Without the lock it
        is None, which an agent that acts (`required`) must not accept: then StateDirLocked is raised."""
        try:
            originals = open_originals(state_dir, boot_id, self.originals)
        except StateDirLocked:
            if required:
                raise
            return None, ()
        except Unavailable as error:
            return None, (f"{error.reason}: {error.remedy}.",)
        stack.callback(self._close_journal, originals)
        return originals, originals.messages

    def open_journals(
        self, directory: Path | None, stack: AsyncExitStack, *, evicting: bool
    ) -> tuple[DecisionJournal, EvictionJournal | None]:
        """Open the journals of decisions and, if `evicting`, of evictions; without a directory they stay in memory
        only."""
        decisions = DecisionJournal(None if directory is None else directory / "decisions.jsonl", disk=self.records)
        evictions = None
        stack.callback(decisions.close)
        if evicting:
            path = None if directory is None else directory / "evictions.jsonl"
            evictions = EvictionJournal(path, disk=self.records)
            stack.callback(evictions.close)
        return decisions, evictions

    def close(self) -> bool:
        """Wait until all files are written, for a bounded time; return whether they are. Idempotent."""
        missing = [writer for writer in (self.originals, self.records) if not writer.close(CLOSE_TIMEOUT_S)]
        for writer in missing:
            log.warning(
                "The disk of the state directory did not answer within %.0f s: the newest %s are not saved",
                CLOSE_TIMEOUT_S,
                writer.name,
            )
        return not missing

    def _close_journal(self, originals: OriginalsJournal) -> None:
        """Close the threads, then release the lock of the state directory. If a write is still under way, the lock stays
        until the process has ended: another agent must not write the same file."""
        if self.close():
            originals.close()
