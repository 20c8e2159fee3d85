"""Plugins that appear, disappear, hang or give invalid answers, on real sockets."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import pytest

from agent.katalyst import plugin_watcher
from agent.katalyst.plugin_registration import PluginIdentity, PluginRegistration
from agent.katalyst.plugin_watcher import PluginWatcher
from api.proto import plugin_registration_pb2 as registration
from common.grpc_unix import GrpcServer, serve_on_socket

S = 1_000_000_000
KINDS = {"EvictionPlugin": ("v1alpha1",), "ReporterPlugin": ("v1alpha1",)}


async def offer(path: Path, card: PluginIdentity) -> tuple[GrpcServer, PluginRegistration]:
    introduced = PluginRegistration(card)
    return await serve_on_socket(path, (introduced.service(),)), introduced


async def test_plugins_come_and_go(tmp_path: Path) -> None:
    watcher = PluginWatcher(KINDS, tmp_path / "socks")
    await watcher.scan()
    assert watcher.plugins("EvictionPlugin") == ()
    first, introduced = await offer(tmp_path / "socks" / "a.sock", PluginIdentity(kind="EvictionPlugin", name="mine"))
    below, _introduced = await offer(
        tmp_path / "socks" / "dir" / "b.sock", PluginIdentity(kind="ReporterPlugin", name="other")
    )
    await watcher.scan()
    assert [(plugin.name, plugin.socket) for plugin in watcher.plugins("EvictionPlugin")] == [("mine", first.path)]
    assert [plugin.name for plugin in watcher.plugins("ReporterPlugin")] == ["other"]
    assert introduced.registered is True
    await first.stop()
    await watcher.scan()
    assert watcher.plugins("EvictionPlugin") == ()
    again, introduced = await offer(tmp_path / "socks" / "a.sock", PluginIdentity(kind="EvictionPlugin", name="second"))
    await watcher.scan()
    assert [plugin.name for plugin in watcher.plugins("EvictionPlugin")] == ["second"]
    assert watcher.problems() == ()
    await again.stop()
    await below.stop()


async def test_two_watchers_of_one_directory_do_not_refuse_each_others_plugins(tmp_path: Path) -> None:
    both = [PluginWatcher({kind: versions}, tmp_path) for kind, versions in KINDS.items()]
    cards = [PluginIdentity(kind=kind, name=kind.lower()) for kind in KINDS]
    offered = [await offer(tmp_path / f"{card.name}.sock", card) for card in cards]
    for _ in range(2):
        for watcher in both:
            await watcher.scan()
    for watcher, kind in zip(both, KINDS, strict=True):
        assert [plugin.name for kind_ in KINDS for plugin in watcher.plugins(kind_)] == [kind.lower()]
        assert watcher.problems() == ()
    assert [introduced.registered for _, introduced in offered] == [True, True]
    for server, _ in offered:
        await server.stop()


REFUSED = {
    "a kind of others": (
        PluginIdentity(kind="CSIPlugin", name="x"),
        "type 'CSIPlugin' is not supported; EvictionPlugin, ReporterPlugin",
    ),
    "a version of others": (
        PluginIdentity(kind="EvictionPlugin", name="x", versions=("v9",)),
        r"supported_versions \['v9'\] lack v1alpha1",
    ),
    "no name": (PluginIdentity(kind="EvictionPlugin", name=""), "name is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_plugin_gets_the_reason(tmp_path: Path, name: str) -> None:
    card, text = REFUSED[name]
    server, introduced = await offer(tmp_path / "a.sock", card)
    watcher = PluginWatcher(KINDS, tmp_path)
    await watcher.scan()
    assert watcher.plugins(card.kind) == ()
    (problem,) = watcher.problems()
    assert text.replace("\\", "") in problem
    assert introduced.registered is False
    assert introduced.error == problem.partition(": ")[2]
    await server.stop()


async def test_a_mute_socket_is_retried_with_backoff_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_watcher, "ANSWER_TIMEOUT_S", 0.2)
    now = [0]
    watcher = PluginWatcher(KINDS, tmp_path, lambda: now[0])
    left = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as mute, socket.socket(socket.AF_UNIX) as killed:
        mute.bind(str(tmp_path / "mute.sock"))
        mute.listen()
        killed.bind(str(left))
        (tmp_path / "plain").write_text("no socket")
        server, _introduced = await offer(tmp_path / "good.sock", PluginIdentity(kind="EvictionPlugin", name="good"))
        async with asyncio.timeout(20):
            await watcher.scan()
        assert [plugin.name for plugin in watcher.plugins("EvictionPlugin")] == ["good"]
        assert [problem.partition(": ")[0] for problem in watcher.problems()] == [
            str(left),
            str(tmp_path / "mute.sock"),
        ]
        waits = []
        for _turn in range(4):
            waits.append(watcher._retries[left].wait_s)
            now[0] = watcher._retries[left].due_ns
            await watcher.scan()
        assert waits == [5, 10, 20, 40]
        await server.stop()
    left.unlink()
    (tmp_path / "mute.sock").unlink()
    await watcher.scan()
    assert watcher.problems() == ()


async def test_a_plugin_with_invalid_answers_does_not_affect_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def garbage(_request: bytes, _context: object) -> bytes:
        return b"\xff\xff\xff\xff\x07"

    rude = grpc.aio.server()
    methods = {"GetInfo": grpc.unary_unary_rpc_method_handler(garbage)}
    rude.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pluginregistration.Registration", methods),))
    rude.add_insecure_port(f"unix:{tmp_path}/a.sock")
    await rude.start()
    odd, _introduced = await offer(tmp_path / "b.sock", PluginIdentity(kind="EvictionPlugin", name="odd"))
    good, _introduced = await offer(tmp_path / "c.sock", PluginIdentity(kind="EvictionPlugin", name="good"))
    watcher = PluginWatcher(KINDS, tmp_path)
    usual = watcher._refusal

    def refusal(info: registration.PluginInfo) -> str:
        return usual(info) if info.name == "good" else str(1 // 0)

    monkeypatch.setattr(watcher, "_refusal", refusal)
    await watcher.scan()
    assert [plugin.name for plugin in watcher.plugins("EvictionPlugin")] == ["good"]
    first, second = watcher.problems()
    assert "a.sock: the response of Registration.GetInfo cannot be decoded" in first
    assert second.endswith(
        "b.sock: registration failed because of a bug: ZeroDivisionError: integer division or modulo by zero"
    )
    assert caplog.text.count("could not be registered") == 1
    for server in (odd, good):
        await server.stop()
    await rude.stop(0)


async def test_too_many_sockets_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_watcher, "MAX_SOCKETS", 1)
    first, _introduced = await offer(tmp_path / "a.sock", PluginIdentity(kind="EvictionPlugin", name="a"))
    second, _introduced = await offer(tmp_path / "b.sock", PluginIdentity(kind="EvictionPlugin", name="b"))
    watcher = PluginWatcher(KINDS, tmp_path)
    await watcher.scan()
    assert [plugin.name for plugin in watcher.plugins("EvictionPlugin")] == ["a"]
    assert watcher.problems() == (f"{tmp_path} has more than 1 sockets; the others are ignored",)
    await first.stop()
    await second.stop()
