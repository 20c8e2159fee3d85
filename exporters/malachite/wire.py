"""Defines what all Malachite documents share: the envelope, and numbers that the client's Go decoder takes.
Pure. A missing key reads as zero there, and one number of the wrong kind loses the whole document; so a value that is
unknown or out of range is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from api.cpu import parse_cpu_list
from api.measurements import LoadAverages, Pressure
from api.metrics import NS_PER_S
from api.text import printable, to_json

KIB = 1024
NS_PER_US, NS_PER_MS = 1000, 1_000_000
MAX_U64, MAX_I64 = (1 << 64) - 1, (1 << 63) - 1


class MalachiteStruct(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a document. What is None is left out; what has no default is always there."""


class PressureLine(MalachiteStruct, frozen=True):
    """One line of a PSI file: shares of time in percent, and the sum in microseconds."""

    avg10: float | None = None
    avg60: float | None = None
    avg300: float | None = None
    total: float | None = None


class PressureFile(MalachiteStruct, frozen=True):
    """One PSI file."""

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
    """A kernel list such as `0-3,8`, and its numbers one by one."""

    meta: str
    inner: tuple[int, ...]


def success_body(data: MalachiteStruct) -> bytes:
    """The body of a good answer."""
    return to_json({"status": 0, "data": data})


def error_body(message: str) -> bytes:
    """The body of any other answer: the client takes a status that is not zero for an error, never for data."""
    return msgspec.json.encode({"status": 1, "message": printable(message)})


def u64(value: int | None) -> int | None:
    """An unsigned integer, or nothing where it does not fit."""
    return value if value is not None and 0 <= value <= MAX_U64 else None


def i64(value: int | None) -> int | None:
    """A signed integer, or nothing where it does not fit."""
    return value if value is not None and -MAX_I64 <= value <= MAX_I64 else None


def is_identifier(number: int) -> bool:
    """Whether it can be the number of a CPU, a node or a cache."""
    return 0 <= number <= MAX_I64


def in_unit(value: int | None, unit: int) -> int | None:
    """An unsigned integer in a larger unit, rounded down: bytes as KiB, nanoseconds as microseconds."""
    return None if value is None else u64(value // unit)


def finite(value: float | None) -> float | None:
    """A finite number; JSON has no others."""
    return value if value is not None and math.isfinite(value) else None


def unix_seconds(ns: int | None) -> int | None:
    """A moment as whole seconds since 1970, rounded down so that it is never in the future."""
    return None if ns is None or ns < 0 else i64(ns // NS_PER_S)


def matching_fields(kind: type[MalachiteStruct], values: Mapping[str, int]) -> dict[str, Any]:
    """Those of the kernel's values that a part of a document has fields for, by the names they share."""
    return {name: value for name in kind.__struct_fields__ if (value := u64(values.get(name))) is not None}


def pressure_file(of: Pressure | None) -> PressureFile | None:
    """A PSI file; `full` is left out where the kernel has none."""
    if of is None:
        return None
    some = PressureLine(
        avg10=finite(of.some_avg10),
        avg60=finite(of.some_avg60),
        avg300=finite(of.some_avg300),
        total=_float(of.some_us),
    )
    if of.full_us is None:
        return PressureFile(some=some)
    full = PressureLine(
        avg10=finite(of.full_avg10),
        avg60=finite(of.full_avg60),
        avg300=finite(of.full_avg300),
        total=_float(of.full_us),
    )
    return PressureFile(some=some, full=full)


def load_averages(of: LoadAverages | None) -> LoadFields | None:
    """Load averages with those of runnable tasks alone."""
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
    """A kernel list, or nothing where the text is none."""
    if text is None:
        return None
    try:
        return NumberList(meta=text, inner=parse_cpu_list(text))
    except ValueError:
        return None


def _float(value: int) -> float | None:
    return float(value) if u64(value) is not None else None
