"""The agent's probes other than runqlat: loaded after the start, joined into snapshots, removed at the end."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from probes import registry
from probes.migrations import ONE_NODE
from tests.builders.waiting import until
from tests.kernel.real_cgroups import cgroup, require_writable_cgroups
from tests.live.agent_process import DIOPTASE, Agent, pods_file
from tests.live.test_agent import attached, held_by

pytestmark = pytest.mark.live

CHATTER = """
import socket, time
a, b = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
b.bind(("127.0.0.1", 0))
while True:
    a.sendto(b"x" * 100, b.getsockname())
    b.recv(100)
    time.sleep(0.01)
"""
RSS_MIB = 64


@pytest.fixture
def hierarchy() -> Hierarchy:
    return require_writable_cgroups()


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    pods = pods_file(tmp_path / "pods.yaml", "/dioptase-test-none-web", "/dioptase-test-none-batch")
    return ["--pods", str(pods), "--state-dir", str(tmp_path / "state")]


def snapshot(agent: Agent) -> dict[str, Any]:
    return dict(json.loads(agent.get("/api/v1/snapshot")))


def sources(agent: Agent) -> dict[str, dict[str, Any]]:
    return {source["name"]: source for source in snapshot(agent)["sources"]}


def loaded(agent: Agent) -> None:
    """Wait until no probe is loading any more."""
    agent.view()
    until(
        lambda: not any(source["detail"] == "loading" for source in sources(agent).values()),
        f"all probes are loaded or refused: {agent.log}",
        60,
    )


def rss_mib(agent: Agent) -> float:
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]) / 1024


def test_probes_come_after_the_start_and_leave_with_the_agent(hierarchy: Hierarchy, options: list[str]) -> None:
    with cgroup(hierarchy, "chatter") as group, Agent(*options) as agent:
        group.start(["python3", "-c", CHATTER])
        loaded(agent)
        result = sources(agent)
        assert result.keys() >= {"waits", *registry.DEFAULT_PROBES}
        for name in registry.DEFAULT_PROBES:
            assert result[name]["ok"], result[name]
            assert result[name]["detail"], "the form is shown"

        def talks() -> bool:
            net = snapshot(agent)["cgroups"].get(group.path, {}).get("net")
            return bool(net and net["udp_sent_packets"] > 20)

        until(talks, "the chatter's datagrams are in the snapshot")
        net = snapshot(agent)["cgroups"][group.path]["net"]
        assert net["udp_sent_bytes"] == 100 * net["udp_sent_packets"]
        assert snapshot(agent)["node"]["softirq_ns"]["0"]["TIMER"] > 0
        assert not Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").exists() or not children(agent)
        assert rss_mib(agent) <= RSS_MIB
        own = held_by(agent)
        assert own <= attached()
        assert agent.end() == 0
    until(lambda: not own & attached(), "nothing stays attached")


def children(agent: Agent) -> str:
    return Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text()


def test_only_the_chosen_probes_are_loaded(hierarchy: Hierarchy, options: list[str], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("probes: [softirq]\n")
    with Agent("--config", str(config), *options) as agent:
        loaded(agent)
        result = sources(agent)
        assert result["softirq"]["ok"]
        assert not result.keys() & (set(registry.PROBE_NAMES) - {"softirq"})
        assert agent.end() == 0


def test_an_unknown_probe_is_refused_before_anything_starts(options: list[str], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("probes: [softirk]\n")
    request = subprocess.run(
        [DIOPTASE, "agent", "--config", str(config), *options], capture_output=True, text=True, check=False
    )
    assert request.returncode == 2
    assert "there is no probe `softirk`; choose from " in " ".join(request.stderr.split())


def test_ending_while_probes_load_is_quick_and_leaves_nothing(hierarchy: Hierarchy, options: list[str]) -> None:
    with Agent(*options) as agent:
        assert agent.url
        own = held_by(agent)
        assert agent.end(signal.SIGTERM) == 0
    until(lambda: not own & attached(), "nothing stays attached")


def test_without_capabilities_each_probe_says_what_it_lacks(hierarchy: Hierarchy, options: list[str]) -> None:
    with Agent(*options, prefix=("setpriv", "--bounding-set=-all", "--inh-caps=-all")) as agent:
        loaded(agent)
        result = sources(agent)
        for name in registry.DEFAULT_PROBES:
            if result[name]["detail"] == ONE_NODE:
                continue
            assert not result[name]["ok"]
            assert "capabilities BPF and PERFMON" in result[name]["remedy"]
        assert agent.end() == 0
