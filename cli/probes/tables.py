"""A probe's interval for a person: a table of what grew, by cgroup and thing, and a histogram for every distribution. Pure."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from api.facts import Durations
from api.histograms import quantile_ns
from api.text import to_json
from cli.probes.changes import Cell
from cli.probes.intervals import Shown
from cli.probes.screen import bars
from cli.words import NONE, clean, duration, figures, size

NODE = "node"
HEADS = {
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
"""What `dioptase top` calls them too: ten columns have to fit beside a path. `blocked` is what top shows as
stuck and as i/o."""
NANOSECONDS = ("_ns", ".by_cgroup")
"""Ends of names that mean them; `Blame.by_cgroup` says so in its words alone."""


def render(shown: Shown, height: int | None) -> Group:
    """A head line, the table and the histograms, as much as fits into `height` lines."""
    interval = shown.interval
    head = f"{interval.probe}, form {interval.form}, {interval.interval_s:.1f} s"
    parts: list[Any] = [Text(head, style="bold")]
    if interval.problem:
        parts.append(Text(clean(interval.problem), style="yellow"))
    used = len(parts)
    numbers = [(cgroup, cell) for cgroup, cell in shown.cells if not isinstance(cell.value, Durations)]
    if not shown.cells:
        parts.append(Text("nothing happened", style="dim"))
    if numbers:
        room = None if height is None else max(1, height - used - 2)
        table, left = _table(numbers, interval.interval_s, room)
        parts.append(table)
        used += table.row_count + 1
        if left:
            parts.append(Text(f"and {left} more rows; choose with --cgroup", style="dim"))
            used += 1
    left = 0
    for cgroup, cell in shown.cells:
        if isinstance(cell.value, Durations):
            block = _histogram(_label(cgroup, cell), cell.value)
            if left or (height is not None and used + len(block) >= height):
                left += 1
                continue
            parts += block
            used += len(block)
    if left:
        parts.append(Text(f"and {left} more histograms; choose with --cgroup", style="dim"))
    return Group(*parts)


def _table(numbers: list[tuple[str, Cell]], seconds: float, room: int | None) -> tuple[Table, int]:
    """Rows are things, columns are names; how many rows found no room."""
    rows: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
    for cgroup, cell in numbers:
        rows.setdefault((cgroup, cell.about), {})[cell.name] = _number(cell, seconds)
    columns = list(dict.fromkeys(cell.name for _, cell in numbers))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(_head(column), justify="right", overflow="fold")
    shown = list(rows.items())[:room]
    for (cgroup, about), values in shown:
        name = Text.assemble((clean(cgroup or NODE), "cyan"), *(f"  {clean(part)}" for part in about))
        table.add_row(name, *(Text(values.get(column, NONE)) for column in columns))
    return table, len(rows) - len(shown)


def _head(column: str) -> str:
    """In words that may go below one another where the terminal is narrow."""
    name = clean(column.rpartition(".")[2].removesuffix("_ns").removesuffix("_bytes"))
    return HEADS.get(column, name.replace("_", " "))


def _number(cell: Cell, seconds: float) -> str:
    """Growth as a rate, anything else as it is."""
    if not cell.grown:
        return figures(cell.value) if isinstance(cell.value, float) else _text(cell.value)
    rate = cell.value / seconds
    if cell.name.endswith(NANOSECONDS):
        return f"{duration(rate / 1000)}/s"
    if cell.name.endswith("_bytes"):
        return f"{size(round(rate))}/s"
    return f"{figures(rate)}/s"


def _text(value: Any) -> str:
    return clean(value if isinstance(value, str) else to_json(value).decode())


def _label(cgroup: str, cell: Cell) -> Text:
    name = cell.name.rpartition(".")[2]
    return Text.assemble((clean(cgroup or NODE), "cyan"), *(f"  {clean(part)}" for part in cell.about), f"  {name}")


def _histogram(label: Text, times: Durations) -> list[Text]:
    slots = times.slots
    mean = duration(times.sum_ns / times.count / 1000)
    if slots is None or not any(slots):
        return [Text(), label + Text(f": {times.count}, mean {mean}")]
    p50, p99 = (duration((quantile_ns(slots, q) or 0.0) / 1000) for q in (0.5, 0.99))
    return [Text(), label + Text(f": {times.count}, mean {mean}, p50 {p50}, p99 {p99}"), *bars(slots)]
