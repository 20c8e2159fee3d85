"""The eviction manager at work in the agent's rounds: what it remembers, and the killer that carries out its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from agent.advisor.containers import ContainerMemory
from agent.config import AdvisorConfig, Config
from agent.eviction.holding import Wish, over, wished
from agent.eviction.judgement import PLUGIN_FAILED, Finding
from agent.eviction.killer import Killer, Teller, carry_out
from agent.eviction.manager import judge
from agent.eviction.situation import (
    NS_PER_S,
    RootfsUse,
    Situation,
    newly_promised,
    on_their_way,
    overdue,
)
from agent.eviction.state import EvictionMemory
from agent.policy import Remembered
from agent.qrm.placing.ceiling import below
from agent.qrm.placing.state import with_bindings
from api.cpus import Topology
from api.decisions import Advice
from api.evictions import Evictions, KillEvent
from api.facts import Interface
from api.samples import Snapshot, SourceStatus

NAME = "eviction"
"""Of its source in the snapshot."""
_OWN_CPUS = ("reserve", "interrupt", "dedicated", "isolation")
"""Pools, and kinds of them, into which share pools cannot grow."""


class Evictor:
    """Judges every round. Without a killer all its plugins run dry: who would leave is shown, and stays."""

    def __init__(self, config: Config, killer: Killer | None) -> None:
        self.killer = killer
        self.notifier: Teller | None = None
        """Who tells pods of soft thresholds that ask for it, beside the events."""
        self.obey(config)
        self._memory = EvictionMemory()
        self._wished: dict[str, Wish] = {}
        """Of those who were handed to the killer and may be held: what for."""
        self._leaving_ns: dict[str, int] = {}
        """Since when pods that were told to end are seen to be, whoever told them: by uid, CLOCK_MONOTONIC."""
        self.outside: Callable[[], tuple[Finding, ...]] = tuple
        """What plugins at sockets found."""
        self.rootfs: Callable[[], Mapping[str, RootfsUse]] = dict
        """What writable layers hold, by the pods' uids."""

    def obey(self, config: Config) -> None:
        """Judge by these settings from now on; what is remembered stays."""
        dry = msgspec.structs.replace(config.eviction, dry_run=("*",))
        self._all, self._config = config, dry if self.killer is None else config.eviction

    def wants(self, *plugins: str) -> bool:
        """Whether one of these plugins judges."""
        return any(self._config.enabled(name) for name in plugins)

    def outcomes(self) -> tuple[KillEvent, ...]:
        """What became of those who had to leave. To be called every round: it also ends those whose grace is over."""
        told = () if self.notifier is None else tuple(self.notifier.outcomes())
        return told if self.killer is None else (*self.killer.outcomes(), *told)

    def turn(
        self,
        snapshot: Snapshot,
        advice: Advice | None,
        known: Remembered,
        now_ns: int,
    ) -> Evictions:
        """Who has to leave now; they are asked to. `known` is what advice and placement of this round remember; `now_ns` is
        CLOCK_MONOTONIC."""
        # Pods with the NUMA nodes that QRM bound them to.
        snapshot = msgspec.structs.replace(snapshot, pods=with_bindings(snapshot.pods, known.cpus))
        usable = below(snapshot, known.ceiling)
        loads = _loads(known.advisor.containers, now_ns, self._config.stale_s)
        layers = self.rootfs()
        pools = {} if advice is None else {pool.name: pool.cpus for pool in advice.pools}
        leaving, stuck = self._away(snapshot, now_ns)
        situation = Situation(
            snapshot=snapshot,
            now_ns=now_ns,
            headroom=None if advice is None else newly_promised(advice.advertised),
            advice=None if advice is None else advice.cpu,
            pools=pools,
            lent_cores=advice.lent_cores if advice is not None and advice.policy == "latency" else None,
            shared_limit_cpus=_shared_limit(usable.topology, pools, self._all.advisor),
            loads=loads,
            rootfs={pod.key: layers[pod.uid] for pod in snapshot.pods if pod.uid in layers},
            nics=_nics(snapshot.node.interfaces),
            power=None if known.node is None else known.node.answered,
            leaving=leaving,
            stuck=stuck,
            held=frozenset() if self.killer is None else frozenset(self.killer.held),
        )
        gone = {each.pod for each in self._memory.sent if not each.dry_run and each.gone(situation)}
        found, self._memory = judge(situation, self._memory, self._config, self.outside())
        if self.killer is None:
            return found
        carry_out(found, snapshot.pods, self.killer)
        if self.notifier is not None:
            self.notifier.turn(found.victims, snapshot.pods, now_ns)
        self._wished = wished(found, self._wished, self.killer.held, snapshot.pods, now_ns)
        if self._memory.judged_at_ns == now_ns:
            stay = dict(over(self._wished, self.killer.held, found, snapshot.pods, self._config, gone))
            self._withdraw(self.killer, stay)
        asked, held = tuple(sorted(self.killer.leaving)), dict(sorted(self.killer.held.items()))
        return msgspec.structs.replace(found, leaving=asked, held=held)

    def _withdraw(self, killer: Killer, stay: Mapping[str, str]) -> None:
        """Whom nobody wants to leave any more, each with why."""
        for pod, why in stay.items():
            killer.withdraw(pod, why)
        # Else they would count as gone for as long as they would have taken to end.
        sent = tuple(each for each in self._memory.sent if each.dry_run or each.pod not in stay)
        self._memory = msgspec.structs.replace(self._memory, sent=sent)

    def _away(self, snapshot: Snapshot, now_ns: int) -> tuple[frozenset[str], frozenset[str]]:
        """Pods on their way out, whoever sent them, and those that do not go."""
        self._leaving_ns = on_their_way(snapshot.pods, self._leaving_ns, now_ns)
        told = frozenset(pod.key for pod in snapshot.pods if pod.leaving)
        late = overdue(snapshot.pods, self._leaving_ns, now_ns)
        if self.killer is None:
            return told, late
        # Of whom it watches the killer knows better: they may have a grace of a plugin's, however long.
        return told | self.killer.leaving, (late - self.killer.leaving) | self.killer.stuck

    @staticmethod
    def status(found: Evictions, duration_ns: int) -> SourceStatus:
        """How that went: a plugin that failed is told where sources are."""
        failed = [each for each in found.thresholds if each.verdict.rule == PLUGIN_FAILED]
        if not failed:
            return SourceStatus(name=NAME, ok=True, duration_ns=duration_ns)
        return SourceStatus(
            name=NAME,
            ok=False,
            duration_ns=duration_ns,
            error="; ".join(f"{each.plugin}: {each.verdict.text}" for each in failed),
            remedy="it evicts nobody: leave it out of eviction.plugins, or its socket out of their directory, and report this",
        )


def _loads(containers: Mapping[str, ContainerMemory], now_ns: int, stale_s: float) -> dict[str, float]:
    """One-minute loads by cgroup, of those whose waits were known a moment ago: the advisor keeps the others as they were."""
    return {
        path: each.load1
        for path, each in containers.items()
        if each.load1 is not None and each.load_at_ns is not None and now_ns - each.load_at_ns <= stale_s * NS_PER_S
    }


def _nics(interfaces: Mapping[str, Interface]) -> dict[str, float]:
    """Bandwidth in Mbit/s of cards that say their speed, and 0 of those without a link; of bonded ones the bond tells."""
    return {
        name: float(each.speed_mbit or 0) if each.carrier is not False else 0.0
        for name, each in interfaces.items()
        if not each.bonded and (each.carrier is False or (each.speed_mbit or 0) > 0)
    }


def _shared_limit(topology: Topology, pools: Mapping[str, tuple[int, ...]], advisor: AdvisorConfig) -> float | None:
    """CPUs that all share pools together may grow to, where they are sized by need alone [enableReclaim without
    reservedResourceForAllocate]: what others do not have for themselves, less what reclaimed pods always keep.

    None where reclaimed pods share their CPUs [allowSharedCoresOverlapReclaimedCores]: those pools are as large as can be.
    """
    cpus = len(topology.cpus)
    by_need = advisor.policy == "canonical" and not advisor.provision.overlap and advisor.enable_reclaim
    if not pools or not by_need or advisor.reserve_cores(cpus) > 0:
        return None
    others = {cpu for name, own in pools.items() if name.partition("-")[0] in _OWN_CPUS for cpu in own}
    return float(cpus - len(others) - advisor.reclaim_reserve_cores(cpus, len(topology.numa_nodes)))
