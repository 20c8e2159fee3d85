from __future__ import annotations

from demo.counters import CLIENT_CELLS, ClientCell, bucket_of
from demo.summary import PHASE_ALONE, PHASE_SPIKE, PHASE_WITH_BATCH, PhaseTotals, RunningMean, summary_table


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
