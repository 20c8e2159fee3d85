"""Indicators of harm and placements in the view of a cycle."""

from __future__ import annotations

import msgspec
import pytest

from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import Pressure
from exporters.view.cycle_view import build_view, past_view
from exporters.view.placement_view import harm_views, placement_views
from tests.builders.full_node import full_cycle


def a_pod(name: str, placed_s: float | None, qos: QoSLevel = QoSLevel.RECLAIMED, score: str = "") -> Pod:
    return Pod(
        uid=name, namespace="team", name=name, qos=qos, containers=(), placed_s=placed_s,
        annotations={"dioptase.io/placement-score": score} if score else {},
    )  # fmt: skip


def test_indicators_are_those_of_the_report_with_the_default_limits() -> None:
    cycle = full_cycle()
    node = msgspec.structs.replace(cycle.snapshot.node, cpu_pressure=Pressure(some_us=1, some_avg10=90, some_avg60=30))
    cycle = msgspec.structs.replace(cycle, snapshot=msgspec.structs.replace(cycle.snapshot, node=node))
    views = {view.name: (view.value, view.limit) for view in harm_views(cycle)}
    assert views["dioptase.io/cpu_pressure"] == (0.3, 0.4)
    assert views["dioptase.io/runq_latency_p99"][1] == 0.01
    shares = [view.value / view.limit for view in harm_views(cycle)]
    assert shares == sorted(shares, reverse=True)


def test_only_reclaimed_pods_with_a_known_time_are_placements() -> None:
    pods = [
        a_pod("old", 100.0, score="12.5"),
        a_pod("file", None),
        a_pod("web", 300.0, QoSLevel.SHARED),
        a_pod("new", 200.25, score="x"),
    ]
    assert [(view.pod, view.placed_at_ms, view.score) for view in placement_views(pods)] == [
        ("team/new", 200_250, None),
        ("team/old", 100_000, 12.5),
    ]


@pytest.mark.parametrize("field", ["harm", "placements"])
def test_past_views_do_not_repeat_them(field: str) -> None:
    view = build_view(full_cycle())
    assert getattr(past_view(view), field) == ()
