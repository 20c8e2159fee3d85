"""Which NUMA nodes may be lent at all, and which have pods bound to them. Katalyst's disableReclaimLevel and share pools."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

import msgspec

from api.cpus import Topology
from api.pods import Pod
from api.qos import QoSLevel


class DisableLevel(StrEnum):
    """How far it reaches that reclaim is off for a pod (the service profile's disableReclaimLevel)."""

    POD = "Pod"
    """Its own NUMA nodes where it has them for itself, none otherwise."""
    NUMA = "NUMA"
    SOCKET = "Socket"
    NODE = "Node"


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """An online pod as far as it decides what may be lent around it."""

    pod: str
    """`namespace/name`."""
    numa_nodes: tuple[int, ...] = ()
    """Where its CPUs are; empty where that is not known."""
    reclaimable: bool = True
    """False where its service profile says that it fares badly, or forbids it."""
    level: DisableLevel = DisableLevel.POD
    exclusive: bool = False
    """numa_exclusive."""
    bound_pool: str = ""
    """Name of its share pool where that is bound to its NUMA nodes."""


class Lendable(msgspec.Struct, frozen=True, kw_only=True):
    """NUMA nodes that may be lent, and by node why the others may not."""

    numa_nodes: tuple[int, ...]
    refused: Mapping[int, str] = {}
    unknown: tuple[str, ...] = ()
    """Pods that keep others away from somewhere, but nobody knows from where: then nothing can be said of any node."""


def lendable(topology: Topology, tenants: Sequence[Tenant], disabled_pools: Collection[str]) -> Lendable:
    """The NUMA nodes that no tenant takes out of reclaim."""
    sockets: dict[int, set[int]] = {}
    socket_of: dict[int, int] = {}
    for cpu in topology.cpus:
        sockets.setdefault(cpu.socket, set()).add(cpu.numa)
        socket_of[cpu.numa] = cpu.socket
    refused: dict[int, str] = {}
    unknown = []
    for tenant in tenants:
        for reach, why in _claims(tenant, disabled_pools):
            if reach is DisableLevel.NODE:
                nodes = set(socket_of)
            elif not tenant.numa_nodes:
                unknown.append(tenant.pod)
                continue
            else:
                nodes = set(tenant.numa_nodes)
                if reach is DisableLevel.SOCKET:
                    nodes = {n for own in nodes if own in socket_of for n in sockets[socket_of[own]]}
            for numa in nodes:
                refused.setdefault(numa, why)
    return Lendable(
        numa_nodes=tuple(numa for numa in topology.numa_nodes if numa not in refused),
        refused={numa: refused[numa] for numa in sorted(refused) if numa in socket_of},
        unknown=tuple(sorted(set(unknown))),
    )


def _claims(tenant: Tenant, disabled_pools: Collection[str]) -> list[tuple[DisableLevel, str]]:
    """How far a tenant takes NUMA nodes out of reclaim, and why; twice where both reasons hold."""
    claims: list[tuple[DisableLevel, str]] = []
    if not tenant.reclaimable and (tenant.level is not DisableLevel.POD or tenant.exclusive):
        reach = DisableLevel.NUMA if tenant.level is DisableLevel.POD else tenant.level
        claims.append((reach, f"reclaim is off for {tenant.pod} at level {tenant.level}"))
    pool = tenant.bound_pool.partition("-NUMA")[0]
    if pool and pool in disabled_pools:
        claims.append((DisableLevel.SOCKET, f"share pool {pool} of {tenant.pod} must not be lent from"))
    return claims


def bound_nodes(
    pods: Sequence[Pod], cpus_by_cgroup: Mapping[str, tuple[int, ...]], topology: Topology
) -> tuple[int, ...]:
    """NUMA nodes that some pod is bound to: by its result, or, for dedicated_cores, by where its CPUs are."""
    numa_of = {cpu.id: cpu.numa for cpu in topology.cpus}
    bound: set[int] = set()
    for pod in pods:
        if pod.qos is QoSLevel.DEDICATED:
            for container in pod.containers:
                bound.update(numa_of[cpu] for cpu in cpus_by_cgroup.get(container.cgroup, ()) if cpu in numa_of)
        elif pod.qos is not QoSLevel.SYSTEM:
            bound.update(pod.bound_numa)
    return tuple(sorted(bound & set(numa_of.values())))
