"""`system/compute`: CPU time by CPU, run-queue waits, load and tasks; also the client's health check, so always answered.

Shares of time are over the last five seconds, the interval at which the client asks.
"""

from __future__ import annotations

import msgspec

from api.facts import CpuCounters, CpuTimes, L3Monitor
from api.rates import delta
from api.samples import Snapshot
from exporters.malachite.past import History, Past
from exporters.malachite.waits import Waits
from exporters.malachite.wire import Loads, Stalls, Wire, counts, real, seconds, stalls, u64

RESCTRL = "/sys/fs/resctrl/"
MODES = tuple(field for field in CpuTimes.__struct_fields__)
BUSY = tuple(mode for mode in MODES if mode not in ("idle_ns", "iowait_ns", "steal_ns"))


class Counted(Wire, frozen=True):
    """Hardware counters over the last five seconds."""

    cpi: float
    instructions: float
    cycles: float
    l3_misses: float | None = None


class Cpu(Wire, frozen=True):
    """One CPU, or all together. Percent, but for the waits in milliseconds and iowait, which the client takes as it is."""

    name: str
    cpu_usage: float | None = None
    cpu_sys_usage: float | None = None
    cpu_iowait_ratio: float | None = None
    cpu_sched_wait: float | None = None
    cpu_steal_ratio: float | None = None
    cpu_usr_ratio: float | None = None
    cpu_irq_ratio: float | None = None
    cpi_data: Counted | None = None


class Processes(Wire, frozen=True):
    """Tasks of the node."""

    procs_running: int | None = None
    procs_blocked: int | None = None


class L3(Wire, frozen=True):
    """Counters of one L3 cache, in bytes, all control groups together. What a victim cache passes on per second no kernel
    interface gives."""

    id: int
    mbm_total_bytes: int | None = None
    mbm_local_bytes: int | None = None
    llc_occupancy: int | None = None


class L3Monitors(Wire, frozen=True):
    """Memory bandwidth monitoring (resctrl)."""

    l3mon: tuple[L3, ...]
    path: str
    update_time: int | None = None


class Compute(Wire, frozen=True, kw_only=True):
    """The document."""

    cpu: tuple[Cpu, ...]
    global_cpu: Cpu
    load: Loads | None = None
    process_stats: Processes
    cpu_codename: str | None = None
    l3_mon: L3Monitors | None = None
    pressure: Stalls | None = None
    update_time: int | None = None


def compute(now: Snapshot, history: History) -> Compute:
    """CPUs and load now; shares and waits are absent until there is something to compare with."""
    node, past, waits = now.node, history.past, Waits(now, history)
    return Compute(
        cpu=tuple(_cpu(now, past, waits, number) for number in sorted(node.per_cpu or now.topology.ids)),
        global_cpu=_shares("cpu", None if past is None else past.cpu, node.cpu, waits.of_all()),
        load=None
        if node.load is None
        else Loads(**dict(zip(("one", "five", "fifteen"), map(real, node.load), strict=True))),
        process_stats=Processes(procs_running=u64(node.procs_running), procs_blocked=u64(node.procs_blocked)),
        cpu_codename=node.machine.codename or None,
        l3_mon=_l3(now),
        pressure=stalls(node.cpu_pressure),
        update_time=seconds(now.wall_time_ns),
    )


def _cpu(now: Snapshot, past: Past | None, waits: Waits, number: int) -> Cpu:
    name = f"cpu{number}"
    before = None if past is None else past.per_cpu.get(number)
    shares = _shares(name, before, now.node.per_cpu.get(number), waits.of(number))
    counted = None if past is None else _cpi(past.cpu_counters.get(number), now.node.cpu_counters.get(number))
    return shares if counted is None else msgspec.structs.replace(shares, cpi_data=counted)


def _cpi(before: CpuCounters | None, after: CpuCounters | None) -> Counted | None:
    """None where a CPU has retired nothing: the client takes the mean over those that have a ratio."""
    if before is None or after is None:
        return None
    cycles, instructions = delta(before.cycles, after.cycles), delta(before.instructions, after.instructions)
    if cycles is None or not instructions:
        return None
    misses = delta(before.misses, after.misses)
    return Counted(
        cpi=cycles / instructions,
        instructions=float(instructions),
        cycles=float(cycles),
        l3_misses=None if misses is None else float(misses),
    )


def _shares(name: str, before: CpuTimes | None, after: CpuTimes | None, wait_ms: float | None) -> Cpu:
    if before is None or after is None:
        return Cpu(name=name, cpu_sched_wait=wait_ms)
    # Single modes do go backwards (Documentation/filesystems/proc.rst says so of iowait): then they did not grow.
    grown = {mode: max(getattr(after, mode) - getattr(before, mode), 0) for mode in MODES}
    total = sum(grown.values())
    if not total:
        return Cpu(name=name, cpu_sched_wait=wait_ms)

    def share(*modes: str) -> float:
        return float(sum(grown[mode] for mode in modes) / total)

    return Cpu(
        name=name,
        cpu_usage=100 * share(*BUSY),
        cpu_sys_usage=100 * share("system_ns"),
        cpu_iowait_ratio=share("iowait_ns"),
        cpu_sched_wait=wait_ms,
        cpu_steal_ratio=100 * share("steal_ns"),
        cpu_usr_ratio=100 * share("user_ns", "nice_ns"),
        cpu_irq_ratio=100 * share("irq_ns", "softirq_ns"),
    )


def _l3(now: Snapshot) -> L3Monitors | None:
    controls: dict[int, list[L3Monitor]] = {}
    for monitor in now.node.l3:
        if counts(monitor.id) and not monitor.nested:
            controls.setdefault(monitor.id, []).append(monitor)
    groups = {monitor.group for monitors in controls.values() for monitor in monitors}
    # A counter that the hardware did not give this time must not look like traffic that was never there.
    whole = tuple(_sum(cache, of) for cache, of in controls.items() if {monitor.group for monitor in of} == groups)
    return L3Monitors(l3mon=whole, path=RESCTRL, update_time=seconds(now.wall_time_ns)) if whole else None


def _sum(cache: int, of: list[L3Monitor]) -> L3:
    held = [monitor.occupancy_bytes for monitor in of if monitor.occupancy_bytes is not None]
    return L3(
        id=cache,
        mbm_total_bytes=u64(sum(monitor.total_bytes for monitor in of)),
        mbm_local_bytes=u64(sum(monitor.local_bytes for monitor in of)),
        llc_occupancy=u64(sum(held)) if len(held) == len(of) else None,
    )
