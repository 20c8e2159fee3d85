"""Summarizes a demo run: latency and batch throughput by phase, and CPU time that other processes used."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from demo.counters import BUCKETS, CLIENT_CELLS, ClientCell, quantile_ms

MENTION_RATIO = 0.1
"""Share of the node below which CPU use of others is not mentioned."""
TOO_BUSY_RATIO = 0.25
"""Share of the node above which CPU use of others dominates the results."""
_BUSY = (0, 1, 2, 5, 6)
"""Indexes of user, nice, system, irq and softirq in the first line of /proc/stat."""


def busy_cpu_s(stat: str) -> float:
    """Return busy CPU seconds since boot from the text of /proc/stat."""
    ticks = stat.split("\n", 1)[0].split()[1:]
    return sum(int(ticks[place]) for place in _BUSY) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """Return CPU seconds of this process and of its descendants that have ended and were waited for."""
    used = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class OtherCpuUse:
    """CPU use of other processes from creation until `cores`, which is called after the demo's own processes have ended."""

    def __init__(self, now_s: float, stat: Path = Path("/proc/stat")) -> None:
        self._stat, self._began_s = stat, now_s
        self._before_s = self._used_s()

    def _used_s(self) -> float:
        return busy_cpu_s(self._stat.read_text()) - own_cpu_s()

    def cores(self, now_s: float) -> float:
        """Return the average use in cores."""
        seconds = now_s - self._began_s
        return (self._used_s() - self._before_s) / seconds if seconds > 0 else 0.0


def other_cpu_use_line(cores: float, cpus: int) -> str | None:
    """Return a line for the summary; None if others used little."""
    if cores <= MENTION_RATIO * cpus:
        return None
    used = f"{'others':<15}used {cores:.2f} of {cpus} cores on average"
    return f"{used}: part of the service's latency is not caused by the batch job"


def busy_machine_warning(cores: float, cpus: int) -> str | None:
    """Return a warning to print before the table; None if others used little enough."""
    if cores <= TOO_BUSY_RATIO * cpus:
        return None
    return (
        f"! this machine was too busy for the numbers below to be the product's: others used {cores:.2f} of {cpus} cores "
        "on average; end them and run it again"
    )


PHASE_ALONE, PHASE_WITH_BATCH, PHASE_SPIKE = "alone", "with batch", "in spikes"
PHASES = (PHASE_ALONE, PHASE_WITH_BATCH, PHASE_SPIKE)
SUMMARY_CELLS = (ClientCell.ANSWERED, ClientCell.LOST)


class PhaseCounters(msgspec.Struct, kw_only=True):
    """Everything counted while the run was in this phase."""

    seconds: float = 0.0
    client: list[int] = msgspec.field(default_factory=lambda: [0] * CLIENT_CELLS)
    units: int = 0

    def add(self, seconds: float, client: Sequence[int], units: int) -> None:
        self.seconds += seconds
        self.units += units
        for index, count in enumerate(client):
            self.client[index] += count


class PhaseTotals:
    """Splits cumulative counters into phases: each reading is charged to the phase named with it."""

    def __init__(self) -> None:
        self.phases = {name: PhaseCounters() for name in PHASES}
        self._before: tuple[float, list[int], int] | None = None

    def read(self, phase: str, now_s: float, client: list[int], units: int) -> None:
        """Add the growth since the previous reading to `phase`; `client` and `units` are totals at `now_s`."""
        if self._before is not None:
            then_s, old, old_units = self._before
            grown = [new - old for new, old in zip(client, old, strict=True)]
            for fixed in (ClientCell.STARTED_NS, ClientCell.REALTIME):
                grown[fixed] = 0
            self.phases[phase].add(now_s - then_s, grown, units - old_units)
        self._before = now_s, client, units


class RunningMean:
    """Running mean that ignores None."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self._sum, self._count = self._sum + value, self._count + 1

    @property
    def value(self) -> float | None:
        return self._sum / self._count if self._count else None


SUMMARY_COLUMNS = (
    ("answered", 10), ("lost", 8), ("p50 ms", 9), ("p99 ms", 9), ("p99.9 ms", 10), ("batch units/s", 15),
)  # fmt: skip


def summary_table(tally: PhaseTotals) -> Iterator[str]:
    """Yield a heading and a line per phase that had any time."""
    yield _row("online service", [name for name, _ in SUMMARY_COLUMNS])
    for name, phase in tally.phases.items():
        if phase.seconds:
            counts = [f"{phase.client[cell]:,}" for cell in SUMMARY_CELLS]
            quantiles = [quantile_ms(phase.client[:BUCKETS], q) for q in (0.5, 0.99, 0.999)]
            latencies = ["" if value is None else f"{value:.2f}" for value in quantiles]
            yield _row(name, [*counts, *latencies, f"{phase.units / phase.seconds:,.0f}"])


def _row(head: str, cells: Sequence[str]) -> str:
    return f"{head:<15}" + "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, SUMMARY_COLUMNS, strict=True))
