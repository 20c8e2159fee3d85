"""Registers plugins of the agent: by a socket in a watched directory, and by a call to a registration socket.
`SupervisedServers` creates removed sockets again. Both kinds of registration may be in use.
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
VERSION = "v1alpha1"
KUBELET_SOCKET = "kubelet.sock"
CHECK_INTERVAL_S = 5.0


SocketServices = Mapping[Path, tuple[GrpcService, ...]]
"""Services by the path of their socket."""


async def serve_sockets(sockets: SocketServices) -> tuple[GrpcServer, ...]:
    """Serve all sockets. Raises Unavailable if one cannot be served; the others are then stopped."""
    servers: list[GrpcServer] = []
    try:
        for path, services in sockets.items():
            servers.append(await serve_on_socket(path, services))
    except Unavailable:
        for server in servers:
            await server.stop()
        raise
    return tuple(servers)


async def _supervise(
    ensure: Callable[[], Awaitable[object]], close: Callable[[], Awaitable[None]], every_s: float
) -> None:
    try:
        while True:
            await ensure()
            await asyncio.sleep(every_s)
    finally:
        await close()


class SupervisedServers:
    """Servers that are started and stopped together."""

    def __init__(self, sockets: SocketServices) -> None:
        self._sockets, self._servers = sockets, tuple[GrpcServer, ...]()
        self.problem: Unavailable | None = None
        """Why the servers do not run; None while they do."""

    async def ensure(self) -> bool:
        """Start the servers unless all sockets are in place; return whether they were started. Call it periodically."""
        if self._servers and all(server.is_socket_in_place() for server in self._servers):
            return False
        for server in self._servers:
            if not server.is_socket_in_place():
                log.info("%s was removed and is created again", server.path)
        await self.close()
        try:
            self._servers = await serve_sockets(self._sockets)
        except Unavailable as error:
            if self.problem is None or self.problem.reason != error.reason:
                log.warning("%s; %s", error.reason, error.remedy)
            self.problem = error
            return False
        self.problem = None
        return True

    async def run(self, every_s: float = CHECK_INTERVAL_S) -> None:
        """Ensure the servers until cancelled, then stop them."""
        await _supervise(self.ensure, self.close, every_s)

    async def close(self) -> None:
        """Stop the servers. Idempotent."""
        servers, self._servers = self._servers, ()
        for server in servers:
            await server.stop()


class PluginIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Kind, name and versions of a plugin of the agent."""

    kind: str
    """`ResourcePlugin`, `EvictionPlugin` or `ReporterPlugin`."""
    name: str
    """Name; for a resource plugin the resource."""
    versions: tuple[str, ...] = (VERSION,)


class PluginRegistration:
    """Registration service of a plugin; `registered` is None until a watcher has answered."""

    def __init__(self, card: PluginIdentity) -> None:
        self.card = card
        self.registered: bool | None = None
        self.error = ""
        """Error message of the watcher."""

    def service(self) -> GrpcService:
        """Return `pluginregistration.Registration`, to be served on the plugin's socket."""

        async def get(_request: Any, _words: Mapping[str, str]) -> Any:
            return watched.PluginInfo(type=self.card.kind, name=self.card.name, supported_versions=self.card.versions)

        async def notify(request: Any, _words: Mapping[str, str]) -> Any:
            self.registered, self.error = request.plugin_registered, request.error[:300]
            if not self.registered:
                log.warning("plugin %s %s was not registered: %s", self.card.kind, self.card.name, self.error)
            return watched.RegistrationStatusResponse()

        handlers = {"GetInfo": get, "NotifyRegistrationStatus": notify}
        return GrpcService(watched.DESCRIPTOR.services_by_name["Registration"], handlers)


async def register_plugin(socket: Path, endpoint: str, resource: str, options: Any) -> None:
    """Register the plugin at `endpoint`, a socket in the same directory, at a registration socket. Raises Unavailable, and
    CallRefused if it is rejected."""
    peer = GrpcClient(socket, plugin.DESCRIPTOR.services_by_name["Registration"])
    try:
        request = plugin.RegisterRequest(version=VERSION, endpoint=endpoint, resource_name=resource, options=options)
        await peer.call("Register", request)
    finally:
        await peer.close()


class PluginEndpoint:
    """A plugin socket that is kept in place, and with `options` registered at every new `kubelet.sock` in its directory."""

    def __init__(self, path: Path, registration: PluginRegistration, service: GrpcService, options: Any = None) -> None:
        self.path, self.registration, self._options = path, registration, options
        self._servers = SupervisedServers({path: (service, registration.service())})
        self._announced: int | None = None
        self._refused: Unavailable | None = None

    @property
    def problem(self) -> Unavailable | None:
        """Why the socket is missing or was not registered; None otherwise."""
        return self._servers.problem or self._refused

    @property
    def is_registered(self) -> bool:
        """Whether a plugin manager has registered it."""
        return self._announced is not None or self.registration.registered is True

    async def ensure(self) -> None:
        """Create the socket and register it if necessary; call it periodically."""
        if await self._servers.ensure():
            self._announced = None
        if self._servers.problem is not None:
            return
        try:
            await self._announce()
            self._refused = None
        except Unavailable as error:
            if self._refused is None or self._refused.reason != error.reason:
                log.warning("%s; %s", error.reason, error.remedy)
            self._refused = error

    async def run(self, every_s: float = CHECK_INTERVAL_S) -> None:
        """Ensure socket and registration until cancelled, then remove the socket."""
        await _supervise(self.ensure, self.close, every_s)

    async def close(self) -> None:
        """Remove the socket."""
        await self._servers.close()

    async def _announce(self) -> None:
        if self._options is None:
            return
        socket = self.path.with_name(KUBELET_SOCKET)
        try:
            inode = socket.stat().st_ino
        except OSError:
            self._announced = None
            return  # A manager without this socket watches the directory instead.
        if inode != self._announced:
            await register_plugin(socket, self.path.name, self.registration.card.name, self._options)
            self._announced = inode
            log.info("registered %s at %s", self.path, socket)
