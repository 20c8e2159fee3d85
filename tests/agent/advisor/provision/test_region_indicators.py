"""Current values of indicators by kernel counters, and targets by configuration and service profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import ProvisionInputs
from agent.advisor.provision.region_indicators import ProvisionIndicators, indicator_target
from agent.advisor.provision.regions import RegionMembers
from agent.config.advisor import IndicatorTargetsConfig
from api.advice import Region, RegionKind
from api.annotations import IndicatorTarget
from api.measurements import CpuCounters, RunqLatency
from api.pod import Container
from api.rates import NodeRates, Rates
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
