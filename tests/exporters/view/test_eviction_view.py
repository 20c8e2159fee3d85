"""What the eviction manager judged, as metrics, as a View and over HTTP: numbers where there are some, else nothing."""

from __future__ import annotations

import json
import urllib.request

import msgspec
import pytest

from api.decision import Cycle
from api.eviction import EvictionEvent, EvictionEventReason, EvictionResult, EvictionThreshold, ThresholdMet
from api.knobs import Reason
from api.units import MIB
from exporters.prometheus.families import MetricsState, metric_families
from exporters.view.cycle_view import build_view, past_view
from tests.builders.agent_server import AgentServer
from tests.builders.four_cpu_node import S, busy_cycle
from tests.builders.full_node import MEMORY_PLUGIN, RICH_EVICTIONS, RICH_KILLS

RSS = "rss-overuse-eviction-plugin"
FREE = (MEMORY_PLUGIN, "SystemMemory", "free")


def reported(
    seq: int, evictions: EvictionResult | None = RICH_EVICTIONS, kills: tuple[EvictionEvent, ...] = RICH_KILLS
) -> Cycle:
    return msgspec.structs.replace(busy_cycle(seq), evictions=evictions, kills=kills)


def points(observed: MetricsState, name: str) -> dict[tuple[str, ...], float]:
    actual = {family.metric.name: family for family in metric_families(observed)}.get(f"dioptase_eviction_{name}")
    return {} if actual is None else {point.labels: point.value for point in actual.points}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("threshold", {FREE: 96 * MIB, (RSS, "rss", ""): 1.05}),
        ("observed", {FREE: 64 * MIB, (RSS, "rss", ""): 1.5}),
        ("met", {FREE: 2, (RSS, "rss", ""): 1}),
        ("not_judged", {(MEMORY_PLUGIN,): 1, (RSS,): 0}),
        ("condition", {("MemoryPressure", "node"): 1}),
        ("leaving_pods", {(): 1}),
        ("held_pods", {("budget",): 1, ("refused",): 0, ("unreachable",): 0, ("busy",): 0, ("cluster-budget",): 0}),
        ("victims_total", {(MEMORY_PLUGIN, "false"): 2, (RSS, "true"): 1}),
        (
            "kills_total",
            {
                (reason.value,): 2 if reason in (EvictionEventReason.CREATED, EvictionEventReason.EXCEEDED) else 0
                for reason in EvictionEventReason
            },
        ),
    ],
)
def test_two_cycles_as_metrics(name: str, expected: dict[tuple[str, ...], float]) -> None:
    assert points(MetricsState(version="1").after(reported(1)).after(reported(2)), name) == expected


def test_where_no_plugin_is_configured_there_is_no_series_and_no_card() -> None:
    quiet = reported(2, None, ())
    names = [family.metric.name for family in metric_families(MetricsState(version="1").after(quiet))]
    assert [name for name in names if "eviction" in name] == []
    assert build_view(quiet).evictions is None


def test_plugins_and_reasons_begin_at_zero_so_that_the_first_victim_is_an_increase() -> None:
    none_of_them = EvictionResult(thresholds=RICH_EVICTIONS.thresholds)
    observed = MetricsState(version="1").after(reported(1, none_of_them, ()))
    assert points(observed, "victims_total") == {(MEMORY_PLUGIN, "false"): 0, (RSS, "true"): 0}
    assert set(points(observed, "kills_total").values()) == {0}


def test_a_notified_pod_is_no_victim() -> None:
    notified_only = tuple(msgspec.structs.replace(victim, notify=True) for victim in RICH_EVICTIONS.victims)
    observed = MetricsState(version="1").after(
        reported(1, msgspec.structs.replace(RICH_EVICTIONS, victims=notified_only))
    )
    assert set(points(observed, "victims_total").values()) == {0}


def test_a_pod_that_stays_because_its_plugin_runs_dry_is_counted_once() -> None:
    """Sent four times in a dry run, and once more after it had been away: two."""
    observed = MetricsState(version="1")
    for seq in (1, 2, 3, 4, 6):
        observed = observed.after(reported(seq))
        if seq == 4:
            removed = reported(5, EvictionResult(thresholds=RICH_EVICTIONS.thresholds))
            observed = observed.after(
                msgspec.structs.replace(removed, snapshot=msgspec.structs.replace(removed.snapshot, pods=()))
            )
    assert points(observed, "victims_total") == {(MEMORY_PLUGIN, "false"): 5, (RSS, "true"): 2}


def threshold(met: ThresholdMet, observed: float) -> EvictionThreshold:
    why = Reason(rule="hard_threshold_met", text="t")
    return EvictionThreshold(plugin="p", met=met, scope="s", value=1.0, observed=observed, reason=why)


def test_of_thresholds_that_nothing_tells_apart_the_worst_is_the_series() -> None:
    actual = EvictionResult(
        thresholds=(
            threshold(ThresholdMet.NOT_MET, 1.0),
            threshold(ThresholdMet.HARD, 2.0),
            threshold(ThresholdMet.SOFT, 3.0),
        )
    )
    observed = MetricsState(version="1").after(reported(1, actual))
    assert (points(observed, "met"), points(observed, "observed")) == ({("p", "s", ""): 2}, {("p", "s", ""): 2.0})


def test_the_view_has_what_is_met_first_and_ages_in_seconds() -> None:
    view = build_view(reported(5)).evictions
    assert view is not None
    assert [(each.plugin, each.met, each.evaluated, each.met_s) for each in view.thresholds] == [
        (MEMORY_PLUGIN, "hard", True, 4.0),
        (RSS, "soft", True, 4.0),
        (MEMORY_PLUGIN, "not-met", False, None),
    ]
    (condition,) = view.conditions
    assert (condition.name, condition.effects, condition.last_met_s) == ("MemoryPressure", ("NoSchedule",), 4.0)
    assert condition.ends_in_s == 296.0
    assert [(victim.pod, victim.dry_run) for victim in view.victims] == [
        ("default/batch", False),
        ("default/web", True),
    ]
    assert view.terminating == ("default/batch",)
    assert past_view(build_view(reported(5))).evictions is None, "five minutes of it would waste memory"


@pytest.mark.parametrize(
    ("requests", "seqs"),
    [
        ("", [1, 2, 3, 4]),
        ("?pod=default/batch", [1, 3]),
        ("?reason=EvictExceededGracePeriod", [2]),
        (f"?plugin={RSS}", [4]),
        ("?after=2&limit=1", [4]),
    ],
)
def test_evictions_can_be_filtered(requests: str, seqs: list[int]) -> None:
    agent = AgentServer()
    try:
        agent.show([reported(1)])
        with urllib.request.urlopen(f"{agent.url}api/v1/evictions{requests}", timeout=5) as answer:
            entries = json.loads(answer.read())
    finally:
        agent.close()
    assert [entry["seq"] for entry in entries] == seqs
    assert all((entry["victim"] is None) != (entry["kill"] is None) for entry in entries)
    assert all(entry["wall_time_ns"] % S == 0 for entry in entries)
