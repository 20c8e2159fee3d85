"""Memory headroom: numbers from Katalyst's own tests, and of its formulas by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.memory.memory_headroom import compute_memory_headroom
from agent.advisor.memory.memory_inputs import MemoryInputs, ReclaimRoot
from agent.config.memory import MemoryConfig, UtilBasedMemoryConfig
from api.pod import Pod
from api.qos import QoSLevel
from api.units import GIB
from tests.agent.advisor.memory.builders import ROOT, group, pod, root, situation, without

SHARED, DEDICATED, RECLAIMED, SYSTEM = (
    QoSLevel.SHARED,
    QoSLevel.DEDICATED,
    QoSLevel.RECLAIMED,
    QoSLevel.SYSTEM,
)
FOUR = MemoryConfig(reserved_for_allocate_bytes=4 * GIB)


def util(cache: float = 0.0) -> MemoryConfig:
    settings = UtilBasedMemoryConfig(enable=True, cache_based_ratio=cache, static_based_capacity_bytes=20 * GIB)
    return MemoryConfig(reserved_for_allocate_bytes=4 * GIB, util_based=settings)


def numa_aware(cache: float = 0.5, retained: float = 0.0, oversold: float = 0.0) -> MemoryConfig:
    settings = UtilBasedMemoryConfig(cache_based_ratio=cache, request_based_ratio=retained, max_oversold_rate=oversold)
    return MemoryConfig(policy="numa_aware", reserved_for_allocate_bytes=4 * GIB, util_based=settings)


def online(use: float = 10, free: float = 60, used: float = 40, **fields: object) -> MemoryInputs:
    """Katalyst's own case: 100 GiB, a shared and a system pod with as much resident memory as cache."""
    cached = 100 - free - used
    return situation(
        [pod("online", SHARED), pod("system", SYSTEM)],
        [group("/online", anon=use, file=use), group("/system", anon=10, file=10)],
        total=100,
        free=free,
        scale=500,
        cpus=20,  # 0.2 CPUs a GiB: cache counts between 1/6 and 1/3.5
        meminfo={"Buffers": 0, "Cached": cached, "SReclaimable": 0},
        **fields,
    )


@pytest.mark.parametrize(
    ("inputs", "config", "expected"),
    [
        (online(), FOUR, 64),  # 96 - 1.1 x 20 - 10
        (online(), util(), 88),  # + (60 x 0.6 - 10) - (32 - 20 + 10) + 20
        (online(free=30), util(), 84),  # nothing is left of 18 - 10: the fixed capacity alone
        (online(use=15, free=20, used=60), util(0.6), 85),  # 96 - 43, + 0.6 x 20 of cache, + 20
        (online(use=15, free=20, used=60), util(), 73),  # without cache
        (online(use=30, free=80, used=10), util(0.6), 52),  # 20 + 12 that are free, more than 6 of cache, + 20
        (online(use=1, free=95, used=5), util(), 96),  # never more than can be allocated
        (situation(total=100, free=100), FOUR, 96),  # no pods
    ],
)
def test_canonical(inputs: MemoryInputs, config: MemoryConfig, expected: float) -> None:
    result = compute_memory_headroom(inputs, config, None)
    assert result.bytes == pytest.approx(expected * GIB)
    assert result.by_numa == {0: result.bytes}


@pytest.mark.parametrize(("cpus", "expected"), [(17, 85), (28, 85), (16, 73), (29, 73)])
def test_cache_counts_where_cpus_and_memory_are_in_proportion(cpus: int, expected: float) -> None:
    inputs = online(use=15, free=20, used=60)
    node = situation(
        inputs.snapshot.pods,
        [inputs.snapshot.cgroups["/online"], inputs.snapshot.cgroups["/system"]],
        total=100,
        free=20,
        scale=500,
        cpus=cpus,
        meminfo={"Buffers": 0, "Cached": 20, "SReclaimable": 0},
    )
    result = compute_memory_headroom(node, util(0.6), None)
    assert result.bytes == pytest.approx(expected * GIB)


def test_shared_memory_is_part_of_the_cache_and_counts_once() -> None:
    inputs = situation([pod("a", SHARED)], [group("/a", anon=10, file=10, shmem=8)], total=100)
    result = compute_memory_headroom(inputs, FOUR, None)
    assert result.bytes == pytest.approx((96 - 22) * GIB)


@pytest.mark.parametrize(
    ("owner", "fields", "expected"),
    [
        (pod("a", SHARED, request=30), {}, 96 - 22),
        (pod("a", SHARED, request=30), {"not_reclaimable": ("default/a",)}, 96 - 30),
        (pod("a", SHARED), {"not_reclaimable": ("default/a",)}, 96 - 8),  # no request either: the fallback
        (pod("a", SHARED, request=30), {"ramping": ("/a",)}, 96 - 30),
        (pod("a", DEDICATED, request=30, bound=(0,), exclusive=True), {}, 96 - 22),
        (pod("a", DEDICATED, request=30, bound=(0,), exclusive=True), {"not_reclaimable": ("default/a",)}, 0),
        (pod("a", SYSTEM, request=30), {}, 96 - 10),
        (pod("a", RECLAIMED, request=30), {}, 96),
    ],
)
def test_estimated_need_of_containers(owner: Pod, fields: dict[str, object], expected: float) -> None:
    path = owner.containers[0].cgroup
    result = compute_memory_headroom(
        situation([owner], [group(path, anon=10, file=10)], total=100, **fields), FOUR, None
    )
    assert result.bytes == pytest.approx(expected * GIB)


def test_a_sidecar_of_a_pod_with_its_own_numa_node_needs_nothing_more() -> None:
    main = pod("a", DEDICATED, request=30, bound=(0,), exclusive=True)
    side = replace(main.containers[0], name="side", cgroup="/side", sidecar=True)
    both = replace(main, containers=(*main.containers, side))
    inputs = situation([both], numa=2, total=50, not_reclaimable=("default/a",))
    assert compute_memory_headroom(inputs, FOUR, None).bytes == pytest.approx((96 - 50) * GIB)


def test_an_unmeasured_container_counts_with_its_request_and_stops_growth() -> None:
    pods = [pod("a", SHARED, request=30), pod("b", SHARED)]
    inputs = situation(pods, [group("/a"), group("/b", anon=0, file=0)], total=100)
    first = compute_memory_headroom(inputs, FOUR, None)
    assert first.bytes == pytest.approx(66 * GIB)
    frozen = compute_memory_headroom(inputs, FOUR, 50.0 * GIB)
    assert frozen.bytes == 50 * GIB
    assert frozen.reason.rule == "memory_headroom_frozen"
    assert sum(frozen.by_numa.values()) == pytest.approx(50 * GIB)
    assert compute_memory_headroom(inputs, FOUR, 80.0 * GIB).bytes == pytest.approx(66 * GIB)


def test_a_container_without_cgroup_counts_with_its_request_and_stops_nothing() -> None:
    inputs = situation([pod("a", SHARED, request=30)], total=100)
    result = compute_memory_headroom(inputs, FOUR, 50.0 * GIB)
    assert result.bytes == pytest.approx(66 * GIB)


def test_an_old_reading_does_not_count() -> None:
    inputs = situation([pod("a", SHARED, request=30)], [group("/a", anon=1, file=1, read_at_ns=900 * 10**9)], total=100)
    assert compute_memory_headroom(inputs, FOUR, None).bytes == pytest.approx(66 * GIB)


def test_canonical_is_spread_by_what_is_free_and_what_reclaimed_pods_use() -> None:
    groups = [root(on_numa={0: (10, 10), 1: (0, 0)})]
    result = compute_memory_headroom(situation([], groups, numa=2, total=50, free=(10, 30)), FOUR, None)
    assert result.bytes == pytest.approx(96 * GIB)
    assert result.by_numa == {0: pytest.approx(96 * GIB * 30 / 60), 1: pytest.approx(96 * GIB * 30 / 60)}


def test_canonical_is_not_spread_with_missing_inputs() -> None:
    inputs = situation([], [root()], numa=2, total=50)
    result = compute_memory_headroom(inputs, FOUR, None)
    assert result.bytes == pytest.approx(96 * GIB)
    assert result.by_numa == {}
    assert result.reason.inputs["by_numa_missing"] == f"memory of {ROOT} by NUMA node"


EXCLUSIVE = pod("own", DEDICATED, request=30, bound=(0,), exclusive=True)
BATCH = pod("batch", RECLAIMED, request=20)


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([], {0: 110.5, 1: 110.5}),  # 250 - 25 - 4
        ([BATCH], {0: 120.5, 1: 120.5}),
        ([BATCH, EXCLUSIVE], {0: 0, 1: 130.5}),  # 125 - 12.5 - 2 + 20
        ([pod("batch", RECLAIMED, request=20, bound=(1,))], {0: 110.5, 1: 130.5}),
    ],
)
def test_numa_aware(pods: list[Pod], expected: dict[int, float]) -> None:
    inputs = situation(pods, [group(f"{ROOT}/batch")], numa=2, scale=500, not_reclaimable=("default/own",))
    result = compute_memory_headroom(inputs, numa_aware(), None)
    assert result.by_numa == pytest.approx({numa: size * GIB for numa, size in expected.items()})
    assert result.bytes == pytest.approx(sum(expected.values()) * GIB)


def test_a_reclaimable_pod_excludes_no_numa_node() -> None:
    result = compute_memory_headroom(situation([EXCLUSIVE], numa=2, scale=500), numa_aware(), None)
    assert result.by_numa == {0: 110.5 * GIB, 1: 110.5 * GIB}


def test_numa_aware_reserves_a_part_of_online_requests() -> None:
    inputs = situation([pod("a", SHARED, request=100)], [group("/a")], numa=2, scale=500)
    result = compute_memory_headroom(inputs, numa_aware(retained=0.1), None)
    assert result.bytes == pytest.approx(211 * GIB)


def test_numa_aware_headroom_is_at_most_twice_the_limit_of_the_reclaim_root() -> None:
    inputs = situation([], [root(limit=50 * GIB)], numa=2, scale=500)
    result = compute_memory_headroom(inputs, numa_aware(oversold=2.0), None)
    assert result.by_numa == {0: 50 * GIB, 1: 50 * GIB}
    assert (
        compute_memory_headroom(situation([], [root()], numa=2, scale=500), numa_aware(oversold=2.0), None).bytes
        == 221 * GIB
    )


def test_the_limit_of_a_bound_root_counts_on_its_numa_node() -> None:
    bound = pod("batch", RECLAIMED, request=20, bound=(1,))
    groups = [
        root(limit=60 * GIB),
        group(f"{ROOT}/batch"),
        replace(root(limit=15 * GIB), path="/kubepods/besteffort-1"),
    ]
    inputs = situation([bound], groups, numa=2, scale=500, numa_roots={1: "/kubepods/besteffort-1"})
    result = compute_memory_headroom(inputs, numa_aware(oversold=2.0), None)
    assert result.by_numa == {0: pytest.approx(110.5 * GIB), 1: 30 * GIB}


@pytest.mark.parametrize(
    ("inputs", "config", "what"),
    [
        (without(situation(numa=2), "MemFree"), numa_aware(), "MemFree of NUMA node 0"),
        (without(situation(numa=2), "MemTotal"), numa_aware(), "MemTotal of NUMA node 0"),
        (without(situation(numa=2), "Inactive(file)"), numa_aware(), "Inactive(file) of NUMA node 0"),
        (situation(numa=2, scale=None), numa_aware(), "vm.watermark_scale_factor"),
        (situation(numa=2, root=ReclaimRoot(path="/gone")), numa_aware(oversold=2.0), "the memory limit of /gone"),
        (situation([pod("x", DEDICATED, exclusive=True)], enable_reclaim=True, not_reclaimable=("default/x",)),
         numa_aware(), "the NUMA nodes that default/x uses exclusively"),
        (situation([pod("x", DEDICATED, exclusive=True)], not_reclaimable=("default/x",)), FOUR,
         "the NUMA nodes that default/x uses exclusively"),
        (without(online(), "MemFree"), util(), "MemFree of the node"),
        (without(online(), "vm.watermark_scale_factor"), util(), "vm.watermark_scale_factor"),
        (without(online(), "Cached"), util(0.6), "Cached of the node"),
    ],
)  # fmt: skip
def test_a_missing_input_gives_no_headroom(inputs: MemoryInputs, config: MemoryConfig, what: str) -> None:
    result = compute_memory_headroom(inputs, config, 10.0 * GIB)
    assert result.bytes is None
    assert result.reason.rule == "memory_inputs_missing"
    assert what in result.reason.text


def test_old_readings_of_numa_nodes_give_no_headroom() -> None:
    inputs = situation(numa=2)
    node = replace(inputs.snapshot.node, files_read_at_ns=900 * 10**9)
    old = replace(inputs, snapshot=replace(inputs.snapshot, node=node))
    assert compute_memory_headroom(old, numa_aware(), None).bytes is None


@pytest.mark.parametrize(
    ("inputs", "config", "rule"),
    [
        (situation(), MemoryConfig(policy="none"), "memory_headroom_none"),
        (situation(enable_reclaim=False), FOUR, "memory_reclaim_disabled"),
    ],
)
def test_policy_none_and_disabled_reclaim_give_zero(inputs: MemoryInputs, config: MemoryConfig, rule: str) -> None:
    result = compute_memory_headroom(inputs, config, 10.0 * GIB)
    assert (result.bytes, result.by_numa, result.reason.rule) == (0.0, {0: 0.0}, rule)


sizes = st.floats(0, 120, allow_nan=False)


@given(
    policy=st.sampled_from(["canonical", "numa_aware"]),
    enable=st.booleans(),
    free=st.lists(sizes, min_size=2, max_size=2),
    uses=st.lists(st.tuples(sizes, sizes, st.sampled_from(list(QoSLevel)), st.booleans()), max_size=5),
    cache=st.floats(0, 1),
)
def test_headroom_adds_up_and_stays_within_the_node(
    policy: str,
    enable: bool,
    free: list[float],
    uses: list[tuple[float, float, QoSLevel, bool]],
    cache: float,
) -> None:
    pods = [pod(f"p{index}", qos, request=anon) for index, (anon, _, qos, _) in enumerate(uses)]
    groups = [
        group(p.containers[0].cgroup, anon=anon, file=file) if state else group(p.containers[0].cgroup)
        for p, (anon, file, _, state) in zip(pods, uses, strict=True)
    ]
    config = MemoryConfig(
        policy=policy,  # type: ignore[arg-type]
        util_based=UtilBasedMemoryConfig(enable=enable, cache_based_ratio=cache),
    )
    inputs = situation(
        pods, [*groups, root(on_numa={0: (1, 0), 1: (1, 0)})], numa=2, total=250, free=free,
        meminfo={"Buffers": 1, "Cached": 2, "SReclaimable": 1},
    )  # fmt: skip
    result = compute_memory_headroom(inputs, config, None)
    assert result.bytes is not None
    requests = sum(anon for anon, _, qos, _ in uses if qos is QoSLevel.RECLAIMED) * GIB
    assert 0 <= result.bytes <= 500 * GIB + requests
    assert all(size >= 0 for size in result.by_numa.values())
    if result.by_numa:
        assert sum(result.by_numa.values()) == pytest.approx(result.bytes)
    before = result.bytes / 2
    again = compute_memory_headroom(inputs, config, before)
    assert again.bytes is not None
    if policy == "canonical" and any(not state for _, _, qos, state in uses if qos is not QoSLevel.RECLAIMED):
        assert again.bytes <= before
