"""Forecasts in the loop: their history survives a restart, is shared with the shadow policy, and stops no cycle."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest

from agent.advisor.engine import PolicyState
from agent.advisor.forecast import predictor
from agent.advisor.forecast.node_forecast import ForecastSeries
from agent.advisor.forecast.predictor import PeakPredictor
from agent.journal.forecast_file import ForecastFile
from api.decision import ActMode, Cycle
from api.snapshot import Snapshot
from tests.agent.test_loop import SHADOW, Scripted, loop_over
from tests.builders.four_cpu_node import busy_snapshot

S = 1_000_000_000
HOUR = 3600 * S


class Timed(Scripted):
    """Snapshots with the timestamps of their cycle."""

    def snapshot(self, seq: int, taken_at_ns: int, wall_time_ns: int) -> Snapshot:
        return msgspec.structs.replace(self.see(seq), taken_at_ns=taken_at_ns, wall_time_ns=wall_time_ns)


def cycle_with_history(directory: Path, script: Scripted) -> Cycle:
    return loop_over(script, forecasts=ForecastFile(directory, "b")).run_cycle("tick")


def day_of_history(now_ns: int) -> PeakPredictor:
    """26 hours of 1.5 cores, a sample a minute, until now."""
    state = PeakPredictor()
    for minute in range(26 * 60, -1, -1):
        state = predictor.observe_use(state, now_ns - minute * 60 * S, 1.5)
    return state


async def test_a_restarted_agent_has_forecasts_at_once_from_a_day_of_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 30 * HOUR
    monkeypatch.setattr("agent.loop.time.monotonic_ns", lambda: now_ns + S)
    ForecastFile(tmp_path, "b").save(ForecastSeries(cpu=day_of_history(now_ns)), now_ns, 1_700_000_000 * S)
    finished = cycle_with_history(tmp_path, Timed(busy_snapshot))
    cpu, memory = finished.forecasts
    assert cpu.forecast.trusted
    assert cpu.forecast.peak == pytest.approx(1.5, rel=0.001)
    assert cpu.score is not None
    assert (cpu.score.miss_ratio, cpu.score.evaluated) == (0.0, 0)
    assert (memory.forecast.peak, memory.forecast.trusted) == (None, False)
    without_history = loop_over(Timed(busy_snapshot)).run_cycle("tick")
    assert without_history.forecasts[0].forecast.peak is None


async def test_a_damaged_history_is_a_startup_warning(tmp_path: Path) -> None:
    (tmp_path / "forecast_state").write_text("{")
    finished = cycle_with_history(tmp_path, Scripted(busy_snapshot))
    assert finished.startup_warnings[0].startswith(
        f"Forecasts start without history: {tmp_path}/forecast_state is damaged"
    )


async def test_a_history_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    finished = cycle_with_history(tmp_path / "gone", Scripted(busy_snapshot))
    status = finished.snapshot.sources[-1]
    assert (status.name, status.ok) == ("forecast-state", False)
    assert "No such file or directory" in status.error
    assert finished.outcomes


async def test_a_shadow_policy_shares_the_history_and_forecasts_of_the_live_policy() -> None:
    loop = loop_over(Scripted(busy_snapshot), SHADOW)
    for _ in range(2):
        loop.run_cycle("tick")
    live, shadow = (cast(PolicyState, getattr(loop, name)).forecasts for name in ("_policy_state", "_shadow_state"))
    assert shadow.series is live.series is not None
    assert shadow.forecasts is live.forecasts


async def test_with_act_off_there_is_no_forecast() -> None:
    script = Scripted(busy_snapshot)
    script.act = ActMode.OFF
    assert loop_over(script).run_cycle("tick").forecasts == ()
