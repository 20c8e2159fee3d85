"""Lists and watches one resource, keeps a copy in memory and notifies listeners of changes.
The copy stays readable while a watch is interrupted; `age_s` is its age. Listeners run on the event loop
and must not block.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic

import msgspec

from common.throttled_log import ThrottledLog
from kube.client import KubeClient, ListScope
from kube.errors import ApiError, ApiUnreachable, InvalidResponse
from kube.objects import ResourceType, T, key_of
from kube.watch import (
    IndexFunction,
    ObjectChange,
    ObjectStore,
    WatchEvent,
    WatchEventType,
    WatchPosition,
    is_superseded_by,
)


class _ResourceName(msgspec.Struct, frozen=True):
    name: str = ""


class _Resources(msgspec.Struct, frozen=True):
    kind: str
    resources: tuple[_ResourceName, ...] = ()


class _Version(msgspec.Struct, frozen=True, rename="camel"):
    group_version: str = ""


class _Group(msgspec.Struct, frozen=True):
    versions: tuple[_Version, ...] = ()


class _Groups(msgspec.Struct, frozen=True):
    kind: str
    groups: tuple[_Group, ...] = ()


def describe_unsynced(informers: Iterable[Informer[Any]]) -> str:
    """Return the resources of these informers that have not been listed yet; empty if all have."""
    names = [informer.resource.gvr for informer in informers if not informer.synced.is_set()]
    return f"not listed yet: {', '.join(names)}" if names else ""


async def is_kind_missing(client: KubeClient, resource: ResourceType[Any]) -> bool:
    """Whether the API server states that it does not have this kind; False if its response is not conclusive.

    Raises ApiUnreachable.
    """
    if not resource.group:
        return False  # the core group's kinds always exist
    answer = await client.raw(f"/apis/{resource.api_version}", "apis")
    try:
        if answer.status == 200:
            listing = msgspec.json.decode(answer.body, type=_Resources)
            return listing.kind == "APIResourceList" and resource.plural not in {
                item.name for item in listing.resources
            }
        if answer.status != 404:
            return False
        answer = await client.raw("/apis", "apis")
        if answer.status != 200:
            return False
        groups = msgspec.json.decode(answer.body, type=_Groups)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    versions = {version.group_version for group in groups.groups for version in group.versions}
    return groups.kind == "APIGroupList" and resource.api_version not in versions


log = logging.getLogger(__name__)

MAX_WATCH_S = 480
"""Maximum duration of a watch; each lasts between half of it and all of it, so that they are not renewed together."""
NOTIFIED_AT_ONCE = 500
"""Objects of a first list whose listeners are called before other tasks run."""
ChangeListener = Callable[[ObjectChange[T]], None]


class Informer(Generic[T]):
    """In-memory copy of one resource. Start `run` as a task, wait for `synced`, then read `store`."""

    def __init__(
        self,
        client: KubeClient,
        resource: ResourceType[T],
        scope: ListScope | None = None,
        index: IndexFunction[T] | None = None,
        *,
        max_s: int = MAX_WATCH_S,
    ) -> None:
        """`max_s` bounds the age of the copy: if a resource does not change, the server sends nothing, and after a restart
        not even bookmarks, until a watch of that duration ends.
        """
        self.resource, self.scope, self._max_watch_s = resource, scope or ListScope(), max_s
        self.store: ObjectStore[T] = ObjectStore(index)
        self.problems: dict[str, str] = {}
        """Problems of objects that do not match their type, by key; the store keeps the last valid version, if any."""
        self.synced = asyncio.Event()
        self.missing = False
        """Whether the API server states that it does not have the resource, because its CRD is not installed."""
        self._client = client
        self._listeners: list[ChangeListener[T]] = []
        self._position = WatchPosition()
        self._received_at_s: float | None = None
        self._throttled_log = ThrottledLog(log)

    def listen(self, listener: ChangeListener[T]) -> None:
        """Call the listener on every change from now on."""
        self._listeners.append(listener)

    @property
    def relists(self) -> int:
        return self._position.relists

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the last message of the server about this resource, the end of a watch included; None before the
        first list."""
        return None if self._received_at_s is None else now_s - self._received_at_s

    def record_write(self, object_: T) -> None:
        """Store the result of a write at once, unless the watch has already delivered a newer version."""
        key = key_of(object_.metadata)
        if not is_superseded_by(self.store.get(key), object_):
            return
        if change := self.store.put(key, object_):
            self._notify(iter((change,)))

    async def run(self) -> None:
        """List and watch until cancelled; errors of the server and of the network are retried."""
        while True:
            started_s = time.monotonic()
            try:
                await self._list_and_watch()
                self._position = self._position.ended(time.monotonic() - started_s, random.random())
            except InvalidResponse as error:
                self._position = self._position.invalid_data_received(random.random())
                self._warn(str(error))
            except ApiUnreachable as error:
                self._position = self._position.connection_lost(random.random())
                self._warn(str(error))
            except ApiError as error:
                self._position = self._position.refused(error, random.random())
                if not error.expired:
                    self._warn(str(error))
                if error.path_not_served and not self.missing and await self._is_kind_missing():
                    self._clear()
            await asyncio.sleep(self._position.wait_s)

    async def _list_and_watch(self) -> None:
        """List if necessary, then watch until the server ends the watch."""
        since = self._position.resource_version
        if since is None:
            listing = await self._client.list(self.resource, self.scope)
            self._record_message()
            self.problems = dict(listing.problems)
            changes = self.store.replace(listing.objects, listing.problems)
            if self.synced.is_set():
                self._notify(iter(changes))
            else:
                await self._notify_in_batches(changes)
            since = listing.resource_version
            self._position = self._position.listed(since)
            self.missing = False
            self.synced.set()
        duration_s = random.randint(self._max_watch_s // 2, self._max_watch_s)
        async for event in self._client.watch(self.resource, since, self.scope, duration_s):
            self._record_message()
            self._apply(event)
            self._position = self._position.event_received(event.resource_version)
        self._record_message()

    def _apply(self, event: WatchEvent[T]) -> None:
        if event.what is WatchEventType.BOOKMARK:
            return
        self.problems.pop(event.key, None)
        change = None
        if event.what is WatchEventType.DELETED:
            change = self.store.drop(event.key)
        elif event.object is not None:
            change = self.store.put(event.key, event.object)
        else:
            self.problems[event.key] = event.problem
            self._warn(f"{event.key}: does not match its type: {event.problem}")
        if change is not None:
            self._notify(iter((change,)))

    async def _is_kind_missing(self) -> bool:
        # A 404 may come from a proxy or a starting server; dropping all objects for it could undo what they configure.
        try:
            return await is_kind_missing(self._client, self.resource)
        except ApiUnreachable:
            return False

    def _clear(self) -> None:
        # Without the definition of its kind, no object exists.
        self.missing = True
        self.problems = {}
        self._notify(iter(self.store.replace({})))
        self.synced.set()

    def _notify(self, changes: Iterator[ObjectChange[T]]) -> None:
        for change in changes:
            for listener in self._listeners:
                listener(change)

    async def _notify_in_batches(self, changes: list[ObjectChange[T]]) -> None:
        """Notify of the first list, and let other tasks run meanwhile: the listeners of 150,000 pods take seconds, in which a
        leader could not renew its lease. Later lists are notified at once, because a write may be recorded in between."""
        for first in range(0, len(changes), NOTIFIED_AT_ONCE):
            self._notify(iter(changes[first : first + NOTIFIED_AT_ONCE]))
            await asyncio.sleep(0)

    def _record_message(self) -> None:
        self._received_at_s = time.monotonic()

    def _warn(self, problem: str) -> None:
        self._throttled_log.warn(f"watching {self.resource.gvr}: {problem}")
