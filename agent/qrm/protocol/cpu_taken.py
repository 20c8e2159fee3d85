"""An answer of somebody else's CPU advisor as advice of ours, for our QRM to carry out. Pure.

It is taken whole or not at all. Which CPUs pools have is for our QRM to choose: blocks only count them. Dedicated containers
and `reserve` stay as we have them, as they do with Katalyst's own plugin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from agent.qrm.placing.state import DEDICATED, FALLBACK, INTERRUPT, ISOLATION, POOL_ENTRY, RECLAIM, RESERVE
from agent.qrm.protocol.blocks import Piece, fit, pieces
from agent.qrm.protocol.common import CGROUP_CONFIG, CPU_NUMA_HEADROOM, Unusable, by_uid, number_by_node
from api.advice import UNBOUND, CpuAdvice, Headroom, PoolSize
from api.decisions import Advice
from api.knobs import Verdict
from api.pods import Pod

POLICY = "katalyst"
"""Of advice that somebody else's advisor gave."""
_NODE = re.compile(r".+-(\d{1,4})", re.ASCII)
_NOT_OURS = frozenset((RESERVE, INTERRUPT, DEDICATED, FALLBACK, ""))


class Quota(msgspec.Struct, frozen=True):
    """Value of `cgroup_config`."""

    cpu_quota: int = -1
    cpu_period: int = 0


def taken(answer: Any, pods: Sequence[Pod], cpus_by_numa: Mapping[int, int], before_cores: float | None) -> Advice:
    """What an answer (GetAdviceResponse, ListAndWatchResponse) says. `before_cores` was lent by the one before.

    Raises Unusable that names the field.
    """
    found = pieces(answer.entries)
    fit(found, cpus_by_numa)
    reclaim = answer.entries.get(RECLAIM)
    if reclaim is None or POOL_ENTRY not in reclaim.entries:
        raise Unusable(f"entries[{RECLAIM}] is missing; without it nobody knows where reclaimed pods run")
    parts = reclaim.entries[POOL_ENTRY].calculation_results_by_numas
    nodes = [numa for numa in parts if numa in cpus_by_numa] or [UNBOUND]
    if UNBOUND in parts:
        nodes.append(UNBOUND)
    apart = _isolated(answer.entries, by_uid(pods))
    limits = _quotas(answer.extra_entries)
    if away := sorted(set(limits).difference(cpus_by_numa, (UNBOUND,))):
        raise Unusable(f"extra_entries: {CGROUP_CONFIG} of NUMA node {away[0]}, the node has {sorted(cpus_by_numa)}")
    sizes = (*_online(found, apart), *_reclaimed(found, apart, by_uid(pods), limits, nodes))
    headroom = _headroom(answer.extra_entries)
    lent = float(sum(piece.cpus for piece in found if piece.owner.entry == RECLAIM))
    text = f"The advisor at the socket gives reclaimed pods {lent:g} CPUs in {len(sizes)} sizes of pools."
    before = lent if before_cores is None else before_cores
    return Advice(
        policy=POLICY,
        cpu=CpuAdvice(sizes=sizes, isolated=tuple(sorted(set(apart.values())))),
        requirement_cores=None,
        headroom=headroom,
        lent_cores=min([lent, *([limits[UNBOUND]] if UNBOUND in limits else [])]),
        idle=False,
        action="shrink" if lent < before else "grow" if lent > before else "hold",
        verdict=Verdict(rule="remote_advice", text=text, inputs={"lent_cores": lent, "pools": len(sizes)}),
    )


def _isolated(entries: Mapping[str, Any], pods: Mapping[str, Pod]) -> dict[str, str]:
    """Pools of pods that are kept apart, whatever they are called there, and the pod's key."""
    found: dict[str, str] = {}
    for uid, its in sorted(entries.items()):
        for container, info in sorted(its.entries.items()):
            pool, pod = info.owner_pool_name, pods.get(uid)
            if container == POOL_ENTRY or pod is None or not pool.startswith(ISOLATION.rstrip("-")):
                continue
            if found.setdefault(pool, pod.key) != pod.key:
                raise Unusable(f"entries: {pool[:80]} is a pool of {found[pool]} and of {pod.key}")
    return found


def _ours(pool: str, numa: int, apart: Mapping[str, str]) -> str:
    """What our QRM calls that pool."""
    if pool not in apart:
        return pool
    return f"{ISOLATION}{apart[pool]}" if numa == UNBOUND else f"{ISOLATION}{apart[pool]}-NUMA{numa}"


def _online(found: Iterable[Piece], apart: Mapping[str, str]) -> list[PoolSize]:
    sizes: dict[tuple[str, int], int] = {}
    for piece in found:
        if piece.owner.container == POOL_ENTRY and piece.owner.entry not in (_NOT_OURS | {RECLAIM}):
            if piece.pool != piece.owner.entry:
                raise Unusable(f"entries[{piece.owner.entry[:80]}].owner_pool_name is {piece.pool!r:.80}")
            key = (_ours(piece.owner.entry, piece.numa, apart), piece.numa)
            sizes[key] = sizes.get(key, 0) + piece.cpus
    return [PoolSize(pool=pool, numa=numa, cpus=cpus) for (pool, numa), cpus in sorted(sizes.items())]


def _reclaimed(
    found: Sequence[Piece],
    apart: Mapping[str, str],
    pods: Mapping[str, Pod],
    limits: Mapping[int, float],
    nodes: Iterable[int],
) -> list[PoolSize]:
    """Sizes of reclaim: blocks that nobody else has are its own, the others are shared."""
    lenders: dict[str, str] = {}
    for piece in found:
        entry = piece.owner.entry
        if entry == RECLAIM:
            continue
        if piece.owner.container == POOL_ENTRY:
            lenders.setdefault(piece.id, _ours(entry, piece.numa, apart))
        elif entry in pods:
            lenders.setdefault(piece.id, f"{DEDICATED}-{pods[entry].key}")
        else:
            lenders.setdefault(piece.id, "")  # a pod that is not known here lends nothing here
    own = dict.fromkeys({*limits, *nodes}, 0)
    shared: dict[int, dict[str, int]] = {}
    for piece in found:
        if piece.owner.entry == RECLAIM:
            lender = lenders.get(piece.id)
            if lender is None:
                own[piece.numa] += piece.cpus
            elif lender:
                overlap = shared.setdefault(piece.numa, {})
                overlap[lender] = overlap.get(lender, 0) + piece.cpus
    return [
        PoolSize(
            pool=RECLAIM,
            numa=numa,
            cpus=cpus,
            quota_cores=limits.get(numa),
            overlap=dict(sorted(shared.get(numa, {}).items())),
        )
        for numa, cpus in sorted(own.items())
    ]


def _quotas(extras: Iterable[Any]) -> dict[int, float]:
    """Cores that cgroups above reclaimed pods are limited to, by NUMA node; those without a limit are left out."""
    found: dict[int, float] = {}
    for index, info in enumerate(extras):
        text = info.calculation_result.values.get(CGROUP_CONFIG)
        if text is None:
            continue
        field = f"extra_entries[{index}] {CGROUP_CONFIG}"
        try:
            quota = msgspec.json.decode(text, type=Quota)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise Unusable(f"{field}: {text!r:.80} ({error})") from None
        if quota.cpu_quota > 0:
            if not 0 < quota.cpu_period <= 1_000_000:
                raise Unusable(f"{field}: cpu_period is {quota.cpu_period}; it is from 1 to 1000000 us")
            match = _NODE.fullmatch(info.cgroup_path)
            found[int(match[1]) if match else UNBOUND] = quota.cpu_quota / quota.cpu_period
    return found


def _headroom(extras: Iterable[Any]) -> Headroom | None:
    for index, info in enumerate(extras):
        text = info.calculation_result.values.get(CPU_NUMA_HEADROOM)
        if text is not None:
            cores = number_by_node(text, f"extra_entries[{index}] {CPU_NUMA_HEADROOM}")
            total = sum(cores.values())
            verdict = Verdict(rule="remote_headroom", text=f"The advisor at the socket promises {total:g} cores.")
            return Headroom(cores=total, cores_by_numa=cores, verdict=verdict)
    return None
