"""Malachite's version 2 documents of a running agent against the cgroup files, while all that they tell of stands still."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.cpu import parse_cpu_list
from api.snapshot import UNLIMITED
from exporters.malachite.cgroup_v2 import SPLIT_COUNTERS, V2_MEMORY_STAT, V2_NUMA_STAT
from tests.builders.waiting import until
from tests.live.agent_process import Agent, write_pods
from tests.malachite.stock_client import PORT
from tests.vm.pods import BATCH, DB, WARM_S, WEB, Pods
from tests.vm.workloads import DATA, meminfo, number_of

pytestmark = pytest.mark.vm_probes

NODES = Path("/sys/devices/system/node")
STARTS_S = 120.0


def document(name: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/api/v1/{name}", timeout=30) as answer:
        body = json.loads(answer.read())
    assert body["status"] == 0
    return dict(body["data"])


def groups_of(path: str) -> dict[str, Any]:
    data = document("cgroup/groups?" + urllib.parse.urlencode({"cgroup_user_path": path}))
    assert (data["user_path"], data["cgroup_type"], data["mount_point"]) == (path, "V2", "/sys/fs/cgroup")
    return dict(data["sub_system_groups"])


def limit(text: str) -> int:
    return UNLIMITED if text.strip() == "max" else int(text)


def with_sums(stat: dict[str, int]) -> dict[str, int]:
    return stat | {name: stat[f"{name}_anon"] + stat[f"{name}_file"] for name in SPLIT_COUNTERS}


class Expected:
    """What the files of a cgroup say now, part by part, in the words of the documents."""

    def __init__(self, pods: Pods, path: str) -> None:
        self._pods, self._path = pods, path

    def cpu(self) -> dict[str, Any]:
        stat = self._pods.keyed(self._path, "cpu.stat")
        quota, period = self._text("cpu.max").split()
        names = ("usage_usec", "user_usec", "system_usec", "nr_periods", "nr_throttled", "throttled_usec")
        return {
            "cpu_stats": {name: stat[name] for name in names},
            "max": UNLIMITED if quota == "max" else int(quota),
            "max_period": int(period),
            "max_burst": int(self._text("cpu.max.burst")),
            "weight": int(self._text("cpu.weight")),
        }

    def threads(self) -> int:
        return len(self._text("cgroup.threads").split())

    def memory(self) -> dict[str, Any]:
        stat, local = (self._pods.keyed(self._path, name) for name in ("memory.stat", "memory.events.local"))
        return {
            "memory_usage_in_bytes": int(self._text("memory.current")),
            **{name: limit(self._text(f"memory.{name}")) for name in ("max", "high", "low", "min")},
            "swap_current": int(self._text("memory.swap.current")),
            "swap_max": limit(self._text("memory.swap.max")),
            "mem_stats": {k: v for k, v in with_sums(stat).items() if k in V2_MEMORY_STAT},
            "mem_numa_stats": self._numa(),
            "mem_local_events": {name: local[name] for name in ("low", "high", "max", "oom", "oom_kill")},
        }

    def cpuset(self) -> dict[str, Any]:
        texts = {name: self._text(f"cpuset.{name}.effective").strip() for name in ("cpus", "mems")}
        return {name: {"meta": text, "inner": list(parse_cpu_list(text))} for name, text in texts.items()}

    def blkio(self) -> dict[str, Any]:
        devices = (line.split() for line in self._text("io.stat").splitlines())
        return {
            device: {"Data": {name: int(value) for name, value in (word.split("=") for word in words)}}
            for device, *words in devices
            if words
        }

    def pressure(self, name: str) -> float:
        return float(self._text(f"{name}.pressure").splitlines()[0].rpartition("total=")[2])

    def _numa(self) -> dict[str, dict[str, int]]:
        by_node: dict[str, dict[str, int]] = {}
        for kind, *words in (line.split() for line in self._text("memory.numa_stat").splitlines()):
            for node, _, value in (word.partition("=") for word in words):
                by_node.setdefault(node, {})[kind] = int(value)
        return {node: {k: v for k, v in with_sums(stat).items() if k in V2_NUMA_STAT} for node, stat in by_node.items()}

    def _text(self, name: str) -> str:
        return self._pods.file(self._path, name).read_text()


@pytest.fixture(scope="module")
def pods(hierarchy: Hierarchy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    """Two frozen cgroups, watched by an agent that has seen them running."""
    directory = tmp_path_factory.mktemp("malachite")
    listed = write_pods(directory / "pods.yaml", {WEB: "shared_cores", DB: "shared_cores", BATCH: "reclaimed_cores"})
    config = directory / "config.yaml"
    config.write_text("probes: [threads]\n")
    options = ["--pods", listed, "--config", config, "--state-dir", directory / "state", "--act", "off"]
    with (
        Pods(hierarchy, DATA) as created,
        Agent(*map(str, options), "--malachite", f"127.0.0.1:{PORT}") as agent,
    ):
        until(lambda: "Malachite's documents on" in agent.log, lambda: agent.log, seconds=STARTS_S)
        until(lambda: has_rate(WEB), lambda: agent.log, seconds=WARM_S)
        created.freeze()
        yield created


def has_rate(path: str) -> bool:
    """Whether the agent has seen it twice, five seconds apart, and has counted its threads."""
    try:
        cpu = groups_of(path)["Cpuacct"]["Cpu"]["V2"]
    except OSError:
        return False
    return cpu.get("cpu_usage_ratio", 0) > 0 and "task_nr_sleeping" in cpu


def agreed(text: Any, read: Any) -> tuple[Any, Any]:
    """The two of them, as soon as they agree: the agent reads some files every five seconds, and the kernel settles accounts
    of pages late."""
    last: list[tuple[Any, Any]] = [(None, None)]

    def same() -> bool:
        last[0] = text(), read()
        time.sleep(0.3)
        return bool(last[0][0] == last[0][1])

    until(same, lambda: f"the agent's {last[0][0]} is the kernel's {last[0][1]}", 30.0)
    return last[0]


def part(document: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """Those keys of it that are expected."""
    return {key: document.get(key) for key in like}


EACH = pytest.mark.parametrize("path", [WEB, DB, BATCH], ids=lambda path: path.rpartition("/")[2])


@EACH
def test_cpu(pods: Pods, path: str) -> None:
    expected = Expected(pods, path)
    text, read = agreed(lambda: part(groups_of(path)["Cpuacct"]["Cpu"]["V2"], expected.cpu()), expected.cpu)
    assert text == read
    if path == WEB:
        assert (read["max"], read["weight"]) == (50_000, 79)
        assert read["cpu_stats"]["nr_throttled"] >= 20


@EACH
def test_threads(pods: Pods, path: str) -> None:
    expected = Expected(pods, path)

    def describe() -> tuple[int, int]:
        cpu = groups_of(path)["Cpuacct"]["Cpu"]["V2"]
        return cpu["task_nr_runnable"], cpu["task_nr_runnable"] + cpu["task_nr_unint"] + cpu["task_nr_sleeping"]

    counted, listed = agreed(describe, lambda: (0, expected.threads()))
    assert counted == listed, "nothing runs that is frozen"
    assert listed[1] >= 1


@EACH
def test_memory(pods: Pods, path: str) -> None:
    expected = Expected(pods, path)
    text, read = agreed(lambda: part(groups_of(path)["Memory"]["Memory"]["V2"], expected.memory()), expected.memory)
    assert text == read
    assert set(read["mem_numa_stats"]) == {"N0", "N1"}
    if path == WEB:
        assert read["mem_numa_stats"]["N1"]["anon"] > 40 << 20, "cpuset.mems has node 1 alone"
        assert read["mem_numa_stats"]["N0"]["anon"] < 1 << 20
    if path == DB:
        assert read["mem_local_events"]["high"] > 0
        assert read["swap_current"] > 16 << 20


@EACH
def test_cpuset_and_block_io(pods: Pods, path: str) -> None:
    expected = Expected(pods, path)
    text, read = agreed(lambda: part(groups_of(path)["Cpuset"]["CpuSet"]["V2"], expected.cpuset()), expected.cpuset)
    assert text == read
    text, read = agreed(lambda: groups_of(path)["Blkio"]["BlkIO"]["V2"]["io_stat"], expected.blkio)
    assert text == read
    if path == WEB:
        assert read[number_of("data")]["Data"]["wbytes"] > 0


@EACH
def test_pressure(pods: Pods, path: str) -> None:
    """Sums alone: averages fall while nothing happens."""
    expected = Expected(pods, path)

    def describe() -> list[float]:
        groups = groups_of(path)
        of = (
            groups["Cpuacct"]["Cpu"]["V2"]["cpu_pressure"],
            groups["Memory"]["Memory"]["V2"]["mem_pressure"],
            groups["Blkio"]["BlkIO"]["V2"]["io_pressure"],
        )
        return [stalls["some"]["total"] for stalls in of]

    observed, read = agreed(describe, lambda: [expected.pressure(name) for name in ("cpu", "memory", "io")])
    assert observed == read
    assert read[0] > 0 or path == DB


def test_the_node_and_its_numa_nodes(pods: Pods) -> None:
    memory, compute = document("system/memory"), document("system/compute")
    assert memory["system"]["mem_total"] * 1024 == meminfo("MemTotal")
    numa = {node["id"]: (node["mem_total"] * 1024, node["cpu_list"]["meta"]) for node in memory["numa"]}
    assert numa == {
        number: (
            meminfo("MemTotal", number),
            (NODES / f"node{number}/cpulist").read_text().strip(),
        )
        for number in (0, 1)
    }
    assert [cpu["name"] for cpu in compute["cpu"]] == ["cpu0", "cpu1", "cpu2", "cpu3"]
