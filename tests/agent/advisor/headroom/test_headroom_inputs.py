"""Sums of a snapshot: use by NUMA node, by pod and by the system, for both cgroup versions, and unmeasured parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import ContainerDemand
from agent.advisor.headroom.koordinator_headroom import (
    KoordinatorTier,
    batch_amount,
    koordinator_cpu_budget,
    koordinator_memory_budget,
    koordinator_tier,
)
from agent.advisor.node_advice import pod_loads
from agent.advisor.pod_usage import reclaimed_cpu_by_numa
from api.advice import NOT_NUMA_BOUND
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.rates import CgroupRates, NodeRates, Rates
from api.snapshot import Snapshot
from api.units import GIB
from tests.builders import pods as pod_builders
from tests.builders.nodes import cgroup_sample
from tests.builders.snapshots import snapshot

pod = partial(pod_builders.pod, namespace="a", cpu_request=2.0, memory_request=4 * GIB)


def rates(cores: Mapping[str, float | None], busy: float | None = None) -> Rates:
    groups = {f"/{name}": CgroupRates(interval_ns=1, cpu_cores=value) for name, value in cores.items()}
    return Rates(node=NodeRates(interval_ns=1, busy_cores=busy), cgroups=groups)


def build_snapshot(
    pods: list[Pod], stats: Mapping[str, Mapping[str, int]] | None = None, *, there: bool = True
) -> Snapshot:
    shot = snapshot(0, pods if there else [], machine=16)
    groups = {f"/{name}": cgroup_sample(f"/{name}", memory_stat=stat) for name, stat in (stats or {}).items()}
    return replace(shot, pods=tuple(pods), cgroups={**shot.cgroups, **groups})


def test_use_of_reclaimed_pods_counts_on_their_bound_nodes() -> None:
    pods = [
        pod("bound", QoSLevel.RECLAIMED, bound_numa=(1,)),
        pod("wide", QoSLevel.RECLAIMED, bound_numa=(0, 1)),
        pod("free", QoSLevel.RECLAIMED),
        pod("online"),
    ]
    change = rates({"bound": 1.5, "wide": 0.25, "free": 0.5, "online": 7})
    assert reclaimed_cpu_by_numa(build_snapshot(pods), change, (1,)) == {1: 1.5, NOT_NUMA_BOUND: 0.75}
    assert reclaimed_cpu_by_numa(build_snapshot(pods), change, ()) == {NOT_NUMA_BOUND: 2.25}
    assert reclaimed_cpu_by_numa(build_snapshot(pods), None, (1,)) == {1: None, NOT_NUMA_BOUND: None}
    unread = rates({"bound": None, "wide": 0.25, "free": 0.5})
    assert reclaimed_cpu_by_numa(build_snapshot(pods), unread, (1,)) == {1: None, NOT_NUMA_BOUND: 0.75}
    assert reclaimed_cpu_by_numa(build_snapshot(pods), rates({"wide": 0.25, "free": 0.5}), (1,)) == {
        1: None,
        NOT_NUMA_BOUND: 0.75,
    }
    assert reclaimed_cpu_by_numa(build_snapshot(pods, there=False), rates({}), (1,)) == {
        1: 0,
        NOT_NUMA_BOUND: 0,
    }  # no pods, no use


def test_pod_load_is_the_higher_of_use_and_load() -> None:
    pods = [pod("a"), pod("b"), pod("new")]
    state = ContainerDemand(cgroup_id=1, first_seen_ns=0, last_seen_ns=0, ramping=False, load1=3.0, load5=1.0)
    stats = {"a": {"anon": 5}, "b": {"total_rss": 6, "rss": 1}}
    loads = pod_loads(build_snapshot(pods, stats), rates({"a": 1.0, "b": 1.0}), {"/a": state})
    assert [(item.cpu_used_cores, item.memory_used_bytes) for item in loads] == [(3, 5), (1, 6), (None, None)]
    assert [(item.cpu_request_cores, item.memory_request_bytes) for item in loads] == [(2, 4 * GIB)] * 3
    bare = pod("bare", containers=(Container(name="c", cgroup="/bare"),))
    assert pod_loads(build_snapshot([bare]), None, {})[0].cpu_request_cores is None


@pytest.mark.parametrize(
    ("qos", "priority", "labels", "tier"),
    [
        (QoSLevel.SHARED, 0, {}, KoordinatorTier.PROD),
        (QoSLevel.SYSTEM, 0, {}, KoordinatorTier.PROD),
        (QoSLevel.RECLAIMED, 0, {}, KoordinatorTier.BATCH),
        (QoSLevel.SHARED, 9999, {}, KoordinatorTier.PROD),
        (QoSLevel.SHARED, 7000, {}, KoordinatorTier.MID),
        (QoSLevel.SHARED, 5500, {}, KoordinatorTier.BATCH),
        (QoSLevel.SHARED, 3000, {}, KoordinatorTier.FREE),
        (QoSLevel.SHARED, 6000, {}, KoordinatorTier.PROD),
        (QoSLevel.SHARED, 9000, {"koordinator.sh/priority-class": "koord-mid"}, KoordinatorTier.MID),
        (QoSLevel.RECLAIMED, 0, {"koordinator.sh/priority-class": "nonsense"}, KoordinatorTier.BATCH),
    ],
)
def test_tiers(qos: QoSLevel, priority: int, labels: dict[str, str], tier: KoordinatorTier) -> None:
    assert koordinator_tier(pod("p", qos, priority=priority, labels=labels)) is tier


def test_use_without_a_pod_counts_as_system_use() -> None:
    pods = [pod("a"), pod("lse", labels={"koordinator.sh/qosClass": "LSE"}), pod("be", QoSLevel.RECLAIMED), pod("new")]
    budget = koordinator_cpu_budget(build_snapshot(pods), rates({"a": 3, "lse": 0.5, "be": 4}, busy=9.5), 1.0, 6.0)
    assert (budget.capacity, budget.system_used, budget.node_used, budget.prod_reclaimable) == (16, 2, 9.5, 6)
    # 16 - 40 % - 2 - (3 used, 2 requested by the exclusive one, 2 by the one that is not measured)
    assert batch_amount(budget, "usage", 60).value == pytest.approx(16 - 6.4 - 2 - 7)
    assert koordinator_cpu_budget(build_snapshot(pods), rates({}), 1.0).system_used is None
    assert koordinator_cpu_budget(build_snapshot(pods), None, 1.0).system_used is None


def test_memory_in_use_is_without_page_cache_in_both_hierarchies() -> None:
    pods = [pod("v2"), pod("v1"), pod("unread")]
    stats = {
        "v2": {"inactive_anon": 1 * GIB, "active_anon": 2 * GIB, "unevictable": GIB, "file": 50 * GIB},
        "v1": {"inactive_anon": 1, "total_inactive_anon": 2 * GIB, "total_active_anon": GIB, "total_unevictable": 0},
    }
    shot = build_snapshot(pods, stats)
    assert koordinator_memory_budget(shot) is None
    node = replace(shot.node, memory_total_bytes=64 * GIB, memory_available_bytes=50 * GIB)
    budget = koordinator_memory_budget(replace(shot, node=node))
    assert budget is not None
    assert [demand.used for demand in budget.demands] == [4 * GIB, 3 * GIB, None]
    assert (budget.capacity, budget.system_used, budget.node_used) == (64 * GIB, 7 * GIB, 14 * GIB)
    blind = replace(shot.node, memory_total_bytes=64 * GIB)
    budget = koordinator_memory_budget(replace(shot, node=blind))
    assert budget is not None
    assert budget.system_used is None
