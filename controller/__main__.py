"""Composition root of the controller: options, API client, HTTP endpoint and leader election."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from agent.dynamic_config.translate import CONFIG_KINDS, DynamicConfigRefused, translate_object
from api import VERSION
from common.http.listener import HttpListener
from common.http.token_review import TokenReviewer
from common.yaml_guard import check_yaml
from controller.descheduler.descheduling_report import DeschedulingReport
from controller.descheduler.plan_endpoint import add_plan_endpoint
from controller.endpoints import build_application
from controller.manager import DESCHEDULER, ControllerManager
from controller.metrics import ControllerExposition
from controller.reconcile import MetricValues
from controller.serving import ProgramOptions, load_settings, run_until_signal, serve_with_tls
from controller.settings import ControllerConfig
from controller.webhooks.config_validation import ConfigFindings
from controller.webhooks.webhook_service import WebhookService
from kube.access_review import review_token
from kube.client import KubeClient
from kube.kubeconfig import load_access
from kube.leader_election import LeaderElection

log = logging.getLogger("dioptase.controller")

LEADING_METRIC = "dioptase_controller_leading"


def main(options: ProgramOptions) -> None:
    """Run until a signal. Raises ValueError for invalid settings, and Unavailable, before anything is written."""
    asyncio.run(_run(options, load_settings(options.config, ControllerConfig)))


async def _run(options: ProgramOptions, config: ControllerConfig) -> None:
    access = load_access(os.environ, check_yaml)
    metrics = MetricValues()
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(KubeClient(access, f"dioptase-controller/{VERSION}"))
        exposition = ControllerExposition(metrics, client)
        replica = Replica(client, config, metrics, exposition, f"{access.namespace}/{config.lease}")
        tokens = TokenReviewer(partial(review_token, client)) if config.token_review else None
        authorize = None if tokens is None else tokens.refusal
        parts = [replica.run]
        unready = [replica.unsynced]
        if config.webhooks.serve:
            webhooks = WebhookService(client, config.webhooks, access.namespace, options.hosts, metrics, check_config)
            exposition.watch_always(webhooks)
            parts.append(webhooks.run)
            # A Service must not send reviews to a replica whose port is still closed.
            unready.append(webhooks.unready)
        application = build_application(
            exposition, lambda: next(filter(None, (why() for why in unready)), ""), authorize
        )
        if DESCHEDULER in config.controllers:
            add_plan_endpoint(application, lambda: replica.descheduling_report, authorize)
        await serve_with_tls(HttpListener(application), options.hosts, options.port, options.web_config, stack)
        await run_until_signal(_run_together(parts))


def check_config(resource: str, body: Mapping[str, Any]) -> ConfigFindings:
    """Return what the agents find in a configuration object, by the parser that they apply it with."""
    kind = CONFIG_KINDS.get(resource)
    if kind is None:
        return ConfigFindings()
    try:
        return ConfigFindings(ineffective=translate_object(kind, body).unused)
    except DynamicConfigRefused as error:
        return ConfigFindings(problem=str(error))


async def _run_together(parts: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part())


class Replica:
    """One of several replicas: on standby until it leads, and again after it loses the lease."""

    def __init__(
        self,
        client: KubeClient,
        config: ControllerConfig,
        metrics: MetricValues,
        exposition: ControllerExposition,
        lease: str,
    ) -> None:
        self._client, self._config, self._metrics, self._exposition = client, config, metrics, exposition
        identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        self._election = LeaderElection(client, lease, identity)
        self._namespace = lease.rpartition("/")[0]
        self._manager: ControllerManager | None = None

    async def run(self) -> None:
        """Run until cancelled, or until the work raises because of a bug."""
        while True:
            self._metrics.set(LEADING_METRIC, [((), 0)])
            await self._election.lead(self._work)

    def unsynced(self) -> str:
        """Why this replica is not ready: resources not listed yet. A replica on standby is ready."""
        return self._manager.unsynced() if self._manager is not None else ""

    @property
    def descheduling_report(self) -> DeschedulingReport | None:
        """The latest evaluation of the descheduler; None unless this replica leads and runs one."""
        return None if self._manager is None else self._manager.descheduling_report

    async def _work(self) -> None:
        self._metrics.set(LEADING_METRIC, [((), 1)])
        self._manager = ControllerManager(self._client, self._config, self._namespace, self._metrics, self._exposition)
        try:
            await self._manager.run()
        finally:
            self._manager = None
            self._exposition.watch((), {})
