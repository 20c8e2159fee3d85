"""Regions, sizes of pools, pods that were rejected, and memory advice as rows of the catalogue. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from api.advice import UNBOUND, PoolSize
from api.decisions import Advice, Round
from api.memory_advice import MemoryAdvice, MemoryCondition, MemoryPressure
from exporters.nodes import MOST_INTERFACES
from exporters.points import Family, Labels, points

NODE = ""
"""In the place of a NUMA node: the node as a whole."""


def advised_families(finished: Round) -> Iterator[Family]:
    """What stands behind the sums of the advice; nothing where nothing was advised."""
    if finished.advice is not None:
        yield from _cpu(finished.advice)
    if finished.memory is not None:
        yield from _memory(finished.memory)


def _cpu(advice: Advice) -> Iterator[Family]:
    sizes, regions = advice.cpu.sizes, advice.cpu.regions
    yield points("dioptase_pool_size_cpus", ((_place(size), size.cpus) for size in sizes))
    yield points("dioptase_pool_quota_cores", ((_place(size), size.quota_cores) for size in sizes))
    yield points("dioptase_region_control_cores", (
        ((one.region.name, one.region.kind.value, one.policy, control.value), value)
        for one in regions for control, value in one.controls.items()
    ))  # fmt: skip
    yield points("dioptase_region_bound_cores", (
        ((one.region.name, bound), value)
        for one in regions for bound, value in (("lower", one.lower_cores), ("upper", one.upper_cores))
    ))  # fmt: skip
    signals = [(one.region.name, signal) for one in regions for signal in one.signals]
    yield points("dioptase_region_indicator", (((name, signal.name), signal.current) for name, signal in signals))
    yield points("dioptase_region_indicator_target", (((name, signal.name), signal.target) for name, signal in signals))
    rejected = Counter(verdict.rule for verdict in advice.rejected.values())
    yield points("dioptase_rejected_pods", (((rule,), count) for rule, count in sorted(rejected.items())))
    cards = advice.cards[:MOST_INTERFACES]
    yield points("dioptase_network_capacity_mbit", (
        ((card.name, direction), capacity)
        for card in cards
        for direction, capacity in (("received", card.ingress_capacity), ("sent", card.egress_capacity))
    ))  # fmt: skip
    yield points("dioptase_network_promised_mbit", (((card.name,), card.promised) for card in cards))


def _place(size: PoolSize) -> Labels:
    return size.pool, NODE if size.numa == UNBOUND else str(size.numa)


def _memory(advice: MemoryAdvice) -> Iterator[Family]:
    conditions = {NODE: advice.condition, **{str(numa): found for numa, found in advice.numa_conditions.items()}}
    yield points(
        "dioptase_memory_provision_bytes", (((str(numa),), size) for numa, size in advice.provision_by_numa.items())
    )
    yield points("dioptase_memory_condition", (
        ((where, state.value), int(found.state is state)) for where, found in conditions.items() for state in MemoryPressure
    ))  # fmt: skip
    yield points(
        "dioptase_memory_shortfall_bytes", (((where,), _missing(found)) for where, found in conditions.items())
    )


def _missing(found: MemoryCondition) -> int | None:
    """None where it is not known: that is not nothing."""
    return None if found.state is MemoryPressure.UNKNOWN else found.target_bytes
