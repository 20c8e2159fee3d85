"""A machine and what lives on it, generated: sockets, NUMA nodes, cores with siblings, services and batch jobs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agent.simulation.loads import Load, load
from api.cpus import Cpu, Topology
from api.pods import Container, Pod
from api.qos import QoSLevel

MOST_CPUS, MOST_NUMA = 1024, 64
CORES_PER_L3 = 8


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """One pod with one container, and what it asks of the CPU."""

    pod: Pod
    peak_cores: float
    load: Load
    request_us: float = 500.0
    """CPU time of one request: how much work comes with each wakeup."""
    threads: int = 8

    @property
    def cgroup(self) -> str:
        return self.pod.containers[0].cgroup

    def wanted_cores(self, at_s: float) -> float:
        return self.peak_cores * self.load(at_s)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated."""

    topology: Topology
    memory_bytes: int
    services: tuple[Service, ...]


def topology(cpus: int, numa: int = 1, threads: int = 2) -> Topology:
    """CPUs numbered as Linux does on x86: one thread of every core first, then their siblings; two NUMA nodes a socket from
    four on. Raises ValueError where the numbers do not divide."""
    if not 1 <= cpus <= MOST_CPUS or not 1 <= numa <= MOST_NUMA:
        raise ValueError(f"{cpus} CPUs on {numa} NUMA nodes: at most {MOST_CPUS} on {MOST_NUMA} can be simulated")
    if cpus % (numa * threads):
        raise ValueError(f"{cpus} CPUs cannot be dealt out to {numa} NUMA nodes in cores of {threads}")
    cores = cpus // threads
    per_socket = 2 if numa >= 4 and numa % 2 == 0 else 1
    found = []
    for number in range(cpus):
        core = number % cores
        node = core * numa // cores
        found.append(Cpu(id=number, core=core, socket=node // per_socket, numa=node, l3=core // CORES_PER_L3))
    return Topology(cpus=tuple(found))


def service(
    name: str, kind: str, peak_cores: float, *, qos: QoSLevel = QoSLevel.SHARED, seed: int = 1, parent: str = "/pods"
) -> Service:
    """An online service that asks for its peak, as they do."""
    container = Container(name=name, cgroup=f"{parent}/{name}", cpu_request_cores=peak_cores)
    pod = Pod(uid=f"sim/{name}", namespace="sim", name=name, qos=qos, containers=(container,))
    return Service(pod=pod, peak_cores=peak_cores, load=load(kind, seed))


def batch(name: str, appetite_cores: float, *, parent: str = "/pods") -> Service:
    """Work that takes whatever it is given, up to its number of threads."""
    container = Container(name=name, cgroup=f"{parent}/{name}", reclaimed_cpu_cores=appetite_cores)
    pod = Pod(uid=f"sim/{name}", namespace="sim", name=name, qos=QoSLevel.RECLAIMED, containers=(container,))
    return Service(
        pod=pod, peak_cores=appetite_cores, load=_always, request_us=10_000.0, threads=max(round(appetite_cores), 1)
    )


def _always(_at_s: float) -> float:
    return 1.0


def node(cpus: int, numa: int, kinds: Sequence[str], *, online: int, seed: int) -> Plan:
    """A machine with so many services, whose peaks together are four fifths of it, and batch work that would take all."""
    machine = topology(cpus, numa, 2 if cpus % (2 * numa) == 0 else 1)
    peak = 0.8 * cpus / max(online, 1)
    services = [service(f"web{i}", kinds[i % len(kinds)], peak, seed=seed + i) for i in range(online)]
    return Plan(topology=machine, memory_bytes=cpus << 32, services=(*services, batch("batch", float(cpus))))
