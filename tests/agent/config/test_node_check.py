"""Settings that a node cannot hold are rejected with the node's own amount."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent.config.config import AgentConfig
from agent.config.node_check import check_against_node
from api.cpu import Cpu, Topology
from api.units import GIB
from tests.builders.settings import parse_config

NODE = Topology(cpus=tuple(Cpu(id=i, core=i, socket=0, numa=i // 5) for i in range(8)))
"""CPUs 0 to 4 on NUMA node 0, 5 to 7 on node 1."""


def check(text: str) -> str:
    return check_against_node(parse_config(text.encode(), "f"), NODE, 32 * GIB, {0: 20 * GIB, 1: 12 * GIB})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("placing: {reservedCpuList: 0-1}", ""),
        (
            "placing: {reservedCpuList: '0,8-9'}",
            "placing.reservedCpuList: CPU 8-9 is not online on this node, CPUs 0-7 are; remove it",
        ),
        (
            "placing: {interruptCpuList: '12'}",
            "placing.interruptCpuList: CPU 12 is not online on this node, CPUs 0-7 are; remove it",
        ),
        ("placing: {reservedCpuList: 0-7}", "placing.reservedCpuList: of 8 CPUs none would be left to pods; reserve fewer"),
        (
            "placing: {interruptCpuList: 0-7}",
            "placing.interruptCpuList: of 8 CPUs none would be left to pods; reserve fewer",
        ),
        ("placing: {reservedCpus: 7}", ""),
        (
            "advisor: {provision: {quota: true, overlap: true}}",
            "advisor.provision.quota: on several NUMA nodes only reclaimed pods that are bound to one may use its quota",
        ),
        ("advisor: {provision: {quota: true, overlap: true}}\nplacing: {enableReclaimNumaBinding: true}", ""),
        ("placing: {reservedCpus: 8}", "placing.reservedCpus: of 8 CPUs none would be left to pods; reserve fewer"),
        (
            "placing: {reservedCpus: 6, interruptCpuList: 0-1}",
            "placing.reservedCpus: of 8 CPUs none would be left to pods; reserve",
        ),
        ("placing: {reservedCpus: 2, minReclaimedCpus: 6}", ""),
        (
            "placing: {reservedCpus: 2, minReclaimedCpus: 7}",
            "placing.minReclaimedCpus: 7 is more than the 6 CPUs of pods on this",
        ),
        ("advisor: {minReclaimedCores: 8, reservedForAllocateCores: 8}", ""),
        (
            "advisor: {minReclaimedCores: 9}",
            "advisor.minReclaimedCores: 9 is more than the 8 CPUs of pods on this node; lower it",
        ),
        (
            "advisor: {reservedForAllocateCores: 8.5}",
            "advisor.reservedForAllocateCores: 8.5 is more than the 8 CPUs of this node",
        ),
        (
            "shadow: {minReclaimedCores: 9}",
            "shadow.minReclaimedCores: 9 is more than the 8 CPUs of pods on this node; lower it",
        ),
        ("advisor: {provision: {numaMinReclaimedRatio: 0.1, numaMinReclaimedCores: 3}}", ""),
        (
            "advisor: {provision: {numaMinReclaimedRatio: 0.1, numaMinReclaimedCores: 4}}",
            "advisor.provision.numaMinReclaimedCores: 4 is more than the 3 CPUs of NUMA node 1; lower it",
        ),
        ("advisor: {provision: {numaMinReclaimedCores: 4}}", ""),
        ("report: {minCores: 9}", "report.minCores: 9 is more than the 8 CPUs of this node; lower it"),
        ("report: {reservedCores: 9}", "report.reservedCores: 9 is more than the 8 CPUs of this node; lower it"),
        ("report: {minMemoryMib: 32769}", "report.minMemoryMib: 32769 is more than the 32768 MiB of this node; lower it"),
        ("report: {reservedMemoryMib: 32768}", ""),
        (f"memory: {{reservedForAllocateBytes: {32 * GIB}}}", ""),
        (
            f"memory: {{reservedForAllocateBytes: {33 * GIB}}}",
            "memory.reservedForAllocateBytes: 35433480192 is more than the 34359738368 bytes of this node; lower it",
        ),
        (
            f"memory: {{minCriticalWatermarkBytes: {13 * GIB}}}",
            "memory.minCriticalWatermarkBytes: 13958643712 is more than the 12884901888 bytes of NUMA node 1; lower it",
        ),
        ("knobs: {suppress: {reservedCores: 9}}", "knobs.suppress.reservedCores: 9 is more than the 8 CPUs of this node"),
    ],
)  # fmt: skip
def test_a_reserve_that_the_node_lacks_is_rejected(text: str, message: str) -> None:
    assert check(text)[: len(message) or None] == message


@pytest.mark.parametrize("cpus", [1, 2, 256])
def test_the_defaults_fit_every_node(cpus: int) -> None:
    topology = Topology(cpus=tuple(Cpu(id=i, core=i, socket=0, numa=0) for i in range(cpus)))
    assert check_against_node(AgentConfig(shadow=AgentConfig().advisor), topology, GIB, {0: GIB}) == ""


def test_unknown_memory_limits_nothing() -> None:
    config = parse_config(f"memory: {{reservedForAllocateBytes: {33 * GIB}}}".encode(), "f")
    assert check_against_node(config, NODE, None, {}) == ""


def test_the_agent_exits_before_it_creates_anything(tmp_path: Path) -> None:
    """On this very node."""
    file, state = tmp_path / "f.yaml", tmp_path / "state"
    file.write_text("placing: {reservedCpuList: '8000'}")
    run = f"from cli.main import main; main(['agent', '--config', '{file}', '--state-dir', '{state}'])"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"{file}: placing.reservedCpuList: CPU 8000 is not online on this node, CPUs 0" in done.stderr
    assert not state.exists()
