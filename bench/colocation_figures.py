"""Figures of a colocation run: p99 in every scenario, and reclaimed CPU against its cost. Saved as SVG of 800 x 460 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.colocation_layouts import FLAT
from bench.colocation_modes import MODES_BY_NAME as MODES
from bench.colocation_report import (
    MAX_P99_OF_ALONE,
    MAX_P99_OF_FLOOR,
    MIN_UNITS_OF_FLOOR,
    ColocationResults,
    TradeoffPoint,
    cell_p99,
    tradeoff_curve,
)
from bench.colocation_scenarios import CURVE_SCENARIO

COLOURS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7", "#b8a900", "#7f7f7f")
"""Okabe and Ito's palette and a grey; its yellow is darkened for a white background. Modes also differ by their marker."""
MARKERS = "osD^vP*Xhdp"
TARGETS_COLOUR, OTHERS_COLOUR, GOALS_COLOUR = COLOURS[4], COLOURS[0], COLOURS[3]
WIDTH_IN, HEIGHT_IN = 800 / 72, 460 / 72
MODE_SPACING = 0.09
"""Distance between modes of one scenario; scenarios are 1 apart."""


def save_figures(results: ColocationResults, directory: Path, name: str) -> None:
    """Write NAME.svg to the directory, and for the flat layout NAME.tradeoff.svg."""
    figures = {f"{name}.svg": p99_figure, f"{name}.tradeoff.svg": tradeoff_figure}
    with _style():
        for file, draw in (figures if results.layout == FLAT else {f"{name}.svg": kubelet_figure}).items():
            draw(results).savefig(directory / file, metadata={"Date": None})


def _style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(
        {
            # Text as outlines looks the same on every machine. With a fixed salt, equal results give an equal file.
            "svg.fonttype": "path",
            "svg.hashsalt": "dioptase",
            "font.size": 10.0,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#dddddd",
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )


def p99_figure(results: ColocationResults) -> Figure:
    """Draw the median p99 of each mode in each scenario, with a bar from the minimum to the maximum of all rounds."""
    figure, axes = _axes("p99 latency of the online service, with twice as many burners as CPUs")
    scenarios, modes = results.scenarios(), results.modes()
    for index, mode in enumerate(modes):
        groups = [(x, group) for x, name in enumerate(scenarios) if (group := results.group(mode, name))]
        _bars(
            axes,
            [x + (index - (len(modes) - 1) / 2) * MODE_SPACING for x, _ in groups],
            [(group.median(cell_p99), *group.spread(cell_p99)) for _, group in groups],
            mode,
            COLOURS[index % len(COLOURS)],
        )
    axes.set(xlabel="scenario", ylabel="p99 (ms); bar: minimum to maximum of all rounds")
    axes.set_xticks(range(len(scenarios)), scenarios)
    axes.grid(visible=False, axis="x")
    if modes:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, title="mode")
    return figure


def kubelet_figure(results: ColocationResults) -> Figure:
    """Draw a line for each scenario: p99 of each mode as a multiple of that without batch work, medians and all rounds."""
    figure, axes = _axes("p99 latency of the online service on a kubelet's cgroups")
    axes.set_xscale("log")
    axes.set_yscale("linear")
    scenarios = results.scenarios()
    modes = [mode for mode in results.modes() if MODES[mode].batch]
    labelled: set[str] = set()
    for index, mode in enumerate(modes):
        for y, scenario in enumerate(scenarios):
            group, alone = results.group(mode, scenario), results.group("alone", scenario)
            if group is None or alone is None:
                continue
            base, (low, high) = alone.median(cell_p99), group.spread(cell_p99)
            middle, label = group.median(cell_p99), None if mode in labelled else mode
            labelled.add(mode)
            axes.errorbar(
                [middle / base], [y + (index - (len(modes) - 1) / 2) * MODE_SPACING],
                xerr=([(middle - low) / base], [(high - middle) / base]), fmt=MARKERS[index], color=COLOURS[index],
                markersize=5, label=label,
            )  # fmt: skip
    axes.set_yticks(range(len(scenarios)), scenarios)
    axes.invert_yaxis()
    axes.set(xlabel="p99 (multiple of that without batch work); bar: minimum to maximum of all rounds")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    if labelled:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, title="mode")
    return figure


def tradeoff_figure(results: ColocationResults) -> Figure:
    """Draw the trade-off: right is more batch work, down is less interference. A line joins the targets in their order."""
    figure, axes = _axes(f"Batch work against the latency of the online service, scenario {CURVE_SCENARIO}")
    points = tradeoff_curve(results)
    targets = sorted((point for point in points if point.target_ms is not None), key=lambda p: p.target_ms or 0)
    axes.plot([p.batch for p in targets], [p.p99 for p in targets], color=TARGETS_COLOUR, alpha=0.4)
    for point in points:
        colour = OTHERS_COLOUR if point.target_ms is None else TARGETS_COLOUR
        _bars(axes, [point.batch], [(point.p99, point.low, point.high)], point.mode, colour)
        label = axes.annotate(_label(point), (point.batch, point.p99), (9, 6), textcoords="offset points", color=colour)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})
    _goals(axes, points)
    axes.set(xlabel="batch work done (part of the floor's)", ylabel="p99 (multiple of alone)")
    axes.set_xlim(0, max([1.0, *(point.batch for point in points)]) * 1.18)
    return figure


def _axes(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    return figure, axes


def _bars(
    axes: Axes, xs: Sequence[float], values: Sequence[tuple[float, float, float]], mode: str, colour: str
) -> None:
    """Draw medians with their minimum and maximum, labelled with the mode."""
    medians = [median for median, _, _ in values]
    below = [median - low for median, low, _ in values]
    above = [high - median for median, _, high in values]
    marker = MARKERS[list(MODES).index(mode) % len(MARKERS)]
    axes.errorbar(
        xs, medians, yerr=(below, above), fmt=marker, color=colour, ecolor=colour, elinewidth=2, markersize=8, label=mode
    )  # fmt: skip


def _label(point: TradeoffPoint) -> str:
    target = "" if point.target_ms is None else f" (target {point.target_ms:g} ms)"
    return f"{point.mode}{target}: {point.p99:.3g}"


def _goals(axes: Axes, points: Sequence[TradeoffPoint]) -> None:
    """Draw a dashed line at each goal."""
    limits = [(MAX_P99_OF_ALONE, f"goal with a stricter target: {MAX_P99_OF_ALONE:g}x alone")]
    limits += [
        (MAX_P99_OF_FLOOR * point.p99, f"goal of ours: {MAX_P99_OF_FLOOR:g}x the floor")
        for point in points
        if point.mode == "floor"
    ]
    for limit, text in limits:
        axes.axhline(limit, color=GOALS_COLOUR, linestyle="--")
        axes.annotate(text, (0.01, limit), (0, 4), ("axes fraction", "data"), "offset points", color=GOALS_COLOUR)
    axes.axvline(MIN_UNITS_OF_FLOOR, color=GOALS_COLOUR, linestyle="--")
    axes.annotate(
        f"goal: {MIN_UNITS_OF_FLOOR:g} of the floor's batch work", (MIN_UNITS_OF_FLOOR, 0.99), (-6, 0),
        ("data", "axes fraction"), "offset points", ha="right", va="top", color=GOALS_COLOUR,
    )  # fmt: skip
