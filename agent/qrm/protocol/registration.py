"""How a plugin of ours is found: by its socket in a directory that somebody watches, and by a call to who does not watch.

Both at once are harmless: whoever hears of the plugin again takes the newer word.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent.rpc import Peer, Server, Service, serve
from api.ports import Unavailable
from api.proto import plugin_registration_pb2 as watched
from api.proto import resource_plugin_pb2 as plugin

log = logging.getLogger(__name__)
VERSION = "v1alpha1"
KUBELET_SOCKET = "kubelet.sock"
CHECK_S = 5.0


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin says it is."""

    kind: str
    """`ResourcePlugin`, `EvictionPlugin` or `ReporterPlugin`."""
    name: str
    """Of a resource plugin the resource."""
    versions: tuple[str, ...] = (VERSION,)


class Introduced:
    """What became of a plugin's introduction: None before anybody said anything."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.registered: bool | None = None
        self.error = ""
        """Why it was not taken, in the watcher's words."""

    def service(self) -> Service:
        """`pluginregistration.Registration`, beside the plugin's own on its socket."""

        async def get(_request: Any, _words: Mapping[str, str]) -> Any:
            return watched.PluginInfo(type=self.card.kind, name=self.card.name, supported_versions=self.card.versions)

        async def notify(request: Any, _words: Mapping[str, str]) -> Any:
            self.registered, self.error = request.plugin_registered, request.error[:300]
            if not self.registered:
                log.warning("plugin %s %s was not taken: %s", self.card.kind, self.card.name, self.error)
            return watched.RegistrationStatusResponse()

        handlers = {"GetInfo": get, "NotifyRegistrationStatus": notify}
        return Service(watched.DESCRIPTOR.services_by_name["Registration"], handlers)


async def register(socket: Path, endpoint: str, resource: str, options: Any) -> None:
    """Tell whoever serves `socket` of a plugin at `endpoint`, a file beside it. Raises Unavailable, Refused where it is not
    taken."""
    peer = Peer(socket, plugin.DESCRIPTOR.services_by_name["Registration"])
    try:
        request = plugin.RegisterRequest(version=VERSION, endpoint=endpoint, resource_name=resource, options=options)
        await peer.call("Register", request)
    finally:
        await peer.close()


class Presence:
    """A plugin that stays where it is looked for: its socket is put back where somebody cleaned the directory, and it
    announces itself to every new `kubelet.sock` beside it (`options` are then those that it says)."""

    def __init__(self, path: Path, introduced: Introduced, service: Service, options: Any = None) -> None:
        self.path, self.introduced, self._service, self._options = path, introduced, service, options
        self._server: Server | None = None
        self._announced: int | None = None
        self.problem: Unavailable | None = None
        """Why it is not there, or was not taken; None where all is well."""

    async def look(self) -> None:
        """See that the socket is there, and that whoever registers plugins knows; to be called every few seconds."""
        try:
            if self._server is None or not self._server.intact():
                if self._server is not None:
                    log.info("%s is gone; it is put back", self.path)
                    await self._server.stop()
                self._server, self._announced = None, None
                self._server = await serve(self.path, (self._service, self.introduced.service()))
            await self._announce()
            self.problem = None
        except Unavailable as error:
            if self.problem is None or self.problem.reason != error.reason:
                log.warning("%s; %s", error.reason, error.remedy)
            self.problem = error

    async def run(self, every_s: float = CHECK_S) -> None:
        """Look until cancelled, then leave."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(every_s)
        finally:
            await self.close()

    async def close(self) -> None:
        """Take the socket away."""
        if self._server is not None:
            await self._server.stop()
            self._server = None

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
            await register(socket, self.path.name, self.introduced.card.name, self._options)
            self._announced = inode
            log.info("%s was announced to %s", self.path, socket)
