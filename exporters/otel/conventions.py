"""Maps facts to OpenTelemetry's semantic conventions 1.44 and keeps the start times of counters.
Pure. The mode `softirq` is an extension; the conventions know `interrupt` only. A cgroup that is created again under
its path has a new id and so a new start time; without it its counters would seem to run backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import msgspec

from api.pod import Container, Pod
from api.snapshot import CgroupSample, NodeSample, Snapshot
from api.text import encodable
from api.units import NS_PER_S
from exporters.otel.environment import CONTAINER_ID
from exporters.prometheus.cgroup_families import MAX_DEVICES_PER_CGROUP, device_names, first_value, working_set
from exporters.prometheus.metric_family import MetricNumber, ns_to_seconds
from exporters.prometheus.node_families import HZ_PER_KHZ, MAX_INTERFACES

MAX_START_TIMES = 4096
"""Maximum number of cgroups with a start time, removed ones included."""


class CgroupStartTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Start times of the counters of cgroups, from all cycles so far."""

    by_id: Mapping[int, int | None] = {}
    """By id: time of the last cycle without the cgroup, when all its counters were zero (nanoseconds of CLOCK_REALTIME); None
    if the first cycle had it."""
    looked_at_ns: int | None = None

    def after(self, snapshot: Snapshot) -> CgroupStartTimes:
        """Return a copy with one more cycle; the old value may still be in use by a renderer."""
        if not snapshot.cgroups:
            return self
        here = [sample.id for sample in snapshot.cgroups.values()]
        by_id = self.by_id
        if new := [each for each in here if each not in by_id]:
            if len(by_id) + len(new) > MAX_START_TIMES:
                by_id = {each: by_id[each] for each in here if each in by_id}
            by_id = {**by_id, **dict.fromkeys(new, self.looked_at_ns)}
        return CgroupStartTimes(by_id=by_id, looked_at_ns=snapshot.wall_time_ns)


OtelAttributes = dict[str, str | int]
InstrumentPoints = Iterable[tuple[OtelAttributes, MetricNumber | None]]
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
CPU_MODE_FIELDS = {
    "user": "user_ns", "nice": "nice_ns", "system": "system_ns", "idle": "idle_ns", "iowait": "iowait_ns",
    "interrupt": "irq_ns", "softirq": "softirq_ns", "steal": "steal_ns",
}  # fmt: skip
TCP_STATES = {"syn_recv": "syn_received", "fin_wait1": "fin_wait_1", "fin_wait2": "fin_wait_2"}
"""States whose names in the conventions differ from the kernel's."""
AGENT_ONLY_PREFIXES = ("service.", "os.", "container.", "k8s.")
SHARED_PREFIXES = ("k8s.node.", "k8s.cluster.")
DIRECTIONS = (("receive", "received"), ("transmit", "sent"))


class OtelInstrument(NamedTuple):
    """One metric of the conventions. `kind` is counter, updown (a sum that also falls) or gauge."""

    name: str
    unit: str
    kind: str
    description: str
    points: tuple[tuple[OtelAttributes, MetricNumber], ...]


class ContainerSample(NamedTuple):
    """A container of a listed pod."""

    attributes: OtelAttributes
    container: Container
    sample: CgroupSample
    devices: Mapping[str, str]
    """Names of disks by `MAJOR:MINOR`."""


NODE_INSTRUMENTS: tuple[tuple[str, str, str, str, Callable[[NodeSample], InstrumentPoints]], ...] = (
    ("system.cpu.time", "s", "counter", "Time of each logical CPU by mode.", lambda n: (
        ({"cpu.logical_number": cpu, "cpu.mode": mode}, getattr(times, field) / NS_PER_S)
        for cpu, times in n.per_cpu.items() for mode, field in CPU_MODE_FIELDS.items())),
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
        ({"system.device": encodable(name), "disk.io.direction": direction}, getattr(disk, f"{direction}_bytes"))
        for name, disk in n.disks.items() for direction in ("read", "write"))),
    ("system.disk.operations", "{operation}", "counter", "Operations completed.", lambda n: (
        ({"system.device": encodable(name), "disk.io.direction": direction}, getattr(disk, f"{direction}s"))
        for name, disk in n.disks.items() for direction in ("read", "write"))),
    ("system.disk.operation_time", "s", "counter", "Time that operations took, summed.", lambda n: (
        ({"system.device": encodable(name), "disk.io.direction": direction}, getattr(disk, f"{direction}_ns") / NS_PER_S)
        for name, disk in n.disks.items() for direction in ("read", "write"))),
    ("system.disk.io_time", "s", "counter", "Time with an operation in flight.", lambda n: (
        ({"system.device": encodable(name)}, disk.busy_ns / NS_PER_S) for name, disk in n.disks.items())),
    ("system.filesystem.limit", "By", "updown", "Size of a file system.", lambda n: (
        ({"system.filesystem.mountpoint": encodable(at)}, fs.size_bytes) for at, fs in n.filesystems.items())),
    ("system.network.io", "By", "counter", "Bytes transmitted and received.", lambda n: _network(n, "bytes")),
    ("system.network.packet.count", "{packet}", "counter", "Packets transferred.", lambda n: _network(n, "packets")),
    ("system.network.packet.dropped", "{packet}", "counter", "Packets dropped.", lambda n: _network(n, "drop")),
    ("system.network.errors", "{error}", "counter", "Errors of network interfaces.", lambda n: _network(n, "errs")),
    ("system.network.connection.count", "{connection}", "updown", "Connections by state.", lambda n: (
        ({"network.transport": "tcp", "network.connection.state": TCP_STATES.get(state, state)}, count)
        for state, count in n.tcp_states.items())),
)  # fmt: skip
CONTAINER_INSTRUMENTS: tuple[tuple[str, str, str, str, Callable[[ContainerSample], InstrumentPoints]], ...] = (
    ("container.cpu.time", "s", "counter", "CPU time used, by mode where the kernel tells.", lambda o: _cpu(o.sample)),
    ("container.memory.usage", "By", "updown", "Memory charged, page cache included.", lambda o: [
        ({}, o.sample.memory_bytes)]),
    ("container.memory.rss", "By", "updown", "Anonymous memory.", lambda o: [
        ({}, first_value(o.sample.memory_stat, ("anon", "total_rss", "rss")))]),
    ("container.memory.working_set", "By", "updown", "Memory without inactive page cache.", lambda o: [
        ({}, working_set(o.sample))]),
    ("container.paging.faults", "{fault}", "counter", "Page faults.", lambda o: _faults(
        o.sample.memory_stat, ("total_pgfault", "pgfault"), ("total_pgmajfault", "pgmajfault"))),
    ("container.disk.io", "By", "counter", "Bytes transferred.", lambda o: (
        ({"system.device": o.devices.get(number, number), "disk.io.direction": direction}, getattr(io, f"{direction}_bytes"))
        for number, io in islice(o.sample.io.items(), MAX_DEVICES_PER_CGROUP) for direction in ("read", "write"))),
    ("k8s.container.cpu.request.desired", "{cpu}", "updown", "CPU that the pod asks for.", lambda o: [
        ({}, o.container.cpu_request_cores)]),
    ("k8s.container.cpu.limit.desired", "{cpu}", "updown", "CPU that the pod may use at most.", lambda o: [
        ({}, o.container.cpu_limit_cores)]),
    ("k8s.container.memory.request.desired", "By", "updown", "Memory that the pod asks for.", lambda o: [
        ({}, o.container.memory_request_bytes)]),
    ("k8s.container.memory.limit.desired", "By", "updown", "Memory that the pod may use at most.", lambda o: [
        ({}, o.container.memory_limit_bytes)]),
)  # fmt: skip


def node_instruments(snapshot: Snapshot) -> Iterator[OtelInstrument]:
    """Yield every node metric of the conventions that this snapshot has a value for."""
    yield OtelInstrument(
        "system.cpu.logical.count", "{cpu}", "updown", "Online CPUs.", (({}, len(snapshot.topology.cpus)),)
    )
    for name, unit, kind, description, fact in NODE_INSTRUMENTS:
        shown = tuple((attributes, value) for attributes, value in fact(snapshot.node) if value is not None)
        if shown:
            yield OtelInstrument(name, unit, kind, description, shown)


def container_instruments(
    snapshot: Snapshot, max_containers: int
) -> Iterator[tuple[ContainerSample, tuple[OtelInstrument, ...]]]:
    """Yield at most `max_containers` containers of listed pods, each with every metric that has a value.

    Each container is a resource. Its points repeat the identity, because Prometheus keeps only configured attributes of
    resources and would otherwise merge all containers.
    """
    for owned in islice(_container_samples(snapshot), max_containers):
        shown = []
        for name, unit, kind, description, of_container in CONTAINER_INSTRUMENTS:
            if points := tuple(
                (owned.attributes | own, value) for own, value in of_container(owned) if value is not None
            ):
                shown.append(OtelInstrument(name, unit, kind, description, points))
        if shown:
            yield owned, tuple(shown)


def shared_resource_attributes(resource: Mapping[str, str]) -> OtelAttributes:
    """Return the agent's resource attributes that hold for containers too: host, cluster, and user-defined ones."""
    return {
        name: value
        for name, value in resource.items()
        if name.startswith(SHARED_PREFIXES) or not name.startswith(AGENT_ONLY_PREFIXES)
    }


def _container_samples(snapshot: Snapshot) -> Iterator[ContainerSample]:
    devices = device_names(snapshot)
    for pod in snapshot.pods:
        for container in pod.containers:
            sample = snapshot.cgroups.get(container.cgroup)
            if sample is not None:
                yield ContainerSample(_identity(pod, container), container, sample, devices)


def _identity(pod: Pod, container: Container) -> OtelAttributes:
    attributes: OtelAttributes = {
        "k8s.namespace.name": encodable(pod.namespace),
        "k8s.pod.name": encodable(pod.name),
        "k8s.container.name": encodable(container.name),
    }
    if pod.uid != pod.key:
        attributes["k8s.pod.uid"] = encodable(pod.uid)
    match = CONTAINER_ID.search(container.cgroup)
    return attributes | ({"container.id": match[1]} if match else {})


def _cpu(sample: CgroupSample) -> InstrumentPoints:
    if sample.cpu_user_ns is None or sample.cpu_system_ns is None:
        return [({}, ns_to_seconds(sample.cpu_usage_ns))]
    return (
        ({"cpu.mode": mode}, ns / NS_PER_S)
        for mode, ns in (("user", sample.cpu_user_ns), ("system", sample.cpu_system_ns))
    )


def _memory(meminfo: Mapping[str, int]) -> InstrumentPoints:
    """Return memory states that add up to the total, as the conventions require."""
    shown = {
        state: meminfo.get(name) for state, name in (("free", "MemFree"), ("buffers", "Buffers"), ("cached", "Cached"))
    }
    total, values = meminfo.get("MemTotal"), [value for value in shown.values() if value is not None]
    if total is not None and len(values) == len(shown):
        shown["used"] = max(0, total - sum(values))
    return (({"system.memory.state": state}, value) for state, value in shown.items())


def _faults(stat: Mapping[str, int], every: tuple[str, ...], major: tuple[str, ...]) -> InstrumentPoints:
    all_faults, waited = first_value(stat, every), first_value(stat, major)
    if all_faults is None or waited is None:
        return ()
    return (
        ({"system.paging.fault.type": "major"}, waited),
        ({"system.paging.fault.type": "minor"}, max(0, all_faults - waited)),
    )


def _network(node: NodeSample, column: str) -> InstrumentPoints:
    return (
        (
            {"network.interface.name": encodable(name), "network.io.direction": direction},
            getattr(interface, field).get(column),
        )
        for name, interface in islice(node.interfaces.items(), MAX_INTERFACES)
        for direction, field in DIRECTIONS
    )
