"""List and watch one resource for as long as the program runs, keep what is known in memory, and tell what changed.

Whatever ends a watch, it goes on where it was, or lists anew (`kube.watch.Following`); the copy stays readable meanwhile, and
`age_s` says how old it is. Listeners are called in the loop and must not wait: they put a key into a queue.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Generic

from kube.client import Client, Scope
from kube.discovery import lacks
from kube.errors import ApiError, Garbage, Unreachable
from kube.objects import Resource, T, key_of
from kube.saying import Saying
from kube.store import Change, Index, Store, followed
from kube.watch import Event, Following, What

log = logging.getLogger(__name__)

MOST_S = 480
"""How long a watch is asked to last at most; from half of it on, so that not all of them are renewed at once."""
Listener = Callable[[Change[T]], None]


class Informer(Generic[T]):
    """The copy of one resource. `run` it as a task, wait until it is `synced`, then read `store`."""

    def __init__(
        self,
        client: Client,
        resource: Resource[T],
        scope: Scope | None = None,
        index: Index[T] | None = None,
        *,
        most_s: int = MOST_S,
    ) -> None:
        """Nobody hears of a resource that nothing happens to, not even bookmarks after the API server was restarted: `most_s`
        is how old a copy may look then, for another watch a time."""
        self.resource, self.scope, self._most_s = resource, scope or Scope(), most_s
        self.store: Store[T] = Store(index)
        self.problems: dict[str, str] = {}
        """Objects that are there and do not fit their type, by key; of those the store has the last that did, if any."""
        self.synced = asyncio.Event()
        self.missing = False
        """The API server has no such resource, and says so: its definition is not installed, or not yet."""
        self._client = client
        self._listeners: list[Listener[T]] = []
        self._following = Following()
        self._heard_at: float | None = None
        self._saying = Saying(log)

    def listen(self, listener: Listener[T]) -> None:
        """Have changes told from now on."""
        self._listeners.append(listener)

    @property
    def relists(self) -> int:
        return self._following.relists

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the server was last heard of this resource, be it that it ended a watch in which nothing happened; None
        before the first list."""
        return None if self._heard_at is None else now_s - self._heard_at

    def wrote(self, object_: T) -> None:
        """What the API server answered to a write of ours: known at once, before the watch tells it. Not where the watch was
        quicker, and has told what came of that object since."""
        key = key_of(object_.metadata)
        if not followed(self.store.get(key), object_):
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
            except Garbage as error:
                self._following = self._following.garbled(random.random())
                self._say(str(error))
            except Unreachable as error:
                self._following = self._following.cut(random.random())
                self._say(str(error))
            except ApiError as error:
                self._following = self._following.refused(error, random.random())
                if not error.expired:
                    self._say(str(error))
                if error.unserved and not self.missing and await self._lacked():
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
            self._following = self._following.saw(event.resource_version)
        self._heard()

    def _take(self, event: Event[T]) -> None:
        if event.what is What.BOOKMARK:
            return
        self.problems.pop(event.key, None)
        change = None
        if event.what is What.DELETED:
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
            return await lacks(self._client, self.resource)
        except Unreachable:
            return False

    def _lost(self) -> None:
        # Without its definition nothing of it exists.
        self.missing = True
        self.problems = {}
        self._tell(iter(self.store.replace({})))
        self.synced.set()

    def _tell(self, changes: Iterator[Change[T]]) -> None:
        for change in changes:
            for listener in self._listeners:
                listener(change)

    def _heard(self) -> None:
        self._heard_at = time.monotonic()

    def _say(self, what: str) -> None:
        self._saying.warn(f"watching {self.resource.gvr}: {what}")
