"""Error rates of quota trials on synthetic run-queue latency: `python -m bench.quota_trials` (a minute of CPU, no root).

The first table compares statistics on two sets of eight blocks of five seconds, with the same true latency (rate of false
`helped`) and with fewer long waits (rate of missed effects). The second table runs the policy and the trial in a closed loop: a
batch job uses all CPU that it gets, cycles end on alarms, and the quota acts on the latency of the next cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import erf, log, sqrt
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.random import Generator

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.latency import LatencyInputs, evaluate_latency, is_breach, min_quota_cores
from agent.advisor.latency_comparison import LatencyInterval, compare_latency, merge_slots
from agent.advisor.quota_trial import QuotaTrialInputs, measures_limit, run_quota_trial
from agent.config.advisor import LatencyConfig
from api.histogram import BOUNDS_NS, SLOT_COUNT, count_above, quantile_ns
from api.snapshot import RunqLatency
from api.units import NS_PER_MS, NS_PER_S

BLOCK_S, BLOCKS = 5, 8
STEP_S, STEPS_PER_CYCLE = 0.1, 10
CPUS = 8
CONFIG = LatencyConfig()
WEB = "/web"


class OnlineLoad(NamedTuple):
    """Synthetic online work: waits a second, and bursts in which a share of them is long."""

    name: str
    waits_per_s: float = 400.0
    burst_every_s: float = 0.0
    """Mean time between bursts; 0: one burst without end."""
    burst_s: float = 1.0
    """Mean length of a burst (exponential)."""
    long_share: float = 0.1
    """Share of long waits in a burst."""
    effect: float = 1.0
    """Factor of that share with the smallest quota; 1: the quota does not help."""


def _slot_shares(median_ms: float, sigma: float) -> np.ndarray:
    """Return the shares of a log-normal distribution by slot."""
    below = [0.5 * (1 + erf(log(bound / NS_PER_MS / median_ms) / sigma / sqrt(2))) for bound in BOUNDS_NS]
    return np.diff([0.0, *below, 1.0])


SHORT, LONG = _slot_shares(0.1, 1.2), _slot_shares(30.0, 0.8)
"""p99 of short waits is 1.6 ms; the median of long ones is three times the target."""


class WaitGenerator:
    """Draws waits step by step: load varies by a third within 20 s, and bursts come at random."""

    def __init__(self, load: OnlineLoad, rng: Generator) -> None:
        self._load, self._rng = load, rng
        self._level, self._in_burst = 0.0, load.burst_every_s == 0

    def step(self, limited_ratio: float) -> np.ndarray:
        """Return the waits of one step by slot. `limited_ratio` is 0 without a quota and 1 with the smallest one."""
        load, rng = self._load, self._rng
        keep = 1 - STEP_S / 20
        self._level = keep * self._level + sqrt(1 - keep**2) * 0.3 * rng.standard_normal()
        if load.burst_every_s:
            mean_s = load.burst_s if self._in_burst else load.burst_every_s
            self._in_burst ^= bool(rng.random() < STEP_S / mean_s)
        count = rng.poisson(load.waits_per_s * STEP_S * np.exp(self._level))
        share = load.long_share * (1 - (1 - load.effect) * limited_ratio) if self._in_burst else 0.0
        return rng.multinomial(count, (1 - share) * SHORT + share * LONG)


def draw_blocks(load: OnlineLoad, rng: Generator) -> list[LatencyInterval]:
    """Return blocks without and with the quota, in turn."""
    waits, blocks = WaitGenerator(load, rng), []
    for number in range(2 * BLOCKS):
        slots = sum(waits.step(number % 2) for _ in range(round(BLOCK_S / STEP_S)))
        blocks.append(
            LatencyInterval(
                limited=bool(number % 2),
                started_ns=number * BLOCK_S * NS_PER_S,
                duration_ns=BLOCK_S * NS_PER_S,
                slots=tuple(map(int, slots)),
            )
        )
    return blocks


def pooled_proportions(blocks: Sequence[LatencyInterval]) -> bool:
    """Two-proportion z test on the merged histograms: every wait is independent of the others."""
    without, limited = _kinds(blocks)
    merged = [merge_slots(without), merge_slots(limited)]
    everything = [a + b for a, b in zip(*merged, strict=True)]
    threshold = quantile_ns(everything, CONFIG.quantile) or 0.0
    counts, longs = [sum(slots) for slots in merged], [count_above(slots, threshold) for slots in merged]
    share = sum(longs) / sum(counts)
    error = sqrt(share * (1 - share) * (1 / counts[0] + 1 / counts[1]))
    return (longs[0] / counts[0] - longs[1] / counts[1]) / error > 1.645


def mean_log_quantile(blocks: Sequence[LatencyInterval]) -> bool:
    """Student's t test on the logarithm of each block's p99."""
    values = [[log(quantile_ns(b.slots, CONFIG.quantile) or 1.0) for b in kind] for kind in _kinds(blocks)]
    error = sqrt(sum(np.var(kind, ddof=1) / len(kind) for kind in values))
    return float(np.mean(values[0]) - np.mean(values[1])) > 1.761 * error  # 14 degrees of freedom


def rank_sum(blocks: Sequence[LatencyInterval]) -> bool:
    """Wilcoxon's rank-sum test on each block's share of long waits, by the normal approximation."""
    kinds = _kinds(blocks)
    threshold = quantile_ns(merge_slots(blocks), CONFIG.quantile) or 0.0
    shares = [[count_above(b.slots, threshold) / max(sum(b.slots), 1) for b in kind] for kind in kinds]
    wins = sum((a > b) + (a == b) / 2 for a in shares[0] for b in shares[1])
    pairs = len(shares[0]) * len(shares[1])
    return wins - pairs / 2 > 1.645 * sqrt(pairs * (2 * BLOCKS + 1) / 12)


def ratio_of_blocks(blocks: Sequence[LatencyInterval]) -> bool:
    """The statistic of the agent."""
    comparison = compare_latency(blocks, CONFIG.quantile)
    return comparison is not None and comparison.improved


def _kinds(blocks: Sequence[LatencyInterval]) -> tuple[list[LatencyInterval], list[LatencyInterval]]:
    return [b for b in blocks if not b.limited], [b for b in blocks if b.limited]


STATISTICS: dict[str, Callable[[Sequence[LatencyInterval]], bool]] = {
    "two proportions, merged histograms": pooled_proportions,
    "t test, log p99 of blocks": mean_log_quantile,
    "rank sum, shares of blocks": rank_sum,
    "ratio of blocks (agent)": ratio_of_blocks,
}


class TrialRun(NamedTuple):
    """What one closed loop did until its verdict."""

    helped: bool | None
    """None without a verdict."""
    seconds: float
    """Time until the verdict, or of the whole run."""
    breach_s: float
    """Length of the cycles above the target."""
    batch_ratio: float
    """CPU of the batch job until then, as part of all CPUs."""


class ClosedLoop:
    """Policy, trial and synthetic node, one cycle at a time."""

    def __init__(self, load: OnlineLoad, rng: Generator, config: LatencyConfig = CONFIG) -> None:
        self._waits, self._config = WaitGenerator(load, rng), config
        self.state, self._now_ns, self._suppressed = AdvisorState(reclaimable_cores=float(CPUS)), 0, False
        self.rule = ""

    def run_cycle(self) -> tuple[float, RunqLatency]:
        """Run one cycle; return its length in seconds and its waits."""
        level, minimum = self.state.reclaimable_cores or 0.0, min_quota_cores(CPUS, self._config)
        watches = level > minimum or measures_limit(self.state.quota_trial)
        slots, steps, alarm = np.zeros(SLOT_COUNT, dtype=int), 0, False
        while steps < STEPS_PER_CYCLE and not alarm:
            step = self._waits.step((CPUS - level) / (CPUS - minimum))
            slots, steps = slots + step, steps + 1
            alarm = watches and not self._suppressed and self._is_breach(step)
        self._suppressed = False
        wait = self._as_latency(slots)
        self._now_ns += round(steps * STEP_S * NS_PER_S)
        action = self._evaluate(wait, level, round(steps * STEP_S * NS_PER_S))
        self._suppressed = alarm and action != "shrink"
        return steps * STEP_S, wait

    def _is_breach(self, slots: np.ndarray) -> bool:
        return is_breach(self._as_latency(slots), self._config.target_wait_ms * NS_PER_MS, self._config)

    @staticmethod
    def _as_latency(slots: np.ndarray) -> RunqLatency:
        counts = tuple(map(int, slots))
        return RunqLatency(
            sum_ns=sum(n * b for n, b in zip(counts, BOUNDS_NS, strict=False)), count=sum(counts), slots=counts
        )

    def _evaluate(self, wait: RunqLatency, level: float, elapsed_ns: int) -> str:
        inputs = LatencyInputs(
            now_ns=self._now_ns, elapsed_ns=elapsed_ns, node_cpus=CPUS, waits={WEB: wait}, reclaimed_use_cores=level,
            requirement_cores=1.0,
        )  # fmt: skip
        result = evaluate_latency(inputs, self.state, self._config)
        trial_inputs = QuotaTrialInputs(
            now_ns=self._now_ns, wall_time_ns=self._now_ns, elapsed_ns=elapsed_ns, node_cpus=CPUS, maximum_cores=float(CPUS),
            in_force_cores=level, used_cores=level, waits=inputs.waits, key="k", workloads="default/web",
        )  # fmt: skip
        result, trial = run_quota_trial(trial_inputs, result, self.state.quota_trial, self._config)
        self.rule = result.reason.rule
        self.state = replace(
            self.state, reclaimable_cores=result.level_cores, harmful_cores=result.harmful_cores,
            baseline_latency_ns=result.baseline_latency_ns, minimum_since_ns=result.minimum_since_ns,
            last_breach_ns=result.last_breach_ns, last_wait_ns=result.last_wait_ns, quota_trial=trial,
        )  # fmt: skip
        return result.action


def run_until_verdict(load: OnlineLoad, seed: int, max_s: float = 1200.0) -> TrialRun:
    """Run a closed loop until the trial has a verdict."""
    loop, seconds, breach_s, batch_s = ClosedLoop(load, np.random.default_rng(seed)), 0.0, 0.0, 0.0
    while seconds < max_s and not loop.state.quota_trial.verdicts:
        level = loop.state.reclaimable_cores or 0.0
        length, wait = loop.run_cycle()
        seconds, batch_s = seconds + length, batch_s + level * length
        breach_s += length * is_breach(wait, CONFIG.target_wait_ms * NS_PER_MS, CONFIG)
    verdicts = loop.state.quota_trial.verdicts
    return TrialRun(verdicts[0].helped if verdicts else None, seconds, breach_s, batch_s / seconds / CPUS)


NOISES = (
    OnlineLoad("independent waits", burst_every_s=0, long_share=0.02),
    OnlineLoad("bursts of 0.3 s every 2 s", burst_every_s=2, burst_s=0.3),
    OnlineLoad("bursts of 1 s every 10 s", burst_every_s=10, burst_s=1),
    OnlineLoad("bursts of 3 s every 20 s", burst_every_s=20, burst_s=3),
    OnlineLoad("20 waits/s, bursts of 1 s every 5 s", waits_per_s=20, burst_every_s=5, burst_s=1),
)
EFFECTS = (1.0, 0.5, 0.1)


def main(repeats: int = 400, runs: int = 40) -> None:
    """Print both tables."""
    print(
        "| latency | quota leaves | " + " | ".join(STATISTICS) + " |\n|---" * 1 + "|---" * (len(STATISTICS) + 1) + "|"
    )
    for noise in NOISES:
        for effect in EFFECTS:
            load, rng = noise._replace(effect=effect), np.random.default_rng(1)
            sets = [draw_blocks(load, rng) for _ in range(repeats)]
            rates = [sum(map(statistic, sets)) / repeats for statistic in STATISTICS.values()]
            print(f"| {noise.name} | {effect:.0%} | " + " | ".join(f"{rate:.1%}" for rate in rates) + " |", flush=True)
    print("\n| latency | quota leaves | helped | did not help | none | seconds | above target, s | batch CPU |")
    print("|---|---|---|---|---|---|---|---|")
    for noise in NOISES:
        for effect in EFFECTS:
            results = [run_until_verdict(noise._replace(effect=effect), seed) for seed in range(runs)]
            shares = [sum(run.helped is value for run in results) / runs for value in (True, False, None)]
            means = [float(np.median([run[i] for run in results])) for i in (1, 2, 3)]
            print(f"| {noise.name} | {effect:.0%} | " + " | ".join(f"{share:.0%}" for share in shares)
                  + f" | {means[0]:.0f} | {means[1]:.1f} | {means[2]:.0%} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
