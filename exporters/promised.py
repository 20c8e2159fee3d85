"""What can be promised to reclaimed pods and what the node advertises of it, by resource and NUMA node. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from api.advice import Headroom
from api.decisions import Advice
from exporters.points import Family, Labels, points


def promised_families(advice: Advice) -> Iterator[Family]:
    """Rows of both; of what is not known there is none."""
    for what, amounts in (("headroom", advice.headroom), ("advertised", advice.advertised)):
        if amounts is not None:
            yield from _amounts(what, amounts)
    yield points(
        "dioptase_region_headroom_cores",
        (((one.region.name, one.region.kind.value), one.headroom_cores) for one in advice.cpu.regions),
    )


def _amounts(what: str, amounts: Headroom) -> Iterator[Family]:
    yield points(f"dioptase_reclaim_{what}_cores", [((), amounts.cores)])
    yield points(f"dioptase_reclaim_memory_{what}_bytes", [((), amounts.memory_bytes)])
    yield points(f"dioptase_reclaim_numa_{what}_cores", _by_numa(amounts.cores_by_numa))
    yield points(f"dioptase_reclaim_numa_memory_{what}_bytes", _by_numa(amounts.memory_by_numa))


def _by_numa(parts: Mapping[int, float]) -> Iterator[tuple[Labels, float]]:
    return (((str(numa),), amount) for numa, amount in sorted(parts.items()))
