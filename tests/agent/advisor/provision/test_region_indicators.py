"""Indicators of a region: current values, targets, and targets moved by latency predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.advisor_state import LatencyPrediction, LatencyPredictions, ProvisionInputs
from agent.advisor.provision.region_indicators import ProvisionIndicators, adjust_targets, indicator_target
from agent.advisor.provision.regions import RegionMembers
from agent.config.advisor import IndicatorTargetsConfig, InferenceConfig, InferenceSlot
from api.advice import IndicatorState, Region, RegionKind
from api.annotations import IndicatorTarget
from api.pod import Container
from api.rates import NodeRates, Rates
from api.snapshot import CpuCounters, RunqLatency
from tests.agent.advisor.provision.builders import dedicated, shared, situation
from tests.builders.nodes import S

CONFIG = IndicatorTargetsConfig()
SHARE = Region(name="share", kind=RegionKind.SHARE, pool="share", numa_nodes=(0,))
PINNED = Region(
    name="dedicated-default/d-NUMA0",
    kind=RegionKind.DEDICATED,
    pool="dedicated-default/d",
    numa_nodes=(0,),
    bound=True,
    containers=("/d", "/d/side"),
)


def two_rounds(
    before: dict[int, RunqLatency], after: dict[int, RunqLatency], busy: Mapping[int, float] | None = None
) -> ProvisionInputs:
    built = situation([shared("a")], cpus=4, pools={"share": (0, 1)})
    change = Rates(node=NodeRates(interval_ns=S, per_cpu_busy_ratio=busy or {}), cgroups={})
    now = replace(built.snapshot, node=replace(built.snapshot.node, cpu_waits=after))
    then = replace(built.snapshot, node=replace(built.snapshot.node, cpu_waits=before))
    return replace(built, snapshot=now, previous=then, change=change)


def values(built: ProvisionInputs, region: Region = SHARE, config: IndicatorTargetsConfig = CONFIG) -> dict[str, float]:
    member = RegionMembers(region, built.snapshot.pods)
    return {signal.name: signal.current for signal in ProvisionIndicators(built).signals(member, config)}


def test_latency_of_a_pool_is_the_mean_of_its_cpus_in_microseconds() -> None:
    before = dict.fromkeys(range(4), RunqLatency(sum_ns=5_000_000, count=10))
    after = {
        0: RunqLatency(sum_ns=5_000_000 + 90_000, count=40),  # 30 waits of 3 us
        1: RunqLatency(sum_ns=5_000_000 + 10_000_000, count=20),  # 10 waits of 1 ms
        2: RunqLatency(sum_ns=9_000_000_000, count=20),  # not in the pool
        3: RunqLatency(sum_ns=9_000_000_000, count=20),
    }
    assert values(two_rounds(before, after)) == {"cpu_sched_wait": pytest.approx(501.5)}


def test_an_indicator_of_0_is_known_and_one_without_a_value_is_not() -> None:
    none = dict.fromkeys((0, 1), RunqLatency(sum_ns=0, count=0))
    member = RegionMembers(SHARE, two_rounds(none, none).snapshot.pods)
    idle = ProvisionIndicators(two_rounds(none, none, {0: 0.0, 1: 0.0}))
    assert idle.signals(member, CONFIG) == ()
    assert idle.unknown(member, CONFIG) == frozenset()
    assert ProvisionIndicators(two_rounds(none, {}, {0: 0.5})).unknown(member, CONFIG) == {"cpu_sched_wait"}
    expected = {"default/a": {"request_p99_ms": IndicatorTarget(upper=20)}}
    late = replace(two_rounds(none, none, {0: 0.5}), targets=expected)
    assert ProvisionIndicators(late).unknown(member, CONFIG) == {"request_p99_ms"}
    reported = replace(late, indicators={"default/a": {"request_p99_ms": 8.0}})
    assert ProvisionIndicators(reported).unknown(member, CONFIG) == frozenset()


def test_a_cpu_without_timeslices_has_no_latency() -> None:
    before = dict.fromkeys((0, 1), RunqLatency(sum_ns=0, count=0))
    after = {0: RunqLatency(sum_ns=0, count=0), 1: RunqLatency(sum_ns=2_000_000, count=1)}
    assert values(two_rounds(before, after)) == {"cpu_sched_wait": pytest.approx(1000.0)}


def test_without_the_probe_schedstat_is_used() -> None:
    built = two_rounds({}, {})
    assert built.previous is not None
    now = replace(built.snapshot.node, run_delay_ns={0: 400_000, 1: 0, 2: 7}, timeslices={0: 4, 1: 5})
    then = replace(built.previous.node, run_delay_ns={0: 0, 1: 0}, timeslices={0: 0, 1: 0})
    built = replace(
        built,
        snapshot=replace(built.snapshot, node=now),
        previous=replace(built.previous, node=then),
    )
    assert values(built) == {"cpu_sched_wait": pytest.approx(50.0)}


def test_use_is_the_mean_of_those_cpus_that_were_measured() -> None:
    built = two_rounds({}, {}, busy={0: 0.9, 3: 0.1})
    assert values(built) == {"cpu_usage_ratio": 0.9}


def test_unknown_and_zero_values_are_omitted() -> None:
    assert values(two_rounds({}, {})) == {}
    assert values(two_rounds({}, {}, busy={0: 0.0, 1: 0.0})) == {}
    backwards = two_rounds({0: RunqLatency(sum_ns=5, count=5)}, {0: RunqLatency(sum_ns=4, count=9)})
    assert values(backwards) == {}
    first = replace(two_rounds({}, {}, busy={0: 0.5}), previous=None, change=None)
    assert values(first) == {}
    assert values(replace(two_rounds({}, {}, busy={0: 0.5}), pools={})) == {}
    other_boot = two_rounds({0: RunqLatency(sum_ns=0, count=0)}, {0: RunqLatency(sum_ns=4, count=9)})
    assert values(replace(other_boot, change=None)) == {}


def test_cycles_per_instruction_are_those_of_main_containers() -> None:
    pod = dedicated("d", 4, numa=(0,))
    side = Container(name="side", cgroup="/d/side", sidecar=True)
    pod = replace(pod, containers=(*pod.containers, side))
    built = situation([pod], cpus=4, assigned={"/d": (1, 2), "/d/side": (3,)})
    counters = {"/d": (CpuCounters(cycles=100, instructions=100), CpuCounters(cycles=3100, instructions=2100))}
    counters["/d/side"] = (CpuCounters(cycles=0, instructions=0), CpuCounters(cycles=9000, instructions=10))

    def counted(index: int) -> dict[str, object]:
        sample = built.snapshot.cgroups["/d"]
        return {path: replace(sample, path=path, counters=pair[index]) for path, pair in counters.items()}

    built = replace(
        built,
        snapshot=replace(built.snapshot, cgroups=counted(1)),
        previous=replace(built.snapshot, cgroups=counted(0)),
        change=Rates(node=NodeRates(interval_ns=S, per_cpu_busy_ratio={0: 1.0, 1: 0.5, 2: 0.3, 3: 0.7}), cgroups={}),
    )
    assert values(built, PINNED) == {"cpi": 1.5, "cpu_usage_ratio": pytest.approx(0.5)}
    assert values(replace(built, change=None), PINNED) == {}
    # One that has come since then has no rate, and waits are no indicator of dedicated pods.
    assert built.previous is not None
    fresh = replace(built, previous=replace(built.previous, cgroups={}))
    waits = IndicatorTargetsConfig(dedicated={"cpi": 1.4, "cpu_sched_wait": 460.0})
    assert values(fresh, PINNED, waits) == {}
    other = replace(PINNED, numa_nodes=(1,))
    assert values(built, other) == {"cpi": 1.5}


def test_external_values_take_precedence() -> None:
    config = IndicatorTargetsConfig(share={"mem_access_read_lat": 80.0, "cpu_usage_ratio": 0.8})
    built = replace(
        two_rounds({}, {}, busy={0: 0.9}),
        indicators={"default/a": {"mem_access_read_lat": 95.0, "cpu_usage_ratio": 0.7}},
    )
    assert values(built, config=config) == {"mem_access_read_lat": 95.0, "cpu_usage_ratio": 0.7}


PROFILES = [
    {"cpi": IndicatorTarget(lower=1.0), "cpu_usage_ratio": IndicatorTarget(lower=0.5, upper=0.7)},
    {"cpi": IndicatorTarget(lower=0.5, upper=1.6)},
    {},
]


@pytest.mark.parametrize(
    ("name", "default", "profiles", "config", "expected"),
    [
        ("cpi", 1.4, PROFILES, CONFIG, 1.0),  # the lowest; the upper bound goes before the lower
        ("cpi", 1.4, PROFILES, IndicatorTargetsConfig(getters={"cpi": "spd-avg"}), (1.0 + 1.6 + 1.4) / 3),
        ("cpu_usage_ratio", 0.8, PROFILES, CONFIG, (0.7 + 0.8 + 0.8) / 3),  # its getter is the mean
        ("cpu_usage_ratio", 0.8, PROFILES, IndicatorTargetsConfig(getters={}), 0.7),
        ("cpu_usage_ratio", 0.8, [], CONFIG, 0.8),
        ("cpu_usage_ratio", 0.8, PROFILES, IndicatorTargetsConfig(getters={}, getter="metric-threshold"), 0.8),
        (
            "cpu_usage_ratio",
            0.8,
            PROFILES,
            IndicatorTargetsConfig(
                getters={"cpu_usage_ratio": "metric-threshold"}, thresholds={"cpu_usage_ratio": 0.55}
            ),
            0.55,
        ),
        (
            "cpu_usage_ratio",
            0.8,
            PROFILES,
            IndicatorTargetsConfig(
                getter="metric-threshold",
                getters={},
                thresholds={"cpu_usage_ratio": 0.5},
                expand_factors={"cpu_usage_ratio": 1.2},
            ),
            0.6,
        ),
    ],
)
def test_targets(
    name: str,
    default: float,
    profiles: Sequence[Mapping[str, IndicatorTarget]],
    config: IndicatorTargetsConfig,
    expected: float,
) -> None:
    assert indicator_target(name, default, profiles, config) == pytest.approx(expected)


def test_default_targets_are_katalysts() -> None:
    assert CONFIG.share == {"cpu_sched_wait": 460.0, "cpu_usage_ratio": 0.8}
    assert CONFIG.dedicated == {"cpi": 1.4, "cpu_usage_ratio": 0.55}


SIGNALS = (
    IndicatorState(name="cpu_sched_wait", current=300, target=460),
    IndicatorState(name="cpu_usage_ratio", current=0.5, target=0.55),
)
SLOTS = (
    InferenceSlot(below=0.3, offset=0.2),
    InferenceSlot(below=0.6, offset=0.1),
    InferenceSlot(below=0.9, offset=-0.15),
)


def config(strategy: str = "borwein_v2", **fields: Any) -> InferenceConfig:
    return msgspec.convert({"strategy": strategy, "slots": msgspec.to_builtins(SLOTS), **fields}, InferenceConfig)


def predictions_of(*values: float, at_s: float = 100, ignored: tuple[float, ...] = ()) -> LatencyPredictions:
    containers = {f"c{n}": LatencyPrediction(value=value) for n, value in enumerate(values)}
    containers |= {f"i{n}": LatencyPrediction(value=value, ignore=True) for n, value in enumerate(ignored)}
    return LatencyPredictions(
        at_ns=round(at_s * S), by_pod={"a/b": containers, "a/other": {"c": LatencyPrediction(value=50)}}
    )


def target(predictions: LatencyPredictions | None, settings: InferenceConfig, minute: int = 600) -> tuple[float, str]:
    signals, reason = adjust_targets(SIGNALS, ["a/b"], predictions, settings, 110 * S, minute)
    assert signals[0] == SIGNALS[0]
    return signals[1].target, reason.rule


@pytest.mark.parametrize(
    ("predictions", "settings", "expected"),
    [
        (predictions_of(0.1), config(), 0.75),
        (predictions_of(0.3), config(), 0.65),  # not below .3
        (predictions_of(0.1, 0.7), config(), 0.65),  # a mean of .4
        (predictions_of(0.1, ignored=(5.0,)), config(), 0.75),
        (predictions_of(0.8), config(), 0.4),
        (predictions_of(7.0), config(), 0.4),  # above all slots: the last
        (predictions_of(0.1), config(offsetMax=0.05), 0.6),
        (predictions_of(0.8), config(offsetMin=-0.1), 0.45),
        (predictions_of(0.1), config(targetMax=0.7), 0.7),
        (predictions_of(0.8), config(targetMin=0.5), 0.5),
        # version 3: the offset is the target
        (predictions_of(0.1), config("borwein_v3", targetMin=0.05), 0.2),
        (predictions_of(0.5), config("borwein_v3", targetMin=0.05), 0.1),
        (predictions_of(0.8), config("borwein_v3"), 0.2),
        # special times count more than slots
        (predictions_of(0.1), config(specialTimes=[{"start": "09:30", "end": "10:01", "offset": -0.2}]), 0.35),
        (predictions_of(0.1), config(specialTimes=[{"start": "09:30", "end": "10:00", "offset": -0.2}]), 0.75),
        (predictions_of(0.1), config(specialTimes=[{"start": "22:00", "end": "10:30", "offset": -0.2}]), 0.35),
        (predictions_of(0.1), config(specialTimes=[{"start": "22:00", "end": "06:00", "offset": -0.2}]), 0.75),
    ],
)
def test_target(predictions: LatencyPredictions, settings: InferenceConfig, expected: float) -> None:
    assert target(predictions, settings) == (expected, settings.strategy)


@pytest.mark.parametrize(
    ("predictions", "settings", "rule"),
    [
        (predictions_of(0.1), InferenceConfig(), "inference_off"),
        (None, config(), "inference_stale"),
        (predictions_of(0.1, at_s=49.9), config(), "inference_stale"),
        (predictions_of(0.1, at_s=111), config(), "inference_stale"),  # from a clock of another boot
        (predictions_of(), config(), "inference_nothing"),
        (predictions_of(ignored=(0.1,)), config("borwein_v3"), "inference_nothing"),
        (predictions_of(float("nan")), config(), "inference_nothing"),
    ],
)
def test_without_predictions_targets_are_unchanged(
    predictions: LatencyPredictions | None, settings: InferenceConfig, rule: str
) -> None:
    assert target(predictions, settings) == (0.55, rule)


def test_the_reason_contains_the_numbers() -> None:
    reason = adjust_targets(SIGNALS, ["a/b"], predictions_of(0.1, 0.3), config(), 110 * S, 0)[1]
    reported = "The mean prediction of 2 containers is 0.2: the slot below 0.3 has +0.2, so the target is 0.75 instead of 0.55."
    assert reason.text == reported


@pytest.mark.parametrize(
    "wrong",
    [
        {"strategy": "borwein_v2"},
        {"offsetMin": 0.5, "offsetMax": 0.1},
        {"targetMin": 0.5, "targetMax": 0.1},
        {"slots": [{"below": 0.5, "offset": 0}, {"below": 0.5, "offset": 0.1}]},
        {"specialTimes": [{"start": "24:00", "end": "06:00", "offset": 0}]},
    ],
)
def test_invalid_settings_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, InferenceConfig)


versions = st.sampled_from(["borwein_v2", "borwein_v3"])


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=5), st.integers(0, 1439), versions)
def test_targets_stay_within_bounds(values: list[float], minute: int, strategy: str) -> None:
    settings = config(strategy, specialTimes=[{"start": "20:00", "end": "04:00", "offset": 1.0}])
    assert 0.2 <= target(predictions_of(*values), settings, minute)[0] <= 0.9
