"""Rounds that were, judged again by other policies, and what would have come of it: lent, missed, harmed. Pure.

A recording tells what online pods needed, what batch work used and whom they waited for. What another policy would have
made of the same minutes is computed from that, and needs two assumptions, which every table repeats: batch work that was held
back would have used all that it was lent; and waits that it caused grow with what it uses. A simulation needs neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from agent.advisor.culprits import blamed
from agent.advisor.estimation import online_containers
from agent.advisor.measured import reclaimed_use_cores
from agent.config import Config
from agent.policy import Remembered, judge
from agent.qrm.cpu import managed
from agent.qrm.table import TABLE
from api.decisions import Advice, Decision, Round
from api.evictions import Victim
from api.histograms import SLOTS, quantile_ns
from api.knobs import Knob
from api.qos import QoSLevel
from api.rates import Rates, members, rates
from api.samples import Snapshot

if TYPE_CHECKING:
    from agent.eviction.evictor import Evictor

NS_PER_S = 1_000_000_000
HELD_BACK = 0.95
"""Batch work that used so much of what it was lent would have used more."""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """What a round says of the time since the one before it, whatever any policy says. Cores, and core seconds a second."""

    at_s: float
    """Since the first round; the time between two boots is left out."""
    boot: int = 0
    """How many boots there were before this one."""
    interval_s: float
    node_cpus: int
    online_cores: float
    """What online pods used,"""
    wanted_cores: float
    """and that with what they waited for."""
    batch_cores: float
    batch_lent_cores: float | None
    """What it was lent at that time; None where nobody decided."""
    harm_cores: float
    """What online pods waited while batch work had the CPU."""
    waits: tuple[int, ...]
    """Of online pods, in slots."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy makes of one round."""

    lent_cores: float
    promised_cores: float | None
    action: str
    rule: str
    changes: int
    """Knobs that would have been written."""
    batch_cores: float
    """What batch work used, or would have."""
    harm_cores: float
    """What online pods waited for batch work, or would have,"""
    short_cores: float
    """and what they wanted beyond the CPUs of their own pool, where the pools are kept apart."""
    victims: frozenset[str] | None = None
    """Uids of pods that would have had to leave; None where no eviction plugin is named."""


class Player:
    """One policy, played through rounds as they come."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._remembered = Remembered()
        self._known: dict[tuple[str, Knob], str] = {}
        self.decisions: tuple[Decision, ...] = ()
        """Of the latest round,"""
        self.victims: tuple[Victim, ...] | None = None
        """and who would have had to leave in it; None where no eviction plugin is named."""
        self._evictor: Evictor | None = None
        if config.eviction.plugins:
            from agent.eviction.evictor import Evictor  # noqa: PLC0415 - most settings evict nobody

            self._evictor = Evictor(config, None)

    def judge(self, snapshot: Snapshot) -> tuple[Advice | None, int]:
        """The policy's advice, and how many knobs it would have turned."""
        judged, self._remembered = judge(snapshot, self._config, self._remembered, snapshot.taken_at_ns)
        advice = judged.advice
        if self._evictor is not None:
            now_ns = snapshot.taken_at_ns
            self.victims = self._evictor.turn(snapshot, advice, self._remembered, now_ns).victims
        if advice is None:
            return None, 0
        knobs = dict.fromkeys(managed(snapshot.pods), frozenset(TABLE))
        self.decisions = judged.decisions(snapshot, knobs)
        wanted = {(decision.cgroup, decision.knob): decision.value for decision in self.decisions}
        changes = sum(self._known.get(key) != value for key, value in wanted.items())
        self._known = wanted
        return advice, changes


def play(rounds: Iterable[Round], policies: Mapping[str, Config]) -> Iterator[tuple[Fact, dict[str, Mark]]]:
    """Every round from the second of each boot on, with what each policy would have made of it. No policy remembers anything
    of another boot, whose clock says nothing in this one."""
    players = {name: Player(config) for name, config in policies.items()}
    before: Round | None = None
    began_ns, at_ns, boot = 0, 0, 0
    for finished in rounds:
        snapshot = finished.snapshot
        if before is None:
            began_ns = snapshot.taken_at_ns
        elif _rebooted(before.snapshot, snapshot):
            players = {name: Player(config) for name, config in policies.items()}
            began_ns, boot, before = snapshot.taken_at_ns - at_ns, boot + 1, None
        judged = {name: player.judge(snapshot) for name, player in players.items()}
        change = rates(before.snapshot, snapshot) if before is not None else None
        if change is not None and before is not None:
            fact = fact_of(before, finished, change, began_ns, boot)
            yield fact, {name: mark(fact, *judged[name], player.victims) for name, player in players.items()}
        at_ns, before = snapshot.taken_at_ns - began_ns, finished


def _rebooted(before: Snapshot, now: Snapshot) -> bool:
    """Between these two; not every machine names its boots."""
    return now.boot_id != before.boot_id or now.taken_at_ns < before.taken_at_ns


def fact_of(before: Round, finished: Round, change: Rates, began_ns: int, boot: int = 0) -> Fact:
    """What happened between two rounds."""
    snapshot = finished.snapshot
    online = [c.cgroup for c in online_containers(snapshot)]
    found = [rate for path in online if (rate := change.cgroups.get(path)) is not None]
    used = sum(rate.cpu_cores or 0.0 for rate in found)
    slots = [rate.wait.slots for rate in found if rate.wait is not None and rate.wait.slots is not None]
    reclaimed = [c.cgroup for pod in snapshot.pods if pod.qos is QoSLevel.RECLAIMED for c in pod.containers]
    return Fact(
        at_s=(snapshot.taken_at_ns - began_ns) / NS_PER_S,
        boot=boot,
        interval_s=change.node.interval_ns / NS_PER_S,
        node_cpus=len(snapshot.topology.cpus),
        online_cores=used,
        wanted_cores=used + sum(rate.wait_cores or 0.0 for rate in found),
        batch_cores=reclaimed_use_cores(snapshot, change) or 0.0,
        batch_lent_cores=before.advice.lent_cores if before.advice is not None else None,
        harm_cores=_harm_ns(before.snapshot, snapshot, online, reclaimed) / change.node.interval_ns,
        waits=tuple(map(sum, zip(*slots, strict=True))) if slots else (0,) * SLOTS,
    )


def _harm_ns(before: Snapshot, now: Snapshot, online: Sequence[str], reclaimed: Sequence[str]) -> int:
    told = (blamed(paths, reclaimed, before, now) for paths in members(now.cgroups, online).values())
    return sum(sum(found.by_reclaimed.values()) for found in told if found is not None)


def mark(fact: Fact, advice: Advice | None, changes: int, victims: Sequence[Victim] | None = None) -> Mark:
    """What a policy's advice would have come to. Without any, nothing holds batch work back."""
    cpus = float(fact.node_cpus)
    lent = cpus if advice is None else advice.lent_cores
    pools = {} if advice is None else {pool.name: set(pool.cpus) for pool in advice.pools}
    own = set[int]().union(*(cpus for name, cpus in pools.items() if name != "reclaim"))
    apart = bool(own) and not own & pools.get("reclaim", set())
    limited = fact.batch_lent_cores is not None and fact.batch_cores >= HELD_BACK * fact.batch_lent_cores
    would = min(lent, max(cpus - fact.online_cores, 0.0)) if limited else min(lent, fact.batch_cores)
    share = would / fact.batch_cores if fact.batch_cores else 0.0
    return Mark(
        lent_cores=lent,
        promised_cores=None if advice is None else advice.headroom_cores,
        action="none" if advice is None else advice.action,
        rule="" if advice is None else advice.verdict.rule,
        changes=changes,
        batch_cores=would,
        harm_cores=0.0 if apart else fact.harm_cores * share,
        short_cores=max(fact.wanted_cores - len(own), 0.0) if apart else 0.0,
        victims=None if victims is None else frozenset(each.uid for each in victims if not each.notify),
    )


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One policy over a whole recording or simulation; means are over time."""

    rounds: int
    lent_cores: float
    batch_cores: float
    harm_ms_per_s: float
    short_ms_per_s: float
    wait_p50_ms: float | None
    """Of online pods; as it was, in a recording."""
    wait_p99_ms: float | None
    promised_cores: float | None
    missed_ratio: float | None
    """Part of the rounds whose promise the most that online pods used within the horizon did not leave,"""
    missed_cores: float | None
    """and by how much, on average over those."""
    shrinks: int
    changes: int
    victims: int | None
    """Pods that would have had to leave, each once, for they stayed; not who is only told. None where no plugin is named."""


class Tally:
    """Adds up what `play` yields for one policy. Promises are held against what came within `horizon_s`; those that a reboot
    cut short are neither kept nor missed."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._seconds = self._lent = self._batch = self._harm = self._short = self._promised = 0.0
        self._promised_s = 0.0
        self._rounds = self._shrinks = self._changes = 0
        self._slots = [0] * SLOTS
        self._open: deque[tuple[float, float]] = deque()
        """Promises whose time is not over: when, and how much online pods may use without breaking it."""
        self._peaks: deque[tuple[float, float]] = deque()
        """Use that nothing later exceeds, so the first is the most since any open promise."""
        self._kept = self._missed = 0
        self._missed_cores = 0.0
        self._boot = 0
        self._victims: frozenset[str] | None = None

    def add(self, fact: Fact, mark: Mark) -> None:
        seconds = fact.interval_s
        self._rounds += 1
        self._seconds += seconds
        self._lent += mark.lent_cores * seconds
        self._batch += mark.batch_cores * seconds
        self._harm += mark.harm_cores * seconds
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
        if mark.promised_cores is not None:
            self._promised += mark.promised_cores * seconds
            self._promised_s += seconds
            self._open.append((fact.at_s, fact.node_cpus - mark.promised_cores))

    def _settle(self, now_s: float) -> None:
        while self._open and now_s - self._open[0][0] >= self._horizon_s:
            made_s, room = self._open.popleft()
            while self._peaks[0][0] <= made_s:
                self._peaks.popleft()
            short = self._peaks[0][1] - room
            self._kept += short <= 0
            self._missed += short > 0
            self._missed_cores += max(short, 0.0)

    def score(self) -> Score:
        seconds, judged = self._seconds or 1.0, self._kept + self._missed
        p50, p99 = (quantile_ns(self._slots, q) for q in (0.5, 0.99))
        return Score(
            rounds=self._rounds,
            lent_cores=self._lent / seconds,
            batch_cores=self._batch / seconds,
            harm_ms_per_s=1000 * self._harm / seconds,
            short_ms_per_s=1000 * self._short / seconds,
            wait_p50_ms=None if p50 is None else p50 / 1e6,
            wait_p99_ms=None if p99 is None else p99 / 1e6,
            promised_cores=self._promised / self._promised_s if self._promised_s else None,
            missed_ratio=self._missed / judged if judged else None,
            missed_cores=self._missed_cores / self._missed if self._missed else None,
            shrinks=self._shrinks,
            changes=self._changes,
            victims=None if self._victims is None else len(self._victims),
        )
