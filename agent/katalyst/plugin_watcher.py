"""Discovers plugins by their sockets in a directory, as the kubelet's plugin watcher does.
A new socket is asked for its identity and told whether it is accepted; one that does not answer is retried with
backoff.
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
from common.grpc_unix import GrpcClient

log = logging.getLogger(__name__)
PLUGIN_SOCKETS_DIR = Path("/var/lib/katalyst/plugin-socks")
KATALYST_PLUGIN_KINDS = frozenset(("EvictionPlugin", "ReporterPlugin", "ResourcePlugin"))
"""Of Katalyst's plugins, which share a directory: each is taken by the manager of its kind, and none is refused by another."""
MAX_SOCKETS = 64
"""That are looked at; more are a mistake, and said."""
ANSWER_TIMEOUT_S = 2.0
MIN_RETRY_S = 5.0
MAX_RETRY_S = 300.0
NS_PER_S = 1_000_000_000
_REGISTRATION = wire.DESCRIPTOR.services_by_name["Registration"]


class DiscoveredPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """One that was taken."""

    kind: str
    """`EvictionPlugin`, `ReporterPlugin`, ..."""
    name: str
    socket: Path
    """Where it answers."""
    inode: int
    """Of the socket that it was found by: another one there is another plugin."""


class _RetryState(msgspec.Struct, frozen=True):
    """A socket that was not taken: which one, when to ask again, and after how long then; without a reason, another part's."""

    inode: int
    again_ns: int
    wait_s: float
    why: str
    """Empty of one that is somebody else's."""


class PluginWatcher:
    """What is in the directory. `kinds` are those that somebody here uses, with the versions that are understood."""

    def __init__(
        self,
        kinds: Mapping[str, Collection[str]],
        directory: Path = PLUGIN_SOCKETS_DIR,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._kinds, self._directory, self._now_ns = kinds, directory, now_ns
        self._taken: dict[Path, DiscoveredPlugin] = {}
        self._trials: dict[Path, _RetryState] = {}
        self._crowded = False

    def plugins(self, kind: str) -> tuple[DiscoveredPlugin, ...]:
        """Those of that kind, by name; of two with one name the one that was found last."""
        named = {plugin.name: plugin for plugin in self._taken.values() if plugin.kind == kind}
        return tuple(named[name] for name in sorted(named))

    def problems(self) -> tuple[str, ...]:
        """One sentence for each socket that is not taken."""
        found = [f"{path}: {trial.why}" for path, trial in sorted(self._trials.items()) if trial.why]
        if self._crowded:
            found.append(f"{self._directory} has more than {MAX_SOCKETS} sockets; the others are not looked at")
        return tuple(found)

    async def look(self) -> None:
        """See who came and who went; takes no longer than one plugin that does not answer. To be called now and then."""
        there = await asyncio.to_thread(self._sockets)
        self._taken = {path: one for path, one in self._taken.items() if there.get(path) == one.inode}
        self._trials = {path: one for path, one in self._trials.items() if there.get(path) == one.inode}
        now = self._now_ns()
        due = [
            (path, inode)
            for path, inode in there.items()
            if path not in self._taken and (path not in self._trials or self._trials[path].again_ns <= now)
        ]
        await asyncio.gather(*(self._try(path, inode) for path, inode in due))

    def _sockets(self) -> dict[Path, int]:
        """Inodes of the sockets in the directory, which need not be there, and of directories directly in it."""
        found: dict[Path, int] = {}
        try:
            paths = [*self._directory.iterdir(), *(path for path in self._directory.glob("*/*"))]
        except OSError:
            return {}
        for path in sorted(paths):
            try:
                status = path.lstat()
            except OSError:
                continue
            if stat.S_ISSOCK(status.st_mode) and not path.name.startswith("."):
                found[path] = status.st_ino
        self._crowded = len(found) > MAX_SOCKETS
        return dict(list(found.items())[:MAX_SOCKETS])

    async def _try(self, path: Path, inode: int) -> None:
        """Whatever one of them does, the others are met."""
        try:
            await self._meet(path, inode)
        except Exception as error:
            log.exception("%s could not be asked", path)
            self._put_off(path, inode, f"asking it failed, which is a bug: {type(error).__name__}: {error}")

    async def _meet(self, path: Path, inode: int) -> None:
        peer = GrpcClient(path, _REGISTRATION, timeout_s=ANSWER_TIMEOUT_S)
        try:
            said = await peer.call("GetInfo", wire.InfoRequest())
            if said.type in KATALYST_PLUGIN_KINDS and said.type not in self._kinds:
                self._put_off(path, inode, "")
                return
            why = self._against(said)
            status = wire.RegistrationStatus(plugin_registered=not why, error=why)
            await peer.call("NotifyRegistrationStatus", status)
        except Unavailable as error:
            self._put_off(path, inode, error.reason)
            return
        finally:
            await peer.close()
        if why:
            self._put_off(path, inode, why)
            return
        endpoint = Path(said.endpoint) if said.endpoint else path
        self._trials.pop(path, None)
        self._taken[path] = DiscoveredPlugin(kind=said.type, name=said.name, socket=endpoint, inode=inode)
        log.info("plugin %s %s at %s is taken", said.type, said.name, path)

    def _against(self, said: wire.PluginInfo) -> str:
        """Why the plugin is not taken; empty where it is."""
        if said.type not in self._kinds:
            return f"type {said.type!r:.80} is not used here; {', '.join(sorted(self._kinds))} are"
        versions = self._kinds[said.type]
        if not set(versions) & set(said.supported_versions):
            return f"supported_versions {list(said.supported_versions)!r:.200} lack {', '.join(sorted(versions))}"
        if not said.name:
            return "name is empty"
        return ""

    def _put_off(self, path: Path, inode: int, why: str) -> None:
        before = self._trials.get(path)
        wait_s = MIN_RETRY_S if before is None else min(before.wait_s * 2, MAX_RETRY_S)
        if why and (before is None or before.why != why):
            log.warning("%s is not taken as a plugin: %s", path, why)
        self._trials[path] = _RetryState(inode, self._now_ns() + round(wait_s * NS_PER_S), wait_s, why)
