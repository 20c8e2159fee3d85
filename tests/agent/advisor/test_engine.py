"""Whole cycles, from snapshot to decisions, on random machines, pods and loads: invariants of any configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.policy_result import PolicyResult
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.config.qrm import CpuPlacementConfig
from agent.qrm.decisions.cpu import compose_decisions, managed_cgroups
from agent.qrm.knobs.knob_files import KNOB_SPECS, UNSUPPORTED, canonical
from api.cpu import Topology, parse_cpu_list
from api.decision import Decision
from api.knobs import ONE_SHOT_KNOBS, Knob
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import Snapshot
from tests.agent.qrm.cpuset import builders
from tests.agent.qrm.cpuset.builders import S, dedicated, machine, machines, reclaimed, some_pods
from tests.builders.snapshots import snapshot

ROUNDS = 6
MANY = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
KNOBS = frozenset(knob for knob in KNOB_SPECS if (knob, "v2") not in UNSUPPORTED)


@st.composite
def configs(draw: st.DrawFn) -> AgentConfig:
    """Every policy and sharing mode, with reserves that fit and that do not."""
    advisor = {
        "policy": draw(st.sampled_from(["canonical", "latency"])),
        "enableReclaim": draw(st.integers(0, 4)) > 0,
        "minReclaimedCores": draw(st.sampled_from([None, 1, 8, 400])),
        "reservedForAllocateCores": draw(st.sampled_from([None, 0, 4, 400])),
        "provision": {"overlap": draw(st.booleans()), "quota": draw(st.booleans())},
    }
    return AgentConfig(
        advisor=msgspec.convert(advisor, AdvisorConfig),
        placing=CpuPlacementConfig(reserved_cpus=draw(st.sampled_from([0, 0, 2, 12]))),
    )


def rounds(
    pods: Sequence[Pod],
    topology: Topology,
    config: AgentConfig,
    cores: Mapping[str, float],
    down: Sequence[frozenset[str]] = (frozenset(),) * ROUNDS,
) -> list[tuple[Snapshot, PolicyResult, tuple[Decision, ...]]]:
    """What comes of steady use of so many cores by pod; the first container of those `down` in a cycle does not run."""
    state, result = PolicyState(), []
    for second in range(ROUNDS):
        current = snapshot(
            float(second),
            [without_first(pod) if pod.name in down[second] else pod for pod in pods],
            machine=topology,
            usage_s={name: used * second for name, used in cores.items()},
        )
        policy_result, state = evaluate_policy(current, config, state, current.taken_at_ns)
        result.append(
            (
                current,
                policy_result,
                compose_decisions(policy_result, current, dict.fromkeys(managed_cgroups(current.pods), KNOBS)),
            )
        )
    return result


def without_first(pod: Pod) -> Pod:
    waiting = tuple(replace(item, cgroup="") for item in pod.containers[:1])
    return replace(pod, containers=pod.containers[1:], waiting=waiting)


def check(
    current: Snapshot, result: PolicyResult, decisions: Sequence[Decision], config: AgentConfig, *, first: bool
) -> None:
    """Nothing exceeds the node, every pod has CPUs, pools are separate where required, and each knob has one valid value."""
    advice, placement, cpus = result.advice, result.placement, set(current.topology.ids)
    assert advice is not None
    assert placement is not None
    assert 0 <= advice.reclaimable_cores <= len(cpus)
    pools = {pool.name: set(pool.cpus) for pool in advice.pools}
    assert set().union(*pools.values()) <= cpus
    # In the first cycle QRM has not bound any pod to a NUMA node yet, and a pool of such pods has no size of its own.
    if config.advisor.policy == "canonical" and not config.advisor.provision.overlap and not first:
        retained = [name for name in pools if name == "reclaim" or name.startswith(("share", "isolation"))]
        for name in retained:
            if name != "reclaim" and len(cpus) >= 2 * len(retained) + 12:
                assert not pools[name] & pools.get("reclaim", set()), name
    assert all(placement.cpus.values())
    assert pools["reclaim"], "reclaimed pods are never without a CPU"
    text = [(decision.cgroup, decision.knob) for decision in decisions]
    assert len(text) == len(set(text))
    for decision in decisions:
        assert decision.knob in KNOBS
        assert decision.reason.text
        if decision.knob not in ONE_SHOT_KNOBS:
            canonical(decision.knob, decision.value)
        if decision.knob is Knob.CPUSET:
            assert set(parse_cpu_list(decision.value)) <= cpus
            assert decision.value


@given(
    some_pods(), machines(), configs(), st.lists(st.sampled_from([0.0, 0.3, 1.0, 4.0, 50.0]), min_size=12, max_size=12)
)
@MANY
def test_invariants_on_any_machine_with_any_pods(
    pods: tuple[Pod, ...], topology: Topology, config: AgentConfig, use: list[float]
) -> None:
    cores = {pod.name: used for pod, used in zip(pods, use, strict=False)}
    result = rounds(pods, topology, config, cores)
    for number, (current, policy_result, decisions) in enumerate(result):
        check(current, policy_result, decisions, config, first=number == 0)
    advice = result[-1][1].advice
    assert advice is not None
    # Share pools shrink in steps, and a pod without CPUs of its own is in one of them.
    shared = any(pod.qos is QoSLevel.SHARED or pod.key in advice.rejected for pod in pods if pod.qos.online)
    if config.advisor.policy == "canonical" and not shared:
        values = [{(d.cgroup, d.knob): d.value for d in decisions} for _, _, decisions in result[-2:]]
        assert values[0] == values[1], "steady use changes nothing"
    assert result[-1][0].taken_at_ns == ROUNDS * S


@given(
    some_pods(), machines(), configs(),
    st.lists(st.frozensets(st.sampled_from([f"p{number}" for number in range(12)])), min_size=ROUNDS, max_size=ROUNDS),
)  # fmt: skip
@MANY
def test_invariants_with_any_restarting_containers(
    pods: tuple[Pod, ...], topology: Topology, config: AgentConfig, down: list[frozenset[str]]
) -> None:
    for current, policy_result, decisions in (
        result := rounds(pods, topology, config, {pod.name: 1.0 for pod in pods}, down)
    ):
        check(current, policy_result, decisions, config, first=current is result[0][0])
        assert {decision.cgroup for decision in decisions} <= managed_cgroups(current.pods), "only existing cgroups"


def test_cpus_of_a_restarting_pod_stay_reserved_in_the_advice() -> None:
    config = msgspec.convert({"advisor": {"policy": "canonical", "minShareCores": 1}}, AgentConfig)
    pods = (dedicated("db", 9.0), builders.pod("web", cores=2.0), reclaimed("batch"))
    down = [frozenset({"db"} if number in (2, 3, 5) else ()) for number in range(ROUNDS)]
    result = rounds(pods, machine(1, 1, 1, 16, 1), config, {"db": 1.0, "web": 1.0, "batch": 1.0}, down)
    advices = [policy_result.advice for _, policy_result, _ in result if policy_result.advice is not None]
    sizes = [{size.pool: size.cpus for size in advice.cpu.sizes} for advice in advices]
    assert [each["dedicated-default/db"] for each in sizes] == [8] * ROUNDS
