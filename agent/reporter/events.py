"""Writes the steps of evictions as events of the pods, with Katalyst's reasons and the numbers of the threshold.
Events are rate-limited; when the queue is full the oldest event is dropped and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from api.decision import Cycle
from api.eviction import EvictionEvent, EvictionVictim, format_observation
from api.interfaces import ProbeReading, Unavailable
from api.pod import Pod
from common.backoff import TokenBucket
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.objects import PartialObjectMetadata, ResourceType, format_timestamp

EVENTS = ResourceType("", "v1", "events", "Event", PartialObjectMetadata, namespaced=True)
COMPONENT = "dioptase-agent"
POLL_INTERVAL_S = 1.0
EVENTS_PER_S, EVENT_BURST = 1.0, 25.0
MAX_QUEUED_EVENTS = 200
MAX_VICTIMS = 1000
MAX_MESSAGE_CHARS = 1024
"""Letters of a message that the API server takes."""


def build_event(
    kill: EvictionEvent,
    pod: Pod | None,
    victim: EvictionVictim | None,
    node: str,
    at_wall_ns: int,
    at_ns: int | None = None,
) -> dict[str, Any]:
    """One step as a core/v1 Event. The pod may be gone, and then its uid is the victim's; without either it has none. `at_ns`
    is the moment of `at_wall_ns` by CLOCK_MONOTONIC."""
    namespace, _, name = kill.pod.partition("/")
    uid = victim.uid if victim is not None else pod.uid if pod is not None else ""
    message, numbers = kill.message, ""
    if victim is not None:
        if victim.reason.text not in message:
            message = f"{message} ({victim.plugin}: {victim.reason.text})"
        numbers = _threshold_numbers(victim, at_wall_ns, at_ns)
    at = format_timestamp(at_wall_ns / 1e9)
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, **({"uid": uid} if uid else {})}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{name[:200]}.", "namespace": namespace},
        "involvedObject": about,
        "reason": kill.reason.value,
        "message": _truncate(message, MAX_MESSAGE_CHARS - len(numbers)) + numbers,
        "type": "Warning" if kill.warning else "Normal",
        "action": kill.action,
        "count": 1,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "eventTime": format_timestamp(at_wall_ns / 1e9, micro=True),
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
    }


def _threshold_numbers(victim: EvictionVictim, at_wall_ns: int, at_ns: int | None) -> str:
    """What the plugin held against what, since when, and whom it is about."""
    parts = []
    if victim.observed is not None and victim.reason.threshold is not None:
        held = [
            format_observation(value, victim.scope, victim.subject)
            for value in (victim.observed, victim.reason.threshold)
        ]
        parts.append(f"observed {held[0]} {victim.operator} threshold {held[1]}")
    if victim.since_ns is not None and at_ns is not None:
        parts.append(f"since {format_timestamp((at_wall_ns - at_ns + victim.since_ns) / 1e9)}")
    if victim.cgroup:
        parts.append(f"cgroup {_truncate(victim.cgroup, MAX_MESSAGE_CHARS // 4)}")
    return f" [{'; '.join((victim.plugin, *parts))}]" if parts else ""


def _truncate(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


class EvictionEventWriter:
    """Sink of rounds and a source of its own (api.interfaces.Probe); `lost_events` are those that were dropped."""

    name, form = "events", "create"

    def __init__(self, client: KubeClient, node: str) -> None:
        self._client, self._node = client, node
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_QUEUED_EVENTS)
        self._victims: dict[str, EvictionVictim] = {}
        self._bucket = TokenBucket(EVENTS_PER_S, EVENT_BURST, time.monotonic())
        self._trouble: Unavailable | None = None
        self._lost = 0

    def publish(self, finished: Cycle) -> None:
        """Queue what this round says; never waits."""
        pods = {pod.key: pod for pod in finished.snapshot.pods}
        for kill in finished.kills:
            if len(self._waiting) == MAX_QUEUED_EVENTS:
                self._lost += 1
            self._waiting.append(
                build_event(
                    kill,
                    pods.get(kill.pod),
                    self._victims.get(kill.pod),
                    self._node,
                    finished.snapshot.wall_time_ns,
                    finished.snapshot.taken_at_ns,
                )
            )
        # What becomes of them is told in later rounds.
        for victim in () if finished.evictions is None else finished.evictions.victims:
            if not victim.dry_run:
                self._victims.pop(victim.pod, None)
                self._victims[victim.pod] = victim
        while len(self._victims) > MAX_VICTIMS:
            self._victims.pop(next(iter(self._victims)))

    @property
    def lost_events(self) -> int | None:
        return self._lost

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

    def problem(self) -> Unavailable | None:
        """Why nobody is told; None where all are."""
        return self._trouble

    def close(self) -> None:
        """Nothing to give back: `run` is cancelled by who runs it."""

    async def run(self) -> None:
        """Until cancelled. Nothing that the API server says or does ends it."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """Write what waits, as far as the rate allows. An event that is refused is dropped: it would be refused again."""
        while self._waiting and self._bucket.take(now_s):
            one = self._waiting[0]
            try:
                await self._client.create(EVENTS, one, one["metadata"]["namespace"])
            except ApiUnreachable as error:
                self._failed(error, "it is tried again; `dioptase explain` has it in any case")
                return
            except ApiError as error:
                self._lost += 1
                self._failed(error, "give the agent's role create of events")
            else:
                self._trouble = None
            if self._waiting and self._waiting[0] is one:
                self._waiting.popleft()

    def _failed(self, error: Exception, remedy: str) -> None:
        self._trouble = Unavailable(f"events cannot be written: {error}", remedy)
