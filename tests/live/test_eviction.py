"""The agent as a process that evicts: what it shows, what it leaves alone, and what is left when it is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.katalyst.plugin_registration import PluginIdentity, PluginRegistration
from api.proto import eviction_plugin_pb2 as wire
from common.grpc_unix import GrpcServer, GrpcService, serve_on_socket
from tests.agent.katalyst.test_eviction_plugin_clients import SERVICE, handlers
from tests.builders.waiting import until
from tests.dashboards.prometheus_server import free_port
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.kernel.test_eviction_cycles import EIGHT_MIB
from tests.kernel.test_signal_killer import IGNORING, SLEEP, run
from tests.live.agent_process import DIOPTASE, Agent

pytestmark = pytest.mark.live
RSS = "rss-overuse-eviction-plugin"


@pytest.fixture
def groups() -> Iterator[tuple[TestCgroup, TestCgroup]]:
    hierarchy = require_writable_cgroups()
    with cgroup(hierarchy, "live-stays") as web, cgroup(hierarchy, "live-leaves") as batch:
        yield web, batch


def options(groups: tuple[TestCgroup, TestCgroup], directory: Path, act: str = "on", **eviction: object) -> list[str]:
    """Pods `web` and `batch`, of which the second requests one MiB, and an agent that looks at nothing else."""
    levels = {"web": ("shared_cores", "100Mi", groups[0].path), "batch": ("reclaimed_cores", "1Mi", groups[1].path)}
    pods = [
        {
            "name": name,
            "annotations": {"katalyst.kubewharf.io/qos_level": level},
            "containers": [{"name": name, "cgroup": path, "resources": {"requests": {"memory": memory}}}],
        }
        for name, (level, memory, path) in levels.items()
    ]
    (directory / "pods.yaml").write_bytes(msgspec.yaml.encode({"pods": pods}))
    settings = {
        "intervalS": 0.5, "advisor": {"policy": "none"}, "probes": [],
        "eviction": {"plugins": [RSS], "intervalS": 0.5, **eviction},
    }  # fmt: skip
    (directory / "settings.yaml").write_bytes(msgspec.yaml.encode(settings))
    files = ["--pods", str(directory / "pods.yaml"), "--config", str(directory / "settings.yaml")]
    return [*files, "--state-dir", str(directory / "state"), "--act", act]


def evictions(agent: Agent) -> list[dict[str, Any]]:
    document: list[dict[str, Any]] = json.loads(agent.get("/api/v1/evictions"))
    return document


def reasons(agent: Agent) -> list[str]:
    """What became of victims so far."""
    return [entry["kill"]["reason"] for entry in evictions(agent) if entry["kill"]]


def explained(agent: Agent, pod: str) -> str:
    done = subprocess.run(
        [DIOPTASE, "explain", pod, "--url", agent.url.rstrip("/")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return " ".join(done.stdout.split())


def test_a_pod_above_its_request_is_evicted_and_reported_everywhere(
    groups: tuple[TestCgroup, TestCgroup], tmp_path: Path
) -> None:
    online, batch = run(groups[0], EIGHT_MIB + SLEEP), run(groups[1], EIGHT_MIB + SLEEP)
    with Agent(*options(groups, tmp_path)) as agent:
        until(lambda: reasons(agent) == ["EvictCreated", "EvictSucceeded"], "it leaves")
        assert (batch.wait(20), online.poll()) == (-signal.SIGTERM, None)
        victim = evictions(agent)[0]["victim"]
        assert (victim["pod"], victim["plugin"], victim["dry_run"]) == ("default/batch", RSS, False)
        text = explained(agent, "default/batch")
        assert "it is evicted, with the pod's own grace period, by rss-overuse-eviction-plugin" in text
        assert "above 1.05 times" in text
        metrics = agent.get("/metrics")
        assert f'dioptase_eviction_victims_total{{plugin="{RSS}",dry_run="false"}} 1' in metrics
        assert 'dioptase_eviction_kills_total{reason="EvictSucceeded"} 1' in metrics
        assert 'dioptase_source_up{source="eviction",detail=""} 1' in metrics
        assert agent.view()["evictions"]["thresholds"][0]["plugin"] == RSS
        assert "default/batch is evicted: Resident memory is" in agent.log
        assert agent.end() == 0
    lines = (tmp_path / "state" / "evictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [1, 2, 3]


def test_a_dry_run_of_the_agent_shows_the_victims(groups: tuple[TestCgroup, TestCgroup], tmp_path: Path) -> None:
    batch = run(groups[1], EIGHT_MIB + SLEEP)
    with Agent(*options(groups, tmp_path, "dry-run")) as agent:
        until(lambda: len(evictions(agent)) == 1, "it is shown")
        assert evictions(agent)[0]["victim"]["dry_run"]
        shown = agent.view()["seq"]
        until(lambda: agent.view()["seq"] >= shown + 4, "some more rounds")
        assert (batch.poll(), reasons(agent)) == (None, [])
        assert "default/batch would be evicted: " in agent.log


def test_an_agent_killed_during_an_eviction_kills_no_pod_and_the_next_one_restarts_it(
    groups: tuple[TestCgroup, TestCgroup], tmp_path: Path
) -> None:
    batch = run(groups[1], EIGHT_MIB + IGNORING)
    grace_s = 2.0
    request = options(groups, tmp_path, rss={"graceS": grace_s})
    with Agent(*request) as agent:
        until(lambda: reasons(agent) == ["EvictCreated"], "the eviction is created")
        agent.process.kill()
        agent.process.wait()
    time.sleep(1.5 * grace_s)
    assert batch.poll() is None, "no agent is left to end it"
    with Agent(*request) as agent:
        until(lambda: reasons(agent)[-1:] == ["EvictSucceeded"], "the next one ends it")
        assert batch.wait(20) == -signal.SIGKILL
        assert reasons(agent) == ["EvictCreated", "EvictCreated", "EvictSucceeded"]
        assert [entry["seq"] for entry in evictions(agent)] == list(range(1, len(evictions(agent)) + 1))
        assert agent.end() == 0


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Offers an eviction plugin by what it says, and gives the directory of its socket."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers: list[GrpcServer] = []

    def offer(name: str, **text: Any) -> Path:
        services = (
            PluginRegistration(PluginIdentity(kind="EvictionPlugin", name=name)).service(),
            GrpcService(SERVICE, handlers({"ThresholdMet": wire.ThresholdMetResponse(), **text}, [])),
        )
        created = asyncio.run_coroutine_threadsafe(serve_on_socket(tmp_path / "socks" / f"{name}.sock", services), loop)
        servers.append(created.result(20))
        return tmp_path / "socks"

    try:
        yield offer
    finally:
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_plugin_of_others_has_a_pod_leave_and_one_that_hangs_holds_nothing_up(
    groups: tuple[TestCgroup, TestCgroup], tmp_path: Path, sockets: Callable[..., Path]
) -> None:
    online, batch = run(groups[0], SLEEP), run(groups[1], SLEEP)
    named = wire.GetEvictPodsResponse()
    # In a static file a pod's uid is its name.
    named.evict_pods.add(reason="too loud", force_evict=True).pod.metadata.uid = "default/batch"
    sockets("hangs", GetEvictPods="hang")
    directory = sockets("loud", GetEvictPods=named)
    with Agent(*options(groups, tmp_path, plugins=[], pluginSockets=str(directory))) as agent:
        until(lambda: reasons(agent) == ["EvictCreated", "EvictSucceeded"], "it leaves")
        assert (batch.wait(20), online.poll()) == (-signal.SIGTERM, None)
        victim = evictions(agent)[0]["victim"]
        assert (victim["plugin"], victim["verdict"]["text"]) == ("loud", "too loud")
        metrics = agent.get("/metrics")
        assert 'dioptase_eviction_victims_total{plugin="loud",dry_run="false"} 1' in metrics
        assert 'dioptase_source_up{source="eviction-plugins",detail="grpc"} 1' in metrics
        observed = agent.view()["seq"]
        until(lambda: agent.view()["seq"] >= observed + 4, "rounds go on")
        until(
            lambda: any(
                "did not answer within 5 s" in item["text"] for item in agent.view()["evictions"]["thresholds"]
            ),
            "a hanging pod is reported",
        )
        assert agent.end() == 0


def test_the_demo_lives_through_an_eviction_of_its_batch_job(tmp_path: Path) -> None:
    require_writable_cgroups()
    settings = tmp_path / "evict.yaml"
    settings.write_text(f"advisor: {{policy: none}}\neviction: {{plugins: [{RSS}], rss: {{ratio: 0.05}}}}\n")
    result = tmp_path / "said"
    with result.open("wb") as output:
        address = f"127.0.0.1:{free_port()}"
        demo = subprocess.Popen(
            [DIOPTASE, "demo", "--duration", "100", "--listen", address, "--config", str(settings)],
            stdout=output, stderr=output, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
    try:
        until(lambda: demo.poll() is not None or "job was evicted" in result.read_text(), "it leaves", 90)
        if "another demo is running" in result.read_text():
            pytest.skip("dioptase demo is running on this machine")
        demo.send_signal(signal.SIGINT)
        assert demo.wait(40) == 0, result.read_text()
    finally:
        demo.kill()
        demo.wait()
    text = result.read_text()
    assert "restarts in 10 s: Resident memory is" in text
    assert "evictions      1 of the batch job: Resident memory is" in text
    assert "none differs" in text
