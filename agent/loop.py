"""The agent's control loop: each cycle takes a snapshot, runs the advisor, applies decisions and publishes.
A cycle starts on its interval, or at once on a run-queue latency alarm or a pressure trigger. A cycle that fails
changes nothing more, reports a failed component, and the next cycle starts again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from agent.advisor.cpu_estimate import online_containers
from agent.advisor.engine import ExternalAdvice, PolicyState, evaluate_policy, restore_policy_state
from agent.advisor.forecast.node_forecast import ForecastState
from agent.advisor.latency import can_shrink_quota, latency_limits_ns
from agent.advisor.preview import PreviewInputs
from agent.advisor.runq_latency import is_latency_alarm
from agent.config.config import AgentConfig
from agent.journal.forecast_file import ForecastFile
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.checkpoint import CpusetCheckpoint
from agent.qrm.cpuset.allowed_cpus import allowed_cpus_of, restrict_to_allowed
from agent.qrm.cpuset.state import CpusetState, rebuild_state
from agent.qrm.decisions.compose import PolicyResult
from agent.qrm.decisions.cpu import managed_cgroups
from agent.qrm.decisions.knob_requests import with_nested_cpusets
from agent.sensors.snapshot import Sensor
from agent.sensors.triggers.psi_triggers import PsiTriggerSet
from api.advice import MemoryAdvice, NodeAdvice
from api.decision import ActMode, Advice, Cycle, Outcome
from api.eviction import EvictionEvent, EvictionResult
from api.forecast import Forecast
from api.interfaces import CycleSink, Unavailable
from api.knobs import Knob
from api.measurements import RunqLatency
from api.pod import Pod
from api.qos import QoSLevel
from api.rates import cgroups_by_container, sum_runq_latencies
from api.snapshot import ComponentHealth, Snapshot

if TYPE_CHECKING:
    from agent.eviction.runner import EvictionRunner
    from agent.katalyst.peers import KatalystPeers
    from agent.qrm.actuator.node_knobs import NodeKnobs

log = logging.getLogger(__name__)
TICK = "tick"


class Loop:
    """Owns what is remembered between rounds. `run` returns when `stop` is called."""

    def __init__(  # noqa: PLR0913 - one argument per part of the agent
        self,
        *,
        config: AgentConfig,
        sensor: Sensor,
        actuator: Actuator,
        sinks: Sequence[CycleSink],
        triggers: PsiTriggerSet | None = None,
        checkpoint: CpusetCheckpoint | None = None,
        evictor: EvictionRunner | None = None,
        forecasts: ForecastFile | None = None,
        node_knobs: NodeKnobs | None = None,
        neighbours: KatalystPeers | None = None,
        startup_warnings: tuple[str, ...] = (),
    ) -> None:
        """Raises Unavailable where the checkpoint cannot be read."""
        self._config, self._sensor, self._actuator, self._act = config, sensor, actuator, actuator.act
        self._sinks, self._triggers, self._banner = sinks, triggers, startup_warnings
        self._checkpoint, self._damaged, cpus = checkpoint, False, None
        if checkpoint is not None:
            cpus = checkpoint.load(time.monotonic_ns())
            self._damaged = bool(checkpoint.messages)
            self._banner += checkpoint.messages
        self._forecasts, series = forecasts, None
        if forecasts is not None:
            series = forecasts.load(time.monotonic_ns(), time.time_ns())
            self._banner += forecasts.messages
        self._known = msgspec.structs.replace(
            restore_policy_state(cpus or CpusetState()), forecasts=ForecastState(series=series)
        )
        self._inherits_previous_agent = True
        self._shadow = PolicyState()
        self._evictor, self._node_knobs, self._neighbours = evictor, node_knobs, neighbours
        self._previous: Snapshot | None = None
        self._latest: Cycle | None = None
        self._basis: PreviewInputs | None = None
        self._online_ids: dict[str, list[int]] = {}
        self._seq = 0
        self._stop = asyncio.Event()
        self._alarm = asyncio.Event()
        self._trigger = TICK
        self._alarm_suppressed = False

    @property
    def latest(self) -> Cycle | None:
        """The round that finished last."""
        return self._latest

    @property
    def preview_inputs(self) -> PreviewInputs | None:
        """What the latest round that went well was judged by; None before the first one. Any thread may ask, and while the next
        one is at work too: whoever is made then is to have limits all the same."""
        return self._basis

    def pods(self) -> tuple[Pod, ...]:
        """The pods of the latest round."""
        return self._previous.pods if self._previous is not None else ()

    def apply_config(self, config: AgentConfig) -> None:
        """Have these settings from the next round on. What a part of the agent was opened with stays as it was: sources,
        probes, the pods' dialect, whole disks and caches (docs/dynamic-configuration.md lists what can change)."""
        self._config = config
        if self._evictor is not None:
            self._evictor.apply_config(config)

    def stop(self) -> None:
        """End after the round that runs now."""
        self._stop.set()
        self._alarm.set()

    async def run(self) -> None:
        """Rounds until `stop`: one every interval_s, and one at once on a wait alarm or a pressure trigger."""
        watcher = asyncio.create_task(self._watch())
        if self._triggers is not None:
            asyncio.get_running_loop().add_reader(self._triggers.fileno(), self._pressed)
        due = time.monotonic()
        try:
            while not self._stop.is_set():
                self.run_cycle(self._trigger)
                self._trigger = TICK
                self._alarm.clear()
                now = time.monotonic()
                if now >= due:
                    # After an overrun or a suspended machine the next round is a full interval away: no catching up.
                    due = max(due + self._config.interval_s, now + self._config.interval_s / 2)
                try:
                    await asyncio.wait_for(self._alarm.wait(), max(due - now, 0.0))
                except TimeoutError:
                    continue
        finally:
            watcher.cancel()
            if self._triggers is not None:
                asyncio.get_running_loop().remove_reader(self._triggers.fileno())

    def run_cycle(self, trigger: str) -> Cycle:
        """One round. Never raises: a bug becomes a source named `advisor` or `actuator` that is not ok."""
        started = time.monotonic_ns()
        self._seq += 1
        snapshot = self._sensor.snapshot(self._seq, started, time.time_ns())
        advice: Advice | None = None
        memory: MemoryAdvice | None = None
        node: NodeAdvice | None = None
        forecasts: tuple[Forecast, ...] = ()
        stage, outcomes = "advisor", tuple[Outcome, ...]()
        try:
            inside = cgroups_by_container(
                snapshot.cgroups, (container.cgroup for container in online_containers(snapshot))
            )
            self._online_ids = {path: [snapshot.cgroups[p].id for p in paths] for path, paths in inside.items()}
            if self._act is not ActMode.OFF:
                if self._inherits_previous_agent and snapshot.pods:
                    self._inherits_previous_agent, self._known = False, self._restore_from_previous_agent(snapshot)
                if self._damaged:
                    self._damaged, self._known = False, self._rebuilt(snapshot, started)
                judged, before, told = self._judged(snapshot, started)
                # Before anything is moved: who is started next goes on from there, wherever this one was killed.
                snapshot = self._saved(snapshot)
                advice, memory, node, forecasts = judged.advice, judged.memory, judged.node, judged.forecasts
                stage = "actuator"
                knobs = self._actuator.knobs(managed_cgroups(snapshot.pods))
                for done in self._done(judged, snapshot, knobs, started):
                    outcomes += done
                self._finish(
                    PreviewInputs(
                        snapshot=snapshot, config=self._config, state=before, external_advice=told, now_ns=started, knobs=knobs
                    )
                )
        except Exception as error:
            log.exception("round %d: the %s failed; nothing more is changed in this round", self._seq, stage)
            snapshot = _with_failure(snapshot, stage, error)
        outcomes, snapshot = self._set_node(outcomes, snapshot, started)
        evictions, kills, snapshot = self._evicted(snapshot, advice, started)
        shadow, snapshot = self._run_shadow_policy(snapshot, started)
        finished = Cycle(
            snapshot=snapshot,
            previous=self._previous,
            act=self._act,
            trigger=trigger,
            advice=advice,
            memory=memory,
            node=node,
            forecasts=forecasts,
            shadow=shadow,
            made=self._actuator.foretold.outcomes(),
            outcomes=outcomes,
            evictions=evictions,
            kills=kills,
            duration_ns=time.monotonic_ns() - started,
            startup_warnings=self._banner,
        )
        self._previous, self._latest = snapshot, finished
        # An alarm that led to nothing (the pod's own throttling, a spike that is over) is not heard again until the tick.
        self._alarm_suppressed = trigger != TICK and (advice is None or advice.action != "shrink")
        if self._triggers is not None:
            self._triggers.watch({path: ids[0] for path, ids in self._online_ids.items()})
        for sink in self._sinks:
            sink.publish(finished)
        return finished

    def _finish(self, preview_inputs: PreviewInputs) -> None:
        """Have whoever is made from now on get what this round would give him."""
        self._basis = preview_inputs
        self._actuator.foretold.promised.taken(preview_inputs.state.cpus)

    def _judged(self, snapshot: Snapshot, now_ns: int) -> tuple[PolicyResult, PolicyState, ExternalAdvice]:
        """What is to be, by our advice or by that of whoever is asked in its stead; what was known before, and what he said."""
        cpus = self._actuator.foretold.promised.kept(self._known.cpus)
        known, told = msgspec.structs.replace(self._known, cpus=cpus), ExternalAdvice()
        if self._neighbours is not None:
            known, told = self._neighbours.before(known)
        judged, self._known = evaluate_policy(snapshot, self._config, known, now_ns, told)
        if self._neighbours is not None:
            self._neighbours.after(snapshot, judged, self._known, self._config)
        return judged, known, told

    def _done(
        self, judged: PolicyResult, snapshot: Snapshot, knobs: Mapping[str, Collection[Knob]], now_ns: int
    ) -> Iterator[tuple[Outcome, ...]]:
        """Have done what is to be, and given back what nobody decides on any more and an earlier policy changed."""
        ours = managed_cgroups(snapshot.pods)
        decisions = judged.decisions(snapshot, knobs)
        if self._actuator.version == "v1":
            decisions = with_nested_cpusets(decisions, snapshot)
        yield self._actuator.apply(decisions, now_ns, loosen=judged.asked.loosen)
        # A tree that cannot be read tells of nobody that he has left, and neither does a kubelet that was not reached yet.
        if snapshot.cgroups and (snapshot.pods or snapshot.pods_fresh):
            coming = self._actuator.foretold.coming({one.cgroup for one in decisions}, now_ns / 1e9)
            yield self._actuator.release(decisions, ((ours | judged.named) - snapshot.cgroups.keys()) | coming)
        yield self._actuator.finished()

    def _restore_from_previous_agent(self, snapshot: Snapshot) -> PolicyState:
        """What is known, with the CPU that an agent before this one left reclaimed pods: after a crash in the middle of a
        breach growth goes on from there instead of starting at the node."""
        reclaimed = {c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers}
        lent = self._actuator.previous_quota_cores(reclaimed)
        advisor = msgspec.structs.replace(self._known.advisor, reclaimable_cores=lent)
        return self._known if lent is None else msgspec.structs.replace(self._known, advisor=advisor)

    def _rebuilt(self, snapshot: Snapshot, now_ns: int) -> PolicyState:
        """What is known, with who has which CPUs as the cgroups themselves say."""
        policy = self._config.placing.policy
        topology = restrict_to_allowed(snapshot, allowed_cpus_of(snapshot, None)).topology
        cpus = rebuild_state(snapshot.pods, snapshot.cgroups, topology, policy, now_ns)
        known = restore_policy_state(cpus, self._known.advisor.reclaimable_cores)
        return msgspec.structs.replace(known, forecasts=self._known.forecasts)

    def _saved(self, snapshot: Snapshot) -> Snapshot:
        """Have it on disk who has which CPUs, so that a restart moves nobody, and what forecasts are made of."""
        try:
            if self._checkpoint is not None:
                self._checkpoint.save(self._known.cpus)
        except Unavailable as error:
            snapshot = _with_unavailable(snapshot, "cpu-state", error)
        try:
            if self._forecasts is not None and (series := self._known.forecasts.series) is not None:
                self._forecasts.save(series, snapshot.taken_at_ns, snapshot.wall_time_ns)
        except Unavailable as error:
            snapshot = _with_unavailable(snapshot, "forecast-state", error)
        return snapshot

    def _set_node(
        self, outcomes: tuple[Outcome, ...], snapshot: Snapshot, now_ns: int
    ) -> tuple[tuple[Outcome, ...], Snapshot]:
        """What settings say of whole disks and of caches, whatever became of the advice."""
        if self._node_knobs is None:
            return outcomes, snapshot
        try:
            done, failed = self._node_knobs.run_cycle(snapshot, now_ns)
        except Exception as error:
            log.exception("the knobs of the node failed; they stay as they are")
            return outcomes, _with_failure(snapshot, "node-knobs", error)
        sources = (*snapshot.sources, *failed)
        return (*outcomes, *done), msgspec.structs.replace(snapshot, sources=sources)

    def _evicted(
        self, snapshot: Snapshot, advice: Advice | None, now_ns: int
    ) -> tuple[EvictionResult | None, tuple[EvictionEvent, ...], Snapshot]:
        """Who has to leave. Where the manager fails, nobody has to, and a source tells."""
        if self._evictor is None:
            return None, (), snapshot
        kills: tuple[EvictionEvent, ...] = ()
        started = time.monotonic_ns()
        try:
            kills = self._evictor.outcomes()
            found = self._evictor.run_cycle(snapshot, advice, self._known, now_ns)
        except Exception as error:
            log.exception("the eviction manager failed; nobody is asked to leave in this round")
            return None, kills, _with_failure(snapshot, "eviction", error)
        status = self._evictor.status(found, time.monotonic_ns() - started)
        return found, kills, msgspec.structs.replace(snapshot, sources=(*snapshot.sources, status))

    def _run_shadow_policy(self, snapshot: Snapshot, now_ns: int) -> tuple[Advice | None, Snapshot]:
        """What the second policy makes of the same snapshot. Where it fails, it has no say in anything, and a source tells."""
        if self._config.shadow is None:
            return None, snapshot
        config = msgspec.structs.replace(self._config, advisor=self._config.shadow)
        if self._act is not ActMode.OFF:
            # What online work uses does not depend on who looks: history is kept once.
            self._shadow = msgspec.structs.replace(self._shadow, forecasts=self._known.forecasts)
        try:
            judged, self._shadow = evaluate_policy(snapshot, config, self._shadow, now_ns)
        except Exception as error:
            log.exception("the shadow policy failed")
            self._shadow = PolicyState()
            return None, _with_failure(snapshot, "shadow", error)
        return judged.advice, snapshot

    async def _watch(self) -> None:
        """Between rounds, look at the waits of online pods alone; a breach starts a round without waiting for its time."""
        before = dict[str, RunqLatency]()
        if self._config.advisor.policy != "latency" or self._act is ActMode.OFF:
            return
        failed = False
        while True:
            await asyncio.sleep(self._config.watch_interval_s)
            try:
                after = self._online_waits()
                policy = self._config.advisor
                limits = latency_limits_ns(after, self._known.advisor.baseline_latency_ns, policy.latency)
                if self._can_shrink() and is_latency_alarm(before, after, limits, policy.latency):
                    self._ring("wait")
            except Exception:
                # The next round reads the same source in its guard and shows the reason; here one line is enough.
                if not failed:
                    log.exception("waits cannot be watched between rounds")
                failed, before = True, {}
                continue
            failed, before = False, after

    def _online_waits(self) -> dict[str, RunqLatency]:
        """Waits of the online containers of the last round, each with the groups below it, as far as they are known."""
        ids = self._sensor.read_runq_latency([number for numbers in self._online_ids.values() for number in numbers])
        return {
            container: sum_runq_latencies([ids[number] for number in numbers])
            for container, numbers in self._online_ids.items()
            if all(number in ids for number in numbers)
        }

    def _can_shrink(self) -> bool:
        # What the advisor remembers has only the CPUs that pods may have.
        advisor, previous = self._config.advisor, self._known.advisor.previous
        if advisor.policy != "latency" or self._act is ActMode.OFF or previous is None:
            return False
        return can_shrink_quota(self._known.advisor, len(previous.topology.cpus), advisor.latency)

    def _ring(self, trigger: str) -> None:
        if self._alarm_suppressed:
            return
        self._trigger = trigger
        self._alarm.set()

    def _pressed(self) -> None:
        if self._triggers is not None and self._triggers.fired() and self._can_shrink():
            self._ring("psi")


def _with_unavailable(snapshot: Snapshot, name: str, error: Unavailable) -> Snapshot:
    status = ComponentHealth(name=name, ok=False, error=error.reason, remedy=error.remedy)
    return msgspec.structs.replace(snapshot, sources=(*snapshot.sources, status))


def _with_failure(snapshot: Snapshot, stage: str, error: Exception) -> Snapshot:
    """The same snapshot with one more source that failed, so that the failure is seen wherever sources are."""
    status = ComponentHealth(
        name=stage,
        ok=False,
        error=f"{type(error).__name__}: {error}",
        remedy="this is a bug: report it with the agent's log",
    )
    return msgspec.structs.replace(snapshot, sources=(*snapshot.sources, status))
