"""/proc and /sys as the node's sources see them: files kept open, and what could not be had, each with its remedy.

A source is a function that takes `NodeFiles` and returns fields of a NodeSample. What every machine has is read by
`parse`, and missing it is a problem; what only some have is read by `look`, and missing it is told to whoever asks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from agent.sense.files import Budget, PiecedFile
from api.ports import Unavailable, Vanished

Value = TypeVar("Value")
HOST_PROC = "give the agent the host's /proc"
LONGEST_ATTRIBUTE_BYTES = 1 << 16
"""Of a file below /sys: the kernel gives them a page, and the distance list of a thousand nodes is shorter."""


class NodeFiles:
    """Readers of files below two roots. `close` gives the descriptors back."""

    def __init__(self, proc: Path, sys: Path) -> None:
        self.proc, self.sys = proc, sys
        self._budget = Budget()
        self._kept: dict[Path, PiecedFile] = {}
        self._failures: dict[str, dict[str, str]] = {}
        self._lacks: dict[str, dict[str, Unavailable]] = {}
        self._source = ""

    def begin(self, source: str) -> None:
        """What is told from now on is told by this source, in place of what it told the last time."""
        self._source = source
        self._failures[source], self._lacks[source] = {}, {}

    def parse(self, name: str, parse: Callable[[bytes], Value | None], remedy: str = HOST_PROC) -> Value | None:
        """What a file below /proc says. None, and a failure, where it is missing, refused, or says nothing of use."""
        try:
            value = parse(self.text(self.proc / name)) or None
        except Vanished:
            self.fail(f"{name} is missing", remedy)
        except OSError as error:
            self.fail(f"{name}: {error.strerror}", remedy)
        else:
            if value is None:
                self.fail(f"{name} is not what it should be", remedy)
            return value
        return None

    def look(self, path: Path, *, keep: bool = False) -> bytes:
        """A file that need not be there: its text, empty where it is not or has nothing to say. `keep` it open or not."""
        try:
            return self.text(path) if keep else self.short_text(path)
        except (Vanished, OSError):
            return b""  # OSError is also what speed says of an interface that is down

    def exists(self, path: Path) -> bool:
        """Whether there is such a file or directory."""
        return path.exists()

    def text(self, path: Path) -> bytes:
        """The text of a file that is then kept open. Raises Vanished or OSError."""
        if path not in self._kept:
            self._kept[path] = PiecedFile(self._budget, os.fsencode(path), long=True)
        return self._kept[path].read()

    def short_text(self, path: Path) -> bytes:
        """The text of a short file. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(fd, LONGEST_ATTRIBUTE_BYTES)
        finally:
            os.close(fd)

    def numbered(self, directory: Path, prefix: str) -> Iterator[tuple[int, Path]]:
        """Entries such as node0 and cpu12 by number, in order. Nothing where there is no such directory."""
        pattern = re.compile(rf"{prefix}([0-9]{{1,5}})", re.ASCII)
        matches = (pattern.fullmatch(name) for name in self.names(directory))
        for number, name in sorted((int(match[1]), match[0]) for match in matches if match):
            yield number, directory / name

    def names(self, directory: Path) -> list[str]:
        """Sorted names of what is in a directory; none where it cannot be listed."""
        try:
            return sorted(os.listdir(directory))  # noqa: PTH208 - names alone, hundreds of them
        except OSError:
            return []

    def fail(self, error: str, remedy: str) -> None:
        """Something is missing that every machine has."""
        self._failures[self._source][error] = remedy

    def lack(self, reason: str, remedy: str) -> None:
        """Something is missing that many machines do not have."""
        self._lacks[self._source][reason] = Unavailable(reason, remedy)

    def failures(self) -> dict[str, str]:
        """Remedies by error, of all sources at their latest reading."""
        return {error: remedy for failures in self._failures.values() for error, remedy in failures.items()}

    def lacks(self) -> tuple[tuple[str, Unavailable], ...]:
        """What this machine does not have, each with its source, of all sources at their latest reading."""
        return tuple((source, lack) for source, lacks in self._lacks.items() for lack in lacks.values())

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for file in self._kept.values():
            file.close()
