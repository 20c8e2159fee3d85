"""Lists and watches one resource, keeps a copy in memory and notifies listeners of changes.
The copy stays readable while a watch is interrupted; `age_s` is its age. Listeners run on the event loop
and must not block.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
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


async def is_kind_missing(client: KubeClient, resource: ResourceType[Any]) -> bool:
    """Whether it says that it has no such kind; False too where it says nothing, or nobody knows who answered. Raises
    Unreachable."""
    if not resource.group:
        return False  # those it has, whatever is said
    answer = await client.raw(f"/apis/{resource.api_version}", "apis")
    try:
        if answer.status == 200:
            there = msgspec.json.decode(answer.body, type=_Resources)
            return there.kind == "APIResourceList" and resource.plural not in {one.name for one in there.resources}
        if answer.status != 404:
            return False
        answer = await client.raw("/apis", "apis")
        if answer.status != 200:
            return False
        groups = msgspec.json.decode(answer.body, type=_Groups)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    known = {version.group_version for group in groups.groups for version in group.versions}
    return groups.kind == "APIGroupList" and resource.api_version not in known


log = logging.getLogger(__name__)

MAX_WATCH_S = 480
"""How long a watch is asked to last at most; from half of it on, so that not all of them are renewed at once."""
ChangeListener = Callable[[ObjectChange[T]], None]


class Informer(Generic[T]):
    """The copy of one resource. `run` it as a task, wait until it is `synced`, then read `store`."""

    def __init__(
        self,
        client: KubeClient,
        resource: ResourceType[T],
        scope: ListScope | None = None,
        index: IndexFunction[T] | None = None,
        *,
        max_s: int = MAX_WATCH_S,
    ) -> None:
        """Nobody hears of a resource that nothing happens to, not even bookmarks after the API server was restarted: `most_s`
        is how old a copy may look then, for another watch a time."""
        self.resource, self.scope, self._most_s = resource, scope or ListScope(), max_s
        self.store: ObjectStore[T] = ObjectStore(index)
        self.problems: dict[str, str] = {}
        """Objects that are there and do not fit their type, by key; of those the store has the last that did, if any."""
        self.synced = asyncio.Event()
        self.missing = False
        """The API server has no such resource, and says so: its definition is not installed, or not yet."""
        self._client = client
        self._listeners: list[ChangeListener[T]] = []
        self._following = WatchPosition()
        self._heard_at: float | None = None
        self._saying = ThrottledLog(log)

    def listen(self, listener: ChangeListener[T]) -> None:
        """Have changes told from now on."""
        self._listeners.append(listener)

    @property
    def relists(self) -> int:
        return self._following.relists

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the server was last heard of this resource, be it that it ended a watch in which nothing happened; None
        before the first list."""
        return None if self._heard_at is None else now_s - self._heard_at

    def record_write(self, object_: T) -> None:
        """What the API server answered to a write of ours: known at once, before the watch tells it. Not where the watch was
        quicker, and has told what came of that object since."""
        key = key_of(object_.metadata)
        if not is_superseded_by(self.store.get(key), object_):
            return
        if change := self.store.put(key, object_):
            self._tell(iter((change,)))

    async def run(self) -> None:
        """Until cancelled. Nothing that the server or the network does ends it."""
        while True:
            began = time.monotonic()
            try:
                await self._once()
                self._following = self._following.ended(time.monotonic() - began, random.random())
            except InvalidResponse as error:
                self._following = self._following.invalid_data_received(random.random())
                self._say(str(error))
            except ApiUnreachable as error:
                self._following = self._following.connection_lost(random.random())
                self._say(str(error))
            except ApiError as error:
                self._following = self._following.refused(error, random.random())
                if not error.expired:
                    self._say(str(error))
                if error.path_not_served and not self.missing and await self._lacked():
                    self._lost()
            await asyncio.sleep(self._following.wait_s)

    async def _once(self) -> None:
        """List if need be, then watch until the server ends the watch."""
        since = self._following.resource_version
        if since is None:
            listing = await self._client.list(self.resource, self.scope)
            self._heard()
            self.problems = dict(listing.problems)
            self._tell(iter(self.store.replace(listing.objects, listing.problems)))
            since = listing.resource_version
            self._following = self._following.listed(since)
            self.missing = False
            self.synced.set()
        lasts_s = random.randint(self._most_s // 2, self._most_s)
        async for event in self._client.watch(self.resource, since, self.scope, lasts_s):
            self._heard()
            self._take(event)
            self._following = self._following.event_received(event.resource_version)
        self._heard()

    def _take(self, event: WatchEvent[T]) -> None:
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
            self._say(f"{event.key}: does not fit its type: {event.problem}")
        if change is not None:
            self._tell(iter((change,)))

    async def _lacked(self) -> bool:
        # To forget all objects for a proxy's 404, or that of a server that is just starting, could undo what they asked for.
        try:
            return await is_kind_missing(self._client, self.resource)
        except ApiUnreachable:
            return False

    def _lost(self) -> None:
        # Without its definition nothing of it exists.
        self.missing = True
        self.problems = {}
        self._tell(iter(self.store.replace({})))
        self.synced.set()

    def _tell(self, changes: Iterator[ObjectChange[T]]) -> None:
        for change in changes:
            for listener in self._listeners:
                listener(change)

    def _heard(self) -> None:
        self._heard_at = time.monotonic()

    def _say(self, what: str) -> None:
        self._saying.warn(f"watching {self.resource.gvr}: {what}")
