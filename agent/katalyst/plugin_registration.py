"""Registers plugins of the agent: by a socket in a watched directory, and by a call to a registration socket.
`SupervisedServers` creates the sockets again after they were removed. Both ways of registration may be used at
once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from api.interfaces import Unavailable
from api.proto import plugin_registration_pb2 as watched
from api.proto import resource_plugin_pb2 as plugin
from common.grpc_unix import GrpcClient, GrpcServer, GrpcService, serve_on_socket

log = logging.getLogger(__name__)


class SupervisedServers:
    """Servers that stand and fall together; `start` makes them, all or none, and raises Unavailable."""

    def __init__(self, start: Callable[[], Awaitable[tuple[GrpcServer, ...]]]) -> None:
        self._start, self._servers = start, tuple[GrpcServer, ...]()
        self.problem: Unavailable | None = None
        """Why they are not there; None where they are."""

    async def look(self) -> bool:
        """See that they are there, to be called every few seconds; whether they were made just now."""
        if self._servers and all(server.is_socket_in_place() for server in self._servers):
            return False
        for server in self._servers:
            if not server.is_socket_in_place():
                log.info("%s is gone; it is put back", server.path)
        await self.close()
        try:
            self._servers = await self._start()
        except Unavailable as error:
            if self.problem is None or self.problem.reason != error.reason:
                log.warning("%s; %s", error.reason, error.remedy)
            self.problem = error
            return False
        self.problem = None
        return True

    async def close(self) -> None:
        """Take them away. Idempotent."""
        servers, self._servers = self._servers, ()
        for server in servers:
            await server.stop()


VERSION = "v1alpha1"
KUBELET_SOCKET = "kubelet.sock"
CHECK_INTERVAL_S = 5.0


class PluginIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin says it is."""

    kind: str
    """`ResourcePlugin`, `EvictionPlugin` or `ReporterPlugin`."""
    name: str
    """Of a resource plugin the resource."""
    versions: tuple[str, ...] = (VERSION,)


class PluginRegistration:
    """What became of a plugin's introduction: None before anybody said anything."""

    def __init__(self, card: PluginIdentity) -> None:
        self.card = card
        self.registered: bool | None = None
        self.error = ""
        """Why it was not taken, in the watcher's words."""

    def service(self) -> GrpcService:
        """`pluginregistration.Registration`, beside the plugin's own on its socket."""

        async def get(_request: Any, _words: Mapping[str, str]) -> Any:
            return watched.PluginInfo(type=self.card.kind, name=self.card.name, supported_versions=self.card.versions)

        async def notify(request: Any, _words: Mapping[str, str]) -> Any:
            self.registered, self.error = request.plugin_registered, request.error[:300]
            if not self.registered:
                log.warning("plugin %s %s was not taken: %s", self.card.kind, self.card.name, self.error)
            return watched.RegistrationStatusResponse()

        handlers = {"GetInfo": get, "NotifyRegistrationStatus": notify}
        return GrpcService(watched.DESCRIPTOR.services_by_name["Registration"], handlers)


async def register_plugin(socket: Path, endpoint: str, resource: str, options: Any) -> None:
    """Tell whoever serves `socket` of a plugin at `endpoint`, a file beside it. Raises Unavailable, Refused where it is not
    taken."""
    peer = GrpcClient(socket, plugin.DESCRIPTOR.services_by_name["Registration"])
    try:
        request = plugin.RegisterRequest(version=VERSION, endpoint=endpoint, resource_name=resource, options=options)
        await peer.call("Register", request)
    finally:
        await peer.close()


class PluginEndpoint:
    """A plugin that stays where it is looked for, and announces itself to every new `kubelet.sock` beside it (`options` are
    then those that it says)."""

    def __init__(self, path: Path, registration: PluginRegistration, service: GrpcService, options: Any = None) -> None:
        self.path, self.registration, self._options = path, registration, options
        self._kept = SupervisedServers(self._served(service))
        self._announced: int | None = None
        self._refused: Unavailable | None = None

    @property
    def problem(self) -> Unavailable | None:
        """Why it is not there, or was not taken; None where all is well."""
        return self._kept.problem or self._refused

    @property
    def known(self) -> bool:
        """Whether somebody took it."""
        return self._announced is not None or self.registration.registered is True

    async def look(self) -> None:
        """See that the socket is there, and that whoever registers plugins knows; to be called every few seconds."""
        if await self._kept.look():
            self._announced = None
        if self._kept.problem is not None:
            return
        try:
            await self._announce()
            self._refused = None
        except Unavailable as error:
            if self._refused is None or self._refused.reason != error.reason:
                log.warning("%s; %s", error.reason, error.remedy)
            self._refused = error

    async def run(self, every_s: float = CHECK_INTERVAL_S) -> None:
        """Look until cancelled, then leave."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(every_s)
        finally:
            await self.close()

    async def close(self) -> None:
        """Take the socket away."""
        await self._kept.close()

    def _served(self, service: GrpcService) -> Callable[[], Awaitable[tuple[GrpcServer, ...]]]:
        async def start() -> tuple[GrpcServer, ...]:
            return (await serve_on_socket(self.path, (service, self.registration.service())),)

        return start

    async def _announce(self) -> None:
        if self._options is None:
            return
        socket = self.path.with_name(KUBELET_SOCKET)
        try:
            inode = socket.stat().st_ino
        except OSError:
            self._announced = None
            return  # nobody registers plugins there: it may watch for them
        if inode != self._announced:
            await register_plugin(socket, self.path.name, self.registration.card.name, self._options)
            self._announced = inode
            log.info("%s was announced to %s", self.path, socket)
