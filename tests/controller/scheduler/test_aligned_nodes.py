"""NodeResourceTopology and NodeOvercommitment through the extender: objects of the API in, nodes and reasons out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.explanation import explain_placement
from controller.scheduler.extender import Extender
from controller.scheduler.extender_messages import ExtenderArgs
from controller.scheduler.scheduler_kinds import SchedulerNode, ZonedCnr
from controller.scheduler.scheduler_process import build_chain
from controller.scheduler.scheduler_settings import SchedulerConfig
from controller.scheduler.scheduling_pod import ScheduledPod, parse_scheduling_pod
from controller.scheduler.topology_plugin import TopologySettings, topology_rules
from tests.controller.scheduler.objects import NOW_S, pod_of

PREFIX = "katalyst.kubewharf.io/"
ZONES_FULL = "node(s) whose NUMA nodes cannot hold the pod"
Share = tuple[int, str, str, str]
"""Zone, pod, CPU, memory."""


def zoned_cnr(
    name: str, policy: str, zone: tuple[str, str], sockets: Sequence[int] = (0, 0), used: Sequence[Share] = (),
    annotations: Mapping[str, str] | None = None,
) -> ZonedCnr:  # fmt: skip
    """Return a CustomNodeResource with equal zones, one for each entry of `sockets`."""
    offers = {"cpu": zone[0], "memory": zone[1]}
    by_socket: dict[int, list[dict[str, Any]]] = {}
    for number, socket in enumerate(sockets):
        allocations = [
            {"consumer": f"default/{pod}/uid-{pod}", "requests": {"cpu": cpu, "memory": memory}}
            for where, pod, cpu, memory in used
            if where == number
        ]
        part = {"type": "Numa", "name": str(number), "resources": {"allocatable": offers, "capacity": offers}}
        by_socket.setdefault(socket, []).append({**part, "allocations": allocations})
    zones = [{"type": "Socket", "name": str(socket), "children": parts} for socket, parts in by_socket.items()]
    status = {"topologyZone": zones, "topologyPolicy": policy}
    document = {"metadata": {"name": name, "annotations": dict(annotations or {})}, "status": status}
    return msgspec.json.decode(json.dumps(document), type=ZonedCnr)


def plain_node(name: str, cpu: str = "16", annotations: Mapping[str, str] | None = None) -> SchedulerNode:
    metadata = {"name": name, "annotations": dict(annotations or {})}
    return msgspec.convert(
        {"metadata": metadata, "status": {"allocatable": {"cpu": cpu, "memory": "64Gi"}}}, SchedulerNode
    )


def requesting(
    name: str, *containers: tuple[str, str], level: str = "dedicated_cores", node: str = "",
    enhancement: Mapping[str, str] | None = None, limited: bool = True, phase: str = "Pending",
) -> ScheduledPod:  # fmt: skip
    """Return a pod by CPU and memory of its containers; with `limited`, limits equal requests."""
    annotations = {f"{PREFIX}qos_level": level}
    if enhancement is not None:
        annotations[f"{PREFIX}memory_enhancement"] = json.dumps(enhancement)
    resources = [{"requests": {"cpu": cpu, "memory": memory}} for cpu, memory in containers]
    listed = [
        {"name": f"c{number}", "resources": {**each, "limits": each["requests"] if limited else {}}}
        for number, each in enumerate(resources)
    ]
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "annotations": annotations}
    spec = {"containers": listed, "nodeName": node}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": {"phase": phase}}, ScheduledPod)


BOUND, EXCLUSIVE = {"numa_binding": "true"}, {"numa_binding": "true", "numa_exclusive": "true"}


def an_extender(policy: str = "dynamic", **settings: Any) -> Extender:
    config = SchedulerConfig(topology=TopologySettings(enabled=True, plugin_policy=policy, **settings))  # type: ignore[arg-type]
    return Extender(ClusterState(rules=topology_rules(config.topology)), build_chain(config))


def katalyst_nodes(extender: Extender, policy: str) -> None:
    """Add nodes A to E of Katalyst's table tests; what is in use belongs to dedicated pods that are not known."""
    for name, zone, sockets, used in (
        ("A", ("4", "8Gi"), (0, 0), ()),
        ("B", ("2", "4Gi"), (0, 0), ()),
        ("C", ("4", "8Gi"), (0, 0), ((1, "x", "1", "2Gi"),)),
        ("D", ("2", "4Gi"), (0, 0, 1, 1), ((1, "x", "1", "2Gi"), (2, "y", "1", "2Gi"))),
        ("E", ("2", "4Gi"), (0, 0, 1, 1), ((2, "x", "1", "2Gi"), (3, "y", "1", "2Gi"))),
    ):
        extender.state.apply_node(name, plain_node(name))
        extender.state.apply_cnr(name, zoned_cnr(name, policy, zone, sockets, used))


def fitting(extender: Extender, pod: ScheduledPod, names: Sequence[str]) -> str:
    return "".join(extender.filter(ExtenderArgs(pod=pod, node_names=list(names)), NOW_S).node_names or ())


SINGLE, NUMERIC = "SingleNUMANodeContainerLevel", "NumericContainerLevel"


@pytest.mark.parametrize(
    ("plugin", "policy", "pod", "expected"),
    [
        ("native", SINGLE, requesting("p", ("4", "8Gi"), level=""), "AC"),
        ("native", SINGLE, requesting("p", ("2", "4Gi"), ("2", "4Gi"), level=""), "ABCDE"),
        ("native", "SingleNUMANodePodLevel", requesting("p", ("2", "4Gi"), ("2", "4Gi"), level=""), "AC"),
        ("native", SINGLE, requesting("p", ("350m", "8Gi"), level=""), "ABCDE"),
        ("native", SINGLE, requesting("p", ("4", "8Gi"), level="", limited=False), "ABCDE"),
        ("native", NUMERIC, requesting("p", ("4", "8Gi"), level=""), "ABCDE"),
        ("dynamic", SINGLE, requesting("p", ("4", "8Gi"), enhancement=BOUND), "AC"),
        ("dynamic", SINGLE, requesting("p", ("4", "8Gi"), enhancement=BOUND, limited=False), "AC"),
        ("dynamic", SINGLE, requesting("p", ("4", "8Gi")), "ABCDE"),
        ("dynamic", SINGLE, requesting("p", ("4", "8Gi"), enhancement=BOUND, level="shared_cores"), "ABCDE"),
        ("dynamic", SINGLE, requesting("p", ("2", "4Gi"), enhancement=EXCLUSIVE), "ABCDE"),
        ("dynamic", NUMERIC, requesting("p", ("4", "8Gi"), enhancement=BOUND), "AC"),
        ("dynamic", NUMERIC, requesting("p", ("4", "8Gi"), enhancement=EXCLUSIVE), "ABCE"),
        ("dynamic", "None", requesting("p", ("4", "8Gi"), enhancement=BOUND), "ABCDE"),
    ],
    ids=[
        "9", "10", "11", "13", "burstable", "native numeric", "15", "dedicated without limits", "no binding",
        "shared_cores", "20", "16", "21", "policy none",
    ],
)  # fmt: skip
def test_katalysts_table_of_zones(plugin: str, policy: str, pod: ScheduledPod, expected: str) -> None:
    extender = an_extender(plugin)
    katalyst_nodes(extender, policy)
    assert fitting(extender, pod, "ABCDE") == expected


@pytest.mark.parametrize(
    ("strategy", "expected"), [("MostAllocated", [5, 10, 7, 10]), ("LeastAllocated", [5, 0, 3, 0])], ids=["28", "29"]
)
def test_katalysts_table_of_scores_in_tenths(strategy: str, expected: list[int]) -> None:
    """50, 100, 66, 100 and 50, 0, 33, 0 of 100, without the scores of other plugins."""
    extender = an_extender(strategy=strategy)
    for name, zone, sockets, used in (
        ("a", ("4", "8Gi"), (0, 0), ()),
        ("b", ("2", "4Gi"), (0, 0), ()),
        ("c", ("4", "8Gi"), (0, 0), ((0, "x", "1", "2Gi"), (1, "y", "3", "6Gi"))),
        ("d", ("2", "4Gi"), (0, 0, 1, 1), ()),
    ):
        extender.state.apply_node(name, plain_node(name))
        extender.state.apply_cnr(name, zoned_cnr(name, SINGLE, zone, sockets, used))
    (plugin,) = (each for each in extender.chain.plugins if each.name == "NodeResourceTopology")
    pod = parse_scheduling_pod(requesting("p", ("2", "4Gi"), enhancement=BOUND))
    scores = plugin.score(pod, extender.state.nodes, extender.state.nodes.rows_of(list("abcd")), NOW_S)
    assert scores is not None
    assert np.rint(scores / 10).astype(int).tolist() == expected
    other = parse_scheduling_pod(requesting("p", ("2", "4Gi")))
    assert plugin.score(other, extender.state.nodes, extender.state.nodes.rows_of(["a"]), NOW_S) is None


def free_cpus(state: ClusterState, node: str = "n1") -> list[int]:
    row, arrays = state.nodes.row(node), state.nodes.aligned
    slot = state.nodes.aligned_slot[row]
    free = arrays.allocatable[slot] - arrays.allocated[slot] - arrays.assumed[slot]
    return [int(amount) for amount in free[arrays.zones[slot], 0]]


def test_a_pod_is_charged_to_every_zone_until_the_cnr_names_one() -> None:
    extender = an_extender()
    state, empty = extender.state, zoned_cnr("n1", SINGLE, ("4", "8Gi"))
    state.apply_node("n1", plain_node("n1"))
    state.apply_cnr("n1", empty)
    assert free_cpus(state) == [4000, 4000]
    first, second = (requesting(name, ("3", "4Gi"), enhancement=BOUND) for name in ("first", "second"))
    state.assume(parse_scheduling_pod(first), "n1", NOW_S)
    assert free_cpus(state) == [1000, 1000], "either zone may get it"
    result = extender.filter(ExtenderArgs(pod=second, node_names=["n1"]), NOW_S)
    assert result.failed_and_unresolvable_nodes == {"n1": ZONES_FULL}
    state.release("uid-first", "n1")
    assert free_cpus(state) == [4000, 4000], "the binding failed"
    state.assume(parse_scheduling_pod(first), "n1", NOW_S)
    bound = requesting("first", ("3", "4Gi"), enhancement=BOUND, node="n1")
    state.apply_pod(first, bound, NOW_S)
    assert not state.assumptions
    assert free_cpus(state) == [1000, 1000], "the binding is known, its zone is not"
    state.apply_cnr("n1", zoned_cnr("n1", SINGLE, ("4", "8Gi"), used=[(1, "first", "3", "4Gi")]))
    assert free_cpus(state) == [4000, 1000]
    state.apply_cnr("n1", zoned_cnr("n1", SINGLE, ("4", "8Gi"), used=[(1, "first", "3", "4Gi")]))
    assert free_cpus(state) == [4000, 1000], "an equal report changes nothing"
    assert fitting(extender, second, ["n1"]) == "n1"
    state.apply_pod(bound, None, NOW_S)
    assert free_cpus(state) == [4000, 1000], "the agent has not reported its end yet"
    state.apply_cnr("n1", empty)
    assert free_cpus(state) == [4000, 4000]
    state.apply_cnr("n1", None)
    state.apply_node("n1", None)
    assert (len(state.nodes), int(state.nodes.aligned_slot.max())) == (0, 0)


def test_a_new_process_charges_bound_pods_as_the_old_one_did_in_any_order_of_its_lists() -> None:
    pod = requesting("first", ("3", "4Gi"), enhancement=BOUND, node="n1")
    for used, expected in (((), [1000, 1000]), ([(0, "first", "3", "4Gi")], [1000, 4000])):
        for is_pod_first in (True, False):
            state = an_extender().state
            calls = [
                lambda state=state: state.apply_pod(None, pod, None),
                lambda state=state, used=used: state.apply_cnr("n1", zoned_cnr("n1", SINGLE, ("4", "8Gi"), used=used)),
            ]
            for call in calls if is_pod_first else reversed(calls):
                call()
            assert free_cpus(state) == expected


@pytest.mark.parametrize(
    ("plugin", "level", "enhancement", "expected"),
    [
        ("dynamic", "dedicated_cores", BOUND, [4000, 3000]),
        ("dynamic", "dedicated_cores", EXCLUSIVE, [4000, 0]),
        ("dynamic", "shared_cores", BOUND, [4000, 4000]),
        ("native", "shared_cores", BOUND, [4000, 3000]),
    ],
    ids=["dedicated", "exclusive takes all of its zone", "shares its CPUs", "the kubelet pins"],
)
def test_which_pods_of_a_cnr_take_their_zone(
    plugin: str, level: str, enhancement: Mapping[str, str], expected: list[int]
) -> None:
    state = an_extender(plugin).state
    state.apply_cnr("n1", zoned_cnr("n1", SINGLE, ("4", "8Gi"), used=[(1, "x", "1", "2Gi")]))
    assert free_cpus(state) == [4000, 3000], "a pod that is not known yet takes its zone"
    pod = requesting("x", ("1", "2Gi"), level=level, enhancement=enhancement, node="n1")
    state.apply_pod(None, pod, None)
    assert free_cpus(state) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"name": "one"}, "status.topologyZone: Numa 'one': its name is no number; write one such as 0"),
        ({"name": "1"}, "status.topologyZone: has the NUMA nodes [1, 1]; at most 8 different ones are supported"),
        (
            {"resources": {"allocatable": {"cpu": "many"}}},
            "status.topologyZone: Numa 0: allocatable: 'many' is not a quantity",
        ),
    ],
    ids=["name", "twice", "amount"],
)
def test_invalid_zones_name_the_field_and_align_nothing(change: Mapping[str, Any], expected: str) -> None:
    state = an_extender().state
    document = json.loads(msgspec.json.encode(zoned_cnr("n1", SINGLE, ("4", "8Gi"))))
    document["status"]["topologyZone"][0]["children"][0] |= change
    state.apply_cnr("n1", msgspec.convert(document, ZonedCnr))
    assert expected in state.problems["customnoderesource n1"]
    assert state.nodes.aligned_slot[state.nodes.row("n1")] == 0
    state.apply_cnr("n1", zoned_cnr("n1", SINGLE, ("4", "8Gi")))
    assert not state.problems
    assert free_cpus(state) == [4000, 4000]


def test_zones_that_nothing_reads_cost_nothing() -> None:
    state = ClusterState()
    state.apply_cnr("n1", zoned_cnr("n1", SINGLE, ("4", "8Gi"), sockets=range(8)))
    assert state.nodes.aligned_slot[0] == 0
    assert state.nodes.aligned.size_bytes < 1000
    assert [each.name for each in build_chain(SchedulerConfig()).plugins].count("NodeResourceTopology") == 0
    assert [each.name for each in build_chain(SchedulerConfig()).plugins].count("NodeOvercommitment") == 1
    off = build_chain(SchedulerConfig(node_overcommitment=False))
    assert "NodeOvercommitment" not in [each.name for each in off.plugins]


def test_nodes_with_few_and_many_zones_share_the_arrays() -> None:
    extender = an_extender()
    for number in range(40):
        zones = 8 if number == 39 else 1 + number % 2
        name = f"n{number}"
        extender.state.apply_cnr(name, zoned_cnr(name, SINGLE, (str(1 + number), "8Gi"), [0] * zones))
    for number in (0, 17, 38, 39):
        assert free_cpus(extender.state, f"n{number}") == [1000 * (1 + number)] * (
            8 if number == 39 else 1 + number % 2
        )
    names = [f"n{number}" for number in range(40)]
    assert fitting(extender, requesting("p", ("39", "1Gi"), enhancement=BOUND), names) == "n38n39"


def overcommitted(extender: Extender, requested: str = "20", **cnr: str) -> None:
    """Add node o with 16 CPUs, overcommitted to 32, of which a pod requests some."""
    keys = {"cpu_overcommit_ratio": "2", "original_allocatable_cpu": "16"}
    annotations = {f"{PREFIX}{key}": value for key, value in keys.items()}
    extender.state.apply_node("o", plain_node("o", "32", annotations))
    managers = {"overcommit_cpu_manager": "static", "guaranteed_cpus": "8"} | cnr
    marks = {f"{PREFIX}{key}": value for key, value in managers.items() if value}
    extender.state.apply_cnr("o", zoned_cnr("o", "", ("8", "8Gi"), annotations=marks))
    running = requesting("running", (requested, "1Gi"), level="", limited=False, node="o", phase="Running")
    extender.state.apply_pod(None, running, None)


@pytest.mark.parametrize(
    ("requested", "pod", "cnr", "is_fitting"),
    [
        ("24", requesting("p", ("4", "1Gi"), level="", limited=False), {}, False),
        ("20", requesting("p", ("4", "1Gi"), level="", limited=False), {}, True),
        ("20", requesting("p", ("4", "1Gi"), level=""), {}, False),
        ("16", requesting("p", ("4", "1Gi"), level=""), {}, True),
        ("24", requesting("p", ("4", "1Gi"), level="", limited=False), {"overcommit_cpu_manager": "none"}, True),
        ("24", requesting("p", ("4", "1Gi"), level="", limited=False), {"overcommit_cpu_manager": ""}, True),
        ("28", requesting("p", ("4", "1Gi"), level="", limited=False), {"guaranteed_cpus": "many"}, True),
    ],
    ids=["43", "45", "44: takes 8", "takes 8 of 8", "47", "annotation removed", "35: no number counts as 0"],
)
def test_katalysts_table_of_overcommitment(
    requested: str,
    pod: ScheduledPod,
    cnr: dict[str, str],
    is_fitting: bool,
) -> None:
    extender = Extender(ClusterState(), build_chain(SchedulerConfig()))
    overcommitted(extender, "24")
    extender.state.apply_pod(requesting("running", ("24", "1Gi"), node="o"), None, None)
    overcommitted(extender, requested, **cnr)
    assert (fitting(extender, pod, ["o"]) == "o") is is_fitting


def test_pods_that_are_assumed_pin_cpus_before_the_agent_reports_them() -> None:
    extender = Extender(ClusterState(), build_chain(SchedulerConfig()))
    overcommitted(extender, "4", guaranteed_cpus="0")
    pod = requesting("pinned", ("10", "1Gi"), level="")
    assert fitting(extender, pod, ["o"]) == "o"
    extender.state.assume(parse_scheduling_pod(pod), "o", NOW_S)
    # (16 - 10) x 2 - (14 - 10) = 8
    for cpu, expected in (("8", "o"), ("8001m", "")):
        assert fitting(extender, requesting("p", (cpu, "1Gi"), level="", limited=False), ["o"]) == expected
    extender.state.release("uid-pinned", "o")
    assert fitting(extender, requesting("p", ("28", "1Gi"), level="", limited=False), ["o"]) == "o"


@pytest.mark.parametrize("containers", [1, 2, 60])
def test_a_pod_that_pins_more_cpus_than_any_machine_has_is_rejected_and_leaves_no_room(containers: int) -> None:
    extender = Extender(ClusterState(), build_chain(SchedulerConfig()))
    overcommitted(extender, "0", guaranteed_cpus="0")
    amounts = {"cpu": "140000000000", "memory": "7Ei"}
    spec = {"containers": [{"name": "c", "resources": {"requests": amounts, "limits": amounts}}] * containers}
    pod = pod_of("huge", spec)
    assert fitting(extender, pod, ["o"]) == ""
    extender.state.apply_pod(None, pod_of("huge", {**spec, "nodeName": "o"}), None)
    assert fitting(extender, requesting("p", ("1", "1Gi"), level="", limited=False), ["o"]) == ""


def test_a_static_memory_manager_excludes_overcommitted_memory() -> None:
    extender = Extender(ClusterState(), build_chain(SchedulerConfig()))
    extender.state.apply_node("o", plain_node("o", annotations={f"{PREFIX}memory_overcommit_ratio": "1.5"}))
    marks = {f"{PREFIX}overcommit_memory_manager": "Static"}
    extender.state.apply_cnr("o", zoned_cnr("o", "", ("8", "8Gi"), annotations=marks))
    result = extender.filter(ExtenderArgs(pod=requesting("p", ("1", "1Gi"), level=""), node_names=["o"]), NOW_S)
    expected = "node(s) with overcommitted memory that the kubelet's memory manager pins"
    assert result.failed_and_unresolvable_nodes == {"o": expected}
    extender.state.apply_cnr("o", zoned_cnr("o", "", ("8", "8Gi")))
    assert fitting(extender, requesting("p", ("1", "1Gi"), level=""), ["o"]) == "o"


def test_an_invalid_annotation_of_a_node_names_itself() -> None:
    state = ClusterState()
    state.apply_node("o", plain_node("o", annotations={f"{PREFIX}original_allocatable_cpu": "many"}))
    assert state.problems["node o"].startswith(f"annotation {PREFIX}original_allocatable_cpu: 'many' is not a quantity")


def numbers_of(extender: Extender, pod: ScheduledPod, plugin: str) -> str:
    explained = explain_placement(extender.state, extender.chain, pod, NOW_S, 10)
    (verdict,) = (each for each in explained.nodes[0].verdicts if each.plugin == plugin)
    return f"{verdict.rejection}|{verdict.numbers}"


def test_explanations_have_the_numbers_and_leave_the_pod_itself_out() -> None:
    extender = an_extender()
    used = [(0, "x", "3", "4Gi")]
    extender.state.apply_cnr("n1", zoned_cnr("n1", SINGLE, ("4", "8Gi"), used=used))
    running = requesting("x", ("3", "4Gi"), enhancement=BOUND, node="n1", phase="Running")
    extender.state.apply_pod(None, running, None)
    gib = 1 << 30
    free = f"free by NUMA node: 4000, 4000 milli-CPUs; {8 * gib}, {8 * gib} bytes of memory"
    assert numbers_of(extender, running, "NodeResourceTopology") == f"|{free}"
    assert free_cpus(extender.state) == [1000, 4000], "it counts again"
    large = numbers_of(extender, requesting("p", ("5", "1Gi"), enhancement=BOUND), "NodeResourceTopology")
    assert large.startswith(f"{ZONES_FULL}|no set of NUMA nodes fits (policy single): milli-CPUs: requested 5000")
    assert "largest free 4000 in a NUMA node, 5000 in all" in large
    plain = numbers_of(extender, requesting("p", ("5", "1Gi")), "NodeResourceTopology")
    assert plain == "|the pod is not aligned with NUMA nodes"
    plain = numbers_of(extender, requesting("p", ("5", "1Gi")), "NodeOvercommitment")
    assert plain == "|the kubelet pins nothing that is overcommitted"
    extender = Extender(ClusterState(), build_chain(SchedulerConfig()))
    overcommitted(extender, "20")
    burstable = requesting("p", ("4", "1Gi"), level="", limited=False)
    assert (
        numbers_of(extender, burstable, "NodeOvercommitment")
        == "|the pod takes 4000m of overcommitted CPU, 4000m are free"
    )
    assert "the pod takes 8000m, 4000m are free (ratio 2, 8000m pinned)" in numbers_of(
        extender, requesting("p", ("4", "1Gi"), level=""), "NodeOvercommitment"
    )


_CHANGES = st.tuples(
    st.sampled_from(["assume", "release", "bind", "end", "report", "report none", "delete cnr", "explain"]),
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 1),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_CHANGES, max_size=25))
def test_any_order_of_changes_charges_what_a_new_process_charges(changes: list[tuple[str, str, int]]) -> None:
    enhancements = {"a": BOUND, "b": EXCLUSIVE, "c": {}}
    pods = {name: requesting(name, ("1", "1Gi"), enhancement=each) for name, each in enhancements.items()}
    bound = {name: requesting(name, ("1", "1Gi"), enhancement=each, node="n1") for name, each in enhancements.items()}
    extender = an_extender()
    state, running, cnr = extender.state, set[str](), zoned_cnr("n1", SINGLE, ("4", "8Gi"))
    state.apply_node("n1", plain_node("n1"))
    state.apply_cnr("n1", cnr)
    current: ZonedCnr | None = cnr
    for what, name, zone in changes:
        if what == "assume" and name not in running:
            state.assume(parse_scheduling_pod(pods[name]), "n1", NOW_S)
        elif what == "release":
            state.release(f"uid-{name}", "n1")
        elif what == "bind":
            state.apply_pod(bound[name] if name in running else pods[name], bound[name], NOW_S)
            running.add(name)
        elif what == "end" and name in running:
            state.apply_pod(bound[name], None, NOW_S)
            running.remove(name)
        elif what == "explain":
            explain_placement(state, extender.chain, bound[name], NOW_S, 10)
        elif what.startswith(("report", "delete")):
            used = [(zone, name, "1", "1Gi")] if what == "report" else []
            current = None if what.startswith("delete") else zoned_cnr("n1", SINGLE, ("4", "8Gi"), used=used)
            state.apply_cnr("n1", current)
    fresh = an_extender().state
    fresh.apply_cnr("n1", current)
    fresh.apply_node("n1", plain_node("n1"))
    for name in running:
        fresh.apply_pod(None, bound[name], None)
    for uid, node in state.assumptions:
        fresh.assume(parse_scheduling_pod(pods[uid.removeprefix("uid-")]), node, NOW_S)
    assert free_cpus(state) == free_cpus(fresh)
    assert state.nodes.aligned.pinned_cpus.sum() == fresh.nodes.aligned.pinned_cpus.sum()
