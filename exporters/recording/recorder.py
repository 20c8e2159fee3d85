"""Writes the recording in a thread of its own, within a size bound, and survives a full disk.
A slow disk loses cycles, which are counted, and never delays the loop. Where writing fails, the partial record is cut
off and writing is retried every ten seconds; the recorder reports its state as a component. One recorder locks one
directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import queue
import stat
import threading
import time
from pathlib import Path

import msgspec

from api.decision import Cycle
from api.interfaces import Unavailable
from api.units import MIB
from exporters.prometheus.families import RecordingState
from exporters.recording.segments import KEY_RECORD_INTERVAL, SUFFIX, pack_cycle, segment_header, segment_number

log = logging.getLogger(__name__)

MAX_SEGMENTS = 8
"""Number of segments within the size bound: the oldest one is deleted to make room."""
MAX_QUEUED_CYCLES = 4
RETRY_S = 10.0
CLOSE_TIMEOUT_S = 2.0
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)


class Recorder:
    """Sink of cycles, and a HealthReporter of the recording."""

    name, form = "recording", "zlib"
    lost_events = None
    """Lost cycles have a counter of their own."""

    def __init__(self, directory: Path, max_mib: int, product: str, retry_s: float = RETRY_S) -> None:
        """Start the recording thread. Raises Unavailable if the directory is not writable."""
        self._directory, self._max_bytes, self._product = directory, max_mib * MIB, product
        self._retry_s = retry_s
        self._fd: int | None = None
        self._lock_fd: int | None = None
        """Descriptor of the locked directory."""
        self._path = directory
        self._written = self._number = 0
        self._sizes: dict[Path, int] = {}
        self._size_bytes = 0
        self._boot_id = ""
        self._base: Cycle | None = None
        self._since_key = 0
        self._cycles = self._lost = 0
        self._overflowed = 0
        """Cycles lost in `publish`: each counter is written by one thread only."""
        self._problem: Unavailable | None = None
        self._retry_at = 0.0
        try:
            self._lock()
            self._scan()
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
        except OSError as error:
            self._unlock()
            raise Unavailable(f"cannot record to {directory}: {error.strerror}", _remedy(error)) from error
        self._queue: queue.Queue[Cycle | None] = queue.Queue(MAX_QUEUED_CYCLES)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def publish(self, finished: Cycle) -> None:
        """Queue the cycle without waiting."""
        try:
            self._queue.put_nowait(finished)
        except queue.Full:
            self._overflowed += 1

    @property
    def state(self) -> RecordingState:
        return RecordingState(
            writable=self._problem is None, size_bytes=self._size_bytes, cycles=self._cycles,
            lost_cycles=self._lost_cycles(),
        )  # fmt: skip

    def problem(self) -> Unavailable | None:
        """Return why cycles cannot be written; None while they can."""
        return self._problem

    def close(self) -> None:
        """Write the queued cycles and close the segment, within two seconds even if the disk hangs. Idempotent."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
            except queue.Full:
                return
            self._thread.join(CLOSE_TIMEOUT_S)

    def _lost_cycles(self) -> int:
        return self._lost + self._overflowed

    def _run(self) -> None:
        while (finished := self._queue.get()) is not None:
            if self._problem is not None and time.monotonic() < self._retry_at:
                self._lost += 1
                continue
            try:
                self._write(finished)
            except OSError as error:
                self._failed(error)
            except Exception:
                self._lost += 1
                log.exception("cycle %d could not be recorded", finished.snapshot.seq)
        self._end_segment()
        self._unlock()

    def _write(self, finished: Cycle) -> None:
        alone = msgspec.structs.replace(finished, previous=None)
        if self._fd is not None and self._is_gone(self._fd):
            log.warning("%s was deleted or changed; starting another segment", self._path)
            self._end_segment()
        record = pack_cycle(alone, self._base if self._since_key < KEY_RECORD_INTERVAL else None)
        full = self._written + len(record) > self._max_bytes // MAX_SEGMENTS
        if self._fd is None or full or finished.snapshot.boot_id != self._boot_id:
            record = pack_cycle(alone)
            self._begin_segment(alone, len(record))
        assert self._fd is not None
        self._append(record)
        self._since_key = 1 if self._base is None or self._since_key >= KEY_RECORD_INTERVAL else self._since_key + 1
        self._base = alone
        self._cycles += 1
        if self._problem is not None:
            log.info("recording to %s continues; %d cycles are missing", self._directory, self._lost_cycles())
            self._problem = None

    def _is_gone(self, fd: int) -> bool:
        """Return whether the open segment was deleted or changed by another process: later records would be unreadable."""
        status = os.fstat(fd)
        return status.st_nlink == 0 or status.st_size != self._written

    def _append(self, data: bytes) -> None:
        """Append everything or nothing: a disk may accept part of a record before it is full."""
        assert self._fd is not None
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            os.ftruncate(self._fd, self._written)
            raise
        self._written += done
        self._sizes[self._path] = self._written
        self._size_bytes = sum(self._sizes.values())

    def _begin_segment(self, finished: Cycle, record_bytes: int) -> None:
        self._end_segment()
        boot_id, began_ns = finished.snapshot.boot_id, finished.snapshot.wall_time_ns
        first = segment_header(self._product, boot_id, began_ns)
        self._lock()
        self._scan()
        self._make_room(max(self._max_bytes // MAX_SEGMENTS, len(first) + record_bytes))
        self._number += 1
        path = self._directory / f"{self._number:08d}{SUFFIX}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o640)
        self._path, self._written, self._boot_id = path, 0, boot_id
        self._base = None
        try:
            self._append(first)
        except OSError:
            self._end_segment()
            path.unlink(missing_ok=True)
            raise

    def _end_segment(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _lock(self) -> None:
        """Create the directory if it is missing, and lock it for this recorder. Raises OSError (EBUSY if it is locked)."""
        self._directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if self._lock_fd is not None and os.path.samestat(os.fstat(fd), os.fstat(self._lock_fd)):
            os.close(fd)
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise OSError(errno.EBUSY, "another agent records there", str(self._directory)) from None
        except OSError as error:
            # A file system without locks does not prevent recording.
            log.debug("%s cannot be locked: %s", self._directory, error)
        self._unlock()
        self._lock_fd = fd

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            fd, self._lock_fd = self._lock_fd, None
            os.close(fd)

    def _scan(self) -> None:
        """Read the sizes of the segments, and the highest number in use by any file."""
        self._sizes = {}
        for path in self._directory.iterdir():
            number = segment_number(path)
            if number is None:
                continue
            self._number = max(self._number, number)
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    self._sizes[path] = status.st_size
        self._size_bytes = sum(self._sizes.values())

    def _make_room(self, required_bytes: int) -> None:
        """Delete the oldest segments until `required_bytes` more fit within the bound."""
        for path in sorted(self._sizes, key=lambda segment: int(segment.stem)):
            if sum(self._sizes.values()) + required_bytes <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            del self._sizes[path]
        self._size_bytes = sum(self._sizes.values())

    def _failed(self, error: OSError) -> None:
        self._lost += 1
        self._retry_at = time.monotonic() + self._retry_s
        problem = Unavailable(
            f"cycles are not recorded to {self._directory}: {error.strerror}",
            _remedy(error),
        )
        if self._problem is None:
            log.warning("%s; %s", problem.reason, problem.remedy)
        self._problem = problem
        if error.errno not in FULL_ERRNOS:
            self._end_segment()  # the segment may be the cause; the next attempt starts another one


def _remedy(error: OSError) -> str:
    if error.errno in FULL_ERRNOS:
        return "free space on the disk, record elsewhere with --record, or less with --record-max-mib"
    if error.errno == errno.EBUSY:
        return "stop the other agent, or record elsewhere with --record"
    if error.errno == errno.EFBIG:
        return "reduce maxCgroups in the agent's configuration"
    if error.errno in FORBIDDEN_ERRNOS:
        return "grant this user write access, or record elsewhere with --record"
    return "check the directory and its disk, or record elsewhere with --record"
