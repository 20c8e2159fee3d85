"""Objects that follow their node, and what becomes of a node whose agent is gone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.backoff import TokenBucket
from controller.kinds import (
    ControllerCnr,
    ControllerCnrSpec,
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
from kube.objects import KubeMetadata, KubeOwnerReference, PartialObjectMetadata, format_timestamp, parse_timestamp

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
    ("found", "how", "applied", "expected"),
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
    found: PartialObjectMetadata | None, how: LabelMirroring, applied: bool, expected: Any
) -> None:
    wanted = plan_mirror(NODE, found, how, applied=applied)
    assert (None if wanted is None else (wanted.apply, wanted.removed_labels)) == expected


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
        ([pod("a", ready=False), pod("b")], AgentState.READY),  # a new one beside one that ends
        ([pod("a", deletion_timestamp="2026-01-31T11:00:00Z")], AgentState.NOT_READY),
        ([pod("a", app="web")], AgentState.NOT_FOUND),
        ([ControllerPod(metadata=KubeMetadata(labels={"app": "agent"}))], AgentState.NOT_READY),
    ],
)
def test_how_an_agent_is(pods: list[ControllerPod], expected: AgentState) -> None:
    assert agent_states(["n1"], {"agent": parse_selector("app=agent")}, {"n1": pods}) == {("n1", "agent"): expected}


def tainted(minutes_ago: float | None, *others: dict[str, str]) -> ControllerCnr:
    own = with_own_taint(ControllerCnr(), NOW - minutes_ago * MIN) if minutes_ago is not None else []
    return ControllerCnr(spec=ControllerCnrSpec(taints=(*others, *own)))


def of(
    unwell: dict[str, AgentState],
    well: int = 20,
    *,
    cnrs: dict[str, ControllerCnr] | None = None,
    ago: dict[str, float] | None = None,
    fresh: bool = True,
) -> HealthResult:
    """One look at nodes that are unwell, since so many minutes ago, beside so many that are well."""
    states = {(node, "agent"): state for node, state in unwell.items()} | {
        (f"w{i}", "agent"): AgentState.READY for i in range(well)
    }
    there = {node: ControllerCnr() for node, _ in states} | (cnrs or {})
    before = HealthResult(
        at_s=NOW - 5, unhealthy_since_s={node: NOW - minutes * MIN for node, minutes in (ago or {}).items()}
    )
    return evaluate_agent_health(states, before, there, CONFIG, now_s=NOW, fresh=fresh)


GONE, SICK = AgentState.NOT_FOUND, AgentState.NOT_READY


@pytest.mark.parametrize(
    ("judged", "taint", "untaint", "evict"),
    [
        (of({}), (), (), ()),
        (of({"a": SICK}), (), (), ()),
        (of({"a": SICK}, ago={"a": 9.9}), (), (), ()),
        (of({"a": SICK}, ago={"a": 10}), ("a",), (), ()),
        (of({"a": GONE}, ago={"a": 19.9}, cnrs={"a": tainted(9.9)}), (), (), ()),  # it stays tainted
        (of({"a": GONE}, ago={"a": 20}, cnrs={"a": tainted(10)}), (), (), ("a",)),
        (of({"a": GONE}, ago={"a": 25}), ("a",), (), ("a",)),
        (of({"a": SICK, "b": GONE}, ago={"a": 11, "b": 15}), ("b", "a"), (), ()),
        (of({}, cnrs={"w0": tainted(30)}), (), ("w0",), ()),
        (of({}, cnrs={"elsewhere": tainted(30)}), (), ("elsewhere",), ()),
        # Whose time has come while many others are hit: it may be one and the same thing.
        (of({"a": GONE, **dict.fromkeys("bcdef", GONE)}, 15, ago={"a": 25}), ("a",), (), ()),
        (of({"a": GONE}, cnrs={"a": tainted(60)}), (), (), ()),  # a new leader does not evict at its first look
    ],
)
def test_what_becomes_of_nodes(judged: HealthResult, taint: Any, untaint: Any, evict: Any) -> None:
    assert (judged.halt, judged.taint, judged.untaint, judged.evict) == (HaltReason.NONE, taint, untaint, evict)


def test_a_node_whose_agent_turns_from_missing_to_not_ready_was_unwell_all_along() -> None:
    assert of({"a": SICK}, ago={"a": 7}).unhealthy_since_s == {"a": NOW - 7 * MIN}
    assert of({"a": SICK}).unhealthy_since_s == {"a": NOW}
    assert of({}, ago={"a": 7}).unhealthy_since_s == {}, "and a node that is well again, or gone, is forgotten"


def test_a_node_without_its_resource_is_not_tainted_and_its_pods_still_leave() -> None:
    states, before = (
        {("a", "x"): GONE, ("b", "x"): AgentState.READY},
        HealthResult(at_s=NOW, unhealthy_since_s={"a": NOW - 1200}),
    )
    judged = evaluate_agent_health(states, before, {}, CONFIG, now_s=NOW, fresh=True)
    assert (judged.taint, judged.evict) == ((), ("a",))


def test_one_of_two_agents_is_enough_to_be_unwell() -> None:
    states = {
        ("a", "x"): AgentState.READY,
        ("a", "y"): GONE,
        ("b", "x"): AgentState.READY,
        ("b", "y"): AgentState.READY,
    }
    assert evaluate_agent_health(
        states, HealthResult(at_s=NOW), {}, CONFIG, now_s=NOW, fresh=True
    ).unhealthy_since_s == {"a": NOW}


def test_what_is_old_moves_nobody_and_nothing_is_forgotten() -> None:
    judged = of({"a": GONE}, ago={"a": 25}, cnrs={"w0": tainted(30)}, fresh=False)
    assert (judged.halt, judged.taint, judged.untaint, judged.evict) == (HaltReason.STALE, (), (), ())
    assert judged.unhealthy_since_s == {"a": NOW - 25 * MIN + 5}, "and the time does not count"


def test_an_hour_in_which_nothing_was_heard_evicts_nobody_afterwards() -> None:
    unwell = {("a", "x"): SICK, ("b", "x"): AgentState.READY}
    judged = HealthResult(at_s=NOW, unhealthy_since_s={"a": NOW - 5 * MIN})
    for minute in range(1, 61):
        judged = evaluate_agent_health(unwell, judged, {}, CONFIG, now_s=NOW + minute * MIN, fresh=False)
    after = evaluate_agent_health(unwell, judged, {}, CONFIG, now_s=NOW + 60 * MIN + 5, fresh=True)
    assert (after.evict, after.unhealthy_since_s) == ((), {"a": NOW + 55 * MIN})


def test_a_process_that_stood_still_for_an_hour_counts_a_minute_of_it() -> None:
    unwell = {("a", "x"): SICK, ("b", "x"): AgentState.READY}
    judged = evaluate_agent_health(
        unwell, HealthResult(at_s=NOW, unhealthy_since_s={"a": NOW - 5 * MIN}), {}, CONFIG, now_s=NOW + 3600, fresh=True
    )
    assert judged.unhealthy_since_s == {"a": NOW + 3600 - 6 * MIN}


def test_a_new_leader_takes_a_tainted_node_to_be_unwell_for_as_long_as_that_took() -> None:
    assert of({"a": GONE}, cnrs={"a": tainted(60)}).unhealthy_since_s == {"a": NOW - 10 * MIN}


def test_too_many_at_once_halt_both_but_nobody_stays_tainted_for_it() -> None:
    unwell = {f"u{i}": GONE for i in range(6)}
    judged = of(unwell, well=20, ago=dict.fromkeys(unwell, 30), cnrs={"w0": tainted(30)})
    assert (judged.halt, judged.taint, judged.evict, judged.untaint) == (HaltReason.PARTIAL, (), (), ("w0",))
    assert len(judged.unhealthy_since_s) == 6, "time goes on"
    assert len(of(dict(list(unwell.items())[:5]), well=20, ago=dict.fromkeys(unwell, 30)).evict) == 5


@pytest.mark.parametrize(
    ("unwell", "nodes", "expected"),
    [(0, 0, HaltReason.NONE), (0, 9, HaltReason.NONE), (1, 1, HaltReason.FULL), (1, 2, HaltReason.NONE), (2, 2, HaltReason.FULL), (2, 3, HaltReason.NONE),
     (3, 4, HaltReason.PARTIAL), (3, 15, HaltReason.NONE), (3, 14, HaltReason.PARTIAL), (20, 100, HaltReason.NONE), (21, 100, HaltReason.PARTIAL),
     (100, 100, HaltReason.FULL)],
)  # fmt: skip
def test_disruption(unwell: int, nodes: int, expected: HaltReason) -> None:
    assert disruption_halt(unwell, nodes, 0.2) is expected


@pytest.mark.parametrize("nodes", range(1, 11))
def test_a_roll_out_of_the_agents_is_no_disaster_and_moves_nobody(nodes: int) -> None:
    """Each node in turn is without its agent for 90 s; of one to ten nodes a tenth is one node."""
    now_s, judged = NOW, HealthResult(at_s=NOW)
    names = [f"n{number}" for number in range(nodes)]
    for away in names:
        for _ in range(18):
            now_s += 5
            states = {(name, "x"): GONE if name == away else AgentState.READY for name in names}
            judged = evaluate_agent_health(
                states, judged, dict.fromkeys(names, ControllerCnr()), CONFIG, now_s=now_s, fresh=True
            )
            assert (judged.halt, judged.taint, judged.away, judged.evict) == (HaltReason.NONE, (), (), ())


@pytest.mark.parametrize(
    ("nodes", "most"),
    [(1, 0), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2), (7, 2), (8, 2), (9, 2), (10, 2), (15, 3), (20, 4)],
)
def test_how_many_agents_may_be_gone_for_their_nodes_to_be_emptied(nodes: int, most: int) -> None:
    emptied = []
    for gone in range(1, nodes + 1):
        unwell = {f"u{number}": GONE for number in range(gone)}
        judged = of(unwell, well=nodes - gone, ago=dict.fromkeys(unwell, 30))
        assert set(judged.evict) == set(judged.taint) in (set(), set(unwell))
        emptied += [gone] if judged.evict else []
    assert emptied == list(range(1, most + 1))


def test_those_that_have_just_gone_are_no_disaster_and_those_that_stay_away_are() -> None:
    unwell = {f"u{number}": GONE for number in range(5)}
    ago = {"u0": 12.0, **dict.fromkeys(list(unwell)[1:], 1.9)}
    assert (of(unwell, well=5, ago=ago).halt, of(unwell, well=5, ago=ago).taint) == (HaltReason.NONE, ("u0",))
    ago |= {"u1": 2.0, "u2": 2.0}
    assert (of(unwell, well=5, ago=ago).halt, of(unwell, well=5, ago=ago).taint) == (HaltReason.PARTIAL, ())


def test_reclaimed_pods_are_kept_away_for_as_long_as_the_agent_is_gone() -> None:
    assert of({"a": GONE}, ago={"a": 10}).away == ("a",)
    judged = of({"a": GONE}, ago={"a": 30}, cnrs={"a": tainted(20)})
    assert (judged.taint, judged.away) == ((), ("a",)), "an agent that is half alive may have promised anew"
    assert of({"a": GONE}, ago={"a": 9.9}).away == ()


def test_a_node_that_was_made_anew_under_its_name_was_never_unwell() -> None:
    judged = HealthResult(at_s=NOW, unhealthy_since_s={"a": NOW - 19 * MIN, "b": NOW - 19 * MIN, "c": NOW})
    found = keep_same_nodes(judged, {"a": "u1", "b": "u2", "c": "u3"}, {"a": "u1", "b": "u9"})
    assert found.unhealthy_since_s == {"a": NOW - 19 * MIN}


def test_taints_of_others_stay() -> None:
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
            st.lists(st.sampled_from([AgentState.READY, SICK, GONE]), min_size=3, max_size=3),
        )
    )
)
def test_only_who_was_unwell_without_a_break_leaves(rounds: list[tuple[float, list[AgentState]]]) -> None:
    now_s, judged = NOW, of({}, well=0)
    unbroken = dict.fromkeys("abc", 0.0)
    before_at: dict[str, float] = {}
    for passed_s, agents in rounds:
        now_s += passed_s
        states = {(node, "x"): state for node, state in zip("abc", agents, strict=True)}
        states |= {(f"w{i}", "x"): AgentState.READY for i in range(20)}
        judged = evaluate_agent_health(states, judged, {}, SOON, now_s=now_s, fresh=True)
        for (node, _), state in list(states.items())[:3]:
            before_at.setdefault(node, now_s) if state is not AgentState.READY else before_at.pop(node, None)
            unbroken[node] = now_s - before_at[node] if node in before_at else 0
        assert set(judged.evict) == {node for node, lasted_s in unbroken.items() if lasted_s >= 2 * MIN}


RECLAIMED = {"katalyst.kubewharf.io/qos_level": "reclaimed_cores"}


@pytest.mark.parametrize(
    ("one", "leaves"),
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
def test_who_leaves(one: ControllerPod, leaves: bool) -> None:
    assert reclaimed_victims([one]) == ([one] if leaves else [])


def test_a_node_that_was_tried_does_not_take_the_turns_of_the_others() -> None:
    turns, bucket = NodeRotation(), TokenBucket(0.2, 1, 0)
    picked = {at_s: turns.next_nodes(["a", "b", "c"], at_s, bucket) for at_s in range(0, 70, 5)}
    assert {at_s: nodes for at_s, nodes in picked.items() if nodes} == {
        0: ["a"],
        5: ["b"],
        10: ["c"],
        60: ["a"],
        65: ["b"],
    }


def test_a_node_that_did_not_want_it_for_a_while_is_new() -> None:
    turns = NodeRotation()
    assert [turns.next_nodes(nodes, at_s) for at_s, nodes in enumerate((["a"], ["a"], [], ["a"]))] == [
        ["a"],
        [],
        [],
        ["a"],
    ]
