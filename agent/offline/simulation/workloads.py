"""Simulated machines and workloads: topology, services, batch jobs, and load as a function of time and seed.
Times are seconds from the start of the simulation; a level is a ratio of the service's peak, 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from math import cos, exp, pi

import msgspec

from api.cpu import Cpu, Topology
from api.pod import Container, Pod
from api.qos import QoSLevel

DAY_S = 86_400.0
NOISE = 0.05
"""Relative noise of every second."""
BURST_EVERY_S, BURST_S = 300.0, 20.0

Load = Callable[[float], float]


def build_load(kind: str, seed: int) -> Load:
    """Return the load of that kind. Raises KeyError for an unknown kind."""
    return partial(_with_noise, LOAD_KINDS[kind], seed)


def _with_noise(shape: Callable[[float, int], float], seed: int, at_s: float) -> float:
    return min(max(shape(at_s, seed) * (1 + NOISE * (2 * seeded_uniform(seed, int(at_s)) - 1)), 0.0), 1.0)


def seeded_uniform(seed: int, number: int) -> float:
    """Return a random number in [0, 1) for each pair, the same in every call and order."""
    digest = blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _diurnal(at_s: float, _seed: int) -> float:
    """A fifth at four in the morning, all of it at four in the afternoon."""
    return 0.6 - 0.4 * cos(2 * pi * (at_s / DAY_S - 4 / 24))


def _weekly(at_s: float, seed: int) -> float:
    """Diurnal, and half of that on two days in seven."""
    weekend = int(at_s / DAY_S) % 7 >= 5
    return _diurnal(at_s, seed) * (0.5 if weekend else 1.0)


def _bursty(at_s: float, seed: int) -> float:
    """A quarter, and in some windows of five minutes a burst to between a half and all, which decays within a minute."""
    window, within = divmod(at_s, BURST_EVERY_S)
    start_s = seeded_uniform(seed, -1 - int(window)) * (BURST_EVERY_S - 3 * BURST_S)
    height = 0.25 + 0.5 * seeded_uniform(seed + 1, int(window))
    if seeded_uniform(seed + 2, int(window)) < 0.4 or within < start_s:
        return 0.25
    return 0.25 + height * exp(-(within - start_s) / BURST_S)


def _step(at_s: float, _seed: int) -> float:
    """An hour at a fifth, an hour at four fifths."""
    return 0.8 if int(at_s / 3600) % 2 else 0.2


def _ramp(at_s: float, _seed: int) -> float:
    """From a tenth to all in two hours, and again."""
    return 0.1 + 0.9 * (at_s % 7200) / 7200


def _flat(_at_s: float, _seed: int) -> float:
    return 0.5


LOAD_KINDS: Mapping[str, Callable[[float, int], float]] = {
    "diurnal": _diurnal,
    "weekly": _weekly,
    "bursty": _bursty,
    "step": _step,
    "ramp": _ramp,
    "flat": _flat,
}

MAX_CPUS, MAX_NUMA_NODES = 1024, 64
CORES_PER_L3 = 8


class SimulatedService(msgspec.Struct, frozen=True, kw_only=True):
    """One pod with one container and its CPU demand."""

    pod: Pod
    peak_cores: float
    load: Load
    request_us: float = 500.0
    """CPU time of one request: the work of each wakeup."""
    threads: int = 8

    @property
    def cgroup(self) -> str:
        return self.pod.containers[0].cgroup

    def demand_cores(self, at_s: float) -> float:
        return self.peak_cores * self.load(at_s)


class SimulationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A node and its workloads."""

    topology: Topology
    memory_bytes: int
    services: tuple[SimulatedService, ...]


def build_topology(cpus: int, numa: int = 1, threads: int = 2) -> Topology:
    """Return CPUs numbered as Linux does on x86: one thread of every core first, then their siblings.

    From four NUMA nodes on, a socket has two of them. Raises ValueError if the numbers do not divide.
    """
    if not 1 <= cpus <= MAX_CPUS or not 1 <= numa <= MAX_NUMA_NODES:
        raise ValueError(f"{cpus} CPUs on {numa} NUMA nodes: at most {MAX_CPUS} on {MAX_NUMA_NODES} can be simulated")
    if cpus % (numa * threads):
        raise ValueError(f"{cpus} CPUs cannot be divided among {numa} NUMA nodes in cores of {threads} threads")
    cores = cpus // threads
    per_socket = 2 if numa >= 4 and numa % 2 == 0 else 1
    built = []
    for number in range(cpus):
        core = number % cores
        node = core * numa // cores
        built.append(Cpu(id=number, core=core, socket=node // per_socket, numa=node, l3=core // CORES_PER_L3))
    return Topology(cpus=tuple(built))


def build_service(
    name: str, kind: str, peak_cores: float, *, qos: QoSLevel = QoSLevel.SHARED, seed: int = 1, parent: str = "/pods"
) -> SimulatedService:
    """Return an online service that requests its peak."""
    container = Container(name=name, cgroup=f"{parent}/{name}", cpu_request_cores=peak_cores)
    pod = Pod(uid=f"sim/{name}", namespace="sim", name=name, qos=qos, containers=(container,))
    return SimulatedService(pod=pod, peak_cores=peak_cores, load=build_load(kind, seed))


def build_batch_job(name: str, appetite_cores: float, *, parent: str = "/pods") -> SimulatedService:
    """Return batch work that uses all CPU that it gets, up to its number of threads."""
    container = Container(name=name, cgroup=f"{parent}/{name}", reclaimed_cpu_cores=appetite_cores)
    pod = Pod(uid=f"sim/{name}", namespace="sim", name=name, qos=QoSLevel.RECLAIMED, containers=(container,))
    return SimulatedService(
        pod=pod, peak_cores=appetite_cores, load=_always, request_us=10_000.0, threads=max(round(appetite_cores), 1)
    )


def _always(_at_s: float) -> float:
    return 1.0


def build_node(cpus: int, numa: int, kinds: Sequence[str], *, online: int, seed: int) -> SimulationPlan:
    """Return a node with `online` services, whose peaks add up to four fifths of it, and batch work that would use all."""
    machine = build_topology(cpus, numa, 2 if cpus % (2 * numa) == 0 else 1)
    peak = 0.8 * cpus / max(online, 1)
    services = [build_service(f"web{i}", kinds[i % len(kinds)], peak, seed=seed + i) for i in range(online)]
    return SimulationPlan(
        topology=machine, memory_bytes=cpus << 32, services=(*services, build_batch_job("batch", float(cpus)))
    )
