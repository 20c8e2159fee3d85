"""Makes `system/compute`: CPU time by CPU, run-queue latency, load and tasks; also the client's health check.
Pure. Shares are over the last five seconds. Mean run-queue latency by CPU comes from /proc/schedstat, else from the
run-queue probe, else from the waits of cgroups spread over their cpusets.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from api.cpu import parse_cpu_list
from api.rates import delta
from api.snapshot import CpuCounters, CpuTimes, L3Monitor, NodeSample, Snapshot
from api.units import NS_PER_MS
from exporters.malachite.history import CounterFrame, MalachiteHistory
from exporters.malachite.wire import (
    LoadFields,
    MalachiteStruct,
    PressureFile,
    finite,
    is_identifier,
    pressure_file,
    u64,
    unix_seconds,
)


class CpuRunqLatency:
    """Mean run-queue waits in milliseconds; zero if no task waited, None if unknown."""

    def __init__(self, now: Snapshot, history: MalachiteHistory) -> None:
        self._by_cpu = _by_schedstat(now, history) or _by_probe(now, history) or _by_cpuset(now, history)

    def of(self, cpu: int) -> float | None:
        totals = self._by_cpu.get(cpu)
        return None if totals is None else _mean_ms(*totals)

    def of_all(self) -> float | None:
        if not self._by_cpu:
            return None
        return _mean_ms(
            sum(waited for waited, _ in self._by_cpu.values()), sum(waits for _, waits in self._by_cpu.values())
        )


def _by_schedstat(now: Snapshot, history: MalachiteHistory) -> dict[int, tuple[float, float]]:
    """Return time in nanoseconds and number of the waits by CPU, from /proc/schedstat."""
    return {} if history.past is None else _growth(_schedstat(history.past), _schedstat(now.node))


def _schedstat(counted: CounterFrame | NodeSample) -> dict[int, tuple[int | None, int]]:
    return {cpu: (counted.run_delay_ns.get(cpu), waits) for cpu, waits in counted.timeslices.items()}


def _by_probe(now: Snapshot, history: MalachiteHistory) -> dict[int, tuple[float, float]]:
    """Return the same from our run-queue probe."""
    return {} if history.past is None else _growth(_probed(history.past), _probed(now.node))


def _probed(counted: CounterFrame | NodeSample) -> dict[int, tuple[int | None, int]]:
    return {cpu: (wait.sum_ns, wait.count) for cpu, wait in counted.cpu_waits.items()}


def _growth(
    before: Mapping[int, tuple[int | None, int]], after: Mapping[int, tuple[int | None, int]]
) -> dict[int, tuple[float, float]]:
    grown = {}
    for cpu in before.keys() & after.keys():
        waited, waits = map(delta, before[cpu], after[cpu])
        if waited is not None and waits is not None:
            grown[cpu] = (float(waited), float(waits))
    return grown


def _by_cpuset(now: Snapshot, history: MalachiteHistory) -> dict[int, tuple[float, float]]:
    """Return the same from the waits of cgroups, spread evenly over the CPUs that each may use."""
    online = frozenset(now.topology.ids)
    by_cpu: dict[int, tuple[float, float]] = {}
    lists: dict[str | None, tuple[int, ...]] = {}
    for sample in now.cgroups.values():
        reading = history.cgroup(sample)
        if sample.wait is None or reading is None or reading[1].wait is None:
            continue
        waited, waits = delta(reading[1].wait[0], sample.wait.sum_ns), delta(reading[1].wait[1], sample.wait.count)
        if waited is None or waits is None:
            continue
        text = sample.limits.cpus
        if text not in lists:
            lists[text] = _allowed_cpus(text, online)
        cpus = lists[text]
        for cpu in cpus:
            before = by_cpu.get(cpu, (0.0, 0.0))
            by_cpu[cpu] = (before[0] + waited / len(cpus), before[1] + waits / len(cpus))
    return by_cpu


def _allowed_cpus(text: str | None, online: frozenset[int]) -> tuple[int, ...]:
    try:
        allowed = online.intersection(parse_cpu_list(text or ""))
    except ValueError:
        allowed = frozenset()
    return tuple(sorted(allowed or online))


def _mean_ms(waited_ns: float, waits: float) -> float | None:
    return finite(waited_ns / waits / NS_PER_MS) if waits else 0.0


RESCTRL_PATH = "/sys/fs/resctrl/"
CPU_MODES = tuple(field for field in CpuTimes.__struct_fields__)
BUSY_MODES = tuple(mode for mode in CPU_MODES if mode not in ("idle_ns", "iowait_ns", "steal_ns"))


class CpiData(MalachiteStruct, frozen=True):
    """Hardware counters over the last five seconds."""

    cpi: float
    instructions: float
    cycles: float
    l3_misses: float | None = None


class CpuShares(MalachiteStruct, frozen=True):
    """Use of one CPU or of all, in percent; cpu_sched_wait in milliseconds, and cpu_iowait_ratio as a ratio."""

    name: str
    cpu_usage: float | None = None
    cpu_sys_usage: float | None = None
    cpu_iowait_ratio: float | None = None
    cpu_sched_wait: float | None = None
    cpu_steal_ratio: float | None = None
    cpu_usr_ratio: float | None = None
    cpu_irq_ratio: float | None = None
    cpi_data: CpiData | None = None


class ProcessCounts(MalachiteStruct, frozen=True):
    """Number of runnable and of blocked tasks of the node."""

    procs_running: int | None = None
    procs_blocked: int | None = None


class L3Counters(MalachiteStruct, frozen=True):
    """Counters of one L3 cache in bytes, summed over all control groups.

    No kernel interface has the traffic of a victim cache.
    """

    id: int
    mbm_total_bytes: int | None = None
    mbm_local_bytes: int | None = None
    llc_occupancy: int | None = None


class L3Monitors(MalachiteStruct, frozen=True):
    """Memory bandwidth monitoring (resctrl)."""

    l3mon: tuple[L3Counters, ...]
    path: str
    update_time: int | None = None


class ComputeDocument(MalachiteStruct, frozen=True, kw_only=True):
    """The document `system/compute`."""

    cpu: tuple[CpuShares, ...]
    global_cpu: CpuShares
    load: LoadFields | None = None
    process_stats: ProcessCounts
    cpu_codename: str | None = None
    l3_mon: L3Monitors | None = None
    pressure: PressureFile | None = None
    update_time: int | None = None


def compute_document(now: Snapshot, history: MalachiteHistory) -> ComputeDocument:
    """Return CPUs and load; shares and waits are absent in the first snapshot."""
    node, past, waits = now.node, history.past, CpuRunqLatency(now, history)
    return ComputeDocument(
        cpu=tuple(_cpu_shares(now, past, waits, number) for number in sorted(node.per_cpu or now.topology.ids)),
        global_cpu=_shares("cpu", None if past is None else past.cpu, node.cpu, waits.of_all()),
        load=None
        if node.load is None
        else LoadFields(**dict(zip(("one_minute", "five", "fifteen"), map(finite, node.load), strict=True))),
        process_stats=ProcessCounts(procs_running=u64(node.procs_running), procs_blocked=u64(node.procs_blocked)),
        cpu_codename=node.machine.codename or None,
        l3_mon=_l3(now),
        pressure=pressure_file(node.cpu_pressure),
        update_time=unix_seconds(now.wall_time_ns),
    )


def _cpu_shares(now: Snapshot, past: CounterFrame | None, waits: CpuRunqLatency, number: int) -> CpuShares:
    name = f"cpu{number}"
    before = None if past is None else past.per_cpu.get(number)
    shares = _shares(name, before, now.node.per_cpu.get(number), waits.of(number))
    counted = None if past is None else _cpi(past.cpu_counters.get(number), now.node.cpu_counters.get(number))
    return shares if counted is None else msgspec.structs.replace(shares, cpi_data=counted)


def _cpi(before: CpuCounters | None, after: CpuCounters | None) -> CpiData | None:
    """Return None if a CPU has retired no instruction: the client averages the CPUs that have a ratio."""
    if before is None or after is None:
        return None
    cycles, instructions = delta(before.cycles, after.cycles), delta(before.instructions, after.instructions)
    if cycles is None or not instructions:
        return None
    misses = delta(before.misses, after.misses)
    return CpiData(
        cpi=cycles / instructions,
        instructions=float(instructions),
        cycles=float(cycles),
        l3_misses=None if misses is None else float(misses),
    )


def _shares(name: str, before: CpuTimes | None, after: CpuTimes | None, wait_ms: float | None) -> CpuShares:
    if before is None or after is None:
        return CpuShares(name=name, cpu_sched_wait=wait_ms)
    # A mode can decrease, as Documentation/filesystems/proc.rst states of iowait: then it did not grow.
    grown = {mode: max(getattr(after, mode) - getattr(before, mode), 0) for mode in CPU_MODES}
    total = sum(grown.values())
    if not total:
        return CpuShares(name=name, cpu_sched_wait=wait_ms)

    def share(*modes: str) -> float:
        return float(sum(grown[mode] for mode in modes) / total)

    return CpuShares(
        name=name,
        cpu_usage=100 * share(*BUSY_MODES),
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
        if is_identifier(monitor.id) and not monitor.is_monitoring_group:
            controls.setdefault(monitor.id, []).append(monitor)
    groups = {monitor.group for monitors in controls.values() for monitor in monitors}
    # A counter that is unavailable in this cycle would look like a decrease of the sum.
    monitors = tuple(
        _sum_l3(cache, of) for cache, of in controls.items() if {monitor.group for monitor in of} == groups
    )
    return (
        L3Monitors(l3mon=monitors, path=RESCTRL_PATH, update_time=unix_seconds(now.wall_time_ns)) if monitors else None
    )


def _sum_l3(cache: int, of: list[L3Monitor]) -> L3Counters:
    held = [monitor.occupancy_bytes for monitor in of if monitor.occupancy_bytes is not None]
    return L3Counters(
        id=cache,
        mbm_total_bytes=u64(sum(monitor.total_bytes for monitor in of)),
        mbm_local_bytes=u64(sum(monitor.local_bytes for monitor in of)),
        llc_occupancy=u64(sum(held)) if len(held) == len(of) else None,
    )
