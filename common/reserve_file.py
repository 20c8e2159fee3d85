"""Space that is reserved on disk for a file that has to be written when the disk is full.
The file has two slots that are overwritten in place, in turn, so that a kill during a write leaves the other slot intact. On
ext4, xfs and tmpfs, overwriting blocks that have been written needs no new block. On file systems that write to new blocks
(btrfs, ZFS, bcachefs, and any file that was copied by reflink) and on thin volumes an overwrite may need new blocks and fail.
"""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from common.files import read_small_file
from common.state_file import sync_directory
from common.sync_times import SYNC_TIMES

HEADER_BYTES = 512
_CHUNK_BYTES = 64 << 10
_SECTOR_BYTES = 512
"""Unit of st_blocks (stat(2))."""


class _Header(msgspec.Struct, frozen=True):
    sequence: int
    size: int
    replaces: str
    """Digest of the file that the content takes the place of."""
    checksum: str


class ReservedContent(msgspec.Struct, frozen=True):
    """The newest intact content."""

    sequence: int
    replaces: str
    data: bytes


def digest_of(data: bytes | None) -> str:
    """Return the digest of a file's content; empty for a file that does not exist."""
    return "" if data is None else hashlib.sha256(data).hexdigest()


class ReserveFile:
    """The file at `path`; each of its slots holds at most `slot_bytes` of content."""

    def __init__(self, path: Path, slot_bytes: int) -> None:
        self.path, self.slot_bytes = path, slot_bytes
        self._stride = HEADER_BYTES + slot_bytes
        self.allocated = False
        """Whether this process has found or made all blocks of the file."""

    def allocate(self) -> None:
        """Write every block of the file once, unless all exist or an earlier agent left content in it. Raises OSError, with
        ENOSPC unless twice the size is free; then the file is removed."""
        if self._has_blocks() or self.read() is not None:
            return  # A file that contains originals must not be overwritten.
        size = 2 * self._stride
        free = os.statvfs(self.path.parent)
        if free.f_bavail * free.f_frsize < 2 * size:
            # Filling the disk for a moment would make other writes fail.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        try:
            with SYNC_TIMES.measure(self.path.name):
                self._fill(size)
                sync_directory(self.path.parent)
        except OSError:
            with suppress(OSError):
                self.path.unlink()
            raise
        self.allocated = True

    def read(self) -> ReservedContent | None:
        """Return the newest intact content; None without any. Raises OSError."""
        return _newest(self._read_file(), self._stride)

    def write(self, data: bytes, replaces: str) -> None:
        """Overwrite the older slot and sync it. Raises OSError: EFBIG if the content is larger than a slot, ENOSPC if the
        space was not allocated."""
        if len(data) > self.slot_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self.path))
        if not self.allocated and not self._has_blocks():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        latest = self.read()
        sequence = 1 if latest is None else latest.sequence + 1
        header = _Header(sequence, len(data), replaces, _checksum(sequence, replaces, data))
        with SYNC_TIMES.measure(self.path.name):
            self._overwrite(sequence % 2 * self._stride, _encode_header(header) + data)

    def clear(self) -> None:
        """Make both slots empty. Raises OSError."""
        if not self.path.exists():
            return
        with SYNC_TIMES.measure(self.path.name):
            for slot in range(2):
                self._overwrite(slot * self._stride, b" " * HEADER_BYTES)

    def _has_blocks(self) -> bool:
        size = 2 * self._stride
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return False
        self.allocated = status.st_size == size and status.st_blocks * _SECTOR_BYTES >= size
        return self.allocated

    def _read_file(self) -> bytes:
        try:
            return read_small_file(self.path, 2 * self._stride)
        except FileNotFoundError:
            return b""

    def _fill(self, size: int) -> None:
        # Random bytes: a file system that compresses would store zeros without any block.
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for start in range(0, size, _CHUNK_BYTES):
                _write_at(fd, start, os.urandom(min(_CHUNK_BYTES, size - start)))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _overwrite(self, start: int, data: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _write_at(fd, start, data)
            os.fdatasync(fd)
        finally:
            os.close(fd)


def _write_at(fd: int, start: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], start + written)


def _checksum(sequence: int, replaces: str, data: bytes) -> str:
    return hashlib.sha256(f"{sequence} {replaces} ".encode() + data).hexdigest()


def _encode_header(header: _Header) -> bytes:
    return msgspec.json.encode(header).ljust(HEADER_BYTES)


def _newest(content: bytes, stride: int) -> ReservedContent | None:
    contents = []
    for slot in range(2):
        part = content[slot * stride : (slot + 1) * stride]
        try:
            header = msgspec.json.decode(part[:HEADER_BYTES], type=_Header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        data = part[HEADER_BYTES : HEADER_BYTES + header.size]
        if 0 <= header.size == len(data) and header.checksum == _checksum(header.sequence, header.replaces, data):
            contents.append(ReservedContent(header.sequence, header.replaces, data))
    return max(contents, key=lambda each: each.sequence, default=None)
