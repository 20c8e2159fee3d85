"""The container table and cgroup labels of `dioptase top`. Pure.
On a narrow terminal the least important columns are dropped first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from cli import formats
from cli.top.charts import is_reclaimed, sparkline
from exporters.view.cycle_view import ContainerView, View


def cgroup_label(container: ContainerView) -> str:
    """The pod, and its container where that has another name; the path where no pod is listed."""
    if not container.pod:
        return formats.printable(container.cgroup)
    text = formats.printable(container.pod)
    if not container.pod.endswith(f"/{container.container}"):
        text += f" {formats.printable(container.container)}"
    return text


def cgroup_labels(containers: Iterable[ContainerView]) -> Mapping[str, str]:
    """By path."""
    return {container.cgroup: cgroup_label(container) for container in containers}


def fit_label(text: str, width: int) -> str:
    """Exactly so wide. Pods differ at their beginnings, paths at their ends: that end is kept."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    if text.startswith("/"):
        kept = text[-width * 2 :]
        while cell_len(kept) > width - 1:
            kept = kept[1:]
        return set_cell_size("…" + kept, width)
    return set_cell_size(text[: width * 2], width - 1) + "…"


SPARKLINE_LOW_US, SPARKLINE_HIGH_US = 100.0, 1_000_000.0
_NO_SPACES = str.maketrans({" ": None})


class ContainerColumn(NamedTuple):
    """`importance`: the lowest leaves first. `name` and `trend` take what is left."""

    title: str
    width: int
    importance: int
    cell: Callable[[ContainerView], str]


def _durations_cell(us: tuple[float | None, float | None]) -> str:
    return "/".join(formats.duration(value).translate(_NO_SPACES) for value in us)


def _runq_latency_cell(c: ContainerView) -> str:
    if c.wait is None:
        return formats.ABSENT
    if c.wait.p99_us is None and c.wait.mean_us is not None:
        return f"~{formats.duration(c.wait.mean_us).translate(_NO_SPACES)}"
    return _durations_cell((c.wait.p50_us, c.wait.p99_us))


def _request_latency_cell(c: ContainerView) -> str:
    if c.latency is None:
        return formats.ABSENT
    p50, p99 = c.latency.p50_ms, c.latency.p99_ms
    return _durations_cell((None if p50 is None else p50 * 1000, None if p99 is None else p99 * 1000))


def _memory_cell(c: ContainerView) -> str:
    text = formats.size(c.memory_bytes).translate(_NO_SPACES)
    return text.removesuffix("iB")


CONTAINER_COLUMNS = (
    ContainerColumn("qos", 9, 4, lambda c: formats.printable(c.qos.removesuffix("_cores"))),
    ContainerColumn("cpu", 5, 9, lambda c: formats.cores(c.cpu_cores)),
    ContainerColumn("thrtl", 5, 6, lambda c: formats.percent(c.throttled_ratio).translate(_NO_SPACES)),
    ContainerColumn("thd", 3, 1, lambda c: formats.integer(c.threads)),
    ContainerColumn("mem", 5, 2, _memory_cell),
    ContainerColumn("wait p50/p99", 13, 8, _runq_latency_cell),
    ContainerColumn("latency", 13, 7, _request_latency_cell),
)
MIN_TREND_WIDTH = 6
"""Least width of the sparkline of waits; its importance is 3."""
MIN_NAME_WIDTH = 13


def container_table(view: View, history: Sequence[View], width: int, max_lines: int) -> list[Text]:
    """Heading and one line a container, then the other cgroups that run or wait most; busiest first where not all fit."""
    if not view.containers and not view.others:
        text = Text("Nothing runs: no pods are listed, and no cgroup used or waited for a CPU.", style="dim")
        text.truncate(width, overflow="ellipsis")
        return [text]
    columns, trend = _select_columns(width)
    name = width - sum(c.width + 1 for c in columns) - (trend + 1 if trend else 0)
    spare = max(min(name - 40, 30 - trend), 0) if trend else 0
    name, trend = name - spare, trend + spare
    shown = list(view.containers)
    if len(shown) > max_lines:
        shown = sorted(shown, key=lambda c: c.cpu_cores or 0.0, reverse=True)[: max_lines - 1]
    left_out = len(view.containers) - len(shown)
    shown += view.others[: max(max_lines - len(shown) - 1, 0)]
    heads = [set_cell_size("pod" if view.containers else "cgroup", name), *(c.title.rjust(c.width) for c in columns)]
    made = [
        Text(
            " ".join([*heads, *([("wait p99" if trend >= 8 else "waits").ljust(trend)] if trend else [])]), style="dim"
        )
    ]
    for container in shown:
        line = Text.assemble((fit_label(cgroup_label(container), name), label_style(container)))
        for column in columns:
            line.append(" " + right_align(column.cell(container), column.width))
        if trend:
            line.append(" " + _runq_latency_trend(container, history, trend), "magenta")
        made.append(line)
    if left_out:
        made.append(Text(f"and {left_out} more with less CPU", style="dim"))
    return made


def _select_columns(width: int) -> tuple[list[ContainerColumn], int]:
    """Columns that fit beside a name of NAME cells, and the sparkline's width or 0."""
    wanted: list[tuple[int, ContainerColumn | None]] = [(c.importance, c) for c in CONTAINER_COLUMNS]
    wanted.append((3, None))
    left = width - MIN_NAME_WIDTH
    kept: list[ContainerColumn | None] = []
    for _, column in sorted(wanted, key=lambda pair: pair[0], reverse=True):
        need = 1 + (MIN_TREND_WIDTH if column is None else column.width)
        if need > left:
            break
        left -= need
        kept.append(column)
    return [c for c in CONTAINER_COLUMNS if c in kept], MIN_TREND_WIDTH if None in kept else 0


def label_style(container: ContainerView) -> str:
    """Colour of a name: batch, online, or nobody's."""
    return "yellow" if is_reclaimed(container) else "cyan" if container.pod else ""


def right_align(text: str, width: int) -> str:
    """Exactly so wide, cut with an ellipsis."""
    return text.rjust(width) if cell_len(text) <= width else text[: width - 1] + "…"


def _runq_latency_trend(container: ContainerView, history: Sequence[View], width: int) -> str:
    """p99 waits of the latest rounds, the newest last."""
    values: list[float | None] = []
    for view in history[-width:]:
        same = next((c for c in (*view.containers, *view.others) if c.cgroup == container.cgroup), None)
        wait = None if same is None else same.wait
        values.append(None if wait is None else wait.p99_us if wait.p99_us is not None else wait.mean_us)
    return sparkline(values, SPARKLINE_LOW_US, SPARKLINE_HIGH_US).rjust(width)
