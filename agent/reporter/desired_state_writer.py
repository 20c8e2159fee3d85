"""Keeps an API object as the agent wants it: writes changes, writes again periodically, retries with backoff.
Base class of the writers of the CustomNodeResource, extended resources, Node taints and events. A cycle is only
handed over; the requests run in the writer's own task.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from agent.reporter.cnr import TaintIdentity, merge_taints
from api.decision import Cycle
from api.interfaces import Unavailable
from common.backoff import Backoff
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.objects import ResourceType, TaintedObject

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 5.0
"""[--reporter-collect-interval] Default interval between checks for changes."""
WITHDRAW_TIMEOUT_S = 3.0
MAX_CAS_TRIES = 3
"""Attempts of a compare-and-swap that loses against other writers."""
RETRY_REMEDY = "wait for the next attempt; until then the scheduler uses the values written last"
NODES = ResourceType("", "v1", "nodes", "Node", TaintedObject)
PatchFields = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]
"""Further fields of the metadata, and the complete list of taints."""


class DesiredStateWriter(ABC):
    """Sink of cycles and HealthReporter. Subclasses implement `publish` and `_write`."""

    name: str
    form: str
    lost_events: int | None = None
    poll_interval_s: ClassVar[float] = POLL_INTERVAL_S
    retry_backoff: ClassVar[Backoff] = Backoff(first_s=2.0, max_s=60.0)
    forbidden_remedy: ClassVar[str] = ""
    """Remedy of HTTP 403: the permission that the agent's role lacks."""

    def __init__(self, client: KubeClient, node: str) -> None:
        self._client, self._node = client, node
        self._changed = asyncio.Event()
        self._failures = 0
        self._resync_due_s = self._retry_due_s = 0.0
        self._failure: Unavailable | None = None
        self._written: Any = None
        """State that the API server accepted last; None or empty before the first write."""

    @abstractmethod
    def publish(self, cycle: Cycle) -> None:
        """Take the desired state of this cycle without blocking."""

    @abstractmethod
    async def _write(self, now_s: float) -> bool:
        """Write what is due; return whether anything was. Raises ApiError and ApiUnreachable."""

    @abstractmethod
    def _failure_text(self, error: Exception) -> str:
        """Reason that is reported while writing fails."""

    def problem(self) -> Unavailable | None:
        """Return why the object is not in the desired state; None while writing succeeds."""
        return self._failure

    def wake(self) -> None:
        """Write at once instead of after the poll interval."""
        self._changed.set()

    async def run(self) -> None:
        """Write periodically until cancelled. No failure of the API server ends it."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.poll_interval_s):
                    await self._changed.wait()
            self._changed.clear()
            await self.sync(time.monotonic())

    async def sync(self, now_s: float) -> None:
        """Write what is due at `now_s` (CLOCK_MONOTONIC, seconds). Never raises."""
        if now_s < self._retry_due_s:
            return
        try:
            if await self._write(now_s):
                self._failures, self._failure = 0, None
        except (ApiError, ApiUnreachable) as error:
            self._back_off(error, now_s)
        except Exception as error:
            # A bug in a report must end neither the agent nor this task: the next cycle may have other values.
            log.exception("%s: the object of node %s could not be built", self.name, self._node)
            self._back_off(error, now_s)

    def _back_off(self, error: Exception, now_s: float) -> None:
        self._failures += 1
        self._retry_due_s = now_s + self.retry_backoff.wait_s(self._failures, random.random())
        self._failure = Unavailable(self._failure_text(error), self._remedy(error))

    def _remedy(self, error: Exception) -> str:
        return self.forbidden_remedy if isinstance(error, ApiError) and error.status == 403 else RETRY_REMEDY


class WithdrawableWriter(DesiredStateWriter):
    """Writer that removes what it wrote when the agent ends, because no process keeps it up to date from then on."""

    leftover_text: ClassVar[str]
    """Part of the warning that names what stays on the Node, with the remedy."""

    @abstractmethod
    async def _delete(self) -> None:
        """Remove everything written. Raises ApiError and ApiUnreachable."""

    async def withdraw(self) -> None:
        """Remove everything written, if there is anything. Never raises, and gives up after WITHDRAW_TIMEOUT_S."""
        if not self._written:
            return
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._delete()
        except (ApiError, ApiUnreachable, TimeoutError) as error:
            log.warning("Node %s: %s: %s", self._node, self.leftover_text, error)
        self._written = None


async def write_taints(
    client: KubeClient,
    kind: ResourceType[TaintedObject],
    name: str,
    desired: Iterable[Mapping[str, Any]],
    formerly_written: Collection[TaintIdentity] = (),
) -> bool:
    """Replace the agent's taints in an object's list and keep those of other owners; return whether a patch was sent.

    The list is atomic, so that server-side apply would take over all of it; a patch with the resource version read before
    cannot overwrite another writer. Raises ApiError and ApiUnreachable.
    """
    desired = tuple(desired)

    def change(current: TaintedObject) -> PatchFields | None:
        taints = merge_taints(current.spec.taints, desired, formerly_written)
        return None if taints is None else ({}, taints)

    return await patch_taints(client, kind, name, change)


async def patch_taints(
    client: KubeClient,
    kind: ResourceType[TaintedObject],
    name: str,
    change: Callable[[TaintedObject], PatchFields | None],
) -> bool:
    """Patch an object with what `change` computes from its current state; return whether a patch was sent.

    Raises ApiError and ApiUnreachable.
    """
    for tries_left in range(MAX_CAS_TRIES - 1, -1, -1):
        current = await client.get(kind, name)
        fields = change(current)
        if fields is None:
            return False
        metadata, taints = fields
        body = {
            "metadata": {"resourceVersion": current.metadata.resource_version, **metadata},
            "spec": {"taints": taints},
        }
        try:
            await client.merge_patch(kind, name, body)
        except ApiError as error:
            if not error.conflict or tries_left == 0:
                raise
        else:
            return True
    return False
