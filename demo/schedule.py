"""Defines request rates over time and the due times of requests. Deterministic for a seed."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator

import msgspec


class ConstantRate(msgspec.Struct, frozen=True, kw_only=True, tag="constant"):
    """A rate that never changes."""

    rate: float

    @property
    def peak(self) -> float:
        return self.rate

    def rate_at(self, _: float) -> float:
        return self.rate

    def spikes(self, _: float) -> tuple[float, ...]:
        return ()


class RateWave(msgspec.Struct, frozen=True, kw_only=True, tag="wave"):
    """A rate that rises from `low` to `high` and falls back within each period, with one sudden spike on the way down.

    The spike begins and ends within one request: nothing announces it.
    """

    low: float
    high: float
    period_s: float
    spike: float
    """Rate during the spike."""
    spike_at_s: float
    """Beginning of the spike, from the beginning of its period."""
    spike_s: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError(f"wave: low {self.low} and high {self.high} must be positive and in this order")
        if self.spike <= 0 or self.spike_at_s < 0 or self.spike_s < 0 or self.period_s <= 0:
            raise ValueError("wave: spike and period_s must be positive, spike_at_s and spike_s not negative")
        if self.spike_at_s + self.spike_s > self.period_s:
            raise ValueError(f"wave: the spike ends after its period of {self.period_s} s")

    @property
    def peak(self) -> float:
        return max(self.high, self.spike)

    def in_spike(self, t: float) -> bool:
        """Whether second `t` belongs to a spike."""
        return self.spike_at_s <= t % self.period_s < self.spike_at_s + self.spike_s

    def rate_at(self, t: float) -> float:
        """Requests a second at `t` seconds from the beginning."""
        if self.in_spike(t):
            return self.spike
        return self.low + (self.high - self.low) * (1 - math.cos(2 * math.pi * t / self.period_s)) / 2

    def spikes(self, until_s: float) -> tuple[float, ...]:
        """Return the beginnings of the spikes before `until_s`."""
        count = max(0, math.ceil((until_s - self.spike_at_s) / self.period_s))
        return tuple(self.spike_at_s + k * self.period_s for k in range(count))


class RateBursts(msgspec.Struct, frozen=True, kw_only=True, tag="bursts"):
    """A rate that jumps between `low` and `high`: each burst begins and ends within one request."""

    low: float
    high: float
    period_s: float
    """Time after which the same bursts repeat."""
    on: tuple[tuple[float, float], ...]
    """Beginning and end of each burst in seconds of the period, ascending and disjoint."""
    from_s: float = 0.0
    """Beginning of a period, so that a measurement after any warm-up meets the same bursts."""

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError(f"bursts: low {self.low} and high {self.high} must be positive and in this order")
        edges = [0.0, *(edge for burst in self.on for edge in burst), self.period_s]
        if self.period_s <= 0 or edges != sorted(edges):
            raise ValueError("bursts: each must end after it begins, before the next one and within the period")

    @property
    def peak(self) -> float:
        return self.high

    def in_spike(self, t: float) -> bool:
        """Whether second `t` belongs to a burst."""
        at = (t - self.from_s) % self.period_s
        before = bisect_right(self.on, at, key=lambda burst: burst[0])
        return before > 0 and at < self.on[before - 1][1]

    def rate_at(self, t: float) -> float:
        return self.high if self.in_spike(t) else self.low

    def spikes(self, until_s: float) -> tuple[float, ...]:
        """Return the beginnings of the bursts between 0 and `until_s`."""
        first = -math.ceil(self.from_s / self.period_s)
        last = math.ceil((until_s - self.from_s) / self.period_s)
        begins = (self.from_s + k * self.period_s + begin for k in range(first, last) for begin, _ in self.on)
        return tuple(begin for begin in begins if 0 <= begin < until_s)


MIN_PART = 0.5
"""Minimum length of a burst and of a gap, relative to their means; the rest is exponentially distributed."""


def random_bursts(low: float, high: float, *, period_s: float, count: int, on_share: float, seed: int) -> RateBursts:
    """Return `count` bursts a period of random lengths and distances; for every seed they last `on_share` of the period."""
    rng = random.Random(seed)
    drawn = [[MIN_PART + (1 - MIN_PART) * rng.expovariate(1) for _ in range(count)] for _ in range(2)]
    gaps, lengths = (
        [part / sum(parts) * share * period_s for part in parts]
        for parts, share in zip(drawn, (1 - on_share, on_share), strict=True)
    )
    on, at = [], 0.0
    for gap, length in zip(gaps, lengths, strict=True):
        on.append((at + gap, min(at + gap + length, period_s)))
        at += gap + length
    return RateBursts(low=low, high=high, period_s=period_s, on=tuple(on))


Schedule = ConstantRate | RateWave | RateBursts


def arrivals(schedule: Schedule, seed: int, reseed_at_s: float = math.inf) -> Iterator[float]:
    """Yield due times in seconds of a Poisson process with the schedule's rate, by thinning one at its peak rate.

    At `reseed_at_s` the random generator is seeded again, so that measurements after warm-ups of different lengths get the
    same arrivals.
    """
    rng, t, peak = random.Random(seed), 0.0, schedule.peak
    while True:
        before, t = t, t + rng.expovariate(peak)
        if before < reseed_at_s <= t:
            rng, t = random.Random(seed), reseed_at_s
        if rng.random() * peak < schedule.rate_at(t):
            yield t


def parse_schedule(text: str) -> Schedule:
    """Parse a schedule such as `{"type": "constant", "rate": 800}`. Raises ValueError that names the field."""
    decoded: Schedule = msgspec.json.decode(text, type=Schedule)
    return decoded
