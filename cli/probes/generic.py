"""`dioptase probe NAME` for every row of the registry: what the probe saw in each interval, as JSON or as a live table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import click
import msgspec
from rich.console import Group as RenderableGroup

from api.ports import Probe, Seen, Unavailable
from api.text import to_json
from cli.options import Seconds
from cli.probes.changes import Cell, cells, change
from cli.probes.screen import Screen, cgroup_paths, name_of, whole
from cli.probes.tables import render
from probes.registry import Row


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one cgroup within an interval."""

    cgroup: str
    """Path, or `id N` for a cgroup that was gone before it could be looked up or is outside this mount."""
    id: int
    values: Mapping[str, Any]
    """By field of a cgroup's sample: how much counters have grown by, and what is no counter as it is."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints, one line each."""

    probe: str
    form: str
    wall_time_ns: int
    interval_s: float
    cgroups: tuple[Group, ...]
    """Only those where something happened; the busiest comes first."""
    node: Mapping[str, Any]
    problem: str
    """What the probe could not count, since the start."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """An interval, and its numbers with the cgroup that each belongs to; empty for the node."""

    interval: Interval
    cells: tuple[tuple[str, Cell], ...]


def command(row: Row, show_as: Callable[[Shown, int | None], RenderableGroup] = render) -> click.Command:
    """The command object of one probe; `show_as` draws an interval in as many lines as there are."""

    @click.command(row.name, help=f"{row.about[0].upper()}{row.about[1:]}.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object per interval.")
    @click.option("--interval", type=Seconds(min=0.05), default=1.0, show_default=True, help="Seconds per table.")
    @click.option(
        "--duration", "duration_s", type=Seconds(min=0), help="End after so many seconds; default: at Ctrl-C."
    )
    @click.option(
        "--cgroup", "prefix", default="/", show_default=True, help="Only cgroups whose path begins with this."
    )
    def run(*, as_json: bool, interval: float, duration_s: float | None, prefix: str) -> None:
        try:
            probe = row.open()
        except Unavailable as error:
            raise click.ClickException(f"{error.reason}\nWhat to do: {error.remedy}") from error
        with ExitStack() as stack:
            stack.callback(probe.close)
            show = _print_json if as_json else stack.enter_context(Screen(show_as))
            try:
                for shown in intervals(probe, interval, duration_s, prefix):
                    show(shown)
            except KeyboardInterrupt:
                return

    return run


def intervals(probe: Probe, interval: float, duration_s: float | None, prefix: str) -> Iterator[Shown]:
    """What happened in each interval from now on."""
    started = previous_at = time.monotonic()
    end = None if duration_s is None else started + duration_s
    paths = cgroup_paths()
    previous = probe.read(paths, complete=whole(paths))
    while end is None or previous_at < end:
        wake = previous_at + interval if end is None else min(previous_at + interval, end)
        time.sleep(max(0.0, wake - time.monotonic()))
        # Paths before and after: a cgroup that came and went within the interval had one in at least one of them.
        paths_now = cgroup_paths()
        seen, now = probe.read(paths_now, complete=whole(paths_now)), time.monotonic()
        problem = probe.problem()
        cgroups, found = summarize(previous, seen, {**paths, **paths_now}, prefix)
        yield Shown(
            interval=Interval(
                probe=probe.name,
                form=probe.form,
                wall_time_ns=time.time_ns(),
                interval_s=round(now - previous_at, 6),
                cgroups=cgroups,
                node={name: change(previous.node.get(name), value) for name, value in seen.node.items()},
                problem="" if problem is None else f"{problem.reason}: {problem.remedy}",
            ),
            cells=found,
        )
        previous, previous_at, paths = seen, now, paths_now


def summarize(
    before: Seen, after: Seen, paths: dict[int, str], prefix: str
) -> tuple[tuple[Group, ...], tuple[tuple[str, Cell], ...]]:
    """Pure: what changed between two reads in the cgroups below a prefix and on the node, and the same as cells."""
    found: list[tuple[int, Group, list[Cell]]] = []
    for number, values in after.cgroups.items():
        name, old = name_of(number, paths), before.cgroups.get(number, {})
        if not name.startswith(prefix):
            continue
        changed = {field: change(old.get(field), value) for field, value in values.items()}
        numbers = [cell for field, value in values.items() for cell in cells(changed[field], value, name=field)]
        if numbers:
            found.append((_weight(numbers), Group(cgroup=name, id=number, values=changed), numbers))
    found.sort(key=lambda item: (-item[0], item[1].cgroup))
    rows = [(group.cgroup, cell) for _, group, numbers in found for cell in numbers]
    for field, value in after.node.items():
        rows += [("", cell) for cell in cells(change(before.node.get(field), value), value, name=field)]
    return tuple(group for _, group, _ in found), tuple(rows)


def _weight(numbers: list[Cell]) -> int:
    return sum(cell.value for cell in numbers if isinstance(cell.value, int))


def _print_json(shown: Shown) -> None:
    sys.stdout.buffer.write(to_json(shown.interval) + b"\n")  # UTF-8, whatever the terminal's encoding
    sys.stdout.buffer.flush()
