"""Eviction plugins for memory and headroom: at the threshold, and one unit to either side."""

from __future__ import annotations

import msgspec
import pytest

from agent.config.eviction import (
    KoordinatorCpuConfig,
    KoordinatorMemoryConfig,
    NumaMemoryConfig,
    OomdConfig,
    ReclaimedPressureConfig,
    RssOveruseConfig,
    SystemMemoryConfig,
)
from agent.eviction.eviction_inputs import EvictionInputs
from agent.eviction.finding import EvictionFinding
from agent.eviction.plugins import (
    koordinator_cpu_evict,
    koordinator_memory_evict,
    numa_memory_pressure,
    oomd_pressure,
    reclaimed_numa_resource_pressure,
    reclaimed_resource_pressure,
    rss_overuse,
    system_memory_pressure,
)
from agent.eviction.plugins.koordinator_cpu_evict import KoordinatorCpuState
from agent.eviction.plugins.numa_memory_pressure import NumaMemoryPressureState
from agent.eviction.plugins.oomd_pressure import OomdState
from agent.eviction.plugins.system_memory_pressure import SystemMemoryPressureState
from agent.eviction.victims import SOFT_NOTIFY_ANNOTATION
from api.advice import Headroom
from api.eviction import ThresholdMet
from api.knobs import Reason
from api.pod import Container, Pod
from api.qos import Enhancements, QoSLevel
from api.snapshot import Kswapd, Pressure
from api.units import GIB, MIB
from tests.agent.eviction.builders import (
    BOOT_NS,
    HARD,
    NOT_MET,
    PAGE,
    SOFT,
    S,
    names,
    numa_node,
    pod,
    pressure,
    situation,
    zone,
)

WHY = Reason(rule="r", text="t")


def headroom(cores: float | None, memory: float | None = None, **by_numa: dict[int, float]) -> Headroom:
    return Headroom(cores=cores, memory_bytes=memory, reason=WHY, **by_numa)


def evaluate_reclaimed(at: EvictionInputs) -> tuple[EvictionFinding, ...]:
    return reclaimed_resource_pressure.evaluate_reclaimed(at, ReclaimedPressureConfig())


def koordinator_memory(at: EvictionInputs) -> EvictionFinding:
    return koordinator_memory_evict.evaluate_koordinator_memory(at, KoordinatorMemoryConfig())[0]


def free_memory(at: EvictionInputs, config: SystemMemoryConfig | None = None) -> EvictionFinding:
    """Return the first finding, which is that of the free memory if it is met."""
    config = config or SystemMemoryConfig()
    return system_memory_pressure.evaluate_system_memory(at, SystemMemoryPressureState(), config)[0][0]


# Requests of reclaimed pods


@pytest.mark.parametrize(
    ("requests", "headroom_cores", "met", "value"),
    [
        ((5, 5), 1.0, HARD, 5000),  # Katalyst's own case: 10000 > 5000
        ((5,), 1.0, SOFT, 1500),  # equal is not above
        ((5.001,), 1.0, HARD, 5000),
        ((1.5,), 1.0, NOT_MET, 5000),
        ((1.501,), 1.0, SOFT, 1500),
        ((1,), 0.001, HARD, 5),
    ],
)
def test_reclaimed_cpu(requests: tuple[float, ...], headroom_cores: float, met: ThresholdMet, value: float) -> None:
    pods = [pod(f"p{i}", cores=cores) for i, cores in enumerate(requests)]
    cpu, memory = evaluate_reclaimed(situation(pods=pods, headroom=headroom(headroom_cores)))
    assert (cpu.threshold.met, cpu.threshold.value) == (met, pytest.approx(value))
    assert cpu.threshold.observed == pytest.approx(sum(requests) * 1000)
    assert cpu.threshold.scope == "resource.katalyst.kubewharf.io/reclaimed_millicpu"
    assert memory.threshold.reason.rule == "input_missing"


def test_zero_headroom_evicts_no_pod() -> None:
    """As after reclaiming was disabled: requests of 64 cores and 64 GiB, on the node and on a NUMA node."""
    nothing = headroom(0.0, 0.0, cores_by_numa={0: 0.0}, memory_by_numa={0: 0.0})
    at = situation(pods=[pod("a", cores=64, memory=64 * GIB, numa=(0,))], headroom=nothing)
    actual = (
        *evaluate_reclaimed(at),
        *reclaimed_numa_resource_pressure.evaluate_reclaimed_numa(at, ReclaimedPressureConfig()),
    )
    assert [each.threshold.reason.rule for each in actual] == ["nothing_promised"] * 4
    assert [names(each) for each in actual] == [[]] * 4
    assert "requested 64000m; the headroom is 0" in actual[0].threshold.reason.text


@pytest.mark.parametrize(("cores", "rule"), [(0.0, "nothing_promised"), (0.001, "hard_threshold_met")])
def test_koordinators_allocatable_rule_ignores_zero_headroom(cores: float, rule: str) -> None:
    at, config = (
        situation(pods=[pod("a", cores=1)], headroom=headroom(cores)),
        KoordinatorCpuConfig(allocatable_threshold=1.5),
    )
    actual, _ = koordinator_cpu_evict.evaluate_koordinator_cpu(at, KoordinatorCpuState(), config)
    (by_headroom,) = [each for each in actual if each.threshold.scope == "cpu-allocatable"]
    assert (by_headroom.threshold.reason.rule, bool(names(by_headroom))) == (rule, cores > 0)


def test_the_largest_request_is_evicted_first_with_a_grace_of_a_minute() -> None:
    pods = [pod("a", cores=2), pod("b", cores=4), pod("c", cores=1), pod("web", QoSLevel.SHARED, cores=64)]
    actual = evaluate_reclaimed(situation(pods=pods, headroom=headroom(1.0)))[0]
    assert names(actual) == ["b", "a", "c"]
    assert actual.candidates[0].grace_s == 60


@pytest.mark.parametrize(
    ("cores", "candidates_of"), [(1.5, []), (1.501, ["big", "small"]), (5.001, ["a", "b", "big", "small"])]
)
def test_the_soft_threshold_selects_only_pods_that_opted_in(cores: float, candidates_of: list[str]) -> None:
    """The headroom is one core. The two largest requests did not opt in: they run until the threshold is hard."""
    asks, more = {"annotations": {SOFT_NOTIFY_ANNOTATION: "True"}}, cores - 1.2
    pods = [pod("a", cores=more), pod("b", cores=0.6), pod("small", cores=0.2, **asks), pod("big", cores=0.4, **asks)]
    actual = evaluate_reclaimed(situation(pods=pods, headroom=headroom(1.0)))[0]
    assert names(actual) == candidates_of


@pytest.mark.parametrize(("size", "met"), [(5 * GIB, SOFT), (5 * GIB + 1, HARD), (GIB, NOT_MET)])
def test_reclaimed_memory(size: int, met: ThresholdMet) -> None:
    actual = evaluate_reclaimed(situation(pods=[pod("a", memory=size)], headroom=headroom(None, GIB)))[1]
    assert actual.threshold.met is met


def test_requests_of_a_terminating_pod_do_not_count() -> None:
    pods = [pod("a", cores=8), pod("b", cores=8)]
    at = situation(pods=pods, headroom=headroom(1.5), terminating=frozenset({"default/a"}))
    actual = evaluate_reclaimed(at)[0]
    assert (actual.threshold.observed, names(actual)) == (8000, ["b"])


def test_requests_by_numa_node() -> None:
    pods = [pod("a", cores=6, numa=(0,)), pod("b", cores=2, numa=(1,)), pod("c", cores=100)]
    at = situation(pods=pods, headroom=headroom(None, cores_by_numa={0: 1.0, 1: 2.0}), numa=2)
    actual = {
        each.threshold.scope: each
        for each in reclaimed_numa_resource_pressure.evaluate_reclaimed_numa(at, ReclaimedPressureConfig())
    }
    cpu = "resource.katalyst.kubewharf.io/reclaimed_millicpu"
    assert actual[f"zone0|{cpu}"].threshold.met is HARD
    assert actual[f"zone1|{cpu}"].threshold.met is NOT_MET
    assert names(actual[f"zone0|{cpu}"]) == ["a"]


# NUMA memory

NUMA = 64 * GIB
LOW, LEAST = 400 * MIB, 100 * MIB
LOW_MARK, MIN_MARK = LOW + 256 * MIB, LEAST + GIB


def numa_situation(free: int, *, inactive: int = 64 * GIB, at_s: float = 100.0, **more: object) -> EvictionInputs:
    pods = [pod("web", QoSLevel.SHARED), pod("small"), pod("big"), pod("tiny")]
    pages = {"web": 20 * GIB, "small": GIB, "big": 2 * GIB, "tiny": NUMA // 1000 - PAGE}
    samples = {name: {"numa_stat": {"total": {0: size // PAGE}}} for name, size in pages.items()}
    node = {
        "zones": (zone(0, free, LOW, LEAST), zone(0, 0, 0, 0, "DMA")),
        "numa": {0: numa_node(NUMA, inactive)},
    }
    fields: dict[str, object] = {"vmstat": {"pgscan_kswapd": 0, "pgscan_direct": 0}}
    return situation(at_s, pods, samples=samples, node={**node, **fields, **more})  # type: ignore[dict-item]


def evaluate_numa(at: EvictionInputs, rounds: int) -> tuple[EvictionFinding, int]:
    memory = NumaMemoryPressureState(rounds={0: rounds}, scanned={0: 0})
    findings, after = numa_memory_pressure.evaluate_numa_memory(at, memory, NumaMemoryConfig())
    return findings[0], after.rounds[0]


@pytest.mark.parametrize(
    ("free", "before", "after", "met", "candidates_of"),
    [
        (MIN_MARK, 0, 0, NOT_MET, []),  # above the low mark (656 MiB < 1124 MiB): the minimum is the higher one here
        (MIN_MARK - PAGE, 0, 11, HARD, ["big", "small"]),  # at once, the largest of the reclaimed
        (MIN_MARK - PAGE, 11, 12, HARD, ["big", "small", "web"]),  # a cycle later any pod, reclaimed ones first
        (MIN_MARK - PAGE, 12, 12, HARD, ["big", "small", "web"]),
        (MIN_MARK, 12, 11, NOT_MET, []),
    ],
)
def test_numa_below_the_minimum(
    free: int, before: int, after: int, met: ThresholdMet, candidates_of: list[str]
) -> None:
    actual, rounds = evaluate_numa(numa_situation(free), before)
    assert (rounds, actual.threshold.met, names(actual)) == (after, met, candidates_of)


@pytest.mark.parametrize(
    ("free", "scanned", "before", "after", "met", "any_level"),
    [
        (4 * GIB, 0, 6, 5, NOT_MET, False),
        (4 * GIB - PAGE, 0, 0, 1, NOT_MET, False),
        (4 * GIB - PAGE, 0, 5, 6, NOT_MET, False),
        (4 * GIB - PAGE, 0, 6, 7, HARD, False),
        (4 * GIB - PAGE, 0, 10, 11, HARD, False),
        (4 * GIB - PAGE, 0, 11, 12, HARD, True),
        (4 * GIB - PAGE, 1, 1, 2, NOT_MET, False),  # reclaim at work counts from the third round on
        (4 * GIB - PAGE, 1, 2, 4, NOT_MET, False),
    ],
)
def test_numa_with_little_page_cache(
    free: int, scanned: int, before: int, after: int, met: ThresholdMet, any_level: bool
) -> None:
    """Inactive files of less than 4 GiB raise the low mark to 4 GiB."""
    at = numa_situation(free, inactive=4 * GIB - 1, vmstat={"pgscan_kswapd": scanned, "pgscan_direct": 0})
    actual, rounds = evaluate_numa(at, before)
    assert (rounds, actual.threshold.met, "web" in names(actual)) == (after, met, any_level)
    assert actual.threshold.value == 4 * GIB


@pytest.mark.parametrize(("scanned_pages", "after"), [(0, 3), (1, 4)])
def test_numa_reclaim_is_the_nodes_own_if_the_probe_reports_it(scanned_pages: int, after: int) -> None:
    kswapd = {0: Kswapd(wakeups=0, active_ns=0, scanned_pages=scanned_pages, reclaimed_pages=0)}
    vmstat = {"pgscan_kswapd": 99, "pgscan_direct": 0}
    at = numa_situation(4 * GIB - PAGE, inactive=0, vmstat=vmstat, kswapd=kswapd)
    assert evaluate_numa(at, 2)[1] == after


def test_numa_graces() -> None:
    actual, _ = evaluate_numa(numa_situation(0), 12)
    assert [(each.pod.name, each.grace_s) for each in actual.candidates] == [
        ("big", 1.0),
        ("small", 1.0),
        ("web", None),
    ]


def test_memory_of_terminating_pods_counts_as_free() -> None:
    at = msgspec.structs.replace(numa_situation(MIN_MARK - GIB), terminating=frozenset({"default/big"}))
    actual, _ = evaluate_numa(at, 0)
    assert (actual.threshold.met, actual.threshold.observed) == (NOT_MET, MIN_MARK + GIB)


def test_small_numa_nodes_have_marks_in_proportion() -> None:
    at = situation(
        pods=[pod("a")], samples={"a": {"numa_stat": {"total": {0: GIB // PAGE}}}},
        node={"zones": (zone(0, GIB, LOW, LEAST),), "numa": {0: numa_node(8 * GIB)}},
    )  # fmt: skip
    actual, _ = evaluate_numa(at, 0)
    assert actual.threshold.reason.inputs["min_bytes"] == LEAST + GIB / 4
    assert actual.threshold.reason.inputs["low_bytes"] == LOW + 64 * MIB
    assert actual.threshold.met is NOT_MET


def test_numa_zones_count_together() -> None:
    """An empty zone Normal is no pressure while the kernel can allocate from DMA32."""
    zones = (zone(0, 2 * GIB, LOW, LEAST, "DMA32"), zone(0, 0, LOW, LEAST))
    at = situation(pods=[pod("a")], node={"zones": zones, "numa": {0: numa_node(4 * GIB)}})
    actual, _ = evaluate_numa(at, 0)
    assert (actual.threshold.met, actual.threshold.observed) == (NOT_MET, 2 * GIB)
    assert actual.threshold.reason.inputs["min_bytes"] == 2 * LEAST + GIB / 8


def test_numa_of_version_2_is_in_bytes() -> None:
    at = situation(
        pods=[pod("a")], samples={"a": {"numa_stat": {"anon": {0: GIB}, "file": {0: GIB}}}},
        node={"zones": (zone(0, 0, LOW, LEAST),), "numa": {0: numa_node(NUMA)}},
    )  # fmt: skip
    assert names(evaluate_numa(at, 0)[0]) == ["a"]


def test_numa_counters_restart_without_recent_zones() -> None:
    at = numa_situation(0, zones=(), files_read_at_ns=BOOT_NS + 100 * S)
    findings, after = numa_memory_pressure.evaluate_numa_memory(
        at, NumaMemoryPressureState(rounds={0: 8}), NumaMemoryConfig()
    )
    assert (findings[0].threshold.reason.rule, after.rounds) == ("input_missing", {})
    old = numa_situation(0, files_read_at_ns=BOOT_NS + 69 * S)
    findings, after = numa_memory_pressure.evaluate_numa_memory(
        old, NumaMemoryPressureState(rounds={0: 8}), NumaMemoryConfig()
    )
    assert (findings[0].threshold.met, after) == (NOT_MET, NumaMemoryPressureState())


def test_the_numa_counter_counts_each_reading_once() -> None:
    """Evaluated every second, zones read every five: the seventh reading is the first above six rounds."""
    memory, hard = NumaMemoryPressureState(), []
    for second in range(35):
        read_at_s = 100 + second - second % 5
        at = numa_situation(3 * GIB, inactive=0, at_s=100.0 + second, files_read_at_ns=BOOT_NS + read_at_s * S)
        findings, memory = numa_memory_pressure.evaluate_numa_memory(at, memory, NumaMemoryConfig())
        if findings[0].threshold.met is HARD:
            hard.append((second, names(findings[0])))
    assert memory.rounds == {0: 7}
    assert [second for second, _ in hard] == [30, 31, 32, 33, 34]
    assert [candidates_of for _, candidates_of in hard] == [["big", "small"], [], [], [], []], (
        "one reading sends one pod"
    )


# The node's memory


def free_situation(free: int, scale: int = 100, **more: object) -> EvictionInputs:
    node = {"meminfo": {"MemFree": free, "MemTotal": 100 * GIB}, "sysctl": {"vm.watermark_scale_factor": scale}}
    pods = [pod("low", priority=-5), pod("big"), pod("web", QoSLevel.SHARED), pod("unknown")]
    samples = {"low": {"memory_bytes": GIB}, "big": {"memory_bytes": 2 * GIB}, "web": {"memory_bytes": 9 * GIB}}
    return situation(pods=pods, samples=samples, node=node, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("free", "met"), [(GIB, NOT_MET), (GIB - 1, HARD)])
def test_free_memory_below_the_watermark(free: int, met: ThresholdMet) -> None:
    actual = free_memory(free_situation(free))
    assert actual.threshold.met is met
    assert names(actual) == ([] if met is NOT_MET else ["low", "big"])
    assert (actual.threshold.condition is None) == (met is NOT_MET)
    assert actual.cool_down_s == (35 if met is HARD else actual.cool_down_s)


def test_free_memory_below_the_configured_minimum() -> None:
    config = SystemMemoryConfig(free_minimum_bytes=2 * GIB)
    actual = free_memory(free_situation(2 * GIB - 1), config)
    assert (actual.threshold.met, actual.threshold.value) == (HARD, 2 * GIB)
    assert actual.threshold.condition is not None
    assert actual.threshold.condition.name == "MemoryPressure"


def test_free_memory_of_an_unknown_scale_is_no_pressure() -> None:
    at = situation(pods=[pod("a")], node={"meminfo": {"MemFree": 0, "MemTotal": GIB}})
    findings, _ = system_memory_pressure.evaluate_system_memory(at, SystemMemoryPressureState(), SystemMemoryConfig())
    assert {actual.threshold.met for actual in findings} == {NOT_MET}


def steal(pages_per_s: float, seconds: int, gap_at: int | None = None) -> list[EvictionFinding]:
    """The kswapd finding of each cycle, ten seconds apart."""
    memory, actual = SystemMemoryPressureState(), []
    for at_s in range(0, seconds + 1, 10):
        vmstat = {} if at_s == gap_at else {"pgsteal_kswapd": round(pages_per_s * at_s)}
        at = situation(1000.0 + at_s, [pod("a")], samples={"a": {"memory_bytes": GIB}}, node={"vmstat": vmstat})
        findings, memory = system_memory_pressure.evaluate_system_memory(at, memory, SystemMemoryConfig())
        # first where it is met, else in the middle of three that are not
        actual.append(next((each for each in findings if each.threshold.met is HARD), findings[1]))
    return actual


def test_background_reclaim_for_two_minutes() -> None:
    actual = steal(2000, 120)
    assert [each.threshold.met for each in actual[-2:]] == [NOT_MET, HARD]
    assert (actual[-1].threshold.value, actual[-1].threshold.observed) == (120, 120)
    assert names(actual[-1]) == ["a"]
    assert steal(1999, 130)[-1].threshold.met is NOT_MET
    # a cycle without a rate restarts the timer: 60 is missing, 70 is the first sample
    assert steal(2000, 180, gap_at=60)[-1].threshold.met is NOT_MET
    assert steal(2000, 190, gap_at=60)[-1].threshold.met is HARD


def stall(root: float, pods: tuple[float, ...], seconds: int) -> EvictionFinding:
    memory, actual = SystemMemoryPressureState(), None
    listed = [
        Pod(
            uid=f"u{i}", namespace="default", name=f"p{i}", qos=QoSLevel.RECLAIMED,
            containers=(Container(name="c", cgroup=f"/kubepods/burstable/pod{i}/c"),),
        )
        for i in range(len(pods))
    ]  # fmt: skip
    samples: dict[str, dict[str, object]] = {"kubepods/burstable": {"memory_pressure": pressure(root)}}
    for i, avg10 in enumerate(pods):
        samples[f"kubepods/burstable/pod{i}"] = {"memory_pressure": pressure(avg10)}
        samples[f"kubepods/burstable/pod{i}/c"] = {"memory_bytes": GIB}
    for at_s in range(0, seconds + 1, 5):
        at = situation(100.0 + at_s, listed, samples=samples)
        findings, memory = system_memory_pressure.evaluate_system_memory(at, memory, SystemMemoryConfig())
        actual = next((each for each in findings if each.threshold.met is HARD), findings[2])
    assert actual is not None
    return actual


@pytest.mark.parametrize(
    ("root", "pods", "seconds", "met"),
    [
        (15.0, (4, 4, 4), 15, HARD),
        (15.0, (4, 4, 4), 10, NOT_MET),
        (14.9, (4, 4, 4), 15, NOT_MET),
        (15.0, (4, 4, 3.9), 15, NOT_MET),  # mean 3.97
        (15.0, (20, 20, 1.0), 15, NOT_MET),  # two pods that stall; 1 is not more than 1
        (15.0, (9, 2, 1.1, 0), 15, HARD),  # those that do not stall are not part of the mean
    ],
)
def test_several_burstable_pods_stall(root: float, pods: tuple[float, ...], seconds: int, met: ThresholdMet) -> None:
    actual = stall(root, pods, seconds)
    assert actual.threshold.met is met
    assert bool(actual.candidates) == (met is HARD)


# Resident memory over requests


def rss_fixture() -> EvictionInputs:
    """Katalyst's eight pods: requests of one or two containers, thresholds of their own, labels."""
    shapes: list[tuple[str, list[tuple[int | None, int]], float | None, dict[str, str]]] = [
        ("pod-1", [(10, 9)], None, {}),
        ("pod-2", [(None, 9)], None, {}),
        ("pod-3", [(10, 9)], 0.8, {}),
        ("pod-4", [(None, 9)], 0.8, {}),
        ("pod-5", [(10, 8), (10, 8)], None, {"app": "x"}),
        ("pod-6", [(10, 9), (None, 1)], None, {"app": "x"}),
        ("pod-7", [(10, 5), (4, 2)], 0.8, {"app": "x"}),
        ("pod-8", [(10, 9), (4, 3)], 0.8, {"app": "x"}),
    ]
    pods, samples = [], {}
    for name, containers, own, labels in shapes:
        numa_stat = []
        for i, (request, use) in enumerate(containers):
            size = None if request is None else request * GIB
            numa_stat.append(Container(name=f"c{i}", cgroup=f"/{name}-{i}", memory_request_bytes=size))
            samples[f"{name}-{i}"] = {"memory_stat": {"rss": use * GIB}}
        pods.append(
            Pod(
                uid=name, namespace="default", name=name, qos=QoSLevel.SHARED, containers=tuple(numa_stat), labels=labels,
                enhancements=Enhancements(rss_overuse_threshold=own),
            )
        )  # fmt: skip
    at = situation(samples=samples)
    return msgspec.structs.replace(at, snapshot=msgspec.structs.replace(at.snapshot, pods=tuple(pods)))


@pytest.mark.parametrize(
    ("ratio", "labels", "over"),
    [
        (1.05, {}, ["pod-3", "pod-8"]),
        (0.1, {}, ["pod-1", "pod-3", "pod-5", "pod-8"]),
        (0.1, {"app": "x"}, ["pod-5", "pod-8"]),
        (0.9, {}, ["pod-3", "pod-8"]),  # pod-1 uses 0.9 times exactly
    ],
)
def test_rss_overuse(ratio: float, labels: dict[str, str], over: list[str]) -> None:
    actual = rss_overuse.evaluate_rss_overuse(rss_fixture(), RssOveruseConfig(ratio=ratio, labels=labels))[0]
    assert names(actual) == over
    assert actual.direct
    assert not actual.forced


def test_rss_ignores_dedicated_pods_and_old_readings() -> None:
    over = {"memory_stat": {"anon": 10}}
    dedicated = situation(pods=[pod("a", QoSLevel.DEDICATED, memory=1)], samples={"a": over})
    old = situation(pods=[pod("a", QoSLevel.SHARED, memory=1)], samples={"a": over}, files_age_s=31)
    fresh = situation(pods=[pod("a", QoSLevel.SHARED, memory=1)], samples={"a": over}, files_age_s=30)
    assert [
        len(rss_overuse.evaluate_rss_overuse(at, RssOveruseConfig())[0].candidates) for at in (dedicated, old, fresh)
    ] == [0, 0, 1]


# Koordinator's


@pytest.mark.parametrize(
    ("available", "candidates_of"),
    [
        (30 * GIB + 1, []),
        (30 * GIB, ["low"]),  # 2 GiB down to 68 %, and the lowest priority has 3
        (26 * GIB, ["low", "big"]),  # 6 GiB
        (20 * GIB, ["low", "big", "small"]),
    ],
)
def test_koordinators_memory_evict(available: int, candidates_of: list[str]) -> None:
    pods = [pod("small"), pod("big"), pod("low", priority=-1), pod("web", QoSLevel.SHARED)]
    sizes = {"small": GIB, "big": 4 * GIB, "low": 3 * GIB, "web": 40 * GIB}
    at = situation(
        pods=pods,
        samples={name: holding(size) for name, size in sizes.items()},
        node={"meminfo": {"MemTotal": 100 * GIB, "MemAvailable": available}},
    )
    actual = koordinator_memory(at)
    assert names(actual) == candidates_of
    assert actual.forced


def holding(size: int, cache: int = 0) -> dict[str, object]:
    """A cgroup with so much memory that only its end frees, and so much page cache."""
    stat = {"inactive_anon": size // 2, "active_anon": size - size // 2, "unevictable": 0, "inactive_file": cache}
    return {"memory_bytes": size + cache, "memory_stat": stat}


def test_page_cache_of_a_victim_does_not_count_as_freed() -> None:
    """75 of 100 GiB are in use, seven too many. `low` holds three, and 30 GiB of cache that count as available anyhow."""
    pods = [pod("a"), pod("b"), pod("low", priority=-1)]
    samples = {"a": holding(2 * GIB), "b": holding(4 * GIB), "low": holding(3 * GIB, cache=30 * GIB)}
    node = {"meminfo": {"MemTotal": 100 * GIB, "MemAvailable": 25 * GIB}}
    at = situation(pods=pods, samples=samples, node=node)
    assert names(koordinator_memory(at)) == ["low", "b"]
    # In the next cycle `low` is terminating: three of the seven.
    later = koordinator_memory(msgspec.structs.replace(at, terminating=frozenset({"default/low"})))
    assert (later.threshold.observed, names(later)) == (pytest.approx(0.72), ["b"])
    # It is stuck: it frees nothing.
    still = msgspec.structs.replace(at, terminating=frozenset({"default/low"}), stuck=frozenset({"default/low"}))
    actual = koordinator_memory(still)
    assert (actual.threshold.observed, names(actual)) == (pytest.approx(0.75), ["b", "a"])
    # The memory that it is going to free is unknown.
    blind = situation(pods=pods, samples={**samples, "low": {}}, node=node, terminating=frozenset({"default/low"}))
    actual = koordinator_memory(blind)
    assert (actual.threshold.reason.rule, names(actual)) == ("input_missing", [])


# oomd's


def play_oomd(full: float, seconds: int, sizes: dict[str, tuple[int, int]], **meminfo: int) -> list[EvictionFinding]:
    """A cycle every ten seconds; `sizes` are the bytes of each pod at first and in the last cycle."""
    memory, findings = OomdState(), ()
    stalls = Pressure(some_us=0, some_avg10=100, full_us=0, full_avg10=full)
    pods = [pod(name) for name in sizes] + [pod("web", QoSLevel.SHARED)]
    for at_s in range(0, seconds + 1, 10):
        used = {name: {"memory_bytes": both[at_s == seconds]} for name, both in sizes.items()} | {
            "web": {"memory_bytes": 999}
        }
        at = situation(100.0 + at_s, pods, samples=used, node={"memory_pressure": stalls, "meminfo": meminfo})
        findings, memory = oomd_pressure.evaluate_oomd(at, memory, OomdConfig())
    return list(findings)


@pytest.mark.parametrize(("full", "seconds", "met"), [(60.1, 30, HARD), (60.0, 30, NOT_MET), (60.1, 20, NOT_MET)])
def test_oomd_pressure(full: float, seconds: int, met: ThresholdMet) -> None:
    assert play_oomd(full, seconds, {"a": (1, 1)})[0].threshold.met is met


@pytest.mark.parametrize(
    ("free", "total", "rule"),
    [(10, 100, "threshold_not_met"), (9, 100, "hard_threshold_met"), (0, 0, "no_swap")],
)
def test_oomd_swap(free: int, total: int, rule: str) -> None:
    actual = play_oomd(0, 10, {"a": (1, 1)}, SwapTotal=total, SwapFree=free)[1]
    assert actual.threshold.reason.rule == rule
    assert names(actual) == (["a"] if rule == "hard_threshold_met" else [])


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ({"a": (50, 50), "b": (10, 30), "c": (20, 20)}, "a"),  # half of all
        # ten pods: of the largest two, 40 and 39, the second grew from 20: 39 / 24.75 is 1.58
        ({"a": (40, 40), "b": (20, 39)} | {f"c{i}": (10, 10) for i in range(8)}, "b"),
        ({"a": (40, 40), "b": (30, 39)} | {f"c{i}": (10, 10) for i in range(8)}, "a"),  # 39 / 32.25 is 1.21
        (
            {"a": (40, 40), "b": (39, 39), "grew": (1, 20)} | {f"c{i}": (10, 10) for i in range(7)},
            "a",
        ),  # not of the largest
    ],
)
def test_oomd_takes_by_size_or_growth(sizes: dict[str, tuple[int, int]], first: str) -> None:
    assert names(play_oomd(99, 30, sizes)[0])[0] == first


def test_oomd_without_pressure_files_is_missing() -> None:
    findings, memory = oomd_pressure.evaluate_oomd(situation(pods=[pod("a")]), OomdState(since_ns=1), OomdConfig())
    assert [actual.threshold.reason.rule for actual in findings] == ["input_missing", "input_missing"]
    assert memory.since_ns is None


def test_reasons_that_users_read_in_events() -> None:
    numa, _ = evaluate_numa(numa_situation(4 * GIB - PAGE, inactive=0), 6)
    assert numa.threshold.reason.text == (
        "NUMA node 0 has 4.00 GiB of free memory, below its low watermark of 4.00 GiB; its count of readings below a "
        "watermark is 7. Reclaimed pods are evicted above 6, all pods from 12 on."
    )
    assert steal(2100, 0)[-1].threshold.reason.text == (
        "The rate of background reclaim is unknown: its counter was read once, and a rate needs two readings."
    )
    assert steal(2100, 120)[-1].threshold.reason.text == (
        "kswapd reclaimed at least 2000 pages a second for 120 s, 2100 in the latest interval; pods are evicted after 120 s."
    )
