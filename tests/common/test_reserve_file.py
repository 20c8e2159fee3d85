"""Reserved space: two slots in turn, a torn slot leaves the other, and nothing is written where no space was allocated."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from common.reserve_file import HEADER_BYTES, ReserveFile, digest_of

SLOT = 4096
STRIDE = HEADER_BYTES + SLOT


@pytest.fixture
def reserve(tmp_path: Path) -> ReserveFile:
    opened = ReserveFile(tmp_path / "originals.reserve", SLOT)
    opened.allocate()
    return opened


def test_all_blocks_exist_before_anything_is_written_and_none_is_added(reserve: ReserveFile) -> None:
    status = reserve.path.stat()
    assert (status.st_size, status.st_blocks * 512 >= 2 * STRIDE, status.st_mode & 0o777) == (2 * STRIDE, True, 0o600)
    for number in range(5):
        reserve.write(b"x" * (SLOT - number), digest_of(None))
    after = reserve.path.stat()
    assert (after.st_size, after.st_blocks, after.st_ino) == (status.st_size, status.st_blocks, status.st_ino)


def test_the_newest_content_is_read_with_what_it_takes_the_place_of(reserve: ReserveFile) -> None:
    assert reserve.read() is None
    for number in range(1, 4):
        reserve.write(f"content {number}".encode(), digest_of(b"file"))
        read = ReserveFile(reserve.path, SLOT).read()
        assert read is not None
        assert (read.sequence, read.data, read.replaces) == (number, f"content {number}".encode(), digest_of(b"file"))
    reserve.clear()
    assert reserve.read() is None


@pytest.mark.parametrize("intact", [0, 100, HEADER_BYTES, HEADER_BYTES + 3])
def test_a_kill_in_the_middle_of_a_write_leaves_the_content_before_it(reserve: ReserveFile, intact: int) -> None:
    reserve.write(b"first", digest_of(None))
    reserve.write(b"second", digest_of(None))
    before = reserve.path.read_bytes()
    reserve.write(b"the third", digest_of(None))
    third = reserve.path.read_bytes()[STRIDE : STRIDE + intact]
    reserve.path.write_bytes(before[:STRIDE] + third + before[STRIDE + intact :])
    read = reserve.read()
    assert read is not None
    assert read.data == b"second"


def test_content_larger_than_a_slot_is_refused(reserve: ReserveFile) -> None:
    with pytest.raises(OSError, match="File too large"):
        reserve.write(b"x" * (SLOT + 1), "")
    assert reserve.read() is None


def test_without_allocated_space_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "originals.reserve"
    absent = ReserveFile(path, SLOT)
    with pytest.raises(OSError) as caught:
        absent.write(b"content", "")
    assert (caught.value.errno, path.exists()) == (errno.ENOSPC, False)
    with path.open("wb") as sparse:
        os.truncate(sparse.fileno(), 2 * STRIDE)
    with pytest.raises(OSError) as caught:
        absent.write(b"content", "")
    assert caught.value.errno == errno.ENOSPC, "a sparse copy from a backup has no blocks"
    absent.allocate()
    absent.write(b"content", "")


def test_allocating_again_keeps_what_an_earlier_agent_saved_there(reserve: ReserveFile) -> None:
    reserve.write(b"originals", digest_of(None))
    again = ReserveFile(reserve.path, SLOT)
    again.allocate()
    read = again.read()
    assert read is not None
    assert read.data == b"originals"
