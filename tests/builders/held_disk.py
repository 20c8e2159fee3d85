"""A disk that answers when a test says so, in place of the disk thread of an agent."""

from __future__ import annotations

from collections.abc import Callable


class HeldDisk:
    """A FileWriter that holds every write until `answer`."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[], None]] = {}
        self.done: list[str] = []
        """Names of the writes that have run, in order."""

    def submit(self, name: str, write: Callable[[], None]) -> bool:
        self.waiting[name] = write
        return False

    def answer(self) -> None:
        """Run every write that waits."""
        waiting, self.waiting = self.waiting, {}
        for name, write in waiting.items():
            write()
            self.done.append(name)
