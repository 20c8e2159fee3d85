"""What a person sees of the machine in one round: pressure, reclaim, memory zones, and all waits together.

Pure. What is counted is per second of wall time; None is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from api.catalogue import NS_PER_S, US_PER_S
from api.facts import Kswapd, OomVictim, Pressure, Wait, Zone
from api.rates import delta, total
from api.samples import NodeSample, Snapshot
from exporters.cgroup_view import ReclaimView, WaitView, refaults, wait_view


class PressureView(msgspec.Struct, frozen=True, kw_only=True):
    """Share of time in which some task, or all of them, stalled for a resource."""

    some: float
    full: float | None


class KswapdView(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's background reclaim of one NUMA node."""

    node: int
    active_ratio: float
    wakeups: float
    scanned_pages: float
    reclaimed_pages: float


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One machine. Rates are None or absent in the first round."""

    pressure: Mapping[str, PressureView] = {}
    """By resource: cpu, memory, io."""
    load: tuple[float, float, float] | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    running: int | None = None
    blocked: int | None = None
    wait: WaitView | None = None
    """Waits of all cgroups together."""
    kswapd: tuple[KswapdView, ...] = ()
    zones: tuple[Zone, ...] = ()
    """Those that hold pages; sizes and watermarks in pages."""
    reclaim: ReclaimView | None = None
    """Of all cgroups together."""
    refaults: float | None = None
    oom_victims: tuple[OomVictim, ...] = ()


def node_view(
    now: Snapshot,
    before: Snapshot | None,
    interval_ns: int | None,
    waits: Iterable[Wait],
    reclaims: Collection[ReclaimView],
) -> NodeView:
    """`before` and `interval_ns` are None where there are no rates; `waits` and `reclaims` are those of every cgroup."""
    node = now.node
    earlier = before.node if before is not None and interval_ns else None
    return NodeView(
        pressure=_pressures(earlier, node, interval_ns) if earlier and interval_ns else {},
        load=node.load,
        memory_total_bytes=node.memory_total_bytes,
        memory_available_bytes=node.memory_available_bytes,
        running=node.procs_running,
        blocked=node.procs_blocked,
        wait=_together(waits),
        kswapd=_kswapd(earlier.kswapd, node.kswapd, interval_ns) if earlier and interval_ns else (),
        zones=tuple(zone for zone in node.zones if zone.managed),
        reclaim=_reclaim(reclaims),
        refaults=refaults(earlier, node) if earlier else None,
        oom_victims=node.oom_victims,
    )


def _pressures(before: NodeSample, now: NodeSample, interval_ns: int) -> dict[str, PressureView]:
    pairs = {
        "cpu": (before.cpu_pressure, now.cpu_pressure),
        "memory": (before.memory_pressure, now.memory_pressure),
        "io": (before.io_pressure, now.io_pressure),
    }
    seen = {resource: _pressure(*pair, interval_ns) for resource, pair in pairs.items()}
    return {resource: view for resource, view in seen.items() if view is not None}


def _pressure(before: Pressure | None, now: Pressure | None, interval_ns: int) -> PressureView | None:
    if before is None or now is None:
        return None
    some, full = delta(before.some_us, now.some_us), delta(before.full_us, now.full_us)
    interval_us = interval_ns * US_PER_S / NS_PER_S
    return (
        None
        if some is None
        else PressureView(some=some / interval_us, full=None if full is None else full / interval_us)
    )


def _kswapd(before: Mapping[int, Kswapd], now: Mapping[int, Kswapd], interval_ns: int) -> tuple[KswapdView, ...]:
    seconds = interval_ns / NS_PER_S
    found = []
    for node, after in sorted(now.items()):
        first = before.get(node)
        if first is None:
            continue
        active, wakeups = delta(first.active_ns, after.active_ns), delta(first.wakeups, after.wakeups)
        scanned = delta(first.scanned_pages, after.scanned_pages)
        reclaimed = delta(first.reclaimed_pages, after.reclaimed_pages)
        if active is None or wakeups is None or scanned is None or reclaimed is None:
            continue
        found.append(
            KswapdView(
                node=node,
                active_ratio=active / interval_ns,
                wakeups=wakeups / seconds,
                scanned_pages=scanned / seconds,
                reclaimed_pages=reclaimed / seconds,
            )
        )
    return tuple(found)


def _together(waits: Iterable[Wait]) -> WaitView | None:
    known = list(waits)
    # Most cgroups did not wait at all, and adding their distributions up is what takes time.
    return wait_view(total([wait for wait in known if wait.count] or known[:1])) if known else None


def _reclaim(reclaims: Collection[ReclaimView]) -> ReclaimView | None:
    if not reclaims:
        return None
    return ReclaimView(
        direct_ms=sum(one.direct_ms for one in reclaims),
        limit_ms=sum(one.limit_ms for one in reclaims),
        pages=sum(one.pages for one in reclaims),
        kswapd_wakeups=sum(one.kswapd_wakeups for one in reclaims),
    )
