"""How much CPU a service asks for over time: diurnal, weekly, bursty, step, ramp, each a pure function of time and seed.

Times are seconds since the beginning of the simulation, levels are parts of a service's peak, 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from math import cos, exp, pi

DAY_S = 86_400.0
NOISE = 0.05
"""Relative, of every second."""
BURST_EVERY_S, BURST_S = 300.0, 20.0

Load = Callable[[float], float]


def load(kind: str, seed: int) -> Load:
    """The load of that name. Raises KeyError where there is none."""
    return partial(_noisy, KINDS[kind], seed)


def _noisy(shape: Callable[[float, int], float], seed: int, at_s: float) -> float:
    return min(max(shape(at_s, seed) * (1 + NOISE * (2 * uniform(seed, int(at_s)) - 1)), 0.0), 1.0)


def uniform(seed: int, number: int) -> float:
    """A random number of [0, 1) for each pair: any second can be asked for, in any order, and is the same again."""
    digest = blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _diurnal(at_s: float, _seed: int) -> float:
    """A fifth at four in the morning, all of it at four in the afternoon."""
    return 0.6 - 0.4 * cos(2 * pi * (at_s / DAY_S - 4 / 24))


def _weekly(at_s: float, seed: int) -> float:
    """Diurnal, and half of that on two days in seven."""
    weekend = int(at_s / DAY_S) % 7 >= 5
    return _diurnal(at_s, seed) * (0.5 if weekend else 1.0)


def _bursty(at_s: float, seed: int) -> float:
    """A quarter, and in some windows of five minutes a burst to between a half and all, which dies away within a minute."""
    window, within = divmod(at_s, BURST_EVERY_S)
    began = uniform(seed, -1 - int(window)) * (BURST_EVERY_S - 3 * BURST_S)
    height = 0.25 + 0.5 * uniform(seed + 1, int(window))
    if uniform(seed + 2, int(window)) < 0.4 or within < began:
        return 0.25
    return 0.25 + height * exp(-(within - began) / BURST_S)


def _step(at_s: float, _seed: int) -> float:
    """An hour at a fifth, an hour at four fifths."""
    return 0.8 if int(at_s / 3600) % 2 else 0.2


def _ramp(at_s: float, _seed: int) -> float:
    """From a tenth to all in two hours, and again."""
    return 0.1 + 0.9 * (at_s % 7200) / 7200


def _flat(_at_s: float, _seed: int) -> float:
    return 0.5


KINDS: Mapping[str, Callable[[float, int], float]] = {
    "diurnal": _diurnal,
    "weekly": _weekly,
    "bursty": _bursty,
    "step": _step,
    "ramp": _ramp,
    "flat": _flat,
}
