"""Targets adjusted by predictions: slots, special times, bounds, both versions, and missing predictions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.advisor.advisor_state import LatencyPrediction, LatencyPredictions
from agent.advisor.provision.region_indicators import adjust_targets
from agent.config.advisor import InferenceConfig, InferenceSlot
from api.advice import IndicatorState

S = 1_000_000_000
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
