"""Eviction plugins for file systems, network cards and power."""

from __future__ import annotations

import pytest

from agent.config.eviction import FilesystemThreshold, NicEvictionConfig, RootfsOveruseConfig, RootfsPressureConfig
from agent.eviction.eviction_inputs import EvictionInputs, RootfsUse
from agent.eviction.finding import EvictionFinding
from agent.eviction.plugins import network_eviction, node_power_pressure, rootfs_overuse, rootfs_pressure
from agent.eviction.plugins.network_eviction import NIC_ANNOTATION, NetworkEvictionState
from agent.eviction.plugins.node_power_pressure import NodePowerEvictionState
from api.advice import PowerAction, PowerActionKind
from api.eviction import ThresholdMet
from api.knobs import Reason
from api.qos import QoSLevel
from api.snapshot import Filesystem
from api.units import GIB
from tests.agent.eviction.builders import HARD, NOT_MET, SOFT, names, pod, situation


def disk(
    free: int, size: int = 100 * GIB, *, free_inodes: int = 1000, inodes: int = 1000, **used: int
) -> EvictionInputs:
    pods = [pod("batch"), pod("cron"), pod("web", QoSLevel.SHARED), pod("unmeasured")]
    room = Filesystem(size_bytes=size, available_bytes=free, inodes=inodes, free_inodes=free_inodes)
    uses = {f"default/{name}": RootfsUse(used_bytes=count, inodes=count // GIB) for name, count in used.items()}
    return situation(pods=pods, node={"filesystems": {"/": room}}, rootfs=uses)


TENTH = RootfsPressureConfig(minimum_free=FilesystemThreshold(ratio=0.1))


@pytest.mark.parametrize(
    ("config", "free", "met"),
    [
        (TENTH, 10 * GIB, NOT_MET),
        (TENTH, 10 * GIB - 1, HARD),
        (RootfsPressureConfig(minimum_free=FilesystemThreshold(number=5, ratio=0.1)), 5, NOT_MET),  # the number counts
        (RootfsPressureConfig(minimum_free=FilesystemThreshold(number=5)), 4, HARD),
        (RootfsPressureConfig(), 0, NOT_MET),
    ],
)
def test_free_bytes(config: RootfsPressureConfig, free: int, met: ThresholdMet) -> None:
    assert rootfs_pressure.evaluate_rootfs_pressure(disk(free), config)[0].threshold.met is met


def test_free_inodes() -> None:
    config = RootfsPressureConfig(minimum_free_inodes=FilesystemThreshold(number=50))
    assert rootfs_pressure.evaluate_rootfs_pressure(disk(0, free_inodes=50), config)[1].threshold.met is NOT_MET
    actual = rootfs_pressure.evaluate_rootfs_pressure(disk(0, free_inodes=49, batch=3 * GIB, web=5 * GIB), config)[1]
    assert (actual.threshold.met, names(actual)) == (HARD, ["web", "batch"])


@pytest.mark.parametrize(("size", "met"), [(10 * GIB, HARD), (10 * GIB - 1, NOT_MET)])
def test_small_file_systems_are_not_evaluated(size: int, met: ThresholdMet) -> None:
    assert rootfs_pressure.evaluate_rootfs_pressure(disk(0, size), TENTH)[0].threshold.met is met


def test_candidates_for_a_full_file_system() -> None:
    config = RootfsPressureConfig(
        minimum_free=FilesystemThreshold(ratio=0.1),
        pod_minimum=FilesystemThreshold(number=2 * GIB),
        reclaimed_priority=FilesystemThreshold(ratio=0.03),
    )
    used = {"batch": 3 * GIB + 1, "cron": 2 * GIB - 1, "web": 9 * GIB}
    actual = rootfs_pressure.evaluate_rootfs_pressure(disk(0, **used), config)[0]
    assert names(actual) == ["batch", "web"], (
        "a reclaimed pod above its own bound first; never a pod of little or unknown use"
    )
    assert actual.threshold.condition is not None
    assert actual.threshold.condition.name == "SystemRootfs"
    assert names(rootfs_pressure.evaluate_rootfs_pressure(disk(0, **{**used, "batch": 3 * GIB}), config)[0]) == [
        "web",
        "batch",
    ]


def test_an_unknown_file_system_is_a_missing_input() -> None:
    config = RootfsPressureConfig(mount="/var", minimum_free=FilesystemThreshold(ratio=0.1))
    assert rootfs_pressure.evaluate_rootfs_pressure(disk(0), config)[0].threshold.reason.rule == "input_missing"


@pytest.mark.parametrize(
    ("amount", "used", "over"),
    [
        (FilesystemThreshold(number=30 * GIB), 30 * GIB, False),
        (FilesystemThreshold(number=30 * GIB), 30 * GIB + 1, True),
        (FilesystemThreshold(number=1), 20 * GIB, False),  # 20 GiB at least
        (FilesystemThreshold(number=1), 20 * GIB + 1, True),
        (FilesystemThreshold(ratio=0.01), 10 * GIB, False),  # a tenth at least
        (FilesystemThreshold(ratio=0.01), 10 * GIB + 1, True),
        (FilesystemThreshold(), 99 * GIB, False),
    ],
)
def test_overuse(amount: FilesystemThreshold, used: int, over: bool) -> None:
    actual = rootfs_overuse.evaluate_rootfs_overuse(disk(0, web=used), RootfsOveruseConfig(shared=amount))[0]
    assert names(actual) == (["web"] if over else [])


def test_the_largest_writers_of_the_configured_levels() -> None:
    used = {"batch": 50 * GIB, "cron": 60 * GIB, "web": 70 * GIB}
    both = (QoSLevel.SHARED, QoSLevel.RECLAIMED)
    amounts = {"shared": FilesystemThreshold(ratio=0.2), "reclaimed": FilesystemThreshold(ratio=0.2)}
    assert names(rootfs_overuse.evaluate_rootfs_overuse(disk(0, **used), RootfsOveruseConfig(**amounts))[0]) == ["web"]
    config = RootfsOveruseConfig(**amounts, levels=both, count=2)
    assert names(rootfs_overuse.evaluate_rootfs_overuse(disk(0, **used), config)[0]) == ["web", "cron"]
    elsewhere = RootfsOveruseConfig(**amounts, levels=both, count=2, shared_namespaces=("other",))
    assert names(rootfs_overuse.evaluate_rootfs_overuse(disk(0, **used), elsewhere)[0]) == ["cron", "batch"]


def cards(
    bandwidth: float, at_s: float, memory: NetworkEvictionState
) -> tuple[list[EvictionFinding], NetworkEvictionState]:
    pods = [
        pod("on", annotations={NIC_ANNOTATION: "eth1"}),
        pod("off", annotations={NIC_ANNOTATION: "eth0"}),
        pod("none"),
    ]
    at = situation(at_s, pods, nics={"eth0": 100.0, "eth1": bandwidth})
    findings, after = network_eviction.evaluate_network(at, memory, NicEvictionConfig())
    return list(findings), after


def test_a_card_without_bandwidth_for_five_minutes() -> None:
    _, memory = cards(0, 100, NetworkEvictionState())
    actual, memory = cards(0, 399, memory)
    assert {each.threshold.met for each in actual} == {NOT_MET}
    actual, _ = cards(0, 400, memory)
    assert [(each.threshold.met, names(each)) for each in actual] == [(NOT_MET, []), (SOFT, ["on"])]
    _, memory = cards(1, 350, memory)
    assert cards(0, 400, memory)[0][1].threshold.observed == 0, "one cycle with bandwidth restarts the timer"


def test_unknown_cards_restart_the_timer() -> None:
    _, memory = cards(0, 100, NetworkEvictionState())
    findings, memory = network_eviction.evaluate_network(situation(395.0, [pod("a")]), memory, NicEvictionConfig())
    assert (findings[0].threshold.reason.rule, memory.down_since_ns) == ("input_missing", {})
    assert cards(0, 400, memory)[0][1].threshold.observed == 0, "the timer restarted"


def power_response(count: int) -> PowerAction:
    reason = Reason(rule="r", text="t")
    return PowerAction(kind=PowerActionKind.EVICT, at_ns=1, count=count, current_watts=300, reason=reason)


@pytest.mark.parametrize(("stuck", "victims"), [((), ["a", "b"]), (("default/a",), ["b", "c"])])
def test_power_pressure_selects_as_many_pods_as_the_response_says(stuck: tuple[str, ...], victims: list[str]) -> None:
    pods = [pod(name, cores=1) for name in "abc"]
    response = power_response(2)
    findings, _ = node_power_pressure.evaluate_node_power(
        situation(pods=pods, power=response, stuck=frozenset(stuck)), NodePowerEvictionState()
    )
    assert names(findings[0]) == victims


def test_a_victim_of_power_pressure_that_a_budget_blocks_stays_selected() -> None:
    response = power_response(1)
    (first,), memory = node_power_pressure.evaluate_node_power(
        situation(pods=[pod("a", cores=1)], power=response), NodePowerEvictionState()
    )
    assert (names(first), first.threshold.met) == (["a"], HARD)
    retained = situation(pods=[pod("a", cores=1)], power=response, stuck=frozenset({"default/a"}))
    (later,), memory = node_power_pressure.evaluate_node_power(retained, memory)
    assert (names(later), later.threshold.met) == ([], HARD)
    (left,), _ = node_power_pressure.evaluate_node_power(situation(power=response), memory)
    assert (names(left), left.threshold.met) == ([], NOT_MET)
