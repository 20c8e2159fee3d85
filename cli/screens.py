"""The further screens of `dioptase top`: who waits on whom, memory, threads and pressure, disk and network: a View as lines
of text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from rich.cells import set_cell_size
from rich.text import Text

from cli import words
from cli.blame import matrix
from cli.charts import bar
from cli.names import fitted, name_of
from cli.table import right, style_of
from exporters.cgroup_view import ContainerView
from exporters.node_view import PressureView
from exporters.view import View

CARRIED = 15
"""So many rounds a value that is read every few rounds only stays on the screen."""
_SHORT = str.maketrans({" ": None})


class Column(NamedTuple):
    """`read` gives what the column is sorted by; the lowest importance leaves first where the terminal is narrow."""

    title: str
    width: int
    importance: int
    read: Callable[[ContainerView], float | None]
    say: Callable[[float | None], str]


class Screen(NamedTuple):
    """One screen: key, what it is called, and the columns of its table; the first is what it is sorted by at first."""

    key: str
    short: str
    title: str
    columns: tuple[Column, ...]


def _short(say: Callable[[float | None], str]) -> Callable[[float | None], str]:
    return lambda value: say(value).translate(_SHORT)


def _size(value: float | None) -> str:
    return words.size(None if value is None else int(value)).translate(_SHORT).removesuffix("iB")


def _milliseconds(value: float | None) -> str:
    return words.NONE if value is None else words.figures(value) if value else "0"


def _tenths(value: float | None) -> str:
    return words.NONE if value is None else words.fixed(value, 1 if 0 < value < 9.95 else 0)


def _share(c: ContainerView) -> float | None:
    return c.memory_bytes / c.memory_limit_bytes if c.memory_limit_bytes and c.memory_bytes is not None else None


def _stuck(c: ContainerView) -> float | None:
    """Threads that no signal wakes and that do not wait for a disk: those stand under i/o."""
    states = c.threads_by_state
    return states.uninterruptible - (states.iowait or 0) if states else None


OVERVIEW = Screen("1", "overview", "overview", ())
WAITS = Screen("2", "waits", "who waits on whom", (
    Column("waiting", 8, 9, lambda c: c.wait_cores, words.cores),
    Column("p99", 6, 8, lambda c: c.wait.p99_us if c.wait else None, _short(words.duration)),
    Column("p50", 6, 6, lambda c: c.wait.p50_us if c.wait else None, _short(words.duration)),
    Column("cpu", 5, 7, lambda c: c.cpu_cores, words.cores),
    Column("thrtl", 5, 5, lambda c: c.throttled_ratio, _short(words.percent)),
    Column("longest", 8, 4, lambda c: c.throttle_p99_us, _short(words.duration)),
    Column("waits", 8, 3, lambda c: c.wait.count if c.wait else None, words.integer),
))  # fmt: skip
MEMORY = Screen("3", "memory", "memory and reclaim", (
    Column("memory", 7, 9, lambda c: c.memory_bytes, _size),
    Column("limit", 6, 7, lambda c: c.memory_limit_bytes, _size),
    Column("used", 5, 6, _share, _short(words.percent)),
    Column("direct", 7, 8, lambda c: c.reclaim.direct_ms if c.reclaim else None, _milliseconds),
    Column("at limit", 9, 7, lambda c: c.reclaim.limit_ms if c.reclaim else None, _milliseconds),
    Column("pages", 7, 3, lambda c: c.reclaim.pages if c.reclaim else None, _tenths),
    Column("refault", 8, 5, lambda c: c.refaults, _tenths),
    Column("stall", 6, 4, lambda c: c.memory_pressure_ratio, _short(words.percent)),
    Column("oom", 4, 2, lambda c: c.oom_kills, words.integer),
))  # fmt: skip
THREADS = Screen("4", "threads", "threads and pressure", (
    Column("run", 5, 9, lambda c: c.threads_by_state.runnable if c.threads_by_state else None, words.integer),
    Column("stuck", 5, 8, _stuck, words.integer),
    Column("i/o", 5, 6, lambda c: c.threads_by_state.iowait if c.threads_by_state else None, words.integer),
    Column("asleep", 7, 5, lambda c: c.threads_by_state.sleeping if c.threads_by_state else None, words.integer),
    Column("load1", 6, 4, lambda c: c.load[0] if c.load else None, words.cores),
    Column("cpu", 6, 8, lambda c: c.cpu_pressure_ratio, _short(words.percent)),
    Column("memory", 7, 7, lambda c: c.memory_pressure_ratio, _short(words.percent)),
    Column("disk", 6, 6, lambda c: c.io_pressure_ratio, _short(words.percent)),
))  # fmt: skip
IO = Screen("5", "i/o", "disk and network", (
    Column("read/s", 7, 9, lambda c: c.traffic.disk_read if c.traffic else None, _size),
    Column("write/s", 7, 9, lambda c: c.traffic.disk_write if c.traffic else None, _size),
    Column("p99", 6, 7, lambda c: c.traffic.disk_p99_us if c.traffic else None, _short(words.duration)),
    Column("stall", 6, 5, lambda c: c.io_pressure_ratio, _short(words.percent)),
    Column("sent/s", 7, 8, lambda c: c.traffic.sent if c.traffic else None, _size),
    Column("recv/s", 7, 8, lambda c: c.traffic.received if c.traffic else None, _size),
    Column("retrans", 8, 6, lambda c: c.traffic.retransmits if c.traffic else None, _tenths),
))  # fmt: skip
SCREENS = {screen.key: screen for screen in (OVERVIEW, WAITS, MEMORY, THREADS, IO)}
HELP = (
    "1 overview              lent and used CPU, waits, decisions",
    "2 who waits on whom     ms of wait a second, by who had the CPU meanwhile",
    "3 memory and reclaim    use, limits, reclaim (ms a second), refaults, OOM kills",
    "4 threads and pressure  threads by state, load, share of time stalled (PSI)",
    "5 disk and network      bytes a second, p99 of disk requests, TCP retransmits",
    "",
    "s S                     sort the table by the next column, by the one before",
    "n                       sort it by name",
    "? h                     this help, and back",
    "q                       quit; so does Ctrl-C",
    "",
    "headroom                CPU that can be promised to reclaimed pods in all,",
    "                        what they use now included",
    "",
    "The page of the agent shows the same numbers with their history.",
)


def body(view: View, history: Sequence[View], screen: Screen, sort: int, size: tuple[int, int]) -> list[Text]:
    """What is between the header and the last line; `sort` is a column's index, or -1 for the name."""
    width, height = size
    upper = {
        WAITS.key: lambda: matrix(view, history, width, max(height // 2, 6)),
        MEMORY.key: lambda: _memory(view, width),
        THREADS.key: lambda: _pressure(view, width),
        IO.key: lambda: [_stalled(view, "io", "yellow", width)],
    }[screen.key]()
    return [*upper, *_table(view, history, screen, sort, (width, height - len(upper)))]


def _table(view: View, history: Sequence[View], screen: Screen, sort: int, size: tuple[int, int]) -> list[Text]:
    width, height = size
    columns = _fitting(screen.columns, width)
    by = screen.columns[sort] if 0 <= sort < len(screen.columns) else None
    cgroups = _known(view, history)
    if by is None:
        cgroups.sort(key=name_of)
    else:
        cgroups.sort(key=lambda c: (by.read(c) is None, -(by.read(c) or 0.0)))
    name = width - sum(column.width + 1 for column in columns)
    heads = [set_cell_size("cgroup" + (" ▾" if by is None else ""), name)]
    heads += [right(("▾" if column is by else "") + column.title, column.width) for column in columns]
    made = [Text(" ".join(heads), style="dim")]
    room = max(height - 1, 0)
    shown = cgroups[:room] if len(cgroups) <= room else cgroups[: max(room - 1, 0)]
    for c in shown:
        line = Text.assemble((fitted(name_of(c), name), style_of(c)))
        for column in columns:
            line.append(" " + right(column.say(column.read(c)), column.width))
        made.append(line)
    hidden = len(cgroups) - len(shown) + view.other_cgroups - len(view.others)
    if hidden > 0 and len(made) < height:
        made.append(Text(f"and {hidden:,} more", style="dim"))
    return made[: max(height, 0)]


def _known(view: View, history: Sequence[View]) -> list[ContainerView]:
    """All cgroups of the View; what is read every few rounds only is what it was when it was read last."""
    before: dict[str, float] = {}
    for seen in history[-CARRIED:]:
        before |= {c.cgroup: c.refaults for c in (*seen.containers, *seen.others) if c.refaults is not None}
    return [
        c if c.refaults is not None else msgspec.structs.replace(c, refaults=before.get(c.cgroup))
        for c in (*view.containers, *view.others)
    ]


def _fitting(columns: Sequence[Column], width: int) -> list[Column]:
    left = width - 14
    kept = []
    for column in sorted(columns, key=lambda c: -c.importance):
        if column.width + 1 > left:
            break
        left -= column.width + 1
        kept.append(column)
    return [column for column in columns if column in kept]


def _memory(view: View, width: int) -> list[Text]:
    node = view.node
    total, free = node.memory_total_bytes, node.memory_available_bytes
    used = bar(max(width // 4, 8), total or 0, ((total - free, "█", "cyan"),) if total and free is not None else ())
    made = [Text.assemble("memory ", used, f" {words.size(free)} of {words.size(total)} could be had")]
    reclaim = node.reclaim
    facts = [
        f"direct reclaim {_milliseconds(reclaim.direct_ms if reclaim else None)} ms/s",
        f"at limits {_milliseconds(reclaim.limit_ms if reclaim else None)} ms/s",
        f"stalled {_both(node.pressure.get('memory'))}",
    ]
    made.append(Text("reclaim " + words.join(facts)))
    for k in node.kswapd[:2]:
        made.append(
            Text(
                f"kswapd{k.node} active {words.percent(k.active_ratio)} · wakeups {_tenths(k.wakeups)}/s · "
                f"scanned {_tenths(k.scanned_pages)}/s · reclaimed {_tenths(k.reclaimed_pages)}/s"
            )
        )
    if view.memory is not None:
        promised = view.memory.headroom_bytes
        told = words.NONE if promised is None else words.size(round(promised))
        state = view.memory.condition.state.value
        made.append(
            Text(f"batch   {told} can be promised · {state}: {words.clean(view.memory.condition.verdict.text)}")
        )
    low = [f"{zone.node} {words.clean(zone.name)}" for zone in node.zones if zone.free < zone.low]
    if low:
        made.append(Text(f"! below the low watermark: {', '.join(low)}", style="yellow"))
    for victim in node.oom_victims[-2:]:
        what = f"{words.clean(victim.command)} (process {victim.pid}) of {words.clean(victim.cgroup)}"
        made.append(Text(f"✕ {words.clock(victim.wall_time_ns / 1e6)} killed for memory: {what}", style="red"))
    return made


def _pressure(view: View, width: int) -> list[Text]:
    node = view.node
    styles = {"cpu": "cyan", "memory": "magenta", "io": "yellow"}
    made = [_stalled(view, resource, style, width) for resource, style in styles.items()]
    load = " ".join(words.cores(value) for value in node.load) if node.load else words.NONE
    counts = f"running {words.integer(node.running)} · blocked {words.integer(node.blocked)}"
    made.append(Text(f"load   {load} · {counts}"))
    return made


def _stalled(view: View, resource: str, style: str, width: int) -> Text:
    pressure = view.node.pressure.get(resource)
    full = (pressure.full or 0.0) if pressure else 0.0
    parts = ((full, "█", style), (pressure.some - full, "▒", style)) if pressure else ()
    return Text.assemble(f"{resource:<7}", bar(max(width // 3, 8), 1.0, parts), f" {_both(pressure)}")


def _both(pressure: PressureView | None) -> str:
    if pressure is None:
        return words.NONE
    return f"some {words.percent(pressure.some)} · all {words.percent(pressure.full)}"
