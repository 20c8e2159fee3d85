"""The edge to the kubelet on real sockets: TLS, tokens that rotate, refusals, slow and endless answers."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from agent.config.kubelet import KubeletConfig
from agent.sensors.pods import kubelet_client as module
from agent.sensors.pods.kubelet_client import KubeletClient
from api.interfaces import Unavailable
from kube import credentials
from tests.exporters.certificates import Authority

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(handler, access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def server_side(authority: Authority, *, clients: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("localhost"))
    if clients:
        context.load_verify_locations(authority.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def settings(url: str, **changes: Any) -> KubeletConfig:
    """As a settings file would have them, so that bounds and names are those of one."""
    return msgspec.convert({"url": url, "tokenFile": "", "caFile": "", **changes}, KubeletConfig)


def answering(status: int, text: str, observed: list[web.Request] | None = None) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        if observed is not None:
            observed.append(request)
        return web.Response(status=status, text=text)

    return handler


async def refusal(config: KubeletConfig) -> Unavailable:
    async with KubeletClient(config) as kubelet:
        with pytest.raises(Unavailable) as failed:
            await kubelet.ask()
    return failed.value


async def test_the_token_is_sent_over_tls_and_reread_when_the_kubelet_rejects_it(
    authority: Authority, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    observed: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.path == "/pods"
        observed.append(request.headers["Authorization"])
        good = request.headers["Authorization"] == "Bearer second"
        return web.Response(status=200 if good else 401, text="{}" if good else "Unauthorized")

    async with serving(handler, server_side(authority)) as url:
        config = settings(url, tokenFile=str(token), caFile=str(authority.certificate))
        async with KubeletClient(config) as kubelet:
            with pytest.raises(Unavailable, match="answered 401: Unauthorized") as unknown:
                await kubelet.ask()
            assert "kubelet.tokenFile" in unknown.value.remedy
            token.with_suffix(".new").write_text("second\n")
            token.with_suffix(".new").replace(token)
            assert await kubelet.ask() == b"{}"
    assert observed == ["Bearer first", "Bearer second"]


async def test_over_plain_http_no_token_is_shown_to_anybody(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    observed: list[web.Request] = []
    async with (
        serving(answering(200, "{}", observed)) as url,
        KubeletClient(settings(url, tokenFile=str(token))) as kubelet,
    ):
        assert await kubelet.ask() == b"{}"
    assert "Authorization" not in observed[0].headers
    assert observed[0].headers["Accept-Encoding"] == "identity"


async def test_a_client_certificate_is_shown(authority: Authority) -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        subject = dict(pair for (pair,) in request.transport.get_extra_info("peercert")["subject"])
        return web.Response(text=subject["commonName"])

    certificate, key = authority.issue("me")
    async with serving(handler, server_side(authority, clients=True)) as url:
        own_key = {"certificateFile": str(certificate), "keyFile": str(key)}
        async with KubeletClient(settings(url, caFile=str(authority.certificate), **own_key)) as kubelet:
            assert await kubelet.ask() == b"me"


async def test_a_certificate_of_another_authority_or_name_is_not_believed(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    async with serving(answering(200, "{}"), server_side(authority)) as url:
        stranger = await refusal(settings(url, caFile=str(other.certificate)))
        assert "certificate was rejected" in stranger.reason
        assert "kubelet.caFile" in stranger.remedy
        own_key = str(authority.certificate)
        misnamed = await refusal(settings(url, caFile=own_key, serverName="worker-3"))
        assert "worker-3" in misnamed.reason
        assert "kubelet.serverName" in misnamed.remedy
        for more in ({"serverName": "localhost", "caFile": own_key}, {"verify": False, "serverName": "worker-3"}):
            async with KubeletClient(settings(url, **more)) as kubelet:
                assert await kubelet.ask() == b"{}"


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (403, "nodes/proxy"),
        (400, "https://"),
        (404, "kubelet.url"),
        (302, "kubelet.url"),
        (500, "its log"),
    ],
)
async def test_each_refusal_says_what_to_do(status: int, remedy: str) -> None:
    async with serving(answering(status, "Forbidden (user=agent)\n" + "x" * 10_000)) as url:
        failed = await refusal(settings(url))
    assert failed.reason.startswith(f"{url}/pods answered {status}: Forbidden (user=agent) xxx")
    assert len(failed.reason) < 300
    assert remedy in failed.remedy


async def test_a_refused_connection_and_a_missing_token_are_reported(tmp_path: Path, authority: Authority) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        refused = await refusal(settings(url))
        assert refused.reason == f"{url}/pods: connection refused"
        assert "readOnlyPort" in refused.remedy
    missing = await refusal(settings("https://127.0.0.1:1", verify=False, tokenFile=str(tmp_path / "token")))
    assert missing.reason == f"kubelet.tokenFile: {tmp_path}/token: cannot be read: No such file or directory"
    unsigned = await refusal(settings("https://127.0.0.1:1", caFile=str(tmp_path / "ca.crt")))
    assert unsigned.reason.startswith(f"kubelet.caFile: {tmp_path}/ca.crt")


async def test_a_kubelet_that_hangs_costs_one_deadline() -> None:
    async def hang(_request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    async with serving(hang) as url:
        failed = await refusal(settings(url, timeoutS=0.2))
    assert failed.reason == f"{url}/pods did not answer within 0.2 s"


async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_POD_LIST_BYTES", 1 << 20)

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x" * 65536)

    async with serving(endless) as url:
        failed = await refusal(settings(url))
    assert failed.reason == f"{url}/pods answered with more than 1 MiB"


async def test_a_broken_connection_and_another_protocol_are_reported(authority: Authority) -> None:
    async def rude(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(rude, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert (await refusal(settings(url))).reason.startswith(f"{url}/pods: ")
    server.close()
    async with serving(answering(200, "{}")) as plain:
        spoken = await refusal(settings(plain.replace("http:", "https:"), verify=False))
        assert spoken.reason.startswith(plain.replace("http:", "https:"))
    async with serving(answering(200, "{}"), server_side(authority)) as secured:
        failed = await refusal(settings(secured.replace("https:", "http:")))
        assert failed.reason.startswith(secured.replace("https:", "http:"))


async def test_a_token_that_goes_away_leaves_the_last_one_in_force(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "FILE_CHECK_INTERVAL_S", 0.0)
    token = tmp_path / "token"
    token.write_text("first")
    observed: list[web.Request] = []
    async with serving(answering(200, "{}", observed), server_side(authority)) as url:
        kubelet = KubeletClient(settings(url, tokenFile=str(token), verify=False))
        async with kubelet:
            await kubelet.ask()
            token.unlink()
            await kubelet.ask()
    assert [request.headers["Authorization"] for request in observed] == ["Bearer first", "Bearer first"]


@pytest.mark.parametrize(
    "url", ["10.0.0.1:10250", "https://a b", "https://a/pods", "ftp://a", "https://", "https://a:123456"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.url"):
        settings(url)


@pytest.mark.parametrize("root", ["", "kubelet", "/a/", "/a//b", "/../a", "/-a"])
def test_what_is_no_cgroup_root_is_refused(root: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.cgroupRoot"):
        settings("http://a", cgroupRoot=root)
