"""The eviction runner in cycles: its inputs, the victims that the pod evictor receives, and dry runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from agent.advisor.advisor_state import AdvisorState, ContainerDemand
from agent.advisor.engine import PolicyState
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.config.eviction import CpuLoadEvictionConfig, EvictionConfig
from agent.eviction.runner import EvictionRunner
from agent.qrm.cpuset.allowed_cpus import AllowedCpus
from agent.qrm.cpuset.state import CpusetEntry, CpusetState
from api.advice import CpuAdvice, Headroom, Region, RegionAdvice, RegionKind
from api.decision import Advice, Pool
from api.eviction import EvictionBlock, EvictionEvent, EvictionEventReason, ThresholdMet
from api.knobs import Reason
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import Interface, Snapshot
from api.units import MIB
from tests.agent.eviction.builders import S, pod, situation
from tests.agent.eviction.test_manager import broken, replace_plugin

RSS, LOAD = "rss-overuse-eviction-plugin", "cpu-pressure-load-plugin"
NUMA = "reclaimed-numa-resource-pressure-eviction-plugin"
RECLAIMED = "reclaimed-resource-pressure-eviction-plugin"
CPU, NETWORK = "koordinator-cpu-evict", "network-eviction-plugin"
BY_NEED = {"policy": "canonical", "reservedForAllocateCores": 0}
WHY = Reason(rule="r", text="t")
BATCH = pod("batch", memory=100 * MIB)
WEB = pod("web", QoSLevel.SHARED, memory=100 * MIB)


class FakePodEvictor:
    """A pod evictor that records its calls."""

    def __init__(self) -> None:
        self.evictions: list[tuple[str, float | None]] = []
        self.new_events: list[EvictionEvent] = []
        self.terminating: frozenset[str] = frozenset()
        self.stuck: frozenset[str] = frozenset()
        self.blocked: dict[str, EvictionBlock] = {}
        self.cancelled: list[tuple[str, str]] = []

    def cancel(self, pod: str, reason: str) -> None:
        self.cancelled.append((pod, reason))

    def close(self) -> None:
        pass

    def evict(self, pod: Pod, grace_s: float | None, reason: str) -> None:
        self.evictions.append((pod.key, grace_s))
        self.terminating |= {pod.key}

    def outcomes(self) -> Sequence[EvictionEvent]:
        notified, self.new_events = self.new_events, []
        return notified


def over(at_s: float, **sizes: float) -> Snapshot:
    """A snapshot of two pods that requested 100 MiB each, and use `sizes` MiB."""
    samples = {name: {"memory_stat": {"rss": round(size * MIB)}, "threads": 2} for name, size in sizes.items()}
    return situation(at_s, [BATCH, WEB], samples=samples).snapshot


def config(*plugins: str, **fields: object) -> AgentConfig:
    return msgspec.convert({"eviction": {"plugins": plugins}, **fields}, AgentConfig)


def load_config(advisor: Mapping[str, object]) -> AgentConfig:
    """Return settings in which one sample of the load is enough."""
    eviction = EvictionConfig(plugins=(LOAD,), load=CpuLoadEvictionConfig(ring_size=1))
    return AgentConfig(advisor=msgspec.convert(advisor, AdvisorConfig), eviction=eviction)


def advisor_state(load1: float, at_s: int) -> AdvisorState:
    """Return the state of an advisor that sampled the load of web at `at_s`."""
    demand = ContainerDemand(
        cgroup_id=1, first_seen_ns=0, last_seen_ns=at_s * S, ramping=False, load1=load1, load_at_ns=at_s * S
    )
    return AdvisorState(containers={"/web": demand})


def advice(pools: Mapping[str, int], reported_headroom: Headroom | None = None) -> Advice:
    """Pools of so many CPUs each, one after the other; `web` is in `share`. This cycle computes a headroom of 0."""
    advised, first = [], 0
    for name, size in pools.items():
        advised.append(Pool(name=name, cpus=tuple(range(first, first + size))))
        first += size
    region = Region(name="share", kind=RegionKind.SHARE, pool="share", numa_nodes=(0,), pods=("default/web",))
    region_advice = RegionAdvice(region=region, policy="p", controls={}, upper_cores=8, lower_cores=1, reason=WHY)
    return Advice(
        policy="latency", cpu=CpuAdvice(regions=(region_advice,)), pools=tuple(advised), requirement_cores=1,
        reclaimable_cores=1, headroom=Headroom(cores=0.0, reason=WHY), reported_headroom=reported_headroom,
        idle=True, action="hold", reason=WHY,
    )  # fmt: skip


def test_a_victim_is_evicted_once_and_reported_as_terminating() -> None:
    pod_evictor = FakePodEvictor()
    evictor = EvictionRunner(config(RSS), pod_evictor)
    first = evictor.run_cycle(over(100, batch=106, web=50), None, PolicyState(), 100 * S)
    assert [(victim.pod, victim.dry_run) for victim in first.victims] == [("default/batch", False)]
    assert (pod_evictor.evictions, first.terminating) == ([("default/batch", None)], ("default/batch",))
    # The next cycle: it still uses the memory and is terminating; no other pod is evicted.
    later = evictor.run_cycle(over(106, batch=106, web=50), None, PolicyState(), 106 * S)
    assert (later.victims, pod_evictor.evictions) == ((), [("default/batch", None)])
    pod_evictor.new_events = [
        EvictionEvent(pod="default/batch", reason=EvictionEventReason.SUCCEEDED, message="m", at_ns=1)
    ]
    assert [event.reason for event in evictor.outcomes()] == [EvictionEventReason.SUCCEEDED]


def test_a_stuck_victim_is_not_evicted_again_and_the_next_pod_is() -> None:
    """Both pods exceed their requests; the first is stuck, and one pod is evicted per cycle."""
    pod_evictor = FakePodEvictor()
    evictor = EvictionRunner(config(RSS), pod_evictor)
    evictor.run_cycle(over(100, batch=106, web=106), None, PolicyState(), 100 * S)
    pod_evictor.stuck = pod_evictor.terminating
    result = evictor.run_cycle(over(106, batch=106, web=106), None, PolicyState(), 106 * S)
    assert pod_evictor.evictions == [("default/batch", None), ("default/web", None)]
    assert result.terminating == ("default/batch", "default/web")
    result = evictor.run_cycle(over(200, batch=106, web=50), None, PolicyState(), 200 * S)
    assert (result.victims, len(pod_evictor.evictions)) == ((), 2)


def test_without_a_pod_evictor_every_plugin_runs_dry() -> None:
    evictor = EvictionRunner(config(RSS), None)
    result = evictor.run_cycle(over(100, batch=106, web=50), None, PolicyState(), 100 * S)
    assert [(victim.pod, victim.dry_run) for victim in result.victims] == [("default/batch", True)]
    assert result.thresholds[0].dry_run
    assert (evictor.outcomes(), result.terminating) == ((), ())


@pytest.mark.parametrize(
    ("pod_fields", "sample", "files_age_s", "evicted"),
    [
        ({}, {"rss": 106}, 30, True),
        ({}, {"rss": 105}, 0, False),
        ({}, {"rss": 106}, 31, False),  # readings are too old
        ({}, {"rss": 106, "threads": 0}, 0, False),  # page cache of an empty cgroup is not freed by an eviction
        ({"terminating": True}, {"rss": 106}, 0, False),  # another client deleted the pod
    ],
)
def test_a_pod_above_its_request_is_evicted_if_it_runs_and_its_readings_are_recent(
    pod_fields: dict[str, Any], sample: dict[str, int], files_age_s: float, evicted: bool
) -> None:
    fields = {"memory_stat": {"rss": sample["rss"] * MIB}, "threads": sample.get("threads", 2)}
    batch = msgspec.structs.replace(BATCH, **pod_fields)
    snapshot = situation(100, [batch], samples={"batch": fields}, files_age_s=files_age_s).snapshot
    pod_evictor = FakePodEvictor()
    EvictionRunner(config(RSS), pod_evictor).run_cycle(snapshot, None, PolicyState(), 100 * S)
    assert pod_evictor.evictions == ([("default/batch", None)] if evicted else [])


def test_a_failed_plugin_makes_the_component_unhealthy_and_evicts_no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    pod_evictor = FakePodEvictor()
    evictor = EvictionRunner(config(RSS), pod_evictor)
    assert evictor.status(evictor.run_cycle(over(100, batch=50, web=50), None, PolicyState(), 100 * S), 7).ok
    replace_plugin(monkeypatch, RSS, broken)
    result = evictor.run_cycle(over(106, batch=200, web=50), None, PolicyState(), 106 * S)
    status = evictor.status(result, 7)
    assert (status.name, status.ok, status.duration_ns, pod_evictor.evictions) == ("eviction", False, 7, [])
    assert status.error == f"{RSS}: This plugin failed: ZeroDivisionError: of no use"


@pytest.mark.parametrize(
    ("advisor", "share", "met"),
    [
        # 8 CPUs, of which reclaimed pods always keep 2; a load of 2 tasks.
        (
            {"policy": "canonical"},
            6,
            ThresholdMet.NOT_MET,
        ),  # a reserve is kept: only a load above the 6 CPUs would count
        ({**BY_NEED}, 5, ThresholdMet.NOT_MET),  # the pool can grow by one
        ({**BY_NEED}, 6, ThresholdMet.SOFT),  # it cannot: any load above 1 meets the soft threshold
        ({**BY_NEED, "enableReclaim": False}, 6, ThresholdMet.NOT_MET),
        # Reclaimed pods are on the same CPUs: the pool is as large as it can be, and idle for all that.
        ({**BY_NEED, "provision": {"overlap": True}}, 6, ThresholdMet.NOT_MET),
        ({**BY_NEED, "policy": "latency"}, 6, ThresholdMet.NOT_MET),
    ],
)
def test_a_pool_that_is_sized_by_need_is_under_pressure_once_it_cannot_grow(
    advisor: dict[str, object], share: int, met: ThresholdMet
) -> None:
    snapshot = situation(100, [WEB], cpus=8).snapshot
    settings = load_config(advisor)
    advised = advice({"share": share, "reclaim": 8 - share})
    policy_state = PolicyState(advisor=advisor_state(2.0, 100))
    result = EvictionRunner(settings, None).run_cycle(snapshot, advised, policy_state, 100 * S)
    assert [(each.subject, each.met) for each in result.thresholds] == [("share", met)]


def test_share_pools_cannot_grow_beyond_the_allowed_cpus() -> None:
    """Of 8 CPUs pods may have 6, and reclaimed ones keep 1 of them (of 8 it would be 2): a share pool of 5 cannot grow."""
    settings = load_config(BY_NEED)
    advisor, advised = advisor_state(2.0, 100), advice({"share": 5, "reclaim": 1})
    for allowed, met in (
        (AllowedCpus(cgroup="/kubepods", cpus=tuple(range(6))), ThresholdMet.SOFT),
        (None, ThresholdMet.NOT_MET),
    ):
        policy_state = PolicyState(advisor=advisor, allowed_cpus=allowed)
        result = EvictionRunner(settings, None).run_cycle(
            situation(100, [WEB], cpus=8).snapshot, advised, policy_state, 100 * S
        )
        assert [each.met for each in result.thresholds] == [met]


def test_the_bandwidth_of_cards_is_that_of_their_link() -> None:
    """Card eth1 has lost its link, eth2 is down and reports nothing, and bond0 reports the sum of the bonded eth3."""
    cards = {
        "eth0": Interface(received={}, sent={}, speed_mbit=1000, carrier=True),
        "eth1": Interface(received={}, sent={}, carrier=False),
        "eth2": Interface(received={}, sent={}),
        "eth3": Interface(received={}, sent={}, carrier=False, bonded=True),
        "bond0": Interface(received={}, sent={}, speed_mbit=2000, carrier=True),
    }
    snapshot = situation(100, [WEB], node={"interfaces": cards}).snapshot
    result = EvictionRunner(config(NETWORK), None).run_cycle(snapshot, None, PolicyState(), 100 * S)
    bandwidths = {each.subject: each.reason.inputs["bandwidth_mbps"] for each in result.thresholds}
    assert bandwidths == {"eth0": 1000, "eth1": 0, "bond0": 2000}


@pytest.mark.parametrize(("policy", "allowed_cores"), [("latency", 3.0), ("canonical", 6.0)])
def test_the_latency_policys_reclaimable_cores_are_the_supply(policy: str, allowed_cores: float) -> None:
    """Three cores are reclaimable, the reclaim pool has six CPUs, and ten cores are requested."""
    advised = msgspec.structs.replace(advice({"share": 10, "reclaim": 6}), policy=policy, reclaimable_cores=3.0)
    greedy, evictor = pod("greedy", cores=10), EvictionRunner(config(CPU), None)
    for at_s in range(10, 61, 5):
        used = {"greedy": {"cpu_usage_ns": at_s * 2 * S}}
        result = evictor.run_cycle(situation(at_s, [greedy], samples=used).snapshot, advised, PolicyState(), at_s * S)
    satisfied = next(each for each in result.thresholds if each.scope == "be-satisfaction")
    assert satisfied.observed == pytest.approx(allowed_cores / 10)


def test_requests_are_compared_with_the_reported_headroom() -> None:
    """12 cores and 300 GiB requested: two times the reported 6 cores, and more than five times the 40 GiB."""
    greedy, pools = pod("greedy", cores=12, memory=300 << 30), {"share": 10, "reclaim": 6}
    snapshot = situation(10, [greedy], cpus=16).snapshot
    notified = Headroom(cores=6.0, memory_bytes=float(40 << 30), reason=WHY)
    result = EvictionRunner(config(RECLAIMED), None).run_cycle(snapshot, advice(pools, notified), PolicyState(), 10 * S)
    by_cpu, by_memory = sorted(result.thresholds, key=lambda each: each.scope.endswith("memory"))
    assert (by_cpu.met, by_cpu.observed, by_cpu.value) == (ThresholdMet.SOFT, 12_000, 1.5 * 6000)
    assert (by_memory.met, by_memory.value) == (ThresholdMet.HARD, 5 * 40 * (1 << 30))
    for unknown in (None, Headroom(reason=WHY)):
        result = EvictionRunner(config(RECLAIMED), None).run_cycle(
            snapshot, advice(pools, unknown), PolicyState(), 10 * S
        )
        assert all(each.met is not ThresholdMet.HARD for each in result.thresholds), "no window of samples is full yet"
        assert not result.victims


@pytest.mark.parametrize(
    ("stale", "met"),
    [
        ((), [ThresholdMet.HARD, ThresholdMet.SOFT]),
        (("cpu",), [ThresholdMet.NOT_MET, ThresholdMet.SOFT]),
        (("memory",), [ThresholdMet.HARD, ThresholdMet.NOT_MET]),
        (("cpu", "memory"), [ThresholdMet.NOT_MET, ThresholdMet.NOT_MET]),
    ],
)
def test_headroom_of_stale_inputs_evicts_no_pod(stale: tuple[str, ...], met: list[ThresholdMet]) -> None:
    """38 cores requested, a headroom of 40: after 13.8 minutes without inputs a fifth of it, 7.6 cores, is reported."""
    greedy = pod("greedy", cores=38, memory=3 << 30, numa=(0,))
    left = Headroom(
        cores=7.59, cores_by_numa={0: 7.59}, memory_bytes=float(2 << 30), memory_by_numa={0: float(2 << 30)},
        stale=stale, reason=WHY,
    )  # fmt: skip
    for name in (RECLAIMED, NUMA):
        evictor = EvictionRunner(config(name), None)
        result = evictor.run_cycle(situation(10, [greedy]).snapshot, advice({}, left), PolicyState(), 10 * S)
        ordered = sorted(result.thresholds, key=lambda each: each.scope.endswith("memory"))
        assert [each.met for each in ordered] == met
        assert [each.reason.rule == "input_missing" for each in ordered] == [
            each is ThresholdMet.NOT_MET for each in met
        ]
        assert bool(result.victims) == ("cpu" not in stale)


def test_pods_are_evaluated_on_the_numa_node_that_qrm_bound_them_to() -> None:
    """11 cores requested on NUMA node 1, which has half of the reported 4 cores."""
    greedy = pod("greedy", cores=11)
    entry = CpusetEntry(owner_pool_name="reclaim", allocation_result="8-15", bound_numa=(1,))
    policy_state = PolicyState(cpus=CpusetState(pod_entries={greedy.uid: {"greedy": entry}}))
    advised = advice({"reclaim": 3}, Headroom(cores=4.0, cores_by_numa={0: 2.0, 1: 2.0}, reason=WHY))
    evictor = EvictionRunner(config(NUMA), None)
    for at_s in range(10, 200, 10):
        result = evictor.run_cycle(situation(at_s, [greedy], cpus=16, numa=2).snapshot, advised, policy_state, at_s * S)
    by_scope = {each.scope: each for each in result.thresholds}
    here = by_scope["zone1|resource.katalyst.kubewharf.io/reclaimed_millicpu"]
    assert (here.met, here.observed, here.value) == (ThresholdMet.HARD, 11_000, 5 * 2000)
    assert not any(scope.startswith("zone0") for scope in by_scope)


@pytest.mark.parametrize(("dies_at_s", "met"), [(10_000, ThresholdMet.HARD), (300, ThresholdMet.NOT_MET)])
def test_a_load_without_new_samples_expires(dies_at_s: int, met: ThresholdMet) -> None:
    """Twice as much as the four CPUs bear; without samples from 300 s on, the last one is used until 330 s."""
    evictor = EvictionRunner(config(LOAD), None)
    advised = advice({"share": 4, "reclaim": 4})
    for at_s in range(100, 1000, 10):
        policy_state = PolicyState(advisor=advisor_state(8.0, min(at_s, dies_at_s)))
        result = evictor.run_cycle(situation(at_s, [WEB], cpus=8).snapshot, advised, policy_state, at_s * S)
    assert result.thresholds[0].met is met
