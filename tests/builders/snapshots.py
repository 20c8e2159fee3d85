"""Snapshots and cycles for every test, from pods (tests/builders/pods.py) and samples (tests/builders/nodes.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from api.cpu import Topology
from api.decision import ActMode, Cycle, Outcome
from api.pod import Pod
from api.snapshot import ComponentHealth, RunqLatency, Snapshot
from tests.builders.nodes import S, cgroup_sample, node_sample, topology


def snapshot(
    at_s: float,
    pods: Sequence[Pod] = (),
    *,
    machine: Topology | int = 2,
    usage_s: Mapping[str, float] | None = None,
    latency: Mapping[str, RunqLatency] | None = None,
    ids: Mapping[str, int] | None = None,
    idle: bool = True,
    **fields: Any,
) -> Snapshot:
    """Return a snapshot taken at `at_s` with a cgroup per container. By pod name: `usage_s` is cumulative CPU time,
    `latency` cumulative run-queue latency, `ids` the cgroup id."""
    node = topology(machine) if isinstance(machine, int) else machine
    cgroups = {
        container.cgroup: cgroup_sample(
            container.cgroup,
            id=(ids or {}).get(pod.name, 100 + index),
            cpu_usage_s=(usage_s or {}).get(pod.name),
            wait=(latency or {}).get(pod.name),
        )
        for index, pod in enumerate(pods)
        for container in pod.containers
    }
    values: dict[str, Any] = {
        "seq": round(at_s * 10) + 1,
        "taken_at_ns": round(at_s * S) + S,
        "wall_time_ns": round(at_s * S),
        "boot_id": "b",
        "topology": node,
        "node": node_sample(node, at_s, idle=idle),
        "cgroups": {**cgroups, "/": cgroup_sample("/", id=1)},
        "pods": tuple(pods),
    }
    return Snapshot(**{**values, **fields})


def cycle(
    current: Snapshot, *, previous: Snapshot | None = None, outcomes: Sequence[Outcome] = (), **fields: Any
) -> Cycle:
    """Return a finished cycle without advice; `fields` are of Cycle."""
    values: dict[str, Any] = {"act": ActMode.ON, "trigger": "tick", "outcomes": tuple(outcomes)}
    return Cycle(snapshot=current, previous=previous, **{**values, **fields})


def component_health(name: str, error: str = "", remedy: str = "", **fields: Any) -> ComponentHealth:
    """Return the health of a source: failed if there is an error."""
    return ComponentHealth(name=name, ok=not error, error=error, remedy=remedy, **{"duration_ns": 1000, **fields})
