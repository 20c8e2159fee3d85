"""One leader at a time among several processes, by a Lease of the API server.

Who leads is decided by each from the lease and its own clock alone: a lease is over when it has not changed for as long as it
says, counted from when we saw it. Clocks of different machines are never compared. Every write is a compare-and-swap on the
lease's version, so of two that reach for it one gets it. A leader that could not renew for RENEW_S stops its work before the
lease is over (LEASE_S): there are never two at work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Any

import msgspec

from kube.client import Client
from kube.errors import ApiError, Unreachable
from kube.moments import stamp
from kube.objects import Meta, Resource
from kube.saying import Saying

log = logging.getLogger(__name__)

LEASE_S, RENEW_S, RETRY_S = 15, 10.0, 2.0


class LeaseSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Who holds it and since when."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """coordination.k8s.io/v1."""

    metadata: Meta = Meta()
    spec: LeaseSpec = LeaseSpec()


LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease", Lease, namespaced=True)


class Seen(msgspec.Struct, frozen=True):
    """A lease, or that there is none, and when that version of it was first seen, on our monotonic clock."""

    lease: Lease | None
    since_s: float

    def look(self, lease: Lease | None, now_s: float) -> Seen:
        """What is known after another look."""
        return self if self.lease is not None and _version(self.lease) == _version(lease) else Seen(lease, now_s)


class Move(Enum):
    """What to do about a lease."""

    CREATE = auto()
    TAKE = auto()
    RENEW = auto()
    WAIT = auto()


def move(seen: Seen, me: str, now_s: float) -> Move:
    """The rule of the election. One that nobody holds may be taken at once; it was given back."""
    if seen.lease is None:
        return Move.CREATE
    spec = seen.lease.spec
    if spec.holder_identity == me:
        return Move.RENEW
    if not spec.holder_identity or now_s - seen.since_s >= (spec.lease_duration_seconds or LEASE_S):
        return Move.TAKE
    return Move.WAIT


def claim(seen: Seen, me: str, at_s: float) -> dict[str, Any]:
    """The patch, or the spec of the new lease, that makes or keeps us the leader; `at_s` since the epoch, for people."""
    spec: dict[str, Any] = {
        "holderIdentity": me,
        "leaseDurationSeconds": LEASE_S,
        "renewTime": stamp(at_s, micro=True),
    }
    if seen.lease is None or seen.lease.spec.holder_identity != me:
        spec["acquireTime"] = spec["renewTime"]
        spec["leaseTransitions"] = 0 if seen.lease is None else (seen.lease.spec.lease_transitions or 0) + 1
    return {"metadata": {"resourceVersion": _version(seen.lease)} if seen.lease else {}, "spec": spec}


class Election:
    """Takes part for one process. `leading` says whether it leads now, `holder` who does as far as is known."""

    def __init__(self, client: Client, key: str, me: str) -> None:
        self._client, self._key, self._me = client, key, me
        self._seen = Seen(None, time.monotonic())
        self._saying = Saying(log)
        self.leading = False

    @property
    def holder(self) -> str:
        return "" if self._seen.lease is None else self._seen.lease.spec.holder_identity or ""

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait until we lead, then work for as long as we do. Returns when leading was lost, after the work was cancelled and
        has ended; raises what the work raises. When cancelled, the lease is given back: another need not wait for it."""
        while not await self._attempt():
            await asyncio.sleep(RETRY_S * (1 + random.random() / 2))
        log.info("leading: %s holds lease %s", self._me, self._key)
        self.leading = True
        working, renewing = asyncio.ensure_future(work()), asyncio.ensure_future(self._renew())
        try:
            await asyncio.wait((working, renewing), return_when=asyncio.FIRST_COMPLETED)
            lost = renewing.done() and not working.done()
        except asyncio.CancelledError:
            lost = False
            raise
        finally:
            self.leading = False
            await _end(renewing)
            await _end(working)
            await self._give_back()
        if lost:
            log.warning(
                "no longer leading: lease %s could not be renewed in %g s, or has gone to another", self._key, RENEW_S
            )
        elif not working.cancelled():
            working.result()

    async def _renew(self) -> None:
        """Until it could not be renewed for RENEW_S, or somebody else has it."""
        renewed_s = time.monotonic()
        while True:
            await asyncio.sleep(RETRY_S)
            asked_s = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(renewed_s + RENEW_S - asked_s):
                    if await self._attempt():
                        renewed_s = asked_s
            if self.holder not in ("", self._me) or time.monotonic() - renewed_s >= RENEW_S:
                return

    async def _attempt(self) -> bool:
        """Look, and take or renew if the rule says so: whether the lease is ours now."""
        try:
            await self._look()
            what = move(self._seen, self._me, time.monotonic())
            if what is Move.WAIT:
                return False
            lease = await self._write(what)
        except ApiError as error:
            if not error.conflict:
                self._saying.warn(f"lease {self._key}: {error}")
            return False
        except Unreachable as error:
            self._saying.warn(f"lease {self._key}: {error}")
            return False
        self._saying.clear()
        self._seen = Seen(lease, time.monotonic())
        return True

    async def _look(self) -> None:
        try:
            lease: Lease | None = await self._client.get(LEASES, self._key)
        except ApiError as error:
            if not error.missing:
                raise
            lease = None
        self._seen = self._seen.look(lease, time.monotonic())

    async def _write(self, what: Move) -> Lease:
        body = claim(self._seen, self._me, time.time())
        namespace, _, name = self._key.rpartition("/")
        if what is not Move.CREATE:
            return await self._client.merge_patch(LEASES, self._key, body)
        body |= {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": {"name": name}}
        return await self._client.create(LEASES, body, namespace)

    async def _give_back(self) -> None:
        lease = self._seen.lease
        if lease is None or lease.spec.holder_identity != self._me:
            return
        body = {
            "metadata": {"resourceVersion": _version(lease)},
            "spec": {"holderIdentity": "", "leaseDurationSeconds": 1},
        }
        # Whoever waits finds out in LEASE_S at the latest.
        with contextlib.suppress(ApiError, Unreachable, TimeoutError):
            async with asyncio.timeout(RETRY_S):
                self._seen = Seen(await self._client.merge_patch(LEASES, self._key, body), time.monotonic())


async def _end(task: asyncio.Future[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


def _version(lease: Lease | None) -> str:
    return "" if lease is None else lease.metadata.resource_version
