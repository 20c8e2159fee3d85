"""Sampling of cycles, and the forecasts and scores that follow."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from agent.advisor.forecast.baselines import METHODS
from agent.advisor.forecast.node_forecast import (
    ForecastState,
    OnlineCpuTime,
    online_cpu_time,
    online_memory_bytes,
    update_forecasts,
)
from agent.config.advisor import ForecastConfig
from api.forecast import ForecastResource
from api.snapshot import CgroupSample, Snapshot
from api.units import MIB
from tests.builders.four_cpu_node import S
from tests.builders.four_cpu_node import busy_snapshot as snapshot

MS = 1_000_000
CONFIG = ForecastConfig()


def changed(current: Snapshot, **batch: object) -> Snapshot:
    """Return the snapshot with another batch cgroup; None removes it."""
    cgroups = dict(current.cgroups)
    sample = cgroups.pop("/batch")
    if batch:
        cgroups["/batch"] = replace(sample, **batch)
    return replace(current, cgroups=cgroups)


def test_online_cpu_time_is_busy_time_without_reclaimed_pods() -> None:
    """3.75 cores busy, 2.25 of them the batch pod's: web has 1.5, the system nothing."""
    assert online_cpu_time(snapshot(1), snapshot(2)) == OnlineCpuTime(1500 * MS, S)
    assert online_cpu_time(snapshot(1), snapshot(4)) == OnlineCpuTime(4500 * MS, 3 * S)


@pytest.mark.parametrize(
    ("previous", "now", "online_ms"),
    [
        (None, snapshot(2), None),
        (snapshot(2), snapshot(2), None),
        (replace(snapshot(1), boot_id="before"), snapshot(2), None),
        (snapshot(1), changed(snapshot(2)), None),
        (snapshot(1), changed(snapshot(2), id=999), None),
        (snapshot(1), changed(snapshot(2), cpu_usage_ns=None), None),
        (snapshot(1), changed(snapshot(2), cpu_usage_ns=1), None),
        (changed(snapshot(1)), changed(snapshot(2), cpu_usage_ns=250 * MS), 3500),
        (changed(snapshot(1)), changed(snapshot(2)), 3750),
    ],
    ids=["first", "no time", "another boot", "removed", "recreated", "not read", "went back", "created", "missing"],
)  # fmt: skip
def test_a_partly_measured_interval_has_no_cpu_time(
    previous: Snapshot | None, now: Snapshot, online_ms: int | None
) -> None:
    """A reclaimed cgroup that was created in the interval used all of its CPU time in it."""
    assert online_cpu_time(previous, now) == (None if online_ms is None else OnlineCpuTime(online_ms * MS, S))


@pytest.mark.parametrize(
    ("stat", "online_mib"),
    [
        (
            {"inactive_anon": 100 * MIB, "active_anon": 20 * MIB, "unevictable": 4 * MIB, "inactive_file": 500 * MIB},
            1924,
        ),
        ({"total_inactive_anon": 3000 * MIB}, 0),
        ({}, None),
    ],
)
def test_online_memory_is_unavailable_memory_without_reclaimed_pods(
    stat: dict[str, int], online_mib: int | None
) -> None:
    """2,048 of 8,192 MiB are not available; the page cache of a reclaimed pod is."""
    result = online_memory_bytes(changed(snapshot(1), memory_stat=stat))
    assert result == (None if online_mib is None else online_mib * MIB)


def test_a_sample_is_the_mean_of_five_seconds() -> None:
    """One-second cycles with 1.5 cores; the one in which the batch pod is not measured does not count."""
    watched, previous, used = ForecastState(), None, []
    for seq in range(1, 12):
        now = snapshot(seq) if seq != 4 else changed(snapshot(seq), cpu_usage_ns=None)
        watched = update_forecasts(previous, now, watched, CONFIG, now.taken_at_ns)
        previous = now
        cpu = watched.forecasts[0]
        used.append((cpu.resource, cpu.used, watched.series.cpu.open_samples))  # type: ignore[union-attr]
    assert used[0] == (ForecastResource.CPU, None, 0)
    assert used[1:5] == [(ForecastResource.CPU, None, 0)] * 4
    assert used[5:10] == [(ForecastResource.CPU, 1.5, 1)] * 5
    assert used[10] == (ForecastResource.CPU, 1.5, 2)
    assert watched.forecasts[1].used is None  # without memory.stat the batch pod's memory is not known


def hours(config: ForecastConfig, count: int, spike_at: int | None = None) -> ForecastState:
    """One cycle per minute on a node of 4 CPUs: online pods use 1.5 cores, once 3.5."""
    watched, previous, busy = ForecastState(), None, 0.0
    for minute in range(count * 60):
        busy += 60 * (3.5 if minute == spike_at else 1.5)
        base = snapshot(1)
        assert base.node.cpu is not None
        node = replace(base.node, cpu=replace(base.node.cpu, user_ns=round(busy * S), nice_ns=0, system_ns=0))
        cgroups = {
            "/batch": CgroupSample(path="/batch", id=1, cpu_usage_ns=0, memory_stat={"anon": 0, "inactive_anon": 0})
        }
        now = replace(base, taken_at_ns=minute * 60 * S, node=node, cgroups=cgroups)
        watched = update_forecasts(previous, now, watched, config, now.taken_at_ns)
        previous = now
    return watched


def test_a_spike_is_scored_as_misses_and_their_size() -> None:
    """A minute of 3.5 cores after 20 hours of 1.5: the 12 forecasts of the hour before missed it by 2."""
    cpu, memory = hours(CONFIG, 22, spike_at=20 * 60).forecasts
    assert cpu.forecast.peak is not None
    assert cpu.forecast.peak >= 1.5
    assert not cpu.forecast.trusted
    assert cpu.score is not None
    assert cpu.score.missed == 12
    assert cpu.score.miss_ratio == cpu.score.big_miss_ratio == pytest.approx(12 / cpu.score.evaluated)
    assert [cpu.score.shortfall_mean, cpu.score.shortfall_max] == pytest.approx([2.0, 2.0], abs=0.01)
    assert cpu.score.quantile_ratio == pytest.approx(0.945, abs=0.01)
    assert memory.score is not None
    assert memory.score.missed == 0
    assert memory.forecast.peak == pytest.approx(2048 * MIB, rel=1e-6)
    assert memory.score.bias == pytest.approx(0.0, abs=1.0)


@pytest.mark.parametrize(
    ("method", "peak"), [("koordinator", 1.7139), ("n-sigma", 1.5), ("rc-like", 1.5), ("max", 1.5)]
)
def test_baselines_predict_from_the_same_samples_without_scores(method: str, peak: float) -> None:
    cpu = hours(msgspec.convert({"method": method}, ForecastConfig), 3).forecasts[0]
    assert cpu.forecast.peak == pytest.approx(peak, abs=1e-4)
    assert cpu.score is None


def test_every_configurable_method_exists() -> None:
    assert msgspec.json.schema(ForecastConfig)["$defs"]["ForecastConfig"]["properties"]["method"]["enum"] == sorted(
        METHODS
    )
