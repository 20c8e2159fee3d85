"""Has kube-scheduler try pending pods again at once when resources appear for them.
kube-scheduler hears of changes of Nodes and Pods, not of CustomNodeResources: a pod that only the extender rejected would wait
for an unrelated event or for five minutes. An update of the pod itself is such an event for it: without queueing hints (before
1.32) any change outside of the status moves it (pkg/scheduler/internal/queue/scheduling_queue.go, isPodUpdated); with them the
extender counts as a plugin that every event concerns (pkg/scheduler/framework/runtime/framework.go, defaultEnqueueExtension).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from api.qos import QoSLevel
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.gangs import gang_key
from controller.scheduler.node_arrays import BoolArray
from controller.scheduler.plugin_chain import PluginChain
from controller.scheduler.scheduler_kinds import SCHEDULER_PODS
from controller.scheduler.scheduling_pod import ScheduledPod, SchedulingPod, parse_scheduling_pod
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.objects import format_timestamp, key_of
from kube.watch import ObjectChange

log = logging.getLogger(__name__)
RETRY_ANNOTATION = "dioptase.io/scheduling-retry"
"""Time at which the extender last saw room for a pending pod."""
RETRY_INTERVAL_S = 0.25
MIN_RETRY_AGE_S, MAX_RETRY_AGE_S = 1.0, 8.0
"""Time between the first two updates of one pod that stays pending; it doubles up to the second number. Updates in vain, such
as those of a gang for which there is room for some of its pods, would be hundreds of writes a second."""
MAX_RETRIES = 50
"""Pods updated in one interval, those with the highest priority first: more than kube-scheduler schedules meanwhile."""


INVALID_POD, INCOMPLETE_GANG, UNKNOWN_NODES, NOT_TRIED = OTHER_REJECTIONS = ("Invalid", "Gang", "Cache", "Unknown")
"""What rejects a pod besides plugins: its own fields, its gang, nodes that have not been listed yet; or this process has not
tried it."""


class RejectedPod(NamedTuple):
    """Pod that no node of a request fits."""

    uid: str
    candidates: frozenset[int] | None
    """Rows of the nodes that kube-scheduler's own plugins accept; None if that is not known. Room elsewhere is of no use to
    the pod, and if those plugins accept other nodes later, kube-scheduler notices itself."""
    plugin: str
    """Plugin that rejected most nodes at the latest attempt, or one of OTHER_REJECTIONS."""
    since_s: float
    """Time of the first rejection, in seconds since the epoch."""


class PendingPods:
    """Pods that an extender call rejected, by key, until they have a node or are deleted."""

    def __init__(
        self, client: KubeClient, pods: Informer[ScheduledPod], state: ClusterState, chain: PluginChain,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._client, self._pods, self._state, self._chain, self._clock = client, pods, state, chain, clock
        self._rejected: dict[str, RejectedPod] = {}
        self._next_update_s: dict[str, tuple[float, float]] = {}
        """Earliest time of the next update of a pod, and the interval after that."""
        self._rows: set[int] = set()
        """Rows of nodes that changed since the last evaluation."""
        self._forced: set[str] = set()
        self._changed = asyncio.Event()
        pods.listen(self._on_pod)

    def __len__(self) -> int:
        """Number of pods that wait."""
        return len(self._rejected)

    def record_result(
        self, pod: ScheduledPod, rows: Iterable[int], *, is_rejected: bool, plugin: str = NOT_TRIED
    ) -> None:
        """Record the result of a filter request for these candidate rows, and the plugin that rejected most of them."""
        key = key_of(pod.metadata)
        if is_rejected:
            self._reject(key, pod.metadata.uid, frozenset(rows), plugin)
        else:
            self._rejected.pop(key, None)

    def _reject(self, key: str, uid: str, candidates: frozenset[int] | None, plugin: str) -> None:
        earlier = self._rejected.get(key)
        since_s = self._clock() if earlier is None or earlier.uid != uid else earlier.since_s
        self._rejected[key] = RejectedPod(uid, candidates, plugin, since_s)

    def counts_by_plugin(self) -> dict[str, int]:
        """Return the number of pods by what rejects most nodes for them: every plugin, and OTHER_REJECTIONS."""
        names = (*(plugin.name for plugin in self._chain.plugins), *OTHER_REJECTIONS)
        counts = Counter(rejected.plugin for rejected in self._rejected.values())
        return {name: counts[name] for name in names}

    def oldest_age_s(self) -> float:
        """Return the time since the first rejection of the pod that waits longest; 0 without pods that wait."""
        since_s = min((rejected.since_s for rejected in self._rejected.values()), default=None)
        # A clock that was set back is no negative age.
        return 0.0 if since_s is None else max(self._clock() - since_s, 0.0)

    def adopt_pending(self) -> None:
        """Count every pending pod with reclaimed resources as rejected, and each dedicated_cores pod: an earlier process may
        have rejected it."""
        for key, pod in self._pods.store.items():
            with contextlib.suppress(ValueError):
                # Parsing takes long for the many pods that have a node.
                parsed = None if pod.spec.node_name else parse_scheduling_pod(pod)
                if parsed is not None and (parsed.reclaimed != (0, 0) or parsed.level is QoSLevel.DEDICATED):
                    self._reject(key, pod.metadata.uid, None, NOT_TRIED)
        self._rows.update(range(len(self._state.nodes.names)))
        self._changed.set()

    def retry_now(self, keys: Iterable[str]) -> None:
        """Have kube-scheduler try these pods, because their gang was planned."""
        if fresh := [key for key in keys if key in self._rejected]:
            self._forced.update(fresh)
            self._changed.set()

    def record_room(self, node: str) -> None:
        """Evaluate the pending pods soon: the CustomNodeResource of a node changed, or a pod left it."""
        if self._rejected and (row := self._state.nodes.row(node)) is not None:
            self._rows.add(row)
            self._changed.set()

    def record_room_everywhere(self) -> None:
        """Evaluate the pending pods on all nodes soon: a quota changed, or a namespace uses less of it."""
        if self._rejected:
            self._rows.update(range(len(self._state.nodes.names)))
            self._changed.set()

    async def run(self) -> None:
        """Update pods for which there is room now, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            forced, self._forced = self._forced, set()
            due = {key: self._rejected[key].uid for key in sorted(forced) if key in self._rejected}
            for key, uid in (due | dict(self.fitting_pods(self._clock()))).items():
                await self._update(key, uid)
            await asyncio.sleep(RETRY_INTERVAL_S)

    def fitting_pods(self, now_s: float) -> list[tuple[str, str]]:
        """Return key and uid of pods to update, those with the highest priority first.

        Room that one of them would take is not counted twice, so that one freed core does not wake a thousand pods.
        """
        nodes, changed = self._state.nodes, sorted(self._rows)
        self._rows.clear()
        rows = np.array(changed, np.intp)
        reserved = np.zeros((len(rows), 2), np.int64)
        passes_by_shape: dict[tuple[str, SchedulingPod], BoolArray] = {}
        results: list[tuple[str, str]] = []
        gangs: set[str] = set()
        for key, pod, rejected in self._parsed():
            # The first pod of a gang plans the others, which are tried then.
            if (gang := gang_key(self._pods.store[key])) in gangs:
                continue
            is_due = self._is_due(key, now_s)
            # The namespace matters to quotas.
            shape = (key.partition("/")[0], pod._replace(key="", uid="", priority=0))
            if (passes := passes_by_shape.get(shape)) is None:
                passes = passes_by_shape[shape] = self._chain.filter(pod, nodes, rows, now_s).passes
            fits = passes.copy()
            if rejected.candidates is not None:
                fits &= np.fromiter((row in rejected.candidates for row in changed), np.bool_, len(changed))
            if pod.reclaimed != (0, 0):
                free = nodes.allocatable[rows] - nodes.requested[rows] - reserved
                fits &= (np.asarray(pod.reclaimed) <= free).all(axis=1)
            if not fits.any():
                continue
            if gang:
                gangs.add(gang)
            index = int(np.flatnonzero(fits)[0])
            if is_due and len(results) < MAX_RETRIES:
                reserved[index] += pod.reclaimed
                results.append((key, pod.uid))
                self._record_update(key, now_s)
                # Another scheduler may have an adopted pod: from then on only filter requests show that it is this one's.
                if rejected.candidates is None:
                    self._rejected.pop(key)
            else:
                self._rows.add(changed[index])
                self._changed.set()
        return results

    def _is_due(self, key: str, now_s: float) -> bool:
        next_s, interval_s = self._next_update_s.get(key, (-math.inf, 0.0))
        # A clock that was set back must not delay an update for longer than the interval.
        return now_s >= next_s or now_s < next_s - interval_s

    def _record_update(self, key: str, now_s: float) -> None:
        _, interval_s = self._next_update_s.get(key, (0.0, 0.0))
        interval_s = min(2 * interval_s, MAX_RETRY_AGE_S) or MIN_RETRY_AGE_S
        self._next_update_s[key] = now_s + interval_s, interval_s

    def _parsed(self) -> list[tuple[str, SchedulingPod, RejectedPod]]:
        """Return the pods that wait, by descending priority."""
        results = []
        for key, rejected in self._rejected.items():
            stored = self._pods.store.get(key)
            if stored is not None and stored.metadata.uid == rejected.uid and not stored.spec.node_name:
                with contextlib.suppress(ValueError):
                    results.append((key, parse_scheduling_pod(stored), rejected))
        return sorted(results, key=lambda item: -item[1].priority)

    async def _update(self, key: str, uid: str) -> None:
        now_s = self._clock()
        metadata = {"uid": uid, "annotations": {RETRY_ANNOTATION: format_timestamp(now_s, micro=True)}}
        try:
            await self._client.merge_patch(SCHEDULER_PODS, key, {"metadata": metadata})
        except ApiError as error:
            # Deleted, or created again, meanwhile: the watch delivers it.
            if not (error.missing or error.conflict):
                log.warning("%s: cannot have kube-scheduler try it again: %s", key, error)
        except ApiUnreachable as error:
            log.warning("%s: cannot have kube-scheduler try it again: %s", key, error)

    def _on_pod(self, change: ObjectChange[ScheduledPod]) -> None:
        new = change.new
        rejected = self._rejected.get(change.key)
        if new is None or new.spec.node_name or (rejected is not None and rejected.uid != new.metadata.uid):
            self._rejected.pop(change.key, None)
            self._next_update_s.pop(change.key, None)
