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
"""Heights of histogram bars go from 0.01 % to 100 % of the waits, on a logarithmic scale: the waits that matter are rare."""
RUNQ_LATENCY_SPAN_MS = 30_000
AXIS_LABELS = ((0, "1µs"), (5, "32µs"), (10, "1ms"), (15, "33ms"), (20, "1s"), (25, "34s"))
"""Upper bounds of slots, where they are named."""


def bar(width: int, total: float, parts: Sequence[tuple[float, str, str]]) -> Text:
    """A bar of stacked parts (amount, character, style) of a whole, rounded so that their sum keeps its length."""
    made, drawn, amount = Text(), 0, 0.0
    for part, char, style in parts:
        amount += part
        end = min(round(width * amount / total), width) if total > 0 else 0
        made.append(char * max(end - drawn, 0), style)
        drawn = max(end, drawn)
    made.append("·" * (width - drawn), "dim")
    return made


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """One character a value, on a logarithmic scale from low to high; a gap where there is none."""
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
    """Waits of all wanted containers together: slots (None where only sums are known), count, and mean in us."""
    return merge_runq_latencies(c.wait for view in history for c in view.containers if predicate(c))


def merge_runq_latencies(latencies: Iterable[RunqLatencyView | None]) -> tuple[list[int] | None, int, float | None]:
    """Slots, count and mean in us of several waits; those that are not known are left out."""
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
    """Both kinds of workload's waits side by side: a title, bars of that height, and the axis.

    Where no pods are listed: those of all cgroups, and those of the cgroup that waited longest in each round.
    """
    recent = [seen for seen in history if view.taken_at_ms - seen.taken_at_ms < RUNQ_LATENCY_SPAN_MS] or [view]
    half = (width - 2) // 2
    if view.containers:
        named = [
            ("online", "cyan", container_runq_latencies(recent, is_online)),
            ("batch", "yellow", container_runq_latencies(recent, is_reclaimed)),
        ]
    else:
        every = merge_runq_latencies(seen.node.wait for seen in recent)
        named = [("all", "cyan", every), ("slowest", "magenta", merge_runq_latencies(map(_slowest_cgroup, recent)))]
    sides = [histogram_lines(name, style, found, half, height) for name, style, found in named]
    return [Text.assemble(left, " " * (width - 2 * half), right) for left, right in zip(*sides, strict=True)]


def _slowest_cgroup(view: View) -> RunqLatencyView | None:
    known = [c.wait for c in view.others if c.wait is not None and c.wait.p99_us is not None]
    return max(known, key=lambda wait: wait.p99_us or 0.0, default=None)


def histogram_lines(
    name: str, style: str, latencies: tuple[list[int] | None, int, float | None], width: int, height: int
) -> list[Text]:
    """Title, bars and axis, all of this width."""
    slots, count, mean_us = latencies
    title = Text.assemble((f"{name} ", f"bold {style}"))
    made = [title]
    if slots is None or not any(slots):
        known = f"{formats.integer(count)} waits, mean {formats.duration(mean_us)}" if count else "no waits measured"
        title.append(known)
        note = "a source of sums only: no distribution" if slots is None and count else ""
        made += [Text(note, style="dim"), *(Text() for _ in range(height + 1))]
    else:
        p50, p99 = (quantile_ns(slots, q) for q in (0.5, 0.99))
        us = [None if value is None else value / 1000 for value in (p50, p99)]
        title.append(f"p50 {formats.duration(us[0])} · p99 {formats.duration(us[1])}")
        number = f" · {formats.integer(count)}"
        title.append(number if title.cell_len + len(number) <= width else "", "dim")
        each = max((width - 5) // len(slots), 1)
        made += _histogram_bars(slots, style, each, height)
        made += _histogram_axis(slots, [value for value in (p50, p99) if value is not None], each)
    for line in made:
        line.truncate(width, overflow="ellipsis")
        line.pad_right(width - line.cell_len)
    return made


def _histogram_bars(slots: Sequence[int], style: str, each: int, height: int) -> list[Text]:
    total = sum(slots)
    eighths = [0 if not n else max(round((1 + log10(n / total) / HISTOGRAM_DECADES) * height * 8), 1) for n in slots]
    made = []
    for row in range(height):
        share = 100 / 10 ** (HISTOGRAM_DECADES * row / height)
        label = f"{share:g}%" if share in (100, 10, 1, 0.1) else ""
        base = (height - 1 - row) * 8
        body = "".join(BLOCKS[min(max(n - base, 0), 8)] * each for n in eighths)
        made.append(Text.assemble((label.rjust(4), "dim"), ("│", "dim"), (body, style)))
    return made


def _histogram_axis(slots: Sequence[int], marks_ns: Sequence[float], each: int) -> list[Text]:
    """The axis with a tick under the slots of the given waits, and the names of some bounds."""
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
    """Cut at the terminal's edge, with an ellipsis."""
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


def wrap_text(text: str, width: int, max_lines: int, style: str = "", *, indent: int = 2) -> list[Text]:
    """The text over at most so many lines; what does not fit ends in an ellipsis."""
    rest = text
    found: list[Text] = []
    while rest and len(found) < max_lines:
        room = width if not found else width - indent
        cut = Text(rest)
        if len(found) == max_lines - 1 or cut.cell_len <= room:
            piece, rest = rest, ""
        else:
            cut.truncate(room)
            space = cut.plain.rfind(" ")
            end = space if space > room // 2 else len(cut.plain)
            piece, rest = rest[:end], rest[end:].lstrip()
        found.append(truncate_line(Text((" " * indent if found else "") + piece, style=style), width))
    return found or [Text()]
