"""Compares peak predictors: how often and how far use exceeds the forecast, and what stays reclaimable."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from agent.advisor.forecast.baselines import METHODS, ForecastMethod
from api.forecast import ForecastResource
from api.units import NS_PER_S
from bench.machine import bench_parser, end_cleanly_on_sigterm, this_machine, write_results
from bench.predictors_report import (
    AGE_HOURS,
    AgeRow,
    AgeScore,
    PredictorRow,
    PredictorScore,
    PredictorsResults,
    age_goal_lines,
    goal_lines,
    heading,
    markdown,
)
from bench.traces import FAMILIES, Trace, generate, nodes_of, read_machines

CORES = 64.0
EVERY_S, HORIZON_S = 300, 3600
START_NS = 7 * NS_PER_S
"""No trace begins on the boundary of a minute or an hour."""
DAY_S = 86_400
SEED = 20_261_122


def evaluate_method(method: ForecastMethod, trace: Trace) -> PredictorScore:
    """Evaluate one method on one trace every five minutes, after a day (half a day for a trace of one day)."""
    used, step_s = trace.used, trace.step_s
    every, ahead = EVERY_S // step_s, HORIZON_S // step_s
    warm = (DAY_S if len(used) * step_s > DAY_S else DAY_S // 2) // step_s
    state, shortfalls, left = method.start(ForecastResource.CPU), list[float](), 0.0
    lendable, observing, predicting = 0.0, 0, 0
    for index, share in enumerate(used):
        now_ns = START_NS + index * step_s * NS_PER_S
        began = time.perf_counter_ns()
        state = method.observe(state, now_ns, share * CORES)
        observing += time.perf_counter_ns() - began
        if index < warm or index % every or index + ahead >= len(used):
            continue
        began = time.perf_counter_ns()
        peak = method.predict(state, now_ns, HORIZON_S * NS_PER_S).peak
        predicting += time.perf_counter_ns() - began
        forecast = 1.0 if peak is None else min(peak / CORES, 1.0)
        actual = max(used[index + 1 : index + 1 + ahead])
        shortfalls.append(actual - forecast)
        lendable += 1 - actual
        left += 1 - forecast
    return PredictorScore(
        evaluated=len(shortfalls),
        missed=sum(shortfall > 0 for shortfall in shortfalls),
        by_5=sum(shortfall > 0.05 for shortfall in shortfalls),
        by_10=sum(shortfall > 0.10 for shortfall in shortfalls),
        shortfall=sum(max(shortfall, 0.0) for shortfall in shortfalls),
        reclaimable=left,
        lendable=lendable,
        observed=len(used),
        observe_ns=observing,
        predict_ns=predicting,
        state_bytes=len(msgspec.json.encode(state)),
    )


def compare_methods(sets: Iterable[tuple[str, float, Sequence[Trace]]]) -> Iterator[PredictorRow]:
    """Yield a row per set of traces (by name and mean use) and method; sums over the traces."""
    for name, mean, traces in sets:
        for method_name, method in METHODS.items():
            yield PredictorRow(
                traces=name,
                used=mean,
                predictor=method_name,
                score=sum_scores([evaluate_method(method, t) for t in traces]),
            )


def evaluate_by_age(method: ForecastMethod, trace: Trace) -> tuple[AgeScore, ...]:
    """Evaluate one method on one trace every five minutes from the first hour on; one score per age of AGE_HOURS."""
    used, step_s = trace.used, trace.step_s
    every, ahead = EVERY_S // step_s, HORIZON_S // step_s
    state, scores = method.start(ForecastResource.CPU), [AgeScore() for _ in AGE_HOURS]
    for index, share in enumerate(used[:-ahead]):
        now_ns = START_NS + index * step_s * NS_PER_S
        state = method.observe(state, now_ns, share * CORES)
        hours = index * step_s / HORIZON_S
        if index % every or hours < AGE_HOURS[0][0]:
            continue
        age = next(number for number, (_, end) in enumerate(AGE_HOURS) if end is None or hours < end)
        peak = method.predict(state, now_ns, HORIZON_S * NS_PER_S).peak
        forecast = 1.0 if peak is None else min(peak / CORES, 1.0)
        score = scores[age]
        scores[age] = AgeScore(
            moments=score.moments + 1,
            forecasts=score.forecasts + (peak is not None),
            missed=score.missed + (max(used[index + 1 : index + 1 + ahead]) > forecast),
            reclaimable=score.reclaimable + 1 - forecast,
        )
    return tuple(scores)


def sum_ages(parts: Sequence[tuple[AgeScore, ...]]) -> tuple[AgeScore, ...]:
    """Sum the scores of several traces age by age."""
    return tuple(
        AgeScore(**{field: sum(getattr(score, field) for score in scores) for field in AgeScore.__struct_fields__})
        for scores in zip(*parts, strict=True)
    )


def compare_by_age(sets: Iterable[tuple[str, float, Sequence[Trace]]]) -> Iterator[AgeRow]:
    """Yield a row per set of traces and method; sums over the traces."""
    for name, _, traces in sets:
        for method_name, method in METHODS.items():
            ages = sum_ages([evaluate_by_age(method, trace) for trace in traces])
            yield AgeRow(traces=name, predictor=method_name, ages=ages)


def sum_scores(parts: Sequence[PredictorScore]) -> PredictorScore:
    """Sum the scores; of the state sizes take the largest."""
    fields = [field for field in PredictorScore.__struct_fields__ if field != "state_bytes"]
    together = {field: sum(getattr(part, field) for part in parts) for field in fields}
    return PredictorScore(**together, state_bytes=max(part.state_bytes for part in parts))


def _trace_sets(args: argparse.Namespace) -> Iterator[tuple[str, float, Sequence[Trace]]]:
    for family in FAMILIES if args.families is None else args.families:
        days = max(args.days, 14) if family == "weekly" else args.days
        yield _with_mean(family, generate(family, args.machines, days, args.seed))
    yield from _file_sets(args)


def _age_sets(args: argparse.Namespace) -> Iterator[tuple[str, float, Sequence[Trace]]]:
    """Many machines of two days: each contributes only a dozen forecasts, of one cause, to an hour of age."""
    for family in FAMILIES if args.families is None else args.families:
        yield _with_mean(family, generate(family, args.age_machines, 2, args.seed + 1))
    yield from _file_sets(args)


def _file_sets(args: argparse.Namespace) -> Iterator[tuple[str, float, Sequence[Trace]]]:
    for path in args.trace:
        machines = read_machines(path)
        yield _with_mean(f"{path.name}, machines", machines)
        if len(machines) >= 20:
            yield _with_mean(
                f"{path.name}, nodes of 20", nodes_of(machines, min(2 * len(machines), 200), 20, args.seed)
            )


def _with_mean(name: str, traces: Sequence[Trace]) -> tuple[str, float, Sequence[Trace]]:
    return name, sum(sum(t.used) for t in traces) / sum(len(t.used) for t in traces), traces


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser("predictors", __doc__)
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], help="CSV (.gz) of machines; may be repeated"
    )
    parser.add_argument(
        "--families", nargs="*", choices=FAMILIES, metavar="NAME", help="generated ones; all unless given"
    )
    parser.add_argument("--machines", type=int, default=5, help="of each family")
    parser.add_argument(
        "--age-machines", type=int, default=20, help="of each family in the table by age of history, two days each"
    )
    parser.add_argument("--days", type=int, default=8, help="of each trace; 14 at least where weeks matter")
    parser.add_argument("--seed", type=int, default=SEED)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the table; a missed goal does not fail the benchmark."""
    end_cleanly_on_sigterm()
    args = parse(argv)
    rows: list[PredictorRow] = []
    try:
        print(heading())
        for row in compare_methods(_trace_sets(args)):
            rows.append(row)
            print(row.line(), flush=True)
        by_age = tuple(compare_by_age(_age_sets(args)))
    except (OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    results = PredictorsResults(
        machine=this_machine("not used"),
        settings=f"{args.machines} machines of each family, {args.days} days (weekly at least 14), seed {args.seed}.",
        methods=tuple((name, method.description) for name, method in METHODS.items()),
        rows=tuple(rows),
        age_machines=args.age_machines,
        by_age=by_age,
    )
    write_results(args.out, "predictors", markdown(results), results)
    print("\n".join([*goal_lines(rows), *age_goal_lines(by_age)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
