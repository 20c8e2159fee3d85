"""The server on a real socket: what it serves, what it refuses, and that it never makes anything up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from aiohttp import web
from yarl import URL

from api.interfaces import Unavailable
from exporters.malachite.server import DOCUMENTS, MalachiteRefused, MalachiteServer, requested_path
from tests.exporters.malachite import contract
from tests.exporters.malachite.machine import BUSY, V1, V2, finished, snapshot


class Client:
    """One session against one server."""

    def __init__(self, server: MalachiteServer, port: int) -> None:
        self.server, self.port = server, port
        self.session = aiohttp.ClientSession()

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
        url = URL(f"http://127.0.0.1:{self.port}/api/v1/{path}", encoded=True)
        async with self.session.request(method, url, headers=headers) as answer:
            assert answer.content_type == "application/json"
            body = await answer.read()
            return answer.status, json.loads(body) if body else None

    async def cgroup(self, path: str) -> tuple[int, Any]:
        return await self.get(f"cgroup/groups?cgroup_user_path={quote(path, safe='')}")

    async def refused(self, path: str, status: int, **headers: str) -> str:
        got, body = await self.get(path, **headers)
        assert (got, body["status"]) == (status, 1)
        assert "data" not in body
        return str(body["message"])


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    server = MalachiteServer(V1)
    client = Client(server, await server.start("127.0.0.1", 0))
    for second in (1, 2):
        server.publish(finished(snapshot(second)))
    yield client
    await client.session.close()
    await server.stop()


@pytest.mark.parametrize("name", DOCUMENTS)
async def test_every_document_is_served_as_the_client_decodes_it(client: Client, name: str) -> None:
    status, body = await client.get(name)
    assert (status, body["status"]) == (200, 0)
    assert not list(contract.breaches(body["data"], contract.DOCUMENTS[name]))


@pytest.mark.parametrize("layout", [V1, V2], ids=lambda layout: layout.version)
async def test_every_cgroup_is_served(layout: Any) -> None:
    server = MalachiteServer(layout)
    client = Client(server, await server.start("127.0.0.1", 0))
    shown = snapshot(3, layout)
    server.publish(finished(shown))
    for path in shown.cgroups:
        status, body = await client.cgroup(path)
        assert (status, body["status"]) == (200, 0)
        data = body["data"]
        assert (data["cgroup_type"], data["user_path"]) == (layout.version, path)
        assert not list(contract.breaches(data, contract.cgroup(layout.version)))
    await client.session.close()
    await server.stop()


async def test_paths_as_the_client_and_as_people_write_them(client: Client) -> None:
    for path in (BUSY, f"{BUSY}/", BUSY.removeprefix("/"), f"/{BUSY}"):
        status, body = await client.cgroup(path)
        assert (status, body["data"]["user_path"]) == (200, BUSY)


@pytest.mark.parametrize(
    ("query", "status", "states"),
    [
        ("", 400, "once"),
        ("?cgroup_user_path=", 400, "once"),
        ("?cgroup_user_path=%2Fa&cgroup_user_path=%2Fb", 400, "once"),
        ("?path=%2Fkubepods", 400, "once"),
        ("?cgroup_user_path=%2F..%2F..%2Fetc%2Fpasswd", 400, "no path of a cgroup"),
        ("?cgroup_user_path=%2Fkubepods%2F.%2Fx", 400, "no path of a cgroup"),
        ("?cgroup_user_path=%2Fkube%00pods", 400, "no path of a cgroup"),
        ("?cgroup_user_path=" + "a" * 4097, 414, "longer than 4096"),
        ("?cgroup_user_path=" + "%2Fa" * 2500, 414, "longer than 4096"),
        ("?cgroup_user_path=" + "a%2F" * 5000, 414, "longer than 4096"),
        ("?cgroup_user_path=%2Fkubepods%2Fpod-that-is-gone", 404, "no cgroup"),
        ("?cgroup_user_path=%252e%252e%252fetc", 404, "no cgroup"),
        ("?cgroup_user_path=%ff%fe", 404, "no cgroup"),
        ("?cgroup_user_path=%zz%", 404, "no cgroup"),
        ("?cgroup_user_path=%2Fkubepods%0a", 404, "no cgroup"),
        ("?cgroup_user_path=" + "&a=b" * 20, 400, "cannot be read"),
    ],
)
async def test_hostile_and_unknown_paths_get_a_clear_error(
    client: Client, query: str, status: int, states: str
) -> None:
    assert states in await client.refused(f"cgroup/groups{query}", status)


async def test_a_name_with_every_kind_of_byte_is_found(client: Client) -> None:
    name = '/größe &?%2F"\\x07 +#'
    base = snapshot(3)
    odd = msgspec.structs.replace(base.cgroups[BUSY], path=name)
    client.server.publish(finished(msgspec.structs.replace(base, cgroups={name: odd})))
    status, body = await client.cgroup(name)
    assert (status, body["data"]["user_path"]) == (200, name)


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("%2Fpod%FF%FE", r"/pod\xff\xfe"),
        ("/caf%E9/gr%C3%B6%C3%9Fe", r"/caf\xe9/größe"),
        ("%2Ftab%09esc%1B%0A", r"/tab\x09esc\x1b\x0a"),
        ("%2F%5Cxff", r"/\x5cxff"),
        ("%2Fa%5Cx2db.slice", r"/a\x2db.slice"),
    ],
)
async def test_the_kernels_own_bytes_of_a_name_find_it(client: Client, query: str, shown: str) -> None:
    base = snapshot(3)
    odd = msgspec.structs.replace(base.cgroups[BUSY], path=shown)
    client.server.publish(finished(msgspec.structs.replace(base, cgroups={shown: odd})))
    for spelled in (query, quote(shown, safe="")):
        status, body = await client.get(f"cgroup/groups?cgroup_user_path={spelled}")
        assert (status, body["data"]["user_path"]) == (200, shown)


async def test_bytes_come_before_a_spelling_that_another_name_has(client: Client) -> None:
    base = snapshot(3)
    names = (r"/\xff", r"/\x5cxff")
    client.server.publish(
        finished(
            msgspec.structs.replace(
                base, cgroups={name: msgspec.structs.replace(base.cgroups[BUSY], path=name) for name in names}
            )
        )
    )
    for query, shown in (("%2F%FF", names[0]), ("%2F%5Cxff", names[1])):
        _, body = await client.get(f"cgroup/groups?cgroup_user_path={query}")
        assert body["data"]["user_path"] == shown


async def test_a_cgroup_whose_files_were_not_read_yet_is_no_cgroup_without_memory(client: Client) -> None:
    base = snapshot(3)
    young = msgspec.structs.replace(base.cgroups[BUSY], files_read_at_ns=None, memory_stat={})
    client.server.publish(finished(msgspec.structs.replace(base, cgroups={BUSY: young})))
    message = await client.refused(f"cgroup/groups?cgroup_user_path={quote(BUSY)}", 503)
    assert "not been read yet" in message


async def test_before_the_first_cycle_nothing_is_known() -> None:
    server = MalachiteServer(V1)
    client = Client(server, await server.start("127.0.0.1", 0))
    for path in (*DOCUMENTS, "cgroup/groups?cgroup_user_path=%2F"):
        assert "no cycle has finished yet" in await client.refused(path, 503)
    await client.session.close()
    await server.stop()


async def test_each_cycle_makes_new_documents_and_none_twice(client: Client) -> None:
    times = []
    for second in (3, 4):
        client.server.publish(finished(snapshot(second)))
        first = await client.get("system/compute")
        assert await client.get("system/compute") == first
        times.append(first[1]["data"]["update_time"])
        _status, body = await client.cgroup(BUSY)
        assert body["data"]["sub_system_groups"]["Cpuacct"]["Cpu"]["V1"]["update_time"] == times[-1]
    assert times[1] - times[0] == 1


async def test_documents_grow_old_visibly_when_cycles_stop(client: Client) -> None:
    """The client compares update_time with its clock; nothing here touches it up."""
    before = (await client.get("system/memory"))[1]["data"]["update_time"]
    await asyncio.sleep(1.1)
    assert (await client.get("system/memory"))[1]["data"]["update_time"] == before


async def test_a_cycle_that_cannot_be_shown_leaves_the_last_one(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    good = await client.get("system/compute")
    client.server.publish(finished(msgspec.structs.replace(snapshot(3), cgroups=None)))
    assert "cycle 3 could not be published" in caplog.text
    assert await client.get("system/compute") == good


async def test_only_get_below_the_api_is_served(client: Client) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        status, body = await client.get("system/compute", method)
        assert (status, body["status"]) == (405, 1)
    assert (await client.get("system/compute", "HEAD"))[0] == 405
    assert "/api/v1/system/memory" in await client.refused("system/nothing", 404)
    assert "is not served" in await client.refused("../../etc/passwd", 404)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9002", "localhost.evil.example", "127.0.0.1.evil.example"]
)
async def test_other_names_of_loopback_are_refused(client: Client, host: str) -> None:
    assert host in await client.refused("system/compute", 403, Host=host)


@pytest.mark.parametrize("host", ["localhost:9002", "127.0.0.1:9002", "[::1]:9002", "LOCALHOST."])
async def test_names_that_the_client_uses_are_served(client: Client, host: str) -> None:
    assert (await client.get("system/compute", Host=host))[0] == 200


async def test_an_occupied_port_is_reported_with_the_option(client: Client) -> None:
    with pytest.raises(Unavailable, match="cannot listen") as caught:
        await MalachiteServer(V1).start("127.0.0.1", client.port)
    assert "--malachite" in caught.value.remedy


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_it_is_served_on_loopback_only(host: str) -> None:
    """`--web-config` cannot help: its client knows neither TLS nor passwords."""
    server = MalachiteServer(V1)
    with pytest.raises(Unavailable, match=f"--malachite {host}:0 would show every cgroup") as caught:
        await server.start(host, 0)
    assert "127.0.0.1:9002" in caught.value.remedy
    await server.stop()


async def test_localhost_is_this_machine() -> None:
    server = MalachiteServer(V1)
    assert await server.start("localhost", 0) > 0
    await server.stop()


class Wire(asyncio.Transport):
    """A connection that counts what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.writes.append(b"".join(map(bytes, list_of_data)))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "path", ["system/info", "system/memory", f"cgroup/groups?cgroup_user_path={quote(BUSY)}", "none"]
)
async def test_headers_and_body_leave_in_one_write(path: str) -> None:
    """In two, Nagle's algorithm and the client's delayed acknowledgement make each call wait 40 ms."""
    server = MalachiteServer(V1)
    server.publish(finished(snapshot(1)))
    runner = web.AppRunner(server.app())
    await runner.setup()
    assert runner.server is not None
    connection, wire = runner.server(), Wire()
    connection.connection_made(wire)
    connection.data_received(f"GET /api/v1/{path} HTTP/1.1\r\nHost: localhost:9002\r\n\r\n".encode())
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(wire.writes) == 1
    assert wire.writes[0].startswith(b"HTTP/1.1 ")
    assert wire.writes[0].endswith(b"}")
    connection.connection_lost(None)
    await runner.cleanup()


def test_query_paths_are_resolved_to_the_snapshots_spelling() -> None:
    assert requested_path("cgroup_user_path=%2Fkubepods%2Fburstable") == "/kubepods/burstable"
    assert requested_path("cgroup_user_path=%2F") == "/"
    assert requested_path("other=1&cgroup_user_path=/a+b") == "/a b"
    with pytest.raises(MalachiteRefused):
        requested_path("cgroup_user_path=..")


def test_every_field_is_documented() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/malachite.md").read_text()
    for name, kind in {**contract.DOCUMENTS, "V1": contract.groups("V1"), "V2": contract.groups("V2")}.items():
        for key in _keys(kind):
            assert f"`{key}`" in text, f"docs/malachite.md does not tell where {key} of {name} comes from"


def _keys(kind: Any) -> set[str]:
    if isinstance(kind, list):
        return _keys(kind[0])
    if not isinstance(kind, dict):
        return set()
    return {key for key in kind if key not in ("*", "data")}.union(*(_keys(value) for value in kind.values()))
