"""Builders of small nodes for memory advice: sizes in GiB, one container per pod."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from agent.advisor.memory.memory_inputs import MemoryInputs, ReclaimRoot
from api.pod import Pod
from api.qos import Enhancements, QoSLevel
from api.snapshot import UNLIMITED, CgroupLimits, CgroupSample, Machine, MemoryZone, NodeSample, NumaNode, Pressure
from api.units import GIB
from tests.builders import snapshots
from tests.builders.nodes import S, cgroup_sample, topology
from tests.builders.pods import pod as build_pod

PAGE = 4096
ROOT = "/kubepods/besteffort"


def pod(
    name: str,
    qos: QoSLevel,
    *,
    request: float | None = None,
    bound: tuple[int, ...] = (),
    exclusive: bool = False,
    **fields: Any,
) -> Pod:
    """Return a pod whose container's cgroup is below ROOT if it is reclaimed."""
    fields.setdefault("enhancements", Enhancements(numa_binding=bool(bound), numa_exclusive=exclusive))
    return build_pod(
        name,
        qos,
        uid=name,
        cgroup=f"{ROOT}/{name}" if qos is QoSLevel.RECLAIMED else f"/{name}",
        memory_request=None if request is None else round(request * GIB),
        bound_numa=bound,
        **fields,
    )


def group(path: str, *, number: int = 7, read_at_ns: int | None = None, **fields: Any) -> CgroupSample:
    """Return a cgroup of version 2: anon, file, shmem, mapped, inactive_* in GiB; on_numa is (anon, file) by node, in GiB."""
    names = {"mapped": "file_mapped"}
    kinds = ("anon", "file", "shmem", "mapped", "inactive_anon", "inactive_file", "active_file")
    stat = {names.get(kind, kind): round(fields.pop(kind) * GIB) for kind in kinds if kind in fields}
    stat |= fields.pop("stat", {})
    on_numa: Mapping[int, tuple[float, float]] = fields.pop("on_numa", {})
    numa_stat = {
        kind: {numa: round(sizes[index] * GIB) for numa, sizes in on_numa.items()}
        for index, kind in enumerate(("anon", "file"))
        if on_numa
    }
    avg60 = fields.pop("avg60", None)
    pressure = None
    if avg60 is not None:
        pressure = Pressure(some_us=fields.pop("stall_us", 0), some_avg10=avg60, some_avg60=avg60)
    return cgroup_sample(
        path,
        id=number,
        memory_stat=stat,
        numa_stat=numa_stat,
        memory_pressure=pressure,
        files_read_at_ns=read_at_ns,
        **fields,
    )


def root(*, limit: int = UNLIMITED, **fields: Any) -> CgroupSample:
    return group(ROOT, number=2, limits=CgroupLimits(memory_max_bytes=limit), **fields)


def situation(
    pods: Sequence[Pod] = (),
    groups: Sequence[CgroupSample] = (),
    *,
    numa: int = 1,
    cpus: int = 96,
    total: float = 250,
    free: float | Sequence[float] = 100,
    inactive: float = 50,
    scale: int | None = 10,
    low: float = 0.5,
    at_s: float = 1000,
    meminfo: Mapping[str, float] | None = None,
    machine: str = "",
    **fields: Any,
) -> MemoryInputs:
    """Return the inputs of a node whose NUMA nodes have `total`, `free` and `inactive` file cache each."""
    frees = list(free) if isinstance(free, Sequence) else [free] * numa
    full = {"MemTotal": total * numa, "MemFree": sum(frees), **(meminfo or {})}
    node = NodeSample(
        memory_total_bytes=round(full["MemTotal"] * GIB),
        meminfo={name: round(size * GIB) for name, size in full.items()},
        sysctl={} if scale is None else {"vm.watermark_scale_factor": scale},
        machine=Machine(codename=machine),
        numa={
            each: NumaNode(
                meminfo={
                    "MemTotal": round(total * GIB),
                    "MemFree": round(frees[each] * GIB),
                    "Inactive(file)": round(inactive * GIB),
                },
                distances={other: 10 if other == each else 12 for other in range(numa)},
            )
            for each in range(numa)
        },
        zones=tuple(
            MemoryZone(node=each, name="Normal", free=0, min=0, low=round(low * GIB) // PAGE, high=0, managed=1)
            for each in range(numa)
        ),
        files_read_at_ns=round(at_s * S),
    )
    snapshot = snapshots.snapshot(
        at_s,
        pods,
        machine=topology(cpus, sockets=numa),
        taken_at_ns=round(at_s * S),
        node=node,
        cgroups={"/": cgroup_sample("/", id=1), **{each.path: each for each in groups}},
    )
    path = ROOT if any(each.path == ROOT for each in groups) else ""
    # The guard limits a root only while a reclaimed container runs in it.
    roots = (path, *fields.get("numa_roots", {}).values())
    fields.setdefault("root", ReclaimRoot(path=path, members=tuple(f"{root}/batch" for root in roots if root)))
    return MemoryInputs(snapshot=snapshot, now_ns=round(at_s * S), **fields)


def without(inputs: MemoryInputs, *names: str) -> MemoryInputs:
    """Return the inputs without these lines of the node's and its NUMA nodes' meminfo, or without sysctl values."""
    node = inputs.snapshot.node
    state = {name: size for name, size in node.meminfo.items() if name not in names}
    numa = {
        each: replace(result, meminfo={name: size for name, size in result.meminfo.items() if name not in names})
        for each, result in node.numa.items()
    }
    sysctl = {name: value for name, value in node.sysctl.items() if name not in names}
    node = replace(node, meminfo=state, numa=numa, sysctl=sysctl)
    return replace(inputs, snapshot=replace(inputs.snapshot, node=node))
