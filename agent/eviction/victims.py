"""Selects the victims of a cycle in Katalyst's order, and cancels blocked evictions whose reason no longer holds.
It is pure. Protected pods are never victims: system and critical pods, static and mirror pods, and pods with a
skipped key. Dry-run victims neither use up the burst nor replace real victims.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from agent.config.eviction import PLUGIN_NAMES, EvictionConfig
from agent.eviction.eviction_inputs import EvictionInputs, exclusion_ns
from agent.eviction.finding import EvictionCandidate, EvictionFinding
from api.eviction import (
    EvictionBlock,
    EvictionResult,
    EvictionThreshold,
    EvictionVictim,
    ThresholdMet,
    format_observation,
)
from api.knobs import Reason
from api.pod import Pod
from api.qos import QoSLevel
from api.units import NS_PER_S


class SentEviction(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that was evicted, or would have been evicted in a dry run."""

    pod: str
    uid: str
    plugin: str
    until_ns: int
    """The pod is excluded as terminating until then."""
    held_until_ns: int
    """The same for a pod whose eviction is blocked, so that its grace does not run yet."""
    dry_run: bool

    def is_excluded(self, inputs: EvictionInputs) -> bool:
        """Return whether the pod is excluded now, so that no other pod is evicted for the same cause.

        A pod that a budget or a refusal blocks is not: other pods are evicted in its place. A pod that is blocked because the
        API server does not answer is excluded for a while, or two pods would leave once it answers again.
        """
        if self.dry_run or self.pod not in inputs.held:
            return inputs.now_ns < self.until_ns
        return self.pod not in inputs.stuck and inputs.now_ns < self.held_until_ns


CRITICAL_PRIORITY = 2_000_000_000
"""Lowest priority of system-cluster-critical and system-node-critical."""
SOFT_NOTIFY_ANNOTATION = "katalyst.kubewharf.io/pod_soft_evict_notify"
EVICT_SCORE_ANNOTATION = "katalyst.kubewharf.io/pod_evict_score"
CONFIG_SOURCE_ANNOTATION = "kubernetes.io/config.source"
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
SCOPE_ORDER = ("", "cpu", "memory", "force")
"""Order of victims with the same QoS level and priority: Katalyst's list of scopes in reverse."""


class EvictionProposal(NamedTuple):
    """The proposal of one plugin to evict a pod."""

    candidate: EvictionCandidate
    finding: EvictionFinding
    forced: bool
    rank: int
    """Position among the plugin's candidates."""

    @property
    def plugin(self) -> str:
        return self.finding.threshold.plugin

    @property
    def kind(self) -> str:
        return "force" if self.finding.forced else self.finding.kind


def propose_evictions(
    finding: EvictionFinding,
    threshold: EvictionThreshold,
    now_ns: int,
    evicted_at_ns: Mapping[str, int],
    sent: Iterable[SentEviction],
) -> list[EvictionProposal]:
    """Return the pods that this finding proposes to evict now."""
    plugin = threshold.plugin
    finding = msgspec.structs.replace(finding, threshold=threshold)
    if finding.awaits_termination and any(each.plugin == plugin for each in sent):
        return []
    last = evicted_at_ns.get(plugin)
    if last is not None and 0 <= now_ns - last < finding.cool_down_s * NS_PER_S:
        return []
    if finding.direct:
        return [
            EvictionProposal(candidate, finding, finding.forced, rank)
            for rank, candidate in enumerate(finding.candidates)
        ]
    if threshold.since_ns is None or now_ns - threshold.since_ns < threshold.tolerance_s * NS_PER_S:
        return []
    forced = threshold.met is ThresholdMet.HARD
    return [EvictionProposal(candidate, finding, forced, rank) for rank, candidate in enumerate(finding.candidates)]


def select_victims(
    proposals: Sequence[EvictionProposal], config: EvictionConfig, stuck: Collection[str] = ()
) -> tuple[tuple[EvictionVictim, ...], tuple[str, ...]]:
    """Return the victims in their order, at most `burst`, and the pods that wait for the next cycle.

    Protected pods and `stuck` pods (`namespace/name`) are no victims. Dry-run victims neither use up the burst nor replace
    real victims.
    """
    possible = [proposal for proposal in proposals if proposal.candidate.pod.key not in stuck]
    allowed = [proposal for proposal in possible if not is_protected(proposal.candidate.pod, config)]
    result: list[EvictionVictim] = []
    waiting: list[str] = []
    for dry in (False, True):
        group = [proposal for proposal in allowed if proposal.finding.threshold.dry_run == dry]
        forced = _first_per_plugin(proposal for proposal in group if proposal.forced)
        soft = sorted((proposal for proposal in group if not proposal.forced), key=_soft_order)
        forced_targets = {proposal.candidate.pod.uid for proposal in forced} | {proposal.plugin for proposal in forced}
        soft = [
            proposal for proposal in soft if forced_targets.isdisjoint((proposal.candidate.pod.uid, proposal.plugin))
        ]
        # A pod that is only notified frees no resources, so it does not count against the number of victims.
        notified = [proposal for proposal in soft if wants_soft_eviction_notice(proposal.candidate.pod)][:1]
        single = [proposal for proposal in soft if not wants_soft_eviction_notice(proposal.candidate.pod)][:1]
        ordered = sorted([*forced, *single], key=_victim_order)
        result += [_victim(proposal, dry=dry) for proposal in (*ordered[: config.burst], *notified)]
        if not dry:
            waiting = [proposal.candidate.pod.key for proposal in ordered[config.burst :]]
    return tuple(result), tuple(waiting)


def _first_per_plugin(proposals: Iterable[EvictionProposal]) -> list[EvictionProposal]:
    """Return one proposal per plugin, or all of a direct finding, and each pod once."""
    by_plugin: dict[str, list[EvictionProposal]] = {}
    for proposal in proposals:
        by_plugin.setdefault(proposal.plugin, []).append(proposal)
    chosen: dict[str, EvictionProposal] = {}
    for group in by_plugin.values():
        for proposal in group if group[0].finding.direct else group[:1]:
            chosen.setdefault(proposal.candidate.pod.uid, proposal)
    return list(chosen.values())


def _victim_order(proposal: EvictionProposal) -> tuple[bool, int, int, int, str]:
    """Reclaimed pods first, then the lowest priority, the kind, and the plugin's own order."""
    pod = proposal.candidate.pod
    return (pod.qos is not QoSLevel.RECLAIMED, pod.priority, SCOPE_ORDER.index(proposal.kind), proposal.rank, pod.key)


def _soft_order(proposal: EvictionProposal) -> tuple[bool, int, float, int, int, str]:
    """As `_victim_order`, but after level and priority the higher pod_evict_score comes first."""
    level, priority, kind, rank, key = _victim_order(proposal)
    return (level, priority, -_evict_score(proposal.candidate.pod), kind, rank, key)


def _evict_score(pod: Pod) -> float:
    """Return 0 for a score that is no finite number: NaN compares false with every number, which would break the order."""
    try:
        score = float(pod.annotations.get(EVICT_SCORE_ANNOTATION, "0"))
    except ValueError:
        return 0.0
    return score if math.isfinite(score) else 0.0


def wants_soft_eviction_notice(pod: Pod) -> bool:
    """Return whether the pod requests notices of soft thresholds instead of soft eviction."""
    return pod.annotations.get(SOFT_NOTIFY_ANNOTATION, "").lower() == "true"


def is_protected(pod: Pod, config: EvictionConfig) -> bool:
    """Return whether no plugin may evict this pod."""
    return (
        pod.qos is QoSLevel.SYSTEM
        or pod.priority >= CRITICAL_PRIORITY
        or pod.annotations.get(CONFIG_SOURCE_ANNOTATION, "api") != "api"
        or MIRROR_ANNOTATION in pod.annotations
        or any(key in pod.annotations for key in config.skipped_annotations)
        or any(key in pod.labels for key in config.skipped_labels)
    )


def _victim(proposal: EvictionProposal, *, dry: bool) -> EvictionVictim:
    threshold, pod = proposal.finding.threshold, proposal.candidate.pod
    observed, target = (
        format_observation(n, threshold.scope, threshold.subject) for n in (threshold.observed, threshold.value)
    )
    text = proposal.candidate.text or (
        f"plugin {threshold.plugin} met threshold in scope {threshold.scope}, target {target}, "
        f"observed {observed}: {threshold.reason.text}"
    )
    return EvictionVictim(
        pod=pod.key,
        uid=pod.uid,
        plugin=threshold.plugin,
        scope=threshold.scope,
        subject=threshold.subject,
        reason=Reason(rule=threshold.reason.rule, text=text, threshold=threshold.value, inputs=threshold.reason.inputs),
        forced=proposal.forced,
        grace_s=proposal.candidate.grace_s,
        notify=not proposal.forced and wants_soft_eviction_notice(pod),
        dry_run=dry,
        observed=threshold.observed,
        operator=threshold.operator,
        since_ns=threshold.since_ns,
        cgroup=_pod_cgroup(pod),
    )


def _pod_cgroup(pod: Pod) -> str:
    """Return the pod's cgroup if all its containers are below one, else the cgroup of the first container."""
    paths = [container.cgroup for container in pod.containers if container.cgroup]
    parents = {path.rpartition("/")[0] for path in paths}
    common = parents.pop() if len(parents) == 1 and len(paths) > 1 else ""
    return common or (paths[0] if paths else "")


class PendingEviction(msgspec.Struct, frozen=True, kw_only=True):
    """An eviction that was handed to the pod evictor."""

    plugin: str
    until_ns: int
    """The pod is excluded until then, or longer while it is blocked (CLOCK_MONOTONIC)."""


def track_pending_evictions(
    result: EvictionResult,
    before: Mapping[str, PendingEviction],
    blocked: Mapping[str, EvictionBlock],
    pods: Sequence[Pod],
    now_ns: int,
) -> dict[str, PendingEviction]:
    """Return the pending evictions by pod: those of this cycle, and earlier ones that are blocked or not yet due."""
    retained = {pod: eviction for pod, eviction in before.items() if pod in blocked or now_ns < eviction.until_ns}
    for victim in result.victims:
        if not victim.dry_run and not victim.notify:
            until_ns = now_ns + exclusion_ns(victim, pods)
            retained[victim.pod] = PendingEviction(plugin=victim.plugin, until_ns=until_ns)
    return retained


def evictions_to_cancel(
    pending: Mapping[str, PendingEviction],
    blocked: Iterable[str],
    result: EvictionResult,
    pods: Iterable[Pod],
    config: EvictionConfig,
    excluded: Collection[str],
) -> Iterator[tuple[str, str]]:
    """Yield the blocked pods that need not leave any more, each with the reason.

    `excluded` are the pods whose memory and CPU the evaluation in `result` did not count.
    """
    met_plugins = {each.plugin for each in result.thresholds if each.met is not ThresholdMet.NOT_MET}
    evaluating = {each.plugin for each in result.thresholds}
    pods_by_key = {pod.key: pod for pod in pods}
    for key in blocked:
        eviction = pending.get(key)
        if eviction is None:
            yield key, "the reason of the eviction is no longer known"
        elif key in pods_by_key and is_protected(pods_by_key[key], config):
            yield key, "the pod is now protected"
        elif config.dry(eviction.plugin):
            yield key, f"{eviction.plugin} now runs dry"
        elif not (
            config.enabled(eviction.plugin) if eviction.plugin in PLUGIN_NAMES else eviction.plugin in evaluating
        ):
            yield key, f"{eviction.plugin} is disabled"
        elif key not in excluded and eviction.plugin not in met_plugins:
            yield key, f"{eviction.plugin} no longer meets its threshold, or has no inputs"
