"""Rings of the last samples, each with the time of its newest one: what nobody could sample for a while is not known. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from agent.eviction.situation import NS_PER_S

Key = TypeVar("Key", int, str)


class Ring(msgspec.Struct, frozen=True, array_like=True):
    """The last samples, and when the newest of them was taken, CLOCK_MONOTONIC."""

    at_ns: int
    values: tuple[float, ...]


def grown(ring: Ring | None, value: float, size: int, at_ns: int) -> Ring:
    """The ring with one more sample, at most `size` of them."""
    before = () if ring is None else ring.values
    return Ring(at_ns, (*before, value)[-size:])


def recent(rings: Mapping[Key, Ring], now_ns: int, age_s: float) -> dict[Key, Ring]:
    """Those that were sampled within so many seconds. Who comes back after that begins anew."""
    return {key: ring for key, ring in rings.items() if 0 <= now_ns - ring.at_ns <= age_s * NS_PER_S}


def part_above(ring: Ring, bound: float, size: int) -> float:
    """Which part of a full ring is above the bound: samples that are still to come are not."""
    return sum(value > bound for value in ring.values) / size
