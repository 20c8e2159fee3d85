"""Encodes CPU advice for a stock CPU plugin, and decodes the advice of a stock CPU advisor. Pure.
A block is a number of CPUs without their ids; blocks with the same id are the same CPUs. An answer is decoded as
a whole or rejected as a whole. Dedicated containers and `reserve` keep what the plugin has given them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from agent.katalyst import cpu_plugin_state
from agent.katalyst.cpu_plugin_state import SharedCpus, fit_plugin_layout, shared_cpus_of
from agent.katalyst.messages import (
    CGROUP_CONFIG,
    CPU_NUMA_HEADROOM,
    MAX_ENTRIES,
    QUOTA_GATE,
    UnusableMessage,
    extra_entry,
    format_numbers_by_numa,
    parse_numbers_by_numa,
    pods_by_uid,
    supported_gates,
)
from agent.qrm.cpuset.state import (
    DEDICATED,
    FALLBACK,
    INTERRUPT,
    ISOLATION_PREFIX,
    POOL_ENTRY,
    RECLAIM,
    RESERVE,
    SYSTEM_PREFIX,
    pool_name_of,
)
from api.advice import NOT_NUMA_BOUND, CpuAdvice, Headroom, PoolSize
from api.cpu import MAX_CPU
from api.decision import Advice
from api.knobs import Reason
from api.pod import Pod
from api.proto import cpu_advisor_pb2 as cpu
from api.proto import resource_plugin_pb2 as plugin
from api.qos import QoSLevel


class BlockOwner(NamedTuple):
    """A pool, whose container has no name, or a container of a pod."""

    entry: str
    container: str = ""


class Block(NamedTuple):
    """One block of one owner on one NUMA node."""

    owner: BlockOwner
    pool: str
    numa: int
    id: str
    cpus: int


class BlockEntries:
    """An answer's entries, filled owner by owner."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._holders: dict[str, list[tuple[BlockOwner, Any]]] = {}

    def owner(self, owner: BlockOwner, pool: str) -> Any:
        """What the owner has; made where it has nothing yet."""
        entry = self.found.setdefault(owner.entry, cpu.CalculationEntries())
        info = entry.entries[owner.container]
        info.owner_pool_name = pool
        return info

    def on(self, owner: BlockOwner, pool: str, numa: int) -> Any:
        """Its part of a NUMA node, which may have no block."""
        part = self.owner(owner, pool).calculation_results_by_numas[numa]
        part.SetInParent()
        return part

    def add(self, owner: BlockOwner, pool: str, numa: int, name: str, cpus: int) -> None:
        """Give it a block, which it shares with everybody who has one of that name. None of no CPUs."""
        if cpus <= 0:
            return
        block = self.on(owner, pool, numa).blocks.add(result=cpus, block_id=name)
        for other, its in self._holders.setdefault(name, []):
            its.overlap_targets.append(_overlap_target(owner))
            block.overlap_targets.append(_overlap_target(other))
        self._holders[name].append((owner, block))


def _overlap_target(owner: BlockOwner) -> Any:
    if owner.container:
        return cpu.OverlapTarget(
            overlap_target_pod_uid=owner.entry,
            overlap_target_container_name=owner.container,
            overlap_type=cpu.OverlapWithPod,
        )
    return cpu.OverlapTarget(overlap_target_pool_name=owner.entry, overlap_type=cpu.OverlapWithPool)


def parse_blocks(entries: Mapping[str, Any]) -> tuple[Block, ...]:
    """Every block of an answer's entries, in order of their names.

    Raises Unusable where a block has no id, is of two sizes or on two NUMA nodes, or has more CPUs than a machine can have.
    """
    if len(entries) > MAX_ENTRIES:
        raise UnusableMessage(f"entries has {len(entries)} of them; {MAX_ENTRIES} are the most")
    found = tuple(_iter_blocks(entries))
    seen: dict[str, Block] = {}
    for piece in found:
        first = seen.setdefault(piece.id, piece)
        if first.numa != piece.numa:
            raise UnusableMessage(f"{_field_name(piece)}: block {piece.id[:80]} is on NUMA node {first.numa} too")
        if first.cpus != piece.cpus:
            raise UnusableMessage(
                f"{_field_name(piece)}: block {piece.id[:80]} has {piece.cpus} CPUs here, and {first.cpus} elsewhere"
            )
    return found


def block_cpus_by_numa(found: Iterable[Block]) -> dict[int, int]:
    """CPUs of the blocks by NUMA node, each counted once."""
    once = {piece.id: piece for piece in found}
    result: dict[int, int] = {}
    for piece in once.values():
        result[piece.numa] = result.get(piece.numa, 0) + piece.cpus
    return result


def check_blocks_fit(found: Iterable[Block], cpus_by_numa: Mapping[int, int]) -> None:
    """Raises Unusable where blocks name a NUMA node that is not there, or take more CPUs than there are."""
    total = block_cpus_by_numa(found)
    for numa, cpus in sorted(total.items()):
        if numa != NOT_NUMA_BOUND and numa not in cpus_by_numa:
            raise UnusableMessage(f"entries: blocks are on NUMA node {numa}, the node has {sorted(cpus_by_numa)}")
        if numa != NOT_NUMA_BOUND and cpus > cpus_by_numa[numa]:
            raise UnusableMessage(
                f"entries: blocks take {cpus} CPUs of NUMA node {numa}, which has {cpus_by_numa[numa]}"
            )
    if sum(total.values()) > sum(cpus_by_numa.values()):
        raise UnusableMessage(
            f"entries: blocks take {sum(total.values())} CPUs, the node has {sum(cpus_by_numa.values())}"
        )


def _iter_blocks(entries: Mapping[str, Any]) -> Iterator[Block]:
    for entry, its in sorted(entries.items()):
        for container, info in sorted(its.entries.items()):
            for numa, part in sorted(info.calculation_results_by_numas.items()):
                for block in part.blocks:
                    piece = Block(
                        BlockOwner(entry, container), info.owner_pool_name, numa, block.block_id, block.result
                    )
                    if not piece.id:
                        raise UnusableMessage(f"{_field_name(piece)}: a block has no block_id")
                    if piece.cpus > MAX_CPU + 1 or numa < NOT_NUMA_BOUND:
                        raise UnusableMessage(
                            f"{_field_name(piece)}: {piece.cpus} CPUs of NUMA node {numa} are no part of a machine"
                        )
                    yield piece


def _field_name(piece: Block) -> str:
    container = f".entries[{piece.owner.container[:80]}]" if piece.owner.container else ""
    return f"entries[{piece.owner.entry[:80]}]{container}"


PERIOD_US = 100_000
_SUPPORTED_GATES = frozenset((QUOTA_GATE,))
_SHARED_SUFFIX = "/lent"
"""At the end of the id of a block that reclaimed pods share."""


class CpuAdviceInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What our advisor says in its latest round."""

    sizes: tuple[PoolSize, ...]
    pods: tuple[Pod, ...]
    """With the NUMA nodes that they are bound to."""
    cpus_by_numa: Mapping[int, int]
    """All online CPUs, the reserved ones among them."""
    headroom: Headroom | None = None
    reclaim_root: str = "/kubepods/besteffort"
    """The cgroup above reclaimed pods; that of NUMA node 0 is `ROOT-0`."""


def encode_cpu_advice(request: Any, offer: CpuAdviceInputs) -> Any:
    """GetAdviceResponse to a GetAdviceRequest.

    Raises Unusable where the request contradicts itself, or what is asked about does not fit on the node.
    """
    supported = supported_gates(request.wanted_feature_gates, "CPU", _SUPPORTED_GATES)
    entries, pods = BlockEntries(), pods_by_uid(offer.pods)
    kept = {pool: _plugin_pool_cpus(request, pool, entries) for pool in (RESERVE, INTERRUPT)}
    usable = {
        numa: cpus - sum(counts.get(numa, 0) for counts in kept.values()) for numa, cpus in offer.cpus_by_numa.items()
    }
    dedicated = _add_dedicated(request, entries, pods, shared_cpus_of(offer.sizes))
    layout = fit_plugin_layout(offer.sizes, usable, dedicated)
    for size in layout.online:
        shared = min(layout.lent.get((size.pool, size.numa), 0), size.cpus)
        entries.on(BlockOwner(size.pool), size.pool, size.numa)
        entries.add(BlockOwner(size.pool), size.pool, size.numa, f"{size.pool}/{size.numa}{_SHARED_SUFFIX}", shared)
        entries.add(BlockOwner(size.pool), size.pool, size.numa, f"{size.pool}/{size.numa}", size.cpus - shared)
    _add_reclaim(entries, layout.reclaim)
    _add_containers(request, entries, pods)
    result = cpu.GetAdviceResponse(
        entries=entries.found,
        allow_shared_cores_overlap_reclaimed_cores=any(
            not pool.startswith(f"{DEDICATED}-") for pool, _numa in layout.lent
        ),
        extra_entries=[*_encode_quotas(offer, quotas=QUOTA_GATE in supported), *_encode_headroom(offer.headroom)],
        supported_feature_gates=supported,
    )
    check_blocks_fit(parse_blocks(result.entries), offer.cpus_by_numa)
    return result


def _plugin_pool_cpus(request: Any, pool: str, entries: BlockEntries) -> dict[int, int]:
    """A pool whose CPUs the plugin chose itself: those of `reserve` are repeated to it, `interrupt` is named. By NUMA node."""
    its = request.entries.get(pool)
    if its is None or POOL_ENTRY not in its.entries:
        return {}
    counts = cpu_plugin_state.count_cpus_by_numa(its.entries[POOL_ENTRY].allocation_info, f"entries[{pool}]")
    entries.owner(BlockOwner(pool), pool)
    if pool == RESERVE:
        # It is to have just one block, of no CPUs too.
        entries.on(BlockOwner(pool), pool, NOT_NUMA_BOUND).blocks.add(result=sum(counts.values()), block_id=pool)
    return counts


def _add_dedicated(request: Any, entries: BlockEntries, pods: Mapping[str, Pod], lent: SharedCpus) -> dict[int, int]:
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
            owner, field = BlockOwner(uid, name), f"entries[{uid[:80]}].entries[{name[:80]}]"
            entries.owner(owner, DEDICATED)
            for numa, cpus in cpu_plugin_state.count_cpus_by_numa(item.allocation_info, field).items():
                first = numa not in mains
                alone = mains.setdefault(numa, cpus) != cpus
                shared = 0 if alone else min(lent.get((key, numa), 0), cpus)
                block = f"{uid}/{name}/{numa}" if alone else f"{uid}/{numa}"
                entries.on(owner, DEDICATED, numa)
                entries.add(owner, DEDICATED, numa, f"{block}{_SHARED_SUFFIX}", shared)
                entries.add(owner, DEDICATED, numa, block, cpus - shared)
                if first or alone:
                    taken[numa] = taken.get(numa, 0) + cpus
    return taken


def _add_reclaim(entries: BlockEntries, sizes: Sequence[PoolSize]) -> None:
    """What reclaimed pods have: their own, and every block that somebody lends. There always is such a pool."""
    owner = BlockOwner(RECLAIM)
    lent = {piece.id: piece for piece in parse_blocks(entries.found) if piece.id.endswith(_SHARED_SUFFIX)}
    entries.owner(owner, RECLAIM)
    for size in sizes:
        entries.on(owner, RECLAIM, size.numa)
        entries.add(owner, RECLAIM, size.numa, f"{RECLAIM}/{size.numa}", size.cpus)
    for piece in lent.values():
        entries.add(owner, RECLAIM, piece.numa, piece.id, piece.cpus)


def _add_containers(request: Any, entries: BlockEntries, pods: Mapping[str, Pod]) -> None:
    """The pool of every container that is not dedicated. One that is not there yet is left out: the next answer has it."""
    for uid, its in request.entries.items():
        for name, item in its.entries.items():
            if name == POOL_ENTRY or item.allocation_info.owner_pool_name == DEDICATED:
                continue
            pool = _pool_of(item, pods.get(uid), entries)
            if pool in entries.found or item.metadata.qos_level == QoSLevel.SYSTEM:
                entries.owner(BlockOwner(uid, name), pool)


def _pool_of(item: Any, pod: Pod | None, entries: BlockEntries) -> str:
    metadata = item.metadata
    if metadata.qos_level == QoSLevel.RECLAIMED:
        return RECLAIM
    if metadata.qos_level == QoSLevel.SYSTEM:
        return str(item.allocation_info.owner_pool_name)
    bound = cpu_plugin_state.bound_nodes_of(item)
    if pod is not None and pod.qos is QoSLevel.SHARED:
        apart = f"{ISOLATION_PREFIX}{pod.key}"
        names = (f"{apart}-NUMA{bound[0]}" if bound else apart, apart, pool_name_of(pod, bound))
        return next((name for name in names if name in entries.found), names[-1])
    name = metadata.annotations.get("cpuset_pool", "")
    name = "share" if not name or name.startswith((ISOLATION_PREFIX, SYSTEM_PREFIX, DEDICATED)) else name
    return f"{name}-NUMA{bound[0]}" if bound else name


def _encode_quotas(offer: CpuAdviceInputs, *, quotas: bool) -> list[Any]:
    """Limits of the cgroups above reclaimed pods; -1 is none."""
    found = []
    for size in sorted(offer.sizes, key=lambda size: size.numa):
        if size.pool == RECLAIM:
            limited = quotas and size.quota_cores is not None and size.quota_cores > 0
            value = int((size.quota_cores or 0.0) * PERIOD_US) if limited else -1
            path = offer.reclaim_root if size.numa == NOT_NUMA_BOUND else f"{offer.reclaim_root}-{size.numa}"
            text = msgspec.json.encode({"cpu_quota": value, "cpu_period": PERIOD_US}).decode()
            found.append(extra_entry(path, {CGROUP_CONFIG: text}))
    return found


def _encode_headroom(headroom: Headroom | None) -> list[Any]:
    if headroom is None or not headroom.cores_by_numa:
        return []
    return [extra_entry("", {CPU_NUMA_HEADROOM: format_numbers_by_numa(headroom.cores_by_numa)})]


REMOTE_POLICY = "katalyst"
"""Of advice that somebody else's advisor gave."""
_NUMA_SUFFIX = re.compile(r".+-(\d{1,4})", re.ASCII)
_UNSIZED_POOLS = frozenset((RESERVE, INTERRUPT, DEDICATED, FALLBACK, ""))


class CgroupQuota(msgspec.Struct, frozen=True):
    """Value of `cgroup_config`."""

    cpu_quota: int = -1
    cpu_period: int = 0


def decode_cpu_advice(
    answer: Any, pods: Sequence[Pod], cpus_by_numa: Mapping[int, int], before_cores: float | None
) -> Advice:
    """What an answer (GetAdviceResponse, ListAndWatchResponse) says. `before_cores` was lent by the one before.

    Raises Unusable that names the field.
    """
    found = parse_blocks(answer.entries)
    check_blocks_fit(found, cpus_by_numa)
    reclaim = answer.entries.get(RECLAIM)
    if reclaim is None or POOL_ENTRY not in reclaim.entries:
        raise UnusableMessage(f"entries[{RECLAIM}] is missing; without it nobody knows where reclaimed pods run")
    parts = reclaim.entries[POOL_ENTRY].calculation_results_by_numas
    nodes = [numa for numa in parts if numa in cpus_by_numa] or [NOT_NUMA_BOUND]
    if NOT_NUMA_BOUND in parts:
        nodes.append(NOT_NUMA_BOUND)
    apart = _isolated_pools(answer.entries, pods_by_uid(pods))
    limits = _decode_quotas(answer.extra_entries)
    if away := sorted(set(limits).difference(cpus_by_numa, (NOT_NUMA_BOUND,))):
        raise UnusableMessage(
            f"extra_entries: {CGROUP_CONFIG} of NUMA node {away[0]}, the node has {sorted(cpus_by_numa)}"
        )
    sizes = (*_online_sizes(found, apart), *_reclaim_sizes(found, apart, pods_by_uid(pods), limits, nodes))
    headroom = _decode_headroom(answer.extra_entries)
    lent = float(sum(piece.cpus for piece in found if piece.owner.entry == RECLAIM))
    text = f"The advisor at the socket gives reclaimed pods {lent:g} CPUs in {len(sizes)} sizes of pools."
    before = lent if before_cores is None else before_cores
    return Advice(
        policy=REMOTE_POLICY,
        cpu=CpuAdvice(sizes=sizes, isolated=tuple(sorted(set(apart.values())))),
        requirement_cores=None,
        headroom=headroom,
        reclaimable_cores=min([lent, *([limits[NOT_NUMA_BOUND]] if NOT_NUMA_BOUND in limits else [])]),
        idle=False,
        action="shrink" if lent < before else "grow" if lent > before else "hold",
        reason=Reason(rule="remote_advice", text=text, inputs={"lent_cores": lent, "pools": len(sizes)}),
    )


def _isolated_pools(entries: Mapping[str, Any], pods: Mapping[str, Pod]) -> dict[str, str]:
    """Pools of pods that are kept apart, whatever they are called there, and the pod's key."""
    found: dict[str, str] = {}
    for uid, its in sorted(entries.items()):
        for container, info in sorted(its.entries.items()):
            pool, pod = info.owner_pool_name, pods.get(uid)
            if container == POOL_ENTRY or pod is None or not pool.startswith(ISOLATION_PREFIX.rstrip("-")):
                continue
            if found.setdefault(pool, pod.key) != pod.key:
                raise UnusableMessage(f"entries: {pool[:80]} is a pool of {found[pool]} and of {pod.key}")
    return found


def _local_pool_name(pool: str, numa: int, apart: Mapping[str, str]) -> str:
    """What our QRM calls that pool."""
    if pool not in apart:
        return pool
    return (
        f"{ISOLATION_PREFIX}{apart[pool]}" if numa == NOT_NUMA_BOUND else f"{ISOLATION_PREFIX}{apart[pool]}-NUMA{numa}"
    )


def _online_sizes(found: Iterable[Block], apart: Mapping[str, str]) -> list[PoolSize]:
    sizes: dict[tuple[str, int], int] = {}
    for piece in found:
        if piece.owner.container == POOL_ENTRY and piece.owner.entry not in (_UNSIZED_POOLS | {RECLAIM}):
            if piece.pool != piece.owner.entry:
                raise UnusableMessage(f"entries[{piece.owner.entry[:80]}].owner_pool_name is {piece.pool!r:.80}")
            key = (_local_pool_name(piece.owner.entry, piece.numa, apart), piece.numa)
            sizes[key] = sizes.get(key, 0) + piece.cpus
    return [PoolSize(pool=pool, numa=numa, cpus=cpus) for (pool, numa), cpus in sorted(sizes.items())]


def _reclaim_sizes(
    found: Sequence[Block],
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
            lenders.setdefault(piece.id, _local_pool_name(entry, piece.numa, apart))
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


def _decode_quotas(extras: Iterable[Any]) -> dict[int, float]:
    """Cores that cgroups above reclaimed pods are limited to, by NUMA node; those without a limit are left out."""
    found: dict[int, float] = {}
    for index, info in enumerate(extras):
        text = info.calculation_result.values.get(CGROUP_CONFIG)
        if text is None:
            continue
        field = f"extra_entries[{index}] {CGROUP_CONFIG}"
        try:
            quota = msgspec.json.decode(text, type=CgroupQuota)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise UnusableMessage(f"{field}: {text!r:.80} ({error})") from None
        if quota.cpu_quota > 0:
            if not 0 < quota.cpu_period <= 1_000_000:
                raise UnusableMessage(f"{field}: cpu_period is {quota.cpu_period}; it is from 1 to 1000000 us")
            match = _NUMA_SUFFIX.fullmatch(info.cgroup_path)
            found[int(match[1]) if match else NOT_NUMA_BOUND] = quota.cpu_quota / quota.cpu_period
    return found


def _decode_headroom(extras: Iterable[Any]) -> Headroom | None:
    for index, info in enumerate(extras):
        text = info.calculation_result.values.get(CPU_NUMA_HEADROOM)
        if text is not None:
            cores = parse_numbers_by_numa(text, f"extra_entries[{index}] {CPU_NUMA_HEADROOM}")
            total = sum(cores.values())
            verdict = Reason(rule="remote_headroom", text=f"The advisor at the socket promises {total:g} cores.")
            return Headroom(cores=total, cores_by_numa=cores, reason=verdict)
    return None
