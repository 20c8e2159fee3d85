"""Policies that settings switch on, through the whole judgement: from pods, settings and snapshots to what a round says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, log
from typing import Any

import msgspec
import pytest

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.engine import PolicyState, evaluate_policy
from agent.config.config import AgentConfig
from agent.config.loader import ConfigError, parse_config
from agent.eviction.eviction_inputs import EvictionInputs
from agent.eviction.manager import EvictionState
from agent.eviction.manager import evaluate_evictions as evict
from agent.qrm.decisions.compose import PolicyResult, compose_decisions
from api.advice import IndicatorState, PowerActionKind
from api.annotations import IndicatorTarget, ServiceProfile, parse_service_profile
from api.cpu import Topology
from api.knobs import Knob
from api.measurements import CpuTimes, Interface, Pressure, RunqLatency
from api.pod import Container, Pod
from api.qos import Enhancements, QoSLevel
from api.snapshot import RequestLatency, Snapshot
from tests.agent.advisor.builders import pod, snapshot, topology

S, GIB = 1_000_000_000, 1 << 30
RAMA = """
advisor:
  policy: canonical
  reservedForAllocateCores: 0
  provision:
    sharePolicies: [rama]
"""
BOUNDS_S = (0.01, 0.02, 0.05, 0.1)


def settings(text: str) -> AgentConfig:
    return parse_config(text.encode(), "test.yaml")


def profiled(name: str, qos: QoSLevel = QoSLevel.SHARED, request: float | None = None, **said: Any) -> Pod:
    made = pod(name, qos, request=request)
    return msgspec.structs.replace(made, profile=msgspec.convert(said, ServiceProfile))


def answering(second: int, slow: float, per_s: int = 100) -> RequestLatency:
    """So many requests a second; the part that is slow takes 20 to 50 ms, the others less than 10."""
    total = per_s * second
    fast = total - round(slow * total)
    return RequestLatency(
        bounds_s=BOUNDS_S, buckets=(fast, fast, total, total, total), sum_s=0.0, sampled_at_ns=second * S + S
    )


def story(
    pods: Sequence[Pod],
    config: AgentConfig,
    seconds: Iterable[int],
    *,
    slow: float | None = None,
    cpus: int | Topology = 48,
) -> list[PolicyResult]:
    """One round a second; every pod uses one core."""
    known, found = PolicyState(), []
    for second in seconds:
        seen = snapshot(second, pods, cpus=cpus, usage_s={each.name: float(second) for each in pods})
        if slow is not None:
            seen = msgspec.structs.replace(seen, indicators={"default/web": answering(second, slow)})
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
        found.append(judged)
    return found


def share_sizes(judged: Sequence[PolicyResult]) -> list[int]:
    return [size.cpus for one in judged if one.advice for size in one.advice.cpu.sizes if size.pool == "share"]


# --- a pod's own latency


def test_a_pod_that_answers_too_slowly_widens_its_pool_under_rama() -> None:
    web = profiled("web", targets={"request_p99_ms": {"upper": 20}})
    found = story([web], settings(RAMA), range(60), slow=1.0)
    # All requests within (20, 50] ms: the 99th percentile by Prometheus' rule is 20 + 30 x 0.99 = 49.7 ms.
    assert found[-1].advice is not None
    region = found[-1].advice.cpu.regions[0]
    assert region.signals == (IndicatorState(name="request_p99_ms", current=pytest.approx(49.7), target=20.0),)
    assert "request_p99_ms is 49.7 ms, its target 20 ms" in region.reason.text
    sizes = share_sizes(found)
    step = ceil(0.05 * 44 * log(49.7 / 20))  # Kp x upper bound x error, in whole CPUs
    grown = sizes.index(sizes[0] + step)
    assert sizes[grown - 1 : grown + 3] == [sizes[0] + n * step for n in range(4)]
    assert sizes[-1] == 44  # all but what reclaimed pods always keep


@pytest.mark.parametrize(
    ("web", "slow", "why"),
    [
        (profiled("web", targets={"request_p99_ms": {"upper": 20}}), None, "nobody publishes a latency"),
        (profiled("web"), 1.0, "nobody has a target"),
        (profiled("web", targets={"request_p99_ms": {"upper": 49}}), 1.0, "within 5 % of the target"),
        (profiled("web", targets={"request_p99_ms": {"upper": 20}}), 0.001, "one request of a thousand is slow"),
    ],
)
def test_a_pool_stays_as_small_as_its_need_where(web: Pod, slow: float | None, why: str) -> None:
    assert set(share_sizes(story([web], settings(RAMA), range(40), slow=slow))) == {4}, why


def test_the_pod_that_is_furthest_above_its_target_speaks_for_its_pool() -> None:
    pods = [
        profiled("web", targets={"request_p99_ms": {"upper": 40}}),
        profiled("api", targets={"request_p99_ms": {"lower": 4}}),
    ]
    known, config = PolicyState(), settings(RAMA)
    for second in range(12):
        seen = snapshot(second, pods, cpus=48, usage_s={"web": 1.0 * second, "api": 1.0 * second})
        indicators = {"default/web": answering(second, 1.0), "default/api": answering(second, 0.0)}
        judged, known = evaluate_policy(
            msgspec.structs.replace(seen, indicators=indicators), config, known, seen.taken_at_ns
        )
    assert judged.advice is not None
    # 49.7 of 40 is 1.24 times, 9.9 of 4 is 2.5 times.
    assert judged.advice.cpu.regions[0].signals[0] == IndicatorState(
        name="request_p99_ms", current=pytest.approx(9.9), target=4.0
    )


def test_a_latency_that_is_not_known_any_more_takes_nothing_back_and_gives_nothing() -> None:
    web = profiled("web", targets={"request_p99_ms": {"upper": 40}})
    config, known, sizes = settings(RAMA), PolicyState(), []
    for second in range(80):
        seen = snapshot(second, [web], cpus=48, usage_s={"web": float(second)})
        last = answering(min(second, 8), 1.0)  # the endpoint hangs after 8 s
        seen = msgspec.structs.replace(seen, indicators={"default/web": last})
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
        sizes += share_sizes([judged])
    assert 4 < sizes[-1] < 44
    assert len(set(sizes[20:])) == 1


def test_a_pool_does_not_shrink_because_one_of_its_indicators_vanished() -> None:
    """Waits of 900 us against 460, at 30 % use: the pool grows. From 60 s on nobody tells how long the waits are."""
    known, found = PolicyState(), []
    for second in range(200):
        seen = snapshot(second, [pod("web", QoSLevel.SHARED)], cpus=48, usage_s={"web": 14.0 * second})
        times = msgspec.structs.replace(
            seen.node.per_cpu[0], user_ns=second * 3 * S // 10, idle_ns=second * 7 * S // 10
        )
        waited = {cpu: RunqLatency(sum_ns=second * 90_000_000, count=second * 100) for cpu in range(48)}
        node = msgspec.structs.replace(
            seen.node, per_cpu=dict.fromkeys(range(48), times), cpu_waits=waited if second < 60 else {}
        )
        seen = msgspec.structs.replace(seen, node=node)
        judged, known = evaluate_policy(seen, settings(RAMA), known, seen.taken_at_ns)
        found.append(judged)
    sizes = share_sizes(found)
    assert sizes[59:] == [44] * 141
    assert found[-1].advice is not None
    region = found[-1].advice.cpu.regions[0]
    assert [signal.name for signal in region.signals] == ["cpu_usage_ratio"]
    assert "cpu_sched_wait is not known any more, so it stays at 44.00" in region.reason.text


# --- quotas


QUOTA = """
advisor:
  policy: canonical
  reservedForAllocateCores: 0
  provision: {overlap: true, quota: true, sharePolicies: [dynamic-quota], dedicatedPolicies: [dynamic-quota]}
placing: {enableReclaimNumaBinding: true}
"""


def at_use(second: float, pods: Sequence[Pod], nodes: Topology, ratio: float, **use: float) -> Snapshot:
    """All CPUs used so much, pods as `use` says."""
    seen = snapshot(second, pods, cpus=nodes, usage_s={name: cores * second for name, cores in use.items()})
    busy = round(second * S * ratio)
    times = msgspec.structs.replace(seen.node.per_cpu[0], user_ns=busy, idle_ns=round(second * S) - busy)
    return msgspec.structs.replace(
        seen, node=msgspec.structs.replace(seen.node, per_cpu=dict.fromkeys(nodes.ids, times))
    )


def bound_to(made: Pod, numa: int) -> Pod:
    return msgspec.structs.replace(made, enhancements=Enhancements(numa_binding=True), bound_numa=(numa,))


def test_the_quota_of_a_numa_node_is_a_limit_of_the_pods_that_run_there() -> None:
    """The database has 8 CPUs of NUMA node 1; on 23 of the 24 there reclaimed pods may use 23 x (0.55 - 0.45) + 0.5 cores."""
    db = bound_to(pod("db", QoSLevel.DEDICATED, request=8), 1)
    near = [bound_to(pod(name, QoSLevel.RECLAIMED, request=cores), 1) for name, cores in (("n", 3), ("m", 1))]
    pods, nodes = [db, pod("b", QoSLevel.RECLAIMED, request=1), *near], topology(48, numa=2)
    known, config = PolicyState(), settings(QUOTA)
    for second in range(5):
        seen = at_use(second, pods, nodes, 0.45, db=4.0, b=9.0, n=0.4, m=0.1)
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
    advice = judged.advice
    assert advice is not None
    quota = {size.numa: size.quota_cores for size in advice.cpu.sizes if size.pool == "reclaim"}
    assert quota == {-1: None, 1: pytest.approx(23 * 0.1 + 0.5)}
    decided = {
        (d.cgroup, d.knob): d for d in compose_decisions(judged, seen, dict.fromkeys(seen.cgroups, frozenset(Knob)))
    }
    quotas = {cgroup: d.value for (cgroup, knob), d in decided.items() if knob is Knob.QUOTA}
    assert quotas == {"/n": "210000 100000", "/m": "70000 100000"}
    why = decided["/n", Knob.QUOTA].reason
    assert why.text.startswith(
        "Reclaimed pods may use 2.80 cores of NUMA node 1 together, and this container 2.10 by its weight."
    )
    assert "x (0.55 - 0.45) + 0.50" in why.text
    # Who is bound to no node cannot be held to a part of this one: it stays off, and has the CPUs of the other.
    assert decided["/b", Knob.CPUSET].value == "0-23"
    assert advice.reclaimable_cores == pytest.approx(24 + 2.8)


def test_a_quota_holds_all_reclaimed_pods_of_a_node_that_has_no_other() -> None:
    web, batch = bound_to(pod("web", QoSLevel.SHARED, request=4), 0), pod("b", QoSLevel.RECLAIMED)
    known, config, nodes = PolicyState(), settings(QUOTA), topology(16)
    for second in range(5):
        seen = at_use(second, [web, batch], nodes, 0.7, web=4.0, b=3.0)
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
    decided = compose_decisions(judged, seen, dict.fromkeys(seen.cgroups, frozenset(Knob)))
    assert judged.advice is not None
    assert judged.advice.reclaimable_cores == pytest.approx(16 * (0.8 - 0.7) + 3.0)
    assert {d.cgroup: d.value for d in decided if d.knob is Knob.QUOTA} == {"/b": "460000 100000"}


@pytest.mark.parametrize(
    ("bound", "places"),
    [((), [-1]), ((1,), [-1, 1]), ((0, 1), [0, 1])],
)
def test_under_latency_the_quotas_of_all_places_together_are_what_is_lent(
    bound: tuple[int, ...], places: list[int]
) -> None:
    web = [bound_to(pod(f"web{numa}", QoSLevel.SHARED, request=4), numa) for numa in bound]
    pods, nodes = [*web, pod("free", QoSLevel.SHARED), pod("b", QoSLevel.RECLAIMED)], topology(48, numa=2)
    known = PolicyState(advisor=AdvisorState(reclaimable_cores=41.75))
    judged, known = evaluate_policy(snapshot(1, pods, cpus=nodes), AgentConfig(), known, S)
    assert judged.advice is not None
    quotas = {size.numa: size.quota_cores for size in judged.advice.cpu.sizes if size.pool == "reclaim"}
    given = {numa: cores for numa, cores in quotas.items() if cores is not None}
    assert sorted(given) == places
    assert list(given.values()) == pytest.approx([41.75 / len(places)] * len(places))
    assert judged.advice.reclaimable_cores == 41.75


# --- inference


@pytest.mark.parametrize(
    ("strategy", "slow", "offset", "target"),
    [
        ("borwein_v2", 1.0, -0.2, 0.6),  # 49.7 of 20 ms: above all slots but the last
        ("borwein_v2", 0.0, 0.1, 0.9),  # 9.9 of 20 ms
        ("borwein_v3", 0.0, 0.5, 0.5),  # in the target's place
    ],
)
def test_a_latency_target_moves_the_target_of_utilisation(
    strategy: str, slow: float, offset: float, target: float
) -> None:
    slots = [{"below": 0.8, "offset": offset}, {"below": 1.2, "offset": 0.0}, {"below": 2.0, "offset": offset}]
    config = msgspec.convert(
        {**msgspec.yaml.decode(RAMA), "inference": {"strategy": strategy, "slots": slots}}, AgentConfig
    )
    web, known = profiled("web", targets={"request_p99_ms": {"upper": 20}}), PolicyState()
    for second in range(12):
        seen = snapshot(second, [web], cpus=48, usage_s={"web": float(second)}, idle_cpus=second % 2 == 0)
        half = CpuTimes(
            user_ns=second * S // 2, nice_ns=0, system_ns=0, idle_ns=second * S // 2, iowait_ns=0, irq_ns=0, softirq_ns=0,
            steal_ns=0,
        )  # fmt: skip
        node = msgspec.structs.replace(seen.node, per_cpu=dict.fromkeys(seen.topology.ids, half))
        seen = msgspec.structs.replace(seen, node=node, indicators={"default/web": answering(second, slow)})
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
    assert judged.advice is not None
    region = judged.advice.cpu.regions[0]
    assert IndicatorState(name="cpu_usage_ratio", current=0.5, target=target) in region.signals
    assert f"so the target is {target}, not 0.8" in region.reason.text
    assert region.reason.inputs["offset"] == offset


# --- service profiles


def test_nothing_is_lent_of_a_pod_whose_profile_says_so() -> None:
    exclusive = Enhancements(numa_binding=True, numa_exclusive=True)
    apart = msgspec.structs.replace(
        profiled("db", QoSLevel.DEDICATED, 8.0, disableReclaimLevel="Pod"), enhancements=exclusive, bound_numa=(0,)
    )
    lent = msgspec.structs.replace(apart, profile=ServiceProfile())
    config = settings("advisor: {policy: canonical}")
    lends, keeps = (
        story([each], config, range(0, 400, 31), cpus=topology(48, numa=2))[-1].advice for each in (lent, apart)
    )
    assert lends is not None
    assert keeps is not None
    # Its need is 4 CPUs of 24 at least; of the other pod reclaimed ones have what they always keep.
    assert [dict(s.overlap) for s in lends.cpu.sizes if s.numa == 0 and s.pool == "reclaim"] == [
        {"dedicated-default/db": 20}
    ]
    assert [dict(s.overlap) for s in keeps.cpu.sizes if s.numa == 0 and s.pool == "reclaim"] == [
        {"dedicated-default/db": 2}
    ]
    assert keeps.cpu.regions[0].reason.rule == "provision_not_reclaimable"
    assert lends.headroom is not None
    assert keeps.headroom is not None
    assert lends.headroom.cores_by_numa[0] > 2
    assert keeps.headroom.cores_by_numa[0] == 0.0
    assert "reclaim is off for default/db at level Pod" in keeps.headroom.reason.text


def test_a_profile_that_cannot_be_read_lends_nothing_and_says_so() -> None:
    profile, (problem,) = parse_service_profile({"dioptase.io/service-profile": '{"targets": {"cpi": {"upper": 0}}}'})
    assert profile == ServiceProfile(disable_reclaim_level="Pod")
    assert "$.targets[...].upper" in problem
    assert "until then nothing of the pod is lent" in problem
    said = '{"targets": {"cpi": {"upper": 1.2}}, "disableReclaimLevel": "Socket"}'
    found = parse_service_profile({"dioptase.io/service-profile": said})
    assert found == (ServiceProfile(targets={"cpi": IndicatorTarget(upper=1.2)}, disable_reclaim_level="Socket"), ())


def test_a_profile_goes_before_the_settings_of_offloading() -> None:
    config = settings("memory: {offloading: {default: {enable: false}}}")
    willing = profiled("web", memoryOffloading={"enable": True, "policy": "psi", "psiMaxProbe": 0.02})
    for each, count in ((willing, 1), (pod("web", QoSLevel.SHARED), 0)):
        known = PolicyState()
        for second in (0, 31):
            seen = with_memory(snapshot(second, [each], usage_s={"web": 0.0}))
            judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
        assert judged.memory is not None
        asked = [wish for wish in judged.memory.knob_requests if wish.knob.value == "memory.reclaim"]
        assert [int(wish.value) for wish in asked] == [int(0.02 * 8 * GIB)] * count


def with_memory(seen: Snapshot) -> Snapshot:
    stat = {"file": 6 * GIB, "file_mapped": 0, "anon": 2 * GIB, "inactive_file": 5 * GIB, "active_file": GIB}
    web = msgspec.structs.replace(
        seen.cgroups["/web"], memory_bytes=8 * GIB, memory_stat=stat, files_read_at_ns=seen.wall_time_ns,
        memory_pressure=Pressure(some_us=0, some_avg10=0.0, some_avg60=0.0),
    )  # fmt: skip
    node = msgspec.structs.replace(
        seen.node,
        memory_total_bytes=64 * GIB,
        meminfo={"SwapTotal": 0, "SwapFree": 0},
        files_read_at_ns=seen.wall_time_ns,
    )
    return msgspec.structs.replace(seen, node=node, cgroups={**seen.cgroups, "/web": web})


# --- power and overcommitment


POWER = """
power: {enable: true}
node:
  annotations: {power-alert: LEVEL, power-budget: "80", power-alert-time: "1970-01-01T00:00:00Z"}
"""


def drawing(seen: Snapshot, watts: float) -> Snapshot:
    """The same on a machine whose packages and memory draw that much together, evenly since it started."""
    spent = seen.taken_at_ns * watts / 1000
    power = {
        "package-0": round(spent * 0.75),
        "package-0/dram": round(spent * 0.25),
        "package-0/core": round(spent * 0.6),
    }
    return msgspec.structs.replace(seen, node=msgspec.structs.replace(seen.node, power_uj=power))


def powered(config: AgentConfig, rounds: Sequence[tuple[float, float]], pods: Sequence[Pod]) -> list[PolicyResult]:
    """Rounds at seconds of the given power; the counters stay straight lines."""
    known, found, spent, last = PolicyState(), [], 0.0, 0.0
    for at_s, watts in rounds:
        spent, last = spent + watts * (at_s - last) * 1e6, at_s
        seen = snapshot(at_s, pods, cpus=4, idle_cpus=False)
        seen = msgspec.structs.replace(seen, node=msgspec.structs.replace(seen.node, power_uj={"psys": round(spent)}))
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
        found.append(judged)
    return found


def test_an_alert_at_once_caps_power_and_the_answer_stands_until_the_next() -> None:
    config = settings(POWER.replace("LEVEL", "s0"))
    found = powered(config, [(1, 100), (2, 100), (3, 100), (10, 100), (12, 85)], [pod("web", QoSLevel.SHARED)])
    power = [one.node.power for one in found if one.node is not None]
    assert [each and each.kind for each in power] == [PowerActionKind.NOOP, *[PowerActionKind.CAP] * 4]
    assert power[0] is not None
    assert power[0].reason.rule == "power_unknown"  # the first round has nothing to subtract from
    assert [each and (each.at_ns, each.current_watts) for each in power[1:]] == [
        (3 * S, 100), (3 * S, 100), (3 * S, 100), (13 * S, 85),
    ]  # fmt: skip
    assert power[1] is not None
    assert (power[1].target_watts, power[1].reason.threshold) == (80, 80)


def test_a_slower_alert_evicts_so_many_reclaimed_pods() -> None:
    pods = [pod("web", QoSLevel.SHARED), *(pod(f"b{n}", QoSLevel.RECLAIMED) for n in range(10))]
    found = powered(settings(POWER.replace("LEVEL", "p0")), [(900, 100), (901, 100)], pods)
    assert found[1].node is not None
    power = found[1].node.power
    assert power is not None
    # 30 min less 901 s are left: 14 full minutes are one ten; 20 % too much / (e/2) = 14 % of 11 pods = 2.
    assert (power.kind, power.percent, power.count) == (PowerActionKind.EVICT, 14, 2)


def test_pods_leave_for_power_by_the_eviction_manager_each_answer_once() -> None:
    config = settings(
        POWER.replace("LEVEL", "p0") + "\neviction: {plugins: [node_power_pressure], burst: 1, intervalS: 0.5}"
    )
    pods = [
        pod("web", QoSLevel.SHARED, request=1),
        *(msgspec.structs.replace(pod(f"b{n}", QoSLevel.RECLAIMED, request=n), priority=n // 2) for n in range(4)),
    ]
    asked: list[str] = []
    known, memory = PolicyState(), EvictionState()
    for second in range(1700, 1709):
        here = [each for each in pods if each.key not in asked]
        seen = drawing(snapshot(second, here, cpus=4, idle_cpus=False), 160)
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
        assert judged.node is not None
        of = EvictionInputs(snapshot=seen, now_ns=seen.taken_at_ns, power=judged.node.power)
        found, memory = evict(of, memory, config.eviction)
        asked += [victim.pod for victim in found.victims]
        assert all("host under power pressure: The node draws 160 W" in v.reason.text for v in found.victims)
        assert all(victim.forced for victim in found.victims)
    # Half of five pods are three: the two of least priority, and of the others the one with the larger request; one a round,
    # of each priority the larger request first, and nobody else until the next answer, nine seconds later.
    assert asked == ["default/b1", "default/b0", "default/b3"]
    assert known.node is not None
    assert known.node.answered is not None
    assert (known.node.answered.count, known.node.answered.at_ns) == (3, 1702 * S)


@pytest.mark.parametrize(
    ("cpu", "memory", "bounds", "ratios"),
    [
        (
            1.0,
            2,
            {"cpu": "3", "memory": "3"},
            (1.59375, 1.171875),
        ),  # Katalyst's own case: 16 cores, 32 GiB, requests 4 and 8
        (1.0, 2, {"cpu": "1.3"}, (1.3, 1.0)),  # bounded by the node's own ratio; without one nothing is overcommitted
        (16.0, 30, {"cpu": "3", "memory": "3"}, (1.0, 1.0)),
    ],
)
def test_a_node_says_how_far_it_may_be_overcommitted(
    cpu: float, memory: int, bounds: dict[str, str], ratios: tuple[float, float]
) -> None:
    said = {f"katalyst.kubewharf.io/{name}_overcommit_ratio": value for name, value in bounds.items()}
    config = msgspec.convert(
        {"advisor": {"policy": "canonical"}, "overcommit": {"enable": True}, "node": {"annotations": said}}, AgentConfig
    )
    container = Container(name="web", cgroup="/web", cpu_request_cores=4.0, memory_request_bytes=8 * GIB)
    web = msgspec.structs.replace(pod("web", QoSLevel.SHARED), containers=(container,))
    known, found = PolicyState(), []
    for second in range(13):
        seen = snapshot(second, [web], cpus=16, usage_s={"web": cpu * second})
        held = msgspec.structs.replace(seen.cgroups["/web"], memory_stat={"anon": memory * GIB})
        node = msgspec.structs.replace(seen.node, memory_total_bytes=32 * GIB)
        seen = msgspec.structs.replace(seen, node=node, cgroups={**seen.cgroups, "/web": held})
        judged, known = evaluate_policy(seen, config, known, seen.taken_at_ns)
        assert judged.node is not None
        found.append(judged.node.overcommit)
    assert found[0] is None  # nothing to subtract from yet
    last = found[-1]
    assert last is not None
    assert (last.cpu_ratio, last.memory_ratio) == (pytest.approx(ratios[0]), pytest.approx(ratios[1]))
    assert len({id(each) for each in found[1:]}) == 2  # looked at every ten seconds


def test_what_is_off_says_nothing_and_remembers_nothing() -> None:
    seen = snapshot(1, [pod("web", QoSLevel.SHARED)])
    judged, known = evaluate_policy(seen, AgentConfig(), PolicyState(), seen.taken_at_ns)
    assert judged.node is None
    assert known.node is None


def test_an_alert_that_cannot_hold_is_refused_at_the_start() -> None:
    with pytest.raises(
        ConfigError, match=r"test.yaml: node.annotations: annotation power-budget: 'much' is not a number"
    ):
        settings(POWER.replace("LEVEL", "p0").replace('"80"', "much"))
    assert settings(POWER.replace("enable: true", "enable: false").replace('"80"', "much")).power.enable is False


def test_network_bandwidth_is_accounted_for_and_who_finds_none_is_rejected_with_the_numbers() -> None:
    def asking(name: str, mbit: int, qos: QoSLevel = QoSLevel.SHARED) -> Pod:
        made = pod(name, qos)
        container = msgspec.structs.replace(made.containers[0], net_bandwidth_mbit=mbit)
        return msgspec.structs.replace(made, containers=(container,))

    def seen(second: int, pods: Sequence[Pod]) -> Snapshot:
        card = Interface(received={}, sent={}, speed_mbit=1000)
        made = snapshot(second, pods, cpus=8)
        return msgspec.structs.replace(made, node=msgspec.structs.replace(made.node, interfaces={"eth0": card}))

    config = settings("advisor: {policy: canonical}\nknobs: {network: {ingressRate: 0.8, reservedMbit: 100}}\n")
    web, late = asking("web", 600), asking("late", 101)
    unbound = asking("db", 5000, QoSLevel.DEDICATED)
    first, known = evaluate_policy(seen(1, [web]), config, PolicyState(), S)
    assert first.advice is not None
    assert [(card.name, card.capacity, card.promised) for card in first.advice.cards] == [("eth0", 700, 600)]
    second, _ = evaluate_policy(seen(2, [late, web, unbound]), config, known, 2 * S)
    assert second.advice is not None
    assert [dict(card.pods) for card in second.advice.cards] == [{"default/web": 600}]
    assert {key: verdict.rule for key, verdict in second.advice.rejected.items()} == {
        "default/late": "no_bandwidth",
        "default/db": "dedicated_needs_numa_binding",
    }
    assert second.advice.rejected["default/late"].text == "No card has 101 Mbit/s left both ways: eth0 100 of 700."
