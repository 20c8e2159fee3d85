"""Which hierarchy the cpu controller is in, by what a process can read of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.kernel_fields import unified_macro


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"0::/\n", {"UNIFIED": 1}),
        (b"4:cpu,cpuacct:/x\n0::/\n", {}),
        (b"2:cpuacct:/cpu\n1:cpu:/\n", {}),
        (b"3:cpuset:/\n2:cpuacct:/cpu\n0::/cpu\n", {"UNIFIED": 1}),
        (b"", {"UNIFIED": 1}),
        (b"nonsense\n\n", {"UNIFIED": 1}),
    ],
)
def test_version_1_shows_in_the_process_own_file(tmp_path: Path, text: bytes, expected: dict[str, int]) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_bytes(text)
    assert unified_macro(tmp_path) == expected


def test_without_the_file_it_is_taken_for_version_2(tmp_path: Path) -> None:
    assert unified_macro(tmp_path) == {"UNIFIED": 1}
