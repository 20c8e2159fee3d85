"""Evaluates recorded cycles under other policies, and scores what they would have reclaimed, missed and delayed.
Pure. Two assumptions apply: throttled batch work would have used all it was granted, and latency that it caused
scales with its use. A simulation needs neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from agent.advisor.cpu_estimate import online_containers
from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.interference import attribute_latency
from agent.advisor.pod_usage import reclaimed_cgroups, reclaimed_use_cores
from agent.config.config import AgentConfig
from agent.qrm.decisions.cpu import compose_decisions, managed_cgroups
from agent.qrm.knobs.knob_files import KNOB_SPECS
from api.decision import Advice, Cycle, Decision
from api.eviction import EvictionVictim
from api.histogram import SLOT_COUNT, quantile_ns
from api.knobs import Knob
from api.rates import Rates, cgroups_by_container, compute_rates
from api.snapshot import Snapshot
from api.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from agent.eviction.runner import EvictionRunner

SATURATED_RATIO = 0.95
"""Batch work that used this part of its reclaimable CPU would have used more."""


class CycleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the time between two cycles, which no policy changes. Cores, and core seconds per second."""

    at_s: float
    """Time since the first cycle, without the time between two boots."""
    boot: int = 0
    """Number of boots before this one."""
    interval_s: float
    node_cpus: int
    online_cores: float
    """CPU use of online pods."""
    demand_cores: float
    """Use of online pods plus their run-queue latency."""
    batch_cores: float
    batch_reclaimable_cores: float | None
    """Reclaimable CPU at that time; None without a decision."""
    interference_cores: float
    """Run-queue latency of online pods while batch work had the CPU."""
    waits: tuple[int, ...]
    """Run-queue latency of online pods, by histogram slot."""


class PolicyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one cycle under one policy."""

    reclaimable_cores: float = msgspec.field(name="lent_cores")
    headroom_cores: float | None = msgspec.field(name="promised_cores")
    action: str
    rule: str
    changes: int
    """Knobs that would have been written."""
    batch_cores: float
    """CPU use of batch work, measured or expected."""
    interference_cores: float
    """Run-queue latency of online pods caused by batch work, measured or expected."""
    short_cores: float
    """Demand of online pods beyond the CPUs of their own pools, if the pools are separate."""
    victims: frozenset[str] | None = None
    """Uids of pods that would have been evicted; None without an eviction plugin."""


class PolicyReplay:
    """One policy, evaluated cycle by cycle."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._state = PolicyState()
        self._values: dict[tuple[str, Knob], str] = {}
        self.decisions: tuple[Decision, ...] = ()
        """Decisions of the latest cycle."""
        self.victims: tuple[EvictionVictim, ...] | None = None
        """Pods that would have been evicted in the latest cycle; None without an eviction plugin."""
        self._evictor: EvictionRunner | None = None
        if config.eviction.plugins:
            from agent.eviction.runner import EvictionRunner  # noqa: PLC0415 - most configurations have no eviction plugin

            self._evictor = EvictionRunner(config, None)

    def evaluate(self, snapshot: Snapshot, rates: Rates | None = None) -> tuple[Advice | None, int]:
        """Evaluate one cycle; return the advice and the number of knobs that would have changed.

        `rates` are those since the previous cycle; without them they are computed.
        """
        result, self._state = evaluate_policy(snapshot, self._config, self._state, snapshot.taken_at_ns, rates=rates)
        advice = result.advice
        if self._evictor is not None:
            now_ns = snapshot.taken_at_ns
            self.victims = self._evictor.run_cycle(snapshot, advice, self._state, now_ns).victims
        if advice is None:
            return None, 0
        knobs = dict.fromkeys(managed_cgroups(snapshot.pods, snapshot.cgroups), frozenset(KNOB_SPECS))
        self.decisions = compose_decisions(result, snapshot, knobs)
        values = {(decision.cgroup, decision.knob): decision.value for decision in self.decisions}
        changes = sum(self._values.get(key) != value for key, value in values.items())
        self._values = values
        return advice, changes


def replay_cycles(
    cycles: Iterable[Cycle], policies: Mapping[str, AgentConfig]
) -> Iterator[tuple[CycleFacts, dict[str, PolicyOutcome]]]:
    """Yield every cycle from the second of each boot on, with the outcome of every policy.

    Policies restart with each boot, because its clock starts again.
    """
    replays = {name: PolicyReplay(config) for name, config in policies.items()}
    before: Cycle | None = None
    start_ns, at_ns, boot = 0, 0, 0
    for cycle in cycles:
        snapshot = cycle.snapshot
        if before is None:
            start_ns = snapshot.taken_at_ns
        elif _is_reboot(before.snapshot, snapshot):
            replays = {name: PolicyReplay(config) for name, config in policies.items()}
            start_ns, boot, before = snapshot.taken_at_ns - at_ns, boot + 1, None
        change = compute_rates(before.snapshot, snapshot) if before is not None else None
        evaluations = {name: replay.evaluate(snapshot, change) for name, replay in replays.items()}
        if change is not None and before is not None:
            fact = measure_cycle(before, cycle, change, start_ns, boot)
            yield (
                fact,
                {name: evaluate_outcome(fact, *evaluations[name], replay.victims) for name, replay in replays.items()},
            )
        at_ns, before = snapshot.taken_at_ns - start_ns, cycle


def _is_reboot(before: Snapshot, now: Snapshot) -> bool:
    """Whether the machine rebooted between the snapshots; not every machine has boot ids."""
    return now.boot_id != before.boot_id or now.taken_at_ns < before.taken_at_ns


def measure_cycle(before: Cycle, cycle: Cycle, change: Rates, start_ns: int, boot: int = 0) -> CycleFacts:
    """Return the measurements between two cycles."""
    snapshot = cycle.snapshot
    online = [c.cgroup for c in online_containers(snapshot)]
    rates = [rate for path in online if (rate := change.cgroups.get(path)) is not None]
    used = sum(rate.cpu_cores or 0.0 for rate in rates)
    slots = [rate.wait.slots for rate in rates if rate.wait is not None and rate.wait.slots is not None]
    return CycleFacts(
        at_s=(snapshot.taken_at_ns - start_ns) / NS_PER_S,
        boot=boot,
        interval_s=change.node.interval_ns / NS_PER_S,
        node_cpus=len(snapshot.topology.cpus),
        online_cores=used,
        demand_cores=used + sum(rate.wait_cores or 0.0 for rate in rates),
        batch_cores=reclaimed_use_cores(snapshot, change) or 0.0,
        batch_reclaimable_cores=before.advice.reclaimable_cores if before.advice is not None else None,
        interference_cores=_interference_ns(before.snapshot, snapshot, online) / change.node.interval_ns,
        waits=tuple(map(sum, zip(*slots, strict=True))) if slots else (0,) * SLOT_COUNT,
    )


def _interference_ns(before: Snapshot, now: Snapshot, online: Sequence[str]) -> int:
    reclaimed = reclaimed_cgroups(now)
    measured = (
        attribute_latency(paths, reclaimed, before, now) for paths in cgroups_by_container(now.cgroups, online).values()
    )
    return sum(sum(interference.by_reclaimed.values()) for interference in measured if interference is not None)


def evaluate_outcome(
    fact: CycleFacts, advice: Advice | None, changes: int, victims: Sequence[EvictionVictim] | None = None
) -> PolicyOutcome:
    """Return the expected outcome of a policy's advice. Without advice, batch work is not limited."""
    cpus = float(fact.node_cpus)
    reclaimable = cpus if advice is None else advice.reclaimable_cores
    pools = {} if advice is None else {pool.name: set(pool.cpus) for pool in advice.pools}
    own = set[int]().union(*(cpus for name, cpus in pools.items() if name != "reclaim"))
    separate = bool(own) and not own & pools.get("reclaim", set())
    limited = (
        fact.batch_reclaimable_cores is not None and fact.batch_cores >= SATURATED_RATIO * fact.batch_reclaimable_cores
    )
    batch_cores = (
        min(reclaimable, max(cpus - fact.online_cores, 0.0)) if limited else min(reclaimable, fact.batch_cores)
    )
    share = batch_cores / fact.batch_cores if fact.batch_cores else 0.0
    return PolicyOutcome(
        reclaimable_cores=reclaimable,
        headroom_cores=None if advice is None else advice.headroom_cores,
        action="none" if advice is None else advice.action,
        rule="" if advice is None else advice.reason.rule,
        changes=changes,
        batch_cores=batch_cores,
        interference_cores=0.0 if separate else fact.interference_cores * share,
        short_cores=max(fact.demand_cores - len(own), 0.0) if separate else 0.0,
        victims=None if victims is None else frozenset(each.uid for each in victims if not each.notify),
    )


class PolicyScore(msgspec.Struct, frozen=True, kw_only=True):
    """Score of one policy over a whole recording or simulation; means are over time."""

    rounds: int
    reclaimable_cores: float = msgspec.field(name="lent_cores")
    batch_cores: float
    harm_ms_per_s: float
    short_ms_per_s: float
    wait_p50_ms: float | None
    """Run-queue latency of online pods; as measured, in a recording."""
    wait_p99_ms: float | None
    headroom_cores: float | None = msgspec.field(name="promised_cores")
    missed_ratio: float | None
    """Part of the cycles whose headroom exceeded what the peak of online use within the horizon left."""
    missed_cores: float | None
    """Mean excess of those cycles."""
    shrinks: int
    changes: int
    victims: int | None
    """Pods that would have been evicted, each counted once and soft evictions excluded; None without an eviction plugin."""


class ScoreCounters:
    """Accumulates the outcomes of one policy. Headroom is compared with online use within `horizon_s`.

    Headroom whose horizon is cut short by a reboot does not count.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._seconds = self._reclaimable = self._batch = self._harm = self._short = self._headroom = 0.0
        self._headroom_s = 0.0
        self._rounds = self._shrinks = self._changes = 0
        self._slots = [0] * SLOT_COUNT
        self._open: deque[tuple[float, float]] = deque()
        """Headroom whose horizon is not over: its time, and the online use from which it is missed."""
        self._peaks: deque[tuple[float, float]] = deque()
        """Peaks in descending order, so that the first one is the maximum since any open headroom."""
        self._held = self._missed = 0
        self._missed_cores = 0.0
        self._boot = 0
        self._victims: frozenset[str] | None = None

    def add(self, fact: CycleFacts, outcome: PolicyOutcome) -> None:
        seconds = fact.interval_s
        self._rounds += 1
        self._seconds += seconds
        self._reclaimable += outcome.reclaimable_cores * seconds
        self._batch += outcome.batch_cores * seconds
        self._harm += outcome.interference_cores * seconds
        self._short += outcome.short_cores * seconds
        self._shrinks += outcome.action == "shrink"
        self._changes += outcome.changes
        if outcome.victims is not None:
            self._victims = (self._victims or frozenset()) | outcome.victims
        self._slots = [a + b for a, b in zip(self._slots, fact.waits, strict=True)]
        if fact.boot != self._boot:
            self._boot = fact.boot
            self._open.clear()
            self._peaks.clear()
        while self._peaks and self._peaks[-1][1] <= fact.online_cores:
            self._peaks.pop()
        self._peaks.append((fact.at_s, fact.online_cores))
        self._close_due(fact.at_s)
        if outcome.headroom_cores is not None:
            self._headroom += outcome.headroom_cores * seconds
            self._headroom_s += seconds
            self._open.append((fact.at_s, fact.node_cpus - outcome.headroom_cores))

    def _close_due(self, now_s: float) -> None:
        while self._open and now_s - self._open[0][0] >= self._horizon_s:
            start_s, room = self._open.popleft()
            while self._peaks[0][0] <= start_s:
                self._peaks.popleft()
            short = self._peaks[0][1] - room
            self._held += short <= 0
            self._missed += short > 0
            self._missed_cores += max(short, 0.0)

    def score(self) -> PolicyScore:
        seconds, closed = self._seconds or 1.0, self._held + self._missed
        p50, p99 = (quantile_ns(self._slots, q) for q in (0.5, 0.99))
        return PolicyScore(
            rounds=self._rounds,
            reclaimable_cores=self._reclaimable / seconds,
            batch_cores=self._batch / seconds,
            harm_ms_per_s=1000 * self._harm / seconds,
            short_ms_per_s=1000 * self._short / seconds,
            wait_p50_ms=None if p50 is None else p50 / NS_PER_MS,
            wait_p99_ms=None if p99 is None else p99 / NS_PER_MS,
            headroom_cores=self._headroom / self._headroom_s if self._headroom_s else None,
            missed_ratio=self._missed / closed if closed else None,
            missed_cores=self._missed_cores / self._missed if self._missed else None,
            shrinks=self._shrinks,
            changes=self._changes,
            victims=None if self._victims is None else len(self._victims),
        )
