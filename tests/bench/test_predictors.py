"""How bench.predictors judges, that its traces are what they say, and a short run of everything."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from agent.advisor.forecast.baselines import METHODS, ForecastMethod
from api.forecast import PeakForecast
from api.knobs import Reason
from bench.predictors import CORES, compare_by_age, evaluate_by_age, evaluate_method, main, sum_ages, sum_scores
from bench.predictors_report import (
    AGE_NAMES,
    AgeRow,
    AgeScore,
    PredictorRow,
    PredictorScore,
    PredictorsResults,
    age_cell,
    age_goal_lines,
    goal_lines,
    goals,
)
from bench.traces import FAMILIES, Trace, generate, nodes_of, read_machines


def always(share: float | None) -> ForecastMethod:
    peak = None if share is None else share * CORES
    forecast = PeakForecast(peak=peak, reason=Reason(rule="x", text="x"))
    return ForecastMethod(
        lambda _: 0, lambda state, now_ns, used: state, lambda state, now_ns, horizon_ns: forecast, ""
    )


def two_days(spike: Callable[[int], bool]) -> Trace:
    """Five minutes a step at 20 %, 50 % where there is a spike."""
    return Trace(family="f", name="n", step_s=300, used=tuple(0.5 if spike(i) else 0.2 for i in range(576)))


def test_a_spike_is_missed_by_the_twelve_forecasts_that_it_follows() -> None:
    evaluation = evaluate_method(always(0.42), two_days(lambda index: index == 400))
    assert evaluation.evaluated == 576 - 288 - 12
    assert (evaluation.missed, evaluation.by_5, evaluation.by_10) == (12, 12, 0)
    assert evaluation.shortfall == pytest.approx(12 * 0.08)
    assert evaluation.reclaimable == pytest.approx(276 * 0.58)
    assert evaluation.lendable == pytest.approx(264 * 0.8 + 12 * 0.5)


def test_a_spike_before_the_warm_up_and_one_that_ends_now_are_not_missed() -> None:
    assert evaluate_method(always(0.42), two_days(lambda index: index in (100, 288))).missed == 0


def test_no_forecast_has_no_headroom_and_no_misses() -> None:
    evaluation = evaluate_method(always(None), two_days(lambda index: index == 400))
    assert (evaluation.missed, evaluation.reclaimable) == (0, 0.0)


def test_a_trace_of_one_day_is_evaluated_after_half_of_it() -> None:
    trace = Trace(family="f", name="n", step_s=300, used=(0.1,) * 288)
    assert evaluate_method(METHODS["max"], trace).evaluated == 288 - 144 - 12


def test_forecasts_are_sorted_by_age_of_history() -> None:
    """A spike at 2 h is missed by the 12 forecasts between 1 and 2 h; one at 10 h by those between 9 and 10 h."""
    ages = evaluate_by_age(always(0.42), two_days(lambda index: index in (24, 120)))
    assert [age.moments for age in ages] == [12, 12, 36, 72, 144, 276]
    assert [age.missed for age in ages] == [12, 0, 0, 12, 0, 0]
    assert ages[0].reclaimable == pytest.approx(12 * 0.58)


def test_an_age_without_forecasts_has_neither_misses_nor_headroom() -> None:
    first, *_ = evaluate_by_age(always(None), two_days(lambda index: index == 24))
    assert (first.moments, first.forecasts, first.missed, first.reclaimable) == (12, 0, 0, 0.0)


def test_misses_at_every_age_of_history_are_at_most_eight_percent() -> None:
    """Nine families, five machines of 36 hours, a seed that the margin was not fitted to."""
    rows = []
    for family in FAMILIES:
        traces = [msgspec.structs.replace(trace, used=trace.used[: 36 * 60]) for trace in generate(family, 5, 2, 31)]
        ages = sum_ages([evaluate_by_age(METHODS["calibrated"], trace) for trace in traces])
        rows.append(AgeRow(traces=family, predictor="calibrated", ages=ages))
    assert age_cell(rows, 0) == "-"  # an hour of errors is not there yet
    lines = age_goal_lines(rows)
    assert [line.split(":")[0] for line in lines] == [f"PASS history {name}" for name in AGE_NAMES[1:]], lines


def age_row(predictor: str, traces: str, missed: int) -> AgeRow:
    predicted = AgeScore(moments=200, forecasts=100, missed=missed, reclaimable=60.0)
    return AgeRow(traces=traces, predictor=predictor, ages=(AgeScore(moments=12), *([predicted] * 5)))


def test_an_age_cell_is_the_mean_of_sets_and_a_dash_without_forecasts() -> None:
    """Misses are a share of the forecasts, headroom a share of all moments."""
    rows = [age_row("calibrated", "a", 4), age_row("calibrated", "b", 10)]
    assert (age_cell(rows, 0), age_cell(rows, 1)) == ("-", "7.0% / 30.0%")
    assert age_goal_lines(rows)[0] == "PASS history 2-3 h: misses: 7.0% of at most 8%"
    assert age_goal_lines([*rows, age_row("calibrated", "c", 11)])[0].startswith("MISS history 2-3 h: misses: 8.3%")
    assert age_goal_lines([age_row("max", "a", 50)]) == []


def test_ages_are_compared_for_every_method() -> None:
    rows = list(compare_by_age([("f", 0.2, [two_days(lambda index: False)] * 2)]))
    assert [row.predictor for row in rows] == list(METHODS)
    assert {row.ages[5].moments for row in rows} == {552}


def row(**changes: float) -> PredictorRow:
    values = (
        dict.fromkeys(PredictorScore.__struct_fields__, 0)
        | {"evaluated": 100, "reclaimable": 34.0, "missed": 7}
        | changes
    )
    return PredictorRow(traces="t", used=0.5, predictor="calibrated", score=PredictorScore(**values))


@pytest.mark.parametrize(
    ("changes", "missed_goal"),
    [({}, None), ({"missed": 8}, "misses"), ({"by_10": 4}, "big"), ({"reclaimable": 33.9}, "lent")],
)
def test_goals(changes: dict[str, float], missed_goal: str | None) -> None:
    assert [name for name, verdict, _ in goals(row(**changes)) if verdict == "MISS"] == (
        [missed_goal] if missed_goal else []
    )


def test_a_node_that_is_more_than_half_used_has_no_goal_for_lending() -> None:
    busy = msgspec.structs.replace(row(reclaimable=1.0), used=0.51)
    assert [name for name, _, _ in goals(busy)] == ["misses", "big"]
    assert len(goal_lines([busy, msgspec.structs.replace(busy, predictor="max")])) == 2


def test_sums_add_up_but_states_do_not() -> None:
    both = sum_scores([row(state_bytes=5).score, row(state_bytes=3).score])
    assert (both.evaluated, both.reclaimable, both.state_bytes) == (200, 68.0, 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_traces_are_the_same_each_time_and_differ_by_machine(family: str) -> None:
    first, second = generate(family, 2, 2, 1)
    assert first == generate(family, 1, 2, 1)[0]
    assert first.used != second.used
    assert len(first.used) == 2880
    assert 0.005 <= min(first.used) < max(first.used) <= 1.0
    assert 0.02 < sum(first.used) / 2880 < 0.75


def test_a_csv_of_machines_and_nodes_made_of_them(tmp_path: Path) -> None:
    path = tmp_path / "m.csv.gz"
    path.write_bytes(gzip.compress(b"a,10,20\nb,30,40\n"))
    machines = read_machines(path)
    assert [machine.used for machine in machines] == [(0.1, 0.2), (0.3, 0.4)]
    node = nodes_of(machines, 1, 2, seed=1)[0]
    assert node.used == pytest.approx((0.2, 0.3))


def test_the_bench_runs_and_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--families", "step", "--machines", "1", "--days", "2", "--age-machines", "1", "--out", str(tmp_path)])
        == 0
    )
    results = msgspec.json.decode((tmp_path / "predictors.json").read_bytes(), type=PredictorsResults)
    assert [result.predictor for result in results.rows] == list(METHODS)
    assert {value.score.evaluated for value in results.rows} == {276}
    page = (tmp_path / "predictors.md").read_text()
    printed = capsys.readouterr().out
    for line in (*goal_lines(results.rows), *age_goal_lines(results.by_age)):
        assert line in page
        assert line in printed


def test_a_trace_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--families", "--trace", str(tmp_path / "no.csv"), "--out", str(tmp_path)]) == 2
    assert "no.csv" in capsys.readouterr().err
