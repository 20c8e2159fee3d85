"""CPU-use traces of online work over days, generated from a seed or read from a file, to evaluate predictors."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec

MINUTES_PER_DAY = 1440
STEP_S = 60


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The use of one node."""

    family: str
    name: str
    step_s: int
    used: tuple[float, ...]
    """Share of the node, 0 to 1."""


def _noise(rng: Random, minutes: int, sd: float, keep: float) -> Iterator[float]:
    """A first-order autoregressive process of that standard deviation; `keep` of a value is left a minute later."""
    value, kick = rng.gauss(0, sd), sd * math.sqrt(1 - keep * keep)
    for _ in range(minutes):
        yield value
        value = keep * value + rng.gauss(0, kick)


def _bursts(rng: Random, minutes: int, a_day: float, length: float, height: float) -> list[float]:
    """Bursts that begin at random and last and rise log-normally; where two meet, the higher one is seen."""
    out = [0.0] * minutes
    at = rng.expovariate(a_day / MINUTES_PER_DAY)
    while at < minutes:
        rise = height * rng.lognormvariate(0, 0.5)
        for minute in range(int(at), min(int(at + max(length * rng.lognormvariate(0, 0.8), 1)), minutes)):
            out[minute] = max(out[minute], rise)
        at += rng.expovariate(a_day / MINUTES_PER_DAY)
    return out


def _day(rng: Random) -> Callable[[int], float]:
    """The shape of a day between 0 and 1: two harmonics, the trough and the second peak somewhere."""
    phase, second, share = rng.random(), rng.random(), rng.uniform(0, 0.4)

    def at(minute: int) -> float:
        turn = 2 * math.pi * minute / MINUTES_PER_DAY
        wave = math.sin(turn + 2 * math.pi * phase) + share * math.sin(2 * turn + 2 * math.pi * second)
        return 0.5 + 0.5 * wave / (1 + share)

    return at


def diurnal(rng: Random, minutes: int) -> list[float]:
    """Days alike but for their height, with little noise."""
    low, high, day = rng.uniform(0.1, 0.3), rng.uniform(0.45, 0.75), _day(rng)
    heights = [rng.gauss(1, 0.07) for _ in range(minutes // MINUTES_PER_DAY + 1)]
    noise = _noise(rng, minutes, rng.uniform(0.01, 0.03), 0.8)
    return [low + (high - low) * day(m) * heights[m // MINUTES_PER_DAY] + e for m, e in enumerate(noise)]


def weekly(rng: Random, minutes: int) -> list[float]:
    """As diurnal, with weekends at half the load, or at half as much again."""
    weekend = rng.choice((0.5, 0.5, 1.5))
    factors = [weekend if m // MINUTES_PER_DAY % 7 in (5, 6) else 1.0 for m in range(minutes)]
    return [value * factor for value, factor in zip(diurnal(rng, minutes), factors, strict=True)]


def bursty(rng: Random, minutes: int) -> list[float]:
    """A calm base with bursts of minutes to hours, some times a day."""
    base, noise = rng.uniform(0.15, 0.3), _noise(rng, minutes, rng.uniform(0.01, 0.04), 0.7)
    bursts = _bursts(rng, minutes, rng.uniform(3, 30), rng.uniform(4, 40), rng.uniform(0.1, 0.25))
    return [base + burst + e for burst, e in zip(bursts, noise, strict=True)]


def step(rng: Random, minutes: int) -> list[float]:
    """Levels that hold for hours to days and change at once: deployments, failovers."""
    mean_minutes, level, out = rng.uniform(8, 48) * 60, rng.uniform(0.15, 0.6), list[float]()
    for e in _noise(rng, minutes, rng.uniform(0.01, 0.04), 0.8):
        if rng.random() < 1 / mean_minutes:
            level = rng.uniform(0.1, 0.7)
        out.append(level + e)
    return out


def ramp(rng: Random, minutes: int) -> list[float]:
    """Use that climbs for days, on top of a weak day, and falls back now and then: leaks, growth, restarts."""
    a_day, level, day = rng.uniform(0.03, 0.2), rng.uniform(0.1, 0.3), _day(rng)
    swing, out = rng.uniform(0, 0.15), list[float]()
    for m, e in enumerate(_noise(rng, minutes, rng.uniform(0.01, 0.03), 0.8)):
        level += a_day / MINUTES_PER_DAY
        if level > 0.7:
            level = rng.uniform(0.1, 0.3)
        out.append(level + swing * day(m) + e)
    return out


def noisy(rng: Random, minutes: int) -> list[float]:
    """Little but noise: slow and fast parts, and every now and then a minute far outside."""
    level, spikes = rng.uniform(0.2, 0.4), rng.uniform(0.001, 0.02)
    slow, fast = (
        _noise(rng, minutes, rng.uniform(0.03, 0.09), 0.995),
        _noise(rng, minutes, rng.uniform(0.03, 0.06), 0.3),
    )
    tail = [rng.expovariate(1 / 0.15) if rng.random() < spikes else 0.0 for _ in range(minutes)]
    return [level + a + b + c for a, b, c in zip(slow, fast, tail, strict=True)]


def drifting(rng: Random, minutes: int) -> list[float]:
    """A colocated node: a weak day, a level that wanders, pods that come and go for hours, noise that grows with use."""
    base, swing, day = rng.uniform(0.1, 0.25), rng.uniform(0.05, 0.25), _day(rng)
    level = _noise(rng, minutes, rng.uniform(0.03, 0.08), 0.9995)
    pods = _bursts(rng, minutes, rng.uniform(1, 8), rng.uniform(20, 200), rng.uniform(0.05, 0.2))
    short = _bursts(rng, minutes, rng.uniform(5, 40), rng.uniform(2, 10), rng.uniform(0.03, 0.15))
    fast = _noise(rng, minutes, rng.uniform(0.04, 0.15), 0.5)
    out = []
    for m, (a, b, c, e) in enumerate(zip(level, pods, short, fast, strict=True)):
        smooth = base + a + b + swing * day(m)
        out.append(smooth * (1 + e) + c)
    return out


def periodic(rng: Random, minutes: int) -> list[float]:
    """A sharp day and jobs at fixed times of it, in the hour or in the day; as large as their own maximum."""
    day, power, low = _day(rng), rng.uniform(0.7, 3), rng.uniform(0.02, 0.25)
    noise, jobs = _noise(rng, minutes, rng.uniform(0.005, 0.05), 0.6), [0.0] * minutes
    for _ in range(rng.randint(0, 3)):
        period = rng.choice((60, 180, 360, MINUTES_PER_DAY, MINUTES_PER_DAY))
        at, length, height = rng.randrange(period), rng.randint(1, 40), rng.uniform(0.1, 0.5)
        for begin in range(at, minutes, period):
            late, rise = rng.randint(0, 3), height * rng.gauss(1, 0.15)
            for minute in range(begin + late, min(begin + late + length, minutes)):
                jobs[minute] = max(jobs[minute], rise)
    stray = _bursts(rng, minutes, rng.uniform(0.1, 3), rng.uniform(2, 30), rng.uniform(0.05, 0.3))
    stray[rng.randrange(minutes)] = rng.uniform(0, 0.6)
    raw = [
        low + day(m) ** power * (1 + e) * 0.6 + max(j, s) + e / 4
        for m, (e, j, s) in enumerate(zip(noise, jobs, stray, strict=True))
    ]
    most = max(raw)
    return [value / most for value in raw]


def changing(rng: Random, minutes: int) -> list[float]:
    """Another family every one to three days: what was learned of a node does not hold for long."""
    out: list[float] = []
    while len(out) < minutes:
        make = rng.choice((diurnal, bursty, step, ramp, noisy, drifting))
        out += make(rng, min(rng.randint(1, 3) * MINUTES_PER_DAY, minutes - len(out)))
    return out


FAMILIES: dict[str, Callable[[Random, int], list[float]]] = {
    make.__name__: make for make in (diurnal, weekly, bursty, step, ramp, noisy, drifting, periodic, changing)
}


def generate(family: str, machines: int, days: int, seed: int) -> list[Trace]:
    """Machines of one family, one value a minute, within 0.5 % to 100 % of the node."""
    out = []
    for number in range(machines):
        rng = Random(f"{seed}/{family}/{number}")
        used = FAMILIES[family](rng, days * MINUTES_PER_DAY)
        clamped = tuple(round(min(max(value, 0.005), 1.0), 4) for value in used)
        out.append(Trace(family=family, name=f"{family}-{number}", step_s=STEP_S, used=clamped))
    return out


def read_machines(path: Path, step_s: int = 300) -> list[Trace]:
    """A CSV (.gz too) with a line a machine: its name, its use in percent a step. Raises ValueError and OSError."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [
            Trace(family=path.name, name=row[0], step_s=step_s, used=tuple(float(cell) / 100 for cell in row[1:]))
            for row in csv.reader(file)
            if row
        ]


def nodes_of(machines: list[Trace], count: int, each: int, seed: int) -> list[Trace]:
    """Nodes of randomly chosen machines, each machine an equal share of the node."""
    rng, nodes = Random(f"{seed}/nodes"), []
    for number in range(count):
        chosen = rng.sample(machines, each)
        used = tuple(sum(values) / each for values in zip(*(machine.used for machine in chosen), strict=True))
        nodes.append(Trace(family=chosen[0].family, name=f"node-{number}", step_s=chosen[0].step_s, used=used))
    return nodes
