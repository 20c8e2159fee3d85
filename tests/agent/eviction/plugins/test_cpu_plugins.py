"""Eviction plugins for CPU: at the threshold, and one unit to either side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.eviction import (
    CpuLoadEvictionConfig,
    CpuSuppressionEvictionConfig,
    KoordinatorCpuConfig,
    NumaCpuConfig,
    NumaSysConfig,
)
from agent.eviction.eviction_inputs import EvictionBucket, PodEvictionRecord
from agent.eviction.finding import EvictionFinding
from agent.eviction.plugins import (
    cpu_pressure_load,
    cpu_pressure_suppression,
    koordinator_cpu_evict,
    numa_cpu_pressure,
    numa_sys_cpu_pressure,
)
from agent.eviction.plugins.cpu_pressure_load import CpuLoadState
from agent.eviction.plugins.cpu_pressure_suppression import CpuSuppressionState
from agent.eviction.plugins.koordinator_cpu_evict import KoordinatorCpuState
from agent.eviction.plugins.numa_cpu_pressure import (
    NumaCpuState,
    evicted_per_hour,
    frequency_score,
    usage_score,
    usage_threshold,
)
from agent.eviction.plugins.numa_sys_cpu_pressure import NumaSysCpuState
from agent.eviction.sample_window import SampleWindow
from api.advice import NOT_NUMA_BOUND, CpuAdvice, Headroom, PoolSize, Region, RegionAdvice, RegionKind
from api.eviction import ThresholdMet
from api.knobs import Reason
from api.pod import Pod
from api.qos import Enhancements, QoSLevel
from api.snapshot import CpuTimes, Machine
from tests.agent.eviction.builders import BOOT_NS, HARD, NOT_MET, SOFT, S, names, pod, situation
from tests.agent.eviction.builders import load as load_of

WHY = Reason(rule="r", text="t")


# Katalyst's scores


@pytest.mark.parametrize(
    ("use", "gap", "score"),
    [
        (0.7, 0.5, 20),  # Katalyst's own case: 60 x (1 - 0.2 / 0.3)
        (0.5, 0.5, 60),
        (0.2, 0.5, -1000),
        (0.2001, 0.5, 0),
        (0.6, 0.5, 40),
        (0.8, 0.5, 0),
        (0.3, -0.2, 40),
    ],
)
def test_usage_gap(use: float, gap: float, score: int) -> None:
    assert usage_score(use, gap) == score


@given(st.floats(0, 1), st.floats(-1, 1))
def test_scores_stay_within_bounds(use: float, gap: float) -> None:
    assert usage_score(use, gap) == -1000 or 0 <= usage_score(use, gap) <= 60


# Load of pools


def region(pool: str, pods: Sequence[str]) -> RegionAdvice:
    keys = tuple(f"default/{name}" for name in pods)
    return RegionAdvice(
        region=Region(name=pool, kind=RegionKind.SHARE, pool=pool, numa_nodes=(0,), pods=keys),
        policy="p", controls={}, upper_cores=1, lower_cores=1, reason=WHY,
    )  # fmt: skip


def play_load(
    loads: Sequence[Mapping[str, float]],
    *,
    size: int = 4,
    limit: float | None = None,
    pool: str = "share",
    config: CpuLoadEvictionConfig | None = None,
) -> tuple[EvictionFinding, CpuLoadState]:
    """One cycle every half minute; the finding of the last one."""
    memory, findings = CpuLoadState(), ()
    pods = [pod("a", QoSLevel.SHARED), pod("b", QoSLevel.SHARED)]
    for i, each in enumerate(loads):
        at = situation(
            100.0 + 30 * i,
            pods,
            samples={name: {"load": load_of(value)} for name, value in each.items()},
            advice=CpuAdvice(regions=(region(pool, ["a", "b"]),)),
            pools={pool: tuple(range(size))},
            shared_limit_cpus=limit,
        )
        findings, memory = cpu_pressure_load.evaluate_cpu_load(at, memory, config or CpuLoadEvictionConfig())
    return findings[0], memory


@pytest.mark.parametrize(
    ("total", "samples", "limit", "met"),
    [
        (7.2, 10, None, SOFT),  # 1.8 times 4 is not more than that
        (7.21, 10, None, HARD),
        (7.21, 8, None, HARD),  # 80 % of ten
        (7.21, 7, None, NOT_MET),
        (4.0, 10, None, NOT_MET),
        (4.01, 10, None, SOFT),
        (4.01, 7, None, NOT_MET),
        (7.21, 10, 5.0, NOT_MET),  # the pool may still grow
        (1.01, 10, 4.0, SOFT),  # the pool cannot grow
        (1.0, 10, 4.0, NOT_MET),
        (7.21, 10, 4.0, HARD),
    ],
)
def test_load_of_a_pool(total: float, samples: int, limit: float | None, met: ThresholdMet) -> None:
    actual, _ = play_load([{"a": 1.0, "b": total - 1.0}] * samples, limit=limit)
    assert actual.threshold.met is met
    assert names(actual) == (["b", "a"] if met is HARD else [])
    assert (actual.threshold.condition is not None) == (met is not NOT_MET)
    assert actual.threshold.value == 0.8, "the threshold, and not what was observed"


def test_the_pod_with_the_highest_mean_load_is_evicted_first() -> None:
    actual, _ = play_load([{"a": 9.0, "b": 1.0}] * 6 + [{"a": 1.0, "b": 8.0}] * 4)
    assert names(actual) == ["a", "b"]
    assert actual.cool_down_s == 300
    assert actual.candidates[0].grace_s is None


def test_a_missing_load_is_no_sample() -> None:
    actual, memory = play_load([{"a": 9.0}] * 7 + [{}] * 3)
    assert (actual.threshold.reason.rule, memory.pools) == ("input_missing", {})
    actual, memory = play_load([{"a": 9.0}] * 7 + [{}] * 2)
    assert (actual.threshold.met, len(memory.pools["share"].values)) == (NOT_MET, 7)
    assert play_load([{"a": 9.0}] * 8 + [{}])[0].threshold.met is HARD


def test_the_load_window_expires_after_a_minute_without_samples() -> None:
    """Half a minute for the next sample and half a minute of staleness; after one more cycle the window restarts."""
    assert play_load([{"a": 9.0}] * 10 + [{}] * 2)[0].threshold.met is HARD
    actual, memory = play_load([{"a": 9.0}] * 10 + [{}] * 3)
    assert (actual.threshold.reason.rule, names(actual)) == ("input_missing", [])
    assert (memory.pools, memory.pods) == ({}, {})
    actual, _ = play_load([{"a": 9.0}] * 10 + [{}] * 3 + [{"a": 9.0}] * 7)
    assert (actual.threshold.met, actual.threshold.observed) == (NOT_MET, 0.7)


def test_a_pod_without_recent_load_is_no_candidate() -> None:
    actual, _ = play_load([{"a": 90.0, "b": 9.0}] * 10 + [{"b": 9.0}] * 3)
    assert (actual.threshold.met, names(actual)) == (HARD, ["b"])


@pytest.mark.parametrize("pool", ["reclaim", "dedicated", "reserve", "fallback", "isolation-x", "reserve-NUMA1"])
def test_the_load_of_exclusive_pools_is_not_evaluated(pool: str) -> None:
    assert play_load([{"a": 90.0}] * 10, pool=pool)[0].threshold.reason.rule == "no_pools"


def test_without_a_sampled_load_the_advisors_load_counts() -> None:
    pods = [pod("a", QoSLevel.SHARED), pod("b", QoSLevel.SHARED)]
    at = situation(
        pods=pods, samples={"a": {"load": load_of(3.0)}}, pools={"share": (0,)}, loads={"/a": 99.0, "/b": 1.5},
        advice=CpuAdvice(regions=(region("share", ["a", "b"]),)),
    )  # fmt: skip
    _, memory = cpu_pressure_load.evaluate_cpu_load(at, CpuLoadState(), CpuLoadEvictionConfig())
    assert memory.pods == {"default/a": SampleWindow(100 * S, (3.0,)), "default/b": SampleWindow(100 * S, (1.5,))}
    assert memory.pools == {"share": SampleWindow(100 * S, (2.0,))}


def test_samples_are_half_a_minute_apart() -> None:
    pods = [pod("a", QoSLevel.SHARED)]
    memory = CpuLoadState()
    for i in range(0, 61, 5):
        at = situation(
            100.0 + i, pods, samples={"a": {"load": load_of(9.0)}}, pools={"share": (0,)},
            advice=CpuAdvice(regions=(region("share", ["a"]),)),
        )  # fmt: skip
        _, memory = cpu_pressure_load.evaluate_cpu_load(at, memory, CpuLoadEvictionConfig())
    assert memory.pods["default/a"] == SampleWindow(160 * S, (9.0, 9.0, 9.0))


# Suppression of reclaimed pods


def play_suppression(
    pods: Sequence[Pod], cpus: int, seconds: int, sizes: tuple[PoolSize, ...] = (), **more: object
) -> list[EvictionFinding]:
    memory, findings = CpuSuppressionState(), ()
    for at_s in (0, seconds):
        at = situation(100.0 + at_s, pods, pools={"reclaim": tuple(range(cpus))}, advice=CpuAdvice(sizes=sizes), **more)  # type: ignore[arg-type]
        findings, memory = cpu_pressure_suppression.evaluate_cpu_suppression(at, memory, CpuSuppressionEvictionConfig())
    return list(findings)


def tolerant(name: str, cores: float, rate: float | None, **more: object) -> Pod:
    return pod(name, cores=cores, enhancements=Enhancements(suppression_tolerance_rate=rate), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "seconds", "victims"),
    [
        (2.0, 301, []),  # 8 cores over 4 CPUs is 2 times exactly
        (1.9, 300, []),
        (1.9, 301, ["a"]),
        (None, 301, []),  # the default: 5
        (9.0, 301, []),
    ],
)
def test_suppression(rate: float | None, seconds: int, victims: list[str]) -> None:
    assert names(play_suppression([tolerant("a", 8, rate)], 4, seconds)[0]) == victims


def test_the_reasons_of_suppression_name_the_tolerance() -> None:
    finding, *_ = play_suppression([tolerant("a", 8, 1.5), tolerant("b", 1, 9.0)], 4, 301)
    assert finding.threshold.reason.text == (
        "Reclaimed pods requested 2.25 times the 4 cores that they have; 1 of 2 pods tolerate less."
    )
    assert finding.candidates[0].text == (
        "Reclaimed pods requested 2.25 times the 4 cores that they have; this pod tolerates 1.50 "
        "(current pool suppression rate 2.25 is over than the pod suppression tolerance rate 1.50)."
    )


def test_the_maximum_tolerance_is_five_times_the_supply() -> None:
    assert names(play_suppression([tolerant("a", 21, 9.0)], 4, 301)[0]) == ["a"]
    assert names(play_suppression([tolerant("a", 20, 9.0)], 4, 301)[0]) == []
    assert names(play_suppression([tolerant("a", 20.5, 9.0)], 4, 301)[0]) == ["a"], "whole cores, rounded up"


def test_each_victim_is_subtracted_before_the_next_is_evaluated() -> None:
    pods = [tolerant("a", 8, 2.0), tolerant("b", 8, 2.0, priority=-1), tolerant("c", 4, 2.0)]
    assert names(play_suppression(pods, 4, 301)[0]) == ["b", "a"]  # 20, 12, 4 of 8: c stays


def test_a_stuck_pod_still_counts_and_is_no_candidate() -> None:
    pods = [tolerant("a", 8, 2.0), tolerant("b", 8, 2.0, priority=-1), tolerant("c", 4, 2.0)]
    actual = play_suppression(pods, 4, 301, stuck=frozenset({"default/b"}))[0]
    assert names(actual) == ["a", "c"], "20, and 12 with the 8 of `b`"
    alone = play_suppression(pods[:1], 1, 301, stuck=frozenset({"default/a"}))[0]
    assert (names(alone), alone.threshold.met) == ([], SOFT), "its suppression is 8 times, stuck or not"


def test_a_quota_below_the_cpus_is_the_supply() -> None:
    sizes = (PoolSize(pool="reclaim", cpus=4, quota_cores=2.0),)
    assert names(play_suppression([tolerant("a", 5, 2.0)], 4, 301, sizes)[0]) == ["a"]
    assert names(play_suppression([tolerant("a", 5, 2.0)], 4, 301)[0]) == []


def test_the_quotas_of_numa_nodes_add_up_for_pods_that_may_run_on_all_of_them() -> None:
    """16 CPUs on two nodes, 6 reclaimable cores in all: 3 on node 1, to which an online pod is bound, and 3 elsewhere."""
    sizes = tuple(PoolSize(pool="reclaim", numa=numa, cpus=0, quota_cores=3.0) for numa in (-1, 1))

    def supplies(*pods: Pod) -> list[object]:
        actual = play_suppression(pods, 16, 301, sizes, numa=2)
        return [each.threshold.reason.inputs["supply_cores"] for each in actual]

    assert supplies(tolerant("free", 9, 2.0)) == [6.0]
    assert supplies(tolerant("free", 9, 2.0), tolerant("near", 9, 2.0, numa=(0,))) == [3.0, 3.0]
    assert supplies(tolerant("free", 9, 2.0), tolerant("near", 9, 2.0, numa=(1,))) == [3.0, 3.0]


def test_bound_pods_are_evaluated_on_their_own_numa_node() -> None:
    """Eight CPUs on each of two nodes; the pool has 0-11: eight on node 0 and four on node 1."""
    pods = [tolerant("bound", 9, 2.0, numa=(1,)), tolerant("free", 15, 2.0)]
    actual = play_suppression(pods, 12, 301, numa=2)
    assert [(each.threshold.reason.inputs["supply_cores"], names(each)) for each in actual] == [
        (8.0, []),
        (4.0, ["bound"]),
    ]


@pytest.mark.parametrize("cpus", [8, None])
def test_the_suppression_timer_restarts_after_relief_and_after_a_cycle_without_a_pool(cpus: int | None) -> None:
    pods, pool = [tolerant("a", 8, 1.0)], {"reclaim": (0, 1)}
    gap = pool if cpus is None else {"reclaim": tuple(range(cpus))}
    memory, actual = CpuSuppressionState(), ()
    for at_s in range(0, 605, 5):
        at = situation(at_s, pods, pools=(gap if cpus else {}) if at_s == 300 else pool)
        actual, memory = cpu_pressure_suppression.evaluate_cpu_suppression(at, memory, CpuSuppressionEvictionConfig())
        if at_s == 300:
            assert memory == CpuSuppressionState()
    assert names(actual[0]) == [], "since 305 s, and not since 0"
    for at_s in (605, 610):
        actual, memory = cpu_pressure_suppression.evaluate_cpu_suppression(
            situation(at_s, pods, pools=pool), memory, CpuSuppressionEvictionConfig()
        )
    assert names(actual[0]) == ["a"]


# CPU of NUMA nodes: two nodes of eight CPUs


def play_numa_cpu(
    cores: Mapping[str, float],
    nodes: Mapping[str, int],
    samples: int = 5,
    records: Mapping[str, PodEvictionRecord] | None = None,
    **config: object,
) -> EvictionFinding:
    pods = [pod(name, QoSLevel.SHARED, numa=(node,)) for name, node in nodes.items()]
    memory, findings = NumaCpuState(), ()
    for i in range(samples):
        used = {name: {"cpu_usage_ns": round(value * 15 * i * S)} for name, value in cores.items()}
        at = situation(100.0 + 15 * i, pods, samples=used, numa=2, records=records or {})
        findings, memory = numa_cpu_pressure.evaluate_numa_cpu(at, memory, NumaCpuConfig(**config))  # type: ignore[arg-type]
    return findings[0]


TWO = {"a": 0, "b": 0, "c": 1}


@pytest.mark.parametrize(
    ("cores", "samples", "met"),
    [
        ({"a": 3.0, "b": 2.28, "c": 1}, 5, NOT_MET),  # 0.66 of the node is 0.6 x 1.1 exactly
        ({"a": 3.0, "b": 2.29, "c": 1}, 5, HARD),
        ({"a": 3.0, "b": 2.29, "c": 1}, 4, HARD),  # three of four samples are 75 %
        ({"a": 3.0, "b": 2.29, "c": 1}, 3, NOT_MET),
    ],
)
def test_numa_cpu(cores: dict[str, float], samples: int, met: ThresholdMet) -> None:
    actual = play_numa_cpu(cores, TWO, samples)
    assert actual.threshold.met is met
    assert actual.threshold.condition is None, "there is room on the other node"


def test_numa_cpu_on_every_node_sets_the_condition() -> None:
    actual = play_numa_cpu({"a": 6, "b": 0.1, "c": 6}, TWO)
    assert actual.threshold.condition is not None
    assert actual.threshold.condition.name == "NumaCPUPressure"


def test_the_pod_whose_use_fits_the_excess_is_evicted_first() -> None:
    # node 0 uses 0.85 of itself, 0.25 above 0.6: b has 0.25, a 0.6
    actual = play_numa_cpu({"a": 4.8, "b": 2.0, "c": 0}, TWO)
    assert names(actual) == ["b", "a"]


@pytest.mark.parametrize(
    ("ratios", "score"), [({1.0: 0.5}, -5000), ({1.0: 0.3, 24.0: 0.2 / 24}, 14), ({1.0: 0.0}, 100), ({}, 0)]
)
def test_the_eviction_frequency_score_is_katalysts(ratios: dict[float, float], score: int) -> None:
    assert frequency_score(ratios) == score


def test_evictions_per_hour_are_a_part_of_the_workloads_pods() -> None:
    """Of ten pods one was evicted 15 minutes ago and four 65 to 55 minutes ago, of which two are in the last hour."""
    buckets = (bucket(-65 * 60, 4), bucket(-15 * 60, 1))
    assert evicted_per_hour(PodEvictionRecord(buckets=buckets, expected_pods=10), BOOT_NS / S) == {
        0.5: pytest.approx(0.2), 1.0: pytest.approx(0.3), 2.0: pytest.approx(0.25)
    }  # fmt: skip
    assert evicted_per_hour(PodEvictionRecord(buckets=buckets), BOOT_NS / S) == {0.5: 0.0, 1.0: 0.0, 2.0: 0.0}


@pytest.mark.parametrize(
    ("scorers", "order"),
    [(("Usage",), ["b", "a"]), (("Usage", "WorkloadEvictionFrequency"), ["a", "b"])],
)
def test_a_workload_that_was_evicted_lately_is_spared_if_the_scorer_is_enabled(
    scorers: tuple[str, ...], order: list[str]
) -> None:
    records = {"uid-b": PodEvictionRecord(has_budget=True, buckets=(bucket(0, 5),), expected_pods=10)}
    assert names(play_numa_cpu({"a": 4.8, "b": 2.0, "c": 0}, TWO, records=records, scorers=scorers)) == order


def bucket(from_s: int, count: int) -> EvictionBucket:
    """Evictions in the ten minutes from `from_s` after the boot on."""
    return EvictionBucket(time_s=BOOT_NS // S + from_s, duration_s=600, count=count)


def test_numa_cpu_without_use_reports_a_missing_input() -> None:
    assert play_numa_cpu({}, TWO).threshold.reason.rule == "input_missing"


@pytest.mark.parametrize(("later_s", "rule"), [(45, "hard_threshold_met"), (46, "input_missing")])
@pytest.mark.parametrize("restarts", [False, True])
def test_numa_cpu_windows_expire_after_a_sample_period_and_staleness(later_s: int, rule: str, restarts: bool) -> None:
    """Counters are not readable any more; or containers come and go faster than they are sampled."""
    ring = SampleWindow(100 * S, (0.9, 0.9, 0.9, 0.9))
    memory = NumaCpuState(numa={0: ring}, pods={"default/a": ring})
    pods = [pod("a", QoSLevel.SHARED, numa=(0,))]
    for at_s in range(101, 101 + later_s):
        samples = {"a": {"cpu_usage_ns": 0, "id": at_s + 9}} if restarts else {}
        findings, memory = numa_cpu_pressure.evaluate_numa_cpu(
            situation(at_s, pods, samples=samples), memory, NumaCpuConfig()
        )
    assert findings[0].threshold.reason.rule == rule


@pytest.mark.parametrize(("later_s", "rule"), [(40, "hard_threshold_met"), (41, "input_missing")])
def test_numa_sys_windows_expire_after_a_sample_period_and_staleness(later_s: int, rule: str) -> None:
    busy, kernel = SampleWindow(100 * S, (0.9,) * 4), SampleWindow(100 * S, (0.6,) * 4)
    memory = NumaSysCpuState(usage={0: busy}, system={0: kernel}, pods={"default/a": (8.0, 5.0)})
    for at_s in range(101, 101 + later_s):
        findings, memory = numa_sys_cpu_pressure.evaluate_numa_sys_cpu(
            situation(at_s, [pod("a", numa=(0,))]), memory, NumaSysConfig()
        )
    assert findings[0].threshold.reason.rule == rule


@pytest.mark.parametrize(
    ("code", "vm", "threshold"),
    [
        ("Intel_CascadeLake", False, 0.55),
        ("Intel_CascadeLake", True, 0.54),
        ("AMD_K17Zen2", None, 0.51),
        ("", None, 0.6),
    ],
)
def test_thresholds_by_code_name(code: str, vm: bool | None, threshold: float) -> None:
    machine = Machine(codename=code, is_vm=vm)
    assert usage_threshold(machine, NumaCpuConfig()) == threshold
    assert usage_threshold(machine, NumaCpuConfig(usage_threshold=0.4)) == 0.4


def play_numa_sys(cores: Mapping[str, tuple[float, float]], samples: int = 5) -> EvictionFinding:
    pods = [pod(name, numa=(0,)) for name in cores]
    memory, findings = NumaSysCpuState(), ()
    for i in range(samples):
        used = {
            name: {"cpu_usage_ns": round(total * 10 * i * S), "cpu_system_ns": round(kernel * 10 * i * S)}
            for name, (total, kernel) in cores.items()
        }
        findings, memory = numa_sys_cpu_pressure.evaluate_numa_sys_cpu(
            situation(100.0 + 10 * i, pods, samples=used, numa=2), memory, NumaSysConfig()
        )
    return findings[0]


@pytest.mark.parametrize(
    ("cores", "samples", "met", "victims"),
    [
        ({"a": (4.08, 2.04)}, 5, HARD, ["a"]),  # 0.51 of the node, half of it in the kernel
        ({"a": (4.0, 2.0)}, 5, SOFT, []),  # 0.5 is not more than 0.5
        ({"a": (4.08, 2.03)}, 5, SOFT, []),
        ({"a": (3.28, 1.32)}, 5, SOFT, []),
        ({"a": (3.2, 1.6)}, 5, NOT_MET, []),
        ({"a": (3.28, 1.30)}, 5, NOT_MET, []),
        ({"a": (4.08, 2.04)}, 3, NOT_MET, []),  # two of four samples
        ({"a": (2.0, 1.9), "b": (2.0, 0.6), "c": (2.0, 0.59)}, 5, HARD, ["a", "b"]),
    ],
)
def test_numa_sys(cores: dict[str, tuple[float, float]], samples: int, met: ThresholdMet, victims: list[str]) -> None:
    actual = play_numa_sys(cores, samples)
    assert (actual.threshold.met, names(actual)) == (met, victims)
    assert (actual.threshold.condition is not None) == (met is not NOT_MET)
    assert all(candidate.grace_s == 60 for candidate in actual.candidates)


# Koordinator's


def play_koordinator(
    used: Mapping[str, float],
    requests: Mapping[str, float],
    pool: Sequence[int],
    samples: int = 25,
    **more: Any,
) -> dict[str, EvictionFinding]:
    """A cycle per second; use in cores by pod, and of the node under `node`."""
    pods = [pod(name, cores=cores, priority=-int(name == "low")) for name, cores in requests.items()]
    config = KoordinatorCpuConfig(node_threshold=0.7, allocatable_threshold=1.5)
    memory, findings = KoordinatorCpuState(), ()
    for i in range(samples):
        times = CpuTimes(
            user_ns=round(used.get("node", 0) * i * S), nice_ns=0, system_ns=0, idle_ns=0, iowait_ns=0, irq_ns=0,
            softirq_ns=0, steal_ns=0,
        )  # fmt: skip
        at = situation(
            100.0 + i, pods, samples={name: {"cpu_usage_ns": round(value * i * S)} for name, value in used.items()},
            node={"cpu": times}, pools={"reclaim": tuple(pool)}, **more,
        )  # fmt: skip
        findings, memory = koordinator_cpu_evict.evaluate_koordinator_cpu(at, memory, config)
    return {each.threshold.scope: each for each in findings}


@pytest.mark.parametrize(
    ("use", "requests", "samples", "victims"),
    [
        ({"a": 1.8, "b": 1.801}, {"a": 4, "b": 4}, 25, ["b"]),  # 4 of 8 cores, 90 % used: 0.3 x 8 have to go
        ({"a": 1.8, "b": 1.79}, {"a": 4, "b": 4}, 25, []),
        ({"a": 1.8, "b": 1.801}, {"a": 3.34, "b": 3.34}, 25, ["b"]),
        ({"a": 1.8, "b": 1.801}, {"a": 3.33, "b": 3.33}, 25, []),  # above 60 %
        ({"a": 1.8, "b": 1.801}, {"a": 4, "b": 4}, 20, []),  # less than a third of a minute is known
        ({"a": 1.8, "low": 1.801}, {"a": 4, "low": 4}, 25, ["low"]),
        ({"a": 1.5, "b": 2.4}, {"a": 4, "b": 4}, 25, ["b"]),
    ],
)
def test_best_effort_satisfaction(
    use: dict[str, float], requests: dict[str, float], samples: int, victims: list[str]
) -> None:
    assert names(play_koordinator(use, requests, range(4), samples)["be-satisfaction"]) == victims


def reclaim(numa: int, cpus: int, quota: float | None = None) -> PoolSize:
    return PoolSize(pool="reclaim", numa=numa, cpus=cpus, quota_cores=quota)


@pytest.mark.parametrize(
    ("sizes", "reclaimable", "allowed_cores"),
    [
        ((), None, 28),
        ((reclaim(NOT_NUMA_BOUND, 28),), None, 28),
        # Node 0 has a quota because a pod is bound there; the 24 CPUs of node 1 have none.
        ((reclaim(NOT_NUMA_BOUND, 24), reclaim(0, 4, 4.0)), None, 28),
        ((reclaim(NOT_NUMA_BOUND, 24), reclaim(0, 4, 1.5)), None, 25.5),
        ((reclaim(NOT_NUMA_BOUND, 24), reclaim(0, 4, 0.0)), None, 24),
        ((reclaim(0, 4, 1.5), reclaim(1, 24, 12.0)), None, 13.5),
        # Reclaimable by priority, every size may have the whole as its quota: it counts once.
        ((reclaim(NOT_NUMA_BOUND, 0, 11.0), reclaim(0, 0, 11.0)), 11.0, 11),
        ((reclaim(NOT_NUMA_BOUND, 0, 41.0), reclaim(0, 0, 41.0)), 41.0, 28),
    ],
)
def test_the_supply_of_reclaimed_pods_is_the_sum_over_numa_nodes(
    sizes: tuple[PoolSize, ...], reclaimable: float | None, allowed_cores: float
) -> None:
    """Two NUMA nodes of 24 CPUs; the pool has four of node 0 and all of node 1. 20 cores are requested, and 18 used."""
    actual = play_koordinator(
        {"a": 18},
        {"a": 20},
        range(20, 48),
        cpus=48,
        numa=2,
        reclaimable_cores=reclaimable,
        advice=CpuAdvice(sizes=sizes),
    )["be-satisfaction"]
    assert actual.threshold.observed == pytest.approx(allowed_cores / 20)
    assert names(actual) == (["a"] if allowed_cores / 20 <= 0.6 and 18 / allowed_cores >= 0.9 else [])


def test_koordinator_evicts_down_to_two_points_below_the_node_threshold() -> None:
    # 16 CPUs, 11.36 in use is 71 %: 0.03 x 16 = 0.48 cores have to go
    actual = play_koordinator({"a": 0.4, "b": 0.3, "node": 11.36}, {"a": 1, "b": 1}, range(16))
    assert names(actual["node-cpu"]) == ["a", "b"]
    assert names(play_koordinator({"a": 0.4, "node": 11.19}, {"a": 1}, range(16))["node-cpu"]) == []


def test_requests_released_by_one_rule_are_subtracted_for_the_next() -> None:
    headroom_cores = Headroom(cores=2.0, reason=WHY)
    actual = play_koordinator({"a": 1.9, "b": 1.9}, {"a": 4, "b": 4}, range(4), headroom=headroom_cores)
    assert (names(actual["be-satisfaction"]), names(actual["cpu-allocatable"])) == (["a"], ["b"])
    assert actual["cpu-allocatable"].threshold.observed == 4


@pytest.mark.parametrize("headroom_cores", [None, Headroom(reason=WHY)])
def test_unknown_headroom_is_not_zero_headroom(headroom_cores: Headroom | None) -> None:
    actual = play_koordinator({"a": 0.1}, {"a": 1}, range(4), headroom=headroom_cores)
    assert actual["cpu-allocatable"].threshold.reason.rule == "input_missing"
