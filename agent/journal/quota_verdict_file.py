"""Keeps the verdicts of quota trials on disk, so that a restart of the agent repeats no trial.
One JSON file with version and checksum, replaced when a verdict is added or withdrawn. Verdicts of another kernel release
are discarded, because its scheduler may make the quota help. Size and age are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from agent.advisor.quota_trial import MAX_VERDICTS, MEMORY_NS
from api.advice import QuotaVerdict
from api.interfaces import Unavailable
from common.disk_writer import INLINE_WRITER, FileWriter
from common.files import read_small_file
from common.state_file import StateFileDamaged, decode_state, encode_state, replace_file, set_aside, write_failure

VERSION = 1
FILE_NAME = "quota_verdicts"
MAX_BYTES = 256 << 10
RETRY_S = 60.0
"""Interval between attempts to write a file that could not be written."""


class SavedQuotaVerdicts(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file."""

    version: int = VERSION
    kernel: str
    """Release of the kernel on which the trials ran (uname -r)."""
    verdicts: tuple[QuotaVerdict, ...]
    checksum: str = ""


class QuotaVerdictFile:
    """The file in a state directory that this process has locked."""

    def __init__(
        self,
        state_dir: Path,
        kernel: str,
        disk: FileWriter = INLINE_WRITER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kernel` is the release of the running kernel."""
        self.messages: tuple[str, ...] = ()
        """Why earlier verdicts were discarded; empty if they were not."""
        self._path: Path | None = state_dir / FILE_NAME
        self._kernel, self._disk, self._clock = kernel, disk, clock
        self._latest: tuple[QuotaVerdict, ...] = ()
        self._written: tuple[QuotaVerdict, ...] = ()
        self._retry_at_s: float | None = None
        self._failure: Unavailable | None = None

    def load(self) -> tuple[QuotaVerdict, ...]:
        """Return the saved verdicts of this kernel release; none from a missing, unreadable or damaged file, see `messages`."""
        if self._path is None:
            return ()
        try:
            saved = decode_state(read_small_file(self._path, MAX_BYTES), SavedQuotaVerdicts, VERSION)
        except FileNotFoundError:
            return ()
        except OSError as error:
            self.messages = (
                f"Every CPU quota is tried again: {self._path} cannot be read: {error.strerror}; make it readable.",
            )
            return ()
        except StateFileDamaged as error:
            consequence, unsaved = "Every CPU quota is tried again", "Verdicts are not saved"
            message, self._path = set_aside(self._path, error, consequence, unsaved)
            self.messages = (message,)
            return ()
        if saved.kernel == self._kernel:
            self._written = tuple(
                verdict
                for verdict in saved.verdicts[-MAX_VERDICTS:]
                if 0 < verdict.expires_wall_ns - verdict.wall_time_ns <= MEMORY_NS
            )
        return self._written

    def save(self, verdicts: tuple[QuotaVerdict, ...]) -> None:
        """Have the verdicts written if they changed. Raises Unavailable after a failed write, until one succeeds."""
        if self._path is None:
            return
        self._latest = verdicts
        waits = self._retry_at_s is not None and self._clock() < self._retry_at_s
        if verdicts != self._written and not waits:
            self._disk.submit(FILE_NAME, partial(self._write, self._path))
        if self._failure is not None:
            raise self._failure

    def _write(self, path: Path) -> None:
        verdicts = self._latest
        try:
            replace_file(path, encode_state(SavedQuotaVerdicts(kernel=self._kernel, verdicts=verdicts)))
        except OSError as error:
            self._retry_at_s = self._clock() + RETRY_S
            self._failure = write_failure("the verdicts of quota trials cannot be written to", path, error)
            return
        self._written, self._retry_at_s, self._failure = verdicts, None, None
