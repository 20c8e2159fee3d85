"""Pure parts of list and watch: event parsing, the position to resume from, and the in-memory object store.
The API server may end a watch at any time and keeps minutes of history: resume from the last version, list again
after 410.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from enum import StrEnum
from typing import Generic

import msgspec

from common.backoff import Backoff
from kube.errors import ApiError, InvalidResponse, parse_api_error
from kube.objects import PartialObjectMetadata, ResourceType, T, key_of

MAX_LINE_BYTES = 16 << 20
"""Objects are held to 1.5 MiB by etcd, or a little more where it is set so; a longer line is no watch."""
MIN_HEALTHY_WATCH_S = 5.0
"""A watch that lasted so long had nothing wrong with it."""
WATCH_BACKOFF = Backoff(first_s=0.5, max_s=30.0)


class LineSplitter:
    """Lines of a stream that comes in pieces. An unfinished last line is never an event: the watch goes on before it."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._longest = max_bytes
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
            raise InvalidResponse(f"a line of a watch has more than {self._longest} bytes")


class WatchEventType(StrEnum):
    """What an event says."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


class WatchEvent(msgspec.Struct, Generic[T], frozen=True):
    """One object that changed, or a bookmark: that everything up to this version was sent."""

    what: WatchEventType
    key: str
    resource_version: str
    object: T | None = None
    """None of a bookmark, and where the object does not fit its type."""
    problem: str = ""
    """Why it does not."""


class _WatchLine(msgspec.Struct):
    type: str
    object: msgspec.Raw


def parse_watch_event(line: bytes, resource: ResourceType[T]) -> WatchEvent[T]:
    """The event of one line. Raises ApiError where it says that the watch has failed, and Garbage for what is no event.

    An object that does not fit its type is an event with a problem: one that somebody made by hand must not end the watch.
    """
    try:
        said = msgspec.json.decode(line, type=_WatchLine)
        if said.type == "ERROR":
            raise parse_api_error(500, bytes(said.object))
        what = WatchEventType(said.type)
        bare = msgspec.json.decode(said.object, type=PartialObjectMetadata)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise InvalidResponse(f"not an event of a watch: {line[:80]!r}: {error}") from None
    version = bare.metadata.resource_version
    if what is WatchEventType.BOOKMARK:
        return WatchEvent(what, "", version)
    known, problem = decode_object(said.object, resource)
    return WatchEvent(what, key_of(bare.metadata), version, known, problem)


def decode_object(raw: bytes | msgspec.Raw, resource: ResourceType[T]) -> tuple[T | None, str]:
    """The object, or why it does not fit its type."""
    try:
        return msgspec.json.decode(raw, type=resource.type), ""
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return None, str(error)


class WatchPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a reader of one resource is: to watch from `resource_version`, or to list when that is None, after `wait_s`."""

    resource_version: str | None = None
    wait_s: float = 0.0
    failures: int = 0
    """In a row, since a list or an event last came in order."""
    relists: int = 0
    """Lists that were needed after the first one."""

    def listed(self, resource_version: str) -> WatchPosition:
        """A list came. Failures stay until something was watched: a watch that never works must wait, whatever lists do."""
        return msgspec.structs.replace(self, resource_version=resource_version, wait_s=0.0)

    def event_received(self, resource_version: str) -> WatchPosition:
        """An event came, or a bookmark."""
        if not resource_version:
            return self
        return msgspec.structs.replace(self, resource_version=resource_version, failures=0, wait_s=0.0)

    def ended(self, lasted_s: float, jitter: float) -> WatchPosition:
        """The server closed the watch, as it does every few minutes: go on from the same version.

        One that ends as soon as it begins is taken as a failure, or it would be asked for without pause.
        """
        return (
            msgspec.structs.replace(self, failures=0, wait_s=0.0)
            if lasted_s >= MIN_HEALTHY_WATCH_S
            else self.connection_lost(jitter)
        )

    def connection_lost(self, jitter: float) -> WatchPosition:
        """The connection broke, or was never made: go on from the same version, a little later."""
        failures = self.failures + 1
        return msgspec.structs.replace(self, failures=failures, wait_s=WATCH_BACKOFF.wait_s(failures, jitter))

    def refused(self, error: ApiError, jitter: float) -> WatchPosition:
        """The server said no. 410 means that the version is too old: list at once, but wait when that keeps happening. Asked
        to wait (429), the version stays good. After all else it is not known what was missed: list."""
        after = self.connection_lost(jitter)
        wait_s = max(after.wait_s, min(error.retry_after_s or 0.0, WATCH_BACKOFF.max_s))
        if error.status in (429, 503, 504):
            return msgspec.structs.replace(after, wait_s=wait_s)
        had = self.resource_version is not None
        if error.expired and self.failures == 0:
            wait_s = 0.0
        return msgspec.structs.replace(after, resource_version=None, wait_s=wait_s, relists=self.relists + had)

    def invalid_data_received(self, jitter: float) -> WatchPosition:
        """What came was no watch: list, later."""
        had = self.resource_version is not None
        return msgspec.structs.replace(self.connection_lost(jitter), resource_version=None, relists=self.relists + had)


IndexFunction = Callable[[T], str]


class ObjectChange(msgspec.Struct, Generic[T], frozen=True):
    """One object was one thing and is another; None where there was or is none. `uid` tells a new one of the same name."""

    key: str
    old: T | None
    new: T | None


def is_superseded_by(known: T | None, written: T) -> bool:
    """Whether what is known of an object is an earlier version of that very object. Versions are numbers that grow."""
    if known is None or known.metadata.uid != written.metadata.uid:
        return False
    before, after = known.metadata.resource_version or "", written.metadata.resource_version or ""
    return not (before.isdecimal() and after.isdecimal()) or int(before) < int(after)


class ObjectStore(Mapping[str, T]):
    """Objects by key. An index, where there is one, names the group of each object: pods by their node."""

    def __init__(self, index: IndexFunction[T] | None = None) -> None:
        self._objects: dict[str, T] = {}
        self._groups: dict[str, dict[str, None]] = {}
        self._index = index

    def __getitem__(self, key: str) -> T:
        return self._objects[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)

    def group(self, name: str) -> list[T]:
        """The objects that the index puts there."""
        return [self._objects[key] for key in self._groups.get(name, ())]

    def replace(self, listed: Mapping[str, T], keep: Collection[str] = ()) -> list[ObjectChange[T]]:
        """Everything as a list had it. What is gone since the last look is told as well, however it went; what has the same
        version is no change. Objects in `keep` are there and could not be read: they stay as they were."""
        gone = [key for key in self._objects if key not in listed and key not in keep]
        changes = [change for key in gone if (change := self.drop(key))]
        return changes + [change for key, new in listed.items() if (change := self.put(key, new))]

    def put(self, key: str, new: T) -> ObjectChange[T] | None:
        """None where that version is known already."""
        old = self._objects.get(key)
        version = new.metadata.resource_version
        if old is not None and version and old.metadata.resource_version == version:
            return None
        self._forget(key, old)
        self._objects[key] = new
        if self._index is not None and (group := self._index(new)):
            self._groups.setdefault(group, {})[key] = None
        return ObjectChange(key, old, new)

    def drop(self, key: str) -> ObjectChange[T] | None:
        """None where it was not known."""
        old = self._objects.pop(key, None)
        self._forget(key, old)
        return None if old is None else ObjectChange(key, old, None)

    def _forget(self, key: str, old: T | None) -> None:
        if old is None or self._index is None:
            return
        group = self._index(old)
        if members := self._groups.get(group):
            members.pop(key, None)
            if not members:
                del self._groups[group]
