"""One Snapshot from all sources. Each source is read in a guard of its own: the others go on, and its failure is a fact.

A source that cannot give something says why and what to do; a bug in one is caught, shown with its text, and logged once.
Nothing is made up: what a source did not give this time is absent from this snapshot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from agent.sense.cgroups import CgroupReader
from agent.sense.indicators import Indicators
from agent.sense.node import NodeReader
from agent.sense.schedstat import SchedstatWaits
from agent.sense.topology import online_text, read_topology
from api.cpus import Topology
from api.facts import Wait
from api.pods import Pod
from api.ports import PodSource, Unavailable, WaitSource
from api.samples import CgroupSample, Indicator, NodeSample, Snapshot, SourceStatus

log = logging.getLogger(__name__)
T = TypeVar("T")
NO_WAITS: tuple[Mapping[int, Wait], Unavailable | None] = ({}, None)
MOST_NAMED = 3
MOST_LOGGED = 100
"""So many different failures are logged, each once; in the snapshots every one of them is shown every time."""


class Sensor:
    """Reads every source once per `snapshot`. The readers are their owner's to close."""

    def __init__(
        self,
        *,
        cgroups: CgroupReader,
        node: NodeReader,
        sys: Path,
        pods: PodSource,
        waits: WaitSource,
        indicators: Indicators,
    ) -> None:
        self._cgroups, self._node, self._sys = cgroups, node, sys
        self._pods, self._waits, self._indicators = pods, waits, indicators
        self._live: dict[int, str] = {}
        self._ids: dict[str, int] = {}
        self._known_pods: tuple[Pod, ...] = ()
        self._known_topology = Topology(cpus=())
        self._online = ""
        self._statuses: list[SourceStatus] = []
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
        waits, problem = self._guard("waits", lambda: self._all_waits(complete), NO_WAITS, self._waits.form)
        if problem is not None:
            status = self._statuses.pop()
            self._statuses.append(
                msgspec.structs.replace(status, ok=False, error=problem.reason, remedy=problem.remedy)
            )
        cgroups = {path: _with_wait(sample, waits.get(sample.id)) for path, sample in cgroups.items()}
        indicators: Mapping[str, Indicator] = self._guard("indicators", self._indicators.latest, {})
        self._statuses.extend((*self._silent_pods(), *_homeless(self._known_pods, cgroups)))
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

    def read_waits(self) -> Mapping[int, Wait]:
        """Waits of online pods alone, by cgroup id: cheap enough for ten times a second.

        The pods and cgroups are those of the last snapshot. Empty where the next one will say why.
        """
        try:
            return self._waits.read(self._live, self._pods_ids(online=True), complete=False)
        except Unavailable:
            return {}
        except Exception as failure:
            if self._is_new("waits", f"{type(failure).__name__}: {failure}"):
                log.exception("source waits failed between two rounds")
            return {}

    def _all_waits(self, complete: bool) -> tuple[Mapping[int, Wait], Unavailable | None]:
        # A probe has the waits of every cgroup at hand; schedstat pays for every thread, so only pods are worth it.
        wanted = self._pods_ids() if self._waits.form == SchedstatWaits.form else None
        return self._waits.read(self._live, wanted, complete=complete), self._waits.problem()

    def _pods_ids(self, *, online: bool = False) -> frozenset[int]:
        pods = (pod for pod in self._known_pods if pod.qos.online or not online)
        paths = (container.cgroup for pod in pods for container in pod.containers)
        return frozenset(self._ids[path] for path in paths if path in self._ids)

    def _topology(self) -> Topology:
        """Read anew only when CPUs came or went: on a large node it is a thousand files."""
        online = online_text(self._sys)
        if online != self._online or not self._known_topology.cpus:
            self._online = online
            return read_topology(self._sys)
        return self._known_topology

    def _silent_pods(self) -> tuple[SourceStatus, ...]:
        errors = self._indicators.errors()
        if not errors:
            return ()
        error = "; ".join(f"{pod}: {reason}" for pod, reason in sorted(errors.items())[:MOST_NAMED])
        if len(errors) > MOST_NAMED:
            error += f"; and {len(errors) - MOST_NAMED} more"
        remedy = "mend the annotations or the endpoint of these pods"
        return (SourceStatus(name="indicator-pods", ok=False, error=error, remedy=remedy),)

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
            SourceStatus(
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
        if (name, error) in self._logged or len(self._logged) >= MOST_LOGGED:
            return False
        self._logged.add((name, error))
        return True


def _homeless(pods: tuple[Pod, ...], cgroups: Mapping[str, CgroupSample]) -> tuple[SourceStatus, ...]:
    """One line on listed containers whose cgroup is not there: a typo in it would silently leave a pod unprotected."""
    missing = [
        f"{container.cgroup} of {pod.key}"
        for pod in pods
        for container in pod.containers
        if container.cgroup not in cgroups
    ]
    if not missing or not cgroups:
        return ()
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    remedy = "start the pod, or mend the path in the pods file: it is that below the cgroup root, as in /web"
    return (SourceStatus(name="pod-cgroups", ok=False, error=f"there is no cgroup {shown}", remedy=remedy),)


def _with_wait(sample: CgroupSample, wait: Wait | None) -> CgroupSample:
    # Where a version 2 cgroup has no cpu controller (then its cpu.stat has no periods), a probe counts its tasks as its
    # ancestor's: that it shows none is no zero.
    elsewhere = wait is not None and not wait.count and wait.slots is not None and sample.periods is None
    return sample if wait is None or elsewhere else msgspec.structs.replace(sample, wait=wait)
