"""Writes the steps of evictions as events of the pods, with Katalyst's reasons and the numbers of the threshold.
An event of the Node says since when original values cannot be journalled, and since when they can again. Events are
rate-limited; when the queue is full the oldest event is dropped and counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from agent.reporter.desired_state_writer import DesiredStateWriter
from api.decision import Cycle
from api.eviction import EvictionEvent, EvictionVictim, format_observation
from api.interfaces import Unavailable
from api.pod import Pod
from api.snapshot import ORIGINALS, ComponentHealth, Snapshot
from api.units import NS_PER_S
from common.backoff import TokenBucket
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.objects import PartialObjectMetadata, ResourceType, format_timestamp

EVENTS = ResourceType("", "v1", "events", "Event", PartialObjectMetadata, namespaced=True)
COMPONENT = "dioptase-agent"
EVENTS_PER_S, EVENT_BURST = 1.0, 25.0
MAX_QUEUED_EVENTS = 200
MAX_VICTIMS = 1000
NODE_EVENT_NAMESPACE = "default"
"""Namespace of events of objects without a namespace (client-go/tools/record/event.go, makeEvent())."""
MAX_MESSAGE_CHARS = 1024
"""Maximum length of an event message that the API server accepts."""


def build_event(
    kill: EvictionEvent,
    pod: Pod | None,
    victim: EvictionVictim | None,
    node: str,
    at_wall_ns: int,
    at_ns: int | None = None,
) -> dict[str, Any]:
    """Return one step of an eviction as a core/v1 Event.

    The uid is that of the victim, else of the listed pod; without both it is left out. `at_wall_ns` (CLOCK_REALTIME) and
    `at_ns` (CLOCK_MONOTONIC) are the same time.
    """
    namespace, _, name = kill.pod.partition("/")
    at = at_wall_ns / NS_PER_S
    uid = victim.uid if victim is not None else pod.uid if pod is not None else ""
    message, numbers = kill.message, ""
    if victim is not None:
        if victim.reason.text not in message:
            message = f"{message} ({victim.plugin}: {victim.reason.text})"
        numbers = _threshold_numbers(victim, at_wall_ns, at_ns)
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, **({"uid": uid} if uid else {})}
    return {
        **_event_frame(about, namespace, node, at),
        "reason": kill.reason.value,
        "message": _truncate(message, MAX_MESSAGE_CHARS - len(numbers)) + numbers,
        "type": "Warning" if kill.warning else "Normal",
        "action": kill.action,
    }


def build_journal_event(node: str, failed: ComponentHealth | None, at_wall_ns: int) -> dict[str, Any]:
    """Return the Event of the Node after original values could not be journalled (`failed`), or can be again (None)."""
    # `kubectl describe node` shows events whose uid is the name of the Node, which the kubelet uses as well.
    about = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}
    message = "original values can be journalled again; reclaimable resources are reported as before"
    if failed is not None:
        message = (
            f"{failed.error}: {failed.remedy}. Until then reclaimable CPU does not grow, "
            "and the node's agent is not ready"
        )
    return {
        **_event_frame(about, NODE_EVENT_NAMESPACE, node, at_wall_ns / NS_PER_S),
        "reason": "OriginalsJournalled" if failed is None else "OriginalsNotJournalled",
        "message": _truncate(message, MAX_MESSAGE_CHARS),
        "type": "Normal" if failed is None else "Warning",
        "action": "Journal",
    }


def _event_frame(about: Mapping[str, str], namespace: str, node: str, at_s: float) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{about['name'][:200]}.", "namespace": namespace},
        "involvedObject": dict(about),
        "count": 1,
        "firstTimestamp": format_timestamp(at_s),
        "lastTimestamp": format_timestamp(at_s),
        "eventTime": format_timestamp(at_s, micro=True),
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
    }


def _threshold_numbers(victim: EvictionVictim, at_wall_ns: int, at_ns: int | None) -> str:
    """Return observed value, threshold, start time and cgroup in brackets; empty if none is known."""
    parts = []
    if victim.observed is not None and victim.reason.threshold is not None:
        observed, threshold = (
            format_observation(value, victim.scope, victim.subject)
            for value in (victim.observed, victim.reason.threshold)
        )
        parts.append(f"observed {observed} {victim.operator} threshold {threshold}")
    if victim.since_ns is not None and at_ns is not None:
        parts.append(f"since {format_timestamp((at_wall_ns - at_ns + victim.since_ns) / NS_PER_S)}")
    if victim.cgroup:
        parts.append(f"cgroup {_truncate(victim.cgroup, MAX_MESSAGE_CHARS // 4)}")
    return f" [{'; '.join((victim.plugin, *parts))}]" if parts else ""


def _truncate(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


class EvictionEventWriter(DesiredStateWriter):
    """Bounded queue of events; `lost_events` counts those that were dropped or refused."""

    name, form = "events", "create"
    poll_interval_s = 1.0

    def __init__(self, client: KubeClient, node: str) -> None:
        super().__init__(client, node)
        self._queue: deque[dict[str, Any]] = deque(maxlen=MAX_QUEUED_EVENTS)
        self._victims: dict[str, EvictionVictim] = {}
        self._bucket = TokenBucket(EVENTS_PER_S, EVENT_BURST, time.monotonic())
        self._can_journal = True
        self.lost_events: int = 0

    def publish(self, cycle: Cycle) -> None:
        """Queue the events of this cycle."""
        self._publish_journal(cycle.snapshot)
        pods = {pod.key: pod for pod in cycle.snapshot.pods}
        at_wall_ns, at_ns = cycle.snapshot.wall_time_ns, cycle.snapshot.taken_at_ns
        for kill in cycle.kills:
            self.lost_events += len(self._queue) == MAX_QUEUED_EVENTS
            victim = self._victims.get(kill.pod)
            self._queue.append(build_event(kill, pods.get(kill.pod), victim, self._node, at_wall_ns, at_ns))
        # The steps of these victims follow in later cycles.
        for victim in () if cycle.evictions is None else cycle.evictions.victims:
            if not victim.dry_run:
                self._victims.pop(victim.pod, None)
                self._victims[victim.pod] = victim
        while len(self._victims) > MAX_VICTIMS:
            self._victims.pop(next(iter(self._victims)))

    def _publish_journal(self, snapshot: Snapshot) -> None:
        if snapshot.can_journal is self._can_journal:
            return
        self._can_journal = snapshot.can_journal
        failed = next((source for source in snapshot.sources if source.name == ORIGINALS and not source.ok), None)
        self.lost_events += len(self._queue) == MAX_QUEUED_EVENTS
        self._queue.append(build_journal_event(self._node, failed, snapshot.wall_time_ns))

    async def _write(self, now_s: float) -> bool:
        """Create queued events as far as the rate allows. An event that the API server refuses is dropped, because it would be
        refused again."""
        while self._queue and self._bucket.take(now_s):
            event = self._queue[0]
            try:
                await self._client.create(EVENTS, event, event["metadata"]["namespace"])
            except ApiUnreachable as error:
                remedy = "wait for the next attempt; `dioptase explain` shows the events meanwhile"
                self._failure = Unavailable(self._failure_text(error), remedy)
                return False
            except ApiError as error:
                self.lost_events += 1
                self._failure = Unavailable(self._failure_text(error), "give the agent's role create of events")
            else:
                self._failure = None
            if self._queue and self._queue[0] is event:
                self._queue.popleft()
        return False

    def _failure_text(self, error: Exception) -> str:
        return f"events cannot be written: {error}"
