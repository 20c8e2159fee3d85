"""The `dioptase demo` command: runs an online service and a batch job on this machine with the agent.
Everything started here is stopped here, in this order: workloads, agent (which restores every value), cgroups.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import click
import msgspec
from click.core import ParameterSource

from agent.qrm.actuator.state_dir import default_state_dir, demo_state_dir
from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.decision import ActMode, JournalEntry, OutcomeStatus
from api.eviction import EvictionEntry
from api.interfaces import Unavailable
from api.text import quote
from api.units import NS_PER_S
from cli.agent_process import AGENT_COMMAND, AgentExited, AgentProcess, free_port, is_port_free
from cli.formats import decision_line
from cli.options import DEFAULT_LISTEN, Seconds, parse_listen
from cli.top.live import run_top
from cli.top.summary import cycle_line
from demo.cgroups import CgroupInUse, DemoCgroups
from demo.counters import ClientCell
from demo.run_directory import remove_abandoned_directories, run_directory
from demo.summary import (
    PHASE_ALONE,
    PHASE_SPIKE,
    PHASE_WITH_BATCH,
    OtherCpuUse,
    PhaseTotals,
    RunningMean,
    busy_machine_warning,
    other_cpu_use_line,
    summary_table,
)
from demo.workloads import (
    BURNER_REQUEST_MIB,
    LATENCY_METRIC,
    PEAK_SHARE,
    DemoMetricsServer,
    DemoWorkloads,
    WorkloadSize,
    allowed_cpu_count,
    demo_wave,
    size_for,
)
from exporters.view.cycle_view import View

BASELINE_S = 10.0
"""The service first runs without the batch job, as the baseline; shorter in short runs."""
TICK_S, POLL_S, STATUS_S = 0.25, 1.0, 10.0
BATCH_RESTART_S = 10.0
"""After an eviction the batch job is started again, as a controller would do."""
EVICTION_REPORTED_WITHIN_S = 3.0
"""The agent must report an eviction within this time after the batch job ended; otherwise the demo failed."""
BATCH = "demo/batch"


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the command line, and names that tests replace."""

    duration_s: float | None
    act: ActMode
    host: str
    port: int
    config: Path | None = None
    """Settings of the agent (YAML)."""
    command: Sequence[str] = AGENT_COMMAND
    """Command that runs the agent; its options are appended."""
    online: str = "dioptase-demo-online"
    batch: str = "dioptase-demo-batch"
    """Names of the two cgroups."""
    record: Path | None = None
    """Directory into which the agent records its cycles."""

    @property
    def alone_s(self) -> float:
        return BASELINE_S if self.duration_s is None else min(BASELINE_S, self.duration_s / 6)


class StopCondition:
    """Whether a signal has arrived or the duration is over."""

    def __init__(self, duration_s: float | None) -> None:
        self._deadline = None if duration_s is None else time.monotonic() + duration_s
        self._reason: str | None = None
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._catch)

    def _catch(self, signum: int, _frame: FrameType | None) -> None:
        self._reason = signal.Signals(signum).name

    def __call__(self) -> bool:
        return self._reason is not None or self._is_expired()

    def _is_expired(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def reason(self) -> str:
        """Why the demo ends; in the live view the user may also have pressed q."""
        return self._reason or ("the duration is over" if self._is_expired() else "requested by the user")


class DemoView:
    """Prints or shows the demo while it runs, and collects the numbers of its summary."""

    def __init__(self, loads: DemoWorkloads, agent: AgentProcess, *, live: bool) -> None:
        self._loads, self._agent, self._wave, self._live = loads, agent, demo_wave(loads.size), live
        self._seq = self._evicted_seq = 0
        self._batch_at = 0.0
        self._batch_ended_at: float | None = None
        self._polled = self._status_said = time.monotonic()
        self.failure: str | None = None
        """Why the demo failed: a process ended by itself; None otherwise."""
        self.totals, self.reclaimable, self.used = PhaseTotals(), RunningMean(), RunningMean()
        self.outcomes: Counter[tuple[OutcomeStatus, str]] = Counter()
        """Number of decisions by outcome and knob."""
        self.evictions: list[str] = []
        """Reason of each eviction of the batch job."""

    def run(self, stop: StopCondition, alone_s: float) -> None:
        """Watch until `stop` returns true, or until a process ends by itself."""
        self._batch_at = time.monotonic() + alone_s

        def over() -> bool:
            if not self._loads.has("batch") and time.monotonic() >= self._batch_at:
                self._loads.start_batch()
                self._say(f"demo: batch job started: {self._loads.size.burners} processes that use all CPU they get")
            self.look()
            return stop() or self._failed()

        if self._live:
            run_top(self._agent.url, on_tick=over)
        else:
            while not over():
                time.sleep(TICK_S)

    def _failed(self) -> bool:
        code = self._agent.ended()
        if code is not None:
            self.failure = f"the agent ended by itself with exit code {code}"
        elif self._loads.has_ended("batch") and self._may_be_evicted():
            return False
        else:
            self.failure = self._loads.ended()
        return self.failure is not None

    def _may_be_evicted(self) -> bool:
        """Whether the batch job's end was an eviction, or may still be reported as one."""
        now = time.monotonic()
        if self._batch_ended_at is None:
            self._batch_ended_at = now
        body = self._agent.get(f"/api/v1/evictions?pod={BATCH}&after={self._evicted_seq}")
        entries = msgspec.json.decode(body, type=list[EvictionEntry]) if body else []
        why = next((e.victim.reason.text for e in entries if e.victim is not None and not e.victim.dry_run), None)
        if why is None:
            return now - self._batch_ended_at < EVICTION_REPORTED_WITHIN_S
        self._evicted_seq, self._batch_ended_at, self._batch_at = entries[-1].seq, None, now + BATCH_RESTART_S
        self.evictions.append(why)
        self._loads.forget("batch")
        self._say(f"demo: the batch job was evicted and restarts in {BATCH_RESTART_S:g} s: {why}")
        return True

    def _say(self, text: str) -> None:
        if not self._live:
            click.echo(text)

    def look(self) -> None:
        """Read the counters, and once a second the agent's decisions and view."""
        now = time.monotonic()
        self.totals.read(self._phase(), now, self._loads.client.values(), self._loads.units())
        if now - self._polled >= POLL_S:
            self._polled = now
            self.read_decisions()
            self._read_view()

    def _phase(self) -> str:
        started_ns = self._loads.client[ClientCell.STARTED_NS]
        running_s = (time.time_ns() - started_ns) / NS_PER_S if started_ns else 0.0
        if not self._loads.has("batch"):
            return PHASE_ALONE
        return PHASE_SPIKE if self._wave.in_spike(max(running_s - TICK_S / 2, 0.0)) else PHASE_WITH_BATCH

    def read_decisions(self) -> None:
        """Count and print the new decisions."""
        body = self._agent.get(f"/api/v1/decisions?after={self._seq}&limit=500")
        for entry in msgspec.json.decode(body, type=list[JournalEntry]) if body else ():
            self._seq = entry.seq
            self.outcomes[entry.outcome.status, entry.outcome.decision.knob.value] += 1
            self._say(decision_line(entry))

    def _read_view(self) -> None:
        body = self._agent.get("/api/v1/view")
        if body is None:
            return
        view = msgspec.json.decode(body, type=View)
        self.reclaimable.add(view.reclaimable_cores)
        self.used.add(view.reclaimed_cores)
        if time.monotonic() - self._status_said >= STATUS_S:
            self._status_said = time.monotonic()
            self._say(cycle_line(view))


def _cores_text(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def demo_summary(show: DemoView, cpus: int, other_cores: float = 0.0, node_cpus: int = 1) -> Iterator[str]:
    """Yield the summary line by line. `other_cores` is the CPU use of other processes on all `node_cpus`; the demo may use
    `cpus` of these."""
    if (warned := busy_machine_warning(other_cores, node_cpus)) is not None:
        yield warned
    yield from summary_table(show.totals)
    if (crowd := other_cpu_use_line(other_cores, node_cpus)) is not None:
        yield crowd
    reclaimable, used = _cores_text(show.reclaimable.value), _cores_text(show.used.value)
    yield f"{'CPU lent':<15}{reclaimable} of {cpus} cores on average, of which the batch job used {used}"
    changes = Counter(
        {knob: count for (status, knob), count in show.outcomes.items() if status is OutcomeStatus.APPLIED}
    )
    listed = ", ".join(f"{knob} {count}" for knob, count in changes.most_common())
    yield f"{'changes':<15}{changes.total()}{f' ({listed})' if listed else ''}"
    others = Counter(dict.fromkeys(OutcomeStatus, 0))
    for (status, _), count in show.outcomes.items():
        others[status] += count
    if show.evictions:
        yield f"{'evictions':<15}{len(show.evictions)} of the batch job: {show.evictions[-1]}"
    for status in (OutcomeStatus.DRY_RUN, OutcomeStatus.REFUSED, OutcomeStatus.MISMATCH, OutcomeStatus.VANISHED):
        if others[status]:
            yield f"{'':<15}{others[status]} {status.value}"


def restore_cgroups(groups: DemoCgroups | None) -> tuple[bool, str]:
    """Compare every value with the one before the demo, then remove the cgroups. Returns whether all are equal, and a line."""
    if groups is None:
        return True, f"{'cgroups':<15}none were created or changed"
    changed = groups.changed_knobs()
    compared = groups.knobs
    groups.remove()
    if not changed:
        return True, f"{'cgroups':<15}restored ({compared} values compared, none differs) and removed"
    listed = "; ".join(f"{path} was {quote(then)}, is {quote(now)}" for path, (then, now) in changed.items())
    return False, f"{'cgroups':<15}removed with {len(changed)} of {compared} values not restored: {listed}"


def print_line(text: str) -> None:
    click.echo(f"demo: {text}")


def pods_file(settings: DemoSettings, size: WorkloadSize, metrics_port: int) -> str:
    """Return the pods file of the two workloads; the service requests the CPU of its highest peak."""
    request = f"{round(1000 * PEAK_SHARE * size.cpus)}m"
    return f"""pods:
- name: online
  namespace: demo
  annotations:
    katalyst.kubewharf.io/qos_level: shared_cores
    prometheus.io/scrape: "true"
    prometheus.io/port: "{metrics_port}"
    dioptase.io/latency-metric: {LATENCY_METRIC}
  containers:
  - name: online
    cgroup: /{settings.online}
    resources: {{requests: {{cpu: {request}}}}}
- name: batch
  namespace: demo
  annotations:
    katalyst.kubewharf.io/qos_level: reclaimed_cores
  containers:
  - name: batch
    cgroup: /{settings.batch}
    resources: {{requests: {{memory: {BURNER_REQUEST_MIB * (size.burners + 1)}Mi}}}}
"""


def make_cgroups(settings: DemoSettings) -> DemoCgroups | None:
    """Create the demo's cgroups; None, with a warning, if this machine or the user's rights forbid it. Raises CgroupInUse."""
    try:
        hierarchy = detect_hierarchy()
        groups = DemoCgroups.make(hierarchy.v1, hierarchy.v2, (settings.online, settings.batch))
    except CgroupInUse:
        raise
    except Unavailable as error:
        print_line(f"! {error.reason}: the workloads run without cgroups of their own, the agent runs dry")
        print_line(f"! remedy: {error.remedy}")
        return None
    for note in groups.notes:
        print_line(note)
    print_line(
        f"created cgroups /{settings.online} and /{settings.batch} ({hierarchy.mode}, {len(groups.mounts)} hierarchies)"
    )
    return groups


def run_demo(settings: DemoSettings) -> int:
    """Run the demo; return the exit status."""
    try:
        return _run_demo(settings)
    except Unavailable as error:
        click.echo(f"dioptase demo: {error.reason}\n  remedy: {error.remedy}", err=True)
        return 1


def _run_demo(settings: DemoSettings) -> int:
    stop, size = StopCondition(settings.duration_s), size_for(allowed_cpu_count())
    others = OtherCpuUse(time.monotonic())
    with ExitStack() as stack:
        groups = make_cgroups(settings)
        if groups is not None:
            stack.callback(groups.remove)
        temporary = Path(tempfile.gettempdir())
        for abandoned in remove_abandoned_directories(temporary):
            print_line(f"removed {abandoned}, left by a demo that was killed")
        directory = stack.enter_context(run_directory(temporary))
        procs = [groups.procs(name) if groups else [] for name in (settings.online, settings.batch)]
        loads = DemoWorkloads(size, directory, *procs)
        stack.callback(loads.close)
        metrics = DemoMetricsServer(loads.client, loads.batch)
        stack.callback(metrics.close)
        (directory / "pods.yaml").write_text(pods_file(settings, size, metrics.port))
        act = ActMode.DRY_RUN if groups is None and settings.act is ActMode.ON else settings.act
        options = ["--pods", str(directory / "pods.yaml"), "--state-dir", str(_state_dir()), "--act", act.value]
        options += [] if settings.config is None else ["--config", str(settings.config.absolute())]
        options += ["--record", str(settings.record)] if settings.record is not None else []
        log = stack.enter_context((directory / "agent.log").open("wb"))
        agent = AgentProcess(options, host=settings.host, port=settings.port, output=log, command=settings.command)
        stack.callback(agent.stop)
        show = DemoView(loads, agent, live=sys.stdout.isatty())
        show.failure = _start_workloads(loads, agent, act, stop)
        if show.failure is None:
            show.run(stop, settings.alone_s)
        if show.failure:
            click.echo(
                f"demo: {show.failure}; the end of the agent's log:\n{_log_tail(directory / 'agent.log')}", err=True
            )
        print_line(f"ending: {show.failure or stop.reason}")
        show.look()
        show.read_decisions()
        loads.stop()
        agent.stop()
        restored, line = restore_cgroups(groups)
        crowd = others.cores(time.monotonic())
        for text in (*demo_summary(show, size.cpus, crowd, os.cpu_count() or size.cpus), line):
            click.echo(text)
    return 0 if restored and not show.failure else 1


def _state_dir() -> Path:
    """A state directory that `dioptase reset` knows, in case the demo is killed; deletes the journals of an earlier demo."""
    state_dir = demo_state_dir(default_state_dir())
    for journal in ("decisions", "evictions"):
        for earlier in state_dir.glob(f"{journal}.jsonl*"):
            earlier.unlink(missing_ok=True)
    return state_dir


def _start_workloads(loads: DemoWorkloads, agent: AgentProcess, act: ActMode, stop: StopCondition) -> str | None:
    """Start service, agent and load; return a sentence about what failed, if anything."""
    size, wave = loads.size, demo_wave(loads.size)
    print_line("starting the agent, which compiles its kernel probes: usually less than 20 s, at most 90 s")
    loads.start_online()
    try:
        agent.wait_healthy(stop)
    except AgentExited as error:
        return str(error)
    print_line(f"agent with --act {act.value}: page, /metrics and API at {agent.url}")
    loads.start_client(wave)
    print_line(
        f"online service started: {size.workers} workers, {size.service_us} us of CPU a request, {wave.low:,.0f} to "
        f"{wave.high:,.0f} requests/s within {wave.period_s:g} s, with {wave.spike_s:g} s of {wave.spike:,.0f}/s"
    )
    return None


def _log_tail(path: Path, lines: int = 20) -> str:
    return "\n".join(f"  {line}" for line in path.read_text(errors="replace").splitlines()[-lines:])


@click.command()
@click.option("--duration", type=Seconds(min=0, min_open=True), help="End after this many seconds.")
@click.option(
    "--act", type=click.Choice([act.value for act in ActMode]), default=ActMode.ON.value, show_default=True,
    help="off: only measure. dry-run: decide, but write nothing. on: write to cgroups.",
)  # fmt: skip
@click.option("--listen", default=DEFAULT_LISTEN, show_default=True, help="Address of page, API and metrics.")
@click.option(
    "--config", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Settings of the agent (YAML), see docs/settings.md; docs/eviction.md has an example.",
)  # fmt: skip
@click.option("--record", type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    help="Record the agent's cycles into this directory, for `dioptase replay`.")  # fmt: skip
@click.pass_context
def demo(
    ctx: click.Context, duration: float | None, act: str, listen: str, config: Path | None, record: Path | None
) -> None:
    """Run an online service and a batch job on this machine, with the agent between them. Ctrl-C ends it."""
    host, port = parse_listen(listen)
    if port == 0:
        port = free_port(host)
    elif not is_port_free(host, port):
        if ctx.get_parameter_source("listen") is not ParameterSource.DEFAULT:
            raise click.UsageError(
                f"--listen: {listen} is in use; stop the program that uses it, or choose another port"
            )
        port = free_port(host)
        print_line(f"port {DEFAULT_LISTEN} is in use: using {port}")
    sys.exit(
        run_demo(
            DemoSettings(duration_s=duration, act=ActMode(act), host=host, port=port, config=config, record=record)
        )
    )
