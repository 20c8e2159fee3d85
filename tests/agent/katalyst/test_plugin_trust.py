"""The agent refuses plugins of every kind that another user serves, reports the reason, and applies none of their answers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from agent.katalyst.plugin_registration import register_plugin
from agent.katalyst.plugin_watcher import PluginWatcher
from agent.katalyst.reporter_plugins import ReporterPlugins
from agent.nri.session import connect_nri
from api.interfaces import Unavailable
from tests.agent.katalyst.test_external_evictions import Manager
from tests.builders.foreign_processes import FOREIGN_UID, directory_for_everybody, foreign_listener, foreign_plugin

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to start processes of another user")


async def test_a_foreign_plugin_in_a_directory_for_everybody_evicts_nothing() -> None:
    with directory_for_everybody() as directory, foreign_plugin(directory / "foreign.sock"):
        manager = Manager(directory)
        result = await manager.run_cycle()
    assert (manager.evicted, result.victims) == ([], ())
    problem = manager.external_findings.problem()
    assert problem is not None
    assert problem.reason == (
        f"eviction plugins are rejected: {directory} is not trusted: {directory} can be written by other users (mode 1777); "
        f"remove the permission: chmod go-w {directory}; or choose a directory of its own"
    )


async def test_a_foreign_plugin_in_a_directory_of_root_evicts_only_if_the_settings_name_its_user(
    tmp_path: Path,
) -> None:
    with directory_for_everybody() as directory, foreign_plugin(path := directory / "foreign.sock"):
        directory.chmod(0o755)
        refused = PluginWatcher({"EvictionPlugin": ("v1alpha1",)}, directory)
        await refused.scan()
        assert refused.plugins("EvictionPlugin") == ()
        assert refused.problems() == (f"{path}: {path} is not trusted: the socket belongs to uid 65534",)
        os.chown(path, 0, 0)
        refused = PluginWatcher({"EvictionPlugin": ("v1alpha1",)}, directory)
        await refused.scan()
        assert refused.problems() == (f"{path}: {path} is not trusted: the process that listens there has uid 65534",)
        accepted = PluginWatcher({"EvictionPlugin": ("v1alpha1",)}, directory, trusted_uids=(FOREIGN_UID,))
        await accepted.scan()
        assert [plugin.name for plugin in accepted.plugins("EvictionPlugin")] == ["foreign"]


async def test_a_plugin_is_dropped_when_its_directory_is_opened_to_everybody(tmp_path: Path) -> None:
    directory = tmp_path / "plugins"
    directory.mkdir()
    with foreign_plugin(directory / "own.sock", 0):
        watcher = PluginWatcher({"EvictionPlugin": ("v1alpha1",)}, directory)
        await watcher.scan()
        assert [plugin.name for plugin in watcher.plugins("EvictionPlugin")] == ["foreign"]
        directory.chmod(0o777)
        await watcher.scan()
        assert watcher.plugins("EvictionPlugin") == ()


async def test_reporters_registration_sockets_and_runtimes_of_others_are_refused() -> None:
    with directory_for_everybody() as directory, foreign_listener(directory / "kubelet.sock"):
        reporters = ReporterPlugins(directory, lambda: None)
        await reporters.scan()
        problem = reporters.problem()
        assert problem is not None
        assert "can be written by other users (mode 1777)" in problem.reason
        with pytest.raises(Unavailable, match=r"can be written by other users \(mode 1777\)"):
            await register_plugin(directory / "kubelet.sock", "dioptase_cpu.sock", "cpu", None)
        directory.chmod(0o755)
        os.chown(directory / "kubelet.sock", 0, 0)
        with pytest.raises(Unavailable, match="the process that listens there has uid 65534"):
            await register_plugin(directory / "kubelet.sock", "dioptase_cpu.sock", "cpu", None)
        with pytest.raises(Unavailable, match="the process that listens there has uid 65534") as refused:
            await connect_nri(directory / "kubelet.sock", {}, 1.0)
        assert refused.value.remedy == "run it as root", "the setting trustedUids is of plugins and advisors"
        reporters.close()


async def test_a_runtime_of_root_is_connected(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "nri.sock"))
        listener.listen()
        session = await connect_nri(tmp_path / "nri.sock", {}, 1.0)
        await session.close()
