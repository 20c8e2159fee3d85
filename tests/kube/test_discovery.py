"""Responses that state that a kind is missing, and 404s that do not."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from kube.errors import parse_api_error
from kube.informer import Informer, is_kind_missing
from kube.objects import PartialObjectMetadata, ResourceType
from tests.builders.api_server import client_of, status_response

THINGS = ResourceType("shop.example", "v1", "things", "Thing", PartialObjectMetadata)
PODS = ResourceType("", "v1", "pods", "Pod", PartialObjectMetadata, namespaced=True)
PLAIN = (404, "404 page not found\n")
PAGE = (404, "<html><h1>404 Not Found</h1><hr>nginx</html>")


def kinds(*plurals: str) -> tuple[int, str]:
    return 200, json.dumps({"kind": "APIResourceList", "resources": [{"name": plural} for plural in plurals]})


def groups(*versions: str) -> tuple[int, str]:
    listed = [{"name": version.partition("/")[0], "versions": [{"groupVersion": version}]} for version in versions]
    return 200, json.dumps({"kind": "APIGroupList", "groups": listed})


@pytest.mark.parametrize(
    ("group", "all_groups", "lacking"),
    [
        (kinds("others"), PLAIN, True),
        (kinds("things", "others"), PLAIN, False),
        (PLAIN, groups("apps/v1", "shop.example/v2"), True),
        # The group exists, and its version is not served for a moment.
        (PLAIN, groups("shop.example/v1"), False),
        # Responses of a proxy.
        (PAGE, PAGE, False),
        (PAGE, (200, "<html>welcome</html>"), False),
        ((200, "{}"), groups(), False),
        ((200, '{"kind":"Status","resources":[]}'), groups(), False),
        (PLAIN, (403, "no"), False),
        ((503, ""), groups(), False),
    ],
)
async def test_a_kind_is_missing_only_if_the_api_server_states_it(
    group: tuple[int, str], all_groups: tuple[int, str], *, lacking: bool
) -> None:
    documents = {"/apis/shop.example/v1": group, "/apis": all_groups}

    async def answer(request: web.Request) -> web.StreamResponse:
        status, text = documents[request.path]
        return status_response(status, text)

    async with client_of(answer) as client:
        assert await is_kind_missing(client, THINGS) is lacking
        assert not await is_kind_missing(client, PODS), "without a request"


@pytest.mark.parametrize("lacking", [True, False])
async def test_an_informer_clears_its_store_only_for_a_missing_kind(*, lacking: bool) -> None:
    lists = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal lists
        if "watch" in request.query:
            return status_response(410, '{"kind":"Status","reason":"Expired","code":410}')
        if request.path == "/apis/shop.example/v1":
            return status_response(*(kinds() if lacking else PAGE))
        if request.path == "/apis":
            return status_response(*PAGE)
        lists += 1
        if lists > 1:
            return status_response(*PLAIN)
        thing = {"metadata": {"name": "a", "resourceVersion": "1"}}
        return status_response(200, json.dumps({"metadata": {"resourceVersion": "1"}, "items": [thing]}))

    async with client_of(answer) as client:
        informer = Informer(client, THINGS)
        running = asyncio.create_task(informer.run())
        async with asyncio.timeout(30):
            await informer.synced.wait()
            while lists < 3:
                await asyncio.sleep(0.01)
        assert (informer.missing, set(informer.store)) == ((True, set()) if lacking else (False, {"a"}))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        (b'{"kind":"Status","reason":"NotFound","code":404,"details":{"name":"web","kind":"pods"}}', True),
        (b'{"kind":"Status","reason":"NotFound","code":404,"details":{}}', False),
        (b"404 page not found\n", False),
        (b"<html>404</html>", False),
        (b"", False),
    ],
)
def test_an_object_is_missing_where_the_api_server_names_it(body: bytes, *, missing: bool) -> None:
    error = parse_api_error(404, body)
    assert (error.missing, error.path_not_served) == (missing, not missing)
