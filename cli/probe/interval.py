"""What a probe measured in one interval: changes between two reads, their JSON form, and their table. Pure.
Integers are counters unless their type is a gauge; everything else is shown as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from api.histogram import BOUNDS_NS, quantile_ns
from api.rates import delta, runq_latency_delta
from api.snapshot import Durations, LoadAverages, OomVictim, ThreadStates
from api.text import printable, to_json
from cli.formats import ABSENT, duration, figures, size

GAUGE_TYPES = (ThreadStates, LoadAverages, OomVictim)
"""Types whose integers are gauges, not counters."""


class ChangeCell(NamedTuple):
    """One number: what it is about, its name, its value, and whether the value is the growth of a counter."""

    about: tuple[str, ...]
    name: str
    value: Any
    grown: bool


def _fields(struct: msgspec.Struct) -> Iterator[tuple[str, str]]:
    # The second name is the one in JSON, which users of `--json` and of the table know.
    return zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)


def value_change(before: Any, after: Any) -> Any:
    """Return the growth of counters at any depth; None where one decreased. A value that is new has grown from zero."""
    if isinstance(after, Durations):
        return after if before is None else runq_latency_delta(before, after)
    if isinstance(after, int) and not isinstance(after, bool):
        return delta(0 if before is None else before, after)
    if isinstance(after, msgspec.Struct) and not isinstance(after, GAUGE_TYPES):
        return {
            label: value_change(getattr(before, name, None), getattr(after, name)) for name, label in _fields(after)
        }
    if isinstance(after, Mapping):
        return {str(key): value_change((before or {}).get(key), value) for key, value in after.items()}
    return after


def change_cells(changed: Any, kind: Any, about: tuple[str, ...] = (), name: str = "") -> Iterator[ChangeCell]:
    """Yield every non-zero number of a change, by the type of the value that changed: keys of mappings become `about`, fields
    the name."""
    if isinstance(kind, Durations):
        if changed is not None and changed.count:
            yield ChangeCell(about, name, changed, grown=True)
    elif isinstance(kind, GAUGE_TYPES):
        numbers = [
            ChangeCell(about, f"{name}.{label}", getattr(kind, field), grown=False) for field, label in _fields(kind)
        ]
        yield from numbers if any(cell.value for cell in numbers) else ()
    elif isinstance(kind, msgspec.Struct):
        for field, label in _fields(kind):
            yield from change_cells(changed[label], getattr(kind, field), about, f"{name}.{label}")
    elif isinstance(kind, Mapping):
        for key, value in kind.items():
            yield from change_cells(changed[str(key)], value, (*about, str(key)), name)
    elif changed not in (None, 0, ()):
        yield ChangeCell(about, name, changed, grown=isinstance(kind, int) and not isinstance(kind, bool))


class CgroupChange(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of one cgroup within an interval."""

    cgroup: str
    """Path, or `id N` for a cgroup that was removed before the lookup or is outside this mount."""
    id: int
    values: Mapping[str, Any]
    """Growth of counters, and other values as they are, by field of a cgroup's sample."""


class ProbeInterval(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `--json`."""

    probe: str
    form: str
    wall_time_ns: int
    interval_s: float
    cgroups: tuple[CgroupChange, ...]
    """Only cgroups with a change; the busiest first."""
    node: Mapping[str, Any]
    problem: str
    """Events that the probe could not count since its start; "" if there are none."""


class DisplayedInterval(msgspec.Struct, frozen=True, kw_only=True):
    """An interval, and its numbers, each with its cgroup; "" stands for the node."""

    interval: ProbeInterval
    cells: tuple[tuple[str, ChangeCell], ...]


BAR_WIDTH = 40


def head_lines(interval: ProbeInterval, title: str = "") -> list[Text]:
    """Render probe, form and length of the interval, with `title`, and the probe's problem if it has one."""
    head = f"{interval.probe}, form {interval.form}, {interval.interval_s:.1f} s{title and f': {title}'}"
    lines = [Text(head, style="bold")]
    return [*lines, Text(printable(interval.problem), style="yellow")] if interval.problem else lines


def duration_texts(durations: Durations) -> tuple[str, str, str]:
    """Return mean, median and 99th percentile as text; `durations` has a count and a histogram."""
    p50, p99 = (duration((quantile_ns(durations.slots or (), q) or 0.0) / 1000) for q in (0.5, 0.99))
    return duration(durations.sum_ns / durations.count / 1000), p50, p99


def path_tail(name: str, width: int) -> str:
    """Shorten a path to `width` cells at its beginning, because its end distinguishes it."""
    return name if cell_len(name) <= width else f"…{name[len(name) - width + 1 :]}"


def slot_bars(slots: Sequence[int]) -> list[Text]:
    """Render a bar per slot, from the first to the last non-empty one."""
    lines = []
    filled = [k for k, count in enumerate(slots) if count]
    highest = max(slots)
    for k in range(filled[0], filled[-1] + 1):
        label = f"≤ {duration(BOUNDS_NS[k] / 1000)}" if k < len(BOUNDS_NS) else f"> {duration(BOUNDS_NS[-1] / 1000)}"
        bar = "█" * max(round(BAR_WIDTH * slots[k] / highest), 1 if slots[k] else 0)
        lines.append(Text(f"  {label:>12} {slots[k]:>8} {bar}"))
    return lines


NODE_LABEL = "node"
COLUMN_TITLES = {
    "threads_by_state.runnable": "run",
    "threads_by_state.uninterruptible": "blocked",
    "threads_by_state.iowait": "i/o",
    "threads_by_state.sleeping": "asleep",
    "load.one": "load1",
    "load.five": "load5",
    "load.fifteen": "load15",
    "load.runnable_one": "run1",
    "load.runnable_five": "run5",
    "load.runnable_fifteen": "run15",
}
"""Titles as in `dioptase top`, short enough for ten columns next to a path. `blocked` is what top splits into stuck and
i/o."""
NANOSECOND_SUFFIXES = ("_ns", ".by_cgroup")
"""Suffixes of values in nanoseconds; the keys of `Blame.by_cgroup` are cgroups, not units."""


def render_interval(shown: DisplayedInterval, height: int | None) -> Group:
    """Render a head line, the table and the histograms, as much as fits into `height` lines."""
    interval = shown.interval
    parts: list[Any] = list(head_lines(interval))
    used = len(parts)
    numbers = [(cgroup, cell) for cgroup, cell in shown.cells if not isinstance(cell.value, Durations)]
    if not shown.cells:
        parts.append(Text("nothing happened", style="dim"))
    if numbers:
        room = None if height is None else max(1, height - used - 2)
        table, omitted = _change_table(numbers, interval.interval_s, room)
        parts.append(table)
        used += table.row_count + 1
        if omitted:
            parts.append(Text(f"and {omitted} more rows; choose with --cgroup", style="dim"))
            used += 1
    omitted = 0
    for cgroup, cell in shown.cells:
        if isinstance(cell.value, Durations):
            block = _duration_histogram(_change_label(cgroup, cell), cell.value)
            if omitted or (height is not None and used + len(block) >= height):
                omitted += 1
                continue
            parts += block
            used += len(block)
    if omitted:
        parts.append(Text(f"and {omitted} more histograms; choose with --cgroup", style="dim"))
    return Group(*parts)


def _change_table(cells: list[tuple[str, ChangeCell]], seconds: float, room: int | None) -> tuple[Table, int]:
    """Return a table with a row per thing and a column per name, and the number of rows that do not fit."""
    rows: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
    for cgroup, cell in cells:
        rows.setdefault((cgroup, cell.about), {})[cell.name] = _format_change(cell, seconds)
    columns = list(dict.fromkeys(cell.name for _, cell in cells))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(_column_title(column), justify="right", overflow="fold")
    shown = list(rows.items())[:room]
    for (cgroup, about), values in shown:
        name = Text.assemble((printable(cgroup or NODE_LABEL), "cyan"), *(f"  {printable(part)}" for part in about))
        table.add_row(name, *(Text(values.get(column, ABSENT)) for column in columns))
    return table, len(rows) - len(shown)


def _column_title(column: str) -> str:
    """Return a title of separate words, which may wrap on a narrow terminal."""
    name = printable(column.rpartition(".")[2].removesuffix("_ns").removesuffix("_bytes"))
    return COLUMN_TITLES.get(column, name.replace("_", " "))


def _format_change(cell: ChangeCell, seconds: float) -> str:
    """Format growth as a rate, and other values as they are."""
    if not cell.grown:
        return figures(cell.value) if isinstance(cell.value, float) else _format_value(cell.value)
    rate = cell.value / seconds
    if cell.name.endswith(NANOSECOND_SUFFIXES):
        return f"{duration(rate / 1000)}/s"
    if cell.name.endswith("_bytes"):
        return f"{size(round(rate))}/s"
    return f"{figures(rate)}/s"


def _format_value(value: Any) -> str:
    return printable(value if isinstance(value, str) else to_json(value).decode())


def _change_label(cgroup: str, cell: ChangeCell) -> Text:
    name = cell.name.rpartition(".")[2]
    return Text.assemble(
        (printable(cgroup or NODE_LABEL), "cyan"), *(f"  {printable(part)}" for part in cell.about), f"  {name}"
    )


def _duration_histogram(label: Text, durations: Durations) -> list[Text]:
    mean, p50, p99 = duration_texts(durations)
    slots = durations.slots
    if slots is None or not any(slots):
        return [Text(), label + Text(f": {durations.count}, mean {mean}")]
    return [Text(), label + Text(f": {durations.count}, mean {mean}, p50 {p50}, p99 {p99}"), *slot_bars(slots)]
