"""Connection limit of the listener and the connections closed for it, on real sockets."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from api.interfaces import Unavailable
from common.http import listener
from common.http.listener import MAX_CONNECTIONS, HttpListener
from tests.builders.foreign_processes import running
from tests.exporters.certificates import Authority

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LARGE = 8 << 20
"""More than the buffers of two sockets hold."""


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None, hosts: Sequence[str] = ("127.0.0.1",)) -> AsyncIterator[int]:
    """A server of one small answer and one that does not fit into any buffer."""

    async def small(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def large(_request: web.Request) -> web.Response:
        return web.Response(body=bytes(LARGE))

    async def slow(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(bytes(1000))
            await asyncio.sleep(0.01)

    app = web.Application()
    app.router.add_get("/", small)
    app.router.add_get("/large", large)
    app.router.add_get("/slow", slow)
    served = HttpListener(app)
    port = 0
    if len(hosts) > 1:  # one port that is free on all of them
        with socket.create_server((hosts[0], 0)) as free:
            port = free.getsockname()[1]
    port = (await served.open(hosts, port, "--listen", tls))[0][1]
    try:
        yield port
    finally:
        await served.close()


@asynccontextmanager
async def held(port: int, count: int, request: str = "") -> AsyncIterator[list[Connection]]:
    """Connections that send this much, one after another, and read nothing."""
    connections: list[Connection] = []
    try:
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            connections.append((reader, writer))
            writer.write(request.encode())
            await writer.drain()
        yield connections
    finally:
        for _, writer in connections:
            writer.close()


async def ended(connection: Connection) -> bool:
    """Whether the server has closed it; everything that it has sent is read."""
    reader, _ = connection
    try:
        while await asyncio.wait_for(reader.read(1 << 16), 1):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


async def scrape(port: int) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/") as answer:
        return await answer.text()


async def ask(connection: Connection) -> bytes:
    reader, writer = connection
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(2)


@pytest.mark.parametrize(
    "request_text",
    ["", "GET / HTTP/1.1\r\n", "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    ids=["silent", "half-asked", "kept-alive"],
)
async def test_a_scraper_is_served_while_200_connections_are_held(
    request_text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with serving() as port, held(port, 200, request_text) as connections:
            assert await scrape(port) == "ok"
            closed = await asyncio.gather(*map(ended, connections))
    assert closed.count(False) == MAX_CONNECTIONS - 1
    assert all(closed[:100]), "the oldest go"
    assert [record.message for record in caplog.records] == [
        "more than 64 connections to one port: closed those idle for the longest time, 1 so far"
    ], "once a minute, however many"


FLOOD = """
import socket, struct, sys
port, source, request = int(sys.argv[1]), sys.argv[2], sys.argv[3].encode().decode("unicode_escape").encode()
print("ready", flush=True)
held = []
while True:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # else the ports run out
    client.setblocking(False)
    held.append(client)
    try:
        client.bind((source, 0))
        client.connect((sys.argv[4], port))
    except OSError:
        pass
    if len(held) > 300:
        try:
            held[-100].send(request)
        except OSError:
            pass
        held.pop(0).close()
"""


@pytest.mark.parametrize(
    "request_text", ["", r"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["silent", "asking"]
)
async def test_no_probe_fails_during_a_flood_of_another_address(request_text: str) -> None:
    async with serving() as port:
        with running("-c", FLOOD, str(port), "127.0.0.2", request_text, "127.0.0.1"):
            assert [await scrape(port) for _ in range(20)] == ["ok"] * 20


async def test_no_probe_on_loopback_fails_during_a_flood_of_the_other_socket() -> None:
    """As on a node: clients reach the node's address, and the kubelet probes loopback."""
    async with serving(hosts=("127.0.0.1", "127.0.0.3")) as port:
        with running("-c", FLOOD, str(port), "127.0.0.4", "", "127.0.0.3"):
            assert [await scrape(port) for _ in range(20)] == ["ok"] * 20


def connect_at_once(port: int, addresses: Sequence[str], count: int) -> list[socket.socket]:
    """Return connections of each address that all request the same, before the server has accepted any of them."""
    clients: list[socket.socket] = []
    for address in addresses:
        for _ in range(count):
            clients.append(socket.create_connection(("127.0.0.1", port), source_address=(address, 0)))
            clients[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            clients[-1].settimeout(0)
    return clients


async def test_a_page_whose_files_are_requested_at_once_is_served() -> None:
    """The API server's proxy opens a connection for each file, all from one address."""
    async with serving() as port:
        clients = connect_at_once(port, ("127.0.0.1",), 30)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            answers = [await loop.sock_recv(client, 15) for client in clients]
        for client in clients:
            client.close()
    assert answers == [b"HTTP/1.1 200 OK"] * 30


async def test_a_connection_that_is_displaced_as_it_arrives_is_closed() -> None:
    """Its task is cancelled before it begins, so that no transport has it; pytest raises the ResourceWarning."""
    async with serving() as port:
        clients = connect_at_once(port, [f"127.0.0.{last}" for last in range(2, 12)], 8)
        assert await scrape(port) == "ok"
        for client in clients:
            client.close()
    gc.collect()


async def test_a_kept_connection_survives_a_flood_of_another_address() -> None:
    async with serving() as port, held(port, 1) as (scraper, *_):
        with running("-c", FLOOD, str(port), "127.0.0.2", "", "127.0.0.1"):
            for _ in range(20):
                assert await ask(scraper) == b"ok"
                await asyncio.sleep(0.02)


async def test_clients_that_do_not_read_do_not_block_others() -> None:
    request = "GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with serving() as port, held(port, MAX_CONNECTIONS + 6, request) as connections:
        assert await scrape(port) == "ok"
        assert await asyncio.gather(*map(ended, connections[:7])) == [True] * 7


async def test_a_scraper_that_keeps_its_connection_and_asks_now_and_then_keeps_it() -> None:
    async with serving() as port, held(port, 1) as (scraper, *_):
        for _ in range(6):
            assert await ask(scraper) == b"ok"
            async with held(port, MAX_CONNECTIONS - 1):
                pass
        assert await ask(scraper) == b"ok"


async def test_closed_connections_do_not_count() -> None:
    async with serving() as port, held(port, 1) as (quiet, *_):
        for _ in range(3 * MAX_CONNECTIONS):
            assert await scrape(port) == "ok"
        assert await ask(quiet) == b"ok"


async def test_a_connection_without_tls_handshake_is_closed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    client = ssl.create_default_context(cafile=str(authority.certificate))
    async with serving(server) as port, held(port, 200) as connections:
        async with aiohttp.ClientSession() as session, session.get(f"https://localhost:{port}/", ssl=client) as answer:
            assert await answer.text() == "ok"
        closed = await asyncio.gather(*map(ended, connections))
    assert closed.count(False) == MAX_CONNECTIONS - 1


async def test_a_connection_that_asks_for_nothing_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "KEEPALIVE_S", 0.1)
    async with serving() as port, held(port, 2) as (silent, active):
        assert await ask(active) == b"ok"
        assert await ended(silent)
        assert await ended(active)


async def test_a_reader_that_takes_nothing_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "TCP_USER_TIMEOUT_S", 0.5)
    dropped = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(bytes(1 << 16))
        finally:
            dropped.set()

    app = web.Application()
    app.router.add_get("/", endless)
    served = HttpListener(app)
    ((_, port),) = await served.open("127.0.0.1", 0, "--listen")
    async with held(port, 1, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        await asyncio.wait_for(dropped.wait(), 20)
    await served.close()


async def test_several_hosts_are_served_and_no_other_address_is() -> None:
    """As the chart has it: the node's own address, and loopback for the kubelet's probes."""
    app = web.Application()
    served = HttpListener(app)
    with socket.create_server(("127.0.0.3", 0)) as other:
        port = other.getsockname()[1]
        bound = await served.open(("127.0.0.1", "127.0.0.2", "127.0.0.1"), port, "--listen")
    try:
        assert sorted(bound) == [("127.0.0.1", port), ("127.0.0.2", port)]
        for host in ("127.0.0.1", "127.0.0.2"):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.3", port)
    finally:
        await served.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this kernel has no IPv6")
async def test_a_node_with_ipv6_alone_is_served_with_loopback_of_ipv4() -> None:
    """The event loop sets IPV6_V6ONLY, so that `::` does not include the addresses of IPv4."""
    served = HttpListener(web.Application())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bound = await served.open(("::", "127.0.0.1"), port, "--listen")
    assert sorted(bound) == [("127.0.0.1", port), ("::", port)]
    await served.close()


async def test_one_unusable_host_of_several_is_an_error_that_names_it() -> None:
    """Newer Pythons skip it; the agent's metrics would be missing while its probes on loopback succeed."""
    served = HttpListener(web.Application())
    with pytest.raises(Unavailable, match=r"cannot listen on 192\.0\.2\.1:0: "):
        await served.open(("127.0.0.1", "192.0.2.1"), 0, "--listen")
    assert served._listening == []


async def test_without_descriptors_the_port_comes_back_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as port:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        client = socket.create_connection(("127.0.0.1", port))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free(), limits[1]))
        try:
            while "Too many open files" not in caplog.text:
                await asyncio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        client.close()
        assert await scrape(port) == "ok"


def lowest_free() -> int:
    descriptor = os.open("/", os.O_RDONLY)
    os.close(descriptor)
    return descriptor


@pytest.mark.parametrize("path", ["/", "/nothing"])
@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_a_request_with_a_body_is_refused_unread(
    path: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[object] = []
    monkeypatch.setattr("aiohttp.http_parser.DeflateBuffer.feed_data", lambda *given: unpacked.append(given))
    fields = f"Host: localhost\r\nContent-Encoding: {encoding}\r\nContent-Length: 2000000"
    async with (
        serving() as port,
        held(port, 1, f"GET {path} HTTP/1.1\r\n{fields}\r\n\r\n\x1f\x08") as ((reader, writer),),
    ):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        assert b"\r\nConnection: close\r\n" in await reader.readuntil(b"\r\n\r\n")
        assert await ended((reader, writer)), "the server does not wait for the body"
        assert await scrape(port) == "ok"
    assert not unpacked


async def test_an_empty_body_is_none() -> None:
    request = "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n"
    async with serving() as port, held(port, 1, request) as ((reader, _),):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: \xff\r\n\r\n", b" 417 "),
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n\r\n", b" 417 "),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", b" 400 "),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello", b" 413 "),
        (b"\xff / HTTP/1.1\r\n\r\n", b" 400 "),
    ],
)  # fmt: skip
async def test_no_request_writes_into_the_log(
    request_bytes: bytes, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as port, held(port, 1) as ((reader, writer),):
        writer.write(request_bytes)
        assert status in await reader.readline()
        assert await ended((reader, writer))
    assert caplog.records == []


async def test_a_client_that_disconnects_during_a_response_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as port:
        async with held(port, 1, "GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n") as ((reader, _),):
            await reader.readuntil(b"\r\n\r\n")
        assert await scrape(port) == "ok"
        await asyncio.sleep(0.1)
    assert caplog.records == []
