"""Encodes CPU advice for a stock CPU plugin, and decodes the advice of a stock CPU advisor. Pure.
A block is a number of CPUs without their ids; blocks with the same id are the same CPUs. An answer is decoded or
rejected as a whole. Dedicated containers and `reserve` keep the CPUs that the plugin has selected.
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
from api.text import quote


class BlockOwner(NamedTuple):
    """A container of a pod, or a pool, whose container name is empty."""

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
    """Builds the entries of an answer."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self._holders: dict[str, list[tuple[BlockOwner, Any]]] = {}

    def owner(self, owner: BlockOwner, pool: str) -> Any:
        """Return the entry of an owner, created if necessary."""
        entry = self.entries.setdefault(owner.entry, cpu.CalculationEntries())
        info = entry.entries[owner.container]
        info.owner_pool_name = pool
        return info

    def on(self, owner: BlockOwner, pool: str, numa: int) -> Any:
        """Return the owner's part of a NUMA node, created if necessary; it may have no block."""
        part = self.owner(owner, pool).calculation_results_by_numas[numa]
        part.SetInParent()
        return part

    def add(self, owner: BlockOwner, pool: str, numa: int, name: str, cpus: int) -> None:
        """Add a block, which is shared by all owners of a block with the same name. Zero CPUs add nothing."""
        if cpus <= 0:
            return
        block = self.on(owner, pool, numa).blocks.add(result=cpus, block_id=name)
        for other, other_block in self._holders.setdefault(name, []):
            other_block.overlap_targets.append(_overlap_target(owner))
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
    """Return all blocks of an answer in the order of their owners.

    Raises UnusableMessage for a block without id, with two sizes, on two NUMA nodes, or with more CPUs than a machine can have.
    """
    if len(entries) > MAX_ENTRIES:
        raise UnusableMessage(f"entries has {len(entries)} items; at most {MAX_ENTRIES} are allowed")
    blocks = tuple(_iter_blocks(entries))
    by_id: dict[str, Block] = {}
    for piece in blocks:
        first = by_id.setdefault(piece.id, piece)
        if first.numa != piece.numa:
            raise UnusableMessage(f"{_field_name(piece)}: block {piece.id[:80]} is also on NUMA node {first.numa}")
        if first.cpus != piece.cpus:
            raise UnusableMessage(
                f"{_field_name(piece)}: block {piece.id[:80]} has {piece.cpus} CPUs here and {first.cpus} elsewhere"
            )
    return blocks


def block_cpus_by_numa(blocks: Iterable[Block]) -> dict[int, int]:
    """Return the CPUs of the blocks by NUMA node; shared blocks count once."""
    by_id = {piece.id: piece for piece in blocks}
    result: dict[int, int] = {}
    for piece in by_id.values():
        result[piece.numa] = result.get(piece.numa, 0) + piece.cpus
    return result


def check_blocks_fit(blocks: Iterable[Block], cpus_by_numa: Mapping[int, int]) -> None:
    """Check that the blocks fit on the node. Raises UnusableMessage for unknown NUMA nodes and too many CPUs."""
    total = block_cpus_by_numa(blocks)
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
    for entry, containers in sorted(entries.items()):
        for container, info in sorted(containers.entries.items()):
            for numa, part in sorted(info.calculation_results_by_numas.items()):
                for block in part.blocks:
                    piece = Block(
                        BlockOwner(entry, container), info.owner_pool_name, numa, block.block_id, block.result
                    )
                    if not piece.id:
                        raise UnusableMessage(f"{_field_name(piece)}: a block has no block_id")
                    if piece.cpus > MAX_CPU + 1 or numa < NOT_NUMA_BOUND:
                        raise UnusableMessage(
                            f"{_field_name(piece)}: {piece.cpus} CPUs on NUMA node {numa} are impossible"
                        )
                    yield piece


def _field_name(piece: Block) -> str:
    container = f".entries[{piece.owner.container[:80]}]" if piece.owner.container else ""
    return f"entries[{piece.owner.entry[:80]}]{container}"


PERIOD_US = 100_000
_SUPPORTED_GATES = frozenset((QUOTA_GATE,))
_SHARED_SUFFIX = "/lent"
"""Suffix of the ids of blocks shared with reclaimed pods."""


class CpuAdviceInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Advice of the latest cycle, and the node that it is for."""

    sizes: tuple[PoolSize, ...]
    pods: tuple[Pod, ...]
    """Pods with their NUMA bindings."""
    cpus_by_numa: Mapping[int, int]
    """Number of online CPUs by NUMA node, including reserved ones."""
    headroom: Headroom | None = None
    reclaim_root: str = "/kubepods/besteffort"
    """Cgroup above reclaimed pods; that of NUMA node 0 is `ROOT-0`."""


def encode_cpu_advice(request: Any, inputs: CpuAdviceInputs) -> Any:
    """Return the GetAdviceResponse to a GetAdviceRequest.

    Raises UnusableMessage for an inconsistent request, and if the plugin's allocations do not fit on the node.
    """
    supported = supported_gates(request.wanted_feature_gates, "CPU", _SUPPORTED_GATES)
    entries, pods = BlockEntries(), pods_by_uid(inputs.pods)
    fixed = {pool: _plugin_pool_cpus(request, pool, entries) for pool in (RESERVE, INTERRUPT)}
    usable = {
        numa: cpus - sum(counts.get(numa, 0) for counts in fixed.values()) for numa, cpus in inputs.cpus_by_numa.items()
    }
    dedicated = _add_dedicated(request, entries, pods, shared_cpus_of(inputs.sizes))
    layout = fit_plugin_layout(inputs.sizes, usable, dedicated)
    for size in layout.online:
        shared = min(layout.shared.get((size.pool, size.numa), 0), size.cpus)
        entries.on(BlockOwner(size.pool), size.pool, size.numa)
        entries.add(BlockOwner(size.pool), size.pool, size.numa, f"{size.pool}/{size.numa}{_SHARED_SUFFIX}", shared)
        entries.add(BlockOwner(size.pool), size.pool, size.numa, f"{size.pool}/{size.numa}", size.cpus - shared)
    _add_reclaim(entries, layout.reclaim)
    _add_containers(request, entries, pods)
    result = cpu.GetAdviceResponse(
        entries=entries.entries,
        allow_shared_cores_overlap_reclaimed_cores=any(
            not pool.startswith(f"{DEDICATED}-") for pool, _numa in layout.shared
        ),
        extra_entries=[*_encode_quotas(inputs, quotas=QUOTA_GATE in supported), *_encode_headroom(inputs.headroom)],
        supported_feature_gates=supported,
    )
    check_blocks_fit(parse_blocks(result.entries), inputs.cpus_by_numa)
    return result


def _plugin_pool_cpus(request: Any, pool: str, entries: BlockEntries) -> dict[int, int]:
    """Add a pool whose CPUs the plugin selects itself, and return its number of CPUs by NUMA node."""
    containers = request.entries.get(pool)
    if containers is None or POOL_ENTRY not in containers.entries:
        return {}
    counts = cpu_plugin_state.count_cpus_by_numa(containers.entries[POOL_ENTRY].allocation_info, f"entries[{pool}]")
    entries.owner(BlockOwner(pool), pool)
    if pool == RESERVE:
        # Katalyst's plugin requires exactly one block of `reserve`, even without CPUs.
        entries.on(BlockOwner(pool), pool, NOT_NUMA_BOUND).blocks.add(result=sum(counts.values()), block_id=pool)
    return counts


def _add_dedicated(
    request: Any, entries: BlockEntries, pods: Mapping[str, Pod], shared_cpus: SharedCpus
) -> dict[int, int]:
    """Add blocks of dedicated containers with the sizes of the plugin; return their CPUs by NUMA node.

    CPUs shared with reclaimed pods form a separate block of the pod's main container and the sidecars on the same CPUs.
    """
    dedicated: dict[int, int] = {}
    for uid, containers in sorted(request.entries.items()):
        key = f"{DEDICATED}-{pods[uid].key}" if uid in pods else ""
        mains: dict[int, int] = {}
        order = sorted(
            containers.entries.items(), key=lambda item: (item[1].metadata.container_type == plugin.SIDECAR, item[0])
        )
        for name, item in order:
            if name == POOL_ENTRY or item.allocation_info.owner_pool_name != DEDICATED:
                continue
            owner, field = BlockOwner(uid, name), f"entries[{uid[:80]}].entries[{name[:80]}]"
            entries.owner(owner, DEDICATED)
            for numa, cpus in cpu_plugin_state.count_cpus_by_numa(item.allocation_info, field).items():
                first = numa not in mains
                alone = mains.setdefault(numa, cpus) != cpus
                shared = 0 if alone else min(shared_cpus.get((key, numa), 0), cpus)
                block = f"{uid}/{name}/{numa}" if alone else f"{uid}/{numa}"
                entries.on(owner, DEDICATED, numa)
                entries.add(owner, DEDICATED, numa, f"{block}{_SHARED_SUFFIX}", shared)
                entries.add(owner, DEDICATED, numa, block, cpus - shared)
                if first or alone:
                    dedicated[numa] = dedicated.get(numa, 0) + cpus
    return dedicated


def _add_reclaim(entries: BlockEntries, sizes: Sequence[PoolSize]) -> None:
    """Add the reclaim pool, which must exist: its own blocks, and every shared block."""
    owner = BlockOwner(RECLAIM)
    shared = {piece.id: piece for piece in parse_blocks(entries.entries) if piece.id.endswith(_SHARED_SUFFIX)}
    entries.owner(owner, RECLAIM)
    for size in sizes:
        entries.on(owner, RECLAIM, size.numa)
        entries.add(owner, RECLAIM, size.numa, f"{RECLAIM}/{size.numa}", size.cpus)
    for piece in shared.values():
        entries.add(owner, RECLAIM, piece.numa, piece.id, piece.cpus)


def _add_containers(request: Any, entries: BlockEntries, pods: Mapping[str, Pod]) -> None:
    """Add the pool of every container that is not dedicated. Containers of missing pools wait for the next answer."""
    for uid, containers in request.entries.items():
        for name, item in containers.entries.items():
            if name == POOL_ENTRY or item.allocation_info.owner_pool_name == DEDICATED:
                continue
            pool = _pool_of(item, pods.get(uid), entries)
            if pool in entries.entries or item.metadata.qos_level == QoSLevel.SYSTEM:
                entries.owner(BlockOwner(uid, name), pool)


def _pool_of(item: Any, pod: Pod | None, entries: BlockEntries) -> str:
    metadata = item.metadata
    if metadata.qos_level == QoSLevel.RECLAIMED:
        return RECLAIM
    if metadata.qos_level == QoSLevel.SYSTEM:
        return str(item.allocation_info.owner_pool_name)
    bound = cpu_plugin_state.bound_nodes_of(item)
    if pod is not None and pod.qos is QoSLevel.SHARED:
        isolated = f"{ISOLATION_PREFIX}{pod.key}"
        names = (f"{isolated}-NUMA{bound[0]}" if bound else isolated, isolated, pool_name_of(pod, bound))
        return next((name for name in names if name in entries.entries), names[-1])
    name = metadata.annotations.get("cpuset_pool", "")
    name = "share" if not name or name.startswith((ISOLATION_PREFIX, SYSTEM_PREFIX, DEDICATED)) else name
    return f"{name}-NUMA{bound[0]}" if bound else name


def _encode_quotas(inputs: CpuAdviceInputs, *, quotas: bool) -> list[Any]:
    """Return CPU quotas of the cgroups above reclaimed pods; -1 means no limit."""
    extras = []
    for size in sorted(inputs.sizes, key=lambda size: size.numa):
        if size.pool == RECLAIM:
            limited = quotas and size.quota_cores is not None and size.quota_cores > 0
            value = int((size.quota_cores or 0.0) * PERIOD_US) if limited else -1
            path = inputs.reclaim_root if size.numa == NOT_NUMA_BOUND else f"{inputs.reclaim_root}-{size.numa}"
            text = msgspec.json.encode({"cpu_quota": value, "cpu_period": PERIOD_US}).decode()
            extras.append(extra_entry(path, {CGROUP_CONFIG: text}))
    return extras


def _encode_headroom(headroom: Headroom | None) -> list[Any]:
    if headroom is None or not headroom.cores_by_numa:
        return []
    return [extra_entry("", {CPU_NUMA_HEADROOM: format_numbers_by_numa(headroom.cores_by_numa)})]


REMOTE_POLICY = "katalyst"
"""Policy name of advice from a foreign advisor."""
_NUMA_SUFFIX = re.compile(r".+-(\d{1,4})", re.ASCII)
_UNSIZED_POOLS = frozenset((RESERVE, INTERRUPT, DEDICATED, FALLBACK, ""))


class CgroupQuota(msgspec.Struct, frozen=True):
    """Value of `cgroup_config` in microseconds."""

    cpu_quota: int = -1
    cpu_period: int = 0


def decode_cpu_advice(
    answer: Any, pods: Sequence[Pod], cpus_by_numa: Mapping[int, int], before_cores: float | None
) -> Advice:
    """Decode a GetAdviceResponse or ListAndWatchResponse. `before_cores` are the reclaimable cores of the advice before.

    Raises UnusableMessage.
    """
    blocks = parse_blocks(answer.entries)
    check_blocks_fit(blocks, cpus_by_numa)
    reclaim = answer.entries.get(RECLAIM)
    if reclaim is None or POOL_ENTRY not in reclaim.entries:
        raise UnusableMessage(f"entries[{RECLAIM}] is missing; without it reclaimed pods have no CPUs")
    parts = reclaim.entries[POOL_ENTRY].calculation_results_by_numas
    nodes = [numa for numa in parts if numa in cpus_by_numa] or [NOT_NUMA_BOUND]
    if NOT_NUMA_BOUND in parts:
        nodes.append(NOT_NUMA_BOUND)
    isolated = _isolated_pools(answer.entries, pods_by_uid(pods))
    limits = _decode_quotas(answer.extra_entries)
    if away := sorted(set(limits).difference(cpus_by_numa, (NOT_NUMA_BOUND,))):
        raise UnusableMessage(
            f"extra_entries: {CGROUP_CONFIG} of NUMA node {away[0]}, the node has {sorted(cpus_by_numa)}"
        )
    sizes = (*_online_sizes(blocks, isolated), *_reclaim_sizes(blocks, isolated, pods_by_uid(pods), limits, nodes))
    headroom = _decode_headroom(answer.extra_entries)
    cores = float(sum(piece.cpus for piece in blocks if piece.owner.entry == RECLAIM))
    text = f"The external CPU advisor assigns {cores:g} CPUs to reclaimed pods, in {len(sizes)} pool sizes."
    before = cores if before_cores is None else before_cores
    return Advice(
        policy=REMOTE_POLICY,
        cpu=CpuAdvice(sizes=sizes, isolated=tuple(sorted(set(isolated.values())))),
        requirement_cores=None,
        headroom=headroom,
        reclaimable_cores=min([cores, *([limits[NOT_NUMA_BOUND]] if NOT_NUMA_BOUND in limits else [])]),
        idle=False,
        action="shrink" if cores < before else "grow" if cores > before else "hold",
        reason=Reason(rule="remote_advice", text=text, inputs={"lent_cores": cores, "pools": len(sizes)}),
    )


def _isolated_pools(entries: Mapping[str, Any], pods: Mapping[str, Pod]) -> dict[str, str]:
    """Return the pools of isolated pods, which the advisor names as it likes, with the keys of the pods."""
    pools: dict[str, str] = {}
    for uid, containers in sorted(entries.items()):
        for container, info in sorted(containers.entries.items()):
            pool, pod = info.owner_pool_name, pods.get(uid)
            if container == POOL_ENTRY or pod is None or not pool.startswith(ISOLATION_PREFIX.rstrip("-")):
                continue
            if pools.setdefault(pool, pod.key) != pod.key:
                raise UnusableMessage(f"entries: {pool[:80]} is the pool of both {pools[pool]} and {pod.key}")
    return pools


def _local_pool_name(pool: str, numa: int, isolated: Mapping[str, str]) -> str:
    """Return the name of the advisor's pool in CpusetState."""
    if pool not in isolated:
        return pool
    name = f"{ISOLATION_PREFIX}{isolated[pool]}"
    return name if numa == NOT_NUMA_BOUND else f"{name}-NUMA{numa}"


def _online_sizes(blocks: Iterable[Block], isolated: Mapping[str, str]) -> list[PoolSize]:
    sizes: dict[tuple[str, int], int] = {}
    for piece in blocks:
        if piece.owner.container == POOL_ENTRY and piece.owner.entry not in (_UNSIZED_POOLS | {RECLAIM}):
            if piece.pool != piece.owner.entry:
                raise UnusableMessage(f"entries[{piece.owner.entry[:80]}].owner_pool_name is {quote(piece.pool)}")
            key = (_local_pool_name(piece.owner.entry, piece.numa, isolated), piece.numa)
            sizes[key] = sizes.get(key, 0) + piece.cpus
    return [PoolSize(pool=pool, numa=numa, cpus=cpus) for (pool, numa), cpus in sorted(sizes.items())]


def _reclaim_sizes(
    blocks: Sequence[Block],
    isolated: Mapping[str, str],
    pods: Mapping[str, Pod],
    limits: Mapping[int, float],
    nodes: Iterable[int],
) -> list[PoolSize]:
    """Return the sizes of reclaim; blocks without another owner are its own, the others are shared."""
    owners: dict[str, str] = {}
    for piece in blocks:
        entry = piece.owner.entry
        if entry == RECLAIM:
            continue
        if piece.owner.container == POOL_ENTRY:
            owners.setdefault(piece.id, _local_pool_name(entry, piece.numa, isolated))
        elif entry in pods:
            owners.setdefault(piece.id, f"{DEDICATED}-{pods[entry].key}")
        else:
            owners.setdefault(piece.id, "")  # CPUs shared by an unlisted pod are not usable.
    own = dict.fromkeys({*limits, *nodes}, 0)
    shared: dict[int, dict[str, int]] = {}
    for piece in blocks:
        if piece.owner.entry == RECLAIM:
            pool = owners.get(piece.id)
            if pool is None:
                own[piece.numa] += piece.cpus
            elif pool:
                overlap = shared.setdefault(piece.numa, {})
                overlap[pool] = overlap.get(pool, 0) + piece.cpus
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
    """Return the CPU limits of cgroups above reclaimed pods in cores, by NUMA node; unlimited ones are left out."""
    limits: dict[int, float] = {}
    for index, info in enumerate(extras):
        text = info.calculation_result.values.get(CGROUP_CONFIG)
        if text is None:
            continue
        field = f"extra_entries[{index}] {CGROUP_CONFIG}"
        try:
            quota = msgspec.json.decode(text, type=CgroupQuota)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise UnusableMessage(f"{field}: {quote(text)} ({error})") from None
        if quota.cpu_quota > 0:
            if not 0 < quota.cpu_period <= 1_000_000:
                raise UnusableMessage(f"{field}: cpu_period is {quota.cpu_period}; it must be 1 to 1000000 us")
            match = _NUMA_SUFFIX.fullmatch(info.cgroup_path)
            limits[int(match[1]) if match else NOT_NUMA_BOUND] = quota.cpu_quota / quota.cpu_period
    return limits


def _decode_headroom(extras: Iterable[Any]) -> Headroom | None:
    for index, info in enumerate(extras):
        text = info.calculation_result.values.get(CPU_NUMA_HEADROOM)
        if text is not None:
            cores = parse_numbers_by_numa(text, f"extra_entries[{index}] {CPU_NUMA_HEADROOM}")
            total = sum(cores.values())
            reason = Reason(
                rule="remote_headroom", text=f"The external CPU advisor reports a headroom of {total:g} cores."
            )
            return Headroom(cores=total, cores_by_numa=cores, reason=reason)
    return None
