"""The control loop: cycles start on time or at once on an alarm, and complete even if a policy or the actuator has a bug."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from agent.advisor.engine import evaluate_policy
from agent.config.advisor import AdvisorConfig, LatencyConfig
from agent.config.config import AgentConfig
from agent.config.eviction import EvictionConfig
from agent.eviction.runner import EvictionRunner
from agent.journal.decisions import DecisionJournal
from agent.loop import Loop
from agent.qrm.actuator.checkpoint import CpusetCheckpoint
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.pending_originals import PendingOriginals
from agent.qrm.actuator.writer import KnobWriter
from agent.qrm.cpuset.state import CpusetEntry
from api.decision import ActMode, Cycle, Decision, Outcome, OutcomeStatus
from api.knobs import Knob
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import CgroupLimits, ComponentHealth, RunqLatency, Snapshot
from exporters.page.web_server import AgentWebServer
from tests.agent.advisor.builders import S, pod, snapshot, waits
from tests.agent.qrm.actuator.trees import Tree

CANONICAL = AgentConfig(advisor=AdvisorConfig(policy="canonical"))
SHADOW = AgentConfig(shadow=AdvisorConfig(policy="canonical"))
WEB, BATCH = pod("web", QoSLevel.SHARED), pod("batch", QoSLevel.RECLAIMED)


class Scripted:
    """A sensor and an actuator with scripted answers, and a sink that records cycles."""

    act, version = ActMode.ON, "v2"

    def __init__(self, see: Callable[[int], Snapshot]) -> None:
        self.see = see
        self.pending_originals = PendingOriginals()
        self.waits: Mapping[int, RunqLatency] = {}
        self.decided: list[Decision] = []
        self.cycles: list[Cycle] = []
        self.failure: Exception | None = None
        self.taken_at_ns: list[int] = []
        self.quotas: Mapping[str, float] = {}
        self.released = 0
        self.wake: Callable[[], object] = lambda: None

    def snapshot(self, seq: int, taken_at_ns: int, wall_time_ns: int) -> Snapshot:
        self.taken_at_ns.append(taken_at_ns)
        return msgspec.structs.replace(self.see(seq), seq=seq)

    def read_runq_latency(self, cgroup_ids: Collection[int]) -> Mapping[int, RunqLatency]:
        return self.waits

    def apply(
        self, decisions: Sequence[Decision], _now_ns: int, *, quota_exempt: Collection[str]
    ) -> tuple[Outcome, ...]:
        assert not quota_exempt, "no default setting lets a quota exceed its owner's"
        if self.failure:
            raise self.failure
        self.decided.extend(decisions)
        return tuple(Outcome(decision=decision, status=OutcomeStatus.APPLIED) for decision in decisions)

    def knobs(self, cgroups: Collection[str]) -> Mapping[str, frozenset[Knob]]:
        return dict.fromkeys(cgroups, frozenset(Knob))

    def previous_quota_cores(self, reclaimed: Collection[str]) -> float | None:
        return sum(self.quotas[cgroup] for cgroup in reclaimed) if self.quotas else None

    def release(self, decisions: object, unseen: object) -> tuple[Outcome, ...]:
        self.released += 1
        return ()

    def finished(self) -> tuple[Outcome, ...]:
        return ()

    def before_originals(self, write: Any) -> None:
        pass

    def on_journalled(self, wake: Callable[[], object]) -> None:
        self.wake = wake

    def publish(self, finished: Cycle) -> None:
        self.cycles.append(finished)


def loop_over(script: Scripted, config: AgentConfig | None = None, *sinks: Any, **parts: Any) -> Loop:
    """A loop whose sensor, actuator and last sink is `script`; `parts` are other arguments of Loop."""
    double: Any = script
    return Loop(config=config or AgentConfig(), sensor=double, actuator=double, sinks=[*sinks, double], **parts)


@asynccontextmanager
async def running(loop: Loop) -> AsyncIterator[None]:
    """Runs the loop; at the end it is stopped, and its last cycle has ended."""
    task = asyncio.create_task(loop.run())
    yield
    loop.stop()
    await task


def small_snapshot(seq: int, wait: dict[int, int] | None = None) -> Snapshot:
    return snapshot(seq, [WEB, BATCH], wait={"web": waits(wait or {10: seq * 100}), "batch": waits({10: seq})})


async def have(script: Scripted, cycles: int) -> None:
    """Waits for so many cycles."""
    async with asyncio.timeout(30):
        while len(script.cycles) < cycles:
            await asyncio.sleep(0.01)


async def test_a_cycle_publishes_its_advice_and_outcomes() -> None:
    script = Scripted(small_snapshot)
    finished = loop_over(script).run_cycle("tick")
    assert script.cycles == [finished]
    assert finished.advice is not None
    assert [outcome.decision.knob for outcome in finished.outcomes] == [Knob.IDLE, Knob.QUOTA]
    assert finished.previous is None


async def test_outcomes_of_the_runtime_are_published_with_the_next_cycle(tmp_path: Path) -> None:
    script, tree = Scripted(small_snapshot), Tree(tmp_path / "cgroup", "v1")
    tree.make("/batch")
    tree.file("/batch", "cpuset.cpus").write_text("1\n")
    decision = tree.decision("/batch", Knob.CPUSET, "1")
    outcome_of_runtime = Outcome(decision=decision, status=OutcomeStatus.APPLIED, before="0-3", after="1")
    script.pending_originals.add("/batch", {Knob.CPUSET: "0-3"}, 1.0, outcomes={Knob.CPUSET: outcome_of_runtime})
    files, originals = KnobWriter(tree.hierarchy), OriginalsJournal(tmp_path / "originals.json", "boot")
    assert script.pending_originals.adopt(files, originals) == 1
    loop = loop_over(script)
    script.failure = RuntimeError("boom")
    assert loop.run_cycle("tick").runtime_outcomes == (outcome_of_runtime,), "although the cycle failed"
    assert loop.run_cycle("tick").runtime_outcomes == ()


async def test_growth_continues_from_the_quota_that_the_previous_agent_left_to_reclaimed_pods() -> None:
    """A tenth of a CPU was left after a breach; growth goes on from there, a tenth of the node a second."""
    script = Scripted(
        lambda seq: small_snapshot(seq) if seq > 1 else msgspec.structs.replace(small_snapshot(seq), pods=())
    )
    script.quotas = {"/batch": 0.1, "/web": 4.0}
    loop, results = loop_over(script), []
    for _ in range(3):
        advice = loop.run_cycle("tick").advice
        assert advice is not None
        results.append((advice.reason.inputs.get("lent_before_cores"), advice.reclaimable_cores))
        script.quotas = {"/batch": 0.1 if len(results) == 1 else 1.5, "/web": 4.0}
    assert results[1:] == [(0.1, 0.3), (0.3, 0.5)], "the quotas are read once"


@pytest.mark.parametrize(
    ("pods", "listed", "released"),
    [((), True, 1), ((), False, 0), ((WEB,), False, 1)],
)
async def test_nothing_is_restored_before_pods_are_listed(
    pods: tuple[Pod, ...], released: int, *, listed: bool
) -> None:
    """After a restart, an unreachable kubelet does not show that a pod has left."""
    source = ComponentHealth(name="pods", ok=listed, error="" if listed else "answered 403")
    script = Scripted(lambda seq: msgspec.structs.replace(small_snapshot(seq), pods=pods, sources=(source,)))
    loop_over(script).run_cycle("tick")
    assert script.released == released


async def test_a_bug_in_the_actuator_is_reported_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    script = Scripted(small_snapshot)
    loop = loop_over(script)
    script.failure = RuntimeError("boom")
    failed = loop.run_cycle("tick")
    assert failed.outcomes == ()
    assert [(s.name, s.ok, s.error) for s in failed.snapshot.sources] == [("actuator", False, "RuntimeError: boom")]
    assert "boom" in caplog.text
    script.failure = None
    assert len(loop.run_cycle("tick").outcomes) == 2


async def test_preview_inputs_stay_those_of_the_last_good_cycle_during_and_after_a_failed_one() -> None:
    script = Scripted(small_snapshot)
    loop, results = loop_over(script), []
    assert loop.preview_inputs is None
    loop.run_cycle("tick")
    first = loop.preview_inputs

    def record_inputs(seq: int) -> Snapshot:
        results.append(loop.preview_inputs)
        return small_snapshot(seq)

    script.see, script.failure = record_inputs, RuntimeError("boom")
    assert first is not None
    loop.run_cycle("tick")
    assert (results, loop.preview_inputs) == ([first], first)
    script.failure = None
    loop.run_cycle("tick")
    assert loop.preview_inputs is not None
    assert loop.preview_inputs.snapshot.seq == 3


async def test_the_next_cycle_counts_cpus_reserved_for_a_created_container() -> None:
    script = Scripted(small_snapshot)
    loop = loop_over(script, CANONICAL)
    given = CpusetEntry(owner_pool_name="dedicated", allocation_result="1", container_name="main", bound_numa=(0,))
    script.pending_originals.reservations.reserve("u-db", {"main": given}, 0.0)
    advice = loop.run_cycle("tick").advice
    assert advice is not None
    assert {pool.name: pool.cpus for pool in advice.pools} == {"share": (0,), "reclaim": (0,)}


async def test_a_bug_in_a_policy_changes_nothing_in_that_cycle() -> None:
    script = Scripted(lambda seq: msgspec.structs.replace(small_snapshot(seq), cgroups=cast(Any, None)))
    finished = loop_over(script).run_cycle("tick")
    assert script.decided == []
    assert finished.snapshot.sources[-1].name == "advisor"
    assert not finished.snapshot.sources[-1].ok


def cycle_with_checkpoint(directory: Path, script: Scripted) -> Cycle:
    return loop_over(script, CANONICAL, checkpoint=CpusetCheckpoint(directory, "b")).run_cycle("tick")


async def test_the_cpu_assignment_survives_a_restart(tmp_path: Path) -> None:
    finished = cycle_with_checkpoint(tmp_path, Scripted(small_snapshot))
    state = CpusetCheckpoint(tmp_path, "b").load(0)
    assert state is not None
    assert finished.advice is not None
    assert {pool.name: frozenset(pool.cpus) for pool in finished.advice.pools} == {
        name: state.pool(name) for name in ("share", "reclaim")
    }
    again = cycle_with_checkpoint(tmp_path, Scripted(small_snapshot))
    assert again.advice is not None
    assert again.advice.pools == finished.advice.pools


async def test_a_damaged_checkpoint_is_reported_and_rebuilt_from_the_cgroups(tmp_path: Path) -> None:
    (tmp_path / "cpu_plugin_state").write_text("{")

    def confined(seq: int) -> Snapshot:
        results = small_snapshot(seq)
        web = msgspec.structs.replace(results.cgroups["/web"], limits=CgroupLimits(cpus="1"))
        return msgspec.structs.replace(results, cgroups={**results.cgroups, "/web": web})

    finished = cycle_with_checkpoint(tmp_path, Scripted(confined))
    assert finished.advice is not None
    assert {pool.name: pool.cpus for pool in finished.advice.pools} == {"share": (1,), "reclaim": (0,)}
    assert "was damaged" in finished.startup_warnings[0]
    assert (tmp_path / "cpu_plugin_state.damaged-1").exists()


async def test_a_full_disk_is_reported_and_stops_no_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("agent.qrm.actuator.checkpoint.replace_file", full)
    finished = cycle_with_checkpoint(tmp_path, Scripted(small_snapshot))
    (status,) = finished.snapshot.sources
    assert (status.name, status.ok) == ("cpu-state", False)
    assert "No space left on device" in status.error
    assert {outcome.decision.knob for outcome in finished.outcomes} == {Knob.CPUSET}


async def test_a_shadow_policy_evaluates_the_same_cycles_and_changes_nothing() -> None:
    script = Scripted(small_snapshot)
    loop = loop_over(script, SHADOW)
    first, second = loop.run_cycle("tick"), loop.run_cycle("tick")
    assert [(r.shadow.policy, r.shadow.reclaimable_cores) for r in (first, second) if r.shadow] == [
        ("canonical", 1.0)
    ] * 2
    assert first.advice is not None
    assert first.advice.policy == "latency"
    assert {outcome.decision.knob for outcome in second.outcomes} == {Knob.IDLE, Knob.QUOTA}


async def test_a_shadow_policy_that_fails_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = Scripted(small_snapshot)
    loop = loop_over(script, SHADOW)

    def broken(snapshot: Snapshot, config: AgentConfig, *others: Any, **named: Any) -> Any:
        if config.advisor.policy == "canonical":
            raise RuntimeError("boom")
        return evaluate_policy(snapshot, config, *others, **named)

    monkeypatch.setattr("agent.loop.evaluate_policy", broken)
    finished = loop.run_cycle("tick")
    assert (finished.shadow, len(finished.outcomes)) == (None, 2)
    assert [(s.name, s.ok) for s in finished.snapshot.sources] == [("shadow", False)]
    assert "the shadow policy failed" in caplog.text
    assert "RuntimeError: boom" in caplog.text


async def test_with_act_off_nothing_is_decided() -> None:
    script = Scripted(small_snapshot)
    script.act = ActMode.OFF
    finished = loop_over(script).run_cycle("tick")
    assert (finished.advice, finished.outcomes, script.decided) == (None, (), [])


async def test_a_node_without_cpus_and_pods_has_cycles_too() -> None:
    empty = msgspec.structs.replace(
        snapshot(0, [], cpus=1), topology=msgspec.structs.replace(snapshot(0, []).topology, cpus=())
    )
    finished = loop_over(Scripted(lambda _seq: empty)).run_cycle("tick")
    assert [source for source in finished.snapshot.sources if not source.ok] == []


async def test_latency_above_the_target_starts_a_cycle_at_once() -> None:
    script = Scripted(lambda seq: small_snapshot(1) if seq == 1 else small_snapshot(2, {10: 200, 60_000: 100}))
    script.waits = {100: waits({10: 100})}
    loop = loop_over(script, AgentConfig(interval_s=60, watch_interval_s=0.02))
    async with running(loop):
        await have(script, 1)
        await asyncio.sleep(0.1)
        assert len(script.cycles) == 1, "nothing has happened yet"
        script.waits = {100: waits({10: 110, 60_000: 100})}
        await have(script, 2)
    alarm = script.cycles[1]
    assert alarm.trigger == "wait"
    assert alarm.advice is not None
    assert (alarm.advice.action, alarm.advice.reclaimable_cores) == ("shrink", 0.1)
    assert [(d.knob, d.value) for d in script.decided[-2:]] == [(Knob.IDLE, "1"), (Knob.QUOTA, "10000 100000")]


async def test_at_the_minimum_quota_alarms_start_no_more_cycles() -> None:
    script = Scripted(lambda seq: small_snapshot(1) if seq == 1 else small_snapshot(seq, {10: 200, 60_000: 100 * seq}))
    loop = loop_over(script, AgentConfig(interval_s=60, watch_interval_s=0.02))
    loop.run_cycle("tick")
    loop.run_cycle("tick")
    assert script.cycles[-1].advice is not None
    assert script.cycles[-1].advice.reclaimable_cores == 0.1
    async with running(loop):
        for number in range(10):
            script.waits = {100: waits({60_000: 100 * number})}
            await asyncio.sleep(0.03)
    assert len(script.cycles) == 3, "the first of run() alone"


async def test_without_a_reclaimed_pod_the_watch_reads_nothing() -> None:
    def online_only(seq: int) -> Snapshot:
        return msgspec.structs.replace(small_snapshot(seq), pods=(WEB,))

    script = Scripted(online_only)
    reads: list[Collection[int]] = []
    script.read_runq_latency = lambda ids: reads.append(ids) or {}  # type: ignore[method-assign, func-returns-value]
    loop = loop_over(script, AgentConfig(interval_s=60, watch_interval_s=0.02))
    async with running(loop):
        await have(script, 1)
        await asyncio.sleep(0.2)
    assert reads == []


async def test_cycles_are_an_interval_apart_and_none_is_made_up_after_an_overrun() -> None:
    script = Scripted(small_snapshot)
    loop = loop_over(script, AgentConfig(interval_s=0.2))
    async with running(loop):
        await have(script, 4)
    assert {finished.trigger for finished in script.cycles} == {"tick"}
    # Never sooner than half an interval (after an overrun), and on the whole not sooner than the interval.
    gaps = [after - before for before, after in pairwise(script.taken_at_ns[:4])]
    assert min(gaps) >= 0.09 * S
    assert sum(gaps) >= 0.49 * S


async def test_the_watch_survives_a_source_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    script = Scripted(small_snapshot)
    loop = loop_over(script, AgentConfig(interval_s=60, watch_interval_s=0.02))
    good = script.read_runq_latency

    def refuse(_cgroup_ids: Collection[int]) -> Mapping[int, RunqLatency]:
        raise OSError("gone")

    script.read_runq_latency = refuse  # type: ignore[method-assign]
    async with running(loop):
        await asyncio.sleep(0.2)
        assert caplog.text.count("run-queue latency cannot be read between cycles") == 1
        script.waits = {100: waits({10: 100})}
        script.read_runq_latency = good  # type: ignore[method-assign]
        await asyncio.sleep(0.1)
        script.waits = {100: waits({10: 110, 60_000: 100})}
        await have(script, 2)
    assert script.cycles[1].trigger == "wait"


async def test_new_settings_take_effect_with_the_next_cycle() -> None:
    script = Scripted(small_snapshot)
    loop = loop_over(script)
    before = loop.run_cycle("tick").advice
    loop.apply_config(AgentConfig(advisor=AdvisorConfig(enable_reclaim=False)))
    after = loop.run_cycle("tick").advice
    assert before is not None
    assert after is not None
    assert before.reported_headroom is not None
    assert after.reported_headroom is not None
    assert (before.reported_headroom.cores, after.reported_headroom.cores) == (None, 0.0)
    assert after.reported_headroom.reason.rule == "reclaim_off"


async def test_a_new_target_takes_effect_between_cycles_too() -> None:
    def config(target_wait_ms: float) -> AgentConfig:
        latency = LatencyConfig(target_wait_ms=target_wait_ms, stale_s=60)
        return AgentConfig(interval_s=60, watch_interval_s=0.02, advisor=AdvisorConfig(latency=latency))

    script = Scripted(small_snapshot)
    script.waits = {100: waits({10: 100})}
    loop = loop_over(script, config(1000))
    async with running(loop):
        await have(script, 1)
        await asyncio.sleep(0.05)
        script.waits = {100: waits({10: 110, 60_000: 100})}
        await asyncio.sleep(0.1)
        assert len(script.cycles) == 1, "60 ms are below a target of a second"
        loop.apply_config(config(10))
        script.waits = {100: waits({10: 120, 60_000: 200})}
        await have(script, 2)
    assert script.cycles[1].trigger == "wait"


class RaisingSink:
    """Raises in every cycle while `error` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = RuntimeError("sink bug")

    def publish(self, finished: Cycle) -> None:
        if self.error is not None:
            raise self.error


class RaisingTriggers:
    """A set of pressure triggers that always raises, behind a descriptor that is always readable."""

    def __init__(self) -> None:
        self.readable, writable = os.pipe()
        os.close(writable)
        self.calls = 0

    def fileno(self) -> int:
        return self.readable

    def watch(self, cgroups: Mapping[str, int]) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def fired(self) -> bool:
        self.calls += 1
        raise OSError(errno.EBADF, "Bad file descriptor")


def failures(finished: Cycle) -> dict[str, str]:
    return {source.name: source.error for source in finished.snapshot.sources if not source.ok}


async def test_a_sink_that_raises_is_reported_and_keeps_no_other_sink_from_its_cycle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script, sink = Scripted(small_snapshot), RaisingSink()
    loop = loop_over(script, None, sink)
    for _ in range(3):
        loop.run_cycle("tick")
    assert [failures(finished) for finished in script.cycles] == [
        {},
        *[{"sink-RaisingSink": "RuntimeError: sink bug"}] * 2,
    ]
    assert caplog.text.count("sink-RaisingSink failed") == 1, "the same failure is logged once"
    sink.error = None
    loop.run_cycle("tick")
    assert failures(loop.run_cycle("tick")) == {}


async def test_a_sensor_that_raises_leaves_a_cycle_without_measurements_and_without_decisions() -> None:
    script = Scripted(small_snapshot)
    loop = loop_over(script)
    before = loop.run_cycle("tick")
    decided = len(script.decided)
    script.see = cast(Any, lambda _seq: 1 / 0)
    failed = loop.run_cycle("tick")
    assert failures(failed) == {"pods": "the sensor failed", "sensor": "ZeroDivisionError: division by zero"}
    assert (failed.snapshot.seq, failed.snapshot.pods, failed.snapshot.cgroups) == (2, before.snapshot.pods, {})
    assert all(outcome.decision.knob is not Knob.QUOTA for outcome in failed.outcomes)
    assert len(script.decided) == decided
    script.see = small_snapshot
    assert failures(loop.run_cycle("tick")) == {}


async def test_pressure_triggers_that_raise_end_neither_the_agent_nor_its_cycles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script, triggers = Scripted(small_snapshot), RaisingTriggers()
    async with running(loop_over(script, AgentConfig(interval_s=0.05), triggers=triggers)):
        await have(script, 3)
    os.close(triggers.readable)
    assert triggers.calls == 1, "the descriptor stays readable, and is watched no more"
    assert failures(script.cycles[-1]) == {"psi-triggers": "OSError: [Errno 24] Too many open files"}
    assert caplog.text.count("the pressure triggers failed") == 1


class BlockedActuator(Scripted):
    """Writes to a FIFO that has no reader from cycle 2 on: `open` blocks until `release_writer`, as on a hung file system."""

    def __init__(self, see: Callable[[int], Snapshot], fifo: Path) -> None:
        super().__init__(see)
        self.fifo, self.blocked, self.watched = fifo, threading.Event(), 0
        self.threads: set[str] = set()
        os.mkfifo(fifo)

    def apply(
        self, decisions: Sequence[Decision], now_ns: int, *, quota_exempt: Collection[str]
    ) -> tuple[Outcome, ...]:
        self.threads.add(threading.current_thread().name)
        if len(self.taken_at_ns) == 2:
            self.blocked.set()
            with self.fifo.open("w"):
                pass
        return super().apply(decisions, now_ns, quota_exempt=quota_exempt)

    def read_runq_latency(self, cgroup_ids: Collection[int]) -> Mapping[int, RunqLatency]:
        self.watched += self.blocked.is_set()
        return super().read_runq_latency(cgroup_ids)

    def release_writer(self) -> None:
        """Lets the blocked `open` return. Harmless after it has."""
        os.close(os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK))


@asynccontextmanager
async def blocked_cycle(tmp_path: Path, *sinks: Any) -> AsyncIterator[tuple[BlockedActuator, Loop, asyncio.Task[None]]]:
    """A running loop whose second cycle waits in the kernel. After 5 s it is released, so that a failing test ends."""
    script = BlockedActuator(small_snapshot, tmp_path / "knob")
    script.waits = {100: waits({10: 100})}
    loop = loop_over(script, AgentConfig(interval_s=0.05, watch_interval_s=0.02), *sinks)
    release = threading.Timer(5, script.release_writer)
    release.start()
    task = asyncio.create_task(loop.run())
    try:
        while not script.blocked.is_set():
            await asyncio.sleep(0.01)
        yield script, loop, task
    finally:
        release.cancel()
        script.release_writer()
        loop.stop()
        await asyncio.wait([task])


async def test_a_blocked_write_stops_neither_an_http_answer_nor_the_latency_watch(tmp_path: Path) -> None:
    server = AgentWebServer(journal=cast(Any, DecisionJournal(None)), version="test")
    port = await server.start("127.0.0.1", 0)
    async with blocked_cycle(tmp_path, server) as (script, _loop, _task), aiohttp.ClientSession() as session:
        began = time.monotonic()
        for path in ("/healthz", "/metrics", "/api/v1/view"):
            async with session.get(f"http://127.0.0.1:{port}{path}") as response:
                assert response.status == 200, path
        await asyncio.sleep(0.2)
        assert time.monotonic() - began < 2
        assert script.watched >= 3, "the watch reads run-queue latency ten times a second, here 50 times"
        assert len(script.cycles) == 1, "the second cycle is still blocked"
    await server.stop()
    assert script.threads == {"cycle_0"}


async def test_a_latency_alarm_during_a_cycle_starts_the_next_one_at_once(tmp_path: Path) -> None:
    async with blocked_cycle(tmp_path) as (script, loop, _task):
        loop.apply_config(msgspec.structs.replace(AgentConfig(interval_s=60), watch_interval_s=0.02))
        script.waits = {100: waits({10: 110, 60_000: 100})}
        await asyncio.sleep(0.2)
        script.release_writer()
        await have(script, 3)
        assert [finished.trigger for finished in script.cycles] == ["tick", "tick", "wait"]


async def test_stop_and_cancel_wait_for_the_cycle_under_way(tmp_path: Path) -> None:
    async with blocked_cycle(tmp_path) as (script, loop, task):
        loop.stop()
        await asyncio.sleep(0.1)
        assert not task.done(), "a cycle that still writes is not left behind"
        script.release_writer()
        await asyncio.wait_for(task, 5)
        assert len(script.cycles) == 2
    (tmp_path / "cancelled").mkdir()
    async with blocked_cycle(tmp_path / "cancelled") as (script, loop, task):
        threading.Timer(0.2, script.release_writer).start()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert len(script.decided) == 4, "the cycle under way wrote its last decision before"


async def test_a_new_configuration_during_a_cycle_takes_effect_with_the_next_one(tmp_path: Path) -> None:
    evictor = EvictionRunner(AgentConfig(), None)
    async with blocked_cycle(tmp_path) as (script, loop, _task):
        cast(Any, loop)._evictor = evictor
        loop.apply_config(
            AgentConfig(
                interval_s=0.05,
                advisor=AdvisorConfig(enable_reclaim=False),
                eviction=EvictionConfig(plugins=("rss-overuse",)),
            )
        )
        assert not evictor.is_enabled("rss-overuse"), "the cycle under way ends as it began"
        script.release_writer()
        await have(script, 3)
        assert evictor.is_enabled("rss-overuse")
    rules = [cast(Any, finished.advice).reported_headroom.reason.rule for finished in script.cycles[:3]]
    assert rules[2] == "reclaim_off"
    assert "reclaim_off" not in rules[:2]


async def test_sinks_of_the_event_loop_are_called_on_it_and_others_in_the_cycle_thread() -> None:
    calls: list[tuple[str, str]] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def publish(self, finished: Cycle) -> None:
            calls.append((self.name, threading.current_thread().name))

    script = Scripted(small_snapshot)
    loop = loop_over(
        script,
        None,
        Named("page"),
        thread_sinks=[Named("journal")],
        before_cycle=lambda: calls.append(("before", threading.current_thread().name)),
    )
    async with running(loop):
        await have(script, 1)
    here = threading.current_thread().name
    assert calls[:3] == [("before", here), ("journal", "cycle_0"), ("page", here)]


async def test_a_sink_of_the_cycle_thread_that_raises_is_reported_too() -> None:
    loop = loop_over(Scripted(small_snapshot), thread_sinks=[RaisingSink()])
    loop.run_cycle("tick")
    assert failures(loop.run_cycle("tick")) == {"sink-RaisingSink": "RuntimeError: sink bug"}
