"""Builds one Snapshot per cycle from all sensors and probes.
Each source is read behind a guard of its own: a failing source is reported as unhealthy and does not stop the
others. A value that a source did not deliver this cycle is absent from the snapshot, never invented. Each distinct
unexpected exception is logged once and shown in every snapshot while it lasts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.cgroup.schedstat import SchedstatRunqLatency
from agent.sensors.node.machine import read_online_cpus_text, read_topology
from agent.sensors.node.node_reader import NodeReader
from agent.sensors.pods.pod_indicators import PodIndicatorScraper
from api.cpu import Topology
from api.interfaces import HealthReporter, PodSource, Probe, ProbeReading, RunqLatencySource, Unavailable
from api.pod import Pod
from api.rates import cgroups_by_container
from api.snapshot import CgroupSample, ComponentHealth, NodeSample, RequestLatency, RunqLatency, Snapshot
from api.text import join_first

log = logging.getLogger(__name__)
T = TypeVar("T")
NO_RUNQ_LATENCY: Mapping[int, RunqLatency] = {}
RESERVED_FIELDS = frozenset({"path", "id", "wait"})
CGROUP_FIELDS = frozenset(CgroupSample.__struct_fields__) - RESERVED_FIELDS
NODE_FIELDS = frozenset(NodeSample.__struct_fields__)
MAX_NAMES_SHOWN = 5
MAX_LOGGED_FAILURES = 100
"""Distinct failures that are logged, each once; the snapshots always show all of them."""


class Sensor:
    """Reads every source once per `snapshot`. The owner of the readers closes them."""

    def __init__(  # noqa: PLR0913 - one argument per source
        self,
        *,
        cgroups: CgroupReader,
        node: NodeReader,
        sys: Path,
        pods: PodSource,
        waits: RunqLatencySource,
        indicators: PodIndicatorScraper,
        probes: Sequence[Probe] = (),
        reporters: Sequence[HealthReporter] = (),
        loop_reporters: Sequence[HealthReporter] = (),
        annotations: Callable[[], Mapping[str, str] | None] = lambda: None,
        patience_ns: int = 0,
    ) -> None:
        """`patience_ns` is how long a listed container may lack its cgroup, because the source of pods notices its end a
        little later. `reporters` are read in the thread of the cycle, `loop_reporters` on the event loop by
        `read_loop_reporters`. `annotations` returns those of the Node (NodeSample.annotations)."""
        self._cgroups, self._node, self._sys = cgroups, node, sys
        self._pods, self._waits, self._indicators = pods, waits, indicators
        self._probes = probes
        self._reporters, self._loop_reporters = reporters, loop_reporters
        self._loop_statuses = tuple[ComponentHealth, ...]()
        self._runq_lock = threading.Lock()
        """Held while a snapshot reads the maps of the run-queue probe, which `read_runq_latency` reads on the event loop."""
        self._annotations, self._patience_ns = annotations, patience_ns
        self._missing_since_ns: dict[str, int] = {}
        self._live: dict[int, str] = {}
        self._ids: dict[str, int] = {}
        self._last_pods: tuple[Pod, ...] = ()
        self._last_topology = Topology(cpus=())
        self._online = ""
        self._statuses: list[ComponentHealth] = []
        self._logged: set[tuple[str, str]] = set()

    def snapshot(self, seq: int, taken_at_ns: int, wall_time_ns: int) -> Snapshot:
        """Return everything known of the node now, stamped with the caller's clocks. Never raises."""
        self._statuses = []
        # The last good list of pods and CPUs stays in force: without its pod, a cgroup's own values would be restored.
        self._last_pods = self._guard("pods", self._pods.read, self._last_pods)
        self._last_topology = self._guard("topology", self._topology, self._last_topology)
        node = self._guard("node", lambda: self._node.read(taken_at_ns, wall_time_ns), NodeSample())
        self._cgroups.manage(container.cgroup for pod in self._last_pods for container in pod.containers)
        cgroups = self._guard(
            "cgroups", lambda: self._cgroups.read(taken_at_ns, wall_time_ns), dict[str, CgroupSample]()
        )
        self._statuses.extend((*self._node.problems(), *self._cgroups.problems()))
        if cgroups:
            self._live = {sample.id: path for path, sample in cgroups.items()}
            self._ids = {path: sample.id for path, sample in cgroups.items()}
        complete = bool(cgroups) and not self._cgroups.skipped
        with self._runq_lock:
            waits = self._observe("waits", lambda: self._all_waits(complete), NO_RUNQ_LATENCY, self._waits)
            reading = self._read_probes(complete)
        self._read_health(self._reporters)
        self._statuses.extend(self._loop_statuses)
        node = msgspec.structs.replace(node, annotations=self._annotations(), **reading.node)
        cgroups = {
            path: _merge_probe_fields(sample, waits.get(sample.id), reading.cgroups.get(sample.id, {}))
            for path, sample in cgroups.items()
        }
        indicators: Mapping[str, RequestLatency] = self._guard("indicators", self._indicators.latest, {})
        self._statuses.extend(
            (
                *self._indicator_status(),
                *_annotation_status(self._last_pods),
                *self._missing_cgroups(cgroups, taken_at_ns),
                *_controller_status(self._last_pods, cgroups),
            )
        )
        return Snapshot(
            seq=seq,
            taken_at_ns=taken_at_ns,
            wall_time_ns=wall_time_ns,
            boot_id=self._node.boot_id,
            topology=self._last_topology,
            node=node,
            cgroups=cgroups,
            pods=self._last_pods,
            indicators=indicators,
            sources=tuple(self._statuses),
        )

    def read_loop_reporters(self) -> None:
        """Read the health of the components that live on the event loop, for the next snapshot. Call it on that loop."""
        self._statuses = []
        self._read_health(self._loop_reporters)
        self._loop_statuses = tuple(self._statuses)

    def read_runq_latency(self, cgroup_ids: Collection[int]) -> Mapping[int, RunqLatency] | None:
        """Return the run-queue latency of these cgroups of the latest snapshot, by id; cheap enough for ten times a second.

        Empty if the source failed; the next snapshot reports the reason. None while a snapshot reads the same maps in
        another thread.
        """
        if not self._runq_lock.acquire(blocking=False):
            return None
        try:
            return self._waits.read(self._live, cgroup_ids, complete=False)
        except Unavailable:
            return {}
        except Exception as failure:
            if self._is_new("waits", f"{type(failure).__name__}: {failure}"):
                log.exception("source waits failed between two cycles")
            return {}
        finally:
            self._runq_lock.release()

    def _read_probes(self, complete: bool) -> ProbeReading:
        """Merge the readings of all probes; if two give the same field, the later probe counts."""
        cgroups: dict[int, dict[str, object]] = {}
        node: dict[str, object] = {}
        for probe in self._probes:
            reading = self._observe(
                probe.name, partial(_read_probe, probe, self._live, complete), ProbeReading(), probe
            )
            node.update(reading.node)
            for number, values in reading.cgroups.items():
                cgroups.setdefault(number, {}).update(values)
        return ProbeReading(cgroups, node)

    def _read_health(self, reporters: Sequence[HealthReporter]) -> None:
        for reporter in reporters:
            self._observe(reporter.name, lambda: None, None, reporter)

    def _all_waits(self, complete: bool) -> Mapping[int, RunqLatency]:
        # A probe reads all cgroups at once; schedstat costs a read per thread, so it is used for pods only.
        cgroup_ids = self._pods_ids() if self._waits.form == SchedstatRunqLatency.form else None
        return self._waits.read(self._live, cgroup_ids, complete=complete)

    def _pods_ids(self) -> frozenset[int]:
        containers = (container.cgroup for pod in self._last_pods for container in pod.containers)
        return frozenset(
            self._ids[path] for paths in cgroups_by_container(self._ids, containers).values() for path in paths
        )

    def _topology(self) -> Topology:
        """Read the topology again only when CPUs came or went: on a large node it is a thousand files."""
        online = read_online_cpus_text(self._sys)
        if online != self._online or not self._last_topology.cpus:
            self._online = online
            return read_topology(self._sys)
        return self._last_topology

    def _missing_cgroups(self, cgroups: Mapping[str, CgroupSample], now_ns: int) -> tuple[ComponentHealth, ...]:
        """Report listed containers without a cgroup in one line: a typo would silently leave a pod unprotected."""
        if not cgroups:
            return ()
        missing = {
            container.cgroup: f"{container.cgroup} of {pod.key}"
            for pod in self._last_pods
            for container in pod.containers
            if container.cgroup not in cgroups
        }
        self._missing_since_ns = {cgroup: self._missing_since_ns.get(cgroup, now_ns) for cgroup in missing}
        overdue = [
            text for cgroup, text in missing.items() if now_ns - self._missing_since_ns[cgroup] >= self._patience_ns
        ]
        if not overdue:
            return ()
        remedy = "start the pod, or correct the path in the pods file: it is relative to the cgroup root, like /web"
        return _unhealthy("pod-cgroups", f"there is no cgroup {join_first(overdue, MAX_NAMES_SHOWN)}", remedy)

    def _indicator_status(self) -> tuple[ComponentHealth, ...]:
        errors = self._indicators.errors()
        if not errors:
            return ()
        error = join_first([f"{pod}: {reason}" for pod, reason in sorted(errors.items())], MAX_NAMES_SHOWN, "; ")
        return _unhealthy("indicator-pods", error, "correct the annotations or the endpoint of these pods")

    def _observe(self, name: str, read: Callable[[], T], default: T, source: RunqLatencySource | HealthReporter) -> T:
        """Read under a guard and add the source's own problem and its lost events to its status."""
        nothing: tuple[T, Unavailable | None] = (default, None)
        value, problem = self._guard(name, lambda: (read(), source.problem()), nothing, source.form)
        status = msgspec.structs.replace(self._statuses.pop(), lost_events=source.lost_events)
        if problem is not None:
            status = msgspec.structs.replace(status, ok=False, error=problem.reason, remedy=problem.remedy)
        self._statuses.append(status)
        return value

    def _guard(self, name: str, read: Callable[[], T], default: T, detail: str = "") -> T:
        started = time.perf_counter_ns()
        error = remedy = ""
        value = default
        try:
            value = read()
        except Unavailable as failure:
            error, remedy = failure.reason, failure.remedy
        except Exception as failure:
            error, remedy = f"{type(failure).__name__}: {failure}", "this is a bug: report it with the agent's log"
            if self._is_new(name, error):
                log.exception("source %s failed; the cycle goes on without it", name)
        self._statuses.append(
            ComponentHealth(
                name=name,
                ok=not error,
                duration_ns=time.perf_counter_ns() - started,
                detail=detail,
                error=error,
                remedy=remedy,
            )
        )
        return value

    def _is_new(self, name: str, error: str) -> bool:
        if (name, error) in self._logged or len(self._logged) >= MAX_LOGGED_FAILURES:
            return False
        self._logged.add((name, error))
        return True


def _unhealthy(name: str, error: str, remedy: str) -> tuple[ComponentHealth, ...]:
    return (ComponentHealth(name=name, ok=False, error=error, remedy=remedy),)


def _annotation_status(pods: tuple[Pod, ...]) -> tuple[ComponentHealth, ...]:
    """Report pods with invalid labels or annotations in one line; each reason has its own remedy."""
    lines = [f"{pod.key}: {problem}" for pod in pods for problem in pod.problems]
    if not lines:
        return ()
    more = f"; and {len(lines) - 1} more" if len(lines) > 1 else ""
    remedy = "correct the labels and annotations of these pods; the snapshot lists all of them in `problems`"
    return _unhealthy("pod-annotations", f"{lines[0]}{more}", remedy)


def _controller_status(pods: tuple[Pod, ...], cgroups: Mapping[str, CgroupSample]) -> tuple[ComponentHealth, ...]:
    """Report listed containers without the cpu controller: they can be neither measured nor controlled."""
    uncontrolled = [
        container.cgroup
        for pod in pods
        for container in pod.containers
        if (sample := cgroups.get(container.cgroup)) is not None
        and sample.cpu_usage_ns is not None
        and sample.periods is None
    ]
    if not uncontrolled:
        return ()
    above = uncontrolled[0].rpartition("/")[0]
    remedy = f"enable it in all parents, the last one: echo +cpu > /sys/fs/cgroup{above}/cgroup.subtree_control"
    return _unhealthy("pod-controllers", f"no cpu controller in {join_first(uncontrolled, MAX_NAMES_SHOWN)}", remedy)


def _read_probe(probe: Probe, live: Mapping[int, str], complete: bool) -> ProbeReading:
    """Return a probe's reading. Raises ValueError, and discards all of it, if a field is in no sample."""
    reading = probe.read(live, complete=complete)
    names = {name for values in reading.cgroups.values() for name in values}
    if unknown := sorted((names - CGROUP_FIELDS) | (reading.node.keys() - NODE_FIELDS)):
        raise ValueError(f"it returned {', '.join(unknown)}, which no sample has a field for")
    return reading


def _merge_probe_fields(sample: CgroupSample, wait: RunqLatency | None, fields: Mapping[str, object]) -> CgroupSample:
    # Without the cpu controller (then cpu.stat of version 2 has no periods) the kernel schedules tasks in the ancestor's
    # group, and a probe counts them there: an empty histogram does not mean zero.
    counted_in_ancestor = wait is not None and not wait.count and wait.slots is not None and sample.periods is None
    changes = fields if wait is None or counted_in_ancestor else {**fields, "wait": wait}
    return msgspec.structs.replace(sample, **changes) if changes else sample
