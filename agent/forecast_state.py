"""What the predictor has learned, on disk: a day of history is not to be lost to a restart of the agent.

One JSON object with a version and a checksum, replaced as a whole when five minutes of history are complete, and at the end.
The predictor lives on CLOCK_MONOTONIC, which nobody sets and which starts again with each boot; so the file says by both
clocks when it was written, and only a history from another boot is moved by what CLOCK_REALTIME says has passed since.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from agent.advisor.forecast.outlook import Series
from agent.advisor.forecast.predictor import Predictor, resumed
from agent.advisor.forecast.window import BUCKET_NS, HORIZON, KEPT
from agent.durable import replace_file, set_aside
from agent.sealed import Damaged, sealed, unsealed
from agent.smallfile import read_small
from api.ports import Unavailable

VERSION = 1
"""Of the layout, of what the regression looks at too."""
FILE_NAME = "forecast_state"
LARGEST_BYTES = 4 << 20
RETRY_NS = 60 * 1_000_000_000
"""Between two writes at least."""
HOUR_NS = HORIZON * BUCKET_NS
_EARLIEST_NS, _LATEST_NS = -HOUR_NS, KEPT * BUCKET_NS


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    version: int = VERSION
    boot_id: str
    monotonic_ns: int
    """CLOCK_MONOTONIC of that boot,"""
    wall_ns: int
    """and CLOCK_REALTIME, when it was written."""
    cpu: Predictor
    memory: Predictor
    checksum: str = ""


class ForecastFile:
    """The file in a state directory that this process has locked. `messages` says what was not taken over, and why."""

    def __init__(self, state_dir: Path, boot_id: str) -> None:
        self.path = state_dir / FILE_NAME
        self.messages: tuple[str, ...] = ()
        self._boot_id = boot_id
        self._offered: Saved | None = None
        self._written: Saved | None = None
        self._tried_ns: int | None = None
        self._failed: Unavailable | None = None

    def load(self, now_ns: int, wall_ns: int) -> Series | None:
        """What was saved last, on this boot's clock; None where nothing of it can be used, see `messages`. Raises Unavailable
        where a damaged file cannot be set aside."""
        try:
            saved = unsealed(read_small(self.path, LARGEST_BYTES), Saved, VERSION)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.messages = (f"Forecasts start afresh: {self.path} cannot be read: {error.strerror}.",)
            return None
        except Damaged as error:
            aside = set_aside(self.path, str(error))
            self.messages = (f"Forecasts start afresh: {self.path} was damaged: {error}. It is kept as {aside}.",)
            return None
        shift_ns = 0
        if saved.boot_id != self._boot_id:
            passed_ns = wall_ns - saved.wall_ns
            if not _EARLIEST_NS <= passed_ns <= _LATEST_NS:
                told = f"{self.path} was written {passed_ns / HOUR_NS:.1f} hours ago by the clock on the wall"
                self.messages = (
                    f"Forecasts start afresh: {told}, and history is used for {_LATEST_NS / HOUR_NS:.0f}.",
                )
                return None
            # A wall clock that was set back a little must not put history ahead of the present.
            shift_ns = now_ns - max(passed_ns, 0) - saved.monotonic_ns
        return Series(cpu=resumed(saved.cpu, shift_ns), memory=resumed(saved.memory, shift_ns))

    def save(self, series: Series, now_ns: int, wall_ns: int) -> None:
        """Have it on disk when it returns, if a bucket of history was completed since the last time. Raises Unavailable, until
        a later attempt succeeds."""
        self._offered = Saved(
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

    def _write(self, saved: Saved) -> None:
        try:
            replace_file(self.path, sealed(saved))
        except OSError as error:
            self._failed = Unavailable(
                f"the history of forecasts cannot be written to {self.path}: {error.strerror}",
                f"make room in {self.path.parent} and make it writable, or choose another with --state-dir",
            )
            return
        self._written, self._failed = saved, None

    @staticmethod
    def _complete(saved: Saved) -> tuple[int | None, int | None]:
        return saved.cpu.bucket, saved.memory.bucket
