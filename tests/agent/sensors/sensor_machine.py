"""A machine of one pod and one batch cgroup, with sources that answer what a test says, for the tests of the sensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.node.node_reader import NodeReader
from agent.sensors.pods.pod_indicators import PodIndicatorScraper
from agent.sensors.snapshot import Sensor
from api.interfaces import HealthReporter, Probe, ProbeReading, RunqLatencySource, Unavailable
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import ComponentHealth, RunqLatency, Snapshot
from tests.agent.sensors import kernel_trees
from tests.agent.sensors.machine_texts import PROC

WEB = Pod(
    uid="u", namespace="default", name="web", qos=QoSLevel.SHARED, containers=(Container(name="web", cgroup="/web"),)
)


class Pods:
    """A PodSource that does what the test tells it."""

    def __init__(self) -> None:
        self.answer: Callable[[], tuple[Pod, ...]] = lambda: (WEB,)

    def read(self) -> tuple[Pod, ...]:
        return self.answer()


class ScriptedReporter:
    """A HealthReporter with the problem and the lost events that a test sets."""

    name, form = "reporter", "tp_btf"

    def __init__(self) -> None:
        self.lost: Unavailable | None = None
        self.lost_events: int | None = None

    def problem(self) -> Unavailable | None:
        return self.lost

    def close(self) -> None:
        pass


class Waits(ScriptedReporter):
    """A RunqLatencySource that has waits of every live cgroup, or answers as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Callable[[Mapping[int, str]], Mapping[int, RunqLatency]] = lambda live: dict.fromkeys(
            live, RunqLatency(sum_ns=5, count=1)
        )
        self.requests: list[tuple[Collection[int] | None, bool]] = []

    def read(
        self, live: Mapping[int, str], cgroup_ids: Collection[int] | None = None, *, complete: bool = True
    ) -> Mapping[int, RunqLatency]:
        self.requests.append((cgroup_ids, complete))
        return self.answer(live)


class ScriptedProbe(ScriptedReporter):
    """A Probe that answers as a test says."""

    def __init__(self, name: str, answer: Callable[[Mapping[int, str]], ProbeReading]) -> None:
        super().__init__()
        self.name, self.answer = name, answer
        self.requests: list[bool] = []

    def read(self, live: Mapping[int, str], *, complete: bool = True) -> ProbeReading:
        self.requests.append(complete)
        return self.answer(live)


class Machine:
    """A hybrid machine with one cgroup, `/web`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        kernel_trees.make(root / "proc", PROC)
        kernel_trees.make(root / "sys", {"devices/system/cpu/online": "0-1\n"})
        self.hierarchy = kernel_trees.hybrid(root, (".", "web"), ("web",))
        self.pods, self.waits = Pods(), Waits()
        self.web_id = (root / "cpu/web").stat().st_ino

    def sensor(
        self,
        waits: RunqLatencySource | None = None,
        indicators: PodIndicatorScraper | None = None,
        limit: int = 4096,
        probes: Sequence[Probe] = (),
        reporters: Sequence[HealthReporter] = (),
        patience_ns: int = 0,
    ) -> Sensor:
        return Sensor(
            cgroups=CgroupReader(self.hierarchy, limit=limit),
            node=NodeReader(self.root / "proc", self.root / "sys", live=False),
            sys=self.root / "sys",
            pods=self.pods,
            waits=waits or self.waits,
            indicators=indicators or PodIndicatorScraper(),
            probes=probes,
            reporters=reporters,
            patience_ns=patience_ns,
        )


def status(snapshot: Snapshot, name: str) -> ComponentHealth:
    (result,) = (source for source in snapshot.sources if source.name == name)
    return result
