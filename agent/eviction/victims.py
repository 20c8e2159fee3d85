"""Selects the victims of a cycle from the plugins' candidates and orders them as Katalyst does.
It is pure. Protected pods are never victims: system and critical pods, static and mirror pods, and pods with a
skipped key. Dry-run victims neither use up the burst nor replace real victims.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from agent.config.eviction import EvictionConfig
from agent.eviction.eviction_inputs import NS_PER_S, EvictionInputs
from agent.eviction.finding import EvictionCandidate, EvictionFinding
from api.eviction import EvictionThreshold, EvictionVictim, ThresholdMet, format_observation
from api.knobs import Reason
from api.pod import Pod
from api.qos import QoSLevel


class SentEviction(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that was told to leave, or would have been in a dry run."""

    pod: str
    uid: str
    plugin: str
    until_ns: int
    """It counts as gone until then."""
    held_until_ns: int
    """The same of one that could not be told yet: what it would take to end does not run."""
    dry_run: bool

    def gone(self, situation: EvictionInputs) -> bool:
        """Whether it counts as gone now. Whom a budget or a refusal keeps never does: others leave in its place. Who cannot be
        asked because nobody answers does for a while, or others would leave with it once somebody does."""
        if self.dry_run or self.pod not in situation.held:
            return situation.now_ns < self.until_ns
        return self.pod not in situation.stuck and situation.now_ns < self.held_until_ns


CRITICAL_PRIORITY = 2_000_000_000
"""system-cluster-critical and system-node-critical have this and more."""
SOFT_NOTIFY_ANNOTATION = "katalyst.kubewharf.io/pod_soft_evict_notify"
EVICT_SCORE_ANNOTATION = "katalyst.kubewharf.io/pod_evict_score"
CONFIG_SOURCE_ANNOTATION = "kubernetes.io/config.source"
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
SCOPE_ORDER = ("", "cpu", "memory", "force")
"""Of two victims of one level and priority, who leaves first: Katalyst's list of scopes from its end."""


class EvictionProposal(NamedTuple):
    """One plugin's wish that a pod leaves."""

    candidate: EvictionCandidate
    finding: EvictionFinding
    forced: bool
    rank: int
    """Among the plugin's candidates."""

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
    """Whom this finding wants to leave now."""
    plugin = threshold.plugin
    finding = msgspec.structs.replace(finding, threshold=threshold)
    if finding.waits and any(each.plugin == plugin for each in sent):
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
    """In order and within the burst; dry runs neither use up the burst nor keep a real victim from leaving.

    Nobody who is protected, or who cannot be made to leave, `namespace/name`.
    """
    possible = [claim for claim in proposals if claim.candidate.pod.key not in stuck]
    allowed = [claim for claim in possible if not is_protected(claim.candidate.pod, config)]
    result: list[EvictionVictim] = []
    waiting: list[str] = []
    for dry in (False, True):
        mine = [claim for claim in allowed if claim.finding.threshold.dry_run == dry]
        forced = _first_per_plugin(claim for claim in mine if claim.forced)
        soft = sorted((claim for claim in mine if not claim.forced), key=_soft_order)
        taken = {claim.candidate.pod.uid for claim in forced} | {claim.plugin for claim in forced}
        soft = [claim for claim in soft if taken.isdisjoint((claim.candidate.pod.uid, claim.plugin))]
        # Who is only told frees nothing, so he stands in nobody's place.
        told = [claim for claim in soft if wants_soft_eviction_notice(claim.candidate.pod)][:1]
        single = [claim for claim in soft if not wants_soft_eviction_notice(claim.candidate.pod)][:1]
        ordered = sorted([*forced, *single], key=_victim_order)
        result += [_victim(claim, dry=dry) for claim in (*ordered[: config.burst], *told)]
        if not dry:
            waiting = [claim.candidate.pod.key for claim in ordered[config.burst :]]
    return tuple(result), tuple(waiting)


def _first_per_plugin(claims: Iterable[EvictionProposal]) -> list[EvictionProposal]:
    """Of a plugin's thresholds only one makes a pod leave in a round; a pod leaves once, whoever wants it to."""
    by_plugin: dict[str, list[EvictionProposal]] = {}
    for claim in claims:
        by_plugin.setdefault(claim.plugin, []).append(claim)
    chosen: dict[str, EvictionProposal] = {}
    for wishes in by_plugin.values():
        for claim in wishes if wishes[0].finding.direct else wishes[:1]:
            chosen.setdefault(claim.candidate.pod.uid, claim)
    return list(chosen.values())


def _victim_order(claim: EvictionProposal) -> tuple[bool, int, int, int, str]:
    """Of one level, priority and kind in the plugin's own order."""
    pod = claim.candidate.pod
    return (pod.qos is not QoSLevel.RECLAIMED, pod.priority, SCOPE_ORDER.index(claim.kind), claim.rank, pod.key)


def _soft_order(claim: EvictionProposal) -> tuple[bool, int, float, int, int, str]:
    """As for all, but of one level and priority first the higher pod_evict_score."""
    level, priority, kind, rank, key = _victim_order(claim)
    return (level, priority, -_evict_score(claim.candidate.pod), kind, rank, key)


def _evict_score(pod: Pod) -> float:
    """What is no number counts as none; NaN, neither more nor less than others, would undo their order."""
    try:
        score = float(pod.annotations.get(EVICT_SCORE_ANNOTATION, "0"))
    except ValueError:
        return 0.0
    return score if math.isfinite(score) else 0.0


def wants_soft_eviction_notice(pod: Pod) -> bool:
    """Whether this pod wants to hear of soft thresholds, and to do what it can itself."""
    return pod.annotations.get(SOFT_NOTIFY_ANNOTATION, "").lower() == "true"


def is_protected(pod: Pod, config: EvictionConfig) -> bool:
    """Whether nobody may evict this pod."""
    return (
        pod.qos is QoSLevel.SYSTEM
        or pod.priority >= CRITICAL_PRIORITY
        or pod.annotations.get(CONFIG_SOURCE_ANNOTATION, "api") != "api"
        or MIRROR_ANNOTATION in pod.annotations
        or any(key in pod.annotations for key in config.skipped_annotations)
        or any(key in pod.labels for key in config.skipped_labels)
    )


def _victim(claim: EvictionProposal, *, dry: bool) -> EvictionVictim:
    threshold, pod = claim.finding.threshold, claim.candidate.pod
    observed, target = (
        format_observation(n, threshold.scope, threshold.subject) for n in (threshold.observed, threshold.value)
    )
    text = claim.candidate.text or (
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
        forced=claim.forced,
        grace_s=claim.candidate.grace_s,
        notify=not claim.forced and wants_soft_eviction_notice(pod),
        dry_run=dry,
        observed=threshold.observed,
        operator=threshold.operator,
        since_ns=threshold.since_ns,
        cgroup=_pod_cgroup(pod),
    )


def _pod_cgroup(pod: Pod) -> str:
    """That of the pod where its containers are in one, else that of the first of them."""
    paths = [container.cgroup for container in pod.containers if container.cgroup]
    parents = {path.rpartition("/")[0] for path in paths}
    common = parents.pop() if len(parents) == 1 and len(paths) > 1 else ""
    return common or (paths[0] if paths else "")
