"""Leader election among several processes by a Lease of the API server.
A lease expires when it has not changed for its duration on the observer's own monotonic clock; clocks of machines
are never compared. A leader that cannot renew stops its work before the lease expires, so two leaders never work at
the same time.
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
    """Holder of a lease and its times."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Lease of coordination.k8s.io/v1."""

    metadata: KubeMetadata = KubeMetadata()
    spec: LeaseSpec = LeaseSpec()


LEASES = ResourceType("coordination.k8s.io", "v1", "leases", "Lease", Lease, namespaced=True)


class ObservedLease(msgspec.Struct, frozen=True):
    """Lease, or None if there is none, and the local monotonic time at which this version was first observed."""

    lease: Lease | None
    since_s: float

    def look(self, lease: Lease | None, now_s: float) -> ObservedLease:
        """Return the observation updated with the lease as just read."""
        return (
            self
            if self.lease is not None and _resource_version(self.lease) == _resource_version(lease)
            else ObservedLease(lease, now_s)
        )


class LeaseAction(Enum):
    """Next step of a candidate."""

    CREATE = auto()
    TAKE = auto()
    RENEW = auto()
    WAIT = auto()


def next_lease_action(observed: ObservedLease, identity: str, now_s: float) -> LeaseAction:
    """Decide the next step. A lease without a holder was released and may be acquired at once."""
    if observed.lease is None:
        return LeaseAction.CREATE
    spec = observed.lease.spec
    if spec.holder_identity == identity:
        return LeaseAction.RENEW
    if not spec.holder_identity or now_s - observed.since_s >= (spec.lease_duration_seconds or LEASE_S):
        return LeaseAction.TAKE
    return LeaseAction.WAIT


def lease_patch(observed: ObservedLease, identity: str, at_s: float) -> dict[str, Any]:
    """Patch, or spec of a new lease, that acquires or renews it; `at_s` is seconds since the epoch, for display only."""
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
    """Candidate of one process. `leading` is whether it leads now, `holder` the last observed leader."""

    def __init__(self, client: KubeClient, key: str, identity: str) -> None:
        self._client, self._key, self._identity = client, key, identity
        self._observed = ObservedLease(None, time.monotonic())
        self._throttled_log = ThrottledLog(log)
        self.leading = False

    @property
    def holder(self) -> str:
        return "" if self._observed.lease is None else self._observed.lease.spec.holder_identity or ""

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for leadership, then run the work as long as it lasts.

        Returns when leadership was lost, after the work was cancelled and has ended; raises what the work raises. Releases
        the lease when cancelled, so that another candidate need not wait for its expiry.
        """
        while not await self._attempt():
            await asyncio.sleep(RETRY_S * (1 + random.random() / 2))
        log.info("leading: %s holds lease %s", self._identity, self._key)
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
            await self._release()
        if lost:
            log.warning(
                "no longer leading: lease %s was acquired by another process or not renewed for %g s",
                self._key,
                RENEW_S,
            )
        elif not working.cancelled():
            working.result()

    async def _renew(self) -> None:
        """Renew until that has failed for RENEW_S or another process holds the lease."""
        renewed_s = time.monotonic()
        while True:
            await asyncio.sleep(RETRY_S)
            started_s = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(renewed_s + RENEW_S - started_s):
                    if await self._attempt():
                        renewed_s = started_s
            if self.holder not in ("", self._identity) or time.monotonic() - renewed_s >= RENEW_S:
                return

    async def _attempt(self) -> bool:
        """Read the lease and acquire or renew it if possible; return whether this process holds it."""
        try:
            await self._read()
            what = next_lease_action(self._observed, self._identity, time.monotonic())
            if what is LeaseAction.WAIT:
                return False
            lease = await self._write(what)
        except ApiError as error:
            if not error.conflict:
                self._throttled_log.warn(f"lease {self._key}: {error}")
            return False
        except ApiUnreachable as error:
            self._throttled_log.warn(f"lease {self._key}: {error}")
            return False
        self._throttled_log.clear()
        self._observed = ObservedLease(lease, time.monotonic())
        return True

    async def _read(self) -> None:
        try:
            lease: Lease | None = await self._client.get(LEASES, self._key)
        except ApiError as error:
            if not error.missing:
                raise
            lease = None
        self._observed = self._observed.look(lease, time.monotonic())

    async def _write(self, what: LeaseAction) -> Lease:
        body = lease_patch(self._observed, self._identity, time.time())
        namespace, _, name = self._key.rpartition("/")
        if what is not LeaseAction.CREATE:
            return await self._client.merge_patch(LEASES, self._key, body)
        body |= {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": {"name": name}}
        return await self._client.create(LEASES, body, namespace)

    async def _release(self) -> None:
        lease = self._observed.lease
        if lease is None or lease.spec.holder_identity != self._identity:
            return
        body = {
            "metadata": {"resourceVersion": _resource_version(lease)},
            "spec": {"holderIdentity": "", "leaseDurationSeconds": 1},
        }
        # Otherwise the lease expires after LEASE_S.
        with contextlib.suppress(ApiError, ApiUnreachable, TimeoutError):
            async with asyncio.timeout(RETRY_S):
                self._observed = ObservedLease(
                    await self._client.merge_patch(LEASES, self._key, body), time.monotonic()
                )


async def _cancel_and_wait(task: asyncio.Future[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


def _resource_version(lease: Lease | None) -> str:
    return "" if lease is None else lease.metadata.resource_version
