"""From a snapshot, and what the advisor remembers, to what CPU provision judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.advisor.measured import reclaimed_use_cores
from agent.advisor.provision.situation import Situation
from agent.advisor.requests import predictions, request_p99_ms
from agent.advisor.state import Memory
from agent.config.inference import InferenceConfig
from api.rates import Rates
from api.samples import Snapshot


def situation_of(
    snapshot: Snapshot, change: Rates | None, memory: Memory, inference: InferenceConfig, now_ns: int
) -> Situation:
    """What is known in this round; `now_ns` is CLOCK_MONOTONIC."""
    numa_of = {cpu.id: cpu.numa for cpu in snapshot.topology.cpus}
    reclaim = _by_numa(memory.pools.get("reclaim", ()), numa_of)
    used = reclaimed_use_cores(snapshot, change)
    cpus = sum(reclaim.values())
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
        reclaim_use_cores={} if used is None else {numa: used * n / cpus for numa, n in reclaim.items()},
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
        not_reclaimable=frozenset(pod.key for pod in snapshot.pods if not pod.profile.lends),
    )


def _by_numa(cpus: Sequence[int], numa_of: Mapping[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for cpu in cpus:
        if cpu in numa_of:
            found[numa_of[cpu]] = found.get(numa_of[cpu], 0) + 1
    return found
