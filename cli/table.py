"""The table of containers in `dioptase top`: columns leave, least important first, until the terminal is wide enough. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from cli import words
from cli.charts import reclaimed, sparkline
from cli.names import fitted, name_of
from exporters.cgroup_view import ContainerView
from exporters.view import View

SPARK_LOW_US, SPARK_HIGH_US = 100.0, 1_000_000.0
_SHORT = str.maketrans({" ": None})


class Column(NamedTuple):
    """`importance`: the lowest leaves first. `name` and `trend` take what is left."""

    title: str
    width: int
    importance: int
    cell: Callable[[ContainerView], str]


def _times(us: tuple[float | None, float | None]) -> str:
    return "/".join(words.duration(value).translate(_SHORT) for value in us)


def _wait(c: ContainerView) -> str:
    if c.wait is None:
        return words.NONE
    if c.wait.p99_us is None and c.wait.mean_us is not None:
        return f"~{words.duration(c.wait.mean_us).translate(_SHORT)}"
    return _times((c.wait.p50_us, c.wait.p99_us))


def _latency(c: ContainerView) -> str:
    if c.latency is None:
        return words.NONE
    p50, p99 = c.latency.p50_ms, c.latency.p99_ms
    return _times((None if p50 is None else p50 * 1000, None if p99 is None else p99 * 1000))


def _memory(c: ContainerView) -> str:
    text = words.size(c.memory_bytes).translate(_SHORT)
    return text.removesuffix("iB")


COLUMNS = (
    Column("qos", 9, 4, lambda c: words.clean(c.qos.removesuffix("_cores"))),
    Column("cpu", 5, 9, lambda c: words.cores(c.cpu_cores)),
    Column("thrtl", 5, 6, lambda c: words.percent(c.throttled_ratio).translate(_SHORT)),
    Column("thd", 3, 1, lambda c: words.integer(c.threads)),
    Column("mem", 5, 2, _memory),
    Column("wait p50/p99", 13, 8, _wait),
    Column("latency", 13, 7, _latency),
)
TREND = 6
"""Least width of the sparkline of waits; its importance is 3."""
NAME = 13


def containers(view: View, history: Sequence[View], width: int, most: int) -> list[Text]:
    """Heading and one line a container, then the other cgroups that run or wait most; busiest first where not all fit."""
    if not view.containers and not view.others:
        text = Text("Nothing runs: no pods are listed, and no cgroup used or waited for a CPU.", style="dim")
        text.truncate(width, overflow="ellipsis")
        return [text]
    columns, trend = _choose(width)
    name = width - sum(c.width + 1 for c in columns) - (trend + 1 if trend else 0)
    spare = max(min(name - 40, 30 - trend), 0) if trend else 0
    name, trend = name - spare, trend + spare
    shown = list(view.containers)
    if len(shown) > most:
        shown = sorted(shown, key=lambda c: c.cpu_cores or 0.0, reverse=True)[: most - 1]
    left_out = len(view.containers) - len(shown)
    shown += view.others[: max(most - len(shown) - 1, 0)]
    heads = [set_cell_size("pod" if view.containers else "cgroup", name), *(c.title.rjust(c.width) for c in columns)]
    made = [
        Text(
            " ".join([*heads, *([("wait p99" if trend >= 8 else "waits").ljust(trend)] if trend else [])]), style="dim"
        )
    ]
    for container in shown:
        line = Text.assemble((fitted(name_of(container), name), style_of(container)))
        for column in columns:
            line.append(" " + right(column.cell(container), column.width))
        if trend:
            line.append(" " + _trend(container, history, trend), "magenta")
        made.append(line)
    if left_out:
        made.append(Text(f"and {left_out} more with less CPU", style="dim"))
    return made


def _choose(width: int) -> tuple[list[Column], int]:
    """Columns that fit beside a name of NAME cells, and the sparkline's width or 0."""
    wanted: list[tuple[int, Column | None]] = [(c.importance, c) for c in COLUMNS]
    wanted.append((3, None))
    left = width - NAME
    kept: list[Column | None] = []
    for _, column in sorted(wanted, key=lambda pair: pair[0], reverse=True):
        need = 1 + (TREND if column is None else column.width)
        if need > left:
            break
        left -= need
        kept.append(column)
    return [c for c in COLUMNS if c in kept], TREND if None in kept else 0


def style_of(container: ContainerView) -> str:
    """Colour of a name: batch, online, or nobody's."""
    return "yellow" if reclaimed(container) else "cyan" if container.pod else ""


def right(text: str, width: int) -> str:
    """Exactly so wide, cut with an ellipsis."""
    return text.rjust(width) if cell_len(text) <= width else text[: width - 1] + "…"


def _trend(container: ContainerView, history: Sequence[View], width: int) -> str:
    """p99 waits of the latest rounds, the newest last."""
    values: list[float | None] = []
    for view in history[-width:]:
        same = next((c for c in (*view.containers, *view.others) if c.cgroup == container.cgroup), None)
        wait = None if same is None else same.wait
        values.append(None if wait is None else wait.p99_us if wait.p99_us is not None else wait.mean_us)
    return sparkline(values, SPARK_LOW_US, SPARK_HIGH_US).rjust(width)
