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
from agent.advisor.pod_usage import reclaimed_use_cores
from agent.config.config import AgentConfig
from agent.qrm.decisions.compose import compose_decisions
from agent.qrm.decisions.cpu import managed_cgroups
from agent.qrm.knobs.knob_files import KNOB_SPECS
from api.decision import Advice, Cycle, Decision
from api.eviction import EvictionVictim
from api.histogram import SLOT_COUNT, quantile_ns
from api.knobs import Knob
from api.qos import QoSLevel
from api.rates import Rates, cgroups_by_container, compute_rates
from api.snapshot import Snapshot

if TYPE_CHECKING:
    from agent.eviction.runner import EvictionRunner

NS_PER_S = 1_000_000_000
SATURATED_RATIO = 0.95
"""Batch work that used so much of what it was lent would have used more."""


class CycleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a round says of the time since the one before it, whatever any policy says. Cores, and core seconds a second."""

    at_s: float
    """Since the first round; the time between two boots is left out."""
    boot: int = 0
    """How many boots there were before this one."""
    interval_s: float
    node_cpus: int
    online_cores: float
    """What online pods used,"""
    demand_cores: float
    """and that with what they waited for."""
    batch_cores: float
    batch_lent_cores: float | None
    """What it was lent at that time; None where nobody decided."""
    interference_cores: float
    """What online pods waited while batch work had the CPU."""
    waits: tuple[int, ...]
    """Of online pods, in slots."""


class PolicyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy makes of one round."""

    reclaimable_cores: float = msgspec.field(name="lent_cores")
    headroom_cores: float | None = msgspec.field(name="promised_cores")
    action: str
    rule: str
    changes: int
    """Knobs that would have been written."""
    batch_cores: float
    """What batch work used, or would have."""
    interference_cores: float
    """What online pods waited for batch work, or would have,"""
    short_cores: float
    """and what they wanted beyond the CPUs of their own pool, where the pools are kept apart."""
    victims: frozenset[str] | None = None
    """Uids of pods that would have had to leave; None where no eviction plugin is named."""


class PolicyReplay:
    """One policy, played through rounds as they come."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._remembered = PolicyState()
        self._known: dict[tuple[str, Knob], str] = {}
        self.decisions: tuple[Decision, ...] = ()
        """Of the latest round,"""
        self.victims: tuple[EvictionVictim, ...] | None = None
        """and who would have had to leave in it; None where no eviction plugin is named."""
        self._evictor: EvictionRunner | None = None
        if config.eviction.plugins:
            from agent.eviction.runner import EvictionRunner  # noqa: PLC0415 - most settings evict nobody

            self._evictor = EvictionRunner(config, None)

    def judge(self, snapshot: Snapshot) -> tuple[Advice | None, int]:
        """The policy's advice, and how many knobs it would have turned."""
        judged, self._remembered = evaluate_policy(snapshot, self._config, self._remembered, snapshot.taken_at_ns)
        advice = judged.advice
        if self._evictor is not None:
            now_ns = snapshot.taken_at_ns
            self.victims = self._evictor.run_cycle(snapshot, advice, self._remembered, now_ns).victims
        if advice is None:
            return None, 0
        knobs = dict.fromkeys(managed_cgroups(snapshot.pods), frozenset(KNOB_SPECS))
        self.decisions = compose_decisions(judged, snapshot, knobs)
        wanted = {(decision.cgroup, decision.knob): decision.value for decision in self.decisions}
        changes = sum(self._known.get(key) != value for key, value in wanted.items())
        self._known = wanted
        return advice, changes


def replay_cycles(
    rounds: Iterable[Cycle], policies: Mapping[str, AgentConfig]
) -> Iterator[tuple[CycleFacts, dict[str, PolicyOutcome]]]:
    """Every round from the second of each boot on, with what each policy would have made of it. No policy remembers anything
    of another boot, whose clock says nothing in this one."""
    players = {name: PolicyReplay(config) for name, config in policies.items()}
    before: Cycle | None = None
    began_ns, at_ns, boot = 0, 0, 0
    for finished in rounds:
        snapshot = finished.snapshot
        if before is None:
            began_ns = snapshot.taken_at_ns
        elif _is_reboot(before.snapshot, snapshot):
            players = {name: PolicyReplay(config) for name, config in policies.items()}
            began_ns, boot, before = snapshot.taken_at_ns - at_ns, boot + 1, None
        judged = {name: player.judge(snapshot) for name, player in players.items()}
        change = compute_rates(before.snapshot, snapshot) if before is not None else None
        if change is not None and before is not None:
            fact = measure_cycle(before, finished, change, began_ns, boot)
            yield (
                fact,
                {name: evaluate_outcome(fact, *judged[name], player.victims) for name, player in players.items()},
            )
        at_ns, before = snapshot.taken_at_ns - began_ns, finished


def _is_reboot(before: Snapshot, now: Snapshot) -> bool:
    """Between these two; not every machine names its boots."""
    return now.boot_id != before.boot_id or now.taken_at_ns < before.taken_at_ns


def measure_cycle(before: Cycle, finished: Cycle, change: Rates, began_ns: int, boot: int = 0) -> CycleFacts:
    """What happened between two rounds."""
    snapshot = finished.snapshot
    online = [c.cgroup for c in online_containers(snapshot)]
    found = [rate for path in online if (rate := change.cgroups.get(path)) is not None]
    used = sum(rate.cpu_cores or 0.0 for rate in found)
    slots = [rate.wait.slots for rate in found if rate.wait is not None and rate.wait.slots is not None]
    reclaimed = [c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers]
    return CycleFacts(
        at_s=(snapshot.taken_at_ns - began_ns) / NS_PER_S,
        boot=boot,
        interval_s=change.node.interval_ns / NS_PER_S,
        node_cpus=len(snapshot.topology.cpus),
        online_cores=used,
        demand_cores=used + sum(rate.wait_cores or 0.0 for rate in found),
        batch_cores=reclaimed_use_cores(snapshot, change) or 0.0,
        batch_lent_cores=before.advice.reclaimable_cores if before.advice is not None else None,
        interference_cores=_interference_ns(before.snapshot, snapshot, online, reclaimed) / change.node.interval_ns,
        waits=tuple(map(sum, zip(*slots, strict=True))) if slots else (0,) * SLOT_COUNT,
    )


def _interference_ns(before: Snapshot, now: Snapshot, online: Sequence[str], reclaimed: Sequence[str]) -> int:
    told = (
        attribute_latency(paths, reclaimed, before, now) for paths in cgroups_by_container(now.cgroups, online).values()
    )
    return sum(sum(found.by_reclaimed.values()) for found in told if found is not None)


def evaluate_outcome(
    fact: CycleFacts, advice: Advice | None, changes: int, victims: Sequence[EvictionVictim] | None = None
) -> PolicyOutcome:
    """What a policy's advice would have come to. Without any, nothing holds batch work back."""
    cpus = float(fact.node_cpus)
    lent = cpus if advice is None else advice.reclaimable_cores
    pools = {} if advice is None else {pool.name: set(pool.cpus) for pool in advice.pools}
    own = set[int]().union(*(cpus for name, cpus in pools.items() if name != "reclaim"))
    apart = bool(own) and not own & pools.get("reclaim", set())
    limited = fact.batch_lent_cores is not None and fact.batch_cores >= SATURATED_RATIO * fact.batch_lent_cores
    would = min(lent, max(cpus - fact.online_cores, 0.0)) if limited else min(lent, fact.batch_cores)
    share = would / fact.batch_cores if fact.batch_cores else 0.0
    return PolicyOutcome(
        reclaimable_cores=lent,
        headroom_cores=None if advice is None else advice.headroom_cores,
        action="none" if advice is None else advice.action,
        rule="" if advice is None else advice.reason.rule,
        changes=changes,
        batch_cores=would,
        interference_cores=0.0 if apart else fact.interference_cores * share,
        short_cores=max(fact.demand_cores - len(own), 0.0) if apart else 0.0,
        victims=None if victims is None else frozenset(each.uid for each in victims if not each.notify),
    )


class PolicyScore(msgspec.Struct, frozen=True, kw_only=True):
    """One policy over a whole recording or simulation; means are over time."""

    rounds: int
    reclaimable_cores: float = msgspec.field(name="lent_cores")
    batch_cores: float
    harm_ms_per_s: float
    short_ms_per_s: float
    wait_p50_ms: float | None
    """Of online pods; as it was, in a recording."""
    wait_p99_ms: float | None
    headroom_cores: float | None = msgspec.field(name="promised_cores")
    missed_ratio: float | None
    """Part of the rounds whose promise the most that online pods used within the horizon did not leave,"""
    missed_cores: float | None
    """and by how much, on average over those."""
    shrinks: int
    changes: int
    victims: int | None
    """Pods that would have had to leave, each once, for they stayed; not who is only told. None where no plugin is named."""


class ScoreCounters:
    """Adds up what `play` yields for one policy. Promises are held against what came within `horizon_s`; those that a reboot
    cut short are neither kept nor missed."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._seconds = self._lent = self._batch = self._harm = self._short = self._promised = 0.0
        self._promised_s = 0.0
        self._rounds = self._shrinks = self._changes = 0
        self._slots = [0] * SLOT_COUNT
        self._open: deque[tuple[float, float]] = deque()
        """Promises whose time is not over: when, and how much online pods may use without breaking it."""
        self._peaks: deque[tuple[float, float]] = deque()
        """Use that nothing later exceeds, so the first is the most since any open promise."""
        self._kept = self._missed = 0
        self._missed_cores = 0.0
        self._boot = 0
        self._victims: frozenset[str] | None = None

    def add(self, fact: CycleFacts, mark: PolicyOutcome) -> None:
        seconds = fact.interval_s
        self._rounds += 1
        self._seconds += seconds
        self._lent += mark.reclaimable_cores * seconds
        self._batch += mark.batch_cores * seconds
        self._harm += mark.interference_cores * seconds
        self._short += mark.short_cores * seconds
        self._shrinks += mark.action == "shrink"
        self._changes += mark.changes
        if mark.victims is not None:
            self._victims = (self._victims or frozenset()) | mark.victims
        self._slots = [a + b for a, b in zip(self._slots, fact.waits, strict=True)]
        if fact.boot != self._boot:
            self._boot = fact.boot
            self._open.clear()
            self._peaks.clear()
        while self._peaks and self._peaks[-1][1] <= fact.online_cores:
            self._peaks.pop()
        self._peaks.append((fact.at_s, fact.online_cores))
        self._settle(fact.at_s)
        if mark.headroom_cores is not None:
            self._promised += mark.headroom_cores * seconds
            self._promised_s += seconds
            self._open.append((fact.at_s, fact.node_cpus - mark.headroom_cores))

    def _settle(self, now_s: float) -> None:
        while self._open and now_s - self._open[0][0] >= self._horizon_s:
            made_s, room = self._open.popleft()
            while self._peaks[0][0] <= made_s:
                self._peaks.popleft()
            short = self._peaks[0][1] - room
            self._kept += short <= 0
            self._missed += short > 0
            self._missed_cores += max(short, 0.0)

    def score(self) -> PolicyScore:
        seconds, judged = self._seconds or 1.0, self._kept + self._missed
        p50, p99 = (quantile_ns(self._slots, q) for q in (0.5, 0.99))
        return PolicyScore(
            rounds=self._rounds,
            reclaimable_cores=self._lent / seconds,
            batch_cores=self._batch / seconds,
            harm_ms_per_s=1000 * self._harm / seconds,
            short_ms_per_s=1000 * self._short / seconds,
            wait_p50_ms=None if p50 is None else p50 / 1e6,
            wait_p99_ms=None if p99 is None else p99 / 1e6,
            headroom_cores=self._promised / self._promised_s if self._promised_s else None,
            missed_ratio=self._missed / judged if judged else None,
            missed_cores=self._missed_cores / self._missed if self._missed else None,
            shrinks=self._shrinks,
            changes=self._changes,
            victims=None if self._victims is None else len(self._victims),
        )
