"""The predictor's history on disk after a restart, a reboot, a full disk and with a damaged file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agent.advisor.forecast import predictor
from agent.advisor.forecast.node_forecast import ForecastSeries
from agent.advisor.forecast.peak_model import ForecastAccuracy
from agent.advisor.forecast.predictor import PeakPredictor
from agent.journal.forecast_file import FILE_NAME, ForecastFile
from api.interfaces import Unavailable

S = 1_000_000_000
MINUTE, HOUR = 60 * S, 3600 * S
WALL = 1_700_000_000 * S
"""CLOCK_REALTIME when CLOCK_MONOTONIC was zero."""
NOW = 26 * HOUR + 7 * S


def learned() -> PeakPredictor:
    """A day and two hours of 10 cores, a sample a minute."""
    state = PeakPredictor()
    for minute in range(26 * 60 + 1):
        state = predictor.observe_use(state, minute * MINUTE + 7 * S, 10.0)
    return state


LEARNED = learned()
SERIES = ForecastSeries(cpu=LEARNED, memory=PeakPredictor())


def written(tmp_path: Path, boot_id: str = "one") -> None:
    ForecastFile(tmp_path, boot_id).save(SERIES, NOW, WALL + NOW)


def test_after_a_restart_a_day_of_history_is_there_and_totals_start_again(tmp_path: Path) -> None:
    written(tmp_path)
    file = ForecastFile(tmp_path, "one")
    series = file.load(NOW + 20 * S, WALL + NOW + 5 * HOUR)  # whatever the wall clock says: the boot is the same
    assert series is not None
    assert file.messages == ()
    assert series.cpu == msgspec.structs.replace(
        LEARNED, accuracy=msgspec.structs.replace(ForecastAccuracy(), recent=LEARNED.accuracy.recent)
    )
    before, after = (predictor.predict_peak(state, NOW + 20 * S) for state in (LEARNED, series.cpu))
    assert after.trusted
    assert after.peak == before.peak == pytest.approx(10.0, rel=0.001)


@pytest.mark.parametrize(
    ("away_s", "bucket", "unknown", "trusted"),
    [
        (90, 0, 0, True),  # the open bucket continues
        (271, -1, 0, True),  # the last sample is 151 s before the boot: the nearest bucket is the one before
        (4 * 3600, -48, 47, False),  # too few recent samples
        (71 * 3600, -852, 851, False),
    ],
)
def test_after_a_reboot_history_is_as_old_as_the_wall_clock_says(
    tmp_path: Path, away_s: int, bucket: int, unknown: int, *, trusted: bool
) -> None:
    """The new boot's clock shows two minutes: history ended so long before that, to the nearest five minutes."""
    written(tmp_path)
    now_ns = 120 * S
    series = ForecastFile(tmp_path, "two").load(now_ns, WALL + NOW + away_s * S)
    assert series is not None
    assert (series.cpu.last_ns, series.cpu.bucket) == (now_ns - away_s * S, bucket)
    assert series.cpu.peaks == LEARNED.peaks
    after = predictor.observe_use(series.cpu, now_ns, 10.0)
    assert sum(peak is None for peak in after.peaks) == unknown
    assert predictor.predict_peak(after, now_ns).trusted is trusted


@pytest.mark.parametrize(("passed_h", "used"), [(73, False), (-2, False), (-0.5, True), (71, True)])
def test_history_that_is_too_old_or_from_the_future_is_discarded_with_a_message(
    tmp_path: Path, passed_h: float, *, used: bool
) -> None:
    written(tmp_path)
    file = ForecastFile(tmp_path, "two")
    series = file.load(60 * S, WALL + NOW + round(passed_h * HOUR))
    assert (series is not None) is used
    assert bool(file.messages) is not used
    if not used:
        assert f"written {passed_h:.1f} hours ago" in file.messages[0]
    elif series is not None:
        assert series.cpu.last_ns <= 60 * S  # never ahead of the present


@pytest.mark.parametrize(
    ("connection_lost", "message"),
    [
        (lambda data: data[:-2], "cannot be read"),
        (lambda data: data.replace(b"10.0", b"11.0", 1), "checksum"),
        (lambda data: data.replace(b'"version":1', b'"version":2', 1), "layout version 2, this program supports 1"),
        (lambda data: b"", "cannot be read"),
        (lambda data: data + b" ", "checksum"),
    ],
    ids=["cut short", "another number", "another version", "empty", "a byte more"],
)
def test_a_damaged_file_is_renamed_and_history_starts_empty(tmp_path: Path, connection_lost, message: str) -> None:  # type: ignore[no-untyped-def]
    written(tmp_path)
    path = tmp_path / FILE_NAME
    damaged = connection_lost(path.read_bytes())
    path.write_bytes(damaged)
    file = ForecastFile(tmp_path, "one")
    assert file.load(NOW, WALL + NOW) is None
    assert message in file.messages[0]
    assert (tmp_path / f"{FILE_NAME}.damaged-1").read_bytes() == damaged
    file.save(SERIES, NOW, WALL + NOW)
    assert ForecastFile(tmp_path, "one").load(NOW, WALL + NOW) is not None


def test_it_is_written_when_a_bucket_is_complete_and_at_the_end(tmp_path: Path) -> None:
    """In ten minutes of cycles it is written at once and at two ends of buckets; the unfinished bucket when the agent ends."""
    file, path = ForecastFile(tmp_path, "one"), tmp_path / FILE_NAME
    state, writes, inode_before = LEARNED, 0, 0
    for second in range(1, 601):
        now_ns = NOW + second * S
        state = predictor.observe_use(state, now_ns, 10.0)
        file.save(ForecastSeries(cpu=state), now_ns, WALL + now_ns)
        if (inode := path.stat().st_ino) != inode_before:
            writes, inode_before = writes + 1, inode
    assert writes == 3
    file.close()
    series = ForecastFile(tmp_path, "one").load(NOW, WALL + NOW)
    assert series is not None
    assert series.cpu.last_ns == NOW + 600 * S
    assert path.stat().st_size < 64 << 10


def test_a_write_error_is_raised_in_each_cycle_and_retried_once_a_minute(tmp_path: Path) -> None:
    missing = tmp_path / "state"
    file = ForecastFile(missing, "one")
    for second in range(59):
        with pytest.raises(Unavailable, match="cannot be written"):
            file.save(SERIES, NOW + second * S, WALL)
        missing.mkdir(exist_ok=True)
    file.save(SERIES, NOW + 60 * S, WALL)
    assert ForecastFile(missing, "one").load(NOW, WALL) is not None
