"""Eviction plugins at sockets, asked beside the rounds: what each found last is what a round judges by, while it is fresh.

A plugin that hangs, refuses or speaks of what does not exist has found nothing, and that is said; it holds up nobody.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from agent.eviction.judgement import PLUGIN_FAILED, Candidate, Finding, missing, not_met
from agent.eviction.protocol.pods import to_wire
from agent.plugins import Plugin
from agent.rpc import NotOffered, Peer
from api.evictions import Condition, Met, Threshold
from api.knobs import Verdict
from api.pods import Pod
from api.ports import Unavailable
from api.proto import eviction_plugin_pb2 as wire

KIND = "EvictionPlugin"
VERSIONS = ("v1alpha1",)
ANSWER_S = 5.0
"""Deadline of all that one plugin is asked in a turn: the manager's own period."""
FRESH_S = 15.0
"""What was found longer ago says nothing of now."""
LONGEST = 128
"""Characters of a scope that are shown, and of metrics' labels."""
S = 1_000_000_000
_SERVICE = wire.DESCRIPTOR.services_by_name["EvictionPlugin"]
_MET = {wire.NOT_MET: Met.NOT_MET, wire.SOFT_MET: Met.SOFT, wire.HARD_MET: Met.HARD}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


class Found(msgspec.Struct, frozen=True):
    """What one plugin found, and when it was asked (CLOCK_MONOTONIC)."""

    findings: tuple[Finding, ...]
    at_ns: int
    token: str = ""
    """By which it says who it is; empty where it does not. Nobody is shown it."""


class RemotePlugins:
    """All of them."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._found: dict[str, Found] = {}
        self._known: tuple[str, ...] = ()

    async def turn(
        self, plugins: Sequence[Plugin], pods: Sequence[Pod], records: Mapping[str, Any] | None = None
    ) -> None:
        """Ask each of them once, all at the same time. `records` are EvictionRecords by uid, for those that rank by them."""
        self._known = tuple(plugin.name for plugin in plugins)
        self._found = {name: found for name, found in self._found.items() if name in self._known}
        await asyncio.gather(*(self._hear(plugin, pods, records or {}) for plugin in plugins))

    def findings(self) -> tuple[Finding, ...]:
        """What they found last, in the order of their names; of one that was not heard for long that it was not."""
        found: list[Finding] = []
        for name in self._known:
            last = self._found.get(name)
            if last is None or self._now_ns() - last.at_ns > FRESH_S * S:
                found.append(missing(name, "What the plugin at its socket finds"))
            else:
                found += last.findings
        return tuple(found)

    def token(self, name: str) -> str:
        """What a plugin says to be allowed; empty where nothing."""
        return self._found[name].token if name in self._found else ""

    async def _hear(self, plugin: Plugin, pods: Sequence[Pod], records: Mapping[str, Any]) -> None:
        """Have what one plugin finds as soon as it says so: others may take longer, or for ever."""
        at_ns = self._now_ns()
        try:
            async with asyncio.timeout(ANSWER_S):
                self._found[plugin.name] = await self._ask(plugin, pods, records)
        except TimeoutError:
            text = f"{plugin.socket} did not answer within {ANSWER_S:g} s; nobody is evicted for that."
            self._found[plugin.name] = Found((not_met(plugin.name, PLUGIN_FAILED, text),), at_ns)

    async def _ask(self, plugin: Plugin, pods: Sequence[Pod], records: Mapping[str, Any]) -> Found:
        at_ns, peer = self._now_ns(), Peer(plugin.socket, _SERVICE, timeout_s=2 * ANSWER_S)
        active, known = [to_wire(pod) for pod in pods], {pod.uid: pod for pod in pods}
        try:
            token = await _token(peer)
            direct = await peer.call("GetEvictPods", wire.GetEvictPodsRequest(active_pods=active))
            met = await peer.call("ThresholdMet", wire.GetThresholdMetRequest(active_pods=active))
            threshold = threshold_of(plugin.name, met)
            top = wire.GetTopEvictionPodsResponse()
            if threshold.met is not Met.NOT_MET:
                request = wire.GetTopEvictionPodsRequest(
                    active_pods=met.candidate_pods or active,
                    topN=1 if threshold.met is Met.HARD else 0,
                    eviction_scope=met.eviction_scope,
                )
                if met.candidate_pods:
                    uids = [pod.metadata.uid for pod in met.candidate_pods]
                    request.candidate_eviction_records.extend(records[uid] for uid in uids if uid in records)
                top = await peer.call("GetTopEvictionPods", request)
        except Unavailable as error:
            failed = not_met(plugin.name, PLUGIN_FAILED, f"{error.reason}; nobody is evicted for that.")
            return Found((failed,), at_ns)
        finally:
            await peer.close()
        findings = (Finding(threshold=threshold, candidates=_top(top, known)), *_direct(plugin.name, direct, known))
        return Found(findings, at_ns, token)


def threshold_of(plugin: str, met: Any) -> Threshold:
    """A ThresholdMetResponse. One of numbers that are none, or of a kind that is not known, is not met."""
    level = _MET.get(met.met_type)
    numbers = math.isfinite(met.threshold_value) and math.isfinite(met.observed_value)
    if level is None or not numbers or met.grace_period_seconds > 1 << 31:
        text = (
            f"met_type {met.met_type}, observed_value {met.observed_value!r}, threshold_value {met.threshold_value!r}"
        )
        return not_met(
            plugin, PLUGIN_FAILED, f"The plugin's answer makes no sense: {text}; nobody is evicted."
        ).threshold
    below = met.threshold_operator == wire.LESS_THAN
    text = (
        f"Plugin {plugin} observed {met.observed_value:g} in {met.eviction_scope[:LONGEST] or 'no scope'}, "
        f"its threshold is {met.threshold_value:g} ({level.value})."
    )
    rules = {Met.NOT_MET: "threshold_not_met", Met.SOFT: "soft_threshold_met", Met.HARD: "hard_threshold_met"}
    return Threshold(
        plugin=plugin,
        met=level,
        scope=met.eviction_scope[:LONGEST],
        value=met.threshold_value,
        observed=met.observed_value,
        operator="<" if below else ">",
        condition=condition_of(met.condition) if level is not Met.NOT_MET and met.HasField("condition") else None,
        tolerance_s=float(max(met.grace_period_seconds, 0)),
        verdict=Verdict(
            rule=rules[level], text=text, threshold=met.threshold_value, inputs={"observed": met.observed_value}
        ),
    )


def condition_of(said: Any) -> Condition | None:
    """What the node is to show; None where nothing is, or nothing that a taint can be."""
    cnr = said.condition_type == wire.CNR_CONDITION
    # Of a CNR each effect says for which level: `reclaimed_cores/NoSchedule`.
    effects = tuple(effect for effect in said.effects if effect.rpartition("/")[2] in _EFFECTS)
    if not said.met_condition or not said.condition_name or not effects:
        return None
    return Condition(name=said.condition_name[:253], kind="cnr" if cnr else "node", effects=effects)


def _top(top: Any, known: Mapping[str, Pod]) -> tuple[Candidate, ...]:
    grace = _grace(top)
    return tuple(
        Candidate(pod=known[pod.metadata.uid], grace_s=grace) for pod in top.target_pods if pod.metadata.uid in known
    )


def _direct(plugin: str, answer: Any, known: Mapping[str, Pod]) -> Iterable[Finding]:
    """Pods that a plugin puts forward for themselves: those that must leave apart from those that may."""
    condition = condition_of(answer.condition) if answer.HasField("condition") else None
    for forced in (True, False):
        chosen = tuple(
            Candidate(pod=known[one.pod.metadata.uid], text=one.reason[:1000], grace_s=_grace(one))
            for one in answer.evict_pods
            if one.force_evict is forced and one.pod.metadata.uid in known
        )
        if not chosen and not (forced and condition is not None):
            continue
        text = f"Plugin {plugin} names {len(chosen)} pods that {'must' if forced else 'may'} leave."
        threshold = Threshold(
            plugin=plugin,
            met=Met.HARD if forced else Met.SOFT,
            scope="evict_pods",
            condition=condition,
            verdict=Verdict(rule="plugin_names_pods", text=text, inputs={"pods": len(chosen)}),
        )
        yield Finding(threshold=threshold, candidates=chosen, direct=True, forced=forced)


def _grace(message: Any) -> float | None:
    """Seconds that pods are given; below nothing is the pod's own."""
    if not message.HasField("deletion_options"):
        return None
    seconds = message.deletion_options.grace_period_seconds
    return float(seconds) if 0 <= seconds < 1 << 31 else None


async def _token(peer: Peer) -> str:
    try:
        return str((await peer.call("GetToken", wire.Empty())).token)
    except NotOffered:
        return ""
