"""Processes that act or reset and are killed before the n-th system call that changes files.

Before one such call is after the previous one, so all n together cover every state that a kill can leave.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from agent.config.config import AgentConfig
from agent.loop import Loop
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.checkpoint import CpusetCheckpoint
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.decision import ActMode, Decision
from api.snapshot import Snapshot
from cli.reset import reset

CALLS = ("mkdir", "open", "write", "fsync", "rename", "unlink")
CHANGES = os.O_CREAT | os.O_TRUNC
"""Flags of `open` that change files."""
_context = get_context("forkserver")
_context.set_forkserver_preload([__name__])


class SyscallKiller:
    """Counts the calls of this process, records them, and kills it before the n-th; 0 never kills."""

    def __init__(self, last: int) -> None:
        self.last, self.count = last, 0
        self.names: dict[int, str] = {}
        self.calls: list[tuple[str, str]] = []
        for name in CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & CHANGES:
                self.count += 1
                if self.count == self.last:
                    os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            path = self.names.get(args[0], "?") if isinstance(args[0], int) else str(args[0])
            if name == "open":
                self.names[result] = path
            else:
                self.calls.append((name, Path(path).name))
            return result

        return counted


def act(last: int, state: Path, rounds: Sequence[Sequence[Decision]], trace: Path | None = None) -> None:
    """Apply these cycles as the agent does, without a shutdown."""
    files = KnobWriter(detect_hierarchy())
    fate = SyscallKiller(last)
    actuator = Actuator(files, open_originals(state, read_boot_id()), ActMode.ON)
    failed = [o for decisions in rounds for o in actuator.apply(decisions) if o.status not in ("applied", "unchanged")]
    if failed:
        sys.exit(f"not applied: {failed}")
    if trace is not None:
        trace.write_text("\n".join(f"{call} {name}" for call, name in fate.calls))
    os._exit(0)


def run_reset(last: int, state: Path) -> None:
    """Run `dioptase reset`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    SyscallKiller(last)
    sys.exit(reset.main(["--state-dir", str(state)], standalone_mode=False))


def run_to_exit(work: Callable[..., None], *args: object) -> int | None:
    """Run the work in a process of its own and return its exit code, negative for a signal."""
    process = _context.Process(target=work, args=args)
    process.start()
    process.join()
    return process.exitcode


class ReplayedSensor:
    """A sensor that returns given snapshots, and then always the last one."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = list(snapshots)

    def snapshot(self, seq: int, _taken_at_ns: int, _wall_time_ns: int) -> Snapshot:
        return self._snapshots[min(seq, len(self._snapshots)) - 1]


def run_cycles(last: int, state: Path, config: AgentConfig, snapshots: Sequence[Snapshot]) -> None:
    """Run whole cycles of the agent on these snapshots, without a shutdown."""
    files = KnobWriter(detect_hierarchy())
    sensor: Any = ReplayedSensor(snapshots)
    SyscallKiller(last)
    loop = Loop(
        config=config,
        sensor=sensor,
        actuator=Actuator(files, open_originals(state, read_boot_id()), ActMode.ON),
        sinks=(),
        checkpoint=CpusetCheckpoint(state, read_boot_id()),
    )
    for _ in snapshots:
        finished = loop.run_cycle("tick")
        wrong = [source for source in finished.snapshot.sources if not source.ok]
        failed = [o for o in finished.outcomes if o.status not in ("applied", "unchanged")]
        if wrong or failed:
            sys.exit(f"{wrong} {failed}")
    os._exit(0)
