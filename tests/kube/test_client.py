"""The HTTP client on real sockets: TLS, tokens, chunks, cut connections, slow bodies. What the API server itself does with
requests is shown on a real one; this server only plays back bytes."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web

from kube import client as client_module
from kube.client import KubeClient, ListScope
from kube.credentials import ApiAccess, ApiCredentials, CredentialData
from kube.errors import ApiError, ApiUnreachable, InvalidResponse
from kube.informer import Informer
from kube.objects import PartialObjectMetadata, ResourceType
from tests.builders.api_server import client_of, serving, status_response
from tests.exporters.certificates import Authority

PODS = ResourceType("", "v1", "pods", "Pod", PartialObjectMetadata, namespaced=True)
NODES = ResourceType("", "v1", "nodes", "Node", PartialObjectMetadata)
POD = '{"metadata":{"name":"web","namespace":"shop","resourceVersion":"%d"}}'


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def server_side(authority: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("localhost"))
    context.load_verify_locations(authority.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def test_client_and_server_verify_each_other_by_certificates(authority: Authority, tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        subject = dict(pair for (pair,) in request.transport.get_extra_info("peercert")["subject"])
        return status_response(200, f'{{"metadata":{{"name":"{subject["commonName"]}"}}}}')

    certificate, key = authority.issue("me")
    mine = ApiCredentials(
        authority=CredentialData(path=authority.certificate),
        certificate=CredentialData(path=certificate),
        key=CredentialData(path=key),
    )
    async with serving(handler, server_side(authority)) as server:
        async with KubeClient(ApiAccess(server, mine), "test") as client:
            assert (await client.get(NODES, "a")).metadata.name == "me"
        stranger = ApiCredentials(authority=CredentialData(path=Authority(tmp_path, "other").certificate))
        async with KubeClient(ApiAccess(server, stranger), "test") as client:
            with pytest.raises(ApiUnreachable, match="certificate verify failed"):
                await client.get(NODES, "a")


async def test_method_path_query_type_and_body_of_requests() -> None:
    received: list[tuple[str, str, str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        content_type = request.headers.get("Content-Type", "")
        received.append((request.method, request.raw_path, content_type, (await request.read()).decode()))
        return status_response(200, POD % 1)

    async with client_of(handler) as client:
        await client.merge_patch(PODS, "shop/web", {"metadata": {"labels": {"a": None}}})
        await client.merge_patch(PODS, "shop/web", {"status": {}}, "status")
        await client.apply(PODS, "shop/web", {"spec": {"x": 1}}, "dioptase")
        await client.create(NODES, {"metadata": {"name": "n"}})
        await client.delete(PODS, "shop/web", uid="u-1", grace_s=0)
        await client.evict(PODS, "shop/web", uid="u-1")
        await client.list(PODS, ListScope(namespace="shop", labels="a in (b,c)", fields="spec.nodeName=n"))
    applied = '{"spec":{"x":1},"apiVersion":"v1","kind":"Pod","metadata":{"name":"web","namespace":"shop"}}'
    evicted = (
        '{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"web","namespace":"shop"},'
        '"deleteOptions":{"preconditions":{"uid":"u-1"}}}'
    )
    web_ = "/api/v1/namespaces/shop/pods/web"
    assert received == [
        ("PATCH", web_, "application/merge-patch+json", '{"metadata":{"labels":{"a":null}}}'),
        ("PATCH", f"{web_}/status", "application/merge-patch+json", '{"status":{}}'),
        ("PATCH", f"{web_}?fieldManager=dioptase&force=true", "application/apply-patch+yaml", applied),
        ("POST", "/api/v1/nodes", "application/json", '{"metadata":{"name":"n"}}'),
        ("DELETE", web_, "application/json", '{"preconditions":{"uid":"u-1"},"gracePeriodSeconds":0}'),
        ("POST", f"{web_}/eviction", "application/json", evicted),
        (
            "GET",
            "/api/v1/namespaces/shop/pods?labelSelector=a+in+(b,c)&fieldSelector=spec.nodeName%3Dn&limit=500",
            "",
            "",
        ),
    ]


async def test_a_rotated_token_is_sent_in_the_second_attempt(tmp_path: Path) -> None:
    path, received = tmp_path / "token", list[str]()
    path.write_text("old")

    async def handler(request: web.Request) -> web.Response:
        received.append(request.headers["Authorization"])
        path.write_text("young")
        return status_response(200, POD % 1) if received[-1] == "Bearer young" else status_response(401, "who?")

    async with client_of(handler, ApiCredentials(token=CredentialData(path=path))) as client:
        await client.get(NODES, "a")
        assert received == ["Bearer old", "Bearer young"]
        path.write_text("neither")
        assert client.requests == {("GET", "nodes.v1", "401"): 1, ("GET", "nodes.v1", "200"): 1}


async def test_a_401_is_retried_once() -> None:
    count = 0

    async def handler(_request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return status_response(401, '{"kind":"Status","message":"Unauthorized","reason":"Unauthorized","code":401}')

    async with client_of(handler) as client:
        with pytest.raises(ApiError, match="401 Unauthorized: Unauthorized"):
            await client.get(NODES, "a")
    assert count == 2


async def test_retry_after_is_respected_except_for_evictions() -> None:
    answers = [
        status_response(429, "later", Retry_After="0"),
        status_response(503, "later", Retry_After="0"),
        status_response(200, POD % 3),
    ]
    budget = (
        '{"code":429,"reason":"TooManyRequests","message":"would violate","details":{"causes":'
        '[{"reason":"DisruptionBudget"}],"retryAfterSeconds":0}}'
    )

    async def handler(request: web.Request) -> web.Response:
        return status_response(429, budget) if request.path.endswith("/eviction") else answers.pop(0)

    async with client_of(handler) as client:
        with pytest.raises(ApiError) as caught:
            await client.evict(PODS, "shop/web")
        assert (caught.value.status, caught.value.causes) == (429, ("DisruptionBudget",))
        assert (await client.get(NODES, "a")).metadata.resource_version == "3"
        assert client.requests["POST", "pods.v1/eviction", "429"] == 1


async def test_a_redirect_is_reported_and_not_followed() -> None:
    async def handler(request: web.Request) -> web.Response:
        return status_response(302, "<h1>Sign\n in</h1>", Location="http://127.0.0.1:1/steal")

    async with client_of(handler, ApiCredentials(token=CredentialData(data=b"secret"))) as client:
        with pytest.raises(ApiError, match="302: <h1>Sign in</h1>"):
            await client.get(NODES, "a")


async def test_pages_are_joined_and_an_expired_page_leads_to_a_list_without_pages() -> None:
    requests: list[str] = []
    first, second = ('{"metadata":{"name":"a"}}', '{"metadata":{"name":"b"}}')

    async def handler(request: web.Request) -> web.Response:
        requests.append(request.query_string)
        if "continue" in request.query:
            return status_response(410, '{"code":410,"reason":"Expired","message":"continue parameter is too old"}')
        if "limit" in request.query:
            return status_response(
                200, '{"metadata":{"resourceVersion":"9","continue":"c/1=="},"items":[' + first + "]}"
            )
        return status_response(200, '{"metadata":{"resourceVersion":"12"},"items":[' + first + "," + second + "]}")

    async with client_of(handler) as client:
        listing = await client.list(NODES)
    assert (listing.resource_version, sorted(listing.objects)) == ("12", ["a", "b"])
    assert requests == ["limit=500", "limit=500&continue=c/1%3D%3D", ""]


async def test_partial_metadata_is_requested() -> None:
    class WholeObject(PartialObjectMetadata, frozen=True, kw_only=True):
        spec: int = 0

    accepted: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        accepted.append(request.headers["Accept"].partition(",")[0])
        return status_response(200, '{"metadata":{}}')

    async with client_of(handler) as client:
        await client.get(NODES, "a")
        await client.list(NODES)
        await client.list(ResourceType("", "v1", "nodes", "Node", WholeObject))
    assert accepted == [
        "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
        "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
        "application/json",
    ]


@pytest.mark.parametrize("text", ["<html>", "", "null", '{"items":[7]}', '{"metadata":[]}', "[" * 9999], ids=range(6))
async def test_an_invalid_list_is_an_invalid_response(text: str) -> None:
    async def handler(_request: web.Request) -> web.Response:
        return status_response(200, text)

    async with client_of(handler) as client:
        with pytest.raises(InvalidResponse, match="unexpected response"):
            await client.list(NODES)


async def test_an_invalid_host_name_is_unreachable() -> None:
    async with KubeClient(ApiAccess("http://a..b:1", ApiCredentials()), "test") as client:
        with pytest.raises(ApiUnreachable):
            await client.get(NODES, "a")


async def test_a_body_that_does_not_end_in_time_is_unreachable() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" ")
            await asyncio.sleep(0.02)

    async with client_of(handler, timeout_s=0.2) as client:
        with pytest.raises(ApiUnreachable, match="GET /api/v1/nodes/a"):
            await client.get(NODES, "a")
        assert client.requests == {("GET", "nodes.v1", "unreachable"): 1}


async def test_a_truncated_body_and_one_that_is_too_large_are_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "100"})
        await answer.prepare(request)
        await answer.write(b"{}")
        assert request.transport is not None
        request.transport.abort() if request.path.endswith("cut") else await answer.write(b" " * 98)
        return answer

    async with client_of(handler) as client:
        with pytest.raises(ApiUnreachable):
            await client.get(NODES, "cut")
        monkeypatch.setattr(client_module, "MAX_RESPONSE_BYTES", 50)
        with pytest.raises(ApiUnreachable, match="more than 50 bytes"):
            await client.get(NODES, "large")


async def test_an_unreachable_server() -> None:
    async with KubeClient(ApiAccess("http://127.0.0.1:1", ApiCredentials()), "test") as client:
        with pytest.raises(ApiUnreachable, match=r"http://127\.0\.0\.1:1: GET /api/v1/nodes/a: "):
            await client.get(NODES, "a")


async def test_the_end_of_a_silent_watch_updates_the_age() -> None:
    """An API server sends no bookmarks for a resource that has not changed since its start."""
    lasting, began = list[int](), list[float]()
    over = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return status_response(200, '{"metadata":{"resourceVersion":"5"},"items":null}')
        lasting.append(int(request.query["timeoutSeconds"]))
        began.append(time.monotonic())
        if len(lasting) == 2:
            over.set()
            await asyncio.sleep(60)
        return status_response(200, "")

    async with client_of(handler) as client:
        informer = Informer(client, PODS, max_s=120)
        running = asyncio.create_task(informer.run())
        await asyncio.wait_for(over.wait(), 10)
        running.cancel()
    assert all(60 <= first <= 120 for first in lasting), lasting
    now_s = time.monotonic()
    age_s = informer.age_s(now_s)
    assert age_s is not None
    assert age_s < now_s - began[0], "the end of the first one"


async def test_other_tasks_run_between_the_objects_of_the_first_list() -> None:
    """Else the lease of a leader that begins to watch 150,000 pods is not renewed for seconds."""
    items = ",".join(f'{{"metadata":{{"name":"p{number}","namespace":"n"}}}}' for number in range(2100))

    async def handler(request: web.Request) -> web.Response:
        if "watch" in request.query:
            await asyncio.sleep(60)
        return status_response(200, f'{{"metadata":{{"resourceVersion":"5"}},"items":[{items}]}}')

    turn, turns = 0, list[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async with client_of(handler) as client:
        informer = Informer(client, PODS)
        informer.listen(lambda _change: turns.append(turn))
        tasks = [asyncio.create_task(each) for each in (count_turns(), informer.run())]
        await asyncio.wait_for(informer.synced.wait(), 10)
        for task in tasks:
            task.cancel()
    assert len(turns) == 2100, "all are notified before the list counts as received"
    assert max(Counter(turns).values()) == 500


async def test_a_watch_cut_within_a_line_resumes_after_the_last_complete_one() -> None:
    """The pieces are played back, one watch after another, and the version that each begins at is recorded."""
    event = '{"type":"%s","object":' + POD + "}\n"
    streams = [
        [event % ("ADDED", 6), event % ("MODIFIED", 7) + (event % ("DELETED", 8))[:30]],
        [event % ("DELETED", 8)],
    ]
    since: list[str] = []
    over = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return status_response(200, '{"metadata":{"resourceVersion":"5"},"items":null}')
        since.append(request.query["resourceVersion"])
        answer = web.StreamResponse()
        await answer.prepare(request)
        pieces = streams.pop(0) if streams else []
        if not pieces:
            over.set()
        for piece in pieces:
            await answer.write(piece.encode())
            await asyncio.sleep(0.02)
        assert request.transport is not None
        request.transport.abort()
        return answer

    headers_received: list[tuple[str | None, str | None]] = []
    async with client_of(handler) as client:
        informer = Informer(client, PODS)
        informer.listen(
            lambda change: headers_received.append(
                (
                    change.old and change.old.metadata.resource_version,
                    change.new and change.new.metadata.resource_version,
                )
            )
        )
        running = asyncio.create_task(informer.run())
        await asyncio.wait_for(over.wait(), 10)
        running.cancel()
    assert since == ["5", "7", "8"]
    assert headers_received == [(None, "6"), ("6", "7"), ("7", None)]
    assert (len(informer.store), informer.relists, informer.synced.is_set()) == (0, 0, True)


async def test_a_name_with_odd_letters_is_one_segment_of_the_path() -> None:
    received: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        received.append(request.raw_path)
        return status_response(200, POD % 1)

    async with client_of(handler) as client:
        await client.get(NODES, "a b?c#d")
    assert received == ["/api/v1/nodes/a%20b%3Fc%23d"]


async def test_a_raw_response_is_returned_unchanged() -> None:
    requests = []

    async def handler(request: web.Request) -> web.Response:
        requests.append((request.path_qs, request.headers.get("X-Mine")))
        return status_response(503, "busy\n", Retry_After="9")

    async with client_of(handler) as client:
        raw = await client.raw("/api/v1/namespaces/x/pods/https:a:1/proxy/p?limit=2", "pods/proxy", {"X-Mine": "1"})
        assert (raw.status, raw.body) == (503, b"busy\n"), "a raw response is returned as it is"
        assert client.requests == {("GET", "pods/proxy", "503"): 1}
    assert requests == [("/api/v1/namespaces/x/pods/https:a:1/proxy/p?limit=2", "1")]


async def test_tokens_are_created_by_the_subresource_of_the_account() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.path == "/api/v1/namespaces/team/serviceaccounts/viewer/token"
        assert (await request.json())["spec"] == {"expirationSeconds": 600}
        return status_response(201, '{"status": {"token": "abc"}}')

    async def garbage(_request: web.Request) -> web.Response:
        return status_response(201, '{"status": {}}')

    async with client_of(handler) as client:
        assert await client.token("team/viewer", 600) == "abc"
    async with client_of(garbage) as client:
        with pytest.raises(InvalidResponse):
            await client.token("team/viewer", 600)
