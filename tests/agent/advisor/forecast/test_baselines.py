"""Koordinator's histogram and the simple methods against numbers computed from their definitions."""

from __future__ import annotations

import msgspec
import pytest

from agent.advisor.forecast import baselines
from agent.advisor.forecast.baselines import (
    CPU_SCALE,
    MEMORY_SCALE,
    METHODS,
    DecayingHistogram,
    histogram_percentile,
    mean_plus_sigmas,
    percentile_99,
)
from api.forecast import ForecastResource

S = 1_000_000_000
MINUTE, DAY = 60 * S, 86_400 * S


@pytest.mark.parametrize(
    ("bucket", "start"), [(0, 0.0), (1, 0.025), (2, 0.05125), (3, 0.0788125), (22, 0.962630), (23, 1.035762)]
)
def test_buckets_start_where_koordinators_do(bucket: int, start: float) -> None:
    assert CPU_SCALE.start_of(bucket) == pytest.approx(start, abs=1e-6)


@pytest.mark.parametrize(("bucket", "mib"), [(0, 0.0), (1, 5.0), (2, 10.25), (3, 15.7625)])
def test_buckets_of_memory_begin_with_5_mib(bucket: int, mib: float) -> None:
    assert MEMORY_SCALE.start_of(bucket) == pytest.approx(mib * 2**20)
    assert (
        MEMORY_SCALE.start_of(MEMORY_SCALE.buckets - 1) >= 2 * 2**40 > MEMORY_SCALE.start_of(MEMORY_SCALE.buckets - 2)
    )


def test_memory_is_predicted_in_bytes() -> None:
    """The upper edge of the bucket of 8e9 bytes plus a tenth, not the 1,166 of the last bucket of cores."""
    forecast = baselines.predict_histogram(histogram_of([8e9] * 1440, ForecastResource.MEMORY), DAY)
    assert forecast.expected is not None
    assert 8e9 <= forecast.expected <= 8e9 * 1.05 + 5 * 2**20
    assert forecast.peak == pytest.approx(forecast.expected * 1.1)
    assert forecast.reason.rule == "koordinator_p98"


def test_one_minute_in_thirty_is_the_peak_of_memory_and_not_of_cpu() -> None:
    """It is 3.3 % of the samples: more than the 98th percentile leaves out, less than the 95th does."""
    spiky = [*[10.0] * 29, 40.0] * 30
    assert histogram_percentile(histogram_of(spiky), CPU_SCALE.percentile) < 11
    assert (
        histogram_percentile(histogram_of([n * 2**30 for n in spiky], ForecastResource.MEMORY), MEMORY_SCALE.percentile)
        > 40 * 2**30
    )


@pytest.mark.parametrize(("cores", "bucket"), [(0.0, 0), (0.0249, 0), (0.026, 1), (1.0, 22), (2.0, 32), (1e9, 157)])
def test_a_use_falls_into_the_bucket_that_starts_below_it(cores: float, bucket: int) -> None:
    assert CPU_SCALE.bucket_of(cores) == bucket
    assert CPU_SCALE.buckets == 158


def histogram_of(minutes: list[float], resource: ForecastResource = ForecastResource.CPU) -> DecayingHistogram:
    state = baselines.start_histogram(resource)
    for minute, used in enumerate([*minutes, 0.0]):
        state = baselines.observe_histogram(state, minute * MINUTE, used)
    return state


def test_a_steady_core_is_predicted_as_the_upper_edge_plus_a_tenth() -> None:
    forecast = baselines.predict_histogram(histogram_of([1.0] * 30), 30 * MINUTE)
    assert forecast.expected == pytest.approx(1.035762, abs=1e-6)
    assert forecast.peak == pytest.approx(1.139338, abs=1e-6)
    assert not forecast.trusted
    assert baselines.predict_histogram(histogram_of([1.0] * 1440), DAY).trusted


def test_the_sample_of_a_minute_is_its_90th_percentile() -> None:
    state = DecayingHistogram()
    for second in range(61):
        state = baselines.observe_histogram(state, second * S, 1.0 if second < 54 else 8.0)
    assert state.samples == 1
    assert state.weights[CPU_SCALE.bucket_of(1.0)] == 1.0


@pytest.mark.parametrize(
    ("resource", "hours", "unit"), [(ForecastResource.CPU, 12, 1.0), (ForecastResource.MEMORY, 24, 2.0**30)]
)
def test_half_of_a_samples_weight_is_left_after_the_half_life(
    resource: ForecastResource, hours: int, unit: float
) -> None:
    """Equal minutes of 1 core at 0 h and 4 cores at 12 h have weights 1 and 2, so 4 cores start at a third."""
    state = baselines.start_histogram(resource)
    for at_s, used in ((0, 1.0), (hours * 3600, 4.0), (hours * 3600 + 60, 0.0)):
        state = baselines.observe_histogram(state, at_s * S, used * unit)
    scale = state.scale
    assert histogram_percentile(state, 0.33) == scale.start_of(scale.bucket_of(1.0 * unit) + 1)
    assert histogram_percentile(state, 0.34) == scale.start_of(scale.bucket_of(4.0 * unit) + 1)


def test_the_reference_moves_before_weights_overflow() -> None:
    """After 101 half-lives the old sample is below the epsilon of an empty bucket, and the new one has a weight of about
    one."""
    state = DecayingHistogram()
    for at_s, cores in ((0, 9.0), (101 * 12 * 3600, 1.0), (101 * 12 * 3600 + 60, 0.0)):
        state = baselines.observe_histogram(state, at_s * S, cores)
    assert state.reference_s == 101 * 12 * 3600
    assert sum(state.weights) == pytest.approx(1.0)
    assert histogram_percentile(state, 1.0) == CPU_SCALE.start_of(CPU_SCALE.bucket_of(1.0) + 1)


def test_a_bucket_with_negligible_weight_is_not_the_maximum() -> None:
    weights = [0.0] * CPU_SCALE.buckets
    weights[22], weights[60] = 1.0, 0.00009
    assert histogram_percentile(DecayingHistogram(weights=tuple(weights), samples=1), 1.0) == CPU_SCALE.start_of(23)
    weights[60] = 0.00011
    assert histogram_percentile(DecayingHistogram(weights=tuple(weights), samples=1), 1.0) == CPU_SCALE.start_of(61)


def test_simple_peaks() -> None:
    assert mean_plus_sigmas([1.0, 3.0]) == 2.0 + 5 * 1.0
    assert percentile_99([float(n) for n in range(1, 201)]) == 198.0


@pytest.mark.parametrize(("name", "expected"), [("n-sigma", 10.0), ("rc-like", 10.0), ("max", 50.0)])
def test_history_length_of_each_method(name: str, expected: float) -> None:
    """A spike of a minute five hours ago: only the maximum contains it; the 99th percentile is below it."""
    method = METHODS[name]
    state = method.start(ForecastResource.CPU)
    for minute in range(1440):
        state = method.observe(state, minute * MINUTE, 50.0 if minute == 1140 else 10.0)
    assert method.predict(state, DAY).peak == expected


@pytest.mark.parametrize("name", METHODS)
def test_all_methods_have_the_same_interface(name: str) -> None:
    method = METHODS[name]
    state = method.start(ForecastResource.CPU)
    assert method.predict(state, 0, 3600 * S).peak is None
    for minute in range(3 * 60):
        state = method.observe(state, minute * MINUTE, 4.0)
    forecast = method.predict(state, 180 * MINUTE, 3600 * S)
    assert forecast.peak == pytest.approx(4.0, rel=0.2)
    assert forecast.reason.text
    assert msgspec.json.decode(msgspec.json.encode(state), type=type(state)) == state
