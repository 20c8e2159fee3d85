"""Bars, sparklines and log2 histograms in block characters. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import log10

from rich.text import Text

from api.histograms import quantile_ns
from cli import words
from exporters.cgroup_view import ContainerView, WaitView
from exporters.view import View

BLOCKS = " ▁▂▃▄▅▆▇█"
DECADES = 4
"""Heights of histogram bars go from 0.01 % to 100 % of the waits, on a logarithmic scale: the waits that matter are rare."""
SPAN_MS = 30_000
AXIS = ((0, "1µs"), (5, "32µs"), (10, "1ms"), (15, "33ms"), (20, "1s"), (25, "34s"))
"""Upper bounds of slots, where they are named."""


def bar(width: int, whole: float, parts: Sequence[tuple[float, str, str]]) -> Text:
    """A bar of stacked parts (amount, character, style) of a whole, rounded so that their sum keeps its length."""
    made, drawn, amount = Text(), 0, 0.0
    for part, char, style in parts:
        amount += part
        end = min(round(width * amount / whole), width) if whole > 0 else 0
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


def online(container: ContainerView) -> bool:
    return container.qos in ("shared_cores", "dedicated_cores")


def reclaimed(container: ContainerView) -> bool:
    return container.qos == "reclaimed_cores"


def gather(
    history: Sequence[View], wanted: Callable[[ContainerView], bool]
) -> tuple[list[int] | None, int, float | None]:
    """Waits of all wanted containers together: slots (None where only sums are known), count, and mean in us."""
    return together(c.wait for view in history for c in view.containers if wanted(c))


def together(found: Iterable[WaitView | None]) -> tuple[list[int] | None, int, float | None]:
    """Slots, count and mean in us of several waits; those that are not known are left out."""
    slots: list[int] | None = None
    count, total_us = 0, 0.0
    for wait in found:
        if wait is None:
            continue
        count += wait.count
        total_us += (wait.mean_us or 0.0) * wait.count
        if wait.slots is not None:
            slots = [a + b for a, b in zip(slots or [0] * len(wait.slots), wait.slots, strict=True)]
    return slots, count, total_us / count if count else None


def waits(view: View, history: Sequence[View], width: int, height: int) -> list[Text]:
    """Both kinds of workload's waits side by side: a title, bars of that height, and the axis.

    Where no pods are listed: those of all cgroups, and those of the cgroup that waited longest in each round.
    """
    recent = [seen for seen in history if view.taken_at_ms - seen.taken_at_ms < SPAN_MS] or [view]
    half = (width - 2) // 2
    if view.containers:
        named = [("online", "cyan", gather(recent, online)), ("batch", "yellow", gather(recent, reclaimed))]
    else:
        every = together(seen.node.wait for seen in recent)
        named = [("all", "cyan", every), ("slowest", "magenta", together(map(_slowest, recent)))]
    sides = [histogram(name, style, found, half, height) for name, style, found in named]
    return [Text.assemble(left, " " * (width - 2 * half), right) for left, right in zip(*sides, strict=True)]


def _slowest(view: View) -> WaitView | None:
    known = [c.wait for c in view.others if c.wait is not None and c.wait.p99_us is not None]
    return max(known, key=lambda wait: wait.p99_us or 0.0, default=None)


def histogram(
    name: str, style: str, found: tuple[list[int] | None, int, float | None], width: int, height: int
) -> list[Text]:
    """Title, bars and axis, all of this width."""
    slots, count, mean_us = found
    title = Text.assemble((f"{name} ", f"bold {style}"))
    made = [title]
    if slots is None or not any(slots):
        known = f"{words.integer(count)} waits, mean {words.duration(mean_us)}" if count else "no waits measured"
        title.append(known)
        note = "a source of sums only: no distribution" if slots is None and count else ""
        made += [Text(note, style="dim"), *(Text() for _ in range(height + 1))]
    else:
        p50, p99 = (quantile_ns(slots, q) for q in (0.5, 0.99))
        us = [None if value is None else value / 1000 for value in (p50, p99)]
        title.append(f"p50 {words.duration(us[0])} · p99 {words.duration(us[1])}")
        number = f" · {words.integer(count)}"
        title.append(number if title.cell_len + len(number) <= width else "", "dim")
        each = max((width - 5) // len(slots), 1)
        made += _bars(slots, style, each, height)
        made += _axis(slots, [value for value in (p50, p99) if value is not None], each)
    for line in made:
        line.truncate(width, overflow="ellipsis")
        line.pad_right(width - line.cell_len)
    return made


def _bars(slots: Sequence[int], style: str, each: int, height: int) -> list[Text]:
    total = sum(slots)
    eighths = [0 if not n else max(round((1 + log10(n / total) / DECADES) * height * 8), 1) for n in slots]
    made = []
    for row in range(height):
        share = 100 / 10 ** (DECADES * row / height)
        label = f"{share:g}%" if share in (100, 10, 1, 0.1) else ""
        base = (height - 1 - row) * 8
        body = "".join(BLOCKS[min(max(n - base, 0), 8)] * each for n in eighths)
        made.append(Text.assemble((label.rjust(4), "dim"), ("│", "dim"), (body, style)))
    return made


def _axis(slots: Sequence[int], marks_ns: Sequence[float], each: int) -> list[Text]:
    """The axis with a tick under the slots of the given waits, and the names of some bounds."""
    line = ["─"] * (len(slots) * each)
    for ns in marks_ns:
        slot = min((max(int(ns) - 1, 0) // 1000).bit_length(), len(slots) - 1)
        line[slot * each + each // 2] = "┴"
    names = [" "] * (len(slots) * each + 4)
    for slot, name in AXIS:
        start = slot * each
        names[start : start + len(name)] = name
    return [Text("    └" + "".join(line), style="dim"), Text("     " + "".join(names), style="dim")]
