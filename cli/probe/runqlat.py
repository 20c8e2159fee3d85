"""The `dioptase probe runqlat` command: run-queue latency per cgroup as a histogram for each interval."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing

import click
import msgspec
from rich.console import Group
from rich.text import Text

from api.histogram import BOUNDS_NS, SLOT_COUNT, quantile_ns
from api.rates import runq_latency_delta
from api.snapshot import RunqLatency
from api.text import printable
from cli.formats import duration
from cli.probe.commands import cgroup_name, open_or_exit, probe_options, read_intervals, show_intervals
from cli.probe.interval import slot_bars
from probes import runqlat as probe_runqlat
from probes.per_cgroup_probe import LostEvents

NO_RUNQ_LATENCY = RunqLatency(sum_ns=0, count=0, slots=(0,) * SLOT_COUNT)


class CgroupRunqLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Waits of one cgroup that ended within an interval."""

    cgroup: str
    """Path, or `id N` for a cgroup that was removed before the lookup or is outside this mount."""
    id: int
    count: int
    sum_ns: int
    p50_us: float | None
    p99_us: float | None
    slots: tuple[int, ...]


class RunqlatInterval(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `--json`; cgroups are sorted by time waited, longest first."""

    probe: str
    form: str
    wall_time_ns: int
    interval_s: float
    lost: LostEvents
    """Number of switches not counted since the start, by reason."""
    cgroups: tuple[CgroupRunqLatency, ...]
    bounds_ns: tuple[int, ...] = BOUNDS_NS
    """Inclusive upper bounds of the slots; the last slot has none."""


@click.command()
@probe_options
@click.option(
    "--form",
    type=click.Choice(["auto", *probe_runqlat.FORMS]),
    default="auto",
    show_default=True,
    help="Form of the probe; auto selects the cheapest that the kernel supports.",
)
def runqlat(*, as_json: bool, interval: float, duration_s: float | None, form: str, prefix: str) -> None:
    """Show run-queue latency as a histogram per cgroup; every context switch of every task counts."""
    forms = probe_runqlat.FORMS if form == "auto" else (form,)
    with closing(open_or_exit(lambda: probe_runqlat.open_runqlat(forms=forms, blame=False))) as source:
        for refusal in source.refused:
            click.echo(f"form refused: {refusal}", err=True)
        intervals = read_runqlat_intervals(source, interval, duration_s, prefix)
        show_intervals(intervals, render_runqlat, (lambda finished: finished) if as_json else None)


def read_runqlat_intervals(
    source: probe_runqlat.RunqLatencyProbe, interval: float, duration_s: float | None, prefix: str
) -> Iterator[RunqlatInterval]:
    """Yield the waits that ended in each interval from now on."""
    for before, after, paths, seconds in read_intervals(source.read, interval, duration_s):
        yield RunqlatInterval(
            probe="runqlat",
            form=source.form,
            wall_time_ns=time.time_ns(),
            interval_s=seconds,
            lost=source.lost(),
            cgroups=summarize_runqlat(before, after, paths, prefix),
        )


def summarize_runqlat(
    before: Mapping[int, RunqLatency], after: Mapping[int, RunqLatency], paths: dict[int, str], prefix: str
) -> tuple[CgroupRunqLatency, ...]:
    """Pure: return the waits that ended between two readings, of the cgroups below a prefix, longest total first."""
    rows = []
    for number, wait in after.items():
        name = cgroup_name(number, paths)
        change = runq_latency_delta(before.get(number, NO_RUNQ_LATENCY), wait)
        if change is None or change.slots is None or not change.count or not name.startswith(prefix):
            continue
        p50, p99 = (quantile_ns(change.slots, q) or 0.0 for q in (0.5, 0.99))
        rows.append(
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
    return tuple(sorted(rows, key=lambda waits: -waits.sum_ns))


def render_runqlat(finished: RunqlatInterval, height: int | None) -> Group:
    """Render a head line and a histogram per cgroup, as many as fit into `height` lines."""
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
    """Render one cgroup: a line of totals, then a bar per slot between the first and the last non-empty one."""
    mean = duration(waits.sum_ns / waits.count / 1000)
    p50, p99 = duration(waits.p50_us), duration(waits.p99_us)
    totals = f"  {waits.count} waits, mean {mean}, p50 {p50}, p99 {p99}"
    lines = [Text(), Text.assemble((printable(waits.cgroup), "cyan"), totals)]
    return lines + slot_bars(waits.slots)
