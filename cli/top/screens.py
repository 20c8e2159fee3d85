"""Screens of `dioptase top` besides the overview (waits, memory, threads, I/O) and their keys. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from rich.cells import set_cell_size
from rich.text import Text

from api.text import printable
from cli import formats
from cli.top.blame_matrix import blame_matrix
from cli.top.charts import bar
from cli.top.container_table import (
    MIN_NAME_WIDTH,
    TableColumn,
    cgroup_label,
    columns_that_fit,
    compact_duration,
    compact_percent,
    compact_size,
    fit_label,
    label_style,
)
from exporters.view.activity import PressureView
from exporters.view.cycle_view import ContainerView, View

REFAULT_MAX_AGE_CYCLES = 15
"""Number of cycles that a value stays on the screen which is not read in every cycle."""


class TopScreen(NamedTuple):
    """One screen: key, short and full title, and columns; the table is sorted by the first column at first."""

    key: str
    short: str
    title: str
    columns: tuple[TableColumn, ...]


def _milliseconds(value: float | None) -> str:
    return formats.ABSENT if value is None else formats.figures(value) if value else "0"


def _tenths(value: float | None) -> str:
    return formats.ABSENT if value is None else formats.fixed(value, 1 if 0 < value < 9.95 else 0)


def _memory_used_ratio(c: ContainerView) -> float | None:
    return c.memory_bytes / c.memory_limit_bytes if c.memory_limit_bytes and c.memory_bytes is not None else None


def _uninterruptible_threads(c: ContainerView) -> float | None:
    """Return the threads that no signal wakes, without those that wait for a disk: these are in column i/o."""
    states = c.threads_by_state
    return states.uninterruptible - (states.iowait or 0) if states else None


OVERVIEW = TopScreen("1", "overview", "overview", ())
RUNQ_LATENCY = TopScreen("2", "waits", "interference", (
    TableColumn("waiting", 8, 9, lambda c: c.wait_cores, formats.cores),
    TableColumn("p99", 6, 8, lambda c: c.wait.p99_us if c.wait else None, compact_duration),
    TableColumn("p50", 6, 6, lambda c: c.wait.p50_us if c.wait else None, compact_duration),
    TableColumn("cpu", 5, 7, lambda c: c.cpu_cores, formats.cores),
    TableColumn("thrtl", 5, 5, lambda c: c.throttled_ratio, compact_percent),
    TableColumn("longest", 8, 4, lambda c: c.throttle_p99_us, compact_duration),
    TableColumn("waits", 8, 3, lambda c: c.wait.count if c.wait else None, formats.integer),
))  # fmt: skip
MEMORY = TopScreen("3", "memory", "memory and reclaim", (
    TableColumn("memory", 7, 9, lambda c: c.memory_bytes, compact_size),
    TableColumn("limit", 6, 7, lambda c: c.memory_limit_bytes, compact_size),
    TableColumn("used", 5, 6, _memory_used_ratio, compact_percent),
    TableColumn("direct", 7, 8, lambda c: c.reclaim.direct_ms if c.reclaim else None, _milliseconds),
    TableColumn("at limit", 9, 7, lambda c: c.reclaim.limit_ms if c.reclaim else None, _milliseconds),
    TableColumn("pages", 7, 3, lambda c: c.reclaim.pages if c.reclaim else None, _tenths),
    TableColumn("refault", 8, 5, lambda c: c.refaults, _tenths),
    TableColumn("stall", 6, 4, lambda c: c.memory_pressure_ratio, compact_percent),
    TableColumn("oom", 4, 2, lambda c: c.oom_kills, formats.integer),
))  # fmt: skip
THREADS = TopScreen("4", "threads", "threads and pressure", (
    TableColumn("run", 5, 9, lambda c: c.threads_by_state.runnable if c.threads_by_state else None, formats.integer),
    TableColumn("stuck", 5, 8, _uninterruptible_threads, formats.integer),
    TableColumn("i/o", 5, 6, lambda c: c.threads_by_state.iowait if c.threads_by_state else None, formats.integer),
    TableColumn("asleep", 7, 5, lambda c: c.threads_by_state.sleeping if c.threads_by_state else None, formats.integer),
    TableColumn("load1", 6, 4, lambda c: c.load[0] if c.load else None, formats.cores),
    TableColumn("cpu", 6, 8, lambda c: c.cpu_pressure_ratio, compact_percent),
    TableColumn("memory", 7, 7, lambda c: c.memory_pressure_ratio, compact_percent),
    TableColumn("disk", 6, 6, lambda c: c.io_pressure_ratio, compact_percent),
))  # fmt: skip
IO = TopScreen("5", "i/o", "disk and network", (
    TableColumn("read/s", 7, 9, lambda c: c.traffic.disk_read if c.traffic else None, compact_size),
    TableColumn("write/s", 7, 9, lambda c: c.traffic.disk_write if c.traffic else None, compact_size),
    TableColumn("p99", 6, 7, lambda c: c.traffic.disk_p99_us if c.traffic else None, compact_duration),
    TableColumn("stall", 6, 5, lambda c: c.io_pressure_ratio, compact_percent),
    TableColumn("sent/s", 7, 8, lambda c: c.traffic.sent if c.traffic else None, compact_size),
    TableColumn("recv/s", 7, 8, lambda c: c.traffic.received if c.traffic else None, compact_size),
    TableColumn("retrans", 8, 6, lambda c: c.traffic.retransmits if c.traffic else None, _tenths),
))  # fmt: skip
SCREENS = {screen.key: screen for screen in (OVERVIEW, RUNQ_LATENCY, MEMORY, THREADS, IO)}
HELP_LINES = (
    "1 overview              reclaimable and used CPU, waits, decisions",
    "2 interference          ms of wait a second, by the cgroup that held the CPU",
    "3 memory and reclaim    use, limits, reclaim (ms a second), refaults, OOM kills",
    "4 threads and pressure  threads by state, load, share of time stalled (PSI)",
    "5 disk and network      bytes a second, p99 of disk requests, TCP retransmits",
    "",
    "s S                     sort the table by the next or previous column",
    "n                       sort the table by name",
    "? h                     show or hide this help",
    "q                       quit; so does Ctrl-C",
    "",
    "headroom                CPU for all reclaimed pods together,",
    "                        their current use included",
    "",
    "The page of the agent shows the same numbers with their history.",
)


def screen_lines_of(
    view: View, history: Sequence[View], screen: TopScreen, sort: int, size: tuple[int, int]
) -> list[Text]:
    """Render the lines between header and key line; `sort` is the index of a column, or -1 for the name."""
    width, height = size
    header = {
        RUNQ_LATENCY.key: lambda: blame_matrix(view, history, width, max(height // 2, 6)),
        MEMORY.key: lambda: _memory_header(view, width),
        THREADS.key: lambda: _pressure_header(view, width),
        IO.key: lambda: [_pressure_bar(view, "io", "yellow", width)],
    }[screen.key]()
    return [*header, *_cgroup_table(view, history, screen, sort, (width, height - len(header)))]


def _cgroup_table(
    view: View, history: Sequence[View], screen: TopScreen, sort: int, size: tuple[int, int]
) -> list[Text]:
    width, height = size
    columns = columns_that_fit(screen.columns, width - MIN_NAME_WIDTH - 1)
    sort_column = screen.columns[sort] if 0 <= sort < len(screen.columns) else None
    cgroups = _carry_refaults(view, history)
    if sort_column is None:
        cgroups.sort(key=cgroup_label)
    else:
        cgroups.sort(key=lambda c: (sort_column.value(c) is None, -(sort_column.value(c) or 0.0)))
    name_width = width - sum(column.width + 1 for column in columns)
    heads = [set_cell_size("cgroup" + (" ▾" if sort_column is None else ""), name_width)]
    heads += [column.align(("▾" if column is sort_column else "") + column.title) for column in columns]
    lines = [Text(" ".join(heads), style="dim")]
    max_rows = max(height - 1, 0)
    shown = cgroups[:max_rows] if len(cgroups) <= max_rows else cgroups[: max(max_rows - 1, 0)]
    for c in shown:
        line = Text.assemble((fit_label(cgroup_label(c), name_width), label_style(c)))
        for column in columns:
            line.append(" " + column.cell(c))
        lines.append(line)
    hidden = len(cgroups) - len(shown) + view.other_cgroups - len(view.others)
    if hidden > 0 and len(lines) < height:
        lines.append(Text(f"and {hidden:,} more", style="dim"))
    return lines[: max(height, 0)]


def _carry_refaults(view: View, history: Sequence[View]) -> list[ContainerView]:
    """Return all cgroups of the view; refaults, which are not read in every cycle, have their latest value."""
    latest: dict[str, float] = {}
    for cycle in history[-REFAULT_MAX_AGE_CYCLES:]:
        latest |= {c.cgroup: c.refaults for c in (*cycle.containers, *cycle.others) if c.refaults is not None}
    return [
        c if c.refaults is not None else msgspec.structs.replace(c, refaults=latest.get(c.cgroup))
        for c in (*view.containers, *view.others)
    ]


def _memory_header(view: View, width: int) -> list[Text]:
    node = view.node
    total, free = node.memory_total_bytes, node.memory_available_bytes
    used = bar(max(width // 4, 8), total or 0, ((total - free, "█", "cyan"),) if total and free is not None else ())
    lines = [Text.assemble("memory ", used, f" {formats.size(free)} of {formats.size(total)} available")]
    reclaim = node.reclaim
    facts = [
        f"direct reclaim {_milliseconds(reclaim.direct_ms if reclaim else None)} ms/s",
        f"at limits {_milliseconds(reclaim.limit_ms if reclaim else None)} ms/s",
        f"stalled {_pressure_text(node.pressure.get('memory'))}",
    ]
    lines.append(Text("reclaim " + formats.join(facts)))
    for k in node.kswapd[:2]:
        lines.append(
            Text(
                f"kswapd{k.node} active {formats.percent(k.active_ratio)} · wakeups {_tenths(k.wakeups)}/s · "
                f"scanned {_tenths(k.scanned_pages)}/s · reclaimed {_tenths(k.reclaimed_pages)}/s"
            )
        )
    if view.memory is not None:
        headroom = view.memory.headroom_bytes
        amount = formats.ABSENT if headroom is None else formats.size(round(headroom))
        state = view.memory.condition.state.value
        lines.append(Text(f"batch   {amount} headroom · {state}: {printable(view.memory.condition.reason.text)}"))
    low = [f"{zone.node} {printable(zone.name)}" for zone in node.zones if zone.free < zone.low]
    if low:
        lines.append(Text(f"! below the low watermark: {', '.join(low)}", style="yellow"))
    for victim in node.oom_victims[-2:]:
        what = f"{printable(victim.command)} (process {victim.pid}) of {printable(victim.cgroup)}"
        lines.append(Text(f"✕ {formats.clock(victim.wall_time_ns / 1e6)} killed for memory: {what}", style="red"))
    return lines


def _pressure_header(view: View, width: int) -> list[Text]:
    node = view.node
    styles = {"cpu": "cyan", "memory": "magenta", "io": "yellow"}
    lines = [_pressure_bar(view, resource, style, width) for resource, style in styles.items()]
    load = " ".join(formats.cores(value) for value in node.load) if node.load else formats.ABSENT
    counts = f"running {formats.integer(node.running)} · blocked {formats.integer(node.blocked)}"
    lines.append(Text(f"load   {load} · {counts}"))
    return lines


def _pressure_bar(view: View, resource: str, style: str, width: int) -> Text:
    pressure = view.node.pressure.get(resource)
    full = (pressure.full or 0.0) if pressure else 0.0
    parts = ((full, "█", style), (pressure.some - full, "▒", style)) if pressure else ()
    return Text.assemble(f"{resource:<7}", bar(max(width // 3, 8), 1.0, parts), f" {_pressure_text(pressure)}")


def _pressure_text(pressure: PressureView | None) -> str:
    if pressure is None:
        return formats.ABSENT
    return f"some {formats.percent(pressure.some)} · all {formats.percent(pressure.full)}"


SORT_BY_NAME = -1


class ScreenSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The selected screen and its sort order."""

    screen: str = OVERVIEW.key
    sort: int = 0
    """Index of the column that the table is sorted by, or SORT_BY_NAME."""
    help: bool = False


def handle_key(choice: ScreenSelection, key: str) -> ScreenSelection | None:
    """Return the selection after a key; None ends the view. Unknown keys change nothing."""
    columns = len(SCREENS[choice.screen].columns)
    if key in "qQ":
        return None
    if key in SCREENS:
        return ScreenSelection(screen=key)
    if key in "?hH":
        return msgspec.structs.replace(choice, help=not choice.help)
    if key == "n":
        return msgspec.structs.replace(choice, sort=SORT_BY_NAME)
    if key in "sS" and columns:
        step = 1 if key == "s" else -1
        current = choice.sort if choice.sort != SORT_BY_NAME else -step
        return msgspec.structs.replace(choice, sort=(current + step) % columns)
    return choice
