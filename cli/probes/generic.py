"""`dioptase probe NAME` for every row of the registry: what the probe saw in each interval, as JSON or as a live table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import click
from rich.console import Group as RenderableGroup

from api.ports import Probe, Seen, Unavailable
from api.text import to_json
from cli.options import Seconds
from cli.probes.changes import Cell, cells, change
from cli.probes.intervals import Group, Interval, Shown
from cli.probes.screen import Screen, cgroup_paths, checked_prefix, device_name, name_of, whole
from cli.probes.tables import render
from probes.registry import Row


def command(row: Row, show_as: Callable[[Shown, int | None], RenderableGroup] = render) -> click.Command:
    """The command object of one probe; `show_as` draws an interval in as many lines as there are."""

    @click.command(row.name, help=f"{row.about[0].upper()}{row.about[1:]}.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object per interval.")
    @click.option("--interval", type=Seconds(min=0.05), default=1.0, show_default=True, help="Seconds per table.")
    @click.option(
        "--duration", "duration_s", type=Seconds(min=0), help="End after so many seconds; default: at Ctrl-C."
    )
    @click.option(
        "--cgroup", "prefix", default="/", show_default=True, callback=checked_prefix,
        help="Only cgroups whose path begins with this.",
    )  # fmt: skip
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
            cells=tuple((cgroup, _named(cell)) for cgroup, cell in found),
        )
        previous, previous_at, paths = seen, now, paths_now


def _named(cell: Cell) -> Cell:
    if cell.name.partition(".")[0] != "block_io":
        return cell
    return cell._replace(about=tuple(device_name(number) for number in cell.about))


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
