"""Each plugin alone, under full pressure: without one reading it evicts no pod."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from agent.config.eviction import PLUGIN_NAMES, EvictionConfig, FilesystemThreshold, RootfsOveruseConfig
from agent.eviction.eviction_inputs import EvictionInputs
from agent.eviction.manager import EvictionState, evaluate_evictions
from agent.eviction.plugins.network_eviction import NIC_ANNOTATION
from api.advice import CpuAdvice, Headroom, PowerAction, PowerActionKind, Region, RegionAdvice, RegionKind
from api.knobs import Reason
from api.pod import Pod
from api.qos import Enhancements, QoSLevel
from api.snapshot import CgroupSample
from api.units import GIB
from tests.agent.eviction.builders import S, pod
from tests.agent.eviction.test_manager import EVERYTHING, trouble

WHY = Reason(rule="r", text="t")
FIELDS = {"annotations": {NIC_ANNOTATION: "eth0"}, "enhancements": Enhancements(suppression_tolerance_rate=1.0)}
ONLINE = [pod(f"web{i}", QoSLevel.SHARED, cores=8, memory=GIB, numa=(0,), **FIELDS) for i in range(3)]
PODS: list[Pod] = [*ONLINE, *(pod(f"batch{i}", cores=8, memory=GIB, numa=(0,), **FIELDS) for i in range(3))]
COMPLETE_S, HIDDEN_S, STEP_S = 330, 120, 5
"""Longer than timers of five minutes, and longer than any sample is valid."""


def everything(at_s: float) -> EvictionInputs:
    region = Region(
        name="share", kind=RegionKind.SHARE, pool="share", numa_nodes=(0,), pods=tuple(each.key for each in ONLINE)
    )
    advised = RegionAdvice(region=region, policy="p", controls={}, upper_cores=1, lower_cores=1, reason=WHY)
    answer = PowerAction(kind=PowerActionKind.EVICT, at_ns=round(at_s * S), count=1, current_watts=300, reason=WHY)
    base = trouble(at_s, PODS, 1.0)
    return msgspec.structs.replace(base, advice=CpuAdvice(regions=(advised,)), power=answer)


Hide = Callable[[EvictionInputs], EvictionInputs]


def without(**fields: object) -> Hide:
    """Hide fields of the inputs."""
    return lambda at: msgspec.structs.replace(at, **fields)


def no_node(**fields: object) -> Hide:
    """Hide fields of the node's sample."""
    return lambda at: msgspec.structs.replace(
        at,
        snapshot=msgspec.structs.replace(at.snapshot, node=msgspec.structs.replace(at.snapshot.node, **fields)),
    )


def no_pod(**fields: object) -> Hide:
    """Hide fields of every cgroup's sample."""

    def hide(at: EvictionInputs) -> EvictionInputs:
        groups: dict[str, CgroupSample] = {
            path: msgspec.structs.replace(each, **fields) for path, each in at.snapshot.cgroups.items()
        }
        return msgspec.structs.replace(at, snapshot=msgspec.structs.replace(at.snapshot, cgroups=groups))

    return hide


def old(at: EvictionInputs) -> EvictionInputs:
    """Make the snapshot too old."""
    return msgspec.structs.replace(at, now_ns=at.now_ns + 31 * S)


OLD_FILES = everything(100.0 + COMPLETE_S).snapshot.wall_time_ns
"""Time of the latest complete reading."""
NOT_READ, NO_AMOUNTS = {"files_read_at_ns": OLD_FILES}, Headroom(reason=WHY)
FREE, STALL, LOADS = {"meminfo": {}}, {"memory_pressure": None}, {"load": None}
STALE, RING_10, RING_15, RING_30 = 30, 40, 45, 60
"""Seconds for which inputs stay valid: staleness, and for windows one sample period of 10, 15 or 30 s more."""
HIDDEN_INPUTS: Mapping[str, Mapping[str, tuple[Hide, int]]] = {
    "reclaimed-resource-pressure-eviction-plugin": {
        "headroom": (without(headroom=None), 0), "amounts": (without(headroom=NO_AMOUNTS), 0),
    },
    "reclaimed-numa-resource-pressure-eviction-plugin": {
        "headroom": (without(headroom=None), 0), "amounts": (without(headroom=NO_AMOUNTS), 0),
    },
    "numa-memory-pressure-eviction-plugin": {
        "zones": (no_node(zones=()), 0), "numa nodes": (no_node(numa={}), 0), "pods": (no_pod(numa_stat={}), 0),
        "reading": (no_node(**NOT_READ), 0), "pods' reading": (no_pod(**NOT_READ), STALE),
    },
    "system-memory-pressure-eviction-plugin": {
        "node": (no_node(**FREE, vmstat={}), 0), "pods": (no_pod(memory_bytes=None), 0),
        "scale and reclaim": (no_node(sysctl={}, vmstat={}), 0), "reading": (no_node(**NOT_READ), STALE),
    },
    "rss-overuse-eviction-plugin": {"stat": (no_pod(memory_stat={}), 0), "reading": (no_pod(**NOT_READ), STALE)},
    "rootfs-pressure-eviction-plugin": {
        "file systems": (no_node(filesystems={}), 0), "layers": (without(rootfs={}), 0),
        "reading": (no_node(**NOT_READ), STALE),
    },
    "rootfs-overuse-eviction-plugin": {"file systems": (no_node(filesystems={}), 0), "layers": (without(rootfs={}), 0)},
    "network-eviction-plugin": {"cards": (without(nics={}), 0)},
    "cpu-pressure-load-plugin": {"load": (no_pod(**LOADS), RING_30), "pools": (without(pools={}), 0)},
    "cpu-pressure-suppression-plugin": {"pools": (without(pools={}), 0)},
    "numa-cpu-pressure-plugin": {"use": (no_pod(cpu_usage_ns=None), RING_15)},
    "numa-sys-cpu-pressure-plugin": {
        "use": (no_pod(cpu_usage_ns=None), RING_10), "in the kernel": (no_pod(cpu_system_ns=None), RING_10),
    },
    "koordinator-cpu-evict": {"use": (no_pod(cpu_usage_ns=None), 0), "pools": (without(pools={}), 0)},
    "koordinator-memory-evict": {"node": (no_node(**FREE), 0), "pods": (no_pod(memory_bytes=None, memory_stat={}), 0)},
    "oomd-pressure": {"node": (no_node(**FREE, **STALL), 0), "pods": (no_pod(memory_bytes=None), 0)},
    "node_power_pressure": {"answer": (without(power=None), 0)},
}  # fmt: skip
ANY_PLUGIN = {"snapshot": (old, 0), "cgroups": (lambda at: replaced(at, cgroups={}), 0)}
CASES = [
    pytest.param(name, hide, valid_s, id=f"{name}: {what}")
    for name, hides in HIDDEN_INPUTS.items()
    for what, (hide, valid_s) in {**hides, **ANY_PLUGIN}.items()
]


def replaced(at: EvictionInputs, **fields: object) -> EvictionInputs:
    return msgspec.structs.replace(at, snapshot=msgspec.structs.replace(at.snapshot, **fields))


def alone(name: str) -> EvictionConfig:
    overuse = RootfsOveruseConfig(shared=FilesystemThreshold(number=1))
    return msgspec.structs.replace(EVERYTHING, plugins=(name,), rootfs_overuse=overuse)  # type: ignore[arg-type]


def last_victim_s(name: str, hide: Hide) -> int | None:
    """Return for how long after the last complete cycle a pod is evicted; victims neither go nor delay others."""
    memory, last = EvictionState(), None
    for second in range(0, COMPLETE_S + HIDDEN_S + 1, STEP_S):
        at = everything(100.0 + second)
        evictions, memory = evaluate_evictions(at if second <= COMPLETE_S else hide(at), memory, alone(name))
        assert {each.plugin for each in evictions.thresholds} == {name}
        memory = msgspec.structs.replace(memory, sent=(), evicted_at_ns={})
        last = second - COMPLETE_S if evictions.victims else last
    return last


def test_every_plugin_has_a_hidden_input() -> None:
    assert HIDDEN_INPUTS.keys() == set(PLUGIN_NAMES)


@pytest.mark.parametrize("name", HIDDEN_INPUTS)
def test_with_all_inputs_a_pod_is_evicted(name: str) -> None:
    """The test below is not vacuous."""
    assert last_victim_s(name, lambda at: at) == HIDDEN_S


@pytest.mark.parametrize(("name", "hide", "valid_s"), CASES)
def test_without_one_reading_no_pod_is_evicted(name: str, hide: Hide, valid_s: int) -> None:
    last_s = last_victim_s(name, hide)
    assert last_s is not None
    assert last_s <= valid_s
