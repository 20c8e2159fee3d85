"""Which pending pods are updated when a CustomNodeResource changes, so that kube-scheduler tries them again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec
import numpy as np
import pytest

from api.pod import RECLAIMED_CPU
from controller.scheduler.cluster_state import ClusterState
from controller.scheduler.elastic_quota import ElasticQuotas
from controller.scheduler.node_arrays import NodeArrays
from controller.scheduler.pending_pods import PendingPods, RowSet
from controller.scheduler.plugin_chain import FilterOutcome, NodePlugin, PluginChain, Rows
from controller.scheduler.resource_fit import FitSettings, ResourceFit
from controller.scheduler.scheduler_kinds import ElasticQuota
from controller.scheduler.scheduler_process import SchedulerCache
from controller.scheduler.scheduling_pod import ScheduledPod, SchedulingPod
from kube.watch import WatchEvent, WatchEventType
from tests.builders.api_server import FakeApiServer
from tests.controller.scheduler.objects import NOW_S, a_cnr, a_pod, pod_of


class CountingChain(PluginChain):
    """Chain that counts its filters in the last of `calls`."""

    def __init__(self, plugins: Sequence[NodePlugin], calls: list[int]) -> None:
        super().__init__(plugins)
        self._calls = calls

    def filter(self, pod: SchedulingPod, nodes: NodeArrays, rows: Rows, now_s: float) -> FilterOutcome:
        self._calls[-1] += 1
        return super().filter(pod, nodes, rows, now_s)


class Waiting:
    """Pending pods on a state with the nodes n1 and n2, which offer nothing yet."""

    def __init__(self, cache: SchedulerCache, pending: PendingPods) -> None:
        self.cache, self.pending = cache, pending
        for name in ("n1", "n2"):
            self.offer(name, 0)

    def offer(self, node: str, millicpu: int) -> None:
        self.cache.state.apply_cnr(node, a_cnr(node, millicpu, 0))
        self.pending.record_room(node)

    def reject(self, name: str, millicpu: int, *candidates: str, priority: int = 0) -> ScheduledPod:
        pod = a_pod(name, millicpu, priority=priority)
        self.apply(pod)
        rows = self.cache.state.nodes.rows_of(list(candidates or ("n1", "n2"))).tolist()
        self.pending.record_result(pod, rows, is_rejected=True)
        return pod

    def apply(self, pod: ScheduledPod, what: WatchEventType = WatchEventType.ADDED) -> None:
        event = WatchEvent(what, f"default/{pod.metadata.name}", "1", pod)
        self.cache.pods._apply(event)  # as the watch delivers it

    def join_gang(self, pod: ScheduledPod, gang: str) -> ScheduledPod:
        annotations = msgspec.structs.replace(pod.metadata.annotations, gang_name=gang, gang_min="3")
        metadata = msgspec.structs.replace(pod.metadata, annotations=annotations, resource_version="2")
        member = msgspec.structs.replace(pod, metadata=metadata)
        self.apply(member, WatchEventType.MODIFIED)
        return member

    def due(self, at_s: float = 0) -> list[str]:
        return [key.removeprefix("default/") for key, _ in self.pending.fitting_pods(NOW_S + at_s)]


@pytest.fixture
async def waiting() -> AsyncIterator[Waiting]:
    async with FakeApiServer().client() as client:
        cache = SchedulerCache(client, ClusterState())
        chain = PluginChain((ResourceFit(FitSettings()),))
        yield Waiting(cache, PendingPods(client, cache.pods, cache.state, chain, lambda: NOW_S))


async def test_room_for_two_wakes_two_of_ten_and_those_with_the_highest_priority(waiting: Waiting) -> None:
    for number in range(10):
        waiting.reject(f"p{number}", 1000, priority=number % 4)
    assert waiting.due() == []
    waiting.offer("n1", 2500)
    assert waiting.due() == ["p3", "p7"]
    assert waiting.due() == [], "nothing has changed since"


async def test_room_that_kube_schedulers_own_plugins_do_not_accept_wakes_nothing(waiting: Waiting) -> None:
    waiting.reject("selective", 1000, "n2")
    waiting.offer("n1", 5000)
    assert waiting.due() == []
    waiting.offer("n2", 5000)
    assert waiting.due() == ["selective"]


async def test_a_pod_that_is_bound_deleted_or_fits_no_longer_waits(waiting: Waiting) -> None:
    pods = [waiting.reject(name, 1000) for name in ("bound", "deleted", "fits", "left")]
    bound, deleted, fits = pods[:3]
    metadata = msgspec.structs.replace(bound.metadata, resource_version="2")
    waiting.apply(msgspec.structs.replace(bound, metadata=metadata, spec=a_pod("bound", 1000, node="n2").spec))
    waiting.apply(deleted, WatchEventType.DELETED)
    waiting.pending.record_result(fits, (), is_rejected=False)
    assert len(waiting.pending) == 1
    waiting.offer("n1", 9000)
    assert waiting.due() == ["left"]


async def test_waiting_pods_are_counted_by_what_rejects_them_and_age_from_their_first_rejection() -> None:
    async with FakeApiServer().client() as client:
        cache, now_s = SchedulerCache(client, ClusterState()), [NOW_S]
        pending = PendingPods(
            client, cache.pods, cache.state, PluginChain((ResourceFit(FitSettings()),)), lambda: now_s[0]
        )
        assert (pending.oldest_age_s(), sum(pending.counts_by_plugin().values())) == (0, 0)
        first, second = a_pod("first", 1000), a_pod("second", 1000)
        pending.record_result(first, (), is_rejected=True, plugin="QoSAwareNodeResourcesFit")
        now_s[0] += 60
        pending.record_result(second, (), is_rejected=True, plugin="Gang")
        pending.record_result(first, (), is_rejected=True, plugin="Gang")
        assert pending.oldest_age_s() == 60
        counts = {"QoSAwareNodeResourcesFit": 0, "Invalid": 0, "Gang": 2, "Cache": 0, "Unknown": 0}
        assert pending.counts_by_plugin() == counts
        pending.record_result(first, (), is_rejected=False)
        assert (pending.oldest_age_s(), pending.counts_by_plugin()["Gang"]) == (0, 1)


async def test_after_a_restart_every_pending_pod_with_reclaimed_resources_is_tried_once(waiting: Waiting) -> None:
    waiting.apply(a_pod("batch", 1000))
    waiting.apply(a_pod("other"))
    waiting.apply(a_pod("running", 1000, node="n2"))
    waiting.offer("n1", 9000)
    waiting.pending.adopt_pending()
    assert waiting.due() == ["batch"]
    waiting.offer("n1", 9500)
    assert waiting.due(60) == [], "another scheduler may have it: this one would have sent a filter request"
    waiting.reject("batch", 1000)
    waiting.offer("n1", 9900)
    assert waiting.due(60) == ["batch"]


async def test_a_pod_that_is_tried_in_vain_is_tried_ever_less_often(waiting: Waiting) -> None:
    """Such as one whose node kube-scheduler's own plugins do not accept any more: each attempt is a write to the API server."""
    waiting.reject("vain", 1000)
    attempts_s = []
    for tenth in range(400):
        waiting.offer("n1", 5000 + tenth % 2)
        if waiting.due(tenth / 10):
            attempts_s.append(tenth / 10)
            waiting.reject("vain", 1000)
    assert attempts_s == [0, 1, 3, 7, 15, 23, 31, 39]


async def test_one_pod_of_a_gang_is_tried_for_all(waiting: Waiting) -> None:
    """It plans the others, and these are tried then."""
    for number in range(3):
        pod = waiting.reject(f"job{number}", 1000)
        waiting.join_gang(pod, "job")
    waiting.reject("single", 1000)
    waiting.offer("n1", 9000)
    assert waiting.due() == ["job0", "single"]
    waiting.offer("n1", 9500)
    assert waiting.due(0.5) == [], "nor another one meanwhile"


async def test_pods_beyond_the_minimum_of_a_started_gang_are_tried_each_for_itself(waiting: Waiting) -> None:
    for name in ("a", "b"):
        pod = waiting.join_gang(waiting.reject(name, 1000), "g")
        waiting.pending.record_result(pod, [0, 1], is_rejected=True, plugin="QoSAwareNodeResourcesFit")
    waiting.offer("n1", 2000)
    assert waiting.due() == ["a", "b"]


async def test_what_is_accepted_here_and_rejected_by_kube_scheduler_is_tried_ever_less_often_too(
    waiting: Waiting,
) -> None:
    """Each plan of a gang has all of its pods updated."""
    member = waiting.join_gang(waiting.reject("a", 1000), "g")
    other = waiting.reject("other", 1000)
    attempts_s: dict[str, list[float]] = {"a": [], "other": []}
    for half_s in range(32):
        for pod, plugin in ((member, "Gang"), (other, "QoSAwareNodeResourcesFit")):
            waiting.pending.record_result(pod, (), is_rejected=False)
            waiting.pending.record_result(pod, [0, 1], is_rejected=True, plugin=plugin)
        waiting.offer("n1", 9000)
        for name in waiting.due(half_s / 2):
            attempts_s[name].append(half_s / 2)
    assert attempts_s == {"a": [0, 1, 3, 7, 15], "other": [0, 1, 3, 7, 15]}


async def test_equal_pods_of_two_namespaces_are_evaluated_by_their_own_quota() -> None:
    async with FakeApiServer().client() as client:
        state = ClusterState()
        quotas = ElasticQuotas(state.namespace_requests)
        quotas.apply("full/quota", msgspec.convert({"spec": {"max": {RECLAIMED_CPU: "500"}}}, ElasticQuota))
        cache = SchedulerCache(client, state, quotas)
        chain = PluginChain((quotas, ResourceFit(FitSettings())))
        waiting = Waiting(cache, PendingPods(client, cache.pods, state, chain, lambda: NOW_S))
        for namespace in ("full", "default"):
            pod = a_pod("p", 1000)
            pod = msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, namespace=namespace))
            cache.pods._apply(WatchEvent(WatchEventType.ADDED, f"{namespace}/p", "1", pod))
            waiting.pending.record_result(pod, [0, 1], is_rejected=True)
        waiting.offer("n1", 9000)
        assert waiting.due() == ["p"]
        quotas.apply("full/quota", None)
        waiting.pending.record_room_everywhere()
        assert waiting.due(2) == ["full/p", "p"]


async def test_a_new_process_watches_for_room_for_pods_that_an_earlier_one_may_have_rejected(waiting: Waiting) -> None:
    amounts = {"cpu": "1", "memory": "1Gi"}
    spec = {"containers": [{"name": "c", "resources": {"requests": amounts, "limits": amounts}}]}
    for pod in (
        pod_of("dedicated", spec, "dedicated_cores"), pod_of("shared", spec), a_pod("reclaimed", 1000),
        pod_of("bound", {**spec, "nodeName": "n1"}, "dedicated_cores"),
    ):  # fmt: skip
        waiting.apply(pod)
    waiting.pending.adopt_pending()
    waiting.offer("n1", 1000)
    assert sorted(waiting.due()) == ["dedicated", "reclaimed"]


async def test_what_a_rejected_pod_remembers_of_5000_nodes_is_a_bit_for_each(waiting: Waiting) -> None:
    """A set of numbers had 650 KiB: 10,000 pending pods of one tenant had 6 GiB."""
    candidates = RowSet.of(np.arange(0, 5000, 2))
    assert len(candidates.bits) == 625
    rows = np.array([0, 1, 4998, 4999, 70_000])
    assert candidates.contains(rows).tolist() == [True, False, True, False, False]
    assert RowSet.of(np.array([-1])).contains(rows).tolist() == [False] * 5, "an unknown node is none"
    waiting.reject("p", 1000, "n1", "unknown")
    waiting.offer("n2", 1000)
    assert waiting.due() == []


async def test_a_request_that_arrives_after_the_deletion_of_its_pod_is_forgotten(waiting: Waiting) -> None:
    pod = waiting.reject("deleted", 1000)
    waiting.apply(pod, WatchEventType.DELETED)
    waiting.pending.record_result(pod, [0, 1], is_rejected=True)
    waiting.reject("waits", 1000)
    waiting.offer("n1", 100)
    assert (waiting.due(59), len(waiting.pending)) == ([], 2)
    waiting.offer("n1", 200)
    assert (waiting.due(61), len(waiting.pending)) == ([], 1)


async def test_a_thousand_different_pods_are_evaluated_in_parts_and_all_of_them(waiting: Waiting) -> None:
    pods = {f"p{n:03}": waiting.reject(f"p{n:03}", 1000 + n, priority=n) for n in range(1000)}
    waiting.offer("n1", 10**9)
    chain = waiting.pending._chain
    calls: list[int] = []
    waiting.pending._chain = CountingChain(chain.plugins, calls)
    woken: list[str] = []
    for interval in range(40):
        calls.append(0)
        for name in waiting.due(interval / 4):
            woken.append(name)
            waiting.pending.record_result(pods[name], (), is_rejected=False)
    assert max(calls) <= 130, "twenty milliseconds of filters at most, so that requests of kube-scheduler are answered"
    assert woken[:2] == ["p999", "p998"]
    assert sorted(woken) == sorted(pods)


async def test_a_gang_of_which_too_few_fit_is_tried_less_and_less_often_and_by_one_of_its_pods(
    waiting: Waiting,
) -> None:
    """Such pods would be tried every second, in vain, and keep the room from the pods after them."""
    for name in ("a", "b", "c"):
        pod = waiting.reject(name, 1000)
        pod = waiting.join_gang(pod, "g")
        waiting.pending.record_result(pod, [0, 1], is_rejected=True, plugin="Gang")
    times: dict[int, list[str]] = {}
    for at_s in range(30):
        waiting.offer("n1", 1000)
        if due := waiting.due(at_s):
            times[at_s] = due
    assert list(times) == [0, 1, 3, 7, 15, 23]
    assert {len(due) for due in times.values()} == {1}
    waiting.reject("other", 1000)
    waiting.offer("n1", 1000)
    assert waiting.due(24) == ["other"], "what the gang does not use is for others"
