"""`dioptase demo`: two ordinary workloads on this machine, the agent between them, and at the end what came of it.

The demo is a user like any other: it makes two cgroups, writes a pods file and runs `dioptase agent` on it. What starts
here ends here, in order: workloads, agent (which puts every value back itself), cgroups.
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

from agent.hierarchy import detect
from agent.qrm.originals import default_state_dir, demo_state_dir
from api.catalogue import NS_PER_S
from api.decisions import Act, JournalEntry, Status
from api.evictions import EvictionEntry
from api.ports import Unavailable
from cli.child import COMMAND, AgentChild, AgentEnded, free_port, is_free
from cli.options import DEFAULT_LISTEN, Seconds, parse_listen
from cli.top import decision_line, round_line, run_top
from demo.cgroups import DemoCgroups, Occupied
from demo.counters import Cell
from demo.metrics import LATENCY_METRIC, MetricsServer
from demo.others import Others, told, warning
from demo.summary import ALONE, BESIDE, SPIKE, Mean, Tally, table
from demo.workloads import BURNER_MIB, PEAK_SHARE, Size, Workloads, demo_wave, own_cpus, size_for
from exporters.view import View

ALONE_S = 10.0
"""The service first runs without the batch job, to have something to compare with; shorter in short runs."""
TICK_S, POLL_S, STATUS_S = 0.25, 1.0, 10.0
AGAIN_S = 10.0
"""After an eviction the batch job is started again, as its controller would."""
KNOWN_WITHIN_S = 3.0
"""So long after the batch job ended the agent may take to say that it made it."""
BATCH = "demo/batch"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says."""

    duration_s: float | None
    act: Act
    host: str
    port: int
    config: Path | None = None
    """Settings of the agent."""
    command: Sequence[str] = COMMAND
    """What runs the agent; its options are appended."""
    online: str = "dioptase-demo-online"
    batch: str = "dioptase-demo-batch"
    """Names of the two cgroups."""
    record: Path | None = None
    """Where the agent records its rounds."""

    @property
    def alone_s(self) -> float:
        return ALONE_S if self.duration_s is None else min(ALONE_S, self.duration_s / 6)


class Stop:
    """Whether a signal or the end of the duration has asked us to end."""

    def __init__(self, duration_s: float | None) -> None:
        self._deadline = None if duration_s is None else time.monotonic() + duration_s
        self._reason: str | None = None
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._catch)

    def _catch(self, signum: int, _frame: FrameType | None) -> None:
        self._reason = signal.Signals(signum).name

    def __call__(self) -> bool:
        return self._reason is not None or self._late()

    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def reason(self) -> str:
        """Why it ends; a person at the live view may also have pressed q."""
        return self._reason or ("the duration is over" if self._late() else "asked to")


class Show:
    """What is seen while the demo runs, and what is remembered of it for the summary."""

    def __init__(self, loads: Workloads, agent: AgentChild, *, live: bool) -> None:
        self._loads, self._agent, self._wave, self._live = loads, agent, demo_wave(loads.size), live
        self._seq = self._evicted_seq = 0
        self._batch_at = 0.0
        self._batch_ended_at: float | None = None
        self._polled = self._status_said = time.monotonic()
        self.failure: str | None = None
        """A sentence about whatever ended by itself, if something did."""
        self.tally, self.lent, self.used = Tally(), Mean(), Mean()
        self.outcomes: Counter[tuple[Status, str]] = Counter()
        """Decisions by what came of them and the knob."""
        self.evictions: list[str] = []
        """Why the batch job had to leave, once for each time."""

    def run(self, stop: Stop, alone_s: float) -> None:
        """Watch until asked to stop, or until something ends by itself."""
        self._batch_at = time.monotonic() + alone_s

        def over() -> bool:
            if not self._loads.has("batch") and time.monotonic() >= self._batch_at:
                self._loads.start_batch()
                self._say(f"demo: batch job started: {self._loads.size.burners} processes that take all they are given")
            self.look()
            return stop() or self._failed()

        if self._live:
            run_top(self._agent.url, each=over)
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
        """Whether the batch job's end was an eviction, or it is too early to tell."""
        now = time.monotonic()
        if self._batch_ended_at is None:
            self._batch_ended_at = now
        body = self._agent.get(f"/api/v1/evictions?pod={BATCH}&after={self._evicted_seq}")
        entries = msgspec.json.decode(body, type=list[EvictionEntry]) if body else []
        why = next((e.victim.verdict.text for e in entries if e.victim is not None and not e.victim.dry_run), None)
        if why is None:
            return now - self._batch_ended_at < KNOWN_WITHIN_S
        self._evicted_seq, self._batch_ended_at, self._batch_at = entries[-1].seq, None, now + AGAIN_S
        self.evictions.append(why)
        self._loads.forget("batch")
        self._say(f"demo: the batch job was evicted and comes again in {AGAIN_S:g} s: {why}")
        return True

    def _say(self, text: str) -> None:
        if not self._live:
            click.echo(text)

    def look(self) -> None:
        """Read the counters, and once a second what the agent says."""
        now = time.monotonic()
        self.tally.read(self._phase(), now, self._loads.client.values(), self._loads.units())
        if now - self._polled >= POLL_S:
            self._polled = now
            self.read_decisions()
            self._read_view()

    def _phase(self) -> str:
        started_ns = self._loads.client[Cell.STARTED_NS]
        running_s = (time.time_ns() - started_ns) / NS_PER_S if started_ns else 0.0
        if not self._loads.has("batch"):
            return ALONE
        return SPIKE if self._wave.in_spike(max(running_s - TICK_S / 2, 0.0)) else BESIDE

    def read_decisions(self) -> None:
        """Count, and say, the decisions that are new."""
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
        self.lent.add(view.lent_cores)
        self.used.add(view.reclaimed_cores)
        if time.monotonic() - self._status_said >= STATUS_S:
            self._status_said = time.monotonic()
            self._say(round_line(view))


def _cores(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def summary(show: Show, cpus: int, others_cores: float = 0.0, node_cpus: int = 1) -> Iterator[str]:
    """What came of it, one line each; others used so much of all CPUs of the node, of which `cpus` were ours to use."""
    if (warned := warning(others_cores, node_cpus)) is not None:
        yield warned
    yield from table(show.tally)
    if (crowd := told(others_cores, node_cpus)) is not None:
        yield crowd
    lent, used = _cores(show.lent.value), _cores(show.used.value)
    yield f"{'CPU lent':<15}{lent} of {cpus} cores on average, of which the batch job used {used}"
    changes = Counter({knob: count for (status, knob), count in show.outcomes.items() if status is Status.APPLIED})
    listed = ", ".join(f"{knob} {count}" for knob, count in changes.most_common())
    yield f"{'changes':<15}{changes.total()}{f' ({listed})' if listed else ''}"
    others = Counter(dict.fromkeys(Status, 0))
    for (status, _), count in show.outcomes.items():
        others[status] += count
    if show.evictions:
        yield f"{'evictions':<15}{len(show.evictions)} of the batch job: {show.evictions[-1]}"
    for status in (Status.DRY_RUN, Status.REFUSED, Status.MISMATCH, Status.VANISHED):
        if others[status]:
            yield f"{'':<15}{others[status]} {status.value}"


def put_back(groups: DemoCgroups | None) -> tuple[bool, str]:
    """Compare every value with what it was, then remove the cgroups: whether all is as before, and a line that says so."""
    if groups is None:
        return True, f"{'cgroups':<15}none were made, none touched"
    changed = groups.changed_knobs()
    compared = groups.knobs
    groups.remove()
    if not changed:
        return True, f"{'cgroups':<15}put back ({compared} values compared, none differs) and removed"
    listed = "; ".join(f"{path} was {then!r}, is {now!r}" for path, (then, now) in changed.items())
    return False, f"{'cgroups':<15}removed with {len(changed)} of {compared} values not put back: {listed}"


def say(text: str) -> None:
    click.echo(f"demo: {text}")


def pods_file(settings: Settings, size: Size, metrics_port: int) -> str:
    """The two workloads as a user would list them; the service asks for what its highest peak needs."""
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
    resources: {{requests: {{memory: {BURNER_MIB * (size.burners + 1)}Mi}}}}
"""


def make_cgroups(settings: Settings) -> DemoCgroups | None:
    """Cgroups of the demo's own; None, with a banner, where this machine or our rights give none. Occupied passes."""
    try:
        hierarchy = detect()
        groups = DemoCgroups.make(hierarchy.v1, hierarchy.v2, (settings.online, settings.batch))
    except Occupied:
        raise
    except Unavailable as error:
        say(f"! {error.reason}: the workloads run without cgroups of their own, the agent runs dry")
        say(f"! remedy: {error.remedy}")
        return None
    for note in groups.notes:
        say(note)
    say(f"made cgroups /{settings.online} and /{settings.batch} ({hierarchy.mode}, {len(groups.mounts)} hierarchies)")
    return groups


def run(settings: Settings) -> int:
    """The whole demo; the exit status."""
    try:
        return _run(settings)
    except Unavailable as error:
        click.echo(f"dioptase demo: {error.reason}\n  remedy: {error.remedy}", err=True)
        return 1


def _run(settings: Settings) -> int:
    stop, size = Stop(settings.duration_s), size_for(own_cpus())
    others = Others(time.monotonic())
    with ExitStack() as stack:
        groups = make_cgroups(settings)
        if groups is not None:
            stack.callback(groups.remove)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dioptase-demo-")))
        procs = [groups.procs(name) if groups else [] for name in (settings.online, settings.batch)]
        loads = Workloads(size, directory, *procs)
        stack.callback(loads.close)
        metrics = MetricsServer(loads.client, loads.batch)
        stack.callback(metrics.close)
        (directory / "pods.yaml").write_text(pods_file(settings, size, metrics.port))
        act = Act.DRY_RUN if groups is None and settings.act is Act.ON else settings.act
        options = ["--pods", str(directory / "pods.yaml"), "--state-dir", str(_state_dir()), "--act", act.value]
        options += [] if settings.config is None else ["--config", str(settings.config.absolute())]
        options += ["--record", str(settings.record)] if settings.record is not None else []
        log = stack.enter_context((directory / "agent.log").open("wb"))
        agent = AgentChild(options, host=settings.host, port=settings.port, output=log, command=settings.command)
        stack.callback(agent.stop)
        show = Show(loads, agent, live=sys.stdout.isatty())
        show.failure = _start(loads, agent, act, stop)
        if show.failure is None:
            show.run(stop, settings.alone_s)
        if show.failure:
            click.echo(f"demo: {show.failure}; the agent's last words:\n{_tail(directory / 'agent.log')}", err=True)
        say(f"ending: {show.failure or stop.reason}")
        show.look()
        show.read_decisions()
        loads.stop()
        agent.stop()
        restored, line = put_back(groups)
        crowd = others.cores(time.monotonic())
        for text in (*summary(show, size.cpus, crowd, os.cpu_count() or size.cpus), line):
            click.echo(text)
    return 0 if restored and not show.failure else 1


def _state_dir() -> Path:
    """Where `dioptase reset` finds it should this demo be killed; without the decisions of an earlier one."""
    state_dir = demo_state_dir(default_state_dir())
    for journal in ("decisions", "evictions"):
        for earlier in state_dir.glob(f"{journal}.jsonl*"):
            earlier.unlink(missing_ok=True)
    return state_dir


def _start(loads: Workloads, agent: AgentChild, act: Act, stop: Stop) -> str | None:
    """Bring up service, agent and load; a sentence about what did not come up."""
    size, wave = loads.size, demo_wave(loads.size)
    loads.start_online()
    try:
        agent.wait_healthy(stop)
    except AgentEnded as error:
        return str(error)
    say(f"agent with --act {act.value}: page, /metrics and API at {agent.url}")
    loads.start_client(wave)
    say(
        f"online service started: {size.workers} workers, {size.service_us} us of CPU a request, {wave.low:,.0f} to "
        f"{wave.high:,.0f} requests/s within {wave.period_s:g} s, with {wave.spike_s:g} s of {wave.spike:,.0f}/s"
    )
    return None


def _tail(path: Path, lines: int = 20) -> str:
    return "\n".join(f"  {line}" for line in path.read_text(errors="replace").splitlines()[-lines:])


@click.command()
@click.option("--duration", type=Seconds(min=0, min_open=True), help="End after so many seconds.")
@click.option(
    "--act", type=click.Choice([act.value for act in Act]), default=Act.ON.value, show_default=True,
    help="off: watch. dry-run: decide and write nothing. on: write.",
)  # fmt: skip
@click.option("--listen", default=DEFAULT_LISTEN, show_default=True, help="Where page, API and metrics are served.")
@click.option(
    "--config", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Settings of the agent (YAML), see docs/operations.md; docs/eviction.md has some to try.",
)  # fmt: skip
@click.option("--record", type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    help="Record the agent's rounds into this directory, for `dioptase replay`.")  # fmt: skip
@click.pass_context
def demo(
    ctx: click.Context, duration: float | None, act: str, listen: str, config: Path | None, record: Path | None
) -> None:
    """See it work: an online service and a batch job on this machine, with the agent between them. Ctrl-C ends it."""
    host, port = parse_listen(listen)
    if port == 0:
        port = free_port(host)
    elif not is_free(host, port):
        if ctx.get_parameter_source("listen") is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--listen: {listen} is in use; end who has it or name another port")
        port = free_port(host)
        say(f"port {DEFAULT_LISTEN} is in use: taking {port}")
    sys.exit(run(Settings(duration_s=duration, act=Act(act), host=host, port=port, config=config, record=record)))
