"""The figures of a colocation run: positions, bars, goals, labels, and the files."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from bench.colocation_figures import kubelet_figure, p99_figure, save_figures, tradeoff_figure
from bench.colocation_report import ColocationResults
from tests.bench.builders import CURVE, cell, results


def medians(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each mode."""
    return {
        str(bars.get_label()): [(x, y) for x, y in zip(*bars.lines[0].get_data(), strict=True)] for bars in axes.containers
    }  # fmt: skip


def spreads(axes: Axes) -> list[tuple[float, float]]:
    """Return the ends of all bars."""
    collections = [each for each in axes.collections if isinstance(each, LineCollection)]
    return [(segment[0][1], segment[1][1]) for bars in collections for segment in bars.get_segments()]


def test_a_scenario_has_the_median_and_the_spread_of_each_mode_side_by_side() -> None:
    measured = results(
        *(cell("floor", p99_ms, 1, scenario="memory") for p99_ms in (3.0, 9.0, 4.0)),
        cell("ours", 4.2, 1, scenario="memory"),
        cell("ours", 40.0, 1, scenario="bursty"),
    )
    (axes,) = p99_figure(measured).axes
    assert medians(axes) == {
        "floor": [(pytest.approx(-0.045), 4.0)],
        "ours": [(pytest.approx(0.045), 4.2), (pytest.approx(1.045), 40.0)],
    }
    assert spreads(axes) == [(3.0, 9.0), (4.2, 4.2), (40.0, 40.0)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["memory", "bursty"]
    assert (axes.get_yscale(), "(ms)" in axes.get_ylabel()) == ("log", True)


def test_the_tradeoff_has_every_mode_with_batch_work_and_joins_the_targets_in_their_order() -> None:
    (axes,) = tradeoff_figure(CURVE).axes
    assert {mode: point for mode, (point,) in medians(axes).items()} == {
        "ours-1ms": (0.1, pytest.approx(1.05)),
        "ours-protect": (0.6, pytest.approx(1.1)),
        "canonical": (0.8, 10.0),
        "ours": (0.99, pytest.approx(2.05)),
        "floor": (1.0, 2.0),
    }
    assert list(axes.lines[0].get_xdata()) == [0.1, 0.6, 0.99]
    texts = [text.get_text() for text in axes.texts]
    assert "ours-protect (target 3 ms): 1.1" in texts
    assert [text for text in texts if "goal" in text] == [
        "goal with a stricter target: 1.1x alone",
        "goal of ours: 1.05x the floor",
        "goal: 0.95 of the floor's batch work",
    ]
    dashed = [line.get_xydata()[0] for line in axes.lines if line.get_linestyle() == "--"]
    assert [tuple(each) for each in dashed] == [(0, pytest.approx(1.1)), (0, pytest.approx(2.1)), (0.95, 0)]


def test_a_kubelets_figure_has_a_line_for_each_scenario_with_multiples_of_alone() -> None:
    name = "burstable-besteffort-cpu-60"
    (axes,) = kubelet_figure(
        results(
            cell("stock", 3.0, 1, scenario="burstable-besteffort-cpu-10"),
            cell("alone", 2.0, 0, scenario=name),
            *(cell("stock", p99_ms, 1, scenario=name) for p99_ms in (6.0, 10.0, 8.0)),
            cell("ours", 3.0, 1, scenario=name),
        )
    ).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["burstable-besteffort-cpu-10", name], (
        "the first one has no point: nothing to compare it with"
    )
    assert {mode: x for mode, ((x, _),) in medians(axes).items()} == {"stock": 4.0, "ours": 1.5}


@pytest.mark.parametrize("measured", [CURVE, results()], ids=["all", "nothing measured"])
def test_files_are_svg_of_800_pixels_and_the_same_each_time(tmp_path: Path, measured: ColocationResults) -> None:
    files = []
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        save_figures(measured, tmp_path / run, "colocation")
        files.append({path.name: path.read_bytes() for path in (tmp_path / run).iterdir()})
    assert files[0] == files[1]
    assert sorted(files[0]) == ["colocation.svg", "colocation.tradeoff.svg"]
    for text in files[0].values():
        assert ElementTree.fromstring(text).attrib["viewBox"] == "0 0 800 460"
