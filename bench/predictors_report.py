"""Sums, rates, goals and the Markdown section of bench.predictors. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.machine import BenchMachine

MAX_MISS_RATIO, MAX_MISS_BY_10_RATIO, MIN_RECLAIMED_RATIO = 0.07, 0.03, 0.34
HALF_IDLE = 0.5
"""The goal for lending is for nodes that online work does not use more of, on average."""
DIOPTASE = "calibrated"


class PredictorScore(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over forecasts; amounts are shares of the node."""

    evaluated: int
    missed: int
    """Forecasts below the next hour's peak,"""
    by_5: int
    """by more than 5 % of the node,"""
    by_10: int
    """by more than 10 %."""
    shortfall: float
    """Of all misses together."""
    lent: float
    """What the forecasts left of the node."""
    lendable: float
    """What the peaks left, had they been known."""
    observed: int
    observe_ns: int
    predict_ns: int
    state_bytes: int
    """As JSON, at the end."""


class PredictorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One predictor on one set of traces."""

    traces: str
    used: float
    """Mean use, as a share of the node."""
    predictor: str
    judged: PredictorScore

    def share(self, field: str) -> float:
        """A sum per forecast: of counts the rate, of amounts the mean."""
        return float(getattr(self.judged, field)) / max(self.judged.evaluated, 1)

    @property
    def mean_shortfall(self) -> float:
        """Of the misses, as a share of the node."""
        return self.judged.shortfall / self.judged.missed if self.judged.missed else 0.0

    def cells(self) -> tuple[str, ...]:
        judged = self.judged
        return (
            self.traces, f"{self.used:.1%}", self.predictor,
            f"{self.share('missed'):.1%}", f"{self.share('by_5'):.1%}", f"{self.share('by_10'):.1%}",
            f"{self.mean_shortfall:.1%}", f"{self.share('lent'):.1%}", f"{self.share('lendable'):.1%}",
            f"{judged.observe_ns / max(judged.observed, 1) / 1000:.1f}",
            f"{judged.predict_ns / max(judged.evaluated, 1) / 1000:.0f}", f"{judged.state_bytes / 1024:.0f}",
            ", ".join(f"{verdict} {name}" for name, verdict, _ in goals(self)),
        )  # fmt: skip

    def line(self) -> str:
        """For a terminal."""
        first, *rest = self.cells()
        return f"{first:<22}" + " ".join(f"{cell:>11}" for cell in rest)


class PredictorsResults(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    machine: BenchMachine
    settings: str
    methods: tuple[tuple[str, str], ...]
    rows: tuple[PredictorRow, ...]


COLUMNS = (
    "traces", "used", "predictor", "misses", "by > 5 %", "by > 10 %", "mean size", "lent", "lendable", "observe us",
    "predict us", "state KiB", "goals",
)  # fmt: skip


def heading() -> str:
    """Above those lines."""
    return f"{COLUMNS[0]:<22}" + " ".join(f"{name:>11}" for name in COLUMNS[1:])


def goals(row: PredictorRow) -> list[tuple[str, str, str]]:
    """Name, PASS or MISS, and the number, of each goal that is set for such traces."""
    found = [
        ("misses", row.share("missed") <= MAX_MISS_RATIO, f"{row.share('missed'):.1%} of at most {MAX_MISS_RATIO:.0%}"),
        (
            "big",
            row.share("by_10") <= MAX_MISS_BY_10_RATIO,
            f"{row.share('by_10'):.1%} of at most {MAX_MISS_BY_10_RATIO:.0%}",
        ),
    ]
    if row.used <= HALF_IDLE:
        found.append(
            (
                "lent",
                row.share("lent") >= MIN_RECLAIMED_RATIO,
                f"{row.share('lent'):.1%} of at least {MIN_RECLAIMED_RATIO:.0%}",
            )
        )
    return [(name, "PASS" if met else "MISS", text) for name, met, text in found]


def goal_lines(rows: Sequence[PredictorRow]) -> list[str]:
    """Our predictor against each goal, as it is printed and shown."""
    return [
        f"{verdict} {row.traces}: {name}: {text}"
        for row in rows
        if row.predictor == DIOPTASE
        for name, verdict, text in goals(row)
    ]


def means(rows: Sequence[PredictorRow]) -> list[tuple[str, str, str, str, str]]:
    """By predictor, over all sets alike: misses, by more than 5 % and 10 %, lent."""
    out = []
    for name in dict.fromkeys(row.predictor for row in rows):
        of = [row for row in rows if row.predictor == name]
        missed, by_5, by_10, lent = (
            sum(row.share(field) for row in of) / len(of) for field in ("missed", "by_5", "by_10", "lent")
        )
        out.append((name, f"{missed:.1%}", f"{by_5:.1%}", f"{by_10:.1%}", f"{lent:.1%}"))
    return out


def markdown(results: PredictorsResults) -> str:
    """The section of bench/RESULTS.md."""
    out = ["## Peak predictors", "", results.machine.line(), "", results.settings, ""]
    out += [
        "A node of 64 cores; every 5 minutes, after a day, each foretells the peak of the next hour. `misses` are forecasts",
        "below it, `mean size` is by how much those fell short, `lent` is what the forecasts left of the node, `lendable` what",
        "the peaks themselves left: nobody who misses none can lend more. Goals: misses at most 7 %, by more than 10 % of the",
        "node at most 3 %, and, where online work uses at most half, at least 34 % lent.",
        "",
    ]
    out += [f"- **{name}**: {what}" for name, what in results.methods]
    out += [
        "",
        "All sets alike:",
        "",
        "| predictor | misses | by > 5 % | by > 10 % | lent |",
        "|---|---:|---:|---:|---:|",
    ]
    out += [f"| {' | '.join(cells)} |" for cells in means(results.rows)]
    out += ["", f"| {' | '.join(COLUMNS)} |", "|---|---:|---|" + "---:|" * (len(COLUMNS) - 4) + "---|"]
    out += [f"| {' | '.join(row.cells())} |" for row in results.rows]
    out += ["", "Goals of ours:", "", *(f"- {line}" for line in goal_lines(results.rows))]
    return "\n".join([*out, ""])
