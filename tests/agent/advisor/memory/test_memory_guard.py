"""Memory pressure by free memory and watermarks, and the limits of the cgroups above reclaimed pods."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from agent.advisor.memory.memory_guard import limit_reclaimed_memory, node_condition, numa_conditions
from agent.advisor.memory.memory_inputs import MemoryInputs, ReclaimRoot
from agent.config.memory import MemoryConfig, ReclaimedMemoryGuardConfig
from api.advice import MemoryPressure
from api.knobs import Knob
from api.qos import QoSLevel
from api.units import GIB
from tests.agent.advisor.memory.builders import PAGE, ROOT, group, pod, root, situation, without

CONFIG = MemoryConfig()
OWN = pod("own", QoSLevel.DEDICATED, bound=(1,), exclusive=True)


def limits(
    inputs: MemoryInputs, config: MemoryConfig = CONFIG, before: Mapping[str, int] | None = None
) -> dict[str, str]:
    return {
        f"{request.cgroup} {request.knob.value}": request.value
        for request in limit_reclaimed_memory(inputs, config, before or {}).knob_requests
    }


def test_the_limit_is_use_plus_free_memory_above_the_watermark() -> None:
    inputs = situation([], [root(on_numa={0: (10, 5), 1: (1, 1)})], numa=2, free=(20, 3))
    # 15 + (20 - 4), and 2 + nothing of the 3 that must stay free
    assert limits(inputs) == {
        f"{ROOT} memory.max": str(33 * GIB),
        f"{ROOT} memory.high": str(int(33 * GIB * 0.95) // PAGE * PAGE),
    }


@pytest.mark.parametrize(
    ("low", "factor", "expected"),
    [(0.5, 1.0, 31), (6, 1.0, 29), (6, 2.0, 23), (6, 0.5, 31), (40, 1.0, 15)],
)
def test_the_zones_watermark_counts_where_it_is_higher(low: float, factor: float, expected: float) -> None:
    config = MemoryConfig(guard=ReclaimedMemoryGuardConfig(critical_watermark_scale_factor=factor))
    inputs = situation([], [root(on_numa={0: (10, 5)})], free=20, low=low)
    assert limits(inputs, config)[f"{ROOT} memory.max"] == str(round(expected * GIB))


def test_an_exclusive_numa_node_adds_only_existing_use() -> None:
    inputs = situation([OWN], [root(on_numa={0: (1, 0), 1: (2, 0)})], numa=2, free=20, not_reclaimable=("default/own",))
    assert limits(inputs)[f"{ROOT} memory.max"] == str((17 + 2) * GIB)
    nowhere = replace(inputs, forbidden_numa=(0, 1))
    assert limits(nowhere)[f"{ROOT} memory.max"] == str(3 * GIB)


def test_numa_reclaim_roots_have_their_own_limits() -> None:
    groups = [root(on_numa={0: (1, 0), 1: (2, 0)}), group("/kubepods/be-1", on_numa={0: (0, 0), 1: (4, 0)})]
    inputs = situation([], groups, numa=2, free=20, numa_roots={1: "/kubepods/be-1"})
    result = limits(inputs)
    # What each has, and 20 - 4 free on each of its nodes: what is in the one gives the other no room.
    assert result["/kubepods/be-1 memory.max"] == str((4 + 16) * GIB)
    assert result[f"{ROOT} memory.max"] == str((3 + 32) * GIB)


def test_no_root_may_grow_by_more_than_is_free() -> None:
    groups = [root(on_numa={0: (10, 0)}), group("/kubepods/be-0", on_numa={0: (10, 0)})]
    result = limits(situation([], groups, free=5, numa_roots={0: "/kubepods/be-0"}))
    assert result[f"{ROOT} memory.max"] == result["/kubepods/be-0 memory.max"] == str(11 * GIB), (
        "1 of 5 GiB may be taken"
    )


def test_a_root_of_a_numa_node_below_the_other_counts_once() -> None:
    groups = [root(on_numa={0: (1, 0), 1: (6, 0)}), group(f"{ROOT}/numa1", on_numa={0: (0, 0), 1: (4, 0)})]
    result = limits(situation([], groups, numa=2, free=20, numa_roots={1: f"{ROOT}/numa1"}))
    assert result[f"{ROOT}/numa1 memory.max"] == str((4 + 16) * GIB)
    assert result[f"{ROOT} memory.max"] == str((7 + 32) * GIB)


@pytest.mark.parametrize(("charged", "expected"), [(15.5, 16), (16.5, 16.5)])
def test_no_limit_below_what_is_charged(charged: float, expected: float) -> None:
    """15 GiB of pages on the NUMA node, 1 GiB free to use, and kernel memory charged to the group."""
    inputs = situation([], [root(on_numa={0: (10, 5)}, memory_bytes=round(charged * GIB))], free=5)
    assert limits(inputs)[f"{ROOT} memory.max"] == str(round(expected * GIB))


@pytest.mark.parametrize(
    ("free", "before", "expected"),
    [
        # 16 of 20 GiB are above the watermark: a change of 1.6 GiB or less is noise.
        (20, 33.0, 31),
        (20, 32.6, 32.6),
        (20, 31.0, 31),
        (20, 29.5, 29.5),
        (20, 29.3, 31),
        # 1 of 5 GiB: a tenth of it.
        (5, 16.2, 16),
        (5, 16.1, 16.1),
        # Nothing is above the watermark: the limit shrinks at once, and grows by a hundredth at least.
        (4, 15.001, 15),
        (4, 14.9, 14.9),
        (4, 14.8, 15),
    ],
)
def test_a_change_within_a_tenth_of_the_free_memory_is_not_written(free: float, before: float, expected: float) -> None:
    inputs = situation([], [root(on_numa={0: (10, 5)})], free=free)
    requests = {ROOT: round(before * GIB)}
    assert limits(inputs, CONFIG, requests)[f"{ROOT} memory.max"] == str(round(expected * GIB))


def test_a_hundred_cycles_with_noise_write_one_limit() -> None:
    """Free memory of a node at rest rises and falls by 4 %, 20 times as much as in the run that wrote nine limits."""
    before: Mapping[str, int] = {}
    written = []
    for cycle in range(100):
        free = 50 * (1 + 0.04 * ((cycle * 37) % 21 - 10) / 10)
        before = limit_reclaimed_memory(situation([], [root(on_numa={0: (1, 0)})], free=free), CONFIG, before).bytes
        written += [] if written and written[-1] == before[ROOT] else [before[ROOT]]
    assert len(written) == 1


def test_without_a_reclaimed_container_there_is_no_limit() -> None:
    inputs = situation([], [root(on_numa={0: (10, 5)})], root=ReclaimRoot(path=ROOT, members=("/burstable/batch",)))
    result = limit_reclaimed_memory(inputs, CONFIG, {ROOT: 5 * GIB})
    assert (result.knob_requests, result.bytes, result.reason.rule) == ((), {}, "memory_guard_no_pod")
    assert result.reason.text == f"Memory of {ROOT} is not limited, because no reclaimed pod runs there."


@pytest.mark.parametrize(
    "inputs",
    [
        situation([], [root()], free=20),
        without(situation([], [root(on_numa={0: (10, 5)})]), "MemFree"),
        situation([], [root(on_numa={0: (10, 5)}, read_at_ns=900 * 10**9)]),
        situation([replace(OWN, bound_numa=())], [root(on_numa={0: (10, 5)})],
                  not_reclaimable=("default/own",)),
        situation([], [root(on_numa={0: (10, 5)})], root=ReclaimRoot(path="/elsewhere", members=("/elsewhere/a",))),
    ],
)  # fmt: skip
def test_where_an_input_is_missing_the_limit_stays_as_it_was(inputs: MemoryInputs) -> None:
    path = inputs.root.path
    result = limit_reclaimed_memory(inputs, CONFIG, {path: 5 * GIB})
    assert result.reason.rule == "memory_guard_unknown"
    assert result.bytes == {path: 5 * GIB}
    assert [request.value for request in result.knob_requests if request.knob is Knob.MEMORY_MAX] == [str(5 * GIB)]
    assert limit_reclaimed_memory(inputs, CONFIG, {}).knob_requests == ()


def test_unknown_watermarks_keep_the_limit() -> None:
    inputs = situation([], [root(on_numa={0: (10, 5)})])
    node = replace(inputs.snapshot.node, zones=())
    unknown = replace(inputs, snapshot=replace(inputs.snapshot, node=node))
    assert limit_reclaimed_memory(unknown, CONFIG, {}).reason.rule == "memory_guard_unknown"


def test_a_disabled_guard_sets_no_limit() -> None:
    config = MemoryConfig(guard=ReclaimedMemoryGuardConfig(enable=False))
    inputs = situation([], [root(on_numa={0: (10, 5)})])
    assert limits(inputs, config) == {f"{ROOT} memory.max": "max", f"{ROOT} memory.high": "max"}


def test_the_limit_of_an_unreadable_root_is_retained() -> None:
    inputs = situation([], [], root=ReclaimRoot())
    result = limit_reclaimed_memory(inputs, CONFIG, {ROOT: 5 * GIB})
    assert (result.knob_requests, result.bytes, result.reason.rule) == ((), {ROOT: 5 * GIB}, "memory_guard_unknown")


def test_without_a_root_nothing_is_limited() -> None:
    inputs = situation([pod("batch", QoSLevel.RECLAIMED)], [group(f"{ROOT}/batch", on_numa={0: (1, 1)})])
    assert limit_reclaimed_memory(inputs, CONFIG, {}).knob_requests == ()
    assert limit_reclaimed_memory(inputs, CONFIG, {}).reason.rule == "memory_guard_no_root"
    named = replace(CONFIG, reclaim_root="/typo")
    assert limit_reclaimed_memory(inputs, named, {}).reason.text.startswith(
        "There is no cgroup /typo (memory.reclaimRoot)"
    )


BYTE = 1 / GIB
NO_RISK, TUNE, DROP, UNKNOWN = (
    MemoryPressure.NO_RISK,
    MemoryPressure.TUNE_MEMCG,
    MemoryPressure.DROP_CACHE,
    MemoryPressure.UNKNOWN,
)


@pytest.mark.parametrize(
    ("inputs", "state", "target", "threshold"),
    [
        # one NUMA node: 4 GiB must be free, and 8 are well
        (situation(free=8), NO_RISK, 0, 4),
        (situation(free=8 - BYTE), TUNE, BYTE, 4),
        (situation(free=4), TUNE, 4, 4),
        (situation(free=4 - BYTE), DROP, 4 + BYTE, 4),
        (situation(free=0), DROP, 8, 4),
        # two: 4 GiB each
        (situation(numa=2, free=(8, 8)), NO_RISK, 0, 8),
        (situation(numa=2, free=(7, 8)), TUNE, 1, 8),
        (situation(numa=2, free=(0, 7)), DROP, 9, 8),
        # twice the watermark is more: 2 x 250 x 500 / 10000 = 25
        (situation(free=50, scale=500), NO_RISK, 0, 25),
        (situation(free=25, scale=500), TUNE, 25, 25),
        (situation(free=24, scale=500), DROP, 26, 25),
        # small nodes: a sixteenth of the memory
        (situation(total=16, free=1, scale=10), TUNE, 1, 1),
        (situation(total=16, free=0.5, scale=10), DROP, 1.5, 1),
    ],
)
def test_the_node(inputs: MemoryInputs, state: MemoryPressure, target: float, threshold: float) -> None:
    result = node_condition(inputs, CONFIG)
    assert result.state is state
    assert result.target_bytes == round(target * GIB)
    assert result.reason.threshold == threshold * GIB


def test_each_numa_node_by_itself() -> None:
    result = numa_conditions(situation(numa=3, free=(3, 7, 8)), CONFIG)
    assert [result[numa].state for numa in range(3)] == [DROP, TUNE, NO_RISK]
    assert [result[numa].target_bytes for numa in range(3)] == [5 * GIB, GIB, 0]


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        (without(situation(free=0), "MemFree"), "MemFree"),
        (situation(free=0, scale=None), "vm.watermark_scale_factor"),
    ],
)
def test_missing_inputs_are_no_pressure(inputs: MemoryInputs, what: str) -> None:
    for result in (node_condition(inputs, CONFIG), numa_conditions(inputs, CONFIG)[0]):
        assert (result.state, result.target_bytes) == (UNKNOWN, 0)
        assert what in result.reason.text


def test_an_old_reading_of_a_numa_node_is_no_pressure() -> None:
    inputs = situation(free=0)
    node = replace(inputs.snapshot.node, files_read_at_ns=969 * 10**9)
    old = replace(inputs, snapshot=replace(inputs.snapshot, node=node))
    assert numa_conditions(old, CONFIG)[0].state is UNKNOWN
    assert node_condition(old, CONFIG).state is DROP  # /proc/meminfo is read every time


@pytest.mark.parametrize(
    ("total", "reserve", "critical", "static", "unknown"),
    [
        (250, 5, 4, 20, 8),
        (64, 5, 4, 8, 8),
        (24, 3, 1.5, 3, 3),
        (2, 0.25, 0.125, 0.25, 0.25),
    ],
)
def test_small_nodes_take_a_part(total: float, reserve: float, critical: float, static: float, unknown: float) -> None:
    size = round(total * GIB)
    result = (
        CONFIG.reserve_bytes(size),
        CONFIG.critical_bytes(size),
        CONFIG.static_bytes(size),
        CONFIG.unknown_need_bytes(size),
    )
    assert result == tuple(round(part * GIB) for part in (reserve, critical, static, unknown))


def test_a_configured_minimum_applies_to_small_nodes_too() -> None:
    config = MemoryConfig(reserved_for_allocate_bytes=5 * GIB, min_critical_watermark_bytes=4 * GIB)
    assert (config.reserve_bytes(8 * GIB), config.critical_bytes(8 * GIB)) == (5 * GIB, 4 * GIB)
    assert (config.reserve_bytes(GIB), config.critical_bytes(GIB)) == (GIB, GIB)
