"""Bars, sparklines, log2 histograms and wrapped text lines for terminals. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import log10

from rich.text import Text

from api.histogram import quantile_ns
from cli import formats
from exporters.view.cycle_view import ContainerView, RunqLatencyView, View

BLOCKS = " ▁▂▃▄▅▆▇█"
HISTOGRAM_DECADES = 4
"""Histogram bars span 0.01 % to 100 % of the waits on a logarithmic scale, because the rare waits matter."""
RUNQ_LATENCY_SPAN_MS = 30_000
AXIS_LABELS = ((0, "1µs"), (5, "32µs"), (10, "1ms"), (15, "33ms"), (20, "1s"), (25, "34s"))
"""Labels of the upper bounds of slots."""


def bar(width: int, total: float, parts: Sequence[tuple[float, str, str]]) -> Text:
    """Return a bar of stacked parts (amount, character, style), rounded so that all parts together keep their total length."""
    text, drawn, amount = Text(), 0, 0.0
    for part, char, style in parts:
        amount += part
        end = min(round(width * amount / total), width) if total > 0 else 0
        text.append(char * max(end - drawn, 0), style)
        drawn = max(end, drawn)
    text.append("·" * (width - drawn), "dim")
    return text


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """Return one character per value, on a logarithmic scale from `low` to `high`; a space for None."""
    steps = len(BLOCKS) - 2

    def char(value: float | None) -> str:
        if value is None:
            return " "
        share = log10(max(value, low) / low) / log10(high / low)
        return BLOCKS[1 + round(min(share, 1.0) * steps)]

    return "".join(map(char, values))


def is_online(container: ContainerView) -> bool:
    return container.qos in ("shared_cores", "dedicated_cores")


def is_reclaimed(container: ContainerView) -> bool:
    return container.qos == "reclaimed_cores"


def container_runq_latencies(
    history: Sequence[View], predicate: Callable[[ContainerView], bool]
) -> tuple[list[int] | None, int, float | None]:
    """Merge the waits of all matching containers: slots (None if only sums are known), count, mean in microseconds."""
    return merge_runq_latencies(c.wait for view in history for c in view.containers if predicate(c))


def merge_runq_latencies(latencies: Iterable[RunqLatencyView | None]) -> tuple[list[int] | None, int, float | None]:
    """Return slots, count and mean in microseconds of several latencies; None values are skipped."""
    slots: list[int] | None = None
    count, total_us = 0, 0.0
    for wait in latencies:
        if wait is None:
            continue
        count += wait.count
        total_us += (wait.mean_us or 0.0) * wait.count
        if wait.slots is not None:
            slots = [a + b for a, b in zip(slots or [0] * len(wait.slots), wait.slots, strict=True)]
    return slots, count, total_us / count if count else None


def runq_latency_charts(view: View, history: Sequence[View], width: int, height: int) -> list[Text]:
    """Render the waits of online and batch containers side by side: title, bars of `height` lines, axis.

    Without listed pods: the waits of all cgroups, and those of the slowest cgroup of each cycle.
    """
    recent = [cycle for cycle in history if view.taken_at_ms - cycle.taken_at_ms < RUNQ_LATENCY_SPAN_MS] or [view]
    half = (width - 2) // 2
    if view.containers:
        named = [
            ("online", "cyan", container_runq_latencies(recent, is_online)),
            ("batch", "yellow", container_runq_latencies(recent, is_reclaimed)),
        ]
    else:
        every = merge_runq_latencies(cycle.node.wait for cycle in recent)
        named = [("all", "cyan", every), ("slowest", "magenta", merge_runq_latencies(map(_slowest_cgroup, recent)))]
    sides = [histogram_lines(name, style, latencies, half, height) for name, style, latencies in named]
    return [Text.assemble(left, " " * (width - 2 * half), right) for left, right in zip(*sides, strict=True)]


def _slowest_cgroup(view: View) -> RunqLatencyView | None:
    latencies = [c.wait for c in view.others if c.wait is not None and c.wait.p99_us is not None]
    return max(latencies, key=lambda wait: wait.p99_us or 0.0, default=None)


def histogram_lines(
    name: str, style: str, latencies: tuple[list[int] | None, int, float | None], width: int, height: int
) -> list[Text]:
    """Render title, bars and axis, each `width` cells wide."""
    slots, count, mean_us = latencies
    title = Text.assemble((f"{name} ", f"bold {style}"))
    lines = [title]
    if slots is None or not any(slots):
        totals = f"{formats.integer(count)} waits, mean {formats.duration(mean_us)}" if count else "no waits measured"
        title.append(totals)
        note = "the source has sums only, no distribution" if slots is None and count else ""
        lines += [Text(note, style="dim"), *(Text() for _ in range(height + 1))]
    else:
        p50, p99 = (quantile_ns(slots, q) for q in (0.5, 0.99))
        us = [None if value is None else value / 1000 for value in (p50, p99)]
        title.append(f"p50 {formats.duration(us[0])} · p99 {formats.duration(us[1])}")
        number = f" · {formats.integer(count)}"
        title.append(number if title.cell_len + len(number) <= width else "", "dim")
        each = max((width - 5) // len(slots), 1)
        lines += _histogram_bars(slots, style, each, height)
        lines += _histogram_axis(slots, [value for value in (p50, p99) if value is not None], each)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.pad_right(width - line.cell_len)
    return lines


def _histogram_bars(slots: Sequence[int], style: str, each: int, height: int) -> list[Text]:
    total = sum(slots)
    eighths = [0 if not n else max(round((1 + log10(n / total) / HISTOGRAM_DECADES) * height * 8), 1) for n in slots]
    bars = []
    for row in range(height):
        share = 100 / 10 ** (HISTOGRAM_DECADES * row / height)
        label = f"{share:g}%" if share in (100, 10, 1, 0.1) else ""
        base = (height - 1 - row) * 8
        body = "".join(BLOCKS[min(max(n - base, 0), 8)] * each for n in eighths)
        bars.append(Text.assemble((label.rjust(4), "dim"), ("│", "dim"), (body, style)))
    return bars


def _histogram_axis(slots: Sequence[int], marks_ns: Sequence[float], each: int) -> list[Text]:
    """Render the axis with a tick at the slots of the given waits, and labels of some bounds."""
    line = ["─"] * (len(slots) * each)
    for ns in marks_ns:
        slot = min((max(int(ns) - 1, 0) // 1000).bit_length(), len(slots) - 1)
        line[slot * each + each // 2] = "┴"
    names = [" "] * (len(slots) * each + 4)
    for slot, name in AXIS_LABELS:
        start = slot * each
        names[start : start + len(name)] = name
    return [Text("    └" + "".join(line), style="dim"), Text("     " + "".join(names), style="dim")]


def section_rule(title: str, width: int) -> Text:
    return Text(f"── {title} ".ljust(width, "─")[:width], style="dim")


def truncate_line(line: Text, width: int) -> Text:
    """Cut a line at the terminal's edge, with an ellipsis."""
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


def wrap_text(text: str, width: int, max_lines: int, style: str = "", *, indent: int = 2) -> list[Text]:
    """Wrap the text into at most `max_lines` lines; an ellipsis ends a text that does not fit."""
    rest = text
    lines: list[Text] = []
    while rest and len(lines) < max_lines:
        room = width if not lines else width - indent
        cut = Text(rest)
        if len(lines) == max_lines - 1 or cut.cell_len <= room:
            piece, rest = rest, ""
        else:
            cut.truncate(room)
            space = cut.plain.rfind(" ")
            end = space if space > room // 2 else len(cut.plain)
            piece, rest = rest[:end], rest[end:].lstrip()
        lines.append(truncate_line(Text((" " * indent if lines else "") + piece, style=style), width))
    return lines or [Text()]
