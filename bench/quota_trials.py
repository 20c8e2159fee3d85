"""Error rates of quota trials on synthetic run-queue latency: `python -m bench.quota_trials` (ten minutes of CPU, no root).

The first table compares statistics on two sets of eight intervals of five seconds, with the same true latency (rate of false
`helped`) and with fewer long waits (rate of missed effects). The second table runs the policy and the trial in a closed loop: a
batch job uses all CPU that it gets, cycles end on alarms, and the quota acts on the latency of the next cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import erf, exp, log, log2, sqrt
from random import Random
from statistics import fmean, median, variance
from typing import NamedTuple

from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.latency import LatencyInputs, evaluate_latency, is_breach, min_quota_cores
from agent.advisor.latency_comparison import LatencyInterval, compare_latency, merge_slots
from agent.advisor.quota_trial import QuotaTrialInputs, measures_limit, run_quota_trial
from agent.config.advisor import LatencyConfig
from api.histogram import BOUNDS_NS, SLOT_COUNT, count_above, quantile_ns
from api.snapshot import RunqLatency
from api.units import NS_PER_MS, NS_PER_S

INTERVAL_S, INTERVALS = 5, 8
_T_14 = 1.761
"""One-sided 95 % quantile of Student's t distribution with 14 degrees of freedom."""
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


def _slot_shares(median_ms: float, sigma: float) -> list[float]:
    """Return the shares of a log-normal distribution by slot."""
    below = [0.5 * (1 + erf(log(bound / NS_PER_MS / median_ms) / sigma / sqrt(2))) for bound in BOUNDS_NS]
    return [after - before for before, after in pairwise((0.0, *below, 1.0))]


SHORT, LONG = _slot_shares(0.1, 1.2), _slot_shares(30.0, 0.8)
"""Short waits have a p99 of 1.6 ms; the median of long ones is three times the target."""


class WaitGenerator:
    """Draws waits step by step: load varies by 30 % within 20 s, and bursts come at random."""

    def __init__(self, load: OnlineLoad, rng: Random) -> None:
        self._load, self._rng = load, rng
        self._level, self._in_burst = 0.0, load.burst_every_s == 0

    def step(self, limited_ratio: float) -> list[int]:
        """Return the waits of one step by slot. `limited_ratio` is 0 without a quota and 1 with the smallest one."""
        load, rng = self._load, self._rng
        keep = 1 - STEP_S / 20
        self._level = keep * self._level + sqrt(1 - keep**2) * 0.3 * rng.gauss(0, 1)
        if load.burst_every_s:
            mean_s = load.burst_s if self._in_burst else load.burst_every_s
            self._in_burst ^= rng.random() < STEP_S / mean_s
        mean = load.waits_per_s * STEP_S * exp(self._level)
        count = max(round(rng.gauss(mean, sqrt(mean))), 0)
        share = load.long_share * (1 - (1 - load.effect) * limited_ratio) if self._in_burst else 0.0
        long = sum(rng.random() < share for _ in range(count)) if share else 0
        slots = [0] * SLOT_COUNT
        for weights, number in ((SHORT, count - long), (LONG, long)):
            for slot in rng.choices(range(SLOT_COUNT), weights, k=number):
                slots[slot] += 1
        return slots


def _sum(histograms: Sequence[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*histograms, strict=True)]


def draw_intervals(load: OnlineLoad, rng: Random) -> list[LatencyInterval]:
    """Return intervals of the same length without and with the quota, in turn."""
    waits, intervals = WaitGenerator(load, rng), []
    for number in range(2 * INTERVALS):
        cycles = [_sum([waits.step(number % 2) for _ in range(STEPS_PER_CYCLE)]) for _ in range(INTERVAL_S)]
        worst_ns = max(quantile_ns(slots, CONFIG.quantile) or 0.0 for slots in cycles)
        intervals.append(
            LatencyInterval(
                limited=bool(number % 2),
                started_ns=number * INTERVAL_S * NS_PER_S,
                duration_ns=INTERVAL_S * NS_PER_S,
                slots=tuple(_sum(cycles)),
                excess=max(log2(worst_ns / (CONFIG.target_wait_ms * NS_PER_MS)), 0.0) if worst_ns else 0.0,
            )
        )
    return intervals


def pooled_proportions(intervals: Sequence[LatencyInterval]) -> bool:
    """Two-proportion z test on the merged histograms: every wait is independent of the others."""
    merged = [merge_slots(kind) for kind in _kinds(intervals)]
    threshold_ns = quantile_ns(merge_slots(intervals), CONFIG.quantile) or 0.0
    counts, longs = [sum(slots) for slots in merged], [count_above(slots, threshold_ns) for slots in merged]
    share = sum(longs) / sum(counts)
    error = sqrt(share * (1 - share) * (1 / counts[0] + 1 / counts[1]))
    return (longs[0] / counts[0] - longs[1] / counts[1]) / error > 1.645


def ratio_of_intervals(intervals: Sequence[LatencyInterval]) -> bool:
    """Ratio estimate of the share above the p99 of all waits, with the variance between intervals."""
    threshold_ns, shares, errors = quantile_ns(merge_slots(intervals), CONFIG.quantile) or 0.0, [], []
    for kind in _kinds(intervals):
        above, counts = [count_above(i.slots, threshold_ns) for i in kind], [sum(i.slots) for i in kind]
        shares.append(sum(above) / sum(counts))
        residuals = sum((x - shares[-1] * n) ** 2 for x, n in zip(above, counts, strict=True))
        errors.append(max(residuals / sum(counts) ** 2 * len(kind) / (len(kind) - 1), shares[-1] / sum(counts)))
    return shares[0] - shares[1] > _T_14 * sqrt(sum(errors))


def mean_log_quantile(intervals: Sequence[LatencyInterval]) -> bool:
    """Student's t test on the logarithm of each interval's p99."""
    values = [[log2(quantile_ns(i.slots, CONFIG.quantile) or 1.0) for i in kind] for kind in _kinds(intervals)]
    error = sqrt(sum(variance(kind) / len(kind) for kind in values))
    return fmean(values[0]) - fmean(values[1]) > _T_14 * error


def rank_sum(intervals: Sequence[LatencyInterval]) -> bool:
    """Wilcoxon's rank-sum test on each interval's share of long waits, by the normal approximation."""
    threshold_ns = quantile_ns(merge_slots(intervals), CONFIG.quantile) or 0.0
    kinds = _kinds(intervals)
    shares = [[count_above(i.slots, threshold_ns) / max(sum(i.slots), 1) for i in kind] for kind in kinds]
    wins = sum((a > b) + (a == b) / 2 for a in shares[0] for b in shares[1])
    pairs = len(shares[0]) * len(shares[1])
    return wins - pairs / 2 > 1.645 * sqrt(pairs * (2 * INTERVALS + 1) / 12)


def mean_excess(intervals: Sequence[LatencyInterval]) -> bool:
    """The statistic of the agent."""
    comparison = compare_latency(intervals, CONFIG.quantile)
    return comparison is not None and comparison.improved


def _kinds(intervals: Sequence[LatencyInterval]) -> tuple[list[LatencyInterval], list[LatencyInterval]]:
    return [i for i in intervals if not i.limited], [i for i in intervals if i.limited]


STATISTICS: dict[str, Callable[[Sequence[LatencyInterval]], bool]] = {
    "two proportions": pooled_proportions,
    "ratio": ratio_of_intervals,
    "log p99": mean_log_quantile,
    "rank sum": rank_sum,
    "excess (agent)": mean_excess,
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

    def __init__(self, load: OnlineLoad, rng: Random, config: LatencyConfig = CONFIG) -> None:
        self._waits, self._config = WaitGenerator(load, rng), config
        self.state, self._now_ns, self._suppressed = AdvisorState(reclaimable_cores=float(CPUS)), 0, False
        self.rule = ""

    def run_cycle(self) -> tuple[float, RunqLatency]:
        """Run one cycle; return its length in seconds and its waits."""
        level, minimum = self.state.reclaimable_cores or 0.0, min_quota_cores(CPUS, self._config)
        watches = level > minimum or measures_limit(self.state.quota_trial)
        slots, steps, alarm = [0] * SLOT_COUNT, 0, False
        while steps < STEPS_PER_CYCLE and not alarm:
            step = self._waits.step((CPUS - level) / (CPUS - minimum))
            slots, steps = _sum([slots, step]), steps + 1
            alarm = watches and not self._suppressed and self._is_breach(step)
        self._suppressed = False
        wait = self._as_latency(slots)
        self._now_ns += round(steps * STEP_S * NS_PER_S)
        action = self._evaluate(wait, level, round(steps * STEP_S * NS_PER_S))
        self._suppressed = alarm and action != "shrink"
        return steps * STEP_S, wait

    def _is_breach(self, slots: list[int]) -> bool:
        return is_breach(self._as_latency(slots), self._config.target_wait_ms * NS_PER_MS, self._config)

    @staticmethod
    def _as_latency(slots: list[int]) -> RunqLatency:
        counts = tuple(slots)
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
    loop, seconds, breach_s, batch_s = ClosedLoop(load, Random(seed)), 0.0, 0.0, 0.0
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
    names = " | ".join(STATISTICS)
    print(f"| latency | quota leaves | {names} |\n{'|---' * (len(STATISTICS) + 2)}|")
    for noise in NOISES:
        for effect in EFFECTS:
            load, rng = noise._replace(effect=effect), Random(1)
            sets = [draw_intervals(load, rng) for _ in range(repeats)]
            rates = [sum(map(statistic, sets)) / repeats for statistic in STATISTICS.values()]
            print(f"| {noise.name} | {effect:.0%} | " + " | ".join(f"{rate:.1%}" for rate in rates) + " |", flush=True)
    print("\n| latency | quota leaves | helped | did not help | none | seconds | above target, s | batch CPU |")
    print("|---|---|---|---|---|---|---|---|")
    for noise in NOISES:
        for effect in EFFECTS:
            results = [run_until_verdict(noise._replace(effect=effect), seed) for seed in range(runs)]
            shares = [sum(run.helped is value for run in results) / runs for value in (True, False, None)]
            means = [
                median(values)
                for values in zip(*((r.seconds, r.breach_s, r.batch_ratio) for r in results), strict=True)
            ]
            print(f"| {noise.name} | {effect:.0%} | " + " | ".join(f"{share:.0%}" for share in shares)
                  + f" | {means[0]:.0f} | {means[1]:.1f} | {means[2]:.0%} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
