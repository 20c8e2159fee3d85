"""What all documents share: the envelope, and numbers that the client's decoder takes.

The client is written in Go: a key that is missing reads as zero, an unknown one is ignored, and one number of the wrong
kind (a fraction or a negative one where an unsigned integer is due, a string, NaN) loses the whole document. So a value
that nobody knows, or that cannot be, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from api.catalogue import NS_PER_S
from api.cpus import parse_cpu_list
from api.facts import Load, Pressure
from api.text import printable, to_json

KIB = 1024
NS_PER_US, NS_PER_MS = 1000, 1_000_000
MAX_U64, MAX_I64 = (1 << 64) - 1, (1 << 63) - 1


class Wire(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a document. What is None is left out; what has no default is always there."""


class Stall(Wire, frozen=True):
    """One line of a PSI file: shares of time in percent, and the sum in microseconds."""

    avg10: float | None = None
    avg60: float | None = None
    avg300: float | None = None
    total: float | None = None


class Stalls(Wire, frozen=True):
    """One PSI file."""

    some: Stall
    full: Stall | None = None


class Loads(Wire, frozen=True):
    """Load averages, in tasks."""

    one: float | None = None
    five: float | None = None
    fifteen: float | None = None
    runnable_one: float | None = None
    runnable_five: float | None = None
    runnable_fifteen: float | None = None


class Numbers(Wire, frozen=True):
    """A kernel list such as `0-3,8`, and its numbers one by one."""

    meta: str
    inner: tuple[int, ...]


def envelope(data: Wire) -> bytes:
    """The body of a good answer."""
    return to_json({"status": 0, "data": data})


def refusal(message: str) -> bytes:
    """The body of any other answer: the client takes a status that is not zero for an error, never for data."""
    return msgspec.json.encode({"status": 1, "message": printable(message)})


def u64(value: int | None) -> int | None:
    """An unsigned integer, or nothing where it does not fit."""
    return value if value is not None and 0 <= value <= MAX_U64 else None


def i64(value: int | None) -> int | None:
    """A signed integer, or nothing where it does not fit."""
    return value if value is not None and -MAX_I64 <= value <= MAX_I64 else None


def counts(number: int) -> bool:
    """Whether it can be the number of a CPU, a node or a cache."""
    return 0 <= number <= MAX_I64


def scaled(value: int | None, unit: int) -> int | None:
    """An unsigned integer in a larger unit, rounded down: bytes as KiB, nanoseconds as microseconds."""
    return None if value is None else u64(value // unit)


def real(value: float | None) -> float | None:
    """A finite number; JSON has no others."""
    return value if value is not None and math.isfinite(value) else None


def seconds(ns: int | None) -> int | None:
    """A moment as whole seconds since 1970, rounded down so that it is never in the future."""
    return None if ns is None or ns < 0 else i64(ns // NS_PER_S)


def named(kind: type[Wire], values: Mapping[str, int]) -> dict[str, Any]:
    """Those of the kernel's values that a part of a document has fields for, by the names they share."""
    return {name: value for name in kind.__struct_fields__ if (value := u64(values.get(name))) is not None}


def stalls(of: Pressure | None) -> Stalls | None:
    """A PSI file; `full` is left out where the kernel has none."""
    if of is None:
        return None
    some = Stall(
        avg10=real(of.some_avg10), avg60=real(of.some_avg60), avg300=real(of.some_avg300), total=_float(of.some_us)
    )
    if of.full_us is None:
        return Stalls(some=some)
    full = Stall(
        avg10=real(of.full_avg10), avg60=real(of.full_avg60), avg300=real(of.full_avg300), total=_float(of.full_us)
    )
    return Stalls(some=some, full=full)


def loads(of: Load | None) -> Loads | None:
    """Load averages with those of runnable tasks alone."""
    if of is None:
        return None
    return Loads(
        one=real(of.one),
        five=real(of.five),
        fifteen=real(of.fifteen),
        runnable_one=real(of.runnable_one),
        runnable_five=real(of.runnable_five),
        runnable_fifteen=real(of.runnable_fifteen),
    )


def numbers(text: str | None) -> Numbers | None:
    """A kernel list, or nothing where the text is none."""
    if text is None:
        return None
    try:
        return Numbers(meta=text, inner=parse_cpu_list(text))
    except ValueError:
        return None


def _float(value: int) -> float | None:
    return float(value) if u64(value) is not None else None
