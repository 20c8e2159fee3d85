"""The `dioptase probe runqlat` command: run-queue latency per cgroup as a histogram for each interval."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import click
import msgspec
from rich.console import Group
from rich.text import Text

from api.histogram import BOUNDS_NS, SLOT_COUNT, quantile_ns
from api.interfaces import Unavailable
from api.measurements import RunqLatency
from api.rates import runq_latency_delta
from cli.formats import duration, printable
from cli.options import Seconds
from cli.probe.commands import LiveDisplay, cgroup_name, cgroup_paths, is_complete, validate_cgroup_prefix
from cli.probe.interval import slot_bars
from probes import runqlat as probe_runqlat
from probes.cgroup_table import LostEvents

NO_RUNQ_LATENCY = RunqLatency(sum_ns=0, count=0, slots=(0,) * SLOT_COUNT)


class CgroupRunqLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Waits of one cgroup that ended within an interval."""

    cgroup: str
    """Path, or `id N` for a cgroup that was gone before it could be looked up or is outside this mount."""
    id: int
    count: int
    sum_ns: int
    p50_us: float | None
    p99_us: float | None
    slots: tuple[int, ...]


class RunqlatInterval(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints, one line each; the busiest cgroup, by time waited, comes first."""

    probe: str
    form: str
    wall_time_ns: int
    interval_s: float
    lost: LostEvents
    """Switches that were not counted since the start, by reason."""
    cgroups: tuple[CgroupRunqLatency, ...]
    bounds_ns: tuple[int, ...] = BOUNDS_NS
    """Inclusive upper bounds of the slots; the last slot has none."""


@click.command()
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
@click.option(
    "--cgroup", "prefix", default="/", show_default=True, callback=validate_cgroup_prefix,
    help="Only cgroups whose path begins with this.",
)  # fmt: skip
def runqlat(*, as_json: bool, interval: float, duration_s: float | None, form: str, prefix: str) -> None:
    """How long tasks wait for a CPU, as a histogram per cgroup: every task, every switch."""
    forms = probe_runqlat.FORMS if form == "auto" else (form,)
    try:
        source = probe_runqlat.open_runqlat(forms=forms, blame=False)
    except Unavailable as error:
        raise click.ClickException(f"{error.reason}\nWhat to do: {error.remedy}") from error
    with ExitStack() as stack:
        stack.callback(source.close)
        for refusal in source.refused:
            click.echo(f"form refused: {refusal}", err=True)
        show = _print_runqlat_json if as_json else stack.enter_context(LiveDisplay(render_runqlat))
        try:
            for finished in read_runqlat_intervals(source, interval, duration_s, prefix):
                show(finished)
        except KeyboardInterrupt:
            return


def read_runqlat_intervals(
    source: probe_runqlat.RunqLatencyProbe, interval: float, duration_s: float | None, prefix: str
) -> Iterator[RunqlatInterval]:
    """The waits that ended in each interval from now on."""
    started = previous_at = time.monotonic()
    end = None if duration_s is None else started + duration_s
    paths = cgroup_paths()
    previous = source.read(paths, complete=is_complete(paths))
    while end is None or previous_at < end:
        wake = previous_at + interval if end is None else min(previous_at + interval, end)
        time.sleep(max(0.0, wake - time.monotonic()))
        # Paths before and after: a cgroup that came and went within the interval had one in at least one of them.
        paths_now = cgroup_paths()
        waits, now = source.read(paths_now, complete=is_complete(paths_now)), time.monotonic()
        yield RunqlatInterval(
            probe="runqlat",
            form=source.form,
            wall_time_ns=time.time_ns(),
            interval_s=round(now - previous_at, 6),
            lost=source.lost(),
            cgroups=summarize_runqlat(previous, waits, {**paths, **paths_now}, prefix),
        )
        previous, previous_at, paths = waits, now, paths_now


def summarize_runqlat(
    before: Mapping[int, RunqLatency], after: Mapping[int, RunqLatency], paths: dict[int, str], prefix: str
) -> tuple[CgroupRunqLatency, ...]:
    """Pure: the waits that ended between two reads, of the cgroups below a prefix, most time waited first."""
    found = []
    for number, wait in after.items():
        name = cgroup_name(number, paths)
        change = runq_latency_delta(before.get(number, NO_RUNQ_LATENCY), wait)
        if change is None or change.slots is None or not change.count or not name.startswith(prefix):
            continue
        p50, p99 = (quantile_ns(change.slots, q) or 0.0 for q in (0.5, 0.99))
        found.append(
            CgroupRunqLatency(
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


def _print_runqlat_json(finished: RunqlatInterval) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(finished) + b"\n")  # UTF-8, whatever the terminal's encoding
    sys.stdout.buffer.flush()


def render_runqlat(finished: RunqlatInterval, height: int | None) -> Group:
    """A head line and a histogram per cgroup, as many as fit into `height` lines."""
    total = sum(waits.count for waits in finished.cgroups)
    reasons = ((name, getattr(finished.lost, name)) for name in finished.lost.__struct_fields__)
    lost = "".join(f", {count} lost ({name})" for name, count in reasons if count)
    head = f"run-queue wait, form {finished.form}, {finished.interval_s:.1f} s, {total} waits{lost}"
    lines = [Text(head, style="bold")]
    for at, waits in enumerate(finished.cgroups):
        block = runqlat_histogram(waits)
        if height is not None and len(lines) + len(block) >= height:
            lines.append(Text(f"and {len(finished.cgroups) - at} more cgroups; choose with --cgroup", style="dim"))
            break
        lines += block
    return Group(*lines)


def runqlat_histogram(waits: CgroupRunqLatency) -> list[Text]:
    """One cgroup: a line of totals, then a bar per slot between the first and the last that is not empty."""
    mean = duration(waits.sum_ns / waits.count / 1000)
    p50, p99 = duration(waits.p50_us), duration(waits.p99_us)
    totals = f"  {waits.count} waits, mean {mean}, p50 {p50}, p99 {p99}"
    lines = [Text(), Text.assemble((printable(waits.cgroup), "cyan"), totals)]
    return lines + slot_bars(waits.slots)
