"""Creates the cgroups of one cell of bench.colocation: as a kubelet makes them, or side by side below the cgroup root."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.cgroup.pod_cgroup_paths import CgroupDriver
from bench.cgroup_tree import cgroup_mounts, make_cgroup, own_cgroup, remove_tree
from bench.kubelet_layout import AGENT_POD, BATCH_POD, ONLINE_POD, KubeletLayout, bench_layout, competing_cgroup
from demo.cgroups import DemoCgroups
from demo.launch import launch_in_cgroups

ONLINE, BATCH = "/dioptase-bench-online", "/dioptase-bench-batch"
"""Cgroups of the flat layout."""
KUBELET_ROOT = "/dioptase_bench"
"""The `cgroupRoot` of the kubelet's layout. Without a dash, which systemd's names would nest."""
FLAT, KUBELET = "flat", "kubelet"
FLAT_PODS = f"""pods:
- name: online
  annotations: {{katalyst.kubewharf.io/qos_level: shared_cores}}
  containers: [{{name: online, cgroup: {ONLINE}}}]
- name: batch
  annotations: {{katalyst.kubewharf.io/qos_level: reclaimed_cores}}
  containers: [{{name: batch, cgroup: {BATCH}}}]
"""
SYSTEM_DAEMON = "import time\nwhile True:\n    time.sleep(0.1)\n    sum(range(20000))"
"""The system's part of the node: half a millisecond of CPU ten times a second, as a kubelet with few pods."""


class CellCgroups(msgspec.Struct, frozen=True, kw_only=True):
    """The cgroups of a cell, and what the agent gets to know of them. Paths are below the cgroup root."""

    mounts: tuple[Path, ...]
    """Mount points of the hierarchies that processes join; the cpu controller's is the first."""
    online: str
    batch: str
    competing: str
    """The batch job's cgroup, or the one above it, whose priority the scheduler compares with the service's."""
    pods: str
    """Text of the agent's pods file."""
    agent: str = ""
    """The agent's own cgroup; empty leaves it in that of this process."""
    agent_options: tuple[str, ...] = ("--act", "on")
    settings: Mapping[str, Any] = {}
    """Settings that an agent derives from a kubelet's layout; those of the mode override them."""

    def directories(self, path: str) -> list[Path]:
        return [mount / path.lstrip("/") for mount in self.mounts]

    def procs(self, path: str) -> list[Path]:
        """Return the files to which a process writes its id to join `path` in every hierarchy."""
        return [directory / "cgroup.procs" for directory in self.directories(path)] if path else []


@contextmanager
def flat_cgroups(hierarchy: Hierarchy) -> Iterator[CellCgroups]:
    """Create both cgroups below the root, with the kernel's equal weights; remove them at the end."""
    groups = DemoCgroups.make(hierarchy.v1, hierarchy.v2, (ONLINE.lstrip("/"), BATCH.lstrip("/")))
    try:
        yield CellCgroups(mounts=groups.mounts, online=ONLINE, batch=BATCH, competing=BATCH, pods=FLAT_PODS)
    finally:
        groups.remove()


@contextmanager
def kubelet_root(hierarchy: Hierarchy, cpus: int) -> Iterator[None]:
    """Create the cgroup that contains the nodes of all cells, and remove it at the end, however that comes about.

    Raises Unavailable if another run uses it, or if cgroups cannot be created.
    """
    layout = bench_layout(KUBELET_ROOT, cpus, usual_driver(hierarchy), online="Burstable", batch="BestEffort")
    with own_cgroup(layout.top.lstrip("/"), layout.top_files(), _ordered_mounts(hierarchy)):
        yield


@contextmanager
def kubelet_cgroups(hierarchy: Hierarchy, cpus: int, *, online: str, batch: str) -> Iterator[CellCgroups]:
    """Create the cgroups of a node with pods of these QoS classes, below that of `kubelet_root`; remove them at the end."""
    layout = bench_layout(KUBELET_ROOT, cpus, usual_driver(hierarchy), online=online, batch=batch)
    mounts, cgroups = _ordered_mounts(hierarchy), layout.cgroups()
    leaves = {layout.system, *(layout.container(pod.name) for pod in layout.pods)}
    tops = [mount / top.lstrip("/") for mount in mounts for top in (layout.kubepods, layout.system)]
    with ExitStack() as stack:
        stack.callback(remove_tree, tops)
        for path, values in cgroups.items():
            for mount in mounts:
                make_cgroup(mount / path.lstrip("/"), values.files(), leaf=path in leaves)
        system = [mount / layout.system.lstrip("/") / "cgroup.procs" for mount in mounts]
        daemon = launch_in_cgroups([sys.executable, "-I", "-S", "-c", SYSTEM_DAEMON], procs=system)
        stack.callback(daemon.wait)
        stack.callback(daemon.kill)
        yield _cell_cgroups(layout, mounts, hierarchy)


def _cell_cgroups(layout: KubeletLayout, mounts: Sequence[Path], hierarchy: Hierarchy) -> CellCgroups:
    online, batch = layout.container(ONLINE_POD), layout.container(BATCH_POD)
    settings: dict[str, Any] = {"memory": {"reclaimRoot": layout.reclaim_root}}
    if hierarchy.mode == "v2":
        # The layout is that of a node whose systemd clears cpu.idle before the kubelet's write; init may be another here.
        settings["kubelet"] = {"idleClass": True}
    return CellCgroups(
        mounts=tuple(mounts),
        online=online,
        batch=batch,
        competing=competing_cgroup(batch, online),
        pods=layout.manifest(),
        agent=layout.container(AGENT_POD),
        agent_options=("--profile", "colocate"),
        settings=settings,
    )


def usual_driver(hierarchy: Hierarchy) -> CgroupDriver:
    """Return the kubelet's cgroup driver of most clusters with this cgroup version; its names decide what the agent may do."""
    return CgroupDriver.SYSTEMD if hierarchy.mode == "v2" else CgroupDriver.CGROUPFS


def _ordered_mounts(hierarchy: Hierarchy) -> list[Path]:
    """Return the mounts of all hierarchies, the cpu controller's first."""
    return [hierarchy.primary, *(mount for mount in cgroup_mounts() if mount != hierarchy.primary)]
