"""Keeps the history of the forecasts on disk, so that a restart of the agent does not lose a day of samples.
One JSON file with version and checksum, replaced when a five-minute bucket is complete and at exit. It holds
CLOCK_MONOTONIC and CLOCK_REALTIME: after a reboot the history is shifted by the elapsed real time.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from agent.advisor.forecast.node_forecast import ForecastSeries
from agent.advisor.forecast.peak_model import BUCKET_NS, HISTORY_BUCKETS, HORIZON_BUCKETS
from agent.advisor.forecast.predictor import PeakPredictor, resume_predictor
from api.interfaces import Unavailable
from common.files import read_small_file
from common.state_file import StateFileDamaged, decode_state, encode_state, quarantine_file, replace_file

VERSION = 1
"""Of the layout, of what the regression looks at too."""
FILE_NAME = "forecast_state"
MAX_BYTES = 4 << 20
RETRY_NS = 60 * 1_000_000_000
"""Between two writes at least."""
HOUR_NS = HORIZON_BUCKETS * BUCKET_NS
_MIN_AGE_NS, _MAX_AGE_NS = -HOUR_NS, HISTORY_BUCKETS * BUCKET_NS


class SavedForecasts(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    version: int = VERSION
    boot_id: str
    monotonic_ns: int
    """CLOCK_MONOTONIC of that boot,"""
    wall_ns: int
    """and CLOCK_REALTIME, when it was written."""
    cpu: PeakPredictor
    memory: PeakPredictor
    checksum: str = ""


class ForecastFile:
    """The file in a state directory that this process has locked. `messages` says what was not taken over, and why."""

    def __init__(self, state_dir: Path, boot_id: str) -> None:
        self.path = state_dir / FILE_NAME
        self.messages: tuple[str, ...] = ()
        self._boot_id = boot_id
        self._offered: SavedForecasts | None = None
        self._written: SavedForecasts | None = None
        self._tried_ns: int | None = None
        self._failed: Unavailable | None = None

    def load(self, now_ns: int, wall_ns: int) -> ForecastSeries | None:
        """What was saved last, on this boot's clock; None where nothing of it can be used, see `messages`. Raises Unavailable
        where a damaged file cannot be set aside."""
        try:
            saved = decode_state(read_small_file(self.path, MAX_BYTES), SavedForecasts, VERSION)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.messages = (f"Forecasts start afresh: {self.path} cannot be read: {error.strerror}.",)
            return None
        except StateFileDamaged as error:
            aside = quarantine_file(self.path, str(error))
            self.messages = (f"Forecasts start afresh: {self.path} was damaged: {error}. It is kept as {aside}.",)
            return None
        shift_ns = 0
        if saved.boot_id != self._boot_id:
            passed_ns = wall_ns - saved.wall_ns
            if not _MIN_AGE_NS <= passed_ns <= _MAX_AGE_NS:
                told = f"{self.path} was written {passed_ns / HOUR_NS:.1f} hours ago by the clock on the wall"
                self.messages = (
                    f"Forecasts start afresh: {told}, and history is used for {_MAX_AGE_NS / HOUR_NS:.0f}.",
                )
                return None
            # A wall clock that was set back a little must not put history ahead of the present.
            shift_ns = now_ns - max(passed_ns, 0) - saved.monotonic_ns
        return ForecastSeries(
            cpu=resume_predictor(saved.cpu, shift_ns), memory=resume_predictor(saved.memory, shift_ns)
        )

    def save(self, series: ForecastSeries, now_ns: int, wall_ns: int) -> None:
        """Have it on disk when it returns, if a bucket of history was completed since the last time. Raises Unavailable, until
        a later attempt succeeds."""
        self._offered = SavedForecasts(
            boot_id=self._boot_id, monotonic_ns=now_ns, wall_ns=wall_ns, cpu=series.cpu, memory=series.memory
        )
        due = self._written is None or self._complete(self._written) != self._complete(self._offered)
        if due and (self._tried_ns is None or now_ns - self._tried_ns >= RETRY_NS):
            self._tried_ns = now_ns
            self._write(self._offered)
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Have the unfinished bucket on disk too; where that fails, the rounds before said so already."""
        if self._offered is not None and self._offered is not self._written:
            self._write(self._offered)

    def _write(self, saved: SavedForecasts) -> None:
        try:
            replace_file(self.path, encode_state(saved))
        except OSError as error:
            self._failed = Unavailable(
                f"the history of forecasts cannot be written to {self.path}: {error.strerror}",
                f"make room in {self.path.parent} and make it writable, or choose another with --state-dir",
            )
            return
        self._written, self._failed = saved, None

    @staticmethod
    def _complete(saved: SavedForecasts) -> tuple[int | None, int | None]:
        return saved.cpu.bucket, saved.memory.bucket
