"""Become a program inside given cgroups, bound to the life of the process that asked for it.

`python -m demo.launch PARENT SIGNAL PROCS PROGRAM ARG...`: PROCS are cgroup.procs files, separated by colons (maybe none).
The process joins before execve, so not one instruction of the program runs, or is accounted for, outside.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from demo.process import end_with_parent

ROOT = Path(__file__).resolve().parents[1]


def launch(
    argv: Sequence[str],
    *,
    procs: Sequence[Path] = (),
    end_signal: int = signal.SIGKILL,
    pass_fds: Sequence[int] = (),
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `argv` in its own session (a terminal's Ctrl-C reaches only us); `end_signal` comes when we end.

    What it says goes to `output`, or where what we say goes.
    Call it from the main thread: the kernel watches the thread that forked, not the process.
    """
    joined = ":".join(str(path) for path in procs)
    command = [*python("demo.launch"), str(os.getpid()), str(int(end_signal)), joined, *argv]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        stdout=output,
        stderr=output,
        env={**os.environ, "PYTHONPATH": _python_path()},
    )


def python(module: str) -> list[str]:
    """The command that runs one of our modules, whatever directory it is started in."""
    return [sys.executable, "-P", "-m", module]


def _python_path() -> str:
    """-P keeps the working directory out of the path; this keeps our own packages in it, installed or not."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def main(argv: Sequence[str]) -> None:
    parent, signum, joined, *program = argv
    end_with_parent(int(parent), int(signum))
    for procs in filter(None, joined.split(":")):
        Path(procs).write_text(str(os.getpid()))
    os.execvp(program[0], program)  # noqa: S606 - replacing ourselves is the purpose


if __name__ == "__main__":
    main(sys.argv[1:])
