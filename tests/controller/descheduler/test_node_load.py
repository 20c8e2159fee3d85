"""Which nodes are hot and which are targets: thresholds as Koordinator's LowNodeLoad computes them, and reported harm."""

from __future__ import annotations

import math
from typing import Any

import pytest

from controller.descheduler.node_load import (
    HotCause,
    HotStreaks,
    NodeThresholds,
    classify_nodes,
    compute_thresholds,
    pressure_columns,
    severity,
)
from tests.controller.descheduler.hot_nodes import a_load, settings
from tests.controller.scheduler.objects import NOW_S

NAN = math.nan
BOTH = {"lowThresholds": {"cpu": 20, "memory": 30}, "highThresholds": {"cpu": 50, "memory": 60}}


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (a_load("n", 20, 30), "target"),  # isNodeUnderutilized: an equal usage is not above the threshold
        (a_load("n", 20.01, 30), ""),
        (a_load("n", 5, 30.1), ""),  # every resource has to be below
        (a_load("n", 50, 60), ""),  # isNodeOverutilized: an equal usage is not above the threshold
        (a_load("n", 50.01, 10), "cpu_usage"),  # one resource is enough
        (a_load("n", 10, 61), "memory_usage"),
        (a_load("n", 90, 90), "cpu_usage memory_usage"),
        (a_load("n", 19, 10, unmeasured=(200.0, 0.0)), ""),  # pods that the report cannot contain use another 2 %
        (a_load("n", 45, 10, unmeasured=(900.0, 0.0)), ""),  # what is only estimated makes no node hot
        (a_load("n", NAN, 10), ""),  # an unknown usage is neither
        (a_load("n", 5, 5, is_schedulable=False), ""),
        (a_load("n", 90, 5, is_schedulable=False), "cpu_usage"),  # a cordoned node may be relieved
        (a_load("n", 5, 5, reported_at_s=NOW_S - 179), "target"),
        (a_load("n", 5, 5, reported_at_s=NOW_S - 180), "stale"),
        (a_load("n", 90, 90, reported_at_s=NOW_S - 180), "stale"),
        (a_load("n", 90, 90, reported_at_s=NOW_S + 180), "stale"),  # a clock that is ahead
        (a_load("n", 90, 90, reported_at_s=NAN), "stale"),
        (a_load("n", 5, 5, harm=(0.0101, NAN, NAN, NAN)), "runq_latency"),
        (a_load("n", 5, 5, harm=(0.01, NAN, NAN, NAN)), ""),
        (a_load("n", 5, 5, harm=(0.0051, NAN, NAN, NAN)), ""),  # above half of the limit: not hot, no target
        (a_load("n", 5, 5, harm=(0.005, NAN, NAN, NAN)), "target"),
        (a_load("n", 5, 5, harm=(NAN, 1.0, NAN, NAN)), "target"),  # CPU pressure counts batch pods: off by default
        (a_load("n", 5, 5, harm=(NAN, NAN, 0.11, NAN)), "memory_pressure"),
        (a_load("n", 5, 5, harm=(NAN, NAN, NAN, 0.6)), "interference"),
        (a_load("n", 5, 5, pressures=("MemoryPressure",)), "eviction_pressure"),
        (a_load("n", 5, 5, pressures=("SystemRootfs",)), ""),  # moves do not relieve it, but it is no target
    ],
)
def test_a_node_is_hot_a_target_or_neither(load: Any, expected: str) -> None:
    classes, _ = classify_nodes([load], settings(lowNodeLoad=BOTH), NOW_S)
    causes = " ".join(reason.cause.value for reason in classes.hot.get("n", ()))
    assert (causes or ("target" if classes.targets else "stale" if classes.stale else "")) == expected


def test_without_thresholds_usage_makes_no_node_hot_because_batch_work_is_meant_to_use_idle_cpu() -> None:
    config = settings(lowNodeLoad={"lowThresholds": {}, "highThresholds": {}})
    classes, thresholds = classify_nodes([a_load("full", 100, 100)], config, NOW_S)
    assert (classes.hot, classes.targets) == ({}, ("full",))
    assert thresholds == NodeThresholds()


@pytest.mark.parametrize(
    ("fields", "usages", "low", "high"),
    [
        # The mean is 50 %: mean - 10 and mean + 10.
        ({"lowThresholds": {"cpu": 10}, "highThresholds": {"cpu": 10}}, (20, 50, 80), (40, None), (60, None)),
        # normalizePercentage: never below 0 or above 100.
        ({"lowThresholds": {"cpu": 60}, "highThresholds": {"cpu": 60}}, (20, 50, 80), (0, None), (100, None)),
        # A low deviation of 0 turns the resource off (getNodeThresholds).
        ({"lowThresholds": {"cpu": 0}, "highThresholds": {"cpu": 10}}, (20, 50, 80), (None, None), (None, None)),
        # With deviations the low one may be larger than the high one.
        ({"lowThresholds": {"cpu": 30}, "highThresholds": {"cpu": 5}}, (20, 50, 80), (20, None), (55, None)),
        # Unknown usages are left out of the mean.
        ({"lowThresholds": {"cpu": 10}, "highThresholds": {"cpu": 10}}, (40, NAN, 60), (40, None), (60, None)),
    ],
)
def test_deviations_are_measured_from_the_mean_usage(fields: Any, usages: Any, low: Any, high: Any) -> None:
    args = settings(lowNodeLoad={"useDeviationThresholds": True, **fields}).low_node_load
    thresholds = compute_thresholds(args, [a_load(f"n{number}", usage) for number, usage in enumerate(usages)])
    assert thresholds.low == pytest.approx(low)
    assert thresholds.high == pytest.approx(high)


def test_a_stale_node_does_not_move_the_mean() -> None:
    config = settings(
        lowNodeLoad={"useDeviationThresholds": True, "lowThresholds": {"cpu": 10}, "highThresholds": {"cpu": 10}}
    )
    loads = [a_load("a", 40), a_load("b", 60), a_load("stale", 100, reported_at_s=NOW_S - 600)]
    _, thresholds = classify_nodes(loads, config, NOW_S)
    assert (thresholds.low[0], thresholds.high[0]) == pytest.approx((40, 60))


def reports(config: dict[str, Any], *values: tuple[float, bool]) -> list[bool]:
    """Return for each report, at this time and hot or not, whether the node is to be relieved."""
    streaks = HotStreaks(settings(lowNodeLoad=config).low_node_load)
    return [streaks.observe("n", at_s, is_hot=hot) for at_s, hot in values]


HOT, NORMAL = True, False


@pytest.mark.parametrize(
    ("config", "values", "expected"),
    [
        # The default of Koordinator: five consecutive hot reports.
        ({}, [(60 * n, HOT) for n in range(6)], [False] * 4 + [True] * 2),
        ({}, [(60 * n, HOT) for n in range(4)] + [(240, NORMAL)] + [(300 + 60 * n, HOT) for n in range(5)],
         [False] * 9 + [True]),
        ({"anomalyCondition": {"consecutiveAbnormalities": 1}}, [(0, HOT)], [True]),
        # The same report, evaluated again, is no further observation.
        ({"anomalyCondition": {"consecutiveAbnormalities": 2}}, [(0, HOT), (0, HOT), (0, HOT), (60, HOT)],
         [False, False, False, True]),
        # Once abnormal, fewer normal reports than consecutiveNormalities do not begin the count again.
        ({"anomalyCondition": {"consecutiveAbnormalities": 2, "consecutiveNormalities": 2}},
         [(0, HOT), (60, HOT), (120, NORMAL), (180, HOT), (240, NORMAL), (300, NORMAL), (360, HOT), (420, HOT)],
         [False, True, False, True, False, False, False, True]),
        # detectorCacheTimeout: five minutes without a report.
        ({"anomalyCondition": {"consecutiveAbnormalities": 2}}, [(0, HOT), (300, HOT), (360, HOT)], [False, False, True]),
        # A report that is older than the one before is of another clock.
        ({"anomalyCondition": {"consecutiveAbnormalities": 2}}, [(600, HOT), (540, HOT)], [False, False]),
        # timeout: the abnormal state ends, and the count begins again.
        ({"anomalyCondition": {"consecutiveAbnormalities": 2, "timeout": "1m"}},
         [(0, HOT), (60, HOT), (120, HOT), (180, HOT), (240, HOT)], [False, True, True, False, True]),
    ],
)  # fmt: skip
def test_a_node_is_relieved_after_consecutive_hot_reports(config: Any, values: Any, expected: list[bool]) -> None:
    assert reports(config, *values) == expected


def test_a_relieved_node_counts_from_zero() -> None:
    streaks = HotStreaks(settings(lowNodeLoad={"anomalyCondition": {"consecutiveAbnormalities": 2}}).low_node_load)
    assert [streaks.observe("n", at_s, is_hot=True) for at_s in (0, 60)] == [False, True]
    streaks.reset("n")
    assert streaks.count("n") == 0
    assert not streaks.observe("n", 120, is_hot=True)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [({}, 60.0), ({"cpu": 3}, 70.0), ({"memory": 0}, 80.0), ({"cpu": 0, "memory": 0}, 0.0)],
)
def test_the_severity_is_the_weighted_mean_of_the_usages(weights: Any, expected: float) -> None:
    assert severity(a_load("n", 80, 40), settings(lowNodeLoad={"resourceWeights": weights}).low_node_load) == expected


@pytest.mark.parametrize(
    ("condition", "columns"),
    [("MemoryPressure", (1,)), ("CPUPressure", (0,)), ("NumaSysCPUPressure", (0,)), ("SystemRootfs", ())],
)
def test_an_eviction_condition_is_about_a_resource(condition: str, columns: tuple[int, ...]) -> None:
    assert pressure_columns(condition) == columns


def test_the_reason_has_value_and_limit() -> None:
    load = a_load("n", 92, 5, harm=(0.0146, NAN, NAN, NAN))
    classes, _ = classify_nodes([load], settings(), NOW_S)
    assert [reason.text for reason in classes.hot["n"]] == [
        "CPU usage is 92.0 %, highThresholds.cpu 50 %",
        "run-queue latency p99 of online pods is 14.6 ms, limit 10 ms",
    ]
    assert {reason.cause for reason in classes.hot["n"]} == {HotCause.CPU_USAGE, HotCause.RUNQ_LATENCY}
