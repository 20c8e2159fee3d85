"""Blocks: CPUs counted but not named, the same ones wherever the same id stands. Built and read here. Pure.

An entry has blocks by NUMA node, or UNBOUND for wherever there is room. Reclaimed pods that may run on some CPUs of a pool
or of a dedicated container have a block of that entry's among their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from agent.qrm.protocol.common import MOST_ENTRIES, Unusable
from api.advice import UNBOUND
from api.cpus import MAX_CPU
from api.proto import cpu_advisor_pb2 as cpu


class Owner(NamedTuple):
    """A pool, whose container has no name, or a container of a pod."""

    entry: str
    container: str = ""


class Piece(NamedTuple):
    """One block of one owner on one NUMA node."""

    owner: Owner
    pool: str
    numa: int
    id: str
    cpus: int


class Entries:
    """An answer's entries, filled owner by owner."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._holders: dict[str, list[tuple[Owner, Any]]] = {}

    def owner(self, owner: Owner, pool: str) -> Any:
        """What the owner has; made where it has nothing yet."""
        entry = self.found.setdefault(owner.entry, cpu.CalculationEntries())
        info = entry.entries[owner.container]
        info.owner_pool_name = pool
        return info

    def on(self, owner: Owner, pool: str, numa: int) -> Any:
        """Its part of a NUMA node, which may have no block."""
        part = self.owner(owner, pool).calculation_results_by_numas[numa]
        part.SetInParent()
        return part

    def add(self, owner: Owner, pool: str, numa: int, name: str, cpus: int) -> None:
        """Give it a block, which it shares with everybody who has one of that name. None of no CPUs."""
        if cpus <= 0:
            return
        block = self.on(owner, pool, numa).blocks.add(result=cpus, block_id=name)
        for other, its in self._holders.setdefault(name, []):
            its.overlap_targets.append(_target(owner))
            block.overlap_targets.append(_target(other))
        self._holders[name].append((owner, block))


def _target(owner: Owner) -> Any:
    if owner.container:
        return cpu.OverlapTarget(
            overlap_target_pod_uid=owner.entry,
            overlap_target_container_name=owner.container,
            overlap_type=cpu.OverlapWithPod,
        )
    return cpu.OverlapTarget(overlap_target_pool_name=owner.entry, overlap_type=cpu.OverlapWithPool)


def pieces(entries: Mapping[str, Any]) -> tuple[Piece, ...]:
    """Every block of an answer's entries, in order of their names.

    Raises Unusable where a block has no id, is of two sizes or on two NUMA nodes, or has more CPUs than a machine can have.
    """
    if len(entries) > MOST_ENTRIES:
        raise Unusable(f"entries has {len(entries)} of them; {MOST_ENTRIES} are the most")
    found = tuple(_pieces(entries))
    seen: dict[str, Piece] = {}
    for piece in found:
        first = seen.setdefault(piece.id, piece)
        if first.numa != piece.numa:
            raise Unusable(f"{_where(piece)}: block {piece.id[:80]} is on NUMA node {first.numa} too")
        if first.cpus != piece.cpus:
            raise Unusable(
                f"{_where(piece)}: block {piece.id[:80]} has {piece.cpus} CPUs here, and {first.cpus} elsewhere"
            )
    return found


def totals(found: Iterable[Piece]) -> dict[int, int]:
    """CPUs of the blocks by NUMA node, each counted once."""
    once = {piece.id: piece for piece in found}
    result: dict[int, int] = {}
    for piece in once.values():
        result[piece.numa] = result.get(piece.numa, 0) + piece.cpus
    return result


def fit(found: Iterable[Piece], cpus_by_numa: Mapping[int, int]) -> None:
    """Raises Unusable where blocks name a NUMA node that is not there, or take more CPUs than there are."""
    total = totals(found)
    for numa, cpus in sorted(total.items()):
        if numa != UNBOUND and numa not in cpus_by_numa:
            raise Unusable(f"entries: blocks are on NUMA node {numa}, the node has {sorted(cpus_by_numa)}")
        if numa != UNBOUND and cpus > cpus_by_numa[numa]:
            raise Unusable(f"entries: blocks take {cpus} CPUs of NUMA node {numa}, which has {cpus_by_numa[numa]}")
    if sum(total.values()) > sum(cpus_by_numa.values()):
        raise Unusable(f"entries: blocks take {sum(total.values())} CPUs, the node has {sum(cpus_by_numa.values())}")


def _pieces(entries: Mapping[str, Any]) -> Iterator[Piece]:
    for entry, its in sorted(entries.items()):
        for container, info in sorted(its.entries.items()):
            for numa, part in sorted(info.calculation_results_by_numas.items()):
                for block in part.blocks:
                    piece = Piece(Owner(entry, container), info.owner_pool_name, numa, block.block_id, block.result)
                    if not piece.id:
                        raise Unusable(f"{_where(piece)}: a block has no block_id")
                    if piece.cpus > MAX_CPU + 1 or numa < UNBOUND:
                        raise Unusable(
                            f"{_where(piece)}: {piece.cpus} CPUs of NUMA node {numa} are no part of a machine"
                        )
                    yield piece


def _where(piece: Piece) -> str:
    container = f".entries[{piece.owner.container[:80]}]" if piece.owner.container else ""
    return f"entries[{piece.owner.entry[:80]}]{container}"
