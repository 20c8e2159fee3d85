"""The eviction manager: asks every plugin, and chooses who leaves this round. Pure.

A hard threshold that has been met for its tolerance makes the first of its candidates leave; soft ones together make one pod
of the node leave, at most. Victims are ordered as Katalyst orders them, and only so many leave in a round; who has to wait is
judged anew in the next. A pod that was sent counts as gone, so that the next round does not send another one for the same
trouble.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from agent.config.eviction import NAMES, EvictionConfig
from agent.eviction import (
    koordinator,
    load,
    network,
    numa_cpu,
    numa_memory,
    numa_sys,
    oomd,
    power,
    reclaimed,
    rootfs,
    rss,
    suppression,
    system_memory,
)
from agent.eviction.choosing import chosen, claims
from agent.eviction.judgement import PLUGIN_FAILED, Finding, missing, not_met
from agent.eviction.situation import NS_PER_S, USUAL_GRACE_S, Situation, counts_as_gone_ns, wait_ns
from agent.eviction.state import EvictionMemory, Plugins, Sent
from api.evictions import Evictions, Met, Shown, Threshold, Victim


def judge(
    situation: Situation, memory: EvictionMemory, config: EvictionConfig, outside: Iterable[Finding] = ()
) -> tuple[Evictions, EvictionMemory]:
    """Who leaves now and why, and the memory for the next call; `outside` is what plugins that are none of ours found.

    May be called as often as one likes: between two rounds (interval_s) thresholds and conditions stand and nobody leaves.
    """
    since = memory.judged_at_ns
    if since is not None and 0 <= situation.now_ns - since < config.interval_s * NS_PER_S:
        return msgspec.structs.replace(memory.latest, victims=(), waiting=()), memory
    if since is None or not 0 <= situation.now_ns - since <= (config.interval_s + config.stale_s) * NS_PER_S:
        memory = msgspec.structs.replace(memory, plugins=_anew(memory.plugins), met_since_ns={})
    uids = {pod.uid for pod in situation.snapshot.pods}
    kept = tuple(each for each in memory.sent if each.uid in uids and situation.now_ns < each.until_ns)
    sent = tuple(each for each in kept if each.gone(situation))
    situation = msgspec.structs.replace(situation, stale_s=config.stale_s)
    findings, plugins = _ask(situation, sent, memory.plugins, config)
    findings += (_here(finding, situation, sent) for finding in outside)
    thresholds, met_since = _lasting(findings, memory.met_since_ns, situation.now_ns, config)
    wishes = [
        claim
        for finding, threshold in zip(findings, thresholds, strict=True)
        for claim in claims(finding, threshold, situation.now_ns, memory.evicted_at_ns, sent)
    ]
    victims, waiting = chosen(wishes, config, situation.stuck)
    # Told once, and nobody in the place of one who in truth would be gone by now.
    told = {(each.uid, each.plugin) for each in sent if each.dry_run}
    victims = tuple(each for each in victims if not each.dry_run or (each.uid, each.plugin) not in told)
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
        sent=(*kept, *(_sent(victim, situation) for victim in gone)),
        evicted_at_ns={**memory.evicted_at_ns, **{victim.plugin: situation.now_ns for victim in gone}},
        plugins=plugins,
    )


def _ask(
    situation: Situation, sent: Iterable[Sent], memory: Plugins, config: EvictionConfig
) -> tuple[list[Finding], Plugins]:
    """Every plugin that is enabled, in Katalyst's order; none of them on an old snapshot or an old list of pods.

    Who was chosen in a dry run is still here, and counts as that: what is shown is the node as it is.
    """
    enabled = [name for name in NAMES if config.enabled(name)]
    if what := situation.unknown:
        return [missing(name, what) for name in enabled], _anew(memory)
    leaving = situation.leaving | {each.pod for each in sent if not each.dry_run}
    situation = msgspec.structs.replace(situation, leaving=leaving)
    findings: list[Finding] = []
    kept: dict[str, object] = {}
    for name in enabled:
        field, ask = _STATEFUL.get(name, ("", None))
        found: Iterable[Finding]
        try:
            if ask is None:
                found = _STATELESS[name](situation, config)
            else:
                found, kept[field] = ask(situation, memory, config)
        except Exception as failure:  # noqa: BLE001 - the others go on, and what failed is shown
            found = [not_met(name, PLUGIN_FAILED, f"This plugin failed: {type(failure).__name__}: {failure}")]
            if field:
                kept[field] = getattr(_anew(memory), field)
        findings += found
    return findings, Plugins(**kept)  # type: ignore[arg-type]


def _here(finding: Finding, situation: Situation, sent: Iterable[Sent]) -> Finding:
    """What somebody found a while ago, without those who have left or are on their way since; nothing on an old snapshot."""
    if what := situation.unknown:
        return missing(finding.threshold.plugin, what)
    away = {each.pod for each in sent if not each.dry_run}
    staying = {pod.uid: pod for pod in situation.staying if pod.key not in away}
    left = tuple(
        msgspec.structs.replace(each, pod=staying[each.pod.uid])
        for each in finding.candidates
        if each.pod.uid in staying
    )
    return msgspec.structs.replace(finding, candidates=left)


def _anew(memory: Plugins) -> Plugins:
    """What goes on after a time in which nothing was known: nothing that was counted or timed, as nobody saw the trouble last.

    Whom a power alert has chosen stays chosen: else the same answer would choose as many again.
    """
    return Plugins(power=memory.power)


_STATELESS: Mapping[str, Callable[[Situation, EvictionConfig], Iterable[Finding]]] = {
    reclaimed.NAME: lambda s, c: reclaimed.judge(s, c.reclaimed),
    reclaimed.NUMA_NAME: lambda s, c: reclaimed.judge_numa(s, c.reclaimed),
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
    oomd.NAME: ("oomd", lambda s, m, c: oomd.judge(s, m.oomd, c.oomd)),
    power.NAME: ("power", lambda s, m, _: power.judge(s, m.power)),
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
                key = f"{threshold.plugin}|{threshold.scope}|{threshold.subject}|{met}"
                began = since[key] = before.get(key, now_ns)
        dry = config.dry(threshold.plugin)
        thresholds.append(msgspec.structs.replace(threshold, since_ns=began, dry_run=dry))
    return tuple(thresholds), since


def _sent(victim: Victim, situation: Situation) -> Sent:
    until_ns = situation.now_ns + counts_as_gone_ns(victim, situation.snapshot.pods)
    held_until_ns = min(until_ns, situation.now_ns + wait_ns(USUAL_GRACE_S))
    return Sent(
        pod=victim.pod, uid=victim.uid, plugin=victim.plugin, until_ns=until_ns, held_until_ns=held_until_ns,
        dry_run=victim.dry_run,
    )  # fmt: skip


def _conditions(
    thresholds: Iterable[Threshold], before: Mapping[str, Shown], now_ns: int, config: EvictionConfig
) -> dict[str, Shown]:
    """Those that are met now, and those that were met a short while ago. A dry run shows none, nor does a plugin of ours that
    is switched off. One of others that is gone may be back in a moment: its condition stands for that while too."""
    kept = {
        name: shown
        for name, shown in before.items()
        if 0 <= now_ns - shown.last_met_ns <= config.condition_s * NS_PER_S
        and not config.dry(shown.plugin)
        and (shown.plugin not in NAMES or config.enabled(shown.plugin))
    }
    for threshold in thresholds:
        condition = threshold.condition
        if condition is None or threshold.dry_run:
            continue
        since = kept[condition.name].since_ns if condition.name in kept else now_ns
        kept[condition.name] = Shown(condition=condition, plugin=threshold.plugin, since_ns=since, last_met_ns=now_ns)
    return kept
