"""`dioptase probe`: one probe alone, on the live kernel, without an agent."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec

import click
import msgspec
from rich.console import Group
from rich.text import Text

from api.facts import Wait
from api.histograms import BOUNDS_NS, SLOTS, quantile_ns
from api.ports import Probe, Unavailable
from api.rates import wait_delta
from cli.options import Seconds
from cli.probes import generic
from cli.probes.screen import Screen, bars, cgroup_paths, name_of, whole
from cli.words import clean, duration
from probes import registry
from probes import runqlat as probe_runqlat
from probes.groups import Lost
from probes.loader import Compiler, sharing
from probes.runqlat import RunqLat

RUNQLAT = "runqlat"
NOTHING = Wait(sum_ns=0, count=0, slots=(0,) * SLOTS)


class CgroupWaits(msgspec.Struct, frozen=True, kw_only=True):
    """Waits of one cgroup that ended within an interval."""

    cgroup: str
    """Path, or `id N` for a cgroup that was gone before it could be looked up or is outside this mount."""
    id: int
    count: int
    sum_ns: int
    p50_us: float | None
    p99_us: float | None
    slots: tuple[int, ...]


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints, one line each; the busiest cgroup, by time waited, comes first."""

    probe: str
    form: str
    wall_time_ns: int
    interval_s: float
    lost: Lost
    """Switches that were not counted since the start, by reason."""
    cgroups: tuple[CgroupWaits, ...]
    bounds_ns: tuple[int, ...] = BOUNDS_NS
    """Inclusive upper bounds of the slots; the last slot has none."""


class Probes(click.Group):
    """A command per probe; cli/probes/NAME.py has those that are shown in a way of their own, as command object NAME."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return [RUNQLAT, *registry.NAMES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in registry.BY_NAME:
            return super().get_command(ctx, cmd_name)
        if find_spec(f"cli.probes.{cmd_name}") is None:
            return generic.command(registry.BY_NAME[cmd_name])
        special = getattr(import_module(f"cli.probes.{cmd_name}"), cmd_name)
        assert isinstance(special, click.Command)
        return special


@click.group(cls=Probes, invoke_without_command=True)
@click.pass_context
def probe(ctx: click.Context) -> None:
    """Run one probe alone and show what it sees; without a name, try all of them and list them."""
    if ctx.invoked_subcommand is None:
        _list()


def _list() -> None:
    """One line per probe: its name, the form that runs here, and what it shows; where none runs, why and what to do."""
    about = "how long tasks wait for a CPU, as a histogram per cgroup"
    openers: list[tuple[str, str, Callable[[], RunqLat | Probe]]] = [(RUNQLAT, about, probe_runqlat.open_waits)]
    openers += [(row.name, row.about, row.open) for row in registry.ROWS]
    with Compiler() as compiler, sharing(compiler):
        for name, text, opener in openers:
            try:
                opened = opener()
            except Unavailable as error:
                click.echo(f"{name:<12} {'no':<8} {text}\n{'':<21} {error.reason}\n{'':<21} what to do: {error.remedy}")
                continue
            click.echo(f"{name:<12} {opened.form:<8} {text}")
            opened.close()


@probe.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per interval.")
@click.option("--interval", type=Seconds(min=0.05), default=1.0, show_default=True, help="Seconds per histogram.")
@click.option("--duration", "duration_s", type=Seconds(min=0), help="End after this many seconds; default: at Ctrl-C.")
@click.option(
    "--form",
    type=click.Choice(["auto", *probe_runqlat.FORMS]),
    default="auto",
    show_default=True,
    help="How to measure; auto takes the cheapest that the kernel allows.",
)
@click.option("--cgroup", "prefix", default="/", show_default=True, help="Only cgroups whose path begins with this.")
def runqlat(*, as_json: bool, interval: float, duration_s: float | None, form: str, prefix: str) -> None:
    """How long tasks wait for a CPU, as a histogram per cgroup: every task, every switch."""
    forms = probe_runqlat.FORMS if form == "auto" else (form,)
    try:
        source = probe_runqlat.open_waits(forms=forms, blame=False)
    except Unavailable as error:
        raise click.ClickException(f"{error.reason}\nWhat to do: {error.remedy}") from error
    with ExitStack() as stack:
        stack.callback(source.close)
        for refusal in source.refused:
            click.echo(f"form refused: {refusal}", err=True)
        show = _print_json if as_json else stack.enter_context(Screen(render))
        try:
            for finished in intervals(source, interval, duration_s, prefix):
                show(finished)
        except KeyboardInterrupt:
            return


def intervals(
    source: probe_runqlat.RunqLat, interval: float, duration_s: float | None, prefix: str
) -> Iterator[Interval]:
    """The waits that ended in each interval from now on."""
    started = previous_at = time.monotonic()
    end = None if duration_s is None else started + duration_s
    paths = cgroup_paths()
    previous = source.read(paths, complete=whole(paths))
    while end is None or previous_at < end:
        wake = previous_at + interval if end is None else min(previous_at + interval, end)
        time.sleep(max(0.0, wake - time.monotonic()))
        # Paths before and after: a cgroup that came and went within the interval had one in at least one of them.
        paths_now = cgroup_paths()
        waits, now = source.read(paths_now, complete=whole(paths_now)), time.monotonic()
        yield Interval(
            probe="runqlat",
            form=source.form,
            wall_time_ns=time.time_ns(),
            interval_s=round(now - previous_at, 6),
            lost=source.lost(),
            cgroups=summarize(previous, waits, {**paths, **paths_now}, prefix),
        )
        previous, previous_at, paths = waits, now, paths_now


def summarize(
    before: Mapping[int, Wait], after: Mapping[int, Wait], paths: dict[int, str], prefix: str
) -> tuple[CgroupWaits, ...]:
    """Pure: the waits that ended between two reads, of the cgroups below a prefix, most time waited first."""
    found = []
    for number, wait in after.items():
        name = name_of(number, paths)
        change = wait_delta(before.get(number, NOTHING), wait)
        if change is None or change.slots is None or not change.count or not name.startswith(prefix):
            continue
        p50, p99 = (quantile_ns(change.slots, q) or 0.0 for q in (0.5, 0.99))
        found.append(
            CgroupWaits(
                cgroup=name,
                id=number,
                count=change.count,
                sum_ns=change.sum_ns,
                p50_us=round(p50 / 1000, 3),
                p99_us=round(p99 / 1000, 3),
                slots=change.slots,
            )
        )
    return tuple(sorted(found, key=lambda waits: -waits.sum_ns))


def _print_json(finished: Interval) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(finished) + b"\n")  # UTF-8, whatever the terminal's encoding
    sys.stdout.buffer.flush()


def render(finished: Interval, height: int | None) -> Group:
    """A head line and a histogram per cgroup, as many as fit into `height` lines."""
    total = sum(waits.count for waits in finished.cgroups)
    reasons = ((name, getattr(finished.lost, name)) for name in finished.lost.__struct_fields__)
    lost = "".join(f", {count} lost ({name})" for name, count in reasons if count)
    head = f"run-queue wait, form {finished.form}, {finished.interval_s:.1f} s, {total} waits{lost}"
    lines = [Text(head, style="bold")]
    for at, waits in enumerate(finished.cgroups):
        block = histogram(waits)
        if height is not None and len(lines) + len(block) >= height:
            lines.append(Text(f"and {len(finished.cgroups) - at} more cgroups; choose with --cgroup", style="dim"))
            break
        lines += block
    return Group(*lines)


def histogram(waits: CgroupWaits) -> list[Text]:
    """One cgroup: a line of totals, then a bar per slot between the first and the last that is not empty."""
    mean = duration(waits.sum_ns / waits.count / 1000)
    p50, p99 = duration(waits.p50_us), duration(waits.p99_us)
    totals = f"  {waits.count} waits, mean {mean}, p50 {p50}, p99 {p99}"
    lines = [Text(), Text.assemble((clean(waits.cgroup), "cyan"), totals)]
    return lines + bars(waits.slots)
