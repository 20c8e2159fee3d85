"""Asks external eviction plugins at their sockets, and provides their findings to the eviction manager.
Only plugins in the configured directory count, and with a token file only those whose token it lists. A plugin
that hangs, refuses or returns nonsense has no findings and delays no other plugin.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.config.eviction import PLUGIN_NAMES, EvictionConfig
from agent.eviction.finding import (
    INPUT_MISSING,
    PLUGIN_FAILED,
    EvictionCandidate,
    EvictionFinding,
    missing_input_finding,
    not_met_finding,
)
from agent.eviction.victims import is_protected
from agent.katalyst.messages import encode_pod
from agent.katalyst.plugin_watcher import DiscoveredPlugin, PluginWatcher
from api.decision import Cycle
from api.eviction import EvictionCondition, EvictionThreshold, ThresholdMet
from api.interfaces import ProbeReading, Unavailable
from api.knobs import Reason
from api.pod import Pod
from api.proto import eviction_plugin_pb2 as wire
from common.grpc_unix import GrpcClient, MethodNotOffered

EVICTION_PLUGIN_KIND = "EvictionPlugin"
EVICTION_PLUGIN_VERSIONS = ("v1alpha1",)
ANSWER_TIMEOUT_S = 5.0
"""Deadline of all that one plugin is asked in a turn: the manager's own period."""
MAX_AGE_S = 15.0
"""What was found longer ago says nothing of now."""
MAX_SCOPE_CHARS = 128
"""Characters of a scope that are shown, and of metrics' labels."""
NS_PER_S = 1_000_000_000
_SERVICE = wire.DESCRIPTOR.services_by_name["EvictionPlugin"]
_MET = {wire.NOT_MET: ThresholdMet.NOT_MET, wire.SOFT_MET: ThresholdMet.SOFT, wire.HARD_MET: ThresholdMet.HARD}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


class PluginFindings(msgspec.Struct, frozen=True):
    """What one plugin found, and when it was asked (CLOCK_MONOTONIC)."""

    findings: tuple[EvictionFinding, ...]
    at_ns: int
    token: str = ""
    """By which it says who it is; empty where it does not. Nobody is shown it."""


class EvictionPluginClients:
    """All of them."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._found: dict[str, PluginFindings] = {}
        self._known: tuple[str, ...] = ()

    async def run_cycle(
        self, plugins: Sequence[DiscoveredPlugin], pods: Sequence[Pod], records: Mapping[str, Any] | None = None
    ) -> None:
        """Ask each of them once, all at the same time. `records` are EvictionRecords by uid, for those that rank by them."""
        self._known = tuple(plugin.name for plugin in plugins)
        self._found = {name: found for name, found in self._found.items() if name in self._known}
        await asyncio.gather(*(self._hear(plugin, pods, records or {}) for plugin in plugins))

    def findings(self) -> tuple[EvictionFinding, ...]:
        """What they found last, in the order of their names; of one that was not heard for long that it was not."""
        found: list[EvictionFinding] = []
        for name in self._known:
            last = self._found.get(name)
            if last is None or self._now_ns() - last.at_ns > MAX_AGE_S * NS_PER_S:
                found.append(missing_input_finding(name, "What the plugin at its socket finds"))
            else:
                found += last.findings
        return tuple(found)

    def token(self, name: str) -> str:
        """What a plugin says to be allowed; empty where nothing."""
        return self._found[name].token if name in self._found else ""

    async def _hear(self, plugin: DiscoveredPlugin, pods: Sequence[Pod], records: Mapping[str, Any]) -> None:
        """Have what one plugin finds as soon as it says so: others may take longer, or for ever."""
        at_ns = self._now_ns()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                self._found[plugin.name] = await self._ask(plugin, pods, records)
        except TimeoutError:
            text = f"{plugin.socket} did not answer within {ANSWER_TIMEOUT_S:g} s; nobody is evicted for that."
            self._found[plugin.name] = PluginFindings((not_met_finding(plugin.name, PLUGIN_FAILED, text),), at_ns)

    async def _ask(self, plugin: DiscoveredPlugin, pods: Sequence[Pod], records: Mapping[str, Any]) -> PluginFindings:
        at_ns, peer = self._now_ns(), GrpcClient(plugin.socket, _SERVICE, timeout_s=2 * ANSWER_TIMEOUT_S)
        active, known = [encode_pod(pod) for pod in pods], {pod.uid: pod for pod in pods}
        try:
            token = await _read_token(peer)
            direct = await peer.call("GetEvictPods", wire.GetEvictPodsRequest(active_pods=active))
            met = await peer.call("ThresholdMet", wire.GetThresholdMetRequest(active_pods=active))
            threshold = decode_threshold(plugin.name, met)
            top = wire.GetTopEvictionPodsResponse()
            if threshold.met is not ThresholdMet.NOT_MET:
                request = wire.GetTopEvictionPodsRequest(
                    active_pods=met.candidate_pods or active,
                    topN=1 if threshold.met is ThresholdMet.HARD else 0,
                    eviction_scope=met.eviction_scope,
                )
                if met.candidate_pods:
                    uids = [pod.metadata.uid for pod in met.candidate_pods]
                    request.candidate_eviction_records.extend(records[uid] for uid in uids if uid in records)
                top = await peer.call("GetTopEvictionPods", request)
        except Unavailable as error:
            failed = not_met_finding(plugin.name, PLUGIN_FAILED, f"{error.reason}; nobody is evicted for that.")
            return PluginFindings((failed,), at_ns)
        finally:
            await peer.close()
        findings = (
            EvictionFinding(threshold=threshold, candidates=_decode_candidates(top, known)),
            *_decode_direct_findings(plugin.name, direct, known),
        )
        return PluginFindings(findings, at_ns, token)


def decode_threshold(plugin: str, met: Any) -> EvictionThreshold:
    """A ThresholdMetResponse. One of numbers that are none, or of a kind that is not known, is not met."""
    level = _MET.get(met.met_type)
    numbers = math.isfinite(met.threshold_value) and math.isfinite(met.observed_value)
    if level is None or not numbers or met.grace_period_seconds > 1 << 31:
        text = (
            f"met_type {met.met_type}, observed_value {met.observed_value!r}, threshold_value {met.threshold_value!r}"
        )
        return not_met_finding(
            plugin, PLUGIN_FAILED, f"The plugin's answer makes no sense: {text}; nobody is evicted."
        ).threshold
    below = met.threshold_operator == wire.LESS_THAN
    text = (
        f"Plugin {plugin} observed {met.observed_value:g} in {met.eviction_scope[:MAX_SCOPE_CHARS] or 'no scope'}, "
        f"its threshold is {met.threshold_value:g} ({level.value})."
    )
    rules = {
        ThresholdMet.NOT_MET: "threshold_not_met",
        ThresholdMet.SOFT: "soft_threshold_met",
        ThresholdMet.HARD: "hard_threshold_met",
    }
    return EvictionThreshold(
        plugin=plugin,
        met=level,
        scope=met.eviction_scope[:MAX_SCOPE_CHARS],
        value=met.threshold_value,
        observed=met.observed_value,
        operator="<" if below else ">",
        condition=decode_condition(met.condition)
        if level is not ThresholdMet.NOT_MET and met.HasField("condition")
        else None,
        tolerance_s=float(max(met.grace_period_seconds, 0)),
        reason=Reason(
            rule=rules[level], text=text, threshold=met.threshold_value, inputs={"observed": met.observed_value}
        ),
    )


def decode_condition(said: Any) -> EvictionCondition | None:
    """What the node is to show; None where nothing is, or nothing that a taint can be."""
    cnr = said.condition_type == wire.CNR_CONDITION
    # Of a CNR each effect says for which level: `reclaimed_cores/NoSchedule`.
    effects = tuple(effect for effect in said.effects if effect.rpartition("/")[2] in _EFFECTS)
    if not said.met_condition or not said.condition_name or not effects:
        return None
    return EvictionCondition(name=said.condition_name[:253], kind="cnr" if cnr else "node", effects=effects)


def _decode_candidates(top: Any, known: Mapping[str, Pod]) -> tuple[EvictionCandidate, ...]:
    grace = _grace_period_s(top)
    return tuple(
        EvictionCandidate(pod=known[pod.metadata.uid], grace_s=grace)
        for pod in top.target_pods
        if pod.metadata.uid in known
    )


def _decode_direct_findings(plugin: str, answer: Any, known: Mapping[str, Pod]) -> Iterable[EvictionFinding]:
    """Pods that a plugin puts forward for themselves: those that must leave apart from those that may."""
    condition = decode_condition(answer.condition) if answer.HasField("condition") else None
    for forced in (True, False):
        chosen = tuple(
            EvictionCandidate(pod=known[one.pod.metadata.uid], text=one.reason[:1000], grace_s=_grace_period_s(one))
            for one in answer.evict_pods
            if one.force_evict is forced and one.pod.metadata.uid in known
        )
        if not chosen and not (forced and condition is not None):
            continue
        text = f"Plugin {plugin} names {len(chosen)} pods that {'must' if forced else 'may'} leave."
        threshold = EvictionThreshold(
            plugin=plugin,
            met=ThresholdMet.HARD if forced else ThresholdMet.SOFT,
            scope="evict_pods",
            condition=condition,
            reason=Reason(rule="plugin_names_pods", text=text, inputs={"pods": len(chosen)}),
        )
        yield EvictionFinding(threshold=threshold, candidates=chosen, direct=True, forced=forced)


def _grace_period_s(message: Any) -> float | None:
    """Seconds that pods are given; below nothing is the pod's own."""
    if not message.HasField("deletion_options"):
        return None
    seconds = message.deletion_options.grace_period_seconds
    return float(seconds) if 0 <= seconds < 1 << 31 else None


async def _read_token(peer: GrpcClient) -> str:
    try:
        return str((await peer.call("GetToken", wire.Empty())).token)
    except MethodNotOffered:
        return ""


log = logging.getLogger(__name__)
MAX_NAME_CHARS = 128
MAX_TOKEN_BYTES = 64 << 10
_NO_FINDING_RULES = (INPUT_MISSING, PLUGIN_FAILED)


class ExternalEvictionPlugins:
    """A source of its own (api.interfaces.Probe), and a sink: the rounds say who is here."""

    name, form = "eviction-plugins", "grpc"
    lost_events = None

    def __init__(self, config: EvictionConfig, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._config = config
        self._watcher = PluginWatcher(
            {EVICTION_PLUGIN_KIND: EVICTION_PLUGIN_VERSIONS}, Path(config.plugin_sockets), now_ns
        )
        self._remotes = EvictionPluginClients(now_ns)
        self._pods: tuple[Pod, ...] = ()
        self._strangers: dict[str, str] = {}
        """Plugins that are not heeded, and why."""
        self._tokens: frozenset[bytes] = frozenset()
        self._unread: Unavailable | None = None

    def publish(self, finished: Cycle) -> None:
        """Show those pods to plugins that could leave [active pods]."""
        pods = finished.snapshot.pods
        self._pods = tuple(pod for pod in pods if not pod.terminating and not is_protected(pod, self._config))

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:  # noqa: ARG002 - as every source is asked
        return ProbeReading()

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

    def findings(self) -> tuple[EvictionFinding, ...]:
        """What they found a moment ago; never waits. Of one that is not heeded only that."""
        found: list[EvictionFinding] = []
        for each in self._remotes.findings():
            # Judged when it is read: a plugin is asked for its token in the same breath as for all else.
            why = "" if each.threshold.reason.rule in _NO_FINDING_RULES else self._against(each.threshold.plugin)
            text = f"{why}; nobody is evicted for what it finds."
            found.append(not_met_finding(each.threshold.plugin, PLUGIN_FAILED, text) if why else each)
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
        await self._remotes.run_cycle(plugins, self._pods)
        strangers |= {plugin.name: why for plugin in plugins if (why := self._against(plugin.name))}
        for name in strangers.keys() - self._strangers.keys():
            log.warning("eviction plugin %s is not heeded: %s", name, strangers[name])
        self._strangers = strangers

    def _named(self) -> tuple[Sequence[DiscoveredPlugin], dict[str, str]]:
        """Those that may be asked, and those whose name will not do."""
        found, strangers = [], {}
        for plugin in self._watcher.plugins(EVICTION_PLUGIN_KIND):
            if plugin.name in PLUGIN_NAMES:
                strangers[plugin.name] = "its name is that of a plugin of ours"
            elif len(plugin.name) > MAX_NAME_CHARS or not plugin.name.isprintable() or "|" in plugin.name:
                strangers[ascii(plugin.name)[:MAX_NAME_CHARS]] = (
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
                lines = file.read(MAX_TOKEN_BYTES).splitlines()
        except OSError as error:
            self._unread = Unavailable(
                f"{path}: {error.strerror}", "write one token a line there; until then no plugin is heeded"
            )
            return frozenset()
        self._unread = None
        return frozenset(line.strip() for line in lines if line.strip())
