"""What is lent against what it costs the online service, and whether the bench's goals are met. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from bench.medians import Reaction, Results, node_use, p99, units
from bench.modes import BY_NAME
from bench.plot import Goal, Mark, scatter
from bench.scenarios import CURVE_SCENARIO

FLOOR_P99, FLOOR_UNITS, NODE_USE = 1.05, 0.95, 0.95
ALONE_P99 = 1.10
REACTION_P50_MS, REACTION_P99_MS = 200.0, 1000.0


class Verdict(msgspec.Struct, frozen=True):
    """One goal in one place: what was measured, and whether that is enough."""

    met: bool
    text: str

    def line(self) -> str:
        return f"- {'PASS' if self.met else 'MISS'} {self.text}"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One mode on the trade-off."""

    mode: str
    target_ms: float | None
    batch: float
    """Units done, as a part of what they are at the floor."""
    p99: float
    """Of the online service, as a multiple of what it is alone."""
    low: float
    high: float


def curve(results: Results, scenario: str = CURVE_SCENARIO) -> list[Point]:
    """Every mode with batch work, least done first; empty where `alone` or `floor` were not measured there."""
    found = []
    for mode in results.modes(scenario):
        batch = results.ratio(scenario, mode, "floor", units)
        times = results.ratio(scenario, mode, "alone", p99)
        group, alone = results.group(mode, scenario), results.group("alone", scenario)
        if not BY_NAME[mode].batch or batch is None or times is None or group is None or alone is None:
            continue
        low, high = (value / alone.median(p99) for value in group.spread(p99))
        found.append(Point(mode=mode, target_ms=BY_NAME[mode].target_ms, batch=batch, p99=times, low=low, high=high))
    return sorted(found, key=lambda point: point.batch)


def markdown(results: Results) -> list[str]:
    """The table of the trade-off."""
    points = curve(results)
    if not points:
        return []
    out = [
        "### What is lent against what it costs",
        "",
        f"In `{CURVE_SCENARIO}`: batch work done as a part of the floor's, and the service's p99 as a multiple of what it is",
        "alone, both medians; the targets are what policy `latency` was told that online pods may wait for a CPU.",
        "",
        "![p99 against batch work done](colocation.tradeoff.svg)",
        "",
        "| mode | target ms | batch / floor | p99 / alone (all rounds) | within 1.10x alone |",
        "|---|---|---|---|---|",
    ]
    for point in points:
        target = "" if point.target_ms is None else f"{point.target_ms:g}"
        out.append(
            f"| {point.mode} | {target} | {point.batch:.2f} | {point.p99:.2f} ({point.low:.2f} to {point.high:.2f}) "
            f"| {'yes' if point.p99 <= ALONE_P99 else 'no'} |"
        )
    return [*out, ""]


def svg(results: Results) -> str:
    """The same as a picture: right is more lent, down is less harm."""
    points = curve(results)
    marks = [Mark(p.batch, p.p99, p.low, p.high, p.mode, joined=p.target_ms is not None) for p in points]
    floor = [p.p99 for p in points if p.mode == "floor"]
    goals = [Goal(f"goal when told to protect: {ALONE_P99:g}x alone", y=ALONE_P99)]
    goals += [Goal(f"goal of ours: {FLOOR_P99:g}x the floor", y=FLOOR_P99 * times) for times in floor]
    goals += [Goal(f"{FLOOR_UNITS:g} of the floor's batch work", x=FLOOR_UNITS)]
    title = f"What is lent against what it costs the online service ({CURVE_SCENARIO})"
    return scatter(title, "batch work done, part of the floor's", "p99, multiple of alone", marks, goals)


def verdicts(results: Results) -> list[Verdict]:
    """The goals, wherever what they are about was measured."""
    found: list[Verdict] = []
    for scenario in results.scenarios():
        found += _beside_the_floor(results, scenario)
    found += [verdict for scenario in results.scenarios() for verdict in _protected(results, scenario)]
    return found + [verdict for reaction in results.reactions for verdict in _reacted(reaction)]


def _beside_the_floor(results: Results, scenario: str) -> list[Verdict]:
    times = results.ratio(scenario, "ours", "floor", p99)
    done = results.ratio(scenario, "ours", "floor", units)
    group = results.group("ours", scenario)
    if times is None or done is None or group is None:
        return []
    use = group.median(node_use)
    return [
        Verdict(times <= FLOOR_P99, f"{scenario}: ours has a p99 of at most {FLOOR_P99:g}x the floor's: {times:.2f}x"),
        Verdict(done >= FLOOR_UNITS, f"{scenario}: and batch work of at least {FLOOR_UNITS:g}x: {done:.2f}x"),
        Verdict(use >= NODE_USE, f"{scenario}: and uses at least {NODE_USE:.0%} of the node: {use:.1%}"),
    ]


def _protected(results: Results, scenario: str) -> list[Verdict]:
    """Of all that policy `latency` was told there, what lends most within the goal; else what comes nearest."""
    points = [point for point in curve(results, scenario) if point.target_ms is not None]
    if not points:
        return []
    within = [point for point in points if point.p99 <= ALONE_P99]
    best = max(within, key=lambda p: p.batch) if within else min(points, key=lambda p: p.p99)
    text = (
        f"{scenario}: told to protect, a p99 of at most {ALONE_P99:.2f}x alone: {best.p99:.2f}x with a target of "
        f"{best.target_ms:g} ms, at which batch work does {best.batch:.2f} of the floor's"
    )
    return [Verdict(bool(within), text)]


def quantile(reaction: Reaction, q: float) -> float:
    """Of all steps that called for something, those that were not answered in their time included: infinitely late."""
    every = sorted(reaction.taken_ms) + [math.inf] * reaction.never
    return every[min(math.ceil(q * len(every)) - 1, len(every) - 1)] if every else math.nan


def shown(value_ms: float) -> str:
    """Milliseconds, or that it took longer than the step."""
    return "" if math.isnan(value_ms) else f"{value_ms:.0f} ms" if math.isfinite(value_ms) else "later than the step"


def _reacted(reaction: Reaction) -> Sequence[Verdict]:
    if not reaction.taken_ms and not reaction.never:
        return ()
    return [
        Verdict(
            quantile(reaction, q) <= limit_ms,
            f"{reaction.mode}, {reaction.kind}: CPU is taken back within {limit_ms:g} ms in {words}: "
            f"{shown(quantile(reaction, q))} ({len(reaction.taken_ms) + reaction.never} of {reaction.steps} "
            "jumps had something to take)",
        )
        for q, limit_ms, words in ((0.5, REACTION_P50_MS, "the median"), (0.99, REACTION_P99_MS, "99 of 100"))
    ]
