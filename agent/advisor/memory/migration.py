"""Whose memory moves when a NUMA node is to be relieved, whether an earlier move worked, and who goes where none would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from agent.advisor.memory.balancer import Level, Plan, plan
from agent.advisor.memory.layers import pool_of
from agent.advisor.memory.situation import Situation, Unknown, elapsed
from agent.advisor.memory.state import Move
from agent.advisor.memory.stats import counted, human, numa_size, on_numa, sample_of
from agent.config.memory import MemoryConfig
from api.advice import Wish
from api.cpus import format_cpu_list, parse_cpu_list
from api.knobs import Knob, Verdict
from api.memory_advice import MemoryEviction
from api.pods import Pod
from api.qos import QoSLevel


class Balanced(NamedTuple):
    """What moves, who goes, and what to remember of it."""

    wishes: tuple[Wish, ...]
    evictions: tuple[MemoryEviction, ...]
    moves: tuple[Move, ...]
    at_ns: int | None
    verdict: Verdict


class Mover(NamedTuple):
    """A pod's anonymous memory on the source, by cgroup, and where it may go."""

    pod: Pod
    anon: Mapping[str, int]
    goals: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(self.anon.values())

    @property
    def goal(self) -> int:
        """The best destination."""
        return self.goals[0]


def balance(situation: Situation, config: MemoryConfig, moves: Sequence[Move], before_ns: int | None) -> Balanced:
    """One turn of the balancer, once in its interval."""
    settings = config.balancer
    if not settings.enable:
        return Balanced((), (), (), None, Verdict(rule="memory_balance_disabled", text="Memory is not balanced."))
    if not elapsed(situation.now_ns, before_ns, settings.interval_s):
        text = f"NUMA nodes are looked at every {settings.interval_s:g} s."
        return Balanced((), (), tuple(moves), before_ns, Verdict(rule="memory_balance_waiting", text=text))
    kept = tuple(
        _reviewed(move, situation, config)
        for move in moves
        if not elapsed(situation.now_ns, move.at_ns, settings.ping_pong_s)
    )
    try:
        found = plan(situation, settings, kept)
    except Unknown as missing:
        text = f"Not known: {missing}. No memory is moved."
        verdict = Verdict(rule="memory_balance_unknown", text=text, inputs={"missing": str(missing)})
        return Balanced((), (), kept, situation.now_ns, verdict)
    if found is None:
        verdict = Verdict(rule="memory_balanced", text="No NUMA node is so slow that memory should move.")
        return Balanced((), (), kept, situation.now_ns, verdict)
    spare = _spare(situation, config, found)
    movers = _select(situation, config, found, dict(spare))
    if not movers:
        return _evict(situation, config, found, kept)
    whole = sum(mover.bytes for mover in movers)
    goals = sorted({mover.goal for mover in movers})
    text = f"{found.text} for {format_cpu_list(goals)}: {human(whole)} of {counted(len(movers), 'pod')}."
    inputs: dict[str, float | int | str | None] = {
        "source": found.source,
        "destinations": format_cpu_list(goals),
        "bytes": whole,
        "pods": len(movers),
        "spare_bytes": sum(spare.values()),
    }
    verdict = Verdict(rule=f"memory_balance_{found.level}", text=text, threshold=settings.success_ratio, inputs=inputs)
    anon = {cgroup: size for mover in movers for cgroup, size in mover.anon.items()}
    wishes = tuple(
        Wish(
            cgroup=cgroup,
            knob=Knob.MIGRATE_PAGES,
            value=f"{found.source} {mover.goal}",
            verdict=verdict,
        )
        for mover in movers
        for cgroup in mover.anon
    )
    move = Move(at_ns=situation.now_ns, source=found.source, destinations=tuple(goals), anon=anon)
    return Balanced(wishes, (), (*kept, move), situation.now_ns, verdict)


def _reviewed(move: Move, situation: Situation, config: MemoryConfig) -> Move:
    """The move with its success, now that its effect is to be seen; as it was where none of its groups can be measured."""
    if move.succeeded is not None:
        return move
    left = asked = 0
    for cgroup, size in move.anon.items():
        sample = sample_of(situation.snapshot, cgroup, config.stale_s)
        sizes = None if sample is None else on_numa(sample, "anon")
        if sizes is not None:
            left += min(sizes.get(move.source, 0), size)
            asked += size
    if not asked:
        return move
    succeeded = (asked - left) / asked >= config.balancer.success_ratio
    return msgspec.structs.replace(move, succeeded=succeeded)


def _spare(situation: Situation, config: MemoryConfig, found: Plan) -> dict[int, int]:
    """By destination, the best first: what it can take above its critical watermark. Those not known can take nothing."""
    result = {}
    for numa in found.destinations:
        try:
            total = numa_size(situation.snapshot, numa, "MemTotal", config.stale_s)
            spare = numa_size(situation.snapshot, numa, "MemFree", config.stale_s) - config.critical_bytes(total)
        except Unknown:
            continue
        result[numa] = spare
    return result


def _select(situation: Situation, config: MemoryConfig, found: Plan, spare: dict[int, int]) -> list[Mover]:
    """Reclaimed pods first, the smallest first; online ones only while that is not enough.

    Each goes to one node: of several the kernel takes the first for all that comes from one (migrate_pages, mm/mempolicy.c).
    """
    settings = config.balancer
    everyone = list(_movers(situation, config, found.source, tuple(spare)))
    reclaimed = [mover for mover in everyone if mover.pod.qos is QoSLevel.RECLAIMED]
    online = [mover for mover in everyone if mover.pod.qos is not QoSLevel.RECLAIMED]
    chosen: list[Mover] = []
    whole = 0
    parts = (
        (reclaimed, settings.max_reclaimed_pod_bytes, settings.max_reclaimed_total_bytes),
        (online, settings.max_pod_bytes, settings.max_total_bytes),
    )
    for movers, most_each, most in parts:
        if movers is online and whole >= settings.enough_reclaimed_bytes:
            break
        for mover in sorted(movers, key=lambda mover: (mover.bytes, mover.pod.key)):
            if not settings.min_pod_bytes < mover.bytes < most_each:
                continue
            if whole + mover.bytes > most:
                break
            goal = next((numa for numa in mover.goals if spare[numa] >= mover.bytes), None)
            if goal is None:
                break
            chosen.append(mover._replace(goals=(goal,)))
            spare[goal] -= mover.bytes
            whole += mover.bytes
    return chosen


def _movers(situation: Situation, config: MemoryConfig, source: int, goals: Sequence[int]) -> Iterator[Mover]:
    """Pods that may have memory moved there, with what they have on the source. Those bound to NUMA nodes stay."""
    pools = {
        "reclaim": situation.reclaim_numa,
        **dict.fromkeys(config.balancer.pools, situation.share_numa),
    }
    for pod in situation.snapshot.pods:
        pool = pool_of(pod)
        if pool not in pools or pod.qos is QoSLevel.DEDICATED or pod.bound_numa or pod.enhancements.numa_binding:
            continue
        nodes = pools[pool]
        anon = _anon(situation, config, pod, source)
        open_ = [numa for numa in goals if nodes is None or numa in nodes]
        for cgroup in anon:
            mems = situation.snapshot.cgroups[cgroup].limits.mems
            open_ = [numa for numa in open_ if not mems or numa in parse_cpu_list(mems)]
        if anon and open_:
            yield Mover(pod, anon, tuple(open_))


def _anon(situation: Situation, config: MemoryConfig, pod: Pod, source: int) -> dict[str, int]:
    """By cgroup: what the pod has on the source; nothing where a container of it is not measured."""
    found = {}
    for container in pod.containers:
        if container.cgroup not in situation.snapshot.cgroups:
            continue
        sample = sample_of(situation.snapshot, container.cgroup, config.stale_s)
        sizes = None if sample is None else on_numa(sample, "anon")
        if sizes is None:
            return {}
        if sizes.get(source):
            found[container.cgroup] = sizes[source]
    return found


def _evict(situation: Situation, config: MemoryConfig, found: Plan, moves: tuple[Move, ...]) -> Balanced:
    """Nothing can move: with force, the reclaimed pod that has most on the source goes."""
    held = []
    if found.level is Level.FORCE:
        pods = (pod for pod in situation.snapshot.pods if pod.qos is QoSLevel.RECLAIMED)
        held = [Mover(pod, anon) for pod in pods if (anon := _anon(situation, config, pod, found.source))]
    if not held:
        text = f"{found.text}, but nothing can move and nobody has to go."
        verdict = Verdict(rule="memory_balance_stuck", text=text, inputs={"source": found.source})
        return Balanced((), (), moves, situation.now_ns, verdict)
    victim = max(held, key=lambda mover: (mover.bytes, mover.pod.key))
    text = f"{found.text}, but nothing can move: {victim.pod.key} has most there, {human(victim.bytes)}."
    inputs: dict[str, float | int | str | None] = {"source": found.source, "bytes": victim.bytes}
    verdict = Verdict(rule="memory_balance_evict", text=text, inputs=inputs)
    eviction = MemoryEviction(pod=victim.pod.key, numa=found.source, verdict=verdict)
    return Balanced((), (eviction,), moves, situation.now_ns, verdict)
