"""Eviction on captured machines: the kernel's own files of both cgroup versions, and a node that has nothing wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agent.config.eviction import PLUGIN_NAMES, EvictionConfig, KoordinatorMemoryConfig
from agent.eviction.eviction_inputs import (
    EvictionInputs,
    memory_bytes,
    numa_memory_bytes,
    rss_bytes,
    unreclaimable_bytes,
)
from agent.eviction.manager import EvictionState, evaluate_evictions
from api.eviction import ThresholdMet
from api.pod import Container, Pod
from api.qos import QoSLevel
from tests.captures import CAPTURES, Captured

WEB = Pod(
    uid="web", namespace="default", name="web", qos=QoSLevel.RECLAIMED,
    containers=(Container(name="web", cgroup="/dioptase-capture/burstable/pod7d/web"),),
)  # fmt: skip


def captured(name: str, root: Path) -> EvictionInputs:
    snapshot = Captured(CAPTURES / f"{name}.tar.gz", root).snapshot()
    return EvictionInputs(snapshot=msgspec.structs.replace(snapshot, pods=(WEB,)), now_ns=1)


@pytest.mark.parametrize(
    ("name", "node", "rss", "held", "on_node", "charged"),
    [
        ("v1-hybrid", 0, 50_651_136, 50_651_136, 12366 * 4096, 51_118_080),
        ("v2", 1, 50_647_040, 50_647_040 + (1 << 20), 50_618_368 + 1_150_976, 52_424_704),
    ],
)
def test_memory_of_a_pod(tmp_path: Path, name: str, node: int, rss: int, held: int, on_node: int, charged: int) -> None:
    at = captured(name, tmp_path)
    assert rss_bytes(at, WEB) == rss
    assert unreclaimable_bytes(at, WEB) == held, "with a MiB of shared memory on version 2, and no page cache"
    assert numa_memory_bytes(at, WEB, node) == on_node
    assert memory_bytes(at, WEB) == charged


@pytest.mark.parametrize("name", ["v1-hybrid", "v2"])
def test_a_quiet_machine_evicts_no_pod(tmp_path: Path, name: str) -> None:
    at, memory = captured(name, tmp_path), EvictionState()
    config = EvictionConfig(plugins=PLUGIN_NAMES, koordinator_memory=KoordinatorMemoryConfig(threshold=0.99))  # type: ignore[arg-type]
    evaluated = set()
    for i in range(20):
        now_ns = 1 + i * 5 * 10**9
        snapshot = msgspec.structs.replace(at.snapshot, taken_at_ns=now_ns)
        evictions, memory = evaluate_evictions(
            msgspec.structs.replace(at, snapshot=snapshot, now_ns=now_ns), memory, config
        )
        assert evictions.victims == ()
        assert {threshold.met for threshold in evictions.thresholds} == {ThresholdMet.NOT_MET}
        evaluated |= {each.plugin for each in evictions.thresholds if each.observed is not None}
    assert {"numa-memory-pressure-eviction-plugin", "system-memory-pressure-eviction-plugin"} <= evaluated
