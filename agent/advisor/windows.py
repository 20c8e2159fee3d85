"""Samples of an amount over a window, their mean in bounded steps, and what is left of it while nothing new is known."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

NS_PER_S = 1_000_000_000


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """An amount at one moment of CLOCK_MONOTONIC."""

    at_ns: int
    value: float


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """The latest samples of one amount, oldest first, and the level that they have led to so far."""

    samples: tuple[Sample, ...] = ()
    level: float | None = None
    """None until the window was full once."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """How many samples are averaged, how long one counts, and how far the level moves at once."""

    size: int
    ttl_ns: int
    min_step: float
    max_step: float


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One resource: its total, its parts by NUMA node, and when it was known last."""

    total: Track = Track()
    by_numa: Mapping[int, Track] = {}
    known_ns: int | None = None
    regaining: bool = False
    """Whether the level is still on its way back from what it lost while nothing was known."""


def push(track: Track, value: float, window: Window, now_ns: int) -> Track:
    """The track with one more sample. The level follows the mean of a full window, step by step."""
    samples = (*track.samples, Sample(at_ns=now_ns, value=value))[-window.size :]
    valid = [sample.value for sample in samples if now_ns - sample.at_ns < window.ttl_ns]
    if len(valid) < window.size:
        return Track(samples=samples, level=track.level)
    return Track(samples=samples, level=step(track.level, sum(valid) / len(valid), window))


def step(level: float | None, mean: float, window: Window) -> float:
    """The next level on the way to the mean: unchanged for less than a min step, at most a max step away."""
    if level is None:
        return mean
    if abs(mean - level) < window.min_step:
        return level
    return min(max(mean, level - window.max_step), level + window.max_step)


def freshness(age_s: float, fresh_s: float, expired_s: float) -> float:
    """1 until `fresh_s` after the last that was known, then linear to 0 at `expired_s`."""
    return min(max((expired_s - age_s) / (expired_s - fresh_s), 0.0), 1.0)


def decayed(level: float, floor: float, fresh: float) -> float:
    """What is left of a level above the floor; one below it stays."""
    low = min(level, floor)
    return low + (level - low) * fresh
