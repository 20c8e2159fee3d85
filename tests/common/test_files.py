"""Files replaced by a FIFO or a device that never ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.files import read_small_file


def test_content_is_read_up_to_one_byte_more_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert read_small_file(path, 10) == b"12345"
    assert read_small_file(path, 3) == b"1234"


def test_pipes_directories_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in ((tmp_path / "pipe", "not a regular file"), (tmp_path, "Is a directory")):
        with pytest.raises(OSError, match=reason):
            read_small_file(path, 10)
    with pytest.raises(OSError, match="not a regular file"):
        read_small_file(Path("/dev/zero"), 10)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        with pytest.raises(OSError, match="directory"):
            read_small_file(tmp_path, 10)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
