"""Runs and measures one cell of the colocation benchmark: one mode in one scenario, in fresh cgroups."""

from __future__ import annotations

import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import fmean

import msgspec

from agent.config.profiles import with_defaults
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import JournalEntry, OutcomeStatus
from api.histogram import quantile_ns
from api.rates import runq_latency_delta
from api.snapshot import RunqLatency
from api.units import NS_PER_MS, NS_PER_S
from bench.colocation_layouts import CellCgroups, flat_cgroups, kubelet_cgroups
from bench.colocation_modes import ColocationMode, ModeKnobs
from bench.colocation_scenarios import Scenario
from bench.machine import TICKS_PER_S, NodeTimes, children_of, cpu_ns_of, node_times, wait_until_ready
from cli.agent_process import AgentExited, AgentProcess, free_port
from demo.counters import ClientCell
from demo.schedule import Schedule
from demo.workloads import DemoWorkloads, WorkloadSize
from exporters.view.cycle_view import View

WARMUP_S = 2.0
DISK = "/var/tmp"
"""A directory on a disk, unlike /tmp on many machines, for the files of the workloads."""
AGENT_WARMUP_S = 12.0
"""After a breach the agent grows the reclaimable CPU by 10 % of the node a second; the steady state is measured."""


MAX_QUIET_OTHERS, MAX_QUIET_STOLEN = 0.03, 0.003
"""Shares of the node used by other processes and stolen by the hypervisor from which on a cell counts as disturbed. From 0.3 %
stolen on, cells have a stall of 100 ms (a quota of the host), which is their p99."""


class MeasurementNoise(msgspec.Struct, frozen=True):
    """Shares of all CPU time. With an agent, of the warm-up too if larger: the agent's state depends on it."""

    others: float
    """Share used by neither the workloads nor the client nor the agent."""
    stolen: float
    """Share taken by the hypervisor."""

    def or_worse(self, other: MeasurementNoise) -> MeasurementNoise:
        """Return the larger value of each share."""
        return MeasurementNoise(max(self.others, other.others), max(self.stolen, other.stolen))

    def level(self) -> float:
        """Return how disturbed the cell was, as a multiple of what is tolerated."""
        return max(self.others / MAX_QUIET_OTHERS, self.stolen / MAX_QUIET_STOLEN)


class AgentActivity(msgspec.Struct, frozen=True):
    """What the agent did in the measured time."""

    reclaimable_cores: float = msgspec.field(name="lent_cores")
    """Average over the agent's cycles."""
    changes: int
    """Number of values changed."""


class RunqLatencyQuantiles(msgspec.Struct, frozen=True):
    """Milliseconds; quantiles are None if the source has sums only."""

    mean_ms: float
    p50_ms: float | None
    p99_ms: float | None
    p999_ms: float | None


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one cell. Latencies include lost requests, with their age at the timeout."""

    mode: str
    scenario: str
    round: int
    seconds: float
    requests: int
    lost: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    units_per_s: float
    node_use: float
    """Busy share of all CPU time, 0 to 1."""
    online_us: float
    """CPU time of the service for one request."""
    client_cores: float
    lag_us: float
    """Average delay of the client's requests."""
    agent_cores: float = 0.0
    """CPU of the agent's processes; its BPF programs run in the tasks of others."""
    noise: MeasurementNoise
    lending: AgentActivity | None = None
    """Only with an agent."""
    waits: RunqLatencyQuantiles | None = None
    """Run-queue latency of the online cgroup, if requested."""


class CounterMarks(msgspec.Struct, frozen=True):
    """Counters at one end of the measured time."""

    wall_ns: int
    units: int
    node: NodeTimes
    online_ns: int
    client_ns: int
    batch_ns: int
    agent_ns: int
    answered: int
    wait: RunqLatency | None


RunqLatencyReader = Callable[[int], RunqLatency | None]
"""Return the cumulative run-queue latency of the cgroup with this id."""


def quantile_ms(latencies_ns: Sequence[int], q: float) -> float:
    """Return the q-quantile of sorted latencies: the nearest sample, without interpolation."""
    if not latencies_ns:
        return float("nan")
    return latencies_ns[min(len(latencies_ns) - 1, int(q * len(latencies_ns)))] / NS_PER_MS


class CellSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that all cells of a run share."""

    hierarchy: Hierarchy
    cpus: tuple[int, ...]
    size: WorkloadSize
    pieces: int
    """Memory work that costs as much as a request on an idle machine."""
    seconds: float
    """Measured time of a cell, after its warm-up."""
    waits: RunqLatencyReader | None = None


class RunningCell(msgspec.Struct, frozen=True):
    """The workloads in their cgroups, and the agent if the mode has one."""

    groups: CellCgroups
    loads: DemoWorkloads
    agent: AgentProcess | None
    samples: Path
    """File that the client writes at its end."""


@contextmanager
def running_cell(
    bed: CellSetup, mode: ColocationMode, scenario: Scenario, schedule: Schedule, **client: object
) -> Iterator[RunningCell]:
    """Start everything of one cell in new cgroups; stop and remove it at the end."""
    size = msgspec.structs.replace(bed.size, burners=scenario.burners * bed.size.burners)
    with cell_cgroups(bed, scenario) as groups, tempfile.TemporaryDirectory(prefix="dioptase-bench-", dir=DISK) as name:
        directory = Path(name)
        loads = DemoWorkloads(size, directory, groups.procs(groups.online), groups.procs(groups.batch))
        agent: AgentProcess | None = None
        try:
            if mode.write_knobs is not None:
                mode.write_knobs(ModeKnobs(bed.hierarchy, groups, bed.cpus, scenario.load))
            if mode.agent_config is not None:
                # Before the load: the child that compiles the probes has a low priority, and the load would delay it for long.
                agent = start_agent(directory, groups, mode.agent_config)
            loads.start_online(pieces=bed.pieces if scenario.on_memory else None, reads=scenario.reads)
            if mode.batch:
                loads.start_batch(idle=mode.sched_idle, kind=scenario.kind)
            samples = directory / "samples"
            loads.start_client(schedule, samples=samples, **client)  # type: ignore[arg-type]
            yield RunningCell(groups, loads, agent, samples)
        finally:
            loads.stop()
            if agent is not None:
                agent.stop()
            loads.close()


def cell_cgroups(bed: CellSetup, scenario: Scenario) -> AbstractContextManager[CellCgroups]:
    """Return the cgroups of the scenario's layout, which exist within the `with` block."""
    if not scenario.online:
        return flat_cgroups(bed.hierarchy)
    return kubelet_cgroups(bed.hierarchy, bed.size.cpus, online=scenario.online, batch=scenario.batch)


def start_agent(directory: Path, groups: CellCgroups, config: str) -> AgentProcess:
    """Start the real agent, acting on the bench's pods; returns when a cycle is finished and the probes are loaded."""
    document = with_defaults(msgspec.yaml.decode(config) or {}, groups.settings)
    (directory / "pods.yaml").write_text(groups.pods)
    (directory / "agent.yaml").write_bytes(msgspec.yaml.encode(document))
    files = (("--pods", "pods.yaml"), ("--config", "agent.yaml"), ("--state-dir", "state"))
    options = [text for option, name in files for text in (option, str(directory / name))]
    with (directory / "agent.log").open("wb") as log:
        agent = AgentProcess(
            [*options, *groups.agent_options], port=free_port(), output=log, procs=groups.procs(groups.agent)
        )
    try:
        wait_until_ready(agent)
    except AgentExited as error:
        agent.stop()
        lines = (directory / "agent.log").read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"{error}: {' / '.join(lines[-3:])}") from error
    return agent


def measure_cell(bed: CellSetup, mode: ColocationMode, scenario: Scenario, round_number: int) -> CellResult:
    """Measure one cell."""
    warmup, seconds = warmup_s(mode), bed.seconds
    schedule = scenario.schedule(bed.size, seconds, warmup)
    client: dict[str, object] = {"duration_s": warmup + seconds + 0.5, "seed": round_number, "warmup_s": warmup}
    with running_cell(bed, mode, scenario, schedule, **client) as running:
        loads, agent = running.loads, running.agent
        cgroup_id = running.groups.directories(running.groups.online)[0].stat().st_ino
        while not loads.client[ClientCell.STARTED_NS]:
            time.sleep(0.01)
        began = _mark(loads, agent, cgroup_id, None)
        time.sleep(warmup)
        before = _mark(loads, agent, cgroup_id, bed.waits)
        time.sleep(seconds)
        after = _mark(loads, agent, cgroup_id, bed.waits)
        if code := loads.process("client").wait(60):
            raise RuntimeError(f"the client ended with exit code {code}")
        pairs = array("Q", running.samples.read_bytes())
        lag_us = loads.client[ClientCell.LAG_NS] / max(loads.client[ClientCell.SENT], 1) / 1000
        sent = (lag_us, loads.client[ClientCell.LOST])
        lending = _agent_activity(agent, before.wall_ns, after.wall_ns) if agent else None
    inside = [
        latency for due, latency in zip(pairs[::2], pairs[1::2], strict=True) if before.wall_ns <= due < after.wall_ns
    ]
    numbers = _cell_numbers((mode.name, scenario.name, round_number), (before, after), sorted(inside), sent)
    # The warm-up makes the interval longer, which could hide a disturbance of the measured part: take the worse of both.
    noise = numbers.noise.or_worse(_noise(began, after)) if agent else numbers.noise
    return msgspec.structs.replace(numbers, noise=noise, lending=lending)


def warmup_s(mode: ColocationMode) -> float:
    """Seconds that a cell of this mode runs before it is measured."""
    return WARMUP_S if mode.agent_config is None else AGENT_WARMUP_S


def _agent_activity(agent: AgentProcess, from_ns: int, until_ns: int) -> AgentActivity | None:
    views = msgspec.json.decode(agent.get("/api/v1/history?after=0", 10) or b"[]", type=list[View])
    reclaimable = [
        view.reclaimable_cores
        for view in views
        if from_ns <= view.wall_time_ms * NS_PER_MS < until_ns and view.reclaimable_cores
    ]
    entries = msgspec.json.decode(agent.get("/api/v1/decisions?limit=2000", 10) or b"[]", type=list[JournalEntry])
    applied = [e for e in entries if e.outcome.status is OutcomeStatus.APPLIED and from_ns <= e.wall_time_ns < until_ns]
    return AgentActivity(fmean(reclaimable), len(applied)) if reclaimable else None


OWN_TIMES = ("online_ns", "client_ns", "batch_ns", "agent_ns")


def _noise(before: CounterMarks, after: CounterMarks) -> MeasurementNoise:
    total = max(after.node.total - before.node.total, 1)
    known_ns = sum(getattr(after, name) - getattr(before, name) for name in OWN_TIMES)
    busy = (after.node.busy - before.node.busy) / total
    return MeasurementNoise(
        busy - known_ns / NS_PER_S / (total / TICKS_PER_S), (after.node.stolen - before.node.stolen) / total
    )


def _mark(
    loads: DemoWorkloads, agent: AgentProcess | None, cgroup_id: int, waits: RunqLatencyReader | None
) -> CounterMarks:
    online = loads.process("online").pid
    return CounterMarks(
        time.time_ns(),
        loads.units(),
        node_times(),
        _family_cpu_ns(online),
        cpu_ns_of(loads.process("client").pid),
        _family_cpu_ns(loads.process("batch").pid) if loads.has("batch") else 0,
        _family_cpu_ns(agent.pid) if agent else 0,
        loads.client[ClientCell.ANSWERED],
        waits(cgroup_id) if waits else None,
    )


def _family_cpu_ns(pid: int) -> int:
    return sum(cpu_ns_of(member) for member in (pid, *children_of(pid)))


def _cell_numbers(
    which: tuple[str, str, int],
    marks: tuple[CounterMarks, CounterMarks],
    latencies: list[int],
    client: tuple[float, int],
) -> CellResult:
    (mode, scenario, number), (before, after) = which, marks
    seconds = (after.wall_ns - before.wall_ns) / NS_PER_S
    total = max(after.node.total - before.node.total, 1)
    return CellResult(
        mode=mode,
        scenario=scenario,
        round=number,
        seconds=seconds,
        requests=len(latencies),
        lost=client[1],
        p50_ms=quantile_ms(latencies, 0.5),
        p99_ms=quantile_ms(latencies, 0.99),
        p999_ms=quantile_ms(latencies, 0.999),
        units_per_s=(after.units - before.units) / seconds,
        node_use=(after.node.busy - before.node.busy) / total,
        noise=_noise(before, after),
        online_us=(after.online_ns - before.online_ns) / max(after.answered - before.answered, 1) / 1000,
        client_cores=(after.client_ns - before.client_ns) / NS_PER_S / seconds,
        lag_us=client[0],
        agent_cores=(after.agent_ns - before.agent_ns) / NS_PER_S / seconds,
        waits=_runq_latency_quantiles(before.wait, after.wait),
    )


def _runq_latency_quantiles(before: RunqLatency | None, after: RunqLatency | None) -> RunqLatencyQuantiles | None:
    wait = runq_latency_delta(before, after)
    if wait is None or not wait.count:
        return None
    quantiles = [quantile_ns(wait.slots, q) if wait.slots is not None else None for q in (0.5, 0.99, 0.999)]
    return RunqLatencyQuantiles(
        wait.sum_ns / wait.count / NS_PER_MS, *(None if ns is None else ns / NS_PER_MS for ns in quantiles)
    )
