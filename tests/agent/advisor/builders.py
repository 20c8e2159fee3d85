"""Builders of tests/builders under the names and parameters that tests of other packages still use."""

from __future__ import annotations

from typing import Any

from api.cpu import Topology
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import Snapshot
from tests.builders import nodes, pods, snapshots
from tests.builders.nodes import S, run_queue_latency

__all__ = ["S", "pod", "snapshot", "topology", "waits"]
waits = run_queue_latency


def topology(cpus: int, *, numa: int = 1, threads: int = 1) -> Topology:
    """Return a topology with one NUMA node per socket."""
    return nodes.topology(cpus, sockets=numa, threads=threads)


def pod(name: str, qos: QoSLevel, *, request: float | None = None, limit: float | None = None) -> Pod:
    """Return a pod with one container, whose request is one of native CPU at every QoS level."""
    container = Container(name=name, cgroup=f"/{name}", cpu_request_cores=request, cpu_limit_cores=limit)
    return pods.pod(name, qos, containers=(container,))


def snapshot(at_s: float, of: Any, *, cpus: int | Topology = 2, idle_cpus: bool = True, **fields: Any) -> Snapshot:
    """Return a snapshot of these pods; `wait` is run-queue latency by pod name."""
    latency = fields.pop("wait", None)
    return snapshots.snapshot(at_s, of, machine=cpus, idle=idle_cpus, latency=latency, **fields)
