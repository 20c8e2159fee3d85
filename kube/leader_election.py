"""Leader election among several processes by a Lease of the API server.
A lease expires when it has not changed for its duration on the observer's own monotonic clock; clocks of machines
are never compared. A leader that cannot renew stops its work before the lease expires, so two leaders never work at
once.
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

from common.throttled_log import ThrottledLog
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.objects import KubeMetadata, ResourceType, format_timestamp

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

    metadata: KubeMetadata = KubeMetadata()
    spec: LeaseSpec = LeaseSpec()


LEASES = ResourceType("coordination.k8s.io", "v1", "leases", "Lease", Lease, namespaced=True)


class ObservedLease(msgspec.Struct, frozen=True):
    """A lease, or that there is none, and when that version of it was first seen, on our monotonic clock."""

    lease: Lease | None
    since_s: float

    def look(self, lease: Lease | None, now_s: float) -> ObservedLease:
        """What is known after another look."""
        return (
            self
            if self.lease is not None and _resource_version(self.lease) == _resource_version(lease)
            else ObservedLease(lease, now_s)
        )


class LeaseAction(Enum):
    """What to do about a lease."""

    CREATE = auto()
    TAKE = auto()
    RENEW = auto()
    WAIT = auto()


def next_lease_action(observed: ObservedLease, identity: str, now_s: float) -> LeaseAction:
    """The rule of the election. One that nobody holds may be taken at once; it was given back."""
    if observed.lease is None:
        return LeaseAction.CREATE
    spec = observed.lease.spec
    if spec.holder_identity == identity:
        return LeaseAction.RENEW
    if not spec.holder_identity or now_s - observed.since_s >= (spec.lease_duration_seconds or LEASE_S):
        return LeaseAction.TAKE
    return LeaseAction.WAIT


def lease_patch(observed: ObservedLease, identity: str, at_s: float) -> dict[str, Any]:
    """The patch, or the spec of the new lease, that makes or keeps us the leader; `at_s` since the epoch, for people."""
    spec: dict[str, Any] = {
        "holderIdentity": identity,
        "leaseDurationSeconds": LEASE_S,
        "renewTime": format_timestamp(at_s, micro=True),
    }
    if observed.lease is None or observed.lease.spec.holder_identity != identity:
        spec["acquireTime"] = spec["renewTime"]
        spec["leaseTransitions"] = 0 if observed.lease is None else (observed.lease.spec.lease_transitions or 0) + 1
    return {"metadata": {"resourceVersion": _resource_version(observed.lease)} if observed.lease else {}, "spec": spec}


class LeaderElection:
    """Takes part for one process. `leading` says whether it leads now, `holder` who does as far as is known."""

    def __init__(self, client: KubeClient, key: str, identity: str) -> None:
        self._client, self._key, self._me = client, key, identity
        self._seen = ObservedLease(None, time.monotonic())
        self._saying = ThrottledLog(log)
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
            await _cancel_and_wait(renewing)
            await _cancel_and_wait(working)
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
            what = next_lease_action(self._seen, self._me, time.monotonic())
            if what is LeaseAction.WAIT:
                return False
            lease = await self._write(what)
        except ApiError as error:
            if not error.conflict:
                self._saying.warn(f"lease {self._key}: {error}")
            return False
        except ApiUnreachable as error:
            self._saying.warn(f"lease {self._key}: {error}")
            return False
        self._saying.clear()
        self._seen = ObservedLease(lease, time.monotonic())
        return True

    async def _look(self) -> None:
        try:
            lease: Lease | None = await self._client.get(LEASES, self._key)
        except ApiError as error:
            if not error.missing:
                raise
            lease = None
        self._seen = self._seen.look(lease, time.monotonic())

    async def _write(self, what: LeaseAction) -> Lease:
        body = lease_patch(self._seen, self._me, time.time())
        namespace, _, name = self._key.rpartition("/")
        if what is not LeaseAction.CREATE:
            return await self._client.merge_patch(LEASES, self._key, body)
        body |= {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": {"name": name}}
        return await self._client.create(LEASES, body, namespace)

    async def _give_back(self) -> None:
        lease = self._seen.lease
        if lease is None or lease.spec.holder_identity != self._me:
            return
        body = {
            "metadata": {"resourceVersion": _resource_version(lease)},
            "spec": {"holderIdentity": "", "leaseDurationSeconds": 1},
        }
        # Whoever waits finds out in LEASE_S at the latest.
        with contextlib.suppress(ApiError, ApiUnreachable, TimeoutError):
            async with asyncio.timeout(RETRY_S):
                self._seen = ObservedLease(await self._client.merge_patch(LEASES, self._key, body), time.monotonic())


async def _cancel_and_wait(task: asyncio.Future[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


def _resource_version(lease: Lease | None) -> str:
    return "" if lease is None else lease.metadata.resource_version
