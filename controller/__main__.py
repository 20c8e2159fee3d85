"""Composition root of the controller: options, API client, HTTP endpoint and leader election."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from agent.dynamic_config.translate import CONFIG_KINDS, DynamicConfigRefused, translate_object
from api import VERSION
from api.interfaces import Unavailable
from common.http.listener import HttpListener
from common.http.token_review import TokenReviewer
from common.http.web_config import WebConfig, WebSecurity
from common.validation import describe_validation_error
from common.yaml_guard import check_yaml
from controller.endpoints import build_application
from controller.manager import ControllerManager
from controller.metrics import ControllerExposition
from controller.reconcile import MetricValues
from controller.settings import ControllerConfig, parse_settings
from controller.webhooks.config_validation import ConfigFindings
from controller.webhooks.webhook_service import WebhookService
from kube.access_review import review_token
from kube.client import KubeClient
from kube.kubeconfig import load_access
from kube.leader_election import LeaderElection

log = logging.getLogger("dioptase.controller")

MAX_SETTINGS_BYTES = 1 << 20
LEADING_METRIC = "dioptase_controller_leading"


class ControllerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line options."""

    hosts: tuple[str, ...]
    port: int
    config: Path | None = None
    web_config: Path | None = None


def main(options: ControllerOptions) -> None:
    """Run until a signal. Raises ValueError for invalid settings, and Unavailable, before anything is written."""
    asyncio.run(_run(options, _load_settings(options.config)))


def _load_settings(path: Path | None) -> ControllerConfig:
    if path is None:
        return ControllerConfig()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SETTINGS_BYTES + 1).decode()
        return parse_settings(text, check_yaml, describe_validation_error)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


async def _run(options: ControllerOptions, config: ControllerConfig) -> None:
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
        await _serve(options, HttpListener(application), stack)
        working = asyncio.create_task(_run_together(parts))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, working.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await working


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


async def _serve(options: ControllerOptions, listener: HttpListener, stack: contextlib.AsyncExitStack) -> None:
    web_config = None if options.web_config is None else WebConfig(options.web_config, check_yaml)
    tls = None if web_config is None else _tls_without_users(options, web_config.load())
    bound = await listener.open(options.hosts, options.port, "--listen", tls)
    stack.push_async_callback(listener.close)
    log.info("metrics and health at %s", ", ".join(f"{host}:{port}" for host, port in bound))
    if web_config is not None:

        async def renew(web: WebSecurity) -> None:
            await listener.renew(_tls_without_users(options, web))

        following = asyncio.create_task(web_config.follow(renew))
        stack.callback(following.cancel)


def _tls_without_users(options: ControllerOptions, web: WebSecurity) -> ssl.SSLContext | None:
    if web.users:
        raise Unavailable(
            f"{options.web_config}: basic_auth_users: the kubelet's probes cannot send passwords",
            "remove it, and restrict access by a NetworkPolicy",
        )
    return web.tls


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

    async def _work(self) -> None:
        self._metrics.set(LEADING_METRIC, [((), 1)])
        self._manager = ControllerManager(self._client, self._config, self._namespace, self._metrics, self._exposition)
        try:
            await self._manager.run()
        finally:
            self._manager = None
            self._exposition.watch((), {})
