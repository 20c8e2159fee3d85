"""Polls external eviction plugins at their sockets, and provides their findings to the eviction manager.
Only plugins in the configured directory count, and with a token file only those whose token it lists. A plugin
that hangs, refuses or returns nonsense has no findings and delays no other plugin.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.config.eviction import PLUGIN_NAMES, EvictionConfig
from agent.eviction.eviction_inputs import PodEvictionRecord
from agent.eviction.finding import (
    INPUT_MISSING,
    PLUGIN_FAILED,
    EvictionCandidate,
    EvictionFinding,
    missing_input_finding,
    not_met_finding,
)
from agent.eviction.victims import is_protected
from agent.katalyst.plugin_watcher import DiscoveredPlugin, PluginWatcher
from agent.katalyst.pod_message import ManifestReader, PodEncoder, no_manifest
from api.decision import Cycle
from api.eviction import EvictionCondition, EvictionThreshold, ThresholdMet
from api.interfaces import Unavailable
from api.knobs import Reason
from api.pod import Pod
from api.proto import eviction_plugin_pb2 as wire
from api.text import printable
from api.units import NS_PER_S
from common.grpc_unix import GrpcClient, MethodNotOffered

log = logging.getLogger(__name__)
EVICTION_PLUGIN_KIND = "EvictionPlugin"
EVICTION_PLUGIN_VERSIONS = ("v1alpha1",)
ANSWER_TIMEOUT_S = 5.0
"""Deadline of all calls to one plugin in a cycle: the period of Katalyst's eviction manager."""
MAX_AGE_S = 15.0
"""Maximum age of findings in use."""
MAX_SCOPE_CHARS = 128
"""Maximum length of a scope in messages and metric labels."""
MAX_NAME_CHARS = 128
MAX_REASON_CHARS = 1000
MAX_TOKEN_BYTES = 64 << 10
_NO_FINDING_RULES = (INPUT_MISSING, PLUGIN_FAILED)
_SERVICE = wire.DESCRIPTOR.services_by_name["EvictionPlugin"]
_MET = {wire.NOT_MET: ThresholdMet.NOT_MET, wire.SOFT_MET: ThresholdMet.SOFT, wire.HARD_MET: ThresholdMet.HARD}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


RecordLoader = Callable[[Sequence[Pod]], Awaitable[Mapping[str, PodEvictionRecord]]]
"""Return the eviction records of pods by uid, without pods whose disruption budgets are not available."""


async def no_records(_pods: Sequence[Pod]) -> Mapping[str, PodEvictionRecord]:
    """Return no record: the RecordLoader of nodes without an API server."""
    return {}


class PluginFindings(msgspec.Struct, frozen=True):
    """Findings of one plugin and the time of the request in ns (CLOCK_MONOTONIC)."""

    findings: tuple[EvictionFinding, ...]
    at_ns: int
    token: str = ""
    """Token by which the plugin authenticates; empty without one. Never logged or shown."""


class EvictionPluginClients:
    """Clients of all plugins, with their latest findings."""

    def __init__(
        self,
        now_ns: Callable[[], int] = time.monotonic_ns,
        manifest: ManifestReader = no_manifest,
        records: RecordLoader = no_records,
    ) -> None:
        self._now_ns, self._encoder, self._records = now_ns, PodEncoder(manifest), records
        self._latest: dict[str, PluginFindings] = {}
        self._names: tuple[str, ...] = ()

    async def run_cycle(self, plugins: Sequence[DiscoveredPlugin], pods: Sequence[Pod]) -> None:
        """Poll each plugin once, concurrently."""
        self._names = tuple(plugin.name for plugin in plugins)
        self._latest = {name: latest for name, latest in self._latest.items() if name in self._names}
        active, by_uid = self._encoder.encode(pods) if plugins else [], {pod.uid: pod for pod in pods}
        await asyncio.gather(*(self._poll(plugin, active, by_uid) for plugin in plugins))

    def findings(self) -> tuple[EvictionFinding, ...]:
        """Return the latest findings in the order of the names; for a plugin without an answer within MAX_AGE_S a finding that
        says so."""
        findings: list[EvictionFinding] = []
        for name in self._names:
            latest = self._latest.get(name)
            if latest is None or self._now_ns() - latest.at_ns > MAX_AGE_S * NS_PER_S:
                findings.append(missing_input_finding(name, "The answer of the plugin"))
            else:
                findings += latest.findings
        return tuple(findings)

    def token(self, name: str) -> str:
        """Return the token of a plugin; empty without one."""
        latest = self._latest.get(name)
        return "" if latest is None else latest.token

    async def _poll(self, plugin: DiscoveredPlugin, active: Sequence[Any], by_uid: Mapping[str, Pod]) -> None:
        at_ns = self._now_ns()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                self._latest[plugin.name] = await self._call(plugin, active, by_uid)
        except TimeoutError:
            text = f"{plugin.socket} did not answer within {ANSWER_TIMEOUT_S:g} s; it evicts no pod."
            self._latest[plugin.name] = PluginFindings((not_met_finding(plugin.name, PLUGIN_FAILED, text),), at_ns)

    async def _call(self, plugin: DiscoveredPlugin, active: Sequence[Any], by_uid: Mapping[str, Pod]) -> PluginFindings:
        at_ns = self._now_ns()
        client = GrpcClient(plugin.socket, _SERVICE, timeout_s=2 * ANSWER_TIMEOUT_S, trusted_uids=plugin.trusted_uids)
        try:
            token = await _read_token(client)
            direct = await client.call("GetEvictPods", wire.GetEvictPodsRequest(active_pods=active))
            met = await client.call("ThresholdMet", wire.GetThresholdMetRequest(active_pods=active))
            threshold = decode_threshold(plugin.name, met)
            top = wire.GetTopEvictionPodsResponse()
            if threshold.met is not ThresholdMet.NOT_MET:
                request = wire.GetTopEvictionPodsRequest(
                    active_pods=met.candidate_pods or active,
                    topN=1 if threshold.met is ThresholdMet.HARD else 0,
                    eviction_scope=met.eviction_scope,
                    candidate_eviction_records=await self._candidate_records(met.candidate_pods, by_uid),
                )
                top = await client.call("GetTopEvictionPods", request)
        except Unavailable as error:
            failed = not_met_finding(plugin.name, PLUGIN_FAILED, f"{error.reason}; it evicts no pod.")
            return PluginFindings((failed,), at_ns)
        finally:
            await client.close()
        findings = (
            EvictionFinding(threshold=threshold, candidates=_decode_candidates(top, by_uid)),
            *_decode_direct_findings(plugin.name, direct, by_uid),
        )
        return PluginFindings(findings, at_ns, token)

    async def _candidate_records(self, candidates: Iterable[Any], by_uid: Mapping[str, Pod]) -> list[Any]:
        """Return the records of a plugin's candidate pods. A plugin that names none receives none, as in Katalyst's
        collectEvictionResult (pkg/agent/evictionmanager/manager.go)."""
        pods = [by_uid[pod.metadata.uid] for pod in candidates if pod.metadata.uid in by_uid]
        return [_encode_record(uid, record) for uid, record in (await self._records(pods)).items()] if pods else []


def _encode_record(uid: str, record: PodEvictionRecord) -> Any:
    buckets = [wire.Bucket(time=each.time_s, duration=each.duration_s, count=each.count) for each in record.buckets]
    return wire.EvictionRecord(
        uid=uid,
        has_pdb=record.has_budget,
        buckets=wire.Buckets(list=buckets),
        disruptions_allowed=record.disruptions_allowed,
        current_healthy=record.current_healthy,
        desired_healthy=record.desired_healthy,
        expected_pods=record.expected_pods,
    )


def decode_threshold(plugin: str, met: Any) -> EvictionThreshold:
    """Decode a ThresholdMetResponse. An invalid number or an unknown type counts as not met."""
    level = _MET.get(met.met_type)
    finite = math.isfinite(met.threshold_value) and math.isfinite(met.observed_value)
    if level is None or not finite or met.grace_period_seconds > 1 << 31:
        text = f"met_type {met.met_type}, observed_value {met.observed_value}, threshold_value {met.threshold_value}"
        return not_met_finding(
            plugin, PLUGIN_FAILED, f"The plugin's answer is invalid: {text}; it evicts no pod."
        ).threshold
    below, scope = met.threshold_operator == wire.LESS_THAN, printable(met.eviction_scope, MAX_SCOPE_CHARS)
    text = (
        f"Plugin {plugin} observed {met.observed_value:g} in {scope or 'no scope'}, "
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
        scope=scope,
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


def decode_condition(condition: Any) -> EvictionCondition | None:
    """Decode a condition of the node; None if it is not met or cannot be a taint."""
    cnr = condition.condition_type == wire.CNR_CONDITION
    # Effects on a CustomNodeResource name their QoS level: `reclaimed_cores/NoSchedule`.
    effects = tuple(effect for effect in condition.effects if effect.rpartition("/")[2] in _EFFECTS)
    if not condition.met_condition or not condition.condition_name or not effects:
        return None
    return EvictionCondition(
        name=printable(condition.condition_name, 253), kind="cnr" if cnr else "node", effects=effects
    )


def _decode_candidates(top: Any, by_uid: Mapping[str, Pod]) -> tuple[EvictionCandidate, ...]:
    grace = _grace_period_s(top)
    return tuple(
        EvictionCandidate(pod=by_uid[pod.metadata.uid], grace_s=grace)
        for pod in top.target_pods
        if pod.metadata.uid in by_uid
    )


def _decode_direct_findings(plugin: str, answer: Any, by_uid: Mapping[str, Pod]) -> Iterable[EvictionFinding]:
    """Yield pods named by the plugin without a threshold: first those that must be evicted, then those that may be."""
    condition = decode_condition(answer.condition) if answer.HasField("condition") else None
    for forced in (True, False):
        candidates = tuple(
            EvictionCandidate(
                pod=by_uid[named.pod.metadata.uid],
                text=printable(named.reason, MAX_REASON_CHARS),
                grace_s=_grace_period_s(named),
            )
            for named in answer.evict_pods
            if named.force_evict is forced and named.pod.metadata.uid in by_uid
        )
        if not candidates and not (forced and condition is not None):
            continue
        text = f"Plugin {plugin} names {len(candidates)} pods that {'must' if forced else 'may'} be evicted."
        threshold = EvictionThreshold(
            plugin=plugin,
            met=ThresholdMet.HARD if forced else ThresholdMet.SOFT,
            scope="evict_pods",
            condition=condition,
            reason=Reason(rule="plugin_names_pods", text=text, inputs={"pods": len(candidates)}),
        )
        yield EvictionFinding(threshold=threshold, candidates=candidates, direct=True, forced=forced)


def _grace_period_s(message: Any) -> float | None:
    """Return the grace period in seconds; None for the pod's own."""
    if not message.HasField("deletion_options"):
        return None
    seconds = message.deletion_options.grace_period_seconds
    return float(seconds) if 0 <= seconds < 1 << 31 else None


async def _read_token(client: GrpcClient) -> str:
    try:
        return str((await client.call("GetToken", wire.Empty())).token)
    except MethodNotOffered:
        return ""


class ExternalEvictionPlugins:
    """Sink of cycles, whose pods are shown to the plugins, and health component."""

    name, form = "eviction-plugins", "grpc"
    lost_events = None

    def __init__(
        self,
        config: EvictionConfig,
        now_ns: Callable[[], int] = time.monotonic_ns,
        manifest: ManifestReader = no_manifest,
        records: RecordLoader = no_records,
        trusted_uids: tuple[int, ...] = (),
    ) -> None:
        """`manifest` and `records` return what plugins receive of pods beyond api.pod."""
        self._config = config
        kinds = {EVICTION_PLUGIN_KIND: EVICTION_PLUGIN_VERSIONS}
        self._watcher = PluginWatcher(kinds, Path(config.plugin_sockets), now_ns, trusted_uids)
        self._clients = EvictionPluginClients(now_ns, manifest, records)
        self._pods: tuple[Pod, ...] = ()
        self._rejected: dict[str, str] = {}
        """Rejected plugins with the reason."""
        self._tokens: frozenset[bytes] = frozenset()
        self._tokens_problem: Unavailable | None = None

    def publish(self, cycle: Cycle) -> None:
        """Take the pods that may be evicted [active pods]."""
        pods = cycle.snapshot.pods
        self._pods = tuple(pod for pod in pods if not pod.terminating and not is_protected(pod, self._config))

    def problem(self) -> Unavailable | None:
        """Return which sockets and plugins are rejected; None if there are none."""
        if self._tokens_problem is not None:
            return self._tokens_problem
        rejected = (*self._watcher.problems(), *(f"{name}: {why}" for name, why in sorted(self._rejected.items())))
        if not rejected:
            return None
        return Unavailable(
            f"eviction plugins are rejected: {'; '.join(rejected)[:1000]}", "see the plugin's log, or remove its socket"
        )

    def findings(self) -> tuple[EvictionFinding, ...]:
        """Return the latest findings without waiting; those of a rejected plugin are replaced by the reason."""
        findings: list[EvictionFinding] = []
        for finding in self._clients.findings():
            plugin, rule = finding.threshold.plugin, finding.threshold.reason.rule
            # Checked on reading: the token arrives with the findings.
            why = "" if rule in _NO_FINDING_RULES else self._token_problem(plugin)
            text = f"{why}; its findings evict no pod."
            findings.append(not_met_finding(plugin, PLUGIN_FAILED, text) if why else finding)
        return tuple(findings)

    async def run(self) -> None:
        """Poll the plugins until cancelled. No failure of a plugin ends it."""
        while True:
            due_s = time.monotonic() + self._config.interval_s
            try:
                await self.poll()
            except Exception:
                log.exception("eviction plugins could not be polled; their latest findings expire")
            await asyncio.sleep(max(due_s - time.monotonic(), 0.1))

    async def poll(self) -> None:
        """Find plugins and poll each once; takes at most the timeout of one plugin."""
        await self._watcher.scan()
        self._tokens = await asyncio.to_thread(self._read_tokens)
        plugins, rejected = self._select_plugins()
        await self._clients.run_cycle(plugins, self._pods)
        rejected |= {plugin.name: why for plugin in plugins if (why := self._token_problem(plugin.name))}
        for name in rejected.keys() - self._rejected.keys():
            log.warning("eviction plugin %s is rejected: %s", name, rejected[name])
        self._rejected = rejected

    def _select_plugins(self) -> tuple[Sequence[DiscoveredPlugin], dict[str, str]]:
        """Return plugins with a valid name, and the others with the reason. External plugins may not use the name of a built-in
        plugin."""
        plugins, rejected = [], {}
        for plugin in self._watcher.plugins(EVICTION_PLUGIN_KIND):
            if plugin.name in PLUGIN_NAMES:
                rejected[plugin.name] = "its name is that of a built-in plugin"
            elif len(plugin.name) > MAX_NAME_CHARS or not plugin.name.isprintable() or "|" in plugin.name:
                rejected[printable(plugin.name, MAX_NAME_CHARS)] = "its name is too long or has invalid characters"
            else:
                plugins.append(plugin)
        return plugins, rejected

    def _token_problem(self, plugin: str) -> str:
        """Return why the token of a plugin is rejected; empty if it is accepted or no tokens are configured."""
        path = self._config.plugin_tokens_file
        token = self._clients.token(plugin).encode(errors="replace")
        listed = bool(token) and any(hmac.compare_digest(token, other) for other in self._tokens)
        return "" if listed or not path else f"its token is not in {path}"

    def _read_tokens(self) -> frozenset[bytes]:
        """Read the token file; without it no token, and so no plugin, is accepted."""
        path = self._config.plugin_tokens_file
        if not path:
            return frozenset()
        try:
            with Path(path).open("rb") as file:
                lines = file.read(MAX_TOKEN_BYTES).splitlines()
        except OSError as error:
            self._tokens_problem = Unavailable(
                f"{path}: {error.strerror}", "write one token per line to it; until then every plugin is rejected"
            )
            return frozenset()
        self._tokens_problem = None
        return frozenset(line.strip() for line in lines if line.strip())
