"""Runs the eviction manager in each cycle of the agent and hands its victims to the configured pod evictor.
Without an evictor every plugin runs dry: the victims are shown and stay. It never waits for an eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from agent.advisor.advisor_state import ContainerDemand
from agent.advisor.engine import PolicyState
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.eviction.cancellation import PendingEviction, evictions_to_cancel, track_pending_evictions
from agent.eviction.eviction_inputs import (
    NS_PER_S,
    EvictionInputs,
    RootfsUse,
    fresh_headroom,
    overdue_pods,
    terminating_since_ns,
)
from agent.eviction.finding import PLUGIN_FAILED, EvictionFinding
from agent.eviction.manager import EvictionState, evaluate_evictions
from agent.qrm.cpuset.allowed_cpus import restrict_to_allowed
from agent.qrm.cpuset.state import with_numa_bindings
from api.cpu import Topology
from api.decision import Advice
from api.eviction import EvictionBlock, EvictionEvent, EvictionResult, EvictionVictim
from api.measurements import Interface
from api.pod import Pod
from api.snapshot import ComponentHealth, Snapshot


class PodEvictor(Protocol):
    """Makes pods leave, each with its grace, without the caller ever waiting."""

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        """Ask the pod to leave now; None is the pod's own grace. Of a pod that was asked before, only a shorter grace counts.

        Returns at once; what came of it is in `outcomes` later.
        """

    @property
    def terminating(self) -> frozenset[str]:
        """Pods that were asked and are not known to be gone, `namespace/name`."""

    @property
    def stuck(self) -> frozenset[str]:
        """Pods that cannot be asked, or were and do not go: nobody asks them again, or counts on what they would free."""

    @property
    def held(self) -> Mapping[str, EvictionBlock]:
        """Pods that could not be asked yet, and why. It goes on trying until they are withdrawn."""

    def withdraw(self, pod: str, why: str) -> None:
        """Leave a pod alone that is held, because `why`."""

    def outcomes(self) -> Sequence[EvictionEvent]:
        """What happened since the last call, oldest first. To be called every round: it also carries on what is pending."""

    def close(self) -> None:
        """Forget everybody, and give back what is held open. Idempotent."""


class PodNotifier(Protocol):
    """Tells pods of soft thresholds that ask for it."""

    def run_cycle(self, victims: Iterable[EvictionVictim], pods: Sequence[Pod], now_ns: int) -> None:
        """Tell those of the victims that are to be told. Never raises."""

    def outcomes(self) -> Sequence[EvictionEvent]:
        """Who was told since the last call."""


def evict_victims(evictions: EvictionResult, pods: Iterable[Pod], killer: PodEvictor) -> None:
    """Hand the victims over, in their order; those of a dry run and those that are only told stay."""
    known = {pod.uid: pod for pod in pods}
    for victim in evictions.victims:
        if not victim.dry_run and not victim.notify and victim.uid in known:
            killer.evict(known[victim.uid], victim.grace_s, victim.reason.text)


COMPONENT_NAME = "eviction"
"""Of its source in the snapshot."""
_EXCLUSIVE_POOLS = ("reserve", "interrupt", "dedicated", "isolation")
"""Pools, and kinds of them, into which share pools cannot grow."""


class EvictionRunner:
    """Judges every round. Without a killer all its plugins run dry: who would leave is shown, and stays."""

    def __init__(self, config: AgentConfig, killer: PodEvictor | None) -> None:
        self.killer = killer
        self.notifier: PodNotifier | None = None
        """Who tells pods of soft thresholds that ask for it, beside the events."""
        self.apply_config(config)
        self._memory = EvictionState()
        self._wished: dict[str, PendingEviction] = {}
        """Of those who were handed to the killer and may be held: what for."""
        self._leaving_ns: dict[str, int] = {}
        """Since when pods that were told to end are seen to be, whoever told them: by uid, CLOCK_MONOTONIC."""
        self.external_findings: Callable[[], tuple[EvictionFinding, ...]] = tuple
        """What plugins at sockets found."""
        self.rootfs: Callable[[], Mapping[str, RootfsUse]] = dict
        """What writable layers hold, by the pods' uids."""

    def apply_config(self, config: AgentConfig) -> None:
        """Judge by these settings from now on; what is remembered stays."""
        dry = msgspec.structs.replace(config.eviction, dry_run=("*",))
        self._all, self._config = config, dry if self.killer is None else config.eviction

    def wants(self, *plugins: str) -> bool:
        """Whether one of these plugins judges."""
        return any(self._config.enabled(name) for name in plugins)

    def outcomes(self) -> tuple[EvictionEvent, ...]:
        """What became of those who had to leave. To be called every round: it also ends those whose grace is over."""
        told = () if self.notifier is None else tuple(self.notifier.outcomes())
        return told if self.killer is None else (*self.killer.outcomes(), *told)

    def run_cycle(
        self,
        snapshot: Snapshot,
        advice: Advice | None,
        known: PolicyState,
        now_ns: int,
    ) -> EvictionResult:
        """Who has to leave now; they are asked to. `known` is what advice and placement of this round remember; `now_ns` is
        CLOCK_MONOTONIC."""
        # Pods with the NUMA nodes that QRM bound them to.
        snapshot = msgspec.structs.replace(snapshot, pods=with_numa_bindings(snapshot.pods, known.cpus))
        usable = restrict_to_allowed(snapshot, known.allowed_cpus)
        loads = _recent_loads(known.advisor.containers, now_ns, self._config.stale_s)
        layers = self.rootfs()
        pools = {} if advice is None else {pool.name: pool.cpus for pool in advice.pools}
        leaving, stuck = self._away(snapshot, now_ns)
        situation = EvictionInputs(
            snapshot=snapshot,
            now_ns=now_ns,
            headroom=None if advice is None else fresh_headroom(advice.reported_headroom),
            advice=None if advice is None else advice.cpu,
            pools=pools,
            reclaimable_cores=advice.reclaimable_cores if advice is not None and advice.policy == "latency" else None,
            shared_limit_cpus=_shared_pools_limit(usable.topology, pools, self._all.advisor),
            loads=loads,
            rootfs={pod.key: layers[pod.uid] for pod in snapshot.pods if pod.uid in layers},
            nics=_nic_bandwidths(snapshot.node.interfaces),
            power=None if known.node is None else known.node.last_action,
            terminating=leaving,
            stuck=stuck,
            held=frozenset() if self.killer is None else frozenset(self.killer.held),
        )
        gone = {each.pod for each in self._memory.sent if not each.dry_run and each.gone(situation)}
        found, self._memory = evaluate_evictions(situation, self._memory, self._config, self.external_findings())
        if self.killer is None:
            return found
        evict_victims(found, snapshot.pods, self.killer)
        if self.notifier is not None:
            self.notifier.run_cycle(found.victims, snapshot.pods, now_ns)
        self._wished = track_pending_evictions(found, self._wished, self.killer.held, snapshot.pods, now_ns)
        if self._memory.evaluated_at_ns == now_ns:
            stay = dict(evictions_to_cancel(self._wished, self.killer.held, found, snapshot.pods, self._config, gone))
            self._withdraw(self.killer, stay)
        asked, held = tuple(sorted(self.killer.terminating)), dict(sorted(self.killer.held.items()))
        return msgspec.structs.replace(found, terminating=asked, held=held)

    def _withdraw(self, killer: PodEvictor, stay: Mapping[str, str]) -> None:
        """Whom nobody wants to leave any more, each with why."""
        for pod, why in stay.items():
            killer.withdraw(pod, why)
        # Else they would count as gone for as long as they would have taken to end.
        sent = tuple(each for each in self._memory.sent if each.dry_run or each.pod not in stay)
        self._memory = msgspec.structs.replace(self._memory, sent=sent)

    def _away(self, snapshot: Snapshot, now_ns: int) -> tuple[frozenset[str], frozenset[str]]:
        """Pods on their way out, whoever sent them, and those that do not go."""
        self._leaving_ns = terminating_since_ns(snapshot.pods, self._leaving_ns, now_ns)
        told = frozenset(pod.key for pod in snapshot.pods if pod.terminating)
        late = overdue_pods(snapshot.pods, self._leaving_ns, now_ns)
        if self.killer is None:
            return told, late
        # Of whom it watches the killer knows better: they may have a grace of a plugin's, however long.
        return told | self.killer.terminating, (late - self.killer.terminating) | self.killer.stuck

    @staticmethod
    def status(found: EvictionResult, duration_ns: int) -> ComponentHealth:
        """How that went: a plugin that failed is told where sources are."""
        failed = [each for each in found.thresholds if each.reason.rule == PLUGIN_FAILED]
        if not failed:
            return ComponentHealth(name=COMPONENT_NAME, ok=True, duration_ns=duration_ns)
        return ComponentHealth(
            name=COMPONENT_NAME,
            ok=False,
            duration_ns=duration_ns,
            error="; ".join(f"{each.plugin}: {each.reason.text}" for each in failed),
            remedy="it evicts nobody: leave it out of eviction.plugins, or its socket out of their directory, and report this",
        )


def _recent_loads(containers: Mapping[str, ContainerDemand], now_ns: int, stale_s: float) -> dict[str, float]:
    """One-minute loads by cgroup, of those whose waits were known a moment ago: the advisor keeps the others as they were."""
    return {
        path: each.load1
        for path, each in containers.items()
        if each.load1 is not None and each.load_at_ns is not None and now_ns - each.load_at_ns <= stale_s * NS_PER_S
    }


def _nic_bandwidths(interfaces: Mapping[str, Interface]) -> dict[str, float]:
    """Bandwidth in Mbit/s of cards that say their speed, and 0 of those without a link; of bonded ones the bond tells."""
    return {
        name: float(each.speed_mbit or 0) if each.carrier is not False else 0.0
        for name, each in interfaces.items()
        if not each.bonded and (each.carrier is False or (each.speed_mbit or 0) > 0)
    }


def _shared_pools_limit(
    topology: Topology, pools: Mapping[str, tuple[int, ...]], advisor: AdvisorConfig
) -> float | None:
    """CPUs that all share pools together may grow to, where they are sized by need alone [enableReclaim without
    reservedResourceForAllocate]: what others do not have for themselves, less what reclaimed pods always keep.

    None where reclaimed pods share their CPUs [allowSharedCoresOverlapReclaimedCores]: those pools are as large as can be.
    """
    cpus = len(topology.cpus)
    by_need = advisor.policy == "canonical" and not advisor.provision.overlap and advisor.enable_reclaim
    if not pools or not by_need or advisor.reserve_cores(cpus) > 0:
        return None
    others = {cpu for name, own in pools.items() if name.partition("-")[0] in _EXCLUSIVE_POOLS for cpu in own}
    return float(cpus - len(others) - advisor.reclaim_reserve_cores(cpus, len(topology.numa_nodes)))
