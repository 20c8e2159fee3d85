"""The `dioptase probe` group and the generic command that shows a probe's intervals as JSON or a live table."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import click
from rich.console import Console, Group
from rich.live import Live

from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.interfaces import Probe, ProbeReading, Unavailable
from api.text import quote, to_json
from cli.options import Seconds, SuggestingGroup
from cli.probe.interval import (
    CgroupChange,
    ChangeCell,
    DisplayedInterval,
    ProbeInterval,
    change_cells,
    render_interval,
    value_change,
)
from probes import registry
from probes import runqlat as probe_runqlat
from probes.loader import Compiler, sharing
from probes.migrations import ONE_NODE
from probes.registry import ProbeEntry
from probes.runqlat import RunqLatencyProbe

ROOT_CGROUP_ID = 1
T = TypeVar("T")
ReadingT = TypeVar("ReadingT")


class LiveDisplay(Generic[T]):
    """Shows each interval in place on a terminal, one below the other anywhere else."""

    def __init__(self, render: Callable[[T, int | None], Group]) -> None:
        self._render = render
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Callable[[T], None]:
        if not self._console.is_terminal:
            return lambda finished: self._console.print(self._render(finished, None))
        self._live.start()
        return lambda finished: self._live.update(self._render(finished, self._console.height - 1), refresh=True)

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def cgroup_paths() -> dict[int, str]:
    """Return the path of every cgroup by its inode; empty if no hierarchy is mounted."""
    try:
        root = detect_hierarchy(Path("/proc")).primary
    except (Unavailable, OSError):
        return {}
    paths: dict[int, str] = {}
    for directory, _, _ in os.walk(root):
        try:
            paths[Path(directory).stat().st_ino] = directory[len(str(root)) :] or "/"
        except FileNotFoundError:
            continue
    return paths


def validate_cgroup_prefix(_context: click.Context, _parameter: click.Parameter, prefix: str) -> str:
    """Callback of --cgroup: reject a prefix that no cgroup can have; warn about one that no cgroup has now."""
    if not prefix.startswith(("/", "id ")):
        raise click.BadParameter(f"no cgroup begins with {quote(prefix)}: paths begin with /, such as /{prefix}")
    paths = cgroup_paths().values()
    if paths and prefix.startswith("/") and not any(path.startswith(prefix) for path in paths):
        click.echo(f"no cgroup begins with {prefix}; waiting for one", err=True)
    return prefix


def is_complete(paths: Mapping[int, str]) -> bool:
    """Whether these are all cgroups. In a container the mount may show only a part of the hierarchy, whose top is not the root
    cgroup; a probe must then keep the counters of cgroups that are missing in this list but exist."""
    return ROOT_CGROUP_ID in paths


def cgroup_name(number: int, paths: dict[int, str]) -> str:
    """Return the path of a cgroup, or `id N` if it was removed before the lookup or is outside this mount."""
    return paths.get(number, "/" if number == ROOT_CGROUP_ID else f"id {number}")


def device_name(number: str, sys_root: Path = Path("/sys")) -> str:
    """Return the kernel's name of a disk, `vda` for `254:0`; the number itself if the disk is gone."""
    try:
        return (sys_root / "dev/block" / number).readlink().name
    except OSError:
        return number


_OPTIONS = (
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object per interval."),
    click.option("--interval", type=Seconds(min=0.05), default=1.0, show_default=True, help="Seconds per interval."),
    click.option(
        "--duration", "duration_s", type=Seconds(min=0), help="End after this many seconds. Default: run until Ctrl-C."
    ),
    click.option(
        "--cgroup", "prefix", default="/", show_default=True, callback=validate_cgroup_prefix,
        help="Show only cgroups whose path begins with this text.",
    ),
)  # fmt: skip


def probe_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all probe commands have."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def probe_command(
    row: ProbeEntry, render: Callable[[DisplayedInterval, int | None], Group] = render_interval
) -> click.Command:
    """Return the command of one probe; `render` draws an interval in at most a number of lines."""

    @click.command(row.name, help=f"{row.about[0].upper()}{row.about[1:]}.")
    @probe_options
    def run(*, as_json: bool, interval: float, duration_s: float | None, prefix: str) -> None:
        with closing(open_or_exit(row.open)) as probe:
            intervals = read_probe_intervals(probe, interval, duration_s, prefix)
            show_intervals(intervals, render, (lambda shown: shown.interval) if as_json else None)

    return run


def open_or_exit(opener: Callable[[], T]) -> T:
    """Open a probe; an Unavailable becomes a ClickException with the remedy."""
    try:
        return opener()
    except Unavailable as error:
        raise click.ClickException(f"{error.reason}\nremedy: {error.remedy}") from error


def show_intervals(
    intervals: Iterable[T], render: Callable[[T, int | None], Group], as_json: Callable[[T], object] | None
) -> None:
    """Show each interval, or print what `as_json` makes of it, until the last interval or Ctrl-C."""
    with ExitStack() as stack:
        show = None if as_json else stack.enter_context(LiveDisplay(render))
        try:
            for finished in intervals:
                if show is not None:
                    show(finished)
                elif as_json is not None:
                    sys.stdout.buffer.write(
                        to_json(as_json(finished)) + b"\n"
                    )  # UTF-8, whatever the terminal's encoding
                    sys.stdout.buffer.flush()
        except KeyboardInterrupt:
            return


class IntervalReadings(NamedTuple, Generic[ReadingT]):
    """The readings at the beginning and the end of an interval."""

    before: ReadingT
    after: ReadingT
    paths: dict[int, str]
    """Paths at the beginning and at the end: a cgroup that existed only within the interval is in at least one of them."""
    seconds: float


def read_intervals(
    read: Callable[..., ReadingT], interval: float, duration_s: float | None
) -> Iterator[IntervalReadings[ReadingT]]:
    """Yield the readings of each interval from now on; `read` is the `read` method of a probe."""
    previous_at = time.monotonic()
    end = None if duration_s is None else previous_at + duration_s
    paths = cgroup_paths()
    previous = read(paths, complete=is_complete(paths))
    while end is None or previous_at < end:
        wake = previous_at + interval if end is None else min(previous_at + interval, end)
        time.sleep(max(0.0, wake - time.monotonic()))
        paths_now = cgroup_paths()
        reading, now = read(paths_now, complete=is_complete(paths_now)), time.monotonic()
        yield IntervalReadings(previous, reading, {**paths, **paths_now}, round(now - previous_at, 6))
        previous, previous_at, paths = reading, now, paths_now


def read_probe_intervals(
    probe: Probe, interval: float, duration_s: float | None, prefix: str
) -> Iterator[DisplayedInterval]:
    """Yield the changes within each interval from now on."""
    for before, after, paths, seconds in read_intervals(probe.read, interval, duration_s):
        problem = probe.problem()
        cgroups, cells = summarize_interval(before, after, paths, prefix)
        yield DisplayedInterval(
            interval=ProbeInterval(
                probe=probe.name,
                form=probe.form,
                wall_time_ns=time.time_ns(),
                interval_s=seconds,
                cgroups=cgroups,
                node={name: value_change(before.node.get(name), value) for name, value in after.node.items()},
                problem="" if problem is None else f"{problem.reason}: {problem.remedy}",
            ),
            cells=tuple((cgroup, _with_device_names(cell)) for cgroup, cell in cells),
        )


def _with_device_names(cell: ChangeCell) -> ChangeCell:
    if cell.name.partition(".")[0] != "block_io":
        return cell
    return cell._replace(about=tuple(device_name(number) for number in cell.about))


def summarize_interval(
    before: ProbeReading, after: ProbeReading, paths: dict[int, str], prefix: str
) -> tuple[tuple[CgroupChange, ...], tuple[tuple[str, ChangeCell], ...]]:
    """Pure: return the changes between two readings in the cgroups below a prefix and on the node, and the same as cells."""
    changes: list[tuple[int, CgroupChange, list[ChangeCell]]] = []
    for number, values in after.cgroups.items():
        name, old = cgroup_name(number, paths), before.cgroups.get(number, {})
        if not name.startswith(prefix):
            continue
        changed = {field: value_change(old.get(field), value) for field, value in values.items()}
        cells = [cell for field, value in values.items() for cell in change_cells(changed[field], value, name=field)]
        if cells:
            changes.append((_total_change(cells), CgroupChange(cgroup=name, id=number, values=changed), cells))
    changes.sort(key=lambda item: (-item[0], item[1].cgroup))
    rows = [(group.cgroup, cell) for _, group, cells in changes for cell in cells]
    for field, value in after.node.items():
        rows += [("", cell) for cell in change_cells(value_change(before.node.get(field), value), value, name=field)]
    return tuple(group for _, group, _ in changes), tuple(rows)


def _total_change(cells: list[ChangeCell]) -> int:
    return sum(cell.value for cell in cells if isinstance(cell.value, int))


RUNQLAT = "runqlat"


class ProbeGroup(SuggestingGroup):
    """One command per probe; a probe with its own display has the command object NAME in cli/probe/NAME.py."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return [RUNQLAT, *registry.PROBE_NAMES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != RUNQLAT and cmd_name not in registry.BY_NAME:
            return super().get_command(ctx, cmd_name)
        if find_spec(f"cli.probe.{cmd_name}") is None:
            return probe_command(registry.BY_NAME[cmd_name])
        special = getattr(import_module(f"cli.probe.{cmd_name}"), cmd_name)
        assert isinstance(special, click.Command)
        return special


@click.group(cls=ProbeGroup, invoke_without_command=True)
@click.pass_context
def probe(ctx: click.Context) -> None:
    """Run one probe alone and show what it measures; without a name, try all probes and list them."""
    if ctx.invoked_subcommand is None:
        _list_probes()


def _list_probes() -> None:
    """Print one line per probe: name, form that runs here, purpose; for a probe that does not run, the reason and remedy."""
    about = "how long tasks wait for a CPU, as a histogram per cgroup"
    openers: list[tuple[str, str, Callable[[], RunqLatencyProbe | Probe]]] = [
        (RUNQLAT, about, probe_runqlat.open_runqlat)
    ]
    openers += [(row.name, row.about, row.open) for row in registry.PROBES]
    with Compiler() as compiler, sharing(compiler):
        for name, text, opener in openers:
            try:
                opened = opener()
            except Unavailable as error:
                click.echo(f"{name:<12} {'no':<8} {text}\n{'':<21} {error.reason}\n{'':<21} remedy: {error.remedy}")
                continue
            if opened.form == ONE_NODE:
                click.echo(f"{name:<12} {'-':<8} {text}\n{'':<21} not needed: {ONE_NODE}")
            else:
                click.echo(f"{name:<12} {opened.form:<8} {text}")
            opened.close()
