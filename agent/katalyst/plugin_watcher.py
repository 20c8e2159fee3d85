"""Discovers plugins by their sockets in a directory, as the kubelet's plugin watcher does.
It requests the identity of a new socket and notifies it of the registration; a socket without an answer is retried
with backoff.
"""

from __future__ import annotations

import asyncio
import logging
import stat
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from api.interfaces import Unavailable
from api.proto import plugin_registration_pb2 as wire
from api.text import quote
from api.units import NS_PER_S
from common.grpc_unix import GrpcClient
from common.socket_trust import check_socket_directory

log = logging.getLogger(__name__)
PLUGIN_SOCKETS_DIR = Path("/var/lib/katalyst/plugin-socks")
KATALYST_PLUGIN_KINDS = frozenset(("EvictionPlugin", "ReporterPlugin", "ResourcePlugin"))
"""Kinds of Katalyst's plugins, which share a directory: each manager registers its own kind and must not refuse the others."""
MAX_SOCKETS = 64
"""Maximum number of sockets in use; more are reported as a problem."""
ANSWER_TIMEOUT_S = 2.0
MIN_RETRY_S = 5.0
MAX_RETRY_S = 300.0
_REGISTRATION = wire.DESCRIPTOR.services_by_name["Registration"]


class DiscoveredPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """A registered plugin."""

    kind: str
    """`EvictionPlugin`, `ReporterPlugin`, ..."""
    name: str
    socket: Path
    """Socket of the plugin's own service."""
    inode: int
    """Inode of the registration socket; another inode at the same path is another plugin."""
    trusted_uids: tuple[int, ...] = ()
    """Users besides root and the agent's own whose process may serve the socket."""


class _RetryState(msgspec.Struct, frozen=True):
    """A socket that is not registered, and when it is tried next."""

    inode: int
    due_ns: int
    wait_s: float
    reason: str
    """Why it is not registered; empty for a plugin of another manager."""


class PluginWatcher:
    """Watches one directory. `kinds` maps the plugin kinds in use to the supported versions."""

    def __init__(
        self,
        kinds: Mapping[str, Collection[str]],
        directory: Path = PLUGIN_SOCKETS_DIR,
        now_ns: Callable[[], int] = time.monotonic_ns,
        trusted_uids: tuple[int, ...] = (),
    ) -> None:
        """`trusted_uids` are users besides root and the agent's own whose plugins are used."""
        self._kinds, self._directory, self._now_ns, self._trusted_uids = kinds, directory, now_ns, trusted_uids
        self._registered: dict[Path, DiscoveredPlugin] = {}
        self._retries: dict[Path, _RetryState] = {}
        self._too_many = False
        self._distrust = ""
        """Why no socket of the directory is used; empty if they are."""

    def plugins(self, kind: str) -> tuple[DiscoveredPlugin, ...]:
        """Return the plugins of a kind by name; of two with the same name the one registered last."""
        named = {plugin.name: plugin for plugin in self._registered.values() if plugin.kind == kind}
        return tuple(named[name] for name in sorted(named))

    def problems(self) -> tuple[str, ...]:
        """Return one sentence for each socket that is not registered."""
        if self._distrust:
            return (self._distrust,)
        problems = [f"{path}: {retry.reason}" for path, retry in sorted(self._retries.items()) if retry.reason]
        if self._too_many:
            problems.append(f"{self._directory} has more than {MAX_SOCKETS} sockets; the others are ignored")
        return tuple(problems)

    async def scan(self) -> None:
        """Register new sockets and drop removed ones; call it periodically. It takes at most one answer timeout."""
        sockets = await asyncio.to_thread(self._sockets)
        self._registered = {
            path: plugin for path, plugin in self._registered.items() if sockets.get(path) == plugin.inode
        }
        self._retries = {path: retry for path, retry in self._retries.items() if sockets.get(path) == retry.inode}
        now = self._now_ns()
        due = [
            (path, inode)
            for path, inode in sockets.items()
            if path not in self._registered and (path not in self._retries or self._retries[path].due_ns <= now)
        ]
        await asyncio.gather(*(self._try(path, inode) for path, inode in due))

    def _sockets(self) -> dict[Path, int]:
        """Return the inodes of sockets in the directory and in its subdirectories; empty if it does not exist."""
        sockets: dict[Path, int] = {}
        try:
            if not self._is_trusted():
                return {}
            paths = [*self._directory.iterdir(), *(path for path in self._directory.glob("*/*"))]
        except OSError:
            return {}
        for path in sorted(paths):
            try:
                status = path.lstat()
            except OSError:
                continue
            if stat.S_ISSOCK(status.st_mode) and not path.name.startswith("."):
                sockets[path] = status.st_ino
        self._too_many = len(sockets) > MAX_SOCKETS
        return dict(list(sockets.items())[:MAX_SOCKETS])

    def _is_trusted(self) -> bool:
        """Return whether only trusted users can put sockets into the directory. Raises OSError if it does not exist."""
        before, self._distrust = self._distrust, ""
        try:
            check_socket_directory(self._directory, self._trusted_uids)
        except Unavailable as error:
            self._distrust = f"{error.reason}; {error.remedy}"
            if self._distrust != before:
                log.warning("plugins are refused: %s", self._distrust)
        return not self._distrust

    async def _try(self, path: Path, inode: int) -> None:
        """Register one socket, so that a failure does not affect the others."""
        try:
            await self._register(path, inode)
        except Exception as error:
            log.exception("%s could not be registered", path)
            self._postpone(path, inode, f"registration failed because of a bug: {type(error).__name__}: {error}")

    async def _register(self, path: Path, inode: int) -> None:
        peer = GrpcClient(path, _REGISTRATION, timeout_s=ANSWER_TIMEOUT_S, trusted_uids=self._trusted_uids)
        try:
            info = await peer.call("GetInfo", wire.InfoRequest())
            if info.type in KATALYST_PLUGIN_KINDS and info.type not in self._kinds:
                self._postpone(path, inode, "")
                return
            reason = self._refusal(info)
            status = wire.RegistrationStatus(plugin_registered=not reason, error=reason)
            await peer.call("NotifyRegistrationStatus", status)
        except Unavailable as error:
            self._postpone(path, inode, error.reason)
            return
        finally:
            await peer.close()
        if reason:
            self._postpone(path, inode, reason)
            return
        endpoint = Path(info.endpoint) if info.endpoint else path
        self._retries.pop(path, None)
        self._registered[path] = DiscoveredPlugin(
            kind=info.type, name=info.name, socket=endpoint, inode=inode, trusted_uids=self._trusted_uids
        )
        log.info("registered plugin %s %s at %s", info.type, info.name, path)

    def _refusal(self, info: wire.PluginInfo) -> str:
        """Return why the plugin is refused; empty if it is accepted."""
        if info.type not in self._kinds:
            return f"type {quote(info.type)} is not supported; {', '.join(sorted(self._kinds))} are"
        versions = self._kinds[info.type]
        if not set(versions) & set(info.supported_versions):
            return f"supported_versions {quote(list(info.supported_versions), 200)} lack {', '.join(sorted(versions))}"
        if not info.name:
            return "name is empty"
        return ""

    def _postpone(self, path: Path, inode: int, reason: str) -> None:
        before = self._retries.get(path)
        wait_s = MIN_RETRY_S if before is None else min(before.wait_s * 2, MAX_RETRY_S)
        if reason and (before is None or before.reason != reason):
            log.warning("plugin socket %s is not registered: %s", path, reason)
        self._retries[path] = _RetryState(inode, self._now_ns() + round(wait_s * NS_PER_S), wait_s, reason)
