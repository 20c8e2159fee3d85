"""The summary of a demo run: phases, and CPU use of other processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import demo.summary
from demo.counters import CLIENT_CELLS, ClientCell, bucket_of
from demo.summary import (
    PHASE_ALONE,
    PHASE_SPIKE,
    PHASE_WITH_BATCH,
    OtherCpuUse,
    PhaseTotals,
    RunningMean,
    busy_cpu_s,
    busy_machine_warning,
    other_cpu_use_line,
    summary_table,
)


def cells(answered: int, latency_ns: int, lost: int = 0, started_ns: int = 77) -> list[int]:
    """A client that had `answered` replies, all with the same latency."""
    values = [0] * CLIENT_CELLS
    values[bucket_of(latency_ns)] = answered
    values[ClientCell.ANSWERED], values[ClientCell.LOST], values[ClientCell.STARTED_NS] = answered, lost, started_ns
    return values


def test_what_is_new_since_the_last_reading_belongs_to_the_phase_it_is_read_in() -> None:
    tally = PhaseTotals()
    tally.read(PHASE_ALONE, 10.0, cells(5, 10**6), 0)
    tally.read(PHASE_ALONE, 12.0, cells(25, 10**6), 0)
    tally.read(PHASE_WITH_BATCH, 13.0, cells(40, 10**6, lost=2), 300)
    tally.read(PHASE_SPIKE, 13.5, cells(90, 10**6, lost=2), 310)
    tally.read(PHASE_WITH_BATCH, 14.5, cells(95, 10**6, lost=3), 910)
    alone, adjacent, spike = (tally.phases[name] for name in (PHASE_ALONE, PHASE_WITH_BATCH, PHASE_SPIKE))
    assert [p.seconds for p in (alone, adjacent, spike)] == [2.0, 2.0, 0.5]
    assert [p.client[ClientCell.ANSWERED] for p in (alone, adjacent, spike)] == [20, 20, 50]
    assert [p.client[ClientCell.LOST] for p in (alone, adjacent, spike)] == [0, 3, 0]
    assert [p.units for p in (alone, adjacent, spike)] == [0, 900, 10]
    assert spike.client[ClientCell.STARTED_NS] == 0


def test_the_table_has_a_line_for_each_phase_that_had_any_time() -> None:
    tally = PhaseTotals()
    tally.read(PHASE_ALONE, 0.0, cells(0, 3 * 10**6), 0)
    tally.read(PHASE_ALONE, 4.0, cells(1200, 3 * 10**6), 0)
    tally.read(PHASE_WITH_BATCH, 6.0, cells(1200, 3 * 10**6), 9000)
    head, alone, adjacent = summary_table(tally)
    assert " ".join(head.split()) == "online service answered lost p50 ms p99 ms p99.9 ms batch units/s"
    assert alone.split() == ["alone", "1,200", "0", "3.20", "3.55", "3.55", "0"]
    assert adjacent.split() == ["with", "batch", "0", "0", "4,500"]


def test_a_mean_ignores_what_is_not_known() -> None:
    mean = RunningMean()
    assert mean.value is None
    for value in (1.0, None, 2.0):
        mean.add(value)
    assert mean.value == 1.5


HZ = os.sysconf("SC_CLK_TCK")


def stat(busy: float, idle: float = 500.0) -> str:
    """A machine that was busy for so many seconds, a tenth of it each in nice and softirq; iowait and steal are not busy."""
    user, part = round(0.8 * busy * HZ), round(0.1 * busy * HZ)
    return f"cpu  {user} {part} 0 {round(idle * HZ)} 777 0 {part} 999 0 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"


def test_busy_is_all_but_idle_iowait_and_steal() -> None:
    assert busy_cpu_s(stat(50.0)) == 50.0


@pytest.mark.parametrize(
    ("busy", "own", "message", "warned"),
    [
        (30.0, 25.0, "others         used 0.50 of 4 cores on average", False),  # 5 of 10 s
        (30.0, 26.0, None, False),  # 0.4 of 4 cores are a tenth, and not more
        (30.0, 31.0, None, False),  # ticks are coarser than what is known of ours
        (30.0, 20.0, "others         used 1.00 of 4 cores on average", False),  # a quarter, and not more
        (30.0, 19.0, "others         used 1.10 of 4 cores on average", True),
    ],
)
def test_what_neither_we_nor_ours_used_is_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: float, own: float, message: str | None, warned: bool
) -> None:
    file = tmp_path / "stat"
    file.write_text(stat(1000.0))
    monkeypatch.setattr(demo.summary, "own_cpu_s", lambda: 7.0)
    others = OtherCpuUse(60.0, file)
    file.write_text(stat(1000.0 + busy))
    monkeypatch.setattr(demo.summary, "own_cpu_s", lambda: 7.0 + own)
    cores = others.cores(70.0)
    line = other_cpu_use_line(cores, 4)
    assert (None if line is None else line.split(":")[0]) == message
    head = busy_machine_warning(cores, 4)
    assert (head is not None) == warned
    if head is not None:
        assert head == (
            "! this machine was too busy for the numbers below to be the product's: others used 1.10 of 4 cores on average; "
            "end them and run it again"
        )
