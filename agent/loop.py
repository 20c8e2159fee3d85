"""The agent's control loop: each cycle takes a snapshot, runs the advisor, applies decisions and publishes.
A cycle starts on its interval, or at once on a run-queue latency alarm or a pressure trigger. A cycle that fails
changes nothing more, reports a failed component, and the next cycle starts again. Cycles run in a thread of their own,
because they read and write hundreds of files: the event loop goes on to serve HTTP, informers and the latency watch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from agent.advisor.cpu_estimate import online_containers
from agent.advisor.engine import (
    ExternalAdvice,
    PolicyState,
    evaluate_policy,
    restore_policy_state,
    without_quota_trials,
)
from agent.advisor.forecast.node_forecast import ForecastState
from agent.advisor.latency import can_shrink_quota, is_latency_alarm, latency_limits_ns
from agent.advisor.policy_result import PolicyResult
from agent.advisor.preview import PreviewInputs
from agent.advisor.quota_trial import measures_limit
from agent.config.config import AgentConfig
from agent.journal.colocation_counter import ColocationCounter
from agent.journal.forecast_file import ForecastFile
from agent.journal.quota_verdict_file import QuotaVerdictFile
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.checkpoint import CpusetCheckpoint
from agent.qrm.cpuset.allowed_cpus import allowed_cpus_of, restrict_to_allowed
from agent.qrm.cpuset.state import CpusetState, rebuild_state
from agent.qrm.decisions.cpu import compose_decisions, managed_cgroups
from agent.qrm.decisions.cpu_priority import priority_health, unlisted_pod_since
from agent.qrm.decisions.knob_requests import with_nested_cpusets
from agent.sensors.snapshot import Sensor
from agent.sensors.triggers.psi_triggers import PsiTriggerSet
from api.advice import NodeAdvice, QuotaVerdict
from api.cpu import Topology
from api.decision import ActMode, Advice, Cycle, Outcome
from api.eviction import EvictionEvent, EvictionResult
from api.interfaces import CycleSink, Unavailable
from api.knobs import Knob
from api.pod import Pod
from api.qos import QoSLevel
from api.rates import Rates, cgroups_by_container, rates_since, sum_runq_latencies
from api.snapshot import ComponentHealth, NodeSample, RunqLatency, Snapshot
from api.units import NS_PER_S

if TYPE_CHECKING:
    from agent.eviction.runner import EvictionRunner
    from agent.katalyst.peers import KatalystPeers
    from agent.qrm.actuator.node_knobs import NodeKnobs

log = logging.getLogger(__name__)
TICK, JOURNALLED = "tick", "journalled"
CYCLE_THREAD = "cycle"
BUG_REMEDY = "this is a bug: report it with the agent's log"


class _CycleDraft(msgspec.Struct):
    """The parts of one cycle while it runs. A part that fails keeps its default."""

    config: AgentConfig
    snapshot: Snapshot
    now_ns: int
    rates: Rates | None = None
    """Rates since the previous cycle: computed once, for the policies, the sinks and the NRI previews."""
    stage: str = "advisor"
    result: PolicyResult | None = None
    outcomes: tuple[Outcome, ...] = ()
    evictions: EvictionResult | None = None
    kills: tuple[EvictionEvent, ...] = ()
    shadow: Advice | None = None

    @property
    def advice(self) -> Advice | None:
        return None if self.result is None else self.result.advice

    @property
    def node_advice(self) -> NodeAdvice | None:
        """Advice for the whole node; None if the advisor failed or does not run."""
        return None if self.result is None else self.result.node or NodeAdvice()

    def report(self, *components: ComponentHealth) -> None:
        """Add the health of components to the snapshot, where every reader looks for it."""
        self.snapshot = msgspec.structs.replace(self.snapshot, sources=(*self.snapshot.sources, *components))

    def report_unavailable(self, name: str, error: Unavailable) -> None:
        self.report(ComponentHealth(name=name, ok=False, error=error.reason, remedy=error.remedy))


class Loop:
    """Runs cycles and owns the state that lasts from one cycle to the next.

    While `run` is active, the cycle thread computes one cycle at a time, and everything else happens on the event loop. The
    two share immutable values that are replaced as a whole (`latest`, `preview_inputs`, the policy state).
    """

    def __init__(  # noqa: PLR0913 - one argument per part of the agent
        self,
        *,
        config: AgentConfig,
        sensor: Sensor,
        actuator: Actuator,
        sinks: Sequence[CycleSink],
        thread_sinks: Sequence[CycleSink] = (),
        before_cycle: Callable[[], None] | None = None,
        triggers: PsiTriggerSet | None = None,
        checkpoint: CpusetCheckpoint | None = None,
        evictor: EvictionRunner | None = None,
        forecasts: ForecastFile | None = None,
        quota_verdicts: QuotaVerdictFile | None = None,
        node_knobs: NodeKnobs | None = None,
        peers: KatalystPeers | None = None,
        totals: ColocationCounter | None = None,
        startup_warnings: tuple[str, ...] = (),
    ) -> None:
        """Load the state of the previous agent. Raises Unavailable if the checkpoint cannot be read.

        `sinks` take each cycle on the event loop, and may use objects that belong to it. `thread_sinks` take it in the cycle
        thread, before `sinks`: they may write files. `before_cycle` is called on the event loop before each cycle.
        """
        self._sensor, self._actuator, self._act = sensor, actuator, actuator.act
        self._config = config = self._testable(config)
        self._sinks, self._thread_sinks, self._before_cycle = sinks, thread_sinks, before_cycle
        self._triggers, self._startup_warnings = triggers, startup_warnings
        self._checkpoint, self._checkpoint_damaged, cpus = checkpoint, False, None
        if checkpoint is not None:
            cpus = checkpoint.load(time.monotonic_ns())
            self._checkpoint_damaged = bool(checkpoint.messages)
            actuator.before_originals(checkpoint.flush)
            self._startup_warnings += checkpoint.messages
        self._forecasts, series = forecasts, None
        if forecasts is not None:
            series = forecasts.load(time.monotonic_ns(), time.time_ns())
            self._startup_warnings += forecasts.messages
        self._quota_verdicts, verdicts = quota_verdicts, tuple[QuotaVerdict, ...]()
        if quota_verdicts is not None:
            verdicts = quota_verdicts.load()
            self._startup_warnings += quota_verdicts.messages
        self._policy_state = msgspec.structs.replace(
            restore_policy_state(cpus or CpusetState(), verdicts=verdicts), forecasts=ForecastState(series=series)
        )
        self._shadow_state = PolicyState()
        self._restores_previous_quota = True
        self._evictor, self._evictor_config = evictor, config
        self._node_knobs, self._peers, self._totals = node_knobs, peers, totals
        self._previous: Snapshot | None = None
        self._latest: Cycle | None = None
        self._preview_inputs: PreviewInputs | None = None
        self._online_ids: dict[str, list[int]] = {}
        self._unlisted_ns: int | None = None
        self._reclaimed_pods_run = False
        self._publish_failures: dict[str, ComponentHealth] = {}
        self._seq = 0
        self._stop, self._alarm = asyncio.Event(), asyncio.Event()
        self._trigger = TICK
        self._alarm_suppressed = self._journalled_since_tick = False

    @property
    def latest(self) -> Cycle | None:
        """The latest finished cycle; None before the first one."""
        return self._latest

    @property
    def preview_inputs(self) -> PreviewInputs | None:
        """The inputs of the latest cycle that did not fail; None before the first one.

        Any thread may read it, also during a cycle: the NRI plugin computes limits for new containers from it.
        """
        return self._preview_inputs

    def pods(self) -> tuple[Pod, ...]:
        """The pods of the latest snapshot."""
        return self._previous.pods if self._previous is not None else ()

    def apply_config(self, config: AgentConfig) -> None:
        """Use this configuration from the next cycle on; a cycle under way keeps the one that it started with.

        Components that were opened with the old configuration keep it: sensors, probes, the annotation mapping, disks and
        caches (docs/dynamic-configuration.md lists what can change).
        """
        self._config = self._testable(config)

    def _testable(self, config: AgentConfig) -> AgentConfig:
        """Return the configuration; without quota trials if this agent writes no quota that could be tested."""
        return config if self._act is ActMode.ON else without_quota_trials(config)

    def stop(self) -> None:
        """End `run` after the cycle that is under way."""
        self._stop.set()
        self._alarm.set()

    async def run(self) -> None:
        """Run cycles until `stop`: one every interval_s, and one at once on a latency alarm or a pressure trigger.

        Returns, or is cancelled, only after the cycle under way has ended, so that nothing is written to the node later.
        """
        watcher = asyncio.create_task(self._watch())
        if self._triggers is not None:
            asyncio.get_running_loop().add_reader(self._triggers.fileno(), self._on_pressure)
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self._on_journalled)
        self._actuator.on_journalled(wake)
        due = time.monotonic()
        try:
            with ThreadPoolExecutor(1, CYCLE_THREAD) as executor:
                while not self._stop.is_set():
                    await self._run_in_thread(executor)
                    now = time.monotonic()
                    if now >= due:
                        # After an overrun or a suspended machine the next cycle is a full interval away: no catching up.
                        due = max(due + self._config.interval_s, now + self._config.interval_s / 2)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._alarm.wait(), max(due - now, 0.0))
        finally:
            self._actuator.on_journalled(lambda: None)
            watcher.cancel()
            self._remove_trigger_reader()

    def run_cycle(self, trigger: str) -> Cycle:
        """Run one cycle in the calling thread and return it. Never raises: a bug becomes a component that is not ok."""
        self._prepare()
        finished = self._compute(trigger)
        self._publish(finished)
        return finished

    async def _run_in_thread(self, executor: ThreadPoolExecutor) -> None:
        # An alarm that comes during the cycle starts the next one, so both are reset before it.
        trigger, self._trigger = self._trigger, TICK
        self._alarm.clear()
        if trigger == TICK:
            self._alarm_suppressed = self._journalled_since_tick = False
        try:
            self._prepare()
            self._publish(await asyncio.get_running_loop().run_in_executor(executor, self._compute, trigger))
        except Exception:
            log.exception("cycle %d failed; the next one starts on its interval", self._seq)
        if self._alarm_suppressed and self._trigger != JOURNALLED and not self._stop.is_set():
            self._trigger = TICK
            self._alarm.clear()

    def _prepare(self) -> None:
        if self._before_cycle is not None:
            self._guard_publish("before-cycle", self._before_cycle)

    def _compute(self, trigger: str) -> Cycle:
        """Do the work of one cycle that is not bound to the event loop, up to the sinks that write files."""
        started, config = time.monotonic_ns(), self._config
        self._seq += 1
        if self._evictor is not None and config is not self._evictor_config:
            self._evictor.apply_config(config)
            self._evictor_config = config
        draft = _CycleDraft(config, self._snapshot(started), started)
        try:
            self._advise_and_act(draft)
        except Exception as error:
            log.exception("cycle %d: the %s failed; this cycle changes nothing more", self._seq, draft.stage)
            draft.report(_bug_health(draft.stage, error))
        self._set_node_knobs(draft)
        self._run_evictions(draft)
        self._run_shadow_policy(draft)
        result = draft.result
        finished = Cycle(
            snapshot=draft.snapshot,
            previous=self._previous,
            act=self._act,
            trigger=trigger,
            advice=draft.advice,
            memory=None if result is None else result.memory,
            node=None if result is None else result.node,
            forecasts=() if result is None else result.forecasts,
            shadow=draft.shadow,
            runtime_outcomes=self._actuator.pending_originals.outcomes(),
            outcomes=draft.outcomes,
            evictions=draft.evictions,
            kills=draft.kills,
            duration_ns=time.monotonic_ns() - started,
            startup_warnings=self._startup_warnings,
        )
        finished.share_rates(draft.rates)
        finished.share_evaluated_latency({} if result is None else result.evaluated_latency)
        if self._totals is not None:
            finished = self._count_totals(self._totals, finished)
        self._previous, self._latest = draft.snapshot, finished
        self._publish_to(self._thread_sinks, finished)
        return finished

    def _snapshot(self, now_ns: int) -> Snapshot:
        """Return the snapshot of this cycle, with the failures of the sinks in the cycle before it.

        If the sensor raises, the snapshot holds the last known pods and CPUs and no measurements, so that nothing grows on
        old data.
        """
        wall_time_ns, previous = time.time_ns(), self._previous
        try:
            snapshot = self._sensor.snapshot(self._seq, now_ns, wall_time_ns)
        except Exception as error:
            log.exception("cycle %d: the sensor failed; the cycle goes on without measurements", self._seq)
            pods_health = ComponentHealth(name="pods", ok=False, error="the sensor failed", remedy=BUG_REMEDY)
            snapshot = Snapshot(
                seq=self._seq,
                taken_at_ns=now_ns,
                wall_time_ns=wall_time_ns,
                boot_id="" if previous is None else previous.boot_id,
                topology=Topology(cpus=()) if previous is None else previous.topology,
                node=NodeSample(),
                cgroups={},
                pods=() if previous is None else previous.pods,
                sources=(pods_health, _bug_health("sensor", error)),
            )
        failures = tuple(self._publish_failures.values())
        return msgspec.structs.replace(snapshot, sources=(*snapshot.sources, *failures)) if failures else snapshot

    def _advise_and_act(self, draft: _CycleDraft) -> None:
        """Evaluate the policy and apply its decisions. `draft.stage` names the part that is at work."""
        snapshot, now_ns = draft.snapshot, draft.now_ns
        draft.rates = rates_since(self._previous, snapshot)
        inside = cgroups_by_container(snapshot.cgroups, (container.cgroup for container in online_containers(snapshot)))
        self._online_ids = {path: [snapshot.cgroups[p].id for p in paths] for path, paths in inside.items()}
        self._reclaimed_pods_run = any(pod.qos is QoSLevel.RECLAIMED and pod.containers for pod in snapshot.pods)
        if self._act is ActMode.OFF:
            return
        if self._restores_previous_quota and snapshot.pods:
            self._restores_previous_quota = False
            self._policy_state = self._with_previous_quota(snapshot)
        if self._checkpoint_damaged:
            self._checkpoint_damaged, self._policy_state = False, self._rebuilt_state(snapshot, draft)
        reservations = self._actuator.pending_originals.reservations
        before = msgspec.structs.replace(self._policy_state, cpus=reservations.merge_into(self._policy_state.cpus))
        external = ExternalAdvice()
        if self._peers is not None:
            before, external = self._peers.before(before)
        # A quota that an external advisor replaces is not in force, so it cannot be tested.
        config = draft.config if external.cpu is None else without_quota_trials(draft.config)
        result, self._policy_state = evaluate_policy(snapshot, config, before, now_ns, external, draft.rates)
        if self._peers is not None:
            self._peers.after(snapshot, result, self._policy_state, draft.config)
        # The CPU state is saved before the originals of this cycle: at whatever point this agent is killed, the next one finds
        # the CPUs of a new container.
        self._save_state(draft)
        draft.result, draft.stage = result, "actuator"
        knobs = self._actuator.knobs(managed_cgroups(snapshot.pods, snapshot.cgroups))
        self._actuate(draft, result, knobs)
        self._preview_inputs = PreviewInputs(
            snapshot=draft.snapshot,
            config=draft.config,
            state=before,
            external_advice=external,
            now_ns=now_ns,
            knobs=knobs,
            rates=draft.rates,
        )
        reservations.drop_merged(before.cpus)

    def _actuate(self, draft: _CycleDraft, result: PolicyResult, knobs: Mapping[str, Collection[Knob]]) -> None:
        """Apply the decisions, and restore what an earlier decision changed and no decision covers any more."""
        snapshot, now_ns = draft.snapshot, draft.now_ns
        decisions = compose_decisions(result, snapshot, knobs)
        if self._actuator.version == "v1":
            decisions = with_nested_cpusets(decisions, snapshot)
        draft.outcomes += self._actuator.apply(decisions, now_ns, quota_exempt=result.knob_requests.quota_exempt)
        if draft.advice is not None:
            obstacles = result.idle_class_obstacles
            self._unlisted_ns = unlisted_pod_since(obstacles, self._unlisted_ns, snapshot.taken_at_ns)
            draft.report(*priority_health(snapshot, decisions, obstacles, draft.outcomes, self._unlisted_ns))
        # An unreadable tree does not show that a pod has left, and neither does a kubelet that was not reached yet.
        if snapshot.cgroups and (snapshot.pods or snapshot.pods_fresh):
            pending = self._actuator.pending_originals.unlisted(
                {decision.cgroup for decision in decisions}, now_ns / NS_PER_S
            )
            managed = managed_cgroups(snapshot.pods, snapshot.cgroups)
            unseen = ((managed | result.extra_cgroups) - snapshot.cgroups.keys()) | pending
            draft.outcomes += self._actuator.release(decisions, unseen)
        draft.outcomes += self._actuator.finished()

    def _with_previous_quota(self, snapshot: Snapshot) -> PolicyState:
        """Return the policy state with the CPU quota that the previous agent left to reclaimed pods.

        After a crash in the middle of a latency breach, growth continues from that quota instead of from the whole node.
        """
        reclaimed = {c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers}
        cores = self._actuator.previous_quota_cores(reclaimed)
        if cores is None:
            return self._policy_state
        advisor = msgspec.structs.replace(self._policy_state.advisor, reclaimable_cores=cores)
        return msgspec.structs.replace(self._policy_state, advisor=advisor)

    def _rebuilt_state(self, snapshot: Snapshot, draft: _CycleDraft) -> PolicyState:
        """Return the policy state with the CPU assignment rebuilt from the cpusets of the cgroups."""
        topology = restrict_to_allowed(snapshot, allowed_cpus_of(snapshot, None)).topology
        policy = draft.config.placing.policy
        cpus = rebuild_state(snapshot.pods, snapshot.cgroups, topology, policy, draft.now_ns)
        advisor = self._policy_state.advisor
        rebuilt = restore_policy_state(cpus, advisor.reclaimable_cores, advisor.quota_trial.verdicts)
        return msgspec.structs.replace(rebuilt, forecasts=self._policy_state.forecasts)

    def _save_state(self, draft: _CycleDraft) -> None:
        """Have the CPU assignment saved, so that a restart moves no container, the history of the forecasts and the verdicts
        of quota trials."""
        try:
            if self._checkpoint is not None:
                self._checkpoint.save(self._policy_state.cpus)
        except Unavailable as error:
            draft.report_unavailable("cpu-state", error)
        try:
            if self._forecasts is not None and (series := self._policy_state.forecasts.series) is not None:
                self._forecasts.save(series, draft.snapshot.taken_at_ns, draft.snapshot.wall_time_ns)
        except Unavailable as error:
            draft.report_unavailable("forecast-state", error)
        try:
            if self._quota_verdicts is not None:
                self._quota_verdicts.save(self._policy_state.advisor.quota_trial.verdicts)
        except Unavailable as error:
            draft.report_unavailable("quota-verdicts", error)

    def _set_node_knobs(self, draft: _CycleDraft) -> None:
        """Apply the settings of disks and caches, whether or not the advisor failed, and its power cap."""
        if self._node_knobs is None:
            return
        try:
            outcomes, failed = self._node_knobs.run_cycle(draft.snapshot, draft.now_ns, draft.node_advice)
        except Exception as error:
            log.exception("writing the node's knobs failed; they keep their values")
            draft.report(_bug_health("node-knobs", error))
            return
        draft.outcomes += tuple(outcomes)
        draft.report(*failed)

    def _run_evictions(self, draft: _CycleDraft) -> None:
        """Run the eviction manager. If it fails, it evicts no pod and is reported as failed."""
        if self._evictor is None:
            return
        started = time.monotonic_ns()
        try:
            draft.kills = self._evictor.outcomes()
            result = self._evictor.run_cycle(draft.snapshot, draft.advice, self._policy_state, draft.now_ns)
        except Exception as error:
            log.exception("the eviction manager failed; this cycle evicts no pod")
            draft.report(_bug_health("eviction", error))
            return
        draft.evictions = result
        draft.report(self._evictor.status(result, time.monotonic_ns() - started))

    def _run_shadow_policy(self, draft: _CycleDraft) -> None:
        """Evaluate the second policy on the same snapshot; its advice is only shown."""
        shadow = draft.config.shadow
        if shadow is None:
            return
        config = without_quota_trials(msgspec.structs.replace(draft.config, advisor=shadow))
        if self._act is not ActMode.OFF:
            # The use of online pods does not depend on the policy, so both policies share one history.
            forecasts = self._policy_state.forecasts
            self._shadow_state = msgspec.structs.replace(self._shadow_state, forecasts=forecasts)
        try:
            result, self._shadow_state = evaluate_policy(
                draft.snapshot, config, self._shadow_state, draft.now_ns, rates=draft.rates
            )
        except Exception as error:
            log.exception("the shadow policy failed")
            self._shadow_state = PolicyState()
            draft.report(_bug_health("shadow", error))
            return
        draft.shadow = result.advice

    def _count_totals(self, totals: ColocationCounter, finished: Cycle) -> Cycle:
        """Return the cycle with the totals of colocation. A failure is reported in the next cycle."""
        name, counted = "colocation-state", [finished]
        self._guard_publish(name, lambda: counted.append(totals.count(finished)))
        if name not in self._publish_failures and (error := totals.failure) is not None:
            health = ComponentHealth(name=name, ok=False, error=error.reason, remedy=error.remedy)
            self._publish_failures[name] = health
        return counted[-1]

    def _publish(self, finished: Cycle) -> None:
        """Pass the cycle to the sinks of the event loop and arm the pressure triggers of its online cgroups."""
        # An alarm that led to nothing (the pod's own throttling, a spike that is over) is suppressed until the tick.
        advice = finished.advice
        if finished.trigger != JOURNALLED:
            self._alarm_suppressed = finished.trigger != TICK and (advice is None or advice.action != "shrink")
        if self._triggers is not None:
            online = {path: ids[0] for path, ids in self._online_ids.items()}
            self._guard_publish("psi-triggers", partial(self._triggers.watch, online))
        self._publish_to(self._sinks, finished)

    def _publish_to(self, sinks: Sequence[CycleSink], finished: Cycle) -> None:
        for sink in sinks:
            self._guard_publish(f"sink-{type(sink).__name__}", partial(sink.publish, finished))

    def _guard_publish(self, name: str, publish: Callable[[], None]) -> None:
        """Call `publish`. An exception is logged once, and reported as a failed component in the next cycle."""
        try:
            publish()
        except Exception as error:
            failure = _bug_health(name, error)
            if self._publish_failures.get(name) != failure:
                log.exception("%s failed in cycle %d; the agent continues", name, self._seq)
            self._publish_failures[name] = failure
        else:
            self._publish_failures.pop(name, None)

    async def _watch(self) -> None:
        """Compare the run-queue latency of online pods several times a second; a breach starts a cycle at once.

        It reads nothing while an alarm could change nothing, because reading 100 containers costs a millisecond of CPU.
        """
        if self._config.advisor.policy != "latency" or self._act is ActMode.OFF:
            return
        before, failed = dict[str, RunqLatency](), False
        while True:
            await asyncio.sleep(self._config.watch_interval_s)
            try:
                if not self._can_shrink():
                    before = {}
                    continue
                after = self._online_latencies()
                if after is None:
                    continue
                policy = self._config.advisor
                limits = latency_limits_ns(after, self._policy_state.advisor.baseline_latency_ns, policy.latency)
                if is_latency_alarm(before, after, limits, policy.latency):
                    self._ring("wait")
            except Exception:
                # The next cycle reads the same source in its guard and shows the reason; here one line is enough.
                if not failed:
                    log.exception("run-queue latency cannot be read between cycles")
                failed, before = True, {}
                continue
            failed, before = False, after

    def _online_latencies(self) -> dict[str, RunqLatency] | None:
        """Return the latency of each online container of the latest cycle, with the cgroups below it, where it is available.

        None while the cycle thread reads the same probe.
        """
        online_ids = self._online_ids
        latencies = self._sensor.read_runq_latency([number for numbers in online_ids.values() for number in numbers])
        if latencies is None:
            return None
        return {
            container: sum_runq_latencies([latencies[number] for number in numbers])
            for container, numbers in online_ids.items()
            if all(number in latencies for number in numbers)
        }

    def _can_shrink(self) -> bool:
        """Return whether a cycle on an alarm could take CPU back: reclaimed pods run, and their quota is above the minimum, or
        is being tested."""
        if not self._reclaimed_pods_run:
            return False
        # The snapshot in the advisor's state contains only the CPUs that pods may use.
        config, state = self._config.advisor, self._policy_state.advisor
        if config.policy != "latency" or self._act is ActMode.OFF or state.previous is None:
            return False
        return can_shrink_quota(state, len(state.previous.topology.cpus), config.latency) or measures_limit(
            state.quota_trial
        )

    def _ring(self, trigger: str) -> None:
        if self._alarm_suppressed:
            return
        self._trigger = trigger
        self._alarm.set()

    def _on_journalled(self) -> None:
        """Start a cycle for the writes that waited for their originals; at most one between two ticks."""
        if self._journalled_since_tick:
            return
        self._journalled_since_tick = True
        if self._trigger == TICK:
            self._trigger = JOURNALLED
        self._alarm.set()

    def _on_pressure(self) -> None:
        try:
            if self._triggers is not None and self._triggers.fired() and self._can_shrink():
                self._ring("psi")
        except Exception:
            # The descriptor stays readable, so that asyncio would call this without end.
            log.exception(
                "the pressure triggers failed; cycles start on their interval and on run-queue latency alarms"
            )
            self._remove_trigger_reader()

    def _remove_trigger_reader(self) -> None:
        if self._triggers is not None:
            asyncio.get_running_loop().remove_reader(self._triggers.fileno())


def _bug_health(name: str, error: Exception) -> ComponentHealth:
    return ComponentHealth(name=name, ok=False, error=f"{type(error).__name__}: {error}", remedy=BUG_REMEDY)
