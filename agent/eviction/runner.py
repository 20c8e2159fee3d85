"""Runs the eviction manager in each cycle of the agent and hands its victims to the configured pod evictor.
Without a pod evictor every plugin runs dry: the victims are shown, and stay. It never waits for an eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from agent.advisor.advisor_state import ContainerDemand
from agent.advisor.engine import PolicyState
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.eviction.eviction_inputs import (
    EvictionInputs,
    PodEvictionRecord,
    RootfsUse,
    fresh_headroom,
    overdue_pods,
    terminating_since_ns,
)
from agent.eviction.finding import PLUGIN_FAILED, EvictionFinding
from agent.eviction.manager import EvictionState, evaluate_evictions
from agent.eviction.plugins.numa_cpu_pressure import NAME as NUMA_CPU
from agent.eviction.victims import PendingEviction, evictions_to_cancel, track_pending_evictions
from agent.qrm.cpuset.allowed_cpus import restrict_to_allowed
from agent.qrm.cpuset.state import with_numa_bindings
from api.cpu import Topology
from api.decision import Advice
from api.eviction import EvictionBlock, EvictionEvent, EvictionResult, EvictionVictim
from api.pod import Pod
from api.snapshot import ComponentHealth, Interface, Snapshot
from api.units import NS_PER_S

COMPONENT_NAME = "eviction"
"""Name of the eviction manager among the components of a snapshot."""
_EXCLUSIVE_POOLS = ("reserve", "interrupt", "dedicated", "isolation")
"""Pools, and prefixes of pools, into which share pools cannot grow."""


class PodEvictor(Protocol):
    """Evicts pods, each with its grace period. No method waits for an eviction. The cycle's thread calls all of them."""

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        """Start the eviction of the pod; a grace of None is the pod's own. The result is in later `outcomes`.

        For a pod under eviction only a shorter grace has an effect.
        """

    @property
    def terminating(self) -> frozenset[str]:
        """Pods whose eviction was accepted and that may still exist, `namespace/name`."""

    @property
    def stuck(self) -> frozenset[str]:
        """Pods that cannot be evicted, or that exceeded their deadline: they are no candidates, and what they would free does
        not count."""

    @property
    def blocked(self) -> Mapping[str, EvictionBlock]:
        """Pods whose eviction is refused for now, with the reason. It is retried until it is cancelled."""

    def cancel(self, pod: str, reason: str) -> None:
        """Cancel the eviction of a blocked pod."""

    def outcomes(self) -> Sequence[EvictionEvent]:
        """Return the events since the last call, oldest first. Call it in every cycle: it also continues pending evictions."""

    def close(self) -> None:
        """End all work and close descriptors. Idempotent."""


class PodNotifier(Protocol):
    """Notifies pods of soft thresholds if they request it."""

    def run_cycle(self, victims: Iterable[EvictionVictim], pods: Sequence[Pod], now_ns: int) -> None:
        """Notify the victims that request it. Never raises."""

    def outcomes(self) -> Sequence[EvictionEvent]:
        """Return the notifications since the last call."""


@runtime_checkable
class PodDetails(Protocol):
    """What the kubelet lists of a pod beyond api.pod."""

    def manifest(self, uid: str) -> bytes:
        """Return the pod's JSON; empty if it is not available."""

    def workload(self, uid: str) -> str:
        """Return the pod's controller, `namespace/Kind/name`; empty without one."""


def evict_victims(evictions: EvictionResult, pods: Iterable[Pod], pod_evictor: PodEvictor) -> None:
    """Hand the victims to the evictor in their order; victims of a dry run and those that are only notified stay."""
    by_uid = {pod.uid: pod for pod in pods}
    for victim in evictions.victims:
        if not victim.dry_run and not victim.notify and victim.uid in by_uid:
            pod_evictor.evict(by_uid[victim.uid], victim.grace_s, victim.reason.text)


class EvictionRunner:
    """Runs the eviction manager in each cycle. Without a pod evictor all plugins run dry: victims are shown, and stay."""

    def __init__(self, config: AgentConfig, pod_evictor: PodEvictor | None) -> None:
        self.pod_evictor = pod_evictor
        self.notifier: PodNotifier | None = None
        """Notifies pods of soft thresholds in addition to events; None without it."""
        self.pod_details: PodDetails | None = None
        """What the kubelet lists of pods; None without a kubelet."""
        self.apply_config(config)
        self._state = EvictionState()
        self._pending: dict[str, PendingEviction] = {}
        """The reason of each pod that was handed to the evictor and may be blocked."""
        self._terminating_since_ns: dict[str, int] = {}
        """Since when each pod is terminating by any deletion, by uid (CLOCK_MONOTONIC)."""
        self.external_findings: Callable[[], tuple[EvictionFinding, ...]] = tuple
        """Return the findings of plugins at sockets."""
        self.rootfs: Callable[[], Mapping[str, RootfsUse]] = dict
        """Return the use of writable layers by the pods' uids."""
        self.records: Callable[[], Mapping[str, PodEvictionRecord]] = dict
        """Return the eviction records of pods by uid."""

    def apply_config(self, config: AgentConfig) -> None:
        """Use this configuration from the next cycle on; the state of the plugins stays."""
        dry_run = msgspec.structs.replace(config.eviction, dry_run=("*",))
        self._agent_config, self._config = config, dry_run if self.pod_evictor is None else config.eviction

    def is_enabled(self, *plugins: str) -> bool:
        """Return whether one of these plugins is enabled. Any thread may call it."""
        return any(self._config.enabled(name) for name in plugins)

    def needs_records(self) -> bool:
        """Return whether a built-in plugin uses eviction records. Any thread may call it."""
        return self.is_enabled(NUMA_CPU) and "WorkloadEvictionFrequency" in self._config.numa_cpu.scorers

    def outcomes(self) -> tuple[EvictionEvent, ...]:
        """Return the events of earlier victims. Call it in every cycle: it also kills pods whose grace is over."""
        notices = () if self.notifier is None else tuple(self.notifier.outcomes())
        return notices if self.pod_evictor is None else (*self.pod_evictor.outcomes(), *notices)

    def run_cycle(
        self,
        snapshot: Snapshot,
        advice: Advice | None,
        policy_state: PolicyState,
        now_ns: int,
    ) -> EvictionResult:
        """Return the victims of this cycle and hand them to the evictor.

        `policy_state` is the state of advisor and cpuset allocation after this cycle; `now_ns` is CLOCK_MONOTONIC.
        """
        snapshot = msgspec.structs.replace(snapshot, pods=with_numa_bindings(snapshot.pods, policy_state.cpus))
        inputs = self._build_inputs(snapshot, advice, policy_state, now_ns)
        terminated = {sent.pod for sent in self._state.sent if not sent.dry_run and sent.is_excluded(inputs)}
        result, self._state = evaluate_evictions(inputs, self._state, self._config, self.external_findings())
        evictor = self.pod_evictor
        if evictor is None:
            return result
        evict_victims(result, snapshot.pods, evictor)
        if self.notifier is not None:
            self.notifier.run_cycle(result.victims, snapshot.pods, now_ns)
        self._pending = track_pending_evictions(result, self._pending, evictor.blocked, snapshot.pods, now_ns)
        if self._state.evaluated_at_ns == now_ns:
            reasons = dict(
                evictions_to_cancel(self._pending, evictor.blocked, result, snapshot.pods, self._config, terminated)
            )
            self._cancel(evictor, reasons)
        return msgspec.structs.replace(
            result, terminating=tuple(sorted(evictor.terminating)), held=dict(sorted(evictor.blocked.items()))
        )

    def _build_inputs(
        self, snapshot: Snapshot, advice: Advice | None, policy_state: PolicyState, now_ns: int
    ) -> EvictionInputs:
        # Before the pods under eviction: one that is accepted in between then counts as terminating.
        held = frozenset() if self.pod_evictor is None else frozenset(self.pod_evictor.blocked)
        usable = restrict_to_allowed(snapshot, policy_state.allowed_cpus)
        layers = self.rootfs()
        pools = {} if advice is None else {pool.name: pool.cpus for pool in advice.pools}
        terminating, stuck = self._terminating_and_stuck(snapshot, now_ns)
        by_latency = advice is not None and advice.policy == "latency"
        return EvictionInputs(
            snapshot=snapshot,
            now_ns=now_ns,
            headroom=None if advice is None else fresh_headroom(advice.reported_headroom),
            advice=None if advice is None else advice.cpu,
            pools=pools,
            reclaimable_cores=advice.reclaimable_cores if advice is not None and by_latency else None,
            shared_limit_cpus=_shared_pools_limit(usable.topology, pools, self._agent_config.advisor),
            loads=_recent_loads(policy_state.advisor.containers, now_ns, self._config.stale_s),
            rootfs={pod.key: layers[pod.uid] for pod in snapshot.pods if pod.uid in layers},
            nics=_nic_bandwidths(snapshot.node.interfaces),
            records=self.records(),
            power=None if policy_state.node is None else policy_state.node.last_action,
            terminating=terminating,
            stuck=stuck,
            held=held,
        )

    def _cancel(self, evictor: PodEvictor, reasons: Mapping[str, str]) -> None:
        for pod, reason in reasons.items():
            evictor.cancel(pod, reason)
        # Otherwise they would be excluded as terminating for as long as their termination would have taken.
        sent = tuple(each for each in self._state.sent if each.dry_run or each.pod not in reasons)
        self._state = msgspec.structs.replace(self._state, sent=sent)

    def _terminating_and_stuck(self, snapshot: Snapshot, now_ns: int) -> tuple[frozenset[str], frozenset[str]]:
        """Return the pods that are terminating by any deletion, and those that exceeded their deadline."""
        self._terminating_since_ns = terminating_since_ns(snapshot.pods, self._terminating_since_ns, now_ns)
        terminating = frozenset(pod.key for pod in snapshot.pods if pod.terminating)
        overdue = overdue_pods(snapshot.pods, self._terminating_since_ns, now_ns)
        evictor = self.pod_evictor
        if evictor is None:
            return terminating, overdue
        # The evictor knows the deadline of its own pods better: a plugin may have given them a long grace.
        return terminating | evictor.terminating, (overdue - evictor.terminating) | evictor.stuck

    @staticmethod
    def status(result: EvictionResult, duration_ns: int) -> ComponentHealth:
        """Return the health of the eviction manager: not ok while a plugin fails."""
        failed = [each for each in result.thresholds if each.reason.rule == PLUGIN_FAILED]
        if not failed:
            return ComponentHealth(name=COMPONENT_NAME, ok=True, duration_ns=duration_ns)
        return ComponentHealth(
            name=COMPONENT_NAME,
            ok=False,
            duration_ns=duration_ns,
            error="; ".join(f"{each.plugin}: {each.reason.text}" for each in failed),
            remedy=(
                "remove the plugin from eviction.plugins, or its socket from eviction.pluginSockets, and report this; "
                "it evicts no pod"
            ),
        )


def _recent_loads(containers: Mapping[str, ContainerDemand], now_ns: int, stale_s: float) -> dict[str, float]:
    """Return one-minute loads by cgroup that are at most `stale_s` old; the advisor also keeps older ones."""
    return {
        path: each.load1
        for path, each in containers.items()
        if each.load1 is not None and each.load_at_ns is not None and now_ns - each.load_at_ns <= stale_s * NS_PER_S
    }


def _nic_bandwidths(interfaces: Mapping[str, Interface]) -> dict[str, float]:
    """Return the bandwidth in Mbit/s of network cards that report it, and 0 for those without a link.

    A bonded card is left out: its bond reports the sum.
    """
    return {
        name: float(each.speed_mbit or 0) if each.carrier is not False else 0.0
        for name, each in interfaces.items()
        if not each.bonded and (each.carrier is False or (each.speed_mbit or 0) > 0)
    }


def _shared_pools_limit(
    topology: Topology, pools: Mapping[str, tuple[int, ...]], advisor: AdvisorConfig
) -> float | None:
    """Return the CPUs to which all share pools together may grow if they are sized by need (in Katalyst: enableReclaim without
    reservedResourceForAllocate): all but those of exclusive pools and the reserve of reclaimed pods.

    None if reclaimed pods overlap with share pools (allowSharedCoresOverlapReclaimedCores), which then have their maximum size.
    """
    cpus = len(topology.cpus)
    by_need = advisor.policy == "canonical" and not advisor.provision.overlap and advisor.enable_reclaim
    if not pools or not by_need or advisor.reserve_cores(cpus) > 0:
        return None
    exclusive = {cpu for name, own in pools.items() if name.partition("-")[0] in _EXCLUSIVE_POOLS for cpu in own}
    return float(cpus - len(exclusive) - advisor.reclaim_reserve_cores(cpus, len(topology.numa_nodes)))
