"""CPU use of other processes during the demo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import demo.summary
from demo.summary import OtherCpuUse, busy_cpu_s, busy_machine_warning, other_cpu_use_line

HZ = os.sysconf("SC_CLK_TCK")


def stat(busy: float, idle: float = 500.0) -> str:
    """A machine that was busy for so many seconds, a tenth of it each in nice and softirq; iowait and steal are not busy."""
    user, part = round(0.8 * busy * HZ), round(0.1 * busy * HZ)
    return f"cpu  {user} {part} 0 {round(idle * HZ)} 777 0 {part} 999 0 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n"


def test_busy_is_all_but_idle_iowait_and_steal() -> None:
    assert busy_cpu_s(stat(50.0)) == 50.0


@pytest.mark.parametrize(
    ("busy", "own", "message", "warned"),
    [
        (30.0, 25.0, "others         used 0.50 of 4 cores on average", False),  # 5 of 10 s
        (30.0, 26.0, None, False),  # 0.4 of 4 cores are a tenth, and not more
        (30.0, 31.0, None, False),  # ticks are coarser than what is known of ours
        (30.0, 20.0, "others         used 1.00 of 4 cores on average", False),  # a quarter, and not more
        (30.0, 19.0, "others         used 1.10 of 4 cores on average", True),
    ],
)
def test_what_neither_we_nor_ours_used_is_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: float, own: float, message: str | None, warned: bool
) -> None:
    file = tmp_path / "stat"
    file.write_text(stat(1000.0))
    monkeypatch.setattr(demo.summary, "own_cpu_s", lambda: 7.0)
    others = OtherCpuUse(60.0, file)
    file.write_text(stat(1000.0 + busy))
    monkeypatch.setattr(demo.summary, "own_cpu_s", lambda: 7.0 + own)
    cores = others.cores(70.0)
    line = other_cpu_use_line(cores, 4)
    assert (None if line is None else line.split(":")[0]) == message
    head = busy_machine_warning(cores, 4)
    assert (head is not None) == warned
    if head is not None:
        assert head == (
            "! this machine was too busy for the numbers below to be the product's: others used 1.10 of 4 cores on average; "
            "end them and run it again"
        )
