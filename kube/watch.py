"""Logic of list and watch without I/O: event parsing, the position to resume from, and the in-memory object store.
The API server may end a watch at any time and retains minutes of history: resume from the last version, list again
after 410.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from enum import StrEnum
from typing import Generic

import msgspec

from api.text import quote
from common.backoff import Backoff
from kube.errors import ApiError, InvalidResponse, parse_api_error
from kube.objects import PartialObjectMetadata, ResourceType, T, key_of

MAX_LINE_BYTES = 16 << 20
"""Limit of a line: etcd limits objects to 1.5 MiB by default."""
MIN_HEALTHY_WATCH_S = 5.0
"""A watch that lasted this long was healthy."""
WATCH_BACKOFF = Backoff(first_s=0.5, max_s=30.0)


class LineSplitter:
    """Splits a stream into lines. An incomplete last line is never an event, because the watch resumes before it."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines completed by this piece, without empty ones. Raises InvalidResponse for a line that is too long."""
        head, *rest = piece.split(b"\n")
        self._append(head)
        if not rest:
            return []
        first = b"".join(self._parts)
        self._parts, self._size = [], 0
        self._append(rest[-1])
        return [line for line in (first, *rest[:-1]) if line.strip()]

    def _append(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > self._max_bytes:
            raise InvalidResponse(f"a line of a watch has more than {self._max_bytes} bytes")


class WatchEventType(StrEnum):
    """Type of a watch event."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


class WatchEvent(msgspec.Struct, Generic[T], frozen=True):
    """Change of one object, or a bookmark: everything up to this version has been sent."""

    what: WatchEventType
    key: str
    resource_version: str
    object: T | None = None
    """None for a bookmark, and if the object does not match its type."""
    problem: str = ""
    """Why the object does not match its type."""


class _WatchLine(msgspec.Struct):
    type: str
    object: msgspec.Raw


def parse_watch_event(line: bytes, resource: ResourceType[T]) -> WatchEvent[T]:
    """Parse one line. Raises ApiError if it reports that the watch failed, InvalidResponse if it is not an event.

    An object that does not match its type becomes an event with a problem, because a manually created object must not
    end the watch.
    """
    try:
        event = msgspec.json.decode(line, type=_WatchLine)
        if event.type == "ERROR":
            raise parse_api_error(500, bytes(event.object))
        what = WatchEventType(event.type)
        bare = msgspec.json.decode(event.object, type=PartialObjectMetadata)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise InvalidResponse(f"not an event of a watch: {quote(line)}: {error}") from None
    version = bare.metadata.resource_version
    if what is WatchEventType.BOOKMARK:
        return WatchEvent(what, "", version)
    object_, problem = decode_object(event.object, resource)
    return WatchEvent(what, key_of(bare.metadata), version, object_, problem)


def decode_object(raw: bytes | msgspec.Raw, resource: ResourceType[T]) -> tuple[T | None, str]:
    """Return the object, or None and why it does not match its type."""
    try:
        return msgspec.json.decode(raw, type=resource.type), ""
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return None, str(error)


class WatchPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where to continue: watch from `resource_version`, or list if it is None, after `wait_s`."""

    resource_version: str | None = None
    wait_s: float = 0.0
    failures: int = 0
    """Consecutive failures since the last list or event."""
    relists: int = 0
    """Number of lists after the first one."""

    def listed(self, resource_version: str) -> WatchPosition:
        """A list was received. Failures are kept until an event arrives, so that a watch that never works backs off."""
        return msgspec.structs.replace(self, resource_version=resource_version, wait_s=0.0)

    def event_received(self, resource_version: str) -> WatchPosition:
        """An event or a bookmark was received."""
        if not resource_version:
            return self
        return msgspec.structs.replace(self, resource_version=resource_version, failures=0, wait_s=0.0)

    def ended(self, lasted_s: float, jitter: float) -> WatchPosition:
        """The server ended the watch, as it does every few minutes: resume from the same version.

        A watch that ends immediately counts as a failure, or it would be repeated without pause.
        """
        return (
            msgspec.structs.replace(self, failures=0, wait_s=0.0)
            if lasted_s >= MIN_HEALTHY_WATCH_S
            else self.connection_lost(jitter)
        )

    def connection_lost(self, jitter: float) -> WatchPosition:
        """The connection broke, or could not be made: resume from the same version after a delay."""
        failures = self.failures + 1
        return msgspec.structs.replace(self, failures=failures, wait_s=WATCH_BACKOFF.wait_s(failures, jitter))

    def refused(self, error: ApiError, jitter: float) -> WatchPosition:
        """The server rejected the request.

        410 means that the version is too old: list at once, or after a delay if it recurs. After 429, 503 and 504 the
        version stays valid. After any other error, missed changes are unknown: list.
        """
        after = self.connection_lost(jitter)
        wait_s = max(after.wait_s, min(error.retry_after_s or 0.0, WATCH_BACKOFF.max_s))
        if error.status in (429, 503, 504):
            return msgspec.structs.replace(after, wait_s=wait_s)
        had = self.resource_version is not None
        if error.expired and self.failures == 0:
            wait_s = 0.0
        return msgspec.structs.replace(after, resource_version=None, wait_s=wait_s, relists=self.relists + had)

    def invalid_data_received(self, jitter: float) -> WatchPosition:
        """The response was not a watch: list after a delay."""
        had = self.resource_version is not None
        return msgspec.structs.replace(self.connection_lost(jitter), resource_version=None, relists=self.relists + had)


IndexFunction = Callable[[T], str]


class ObjectChange(msgspec.Struct, Generic[T], frozen=True):
    """Transition of one object; `old` or `new` is None if it was created or deleted. A recreated object has another uid."""

    key: str
    old: T | None
    new: T | None


def is_superseded_by(current: T | None, written: T) -> bool:
    """Whether `current` is an older version of the same object. Versions are increasing numbers."""
    if current is None or current.metadata.uid != written.metadata.uid:
        return False
    before, after = current.metadata.resource_version or "", written.metadata.resource_version or ""
    return not (before.isdecimal() and after.isdecimal()) or int(before) < int(after)


class ObjectStore(Mapping[str, T]):
    """Objects by key. An index function assigns each object to a group, such as pods to their node."""

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
        """Objects of one group of the index."""
        return [self._objects[key] for key in self._groups.get(name, ())]

    def replace(self, listed: Mapping[str, T], keep: Collection[str] = ()) -> list[ObjectChange[T]]:
        """Replace the content by a list and return all changes, deletions included.

        An object with an unchanged version is no change. Objects in `keep` exist, but could not be decoded: their last
        version is retained.
        """
        deleted = [key for key in self._objects if key not in listed and key not in keep]
        changes = [change for key in deleted if (change := self.drop(key))]
        return changes + [change for key, new in listed.items() if (change := self.put(key, new))]

    def put(self, key: str, new: T) -> ObjectChange[T] | None:
        """Store an object; None if this version is already stored."""
        old = self._objects.get(key)
        version = new.metadata.resource_version
        if old is not None and version and old.metadata.resource_version == version:
            return None
        self._remove_from_group(key, old)
        self._objects[key] = new
        if self._index is not None and (group := self._index(new)):
            self._groups.setdefault(group, {})[key] = None
        return ObjectChange(key, old, new)

    def drop(self, key: str) -> ObjectChange[T] | None:
        """Remove an object; None if it is not stored."""
        old = self._objects.pop(key, None)
        self._remove_from_group(key, old)
        return None if old is None else ObjectChange(key, old, None)

    def _remove_from_group(self, key: str, old: T | None) -> None:
        if old is None or self._index is None:
            return
        group = self._index(old)
        if members := self._groups.get(group):
            members.pop(key, None)
            if not members:
                del self._groups[group]
