"""Headroom by forecast while it is trusted and while it is not, and in which cycles it applies."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from agent.advisor.headroom.forecast_headroom import apply_memory_forecast, forecast_cores
from agent.advisor.provision.pool_sizes import pool_reclaimable_cores
from agent.config.config import AgentConfig
from agent.offline.simulation.simulator import run_simulation
from agent.offline.simulation.workloads import build_node
from api.advice import Headroom, MemoryAdvice, MemoryCondition, MemoryPressure, PoolSize
from api.annotations import ServiceProfile
from api.forecast import Forecast, ForecastResource, PeakForecast
from api.knobs import Reason
from api.units import MIB
from tests.builders.four_cpu_node import busy_snapshot

SO = Reason(rule="estimate", text="As estimated.")
GIB = 1024 * MIB


def outlook(resource: ForecastResource, peak: float | None, used: float | None, *, trusted: bool = True) -> Forecast:
    reason = Reason(rule="calibrated", text="The peak is predicted.")
    forecast = PeakForecast(peak=peak, trusted=trusted, reason=reason)
    return Forecast(resource=resource, used=used, forecast=forecast, target_miss_ratio=0.055)


@pytest.mark.parametrize(
    ("peak", "used", "trusted", "otherwise", "reclaimable", "cores", "rule"),
    [
        (20.0, 10.0, True, 15.0, 48.0, 24.0, "forecast"),
        (20.0, 30.0, True, 15.0, 48.0, 14.0, "forecast"),  # a peak is never below what is used now
        (20.0, 10.0, True, 15.0, 12.0, 12.0, "forecast"),  # bounded by the reclaimable CPU
        (20.0, None, True, None, None, 24.0, "forecast"),
        (20.0, 10.0, False, 15.0, 48.0, 15.0, "forecast_below_canonical"),
        (35.0, 10.0, False, 15.0, 48.0, 9.0, "forecast_below_canonical"),
        (20.0, 10.0, False, None, 48.0, None, "forecast_below_canonical"),
        (None, 10.0, False, 15.0, 48.0, 15.0, "canonical_without_forecast"),
        (None, None, False, None, 48.0, None, "canonical_without_forecast"),
        (99.0, 10.0, True, 15.0, 48.0, 0.0, "forecast"),
    ],
)
def test_cores_of_a_node_of_48_with_4_reserved(
    peak: float | None, used: float | None, trusted: bool, otherwise: float | None, reclaimable: float | None,
    cores: float | None, rule: str,
) -> None:  # fmt: skip
    current = (outlook(ForecastResource.MEMORY, 1.0, 1.0), outlook(ForecastResource.CPU, peak, used, trusted=trusted))
    result, reason = forecast_cores(48.0, 4.0, current, Headroom(cores=otherwise, reason=SO), reclaimable)
    assert (result, reason.rule) == (cores, rule)
    if cores == reclaimable:
        assert reason.text.endswith("at most the 12.00 that reclaimed pods may use now.")


def test_without_a_forecast_the_fallback_headroom_applies() -> None:
    assert forecast_cores(48.0, 4.0, (), Headroom(cores=15.0, reason=SO), 10.0) == (15.0, SO)


@pytest.mark.parametrize(
    ("sizes", "cores"),
    [
        ((), None),
        ((PoolSize(pool="share", cpus=8),), None),
        ((PoolSize(pool="reclaim", cpus=4), PoolSize(pool="reclaim", numa=1, cpus=2, overlap={"share": 6})), 12.0),
        ((PoolSize(pool="reclaim", cpus=8, quota_cores=2.5), PoolSize(pool="reclaim", numa=1, cpus=2)), 4.5),
        # 16 CPUs of share pools overlap both NUMA nodes, of which 3 and 9 cores may be used
        (
            (
                PoolSize(pool="reclaim", cpus=0, overlap={"share": 16}),
                PoolSize(pool="reclaim", numa=0, cpus=2, quota_cores=3.0),
                PoolSize(pool="reclaim", numa=1, cpus=4, quota_cores=9.0),
            ),
            12.0,
        ),
        (
            (
                PoolSize(pool="reclaim", cpus=0, overlap={"share": 4}),
                PoolSize(pool="reclaim", numa=0, cpus=2),
                PoolSize(pool="reclaim", numa=1, cpus=4),
            ),
            10.0,
        ),
    ],
)
def test_headroom_is_bounded_by_the_reclaim_pools(sizes: tuple[PoolSize, ...], cores: float | None) -> None:
    assert pool_reclaimable_cores(sizes, (0, 1)) == cores


def memory(total: float | None, **by_numa: float) -> MemoryAdvice:
    parts = {int(name[1:]): size for name, size in by_numa.items()}
    condition = MemoryCondition(state=MemoryPressure.NO_RISK, reason=SO)
    return MemoryAdvice(
        policy="canonical", headroom_bytes=total, headroom_by_numa=parts, headroom_reason=SO, condition=condition
    )


@pytest.mark.parametrize(
    ("peak", "trusted", "before", "headroom"),
    [
        (3.0, True, 2.0, 4.0),
        (3.0, False, 2.0, 2.0),
        (6.5, False, 2.0, 0.5),
        (None, False, 2.0, 2.0),
        (3.0, False, None, None),
    ],
)
def test_memory_of_a_node_of_8_gib_with_1_reserved(
    peak: float | None, trusted: bool, before: float | None, headroom: float | None
) -> None:
    current = (outlook(ForecastResource.MEMORY, None if peak is None else peak * GIB, 2.0 * GIB, trusted=trusted),)
    was = memory(None if before is None else before * GIB)
    result = apply_memory_forecast(was, current, busy_snapshot(1), AgentConfig())
    assert result.headroom_bytes == (None if headroom is None else headroom * GIB)
    assert result.headroom_by_numa == ({} if headroom is None else {0: headroom * GIB})
    if trusted:
        assert result.headroom_reason.text.endswith("with 1.00 GiB of 8.00 GiB reserved, the headroom is 4.00 GiB.")


@pytest.mark.parametrize(("used", "headroom"), [({"inactive_anon": 512 * MIB}, 2.5), ({}, 2.0)])
def test_requested_memory_of_an_unreclaimable_pod_is_reserved(used: dict[str, int], headroom: float) -> None:
    """2 GiB requested; the used part is in the peak."""
    shot = busy_snapshot(1)
    container = replace(shot.pods[0].containers[0], memory_request_bytes=2 * GIB)
    profile = ServiceProfile(disable_reclaim_level="Pod")
    web = replace(shot.pods[0], containers=(container,), profile=profile)
    sample = replace(shot.cgroups[container.cgroup], memory_stat=used)
    shot = replace(shot, pods=(web, *shot.pods[1:]), cgroups={**shot.cgroups, container.cgroup: sample})
    current = (outlook(ForecastResource.MEMORY, 3.0 * GIB, None),)
    assert apply_memory_forecast(memory(9.0 * GIB), current, shot, AgentConfig()).headroom_bytes == headroom * GIB


@pytest.mark.parametrize(
    "settings",
    [{"memory": {"policy": "none"}}, {"advisor": {"enableReclaim": False}}],
    ids=["policy none", "disabled"],
)
def test_disabled_memory_headroom_stays_zero(settings: dict[str, object]) -> None:
    current = (outlook(ForecastResource.MEMORY, 3.0 * GIB, 2.0 * GIB),)
    assert apply_memory_forecast(
        memory(0.0), current, busy_snapshot(1), msgspec.convert(settings, AgentConfig)
    ) == memory(0.0)


def headroom_by_cycle(settings: dict[str, object]) -> list[tuple[float | None, str]]:
    """Headroom of a node of 16 CPUs under a steady load over six hours, by minute."""
    config = msgspec.convert({"forecast": {"minHistoryS": 14_400}, **settings}, AgentConfig)
    plan = build_node(16, 1, ("step",), online=2, seed=3)
    cycles = [finished for finished, _, _ in run_simulation(plan, config, seconds=6 * 3600, interval_s=60)]
    result = [item.advice.headroom for item in cycles if item.advice is not None]
    return [(item.cores, item.reason.rule) for item in result if item is not None]


def test_cycles_use_the_forecast_once_it_is_trusted() -> None:
    estimate = headroom_by_cycle({})
    forecast = headroom_by_cycle({"advisor": {"headroom": {"policy": "forecast"}}})
    rules = [rule for _, rule in forecast]
    assert list(dict.fromkeys(rules)) == ["canonical_without_forecast", "forecast_below_canonical", "forecast"]
    assert (
        110 <= rules.index("forecast_below_canonical") <= 130
    )  # an hour to learn from, and one that an error is known of
    assert 235 <= rules.index("forecast") <= 245  # four hours, as set
    until = rules.index("forecast")
    pairs = list(zip(estimate, forecast, strict=True))
    assert all(own is not None and others is not None and own <= others for (others, _), (own, _) in pairs[:until])
    assert {rule for _, rule in estimate} == {"estimate"}
