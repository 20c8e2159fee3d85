"""Composition of the scheduler extender: options, API client, informers, plugins, verbs and background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from functools import partial
from typing import Any

from api import VERSION
from common.http.listener import HttpListener
from common.http.token_review import TokenReviewer
from common.yaml_guard import check_yaml
from controller.endpoints import build_application
from controller.metrics import ControllerExposition
from controller.reconcile import MetricValues
from controller.scheduler.binding import PodBinder
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.elastic_quota import ElasticQuotas
from controller.scheduler.extender import Extender
from controller.scheduler.extender_endpoints import MAX_BODY_BYTES, ExtenderEndpoints, body_problem
from controller.scheduler.harm_score import HarmScore
from controller.scheduler.load_aware import LoadAware
from controller.scheduler.node_overcommitment import OvercommitmentFilter
from controller.scheduler.pending_pods import PendingPods
from controller.scheduler.plugin_chain import PluginChain
from controller.scheduler.qos_taints import QosTaints
from controller.scheduler.resource_fit import BalancedAllocation, ResourceFit
from controller.scheduler.scheduler_kinds import (
    ELASTIC_QUOTAS,
    SCHEDULER_CNRS,
    SCHEDULER_NODES,
    SCHEDULER_PODS,
    ZONED_CNRS,
    ElasticQuota,
    SchedulerCnr,
    SchedulerNode,
)
from controller.scheduler.scheduler_settings import SchedulerConfig
from controller.scheduler.scheduling_pod import ScheduledPod
from controller.scheduler.topology_plugin import NumaTopology, topology_rules
from controller.serving import ProgramOptions, load_settings, run_until_signal, serve_with_tls
from kube.access_review import review_token
from kube.client import KubeClient, ListScope
from kube.informer import Informer, describe_unsynced
from kube.kubeconfig import load_access
from kube.watch import ObjectChange

log = logging.getLogger("dioptase.scheduler")
RUNNING_PODS = ListScope(fields=",".join(f"status.phase!={phase}" for phase in ("Succeeded", "Failed")))
"""Pods that have ended take nothing, as for kube-scheduler (pkg/scheduler/scheduler.go, NewInformerFactory). The watch reports
the end of a pod as its deletion."""
MAX_EXTENDER_CONNECTIONS = 1024
"""A kube-scheduler opens one connection for each of the bindings that it has under way."""


def run_scheduler(options: ProgramOptions) -> None:
    """Run until a signal. Raises ValueError for invalid settings, and Unavailable, before anything is served."""
    asyncio.run(_run(options, load_settings(options.config, SchedulerConfig)))


def build_chain(config: SchedulerConfig, quotas: ElasticQuotas | None = None) -> PluginChain:
    """Return the plugins in their order. Add another plugin here."""
    rules = topology_rules(config.topology)
    plugins = (
        *(() if quotas is None else (quotas,)),
        QosTaints(),
        ResourceFit(config.fit),
        BalancedAllocation(config.fit),
        *(() if rules is None else (NumaTopology(rules, config.topology.weight),)),
        *((OvercommitmentFilter(),) if config.node_overcommitment else ()),
        LoadAware(config.load),
        HarmScore(config.harm),
    )
    return PluginChain(plugins)


class SchedulerCache:
    """Informers of Nodes, CustomNodeResources and Pods, which keep the state of the cluster up to date."""

    def __init__(self, client: KubeClient, state: ClusterState, quotas: ElasticQuotas | None = None) -> None:
        self.state, self._quotas = state, quotas
        self.nodes: Informer[SchedulerNode] = Informer(client, SCHEDULER_NODES)
        self.cnrs: Informer[SchedulerCnr] = Informer(
            client, ZONED_CNRS if state.alignment.has_rules else SCHEDULER_CNRS
        )
        self.pods: Informer[ScheduledPod] = Informer(client, SCHEDULER_PODS, RUNNING_PODS)
        self.quotas: Informer[ElasticQuota] = Informer(client, ELASTIC_QUOTAS)
        self.informers: tuple[Informer[Any], ...] = (self.nodes, self.cnrs, self.pods)
        if quotas is not None:
            self.informers = (*self.informers, self.quotas)
            self.quotas.listen(lambda change: quotas.apply(change.key, change.new))
        self.nodes.listen(lambda change: state.apply_node(change.key, change.new))
        self.cnrs.listen(lambda change: state.apply_cnr(change.key, change.new))
        self.pods.listen(self._on_pod)
        self._logged: dict[str, str] = {}
        self._seen_changes = 0
        for informer in self.informers:
            informer.listen(self._log_problems)

    def unsynced(self) -> str:
        """Return the resources that have not been listed yet; empty if all have."""
        return describe_unsynced(self.informers)

    def problems(self) -> dict[str, str]:
        """Return the problems of objects with an invalid value, by kind and name of the object."""
        quotas = {} if self._quotas is None else self._quotas.problems
        return self.state.problems | {f"elasticquota {key}": text for key, text in quotas.items()}

    def _log_problems(self, _change: object) -> None:
        """Log each problem once until it changes. Called for every change of an object, so it has to be cheap."""
        changes = self.state.problem_changes + (0 if self._quotas is None else self._quotas.problem_changes)
        if changes != self._seen_changes:
            problems, self._seen_changes = self.problems(), changes
            for subject, problem in problems.items() - self._logged.items():
                log.warning("%s: %s", subject, problem)
            self._logged = problems

    def _on_pod(self, change: ObjectChange[ScheduledPod]) -> None:
        # Pods of the first list have run for a while; their usage is in the reports.
        placed_at_s = time.time() if self.pods.synced.is_set() else None
        self.state.apply_pod(change.old, change.new, placed_at_s)


async def _run(options: ProgramOptions, config: SchedulerConfig) -> None:
    metrics = MetricValues()
    async with contextlib.AsyncExitStack() as stack:
        access = load_access(os.environ, check_yaml)
        client = await stack.enter_async_context(KubeClient(access, f"dioptase-scheduler/{VERSION}"))
        factors = (config.load.cpu_factor / 100, config.load.memory_factor / 100)
        state = ClusterState(factors, config.load.percentile, topology_rules(config.topology))
        quotas = ElasticQuotas(state.namespace_requests) if config.elastic_quota else None
        chain, cache = build_chain(config, quotas), SchedulerCache(client, state, quotas)
        pending = PendingPods(client, cache.pods, state, chain, time.time)
        watch_for_room(cache, pending)
        binder = PodBinder(client, cache.pods, state, chain, time.time, pending.record_room)

        def set_gauges() -> None:
            gauges = {"nodes": len(state.nodes), "pending_pods": len(pending), "assumed_pods": len(state.assumptions)}
            for name, value in (*gauges.items(), ("problems", len(cache.problems()))):
                metrics.set(f"dioptase_scheduler_{name}", [((), value)])
            metrics.set("dioptase_scheduler_oldest_pending_seconds", [((), pending.oldest_age_s())])
            by_plugin = pending.counts_by_plugin().items()
            metrics.set("dioptase_scheduler_pending_pods_by_plugin", [((name,), count) for name, count in by_plugin])

        exposition = ControllerExposition(metrics, client, set_gauges)
        exposition.watch(cache.informers, {})
        tokens = TokenReviewer(partial(review_token, client)) if config.token_review else None
        authorize = None if tokens is None else tokens.refusal
        app = build_application(exposition, cache.unsynced, authorize, MAX_BODY_BYTES)
        extender = Extender(state, chain)
        cache.pods.listen(lambda change: extender.gangs.apply(change.key, change.old, change.new))
        ExtenderEndpoints(extender, binder, pending, cache, metrics, authorize).add_to(app)
        listener = HttpListener(app, body_problem, MAX_EXTENDER_CONNECTIONS)
        await serve_with_tls(listener, options.hosts, options.port, options.web_config, stack)
        await run_until_signal(_work(cache, pending, binder))
        await binder.finish()


def watch_for_room(cache: SchedulerCache, pending: PendingPods) -> None:
    """Evaluate pending pods when a CustomNodeResource changes, and when a pod on a node ends."""
    cache.cnrs.listen(lambda change: pending.record_room(change.key))
    cache.quotas.listen(lambda _change: pending.record_room_everywhere())

    def on_pod(change: ObjectChange[ScheduledPod]) -> None:
        old, new = change.old, change.new
        if old is not None and old.holds_resources and (new is None or not new.holds_resources):
            pending.record_room(old.spec.node_name)
            if cache.quotas in cache.informers:
                pending.record_room_everywhere()

    cache.pods.listen(on_pod)


async def _work(cache: SchedulerCache, pending: PendingPods, binder: PodBinder) -> None:
    """Run until cancelled, or until one of the tasks raises because of a bug, which ends the process."""

    async def adopt_pending() -> None:
        for informer in cache.informers:
            await informer.synced.wait()
        log.info("%d nodes, %d pods with a node", len(cache.state.nodes), cache.state.pod_count)
        # Without this, each full garbage collection would visit every listed pod, and delay a request meanwhile.
        gc.collect()
        gc.freeze()
        pending.adopt_pending()

    async with asyncio.TaskGroup() as group:
        for informer in cache.informers:
            group.create_task(informer.run())
        group.create_task(adopt_pending())
        group.create_task(pending.run())
        group.create_task(binder.run())
