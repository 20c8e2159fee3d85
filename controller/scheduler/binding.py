"""The verb bind: checks and assumes a pod in one step, and binds it at the API server. If the API server refuses, the
assumption is released. If the result is unknown, because the API server did not answer, the pod is read to find its node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from api.placement import PLACEMENT_SCORE_KEY
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.extender_messages import ExtenderBindingArgs
from controller.scheduler.plugin_chain import PluginChain
from controller.scheduler.scheduler_kinds import SCHEDULER_PODS
from controller.scheduler.scheduling_pod import ScheduledPod, parse_pending_pod
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer

log = logging.getLogger(__name__)
RESOLVE_AFTER_S = 75.0
"""Age of an assumption from which its pod is read. It is longer than the API server works on a request (--request-timeout,
60 s), because until then a binding whose response was lost may still take effect."""
RESOLVE_INTERVAL_S = 5.0
MAX_FINISH_S = 5.0
"""Time for bindings under way when the process ends; kubelets wait 30 s."""


class PodBinder:
    """Binds pods, and keeps the assumptions of the state in step with the API server."""

    def __init__(
        self,
        client: KubeClient,
        pods: Informer[ScheduledPod],
        state: ClusterState,
        chain: PluginChain,
        clock: Callable[[], float],
        on_room: Callable[[str], None] = lambda _node: None,
    ) -> None:
        """`clock` returns seconds since the epoch; `on_room` is called with a node on which an assumption ended."""
        self._on_room = on_room
        self._client, self._pods, self._state, self._chain, self._clock = client, pods, state, chain, clock
        self._tasks: set[asyncio.Task[str]] = set()
        self._in_flight: set[tuple[str, str]] = set()
        """Uid and node of the bindings that the API server is working on."""

    async def bind(self, args: ExtenderBindingArgs) -> str:
        """Bind a pod; return why it is not bound, empty on success. A name that no object can have is an error.

        If kube-scheduler disconnects, the request to the API server continues, so that the extender knows its result.
        """
        try:
            SCHEDULER_PODS.path(f"{args.pod_namespace}/{args.pod_name}")
        except ValueError as error:
            return str(error)
        task = asyncio.create_task(self._bind(args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait for the bindings that are under way, so that kube-scheduler receives their results before the process ends."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=MAX_FINISH_S)

    async def run(self) -> None:
        """Read the pods whose binding the watch has not confirmed, until cancelled."""
        while True:
            await asyncio.sleep(RESOLVE_INTERVAL_S)
            await self.resolve_old_assumptions()

    async def resolve_old_assumptions(self) -> None:
        """Replace each assumption older than RESOLVE_AFTER_S by the node that the API server has."""
        now_s = self._clock()
        for (uid, node), assumption in list(self._state.assumptions.items()):
            # A clock that was set back must not keep an assumption for ever.
            if (uid, node) not in self._in_flight and abs(now_s - assumption.since_s) >= RESOLVE_AFTER_S:
                try:
                    await self._resolve(assumption.charge.key, uid, node)
                except (ApiError, ApiUnreachable) as error:
                    log.warning("%s: cannot read whether it is bound to %s: %s", assumption.charge.key, node, error)

    async def _bind(self, args: ExtenderBindingArgs) -> str:
        key, uid, node = f"{args.pod_namespace}/{args.pod_name}", args.pod_uid, args.node
        pod = await self._read(key, uid)
        if isinstance(pod, str):
            return pod
        if pod.spec.node_name:
            return "" if pod.spec.node_name == node else f"{key} is bound to {pod.spec.node_name} already"
        score = self._check_and_assume(pod, node)
        if isinstance(score, str):
            return score
        self._in_flight.add((uid, node))
        try:
            await self._client.bind(SCHEDULER_PODS, key, uid, node, {PLACEMENT_SCORE_KEY: f"{score:.1f}"})
        except ApiError as error:
            # After an error of the server, such as a timeout of etcd, the binding may be stored (apiserver/pkg/storage/etcd3).
            # A conflict may be with an earlier request for the same node, whose response was lost.
            if error.status >= 500 or error.conflict:
                return await self._after_unknown_result(key, uid, node, str(error), is_final=error.conflict)
            self._release(uid, node)
            return f"binding {key} to {node}: {error}"
        except ApiUnreachable as error:
            return await self._after_unknown_result(key, uid, node, str(error))
        finally:
            self._in_flight.discard((uid, node))
        return ""

    async def _read(self, key: str, uid: str) -> ScheduledPod | str:
        """Return the pod, from the API server if the watch has not delivered it yet, or why it cannot be bound."""
        pod = self._pods.store.get(key)
        if pod is None or pod.metadata.uid != uid:
            try:
                pod = await self._client.get(SCHEDULER_PODS, key)
            except (ApiError, ApiUnreachable) as error:
                return f"reading {key}: {error}"
        if pod.metadata.uid != uid:
            return f"{key} has the uid {pod.metadata.uid}, not {uid}: it was deleted and created again"
        return pod

    def _check_and_assume(self, stored: ScheduledPod, node: str) -> float | str:
        """Check that the pod still fits, and count it at once; return the node's score, 0 to 100, or why the pod does not fit.

        No other request runs between check and assumption. Only this method gives reclaimed resources to bound pods.
        """
        key, state = f"{stored.metadata.namespace}/{stored.metadata.name}", self._state
        try:
            pod = parse_pending_pod(stored)
        except ValueError as error:
            return f"{key}: {error}"
        if (row := state.nodes.row(node)) is None:
            return f"node {node} is not known"
        now_s, rows = self._clock(), np.array([row])
        # The resources of a planned pod are assumed already, as are those of a pod whose first response was lost.
        is_assumed = (pod.uid, node) in state.assumptions
        with state.without(pod.uid):
            score = float(self._chain.score(pod, state.nodes, rows, now_s)[0])
            outcome = None if is_assumed else self._chain.filter(pod, state.nodes, rows, now_s)
        if outcome is not None and not outcome.passes[0]:
            numbers = self._chain.plugins[outcome.plugins[0]].describe(pod, state.nodes, row, now_s)
            return f"{node} does not fit {key} any more: {self._chain.reason(outcome, 0).message} ({numbers})"
        state.assume(pod, node, now_s)
        return score

    async def _after_unknown_result(
        self, key: str, uid: str, node: str, problem: str, *, is_final: bool = False
    ) -> str:
        """Return an empty text if the pod is bound. Otherwise the assumption stays, because the binding may still take effect,
        unless the result `is_final`."""
        try:
            pod = await self._client.get(SCHEDULER_PODS, key)
        except (ApiError, ApiUnreachable):
            return f"binding {key} to {node}: {problem}; the result is not known yet"
        if pod.metadata.uid == uid and pod.spec.node_name == node:
            self._pods.record_write(pod)
            return ""
        if is_final:
            self._release(uid, node)
        return f"binding {key} to {node}: {problem}"

    async def _resolve(self, key: str, uid: str, node: str) -> None:
        """Read a pod and replace its assumption by the node that it has. Raises ApiError and ApiUnreachable."""
        try:
            pod = await self._client.get(SCHEDULER_PODS, key)
        except ApiError as error:
            if not error.missing:
                raise
            self._release(uid, node)
            return
        if pod.metadata.uid == uid and pod.spec.node_name == node:
            # The listener of the informer ends the assumption. A pod that the watch has not delivered at all stays assumed.
            self._pods.record_write(pod)
        else:
            self._release(uid, node)

    def _release(self, uid: str, node: str) -> None:
        self._state.release(uid, node)
        self._on_room(node)
