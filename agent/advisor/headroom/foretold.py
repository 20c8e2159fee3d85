"""Headroom policy `forecast`: what the foretold peak of all but reclaimed pods leaves of the node. Pure.

Until a forecast is trusted, and where there is none, what the policy would be otherwise is the most.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf

import msgspec

from agent.advisor.forecast.lending import promise
from agent.advisor.headroom.gather import idle_bytes
from agent.advisor.memory.stats import human
from agent.config import Config
from api.advice import UNBOUND, Headroom, PoolSize
from api.forecasts import Outlook, Resource
from api.knobs import Verdict
from api.memory_advice import MemoryAdvice
from api.samples import Snapshot

FORECAST = "forecast"


def foretold_cores(
    capacity: float, reserve: float, outlooks: Sequence[Outlook], otherwise: Headroom, lent_cores: float | None
) -> tuple[float | None, Verdict]:
    """Cores that can be promised, and why; never more than is lent now."""
    outlook = _of(Resource.CPU, outlooks)
    if outlook is None:
        return otherwise.cores, otherwise.verdict
    found = promise(capacity, reserve, outlook, otherwise.cores)
    if found.amount is None or lent_cores is None or found.amount <= lent_cores:
        return found.amount, found.verdict
    verdict = found.verdict
    text = f"{verdict.text.removesuffix('.')}; no more than the {lent_cores:.2f} that are lent now."
    inputs = {**verdict.inputs, "lent_cores": lent_cores}
    return lent_cores, msgspec.structs.replace(verdict, text=text, inputs=inputs)


def lent_by_pools(sizes: Sequence[PoolSize], numa_nodes: Collection[int]) -> float | None:
    """Cores that reclaimed pods may have by the sizes and limits of their pools; None where there is no such pool."""
    pools = {size.numa: size for size in sizes if size.pool == "reclaim"}
    if not pools:
        return None
    whole = {numa: size.cpus + sum(size.overlap.values()) for numa, size in pools.items()}
    limits = {numa: inf if size.quota_cores is None else size.quota_cores for numa, size in pools.items()}
    if set(numa_nodes) <= set(pools) and UNBOUND in pools:
        # What is bound to no node is laid over all of them, under their limits.
        return float(min(sum(whole.values()), sum(limits[numa] for numa in numa_nodes)))
    return float(sum(min(cpus, limits[numa]) for numa, cpus in whole.items()))


def foretold_memory(
    memory: MemoryAdvice, outlooks: Sequence[Outlook], snapshot: Snapshot, config: Config
) -> MemoryAdvice:
    """The same advice, with what the forecast leaves of the node's memory; by NUMA node in the parts that it had before."""
    outlook, total = _of(Resource.MEMORY, outlooks), snapshot.node.memory_total_bytes
    nothing = config.memory.policy == "none" or not config.advisor.enable_reclaim
    if nothing or outlook is None or total is None:
        return memory
    before, reserve = memory.headroom_bytes, config.memory.reserve_bytes(total) + idle_bytes(snapshot)
    found = promise(float(total), float(reserve), outlook, before)
    verdict = found.verdict
    if outlook.forecast.peak is not None and found.amount is not None:
        text = f"The most to expect of all but reclaimed pods within an hour is {human(outlook.forecast.peak)}"
        text += f": of {human(total)}, {human(reserve)} kept, {human(found.amount)} are promised"
        text += "." if outlook.forecast.trusted else ", no more than without the forecast, which is not trusted yet."
        verdict = msgspec.structs.replace(verdict, text=text)
    return msgspec.structs.replace(
        memory,
        headroom_bytes=found.amount,
        headroom_by_numa=_in_parts(found.amount, memory.headroom_by_numa, snapshot),
        headroom_verdict=verdict,
    )


def _in_parts(amount: float | None, before: Mapping[int, float], snapshot: Snapshot) -> dict[int, float]:
    nodes, whole = snapshot.topology.numa_nodes, sum(before.values())
    if amount is None:
        return {}
    if len(nodes) == 1:
        return {nodes[0]: amount}
    return {numa: amount * part / whole for numa, part in before.items()} if whole else {}


def _of(resource: Resource, outlooks: Sequence[Outlook]) -> Outlook | None:
    return next((outlook for outlook in outlooks if outlook.resource is resource), None)
