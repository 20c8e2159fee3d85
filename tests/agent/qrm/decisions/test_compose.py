"""With static managers of the kubelet no cpuset is decided, and quotas limit reclaimed pods instead."""

from __future__ import annotations

import msgspec
import pytest

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.policy_result import PolicyResult
from agent.qrm.decisions.cpu import compose_decisions
from agent.qrm.decisions.knob_requests import KnobRequests
from api.advice import KnobRequest
from api.knobs import Knob, Reason
from api.snapshot import ComponentHealth, KubeletManagers, Snapshot
from tests.builders.pods import reclaimed, shared
from tests.builders.settings import parse_config
from tests.builders.snapshots import snapshot

CANONICAL = parse_config(
    b"advisor: {policy: canonical, reservedForAllocateCores: 0, rampUpS: 0}\nplacing: {rampUpS: 0}", "t"
)
PODS = (reclaimed("batch"), shared("web", cpu_request=2))
KNOBS = dict.fromkeys(("/batch", "/web"), frozenset({Knob.CPUSET, Knob.MEMS, Knob.WEIGHT, Knob.IDLE, Knob.QUOTA}))


def observe(kubelet: KubeletManagers | None) -> Snapshot:
    observed = snapshot(10, PODS, machine=8, usage_s={"web": 10, "batch": 1})
    return msgspec.structs.replace(observed, node=msgspec.structs.replace(observed.node, kubelet=kubelet))


def decided(kubelet: KubeletManagers | None) -> dict[tuple[str, Knob], str]:
    observed = observe(kubelet)
    result, _ = evaluate_policy(observed, CANONICAL, PolicyState(), observed.taken_at_ns)
    return {(decision.cgroup, decision.knob): decision.value for decision in compose_decisions(result, observed, KNOBS)}


def test_without_a_static_manager_cpusets_separate_the_pools() -> None:
    for kubelet in (None, KubeletManagers(cpu="none", memory="none")):
        decided_values = decided(kubelet)
        assert {knob for _, knob in decided_values} == {Knob.CPUSET}
        assert set(decided_values["/batch", Knob.CPUSET]) != set(decided_values["/web", Knob.CPUSET])


def test_with_a_static_manager_only_priority_and_quota_are_decided() -> None:
    pools, decided_values = decided(None), decided(KubeletManagers(cpu="static", memory="none"))
    assert {cgroup for cgroup, _ in decided_values} == {"/batch"}
    assert decided_values["/batch", Knob.IDLE] == "1"
    width = len(set(range(8))) - _width(pools["/web", Knob.CPUSET])
    quota, period = map(int, decided_values["/batch", Knob.QUOTA].split())
    assert quota / period == width, "as many cores as the reclaim pool would have"


def test_the_cpu_advice_has_precedence_over_other_requests_for_the_same_knob() -> None:
    observed = observe(KubeletManagers(cpu="static", memory="none"))
    result, _ = evaluate_policy(observed, CANONICAL, PolicyState(), observed.taken_at_ns)
    reason = Reason(rule="r", text="t")
    requests = tuple(
        KnobRequest(cgroup="/batch", knob=knob, value="1000 100000", reason=reason)
        for knob in (Knob.QUOTA, Knob.WEIGHT)
    )
    result = msgspec.structs.replace(result, knob_requests=KnobRequests(requests=requests))
    rules = {decision.knob: decision.reason.rule for decision in compose_decisions(result, observed, KNOBS)}
    assert rules[Knob.WEIGHT] == "r"
    assert rules[Knob.QUOTA] != "r"


def test_an_unreachable_kubelet_may_have_a_static_policy() -> None:
    static, unknown = (decided(KubeletManagers(cpu=policy, memory=policy)) for policy in ("static", "unknown"))
    assert unknown == static
    assert Knob.CPUSET not in {knob for _, knob in unknown}


def test_with_a_static_memory_manager_no_numa_nodes_are_decided() -> None:
    decided_values = decided(KubeletManagers(cpu="none", memory="static"))
    assert {knob for _, knob in decided_values} == {Knob.CPUSET}


def reclaimable_cores(kubelet: KubeletManagers | None, *, db_uses_s: float = 40) -> float:
    """Return the reclaimable cores of 12, with one pod on four exclusive CPUs and one that uses one core."""
    db = msgspec.structs.replace(shared("db", cpu_request=4), uid="uid-db")
    state = PolicyState()
    for second in (0, 10):
        used = {"web": float(second), "db": db_uses_s * second / 10}
        observed = snapshot(second, (*PODS, db), machine=12, usage_s=used)
        observed = msgspec.structs.replace(observed, node=msgspec.structs.replace(observed.node, kubelet=kubelet))
        result, state = evaluate_policy(observed, CANONICAL, state, observed.taken_at_ns)
    assert result.advice is not None
    return result.advice.reclaimable_cores


@pytest.mark.parametrize("db_uses_s", [0, 40])
def test_exclusive_cpus_are_never_reclaimed_and_do_not_count_as_demand(db_uses_s: float) -> None:
    none = KubeletManagers(cpu="static", memory="none")
    alone = KubeletManagers(cpu="static", memory="none", exclusive={"uid-db": {"db": (8, 9, 10, 11)}})
    without = reclaimable_cores(alone, db_uses_s=db_uses_s)
    assert without == 4, "of CPUs 0 to 7 the share pool keeps at least four"
    assert (reclaimable_cores(none, db_uses_s=0), reclaimable_cores(none, db_uses_s=40)) == (8, 5)


def test_containers_with_exclusive_cpus_get_no_decision() -> None:
    alone = KubeletManagers(cpu="static", memory="none", exclusive={"default/web": {"web": (6, 7)}})
    assert {cgroup for cgroup, _ in decided(alone)} == {"/batch"}


def _width(cpus: str) -> int:
    ends = [part.split("-") for part in cpus.split(",")]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in ends)


# --- without a current pod list


def run_two_cycles(*, fresh_pods: bool, later_use_s: float) -> tuple[PolicyResult, PolicyResult]:
    """Return the results of two cycles; in the second, online pods need less, and the pod list is fresh or stale."""
    first = snapshot(10, PODS, machine=16, usage_s={"web": 10, "batch": 1})
    before, state = evaluate_policy(first, CANONICAL, PolicyState(), first.taken_at_ns)
    middle = snapshot(20, PODS, machine=16, usage_s={"web": 10 + 80, "batch": 2})
    before, state = evaluate_policy(middle, CANONICAL, state, middle.taken_at_ns)
    then = snapshot(120, PODS, machine=16, usage_s={"web": 90 + later_use_s, "batch": 3})
    pods = ComponentHealth(name="pods", ok=fresh_pods, error="" if fresh_pods else "the list of pods is 40 s old")
    then = msgspec.structs.replace(then, sources=(pods,))
    after, _ = evaluate_policy(then, CANONICAL, state, then.taken_at_ns)
    return before, after


@pytest.mark.parametrize(("fresh_pods", "action"), [(True, "grow"), (False, "freeze")])
def test_canonical_does_not_grow_while_the_pod_list_is_stale(fresh_pods: bool, action: str) -> None:
    before, after = run_two_cycles(fresh_pods=fresh_pods, later_use_s=100)
    assert before.advice is not None
    assert after.advice is not None
    assert (after.advice.action, after.advice.reclaimable_cores > before.advice.reclaimable_cores) == (
        action,
        fresh_pods,
    )
    if not fresh_pods:
        assert after.advice.reason.rule == "pods_unknown"
        assert after.advice.cpu.sizes == before.advice.cpu.sizes


def test_canonical_shrinks_while_the_pod_list_is_stale() -> None:
    before, after = run_two_cycles(fresh_pods=False, later_use_s=1200)
    assert before.advice is not None
    assert after.advice is not None
    assert (after.advice.action, after.advice.reclaimable_cores < before.advice.reclaimable_cores) == ("shrink", True)
