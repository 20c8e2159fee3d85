"""Composition root of the controller: options, API client, HTTP endpoint and leader election."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import uuid
from functools import partial
from pathlib import Path

import msgspec

from api import VERSION
from api.interfaces import Unavailable
from common.http.listener import HttpListener
from common.http.token_review import TokenReviewer
from common.http.web_config import WebConfig
from common.validation import describe_validation_error
from common.yaml_guard import check_yaml
from controller.endpoints import build_application
from controller.manager import ControllerManager
from controller.metrics import ControllerExposition
from controller.reconcile import MetricValues
from controller.settings import ControllerConfig, parse_settings
from kube.access_review import review_token
from kube.client import KubeClient
from kube.kubeconfig import load_access
from kube.leader_election import LeaderElection

log = logging.getLogger("dioptase.controller")

MAX_SETTINGS_BYTES = 1 << 20
WEB_CONFIG_CHECK_S = 10.0
"""How often the web configuration and its certificates are looked at."""
LEADING_METRIC = "dioptase_controller_leading"


class ControllerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says."""

    host: str
    port: int
    config: Path | None = None
    web_config: Path | None = None


def main(options: ControllerOptions) -> None:
    """Run until a signal ends it. Raises ValueError for settings, and Unavailable, before anything was changed."""
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
    tally = MetricValues()
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(KubeClient(access, f"dioptase-controller/{VERSION}"))
        exposition = ControllerExposition(tally, client)
        replica = Replica(client, config, tally, exposition, f"{access.namespace}/{config.lease}")
        tokens = TokenReviewer(partial(review_token, client)) if config.token_review else None
        admit = None if tokens is None else tokens.refusal
        await _serve(options, HttpListener(build_application(exposition, replica.waiting, admit)), stack)
        working = asyncio.create_task(replica.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, working.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await working


async def _serve(options: ControllerOptions, listener: HttpListener, stack: contextlib.AsyncExitStack) -> None:
    web_config = None if options.web_config is None else WebConfig(options.web_config, check_yaml)
    web = None if web_config is None else web_config.load()
    if web is not None and web.users:
        raise Unavailable(
            f"{options.web_config}: basic_auth_users: probes of a kubelet send no passwords",
            "leave it out, and let a NetworkPolicy say who may ask",
        )
    tls = None if web is None else web.tls
    bound = await listener.open(options.host, options.port, "--listen", tls)
    stack.push_async_callback(listener.close)
    log.info("metrics and health at %s:%d", *bound[0])
    if web_config is not None:
        following = asyncio.create_task(_follow_web_config(web_config, listener))
        stack.callback(following.cancel)


async def _follow_web_config(web_config: WebConfig, listener: HttpListener) -> None:
    """Take on new certificates; a file that is being written leaves the old ones in force."""
    seen = web_config.stamp()
    while True:
        await asyncio.sleep(WEB_CONFIG_CHECK_S)
        if (stamp := web_config.stamp()) == seen:
            continue
        seen = stamp
        try:
            listener.renew(web_config.load().tls)
        except Unavailable as error:
            log.error("%s; what was in force stays: %s", error.reason, error.remedy)


class Replica:
    """One of several: stands by, leads, and stands by again when it has lost the lease."""

    def __init__(
        self,
        client: KubeClient,
        config: ControllerConfig,
        tally: MetricValues,
        exposition: ControllerExposition,
        lease: str,
    ) -> None:
        self._client, self._config, self._tally, self._exposition = client, config, tally, exposition
        me = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        self._election = LeaderElection(client, lease, me)
        self._cluster: ControllerManager | None = None

    async def run(self) -> None:
        """Until cancelled, or until a bug ends the work."""
        while True:
            self._tally.set(LEADING_METRIC, [((), 0)])
            await self._election.lead(self._work)

    def waiting(self) -> str:
        """A replica that stands by is ready; one that leads is when everything was listed."""
        return self._cluster.waiting() if self._cluster is not None else ""

    async def _work(self) -> None:
        self._tally.set(LEADING_METRIC, [((), 1)])
        self._cluster = ControllerManager(self._client, self._config, self._tally, self._exposition)
        try:
            await self._cluster.run()
        finally:
            self._cluster = None
            self._exposition.watch((), {})
