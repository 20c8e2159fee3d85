"""Makes kube-scheduler try pending pods again at once when resources for them become free.
kube-scheduler watches Nodes and Pods, but no CustomNodeResources. If only the extender rejected a pod, it would not try the pod
again before an unrelated event, or before five minutes. So the extender updates the pod. Without queueing hints (before 1.32)
kube-scheduler tries a pod again after any change outside of its status (pkg/scheduler/internal/queue/scheduling_queue.go,
isPodUpdated). With them it treats the extender as a plugin that every event concerns
(pkg/scheduler/framework/runtime/framework.go, defaultEnqueueExtension).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from api.qos import QoSLevel
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.gangs import gang_key
from controller.scheduler.node_arrays import BoolArray
from controller.scheduler.plugin_chain import PluginChain, Rows
from controller.scheduler.scheduler_kinds import SCHEDULER_PODS
from controller.scheduler.scheduling_pod import Amounts, ScheduledPod, SchedulingPod, parse_pending_pod
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.objects import format_timestamp, key_of
from kube.watch import ObjectChange

log = logging.getLogger(__name__)
RETRY_ANNOTATION = "dioptase.io/scheduling-retry"
"""Annotation with the time at which the extender last made kube-scheduler try a pending pod again."""
RETRY_INTERVAL_S = 0.25
MIN_RETRY_AGE_S, MAX_RETRY_AGE_S = 1.0, 8.0
"""Time between the first two updates of a pod or a gang that stays pending, and the maximum up to which this time doubles.
Without these limits, updates in vain would be hundreds of writes a second, for example of a gang of which only some pods
fit."""
MAX_RETRIES = 50
"""Maximum number of pods updated in one interval, those with the highest priority first. kube-scheduler schedules fewer pods in
this time."""
MAX_COST_US = 20_000.0
"""Maximum estimated CPU time of one evaluation, because it delays kube-scheduler's requests by this time. The remaining pods
are evaluated after an interval."""
SKIP_US, PARSE_US, COMPARE_US, FILTER_US = 5.0, 40.0, 20.0, 150.0
COMPARE_ROW_US, FILTER_ROW_US = 0.02, 0.25
"""Measured CPU time of each step: for one pod, and for one node of a pod."""
MAX_UNKNOWN_AGE_S = 60.0
"""Age at which a rejected pod that the watch has not delivered is forgotten."""
MAX_RETRY_MEMORY_S = 60.0
"""Age at which an update in vain is forgotten, so that the next interval is the shortest one again."""


class RowSet(NamedTuple):
    """Set of rows as bits. 10,000 pods that wait on 5,000 nodes have 6 MiB of these; sets of numbers would take 6 GiB."""

    bits: bytes

    @classmethod
    def of(cls, rows: Rows) -> RowSet:
        """Return the set of these rows; -1 stands for an unknown node."""
        mask = np.zeros(int(rows.max(initial=-1)) + 1, np.uint8)
        mask[rows[rows >= 0]] = 1
        return cls(np.packbits(mask).tobytes())

    def contains(self, rows: Rows) -> BoolArray:
        """Return which of these rows are in the set."""
        mask = np.unpackbits(np.frombuffer(self.bits, np.uint8))
        inside = rows < len(mask)
        return inside & (mask[np.where(inside, rows, 0)] == 1) if len(mask) else inside


INVALID_POD, INCOMPLETE_GANG, UNKNOWN_NODES, NOT_TRIED = OTHER_REJECTIONS = ("Invalid", "Gang", "Cache", "Unknown")
"""Causes of a pending pod besides plugins: an invalid field of the pod, its gang, nodes that are not listed yet, and no attempt
by this process."""


class RejectedPod(NamedTuple):
    """Pod that fits no node of a request."""

    uid: str
    candidates: RowSet | None
    """Rows of the nodes that kube-scheduler's own plugins accept; None if they are not known. Free resources of other nodes do
    not help the pod. If those plugins accept other nodes later, kube-scheduler tries the pod again by itself."""
    plugin: str
    """Plugin that rejected most nodes at the latest attempt, or one of OTHER_REJECTIONS."""
    since_s: float
    """Time of the first rejection, in seconds since the epoch."""


class RetryTime(NamedTuple):
    """Time of the latest update of a pod, or of a pod of a gang, and the minimum age at which it may be repeated."""

    at_s: float
    min_age_s: float


class ParsedPod(NamedTuple):
    """Amounts of one version of a pod; None if they are invalid."""

    version: str
    pod: SchedulingPod | None


class PendingPods:
    """Pods that an extender call rejected, by key, until they have a node or are deleted."""

    def __init__(
        self, client: KubeClient, pods: Informer[ScheduledPod], state: ClusterState, chain: PluginChain,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._client, self._pods, self._state, self._chain, self._clock = client, pods, state, chain, clock
        self._rejected: dict[str, RejectedPod] = {}
        self._parsed: dict[str, ParsedPod] = {}
        self._retries: dict[str, RetryTime] = {}
        """By `_retry_key`."""
        self._rows: set[int] = set()
        """Rows of nodes that changed since the last evaluation."""
        self._unevaluated: list[str] = []
        """Pods for which the rows of the evaluation under way are not evaluated yet."""
        self._evaluated_rows: list[int] = []
        self._forced: set[str] = set()
        self._changed = asyncio.Event()
        pods.listen(self._on_pod)

    def __len__(self) -> int:
        """Number of pending pods."""
        return len(self._rejected)

    def record_result(
        self, pod: ScheduledPod, rows: Sequence[int] | Rows, *, is_rejected: bool, plugin: str = NOT_TRIED
    ) -> None:
        """Record the result of a filter request for these candidate rows, and the plugin that rejected most of them."""
        key = key_of(pod.metadata)
        if is_rejected:
            self._reject(key, pod.metadata.uid, RowSet.of(np.asarray(rows, np.intp)), plugin)
        else:
            self._rejected.pop(key, None)

    def _reject(self, key: str, uid: str, candidates: RowSet | None, plugin: str) -> None:
        earlier = self._rejected.get(key)
        since_s = self._clock() if earlier is None or earlier.uid != uid else earlier.since_s
        self._rejected[key] = RejectedPod(uid, candidates, plugin, since_s)

    def counts_by_plugin(self) -> dict[str, int]:
        """Return the number of pending pods by the plugin that rejected most nodes, or by one of OTHER_REJECTIONS."""
        names = (*(plugin.name for plugin in self._chain.plugins), *OTHER_REJECTIONS)
        counts = Counter(rejected.plugin for rejected in self._rejected.values())
        return {name: counts[name] for name in names}

    def oldest_age_s(self) -> float:
        """Return the time in seconds since the first rejection of the oldest pending pod; 0 if no pod is pending."""
        since_s = min((rejected.since_s for rejected in self._rejected.values()), default=None)
        # A clock that was set back must not result in a negative age.
        return 0.0 if since_s is None else max(self._clock() - since_s, 0.0)

    def adopt_pending(self) -> None:
        """Count every pending pod that requests reclaimed resources or is dedicated_cores as rejected, because an earlier
        process may have rejected it."""
        for key, pod in self._pods.store.items():
            with contextlib.suppress(ValueError):
                # Parsing takes long for the many pods that have a node.
                parsed = None if pod.spec.node_name else parse_pending_pod(pod)
                if parsed is not None and (parsed.reclaimed != (0, 0) or parsed.level is QoSLevel.DEDICATED):
                    self._reject(key, pod.metadata.uid, None, NOT_TRIED)
        self._rows.update(range(len(self._state.nodes.names)))
        self._changed.set()

    def retry_now(self, keys: Iterable[str]) -> None:
        """Make kube-scheduler try these pods, because their gang was planned."""
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

        Resources that one of them would take do not count for another, so that one free core does not wake a thousand pods. If
        there are many different pods, a call evaluates some of them and the next calls the others, because requests of
        kube-scheduler wait meanwhile.
        """
        if not self._unevaluated:
            self._begin_evaluation(now_s)
        changed, nodes, store = self._evaluated_rows, self._state.nodes, self._pods.store
        rows = np.array(changed, np.intp)
        free = nodes.allocatable[rows] - nodes.requested[rows]
        largest = Amounts(*free.max(axis=0, initial=0).tolist())
        passes_by_shape: dict[tuple[str, SchedulingPod], BoolArray] = {}
        results: dict[str, tuple[str, str]] = {}
        cost_us = 0.0
        while self._unevaluated and cost_us < MAX_COST_US:
            key = self._unevaluated.pop()
            rejected, stored = self._rejected.get(key), store.get(key)
            if rejected is None or stored is None or (retry_key := _retry_key(key, stored, rejected)) in results:
                continue
            cost_us += SKIP_US if self._is_parsed(key, stored) else PARSE_US
            if (pod := self._parse_waiting(key, stored)) is None or not _is_within(pod.reclaimed, largest):
                continue
            # The namespace matters to quotas.
            shape = (key.partition("/")[0], pod._replace(key="", uid="", priority=0))
            if (passes := passes_by_shape.get(shape)) is None:
                passes = passes_by_shape[shape] = self._chain.filter(pod, nodes, rows, now_s).passes
                cost_us += FILTER_US + len(changed) * FILTER_ROW_US
            if not passes.any():
                continue
            cost_us += COMPARE_US + len(changed) * COMPARE_ROW_US
            if pod.reclaimed != (0, 0):
                # Free amounts only decrease here, so the next equal pod need not be compared with nodes that are full now.
                passes = passes_by_shape[shape] = passes & (np.asarray(pod.reclaimed) <= free).all(axis=1)
            fits = passes if rejected.candidates is None else passes & rejected.candidates.contains(rows)
            if not fits.any():
                continue
            index = int(np.flatnonzero(fits)[0])
            if len(results) < MAX_RETRIES and self._begin_retry(retry_key, now_s):
                free[index] -= pod.reclaimed
                results[retry_key] = (key, pod.uid)
                self._rejected.pop(key)
                # Pods of a gang may have different candidates: at the end of the order, the pod lets another one be next.
                # An adopted pod may belong to another scheduler: only a filter request shows that it belongs to this one.
                if rejected.candidates is not None:
                    self._rejected[key] = rejected
            else:
                self._rows.add(changed[index])
                self._changed.set()
        if self._unevaluated:
            self._changed.set()
        return list(results.values())

    def _begin_evaluation(self, now_s: float) -> None:
        """Take the rows that have changed, and all pods, by descending priority from the end of the list."""
        self._evaluated_rows = sorted(self._rows)
        self._rows.clear()
        if not self._evaluated_rows:
            return
        for key, rejected in list(self._rejected.items()):
            # If the request arrived after the deletion of its pod, no event of the watch will remove the pod.
            if key not in self._pods.store and abs(now_s - rejected.since_s) >= MAX_UNKNOWN_AGE_S:
                self._forget(key)
        self._retries = {
            key: retry for key, retry in self._retries.items() if abs(now_s - retry.at_s) < MAX_RETRY_MEMORY_S
        }
        stored = self._pods.store
        waiting = [(stored[key].spec.priority or 0, key) for key in self._rejected if key in stored]
        waiting.reverse()
        waiting.sort(key=lambda item: item[0])
        self._unevaluated = [key for _, key in waiting]

    def _begin_retry(self, retry_key: str, now_s: float) -> bool:
        """Return whether a pod or a gang may be updated now, and count it as updated."""
        retry = self._retries.get(retry_key)
        # A clock that was set back must not delay an update for longer than the interval.
        if retry is not None and abs(now_s - retry.at_s) < retry.min_age_s:
            return False
        min_age_s = MIN_RETRY_AGE_S if retry is None else min(2 * retry.min_age_s, MAX_RETRY_AGE_S)
        self._retries[retry_key] = RetryTime(now_s, min_age_s)
        return True

    def _is_parsed(self, key: str, stored: ScheduledPod) -> bool:
        version, parsed = stored.metadata.resource_version, self._parsed.get(key)
        return parsed is not None and bool(version) and parsed.version == version

    def _parse_waiting(self, key: str, stored: ScheduledPod) -> SchedulingPod | None:
        """Return the amounts of a pod, parsed once for each version; None if they are invalid, or if it waits no more."""
        if stored.metadata.uid != self._rejected[key].uid or stored.spec.node_name:
            return None
        if not self._is_parsed(key, stored):
            pod = None
            with contextlib.suppress(ValueError):
                pod = parse_pending_pod(stored)
            self._parsed[key] = ParsedPod(stored.metadata.resource_version, pod)
        return self._parsed[key].pod

    def _forget(self, key: str) -> None:
        for each in (self._rejected, self._parsed, self._retries):
            each.pop(key, None)

    async def _update(self, key: str, uid: str) -> None:
        metadata = {"uid": uid, "annotations": {RETRY_ANNOTATION: format_timestamp(self._clock(), micro=True)}}
        try:
            await self._client.merge_patch(SCHEDULER_PODS, key, {"metadata": metadata})
        except (ApiError, ApiUnreachable) as error:
            # If the pod was deleted or created again meanwhile, the watch delivers this.
            if not (isinstance(error, ApiError) and (error.missing or error.conflict)):
                problem = f"cannot set {RETRY_ANNOTATION}, so kube-scheduler may try it again only after 5 min"
                log.warning("%s: %s: %s", key, problem, error)

    def _on_pod(self, change: ObjectChange[ScheduledPod]) -> None:
        new = change.new
        rejected = self._rejected.get(change.key)
        if new is None or new.spec.node_name or (rejected is not None and rejected.uid != new.metadata.uid):
            self._forget(change.key)


def _retry_key(key: str, pod: ScheduledPod, rejected: RejectedPod) -> str:
    """Return the key whose pods are updated at most once in an interval: a gang or a pod; a space distinguishes the two.

    It is the gang if the whole gang lacks resources, or if this process has not tried the pod: an attempt of one pod plans the
    others, which are then tried too.
    """
    gang = gang_key(pod) if rejected.plugin in (INCOMPLETE_GANG, NOT_TRIED) else ""
    return f"gang {gang}" if gang else key


def _is_within(amounts: Amounts, limit: Amounts) -> bool:
    return amounts.millicpu <= limit.millicpu and amounts.memory <= limit.memory
