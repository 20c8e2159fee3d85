"""From a snapshot, and what the advisor remembers, to what CPU provision judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.advisor.headroom.gather import reclaimed_use
from agent.advisor.provision.situation import Situation
from agent.advisor.requests import predictions, request_p99_ms
from agent.advisor.state import Memory
from agent.config.inference import InferenceConfig
from api.advice import UNBOUND
from api.qos import QoSLevel
from api.rates import Rates
from api.samples import Snapshot


def situation_of(
    snapshot: Snapshot, change: Rates | None, memory: Memory, inference: InferenceConfig, now_ns: int
) -> Situation:
    """What is known in this round; `now_ns` is CLOCK_MONOTONIC."""
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    measured = request_p99_ms(snapshot.indicators, memory.requests, now_ns)
    return Situation(
        now_ns=now_ns,
        snapshot=snapshot,
        previous=memory.previous,
        change=change,
        needs=memory.containers,
        reserve=_by_numa(memory.pools.get("reserve", ()), numa_of),
        forbidden=_by_numa(memory.pools.get("interrupt", ()), numa_of),
        assigned=memory.cpus,
        pools=memory.pools,
        found=frozenset(memory.pools if memory.previous is None else ()),
        reclaim_use_cores=_use_by_numa(snapshot, change, memory, numa_of),
        reclaim_quota_cores=memory.provision.quotas,
        indicators=measured,
        targets={pod.key: pod.profile.targets for pod in snapshot.pods if pod.profile.targets},
        predictions=predictions(snapshot.pods, measured, now_ns) if inference.strategy != "none" else None,
        inference=inference,
        runnable={
            path: float(sample.threads_by_state.runnable)
            for path in memory.containers
            if (sample := snapshot.cgroups.get(path)) is not None and sample.threads_by_state is not None
        },
        together=memory.refused,
        not_reclaimable=frozenset(pod.key for pod in snapshot.pods if not pod.profile.lends),
    )


def _use_by_numa(
    snapshot: Snapshot, change: Rates | None, memory: Memory, numa_of: Mapping[int, int]
) -> dict[int, float]:
    """CPU that reclaimed pods use, where it is known. What those use that are bound to no node is spread as their CPUs are."""
    if not memory.pools.get("reclaim"):
        return {}
    used = reclaimed_use(snapshot, change, snapshot.topology.numa_nodes)
    unbound = [pod for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED and len(pod.bound_numa) != 1]
    cpus = {cpu for pod in unbound for container in pod.containers for cpu in memory.cpus.get(container.cgroup, ())}
    where, anywhere = _by_numa(tuple(cpus or memory.pools["reclaim"]), numa_of), used.pop(UNBOUND)
    total, found = sum(where.values()), {}
    for numa, own in used.items():
        part = where.get(numa, 0) / total if total else 0.0
        more = anywhere * part if anywhere is not None else None if part else 0.0
        if own is not None and more is not None:
            found[numa] = own + more
    return found


def _by_numa(cpus: Sequence[int], numa_of: Mapping[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for cpu in cpus:
        if cpu in numa_of:
            found[numa_of[cpu]] = found.get(numa_of[cpu], 0) + 1
    return found
