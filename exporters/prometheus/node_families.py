"""Turns the facts of the node into metric families. Pure; names in labels are the kernel's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from mmap import PAGESIZE

from api.snapshot import (
    CgroupSample,
    CpuTimes,
    Disk,
    Interface,
    Kswapd,
    L3Monitor,
    Machine,
    NodeSample,
    Pressure,
    Snapshot,
)
from api.units import NS_PER_S, US_PER_S
from exporters.prometheus.metric_family import Labels, MetricFamily, MetricNumber, point_family

NodeSamples = Iterable[tuple[Labels, MetricNumber | None]]
UJ_PER_J = 1_000_000
HZ_PER_KHZ = 1000
FRAGMENTATION_SCALE = 1000
MAX_INTERFACES = 128
"""Number of interfaces with series, in the kernel's order: a node has one per pod."""
MEMINFO = (
    "MemFree", "Buffers", "Cached", "SwapCached", "Active(anon)", "Inactive(anon)", "Active(file)", "Inactive(file)",
    "Unevictable", "SwapTotal", "SwapFree", "Dirty", "Writeback", "AnonPages", "Mapped", "Shmem", "SReclaimable",
    "SUnreclaim", "KernelStack", "PageTables", "Percpu", "AnonHugePages", "CommitLimit", "Committed_AS",
)  # fmt: skip
NUMA_MEMINFO = (
    "MemTotal", "MemFree", "MemUsed", "FilePages", "AnonPages", "Mapped", "Shmem", "Dirty", "Writeback", "SReclaimable",
    "SUnreclaim", "Active(anon)", "Inactive(anon)", "Active(file)", "Inactive(file)",
)  # fmt: skip
VM_EVENTS = (
    "pgfault", "pgmajfault", "pswpin", "pswpout", "pgscan_kswapd", "pgscan_direct", "pgsteal_kswapd", "pgsteal_direct",
    "allocstall_dma32", "allocstall_normal", "allocstall_movable", "pageoutrun", "kswapd_low_wmark_hit_quickly",
    "kswapd_high_wmark_hit_quickly", "workingset_refault_anon", "workingset_refault_file", "workingset_activate_anon",
    "workingset_activate_file", "workingset_restore_anon", "workingset_restore_file", "oom_kill", "compact_stall",
    "compact_success", "compact_fail", "thp_fault_alloc", "thp_fault_fallback", "thp_collapse_alloc", "numa_hit",
    "numa_miss", "numa_foreign", "numa_hint_faults", "numa_pages_migrated", "pgmigrate_success", "pgmigrate_fail",
)  # fmt: skip
NETWORK_EVENTS = (
    "Ip.InReceives", "Ip.OutRequests", "Ip.InDiscards", "Ip.OutDiscards", "Tcp.InSegs", "Tcp.OutSegs", "Tcp.RetransSegs",
    "Tcp.InErrs", "Tcp.OutRsts", "Tcp.ActiveOpens", "Tcp.PassiveOpens", "Tcp.AttemptFails", "Tcp.EstabResets",
    "TcpExt.ListenOverflows", "TcpExt.ListenDrops", "TcpExt.TCPTimeouts", "TcpExt.TCPLostRetransmit",
    "TcpExt.TCPSynRetrans", "TcpExt.TCPBacklogDrop", "TcpExt.TCPAbortOnMemory", "TcpExt.PruneCalled",
    "Udp.InDatagrams", "Udp.OutDatagrams", "Udp.InErrors", "Udp.NoPorts", "Udp.RcvbufErrors", "Udp.SndbufErrors",
)  # fmt: skip


def node_families(snapshot: Snapshot) -> Iterator[MetricFamily]:
    """Yield every family of the node; those without a number are empty."""
    yield point_family("dioptase_node_cpus", [((), len(snapshot.topology.cpus))])
    for name, fact in NODE_FACTS:
        yield point_family(name, fact(snapshot.node))


def stalled_seconds(sample: NodeSample | CgroupSample) -> Iterator[tuple[Labels, float | None]]:
    """Yield stall time by resource and kind."""
    pressures: tuple[tuple[str, Pressure | None], ...] = (
        ("cpu", sample.cpu_pressure),
        ("memory", sample.memory_pressure),
        ("io", sample.io_pressure),
    )
    for resource, pressure in pressures:
        if pressure is not None:
            yield (resource, "some"), pressure.some_us / US_PER_S
            yield (resource, "full"), None if pressure.full_us is None else pressure.full_us / US_PER_S


def _machine(machine: Machine) -> NodeSamples:
    if machine.codename or machine.is_vm is not None:
        yield (machine.codename, {True: "1", False: "0", None: ""}[machine.is_vm]), 1


def _cpu_modes(of: Labels, times: CpuTimes) -> NodeSamples:
    for field in times.__struct_fields__:
        yield (*of, field.removesuffix("_ns")), getattr(times, field) / NS_PER_S


def _named_values(of: Labels, names: tuple[str, ...], values: Mapping[str, int]) -> NodeSamples:
    return (((*of, name), values.get(name)) for name in names)


def _kswapd(node: NodeSample, value: Callable[[Kswapd], MetricNumber]) -> NodeSamples:
    return (((str(numa),), value(kswapd)) for numa, kswapd in node.kswapd.items())


def _l3(node: NodeSample, value: Callable[[L3Monitor], MetricNumber | None]) -> NodeSamples:
    # Only control groups, because they include their monitoring groups and a sum would count these twice.
    return (
        ((str(monitor.id), monitor.group), value(monitor)) for monitor in node.l3 if not monitor.is_monitoring_group
    )


def _disks(node: NodeSample, values: Callable[[Disk], tuple[MetricNumber, MetricNumber]]) -> NodeSamples:
    for name, disk in node.disks.items():
        read, written = values(disk)
        yield (name, "read"), read
        yield (name, "write"), written


def _interfaces(node: NodeSample, column: str) -> NodeSamples:
    def both(interface: Interface) -> tuple[tuple[str, int | None], ...]:
        return ("received", interface.received.get(column)), ("sent", interface.sent.get(column))

    return (
        ((name, direction), value)
        for name, interface in islice(node.interfaces.items(), MAX_INTERFACES)
        for direction, value in both(interface)
    )


NODE_FACTS: tuple[tuple[str, Callable[[NodeSample], NodeSamples]], ...] = (
    ("dioptase_node_info", lambda n: _machine(n.machine)),
    ("dioptase_node_cpu_seconds_total", lambda n: _cpu_modes((), n.cpu) if n.cpu else ()),
    ("dioptase_node_percpu_seconds_total", lambda n: (
        sample for cpu, times in n.per_cpu.items() for sample in _cpu_modes((str(cpu),), times))),
    ("dioptase_node_cpu_frequency_hertz", lambda n: (((str(cpu),), khz * HZ_PER_KHZ) for cpu, khz in n.cpu_khz.items())),
    ("dioptase_node_run_delay_seconds_total", lambda n: (
        ((str(cpu),), ns / NS_PER_S) for cpu, ns in n.run_delay_ns.items())),
    ("dioptase_node_softirq_seconds_total", lambda n: (
        ((str(cpu), vector), ns / NS_PER_S) for cpu, vectors in n.softirq_ns.items() for vector, ns in vectors.items())),
    ("dioptase_node_interrupts_total", lambda n: (((str(cpu),), count) for cpu, count in n.interrupts.items())),
    ("dioptase_node_load1", lambda n: [((), n.load[0] if n.load else None)]),
    ("dioptase_node_load5", lambda n: [((), n.load[1] if n.load else None)]),
    ("dioptase_node_load15", lambda n: [((), n.load[2] if n.load else None)]),
    ("dioptase_node_procs_running", lambda n: [((), n.procs_running)]),
    ("dioptase_node_procs_blocked", lambda n: [((), n.procs_blocked)]),
    ("dioptase_node_pressure_seconds_total", stalled_seconds),
    ("dioptase_node_energy_joules_total", lambda n: (((name,), uj / UJ_PER_J) for name, uj in n.power_uj.items())),
    ("dioptase_node_memory_total_bytes", lambda n: [((), n.memory_total_bytes)]),
    ("dioptase_node_memory_available_bytes", lambda n: [((), n.memory_available_bytes)]),
    ("dioptase_node_memory_bytes", lambda n: _named_values((), MEMINFO, n.meminfo)),
    ("dioptase_node_numa_memory_bytes", lambda n: (
        sample for node, numa in n.numa.items() for sample in _named_values((str(node),), NUMA_MEMINFO, numa.meminfo))),
    ("dioptase_node_zone_bytes", lambda n: (
        ((str(zone.node), zone.name, mark), getattr(zone, mark) * PAGESIZE)
        for zone in n.zones for mark in ("managed", "free", "min", "low", "high"))),
    ("dioptase_node_fragmentation_index", lambda n: (
        ((str(node), str(order)), index / FRAGMENTATION_SCALE)
        for node, orders in n.fragmentation.items() for order, index in orders.items())),
    ("dioptase_node_vm_events_total", lambda n: _named_values((), VM_EVENTS, n.vmstat)),
    ("dioptase_node_kswapd_wakeups_total", lambda n: _kswapd(n, lambda k: k.wakeups)),
    ("dioptase_node_kswapd_active_seconds_total", lambda n: _kswapd(n, lambda k: k.active_ns / NS_PER_S)),
    ("dioptase_node_kswapd_scanned_pages_total", lambda n: _kswapd(n, lambda k: k.scanned_pages)),
    ("dioptase_node_kswapd_reclaimed_pages_total", lambda n: _kswapd(n, lambda k: k.reclaimed_pages)),
    ("dioptase_node_oom_kill_timestamp_seconds", lambda n: (
        [((), n.oom_victims[-1].wall_time_ns / NS_PER_S)] if n.oom_victims else ())),
    ("dioptase_node_l3_occupancy_bytes", lambda n: _l3(n, lambda m: m.occupancy_bytes)),
    ("dioptase_node_l3_memory_bytes_total", lambda n: _l3(n, lambda m: m.total_bytes)),
    ("dioptase_node_l3_local_memory_bytes_total", lambda n: _l3(n, lambda m: m.local_bytes)),
    ("dioptase_node_disk_bytes_total", lambda n: _disks(n, lambda d: (d.read_bytes, d.write_bytes))),
    ("dioptase_node_disk_operations_total", lambda n: _disks(n, lambda d: (d.reads, d.writes))),
    ("dioptase_node_disk_operation_seconds_total", lambda n: _disks(
        n, lambda d: (d.read_ns / NS_PER_S, d.write_ns / NS_PER_S))),
    ("dioptase_node_disk_busy_seconds_total", lambda n: (
        ((name,), disk.busy_ns / NS_PER_S) for name, disk in n.disks.items())),
    ("dioptase_node_disk_in_flight", lambda n: (((name,), disk.in_flight) for name, disk in n.disks.items())),
    ("dioptase_node_filesystem_size_bytes", lambda n: (((at,), fs.size_bytes) for at, fs in n.filesystems.items())),
    ("dioptase_node_filesystem_available_bytes", lambda n: (
        ((at,), fs.available_bytes) for at, fs in n.filesystems.items())),
    ("dioptase_node_filesystem_inodes", lambda n: (((at,), fs.inodes) for at, fs in n.filesystems.items())),
    ("dioptase_node_filesystem_free_inodes", lambda n: (((at,), fs.free_inodes) for at, fs in n.filesystems.items())),
    ("dioptase_node_network_bytes_total", lambda n: _interfaces(n, "bytes")),
    ("dioptase_node_network_packets_total", lambda n: _interfaces(n, "packets")),
    ("dioptase_node_network_errors_total", lambda n: _interfaces(n, "errs")),
    ("dioptase_node_network_drops_total", lambda n: _interfaces(n, "drop")),
    ("dioptase_node_network_events_total", lambda n: _named_values((), NETWORK_EVENTS, n.netstat)),
    ("dioptase_node_tcp_sockets", lambda n: (((state,), count) for state, count in n.tcp_states.items())),
)  # fmt: skip
