"""Defines what all Malachite documents share: the envelope, and numbers that the client's Go decoder accepts.
Pure. A missing key reads as zero there, and one number of the wrong kind loses the whole document; so a value that is
unknown or out of range is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from api.cpu import parse_cpu_list
from api.snapshot import LoadAverages, Pressure
from api.text import encodable, to_json
from api.units import NS_PER_S

MAX_U64, MAX_I64 = (1 << 64) - 1, (1 << 63) - 1


class MalachiteStruct(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a document. Fields that are None are left out; fields without a default are always present."""


class PressureLine(MalachiteStruct, frozen=True):
    """One line of a PSI file: shares of time in percent, and the sum in microseconds."""

    avg10: float | None = None
    avg60: float | None = None
    avg300: float | None = None
    total: float | None = None


class PressureFile(MalachiteStruct, frozen=True):
    """One PSI file: stall time of some and of all tasks."""

    some: PressureLine
    full: PressureLine | None = None


class LoadFields(MalachiteStruct, frozen=True):
    """Load averages, in tasks."""

    one_minute: float | None = msgspec.field(default=None, name="one")
    five: float | None = None
    fifteen: float | None = None
    runnable_one: float | None = None
    runnable_five: float | None = None
    runnable_fifteen: float | None = None


class NumberList(MalachiteStruct, frozen=True):
    """A kernel list such as `0-3,8`, and its single numbers."""

    meta: str
    inner: tuple[int, ...]


def success_body(data: MalachiteStruct) -> bytes:
    """Return the body of a successful response."""
    return to_json({"status": 0, "data": data})


def error_body(message: str) -> bytes:
    """Return the body of any other response: the client treats a status other than zero as an error, never as data."""
    return msgspec.json.encode({"status": 1, "message": encodable(message)})


def u64(value: int | None) -> int | None:
    """Return the value, or None if it is no unsigned integer of 64 bits."""
    return value if value is not None and 0 <= value <= MAX_U64 else None


def i64(value: int | None) -> int | None:
    """Return the value, or None if it is no signed integer of 64 bits."""
    return value if value is not None and -MAX_I64 <= value <= MAX_I64 else None


def is_identifier(number: int) -> bool:
    """Return whether a number can identify a CPU, a NUMA node or a cache."""
    return 0 <= number <= MAX_I64


def in_unit(value: int | None, unit: int) -> int | None:
    """Return an unsigned integer in a larger unit, rounded down: bytes as KiB, nanoseconds as microseconds."""
    return None if value is None else u64(value // unit)


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is not finite: JSON has only finite numbers."""
    return value if value is not None and math.isfinite(value) else None


def unix_seconds(ns: int | None) -> int | None:
    """Return whole seconds since 1970, rounded down so that they are never in the future."""
    return None if ns is None or ns < 0 else i64(ns // NS_PER_S)


def known_values(names: Iterable[str], values: Mapping[str, int]) -> dict[str, Any]:
    """Return the kernel's values with these names that are unsigned integers of 64 bits."""
    return {name: value for name in names if (value := u64(values.get(name))) is not None}


def pressure_file(of: Pressure | None) -> PressureFile | None:
    """Return a PSI file; `full` is left out if the kernel has none."""
    if of is None:
        return None
    full = None
    if of.full_us is not None:
        full = _pressure_line(of.full_avg10, of.full_avg60, of.full_avg300, of.full_us)
    return PressureFile(some=_pressure_line(of.some_avg10, of.some_avg60, of.some_avg300, of.some_us), full=full)


def _pressure_line(avg10: float | None, avg60: float | None, avg300: float | None, total_us: int) -> PressureLine:
    total = None if u64(total_us) is None else float(total_us)
    return PressureLine(avg10=finite(avg10), avg60=finite(avg60), avg300=finite(avg300), total=total)


def load_averages(of: LoadAverages | None) -> LoadFields | None:
    """Return load averages of all and of only the runnable tasks."""
    if of is None:
        return None
    return LoadFields(
        one_minute=finite(of.load1),
        five=finite(of.load5),
        fifteen=finite(of.load15),
        runnable_one=finite(of.runnable1),
        runnable_five=finite(of.runnable5),
        runnable_fifteen=finite(of.runnable15),
    )


def number_list(text: str | None) -> NumberList | None:
    """Return a kernel list, or None if the text is none."""
    if text is None:
        return None
    try:
        return NumberList(meta=text, inner=parse_cpu_list(text))
    except ValueError:
        return None
