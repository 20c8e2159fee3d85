"""Sockets of other users, and in directories where other users could put one, are not used: real processes and files."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from api.interfaces import Unavailable
from api.proto import advisor_svc_pb2 as svc
from common.grpc_unix import GrpcClient, GrpcService, serve_on_socket
from common.socket_trust import check_listener, check_socket, check_socket_directory
from tests.builders.foreign_processes import FOREIGN_UID, directory_for_everybody, foreign_listener

ADVISOR = svc.DESCRIPTOR.services_by_name["AdvisorService"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to start processes of another user")


@pytest.mark.parametrize(
    ("mode", "shown"), [(0o1777, "1777"), (0o777, "0777"), (0o775, "0775"), (0o757, "0757")]
)  # fmt: skip
def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int, shown: str) -> None:
    directory = tmp_path / "plugins"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(Unavailable) as refused:
        check_socket_directory(directory)
    assert refused.value.reason == (
        f"{directory} is not trusted: {directory} can be written by other users (mode {shown})"
    )
    assert refused.value.remedy == f"remove the permission: chmod go-w {directory}; or choose a directory of its own"
    directory.chmod(0o755)
    check_socket_directory(directory)


def test_a_parent_that_others_can_write_is_refused_unless_it_is_sticky(tmp_path: Path) -> None:
    parent, directory = tmp_path / "parent", tmp_path / "parent" / "plugins"
    directory.mkdir(parents=True)
    parent.chmod(0o777)
    with pytest.raises(Unavailable, match=rf"{parent} can be written by other users \(mode 0777\)"):
        check_socket_directory(directory)
    parent.chmod(0o1777)  # its users cannot rename the directories of others
    check_socket_directory(directory)


def test_a_link_does_not_hide_a_directory_that_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real").chmod(0o1777)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(Unavailable, match=r"real can be written by other users \(mode 1777\)"):
        check_socket_directory(tmp_path / "link")


def test_a_link_to_a_socket_where_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "open" / "a.sock"))
        (tmp_path / "a.sock").symlink_to(tmp_path / "open" / "a.sock")
        with pytest.raises(Unavailable, match=r"open can be written by other users \(mode 1777\)"):
            check_socket(tmp_path / "a.sock")


def test_a_loop_of_links_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links"):
        check_socket(tmp_path / "loop" / "a.sock")


@needs_root
@pytest.mark.parametrize("name", ["directory", "socket", "process"])
def test_what_belongs_to_another_user_is_refused_unless_the_settings_name_it(name: str) -> None:
    def check(*trusted_uids: int) -> None:
        check_socket(path, trusted_uids)
        check_listener(path, trusted_uids)

    with directory_for_everybody() as directory, foreign_listener(path := directory / "a.sock"):
        directory.chmod(0o755)
        if name == "directory":
            os.chown(directory, FOREIGN_UID, FOREIGN_UID)
        if name == "process":
            os.chown(path, 0, 0)
        with pytest.raises(Unavailable, match="is not trusted") as refused:
            check()
        expected = {
            "directory": f"{directory} is not trusted: {directory} belongs to uid 65534",
            "socket": f"{path} is not trusted: the socket belongs to uid 65534",
            "process": f"{path} is not trusted: the process that listens there has uid 65534",
        }
        assert refused.value.reason == expected[name]
        assert "sockets.trustedUids" in refused.value.remedy
        check(FOREIGN_UID)


@needs_root
async def test_no_request_reaches_the_process_of_another_user() -> None:
    """A process of another user would learn the pods, and the agent would apply its answer."""
    with directory_for_everybody() as directory, foreign_listener(directory / "a.sock"):
        directory.chmod(0o755)
        os.chown(directory / "a.sock", 0, 0)
        client = GrpcClient(directory / "a.sock", ADVISOR, timeout_s=0.5)
        for _ in range(2):
            with pytest.raises(Unavailable, match="has uid 65534"):
                await client.call("RemovePod", svc.RemovePodRequest())
        await client.close()


async def test_no_request_reaches_a_process_whose_user_is_unknown(tmp_path: Path) -> None:
    """A full backlog hides which process listens; it could make room after the check."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(tmp_path / "a.sock"))
        listener.listen(0)
        first.connect(str(tmp_path / "a.sock"))
        client = GrpcClient(tmp_path / "a.sock", ADVISOR, timeout_s=0.5)
        with pytest.raises(Unavailable, match="accepts no connections, so that its user is unknown"):
            await client.call("RemovePod", svc.RemovePodRequest())
        await client.close()


async def test_another_process_at_the_same_path_is_checked_again(tmp_path: Path) -> None:
    async def remove(_request: object, _words: object) -> svc.RemovePodResponse:
        return svc.RemovePodResponse()

    service = GrpcService(ADVISOR, {"RemovePod": remove})
    server = await serve_on_socket(tmp_path / "a.sock", (service,))
    client = GrpcClient(server.path, ADVISOR)
    await client.call("RemovePod", svc.RemovePodRequest())
    before = client._checked
    await client.call("RemovePod", svc.RemovePodRequest())
    assert client._checked == before, "the listener of one file is checked once"
    tmp_path.chmod(0o777)
    with pytest.raises(Unavailable, match="can be written by other users"):
        await client.call("RemovePod", svc.RemovePodRequest())
    tmp_path.chmod(0o700)
    await server.stop()
    server = await serve_on_socket(tmp_path / "a.sock", (service,))
    for _ in range(100):
        try:
            await client.call("RemovePod", svc.RemovePodRequest())
            break
        except Unavailable:
            await asyncio.sleep(0.05)  # gRPC connects again with a backoff
    assert client._checked != before
    await client.close()
    await server.stop()


async def test_without_a_check_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that moved a directory of its own to and fro below /tmp answered a third of the calls: it was missing at the
    check, and in place when gRPC connected."""
    received: list[object] = []

    async def remove(request: object, _words: object) -> svc.RemovePodResponse:
        received.append(request)
        return svc.RemovePodResponse()

    def missing(_path: Path, _trusted_uids: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    server = await serve_on_socket(tmp_path / "a.sock", (GrpcService(ADVISOR, {"RemovePod": remove}),))
    client = GrpcClient(server.path, ADVISOR)
    monkeypatch.setattr("common.grpc_unix.check_socket", missing)
    with pytest.raises(Unavailable, match="no server answers"):
        await client.call("RemovePod", svc.RemovePodRequest())
    assert received == []
    await client.close()
    await server.stop()


async def test_the_agent_serves_nothing_where_others_could_replace_its_socket(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins").chmod(0o1777)
    with pytest.raises(Unavailable, match=r"can be written by other users \(mode 1777\)"):
        await serve_on_socket(tmp_path / "plugins" / "a.sock", ())
    assert list((tmp_path / "plugins").iterdir()) == []


def test_a_full_backlog_does_not_block_the_agent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(tmp_path / "a.sock"))
        listener.listen(0)
        first.connect(str(tmp_path / "a.sock"))
        with pytest.raises(BlockingIOError):
            check_listener(tmp_path / "a.sock")
