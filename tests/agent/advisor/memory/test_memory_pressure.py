"""Memory pressure at each threshold and one byte off."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agent.advisor.memory.memory_guard import node_condition, numa_conditions
from agent.advisor.memory.memory_inputs import MemoryInputs
from agent.config.memory import MemoryConfig
from api.advice import MemoryPressure
from tests.agent.advisor.memory.builders import GIB, situation, without

CONFIG = MemoryConfig()
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
