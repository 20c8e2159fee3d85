"""Calls over real sockets: answers, refusals, peers that hang, lie or are gone, and files that they left."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import pytest

from api.interfaces import Unavailable
from api.proto import advisor_svc_pb2 as svc
from common.grpc_calls import CALL_COUNTS
from common.grpc_unix import CallRefused, GrpcClient, GrpcService, HandlerRefusal, MethodNotOffered, serve_on_socket

ADVISOR = svc.DESCRIPTOR.services_by_name["AdvisorService"]


async def _remove(request: svc.RemovePodRequest, words: Mapping[str, str]) -> svc.RemovePodResponse:
    if request.pod_uid == "hang":
        await asyncio.sleep(60)
    if request.pod_uid == "bug":
        raise KeyError("secret")
    if not request.pod_uid:
        raise HandlerRefusal(f"pod_uid is empty; name a pod (words: {words.get('supports_get_advice')})")
    return svc.RemovePodResponse()


async def _watch(_request: svc.Empty, _words: Mapping[str, str]) -> AsyncIterator[svc.ListAndWatchResponse]:
    for path in ("/a", "/b"):
        yield svc.ListAndWatchResponse(extra_entries=[svc.CalculationInfo(cgroup_path=path)])
    raise HandlerRefusal("no more")


SERVICE = GrpcService(ADVISOR, {"RemovePod": _remove, "ListAndWatch": _watch})


async def test_a_call_is_answered_refused_unknown_late_or_a_bug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve_on_socket(tmp_path / "a.sock", (SERVICE,))
    peer = GrpcClient(server.path, ADVISOR, timeout_s=0.3, metadata={"supports_get_advice": "true"})
    assert await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u")) == svc.RemovePodResponse()
    with pytest.raises(CallRefused, match=r"RemovePod failed: pod_uid is empty; name a pod \(words: true\)"):
        await peer.call("RemovePod", svc.RemovePodRequest())
    with pytest.raises(MethodNotOffered, match=r"AdvisorService\.GetAdvice is not offered"):
        await peer.call("GetAdvice", svc.GetAdviceRequest())
    with pytest.raises(Unavailable, match=r"did not answer within 0\.3 s"):
        await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="hang"))
    with caplog.at_level(logging.ERROR), pytest.raises(CallRefused, match="KeyError: this is a bug") as bug:
        await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="bug"))
    assert "secret" not in bug.value.reason
    assert "secret" in caplog.text
    await peer.close()
    await server.stop()
    assert not list(tmp_path.iterdir())


async def test_a_stream_gives_what_came_before_it_broke(tmp_path: Path) -> None:
    server = await serve_on_socket(tmp_path / "a.sock", (SERVICE,))
    peer = GrpcClient(server.path, ADVISOR)
    stream = peer.stream("ListAndWatch", svc.Empty())
    assert (await anext(stream)).extra_entries[0].cgroup_path == "/a"
    assert (await anext(stream)).extra_entries[0].cgroup_path == "/b"
    with pytest.raises(CallRefused, match="no more"):
        await anext(stream)
    await peer.close()
    await server.stop()


async def test_a_peer_that_is_gone_is_said_and_found_again(tmp_path: Path) -> None:
    peer = GrpcClient(tmp_path / "a.sock", ADVISOR, timeout_s=5)
    with pytest.raises(Unavailable, match=r"a\.sock: AdvisorService\.RemovePod: no server answers"):
        await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u"))
    server = await serve_on_socket(tmp_path / "a.sock", (SERVICE,))
    for _attempt in range(100):
        try:
            await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u"))
            break
        except Unavailable:
            await asyncio.sleep(0.1)
    else:
        pytest.fail("the peer is back, and was not found in ten seconds")
    await peer.close()
    await server.stop()


async def test_a_peer_that_accepts_and_says_nothing_costs_one_deadline(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "a.sock"))
        mute.listen()
        peer = GrpcClient(tmp_path / "a.sock", ADVISOR, timeout_s=0.3)
        with pytest.raises(Unavailable, match=r"did not answer within 0\.3 s|no server answers"):
            await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u"))
        await peer.close()


async def test_garbage_from_either_side_ends_that_connection_alone(tmp_path: Path) -> None:
    server = await serve_on_socket(tmp_path / "a.sock", (SERVICE,))
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(str(server.path))
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)))
        peer = GrpcClient(server.path, ADVISOR)
        await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u"))
        await peer.close()
    await server.stop()

    async def babble(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" * 4096)
        await writer.drain()
        writer.close()

    babbling = await asyncio.start_unix_server(babble, tmp_path / "b.sock")
    peer = GrpcClient(tmp_path / "b.sock", ADVISOR, timeout_s=0.5)
    with pytest.raises(Unavailable):
        await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u"))
    await peer.close()
    babbling.close()


async def test_an_answer_that_is_no_message_is_said_and_the_next_is_understood(tmp_path: Path) -> None:
    """A peer that serves a service of that name with other messages: gRPC itself is content with it."""
    answers = [b"\xff\xff\xff\xff\x07", b""]

    async def invalid_response(_request: bytes, _context: object) -> bytes:
        return answers.pop(0)

    async def many(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        yield svc.ListAndWatchResponse(extra_entries=[svc.CalculationInfo(cgroup_path="/a")]).SerializeToString()
        yield b"\xff\xff\xff\xff\x07"

    server = grpc.aio.server()
    methods = {
        "RemovePod": grpc.unary_unary_rpc_method_handler(invalid_response),
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(many),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ADVISOR.full_name, methods),))
    server.add_insecure_port(f"unix:{tmp_path}/a.sock")
    await server.start()
    peer = GrpcClient(tmp_path / "a.sock", ADVISOR)
    with pytest.raises(Unavailable, match=r"a\.sock: the response of AdvisorService\.RemovePod cannot be decoded"):
        await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u"))
    assert await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u")) == svc.RemovePodResponse()
    stream = peer.stream("ListAndWatch", svc.Empty())
    assert (await anext(stream)).extra_entries[0].cgroup_path == "/a"
    with pytest.raises(Unavailable, match=r"AdvisorService\.ListAndWatch cannot be decoded"):
        await anext(stream)
    assert CALL_COUNTS["made", f"{ADVISOR.full_name}.RemovePod", "DATA_LOSS"] == 1
    await peer.close()
    await server.stop(0)


async def test_a_message_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    server = await serve_on_socket(tmp_path / "a.sock", (SERVICE,))
    peer = GrpcClient(server.path, ADVISOR)
    with pytest.raises(Unavailable, match=r"16 MiB|larger than max"):
        await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u" * (17 << 20)))
    await peer.close()
    await server.stop()


async def test_the_socket_is_there_once_it_answers_for_this_user_alone(tmp_path: Path) -> None:
    server = await serve_on_socket(tmp_path / "below" / "a.sock", (SERVICE,))
    assert [path.name for path in server.path.parent.iterdir()] == ["a.sock"]
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    with pytest.raises(Unavailable, match="is served by another process"):
        await serve_on_socket(server.path, (SERVICE,))
    assert server.is_socket_in_place()
    server.path.unlink()
    assert not server.is_socket_in_place()
    second = await serve_on_socket(tmp_path / "below" / "a.sock", (SERVICE,))
    await server.stop()
    assert second.is_socket_in_place(), "a server that stops leaves the socket of the next one alone"
    await second.stop()


async def test_what_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom common.grpc_unix import serve_on_socket\n"
        "async def main():\n    await serve_on_socket(Path(sys.argv[1]), ())\n"
        "    print('up', flush=True)\n    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        child.send_signal(signal.SIGKILL)
    assert path.is_socket()
    server = await serve_on_socket(path, (SERVICE,))
    peer = GrpcClient(path, ADVISOR)
    await peer.call("RemovePod", svc.RemovePodRequest(pod_uid="u"))
    await peer.close()
    await server.stop()


@pytest.mark.parametrize(
    ("name", "text"), [("x" * 90, "longer than a socket path may be"), ("plain", "is not a socket")]
)
async def test_a_place_where_no_socket_can_be_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "plain").write_text("mine")
    with pytest.raises(Unavailable, match=text):
        await serve_on_socket(tmp_path / name, (SERVICE,))
    assert (tmp_path / "plain").read_text() == "mine"


async def test_a_directory_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="cannot be served"):
        await serve_on_socket(tmp_path / "file" / "a.sock", (SERVICE,))
