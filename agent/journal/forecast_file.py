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
from api.units import NS_PER_S
from common.disk_writer import INLINE_WRITER, FileWriter
from common.files import read_small_file
from common.state_file import StateFileDamaged, decode_state, encode_state, quarantine_file, replace_file, write_failure

VERSION = 1
"""Version of the file, including the inputs of the regression."""
FILE_NAME = "forecast_state"
MAX_BYTES = 4 << 20
RETRY_NS = 60 * NS_PER_S
"""Minimum interval between writes."""
HOUR_NS = HORIZON_BUCKETS * BUCKET_NS
_MIN_AGE_NS, _MAX_AGE_NS = -HOUR_NS, HISTORY_BUCKETS * BUCKET_NS


class SavedForecasts(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file."""

    version: int = VERSION
    boot_id: str
    monotonic_ns: int
    """Time of writing (CLOCK_MONOTONIC of that boot)."""
    wall_ns: int
    """Time of writing (CLOCK_REALTIME)."""
    cpu: PeakPredictor
    memory: PeakPredictor
    checksum: str = ""


class ForecastFile:
    """The file in a state directory that this process has locked. `messages` has the reasons why history was discarded."""

    def __init__(self, state_dir: Path, boot_id: str, disk: FileWriter = INLINE_WRITER) -> None:
        self.path = state_dir / FILE_NAME
        self.messages: tuple[str, ...] = ()
        self._boot_id, self._disk = boot_id, disk
        self._latest: SavedForecasts | None = None
        self._written: SavedForecasts | None = None
        self._attempt_ns: int | None = None
        self._failure: Unavailable | None = None

    def load(self, now_ns: int, wall_ns: int) -> ForecastSeries | None:
        """Return the saved history in this boot's CLOCK_MONOTONIC; None without usable history, see `messages`.

        Raises Unavailable if a damaged file cannot be renamed.
        """
        try:
            saved = decode_state(read_small_file(self.path, MAX_BYTES), SavedForecasts, VERSION)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.messages = (f"Forecasts start without history: {self.path} cannot be read: {error.strerror}.",)
            return None
        except StateFileDamaged as error:
            renamed = quarantine_file(self.path, str(error))
            self.messages = (
                f"Forecasts start without history: {self.path} is damaged: {error}. It was renamed to {renamed}.",
            )
            return None
        shift_ns = 0
        if saved.boot_id != self._boot_id:
            passed_ns = wall_ns - saved.wall_ns
            if not _MIN_AGE_NS <= passed_ns <= _MAX_AGE_NS:
                age = f"{self.path} was written {passed_ns / HOUR_NS:.1f} hours ago"
                self.messages = (
                    f"Forecasts start without history: {age}; the maximum is {_MAX_AGE_NS / HOUR_NS:.0f} hours.",
                )
                return None
            # A wall clock that was set back must not move history into the future.
            shift_ns = now_ns - max(passed_ns, 0) - saved.monotonic_ns
        return ForecastSeries(
            cpu=resume_predictor(saved.cpu, shift_ns), memory=resume_predictor(saved.memory, shift_ns)
        )

    def save(self, series: ForecastSeries, now_ns: int, wall_ns: int) -> None:
        """Have the history written if a bucket was completed since the last write. Raises Unavailable after a failed write,
        until one succeeds."""
        self._latest = SavedForecasts(
            boot_id=self._boot_id, monotonic_ns=now_ns, wall_ns=wall_ns, cpu=series.cpu, memory=series.memory
        )
        due = self._written is None or self._complete(self._written) != self._complete(self._latest)
        if due and (self._attempt_ns is None or now_ns - self._attempt_ns >= RETRY_NS):
            self._attempt_ns = now_ns
            self._disk.submit(FILE_NAME, self._write)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Write the unfinished bucket too. A failure has already been reported by `save`."""
        if self._latest is not None and self._latest is not self._written:
            self._disk.submit(FILE_NAME, self._write)

    def _write(self) -> None:
        saved = self._latest
        assert saved is not None
        try:
            replace_file(self.path, encode_state(saved))
        except OSError as error:
            self._failure = write_failure("the history of forecasts cannot be written to", self.path, error)
            return
        self._written, self._failure = saved, None

    @staticmethod
    def _complete(saved: SavedForecasts) -> tuple[int | None, int | None]:
        return saved.cpu.bucket, saved.memory.bucket
