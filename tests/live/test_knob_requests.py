"""The agent writes the knobs that the settings request in addition to CPU pools, and restores each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent.sensors.node.machine import read_topology
from api.units import MIB
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.live.agent_process import Agent

pytestmark = pytest.mark.live
HOLD = "import sys, time\nheld = b'x' * (64 << 20)\ntime.sleep(60)"


@pytest.fixture
def root() -> Iterator[TestCgroup]:
    """Where reclaimed pods are kept together."""
    with cgroup(require_writable_cgroups(), "wishes") as created:
        yield created


@pytest.fixture
def groups(root: TestCgroup) -> Iterator[tuple[TestCgroup, TestCgroup]]:
    """An online cgroup of half a CPU too, and a batch cgroup with 64 MiB in it."""
    with cgroup(root.hierarchy, "wishes-web") as web:
        batch = TestCgroup(root.hierarchy, f"{root.path}/batch")
        try:
            quota(web).write_text("50000")
            web.burn()
            batch.start([sys.executable, "-c", HOLD])
            yield web, batch
        finally:
            batch.close()


def quota(group: TestCgroup) -> Path:
    return group.file("cpu", "cpu.max" if group.hierarchy.mode == "v2" else "cpu.cfs_quota_us")


def burst(group: TestCgroup) -> str:
    name = "cpu.max.burst" if group.hierarchy.mode == "v2" else "cpu.cfs_burst_us"
    return group.file("cpu", name).read_text().strip()


def idle(group: TestCgroup) -> str:
    return group.file("cpu", "cpu.idle").read_text().strip()


def limit_bytes(group: TestCgroup) -> float:
    name = "memory.max" if group.hierarchy.mode == "v2" else "memory.limit_in_bytes"
    text = group.file("memory", name).read_text().strip()
    # Version 1 shows no limit as the largest number of pages.
    return float("inf") if text == "max" or int(text) >= 1 << 62 else int(text)


def started(tmp_path: Path, groups: tuple[TestCgroup, TestCgroup], config: dict[str, object]) -> Agent:
    web, batch = groups
    key = "katalyst.kubewharf.io"
    pods = [
        {
            "name": "web",
            "annotations": {
                f"{key}/qos_level": "shared_cores",
                f"{key}/cpu_enhancement": '{"cpu_burst_policy": "static", "cpu_burst_percent": "80"}',
            },
            "containers": [{"cgroup": web.path}],
        },
        {
            "name": "batch",
            "annotations": {f"{key}/qos_level": "reclaimed_cores"},
            "containers": [{"cgroup": batch.path}],
        },
    ]
    files = tmp_path / "pods.yaml", tmp_path / "config.yaml"
    files[0].write_bytes(msgspec.yaml.encode({"pods": pods}))
    files[1].write_bytes(msgspec.yaml.encode(config))
    return Agent(
        "--act", "on", "--pods", str(files[0]), "--config", str(files[1]), "--state-dir", str(tmp_path / "state")
    )


def test_the_guard_limits_reclaimed_pods_together_and_a_burst_is_what_the_pod_asks_for(
    root: TestCgroup, groups: tuple[TestCgroup, TestCgroup], tmp_path: Path
) -> None:
    web, batch = groups
    config = {"memory": {"reclaimRoot": root.path}, "knobs": {"burst": {"policy": "katalyst"}}}
    with started(tmp_path, groups, config) as agent:
        until(lambda: limit_bytes(root) < float("inf"), "reclaimed pods have a limit together")
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert 64 * MIB < limit_bytes(root) < total
        assert limit_bytes(batch) == float("inf"), "one by one they have none"
        until(lambda: (idle(root), idle(batch), idle(web)) == ("1", "1", "0"), "they yield together")
        siblings = [source for source in agent.view()["sources"] if source["name"] == "pod-siblings"]
        assert not siblings, "the root is the online pod's sibling, and yields"
        until(lambda: burst(web) == "40000", "80 % of the quota may be saved up")
        assert (burst(batch), quota(web).read_text().split()[0]) == ("0", "50000")
        story = agent.get("/api/v1/decisions?knob=cpu.max.burst")
        assert "80 % of the quota of 50000 us" in story
        assert "above the critical watermark" in agent.get(f"/api/v1/decisions?cgroup={root.path}")
        assert agent.end() == 0
    assert limit_bytes(root) == float("inf")
    assert (burst(web), idle(root), idle(batch)) == ("0", "0", "0")


def test_an_online_pod_below_the_root_keeps_it_from_being_limited(
    root: TestCgroup, groups: tuple[TestCgroup, TestCgroup], tmp_path: Path
) -> None:
    with started(tmp_path, (groups[1], groups[0]), {"memory": {"reclaimRoot": root.path}}) as agent:
        assert agent.view()["act"] == "on"
        until(lambda: "cpu.idle" in agent.get("/api/v1/decisions"), "batch yields")
        assert limit_bytes(root) == float("inf")
        assert agent.end() == 0


def test_koordinator_s_suppress_decides_the_quota_where_the_advisor_has_no_policy(
    groups: tuple[TestCgroup, TestCgroup], tmp_path: Path
) -> None:
    batch = groups[1]
    # Whatever else runs here, half of the node is kept for them: a CPU for each two that there are.
    config = {
        "advisor": {"policy": "none"},
        "knobs": {"suppress": {"policy": "cfsQuota", "thresholdPercent": 1, "minPercent": 50}},
    }
    half_us = len(read_topology(Path("/sys")).cpus) * 50_000
    with started(tmp_path, groups, config) as agent:
        until(lambda: quota(batch).read_text().split()[0] == str(half_us), "it grows to the floor")
        story = agent.get("/api/v1/decisions?pod=default/batch&limit=100")
        assert "1 % of" in story
        assert agent.end() == 0
    assert quota(batch).read_text().split()[0] in ("-1", "max")
