"""Pods, Nodes and CustomNodeResources with amounts that the API server stores but no machine has. They count as much as there
can be, and none of them stops the scheduler or makes room that does not exist."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.qos import MAIN_CONTAINER_KEY, MEMORY_KEY, QOS_LEVEL_KEY
from controller.scheduler.cluster_state import ClusterState, _cached_alignment
from controller.scheduler.extender import Extender
from controller.scheduler.extender_messages import ExtenderArgs
from controller.scheduler.scheduler_process import SchedulerCache, build_chain
from controller.scheduler.scheduler_settings import SchedulerConfig
from controller.scheduler.scheduling_pod import GANG_MIN_KEY, GANG_NAME_KEY, MAX_AMOUNT, ScheduledPod
from tests.builders.api_server import FakeApiServer
from tests.controller.scheduler.objects import NOW_S, a_cnr, a_node, a_pod, a_state, pod_of

GIB = 1 << 30
LARGEST = "9223372036854775807"
"""What the API server stores for 9Ei (apimachinery/pkg/api/resource, maxAllowed)."""


def hostile_pod(amounts: Mapping[str, str], containers: int = 1, *, node: str = "n1", uid: str = "h") -> ScheduledPod:
    """Return a pod whose containers have these requests and limits. Any user with the right to create pods can set the node."""
    resources = {"requests": amounts, "limits": amounts}
    spec = {"nodeName": node, "containers": [{"name": f"c{i}", "resources": resources} for i in range(containers)]}
    return pod_of(uid, spec, "dedicated_cores")


@pytest.mark.parametrize("containers", [1, 2, 3, 200])
@pytest.mark.parametrize(
    "amounts",
    [
        {"memory": LARGEST},
        {"cpu": "12345678901234567890n", "memory": "7Ei"},
        {"cpu": "99999999999999999", "memory": "7Ei"},
        {RECLAIMED_CPU: LARGEST, RECLAIMED_MEMORY: LARGEST},
        {RECLAIMED_MEMORY: "7Ei"},
    ],
    ids=lambda amounts: ",".join(amounts.values()),
)
def test_a_bound_pod_with_any_amount_counts_and_leaves_no_room(amounts: Mapping[str, str], containers: int) -> None:
    state = a_state(("n1", 4000, 8 * GIB))
    pod = hostile_pod(amounts, containers)
    state.apply_pod(None, pod, NOW_S)
    assert not state.problems
    free = (state.nodes.allocatable - state.nodes.requested)[0].tolist()
    assert free == [
        4000 - (MAX_AMOUNT if RECLAIMED_CPU in amounts else 0),
        8 * GIB - (MAX_AMOUNT if RECLAIMED_MEMORY in amounts else 0),
    ]
    state.apply_pod(pod, None, None)
    assert (state.nodes.allocatable - state.nodes.requested)[0].tolist() == [4000, 8 * GIB]
    assert not state.nodes.native_requested.any()


def test_sixty_thousand_such_pods_on_one_node_do_not_overflow_into_free_resources() -> None:
    state = a_state(("n1", 4000, 8 * GIB))
    for number in range(60_000):
        state.apply_pod(None, hostile_pod({RECLAIMED_MEMORY: LARGEST}, uid=f"h{number}"), None)
    assert state.nodes.requested[0].tolist() == [0, 60_000 * MAX_AMOUNT]
    assert (state.nodes.allocatable - state.nodes.requested)[0, 1] < 0


@pytest.mark.parametrize("containers", [1, 2, 3, 200])
@pytest.mark.parametrize("strategy", ["LeastAllocated", "MostAllocated", "RequestedToCapacityRatio"])
@pytest.mark.parametrize("level", ["reclaimed_cores", "dedicated_cores", "shared_cores"])
def test_a_pending_pod_with_any_amount_is_rejected_and_scored(level: str, strategy: str, containers: int) -> None:
    config = msgspec.convert({"fit": {"strategy": strategy}, "topology": {"enabled": True}}, SchedulerConfig)
    amounts = {RECLAIMED_CPU: LARGEST, RECLAIMED_MEMORY: LARGEST, "cpu": LARGEST, "memory": LARGEST}
    spec = {"containers": [{"name": "c", "resources": {"requests": amounts, "limits": amounts}}] * containers}
    args = ExtenderArgs(pod=pod_of("h", spec, level), node_names=["n1"])
    extender = Extender(a_state(("n1", 4000, 8 * GIB)), build_chain(config))
    rejected = extender.filter(args, NOW_S).failed_and_unresolvable_nodes
    assert rejected == {"n1": f"Insufficient {RECLAIMED_CPU}"}
    assert 0 <= extender.prioritize(args, NOW_S)[0].score <= 10


def test_a_bound_pod_whose_amount_cannot_be_parsed_is_named_and_the_scheduler_continues() -> None:
    state = a_state(("n1", 4000, 8 * GIB))
    pod = a_pod("odd", "lots", 1000, node="n1")
    state.apply_pod(None, pod, NOW_S)
    assert state.problems["pod default/odd"].startswith(f"container main: {RECLAIMED_CPU}: 'lots' is not a quantity")
    state.apply_pod(None, a_pod("next", 1000, 1000, node="n1"), NOW_S)
    assert state.nodes.requested[0].tolist() == [1000, 1000]
    state.apply_pod(pod, None, None)
    assert not state.problems


def test_a_node_and_a_cnr_with_amounts_beyond_any_machine_offer_as_much_as_there_can_be() -> None:
    state = ClusterState()
    state.apply_node("n1", a_node("n1", cpu="99999999999999999", memory="7Ei"))
    usage = {"cpu": "99999999999999999", "memory": "7Ei"}
    state.apply_cnr("n1", a_cnr("n1", LARGEST, "7Ei", usage=usage, at="2027-01-15T08:00:00Z"))
    assert state.nodes.native_allocatable[0].tolist() == [MAX_AMOUNT, MAX_AMOUNT]
    assert state.nodes.allocatable[0].tolist() == [MAX_AMOUNT, MAX_AMOUNT]
    extender = Extender(state, build_chain(SchedulerConfig()))
    args = ExtenderArgs(pod=a_pod("p", 1000, GIB), node_names=["n1"])
    assert extender.prioritize(args, NOW_S)[0].score >= 0


def test_the_scheduler_retains_a_few_characters_of_an_annotation_of_256_kib() -> None:
    """Ten thousand pods of a tenant had 2.5 GiB of every extender's memory."""
    keys = (GANG_NAME_KEY, GANG_MIN_KEY, QOS_LEVEL_KEY, MAIN_CONTAINER_KEY)
    annotations = dict.fromkeys(keys, "x" * 60_000) | {MEMORY_KEY: "x" * 20_000}
    document = {"metadata": {"name": "p", "annotations": annotations}, "spec": {"containers": []}}
    pod = msgspec.json.decode(msgspec.json.encode(document), type=ScheduledPod)
    lengths = [len(text) for text in msgspec.structs.astuple(pod.metadata.annotations)]
    assert sorted(lengths) == [254, 254, 254, 254, 16_385]


def test_a_pod_with_thousands_of_containers_waits_with_the_reason_and_counts_where_it_runs() -> None:
    resources = {"requests": {RECLAIMED_CPU: "1"}}
    spec = {"containers": [{"name": f"c{number}", "resources": resources} for number in range(1025)]}
    extender = Extender(a_state(("n1", 4000, 0)), build_chain(SchedulerConfig()))
    result = extender.filter(ExtenderArgs(pod=pod_of("h", spec, "reclaimed_cores"), node_names=["n1"]), NOW_S)
    reason = "spec.containers: 1025 containers are more than 1024; write several pods"
    assert result.failed_and_unresolvable_nodes == {"n1": reason}
    extender.state.apply_pod(None, pod_of("h", {**spec, "nodeName": "n1"}, "reclaimed_cores"), None)
    assert extender.state.nodes.requested[0].tolist() == [1025, 0]


async def test_an_extender_lists_and_watches_hostile_pods_and_continues() -> None:
    """A listener that raises ends the process, and each next one that lists the same pod."""
    server = FakeApiServer()
    pods = "/api/v1/pods"

    def store(name: str, node: str, amounts: Mapping[str, str], containers: int = 1) -> None:
        resources = {"requests": amounts, "limits": amounts}
        listed = [{"name": f"c{number}", "resources": resources} for number in range(containers)]
        metadata = {"name": name, "namespace": "default", "uid": name}
        server.put(f"{pods}/{name}", {"metadata": metadata, "spec": {"nodeName": node, "containers": listed}})

    store("listed", "no-such-node", {"memory": LARGEST})
    async with server.client() as client:
        state = ClusterState()
        cache = SchedulerCache(client, state)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(cache.pods.run())]
            await cache.pods.synced.wait()
            async with asyncio.timeout(60):
                while state.pod_count < 2:
                    # The server sends changes from the beginning of the watch on.
                    store("watched", "n1", {RECLAIMED_MEMORY: "7Ei"}, containers=3)
                    await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
    assert state.nodes.requested[state.nodes.row("n1")].tolist() == [0, MAX_AMOUNT]


def test_pods_that_come_and_go_leave_nothing() -> None:
    """Alignments of pods with a thousand containers stayed in a cache of 65,536 entries: 8 GiB."""
    state = a_state(("n1", 4000, 8 * GIB))
    cached = _cached_alignment.cache_info().currsize
    for number in range(300):
        pod = hostile_pod({"cpu": str(number + 1), "memory": "1Gi"}, 17, uid=f"h{number}", node=f"n{number % 7}")
        state.apply_pod(None, pod, NOW_S)
        state.apply_pod(pod, None, None)
    assert _cached_alignment.cache_info().currsize == cached
    assert (state.pod_count, len(state.nodes), state.namespace_requests, state.problems) == (0, 1, {}, {})
    assert not state.nodes.native_requested.any()
