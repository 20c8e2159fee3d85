"""Scenarios of bench.colocation: pairs of workloads, on a kubelet's layout with the QoS classes of their pods."""

from __future__ import annotations

from fnmatch import fnmatch
from itertools import product
from typing import NamedTuple

import msgspec

from agent.sensors.cgroup.pod_cgroup_paths import BEST_EFFORT, BURSTABLE, GUARANTEED
from bench.colocation_layouts import FLAT, KUBELET
from demo.batch import BatchWork
from demo.schedule import ConstantRate, Schedule, random_bursts
from demo.workloads import FileReads, WorkloadSize

CALM_SHARE, BURST_SHARE, BURSTING = 0.3, 0.7, 0.25
"""Load between bursts and in bursts, and the share of time in bursts: 40 % of the node on average. With higher bursts of
memory work the node would be overloaded, and the latency would show only the length of the bursts."""
BURST_EVERY_S = 1.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of workloads."""

    name: str
    what: str
    load: float
    """Average share of all CPUs that the online service uses."""
    bursty: bool = False
    kind: BatchWork = BatchWork.CPU
    """What the batch job does; requests do the same kind of work."""
    burners: int = 1
    """Number of burners as a multiple of the usual one."""
    online: str = ""
    batch: str = ""
    """QoS classes of the pods on a kubelet's layout; empty on the flat one."""

    @property
    def layout(self) -> str:
        return KUBELET if self.online else FLAT

    @property
    def on_memory(self) -> bool:
        """Whether requests copy memory instead of using CPU time."""
        return self.kind in (BatchWork.MEMORY, BatchWork.STREAM)

    @property
    def reads(self) -> FileReads:
        """Return where requests read a file from."""
        return READS.get(self.kind, FileReads.NONE)

    def schedule(self, size: WorkloadSize, seconds: float, from_s: float) -> Schedule:
        """Return the requests of a cell whose measured time lasts `seconds` from `from_s` on; a steady rate before it."""
        if not self.bursty:
            return ConstantRate(rate=size.rate(self.load))
        drawn = random_bursts(
            size.rate(CALM_SHARE), size.rate(BURST_SHARE), period_s=seconds,
            count=max(round(seconds / BURST_EVERY_S), 1), on_share=BURSTING, seed=1,
        )  # fmt: skip
        return msgspec.structs.replace(drawn, from_s=from_s)


def steady(percent: int) -> Scenario:
    """A steady load with a batch job that computes."""
    return Scenario(
        name=f"steady-{percent}", what=f"{percent} % of the node, steadily; batch computes", load=percent / 100
    )


_BURSTS = f"{CALM_SHARE:.0%} of the node with bursts of {BURST_SHARE:.0%}, 40 % on average"
FLAT_SCENARIOS: tuple[Scenario, ...] = (
    *map(steady, (10, 20, 40, 60)),
    Scenario(name="memory", what="40 %, steadily; both work on memory", load=0.4, kind=BatchWork.STREAM),
    Scenario(name="bursty", what=f"{_BURSTS}; batch computes", load=0.4, bursty=True),
    Scenario(
        name="bursty-memory", what=f"{_BURSTS}; both work on memory", load=0.4, bursty=True, kind=BatchWork.STREAM
    ),
)
CURVE_SCENARIO = "bursty-memory"
"""Scenario of the trade-off: the worst interference and the least even load."""
READS = {BatchWork.PAGE_CACHE: FileReads.PAGE_CACHE, BatchWork.DISK: FileReads.DISK}
TASKS_FACTOR = 16
"""Burners in the load kind `tasks`, as a multiple of the usual number: 32 runnable tasks per CPU."""


class LoadKind(NamedTuple):
    """One kind of interference."""

    what: str
    work: BatchWork
    burners: int = 1


LOAD_KINDS = {
    "cpu": LoadKind("batch computes", BatchWork.CPU),
    "memory": LoadKind("both copy memory, limited by its bandwidth", BatchWork.MEMORY),
    "page-cache": LoadKind("batch writes and reads files in the page cache, requests read one", BatchWork.PAGE_CACHE),
    "disk": LoadKind("batch writes to and reads from the disk, requests read a block from it", BatchWork.DISK),
    "tasks": LoadKind(f"batch computes in {TASKS_FACTOR} times as many tasks", BatchWork.CPU, TASKS_FACTOR),
}
LOADS = {"10": 0.1, "40": 0.4, "60": 0.6, "bursty": 0.4}
ONLINE_CLASSES, BATCH_CLASSES = (GUARANTEED, BURSTABLE, BEST_EFFORT), (BEST_EFFORT, BURSTABLE)


def kubelet_scenario(online: str, batch: str, kind: str, load: str) -> Scenario:
    """Return the scenario `ONLINE-BATCH-KIND-LOAD`: classes of the pods, a key of LOAD_KINDS and one of LOADS."""
    bursty = load == "bursty"
    words = _BURSTS if bursty else f"{load} % of the node, steadily"
    return Scenario(
        name="-".join((online.lower(), batch.lower(), kind, load)),
        what=f"Online {online}, batch {batch}; {words}; {LOAD_KINDS[kind].what}",
        load=LOADS[load],
        bursty=bursty,
        kind=LOAD_KINDS[kind].work,
        burners=LOAD_KINDS[kind].burners,
        online=online,
        batch=batch,
    )


KUBELET_SCENARIOS = tuple(kubelet_scenario(*each) for each in product(ONLINE_CLASSES, BATCH_CLASSES, LOAD_KINDS, LOADS))
SCENARIOS_BY_NAME = {scenario.name: scenario for scenario in (*FLAT_SCENARIOS, *KUBELET_SCENARIOS)}
SCENARIOS_BY_LAYOUT = {
    layout: tuple(name for name, scenario in SCENARIOS_BY_NAME.items() if scenario.layout == layout)
    for layout in (KUBELET, FLAT)
}
DEFAULT_SCENARIOS = {
    FLAT: ("steady-60", "memory", "bursty"),
    # Every pair of classes at the highest load; the two usual ones with every kind of work.
    KUBELET: tuple(
        name
        for name in SCENARIOS_BY_LAYOUT[KUBELET]
        if name.endswith("-cpu-60")
        or name.startswith("burstable-besteffort-cpu-")
        or fnmatch(name, "burstable-*-cpu-bursty")
        or fnmatch(name, "burstable-*-[mpdt]*-40")
    ),
}
