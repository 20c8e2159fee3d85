"""Nodes for bench.rounds: machines and pods by formula, and cgroups for them, real ones or files that look like them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec.structs import replace

from agent.hierarchy import Hierarchy
from agent.simulation.loads import load
from agent.simulation.machine import Plan, Service, batch, service, topology
from api.cpus import format_cpu_list
from api.qos import Enhancements, QoSLevel

KINDS = ("ramp", "bursty", "ramp", "step")
OFTEN = 60
"""So many times faster than in the world, so that a minute of rounds sees bursts come and go."""
DEDICATED_EVERY, NAMED_EVERY = 20, 5
PARENT = "/kubepods"
_CPUSET = ("cpuset.cpus", "cpuset.mems")
_PLAIN = {
    "cpu.weight": "100\n",
    "cpu.max": "max 100000\n",
    "cpu.max.burst": "0\n",
    "cpu.idle": "0\n",
    "cpuset.cpus": "\n",
    "cpuset.mems": "\n",
    "memory.max": "max\n",
    "memory.high": "max\n",
    "memory.low": "0\n",
    "memory.min": "0\n",
    "memory.current": "0\n",
    "memory.stat": "inactive_file 0\nactive_file 0\n",
    "memory.reclaim": "",
    "memory.numa_stat": "anon N0=0\nfile N0=0\n",
    "io.weight": "default 100\n",
    "io.max": "",
}
"""Version 2's files with the kernel's defaults."""


def plan(cpus: int, numa: int, pods: int) -> Plan:
    """Half online, half batch. Of the online pods some have pools of their own and some CPUs of their own; their peaks
    together are four fifths of the node."""
    machine = topology(cpus, numa)
    online = pods // 2
    peak = 0.8 * cpus / online
    services = [_online(number, peak) for number in range(online)]
    jobs = [batch(f"batch{number}", cpus / (pods - online), parent=PARENT) for number in range(pods - online)]
    return Plan(topology=machine, memory_bytes=cpus << 32, services=(*services, *jobs))


def _online(number: int, peak_cores: float) -> Service:
    kind, seed = KINDS[number % len(KINDS)], 1
    made = service(f"web{number}", kind, peak_cores, seed=seed, parent=PARENT)
    usual = load(kind, seed)
    pod = made.pod
    if number % DEDICATED_EVERY == DEDICATED_EVERY - 1:
        one_cpu = replace(pod.containers[0], cpu_request_cores=1.0)
        pod = replace(pod, qos=QoSLevel.DEDICATED, containers=(one_cpu,))
    elif number % NAMED_EVERY == NAMED_EVERY - 1:
        pod = replace(pod, enhancements=Enhancements(cpuset_pool=f"pool{number // NAMED_EVERY % 3}"))
    return replace(made, pod=pod, load=lambda at_s: usual(at_s * OFTEN))


@contextmanager
def plain_tree(made: Plan) -> Iterator[Hierarchy]:
    """A version 2 tree of ordinary files in memory: this machine need not have those CPUs."""
    root = Path(tempfile.mkdtemp(prefix="dioptase-bench-", dir="/dev/shm"))
    try:
        everything = {
            "cpuset.cpus.effective": f"{format_cpu_list(made.topology.ids)}\n",
            "cpuset.mems.effective": f"{format_cpu_list(made.topology.numa_nodes)}\n",
        }
        for path in ("", PARENT, *(service.cgroup for service in made.services)):
            directory = root / path.lstrip("/")
            directory.mkdir(exist_ok=True)
            for name, text in {**_PLAIN, **everything}.items():
                (directory / name).write_text(text)
        yield Hierarchy(v1={}, v2=root)
    finally:
        shutil.rmtree(root)


@contextmanager
def real_cgroups(hierarchy: Hierarchy, parent: str, count: int) -> Iterator[Sequence[str]]:
    """So many cgroups without tasks, side by side, in every hierarchy that has knobs. Raises OSError."""
    names = ("cpu", "cpuset", "memory")
    mounts = {mount for mount in map(hierarchy.controller, names) if mount is not None}
    paths = [f"{parent}/{number}" for number in range(count)]
    with ExitStack() as stack:
        for mount in mounts:
            for path in (parent, *paths):
                directory = mount / path.lstrip("/")
                directory.mkdir()
                stack.callback(directory.rmdir)
                for name in _CPUSET:
                    file, above = directory / name, directory.parent / name
                    if file.exists() and above.exists() and not file.read_text().strip():
                        file.write_text(above.read_text())
            controllers = mount / parent.lstrip("/") / "cgroup.subtree_control"
            if controllers.exists() and hierarchy.mode == "v2":
                controllers.write_text("+cpu +cpuset +memory")
        yield paths
