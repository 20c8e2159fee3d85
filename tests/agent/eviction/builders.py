"""Inputs of eviction plugins for tables: pods with one container each, and the samples that plugins read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from agent.eviction.eviction_inputs import EvictionInputs
from agent.eviction.finding import EvictionFinding
from api.eviction import ThresholdMet
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import CgroupSample, LoadAverages, MemoryZone, NodeSample, NumaNode, Pressure, Snapshot
from api.units import GIB
from tests.agent.advisor.builders import topology
from tests.builders import pods as pods_builder

S = 1_000_000_000
PAGE = 4096
BOOT_NS = 1_700_000_000 * S
"""CLOCK_REALTIME when CLOCK_MONOTONIC was zero."""


def pod(
    name: str,
    qos: QoSLevel = QoSLevel.RECLAIMED,
    *,
    cores: float | None = None,
    memory: int | None = None,
    numa: tuple[int, ...] = (),
    priority: int = 0,
    **more: Any,
) -> Pod:
    """A pod with a container `/NAME`; `cores` and `memory` are requests, of reclaimed resources if the pod is reclaimed."""
    return pods_builder.pod(
        name,
        qos,
        uid=f"uid-{name}",
        cpu_request=cores,
        memory_request=memory,
        priority=priority,
        bound_numa=numa,
        **more,
    )


def sample(name: str, at_s: float = 100.0, **fields: Any) -> CgroupSample:
    """A cgroup `/NAME` whose files were read at `at_s`."""
    values = {"id": crc32(name.encode()) + 2, "files_read_at_ns": BOOT_NS + round(at_s * S), **fields}
    return CgroupSample(path=f"/{name}", **values)


def numa_node(total: int, inactive_file: int = 64 * GIB) -> NumaNode:
    return NumaNode(meminfo={"MemTotal": total, "Inactive(file)": inactive_file})


def zone(node: int, free: int, low: int, least: int, name: str = "Normal") -> MemoryZone:
    """In bytes."""
    return MemoryZone(
        node=node,
        name=name,
        free=free // PAGE,
        min=least // PAGE,
        low=low // PAGE,
        high=low // PAGE,
        managed=1 << 24,
    )


def pressure(avg10: float) -> Pressure:
    return Pressure(some_us=0, some_avg10=avg10)


def load(load1: float) -> LoadAverages:
    return LoadAverages(load1=load1, load5=0, load15=0, runnable1=0, runnable5=0, runnable15=0)


def situation(
    at_s: float = 100.0,
    pods: Sequence[Pod] = (),
    *,
    samples: Mapping[str, Mapping[str, Any]] | None = None,
    node: Mapping[str, Any] | None = None,
    cpus: int = 16,
    numa: int = 1,
    files_age_s: float = 0.0,
    **more: Any,
) -> EvictionInputs:
    """The node at `at_s`; `samples` has fields of the pods' cgroups by name, other pods have cgroups without values."""
    wall_ns = BOOT_NS + round(at_s * S)
    given: dict[str, Mapping[str, Any]] = {p.name: {} for p in pods} | dict(samples or {})
    read_at = {"files_read_at_ns": wall_ns - round(files_age_s * S)}
    cgroups = {"/": CgroupSample(path="/", id=1)}
    cgroups |= {f"/{name}": sample(name, **{**read_at, **fields}) for name, fields in given.items()}
    snapshot = Snapshot(
        seq=round(at_s),
        taken_at_ns=round(at_s * S),
        wall_time_ns=wall_ns,
        boot_id="b",
        topology=topology(cpus, numa=numa),
        node=NodeSample(**{**read_at, **(node or {})}),
        cgroups=cgroups,
        pods=tuple(pods),
    )
    return EvictionInputs(snapshot=snapshot, **{"now_ns": round(at_s * S), **more})


HARD, SOFT, NOT_MET = ThresholdMet.HARD, ThresholdMet.SOFT, ThresholdMet.NOT_MET


def names(finding: EvictionFinding) -> list[str]:
    """Return the names of the candidates in their order."""
    return [candidate.pod.name for candidate in finding.candidates]
