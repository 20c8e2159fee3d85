"""What the latest round says of pods, pools and memory, and who stands behind it: regions, sizes, what was rejected. Pure."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from api.advice import CardBandwidth, Headroom, PoolSize, RegionAdvice
from api.knobs import Verdict
from api.memory_advice import MemoryAdvice
from api.pods import Pod
from api.qos import QoSLevel
from api.samples import Snapshot
from exporters.view import View

RECLAIM = "reclaim"
MEMORY = "memory"
"""What a person asks for who asks about memory as a whole."""


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """What reclaimed pods have of the CPU. Cores; None where inputs are missing."""

    lent_cores: float | None
    requirement_cores: float | None
    headroom: Headroom | None
    advertised: Headroom | None


class PoolStory(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of CPUs, as the latest round advised it."""

    name: str
    cpus: str
    sizes: tuple[PoolSize, ...] = ()
    regions: tuple[RegionAdvice, ...] = ()
    """Whose pods run on it, and what they get."""
    lending: Lending | None = None
    """Of the pool of reclaimed pods alone."""


class PodStory(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as it stands."""

    pod: str
    qos: str
    regions: tuple[RegionAdvice, ...] = ()
    """That its containers are provided for in; none of a pod that nothing is provided for."""
    lending: Lending | None = None
    """Of a reclaimed pod alone: what it has a part in."""
    rejected: Verdict | None = None
    """Why its wish for CPUs or network bandwidth cannot be fulfilled."""
    cards: tuple[CardBandwidth, ...] = ()
    """Network cards that it is promised bandwidth of."""
    problems: tuple[str, ...] = ()
    """What its labels and annotations say that cannot be taken as said."""
    untouched: bool = False
    """Whether the journal has no decision on a cgroup of it that is there."""
    past: int | None = None
    """The newest decision on a cgroup that is gone, of an earlier container of it or an earlier pod that had its name."""

    @property
    def troubled(self) -> bool:
        return self.rejected is not None or bool(self.problems)


def pools(target: str | None, view: View) -> tuple[PoolStory, ...]:
    """Those that are called so, or that a region of that name is on; all where nothing is asked for."""
    names = sorted({*view.pools, *(size.pool for size in view.sizes)})
    return tuple(story for name in names if target in ((story := _pool(name, view)).name, None, *_regions_of(story)))


def _lending(view: View) -> Lending:
    return Lending(
        lent_cores=view.lent_cores,
        requirement_cores=view.requirement_cores,
        headroom=view.headroom,
        advertised=view.advertised,
    )


def _pool(name: str, view: View) -> PoolStory:
    return PoolStory(
        name=name,
        cpus=view.pools.get(name, ""),
        sizes=tuple(size for size in view.sizes if size.pool == name),
        regions=tuple(one for one in view.regions if one.region.pool == name),
        lending=_lending(view) if name == RECLAIM else None,
    )


def _regions_of(story: PoolStory) -> tuple[str, ...]:
    return tuple(one.region.name for one in story.regions)


def pods(wanted: Collection[str], touched: Collection[str], view: View, snapshot: Snapshot) -> tuple[PodStory, ...]:
    """The pods of these names, in their order; `touched` are those of which a knob is told about."""
    return tuple(
        PodStory(
            pod=pod.key,
            qos=pod.qos.value,
            regions=tuple(one for one in view.regions if _provides_for(one, pod)),
            lending=_lending(view) if pod.qos is QoSLevel.RECLAIMED else None,
            rejected=view.rejected.get(pod.key),
            cards=tuple(card for card in view.cards if pod.key in card.pods),
            problems=pod.problems,
            untouched=pod.key not in touched,
        )
        for pod in sorted(snapshot.pods, key=lambda pod: pod.key)
        if pod.key in wanted
    )


def troubled(view: View, snapshot: Snapshot) -> frozenset[str]:
    """Pods of which something could not be done or understood."""
    return frozenset(view.rejected).union(pod.key for pod in snapshot.pods if pod.problems)


def memory(target: str | None, view: View) -> MemoryAdvice | None:
    """What is advised of memory, where everything or memory, or the pool that it is promised to, is asked for."""
    return view.memory if target in (None, MEMORY, RECLAIM) else None


def _provides_for(one: RegionAdvice, pod: Pod) -> bool:
    return any(container.cgroup in one.region.containers for container in pod.containers)
