"""A watch as pure parts: bytes to lines, lines to events, and where to go on after whatever ended it.

The API server sends one JSON document a line. It may end a watch at any moment, and keeps only some minutes of history:
after an end, the next watch goes on from the last version seen; once that version is too old (410), everything is listed anew.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Generic

import msgspec

from kube.errors import ApiError, Garbage, refusal
from kube.objects import Bare, Resource, T, key_of
from kube.pace import Backoff

LONGEST_LINE_BYTES = 16 << 20
"""Objects are held to 1.5 MiB by etcd, or a little more where it is set so; a longer line is no watch."""
STEADY_S = 5.0
"""A watch that lasted so long had nothing wrong with it."""
PACE = Backoff(first_s=0.5, most_s=30.0)


class Lines:
    """Lines of a stream that comes in pieces. An unfinished last line is never an event: the watch goes on before it."""

    def __init__(self, longest: int = LONGEST_LINE_BYTES) -> None:
        self._longest = longest
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that this piece ends, without empty ones. Raises Garbage for one that is too long."""
        head, *rest = piece.split(b"\n")
        self._keep(head)
        if not rest:
            return []
        first = b"".join(self._parts)
        self._parts, self._size = [], 0
        self._keep(rest[-1])
        return [line for line in (first, *rest[:-1]) if line.strip()]

    def _keep(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > self._longest:
            raise Garbage(f"a line of a watch has more than {self._longest} bytes")


class What(StrEnum):
    """What an event says."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


class Event(msgspec.Struct, Generic[T], frozen=True):
    """One object that changed, or a bookmark: that everything up to this version was sent."""

    what: What
    key: str
    resource_version: str
    object: T | None = None
    """None of a bookmark, and where the object does not fit its type."""
    problem: str = ""
    """Why it does not."""


class _Line(msgspec.Struct):
    type: str
    object: msgspec.Raw


def read(line: bytes, resource: Resource[T]) -> Event[T]:
    """The event of one line. Raises ApiError where it says that the watch has failed, and Garbage for what is no event.

    An object that does not fit its type is an event with a problem: one that somebody made by hand must not end the watch.
    """
    try:
        said = msgspec.json.decode(line, type=_Line)
        if said.type == "ERROR":
            raise refusal(500, bytes(said.object))
        what = What(said.type)
        bare = msgspec.json.decode(said.object, type=Bare)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise Garbage(f"not an event of a watch: {line[:80]!r}: {error}") from None
    version = bare.metadata.resource_version
    if what is What.BOOKMARK:
        return Event(what, "", version)
    known, problem = decoded(said.object, resource)
    return Event(what, key_of(bare.metadata), version, known, problem)


def decoded(raw: bytes | msgspec.Raw, resource: Resource[T]) -> tuple[T | None, str]:
    """The object, or why it does not fit its type."""
    try:
        return msgspec.json.decode(raw, type=resource.type), ""
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return None, str(error)


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """Where a reader of one resource is: to watch from `resource_version`, or to list when that is None, after `wait_s`."""

    resource_version: str | None = None
    wait_s: float = 0.0
    failures: int = 0
    """In a row, since a list or an event last came in order."""
    relists: int = 0
    """Lists that were needed after the first one."""

    def listed(self, resource_version: str) -> Following:
        """A list came. Failures stay until something was watched: a watch that never works must wait, whatever lists do."""
        return msgspec.structs.replace(self, resource_version=resource_version, wait_s=0.0)

    def saw(self, resource_version: str) -> Following:
        """An event came, or a bookmark."""
        if not resource_version:
            return self
        return msgspec.structs.replace(self, resource_version=resource_version, failures=0, wait_s=0.0)

    def ended(self, lasted_s: float, jitter: float) -> Following:
        """The server closed the watch, as it does every few minutes: go on from the same version.

        One that ends as soon as it begins is taken as a failure, or it would be asked for without pause.
        """
        return msgspec.structs.replace(self, failures=0, wait_s=0.0) if lasted_s >= STEADY_S else self.cut(jitter)

    def cut(self, jitter: float) -> Following:
        """The connection broke, or was never made: go on from the same version, a little later."""
        failures = self.failures + 1
        return msgspec.structs.replace(self, failures=failures, wait_s=PACE.wait_s(failures, jitter))

    def refused(self, error: ApiError, jitter: float) -> Following:
        """The server said no. 410 means that the version is too old: list at once, but wait when that keeps happening. Asked
        to wait (429), the version stays good. After all else it is not known what was missed: list."""
        after = self.cut(jitter)
        wait_s = max(after.wait_s, min(error.retry_after_s or 0.0, PACE.most_s))
        if error.status in (429, 503, 504):
            return msgspec.structs.replace(after, wait_s=wait_s)
        had = self.resource_version is not None
        if error.expired and self.failures == 0:
            wait_s = 0.0
        return msgspec.structs.replace(after, resource_version=None, wait_s=wait_s, relists=self.relists + had)

    def garbled(self, jitter: float) -> Following:
        """What came was no watch: list, later."""
        had = self.resource_version is not None
        return msgspec.structs.replace(self.cut(jitter), resource_version=None, relists=self.relists + had)
