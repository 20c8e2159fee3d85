"""Composition root of the controller: options in, objects made and joined, and work for as long as this replica leads."""

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

from agent.complaints import complaint
from agent.sense.documents import check
from api import VERSION
from api.ports import Unavailable
from controller.cluster import Cluster
from controller.config import Config
from controller.http import application
from controller.metrics import Exposition
from controller.settings import parse
from controller.tally import Tally
from exporters.listener import Listener
from exporters.tokens import Tokens
from exporters.webconfig import WebConfig
from kube.client import Client
from kube.config import find
from kube.leader import Election
from kube.review import review

log = logging.getLogger("dioptase.controller")

LARGEST_BYTES = 1 << 20
FOLLOW_S = 10.0
"""How often the web configuration and its certificates are looked at."""
LEADING = "dioptase_controller_leading"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says."""

    host: str
    port: int
    config: Path | None = None
    web_config: Path | None = None


def main(options: Options) -> None:
    """Run until a signal ends it. Raises ValueError for settings, and Unavailable, before anything was changed."""
    asyncio.run(_run(options, _config(options.config)))


def _config(path: Path | None) -> Config:
    if path is None:
        return Config()
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1).decode()
        return parse(text, check, complaint)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


async def _run(options: Options, config: Config) -> None:
    access = find(os.environ, check)
    tally = Tally()
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(access, f"dioptase-controller/{VERSION}"))
        exposition = Exposition(tally, client)
        replica = Replica(client, config, tally, exposition, f"{access.namespace}/{config.lease}")
        tokens = Tokens(partial(review, client)) if config.token_review else None
        admit = None if tokens is None else tokens.refusal
        await _serve(options, Listener(application(exposition, replica.waiting, admit)), stack)
        working = asyncio.create_task(replica.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, working.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await working


async def _serve(options: Options, listener: Listener, stack: contextlib.AsyncExitStack) -> None:
    web_config = None if options.web_config is None else WebConfig(options.web_config, check)
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
        following = asyncio.create_task(_follow(web_config, listener))
        stack.callback(following.cancel)


async def _follow(web_config: WebConfig, listener: Listener) -> None:
    """Take on new certificates; a file that is being written leaves the old ones in force."""
    seen = web_config.stamp()
    while True:
        await asyncio.sleep(FOLLOW_S)
        if (stamp := web_config.stamp()) == seen:
            continue
        seen = stamp
        try:
            listener.renew(web_config.load().tls)
        except Unavailable as error:
            log.error("%s; what was in force stays: %s", error.reason, error.remedy)


class Replica:
    """One of several: stands by, leads, and stands by again when it has lost the lease."""

    def __init__(self, client: Client, config: Config, tally: Tally, exposition: Exposition, lease: str) -> None:
        self._client, self._config, self._tally, self._exposition = client, config, tally, exposition
        me = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        self._election = Election(client, lease, me)
        self._cluster: Cluster | None = None

    async def run(self) -> None:
        """Until cancelled, or until a bug ends the work."""
        while True:
            self._tally.set(LEADING, [((), 0)])
            await self._election.lead(self._work)

    def waiting(self) -> str:
        """A replica that stands by is ready; one that leads is when everything was listed."""
        return self._cluster.waiting() if self._cluster is not None else ""

    async def _work(self) -> None:
        self._tally.set(LEADING, [((), 1)])
        self._cluster = Cluster(self._client, self._config, self._tally, self._exposition)
        try:
            await self._cluster.run()
        finally:
            self._cluster = None
            self._exposition.watch((), {})
