"""Computed and reported headroom in whole cycles: vectors of Katalyst and Koordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.headroom.headroom_reporter import ReporterState
from agent.config.advisor import (
    AdvisorConfig,
    CpuUtilBasedConfig,
    HeadroomConfig,
    KoordinatorHeadroomConfig,
    ProvisionConfig,
)
from agent.config.config import AgentConfig
from agent.config.qrm import CpuPlacementConfig
from agent.config.report import ReportConfig
from api.cpu import Topology
from api.pod import Pod
from api.qos import Enhancements
from api.snapshot import ComponentHealth, NodeSample, NumaNode, Snapshot
from api.units import GIB
from tests.agent.advisor.cycles import advice_of, evaluate_cycles, headroom_of, reported_of
from tests.builders.nodes import S, cpu_times, topology
from tests.builders.pods import dedicated, reclaimed, shared
from tests.builders.snapshots import snapshot

TWO = topology(96, sockets=2)
"""0-47 and 48-95, a socket each."""


def build_snapshot(
    at_s: float,
    pods: Sequence[Pod],
    node: Topology,
    used: Mapping[str, float],
    busy: float | Mapping[int, float] = 0.0,
) -> Snapshot:
    """Return a snapshot in which pods have always used these cores and CPUs have always been this busy."""
    built = snapshot(at_s, pods, machine=node, usage_s={name: cores * at_s for name, cores in used.items()})
    ratios = {cpu: busy.get(cpu, 0.0) if isinstance(busy, Mapping) else busy for cpu in node.ids}
    total = sum(ratios.values())
    per_cpu = {cpu: cpu_times(ratio * at_s, at_s) for cpu, ratio in ratios.items()}
    return replace(built, node=NodeSample(per_cpu=per_cpu, cpu=cpu_times(total * at_s, len(ratios) * at_s)))


def canonical(**headroom: Any) -> AgentConfig:
    return AgentConfig(advisor=AdvisorConfig(policy="canonical", headroom=HeadroomConfig(**headroom)))


def batch_config(**advisor: Any) -> AgentConfig:
    return AgentConfig(advisor=AdvisorConfig(headroom=HeadroomConfig(policy="koordinator-batch"), **advisor))


def util(**fields: Any) -> dict[str, Any]:
    return {"util": CpuUtilBasedConfig(enable=True, **{"max_oversold_rate": 1.5, **fields})}


@pytest.mark.parametrize(
    ("busy", "used", "last", "headroom", "expected"),
    [
        (0.3, 3.0, 10.0, util(), 13),  # 10 CPUs, target .6: 10 + 10 x .3
        (0.8, 1.0, 10.0, util(), 5),  # supply 3, 1.5 times that, rounded up
        (0.3, 3.0, 10.0, {}, 10),  # what is idle and what is used
        (0.9, 9.0, 15.0, util(maximum=0.8), 14),  # above the maximum: 15 - 10 x .1
    ],
)
def test_the_reclaim_pool_by_its_utilisation(
    busy: float, used: float, last: float, headroom: dict[str, Any], expected: float
) -> None:
    """96 CPUs on two NUMA nodes; the first ten are the reclaim pool, and this headroom is reported on NUMA node 0."""
    config, pods = canonical(**headroom), [reclaimed("batch")]
    ratios = dict.fromkeys(range(10), busy)
    _, state = evaluate_policy(build_snapshot(1, pods, TWO, {"batch": used}, ratios), config, PolicyState(), S)
    assigned = replace(state.advisor, pools={"reclaim": tuple(range(10))}, reported_by_numa={0: last, 1: 0.0})
    state = replace(state, advisor=assigned)
    policy_result, _ = evaluate_policy(build_snapshot(2, pods, TWO, {"batch": used}, ratios), config, state, 2 * S)
    result = headroom_of(policy_result)
    assert result.cores == pytest.approx(expected)
    assert result.cores_by_numa == {0: pytest.approx(expected), 1: 0}


def bound_to(owner: Pod, *numa: int, **fields: Any) -> Pod:
    return replace(owner, enhancements=Enhancements(numa_binding=True, **fields), bound_numa=numa)


def test_headroom_of_an_exclusive_numa_node() -> None:
    """48 CPUs on two NUMA nodes. The pod uses 10 of its 24, spread evenly: 12.5 and a reserve of 2 make 15 CPUs."""
    node = topology(48, sockets=2)
    alone = bound_to(dedicated("alone", cpu_request=24), 1, numa_exclusive=True)
    pods, used = [shared("web", cpu_request=4), alone], {"alone": 10.0, "web": 1.0}
    busy = dict.fromkeys(range(24, 48), 10 / 24) | {0: 1.0}
    cycles = [build_snapshot(at, pods, node, used, busy) for at in range(1, 200)]
    result = evaluate_cycles(cycles, canonical())[0][-1]
    overlaps = {(size.pool, size.numa): size.overlap for size in advice_of(result).cpu.sizes}
    assert overlaps["reclaim", 1] == {"dedicated-default/alone": 24 - 15}
    # 9 CPUs x 14 / 24 idle are 5.25, rounded up on a NUMA node with bound pods; all but the share pool's four
    assert headroom_of(result).cores_by_numa == {0: 20, 1: 6}
    regions = {item.region.name: item for item in advice_of(result).cpu.regions}
    # 24 less 2 at most; 12.5 are needed and 2 reserved, and 2 that reclaimed pods keep
    assert regions["dedicated-default/alone-NUMA1"].headroom_cores == pytest.approx(22 - 12.5 - 2 + 2)
    assert regions["share"].headroom_cores == pytest.approx(22 - 1.25 - 2 + 2)


@pytest.mark.parametrize(
    ("policy", "cores", "rule"),
    [
        ("none", 0.0, "region_none"),
        # no profile reports a problem, so a score of 100 makes all of it reclaimable
        ("numa-dedicated", 18.75, "region_numa_dedicated"),
    ],
)
def test_regions_use_their_headroom_policy(policy: Any, cores: float, rule: str) -> None:
    web = shared("web")
    cycles = [build_snapshot(at, [web], topology(24), {"web": 1.0}) for at in (1, 2)]
    (share,) = advice_of(evaluate_cycles(cycles, canonical(share_region=policy))[0][-1]).cpu.regions
    # 20 at most, of which 1.25 are needed and 4 reserved; 4 more that reclaimed pods keep
    assert share.headroom_cores == pytest.approx(cores)
    assert share.headroom_reason is not None
    assert share.headroom_reason.rule == rule


@pytest.mark.parametrize("policy", ["canonical", "latency"])
@pytest.mark.parametrize("headroom", ["common", "estimate", "koordinator-batch"])
def test_no_headroom_on_the_socket_of_an_unreclaimable_share_pool(policy: Any, headroom: Any) -> None:
    near = bound_to(shared("near", cpu_request=4), 1, cpuset_pool="flink")
    pods, used = [near, shared("web", cpu_request=4)], {"near": 1.0, "web": 1.0}
    for disabled in ((), ("flink",)):
        config = AgentConfig(
            advisor=AdvisorConfig(
                policy=policy,
                headroom=HeadroomConfig(policy=headroom),
                provision=ProvisionConfig(disable_reclaim_share_pools=disabled),
            )
        )
        cycles = [with_memory(build_snapshot(at, pods, TWO, used)) for at in (1, 2, 3, 40)]
        result = headroom_of(evaluate_cycles(cycles, config)[0][-1])
        by_numa = result.cores_by_numa
        assert (by_numa[0] > 0, by_numa[1] > 0) == (True, not disabled)
        assert result.cores == pytest.approx(sum(by_numa.values()))
        assert (
            "NUMA node 1 is not reclaimable: reclaim is disabled for share pool flink of default/near"
            in result.reason.text
        ) == bool(disabled)
        if headroom == "koordinator-batch":
            assert result.memory_bytes == pytest.approx(sum(result.memory_by_numa.values()))
            assert (result.memory_by_numa[1] > 0) == (not disabled)


def with_memory(shot: Snapshot, total: int = 200, busy: int = 50, anon: Mapping[str, int] | None = None) -> Snapshot:
    """Return the snapshot with this memory in GiB, half on each of two NUMA nodes; `anon` is that of pods."""
    numa = {n: NumaNode(meminfo={"MemTotal": total // 2 * GIB}) for n in (0, 1)}
    node = replace(shot.node, memory_total_bytes=total * GIB, memory_available_bytes=(total - busy) * GIB, numa=numa)
    cgroups = {
        path: replace(
            sample,
            memory_stat={
                "inactive_anon": (anon or {}).get(path[1:], 0) * GIB,
                "active_anon": 0,
                "unevictable": 0,
            },
        )
        for path, sample in shot.cgroups.items()
    }
    return replace(shot, node=node, cgroups=cgroups)


def koordinator(at_s: float, spent_s: float) -> Snapshot:
    """Return 100 CPUs of which the system uses 10 and a prod pod has used these seconds; 200 GiB, 30 by the pod and 20 by
    the system."""
    shot = snapshot(at_s, [shared("web", cpu_request=80)], machine=topology(100, sockets=2), usage_s={"web": spent_s})
    busy = spent_s + 10 * at_s
    shot = replace(shot, node=replace(shot.node, cpu=cpu_times(busy, 100 * at_s)))
    return with_memory(shot, anon={"web": 30})


@pytest.mark.parametrize("allowance", ["canonical", "latency"])
@pytest.mark.parametrize(
    ("headroom", "cores", "gib"),
    [
        # Koordinator's own: 100 - 40 - 10 - 20; 200 - 70 - 20 - 30
        (HeadroomConfig(policy="koordinator-batch"), 30, 80),
        # the pod requests 80: 100 - 40 - 10 - 80; without a request of memory 30 are used
        (
            HeadroomConfig(
                policy="koordinator-batch", koordinator=KoordinatorHeadroomConfig(cpu_policy="maxUsageRequest")
            ),
            0,
            80,
        ),
        # 80 requested, 25 needed by estimate: 55 to spare of 70 that the node leaves; of memory nothing was requested
        (HeadroomConfig(policy="koordinator-mid"), 55, 0),
        # 40 % at most, and a fixed part of memory
        (
            HeadroomConfig(
                policy="koordinator-mid",
                koordinator=KoordinatorHeadroomConfig(mid_cpu_threshold_percent=40, mid_static_memory_percent=25),
            ),
            40,
            50,
        ),
    ],
)
def test_koordinators_sums_by_settings(allowance: Any, headroom: HeadroomConfig, cores: float, gib: float) -> None:
    config = AgentConfig(advisor=AdvisorConfig(policy=allowance, ramp_up_s=0, headroom=headroom))
    result = headroom_of(evaluate_cycles([koordinator(at, 20.0 * at) for at in (1, 2)], config)[0][-1])
    assert result.cores == pytest.approx(cores)
    assert result.cores_by_numa == {0: pytest.approx(cores / 2), 1: pytest.approx(cores / 2)}
    assert result.memory_bytes == pytest.approx(gib * GIB)
    if headroom.policy == "koordinator-batch":
        assert (
            "Memory: Batch is 80.00 GiB = 200.00 GiB - 70.00 GiB margin - 20.00 GiB system - 30.00 GiB by pods"
            in result.reason.text
        )
    assert result.memory_by_numa == {0: pytest.approx(gib * GIB / 2), 1: pytest.approx(gib * GIB / 2)}


def story(changes: Sequence[float], config: AgentConfig, every_s: int = 30) -> list[float | None]:
    """Return the reported CPU headroom of cycles at these intervals, with this use of the pod before each of them."""
    spent_s = accumulate(cores * every_s for cores in (0.0, *changes))
    cycles = [koordinator(number * every_s, spent) for number, spent in enumerate(spent_s)]
    return [reported_of(result).cores for result in evaluate_cycles(cycles, config)[0]]


@pytest.mark.parametrize("allowance", ["canonical", "latency"])
def test_reported_headroom_follows_a_window_in_steps(allowance: Any) -> None:
    """Batch is 50 less what the pod uses. Samples are 30 s apart, and four make a window."""
    config = batch_config(policy=allowance)
    # nothing is known in the first cycle; then the window fills
    assert story([20, 20, 20, 20], config) == [None, None, None, None, 30]
    settled = [20.0] * 4
    # means 30.25, 30.5: the first is within 0.3 of what is reported
    assert story([*settled, 19, 19], config)[4:] == pytest.approx([30, 30, 30.5])
    # means 35, 40, 45, 50 in steps of 4, which go on when the mean has come to rest
    assert story([*settled, 0, 0, 0, 0, 0, 0], config)[4:] == pytest.approx([30, 34, 38, 42, 46, 50, 50])
    # down just as slowly, each of two NUMA nodes by 4 of its 15; when both are down to nothing, so is the whole
    assert story([*settled, *[60] * 5], config)[4:] == pytest.approx([30, 26, 22, 18, 0, 0])
    # and never below the minimum of 4 cores while there is anything: 50 - 49
    assert story([49.0] * 4, config)[4:] == pytest.approx([4])


def test_cycles_between_two_samples_change_nothing() -> None:
    config = batch_config()
    every_second = story([20.0] * 125 + [0.0] * 30, config, every_s=1)
    changes = [at for at, (a, b) in enumerate(pairwise(every_second), 1) if a != b]
    assert changes == [120, 150]


def test_reported_headroom_excludes_a_reserve_and_adds_up_by_numa_node() -> None:
    config = replace(batch_config(), report=ReportConfig(reserved_cores=5, reserved_memory_mib=10 * 1024))
    results, _ = evaluate_cycles([koordinator(at, 20.0 * at) for at in range(0, 151, 30)], config)
    reported = reported_of(results[-1])
    assert (reported.cores, reported.cores_by_numa) == (25, {0: 12.5, 1: 12.5})
    assert (reported.memory_bytes, reported.memory_by_numa) == (70 * GIB, {0: 35 * GIB, 1: 35 * GIB})
    assert reported.reason.inputs["cpu_reserved"] == 5


def test_disabling_reclaim_reports_zero_at_once() -> None:
    on = batch_config()
    results, state = evaluate_cycles([koordinator(at, 20.0 * at) for at in range(0, 151, 30)], on)
    assert reported_of(results[-1]).cores == 30
    off = replace(on, advisor=replace(on.advisor, enable_reclaim=False))
    ((result,), _) = evaluate_cycles([koordinator(151, 20.0 * 151)], off, state)
    for amounts in (headroom_of(result), reported_of(result)):
        assert (amounts.cores, amounts.cores_by_numa, amounts.memory_bytes) == (0, {0: 0, 1: 0}, 0)


def test_utilisation_uses_the_reported_headroom() -> None:
    """Katalyst reads it from the node's resource object. 24 CPUs, 20 in the reclaim pool, no use: the headroom is 24 as
    soon as 20 are reported."""
    config = canonical(util=CpuUtilBasedConfig(enable=True))
    cycles = [build_snapshot(at, [], topology(24), {}) for at in range(0, 400, 10)]
    cores = [(headroom_of(result).cores, reported_of(result).cores) for result in evaluate_cycles(cycles, config)[0]]
    assert cores[1] == (20, None)
    assert cores[11:14] == [(20, None), (20, 20), (24, 20)]
    assert cores[-1] == (24, 24)


def test_a_reclaimed_pod_is_bound_only_where_headroom_is_known() -> None:
    config = replace(canonical(), placing=CpuPlacementConfig(enable_reclaim_numa_binding=True))
    batch = replace(reclaimed("batch"), enhancements=Enhancements(numa_binding=True))
    asks = replace(batch.containers[0], reclaimed_cpu_cores=20.0)
    batch = replace(batch, containers=(asks,))
    shots = [build_snapshot(at, [batch], TWO, {"batch": 1.0}, {0: 1.0}) for at in (1, 2, 3)]
    first, _, last = (result.placement for result in evaluate_cycles(shots, config)[0])
    assert first is not None
    assert first.rejected["default/batch"].rule == "numa_headroom_unknown"
    assert last is not None
    assert not last.rejected
    assert len({cpu // 48 for cpu in last.cpus["/batch"]}) == 1


def test_policy_latency_has_the_estimated_headroom_by_numa_node() -> None:
    """96 CPUs. Online pods need 1.25 x (20 + 4): 20 are bound to NUMA node 1, and 4 run anywhere."""
    near = bound_to(shared("near", cpu_request=20), 1)
    pods, used = [near, shared("web", cpu_request=4)], {"near": 20.0, "web": 4.0}
    cycles = [build_snapshot(at, pods, TWO, used) for at in (1, 2)]
    result = headroom_of(evaluate_cycles(cycles, AgentConfig(advisor=AdvisorConfig(ramp_up_s=0)))[0][-1])
    assert result.reason.rule == "estimate"
    assert result.cores == pytest.approx(96 - 30 - 4)
    # 45.5 and 20.5 CPUs are left there
    assert result.cores_by_numa == {0: pytest.approx(62 * 45.5 / 66), 1: pytest.approx(62 * 20.5 / 66)}
    assert "96 CPUs, online pods need 30.00 by estimate, processes outside" in result.reason.text


def test_policy_state_survives_json() -> None:
    _, state = evaluate_cycles([koordinator(at, 20.0 * at) for at in range(0, 151, 30)], AgentConfig())
    assert state.reporter.reported_headroom is not None
    assert msgspec.json.decode(msgspec.json.encode(state.reporter), type=ReporterState) == state.reporter


def unlisted(snapshot: Snapshot, pods: tuple[Pod, ...] = ()) -> Snapshot:
    source = ComponentHealth(name="pods", ok=False, error="the kubelet answered 403")
    return replace(snapshot, pods=pods, sources=(source,))


@pytest.mark.parametrize("policy", ["canonical", "latency"])
def test_a_stale_pod_list_gives_no_new_headroom_and_no_growth(policy: Any) -> None:
    """By the stale list, all 96 CPUs are idle."""
    config = AgentConfig(advisor=AdvisorConfig(policy=policy), report=ReportConfig(window_s=60.0))
    pods, blind, sighted = (shared("web", cpu_request=4),), PolicyState(), PolicyState()
    for at in range(0, 300, 30):
        now = build_snapshot(at, pods, TWO, {"web": 1.0})
        result, blind = evaluate_policy(unlisted(now), config, blind, now.taken_at_ns)
        assert result.advice is None or reported_of(result).cores is None
        result, sighted = evaluate_policy(now, config, sighted, now.taken_at_ns)
    before = reported_of(result)
    assert before.cores is not None
    assert before.cores > 48
    # By the stale list the pod may have ended meanwhile, and a larger one may have started.
    later = build_snapshot(330, pods, TWO, {"web": 0.1})
    result, _ = evaluate_policy(unlisted(later, pods), config, sighted, later.taken_at_ns)
    assert (reported_of(result).cores, reported_of(result).stale[:1]) == (before.cores, ("cpu",))
