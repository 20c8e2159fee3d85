"""The container table and cgroup labels of `dioptase top`. Pure.
On a narrow terminal the least important columns are dropped first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from api.text import printable
from cli import formats
from cli.top.charts import is_reclaimed, sparkline
from exporters.view.activity import LatencyView
from exporters.view.cycle_view import ContainerView, RunqLatencyView, View


def cgroup_label(container: ContainerView) -> str:
    """Return the pod, with the container if it has another name; the path if the cgroup belongs to no pod."""
    if not container.pod:
        return printable(container.cgroup)
    text = printable(container.pod)
    if not container.pod.endswith(f"/{container.container}"):
        text += f" {printable(container.container)}"
    return text


def cgroup_labels(containers: Iterable[ContainerView]) -> Mapping[str, str]:
    """Return the labels by cgroup path."""
    return {container.cgroup: cgroup_label(container) for container in containers}


def fit_label(text: str, width: int) -> str:
    """Cut or pad to exactly `width` cells. Pods differ at their beginnings, paths at their ends, which is kept."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    if text.startswith("/"):
        tail = text[-width * 2 :]
        while cell_len(tail) > width - 1:
            tail = tail[1:]
        return set_cell_size("…" + tail, width)
    return set_cell_size(text[: width * 2], width - 1) + "…"


SPARKLINE_LOW_US, SPARKLINE_HIGH_US = 100.0, 1_000_000.0
_NO_SPACES = str.maketrans({" ": None})


class TableColumn(NamedTuple):
    """A column; `value` is also the sort key. On a narrow terminal the columns of lowest importance are dropped first."""

    title: str
    width: int
    importance: int
    value: Callable[[ContainerView], Any]
    format: Callable[[Any], str]

    def cell(self, container: ContainerView) -> str:
        """Return the container's value, as wide as the column."""
        return self.align(self.format(self.value(container)))

    def align(self, text: str) -> str:
        """Right-align to exactly the width of the column; cut a longer text with an ellipsis."""
        return text.rjust(self.width) if cell_len(text) <= self.width else text[: self.width - 1] + "…"


def compact(format_value: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a format without spaces, for narrow columns."""
    return lambda value: format_value(value).translate(_NO_SPACES)


def compact_size(value: float | None) -> str:
    """Format a number of bytes without spaces and without `iB`."""
    return compact(formats.size)(None if value is None else int(value)).removesuffix("iB")


compact_duration, compact_percent = compact(formats.duration), compact(formats.percent)


def _runq_latency_text(wait: RunqLatencyView | None) -> str:
    if wait is None:
        return formats.ABSENT
    if wait.p99_us is None and wait.mean_us is not None:
        return f"~{compact_duration(wait.mean_us)}"
    return f"{compact_duration(wait.p50_us)}/{compact_duration(wait.p99_us)}"


def _request_latency_text(latency: LatencyView | None) -> str:
    if latency is None:
        return formats.ABSENT
    return "/".join(map(compact(formats.milliseconds), (latency.p50_ms, latency.p99_ms)))


TREND = TableColumn("waits", 6, 3, lambda c: c.wait, str)
"""The sparkline of latencies, with its minimum width; drawn by `_runq_latency_trend`."""
CONTAINER_COLUMNS = (
    TableColumn("qos", 9, 4, lambda c: printable(c.qos.removesuffix("_cores")), str),
    TableColumn("cpu", 5, 9, lambda c: c.cpu_cores, formats.cores),
    TableColumn("thrtl", 5, 6, lambda c: c.throttled_ratio, compact_percent),
    TableColumn("thd", 3, 1, lambda c: c.threads, formats.integer),
    TableColumn("mem", 5, 2, lambda c: c.memory_bytes, compact_size),
    TableColumn("wait p50/p99", 13, 8, lambda c: c.wait, _runq_latency_text),
    TableColumn("latency", 13, 7, lambda c: c.latency, _request_latency_text),
    TREND,
)
MIN_NAME_WIDTH = 13


def columns_that_fit(columns: Sequence[TableColumn], width: int) -> list[TableColumn]:
    """Return the most important columns that fit into `width` cells, each with a space, in their order."""
    selected = []
    for column in sorted(columns, key=lambda c: -c.importance):
        width -= column.width + 1
        if width < 0:
            break
        selected.append(column)
    return [column for column in columns if column in selected]


def container_table(view: View, history: Sequence[View], width: int, max_lines: int) -> list[Text]:
    """Render a heading, a line per container, then the other cgroups with most CPU or waits; the busiest if not all fit."""
    if not view.containers and not view.others:
        text = Text("Nothing runs: no pods are listed, and no cgroup used or waited for a CPU.", style="dim")
        text.truncate(width, overflow="ellipsis")
        return [text]
    columns = columns_that_fit(CONTAINER_COLUMNS, width - MIN_NAME_WIDTH)
    trend_width = TREND.width if TREND in columns else 0
    columns = [column for column in columns if column is not TREND]
    name_width = width - sum(c.width + 1 for c in columns) - (trend_width + 1 if trend_width else 0)
    spare = max(min(name_width - 40, 30 - trend_width), 0) if trend_width else 0
    name_width, trend_width = name_width - spare, trend_width + spare
    shown = list(view.containers)
    if len(shown) > max_lines:
        shown = sorted(shown, key=lambda c: c.cpu_cores or 0.0, reverse=True)[: max_lines - 1]
    omitted = len(view.containers) - len(shown)
    shown += view.others[: max(max_lines - len(shown) - 1, 0)]
    heads = [
        set_cell_size("pod" if view.containers else "cgroup", name_width),
        *(c.title.rjust(c.width) for c in columns),
    ]
    lines = [
        Text(
            " ".join(
                [*heads, *([("wait p99" if trend_width >= 8 else "waits").ljust(trend_width)] if trend_width else [])]
            ),
            style="dim",
        )
    ]
    for container in shown:
        line = Text.assemble((fit_label(cgroup_label(container), name_width), label_style(container)))
        for column in columns:
            line.append(" " + column.cell(container))
        if trend_width:
            line.append(" " + _runq_latency_trend(container, history, trend_width), "magenta")
        lines.append(line)
    if omitted:
        lines.append(Text(f"and {omitted} more with less CPU", style="dim"))
    return lines


def label_style(container: ContainerView) -> str:
    """Return the colour of a name: batch, online, or a cgroup of no pod."""
    return "yellow" if is_reclaimed(container) else "cyan" if container.pod else ""


def _runq_latency_trend(container: ContainerView, history: Sequence[View], width: int) -> str:
    """Render the p99 latencies of the latest cycles, the newest last."""
    values: list[float | None] = []
    for view in history[-width:]:
        container_now = next((c for c in (*view.containers, *view.others) if c.cgroup == container.cgroup), None)
        wait = None if container_now is None else container_now.wait
        values.append(None if wait is None else wait.p99_us if wait.p99_us is not None else wait.mean_us)
    return sparkline(values, SPARKLINE_LOW_US, SPARKLINE_HIGH_US).rjust(width)
