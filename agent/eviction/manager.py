"""The eviction manager: asks every plugin, and chooses who leaves this round. Pure.

A hard threshold that has been met for its tolerance makes the first of its candidates leave; soft ones together make one pod
of the node leave, at most. Victims are ordered as Katalyst orders them, and only so many leave in a round; who has to wait is
judged anew in the next. A pod that was sent counts as gone, so that the next round does not send another one for the same
trouble.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from agent.config.eviction import NAMES, EvictionConfig
from agent.eviction import (
    balancer,
    koordinator,
    load,
    network,
    numa_cpu,
    numa_memory,
    numa_sys,
    reclaimed,
    rootfs,
    rss,
    suppression,
    system_memory,
)
from agent.eviction.judgement import Candidate, Finding, missing
from agent.eviction.situation import NS_PER_S, Situation
from agent.eviction.state import EvictionMemory, Plugins, Sent
from api.evictions import Evictions, Met, Shown, Threshold, Victim
from api.knobs import Verdict
from api.pods import Pod
from api.qos import QoSLevel

CRITICAL_PRIORITY = 2_000_000_000
"""system-cluster-critical and system-node-critical have this and more."""
SOFT_NOTIFY = "katalyst.kubewharf.io/pod_soft_evict_notify"
EVICT_SCORE = "katalyst.kubewharf.io/pod_evict_score"
STATIC = "kubernetes.io/config.source"
MIRROR = "kubernetes.io/config.mirror"
LEAST_WAIT_S, WAIT_FACTOR, USUAL_GRACE_S = 10.0, 1.5, 30.0
"""A pod may take its grace and half of that again to go. Kubernetes gives 30 s to a pod that says nothing."""
KINDS = ("", "cpu", "memory", "force")
"""Of two victims of one level and priority, who leaves first: Katalyst's list of scopes from its end."""


class _Claim(NamedTuple):
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


def judge(situation: Situation, memory: EvictionMemory, config: EvictionConfig) -> tuple[Evictions, EvictionMemory]:
    """Who leaves now and why, and the memory for the next call.

    May be called as often as one likes: between two rounds (interval_s) thresholds and conditions stand and nobody leaves.
    """
    since = memory.judged_at_ns
    if since is not None and 0 <= situation.now_ns - since < config.interval_s * NS_PER_S:
        return msgspec.structs.replace(memory.latest, victims=(), waiting=()), memory
    uids = {pod.uid for pod in situation.snapshot.pods}
    sent = tuple(each for each in memory.sent if each.uid in uids and situation.now_ns < each.until_ns)
    situation = msgspec.structs.replace(situation, stale_s=config.stale_s)
    findings, plugins = _ask(situation, sent, memory.plugins, config)
    thresholds, met_since = _lasting(findings, memory.met_since_ns, situation.now_ns, config)
    claims = [
        claim
        for finding, threshold in zip(findings, thresholds, strict=True)
        for claim in _claims(finding, threshold, situation.now_ns, memory, sent)
    ]
    victims, waiting = _chosen(claims, config)
    conditions = _conditions(thresholds, memory.conditions, situation.now_ns, config)
    evictions = Evictions(
        thresholds=thresholds, conditions=tuple(conditions.values()), victims=victims, waiting=waiting
    )
    gone = [victim for victim in victims if not victim.notify]
    return evictions, EvictionMemory(
        judged_at_ns=situation.now_ns,
        latest=evictions,
        met_since_ns=met_since,
        conditions=conditions,
        sent=(*sent, *(_sent(victim, situation.now_ns) for victim in gone)),
        evicted_at_ns={**memory.evicted_at_ns, **{victim.plugin: situation.now_ns for victim in victims}},
        plugins=plugins,
    )


def _ask(
    situation: Situation, sent: Iterable[Sent], memory: Plugins, config: EvictionConfig
) -> tuple[list[Finding], Plugins]:
    """Every plugin that is enabled, in Katalyst's order; none of them on an old snapshot.

    Who was sent in a dry run is gone for plugins that run dry, and for no other.
    """
    enabled = [name for name in NAMES if config.enabled(name)]
    if not situation.fresh:
        return [missing(name, "the state of the node") for name in enabled], memory
    real = situation.leaving | {each.pod for each in sent if not each.dry_run}
    live = msgspec.structs.replace(situation, leaving=real)
    dry = msgspec.structs.replace(situation, leaving=real | {each.pod for each in sent})
    findings: list[Finding] = []
    kept: dict[str, object] = {}
    for name in enabled:
        seen = dry if config.dry(name) else live
        if name in _STATELESS:
            findings += _STATELESS[name](seen, config)
        else:
            field, ask = _STATEFUL[name]
            found, kept[field] = ask(seen, memory, config)
            findings += found
    return findings, Plugins(**kept)  # type: ignore[arg-type]


_STATELESS: Mapping[str, Callable[[Situation, EvictionConfig], Iterable[Finding]]] = {
    reclaimed.NAME: lambda s, c: reclaimed.judge(s, c.reclaimed),
    reclaimed.NUMA_NAME: lambda s, c: reclaimed.judge_numa(s, c.reclaimed),
    balancer.NAME: lambda s, _: balancer.judge(s),
    rss.NAME: lambda s, c: rss.judge(s, c.rss),
    rootfs.PRESSURE_NAME: lambda s, c: rootfs.judge_pressure(s, c.rootfs_pressure),
    rootfs.OVERUSE_NAME: lambda s, c: rootfs.judge_overuse(s, c.rootfs_overuse),
    koordinator.MEMORY_NAME: lambda s, c: koordinator.judge_memory(s, c.koordinator_memory),
}
_Ask = Callable[[Situation, Plugins, EvictionConfig], tuple[Iterable[Finding], object]]
_STATEFUL: Mapping[str, tuple[str, _Ask]] = {
    numa_memory.NAME: ("numa_memory", lambda s, m, c: numa_memory.judge(s, m.numa_memory, c.numa_memory)),
    system_memory.NAME: ("system_memory", lambda s, m, c: system_memory.judge(s, m.system_memory, c.system_memory)),
    network.NAME: ("network", lambda s, m, c: network.judge(s, m.network, c.network)),
    load.NAME: ("load", lambda s, m, c: load.judge(s, m.load, c.load)),
    suppression.NAME: ("suppression", lambda s, m, c: suppression.judge(s, m.suppression, c.suppression)),
    numa_cpu.NAME: ("numa_cpu", lambda s, m, c: numa_cpu.judge(s, m.numa_cpu, c.numa_cpu)),
    numa_sys.NAME: ("numa_sys", lambda s, m, c: numa_sys.judge(s, m.numa_sys, c.numa_sys)),
    koordinator.CPU_NAME: (
        "koordinator_cpu",
        lambda s, m, c: koordinator.judge_cpu(s, m.koordinator_cpu, c.koordinator_cpu),
    ),
}


def _lasting(
    findings: Iterable[Finding], before: Mapping[str, int], now_ns: int, config: EvictionConfig
) -> tuple[tuple[Threshold, ...], dict[str, int]]:
    """The thresholds with since when they are met; one that is not met once starts anew. Hard is soft too."""
    thresholds, since = [], {}
    for finding in findings:
        threshold = finding.threshold
        began = None
        if threshold.met is not Met.NOT_MET:
            for met in (Met.SOFT, Met.HARD) if threshold.met is Met.HARD else (Met.SOFT,):
                key = f"{threshold.plugin}|{threshold.scope}|{met}"
                began = since[key] = before.get(key, now_ns)
        dry = config.dry(threshold.plugin)
        thresholds.append(msgspec.structs.replace(threshold, since_ns=began, dry_run=dry))
    return tuple(thresholds), since


def _claims(
    finding: Finding, threshold: Threshold, now_ns: int, memory: EvictionMemory, sent: Iterable[Sent]
) -> list[_Claim]:
    """Whom this finding wants to leave now."""
    plugin = threshold.plugin
    finding = msgspec.structs.replace(finding, threshold=threshold)
    if finding.waits and any(each.plugin == plugin for each in sent):
        return []
    last = memory.evicted_at_ns.get(plugin)
    if last is not None and 0 <= now_ns - last < finding.cool_down_s * NS_PER_S:
        return []
    if finding.direct:
        return [_Claim(candidate, finding, finding.forced, rank) for rank, candidate in enumerate(finding.candidates)]
    if threshold.since_ns is None or now_ns - threshold.since_ns < threshold.tolerance_s * NS_PER_S:
        return []
    forced = threshold.met is Met.HARD
    return [_Claim(candidate, finding, forced, rank) for rank, candidate in enumerate(finding.candidates)]


def _chosen(claims: list[_Claim], config: EvictionConfig) -> tuple[tuple[Victim, ...], tuple[str, ...]]:
    """In order and within the burst; dry runs neither use up the burst nor keep a real victim from leaving."""
    allowed = [claim for claim in claims if not protected(claim.candidate.pod, config)]
    result: list[Victim] = []
    waiting: list[str] = []
    for dry in (False, True):
        mine = [claim for claim in allowed if claim.finding.threshold.dry_run == dry]
        forced = _first_of_each(claim for claim in mine if claim.forced)
        soft = sorted((claim for claim in mine if not claim.forced), key=_soft_order)
        taken = {claim.candidate.pod.uid for claim in forced} | {claim.plugin for claim in forced}
        single = next((claim for claim in soft if taken.isdisjoint((claim.candidate.pod.uid, claim.plugin))), None)
        ordered = sorted([*forced, *([single] if single else [])], key=_order)
        result += [_victim(claim, dry=dry) for claim in ordered[: config.burst]]
        if not dry:
            waiting = [claim.candidate.pod.key for claim in ordered[config.burst :]]
    return tuple(result), tuple(waiting)


def _first_of_each(claims: Iterable[_Claim]) -> list[_Claim]:
    """Of a plugin's thresholds only one makes a pod leave in a round; a pod leaves once, whoever wants it to."""
    by_plugin: dict[str, list[_Claim]] = {}
    for claim in claims:
        by_plugin.setdefault(claim.plugin, []).append(claim)
    chosen: dict[str, _Claim] = {}
    for wishes in by_plugin.values():
        for claim in wishes if wishes[0].finding.direct else wishes[:1]:
            chosen.setdefault(claim.candidate.pod.uid, claim)
    return list(chosen.values())


def _order(claim: _Claim) -> tuple[bool, int, int, str]:
    pod = claim.candidate.pod
    return (pod.qos is not QoSLevel.RECLAIMED, pod.priority, KINDS.index(claim.kind), pod.key)


def _soft_order(claim: _Claim) -> tuple[bool, int, float, int, int, str]:
    """As for all, but of one level and priority first the higher pod_evict_score, and last the plugin's own order."""
    level, priority, kind, key = _order(claim)
    return (level, priority, -_score(claim.candidate.pod), kind, claim.rank, key)


def _score(pod: Pod) -> float:
    try:
        return float(pod.annotations.get(EVICT_SCORE, "0"))
    except ValueError:
        return 0.0


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


def _victim(claim: _Claim, *, dry: bool) -> Victim:
    threshold, pod = claim.finding.threshold, claim.candidate.pod
    text = claim.candidate.text or (
        f"plugin {threshold.plugin} met threshold in scope {threshold.scope}, target {threshold.value:g}, "
        f"observed {threshold.observed:g}: {threshold.verdict.text}"
    )
    return Victim(
        pod=pod.key,
        uid=pod.uid,
        plugin=threshold.plugin,
        scope=threshold.scope,
        verdict=Verdict(
            rule=threshold.verdict.rule, text=text, threshold=threshold.value, inputs=threshold.verdict.inputs
        ),
        forced=claim.forced,
        grace_s=claim.candidate.grace_s,
        notify=not claim.forced and pod.annotations.get(SOFT_NOTIFY) == "true",
        dry_run=dry,
    )


def _sent(victim: Victim, now_ns: int) -> Sent:
    grace_s = USUAL_GRACE_S if victim.grace_s is None else victim.grace_s
    until_ns = now_ns + round(max(LEAST_WAIT_S, WAIT_FACTOR * grace_s) * NS_PER_S)
    return Sent(pod=victim.pod, uid=victim.uid, plugin=victim.plugin, until_ns=until_ns, dry_run=victim.dry_run)


def _conditions(
    thresholds: Iterable[Threshold], before: Mapping[str, Shown], now_ns: int, config: EvictionConfig
) -> dict[str, Shown]:
    """Those that are met now, and those that were met a short while ago. A dry run shows none."""
    kept = {
        name: shown
        for name, shown in before.items()
        if 0 <= now_ns - shown.last_met_ns <= config.condition_s * NS_PER_S
    }
    for threshold in thresholds:
        condition = threshold.condition
        if condition is None or threshold.dry_run:
            continue
        since = kept[condition.name].since_ns if condition.name in kept else now_ns
        kept[condition.name] = Shown(condition=condition, plugin=threshold.plugin, since_ns=since, last_met_ns=now_ns)
    return kept
