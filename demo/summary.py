"""What a demo run amounts to: the client's and the batch job's counters, told apart by phase, as lines for a person. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from demo.counters import BUCKETS, CLIENT_CELLS, Cell, quantile_ms

ALONE, BESIDE, SPIKE = "alone", "beside batch", "in spikes"
PHASES = (ALONE, BESIDE, SPIKE)
COUNTED = (Cell.ANSWERED, Cell.LOST)


class Phase(msgspec.Struct, kw_only=True):
    """Everything counted while the run was in this phase."""

    seconds: float = 0.0
    client: list[int] = msgspec.field(default_factory=lambda: [0] * CLIENT_CELLS)
    units: int = 0

    def add(self, seconds: float, client: Sequence[int], units: int) -> None:
        self.seconds += seconds
        self.units += units
        for index, count in enumerate(client):
            self.client[index] += count


class Tally:
    """Splits cumulative counters into phases: each reading is charged to the phase named with it."""

    def __init__(self) -> None:
        self.phases = {name: Phase() for name in PHASES}
        self._before: tuple[float, list[int], int] | None = None

    def read(self, phase: str, now_s: float, client: list[int], units: int) -> None:
        """`client` and `units` are totals at `now_s`; what is new since the previous reading belongs to `phase`."""
        if self._before is not None:
            then_s, old, old_units = self._before
            grown = [new - old for new, old in zip(client, old, strict=True)]
            for fixed in (Cell.STARTED_NS, Cell.REALTIME):
                grown[fixed] = 0
            self.phases[phase].add(now_s - then_s, grown, units - old_units)
        self._before = now_s, client, units


class Mean:
    """A running mean of what was known."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self._sum, self._count = self._sum + value, self._count + 1

    @property
    def value(self) -> float | None:
        return self._sum / self._count if self._count else None


COLUMNS = (
    ("answered", 10), ("lost", 8), ("p50 ms", 9), ("p99 ms", 9), ("p99.9 ms", 10), ("batch units/s", 15),
)  # fmt: skip


def table(tally: Tally) -> Iterator[str]:
    """One line per phase that had any time, below a head."""
    yield _row("online service", [name for name, _ in COLUMNS])
    for name, phase in tally.phases.items():
        if phase.seconds:
            counts = [f"{phase.client[cell]:,}" for cell in COUNTED]
            quantiles = [quantile_ms(phase.client[:BUCKETS], q) for q in (0.5, 0.99, 0.999)]
            latencies = ["" if value is None else f"{value:.2f}" for value in quantiles]
            yield _row(name, [*counts, *latencies, f"{phase.units / phase.seconds:,.0f}"])


def _row(head: str, cells: Sequence[str]) -> str:
    return f"{head:<15}" + "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))
