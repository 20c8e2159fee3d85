"""Numbers and names in a person's words, for terminals; exporters/page/format.js speaks the same ones.

Absent is a dash, never a zero. Names come from outside (pods, cgroups, kernel texts): `clean` makes every character that
could move a cursor or change a colour visible instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

from api.decisions import Decision, JournalEntry, Outcome, Status

NONE = "\N{EN DASH}"
SIGNS = {
    Status.APPLIED: "✓",
    Status.UNCHANGED: "=",
    Status.DRY_RUN: "◌",
    Status.REFUSED: "✕",
    Status.VANISHED: "∅",
    Status.MISMATCH: "≠",
}
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
ABSURD = 1e15
_LISTS = {"cpuset.cpus": "CPUs", "cpuset.mems": "NUMA nodes"}
_BYTES = ("memory.max", "memory.high", "memory.low", "memory.min", "memory.swap.max", "memory.reclaim", "drop_cache")
"""Knobs whose value is so many bytes."""


def clean(text: str) -> str:
    """The text with everything unprintable spelled out: `\\x1b[31m` instead of red."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def fixed(value: float, digits: int) -> str:
    """Rounded half up, like a browser does; Python's own formatting rounds halves to even. Beyond what anything is counted in,
    a power of ten: others tell these numbers, and none may end the table that has those of a whole fleet."""
    if abs(value) >= ABSURD:
        return f"{value:.2e}"
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def figures(value: float) -> str:
    """Three figures at most: 123, 12.3, 1.23."""
    size = abs(value)
    return fixed(value, 0 if size >= 99.95 else 1 if size >= 9.995 else 2)


def cores(value: float | None) -> str:
    return NONE if value is None else fixed(value, 1 if abs(value) >= 99.95 else 2)


def duration(us: float | None) -> str:
    """A time given in microseconds."""
    if us is None:
        return NONE
    if us < 999.5:
        return f"{figures(us)} µs"
    return f"{figures(us / 1e3)} ms" if us < 999_500 else f"{figures(us / 1e6)} s"


def milliseconds(ms: float | None) -> str:
    return duration(None if ms is None else ms * 1000)


def percent(ratio: float | None) -> str:
    if ratio is None:
        return NONE
    value = ratio * 100
    if 0 < value < 0.1:
        return "< 0.1 %"
    return f"{fixed(value, 1 if 0 < value < 9.95 else 0)} %"


def size(value: int | None) -> str:
    """Bytes."""
    if value is None:
        return NONE
    for unit_bytes, unit in _SIZES:
        if value >= unit_bytes:
            return f"{figures(value / unit_bytes)} {unit}"
    return f"{value} B"


def integer(value: float | None) -> str:
    if value is None or abs(value) >= ABSURD:
        return NONE if value is None else fixed(value, 0)
    return f"{int(fixed(value, 0)):,}"


def clock(wall_time_ms: float) -> str:
    """Local time of day."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(wall_time_ms / 1000))
    except (OverflowError, ValueError, OSError):
        return NONE


def age(seconds: float) -> str:
    """How long ago something was; a clock that runs behind the agent's makes it now."""
    if seconds < 99.5:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def knob_value(knob: str, value: str | None) -> str:
    """A knob's value as its meaning."""
    if value is None:
        return NONE
    if knob == "cpu.max":
        quota, _, period = value.partition(" ")
        if quota == "max":
            return "no limit"
        if quota.isdigit() and period.isdigit() and int(period):
            return f"{cores(int(quota) / int(period))} cores"
    if knob in _LISTS:
        return f"{_LISTS[knob]} {clean(value)}" if value else "all of its parent"
    if knob in _BYTES:
        return "no limit" if value == "max" else size(int(value)) if value.isdecimal() else clean(value)
    if knob == "cpu.idle":
        return {"1": "only when idle", "0": "normal"}.get(value, clean(value))
    return clean(value)


def change(outcome: Outcome) -> str:
    """`3.40 → 3.80 cores`, `3.80 cores → no limit`: the unit is said once."""
    knob = outcome.decision.knob.value
    before, after = knob_value(knob, outcome.before), knob_value(knob, outcome.decision.value)
    if after.endswith(" cores"):
        before = before.removesuffix(" cores")
    return f"{before} → {after}"


def decision_line(entry: JournalEntry) -> str:
    """One decision on one line: when, what came of it, of which pod, which knob, from what to what, and why."""
    outcome, decision = entry.outcome, entry.outcome.decision
    why = clean(decision.verdict.text)
    if outcome.error:
        why = f"{clean(outcome.error)}; {why}"
    status = f"{SIGNS[outcome.status]} {outcome.status.value}"
    when = clock(entry.wall_time_ns / 1e6)
    return f"{when}  {status:<9}  {owner(decision)}  {decision.knob.value} {change(outcome)}  ({why})"


def owner(decision: Decision) -> str:
    """Whom a decision is about: the pod; the cgroup itself where it is no pod's."""
    return clean(decision.pod or decision.cgroup)


def join(parts: Sequence[str], separator: str = " · ") -> str:
    """The parts that are not empty."""
    return separator.join(part for part in parts if part)
