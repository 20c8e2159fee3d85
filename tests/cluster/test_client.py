"""The product's client and a real API server: resumed watches, bookmarks, field owners, leases, and disruption budgets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Mapping

import pytest

from kube.client import KubeClient, ListScope
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.leader_election import LEASE_S, LEASES, LeaderElection
from kube.objects import PartialObjectMetadata, ResourceType, UnstructuredObject
from kube.watch import WatchEvent, WatchEventType
from tests.builders.waiting import until_async
from tests.cluster.cluster import Cluster
from tests.cluster.objects import a_map, a_pod
from tests.cluster.server import APPLY, Refused, Server

pytestmark = pytest.mark.cluster


class ConfigMap(PartialObjectMetadata, frozen=True, kw_only=True):
    data: Mapping[str, str] = {}


MAPS = ResourceType("", "v1", "configmaps", "ConfigMap", ConfigMap, namespaced=True)
PODS = ResourceType("", "v1", "pods", "Pod", UnstructuredObject, namespaced=True)


@contextlib.asynccontextmanager
async def running(task: Awaitable[None]) -> AsyncIterator[None]:
    started = asyncio.ensure_future(task)
    try:
        yield
    finally:
        started.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await started


async def test_lists_come_in_pages_and_whole(client: KubeClient, server: Server, namespace: str) -> None:
    for number in range(7):
        await client.create(MAPS, a_map(f"m{number}", n=str(number)), namespace)
    listing = await client.list(MAPS, ListScope(namespace=namespace, fields="metadata.name!=kube-root-ca.crt"))
    assert {key: item.data["n"] for key, item in listing.objects.items()} == {
        f"{namespace}/m{number}": str(number) for number in range(7)
    }
    assert listing.problems == {}


async def test_a_watch_tells_every_change_in_order(client: KubeClient, namespace: str) -> None:
    scope = ListScope(namespace=namespace, fields="metadata.name=one")
    since = (await client.list(MAPS, scope)).resource_version
    await client.create(MAPS, a_map("one", a="1"), namespace)
    await client.merge_patch(MAPS, f"{namespace}/one", {"data": {"a": "2", "b": "3"}})
    await client.merge_patch(MAPS, f"{namespace}/one", {"data": {"a": None}})
    await client.delete(MAPS, f"{namespace}/one")
    observed = []
    async with contextlib.aclosing(client.watch(MAPS, since, scope, 30)) as events:
        async for event in events:
            observed.append((event.what, None if event.object is None else event.object.data))
            if event.what is WatchEventType.DELETED:
                break
    assert observed == [
        (WatchEventType.ADDED, {"a": "1"}),
        (WatchEventType.MODIFIED, {"a": "2", "b": "3"}),
        (WatchEventType.MODIFIED, {"b": "3"}),
        (WatchEventType.DELETED, {"b": "3"}),
    ]


async def _events(client: KubeClient, since: str, scope: ListScope, lasts_s: int) -> list[WatchEvent[ConfigMap]]:
    return [event async for event in client.watch(MAPS, since, scope, lasts_s)]


@pytest.mark.long
async def test_a_bookmark_carries_a_quiet_watch_past_what_others_wrote(client: KubeClient, namespace: str) -> None:
    """Shortly before it ends; so the next watch need not begin where nothing is kept any longer."""
    scope = ListScope(namespace=namespace, fields="metadata.name=nobody")
    since = (await client.list(MAPS, scope)).resource_version
    watched = asyncio.ensure_future(_events(client, since, scope, 8))
    await asyncio.sleep(1.5)
    written = await client.create(MAPS, a_map("other"), namespace)
    events = await watched
    assert {event.what for event in events} == {WatchEventType.BOOKMARK}
    assert int(events[-1].resource_version) >= int(written.metadata.resource_version) > int(since)


async def test_a_watch_of_what_is_forgotten_is_refused_as_expired(
    own_cluster: Cluster, client: KubeClient, namespace: str
) -> None:
    since = (await client.list(MAPS, ListScope(namespace=namespace))).resource_version
    for number in range(3):
        await client.merge_patch(
            MAPS, f"{namespace}/{(await client.create(MAPS, a_map(f'm{number}'), namespace)).metadata.name}",
            {"data": {"a": "b"}},
        )  # fmt: skip
    assert await asyncio.to_thread(own_cluster.compact) > int(since)
    await asyncio.to_thread(own_cluster.restart_server)
    with pytest.raises(ApiError) as raised:
        await anext(client.watch(MAPS, since, ListScope(namespace=namespace), 5))
    assert raised.value.expired, raised.value


async def test_an_informer_misses_nothing_while_the_server_is_killed_and_the_store_compacted(
    own_cluster: Cluster, client: KubeClient, server: Server, namespace: str
) -> None:
    informer = Informer(client, MAPS, ListScope(namespace=namespace, fields="metadata.name!=kube-root-ca.crt"))
    messages: list[tuple[str, bool]] = []
    informer.listen(lambda change: messages.append((change.key.rpartition("/")[2], change.new is not None)))
    path = f"/api/v1/namespaces/{namespace}/configmaps"

    def away() -> None:
        own_cluster.daemons.end("kube-apiserver")
        own_cluster.daemons.again("kube-apiserver")
        own_cluster.control.ready()
        # The informer waits a moment before it comes back: what it is to find out happens meanwhile.
        server.ask("DELETE", f"{path}/goes")
        server.ask("POST", path, a_map("comes"))
        own_cluster.compact()

    async with running(informer.run()):
        await client.create(MAPS, a_map("stays"), namespace)
        await client.create(MAPS, a_map("goes"), namespace)
        await until_async(lambda: len(informer.store) == 2, "both are known", 60)
        await asyncio.to_thread(away)
        await until_async(lambda: f"{namespace}/comes" in informer.store, "the change is known", 60)
        await until_async(lambda: len(informer.store) == 2, "and the other", 60)
        assert set(informer.store) == {f"{namespace}/stays", f"{namespace}/comes"}
        assert sorted(messages) == [("comes", True), ("goes", False), ("goes", True), ("stays", True)]


async def test_an_informer_lists_again_after_410(
    own_cluster: Cluster, client: KubeClient, server: Server, namespace: str
) -> None:
    """It is held back until history is gone, as behind a network that was cut."""
    informer = Informer(client, MAPS, ListScope(namespace=namespace, fields="metadata.name!=kube-root-ca.crt"))
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    async with running(informer.run()):
        await client.create(MAPS, a_map("goes"), namespace)
        await until_async(lambda: len(informer.store) == 1, "it is known", 60)
    server.ask("DELETE", f"{path}/goes")
    server.ask("POST", path, a_map("comes"))
    await asyncio.to_thread(own_cluster.compact)
    await asyncio.to_thread(own_cluster.restart_server)
    async with running(informer.run()):
        await until_async(lambda: f"{namespace}/comes" in informer.store, "it has listed", 60)
    assert set(informer.store) == {f"{namespace}/comes"}
    assert informer.relists == 1


async def test_a_field_that_another_manager_holds_is_a_conflict_unless_taken(
    client: KubeClient, server: Server, namespace: str
) -> None:
    key, path = f"{namespace}/shared", f"/api/v1/namespaces/{namespace}/configmaps/shared"
    await client.apply(MAPS, key, {"data": {"own_cluster": "1", "both": "1"}}, "dioptase")
    other = {**a_map("shared", both="2"), "metadata": {"name": "shared", "namespace": namespace}}
    with pytest.raises(Refused) as refused:
        server.ask("PATCH", f"{path}?fieldManager=kubectl", other, APPLY)
    assert refused.value.status == 409
    assert [(result["reason"], result["field"]) for result in refused.value.status_body["details"]["causes"]] == [
        ("FieldManagerConflict", ".data.both")
    ]
    server.ask("PATCH", f"{path}?fieldManager=kubectl&force=true", other, APPLY)
    # A field that we do not apply any more is removed, unless another manager owns it too.
    after = await client.apply(MAPS, key, {"data": {"both": "3"}}, "dioptase")
    assert after.data == {"both": "3"}
    managers = {item["manager"]: item["fieldsV1"] for item in server.ask("GET", path)["metadata"]["managedFields"]}
    assert managers["dioptase"] == {"f:data": {"f:both": {}}}


async def test_a_patch_with_a_version_is_a_compare_and_swap(client: KubeClient, namespace: str) -> None:
    first = await client.create(MAPS, a_map("one"), namespace)
    patch = {"metadata": {"resourceVersion": first.metadata.resource_version}, "data": {"a": "1"}}
    await client.merge_patch(MAPS, f"{namespace}/one", patch)
    with pytest.raises(ApiError) as raised:
        await client.merge_patch(MAPS, f"{namespace}/one", patch)
    assert raised.value.conflict


async def test_another_object_of_the_same_name_is_not_deleted(client: KubeClient, namespace: str) -> None:
    first = await client.create(MAPS, a_map("one"), namespace)
    await client.delete(MAPS, f"{namespace}/one", first.metadata.uid)
    await client.create(MAPS, a_map("one"), namespace)
    with pytest.raises(ApiError) as raised:
        await client.delete(MAPS, f"{namespace}/one", first.metadata.uid)
    assert raised.value.conflict


async def test_of_two_one_leads_and_the_other_follows_when_it_is_given_back(client: KubeClient, namespace: str) -> None:
    key = f"{namespace}/controller"
    elections = [LeaderElection(client, key, name) for name in ("a", "b")]
    at_work: list[str] = []
    most = 0

    async def work(name: str) -> None:
        nonlocal most
        at_work.append(name)
        most = max(most, len(at_work))
        try:
            await asyncio.sleep(3600)
        finally:
            at_work.remove(name)

    tasks = [
        asyncio.ensure_future(election.lead(lambda name=name: work(name)))
        for election, name in zip(elections, "ab", strict=True)
    ]
    await until_async(lambda: at_work, "one leads", 60)
    await asyncio.sleep(5)
    first = (elections[0].leading and "a") or "b"
    assert at_work == [first]
    began = time.monotonic()
    leader = tasks.pop("ab".index(first))
    leader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leader
    await until_async(lambda: at_work and at_work != [first], "the other leads", 60)
    assert time.monotonic() - began < LEASE_S, "it was given back, and not waited for"
    lease = await client.get(LEASES, key)
    assert (lease.spec.holder_identity, lease.spec.lease_transitions, most) == (({"a", "b"} - {first}).pop(), 1, 1)
    tasks[0].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await tasks[0]


@pytest.mark.long
async def test_a_leader_stops_working_while_the_server_is_away_and_leads_again(
    own_cluster: Cluster, client: KubeClient, namespace: str
) -> None:
    at_work = 0

    async def work() -> None:
        nonlocal at_work
        at_work += 1
        try:
            await asyncio.sleep(3600)
        finally:
            at_work -= 1

    async def lead() -> None:
        election = LeaderElection(client, f"{namespace}/controller", "a")
        while True:
            await election.lead(work)

    async with running(lead()):
        await until_async(lambda: at_work == 1, "it leads", 60)
        await asyncio.to_thread(own_cluster.daemons.end, "kube-apiserver")
        try:
            await until_async(lambda: at_work == 0, "it has stopped", LEASE_S)
        finally:
            await asyncio.to_thread(own_cluster.daemons.again, "kube-apiserver")
        await asyncio.to_thread(own_cluster.control.ready)
        await until_async(lambda: at_work == 1, "it leads again", 60)


async def test_an_absent_server_differs_from_a_refusal(own_cluster: Cluster, client: KubeClient) -> None:
    await asyncio.to_thread(own_cluster.daemons.end, "kube-apiserver")
    try:
        with pytest.raises(ApiUnreachable, match="GET /api/v1/namespaces/default/configmaps/x"):
            await client.get(MAPS, "default/x")
    finally:
        await asyncio.to_thread(own_cluster.daemons.again, "kube-apiserver")
    await asyncio.to_thread(own_cluster.control.ready)
    with pytest.raises(ApiError) as raised:
        await client.get(MAPS, "default/x")
    assert raised.value.missing


async def test_a_pod_that_its_budget_needs_is_not_evicted_and_another_is(
    client: KubeClient, server: Server, workspace: str
) -> None:
    namespace = workspace
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}
    server.ask("POST", budgets, {"metadata": {"name": "web"}, "spec": spec})
    pods = {name: await client.create(PODS, a_pod(name, app="web"), namespace) for name in ("one", "two")}
    uids = {name: pod.metadata.uid for name, pod in pods.items()}
    await until_async(
        lambda: server.ask("GET", f"{budgets}/web").get("status", {}).get("disruptionsAllowed") == 1,
        "the budget allows one",
        60,
    )
    await client.evict(PODS, f"{namespace}/one", uids["one"])
    with pytest.raises(ApiError) as raised:
        await client.evict(PODS, f"{namespace}/two", uids["two"])
    assert (raised.value.status, raised.value.causes) == (429, ("DisruptionBudget",))
    await until_async(
        lambda: [pod["metadata"]["name"] for pod in server.ask("GET", PODS.collection(namespace))["items"]] == ["two"],
        "only the other is left",
        60,
    )


async def test_another_pod_than_the_one_that_was_meant_is_not_evicted(client: KubeClient, workspace: str) -> None:
    """Without a budget: from one, the server takes what it then does not use, and gives it back minutes later."""
    key = f"{workspace}/one"
    pod = await client.create(PODS, a_pod("one"), workspace)
    with pytest.raises(ApiError) as raised:
        await client.evict(PODS, key, "another")
    assert raised.value.conflict
    await client.evict(PODS, key, pod.metadata.uid)
