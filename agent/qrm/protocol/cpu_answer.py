"""Our advisor's sizes as the answer to somebody else's CPU plugin. Pure.

That plugin keeps what it has given to dedicated containers and to the pools that nobody sizes (`reserve`, `interrupt`), and
refuses an answer that says otherwise, so those numbers are its own; all others are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agent.qrm.placing.state import DEDICATED, INTERRUPT, ISOLATION, POOL_ENTRY, RECLAIM, RESERVE, SYSTEM, own_pool
from agent.qrm.protocol import cpu_state
from agent.qrm.protocol.blocks import Entries, Owner, fit, pieces
from agent.qrm.protocol.common import (
    CGROUP_CONFIG,
    CPU_NUMA_HEADROOM,
    QUOTA_GATE,
    by_node_text,
    by_uid,
    extra,
    gates,
)
from agent.qrm.protocol.cpu_layout import Lent, lay_out, lent_of
from api.advice import UNBOUND, Headroom, PoolSize
from api.pods import Pod
from api.proto import cpu_advisor_pb2 as cpu
from api.proto import resource_plugin_pb2 as plugin
from api.qos import QoSLevel

PERIOD_US = 100_000
_KNOWN = frozenset((QUOTA_GATE,))
_LENT = "/lent"
"""At the end of the id of a block that reclaimed pods share."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What our advisor says in its latest round."""

    sizes: tuple[PoolSize, ...]
    pods: tuple[Pod, ...]
    """With the NUMA nodes that they are bound to."""
    cpus_by_numa: Mapping[int, int]
    """All online CPUs, the reserved ones among them."""
    headroom: Headroom | None = None
    reclaim_root: str = "/kubepods/besteffort"
    """The cgroup above reclaimed pods; that of NUMA node 0 is `ROOT-0`."""


def answer(request: Any, offer: Offer) -> Any:
    """GetAdviceResponse to a GetAdviceRequest.

    Raises Unusable where the request contradicts itself, or what is asked about does not fit on the node.
    """
    supported = gates(request.wanted_feature_gates, "CPU", _KNOWN)
    entries, pods = Entries(), by_uid(offer.pods)
    kept = {pool: _kept(request, pool, entries) for pool in (RESERVE, INTERRUPT)}
    usable = {
        numa: cpus - sum(counts.get(numa, 0) for counts in kept.values()) for numa, cpus in offer.cpus_by_numa.items()
    }
    dedicated = _dedicated(request, entries, pods, lent_of(offer.sizes))
    layout = lay_out(offer.sizes, usable, dedicated)
    for size in layout.online:
        shared = min(layout.lent.get((size.pool, size.numa), 0), size.cpus)
        entries.on(Owner(size.pool), size.pool, size.numa)
        entries.add(Owner(size.pool), size.pool, size.numa, f"{size.pool}/{size.numa}{_LENT}", shared)
        entries.add(Owner(size.pool), size.pool, size.numa, f"{size.pool}/{size.numa}", size.cpus - shared)
    _reclaim(entries, layout.reclaim)
    _containers(request, entries, pods)
    result = cpu.GetAdviceResponse(
        entries=entries.found,
        allow_shared_cores_overlap_reclaimed_cores=any(
            not pool.startswith(f"{DEDICATED}-") for pool, _numa in layout.lent
        ),
        extra_entries=[*_quotas(offer, quotas=QUOTA_GATE in supported), *_headroom(offer.headroom)],
        supported_feature_gates=supported,
    )
    fit(pieces(result.entries), offer.cpus_by_numa)
    return result


def _kept(request: Any, pool: str, entries: Entries) -> dict[int, int]:
    """A pool whose CPUs the plugin chose itself: those of `reserve` are repeated to it, `interrupt` is named. By NUMA node."""
    its = request.entries.get(pool)
    if its is None or POOL_ENTRY not in its.entries:
        return {}
    counts = cpu_state.count(its.entries[POOL_ENTRY].allocation_info, f"entries[{pool}]")
    entries.owner(Owner(pool), pool)
    if pool == RESERVE:
        # It is to have just one block, of no CPUs too.
        entries.on(Owner(pool), pool, UNBOUND).blocks.add(result=sum(counts.values()), block_id=pool)
    return counts


def _dedicated(request: Any, entries: Entries, pods: Mapping[str, Pod], lent: Lent) -> dict[int, int]:
    """Blocks of dedicated containers as large as the plugin has them; returns the CPUs that they take by NUMA node.

    What reclaimed pods may share of them is a block of its own, of the pod's main container and whoever runs with it.
    """
    taken: dict[int, int] = {}
    for uid, its in sorted(request.entries.items()):
        key = f"{DEDICATED}-{pods[uid].key}" if uid in pods else ""
        mains: dict[int, int] = {}
        order = sorted(its.entries.items(), key=lambda one: (one[1].metadata.container_type == plugin.SIDECAR, one[0]))
        for name, item in order:
            if name == POOL_ENTRY or item.allocation_info.owner_pool_name != DEDICATED:
                continue
            owner, field = Owner(uid, name), f"entries[{uid[:80]}].entries[{name[:80]}]"
            entries.owner(owner, DEDICATED)
            for numa, cpus in cpu_state.count(item.allocation_info, field).items():
                first = numa not in mains
                alone = mains.setdefault(numa, cpus) != cpus
                shared = 0 if alone else min(lent.get((key, numa), 0), cpus)
                block = f"{uid}/{name}/{numa}" if alone else f"{uid}/{numa}"
                entries.on(owner, DEDICATED, numa)
                entries.add(owner, DEDICATED, numa, f"{block}{_LENT}", shared)
                entries.add(owner, DEDICATED, numa, block, cpus - shared)
                if first or alone:
                    taken[numa] = taken.get(numa, 0) + cpus
    return taken


def _reclaim(entries: Entries, sizes: Sequence[PoolSize]) -> None:
    """What reclaimed pods have: their own, and every block that somebody lends. There always is such a pool."""
    owner = Owner(RECLAIM)
    lent = {piece.id: piece for piece in pieces(entries.found) if piece.id.endswith(_LENT)}
    entries.owner(owner, RECLAIM)
    for size in sizes:
        entries.on(owner, RECLAIM, size.numa)
        entries.add(owner, RECLAIM, size.numa, f"{RECLAIM}/{size.numa}", size.cpus)
    for piece in lent.values():
        entries.add(owner, RECLAIM, piece.numa, piece.id, piece.cpus)


def _containers(request: Any, entries: Entries, pods: Mapping[str, Pod]) -> None:
    """The pool of every container that is not dedicated. One that is not there yet is left out: the next answer has it."""
    for uid, its in request.entries.items():
        for name, item in its.entries.items():
            if name == POOL_ENTRY or item.allocation_info.owner_pool_name == DEDICATED:
                continue
            pool = _pool_of(item, pods.get(uid), entries)
            if pool in entries.found or item.metadata.qos_level == QoSLevel.SYSTEM:
                entries.owner(Owner(uid, name), pool)


def _pool_of(item: Any, pod: Pod | None, entries: Entries) -> str:
    metadata = item.metadata
    if metadata.qos_level == QoSLevel.RECLAIMED:
        return RECLAIM
    if metadata.qos_level == QoSLevel.SYSTEM:
        return str(item.allocation_info.owner_pool_name)
    bound = cpu_state.binding(item)
    if pod is not None and pod.qos is QoSLevel.SHARED:
        apart = f"{ISOLATION}{pod.key}"
        names = (f"{apart}-NUMA{bound[0]}" if bound else apart, apart, own_pool(pod, bound))
        return next((name for name in names if name in entries.found), names[-1])
    name = metadata.annotations.get("cpuset_pool", "")
    name = "share" if not name or name.startswith((ISOLATION, SYSTEM, DEDICATED)) else name
    return f"{name}-NUMA{bound[0]}" if bound else name


def _quotas(offer: Offer, *, quotas: bool) -> list[Any]:
    """Limits of the cgroups above reclaimed pods; -1 is none."""
    found = []
    for size in sorted(offer.sizes, key=lambda size: size.numa):
        if size.pool == RECLAIM:
            limited = quotas and size.quota_cores is not None and size.quota_cores > 0
            value = int((size.quota_cores or 0.0) * PERIOD_US) if limited else -1
            path = offer.reclaim_root if size.numa == UNBOUND else f"{offer.reclaim_root}-{size.numa}"
            text = msgspec.json.encode({"cpu_quota": value, "cpu_period": PERIOD_US}).decode()
            found.append(extra(path, {CGROUP_CONFIG: text}))
    return found


def _headroom(headroom: Headroom | None) -> list[Any]:
    if headroom is None or not headroom.cores_by_numa:
        return []
    return [extra("", {CPU_NUMA_HEADROOM: by_node_text(headroom.cores_by_numa)})]
