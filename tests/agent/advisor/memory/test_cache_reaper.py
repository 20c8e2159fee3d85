"""Selection of cgroups to reclaim from: page cache of reclaimed containers, and memory of removed children."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from agent.advisor.memory.cache_reaper import ReapResult, reap_cache, reclaim_dying_cgroups
from agent.advisor.memory.memory_guard import node_condition, numa_conditions
from agent.advisor.memory.memory_inputs import MemoryAdvisorState, MemoryInputs, OffloadState
from agent.config.memory import CacheReaperConfig, MemoryConfig, OffloadingConfig
from api.advice import NOT_NUMA_BOUND, MemoryPressure
from api.qos import QoSLevel
from api.snapshot import CgroupSample
from api.units import GIB, MIB
from tests.agent.advisor.memory.builders import ROOT, S, group, pod, situation

CONFIG = MemoryConfig(reaper=CacheReaperConfig(enable=True))


def node(caches: Sequence[float], *, free: float = 3, at_s: float = 1000, read_s: float = 1000) -> MemoryInputs:
    """Return a node of 250 GiB that lacks 8 - free GiB, with reclaimed containers of these cache sizes."""
    pods = [pod(f"b{index}", QoSLevel.RECLAIMED) for index in range(len(caches))]
    groups = [
        group(f"{ROOT}/b{index}", anon=1, file=cache, read_at_ns=round(read_s * S))
        for index, cache in enumerate(caches)
    ]
    return situation(pods, groups, free=free, at_s=at_s)


def run(
    inputs: MemoryInputs,
    before: ReapResult | None = None,
    config: MemoryConfig = CONFIG,
    where: int = NOT_NUMA_BOUND,
    given: Mapping[str, OffloadState] | None = None,
) -> ReapResult:
    conditions = (
        {NOT_NUMA_BOUND: node_condition(inputs, config)} if where == NOT_NUMA_BOUND else numa_conditions(inputs, config)
    )
    return reap_cache(
        inputs,
        config,
        conditions,
        MemoryAdvisorState(cache_drops=before.cache_drops if before else {}, offloaded=given or {}),
    )


def requested_bytes(result: ReapResult) -> dict[str, float]:
    return {request.cgroup.removeprefix(f"{ROOT}/"): int(request.value) / GIB for request in result.knob_requests}


@pytest.mark.parametrize(
    ("caches", "free", "expected"),
    [
        ((2, 10, 4), 3, {"b1": 5}),  # 5 are missing: the largest alone
        ((2, 3, 4), 3, {"b2": 4, "b1": 1}),
        ((1.25, 1.24), 3, {"b0": 1.25}),  # less than 0.5 % of 250 is not worth it
        ((1.2, 1.24), 3, {}),
        ((2, 10, 4), 4, {}),  # not below the critical watermark
        ((), 3, {}),
    ],
)
def test_the_largest_cache_first_and_no_more_than_missing(
    caches: tuple[float, ...], free: float, expected: dict[str, float]
) -> None:
    assert requested_bytes(run(node(caches, free=free))) == pytest.approx(expected)


def test_only_main_containers_of_reclaimed_pods() -> None:
    batch = pod("batch", QoSLevel.RECLAIMED)
    side = replace(batch.containers[0], name="side", cgroup="/side", sidecar=True)
    pods = [
        replace(batch, containers=(*batch.containers, side)),
        pod("online", QoSLevel.SHARED),
        pod("system", QoSLevel.SYSTEM),
        pod("own", QoSLevel.DEDICATED),
    ]
    paths = [f"{ROOT}/batch", "/side", "/online", "/system", "/own"]
    inputs = situation(pods, [group(path, anon=1, file=3) for path in paths], free=1)
    assert requested_bytes(run(inputs)) == {"batch": 3}


def test_shared_memory_cannot_be_dropped() -> None:
    inputs = situation([pod("b", QoSLevel.RECLAIMED)], [group(f"{ROOT}/b", anon=1, file=9, shmem=8.5)], free=1)
    assert requested_bytes(run(inputs)) == {}


def test_a_request_is_not_repeated_before_a_new_reading() -> None:
    first = run(node((4, 3, 2), free=3))
    assert requested_bytes(first) == {"b0": 4, "b1": 1}
    same_reading = run(node((4, 3, 2), free=3, at_s=1001, read_s=1000), first)
    assert requested_bytes(same_reading) == {}
    # The new reading shows that b0 dropped all and b1 nothing. Both wait for 30 s; the next one drops the rest.
    current = run(node((0, 3, 2), free=5 - 1.5, at_s=1005, read_s=1005), same_reading)
    assert requested_bytes(current) == {"b2": 2}
    later = run(node((0, 3, 0), free=3.5, at_s=1030, read_s=1030), current)
    assert requested_bytes(later) == {"b1": 3}


def test_without_a_new_reading_nothing_more_is_requested() -> None:
    first = run(node((10,), free=3))
    assert requested_bytes(first) == {"b0": 5}
    assert requested_bytes(run(node((10,), free=0, at_s=1030, read_s=1000), first)) == {}
    assert requested_bytes(run(node((10,), free=0, at_s=1030, read_s=1005), first)) == {"b0": 8}


def test_drops_for_the_node_count_for_its_numa_nodes() -> None:
    pods = [pod("a", QoSLevel.RECLAIMED), pod("b", QoSLevel.RECLAIMED)]
    groups = [
        group(f"{ROOT}/{name}", anon=0, file=size, on_numa={0: (0, size), 1: (0, 0)})
        for name, size in (("a", 12), ("b", 6))
    ]
    inputs = situation(pods, groups, numa=2, free=(1, 5))
    conditions = {NOT_NUMA_BOUND: node_condition(inputs, CONFIG), **numa_conditions(inputs, CONFIG)}
    assert [conditions[where].target_bytes // GIB for where in (NOT_NUMA_BOUND, 0)] == [10, 7]
    assert requested_bytes(reap_cache(inputs, CONFIG, conditions, MemoryAdvisorState())) == {"a": 10}


@pytest.mark.parametrize(("read_s", "expected"), [(1000, 3), (995, 5)])
def test_offload_requests_count_as_released_until_a_new_reading(read_s: float, expected: float) -> None:
    past = OffloadState(cgroup_id=7, at_ns=999 * S, read_at_ns=round(read_s * S), target_bytes=2 * GIB)
    result = run(node((5, 3, 2), free=3), given={f"{ROOT}/b0": past})
    assert requested_bytes(result) == {"b0": expected}
    assert result.busy == {f"{ROOT}/b0"}


def test_a_recreated_container_is_a_new_one() -> None:
    first = run(node((4,), free=3))
    again = node((4,), free=3, at_s=1001, read_s=1001)
    groups = {path: replace(each, id=99) for path, each in again.snapshot.cgroups.items()}
    inputs = replace(again, snapshot=replace(again.snapshot, cgroups=groups))
    assert requested_bytes(run(inputs, first)) == {"b0": 4}


def test_a_reboot_resets_requests() -> None:
    first = run(node((4,), free=3))
    assert requested_bytes(run(node((4,), free=3, at_s=10, read_s=10), first)) == {"b0": 4}


def test_a_numa_node_counts_its_own_cache() -> None:
    pods = [pod("far", QoSLevel.RECLAIMED), pod("near", QoSLevel.RECLAIMED)]
    groups = [
        group(f"{ROOT}/far", anon=0, file=20, on_numa={0: (0, 0), 1: (0, 20)}),
        group(f"{ROOT}/near", anon=0, file=3, on_numa={0: (0, 3), 1: (0, 0)}),
    ]
    inputs = situation(pods, groups, numa=2, free=(3, 100))
    assert requested_bytes(run(inputs)) == {}  # the node as a whole has enough
    assert requested_bytes(run(inputs, where=0)) == {"near": 3}


def test_version_1_counts_pages() -> None:
    pages = 3 * GIB // 4096
    sample = replace(
        group(f"{ROOT}/b", stat={"total_rss": 0, "total_cache": 3 * GIB}),
        numa_stat={
            "total": {0: pages},
            "file": {0: 0},
            "hierarchical_total": {0: pages},
            "hierarchical_file": {0: pages},
        },
    )
    inputs = situation([pod("b", QoSLevel.RECLAIMED)], [sample], free=3)
    assert requested_bytes(run(inputs)) == {"b": 3}
    assert requested_bytes(run(inputs, where=0)) == {"b": 3}


def test_unmeasured_containers_are_skipped_and_counted() -> None:
    pods = [pod("b", QoSLevel.RECLAIMED), pod("c", QoSLevel.RECLAIMED)]
    groups = [group(f"{ROOT}/b"), group(f"{ROOT}/c", anon=1, file=9, read_at_ns=900 * S)]
    result = run(situation(pods, groups, free=1))
    assert result.knob_requests == ()
    assert result.reason.inputs["unmeasured_containers"] == 2


def test_unknown_pressure_drops_nothing() -> None:
    inputs = replace(node((10,), free=0))
    bare = replace(inputs.snapshot.node, sysctl={})
    unknown = replace(inputs, snapshot=replace(inputs.snapshot, node=bare))
    assert node_condition(unknown, CONFIG).state is MemoryPressure.UNKNOWN
    result = run(unknown)
    assert (result.knob_requests, result.reason.rule) == ((), "memory_reap_unknown")
    assert "vm.watermark_scale_factor" in result.reason.text


def test_a_disabled_reaper_drops_nothing() -> None:
    assert run(node((10,), free=0), config=MemoryConfig()).knob_requests == ()


DYING = MemoryConfig(offloading=OffloadingConfig(dying=True))
SIZES: dict[str, int | None] = {
    "/kubepods": 20 * GIB,
    "/kubepods/burstable": 10 * GIB,
    "/kubepods/burstable/pod1": 6 * GIB,
    "/kubepods/burstable/pod1/c": 6 * GIB,
    "/kubepods/burstable/pod2": 3 * GIB,
    "/kubepods/offline-besteffort-0": 2 * GIB,
    "/kubepods/offline-besteffort-1": 2 * GIB,
    "/kubepods/offline-besteffort-1/pod": 2 * GIB - MIB,
    "/kubepods/besteffort": 5 * GIB,
    "/kubepods/offline-besteffort-0/burstable": None,
}


def dying_node(change: dict[str, int | None] | None = None, at_s: float = 1000) -> MemoryInputs:
    sizes = SIZES | (change or {})
    groups = [CgroupSample(path=path, id=index, memory_bytes=size) for index, (path, size) in enumerate(sizes.items())]
    return situation([], groups, cpus=8, at_s=at_s)


def reclaim_requests(
    inputs: MemoryInputs, config: MemoryConfig = DYING, before_ns: int | None = None
) -> dict[str, int]:
    return {
        request.cgroup: int(request.value) for request in reclaim_dying_cgroups(inputs, config, before_ns).knob_requests
    }


def test_only_memory_without_a_live_child_is_reclaimed() -> None:
    # burstable: 10 - 6 - 3. The second: a MiB is less than what 8 CPUs may have charged in advance (2 MiB). The first has
    # a member that is not measured.
    assert reclaim_requests(dying_node()) == {"/kubepods/burstable": GIB}
    assert reclaim_requests(dying_node({"/kubepods/offline-besteffort-1": 2 * GIB + 2 * MIB})) == {
        "/kubepods/burstable": GIB,
        "/kubepods/offline-besteffort-1": 3 * MIB,
    }


@pytest.mark.parametrize(("at_s", "due"), [(1299.9, False), (1300, True), (999, True)])
def test_dying_cgroups_are_evaluated_once_per_interval(at_s: float, due: bool) -> None:
    result = reclaim_dying_cgroups(dying_node(at_s=at_s), DYING, 1000 * S)
    assert bool(result.knob_requests) == due
    assert result.at_ns == (round(at_s * S) if due else 1000 * S)


@pytest.mark.parametrize(
    "change", [{"/kubepods/burstable": None}, {"/kubepods/burstable/pod2": None}, {"/kubepods/burstable": 9 * GIB}]
)
def test_nothing_is_reclaimed_with_a_missing_size_or_without_a_rest(change: dict[str, int | None]) -> None:
    assert reclaim_requests(dying_node(change)) == {}
    result = reclaim_dying_cgroups(dying_node(change), DYING, None)
    assert ("/kubepods/burstable" in [each.inputs["cgroup"] for each in result.reasons]) == (None in change.values())


def test_dying_cgroups_are_ignored_unless_configured() -> None:
    assert reclaim_requests(dying_node(), MemoryConfig()) == {}
