"""Five minutes of colocation, made from real parts: the advisor and the CPU policy judge a simulated node of four CPUs.

An online service breathes with its load; batch work takes what it is lent. At SPIKE_S the load jumps within one second:
the waits of that second breach the target, lent CPU falls to the minimum at once and comes back slowly. At SWELL_S
a smaller breach halves what batch work uses. Deterministic: no clock, no chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, erf, log, pi, sqrt

import msgspec

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.config.config import AgentConfig
from agent.qrm.decisions.cpu import cpu_requests
from agent.qrm.decisions.knob_requests import resolve_knob_requests
from api.cpu import Cpu, Topology
from api.decision import ActMode, Cycle, Decision, JournalEntry, Outcome, OutcomeStatus
from api.histogram import BOUNDS_NS, SLOT_COUNT
from api.knobs import Knob
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import (
    CgroupSample,
    ComponentHealth,
    CpuTimes,
    NodeSample,
    Pressure,
    RequestLatency,
    RunqLatency,
    Snapshot,
)
from tests.builders.pods import reclaimed, shared

CPUS = 4
S = 1_000_000_000
MS = 1_000_000
STARTED_AT_NS = 1_795_269_600 * S
"""Wall time of the first round: 2026-11-21 14:00:00 UTC."""
SPIKE_S, SPIKE_END_S = 200, 226
SWELL_S = 92
REQUEST_CORES = 0.0005
LATENCY_BOUNDS_S = (
    0.0005,
    0.001,
    0.0015,
    0.002,
    0.003,
    0.004,
    0.006,
    0.008,
    0.012,
    0.016,
    0.024,
    0.032,
    0.064,
    0.128,
    0.5,
)

WEB = shared("web", cgroup="/dioptase-demo-online", cpu_request=2.0)
BATCH = reclaimed("batch", cgroup="/dioptase-demo-batch")
LONG = Pod(
    uid="team-search/query-frontend", namespace="team-search", name="query-frontend-6f7c9d8b5-x2x7z-blue-canary-eu-west-1",
    qos=QoSLevel.SHARED,
    containers=(
        Container(name="query-frontend", cgroup="/kubepods/burstable/pod7d9f/1f2e3d4c5b6a79880f1e2d3c4b5a69788796a5b4c3d2e1f0"),
        Container(name="envoy-sidecar", cgroup="/kubepods/burstable/pod7d9f/gone"),
    ),
)  # fmt: skip
HOSTILE = Pod(
    uid="x", namespace="<b>ns</b>", name="<img src=x onerror=alert(1)>", qos=QoSLevel.RECLAIMED,
    containers=(Container(name="\"'><script>alert(2)</script>", cgroup="/a'b\"c&lt;\x1b[31m\u202e"),),
)  # fmt: skip
CONFIG = AgentConfig()
KNOBS = frozenset({Knob.IDLE, Knob.QUOTA})


class Node:
    """Counters of the simulated machine, and its knobs."""

    def __init__(self) -> None:
        self.usage_ns = {"web": 0, "batch": 0}
        self.idle_ns = self.steal_ns = self.stalled_us = 0
        self.slots = {"web": [0] * SLOT_COUNT, "batch": [0] * SLOT_COUNT}
        self.wait_ns = {"web": 0, "batch": 0}
        self.periods = self.throttled_periods = self.throttled_ns = 0
        self.requests = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.request_s = 0.0
        self.values: dict[Knob, str] = {Knob.IDLE: "0", Knob.QUOTA: "max 100000"}

    @property
    def limit_cores(self) -> float:
        quota, period = self.values[Knob.QUOTA].split()
        return CPUS if quota == "max" else int(quota) / int(period)

    def pass_second(self, t: int) -> None:
        rate = load(t)
        online = rate * REQUEST_CORES
        room = CPUS - online - 0.1
        batch = max(min(self.limit_cores, room), 0.05)
        self.usage_ns["web"] += int(online * S)
        self.usage_ns["batch"] += int(batch * S)
        self.steal_ns += 20 * MS
        self.idle_ns += int(max(CPUS - online - batch - 0.08, 0) * S)
        self.stalled_us += int(min(0.08 + 0.1 * online, 0.9) * 1e6)
        if self.limit_cores < room:
            self.periods += 10
            self.throttled_periods += 9
            self.throttled_ns += int((room - batch) * 0.8 * S)
        tail_ms = (1.2 + 1.1 * online) * (0.5 + 0.5 * batch / CPUS) * (1 + 0.1 * cos(t * 2.3) * cos(t * 0.9))
        if t == SPIKE_S:
            tail_ms = 46.0
        elif SPIKE_S < t < SPIKE_S + 9:
            tail_ms = 9.0 - 0.2 * (t - SPIKE_S)
        elif t in (SWELL_S, SWELL_S + 1):
            tail_ms = 19.0
        self._wait("web", int(rate * 2.2) + 300, (0.006, 1.1, 0.96), (tail_ms * 0.55, 0.55, 0.04))
        self._wait("batch", 420, (2.2, 1.3, 0.8), (45 / max(batch, 0.2), 1.0, 0.2))
        for i, count in enumerate(
            spread(int(rate), [b * 1000 for b in LATENCY_BOUNDS_S], (0.85, 0.38, 0.95), (tail_ms * 0.6, 0.5, 0.05))
        ):
            self.requests[i] += count
        self.request_s += rate * (0.0009 + tail_ms / 40_000)

    def _wait(self, text: str, count: int, *parts: tuple[float, float, float]) -> None:
        for k, waits in enumerate(spread(count, [b / MS for b in BOUNDS_NS], *parts)):
            self.slots[text][k] += waits
            middle = BOUNDS_NS[min(k, SLOT_COUNT - 2)]
            self.wait_ns[text] += waits * middle * 3 // 4

    def sample(self, text: str, path: str, cgroup_id: int) -> CgroupSample:
        batch = text == "batch"
        return CgroupSample(
            path=path,
            id=cgroup_id,
            cpu_usage_ns=self.usage_ns[text],
            periods=self.periods if batch else 0,
            throttled_periods=self.throttled_periods if batch else 0,
            throttled_ns=self.throttled_ns if batch else 0,
            threads=8,
            memory_bytes=(23 << 20) + 4096 * 17 if batch else 41 << 20,
            cpu_pressure=Pressure(some_us=self.stalled_us if batch else self.stalled_us // 9, some_avg10=3.2),
            wait=RunqLatency(sum_ns=self.wait_ns[text], count=sum(self.slots[text]), slots=tuple(self.slots[text])),
        )

    def sense(self, t: int, pods: tuple[Pod, ...], sources: tuple[ComponentHealth, ...]) -> Snapshot:
        now_ns = 1000 * S + t * S
        busy = sum(self.usage_ns.values()) + t * 80 * MS
        long = CgroupSample(path=LONG.containers[0].cgroup, id=303, cpu_usage_ns=31 * MS * t)
        cgroups = [
            self.sample("web", WEB.containers[0].cgroup, 301),
            self.sample("batch", BATCH.containers[0].cgroup, 302),
            long,
            CgroupSample(path="/", id=1),
        ]
        cpu, each = (
            CpuTimes(user_ns=busy // parts, nice_ns=0, system_ns=0, idle_ns=self.idle_ns // parts, iowait_ns=0, irq_ns=0,
                     softirq_ns=0, steal_ns=self.steal_ns // parts)
            for parts in (1, CPUS)
        )  # fmt: skip
        return Snapshot(
            seq=t + 1,
            taken_at_ns=now_ns,
            wall_time_ns=STARTED_AT_NS + t * S,
            boot_id="boot",
            topology=Topology(cpus=tuple(Cpu(id=i, core=i, socket=0, numa=0) for i in range(CPUS))),
            node=NodeSample(
                cpu=cpu,
                per_cpu=dict.fromkeys(range(CPUS), each),
                cpu_pressure=Pressure(some_us=self.stalled_us, some_avg10=8.0),
            ),
            cgroups={sample.path: sample for sample in cgroups},
            pods=pods,
            indicators={WEB.key: RequestLatency(bounds_s=LATENCY_BOUNDS_S, buckets=tuple(_running_total(self.requests)),
                                           sum_s=self.request_s, sampled_at_ns=now_ns)},
            sources=sources,
        )  # fmt: skip


def load(t: int) -> float:
    """Requests a second."""
    if SPIKE_S <= t < SPIKE_END_S:
        return 5200.0
    wobble = 60 * cos(t * 1.7) + 40 * cos(t * 0.61)
    return 1900 - 1200 * cos(2 * pi * t / 150) + wobble


def spread(count: int, bounds: Sequence[float], *parts: tuple[float, float, float]) -> list[int]:
    """How many of `count` lie up to each bound, for a mixture of log-normals (median, sigma, share); one more beyond."""

    def below(x: float) -> float:
        return sum(share * (1 + erf(log(x / median) / sigma / sqrt(2))) / 2 for median, sigma, share in parts)

    ends = [round(count * below(bound)) for bound in bounds] + [count]
    return [high - low for low, high in zip([0, *ends], ends, strict=False)]


def _running_total(counts: Sequence[int]) -> list[int]:
    total, result = 0, []
    for count in counts:
        total += count
        result.append(total)
    return result


SOURCES = (
    ComponentHealth(name="pods", ok=True, duration_ns=20_000),
    ComponentHealth(name="topology", ok=True, duration_ns=40_000),
    ComponentHealth(name="node", ok=True, duration_ns=190_000),
    ComponentHealth(name="cgroups", ok=True, duration_ns=1_450_000),
    ComponentHealth(name="waits", ok=True, duration_ns=310_000, detail="tp_btf"),
)
FAILING = ComponentHealth(
    name="psi", ok=False, duration_ns=40_000, error="/proc/pressure/cpu: Operation not supported",
    remedy="boot the kernel with psi=1",
)  # fmt: skip


class ColocationRun(msgspec.Struct, frozen=True, kw_only=True):
    """What happened: every round, and the journal that the agent would have kept."""

    rounds: tuple[Cycle, ...]
    entries: tuple[JournalEntry, ...]


def simulate_run(
    seconds: int = 300, *, act: ActMode = ActMode.ON, others: tuple[Pod, ...] = (), sources: tuple[ComponentHealth, ...] =
    SOURCES, startup_warnings: tuple[str, ...] = (), config: AgentConfig = CONFIG,
) -> ColocationRun:  # fmt: skip
    """Let the node live for so long under the agent's advice."""
    node, values, pods = Node(), PolicyState(), (WEB, BATCH, *others)
    rounds: list[Cycle] = []
    entries: list[JournalEntry] = []
    for t in range(seconds + 1):
        if t:
            node.pass_second(t)
        snapshot = node.sense(t, pods, sources)
        evaluation, values = evaluate_policy(snapshot, config, values, snapshot.taken_at_ns)
        advice = evaluation.advice
        outcomes: tuple[Outcome, ...] = ()
        if advice is not None and act is not ActMode.OFF:
            knobs = dict.fromkeys(snapshot.cgroups, KNOBS)
            requests = cpu_requests(advice, snapshot, knobs, evaluation.placement)
            outcomes = tuple(_act(d, node, act) for d in resolve_knob_requests(requests, snapshot, knobs))
        trigger = "wait" if t == SPIKE_S else "tick"
        finished = Cycle(
            snapshot=snapshot, previous=rounds[-1].snapshot if rounds else None, act=act, trigger=trigger,
            advice=None if act is ActMode.OFF else advice, memory=evaluation.memory, outcomes=outcomes,
            duration_ns=4_200_000, startup_warnings=startup_warnings,
        )  # fmt: skip
        rounds.append(finished)
        for outcome in outcomes:
            if outcome.status is not OutcomeStatus.UNCHANGED and not _is_repeated(entries, outcome):
                entries.append(
                    JournalEntry(
                        seq=len(entries) + 1,
                        wall_time_ns=snapshot.wall_time_ns,
                        cycle_seq=snapshot.seq,
                        trigger=trigger,
                        policy="latency",
                        outcome=outcome,
                    )
                )
    return ColocationRun(rounds=tuple(rounds), entries=tuple(entries))


def _act(decision: Decision, node: Node, act: ActMode) -> Outcome:
    before = node.values[decision.knob]
    if before == decision.value:
        return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, before=before, after=before)
    if act is ActMode.DRY_RUN:
        return Outcome(decision=decision, status=OutcomeStatus.DRY_RUN, before=before)
    node.values[decision.knob] = decision.value
    return Outcome(decision=decision, status=OutcomeStatus.APPLIED, before=before, after=decision.value)


def _is_repeated(entries: Sequence[JournalEntry], outcome: Outcome) -> bool:
    """A journal writes the same dry-run down once."""
    same = [e.outcome for e in entries if e.outcome.decision.knob is outcome.decision.knob]
    return bool(same) and outcome.status is OutcomeStatus.DRY_RUN and same[-1].decision.value == outcome.decision.value


def with_every_status(story: ColocationRun) -> tuple[JournalEntry, ...]:
    """The story's journal and, newest, one entry of every other status, one of them with hostile names."""
    last = story.entries[-1]
    decision = last.outcome.decision
    hostile = msgspec.structs.replace(
        decision, pod=HOSTILE.key, cgroup=HOSTILE.containers[0].cgroup, knob=Knob.CPUSET, value="2-3"
    )
    more = (
        Outcome(
            decision=decision, status=OutcomeStatus.REFUSED, before="max 100000", error="Permission denied (EACCES)"
        ),
        Outcome(decision=decision, status=OutcomeStatus.DRY_RUN, before="max 100000"),
        Outcome(decision=decision, status=OutcomeStatus.VANISHED),
        Outcome(
            decision=hostile,
            status=OutcomeStatus.MISMATCH,
            before="0-3",
            after="0-1",
            clamped_from="2-9",
            error="<i>read back</i> 0-1",
        ),
    )
    return story.entries + tuple(
        msgspec.structs.replace(last, seq=last.seq + i, wall_time_ns=last.wall_time_ns + i * S, outcome=outcome)
        for i, outcome in enumerate(more, 1)
    )


def with_clock_step(story: ColocationRun, seq: int, by_s: int) -> ColocationRun:
    """Return the same run with a wall clock that was set forwards or back before that cycle."""

    def describe(snapshot: Snapshot) -> Snapshot:
        by_ns = by_s * S if snapshot.seq >= seq else 0
        return msgspec.structs.replace(snapshot, wall_time_ns=snapshot.wall_time_ns + by_ns)

    rounds = [
        msgspec.structs.replace(
            r, snapshot=describe(r.snapshot), previous=None if r.previous is None else describe(r.previous)
        )
        for r in story.rounds
    ]
    entries = [
        msgspec.structs.replace(e, wall_time_ns=e.wall_time_ns + (by_s * S if e.cycle_seq >= seq else 0))
        for e in story.entries
    ]
    return ColocationRun(rounds=tuple(rounds), entries=tuple(entries))


class MemoryJournal:
    """A journal in memory (api.interfaces.DecisionRecord)."""

    def __init__(self, entries: Sequence[JournalEntry] = ()) -> None:
        self.all = list(entries)

    def entries(
        self, after: int = 0, limit: int = 200, expected: Callable[[JournalEntry], bool] | None = None
    ) -> Sequence[JournalEntry]:
        return [entry for entry in self.all if entry.seq > after and (expected is None or expected(entry))][-limit:]
