"""Sums, rates, goals and the Markdown section of bench.predictors. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.machine import BenchMachine, markdown_table

MAX_MISS_RATIO, MAX_MISS_BY_10_RATIO, MIN_RECLAIMED_RATIO = 0.07, 0.03, 0.34
HALF_IDLE = 0.5
"""The goal for reclaimable CPU holds for nodes whose mean online use is at most this."""
DIOPTASE = "calibrated"


class PredictorScore(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over forecasts; amounts are shares of the node."""

    evaluated: int
    missed: int
    """Number of forecasts below the peak of the next hour."""
    by_5: int
    """Number of misses by more than 5 % of the node."""
    by_10: int
    """Number of misses by more than 10 % of the node."""
    shortfall: float
    """Sum of the amounts of all misses."""
    reclaimable: float = msgspec.field(name="lent")
    """Sum of the node's share that the forecasts left."""
    lendable: float
    """Sum of the node's share that the actual peaks left."""
    observed: int
    observe_ns: int
    predict_ns: int
    state_bytes: int
    """Size of the state as JSON at the end."""


class PredictorRow(msgspec.Struct, frozen=True, kw_only=True):
    """Score of one predictor on one set of traces."""

    traces: str
    used: float
    """Mean use as a share of the node."""
    predictor: str
    score: PredictorScore = msgspec.field(name="judged")

    def share(self, field: str) -> float:
        """Return a sum per forecast: a rate for counts, a mean for amounts."""
        return float(getattr(self.score, field)) / max(self.score.evaluated, 1)

    @property
    def mean_shortfall(self) -> float:
        """Mean size of the misses, as a share of the node."""
        return self.score.shortfall / self.score.missed if self.score.missed else 0.0

    def cells(self) -> tuple[str, ...]:
        score = self.score
        return (
            self.traces, f"{self.used:.1%}", self.predictor,
            f"{self.share('missed'):.1%}", f"{self.share('by_5'):.1%}", f"{self.share('by_10'):.1%}",
            f"{self.mean_shortfall:.1%}", f"{self.share('reclaimable'):.1%}", f"{self.share('lendable'):.1%}",
            f"{score.observe_ns / max(score.observed, 1) / 1000:.1f}",
            f"{score.predict_ns / max(score.evaluated, 1) / 1000:.0f}", f"{score.state_bytes / 1024:.0f}",
            ", ".join(f"{result} {name}" for name, result, _ in goals(self)),
        )  # fmt: skip

    def line(self) -> str:
        """Format the cells for a terminal."""
        first, *rest = self.cells()
        return f"{first:<22}" + " ".join(f"{cell:>11}" for cell in rest)


AGE_HOURS = ((1, 2), (2, 3), (3, 6), (6, 12), (12, 24), (24, None))
"""Ages of history, from and until, of the table by age."""
AGE_NAMES = tuple(f"{start}-{end} h" if end else "later" for start, end in AGE_HOURS)
MAX_AGE_MISS_RATIO = 0.08
"""Goal at any age of history."""


class AgeScore(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the moments at one age of history; amounts are shares of the node."""

    moments: int = 0
    forecasts: int = 0
    """Moments with a forecast."""
    missed: int = 0
    """Forecasts below the peak of the next hour."""
    reclaimable: float = 0.0
    """Sum of the node's share that the forecasts left; nothing without a forecast."""


class AgeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one predictor on one set of traces, one per age of AGE_HOURS."""

    traces: str
    predictor: str
    ages: tuple[AgeScore, ...]


class PredictorsResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    machine: BenchMachine
    settings: str
    methods: tuple[tuple[str, str], ...]
    rows: tuple[PredictorRow, ...]
    age_machines: int
    """Machines of each generated family in `by_age`."""
    by_age: tuple[AgeRow, ...]


COLUMNS = (
    "traces", "used", "predictor", "misses", "by > 5 %", "by > 10 %", "mean size", "lent", "lendable", "observe us",
    "predict us", "state KiB", "goals",
)  # fmt: skip


def heading() -> str:
    """Format the column titles for a terminal."""
    return f"{COLUMNS[0]:<22}" + " ".join(f"{name:>11}" for name in COLUMNS[1:])


def goals(row: PredictorRow) -> list[tuple[str, str, str]]:
    """Return name, PASS or MISS, and the number of each goal that applies to these traces."""
    checks = [
        ("misses", row.share("missed") <= MAX_MISS_RATIO, f"{row.share('missed'):.1%} of at most {MAX_MISS_RATIO:.0%}"),
        (
            "big",
            row.share("by_10") <= MAX_MISS_BY_10_RATIO,
            f"{row.share('by_10'):.1%} of at most {MAX_MISS_BY_10_RATIO:.0%}",
        ),
    ]
    if row.used <= HALF_IDLE:
        checks.append(
            (
                "lent",
                row.share("reclaimable") >= MIN_RECLAIMED_RATIO,
                f"{row.share('reclaimable'):.1%} of at least {MIN_RECLAIMED_RATIO:.0%}",
            )
        )
    return [(name, "PASS" if met else "MISS", text) for name, met, text in checks]


def goal_lines(rows: Sequence[PredictorRow]) -> list[str]:
    """Return the result of the product's predictor for each goal, one line each."""
    return [
        f"{result} {row.traces}: {name}: {text}"
        for row in rows
        if row.predictor == DIOPTASE
        for name, result, text in goals(row)
    ]


def means(rows: Sequence[PredictorRow]) -> list[tuple[str, str, str, str, str]]:
    """Return by predictor the means over all sets: misses, misses by more than 5 % and 10 %, reclaimable share."""
    out = []
    for name in dict.fromkeys(row.predictor for row in rows):
        of = [row for row in rows if row.predictor == name]
        missed, by_5, by_10, reclaimable = (
            sum(row.share(field) for row in of) / len(of) for field in ("missed", "by_5", "by_10", "reclaimable")
        )
        out.append((name, f"{missed:.1%}", f"{by_5:.1%}", f"{by_10:.1%}", f"{reclaimable:.1%}"))
    return out


def age_cell(rows: Sequence[AgeRow], age: int) -> str:
    """Return misses and reclaimable share at one age: means over the sets that have forecasts there, or a dash."""
    scores = [row.ages[age] for row in rows if row.ages[age].forecasts]
    if not scores:
        return "-"
    return f"{_mean_misses(scores):.1%} / {sum(s.reclaimable / s.moments for s in scores) / len(scores):.1%}"


def _mean_misses(scores: Sequence[AgeScore]) -> float:
    return sum(score.missed / score.forecasts for score in scores) / len(scores)


def age_goal_lines(rows: Sequence[AgeRow]) -> list[str]:
    """Return the result of the product's predictor for the goal at each age, one line each."""
    out = []
    for age, name in enumerate(AGE_NAMES):
        scores = [row.ages[age] for row in rows if row.predictor == DIOPTASE and row.ages[age].forecasts]
        if scores:
            misses = _mean_misses(scores)
            result = "PASS" if misses <= MAX_AGE_MISS_RATIO else "MISS"
            out.append(f"{result} history {name}: misses: {misses:.1%} of at most {MAX_AGE_MISS_RATIO:.0%}")
    return out


def _age_tables(results: PredictorsResults) -> list[str]:
    rows = results.by_age
    out = [
        "Misses and lent by age of history:", "",
        f"{results.age_machines} other machines of each family, two days. Each cell has the misses, in % of the forecasts at",
        "that age, and lent, in % of the node, where a moment without a forecast lends nothing; a dash is an age without",
        "forecasts. Goal: misses at most 8 % at any age, as the mean of the sets.", "",
    ]  # fmt: skip
    ages = range(len(AGE_NAMES))
    for title, key in (("predictor", "predictor"), (f"traces, {DIOPTASE}", "traces")):
        chosen = [row for row in rows if key == "predictor" or row.predictor == DIOPTASE]
        groups = {
            name: [row for row in chosen if getattr(row, key) == name]
            for name in dict.fromkeys(getattr(r, key) for r in chosen)
        }
        cells = [(name, *(age_cell(group, age) for age in ages)) for name, group in groups.items()]
        out += [*markdown_table((title, *AGE_NAMES), cells), ""]
    return out


def markdown(results: PredictorsResults) -> str:
    """Render the section of bench/RESULTS.md."""
    out = ["## Peak predictors", "", results.machine.line(), "", results.settings, ""]
    out += [
        "A node of 64 cores; every 5 minutes, after a day, each method forecasts the peak of the next hour. `misses` are",
        "forecasts below it, `mean size` is their mean shortfall, `lent` is what the forecasts left of the node, `lendable`",
        "what the actual peaks left: without misses nothing above that is possible. Goals: misses at most 7 %, by more than",
        "10 % of the node at most 3 %, and, where online work uses at most half, at least 34 % lent.",
        "",
    ]
    out += [f"- **{name}**: {what}" for name, what in results.methods]
    heads = ("predictor", "misses", "by > 5 %", "by > 10 %", "lent")
    out += ["", "All sets alike:", "", *markdown_table(heads, means(results.rows)), ""]
    out += markdown_table(COLUMNS, [row.cells() for row in results.rows], text_columns=3)
    out += ["", *_age_tables(results), "Goals of dioptase:", ""]
    out += [f"- {line}" for line in (*goal_lines(results.rows), *age_goal_lines(results.by_age))]
    return "\n".join([*out, ""])
