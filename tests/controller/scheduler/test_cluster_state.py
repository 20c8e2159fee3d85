"""The state of the scheduler: what counts on a node, through deletions, updates, assumptions and restarts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.scheduling_pod import ScheduledPod, parse_scheduling_pod
from tests.controller.scheduler.objects import NOW_S, UNIT, a_cnr, a_node, a_pod, a_state, pod_of


def requested(state: ClusterState, node: str = "n1") -> list[int]:
    row = state.nodes.row(node)
    return [0, 0] if row is None else state.nodes.requested[row].tolist()


def assert_empty(state: ClusterState) -> None:
    """Assert that no row is in use and that every column is as for a new state."""
    assert len(state.nodes) == 0
    for column in (
        state.nodes.requested,
        state.nodes.native_requested,
        state.nodes.allocatable,
        state.nodes.unmeasured,
    ):
        assert not column.any()


def test_a_pod_is_replaced_by_its_update_and_forgotten_after_its_deletion() -> None:
    """Case 8 of Katalyst's cache: 2000 updated to 3000 is 3000; another 2000 makes 5000; without the first 2000 remain."""
    state, first = ClusterState(), a_pod("a", 2000, node="n1")
    state.apply_pod(None, first, None)
    resized = a_pod("a", 3000, node="n1")
    state.apply_pod(first, resized, None)
    assert requested(state)[0] == 3000
    second = a_pod("b", 2000, node="n1")
    state.apply_pod(None, second, None)
    assert requested(state)[0] == 5000
    state.apply_pod(resized, None, None)
    assert requested(state)[0] == 2000
    state.apply_pod(second, None, None)
    assert_empty(state)


def test_an_assumption_on_a_node_without_a_cnr_counts_and_its_release_leaves_nothing() -> None:
    """Case 7: reserved 2000/2U, allocatable 0; nothing after Unreserve."""
    state, pod = ClusterState(), parse_scheduling_pod(a_pod("a", 2000, 2 * UNIT))
    state.assume(pod, "n1", NOW_S)
    state.assume(pod, "n1", NOW_S)
    row = state.nodes.row("n1")
    assert requested(state) == [2000, 2 * UNIT]
    assert state.nodes.allocatable[row].tolist() == [0, 0]
    state.release(pod.uid, "n1")
    state.release(pod.uid, "n1")
    assert_empty(state)


def test_a_cnr_that_is_deleted_and_created_again_does_not_forget_its_pods() -> None:
    """Katalyst forgets them and fills the node twice."""
    state = a_state(("n1", 9000, 12 * UNIT))
    state.apply_pod(None, a_pod("a", 8000, UNIT, node="n1"), None)
    state.apply_cnr("n1", None)
    state.apply_node("n1", None)
    assert requested(state) == [8000, UNIT]
    state.apply_cnr("n1", a_cnr("n1", 9000, 12 * UNIT))
    row = state.nodes.row("n1")
    assert (state.nodes.allocatable[row] - state.nodes.requested[row]).tolist() == [1000, 11 * UNIT]


@pytest.mark.parametrize("node", ["n1", "n2"], ids=["as assumed", "elsewhere, by another scheduler"])
def test_a_binding_that_arrives_replaces_every_assumption_of_the_pod(node: str) -> None:
    state, pending = a_state(("n1", 9000, 0), ("n2", 9000, 0)), a_pod("a", 2000)
    pod = parse_scheduling_pod(pending)
    state.assume(pod, "n1", NOW_S)
    state.assume(pod, "n2", NOW_S)
    state.apply_pod(None, pending, NOW_S)
    assert (requested(state, "n1")[0], requested(state, "n2")[0]) == (2000, 2000), "it may be bound to either"
    state.apply_pod(pending, a_pod("a", 2000, node=node), NOW_S)
    assert {name: requested(state, name)[0] for name in ("n1", "n2")} == {"n1": 0, "n2": 0} | {node: 2000}
    assert not state.assumptions


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_finished_pod_takes_nothing(phase: str) -> None:
    state, running = a_state(("n1", 9000, 0)), a_pod("a", 2000, node="n1")
    state.apply_pod(None, running, None)
    ended = msgspec.structs.replace(running, status=msgspec.structs.replace(running.status, phase=phase))
    state.apply_pod(running, ended, None)
    assert requested(state)[0] == 0
    state.apply_pod(ended, None, None)
    assert requested(state)[0] == 0


def test_a_pod_created_again_under_its_name_replaces_the_old_one() -> None:
    state, old = a_state(("n1", 9000, 0)), a_pod("a", 2000, node="n1")
    state.apply_pod(None, old, None)
    metadata = msgspec.structs.replace(old.metadata, uid="another")
    new = a_pod("a", 500, node="")
    state.apply_pod(old, msgspec.structs.replace(new, metadata=metadata), None)
    assert requested(state)[0] == 0


def test_a_pod_with_an_unknown_level_still_counts() -> None:
    state = a_state(("n1", 9000, 0))
    state.apply_pod(None, a_pod("a", 2000, node="n1", level="best_cores"), None)
    assert requested(state)[0] == 2000
    assert "use one of shared_cores" in state.problems["pod default/a"]
    state.apply_pod(a_pod("a", 2000, node="n1", level="best_cores"), None, None)
    assert not state.problems


def test_invalid_amounts_of_a_cnr_offer_nothing_and_name_the_field() -> None:
    state = a_state(("n1", "many", 5))
    assert state.nodes.allocatable[state.nodes.row("n1")].tolist() == [0, 0]
    assert list(state.problems) == ["customnoderesource n1"]
    assert state.problems["customnoderesource n1"].startswith("status.resources.allocatable: 'many' is not a quantity")
    state.apply_cnr("n1", a_cnr("n1", 5, 5))
    assert not state.problems
    state.apply_cnr("n1", a_cnr("n1", 5, 5, usage={"cpu": "1"}, at="yesterday"))
    assert state.problems["customnoderesource n1"].startswith("status.nodeMetricStatus.updateTime: 'yesterday'")
    state.apply_cnr("n1", None)
    assert not state.problems


def test_load_that_no_report_contains_is_estimated_until_one_does() -> None:
    state = a_state(("n1", 9000, 12 * UNIT))
    report = {"cpu": "2500m", "memory": "1Gi"}
    state.apply_cnr("n1", a_cnr("n1", 9000, 12 * UNIT, usage=report, at="2027-01-15T08:00:00Z"))
    row = state.nodes.row("n1")
    assert state.nodes.usage[row].tolist() == [2500, 1 << 30]
    assert state.nodes.reported_at_s[row] == NOW_S
    state.apply_pod(None, a_pod("old", 4000, UNIT, node="n1"), None)
    assert not state.nodes.unmeasured[row].any(), "it has run for long, so that the usage contains it"
    state.assume(parse_scheduling_pod(a_pod("new", 2000, 2 * UNIT)), "n1", NOW_S + 1)
    assert state.nodes.unmeasured[row] == pytest.approx([1700, 1.4 * UNIT])
    state.apply_pod(a_pod("new", 2000), a_pod("new", 2000, 2 * UNIT, node="n1"), NOW_S + 2)
    for at, expected in (("2027-01-15T08:00:20Z", 1700), ("2027-01-15T08:00:31Z", 0)):
        state.apply_cnr("n1", a_cnr("n1", 9000, 12 * UNIT, usage=report, at=at))
        assert state.nodes.unmeasured[row, 0] == expected, f"30 seconds after {NOW_S + 1}"


def test_requests_of_init_containers_and_sidecars() -> None:
    def container(cpu: str, **fields: str) -> dict[str, object]:
        return {"resources": {"requests": {"cpu": cpu}}, **fields}

    spec = {
        "containers": [container("500m"), container("250m")],
        "initContainers": [container("100m", restartPolicy="Always"), container("1")],
        "overhead": {"cpu": "50m"},
    }
    # Init container and sidecar: 1100; later 500 + 250 + 100 = 850. Plus overhead.
    assert parse_scheduling_pod(pod_of("p", spec)).native.millicpu == 1150
    spec["containers"] = [container("800m"), container("250m")]
    assert parse_scheduling_pod(pod_of("p", spec)).native.millicpu == 1200


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_pod_that_is_evaluated_does_not_compete_with_itself(*, is_bound: bool) -> None:
    """Neither for the node's resources, nor for the quota of its namespace, nor by its estimated load."""
    state = a_state(("n1", 9000, UNIT), ("n2", 9000, UNIT))
    state.assume(parse_scheduling_pod(a_pod("other", 1000)), "n1", NOW_S)
    pod = a_pod("a", 2000, UNIT, node="n1" if is_bound else "")
    if is_bound:
        state.apply_pod(None, pod, NOW_S)
    else:
        for node in ("n1", "n2"):
            state.assume(parse_scheduling_pod(pod), node, NOW_S)
    row = state.nodes.row("n1")

    def counts() -> list[float]:
        nodes = state.nodes
        cpu = [nodes.requested[row, 0], nodes.requested_nonzero[row, 0], nodes.unmeasured[row, 0]]
        return [*map(float, cpu), state.namespace_requests["default"].millicpu]

    before = [3000, 3000, 2550, 3000 if is_bound else 5000]
    assert counts() == before
    with state.without("uid-a"):
        assert counts() == [1000, 1000, 850, 1000]
    assert counts() == before


def test_rows_are_used_again_and_arrays_grow() -> None:
    state = ClusterState()
    for number in range(200):
        state.apply_cnr(f"n{number}", a_cnr(f"n{number}", number, 0))
    assert state.nodes.allocatable[state.nodes.rows_of(["n199", "n7", "none"])[:2], 0].tolist() == [199, 7]
    for number in range(200):
        state.apply_cnr(f"n{number}", None)
    assert_empty(state)
    state.apply_node("other", a_node("other"))
    assert len(state.nodes.names) == 200
    assert np.isnan(state.nodes.usage[state.nodes.row("other")]).all()


def test_taints_with_unique_values_do_not_pile_up() -> None:
    state = ClusterState()
    for number in range(500):
        taint = {"key": "k", "value": str(number), "effect": "NoSchedule", "qosLevel": "reclaimed_cores"}
        state.apply_cnr("n1", a_cnr("n1", 1, 1, taints=[taint]))
    assert len(state.nodes.taint_sets) < 100
    assert state.nodes.taint_sets[state.nodes.taint_set[state.nodes.row("n1")]][0].value == "499"


def test_every_decoded_pod_is_small() -> None:
    """150,000 pods are in memory: annotations and labels that nothing reads must not be."""
    text = msgspec.json.encode({
        "metadata": {"name": "p", "annotations": {f"key{number}": "x" * 1000 for number in range(1000)}, "labels": {"a": "b"}},
        "spec": {"containers": [{"name": "c", "env": [{"name": "e", "value": "v"}]}]},
    })  # fmt: skip
    assert len(msgspec.json.encode(msgspec.json.decode(text, type=ScheduledPod))) < 200
