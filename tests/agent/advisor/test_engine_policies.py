"""Configured policies in whole cycles: from pods, settings and snapshots to decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, log
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.policy_result import PolicyResult
from agent.config.config import AgentConfig
from agent.config.loader import ConfigError
from agent.eviction.eviction_inputs import EvictionInputs
from agent.eviction.manager import EvictionState
from agent.eviction.manager import evaluate_evictions as evict
from agent.qrm.decisions.cpu import compose_decisions
from api.advice import IndicatorState, PowerActionKind
from api.annotations import IndicatorTarget, ServiceProfile, parse_service_profile
from api.cpu import Topology
from api.decision import Decision
from api.knobs import Knob
from api.pod import Pod
from api.qos import Enhancements, QoSLevel
from api.snapshot import Interface, Pressure, RequestLatency, RunqLatency, Snapshot
from api.units import GIB
from tests.agent.advisor.cycles import advice_of, evaluate_cycles, settings
from tests.builders.nodes import cpu_times, topology
from tests.builders.pods import dedicated, pod, reclaimed, shared
from tests.builders.snapshots import snapshot

S = 1000000000
RAMA = """
advisor:
  policy: canonical
  reservedForAllocateCores: 0
  provision:
    sharePolicies: [rama]
"""
BOUNDS_S = (0.01, 0.02, 0.05, 0.1)


def profiled(name: str, qos: QoSLevel = QoSLevel.SHARED, request: float | None = None, **text: Any) -> Pod:
    built = pod(name, qos, cpu_request=request)
    return replace(built, profile=msgspec.convert(text, ServiceProfile))


def answering(second: int, slow: float, per_s: int = 100) -> RequestLatency:
    """Return requests per second; the slow part takes 20 to 50 ms, the others less than 10."""
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
    """Run one cycle per second; every pod uses one core."""
    cycles = [
        snapshot(
            second, pods, machine=cpus, usage_s={each.name: float(second) for each in pods},
            indicators={} if slow is None else {"default/web": answering(second, slow)},
        )
        for second in seconds
    ]  # fmt: skip
    return evaluate_cycles(cycles, config)[0]


def share_sizes(result: Sequence[PolicyResult]) -> list[int]:
    return [size.cpus for item in result if item.advice for size in item.advice.cpu.sizes if size.pool == "share"]


# --- a pod's own latency


def test_slow_requests_grow_the_pool_under_rama() -> None:
    web = profiled("web", targets={"request_p99_ms": {"upper": 20}})
    result = story([web], settings(RAMA), range(60), slow=1.0)
    # All requests within (20, 50] ms: the 99th percentile by Prometheus' rule is 20 + 30 x 0.99 = 49.7 ms.
    region = advice_of(result[-1]).cpu.regions[0]
    assert region.signals == (IndicatorState(name="request_p99_ms", current=pytest.approx(49.7), target=20.0),)
    assert "request_p99_ms is 49.7 ms, its target 20 ms" in region.reason.text
    sizes = share_sizes(result)
    step = ceil(0.05 * 44 * log(49.7 / 20))  # Kp x upper bound x error, in whole CPUs
    grown = sizes.index(sizes[0] + step)
    assert sizes[grown - 1 : grown + 3] == [sizes[0] + n * step for n in range(4)]
    assert sizes[-1] == 44  # all but what reclaimed pods always keep


@pytest.mark.parametrize(
    ("web", "slow", "why"),
    [
        (profiled("web", targets={"request_p99_ms": {"upper": 20}}), None, "no pod publishes a latency"),
        (profiled("web"), 1.0, "no pod has a target"),
        (profiled("web", targets={"request_p99_ms": {"upper": 49}}), 1.0, "within 5 % of the target"),
        (profiled("web", targets={"request_p99_ms": {"upper": 20}}), 0.001, "one request of a thousand is slow"),
    ],
)
def test_a_pool_stays_at_its_need(web: Pod, slow: float | None, why: str) -> None:
    assert set(share_sizes(story([web], settings(RAMA), range(40), slow=slow))) == {4}, why


def test_the_pod_furthest_above_its_target_decides_for_its_pool() -> None:
    pods = [
        profiled("web", targets={"request_p99_ms": {"upper": 40}}),
        profiled("api", targets={"request_p99_ms": {"lower": 4}}),
    ]
    cycles = [
        snapshot(
            second, pods, machine=48, usage_s={"web": 1.0 * second, "api": 1.0 * second},
            indicators={"default/web": answering(second, 1.0), "default/api": answering(second, 0.0)},
        )
        for second in range(12)
    ]  # fmt: skip
    advice = advice_of(evaluate_cycles(cycles, settings(RAMA))[0][-1])
    # 49.7 of 40 is 1.24 times, 9.9 of 4 is 2.5 times.
    assert advice.cpu.regions[0].signals[0] == IndicatorState(
        name="request_p99_ms", current=pytest.approx(9.9), target=4.0
    )


def test_a_missing_request_latency_holds_the_pool() -> None:
    web = profiled("web", targets={"request_p99_ms": {"upper": 40}})
    # The endpoint hangs after 8 s.
    cycles = [
        snapshot(
            second, [web], machine=48, usage_s={"web": float(second)},
            indicators={"default/web": answering(min(second, 8), 1.0)},
        )
        for second in range(80)
    ]  # fmt: skip
    sizes = share_sizes(evaluate_cycles(cycles, settings(RAMA))[0])
    assert 4 < sizes[-1] < 44
    assert len(set(sizes[20:])) == 1


def test_a_pool_does_not_shrink_because_one_of_its_indicators_vanished() -> None:
    """Waits of 900 us against 460, at 30 % use: the pool grows. From 60 s on run-queue latency is not measured."""
    cycles = []
    for second in range(200):
        current = snapshot(second, [shared("web")], machine=48, usage_s={"web": 14.0 * second})
        waited = {cpu: RunqLatency(sum_ns=second * 90_000_000, count=second * 100) for cpu in range(48)}
        node = replace(
            current.node,
            per_cpu=dict.fromkeys(range(48), cpu_times(0.3 * second, second)),
            cpu_waits=waited if second < 60 else {},
        )
        cycles.append(replace(current, node=node))
    result = evaluate_cycles(cycles, settings(RAMA))[0]
    sizes = share_sizes(result)
    assert sizes[59:] == [44] * 141
    region = advice_of(result[-1]).cpu.regions[0]
    assert [signal.name for signal in region.signals] == ["cpu_usage_ratio"]
    assert "cpu_sched_wait has no value any more, so it stays at 44.00" in region.reason.text


# --- quotas


QUOTA = """
advisor:
  policy: canonical
  reservedForAllocateCores: 0
  provision: {overlap: true, quota: true, sharePolicies: [dynamic-quota], dedicatedPolicies: [dynamic-quota]}
placing: {enableReclaimNumaBinding: true}
"""


def at_use(second: float, pods: Sequence[Pod], nodes: Topology, ratio: float, **use: float) -> Snapshot:
    """Return a snapshot in which all CPUs are this busy and pods use `use`."""
    current = snapshot(second, pods, machine=nodes, usage_s={name: cores * second for name, cores in use.items()})
    per_cpu = dict.fromkeys(nodes.ids, cpu_times(ratio * second, second))
    return replace(current, node=replace(current.node, per_cpu=per_cpu))


def all_decisions(result: PolicyResult, current: Snapshot) -> tuple[Decision, ...]:
    """Return the decisions on cgroups that have every knob."""
    return compose_decisions(result, current, dict.fromkeys(current.cgroups, frozenset(Knob)))


def bound_to(built: Pod, numa: int) -> Pod:
    return replace(built, enhancements=Enhancements(numa_binding=True), bound_numa=(numa,))


def test_the_quota_of_a_numa_node_limits_its_pods() -> None:
    """The database has 8 CPUs of NUMA node 1; on 23 of the 24 there reclaimed pods may use 23 x (0.55 - 0.45) + 0.5 cores."""
    db = bound_to(dedicated("db", cpu_request=8), 1)
    near = [bound_to(reclaimed(name, cpu_request=cores), 1) for name, cores in (("n", 3), ("m", 1))]
    pods, nodes = [db, reclaimed("b", cpu_request=1), *near], topology(48, sockets=2)
    cycles = [at_use(second, pods, nodes, 0.45, db=4.0, b=9.0, n=0.4, m=0.1) for second in range(5)]
    result = evaluate_cycles(cycles, settings(QUOTA))[0][-1]
    advice = advice_of(result)
    quota = {size.numa: size.quota_cores for size in advice.cpu.sizes if size.pool == "reclaim"}
    assert quota == {-1: None, 1: pytest.approx(23 * 0.1 + 0.5)}
    decided = {(d.cgroup, d.knob): d for d in all_decisions(result, cycles[-1])}
    quotas = {cgroup: d.value for (cgroup, knob), d in decided.items() if knob is Knob.QUOTA}
    assert quotas == {"/n": "210000 100000", "/m": "70000 100000"}
    why = decided["/n", Knob.QUOTA].reason
    assert why.text.startswith(
        "Reclaimed pods may use 2.80 cores of NUMA node 1 together, and this container 2.10 by its weight."
    )
    assert "x (0.55 - 0.45) + 0.50" in why.text
    # An unbound pod cannot be limited to a part of this node: it has only the CPUs of the other node.
    assert decided["/b", Knob.CPUSET].value == "0-23"
    assert advice.reclaimable_cores == pytest.approx(24 + 2.8)


def test_a_quota_limits_all_reclaimed_pods_of_a_node() -> None:
    web, batch = bound_to(shared("web", cpu_request=4), 0), reclaimed("b")
    cycles = [at_use(second, [web, batch], topology(16), 0.7, web=4.0, b=3.0) for second in range(5)]
    result = evaluate_cycles(cycles, settings(QUOTA))[0][-1]
    assert advice_of(result).reclaimable_cores == pytest.approx(16 * (0.8 - 0.7) + 3.0)
    quotas = {d.cgroup: d.value for d in all_decisions(result, cycles[-1]) if d.knob is Knob.QUOTA}
    assert quotas == {"/b": "460000 100000"}


@pytest.mark.parametrize(
    ("bound", "places"),
    [((), [-1]), ((1,), [-1, 1]), ((0, 1), [0, 1])],
)
def test_under_latency_all_quotas_add_up_to_reclaimable_cpu(bound: tuple[int, ...], places: list[int]) -> None:
    web = [bound_to(shared(f"web{numa}", cpu_request=4), numa) for numa in bound]
    pods, nodes = [*web, shared("free"), reclaimed("b")], topology(48, sockets=2)
    state = PolicyState(advisor=AdvisorState(reclaimable_cores=41.75))
    advice = advice_of(evaluate_cycles([snapshot(1, pods, machine=nodes)], AgentConfig(), state)[0][0])
    quotas = {size.numa: size.quota_cores for size in advice.cpu.sizes if size.pool == "reclaim"}
    given = {numa: cores for numa, cores in quotas.items() if cores is not None}
    assert sorted(given) == places
    assert list(given.values()) == pytest.approx([41.75 / len(places)] * len(places))
    assert advice.reclaimable_cores == 41.75


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
    web = profiled("web", targets={"request_p99_ms": {"upper": 20}})
    cycles = [
        replace(at_use(second, [web], topology(48), 0.5, web=1.0), indicators={"default/web": answering(second, slow)})
        for second in range(12)
    ]
    region = advice_of(evaluate_cycles(cycles, config)[0][-1]).cpu.regions[0]
    assert IndicatorState(name="cpu_usage_ratio", current=0.5, target=target) in region.signals
    assert f"so the target is {target} instead of 0.8" in region.reason.text
    assert region.reason.inputs["offset"] == offset


# --- service profiles


def test_a_profile_can_make_a_pod_unreclaimable() -> None:
    exclusive = Enhancements(numa_binding=True, numa_exclusive=True)
    apart = replace(
        profiled("db", QoSLevel.DEDICATED, 24.0, disableReclaimLevel="Pod"), enhancements=exclusive, bound_numa=(0,)
    )
    reclaimable_cores = replace(apart, profile=ServiceProfile())
    config = settings("advisor: {policy: canonical}")
    reclaimable, keeps = (
        advice_of(story([each], config, range(0, 400, 31), cpus=topology(48, sockets=2))[-1])
        for each in (reclaimable_cores, apart)
    )
    # Its need is 4 CPUs of 24 at least; of the other pod reclaimed ones have what they always keep.
    for advice, cpus in ((reclaimable, 20), (keeps, 2)):
        overlaps = [dict(s.overlap) for s in advice.cpu.sizes if s.numa == 0 and s.pool == "reclaim"]
        assert overlaps == [{"dedicated-default/db": cpus}]
    assert keeps.cpu.regions[0].reason.rule == "provision_not_reclaimable"
    assert reclaimable.headroom is not None
    assert keeps.headroom is not None
    assert reclaimable.headroom.cores_by_numa[0] > 2
    assert keeps.headroom.cores_by_numa[0] == 0.0
    assert "reclaim is disabled for default/db at level Pod" in keeps.headroom.reason.text


def test_an_unreadable_profile_makes_its_pod_unreclaimable_with_a_problem() -> None:
    profile, (problem,) = parse_service_profile({"dioptase.io/service-profile": '{"targets": {"cpi": {"upper": 0}}}'})
    assert profile == ServiceProfile(disable_reclaim_level="Pod")
    assert "$.targets[...].upper" in problem
    assert "until then nothing of the pod is reclaimed" in problem
    text = '{"targets": {"cpi": {"upper": 1.2}}, "disableReclaimLevel": "Socket"}'
    result = parse_service_profile({"dioptase.io/service-profile": text})
    assert result == (ServiceProfile(targets={"cpi": IndicatorTarget(upper=1.2)}, disable_reclaim_level="Socket"), ())


def test_a_profile_takes_precedence_over_offloading_settings() -> None:
    config = settings("memory: {offloading: {default: {enable: false}}}")
    willing = profiled("web", memoryOffloading={"enable": True, "policy": "psi", "psiMaxProbe": 0.02})
    for each, count in ((willing, 1), (shared("web"), 0)):
        cycles = [with_memory(snapshot(second, [each], usage_s={"web": 0.0})) for second in (0, 31)]
        result = evaluate_cycles(cycles, config)[0][-1]
        assert result.memory is not None
        requests = [request for request in result.memory.knob_requests if request.knob.value == "memory.reclaim"]
        assert [int(request.value) for request in requests] == [int(0.02 * 8 * GIB)] * count


def with_memory(current: Snapshot) -> Snapshot:
    stat = {"file": 6 * GIB, "file_mapped": 0, "anon": 2 * GIB, "inactive_file": 5 * GIB, "active_file": GIB}
    web = replace(
        current.cgroups["/web"], memory_bytes=8 * GIB, memory_stat=stat, files_read_at_ns=current.wall_time_ns,
        memory_pressure=Pressure(some_us=0, some_avg10=0.0, some_avg60=0.0),
    )  # fmt: skip
    node = replace(
        current.node,
        memory_total_bytes=64 * GIB,
        meminfo={"SwapTotal": 0, "SwapFree": 0},
        files_read_at_ns=current.wall_time_ns,
    )
    return replace(current, node=node, cgroups={**current.cgroups, "/web": web})


# --- power and overcommitment


POWER = """
power: {enable: true}
node:
  annotations: {power-alert: LEVEL, power-budget: "80", power-alert-time: "1970-01-01T00:00:00Z"}
"""


def drawing(current: Snapshot, watts: float, config: AgentConfig) -> Snapshot:
    """Return the snapshot of a machine whose packages and memory have drawn this power evenly since boot, with the
    annotations of the settings."""
    spent = current.taken_at_ns * watts / 1000
    power = {
        "package-0": round(spent * 0.75),
        "package-0/dram": round(spent * 0.25),
        "package-0/core": round(spent * 0.6),
    }
    return replace(current, node=replace(current.node, power_uj=power, annotations=config.node.annotations))


def powered(config: AgentConfig, cycles: Sequence[tuple[float, float]], pods: Sequence[Pod]) -> list[PolicyResult]:
    """Run cycles at these seconds with the given power; the counters grow linearly."""
    shots, spent, last = [], 0.0, 0.0
    for at_s, watts in cycles:
        spent, last = spent + watts * (at_s - last) * 1e6, at_s
        current = snapshot(at_s, pods, machine=4, idle=False)
        node = replace(current.node, power_uj={"psys": round(spent)}, annotations=config.node.annotations)
        shots.append(replace(current, node=node))
    return evaluate_cycles(shots, config)[0]


def test_an_urgent_alert_caps_power_until_the_next_answer() -> None:
    config = settings(POWER.replace("LEVEL", "s0"))
    result = powered(config, [(1, 100), (2, 100), (3, 100), (10, 100), (12, 85)], [shared("web")])
    power = [item.node.power for item in result if item.node is not None]
    assert [each and each.kind for each in power] == [PowerActionKind.NOOP, *[PowerActionKind.CAP] * 4]
    assert power[0] is not None
    assert power[0].reason.rule == "power_unknown"  # the first cycle has nothing to subtract from
    assert [each and (each.at_ns, each.current_watts) for each in power[1:]] == [
        (3 * S, 100), (3 * S, 100), (3 * S, 100), (13 * S, 85),
    ]  # fmt: skip
    assert power[1] is not None
    assert (power[1].target_watts, power[1].reason.threshold) == (80, 80)


def test_a_slower_alert_evicts_so_many_reclaimed_pods() -> None:
    pods = [shared("web"), *(reclaimed(f"b{n}") for n in range(10))]
    result = powered(settings(POWER.replace("LEVEL", "p0")), [(900, 100), (901, 100)], pods)
    assert result[1].node is not None
    power = result[1].node.power
    assert power is not None
    # 30 min less 901 s are left: 14 full minutes are one ten; 20 % too much / (e/2) = 14 % of 11 pods = 2.
    assert (power.kind, power.percent, power.count) == (PowerActionKind.EVICT, 14, 2)


def test_the_eviction_manager_evicts_once_per_power_answer() -> None:
    config = settings(
        POWER.replace("LEVEL", "p0") + "\neviction: {plugins: [node_power_pressure], burst: 1, intervalS: 0.5}"
    )
    pods = [
        shared("web", cpu_request=1),
        *(replace(reclaimed(f"b{n}", cpu_request=n), priority=n // 2) for n in range(4)),
    ]
    requests: list[str] = []
    state, memory = PolicyState(), EvictionState()
    for second in range(1700, 1709):
        here = [each for each in pods if each.key not in requests]
        current = drawing(snapshot(second, here, machine=4, idle=False), 160, config)
        policy_result, state = evaluate_policy(current, config, state, current.taken_at_ns)
        assert policy_result.node is not None
        of = EvictionInputs(snapshot=current, now_ns=current.taken_at_ns, power=policy_result.node.power)
        result, memory = evict(of, memory, config.eviction)
        requests += [victim.pod for victim in result.victims]
        assert all("host under power pressure: The node draws 160 W" in v.reason.text for v in result.victims)
        assert all(victim.forced for victim in result.victims)
    # Half of five pods are three: the two of least priority, and of the others the one with the larger request; one a cycle,
    # of each priority the larger request first, and no further pod until the next answer, nine seconds later.
    assert requests == ["default/b1", "default/b0", "default/b3"]
    assert state.node is not None
    assert state.node.last_action is not None
    assert (state.node.last_action.count, state.node.last_action.at_ns) == (3, 1702 * S)


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
def test_overcommit_ratios_of_a_node(
    cpu: float, memory: int, bounds: dict[str, str], ratios: tuple[float, float]
) -> None:
    text = {f"katalyst.kubewharf.io/{name}_overcommit_ratio": value for name, value in bounds.items()}
    config = msgspec.convert({"advisor": {"policy": "canonical"}, "overcommit": {"enable": True}}, AgentConfig)
    web, cycles = shared("web", cpu_request=4.0, memory_request=8 * GIB), []
    for second in range(13):
        current = snapshot(second, [web], machine=16, usage_s={"web": cpu * second})
        held = replace(current.cgroups["/web"], memory_stat={"anon": memory * GIB})
        node = replace(current.node, memory_total_bytes=32 * GIB, annotations=text)
        cycles.append(replace(current, node=node, cgroups={**current.cgroups, "/web": held}))
    result = [item.node.overcommit for item in evaluate_cycles(cycles, config)[0] if item.node is not None]
    assert len(result) == 13
    assert result[0] is None  # nothing to subtract from yet
    last = result[-1]
    assert last is not None
    assert (last.cpu_ratio, last.memory_ratio) == (pytest.approx(ratios[0]), pytest.approx(ratios[1]))
    assert len({id(each) for each in result[1:]}) == 2  # looked at every ten seconds


def test_disabled_advice_has_no_result_and_no_state() -> None:
    (result,), state = evaluate_cycles([snapshot(1, [shared("web")])], AgentConfig())
    assert result.node is None
    assert state.node is None


def test_an_invalid_alert_is_rejected_at_the_start() -> None:
    with pytest.raises(
        ConfigError, match=r"test.yaml: node.annotations: annotation power-budget: 'much' is not a number"
    ):
        settings(POWER.replace("LEVEL", "p0").replace('"80"', "much"))
    assert settings(POWER.replace("enable: true", "enable: false").replace('"80"', "much")).power.enable is False


def test_network_bandwidth_is_allocated_and_a_pod_without_any_is_rejected_with_the_numbers() -> None:
    def asking(name: str, mbit: int, qos: QoSLevel = QoSLevel.SHARED) -> Pod:
        built = pod(name, qos)
        container = replace(built.containers[0], net_bandwidth_mbit=mbit)
        return replace(built, containers=(container,))

    def current(second: int, pods: Sequence[Pod]) -> Snapshot:
        card = Interface(received={}, sent={}, speed_mbit=1000)
        built = snapshot(second, pods, machine=8)
        return replace(built, node=replace(built.node, interfaces={"eth0": card}))

    config = settings("advisor: {policy: canonical}\nknobs: {network: {ingressRate: 0.8, reservedMbit: 100}}\n")
    web, late = asking("web", 600), asking("late", 101)
    unbound = asking("db", 5000, QoSLevel.DEDICATED)
    cycles = [current(1, [web]), current(2, [late, web, unbound])]
    first, second = (advice_of(result) for result in evaluate_cycles(cycles, config)[0])
    assert [(card.name, card.capacity, card.allocated_mbit) for card in first.cards] == [("eth0", 700, 600)]
    assert [dict(card.pods) for card in second.cards] == [{"default/web": 600}]
    assert {key: reason.rule for key, reason in second.rejected.items()} == {
        "default/late": "no_bandwidth",
        "default/db": "dedicated_needs_numa_binding",
    }
    assert (
        second.rejected["default/late"].text
        == "No network card has 101 Mbit/s left in both directions: eth0 100 of 700."
    )
