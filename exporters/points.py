"""What a metric looks like on its way out: a row of the catalogue with its numbers. No knowledge of facts or of formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from api.catalogue import BY_NAME, COARSE_BOUNDS_S, NS_PER_S, WAIT_BOUNDS_S
from api.facts import Durations
from api.histograms import COARSE_SLOTS
from api.metric import Metric
from api.text import printable

Number = int | float
Labels = tuple[str, ...]


class Exemplar(NamedTuple):
    """One occasion behind a number, by which a person finds its trace."""

    labels: tuple[tuple[str, str], ...]
    value: Number
    at_ns: int
    """CLOCK_REALTIME."""


class Point(NamedTuple):
    """One number of a counter or gauge. Values of labels, in the order of the row's names, are `owner` and then `own`.

    `owner` has those that many points share (`CGROUP_LABELS`), so that whoever writes them may do so once.
    """

    owner: Labels
    own: Labels
    value: Number
    exemplar: Exemplar | None = None

    @property
    def labels(self) -> Labels:
        return self.owner + self.own


class Distribution(NamedTuple):
    """One histogram: cumulative counts, one per inclusive upper bound and a last one for everything."""

    owner: Labels
    own: Labels
    bounds_s: tuple[float, ...]
    cumulative: tuple[int, ...]
    sum_s: float
    exemplars: Mapping[int, Exemplar] = {}
    """By place in `cumulative`."""

    @property
    def labels(self) -> Labels:
        return self.owner + self.own


class Family(NamedTuple):
    """One row of the catalogue with all it has to show; points or distributions, by the row's kind."""

    metric: Metric
    points: tuple[Point, ...] = ()
    distributions: tuple[Distribution, ...] = ()


def points(name: str, samples: Iterable[tuple[Labels, Number | None]]) -> Family:
    """A row that belongs to no cgroup; what is None has no point."""
    shown = (Point((), tuple(map(printable, own)), value) for own, value in samples if value is not None)
    return Family(BY_NAME[name], points=tuple(shown))


def seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / NS_PER_S


def fine(owner: Labels, durations: Durations, exemplars: Mapping[int, Exemplar] | None = None) -> Distribution:
    """All slots. They and the count are read one after the other while tasks go on, so the slots alone say how many."""
    sum_s = durations.sum_ns / NS_PER_S
    if durations.slots is None:
        return Distribution(owner, (), (), (durations.count,), sum_s)
    return Distribution(owner, (), WAIT_BOUNDS_S, tuple(accumulate(durations.slots)), sum_s, exemplars or {})


def coarse(owner: Labels, own: Labels, durations: Durations) -> Distribution:
    """Every second slot, for what each cgroup has several of."""
    sum_s = durations.sum_ns / NS_PER_S
    if durations.slots is None:
        return Distribution(owner, own, (), (durations.count,), sum_s)
    counts = tuple(accumulate(durations.slots))
    return Distribution(owner, own, COARSE_BOUNDS_S, (*(counts[slot] for slot in COARSE_SLOTS), counts[-1]), sum_s)
