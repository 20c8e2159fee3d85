"""Guarded rollouts: canaries get content first, a rise of evictions or unready agents pauses the rollout, and a change of the
object ends the pause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.kcc.rollout_guard import NodeEviction, RolloutGuard
from controller.kcc.rollout_plan import RolloutInputs, RolloutPlan, plan_rollout
from controller.kinds import Cnc, CncStatus
from kube.objects import UnstructuredObject
from tests.controller.kcc.test_kcc import ALLOWED, GVR, NOW, config_object, entry, node

OLD, NEW, NEWER = {"x": 1}, {"x": 2}, {"x": 3}
KEY = "kat/g"
SOAK_S = 120.0


class Rollout:
    """A kind with one object whose plans are carried out, on nodes n00, n01 and so on."""

    def __init__(self, nodes: int, config: object = OLD) -> None:
        self.nodes: dict[str, Cnc] = {f"n{number:02}": node("a", entry("g", config)) for number in range(nodes)}
        self.object = config_object("g", config=config)
        self.evictions: list[NodeEviction] = []
        self.unready_since_s: dict[str, float] = {}
        self.now_s = NOW
        self.paused: list[str] = []
        self.unreadable: Mapping[str, str] = {}
        self.run()

    def change(self, config: object, **spec: Any) -> None:
        """Change the object."""
        self.object = msgspec.structs.replace(self.object, spec={**spec, "config": config})

    def run(self, seconds: float = 0.0) -> RolloutPlan:
        """Plan after so many seconds and carry the plan out, until nothing changes."""
        self.now_s += seconds
        for _ in range(5):
            result = self.plan()
            self.paused += result.paused.values()
            if not (result.entries or result.statuses):
                return result
            for name, new in result.entries.items():
                self.nodes[name] = msgspec.structs.replace(
                    self.nodes[name], status=CncStatus(katalyst_custom_config_list=() if new is None else (new,))
                )
            status = {**self.object.status, **result.statuses.get(KEY, {})}
            self.object = UnstructuredObject(metadata=self.object.metadata, spec=self.object.spec, status=status)
        raise AssertionError("the plan does not become empty")

    def plan(self) -> RolloutPlan:
        guard = RolloutGuard(
            canary="10%", soak_s=SOAK_S, evictions=tuple(self.evictions), unready_since_s=self.unready_since_s
        )
        inputs = RolloutInputs(
            gvr=GVR,
            allowed=ALLOWED,
            objects={KEY: self.object},
            unreadable=self.unreadable,
            nodes=self.nodes,
            guard=guard,
        )
        return plan_rollout(inputs, self.now_s)

    def having(self, config: object) -> list[str]:
        expected = entry("g", config)["hash"]
        return [
            name for name, cnc in self.nodes.items() if cnc.status.katalyst_custom_config_list[0]["hash"] == expected
        ]

    @property
    def condition(self) -> Mapping[str, Any]:
        (condition,) = [each for each in self.object.status["conditions"] if each["type"] == "RolledOut"]
        return condition

    @property
    def stage(self) -> str:
        return str(self.condition["reason"])

    def evict(self, name: str, pods: int) -> None:
        self.evictions.append(NodeEviction(self.now_s, name, pods))


def test_canaries_come_first_and_the_others_after_two_quiet_minutes() -> None:
    rollout = Rollout(30)
    assert (rollout.stage, rollout.condition["status"]) == ("Complete", "True")
    rollout.change(NEW)
    result = rollout.run()
    assert rollout.having(NEW) == ["n00", "n01", "n02"]
    assert (rollout.stage, rollout.condition["status"]) == ("CanarySoaking", "False")
    assert rollout.condition["message"] == (
        "3 of 30 nodes have this content. The others get it after 120 s, unless evictions or unready agents rise"
    )
    assert rollout.object.status["canaryNodes"] == 3
    assert result.wake_at_s == rollout.now_s + 5
    rollout.run(SOAK_S - 1)
    assert len(rollout.having(NEW)) == 3
    result = rollout.run(1)
    assert len(rollout.having(NEW)) == 30
    assert (rollout.stage, rollout.condition["status"], result.wake_at_s) == ("Complete", "True", None)


@pytest.mark.parametrize(("nodes", "canaries"), [(1, 1), (2, 1), (9, 1), (10, 1), (29, 2), (60, 6)])
def test_there_is_at_least_one_canary(nodes: int, canaries: int) -> None:
    rollout = Rollout(nodes)
    rollout.change(NEW)
    rollout.run()
    assert len(rollout.having(NEW)) == canaries
    assert rollout.stage == ("Complete" if nodes == 1 else "CanarySoaking")


def test_a_wrong_threshold_evicts_on_the_canaries_only() -> None:
    rollout = Rollout(30)
    rollout.change(NEW)
    rollout.run()
    rollout.now_s += 20
    rollout.evict("n00", 1)
    rollout.evict("n01", 2)
    result = rollout.run()
    assert (rollout.stage, rollout.condition["status"]) == ("EvictionsRose", "False")
    assert rollout.condition["message"] == (
        "paused: 3 pods were evicted on the 3 nodes with the new content, 0 on the 27 others. Correct the content or apply the "
        "previous one, or set spec.updateStrategy.rollingUpdate.canary: 100% to continue"
    )
    assert rollout.paused == [rollout.condition["message"]], "one event"
    for _ in range(100):
        rollout.run(60)
    assert (len(rollout.having(NEW)), len(rollout.paused), result.wake_at_s) == (3, 1, None)


@pytest.mark.parametrize(
    ("evictions", "stage"),
    [
        ({"n00": 2}, "CanarySoaking"),
        ({"n00": 3}, "EvictionsRose"),
        ({"n10": 30}, "CanarySoaking"),
        # As many on every node: batch work is short everywhere, and the content is not the reason.
        ({f"n{number:02}": 2 for number in range(30)}, "CanarySoaking"),
        ({f"n{number:02}": 3 if number < 3 else 1 for number in range(30)}, "EvictionsRose"),
    ],
)
def test_evictions_are_compared_with_the_other_nodes(evictions: dict[str, int], stage: str) -> None:
    rollout = Rollout(30)
    rollout.evict("n00", 50)
    rollout.now_s += 60
    rollout.change(NEW)
    rollout.run()
    rollout.now_s += 30
    for name, pods in evictions.items():
        rollout.evict(name, pods)
    rollout.run()
    assert rollout.stage == stage, "evictions before the rollout do not count"


@pytest.mark.parametrize(
    ("before_transition_s", "stage"),
    [(-0.1, "EvictionsRose"), (0.0, "EvictionsRose"), (9.0, "EvictionsRose"), (30.0, "CanarySoaking")],
)
def test_evictions_that_are_observed_while_the_stage_changes_count(before_transition_s: float, stage: str) -> None:
    """The canaries have the content some seconds before the controller observes it, and their evictions too."""
    rollout = Rollout(10)
    rollout.change(NEW)
    rollout.run(60.3)
    rollout.evictions.append(NodeEviction(rollout.now_s - before_transition_s, "n00", 3))
    rollout.run(5)
    assert rollout.stage == stage


@pytest.mark.parametrize(
    ("since_s", "unready", "stage"),
    [
        (10, ["n00"], "AgentsNotReady"),
        (50, ["n00"], "CanarySoaking"),
        (-10, ["n00"], "CanarySoaking"),
        (10, ["n20"], "CanarySoaking"),
        (10, [f"n{number:02}" for number in range(30)], "CanarySoaking"),
    ],
)
def test_agents_that_are_not_ready_pause_a_rollout(since_s: float, unready: list[str], stage: str) -> None:
    """For half a minute, and since it began: a rolling upgrade of all agents is no reason."""
    rollout = Rollout(30)
    rollout.change(NEW)
    rollout.run()
    rollout.unready_since_s = dict.fromkeys(unready, rollout.now_s + since_s)
    rollout.run(60)
    assert rollout.stage == stage


def test_the_rest_of_the_rollout_is_watched_too() -> None:
    rollout = Rollout(30)
    rollout.change(NEW)
    rollout.run()
    rollout.now_s += SOAK_S
    result = rollout.plan()
    some = dict(list(result.entries.items())[:10])
    status = {**rollout.object.status, **result.statuses[KEY]}
    rollout.object = UnstructuredObject(metadata=rollout.object.metadata, spec=rollout.object.spec, status=status)
    for name in some:
        rollout.nodes[name] = node("a", entry("g", NEW))
    rollout.now_s += 5
    rollout.evict("n05", 4)
    rollout.run()
    assert (rollout.stage, len(rollout.having(NEW))) == ("EvictionsRose", 13)


def paused_rollout() -> Rollout:
    rollout = Rollout(30)
    rollout.change(NEW)
    rollout.run()
    rollout.now_s += 10
    rollout.evict("n00", 9)
    rollout.run()
    assert rollout.stage == "EvictionsRose"
    return rollout


@pytest.mark.parametrize("config", [OLD, NEWER])
def test_changed_content_goes_to_all_nodes_at_once_after_a_pause(config: object) -> None:
    rollout = paused_rollout()
    rollout.evict("n00", 9)
    rollout.change(config)
    rollout.run(1)
    assert (rollout.stage, len(rollout.having(config))) == ("Complete", 30)
    rollout.change({"x": 9})
    rollout.run(11)
    assert rollout.stage == "CanarySoaking", "the next content is guarded again"


def test_content_that_was_changed_while_its_kind_was_halted_is_guarded_afterwards() -> None:
    rollout = Rollout(30)
    rollout.unreadable = {"kat/bad": "no object"}
    rollout.change(NEW)
    rollout.run(1)
    assert rollout.having(NEW) == []
    assert rollout.object.status["currentHash"] == entry("g", NEW)["hash"]
    assert rollout.condition["message"] == "the rollout waits until all objects of its kind are valid"
    rollout.run(600)
    rollout.unreadable = {}
    rollout.run(1)
    assert (rollout.stage, rollout.having(NEW)) == ("CanarySoaking", ["n00", "n01", "n02"])
    rollout.run(SOAK_S + 1)
    assert (rollout.stage, len(rollout.having(NEW))) == ("Complete", 30)


def test_a_correction_that_was_made_while_the_kind_was_halted_ends_a_pause() -> None:
    rollout = paused_rollout()
    rollout.unreadable = {"kat/bad": "no object"}
    rollout.change(NEWER)
    rollout.run(1)
    rollout.unreadable = {}
    rollout.run(1)
    assert (rollout.stage, len(rollout.having(NEWER))) == ("Complete", 30)


def test_a_canary_of_its_own_continues_a_paused_rollout() -> None:
    rollout = paused_rollout()
    rollout.change(NEW, updateStrategy={"rollingUpdate": {"canary": "100%"}})
    rollout.run()
    assert len(rollout.having(NEW)) == 30
    assert [each["type"] for each in rollout.object.status["conditions"]] == ["Valid"]
    rollout.change(NEW)
    rollout.run()
    assert rollout.stage == "Complete"


def test_a_paused_object_changes_no_node() -> None:
    rollout = Rollout(30)
    rollout.change(NEW, paused=True)
    assert rollout.run().wake_at_s is None
    assert rollout.having(NEW) == []
    rollout.change(NEW)
    rollout.run()
    assert len(rollout.having(NEW)) == 3


def test_content_that_an_earlier_release_rolled_out_is_complete() -> None:
    rollout = Rollout(30)
    status = {name: value for name, value in rollout.object.status.items() if name != "conditions"}
    rollout.object = UnstructuredObject(metadata=rollout.object.metadata, spec=rollout.object.spec, status=status)
    rollout.nodes["n99"] = node("a")
    rollout.run()
    assert (rollout.stage, len(rollout.having(OLD))) == ("Complete", 31)


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 39), st.integers(1, 5), st.integers(0, 200)), max_size=8),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_no_node_gets_content_after_a_pause(
    nodes: int, evictions: list[tuple[int, int, int]], steps: list[int]
) -> None:
    rollout = Rollout(nodes)
    rollout.change(NEW)
    rollout.run()
    for (number, pods, _), seconds in zip(evictions, steps, strict=False):
        rollout.now_s += seconds
        rollout.evict(f"n{number % nodes:02}", pods)
        before = set(rollout.having(NEW))
        rollout.run()
        if rollout.stage == "EvictionsRose":
            assert set(rollout.having(NEW)) == before
    assert len(rollout.paused) <= 1
