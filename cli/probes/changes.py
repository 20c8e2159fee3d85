"""What a probe's values have changed by between two reads, whatever their types, and that change as the cells of a table.

Pure. Integers are counters, unless they belong to a type that says how things are at the moment; what is no integer is shown
as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from api.facts import Durations, Load, OomVictim, ThreadStates
from api.rates import delta, wait_delta

MOMENTARY = (ThreadStates, Load, OomVictim)
"""Types whose integers do not count since a beginning."""


class Cell(NamedTuple):
    """One number: which of several things it is about, what it is called, itself, and whether it has grown by that."""

    about: tuple[str, ...]
    name: str
    value: Any
    grown: bool


def change(before: Any, after: Any) -> Any:
    """Growth of counters at any depth; None where one went backwards. What was not there before grew from nothing."""
    if isinstance(after, Durations):
        return after if before is None else wait_delta(before, after)
    if isinstance(after, int) and not isinstance(after, bool):
        return delta(0 if before is None else before, after)
    if isinstance(after, msgspec.Struct) and not isinstance(after, MOMENTARY):
        return {name: change(getattr(before, name, None), getattr(after, name)) for name in after.__struct_fields__}
    if isinstance(after, Mapping):
        return {str(key): change((before or {}).get(key), value) for key, value in after.items()}
    return after


def cells(changed: Any, kind: Any, about: tuple[str, ...] = (), name: str = "") -> Iterator[Cell]:
    """Every number of a change that is not zero, by the type of the value that changed: keys of its mappings say what a
    number is about, its fields what it is called.
    """
    if isinstance(kind, Durations):
        if changed is not None and changed.count:
            yield Cell(about, name, changed, grown=True)
    elif isinstance(kind, MOMENTARY):
        numbers = [
            Cell(about, f"{name}.{field}", getattr(kind, field), grown=False) for field in kind.__struct_fields__
        ]
        yield from numbers if any(cell.value for cell in numbers) else ()
    elif isinstance(kind, msgspec.Struct):
        for field in kind.__struct_fields__:
            yield from cells(changed[field], getattr(kind, field), about, f"{name}.{field}")
    elif isinstance(kind, Mapping):
        for key, value in kind.items():
            yield from cells(changed[str(key)], value, (*about, str(key)), name)
    elif changed not in (None, 0, ()):
        yield Cell(about, name, changed, grown=isinstance(kind, int) and not isinstance(kind, bool))
