"""Gangs: a minimum number of pods gets nodes at once or none does, and their resources are theirs until they are bound."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest

from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.extender import Extender
from controller.scheduler.extender_messages import ExtenderArgs, ExtenderFilterResult
from controller.scheduler.node_arrays import NodeArrays
from controller.scheduler.plugin_chain import PluginChain, ReasonNumbers, Rows
from controller.scheduler.resource_fit import FitSettings, ResourceFit
from controller.scheduler.scheduling_pod import (
    PodAnnotations,
    ScheduledPod,
    SchedulingGate,
    SchedulingPod,
    parse_scheduling_pod,
)
from tests.controller.scheduler.objects import NOW_S, a_cnr, a_pod, a_state

NODES = ["n1", "n2"]


class Cluster:
    """Two nodes of five cores, and an extender that hears of pods as from the API server."""

    def __init__(self) -> None:
        self.state: ClusterState = a_state(("n1", 5000, 0), ("n2", 5000, 0))
        self.extender = Extender(self.state, PluginChain((ResourceFit(FitSettings()),)))
        self.pods: dict[str, ScheduledPod] = {}

    def create(
        self, name: str, millicpu: int = 2000, *, gang: str = "g", least: str = "3", node: str = ""
    ) -> ScheduledPod:
        pod = a_pod(name, millicpu, node=node)
        annotations = PodAnnotations(qos_level="reclaimed_cores", gang_name=gang, gang_min=least)
        pod = msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, annotations=annotations))
        self.apply(pod)
        return pod

    def apply(self, pod: ScheduledPod) -> None:
        name = pod.metadata.name
        self.extender.gangs.apply(f"default/{name}", self.pods.get(name), pod)
        self.state.apply_pod(self.pods.get(name), pod, NOW_S)
        self.pods[name] = pod

    def filter(self, name: str, nodes: list[str] | None = None, now_s: float = NOW_S) -> ExtenderFilterResult:
        return self.extender.filter(ExtenderArgs(pod=self.pods[name], node_names=nodes or NODES), now_s)

    def bind(self, name: str, node: str) -> None:
        pod = self.pods[name]
        self.apply(msgspec.structs.replace(pod, spec=msgspec.structs.replace(pod.spec, node_name=node)))

    def requested(self) -> list[int]:
        return [int(self.state.nodes.requested[self.state.nodes.row(name), 0]) for name in NODES]


def reason(result: ExtenderFilterResult) -> str:
    assert not result.node_names
    (text,) = set(result.failed_and_unresolvable_nodes.values())
    return text


def test_a_gang_waits_until_enough_of_its_pods_exist_and_then_has_nodes_at_once() -> None:
    cluster = Cluster()
    cluster.create("a")
    cluster.create("b")
    assert reason(cluster.filter("a")) == "gang default/g has 2 pods of at least 3"
    assert cluster.requested() == [0, 0]
    cluster.create("c")
    first = cluster.filter("c")
    assert len(first.node_names) == 1
    assert cluster.extender.planned_keys == ["default/a", "default/b"]
    assert sorted(cluster.requested()) == [2000, 4000]
    for name in ("a", "b", "c"):
        (node,) = cluster.filter(name).node_names
        assert cluster.extender.planned_keys == []
        cluster.bind(name, node)
    assert sorted(cluster.requested()) == [2000, 4000]
    assert not cluster.state.assumptions
    cluster.create("d", 500)
    assert len(cluster.filter("d").node_names) == 2, "enough of the gang have a node: it may use any node with room"


def test_a_gang_that_does_not_fit_at_once_takes_nothing() -> None:
    cluster = Cluster()
    for name in ("a", "b", "c"):
        cluster.create(name, 3000)
    assert reason(cluster.filter("b")) == "gang default/g: only 2 of 3 pods that have to start together fit"
    assert cluster.requested() == [0, 0]
    assert not cluster.state.assumptions


def test_what_a_gang_has_planned_is_not_given_to_others() -> None:
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.create(name, 4000, least="2")
    cluster.filter("a")
    cluster.create("other", 2000, gang="")
    assert "Insufficient" in reason(cluster.filter("other"))


def test_a_planned_node_that_kube_scheduler_does_not_accept_has_the_gang_planned_again() -> None:
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.create(name, least="2")
    cluster.filter("a")
    planned = dict(cluster.state.assumptions.keys())
    (other,) = {"n1", "n2"} - {planned["uid-b"]}
    assert cluster.filter("b", [other]).node_names == [other]
    assert sum(cluster.requested()) == 4000, "the earlier plan ended"


class CountingFit(ResourceFit):
    """The fit of reclaimed resources, with the number of nodes that it has evaluated."""

    evaluated = 0

    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> ReasonNumbers | None:
        self.evaluated += len(rows)
        return super().filter(pod, nodes, rows, now_s)


@pytest.mark.parametrize("strategy", ["LeastAllocated", "MostAllocated"])
def test_a_large_gang_is_planned_as_if_every_node_were_evaluated_for_each_pod(strategy: str) -> None:
    """On 400 nodes with 1 to 9 cores; evaluating all of them for each of 300 pods would be 120,000 evaluations."""
    offers = {f"n{number:03}": 1000 + number * 37 % 8001 for number in range(400)}
    fit = CountingFit(FitSettings(strategy=strategy))  # type: ignore[arg-type]
    state, chain = a_state(*((name, millicpu, 1 << 40) for name, millicpu in offers.items())), PluginChain((fit,))
    annotations = PodAnnotations(qos_level="reclaimed_cores", gang_name="g", gang_min="300")
    extender, pods = Extender(state, chain), [a_pod(f"p{number:03}", 900, 1 << 30) for number in range(300)]
    pods = [
        msgspec.structs.replace(p, metadata=msgspec.structs.replace(p.metadata, annotations=annotations)) for p in pods
    ]
    for pod in pods:
        extender.gangs.apply(f"default/{pod.metadata.name}", None, pod)
    extender.filter(ExtenderArgs(pod=pods[0], node_names=list(offers)), NOW_S)
    planned, evaluated = Counter(node for _, node in state.assumptions), fit.evaluated
    state.release_plans({pod.metadata.uid for pod in pods})
    rows = state.nodes.rows_of(list(offers))
    for pod in map(parse_scheduling_pod, pods):
        fits = chain.filter(pod, state.nodes, rows, NOW_S).passes
        scores = np.where(fits, chain.score(pod, state.nodes, rows, NOW_S), -1)
        state.assume(pod, list(offers)[int(scores.argmax())], NOW_S)
    expected = Counter(node for _, node in state.assumptions)
    assert planned.total() == 300
    assert Counter(planned.values()) == Counter(expected.values()), "as many pods on as many nodes"
    assert evaluated < 40_000


def test_a_binding_that_is_under_way_stays_when_its_gang_is_planned_again() -> None:
    """It takes effect whatever is planned, so that its node must not be given to another pod meanwhile."""
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.create(name, 4000, least="2")
    cluster.filter("a")
    planned = dict(cluster.state.assumptions.keys())
    # The binding of a begins, and the watch has not delivered it yet.
    cluster.state.assume(parse_scheduling_pod(cluster.pods["a"]), planned["uid-a"], NOW_S + 1)
    assert reason(cluster.filter("b", [planned["uid-a"]])) == (
        "gang default/g: only 0 of 1 pods that have to start together fit"
    )
    assert dict(cluster.state.assumptions.keys()) == {"uid-a": planned["uid-a"]}
    assert cluster.filter("b", now_s=NOW_S + 1).node_names == [planned["uid-b"]], "a counts as started"
    assert cluster.requested() == [4000, 4000]


def test_a_plan_that_the_watch_has_not_delivered_yet_is_replaced_too() -> None:
    cluster = Cluster()
    cluster.create("a", 4000, least="1")
    (node,) = cluster.filter("a").node_names
    cluster.extender.gangs.apply("default/a", cluster.pods["a"], None)
    (other,) = {"n1", "n2"} - {node}
    assert cluster.filter("a", [other]).node_names == [other]
    assert list(cluster.state.assumptions) == [("uid-a", other)]


def test_pods_that_have_ended_or_are_being_deleted_do_not_count() -> None:
    cluster = Cluster()
    for name in ("a", "b", "c"):
        cluster.create(name)
    ended = cluster.pods["a"]
    cluster.apply(msgspec.structs.replace(ended, status=msgspec.structs.replace(ended.status, phase="Succeeded")))
    deleted = cluster.pods["b"]
    metadata = msgspec.structs.replace(deleted.metadata, deletion_timestamp="2027-01-15T08:00:00Z")
    cluster.apply(msgspec.structs.replace(deleted, metadata=metadata))
    assert reason(cluster.filter("c")) == "gang default/g has 1 pod of at least 3"
    assert cluster.extender.gangs.describe(cluster.pods["c"]) == (
        "gang default/g: 1 pod, 0 with a node; at least 3 start together"
    )


@pytest.mark.parametrize("text", ["", "0", "many", "-1", "1001", "1e3", "٣"])
def test_an_invalid_minimum_is_named(text: str) -> None:
    cluster = Cluster()
    cluster.create("a", least=text)
    assert reason(cluster.filter("a")) == (
        f"annotation gang.scheduling.koordinator.sh/min-available: {text!r} is no number of pods; write 1 to 1000"
    )


def test_pods_that_kube_scheduler_does_not_try_are_not_planned() -> None:
    """One pod of a tenant held the resources of 999 others that no scheduler would ever bind."""
    cluster = Cluster()
    cluster.create("a", least="2")
    gated = cluster.create("gated", least="2")
    gates = (SchedulingGate(name="later"),)
    cluster.apply(msgspec.structs.replace(gated, spec=msgspec.structs.replace(gated.spec, scheduling_gates=gates)))
    other = cluster.create("other", least="2")
    cluster.apply(msgspec.structs.replace(other, spec=msgspec.structs.replace(other.spec, scheduler_name="default")))
    assert reason(cluster.filter("a")) == "gang default/g has 1 pod of at least 2"
    assert cluster.requested() == [0, 0]
    cluster.apply(gated)
    assert len(cluster.filter("a").node_names) == 1, "its gate was removed"


def test_a_gang_that_never_fits_is_planned_less_often_the_larger_it_is() -> None:
    """Planning 1000 pods on 5,000 nodes takes 2 s, in which no other pod is scheduled."""
    cluster = Cluster()
    for number in range(100):
        cluster.create(f"p{number:02}", 100 if number else 150, least="100")
    message = "gang default/g: only 99 of 100 pods that have to start together fit"
    assert reason(cluster.filter("p00")) == message
    cluster.state.apply_cnr("n1", a_cnr("n1", 9000, 0))
    assert reason(cluster.filter("p01", now_s=NOW_S + 0.9)) == message
    assert len(cluster.filter("p01", now_s=NOW_S + 1.1).node_names) == 1


def test_a_clock_that_is_set_back_holds_no_gang() -> None:
    cluster = Cluster()
    for number in range(100):
        cluster.create(f"p{number:02}", 100 if number else 150, least="100")
    reason(cluster.filter("p00"))
    cluster.state.apply_cnr("n1", a_cnr("n1", 9000, 0))
    assert len(cluster.filter("p01", now_s=NOW_S - 3600).node_names) == 1


@pytest.mark.parametrize("name", ["g" * 254, "g" * 200_000, "a\x1b[2J", "a\nb"])
def test_a_name_that_is_too_long_or_controls_a_terminal_is_refused(name: str) -> None:
    cluster = Cluster()
    cluster.create("a", gang=name)
    text = reason(cluster.filter("a"))
    assert text.startswith("annotation gang.scheduling.koordinator.sh/name: '")
    assert text.endswith(" is no name; write at most 253 letters")
    assert text.isprintable()
    assert len(text) < 200


def test_many_small_gangs_that_never_fit_hold_no_other_gang() -> None:
    cluster = Cluster()
    for number in range(200):
        cluster.create(f"huge{number}", 90_000, gang=f"huge{number}", least="1")
        assert "only 0 of 1" in reason(cluster.filter(f"huge{number}"))
    for name in ("a", "b", "c"):
        cluster.create(name, 3000)
    assert "only 2 of 3" in reason(cluster.filter("a"))
    cluster.state.apply_cnr("n1", a_cnr("n1", 9000, 0))
    assert len(cluster.filter("a", now_s=NOW_S + 0.05).node_names) == 1


def test_large_gangs_that_never_fit_share_the_time_of_one() -> None:
    cluster = Cluster()
    for gang in ("g", "h"):
        for number in range(100):
            cluster.create(f"{gang}{number:02}", 100 if number else 150, gang=gang, least="100")
        assert "only 99 of 100" in reason(cluster.filter(f"{gang}00"))
    cluster.state.apply_cnr("n1", a_cnr("n1", 30_000, 0))
    assert "only 99 of 100" in reason(cluster.filter("h01", now_s=NOW_S + 1.9))
    assert len(cluster.filter("g01", now_s=NOW_S + 1.1).node_names) == 1
    assert len(cluster.filter("h01", now_s=NOW_S + 2.1).node_names) == 1
