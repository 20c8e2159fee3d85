"""The agent as a process on version 2: CPUs that go offline and come back, SIGKILL in the middle, the next agent, and reset."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent.sensors.node.machine import read_topology
from api.cpu import format_cpu_list, parse_cpu_list
from api.units import MIB
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.live.agent_process import DIOPTASE, Agent
from tests.vm.agent_cycles import KEY, pod, write
from tests.vm.workloads import SPIN, disk, family, free_bytes, hold, numa_nodes, number_of

pytestmark = pytest.mark.vm

ODD = {
    "cpu.weight": "33", "cpu.max": "150000 50000", "cpu.max.burst": "7000", "cpuset.cpus": "0-2", "cpuset.mems": "0-1",
    "memory.max": str(1 << 30), "memory.high": str(1000 * MIB), "memory.low": str(4 * MIB), "memory.min": str(2 * MIB),
    "memory.swap.max": str(600 * MIB), "pids.max": "333",
    "io.weight": "default 33", "io.max": "{data} rbps=33554432 wiops=3300",
}  # fmt: skip
"""What no default and no decision of these tests equals."""
FILES = (*ODD, "cpu.idle", "cgroup.freeze", "cpuset.cpus.partition")


class Node:
    """An online pod and, in a group for batch work, a batch pod, with odd values in every file that the agent could write."""

    def __init__(self, web: TestCgroup, root: TestCgroup, batch: TestCgroup) -> None:
        self.web, self.root, self.batch = web, root, batch
        for group in (web, root, batch):
            for name, value in ODD.items():
                group.file("cpu", name).write_text(value.format(data=number_of("data")))
        # What is below it may have any CPU.
        root.file("cpuset", "cpuset.cpus").write_text(format_cpu_list(read_topology(Path("/sys")).ids))

    def texts(self) -> dict[str, str]:
        """Every file of every group, and what is set for the disk and for processes."""
        text = {
            f"{group.path}/{name}": group.file("cpu", name).read_text()
            for group in (self.web, self.root, self.batch)
            for name in FILES
        }
        text["wbt"] = (disk("data") / "queue/wbt_lat_usec").read_text()
        for group in (self.web, self.batch):
            (process,) = group.processes
            text[f"{group.path} oom_score_adj"] = Path(f"/proc/{process.pid}/oom_score_adj").read_text()
        return text

    def cpus(self) -> tuple[frozenset[int], frozenset[int]]:
        """CPUs of the online pod and of the batch pod."""
        web, batch = (parse_cpu_list(g.file("cpu", "cpuset.cpus").read_text()) for g in (self.web, self.batch))
        return frozenset(web), frozenset(batch)

    def parted(self, every: frozenset[int]) -> bool:
        """Whether each pod has some of these CPUs, every CPU belongs to a pod, and none to both."""
        web, batch = self.cpus()
        return bool(web and batch) and web | batch == every and not web & batch


@pytest.fixture
def node() -> Iterator[Node]:
    hierarchy = require_writable_cgroups()
    with ExitStack() as stack:
        web, root = (stack.enter_context(cgroup(hierarchy, name)) for name in ("web", "batch"))
        (batch,) = stack.enter_context(family(root, "job"))
        yield Node(web, root, batch)


def options(directory: Path, settings: dict[str, Any], node: Node) -> list[str]:
    web = pod(node.web, "shared_cores", cpu=1, memory=64 * MIB)
    web["annotations"][f"{KEY}/cpu_enhancement"] = '{"cpu_burst_policy": "static", "cpu_burst_percent": "80"}'
    web["containers"][0]["resources"]["limits"] = {"memory": str(128 * MIB)}
    pods, config = write(directory, {"probes": [], **settings}, [web, pod(node.batch, "reclaimed_cores")])
    return ["--act", "on", "--pods", str(pods), "--config", str(config), "--state-dir", str(directory / "state")]


def running(agent: Agent) -> bool:
    assert agent.process.poll() is None, agent.log
    return True


@pytest.fixture
def last_cpu() -> Iterator[Path]:
    """Switches the last CPU off and on; on in the end."""
    cpu = max(read_topology(Path("/sys")).ids)
    switch = Path(f"/sys/devices/system/cpu/cpu{cpu}/online")
    yield switch
    switch.write_text("1")


def test_pools_follow_a_cpu_that_goes_offline_and_comes_back(node: Node, last_cpu: Path, tmp_path: Path) -> None:
    for group in (node.web, node.batch):
        group.start(SPIN)
    before, every = node.texts(), frozenset(read_topology(Path("/sys")).ids)
    last = max(every)
    with Agent(*options(tmp_path, {"advisor": {"policy": "canonical"}}, node)) as agent:
        until(lambda: running(agent) and node.parted(every), "every CPU belongs to a pod")
        last_cpu.write_text("0")
        until(lambda: node.parted(every - {last}), "the others are")
        assert last not in {cpu for cpus in agent.view()["pools"].values() for cpu in parse_cpu_list(cpus)}
        assert not [source["name"] for source in agent.view()["sources"] if not source["ok"]]
        last_cpu.write_text("1")
        until(lambda: node.parted(every), "all are again")
        assert agent.end() == 0
        assert "Traceback" not in agent.log
    assert node.texts() == before


def settings(node: Node) -> dict[str, Any]:
    """Whatever the agent can turn on this node is turned."""
    return {
        "advisor": {"policy": "canonical"},
        "memory": {
            "reclaimRoot": node.root.path,
            "minCriticalWatermarkBytes": min(map(free_bytes, numa_nodes())) - 64 * MIB,
            "offloading": {"levels": {"reclaimed_cores": {"enable": True}}},
        },
        "knobs": {
            "burst": {"policy": "katalyst"},
            "memoryQos": {"shared_cores": {"minPercent": 25, "lowPercent": 50, "throttlingPercent": 50}},
            "io": {
                "weights": {"reclaimed_cores": 20, "shared_cores": 300},
                "max": {"reclaimed_cores": f"{number_of('data')} wbps=4194304 wiops=5000"},
                "wbtUs": {"VIRTIO": 54321},
                "costQos": {disk("data").name: "enable=1 ctrl=user min=50.00 max=150.00"},
            },
            "oomPriority": True,
        },
    }


def expected_files(node: Node) -> dict[str, str]:
    """What is in those files then, but for what depends on how busy the node is."""
    web, batch = node.web.path, node.batch.path
    return {
        f"{web}/cpu.max.burst": "120000\n",
        f"{batch}/cpu.max.burst": "0\n",
        f"{web}/memory.min": f"{16 * MIB}\n",
        f"{web}/memory.low": f"{32 * MIB}\n",
        f"{web}/memory.high": f"{96 * MIB}\n",
        f"{web}/io.weight": "default 300\n",
        f"{batch}/io.weight": "default 20\n",
        f"{batch}/io.max": f"{number_of('data')} rbps=33554432 wbps=4194304 riops=max wiops=3300\n",
        f"{batch}/memory.swap.max": "0\n",
        f"{batch} oom_score_adj": "1000\n",
        "wbt": "54321\n",
    }


def test_the_agent_after_a_killed_one_moves_no_pod_and_reset_restores_every_original(
    node: Node, tmp_path: Path
) -> None:
    for group in (node.web, node.batch):
        hold(group, 16 * MIB)
    before, changed = node.texts(), expected_files(node)
    request = options(tmp_path, settings(node), node)
    differing = {f"{node.root.path}/memory.max", f"{node.root.path}/memory.high", *changed}
    differing |= {f"{group.path}/cpuset.cpus" for group in (node.web, node.batch)}

    def turned() -> bool:
        now = node.texts()
        return changed.items() <= now.items() and all(now[name] != before[name] for name in differing)

    with Agent(*request) as first:
        until(lambda: running(first) and turned(), "every knob is turned")
        assert {name for name, text in node.texts().items() if text != before[name]} == differing
        assert "enable=1" in Path("/sys/fs/cgroup/io.cost.qos").read_text()
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
    assert turned()
    cpus, journal = node.cpus(), tmp_path / "state/decisions.jsonl"
    values = len(journal.read_text().splitlines())
    with Agent(*request) as second:
        assert second.view()["seq"] >= 2
        assert node.cpus() == cpus
        entries = [json.loads(line)["outcome"] for line in journal.read_text().splitlines()[values:]]
        moved = [e for e in entries if e["decision"]["knob"].startswith("cpuset") and e["status"] == "applied"]
        assert moved == []
        assert second.end(signal.SIGKILL) == -signal.SIGKILL
    assert turned()
    reset = [DIOPTASE, "reset", "--state-dir", str(tmp_path / "state")]
    done = subprocess.run(reset, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: text for name, text in node.texts().items() if text != before[name]} == {}
    assert "enable=1" not in Path("/sys/fs/cgroup/io.cost.qos").read_text()
    again = subprocess.run(reset, capture_output=True, text=True, check=False)
    assert (again.returncode, "Nothing is left" in again.stdout) == (0, True)
