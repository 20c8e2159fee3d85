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
    """Return the pod, with the container if it has another name; the path if the cgroup belongs to no pod."""
    if not container.pod:
        return formats.printable(container.cgroup)
    text = formats.printable(container.pod)
    if not container.pod.endswith(f"/{container.container}"):
        text += f" {formats.printable(container.container)}"
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


class ContainerColumn(NamedTuple):
    """A column of the table; on a narrow terminal the columns of lowest `importance` are dropped first."""

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
"""Minimum width of the sparkline of latencies; its importance is 3."""
MIN_NAME_WIDTH = 13


def container_table(view: View, history: Sequence[View], width: int, max_lines: int) -> list[Text]:
    """Render a heading, a line per container, then the other cgroups with most CPU or waits; the busiest if not all fit."""
    if not view.containers and not view.others:
        text = Text("Nothing runs: no pods are listed, and no cgroup used or waited for a CPU.", style="dim")
        text.truncate(width, overflow="ellipsis")
        return [text]
    columns, trend_width = _select_columns(width)
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
            line.append(" " + right_align(column.cell(container), column.width))
        if trend_width:
            line.append(" " + _runq_latency_trend(container, history, trend_width), "magenta")
        lines.append(line)
    if omitted:
        lines.append(Text(f"and {omitted} more with less CPU", style="dim"))
    return lines


def _select_columns(width: int) -> tuple[list[ContainerColumn], int]:
    """Return the columns that fit next to the name column, and the width of the sparkline or 0."""
    candidates: list[tuple[int, ContainerColumn | None]] = [(c.importance, c) for c in CONTAINER_COLUMNS]
    candidates.append((3, None))
    free = width - MIN_NAME_WIDTH
    selected: list[ContainerColumn | None] = []
    for _, column in sorted(candidates, key=lambda pair: pair[0], reverse=True):
        cells = 1 + (MIN_TREND_WIDTH if column is None else column.width)
        if cells > free:
            break
        free -= cells
        selected.append(column)
    return [c for c in CONTAINER_COLUMNS if c in selected], MIN_TREND_WIDTH if None in selected else 0


def label_style(container: ContainerView) -> str:
    """Return the colour of a name: batch, online, or a cgroup of no pod."""
    return "yellow" if is_reclaimed(container) else "cyan" if container.pod else ""


def right_align(text: str, width: int) -> str:
    """Right-align to exactly `width` cells; cut a longer text with an ellipsis."""
    return text.rjust(width) if cell_len(text) <= width else text[: width - 1] + "…"


def _runq_latency_trend(container: ContainerView, history: Sequence[View], width: int) -> str:
    """Render the p99 latencies of the latest cycles, the newest last."""
    values: list[float | None] = []
    for view in history[-width:]:
        container_now = next((c for c in (*view.containers, *view.others) if c.cgroup == container.cgroup), None)
        wait = None if container_now is None else container_now.wait
        values.append(None if wait is None else wait.p99_us if wait.p99_us is not None else wait.mean_us)
    return sparkline(values, SPARKLINE_LOW_US, SPARKLINE_HIGH_US).rjust(width)
