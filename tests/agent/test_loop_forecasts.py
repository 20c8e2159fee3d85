"""Forecasts in the loop: their history survives a restart, is kept once beside a shadow, and stops no round."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from agent.advisor.engine import PolicyState
from agent.advisor.forecast import predictor
from agent.advisor.forecast.node_forecast import ForecastSeries
from agent.advisor.forecast.predictor import PeakPredictor
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.journal.forecast_file import ForecastFile
from agent.loop import Loop
from api.decision import ActMode
from api.snapshot import Snapshot
from tests.agent.test_loop import Scripted
from tests.builders.four_cpu_node import busy_snapshot

S = 1_000_000_000
HOUR = 3600 * S


class Timed(Scripted):
    """Rounds five seconds apart by the snapshots' own clock, which is the monotonic clock's when the agent was started."""

    def snapshot(self, seq: int, taken_at_ns: int, wall_time_ns: int) -> Snapshot:
        return msgspec.structs.replace(self.see(seq), taken_at_ns=taken_at_ns, wall_time_ns=wall_time_ns)


def loop_with(forecasts: ForecastFile | None, script: Scripted, config: AgentConfig | None = None) -> Loop:
    stand_in = cast(Any, script)
    return Loop(
        config=config or AgentConfig(), sensor=stand_in, actuator=stand_in, sinks=[stand_in], forecasts=forecasts
    )


def learned(now_ns: int) -> PeakPredictor:
    """26 hours of 1.5 cores, a sample a minute, until now."""
    state = PeakPredictor()
    for minute in range(26 * 60, -1, -1):
        state = predictor.observe_use(state, now_ns - minute * 60 * S, 1.5)
    return state


async def test_a_restarted_agent_foretells_at_once_from_a_day_of_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 30 * HOUR
    monkeypatch.setattr("agent.loop.time.monotonic_ns", lambda: now_ns + S)
    ForecastFile(tmp_path, "b").save(ForecastSeries(cpu=learned(now_ns)), now_ns, 1_700_000_000 * S)
    finished = loop_with(ForecastFile(tmp_path, "b"), Timed(busy_snapshot)).run_cycle("tick")
    cpu, memory = finished.forecasts
    assert cpu.forecast.trusted
    assert cpu.forecast.peak == pytest.approx(1.5, rel=0.001)
    assert cpu.score is not None
    assert (cpu.score.miss_ratio, cpu.score.evaluated) == (0.0, 0)
    assert (memory.forecast.peak, memory.forecast.trusted) == (None, False)
    afresh = loop_with(None, Timed(busy_snapshot)).run_cycle("tick")
    assert afresh.forecasts[0].forecast.peak is None


async def test_a_damaged_history_is_told_in_the_banner(tmp_path: Path) -> None:
    (tmp_path / "forecast_state").write_text("{")
    finished = loop_with(ForecastFile(tmp_path, "b"), Scripted(busy_snapshot)).run_cycle("tick")
    assert finished.startup_warnings[0].startswith(
        f"Forecasts start without history: {tmp_path}/forecast_state is damaged"
    )


async def test_a_history_that_cannot_be_written_is_a_source_that_failed(tmp_path: Path) -> None:
    finished = loop_with(ForecastFile(tmp_path / "gone", "b"), Scripted(busy_snapshot)).run_cycle("tick")
    status = finished.snapshot.sources[-1]
    assert (status.name, status.ok) == ("forecast-state", False)
    assert "No such file or directory" in status.error
    assert finished.outcomes


async def test_a_shadow_foretells_what_the_live_policy_does() -> None:
    """Both have the very same history in the end: there is one."""
    script = Scripted(busy_snapshot)
    loop = loop_with(None, script, AgentConfig(shadow=AdvisorConfig(policy="canonical")))
    for _ in range(2):
        loop.run_cycle("tick")
    live, shadow = (cast(PolicyState, getattr(loop, name)).forecasts for name in ("_policy_state", "_shadow_state"))
    assert shadow.series is live.series is not None
    assert shadow.forecasts is live.forecasts


async def test_where_nothing_is_judged_nothing_is_foretold() -> None:
    script = Scripted(busy_snapshot)
    script.act = ActMode.OFF
    assert loop_with(None, script).run_cycle("tick").forecasts == ()
