"""Draws SVG charts with a logarithmic y axis: lines with their spread, and named points. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import msgspec

WIDTH, HEIGHT = 860, 470
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 46, 52
DASHED = 'stroke-dasharray="6 4"'
COLOURS = ("#4d4d4d", "#1f9d8a", "#d1495b", "#e08e0b", "#7b4fb5", "#0b6fd6", "#05b0d6", "#8c6d46")
"""Distinguishable with the common colour blindnesses; lines also differ by the position of their labels."""


class ChartPoint(msgspec.Struct, frozen=True):
    """A median with the minimum and maximum of its rounds."""

    x: float
    y: float
    low: float
    high: float


class ChartMark(NamedTuple):
    """A named point with the minimum and maximum of its rounds."""

    x: float
    y: float
    low: float
    high: float
    name: str
    joined: bool = False
    """Whether the point belongs to the line."""


class ChartGoal(NamedTuple):
    """A line that values should be below of, or right of."""

    name: str
    y: float | None = None
    x: float | None = None


ChartLines = Mapping[str, Sequence[ChartPoint]]
AxisNames = Mapping[float, str]
"""Labels of places on the x axis."""


def line_chart(title: str, x_label: str, y_label: str, lines: ChartLines, names: AxisNames | None = None) -> str:
    """Draw an SVG document. Points without a positive y are left out: the axis is logarithmic."""
    shown = {name: [p for p in points if p.y > 0] for name, points in lines.items()}
    points = [point for line in shown.values() for point in line]
    if not points:
        return _document([f'<text x="20" y="30">{escape(title)}: no data</text>'])
    axes = _Axes(points)
    body = [f'<text x="{LEFT}" y="24" font-size="16" font-weight="600">{escape(title)}</text>']
    body += _grid(axes, x_label, y_label, names or {x: f"{x:g}" for x in axes.xs})
    for (name, line), y in zip(shown.items(), _label_rows(axes, shown), strict=True):
        if line:
            body += _line(axes, name, line, COLOURS[list(shown).index(name) % len(COLOURS)], y)
    return _document(body)


def scatter_chart(
    title: str, x_label: str, y_label: str, marks: Sequence[ChartMark], goals: Sequence[ChartGoal] = ()
) -> str:
    """Draw an SVG document: named points, a line through the joined ones, and dashed lines at the goals."""
    if not marks:
        return _document([f'<text x="20" y="30">{escape(title)}: no data</text>'])
    places = [ChartPoint(mark.x, mark.y, mark.low, mark.high) for mark in marks]
    axes = _Axes(
        [ChartPoint(0, 1, 1, 1), *places, *(ChartPoint(1, goal.y, goal.y, goal.y) for goal in goals if goal.y)]
    )
    body = [f'<text x="{LEFT}" y="24" font-size="16" font-weight="600">{escape(title)}</text>']
    body += _grid(axes, x_label, y_label, {tenth / 10: f"{tenth / 10:g}" for tenth in range(0, 11, 2)})
    body += [text for goal in goals for text in _goal(axes, goal)]
    path = " ".join(f"{axes.x(m.x):.1f},{axes.y(m.y):.1f}" for m in sorted(marks) if m.joined)
    body.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[5]}" stroke-width="2" stroke-opacity="0.5"/>')
    rows = _label_rows(axes, {mark.name: [place] for mark, place in zip(marks, places, strict=True)})
    for mark, place, row in zip(marks, places, rows, strict=True):
        edge = f'x2="{WIDTH - RIGHT + 6}" y2="{row:.1f}"'
        body.append(
            f'<line x1="{axes.x(mark.x):.1f}" y1="{axes.y(mark.y):.1f}" {edge} stroke="#bbb" stroke-width="0.7"/>'
        )
        body += _line(axes, mark.name, [place], COLOURS[5] if mark.joined else COLOURS[0], row)
    return _document(body)


def _goal(axes: _Axes, goal: ChartGoal) -> list[str]:
    """Draw a dashed line with the name of the goal."""
    if goal.y is not None:
        y = f"{axes.y(goal.y):.1f}"
        ends, at = f'x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"', f'x="{LEFT + 6}" y="{float(y) - 5:.1f}"'
    else:
        x = f"{axes.x(goal.x or 0):.1f}"
        ends, at = f'x1="{x}" y1="{TOP}" x2="{x}" y2="{HEIGHT - BOTTOM}"', f'x="{float(x) - 6:.1f}" y="{TOP + 14}"'
        at += ' text-anchor="end"'
    return [f'<line {ends} stroke="#1f9d8a" {DASHED}/>', f'<text {at} fill="#1f9d8a">{escape(goal.name)}</text>']


class _Axes:
    """Converts values to pixels."""

    def __init__(self, points: Sequence[ChartPoint]) -> None:
        self.xs = sorted({point.x for point in points})
        self.low = math.floor(math.log10(min(p.low if p.low > 0 else p.y for p in points)))
        self.high = max(math.ceil(math.log10(max(p.high for p in points))), self.low + 1)

    def x(self, value: float) -> float:
        span = (self.xs[-1] - self.xs[0]) or 1
        return LEFT + 14 + (value - self.xs[0]) / span * (WIDTH - LEFT - RIGHT - 28)

    def y(self, value: float) -> float:
        share = (math.log10(max(value, 10**self.low)) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _grid(axes: _Axes, x_label: str, y_label: str, names: AxisNames) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    out = []
    steps = (1, 1.5, 2, 3, 5) if axes.high - axes.low == 1 else (1,)
    values = [step * 10.0**power for power in range(axes.low, axes.high) for step in steps]
    for value in (*values, 10.0**axes.high):
        y = axes.y(value)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for place, name in names.items():
        x = axes.x(place)
        out.append(f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}" stroke="#777"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{escape(name)}</text>')
    middle = (LEFT + right) / 2
    out.append(f'<text x="{middle:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    y = (TOP + bottom) / 2
    out.append(f'<text transform="translate(18 {y:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    return out


def _label_rows(axes: _Axes, lines: ChartLines) -> list[float]:
    """Return a height for each line's label: at its last point, moved down where labels would overlap."""
    heights = {name: axes.y(line[-1].y) if line else float(HEIGHT) for name, line in lines.items()}
    rows: dict[str, float] = {}
    last = float(TOP) - 16
    for name in sorted(heights, key=lambda key: heights[key]):
        last = rows[name] = max(heights[name], last + 16)
    return [rows[name] for name in lines]


def _line(axes: _Axes, name: str, points: Sequence[ChartPoint], colour: str, label_y: float) -> list[str]:
    path = " ".join(f"{axes.x(p.x):.1f},{axes.y(p.y):.1f}" for p in points)
    drawn = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    out = [drawn] if len(points) > 1 else []
    for p in points:
        x = f"{axes.x(p.x):.1f}"
        spread = f'y1="{axes.y(p.low):.1f}" x2="{x}" y2="{axes.y(p.high):.1f}"'
        out.append(f'<line x1="{x}" {spread} stroke="{colour}" stroke-opacity="0.45" stroke-width="3"/>')
        out.append(f'<circle cx="{x}" cy="{axes.y(p.y):.1f}" r="3.5" fill="{colour}"/>')
    text = f"{name} {points[-1].y:.3g}"
    out.append(f'<text x="{WIDTH - RIGHT + 10}" y="{label_y + 4:.1f}" fill="{colour}">{escape(text)}</text>')
    return out


def _document(body: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', *body, "</svg>\n"])
