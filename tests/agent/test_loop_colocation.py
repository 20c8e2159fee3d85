"""Totals of colocation in the loop: every sink gets them, they survive a restart, and a failure of them stops no cycle."""

from __future__ import annotations

from pathlib import Path

from agent.journal.colocation_counter import ColocationCounter
from tests.agent.test_loop import Scripted, failures, loop_over
from tests.builders.four_cpu_node import busy_snapshot

S, MS = 1_000_000_000, 1_000_000


def run_cycles(directory: Path, cycles: int) -> Scripted:
    script, counter = Scripted(busy_snapshot), ColocationCounter(directory, 7)
    loop = loop_over(script, totals=counter)
    for _ in range(cycles):
        loop.run_cycle("tick")
    counter.close()
    return script


def used_ms(script: Scripted) -> list[int]:
    return [cycle.totals.used_ns // MS for cycle in script.cycles if cycle.totals is not None]


async def test_cycles_carry_the_totals_and_the_next_agent_continues_them(tmp_path: Path) -> None:
    """The batch pod uses 2.25 cores; a first cycle has no interval."""
    assert used_ms(run_cycles(tmp_path, 3)) == [0, 2250, 4500]
    assert used_ms(run_cycles(tmp_path, 2)) == [4500, 6750]


async def test_totals_that_cannot_be_written_are_reported_and_stop_no_cycle(tmp_path: Path) -> None:
    script = run_cycles(tmp_path / "gone", 2)
    assert "cannot be written" in failures(script.cycles[-1])["colocation-state"]
    assert used_ms(script) == [0, 2250]


async def test_a_bug_in_the_counter_stops_no_cycle(tmp_path: Path) -> None:
    class Buggy(ColocationCounter):
        def count(self, _finished: object) -> object:  # type: ignore[override]
            raise RuntimeError("counter bug")

    script = Scripted(busy_snapshot)
    loop = loop_over(script, totals=Buggy(tmp_path, 7))
    for _ in range(2):
        loop.run_cycle("tick")
    assert failures(script.cycles[-1])["colocation-state"] == "RuntimeError: counter bug"
    assert used_ms(script) == []
