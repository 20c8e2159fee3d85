"""Builds one Snapshot per cycle from all sensors and probes.
Each source is read behind a guard of its own: a failing source is reported as unhealthy and does not stop the
others. A value that a source did not deliver this cycle is absent from the snapshot, never invented. Each distinct
unexpected exception is logged once and shown in every snapshot while it lasts.
"""

from __future__ import annotations

import logging
import re
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
from api.interfaces import PodSource, Probe, ProbeReading, RunqLatencySource, Unavailable
from api.measurements import RunqLatency
from api.pod import Pod
from api.qos import QoSLevel
from api.rates import cgroups_by_container
from api.snapshot import CgroupSample, ComponentHealth, NodeSample, RequestLatency, Snapshot

log = logging.getLogger(__name__)
T = TypeVar("T")
NO_RUNQ_LATENCY: Mapping[int, RunqLatency] = {}
RESERVED_FIELDS = frozenset({"path", "id", "wait"})
CGROUP_FIELDS = frozenset(CgroupSample.__struct_fields__) - RESERVED_FIELDS
NODE_FIELDS = frozenset(NodeSample.__struct_fields__)
MAX_NAMES_SHOWN = 5
MAX_LOGGED_FAILURES = 100
"""So many different failures are logged, each once; in the snapshots every one of them is shown every time."""
_BEST_EFFORT_PREFIX = re.compile(r".*/(?:[^/]*-)?besteffort(?:\.slice)?/")
"""Where the kubelet keeps the pods of its lowest class."""


class Sensor:
    """Reads every source once per `snapshot`. The readers are their owner's to close."""

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
        loop_probes: Sequence[Probe] = (),
        reclaim_root: str = "",
        patience_ns: int = 0,
    ) -> None:
        """`reclaim_root`: the cgroup above reclaimed pods that gives way as a whole; empty where there is none. `patience_ns`:
        so long a listed container may lack its cgroup, because whoever lists it learns a little later that it has ended.
        `loop_probes` report health alone, and are read on the event loop by `read_loop_probes`."""
        self._cgroups, self._node, self._sys = cgroups, node, sys
        self._pods, self._waits, self._indicators = pods, waits, indicators
        self._probes, self._reclaim_root = probes, reclaim_root.rstrip("/")
        self._loop_probes, self._loop_statuses = loop_probes, tuple[ComponentHealth, ...]()
        self._runq_lock = threading.Lock()
        """Held while a snapshot reads the maps of the run-queue probe, which `read_runq_latency` reads on the event loop."""
        self._patience_ns = patience_ns
        self._missing: dict[str, int] = {}
        self._live: dict[int, str] = {}
        self._ids: dict[str, int] = {}
        self._known_pods: tuple[Pod, ...] = ()
        self._judged_pods: tuple[Pod, ...] | None = None
        self._strange: list[str] = []
        self._known_topology = Topology(cpus=())
        self._online = ""
        self._statuses: list[ComponentHealth] = []
        self._logged: set[tuple[str, str]] = set()

    def snapshot(self, seq: int, taken_at_ns: int, wall_time_ns: int) -> Snapshot:
        """Everything known of the node now, stamped with the caller's clocks. Never raises."""
        self._statuses = []
        # The last good list of pods and of CPUs stays in force: forgetting a pod would give its cgroup back.
        self._known_pods = self._guard("pods", self._pods.read, self._known_pods)
        self._known_topology = self._guard("topology", self._topology, self._known_topology)
        node = self._guard("node", lambda: self._node.read(taken_at_ns, wall_time_ns), NodeSample())
        self._cgroups.manage(container.cgroup for pod in self._known_pods for container in pod.containers)
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
            seen = self._read_probes(complete)
        self._statuses.extend(self._loop_statuses)
        node = msgspec.structs.replace(node, **seen.node) if seen.node else node
        cgroups = {
            path: _merge_probe_fields(sample, waits.get(sample.id), seen.cgroups.get(sample.id, {}))
            for path, sample in cgroups.items()
        }
        indicators: Mapping[str, RequestLatency] = self._guard("indicators", self._indicators.latest, {})
        self._statuses.extend(
            (
                *self._silent_pods(),
                *_annotation_status(self._known_pods),
                *self._homeless(cgroups, taken_at_ns),
                *_controller_status(self._known_pods, cgroups),
                *self._unrelated(),
            )
        )
        return Snapshot(
            seq=seq,
            taken_at_ns=taken_at_ns,
            wall_time_ns=wall_time_ns,
            boot_id=self._node.boot_id,
            topology=self._known_topology,
            node=node,
            cgroups=cgroups,
            pods=self._known_pods,
            indicators=indicators,
            sources=tuple(self._statuses),
        )

    def read_loop_probes(self) -> None:
        """Reads the health of the components that live on the event loop, for the next snapshot. Call it on that loop."""
        self._statuses = []
        for probe in self._loop_probes:
            self._observe(probe.name, partial(_read_probe, probe, self._live, complete=False), ProbeReading(), probe)
        self._loop_statuses = tuple(self._statuses)

    def read_runq_latency(self, wanted: Collection[int]) -> Mapping[int, RunqLatency] | None:
        """Returns the run-queue latency of these cgroups of the latest snapshot, by id; cheap enough for ten times a second.

        Empty if the source failed; the next snapshot reports the reason. None while a snapshot reads the same maps in
        another thread.
        """
        if not self._runq_lock.acquire(blocking=False):
            return None
        try:
            return self._waits.read(self._live, wanted, complete=False)
        except Unavailable:
            return {}
        except Exception as failure:
            if self._is_new("waits", f"{type(failure).__name__}: {failure}"):
                log.exception("source waits failed between two rounds")
            return {}
        finally:
            self._runq_lock.release()

    def _read_probes(self, complete: bool) -> ProbeReading:
        """What all probes have seen, as one: of two that give the same field the later one counts."""
        cgroups: dict[int, dict[str, object]] = {}
        node: dict[str, object] = {}
        for probe in self._probes:
            seen = self._observe(probe.name, partial(_read_probe, probe, self._live, complete), ProbeReading(), probe)
            node.update(seen.node)
            for number, values in seen.cgroups.items():
                cgroups.setdefault(number, {}).update(values)
        return ProbeReading(cgroups, node)

    def _all_waits(self, complete: bool) -> Mapping[int, RunqLatency]:
        # A probe has the waits of every cgroup at hand; schedstat pays for every thread, so only pods are worth it.
        wanted = self._pods_ids() if self._waits.form == SchedstatRunqLatency.form else None
        return self._waits.read(self._live, wanted, complete=complete)

    def _pods_ids(self) -> frozenset[int]:
        containers = (container.cgroup for pod in self._known_pods for container in pod.containers)
        return frozenset(
            self._ids[path] for paths in cgroups_by_container(self._ids, containers).values() for path in paths
        )

    def _topology(self) -> Topology:
        """Read anew only when CPUs came or went: on a large node it is a thousand files."""
        online = read_online_cpus_text(self._sys)
        if online != self._online or not self._known_topology.cpus:
            self._online = online
            return read_topology(self._sys)
        return self._known_topology

    def _unrelated(self) -> tuple[ComponentHealth, ...]:
        if self._judged_pods is not self._known_pods:
            self._judged_pods, self._strange = (
                self._known_pods,
                _unrelated_cgroup_pairs(self._known_pods, self._reclaim_root),
            )
        if not self._strange:
            return ()
        more = f" and {len(self._strange) - 1} more" if len(self._strange) > 1 else ""
        error = f"batch work gives way to siblings alone, and these are none: {self._strange[0]}{more}"
        return (ComponentHealth(name="pod-siblings", ok=False, error=error, remedy="put them below one parent"),)

    def _homeless(self, cgroups: Mapping[str, CgroupSample], now_ns: int) -> tuple[ComponentHealth, ...]:
        """One line on listed containers whose cgroup is not there: a typo in it would silently leave a pod unprotected."""
        if not cgroups:
            return ()
        missing = {
            container.cgroup: f"{container.cgroup} of {pod.key}"
            for pod in self._known_pods
            for container in pod.containers
            if container.cgroup not in cgroups
        }
        self._missing = {cgroup: self._missing.get(cgroup, now_ns) for cgroup in missing}
        told = [text for cgroup, text in missing.items() if now_ns - self._missing[cgroup] >= self._patience_ns]
        if not told:
            return ()
        remedy = "start the pod, or mend the path in the pods file: it is that below the cgroup root, as in /web"
        return (
            ComponentHealth(
                name="pod-cgroups", ok=False, error=f"there is no cgroup {_names_text(told)}", remedy=remedy
            ),
        )

    def _silent_pods(self) -> tuple[ComponentHealth, ...]:
        errors = self._indicators.errors()
        if not errors:
            return ()
        error = _names_text([f"{pod}: {reason}" for pod, reason in sorted(errors.items())], "; ")
        remedy = "mend the annotations or the endpoint of these pods"
        return (ComponentHealth(name="indicator-pods", ok=False, error=error, remedy=remedy),)

    def _observe(self, name: str, read: Callable[[], T], default: T, source: RunqLatencySource | Probe) -> T:
        """Guarded; what the source could not count although it works is shown with it, as its error if that was lately."""
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
                log.exception("source %s failed; the round goes on without it", name)
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


def _annotation_status(pods: tuple[Pod, ...]) -> tuple[ComponentHealth, ...]:
    """One line on pods whose labels or annotations could not be taken as said; each reason has its own remedy."""
    told = [f"{pod.key}: {problem}" for pod in pods for problem in pod.problems]
    if not told:
        return ()
    more = f"; and {len(told) - 1} more" if len(told) > 1 else ""
    remedy = "mend the labels and annotations of these pods; the snapshot has all of them under `problems`"
    return (ComponentHealth(name="pod-annotations", ok=False, error=f"{told[0]}{more}", remedy=remedy),)


def _controller_status(pods: tuple[Pod, ...], cgroups: Mapping[str, CgroupSample]) -> tuple[ComponentHealth, ...]:
    """One line on listed containers that the cpu controller does not know: nothing can be measured or changed of them."""
    found = [
        container.cgroup
        for pod in pods
        for container in pod.containers
        if (sample := cgroups.get(container.cgroup)) is not None
        and sample.cpu_usage_ns is not None
        and sample.periods is None
    ]
    if not found:
        return ()
    above = found[0].rpartition("/")[0]
    remedy = (
        f"enable it in the groups above, the last of them: echo +cpu > /sys/fs/cgroup{above}/cgroup.subtree_control"
    )
    return (
        ComponentHealth(
            name="pod-controllers", ok=False, error=f"no cpu controller in {_names_text(found)}", remedy=remedy
        ),
    )


def _names_text(names: Sequence[str], separator: str = ", ") -> str:
    """As many as a person reads, and how many more there are."""
    more = [f"and {len(names) - MAX_NAMES_SHOWN} more"] if len(names) > MAX_NAMES_SHOWN else []
    return separator.join([*names[:MAX_NAMES_SHOWN], *more])


def _unrelated_cgroup_pairs(pods: tuple[Pod, ...], root: str) -> list[str]:
    """Batch cgroups whose priority says nothing to an online one: it holds among the children of one parent. Those below
    `root`, or that of a NUMA node, have its priority; those of the kubelet's lowest class have the least weight beside all
    others."""
    # The node's own daemons (system_cores) are neither.
    online = [container.cgroup for pod in pods if pod.qos.online for container in pod.containers]
    batch = [container.cgroup for pod in pods if pod.qos is QoSLevel.RECLAIMED for container in pod.containers]
    below = re.compile(rf"({re.escape(root)}(?:-\d+)?)/.*") if root else None
    tops = {found[1] if below is not None and (found := below.fullmatch(b)) else b for b in batch}
    return [f"{b} beside {o}" for b in sorted(tops) for o in online if not _yields_to(b, o)]


def _yields_to(batch: str, online: str) -> bool:
    found = _BEST_EFFORT_PREFIX.match(batch)
    return online.startswith(f"{batch.rpartition('/')[0]}/") or (found is not None and not online.startswith(found[0]))


def _read_probe(probe: Probe, live: Mapping[int, str], complete: bool) -> ProbeReading:
    """What a probe has seen. Raises ValueError where it names a field that no sample has: then none of it is believed."""
    seen = probe.read(live, complete=complete)
    named = {name for values in seen.cgroups.values() for name in values}
    if strange := sorted((named - CGROUP_FIELDS) | (seen.node.keys() - NODE_FIELDS)):
        raise ValueError(f"it gives {', '.join(strange)}, which no sample has")
    return seen


def _merge_probe_fields(sample: CgroupSample, wait: RunqLatency | None, seen: Mapping[str, object]) -> CgroupSample:
    """The sample with its wait and with what probes have seen of it."""
    # Where a version 2 cgroup has no cpu controller (then its cpu.stat has no periods), a probe counts its tasks as its
    # ancestor's: that it shows none is no zero.
    elsewhere = wait is not None and not wait.count and wait.slots is not None and sample.periods is None
    changes = seen if wait is None or elsewhere else {**seen, "wait": wait}
    return msgspec.structs.replace(sample, **changes) if changes else sample
