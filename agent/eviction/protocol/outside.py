"""Plugins of others at sockets, beside the rounds: who registers, who may, and what each finds.

A socket is only heeded where the settings name its directory, and with a file of tokens only if its own is in there. What
such a plugin finds is judged like all else: pods that are protected or not here stay, and a dry run is one for it too.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agent.config.eviction import NAMES, EvictionConfig
from agent.eviction.choosing import protected
from agent.eviction.judgement import INPUT_MISSING, PLUGIN_FAILED, Finding, not_met
from agent.eviction.protocol.remote import KIND, VERSIONS, RemotePlugins
from agent.plugins import Plugin, PluginWatcher
from api.decisions import Round
from api.pods import Pod
from api.ports import Seen, Unavailable

log = logging.getLogger(__name__)
LONGEST_NAME = 128
MOST_TOKEN_BYTES = 64 << 10
_SAYS_NOTHING = (INPUT_MISSING, PLUGIN_FAILED)


class Outside:
    """A source of its own (api.ports.Probe), and a sink: the rounds say who is here."""

    name, form = "eviction-plugins", "grpc"
    lost_events = None

    def __init__(self, config: EvictionConfig, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._config = config
        self._watcher = PluginWatcher({KIND: VERSIONS}, Path(config.plugin_sockets), now_ns)
        self._remotes = RemotePlugins(now_ns)
        self._pods: tuple[Pod, ...] = ()
        self._strangers: dict[str, str] = {}
        """Plugins that are not heeded, and why."""
        self._tokens: frozenset[bytes] = frozenset()
        self._unread: Unavailable | None = None

    def publish(self, finished: Round) -> None:
        """Show those pods to plugins that could leave [active pods]."""
        pods = finished.snapshot.pods
        self._pods = tuple(pod for pod in pods if not pod.leaving and not protected(pod, self._config))

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> Seen:  # noqa: ARG002 - as every source is asked
        return Seen()

    def problem(self) -> Unavailable | None:
        """Sockets and plugins that are not heeded; None where all are."""
        if self._unread is not None:
            return self._unread
        wrong = (*self._watcher.problems(), *(f"{name}: {why}" for name, why in sorted(self._strangers.items())))
        if not wrong:
            return None
        return Unavailable(
            f"eviction plugins are not heeded: {'; '.join(wrong)[:1000]}", "see its log, or remove its socket"
        )

    def close(self) -> None:
        """Nothing to give back: `run` is cancelled by who runs it."""

    def findings(self) -> tuple[Finding, ...]:
        """What they found a moment ago; never waits. Of one that is not heeded only that."""
        found: list[Finding] = []
        for each in self._remotes.findings():
            # Judged when it is read: a plugin is asked for its token in the same breath as for all else.
            why = "" if each.threshold.verdict.rule in _SAYS_NOTHING else self._against(each.threshold.plugin)
            text = f"{why}; nobody is evicted for what it finds."
            found.append(not_met(each.threshold.plugin, PLUGIN_FAILED, text) if why else each)
        return tuple(found)

    async def run(self) -> None:
        """Until cancelled. Nothing that a plugin says or does ends it."""
        while True:
            due = time.monotonic() + self._config.interval_s
            try:
                await self.look()
            except Exception:
                log.exception("eviction plugins could not be asked; what they found a moment ago becomes old")
            await asyncio.sleep(max(due - time.monotonic(), 0.1))

    async def look(self) -> None:
        """See who is there, and ask each once; takes no longer than one that hangs."""
        await self._watcher.look()
        self._tokens = await asyncio.to_thread(self._read_tokens)
        plugins, strangers = self._named()
        await self._remotes.turn(plugins, self._pods)
        strangers |= {plugin.name: why for plugin in plugins if (why := self._against(plugin.name))}
        for name in strangers.keys() - self._strangers.keys():
            log.warning("eviction plugin %s is not heeded: %s", name, strangers[name])
        self._strangers = strangers

    def _named(self) -> tuple[Sequence[Plugin], dict[str, str]]:
        """Those that may be asked, and those whose name will not do."""
        found, strangers = [], {}
        for plugin in self._watcher.plugins(KIND):
            if plugin.name in NAMES:
                strangers[plugin.name] = "its name is that of a plugin of ours"
            elif len(plugin.name) > LONGEST_NAME or not plugin.name.isprintable() or "|" in plugin.name:
                strangers[ascii(plugin.name)[:LONGEST_NAME]] = (
                    "its name is too long, or has characters that no name has"
                )
            else:
                found.append(plugin)
        return found, strangers

    def _against(self, plugin: str) -> str:
        """Why this one is not heeded, by its token; empty where it is."""
        path = self._config.plugin_tokens_file
        said = self._remotes.token(plugin).encode(errors="replace")
        known = bool(said) and any(hmac.compare_digest(said, token) for token in self._tokens)
        return "" if known or not path else f"its token is not in {path}"

    def _read_tokens(self) -> frozenset[bytes]:
        """None of them where the file cannot be read: then nobody is heeded."""
        path = self._config.plugin_tokens_file
        if not path:
            return frozenset()
        try:
            with Path(path).open("rb") as file:
                lines = file.read(MOST_TOKEN_BYTES).splitlines()
        except OSError as error:
            self._unread = Unavailable(
                f"{path}: {error.strerror}", "write one token a line there; until then no plugin is heeded"
            )
            return frozenset()
        self._unread = None
        return frozenset(line.strip() for line in lines if line.strip())
