"""Arithmetic of pools that ask for more CPUs than there are, or are to fill those that there are. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from api.advice import UNBOUND
from api.cpus import Topology
from api.sizes import in_proportion


class Regulation(NamedTuple):
    """Sizes by pool."""

    sizes: dict[str, int]
    occupied: int
    """CPUs that the pools have together."""
    throttled: bool = False
    """Whether somebody got less than it asked for."""


def regulate_pool_sizes(
    growing: Mapping[str, int], fixed: Mapping[str, int], available: int, *, expand: bool
) -> Regulation:
    """Sizes that fit: as asked for, or in proportion where that is too much; with `expand`, growing ones fill what is left.

    Fewer CPUs than pools: each pool has all of them, and they share.
    """
    asked = sum(growing.values()) + sum(fixed.values())
    if asked > available:
        sizes = in_proportion({**growing, **fixed}, available)
        if sizes is None:
            every = max(available, 1)
            return Regulation(dict.fromkeys((*growing, *fixed), every), every, throttled=True)
        return Regulation(sizes, available, throttled=True)
    target = available - sum(fixed.values()) if expand else sum(growing.values())
    grown = in_proportion(growing, target)
    assert grown is not None  # a target of at least what was asked for is never too small
    return Regulation({**grown, **fixed}, sum(grown.values()) + sum(fixed.values()))


def regulate_overlap(sizes: Mapping[str, int], cpus: int) -> dict[str, int]:
    """Which pool lends how many of `cpus`: in proportion to their sizes, rounded up, the largest first, until it is enough.

    Raises ValueError where the pools together have less.
    """
    total = sum(sizes.values())
    if cpus > total:
        raise ValueError(f"{cpus} CPUs cannot overlap pools of {total}")
    result: dict[str, int] = {}
    left = cpus
    for pool, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if not left:
            break
        result[pool] = min(-(-cpus * size // total), size, left)
        left -= result[pool]
    return result


def apportion(cores: float, cpus: Mapping[int, int], nodes: Collection[int]) -> dict[int, float]:
    """What may be used of the whole node in all, by each of these NUMA nodes, and by the others together as UNBOUND if there
    are any: in proportion to CPUs, so that it is the same in all."""
    total = sum(cpus.values())
    parts = {numa: cores * size / total for numa, size in cpus.items() if numa in nodes}
    others = [size for numa, size in cpus.items() if numa not in nodes]
    return parts | ({UNBOUND: cores * sum(others) / total} if others else {})


def node_cpus(topology: Topology) -> dict[int, int]:
    """CPUs by NUMA node."""
    sizes: dict[int, int] = {}
    for cpu in topology.cpus:
        sizes[cpu.numa] = sizes.get(cpu.numa, 0) + 1
    return dict(sorted(sizes.items()))
