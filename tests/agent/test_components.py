"""The agent's connection to its cluster: which components are opened for which settings, and what each receives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from agent import components
from agent.components import ClusterConnection
from agent.config.config import AgentConfig, SocketsConfig
from agent.config.kubelet import KubeletConfig
from agent.config.report import ReportConfig
from agent.dynamic_config.last_good import LastGoodFile
from agent.qrm.actuator import oom_scores, sysfs_writer
from agent.qrm.knobs.resctrl import GROUP_PREFIX
from agent.reporter.extended_resources import ExtendedResources
from agent.sensors.pods.kubelet_client import CONFIGZ_PATH, KubeletClient
from agent.sensors.pods.kubelet_configuration import KubeletConfigPoller
from api.decision import ActMode
from api.diagnostics import EffectiveConfiguration
from api.interfaces import Unavailable
from api.text import to_json
from common.supervised_tasks import SupervisedTasks
from tests.agent.dynamic_config.test_follow import Cluster as Server
from tests.agent.dynamic_config.test_follow import until
from tests.agent.dynamic_config.test_merge import ADMIN, fits, reclaim, thing
from tests.agent.reporter.test_cnr import finished
from tests.builders.api_server import FakeApiServer, serving

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: "{}"}}}}]
users: [{{name: u, user: {{token: t}}}}]
"""


def set_kubeconfig(monkeypatch: pytest.MonkeyPatch, directory: Path, server: str) -> None:
    (directory / "kubeconfig").write_text(KUBECONFIG.format(server))
    monkeypatch.setenv("KUBECONFIG", str(directory / "kubeconfig"))


async def test_without_a_node_name_nothing_is_reported_and_settings_are_shown(tmp_path: Path) -> None:
    cluster = ClusterConnection("", tmp_path)
    file = {"report": {"reservedCores": 1}}
    config = AgentConfig(report=ReportConfig(reserved_cores=1))
    assert cluster.open({"file": file}, config, fits) == (config, ())
    async with AsyncExitStack() as stack:
        assert await cluster.join(AgentConfig(), ActMode.ON, None, SupervisedTasks(stack)) == ()
        assert cluster.reporters == ()
    effective = msgspec.json.decode(to_json(cluster.effective_configuration()), type=EffectiveConfiguration)
    assert [item.name for item in effective.settings if item.source == "file"] == ["report.reservedCores"]
    assert (effective.node, effective.objects) == ("", ())
    assert list(tmp_path.iterdir()) == []


async def test_with_a_node_name_the_agent_starts_with_the_last_good_configuration_and_follows_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LastGoodFile(tmp_path, "n1").save({ADMIN: thing(reclaim(enableReclaim=False), "h1")})
    server = Server()
    server.name_hashes("h2")
    server.set_fields(enableReclaim=True, minReclaimedResourceForReport={"cpu": "3"})
    cluster = ClusterConnection("n1", tmp_path)
    config, messages = cluster.open({}, AgentConfig(report=ReportConfig(extended_resources=True)), fits)
    assert (config.advisor.enable_reclaim, messages) == (False, ())
    received: list[AgentConfig] = []
    async with serving(server.answer) as address, AsyncExitStack() as stack:
        set_kubeconfig(monkeypatch, tmp_path, str(address))
        sinks = await cluster.join(AgentConfig(), ActMode.ON, None, SupervisedTasks(stack))
        assert len(sinks) == 3
        assert [source.name for source in cluster.reporters] == [
            "dynamic-config",
            "cnr",
            "events",
            "extended-resources",
            "node-report",
        ]
        cluster.start(received.append, SupervisedTasks(stack))
        await until(lambda: received, "the new content is applied")
        effective, applied, requests = cluster.effective_configuration(), cluster.applied_objects(), cluster.requests()
    assert applied == {("AdminQoSConfiguration", "kube-system/all", "h2"): True}
    assert requests["GET", "adminqosconfigurations.v1alpha1.config.katalyst.kubewharf.io", "200"] == 1
    assert (received[0].advisor.enable_reclaim, received[0].report.min_cores) == (True, 3.0)
    assert received[0].report.extended_resources, "the file's own settings stay"
    assert (effective.node, [item.hash for item in effective.objects]) == ("n1", ["h2"])
    await asyncio.sleep(0)


async def test_annotations_of_the_settings_count_without_api_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.convert({"power": {"enable": True}, "node": {"annotations": {"power-alert": "s0"}}}, AgentConfig)
    alone = ClusterConnection("", None, None)
    assert alone.open({}, config, fits) == (config, ())
    assert alone.node_annotations() == {"power-alert": "s0"}
    server = FakeApiServer({"/api/v1/nodes/n1": {"metadata": {"name": "n1", "annotations": {"power-alert": "p0"}}}})
    async with serving(server) as address, AsyncExitStack() as stack:
        (tmp_path / "kubeconfig").write_text(KUBECONFIG.format(address))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        cluster, tasks = ClusterConnection("n1", None, None), SupervisedTasks(stack)
        _, messages = cluster.open({}, config, fits)
        assert messages == ("node.annotations are ignored: those of Node n1 count; take them out of the settings.",)
        await cluster.join(config, ActMode.ON, None, tasks)
        assert "node-annotations" in [reporter.name for reporter in cluster.reporters]
        assert cluster.node_annotations() is None, "unknown, and not the settings'"
        cluster.start(lambda _: None, tasks)
        await until(lambda: cluster.node_annotations() == {"power-alert": "p0"}, "the Node's annotations are known")


@pytest.mark.parametrize(
    ("act", "serve", "reports"),
    [
        (ActMode.ON, (), True),
        (ActMode.DRY_RUN, (), False),
        (ActMode.DRY_RUN, ("pod-resources",), False),
        (ActMode.DRY_RUN, ("advisor",), True),  # a stock QRM plugin carries it out
        (ActMode.OFF, ("advisor",), False),
    ],
)
async def test_a_dry_run_reports_reclaimable_resources_only_if_a_peer_carries_out_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: ActMode, serve: tuple[Any, ...], reports: bool
) -> None:
    set_kubeconfig(monkeypatch, tmp_path, "http://127.0.0.1:1")
    config = AgentConfig(
        report=ReportConfig(extended_resources=True), sockets=SocketsConfig(serve=serve, advisor_dir=str(tmp_path))
    )
    cluster = ClusterConnection("n1", None)
    cluster.open({}, config, fits)
    async with AsyncExitStack() as stack:
        (written,) = [
            item
            for item in await cluster.join(config, act, None, SupervisedTasks(stack))
            if isinstance(item, ExtendedResources)
        ]
        written.publish(finished())
        assert any(written._desired.values()) is reports


@pytest.fixture
def socks() -> Iterator[Path]:
    """A directory with a path that is short enough for sockets."""
    with TemporaryDirectory(prefix="socks") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("report", "kubelet", "names"),
    [
        ({}, False, ["cnr", "events", "node-report"]),
        ({"pod_resources": "/nowhere.sock"}, True, ["cnr", "events", "node-report"]),
        ({"reporter_plugins": "/nowhere"}, False, ["cnr", "events", "node-report", "reporter-plugins"]),
        ({"offered_in": "{}"}, True, ["offered-report", "events"]),
    ],
)
async def test_the_report_settings_decide_which_components_are_opened(
    tmp_path: Path,
    socks: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: dict[str, str],
    kubelet: bool,
    names: list[str],
) -> None:
    set_kubeconfig(monkeypatch, tmp_path, "http://127.0.0.1:1")
    settings = {name: value.format(socks) for name, value in report.items()}
    client = KubeletClient(KubeletConfig(url="http://127.0.0.1:1"), CONFIGZ_PATH)
    cluster = ClusterConnection("n1", None, KubeletConfigPoller(client) if kubelet else None)
    cluster.open({}, AgentConfig(report=ReportConfig(**settings)), fits)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        await cluster.join(AgentConfig(), ActMode.ON, None, SupervisedTasks(stack))
        assert [source.name for source in cluster.reporters] == ["dynamic-config", *names]
        cluster.start(lambda _config: None, SupervisedTasks(stack))
        if "offered_in" in report:
            await until((socks / "dioptase-reporter.sock").is_socket, "the report is offered")
        if "pod_resources" in report:
            (collector,) = [item for item in cluster.reporters if item.name == "node-report"]
            await until(lambda: collector.problem() is not None, "neither the kubelet nor its socket exists")


async def test_a_node_s_name_without_an_api_server_is_refused_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    cluster = ClusterConnection("n1", None)
    cluster.open({}, AgentConfig(), fits)
    async with AsyncExitStack() as stack:
        with pytest.raises(Unavailable):
            await cluster.join(AgentConfig(), ActMode.ON, None, SupervisedTasks(stack))


async def test_tokens_cannot_be_reviewed_before_the_cluster_was_joined() -> None:
    with pytest.raises(Unavailable, match="has not joined its cluster yet"):
        await ClusterConnection("n1", None).review("token", "/metrics")


def test_tokens_are_not_reviewed_without_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("exporters: {tokenReview: true}\n")
    run = f"from cli.main import main; main(['agent', '--config', '{path}', '--state-dir', '{tmp_path / 'state'}'])"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"{path}: exporters.tokenReview: the API server reviews the tokens; add --node" in done.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("kubelet", "name"),
    [
        ({}, "n1"),
        ({"url": "https://localhost:10250"}, "n1"),
        ({"url": "https://[::1]:10250"}, "n1"),
        ({"url": "https://192.0.2.1:10250"}, ""),
        ({"url": "http://127.0.0.1:10255"}, ""),
        ({"serverName": "kubelet"}, "kubelet"),
    ],
)
def test_a_kubelet_at_loopback_is_known_by_its_node_s_name(kubelet: dict[str, str], name: str) -> None:
    assert msgspec.convert(kubelet, KubeletConfig).named("n1").server_name == name


def test_the_journals_whose_presence_is_checked_are_those_that_are_written() -> None:
    assert (components.NODE_ORIGINALS, components.OOM_ORIGINALS) == (sysfs_writer.FILE_NAME, oom_scores.FILE_NAME)
    assert f"fs/resctrl/{GROUP_PREFIX}*" == components.RESCTRL_GROUPS
