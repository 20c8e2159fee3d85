"""NUMA-aware placement on the nodes of this machine: real cpusets of dedicated, bound and other pods, and where they run.

Two nodes or four, of two CPUs each; the expected CPUs are computed by hand. Reclaimed pods keep a CPU of every node. A
share pool wants two, and gets what is left of its nodes: one of one node.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent.loop import Loop
from api.cpu import parse_cpu_list
from api.decision import Cycle
from api.units import MIB
from tests.builders.waiting import until
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups
from tests.vm.agent_cycles import PAUSE_S, acting_loop, pod, refused, run_cycle, write
from tests.vm.workloads import SPIN, hold, numa_nodes, on_nodes, ran_on

pytestmark = [pytest.mark.vm, pytest.mark.vm_four]

CANONICAL = {
    "advisor": {
        "policy": "canonical", "reservedForAllocateCores": 0, "minShareCores": 2, "rampUpS": 0, "minRampDownPeriodS": 0,
        "provision": {"minDedicatedCores": 1},
    },
    "placing": {"rampUpS": 0, "residualS": 0, "enableReclaimNumaBinding": True},
}  # fmt: skip
ALONE = {"numa_binding": "true", "numa_exclusive": "true"}
BOUND = {"numa_binding": "true"}


class Groups:
    """A cgroup for each pod, by name."""

    def __init__(self, *names: str) -> None:
        self._stack = ExitStack()
        self.by_name = {name: self._stack.enter_context(cgroup(require_writable_cgroups(), name)) for name in names}

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> TestCgroup:
        return self.by_name[name]


@pytest.fixture
def nodes() -> dict[int, tuple[int, ...]]:
    """CPUs by NUMA node."""
    result = numa_nodes()
    if len(result) not in (2, 4) or {len(cpus) for cpus in result.values()} != {2}:
        pytest.fail(f"this machine has NUMA nodes {result}; these numbers are of two or four nodes of two CPUs each")
    return result


def has(groups: Groups) -> dict[str, tuple[str, str]]:
    """CPUs and NUMA nodes of each, as they are set; what is in force must be the same."""
    result = {}
    for name, group in groups.by_name.items():
        texts = {file: group.file("cpuset", file).read_text().strip() for file in ("cpuset.cpus", "cpuset.mems")}
        for file, text in texts.items():
            assert text in ("", group.file("cpuset", f"{file}.effective").read_text().strip())
        result[name] = (texts["cpuset.cpus"], texts["cpuset.mems"])
    return result


def settle(loop: Loop) -> Cycle:
    """Three rounds: in the first nothing is measured yet. Nothing is refused in any."""
    for _ in range(3):
        time.sleep(PAUSE_S)
        done = run_cycle(loop)
        assert refused(done) == []
    return done


def rejected(done: Cycle) -> dict[str, str]:
    """Why pods do not have what they ask for, by the last word of their names."""
    assert done.advice is not None
    return {
        key.rpartition("-")[2]: verdict.text.partition(" requests ")[2] for key, verdict in done.advice.rejected.items()
    }


def seen_busy(group: TestCgroup) -> set[int]:
    """CPUs on which two processes of the group are seen that take all they can get, for a moment."""
    busy = [group.start(SPIN) for _ in range(2)]
    until(lambda: len(group.file("cpu", "cgroup.procs").read_text().split()) >= 3, "they have joined")
    observed = ran_on(busy)
    for process in busy:
        process.kill()
        process.wait()
        group.processes.remove(process)
    return observed


NOBODYS = ("", "")
INHERITED = {2: ("0-3", "0-1"), 4: ("0-7", "0-3")}
"""Inherited values of cgroups with tasks: the kernel does not accept an empty list from them."""
EXCLUSIVE: dict[int, list[dict[str, tuple[str, str]]]] = {
    2: [
        {"db": ("0-1", "0"), "web": ("2", "1"), "batch": ("0,3", "0-1"), "api": NOBODYS, "other": NOBODYS},
        {"db": ("0-1", "0"), "web": ("2", "1"), "batch": ("0,3", "0-1"), "api": ("2", "1"), "other": ("2", "1")},
        {"db": INHERITED[2], "web": ("1-2", "0-1"), "batch": ("0,3", "0-1"), "api": NOBODYS, "other": NOBODYS},
    ],
    4: [
        {"db": ("0-3", "0-1"), "web": ("4-5", "2-3"), "batch": ("0,2,6-7", "0-3"), "api": NOBODYS, "other": NOBODYS},
        {
            "db": ("0-3", "0-1"),
            "web": ("6", "3"),
            "batch": ("0,2,5,7", "0-3"),
            "api": ("4", "2"),
            "other": ("4,6", "2-3"),
        },
        {"db": INHERITED[4], "web": ("1,6", "0-3"), "batch": ("0,2-5,7", "0-3"), "api": NOBODYS, "other": NOBODYS},
    ],
}
"""With db, which has half of the nodes for itself, web and batch; with api, bound to one node, and with another one that asks
for half of the nodes; and without all of these again. Of the nodes that are db's, batch shares the CPU that it keeps."""


def test_a_dedicated_pod_has_its_nodes_for_itself(nodes: dict[int, tuple[int, ...]], tmp_path: Path) -> None:
    half = list(nodes)[: len(nodes) // 2]
    cores = float(sum(len(nodes[node]) for node in half))
    last = max(nodes)
    with Groups("db", "web", "batch", "api", "other") as groups:
        pods: dict[str, dict[str, Any]] = {
            "db": pod(groups["db"], "dedicated_cores", cpu=cores, **ALONE),
            "web": pod(groups["web"], "shared_cores", cpu=1),
            "batch": pod(groups["batch"], "reclaimed_cores"),
            "api": pod(groups["api"], "shared_cores", cpu=1, **BOUND),
            "other": pod(groups["other"], "dedicated_cores", cpu=cores, **ALONE),
        }

        def listed(*names: str) -> list[dict[str, Any]]:
            return [pods[name] for name in names]

        for name in ("web", "batch"):
            hold(groups[name], MIB)
        hold(groups["db"], 32 * MIB, cpu=nodes[last][0])
        until(lambda: on_nodes(groups["db"])[last] >= 32 * MIB, "it is where it was touched")
        with acting_loop(tmp_path, CANONICAL, listed("db", "web", "batch")) as loop:
            alone = settle(loop)
            assert (has(groups), rejected(alone)) == (EXCLUSIVE[len(nodes)][0], {})
            until(lambda: sum(on_nodes(groups["db"])[n] for n in half) >= 32 * MIB, "its memory has come along")
            assert on_nodes(groups["db"])[last] < MIB
            for name in ("db", "web", "batch"):
                assert seen_busy(groups[name]) <= set(parse_cpu_list(has(groups)[name][0]))
            write(tmp_path, CANONICAL, listed("db", "web", "batch", "api", "other"))
            crowded = settle(loop)
            assert has(groups) == EXCLUSIVE[len(nodes)][1]
            left = ", ".join(f"{node}: 0" for node in nodes)
            none = f"no NUMA nodes have them (left on node {left})."
            shared = f"of {cores:g} CPUs, shared pods request 2 and dedicated pods that follow 0"
            reasons = {"other": f"{cores:g} CPUs of its own; {shared}. It runs with the shared pods."}
            if len(nodes) == 2:
                reasons["api"] = f"1 CPUs; {none}"  # web would not fit on what is left
            assert rejected(crowded) == reasons
            write(tmp_path, CANONICAL, listed("web", "batch"))
            settle(loop)
            assert has(groups) == EXCLUSIVE[len(nodes)][2]
        total, none = INHERITED[len(nodes)], NOBODYS
        assert has(groups) == {"db": total, "web": total, "batch": total, "api": none, "other": none}


BINDING = {
    2: {"api": ("0", "0"), "web": ("2", "1"), "batch": ("3", "1")},
    4: {"api": ("0", "0"), "web": ("2-3", "1-3"), "batch": ("4-5", "2")},
}


def test_shared_and_reclaimed_pods_are_bound_to_nodes_with_room(
    nodes: dict[int, tuple[int, ...]], tmp_path: Path
) -> None:
    with Groups("api", "web", "batch") as groups:
        pods = [
            pod(groups["api"], "shared_cores", cpu=1, **BOUND),
            pod(groups["web"], "shared_cores", cpu=1),
            pod(groups["batch"], "reclaimed_cores", cpu=0.5, **BOUND),
        ]
        hold(groups["batch"], 32 * MIB, cpu=nodes[0][0])
        until(lambda: on_nodes(groups["batch"])[0] >= 32 * MIB, "it is where it was touched")
        with acting_loop(tmp_path, CANONICAL, pods) as loop:
            assert rejected(settle(loop)) == {}
            assert has(groups) == BINDING[len(nodes)]
            (node,) = parse_cpu_list(has(groups)["batch"][1])
            until(lambda: on_nodes(groups["batch"])[node] >= 32 * MIB, "its memory has come along")
        assert has(groups) == {"api": NOBODYS, "web": NOBODYS, "batch": INHERITED[len(nodes)]}
