"""Fakes for tests of node-wide controls: a disk, a resctrl tree, processes, and an agent killed at every step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.qrm.actuator.resctrl_groups import ResctrlWriter
from api.snapshot import Disk

MAX_STEPS = 60


class FakeResctrl(ResctrlWriter):
    """Like the kernel, it removes the files of a group together with the group."""

    def remove(self, directory: Path) -> None:
        for file in directory.iterdir():
            file.unlink()
        super().remove(directory)


def disk(number: str, kind: str, wbt_us: int | None = 75_000) -> Disk:
    return Disk(
        number=number, kind=kind, wbt_lat_us=wbt_us,
        reads=0, read_bytes=0, read_ns=0, writes=0, write_bytes=0, write_ns=0, busy_ns=0, in_flight=0,
    )  # fmt: skip


def add_process(proc: Path, cgroup: Path, pid: int, score: int, *, parent: int = 1, start: int = 7) -> Path:
    """Add a process to a /proc and a cgroup of ordinary files; return its oom_score_adj file."""
    directory = proc / str(pid)
    for folder in (directory, cgroup):
        folder.mkdir(parents=True, exist_ok=True)
    with (cgroup / "cgroup.procs").open("a") as file:
        file.write(f"{pid}\n")
    (directory / "stat").write_text(f"{pid} (a) b) S {parent} {' '.join('0' * 17)} {start} 0\n")
    (directory / "oom_score_adj").write_text(f"{score}\n")
    return directory / "oom_score_adj"


def kill_at_every_step(
    calls: Sequence[tuple[object, str]], prepare: Callable[[], object], work: Callable[[], object],
    check: Callable[[str], object],
) -> int:  # fmt: skip
    """Run `work` in processes killed before the first, second, ... of these calls until one ends; return their number.

    `prepare` runs before each process, `check` after it, with the name of the step.
    """
    codes: list[int] = []
    while not codes or codes[-1] != 0:
        assert len(codes) < MAX_STEPS
        prepare()
        pid = os.fork()
        if pid == 0:
            _die_before(len(codes) + 1, calls)
            work()
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        check(f"step {len(codes)}")
    assert set(codes[:-1]) == {-signal.SIGKILL}
    return len(codes)


def _die_before(last: int, calls: Sequence[tuple[object, str]]) -> None:
    count = 0
    for owner, name in calls:
        call = getattr(owner, name)

        def counted(*args, call=call, **options):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        setattr(owner, name, counted)
