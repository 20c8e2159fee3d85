"""Katalyst's tutorial on a node of its size, with real cpusets: 48 CPUs on two sockets, 4 of them kept for bursts of online
pods, whose pool has 6 CPUs and then 8; what is left is reclaimed pods', and advertised.

The tutorial's table (docs/tutorial/colocation.md of Katalyst): nothing runs, 44 are advertised; a shared pod with one busy
thread, 42; with three, 40.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from api.cpu import parse_cpu_list
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.live.agent_process import Agent

pytestmark = pytest.mark.vm_big

QOS_LEVEL = "katalyst.kubewharf.io/qos_level"
LEVELS = {"web": "shared_cores", "batch": "reclaimed_cores", "more": "reclaimed_cores"}
REQUESTS = {
    "shared_cores": {"cpu": "2"},
    "reclaimed_cores": {"resource.katalyst.kubewharf.io/reclaimed_millicpu": "2k"},
}
KNOBS = ("cpuset.cpus", "cpuset.mems", "cpu.idle", "cpu.weight", "cpu.max", "memory.high", "memory.max", "memory.low")
SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"]
ALL = frozenset(range(48))

Groups = Mapping[str, TestCgroup]


@pytest.fixture
def groups() -> Iterator[Groups]:
    """A cgroup for each pod, with the cpuset that the kubelet writes; something sleeps in those of the reclaimed ones."""
    hierarchy = require_writable_cgroups()
    with ExitStack() as stack:
        created = {name: stack.enter_context(cgroup(hierarchy, name)) for name in LEVELS}
        for group in created.values():
            group.file("cpuset", "cpuset.cpus").write_text("0-47")
            group.file("cpuset", "cpuset.mems").write_text("0-1")
        for name in ("batch", "more"):
            created[name].start(SLEEP)
        yield created


def list_pods(path: Path, groups: Groups, *names: str) -> None:
    """Replace the pods file atomically."""
    pods = [
        {
            "name": name,
            "annotations": {QOS_LEVEL: LEVELS[name]},
            "containers": [{"cgroup": groups[name].path, "resources": {"requests": REQUESTS[LEVELS[name]]}}],
        }
        for name in names
    ]
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.yaml.encode({"pods": pods}))
    new.replace(path)


def texts(groups: Groups) -> dict[tuple[str, str], str]:
    """Every knob of every pod, byte for byte."""
    return {(name, knob): group.file("cpu", knob).read_text() for name, group in groups.items() for knob in KNOBS}


def agreed_cpus(group: TestCgroup) -> frozenset[int]:
    """The CPUs of a pod: as they were written, as the kernel has them, and as its processes may use them; all three agree."""
    written = group.file("cpuset", "cpuset.cpus").read_text().strip()
    assert group.file("cpuset", "cpuset.cpus.effective").read_text().strip() == written
    for process in group.processes:
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert f"Cpus_allowed_list:\t{written}\n" in status
    return frozenset(parse_cpu_list(written))


def cpus_of(groups: Groups) -> dict[str, str]:
    return {name: group.file("cpuset", "cpuset.cpus").read_text().strip() for name, group in groups.items()}


def settles(agent: Agent, groups: Groups, cpus: Mapping[str, str], reported_headroom: int) -> None:
    """Wait until pods have these CPUs and so many are advertised."""
    until(lambda: cpus_of(groups) == cpus, lambda: f"cpusets become {cpus}: {agent.log}")
    until(lambda: agent.view()["lent_cores"] == reported_headroom, f"{reported_headroom} CPUs are lent")
    until(
        lambda: round(agent.view()["advertised"]["cores"] or 0) == reported_headroom,
        f"{reported_headroom} CPUs are advertised",
    )


@pytest.mark.parametrize(
    ("reserved", "stages"),
    [
        (0, (("4-47", 44), ("0-5", "6-47", 42), ("0-7", "8-47", 40))),
        (2, (("5-23,25-47", 42), ("1-6", "7-23,25-47", 40))),
    ],
    ids=["the-tutorial", "with-a-cpu-of-each-socket-for-the-system"],
)
def test_a_share_pool_of_six_cpus_then_eight_and_the_rest_is_reclaimable(
    groups: Groups, tmp_path: Path, reserved: int, stages: tuple[tuple[str, int], *tuple[tuple[str, str, int], ...]]
) -> None:
    assert os.cpu_count() == len(ALL)
    before, pods, config = texts(groups), tmp_path / "pods.yaml", tmp_path / "config.yaml"
    list_pods(pods, groups, "batch", "more")
    settings = {
        "intervalS": 2,
        "probes": [],
        # Whole cores are rounded down for each NUMA node: the tenth of a CPU that the agent uses would cost one of each.
        "advisor": {"policy": "canonical", "headroom": {"wholeCores": False}},
        "placing": {"reservedCpus": reserved},
        # Two minutes' mean, unless set: sooner here, for a guest's time is dear.
        "report": {"periodS": 4, "windowS": 4, "minStepCores": 0.05},
    }
    config.write_bytes(msgspec.yaml.encode(settings))
    (alone, most), *grown = stages
    rest = {0, 24} if reserved else set()
    options = ("--act", "on", "--pods", str(pods), "--config", str(config), "--state-dir", str(tmp_path / "state"))
    with Agent(*options) as agent:
        settles(agent, groups, {"web": "0-47", "batch": alone, "more": alone}, most)
        list_pods(pods, groups, "web", "batch", "more")
        for burners, (share, reclaimable, less) in zip((1, 2), grown, strict=False):
            groups["web"].burn(burners)
            settles(agent, groups, {"web": share, "batch": reclaimable, "more": reclaimable}, less)
            web, batch = agreed_cpus(groups["web"]), agreed_cpus(groups["batch"])
            assert batch == agreed_cpus(groups["more"])
            assert not web & batch
            assert ALL - web - batch == rest, "exactly the CPUs reserved for the system belong to no pod"
        pools = agent.view()["pools"]
        assert (pools["share"], pools.get("reserve")) == (grown[-1][0], "0,24" if reserved else None)
        assert agent.end() == 0, agent.log
    assert texts(groups) == before
