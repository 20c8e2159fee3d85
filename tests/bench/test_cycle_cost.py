"""How bench.cycle_cost makes its nodes and tells its numbers, and a short run of everything."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.qos import QoSLevel
from bench.cycle_cost import STAGES, measure_apply, measure_cycles, plain_cgroup_tree, simulated_plan
from bench.cycle_cost_report import SCALING_STAGES, CycleCostResults, CycleCostRow, LatencySpread, markdown
from bench.machine import this_machine
from tests.kernel.real_cgroups import require_writable_cgroups


def test_half_of_the_pods_are_online_and_ask_for_four_fifths_of_the_node() -> None:
    created = simulated_plan(64, 2, 200)
    online = [service for service in created.services if service.pod.qos.online]
    assert Counter(service.pod.qos for service in created.services) == {
        QoSLevel.SHARED: 95,
        QoSLevel.DEDICATED: 5,
        QoSLevel.RECLAIMED: 100,
    }
    assert sum(service.peak_cores for service in online) == pytest.approx(0.8 * 64)
    pools = Counter(service.pod.enhancements.cpuset_pool for service in online)
    assert pools[""] == 85
    assert len(pools) == 4


def test_a_plain_tree_has_the_cpus_of_the_node_and_leaves_nothing() -> None:
    created = simulated_plan(256, 8, 8)
    with plain_cgroup_tree(created) as hierarchy:
        root = hierarchy.primary
        assert (root / "kubepods/web0/cpuset.cpus.effective").read_text() == "0-255\n"
        assert len(list((root / "kubepods").iterdir())) == 8 + 18
    assert not root.exists()


def test_the_p99_of_few_rounds_is_the_slowest() -> None:
    assert LatencySpread.of([3.0, 1.0, 2.0]) == LatencySpread(median=2.0, p99=3.0)
    assert LatencySpread.of([float(number) for number in range(200)]) == LatencySpread(median=99.5, p99=198.0)


@pytest.mark.parametrize(("p99", "reason"), [(19.9, "PASS"), (20.0, "MISS")])
def test_the_goal_is_for_the_p99_of_the_total(p99: float, reason: str) -> None:
    spread, row = LatencySpread(median=1.0, p99=p99), LatencySpread(median=0.5, p99=0.5)
    result = CycleCostRow(
        pods=200, cpus=64, numa=2, policy="latency", goal_ms=20.0, rounds=9, total=spread, cpu=row,
        stages=dict.fromkeys((*STAGES, "rest"), row), written=row,
    )  # fmt: skip
    assert result.reason == reason
    page = markdown(CycleCostResults(machine=this_machine("v2"), rows=(result,), applied=()))
    assert f"| 200 pods, 64 CPUs, 2 NUMA nodes | latency | 1.0, {p99:.1f} | {reason} 20 |" in page


@pytest.mark.parametrize(("policy", "written"), [("latency", 0), (SCALING_STAGES, 10), ("canonical", 0)])
def test_stages_of_real_cycles_add_up(policy: str, written: int, tmp_path: Path) -> None:
    row = measure_cycles(20, 16, 2, 20.0, policy, 5)
    assert row.written.median == written
    for stage in ("advise", "place", "decide", "apply"):
        assert row.stages[stage].median > 0
    assert row.stages["rest"].median < row.total.median
    results = CycleCostResults(machine=this_machine(detect_hierarchy().mode), rows=(row,), applied=())
    (tmp_path / "cycle_cost.json").write_bytes(msgspec.json.encode(results))
    assert msgspec.json.decode((tmp_path / "cycle_cost.json").read_bytes(), type=CycleCostResults) == results


@pytest.mark.kernel
def test_writes_to_real_cgroups_are_measured_and_nothing_is_left() -> None:
    hierarchy = require_writable_cgroups()
    before = set(hierarchy.primary.iterdir())
    result = {applied.what: applied for applied in measure_apply(hierarchy, 4, 2)}
    assert len(result) == 5
    assert {applied.knobs for applied in result.values()} == {4}
    assert set(hierarchy.primary.iterdir()) == before
