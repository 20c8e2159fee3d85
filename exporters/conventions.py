"""The facts for which OpenTelemetry has names of its own, under those names: `system.*`, `container.*`, `k8s.*`. Pure.

They are sent beside our own rows, so that dashboards made for the conventions find their numbers. Names and attributes are
those of semantic conventions 1.44 (development status, as all of the system and container ones are); a test holds the
names against the conventions' own package. The mode `softirq` is ours: the conventions know `interrupt` only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from api.catalogue import NS_PER_S
from api.pods import Container, Pod
from api.samples import CgroupSample, NodeSample, Snapshot
from api.text import printable
from exporters.cgroups import MOST_DEVICES, device_names, first, working_set
from exporters.nodes import HZ_PER_KHZ, MOST_INTERFACES
from exporters.points import Number, seconds

Attributes = dict[str, str | int]
Points = Iterable[tuple[Attributes, Number | None]]
SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
MODES = {
    "user": "user_ns", "nice": "nice_ns", "system": "system_ns", "idle": "idle_ns", "iowait": "iowait_ns",
    "interrupt": "irq_ns", "softirq": "softirq_ns", "steal": "steal_ns",
}  # fmt: skip
TCP_STATES = {"syn_recv": "syn_received", "fin_wait1": "fin_wait_1", "fin_wait2": "fin_wait_2"}
"""Where the conventions, whose list of states is closed, spell them otherwise than the kernel."""
AGENT_ALONE = ("service.", "os.", "container.", "k8s.")
SHARED = ("k8s.node.", "k8s.cluster.")
DIRECTIONS = (("receive", "received"), ("transmit", "sent"))
_CONTAINER_ID = re.compile(r"(?:^|[^0-9a-f])([0-9a-f]{64})(?:[^0-9a-f]|$)")


class Instrument(NamedTuple):
    """One metric of the conventions. `kind` is counter, updown (a sum that also falls) or gauge."""

    name: str
    unit: str
    kind: str
    description: str
    points: tuple[tuple[Attributes, Number], ...]


class Owned(NamedTuple):
    """A container of a listed pod."""

    attributes: Attributes
    container: Container
    sample: CgroupSample
    devices: Mapping[str, str]
    """Names of disks by `MAJOR:MINOR`."""


NODE: tuple[tuple[str, str, str, str, Callable[[NodeSample], Points]], ...] = (
    ("system.cpu.time", "s", "counter", "Time of each logical CPU by mode.", lambda n: (
        ({"cpu.logical_number": cpu, "cpu.mode": mode}, getattr(times, field) / NS_PER_S)
        for cpu, times in n.per_cpu.items() for mode, field in MODES.items())),
    ("system.cpu.frequency", "Hz", "gauge", "Frequency that each CPU runs at.", lambda n: (
        ({"cpu.logical_number": cpu}, khz * HZ_PER_KHZ) for cpu, khz in n.cpu_khz.items())),
    ("system.memory.limit", "By", "updown", "Memory of the node.", lambda n: [({}, n.memory_total_bytes)]),
    ("system.memory.usage", "By", "updown", "Memory by state.", lambda n: _memory(n.meminfo)),
    ("system.memory.linux.available", "By", "updown", "Memory that could be had without swapping.", lambda n: [
        ({}, n.memory_available_bytes)]),
    ("system.memory.linux.slab.usage", "By", "updown", "Memory of the kernel's slab allocator.", lambda n: (
        ({"system.memory.linux.slab.state": state}, n.meminfo.get(name))
        for state, name in (("reclaimable", "SReclaimable"), ("unreclaimable", "SUnreclaim")))),
    ("system.paging.faults", "{fault}", "counter", "Page faults.", lambda n: _faults(n.vmstat, ("pgfault",), ("pgmajfault",))),
    ("system.disk.io", "By", "counter", "Bytes transferred.", lambda n: (
        ({"system.device": printable(name), "disk.io.direction": direction}, getattr(disk, f"{direction}_bytes"))
        for name, disk in n.disks.items() for direction in ("read", "write"))),
    ("system.disk.operations", "{operation}", "counter", "Operations completed.", lambda n: (
        ({"system.device": printable(name), "disk.io.direction": direction}, getattr(disk, f"{direction}s"))
        for name, disk in n.disks.items() for direction in ("read", "write"))),
    ("system.disk.operation_time", "s", "counter", "Time that operations took, summed.", lambda n: (
        ({"system.device": printable(name), "disk.io.direction": direction}, getattr(disk, f"{direction}_ns") / NS_PER_S)
        for name, disk in n.disks.items() for direction in ("read", "write"))),
    ("system.disk.io_time", "s", "counter", "Time with an operation in flight.", lambda n: (
        ({"system.device": printable(name)}, disk.busy_ns / NS_PER_S) for name, disk in n.disks.items())),
    ("system.filesystem.limit", "By", "updown", "Size of a file system.", lambda n: (
        ({"system.filesystem.mountpoint": printable(at)}, fs.size_bytes) for at, fs in n.filesystems.items())),
    ("system.network.io", "By", "counter", "Bytes transmitted and received.", lambda n: _network(n, "bytes")),
    ("system.network.packet.count", "{packet}", "counter", "Packets transferred.", lambda n: _network(n, "packets")),
    ("system.network.packet.dropped", "{packet}", "counter", "Packets dropped.", lambda n: _network(n, "drop")),
    ("system.network.errors", "{error}", "counter", "Errors of network interfaces.", lambda n: _network(n, "errs")),
    ("system.network.connection.count", "{connection}", "updown", "Connections by state.", lambda n: (
        ({"network.transport": "tcp", "network.connection.state": TCP_STATES.get(state, state)}, count)
        for state, count in n.tcp_states.items())),
)  # fmt: skip
CONTAINER: tuple[tuple[str, str, str, str, Callable[[Owned], Points]], ...] = (
    ("container.cpu.time", "s", "counter", "CPU time used, by mode where the kernel tells.", lambda o: _cpu(o.sample)),
    ("container.memory.usage", "By", "updown", "Memory charged, page cache included.", lambda o: [
        ({}, o.sample.memory_bytes)]),
    ("container.memory.rss", "By", "updown", "Anonymous memory.", lambda o: [
        ({}, first(o.sample.memory_stat, ("anon", "total_rss", "rss")))]),
    ("container.memory.working_set", "By", "updown", "Memory without inactive page cache.", lambda o: [
        ({}, working_set(o.sample))]),
    ("container.paging.faults", "{fault}", "counter", "Page faults.", lambda o: _faults(
        o.sample.memory_stat, ("total_pgfault", "pgfault"), ("total_pgmajfault", "pgmajfault"))),
    ("container.disk.io", "By", "counter", "Bytes transferred.", lambda o: (
        ({"system.device": o.devices.get(number, number), "disk.io.direction": direction}, getattr(io, f"{direction}_bytes"))
        for number, io in islice(o.sample.io.items(), MOST_DEVICES) for direction in ("read", "write"))),
    ("k8s.container.cpu.request.desired", "{cpu}", "updown", "CPU that the pod asks for.", lambda o: [
        ({}, o.container.cpu_request_cores)]),
    ("k8s.container.cpu.limit.desired", "{cpu}", "updown", "CPU that the pod may use at most.", lambda o: [
        ({}, o.container.cpu_limit_cores)]),
    ("k8s.container.memory.request.desired", "By", "updown", "Memory that the pod asks for.", lambda o: [
        ({}, o.container.memory_request_bytes)]),
    ("k8s.container.memory.limit.desired", "By", "updown", "Memory that the pod may use at most.", lambda o: [
        ({}, o.container.memory_limit_bytes)]),
)  # fmt: skip


def node_instruments(snapshot: Snapshot) -> Iterator[Instrument]:
    """Every metric of the conventions about the node that this snapshot has a number for."""
    yield Instrument(
        "system.cpu.logical.count", "{cpu}", "updown", "Online CPUs.", (({}, len(snapshot.topology.cpus)),)
    )
    for name, unit, kind, description, fact in NODE:
        shown = tuple((attributes, value) for attributes, value in fact(snapshot.node) if value is not None)
        if shown:
            yield Instrument(name, unit, kind, description, shown)


def containers(snapshot: Snapshot, most: int) -> Iterator[tuple[Owned, tuple[Instrument, ...]]]:
    """At most so many containers of listed pods, each with every metric that it has a number for.

    Its identity is that of a resource. The points carry it as well, since Prometheus keeps of resources what it is told to
    only, and without it would take all containers for one.
    """
    for owned in islice(_owned(snapshot), most):
        shown = []
        for name, unit, kind, description, of_container in CONTAINER:
            if points := tuple(
                (owned.attributes | own, value) for own, value in of_container(owned) if value is not None
            ):
                shown.append(Instrument(name, unit, kind, description, points))
        if shown:
            yield owned, tuple(shown)


def surroundings(resource: Mapping[str, str]) -> Attributes:
    """What is true of a container too where the agent's resource says it: host, cluster, and what people added."""
    return {
        name: value for name, value in resource.items() if name.startswith(SHARED) or not name.startswith(AGENT_ALONE)
    }


def _owned(snapshot: Snapshot) -> Iterator[Owned]:
    devices = device_names(snapshot)
    for pod in snapshot.pods:
        for container in pod.containers:
            sample = snapshot.cgroups.get(container.cgroup)
            if sample is not None:
                yield Owned(_identity(pod, container), container, sample, devices)


def _identity(pod: Pod, container: Container) -> Attributes:
    known: Attributes = {
        "k8s.namespace.name": printable(pod.namespace),
        "k8s.pod.name": printable(pod.name),
        "k8s.container.name": printable(container.name),
    }
    if pod.uid != pod.key:
        known["k8s.pod.uid"] = printable(pod.uid)
    found = _CONTAINER_ID.search(container.cgroup)
    return known | ({"container.id": found[1]} if found else {})


def _cpu(sample: CgroupSample) -> Points:
    if sample.cpu_user_ns is None or sample.cpu_system_ns is None:
        return [({}, seconds(sample.cpu_usage_ns))]
    return (
        ({"cpu.mode": mode}, ns / NS_PER_S)
        for mode, ns in (("user", sample.cpu_user_ns), ("system", sample.cpu_system_ns))
    )


def _memory(meminfo: Mapping[str, int]) -> Points:
    """States that together make the whole, as the conventions want them."""
    shown = {
        state: meminfo.get(name) for state, name in (("free", "MemFree"), ("buffers", "Buffers"), ("cached", "Cached"))
    }
    total, known = meminfo.get("MemTotal"), [value for value in shown.values() if value is not None]
    if total is not None and len(known) == len(shown):
        shown["used"] = max(0, total - sum(known))
    return (({"system.memory.state": state}, value) for state, value in shown.items())


def _faults(stat: Mapping[str, int], every: tuple[str, ...], major: tuple[str, ...]) -> Points:
    all_faults, waited = first(stat, every), first(stat, major)
    if all_faults is None or waited is None:
        return ()
    return (
        ({"system.paging.fault.type": "major"}, waited),
        ({"system.paging.fault.type": "minor"}, max(0, all_faults - waited)),
    )


def _network(node: NodeSample, column: str) -> Points:
    return (
        (
            {"network.interface.name": printable(name), "network.io.direction": direction},
            getattr(interface, field).get(column),
        )
        for name, interface in islice(node.interfaces.items(), MOST_INTERFACES)
        for direction, field in DIRECTIONS
    )
