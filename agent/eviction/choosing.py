"""Who of the candidates leaves this round, and in which order. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from agent.config.eviction import EvictionConfig
from agent.eviction.judgement import Candidate, Finding
from agent.eviction.situation import NS_PER_S
from agent.eviction.state import Sent
from api.evictions import Met, Threshold, Victim, amount
from api.knobs import Verdict
from api.pods import Pod
from api.qos import QoSLevel

CRITICAL_PRIORITY = 2_000_000_000
"""system-cluster-critical and system-node-critical have this and more."""
SOFT_NOTIFY = "katalyst.kubewharf.io/pod_soft_evict_notify"
EVICT_SCORE = "katalyst.kubewharf.io/pod_evict_score"
STATIC = "kubernetes.io/config.source"
MIRROR = "kubernetes.io/config.mirror"
KINDS = ("", "cpu", "memory", "force")
"""Of two victims of one level and priority, who leaves first: Katalyst's list of scopes from its end."""


class Claim(NamedTuple):
    """One plugin's wish that a pod leaves."""

    candidate: Candidate
    finding: Finding
    forced: bool
    rank: int
    """Among the plugin's candidates."""

    @property
    def plugin(self) -> str:
        return self.finding.threshold.plugin

    @property
    def kind(self) -> str:
        return "force" if self.finding.forced else self.finding.kind


def claims(
    finding: Finding, threshold: Threshold, now_ns: int, evicted_at_ns: Mapping[str, int], sent: Iterable[Sent]
) -> list[Claim]:
    """Whom this finding wants to leave now."""
    plugin = threshold.plugin
    finding = msgspec.structs.replace(finding, threshold=threshold)
    if finding.waits and any(each.plugin == plugin for each in sent):
        return []
    last = evicted_at_ns.get(plugin)
    if last is not None and 0 <= now_ns - last < finding.cool_down_s * NS_PER_S:
        return []
    if finding.direct:
        return [Claim(candidate, finding, finding.forced, rank) for rank, candidate in enumerate(finding.candidates)]
    if threshold.since_ns is None or now_ns - threshold.since_ns < threshold.tolerance_s * NS_PER_S:
        return []
    forced = threshold.met is Met.HARD
    return [Claim(candidate, finding, forced, rank) for rank, candidate in enumerate(finding.candidates)]


def chosen(
    wishes: Sequence[Claim], config: EvictionConfig, stuck: Collection[str] = ()
) -> tuple[tuple[Victim, ...], tuple[str, ...]]:
    """In order and within the burst; dry runs neither use up the burst nor keep a real victim from leaving.

    Nobody who is protected, or who cannot be made to leave, `namespace/name`.
    """
    possible = [claim for claim in wishes if claim.candidate.pod.key not in stuck]
    allowed = [claim for claim in possible if not protected(claim.candidate.pod, config)]
    result: list[Victim] = []
    waiting: list[str] = []
    for dry in (False, True):
        mine = [claim for claim in allowed if claim.finding.threshold.dry_run == dry]
        forced = _first_of_each(claim for claim in mine if claim.forced)
        soft = sorted((claim for claim in mine if not claim.forced), key=_soft_order)
        taken = {claim.candidate.pod.uid for claim in forced} | {claim.plugin for claim in forced}
        soft = [claim for claim in soft if taken.isdisjoint((claim.candidate.pod.uid, claim.plugin))]
        # Who is only told frees nothing, so he stands in nobody's place.
        told = [claim for claim in soft if asks_to_be_told(claim.candidate.pod)][:1]
        single = [claim for claim in soft if not asks_to_be_told(claim.candidate.pod)][:1]
        ordered = sorted([*forced, *single], key=_order)
        result += [_victim(claim, dry=dry) for claim in (*ordered[: config.burst], *told)]
        if not dry:
            waiting = [claim.candidate.pod.key for claim in ordered[config.burst :]]
    return tuple(result), tuple(waiting)


def _first_of_each(claims: Iterable[Claim]) -> list[Claim]:
    """Of a plugin's thresholds only one makes a pod leave in a round; a pod leaves once, whoever wants it to."""
    by_plugin: dict[str, list[Claim]] = {}
    for claim in claims:
        by_plugin.setdefault(claim.plugin, []).append(claim)
    chosen: dict[str, Claim] = {}
    for wishes in by_plugin.values():
        for claim in wishes if wishes[0].finding.direct else wishes[:1]:
            chosen.setdefault(claim.candidate.pod.uid, claim)
    return list(chosen.values())


def _order(claim: Claim) -> tuple[bool, int, int, int, str]:
    """Of one level, priority and kind in the plugin's own order."""
    pod = claim.candidate.pod
    return (pod.qos is not QoSLevel.RECLAIMED, pod.priority, KINDS.index(claim.kind), claim.rank, pod.key)


def _soft_order(claim: Claim) -> tuple[bool, int, float, int, int, str]:
    """As for all, but of one level and priority first the higher pod_evict_score."""
    level, priority, kind, rank, key = _order(claim)
    return (level, priority, -_score(claim.candidate.pod), kind, rank, key)


def _score(pod: Pod) -> float:
    """What is no number counts as none; NaN, neither more nor less than others, would undo their order."""
    try:
        score = float(pod.annotations.get(EVICT_SCORE, "0"))
    except ValueError:
        return 0.0
    return score if math.isfinite(score) else 0.0


def asks_to_be_told(pod: Pod) -> bool:
    """Whether this pod wants to hear of soft thresholds, and to do what it can itself."""
    return pod.annotations.get(SOFT_NOTIFY, "").lower() == "true"


def protected(pod: Pod, config: EvictionConfig) -> bool:
    """Whether nobody may evict this pod."""
    return (
        pod.qos is QoSLevel.SYSTEM
        or pod.priority >= CRITICAL_PRIORITY
        or pod.annotations.get(STATIC, "api") != "api"
        or MIRROR in pod.annotations
        or any(key in pod.annotations for key in config.skipped_annotations)
        or any(key in pod.labels for key in config.skipped_labels)
    )


def _victim(claim: Claim, *, dry: bool) -> Victim:
    threshold, pod = claim.finding.threshold, claim.candidate.pod
    observed, target = (amount(n, threshold.scope, threshold.subject) for n in (threshold.observed, threshold.value))
    text = claim.candidate.text or (
        f"plugin {threshold.plugin} met threshold in scope {threshold.scope}, target {target}, "
        f"observed {observed}: {threshold.verdict.text}"
    )
    return Victim(
        pod=pod.key,
        uid=pod.uid,
        plugin=threshold.plugin,
        scope=threshold.scope,
        subject=threshold.subject,
        verdict=Verdict(
            rule=threshold.verdict.rule, text=text, threshold=threshold.value, inputs=threshold.verdict.inputs
        ),
        forced=claim.forced,
        grace_s=claim.candidate.grace_s,
        notify=not claim.forced and asks_to_be_told(pod),
        dry_run=dry,
        observed=threshold.observed,
        operator=threshold.operator,
        since_ns=threshold.since_ns,
        cgroup=_cgroup(pod),
    )


def _cgroup(pod: Pod) -> str:
    """That of the pod where its containers are in one, else that of the first of them."""
    paths = [container.cgroup for container in pod.containers if container.cgroup]
    parents = {path.rpartition("/")[0] for path in paths}
    common = parents.pop() if len(parents) == 1 and len(paths) > 1 else ""
    return common or (paths[0] if paths else "")
