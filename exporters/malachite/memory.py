"""Makes `system/memory`: memory of the node and of each NUMA node, and fragmentation. Pure. Sizes are in KiB."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

from api.cpu import format_cpu_list
from api.snapshot import MemoryZone, NodeSample, NumaNode, Snapshot
from api.units import KIB
from exporters.malachite.history import MalachiteHistory, node_read_at_ns
from exporters.malachite.wire import MalachiteStruct, NumberList, finite, in_unit, is_identifier, u64, unix_seconds

PAGE_BYTES = mmap.PAGESIZE
COSTLY_ORDER = 3
"""PAGE_ALLOC_COSTLY_ORDER, 32 KiB: for larger blocks the kernel does not retry reclaim without a limit."""


class SystemMemorySizes(MalachiteStruct, frozen=True):
    """Memory of the node in KiB; `vmstat_*` are counters, `mem_sock_*` are pages, `mem_util` is percent."""

    mem_total: int | None = None
    mem_free: int | None = None
    mem_used: int | None = None
    mem_util: float | None = None
    mem_shm: int | None = None
    mem_available: int | None = None
    mem_buffers: int | None = None
    mem_page_cache: int | None = None
    mem_slab_reclaimable: int | None = None
    mem_dirty_page_cache: int | None = None
    mem_write_back_page_cache: int | None = None
    mem_swap_total: int | None = None
    mem_swap_free: int | None = None
    mem_active_anon: int | None = None
    mem_inactive_anon: int | None = None
    mem_active_file: int | None = None
    mem_inactive_file: int | None = None
    vm_watermark_scale_factor: int | None = None
    vmstat_pgsteal_kswapd: int | None = None
    vmstat_pgsteal_direct: int | None = None
    vmstat_pgscan_kswapd: int | None = None
    vmstat_pgscan_direct: int | None = None
    vmstat_compact_stall: int | None = None
    mem_sock_tcp: int | None = None
    mem_sock_tcp_limit: int | None = None
    mem_sock_udp: int | None = None
    mem_sock_udp_limit: int | None = None


class NumaMemorySizes(MalachiteStruct, frozen=True):
    """Memory of one NUMA node in KiB. Bandwidths and latencies need counters of the memory controller and are left out."""

    id: int
    path: str
    cpu_list: NumberList
    mem_total: int | None = None
    mem_used: int | None = None
    mem_free: int | None = None
    mem_shmem: int | None = None
    mem_available: int | None = None
    mem_file_pages: int | None = None
    mem_active_anon: int | None = None
    mem_inactive_anon: int | None = None
    mem_active_file: int | None = None
    mem_inactive_file: int | None = None


class OrderScore(MalachiteStruct, frozen=True):
    """Percentage of free memory in blocks smaller than 2^order pages."""

    order: int
    score: int


class Fragmentation(MalachiteStruct, frozen=True, kw_only=True):
    """Fragmentation of a NUMA node: the mean score of orders above COSTLY_ORDER. The client compacts from 60 to 95 on."""

    id: int
    mem_frag_score: int | None = None
    mem_order_scores: tuple[OrderScore, ...]


class MemoryDocument(MalachiteStruct, frozen=True):
    """The document `system/memory`."""

    system: SystemMemorySizes
    numa: tuple[NumaMemorySizes, ...]
    extfrag: tuple[Fragmentation, ...]
    update_time: int | None = None


def memory_document(now: Snapshot, _history: MalachiteHistory) -> MemoryDocument:
    """Return memory of the node and of each NUMA node."""
    node = now.node
    return MemoryDocument(
        system=_system(node),
        numa=tuple(_numa(number, of, node.zones) for number, of in sorted(_numa_nodes(now).items())),
        extfrag=tuple(
            _fragmentation(number, free) for number, free in sorted(node.free_blocks.items()) if is_identifier(number)
        ),
        update_time=unix_seconds(node_read_at_ns(now)),
    )


def _system(node: NodeSample) -> SystemMemorySizes:
    sizes, events = node.meminfo, node.vmstat
    kib = {name: in_unit(value, KIB) for name, value in sizes.items()}
    used = _used(sizes)
    total = sizes.get("MemTotal")
    return SystemMemorySizes(
        mem_total=kib.get("MemTotal"),
        mem_free=kib.get("MemFree"),
        mem_used=in_unit(used, KIB),
        mem_util=finite(100 * used / total) if used is not None and total else None,
        mem_shm=kib.get("Shmem"),
        mem_available=kib.get("MemAvailable"),
        mem_buffers=kib.get("Buffers"),
        mem_page_cache=kib.get("Cached"),
        mem_slab_reclaimable=kib.get("SReclaimable"),
        mem_dirty_page_cache=kib.get("Dirty"),
        mem_write_back_page_cache=kib.get("Writeback"),
        mem_swap_total=kib.get("SwapTotal"),
        mem_swap_free=kib.get("SwapFree"),
        mem_active_anon=kib.get("Active(anon)"),
        mem_inactive_anon=kib.get("Inactive(anon)"),
        mem_active_file=kib.get("Active(file)"),
        mem_inactive_file=kib.get("Inactive(file)"),
        vm_watermark_scale_factor=u64(node.sysctl.get("vm.watermark_scale_factor")),
        vmstat_pgsteal_kswapd=u64(events.get("pgsteal_kswapd")),
        vmstat_pgsteal_direct=u64(events.get("pgsteal_direct")),
        vmstat_pgscan_kswapd=u64(events.get("pgscan_kswapd")),
        vmstat_pgscan_direct=u64(events.get("pgscan_direct")),
        vmstat_compact_stall=u64(events.get("compact_stall")),
        mem_sock_tcp=u64(node.netstat.get("sockstat.TCP.mem")),
        mem_sock_tcp_limit=u64(node.sysctl.get("net.ipv4.tcp_mem.max")),
        mem_sock_udp=u64(node.netstat.get("sockstat.UDP.mem")),
        mem_sock_udp_limit=u64(node.sysctl.get("net.ipv4.udp_mem.max")),
    )


def _used(sizes: Mapping[str, int]) -> int | None:
    # The client reports this as the usage of the node, so it excludes memory that can be freed at once, as in free(1).
    if "MemTotal" not in sizes or "MemFree" not in sizes:
        return None
    spare = sum(sizes.get(name, 0) for name in ("MemFree", "Buffers", "Cached", "SReclaimable"))
    return max(sizes["MemTotal"] - spare, 0)


def _numa_nodes(now: Snapshot) -> Mapping[int, NumaNode]:
    """Return NUMA nodes with their CPUs; a kernel built without NUMA has one, with all memory.

    The client maps CPUs to NUMA nodes by the first response only, so CPUs are always listed.
    """
    by_topology = {n: tuple(cpu.id for cpu in now.topology.cpus if cpu.numa == n) for n in now.topology.numa_nodes}
    if now.node.numa:
        return {
            number: of if of.cpus else NumaNode(cpus=by_topology.get(number, ()), meminfo=of.meminfo)
            for number, of in now.node.numa.items()
            if is_identifier(number)
        }
    node_meminfo = now.node.meminfo if len(by_topology) == 1 else {}
    return {
        number: NumaNode(cpus=cpus, meminfo=node_meminfo)
        for number, cpus in by_topology.items()
        if is_identifier(number)
    }


def _numa(number: int, of: NumaNode, zones: tuple[MemoryZone, ...]) -> NumaMemorySizes:
    sizes = of.meminfo
    kib = {name: in_unit(value, KIB) for name, value in sizes.items()}
    used, files = sizes.get("MemUsed"), sizes.get("FilePages")
    if used is None and "MemTotal" in sizes and "MemFree" in sizes:
        used = sizes["MemTotal"] - sizes["MemFree"]
    if files is None and "Cached" in sizes:
        files = sizes["Cached"] + sizes.get("Buffers", 0)
    cpus = tuple(cpu for cpu in of.cpus if is_identifier(cpu))
    return NumaMemorySizes(
        id=number,
        path=f"/sys/devices/system/node/node{number}",
        cpu_list=NumberList(meta=format_cpu_list(cpus), inner=cpus),
        mem_total=kib.get("MemTotal"),
        mem_used=in_unit(used, KIB),
        mem_free=kib.get("MemFree"),
        mem_shmem=kib.get("Shmem"),
        mem_available=kib.get("MemAvailable")
        or in_unit(_available(sizes, [z for z in zones if z.node == number]), KIB),
        mem_file_pages=in_unit(files, KIB),
        mem_active_anon=kib.get("Active(anon)"),
        mem_inactive_anon=kib.get("Inactive(anon)"),
        mem_active_file=kib.get("Active(file)"),
        mem_inactive_file=kib.get("Inactive(file)"),
    )


def _available(sizes: Mapping[str, int], zones: list[MemoryZone]) -> int | None:
    """Return the bytes of a NUMA node that are available without swapping, by the kernel's estimate for a machine.

    si_mem_available() in mm/show_mem.c: free memory above the reserve, and the part of page cache and of reclaimable slab
    that exceeds the low watermark or half of it.
    """
    if "MemFree" not in sizes:
        return None
    low = PAGE_BYTES * sum(zone.low for zone in zones)
    reserved = PAGE_BYTES * sum(zone.high for zone in zones)
    cache = sizes.get("Active(file)", 0) + sizes.get("Inactive(file)", 0)
    slab = sizes.get("KReclaimable", sizes.get("SReclaimable", 0))
    spare = cache - min(cache // 2, low) + slab - min(slab // 2, low)
    return max(sizes["MemFree"] - reserved + spare, 0)


def _fragmentation(number: int, free: Mapping[int, int]) -> Fragmentation:
    scores = {
        order: score
        for order in sorted(free)
        if 0 <= order < 64 and (score := unusable_free_percent(free, order)) is not None
    }
    hard = [score for order, score in scores.items() if order > COSTLY_ORDER]
    return Fragmentation(
        id=number,
        mem_frag_score=sum(hard) // len(hard) if hard else None,
        mem_order_scores=tuple(OrderScore(order=order, score=score) for order, score in scores.items()),
    )


def unusable_free_percent(free: Mapping[int, int], order: int) -> int | None:
    """Return the percentage of free memory in blocks that are too small for this order, over all zones.

    As unusable_free_index() of mm/vmstat.c.
    """
    pages = {of: max(count, 0) << of for of, count in free.items() if 0 <= of < 64}
    total = sum(pages.values())
    if not total:
        return None
    return 100 * sum(amount for of, amount in pages.items() if of < order) // total
