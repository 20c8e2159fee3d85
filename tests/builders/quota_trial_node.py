"""A node of four CPUs in a closed loop: its online latency depends on the quota that the policy set in the cycle before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.config.config import AgentConfig
from api.decision import Advice
from api.pod import Pod
from api.snapshot import RunqLatency, Snapshot
from tests.builders.nodes import run_queue_latency
from tests.builders.pods import reclaimed, shared
from tests.builders.snapshots import snapshot

CPUS = 4
WEB, BATCH = shared("web", cpu_request=1.0), reclaimed("batch", cpu_request=2.0)
Waits = dict[int, int]
"""Number of waits by their duration in microseconds."""
QUIET: Waits = {100: 400}
BURST: Waits = {100: 360, 40_000: 40}
"""A tenth of the waits is four times the target."""


def own_bursts(second: int, _cores: float) -> Waits:
    """A burst of one second in seven, whatever reclaimed pods may use."""
    return BURST if second * 5 % 7 == 0 else QUIET


def harm_of_batch(_second: int, cores: float) -> Waits:
    """Online pods wait while reclaimed pods may use more than half of the node."""
    return BURST if cores > CPUS / 2 else QUIET


class TrialCycle(NamedTuple):
    """One cycle: when it ended, what reclaimed pods could use in it, and what the policy decided."""

    at_s: float
    cores: float
    snapshot: Snapshot
    advice: Advice

    @property
    def rule(self) -> str:
        return self.advice.reason.rule


class QuotaTrialNode:
    """Runs cycles. Reclaimed pods use all CPU that they get, unless `use_cores` says otherwise."""

    def __init__(
        self, latency: Callable[[int, float], Waits], config: AgentConfig, state: PolicyState | None = None
    ) -> None:
        self.latency, self.config, self.state = latency, config, state or PolicyState()
        self.pods: Sequence[Pod] = (WEB, BATCH)
        self.use_cores: Callable[[float], float] = lambda cores: min(cores, CPUS - 0.5)
        self.at_s, self.cores = 0.0, float(CPUS)
        self._used_s = 0.0
        self._waits: dict[str, RunqLatency] = {}

    def run(self, seconds: float, step_s: float = 1.0) -> list[TrialCycle]:
        """Run cycles of `step_s` and return them."""
        cycles = []
        for _ in range(round(seconds / step_s)):
            cores = self.cores
            self._used_s += step_s * self.use_cores(cores)
            new = run_queue_latency(self.latency(round(self.at_s), cores))
            self.at_s += step_s
            online = [pod.name for pod in self.pods if pod.qos.online]
            self._waits = {name: _add(self._waits[name], new) if name in self._waits else new for name in online}
            current = snapshot(
                self.at_s,
                self.pods,
                machine=CPUS,
                usage_s={BATCH.name: self._used_s, **dict.fromkeys(online, self.at_s / 2)},
                latency=self._waits,
                seq=round(self.at_s / step_s),
            )
            result, self.state = evaluate_policy(current, self.config, self.state, current.taken_at_ns)
            assert result.advice is not None
            self.cores = result.advice.reclaimable_cores
            cycles.append(TrialCycle(self.at_s, cores, current, result.advice))
        return cycles

    def run_until(self, rule: str, max_s: int = 1500) -> list[TrialCycle]:
        """Run cycles of a second until one has this rule, and return all of them."""
        cycles: list[TrialCycle] = []
        while not cycles or cycles[-1].rule != rule:
            assert len(cycles) < max_s, f"no {rule} in {max_s} s: {[cycle.rule for cycle in cycles[-20:]]}"
            cycles += self.run(1)
        return cycles


def _add(a: RunqLatency, b: RunqLatency) -> RunqLatency:
    assert a.slots is not None
    assert b.slots is not None
    slots = tuple(x + y for x, y in zip(a.slots, b.slots, strict=True))
    return RunqLatency(sum_ns=a.sum_ns + b.sum_ns, count=a.count + b.count, slots=slots)
