"""What a colocation run found, and its medians and ratios. Pure."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import msgspec

from bench.cell import Measured
from bench.machine import Machine
from bench.modes import BY_NAME as MODES
from bench.scenarios import BY_NAME as SCENARIOS

Of = Callable[[Measured], float]


class Reaction(msgspec.Struct, frozen=True, kw_only=True):
    """What became of batch work's CPU when the online load jumped, in milliseconds from the first request of each jump."""

    mode: str
    kind: str
    """`steps` or `bursts`."""
    steps: int
    taken_ms: tuple[float, ...]
    """Until batch work's CPU was taken back, whoever did that, for each step in which it was;"""
    never: int
    """and in how many more it was not."""
    decided_ms: tuple[float, ...]
    """Start of the round in which the agent decided on a smaller quota, where it did (the journal's time)."""
    written_ms: tuple[float, ...]
    """When the first changed value was seen in a cgroup file, polled every few milliseconds."""
    triggers: tuple[str, ...]


class Group(msgspec.Struct, frozen=True):
    """The rounds of one mode in one scenario."""

    cells: tuple[Measured, ...]

    def median(self, of: Of) -> float:
        return median(map(of, self.cells))

    def spread(self, of: Of) -> tuple[float, float]:
        values = [of(cell) for cell in self.cells]
        return min(values), max(values)


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    machine: Machine
    settings: str
    cells: tuple[Measured, ...]
    reactions: tuple[Reaction, ...] = ()
    failures: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Repetitions for which there was no time."""

    def group(self, mode: str, scenario: str) -> Group | None:
        """None where that was not measured."""
        cells = tuple(cell for cell in self.cells if (cell.mode, cell.scenario) == (mode, scenario))
        return Group(cells) if cells else None

    def modes(self, scenario: str | None = None) -> list[str]:
        """Modes with at least one cell, there or anywhere, in the order in which bench.modes has them."""
        there = {cell.mode for cell in self.cells if scenario in (None, cell.scenario)}
        return [name for name in MODES if name in there]

    def scenarios(self) -> list[str]:
        """Those with at least one cell, in the order in which bench.scenarios has them."""
        return [name for name in SCENARIOS if any(cell.scenario == name for cell in self.cells)]

    def ratio(self, scenario: str, mode: str, base: str, of: Of) -> float | None:
        """Median of one mode over the median of another in the same scenario."""
        here, there = self.group(mode, scenario), self.group(base, scenario)
        if here is None or there is None or not there.median(of):
            return None
        return here.median(of) / there.median(of)


def p99(cell: Measured) -> float:
    return cell.p99_ms


def units(cell: Measured) -> float:
    return cell.units_per_s


def node_use(cell: Measured) -> float:
    return cell.node_use
