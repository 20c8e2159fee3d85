"""Computes rates between two snapshots for the view: disk, network, reclaim, pressure and request latency.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.histogram import quantile_ns
from api.rates import delta
from api.snapshot import (
    BlockIo,
    CgroupSample,
    Durations,
    IoStat,
    Kswapd,
    NodeSample,
    Pressure,
    ReclaimLatency,
    RequestLatency,
    Snapshot,
    SocketTraffic,
)
from api.units import NS_PER_MS, NS_PER_S, NS_PER_US, US_PER_S


class LatencyView(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that the pod itself reported since the previous cycle."""

    per_second: float
    p50_ms: float | None
    p99_ms: float | None


class ReclaimView(msgspec.Struct, frozen=True, kw_only=True):
    """Reclaim by the cgroup's own tasks, per second."""

    direct_ms: float
    """Time in reclaim because the node was short of memory."""
    limit_ms: float
    """Time in reclaim because of the cgroup's own limit."""
    pages: float
    kswapd_wakeups: float


class TrafficView(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per second, disk latency and retransmits."""

    disk_read: float | None = None
    disk_write: float | None = None
    disk_p99_us: float | None = None
    """Time from issue to completion."""
    sent: float | None = None
    received: float | None = None
    retransmits: float | None = None
    """Retransmitted TCP segments per second."""


def reclaim_view(before: ReclaimLatency | None, now: ReclaimLatency | None, interval_ns: int) -> ReclaimView | None:
    """Return the reclaim of an interval; None if either end is unknown or the counters restarted."""
    if before is None or now is None:
        return None
    seconds = interval_ns / NS_PER_S
    direct = delta(before.direct.sum_ns, now.direct.sum_ns)
    limit = delta(before.limit.sum_ns, now.limit.sum_ns)
    pages = delta(before.reclaimed_pages, now.reclaimed_pages)
    wakeups = delta(before.kswapd_wakeups, now.kswapd_wakeups)
    if direct is None or limit is None or pages is None or wakeups is None:
        return None
    return ReclaimView(
        direct_ms=direct / NS_PER_MS / seconds,
        limit_ms=limit / NS_PER_MS / seconds,
        pages=pages / seconds,
        kswapd_wakeups=wakeups / seconds,
    )


def refaults_per_second(before: CgroupSample | NodeSample, now: CgroupSample | NodeSample) -> float | None:
    """Return pages per second that were read again soon after they had been reclaimed."""
    seconds = _seconds_between_reads(before, now)
    return None if seconds is None else _rate_per_second(_refaulted_pages(before), _refaulted_pages(now), seconds)


def _refaulted_pages(sample: CgroupSample | NodeSample) -> int | None:
    """Return refaults of anonymous and file pages; old kernels have one name for both."""
    counters = sample.memory_stat if isinstance(sample, CgroupSample) else sample.vmstat
    counts = [count for name, count in counters.items() if name.startswith("workingset_refault")]
    return sum(counts) if counts else None


def _seconds_between_reads(before: CgroupSample | NodeSample, now: CgroupSample | NodeSample) -> float | None:
    """Return the time between two reads of the files that are not read in every cycle; None without a second read."""
    if before.files_read_at_ns is None or now.files_read_at_ns is None:
        return None
    elapsed_ns = now.files_read_at_ns - before.files_read_at_ns
    return elapsed_ns / NS_PER_S if elapsed_ns > 0 else None


def traffic_view(before: CgroupSample, now: CgroupSample, interval_ns: int) -> TrafficView | None:
    seconds = interval_ns / NS_PER_S
    read, write, p99_us = _disk_activity(before, now)
    apart_s = _seconds_between_reads(before, now)
    if read is None and apart_s is not None:
        read, write = (
            _rate_per_second(_sum_devices(before.io, field), _sum_devices(now.io, field), apart_s)
            for field in ("read_bytes", "write_bytes")
        )
    else:
        read, write = _per_second(read, seconds), _per_second(write, seconds)
    sent = _rate_per_second(_net_bytes(before.net, "sent"), _net_bytes(now.net, "sent"), seconds)
    received = _rate_per_second(_net_bytes(before.net, "received"), _net_bytes(now.net, "received"), seconds)
    retransmits = _rate_per_second(
        before.net.tcp_retransmits if before.net else None, now.net.tcp_retransmits if now.net else None, seconds
    )
    if all(value is None for value in (read, write, sent, received)):
        return None
    return TrafficView(
        disk_read=read, disk_write=write, disk_p99_us=p99_us, sent=sent, received=received, retransmits=retransmits
    )


def _per_second(value: float | None, seconds: float) -> float | None:
    return None if value is None else value / seconds


def _rate_per_second(before: int | None, now: int | None, seconds: float) -> float | None:
    return _per_second(delta(before, now), seconds)


def _net_bytes(net: SocketTraffic | None, way: str) -> int | None:
    return None if net is None else int(getattr(net, f"tcp_{way}_bytes")) + int(getattr(net, f"udp_{way}_bytes"))


def _sum_devices(io: Mapping[str, IoStat], field: str) -> int | None:
    return sum(getattr(stat, field) for stat in io.values()) if io else None


def _disk_activity(before: CgroupSample, now: CgroupSample) -> tuple[float | None, float | None, float | None]:
    """Return bytes read and written in the interval, and p99 in microseconds over both kinds of block requests."""
    read = write = 0
    slots: list[int] | None = None
    for device, after in now.block_io.items():
        first = before.block_io.get(device) or _NO_BLOCK_IO
        grown = delta(first.read_bytes, after.read_bytes), delta(first.write_bytes, after.write_bytes)
        if grown[0] is None or grown[1] is None:
            return None, None, None
        read, write = read + grown[0], write + grown[1]
        for kind in ("reads", "writes"):
            was: Durations = getattr(first, kind)
            done: Durations = getattr(after, kind)
            if done.slots is None:
                continue
            old = was.slots or (0,) * len(done.slots)
            slots = [a + b - c for a, b, c in zip(slots or [0] * len(old), done.slots, old, strict=True)]
    if not now.block_io:
        return None, None, None
    p99 = quantile_ns(slots, 0.99) if slots and min(slots) >= 0 else None
    return read, write, None if p99 is None else p99 / NS_PER_US


_NO_BLOCK_IO = BlockIo(
    reads=Durations(sum_ns=0, count=0), writes=Durations(sum_ns=0, count=0), read_bytes=0, write_bytes=0
)  # fmt: skip


def latency_view(key: str, snapshot: Snapshot, previous: Snapshot | None) -> LatencyView | None:
    after = snapshot.indicators.get(key)
    before = previous.indicators.get(key) if previous else None
    if after is None or before is None or before.bounds_s != after.bounds_s:
        return None
    elapsed_ns = after.sampled_at_ns - before.sampled_at_ns
    counts = tuple(b - a for a, b in zip(before.buckets, after.buckets, strict=True))
    if elapsed_ns <= 0 or min(counts) < 0:
        return None
    return LatencyView(
        per_second=counts[-1] * NS_PER_S / elapsed_ns,
        p50_ms=_bucket_quantile_ms(after, counts, 0.5),
        p99_ms=_bucket_quantile_ms(after, counts, 0.99),
    )


def _bucket_quantile_ms(indicator: RequestLatency, counts: tuple[int, ...], q: float) -> float | None:
    """Return the quantile in milliseconds as histogram_quantile of Prometheus; the last bound stands for the open bucket."""
    total = counts[-1]
    if total == 0:
        return None
    rank, below, low = q * total, 0, 0.0
    for bound, count in zip(indicator.bounds_s, counts, strict=False):
        if count >= rank:
            return 1000 * (low + (bound - low) * (rank - below) / max(count - below, 1))
        below, low = count, bound
    return 1000 * indicator.bounds_s[-1]


class PressureView(msgspec.Struct, frozen=True, kw_only=True):
    """Share of time in which some or all tasks stalled for a resource."""

    some: float
    full: float | None


class KswapdView(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's background reclaim of one NUMA node."""

    node: int
    active_ratio: float
    wakeups: float
    scanned_pages: float
    reclaimed_pages: float


def pressure_views(before: NodeSample, now: NodeSample, interval_ns: int) -> dict[str, PressureView]:
    pairs = {
        "cpu": (before.cpu_pressure, now.cpu_pressure),
        "memory": (before.memory_pressure, now.memory_pressure),
        "io": (before.io_pressure, now.io_pressure),
    }
    views = {resource: _pressure_view(*pair, interval_ns) for resource, pair in pairs.items()}
    return {resource: view for resource, view in views.items() if view is not None}


def _pressure_view(before: Pressure | None, now: Pressure | None, interval_ns: int) -> PressureView | None:
    if before is None or now is None:
        return None
    some, full = delta(before.some_us, now.some_us), delta(before.full_us, now.full_us)
    interval_us = interval_ns * US_PER_S / NS_PER_S
    return (
        None
        if some is None
        else PressureView(some=some / interval_us, full=None if full is None else full / interval_us)
    )


def kswapd_views(before: Mapping[int, Kswapd], now: Mapping[int, Kswapd], interval_ns: int) -> tuple[KswapdView, ...]:
    seconds = interval_ns / NS_PER_S
    views = []
    for node, after in sorted(now.items()):
        first = before.get(node)
        if first is None:
            continue
        active, wakeups = delta(first.active_ns, after.active_ns), delta(first.wakeups, after.wakeups)
        scanned = delta(first.scanned_pages, after.scanned_pages)
        reclaimed = delta(first.reclaimed_pages, after.reclaimed_pages)
        if active is None or wakeups is None or scanned is None or reclaimed is None:
            continue
        views.append(
            KswapdView(
                node=node,
                active_ratio=active / interval_ns,
                wakeups=wakeups / seconds,
                scanned_pages=scanned / seconds,
                reclaimed_pages=reclaimed / seconds,
            )
        )
    return tuple(views)
