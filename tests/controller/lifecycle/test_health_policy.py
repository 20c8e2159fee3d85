"""Objects that follow their node, and actions on a node whose agent is not ready."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.backoff import TokenBucket
from controller.kinds import (
    ControllerPod,
    ControllerPodSpec,
    ControllerPodStatus,
    StatusCondition,
)
from controller.label_selectors import parse_selector
from controller.lifecycle.health_policy import (
    AgentState,
    HaltReason,
    HealthResult,
    NodeRotation,
    agent_states,
    disruption_halt,
    evaluate_agent_health,
    keep_same_nodes,
    reclaimed_victims,
    with_own_taint,
    without_own_taint,
)
from controller.lifecycle.mirroring import LabelMirroring, find_orphans, plan_mirror
from controller.settings import HealthConfig
from kube.objects import (
    KubeMetadata,
    KubeOwnerReference,
    PartialObjectMetadata,
    TaintedObject,
    TaintsSpec,
    format_timestamp,
    parse_timestamp,
)

NOW = parse_timestamp("2026-01-31T12:00:00Z")
MIN = 60.0
CONFIG = HealthConfig()
SOON = HealthConfig(taint_after_s=MIN, evict_after_s=2 * MIN)
OWNER = KubeOwnerReference(
    api_version="v1", kind="Node", name="n1", uid="u1", controller=True, block_owner_deletion=True
)
NODE = PartialObjectMetadata(metadata=KubeMetadata(name="n1", uid="u1", labels={"zone": "a", "disk": "ssd"}))
APPLIED = {
    "metadata": {
        "labels": {"zone": "a", "disk": "ssd"},
        "ownerReferences": [
            {
                "apiVersion": "v1",
                "kind": "Node",
                "name": "n1",
                "uid": "u1",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
}


def mirrored(labels: dict[str, str], owner: KubeOwnerReference = OWNER) -> PartialObjectMetadata:
    return PartialObjectMetadata(metadata=KubeMetadata(name="n1", labels=labels, owner_references=(owner,)))


@pytest.mark.parametrize(
    ("current", "mode", "applied", "expected"),
    [
        (None, LabelMirroring.MERGED, False, (APPLIED, ())),
        (None, LabelMirroring.REPLACED, True, (APPLIED, ())),
        (mirrored({"zone": "a", "disk": "ssd"}), LabelMirroring.MERGED, True, None),
        (mirrored({"zone": "a", "disk": "ssd"}), LabelMirroring.MERGED, False, (APPLIED, ())),
        (mirrored({"zone": "a", "disk": "ssd", "own": "1"}), LabelMirroring.MERGED, True, None),
        (mirrored({"zone": "a", "disk": "ssd", "own": "1"}), LabelMirroring.REPLACED, True, (APPLIED, ("own",))),
        (mirrored({"zone": "b", "disk": "ssd"}), LabelMirroring.MERGED, True, (APPLIED, ())),
        (mirrored({"zone": "a"}), LabelMirroring.REPLACED, True, (APPLIED, ())),
        (
            mirrored({"zone": "a", "disk": "ssd"}, msgspec.structs.replace(OWNER, uid="old")),
            LabelMirroring.MERGED,
            True,
            (APPLIED, ()),
        ),
    ],
)
def test_objects_follow_their_node(
    current: PartialObjectMetadata | None, mode: LabelMirroring, applied: bool, expected: Any
) -> None:
    patch = plan_mirror(NODE, current, mode, applied=applied)
    assert (None if patch is None else (patch.apply, patch.removed_labels)) == expected


def test_objects_without_a_node() -> None:
    assert find_orphans({"n1"}, {"n2": NODE, "n1": NODE, "n0": NODE}) == ["n0", "n2"]


def pod(name: str, node: str = "n1", *, ready: bool = True, app: str = "agent", **metadata: Any) -> ControllerPod:
    condition = StatusCondition(type="Ready", status="True" if ready else "False")
    return ControllerPod(
        metadata=KubeMetadata(name=name, namespace="kat", labels={"app": app}, **metadata),
        spec=ControllerPodSpec(node_name=node),
        status=ControllerPodStatus(phase="Running", conditions=(condition,)),
    )


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([], AgentState.NOT_FOUND),
        ([pod("a")], AgentState.READY),
        ([pod("a", ready=False)], AgentState.NOT_READY),
        ([pod("a", ready=False), pod("b")], AgentState.READY),  # one pod replaces another
        ([pod("a", deletion_timestamp="2026-01-31T11:00:00Z")], AgentState.NOT_READY),
        ([pod("a", app="web")], AgentState.NOT_FOUND),
        ([ControllerPod(metadata=KubeMetadata(labels={"app": "agent"}))], AgentState.NOT_READY),
    ],
)
def test_the_state_of_an_agent(pods: list[ControllerPod], expected: AgentState) -> None:
    assert agent_states(["n1"], {"agent": parse_selector("app=agent")}, {"n1": pods}) == {("n1", "agent"): expected}


def tainted(minutes_ago: float | None, *others: dict[str, str]) -> TaintedObject:
    own = with_own_taint(TaintedObject(), NOW - minutes_ago * MIN) if minutes_ago is not None else []
    return TaintedObject(spec=TaintsSpec(taints=(*others, *own)))


def evaluate(
    unhealthy: dict[str, AgentState],
    healthy: int = 20,
    *,
    cnrs: dict[str, TaintedObject] | None = None,
    ago: dict[str, float] | None = None,
    fresh: bool = True,
) -> HealthResult:
    """Evaluate `unhealthy` nodes, since `ago` minutes, together with a number of healthy nodes."""
    states = {(node, "agent"): state for node, state in unhealthy.items()} | {
        (f"w{i}", "agent"): AgentState.READY for i in range(healthy)
    }
    all_cnrs = {node: TaintedObject() for node, _ in states} | (cnrs or {})
    before = HealthResult(
        at_s=NOW - 5, unhealthy_since_s={node: NOW - minutes * MIN for node, minutes in (ago or {}).items()}
    )
    return evaluate_agent_health(states, before, all_cnrs, CONFIG, now_s=NOW, fresh=fresh)


MISSING, SICK = AgentState.NOT_FOUND, AgentState.NOT_READY


@pytest.mark.parametrize(
    ("result", "taint", "untaint", "evict"),
    [
        (evaluate({}), (), (), ()),
        (evaluate({"a": SICK}), (), (), ()),
        (evaluate({"a": SICK}, ago={"a": 9.9}), (), (), ()),
        (evaluate({"a": SICK}, ago={"a": 10}), ("a",), (), ()),
        (evaluate({"a": MISSING}, ago={"a": 19.9}, cnrs={"a": tainted(9.9)}), (), (), ()),  # the taint stays
        (evaluate({"a": MISSING}, ago={"a": 20}, cnrs={"a": tainted(10)}), (), (), ("a",)),
        (evaluate({"a": MISSING}, ago={"a": 25}), ("a",), (), ("a",)),
        (evaluate({"a": SICK, "b": MISSING}, ago={"a": 11, "b": 15}), ("b", "a"), (), ()),
        (evaluate({}, cnrs={"w0": tainted(30)}), (), ("w0",), ()),
        (evaluate({}, cnrs={"elsewhere": tainted(30)}), (), ("elsewhere",), ()),
        # No eviction while many others have just become unhealthy: the cause may be the same.
        (evaluate({"a": MISSING, **dict.fromkeys("bcdef", MISSING)}, 15, ago={"a": 25}), ("a",), (), ()),
        (
            evaluate({"a": MISSING}, cnrs={"a": tainted(60)}),
            (),
            (),
            (),
        ),  # a new leader does not evict in its first evaluation
    ],
)
def test_actions_on_nodes(result: HealthResult, taint: Any, untaint: Any, evict: Any) -> None:
    assert (result.halt, result.taint, result.untaint, result.evict) == (HaltReason.NONE, taint, untaint, evict)


def test_a_node_whose_agent_turns_from_missing_to_not_ready_was_unhealthy_all_along() -> None:
    assert evaluate({"a": SICK}, ago={"a": 7}).unhealthy_since_s == {"a": NOW - 7 * MIN}
    assert evaluate({"a": SICK}).unhealthy_since_s == {"a": NOW}
    assert evaluate({}, ago={"a": 7}).unhealthy_since_s == {}, "the time of a recovered or deleted node is dropped"


def test_a_node_without_its_resource_is_not_tainted_and_its_pods_are_evicted() -> None:
    states, before = (
        {("a", "x"): MISSING, ("b", "x"): AgentState.READY},
        HealthResult(at_s=NOW, unhealthy_since_s={"a": NOW - 1200}),
    )
    result = evaluate_agent_health(states, before, {}, CONFIG, now_s=NOW, fresh=True)
    assert (result.taint, result.evict) == ((), ("a",))


def test_one_of_two_agents_makes_the_node_unhealthy() -> None:
    states = {
        ("a", "x"): AgentState.READY,
        ("a", "y"): MISSING,
        ("b", "x"): AgentState.READY,
        ("b", "y"): AgentState.READY,
    }
    assert evaluate_agent_health(
        states, HealthResult(at_s=NOW), {}, CONFIG, now_s=NOW, fresh=True
    ).unhealthy_since_s == {"a": NOW}


def test_stale_copies_halt_all_actions_and_keep_the_unhealthy_times() -> None:
    result = evaluate({"a": MISSING}, ago={"a": 25}, cnrs={"w0": tainted(30)}, fresh=False)
    assert (result.halt, result.taint, result.untaint, result.evict) == (HaltReason.STALE, (), (), ())
    assert result.unhealthy_since_s == {"a": NOW - 25 * MIN + 5}, "stale time does not count"


def test_an_hour_of_stale_copies_does_not_count_as_unhealthy() -> None:
    unhealthy = {("a", "x"): SICK, ("b", "x"): AgentState.READY}
    result = HealthResult(at_s=NOW, unhealthy_since_s={"a": NOW - 5 * MIN})
    for minute in range(1, 61):
        result = evaluate_agent_health(unhealthy, result, {}, CONFIG, now_s=NOW + minute * MIN, fresh=False)
    after = evaluate_agent_health(unhealthy, result, {}, CONFIG, now_s=NOW + 60 * MIN + 5, fresh=True)
    assert (after.evict, after.unhealthy_since_s) == ((), {"a": NOW + 55 * MIN})


def test_an_hour_without_evaluation_counts_as_a_minute() -> None:
    unhealthy = {("a", "x"): SICK, ("b", "x"): AgentState.READY}
    result = evaluate_agent_health(
        unhealthy,
        HealthResult(at_s=NOW, unhealthy_since_s={"a": NOW - 5 * MIN}),
        {},
        CONFIG,
        now_s=NOW + 3600,
        fresh=True,
    )
    assert result.unhealthy_since_s == {"a": NOW + 3600 - 6 * MIN}


def test_a_new_leader_assumes_the_taint_delay_for_a_tainted_node() -> None:
    assert evaluate({"a": MISSING}, cnrs={"a": tainted(60)}).unhealthy_since_s == {"a": NOW - 10 * MIN}


def test_too_many_unhealthy_nodes_halt_taints_and_evictions_but_not_untaints() -> None:
    unhealthy = {f"u{i}": MISSING for i in range(6)}
    result = evaluate(unhealthy, healthy=20, ago=dict.fromkeys(unhealthy, 30), cnrs={"w0": tainted(30)})
    assert (result.halt, result.taint, result.evict, result.untaint) == (HaltReason.PARTIAL, (), (), ("w0",))
    assert len(result.unhealthy_since_s) == 6, "unhealthy times continue"
    assert len(evaluate(dict(list(unhealthy.items())[:5]), healthy=20, ago=dict.fromkeys(unhealthy, 30)).evict) == 5


@pytest.mark.parametrize(
    ("unhealthy", "nodes", "expected"),
    [
        *((0, 0, HaltReason.NONE), (0, 9, HaltReason.NONE), (1, 1, HaltReason.FULL), (1, 2, HaltReason.NONE)),
        *((2, 2, HaltReason.FULL), (2, 3, HaltReason.NONE), (3, 4, HaltReason.PARTIAL), (3, 15, HaltReason.NONE)),
        *((3, 14, HaltReason.PARTIAL), (20, 100, HaltReason.NONE), (21, 100, HaltReason.PARTIAL)),
        (100, 100, HaltReason.FULL),
    ],
)
def test_disruption(unhealthy: int, nodes: int, expected: HaltReason) -> None:
    assert disruption_halt(unhealthy, nodes, 0.2) is expected


@pytest.mark.parametrize("nodes", range(1, 11))
def test_a_rollout_of_the_agents_causes_no_action(nodes: int) -> None:
    """The agent of one node after another is missing for 90 s; maxUnavailable 10% is one node of ten."""
    now_s, result = NOW, HealthResult(at_s=NOW)
    names = [f"n{number}" for number in range(nodes)]
    for missing_node in names:
        for _ in range(18):
            now_s += 5
            states = {(name, "x"): MISSING if name == missing_node else AgentState.READY for name in names}
            result = evaluate_agent_health(
                states, result, dict.fromkeys(names, TaintedObject()), CONFIG, now_s=now_s, fresh=True
            )
            assert (result.halt, result.taint, result.away, result.evict) == (HaltReason.NONE, (), (), ())


@pytest.mark.parametrize(
    ("nodes", "max_missing"),
    [(1, 0), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2), (7, 2), (8, 2), (9, 2), (10, 2), (15, 3), (20, 4)],
)
def test_maximum_number_of_missing_agents_with_evictions(nodes: int, max_missing: int) -> None:
    emptied = []
    for missing in range(1, nodes + 1):
        unhealthy = {f"u{number}": MISSING for number in range(missing)}
        result = evaluate(unhealthy, healthy=nodes - missing, ago=dict.fromkeys(unhealthy, 30))
        assert set(result.evict) == set(result.taint) in (set(), set(unhealthy))
        emptied += [missing] if result.evict else []
    assert emptied == list(range(1, max_missing + 1))


def test_only_lasting_absence_counts_as_disruption() -> None:
    unhealthy = {f"u{number}": MISSING for number in range(5)}
    ago = {"u0": 12.0, **dict.fromkeys(list(unhealthy)[1:], 1.9)}
    assert (evaluate(unhealthy, healthy=5, ago=ago).halt, evaluate(unhealthy, healthy=5, ago=ago).taint) == (
        HaltReason.NONE,
        ("u0",),
    )
    ago |= {"u1": 2.0, "u2": 2.0}
    assert (evaluate(unhealthy, healthy=5, ago=ago).halt, evaluate(unhealthy, healthy=5, ago=ago).taint) == (
        HaltReason.PARTIAL,
        (),
    )


def test_reclaimed_pods_are_kept_away_while_the_agent_is_missing() -> None:
    assert evaluate({"a": MISSING}, ago={"a": 10}).away == ("a",)
    result = evaluate({"a": MISSING}, ago={"a": 30}, cnrs={"a": tainted(20)})
    assert (result.taint, result.away) == ((), ("a",)), (
        "an agent that fails repeatedly may have reported resources again"
    )
    assert evaluate({"a": MISSING}, ago={"a": 9.9}).away == ()


def test_a_recreated_node_loses_its_unhealthy_time() -> None:
    result = HealthResult(at_s=NOW, unhealthy_since_s={"a": NOW - 19 * MIN, "b": NOW - 19 * MIN, "c": NOW})
    current = keep_same_nodes(result, {"a": "u1", "b": "u2", "c": "u3"}, {"a": "u1", "b": "u9"})
    assert current.unhealthy_since_s == {"a": NOW - 19 * MIN}


def test_taints_of_other_writers_are_kept() -> None:
    other = {
        "key": "node.kubernetes.io/unschedulable",
        "effect": "NoSchedule",
        "qosLevel": "shared_cores",
        "extra": "1",
    }
    cnr = tainted(5, other)
    assert without_own_taint(cnr) == [other]
    assert with_own_taint(cnr, NOW) == [
        other,
        {
            "key": "node.kubernetes.io/unschedulable",
            "effect": "NoSchedule",
            "qosLevel": "reclaimed_cores",
            "timeAdded": format_timestamp(NOW),
        },
    ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([MIN / 2, MIN]),
            st.lists(st.sampled_from([AgentState.READY, SICK, MISSING]), min_size=3, max_size=3),
        )
    )
)
def test_only_nodes_unhealthy_without_interruption_are_evicted_from(
    evaluations: list[tuple[float, list[AgentState]]],
) -> None:
    now_s, result = NOW, evaluate({}, healthy=0)
    unhealthy_s = dict.fromkeys("abc", 0.0)
    before_at: dict[str, float] = {}
    for passed_s, agents in evaluations:
        now_s += passed_s
        states = {(node, "x"): state for node, state in zip("abc", agents, strict=True)}
        states |= {(f"w{i}", "x"): AgentState.READY for i in range(20)}
        result = evaluate_agent_health(states, result, {}, SOON, now_s=now_s, fresh=True)
        for (node, _), state in list(states.items())[:3]:
            before_at.setdefault(node, now_s) if state is not AgentState.READY else before_at.pop(node, None)
            unhealthy_s[node] = now_s - before_at[node] if node in before_at else 0
        assert set(result.evict) == {node for node, lasted_s in unhealthy_s.items() if lasted_s >= 2 * MIN}


RECLAIMED = {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"}


@pytest.mark.parametrize(
    ("candidate", "leaves"),
    [
        (pod("a", annotations=RECLAIMED), True),
        (pod("a"), False),
        (pod("a", annotations={"katalyst.kubewharf.io/qos_level": "shared_cores"}), False),
        (pod("a", annotations={"katalyst.kubewharf.io/qos_level": "reclaimed"}), False),
        (pod("a", annotations=RECLAIMED, deletion_timestamp="2026-01-31T11:00:00Z"), False),
        (pod("a", annotations={**RECLAIMED, "kubernetes.io/config.mirror": "x"}), False),
        (pod("a", annotations=RECLAIMED, owner_references=(msgspec.structs.replace(OWNER, kind="DaemonSet"),)), False),
        (pod("a", annotations=RECLAIMED, owner_references=(msgspec.structs.replace(OWNER, kind="ReplicaSet"),)), True),
        (
            msgspec.structs.replace(pod("a", annotations=RECLAIMED), status=ControllerPodStatus(phase="Succeeded")),
            False,
        ),
        (msgspec.structs.replace(pod("a", annotations=RECLAIMED), status=ControllerPodStatus(phase="Pending")), True),
    ],
)
def test_reclaimed_victims(candidate: ControllerPod, leaves: bool) -> None:
    assert reclaimed_victims([candidate]) == ([candidate] if leaves else [])


def test_a_node_that_was_tried_does_not_use_the_rate_of_others() -> None:
    rotation = NodeRotation(TokenBucket(0.2, 1, 0))
    selected = {at_s: rotation.next_nodes(["a", "b", "c"], at_s) for at_s in range(0, 70, 5)}
    assert {at_s: nodes for at_s, nodes in selected.items() if nodes} == {
        0: ["a"],
        5: ["b"],
        10: ["c"],
        60: ["a"],
        65: ["b"],
    }


def test_a_node_that_was_not_listed_in_between_is_tried_at_once() -> None:
    rotation = NodeRotation()
    assert [rotation.next_nodes(nodes, at_s) for at_s, nodes in enumerate((["a"], ["a"], [], ["a"]))] == [
        ["a"],
        [],
        [],
        ["a"],
    ]
