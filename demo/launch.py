"""Starts processes inside given cgroups that never outlive their parent, and supervises forked workers.
`python -m demo.launch PARENT SIGNAL PROCS PROGRAM ARG...` joins the cgroup.procs files before execve, so nothing of
the program runs outside. The kernel sends PR_SET_PDEATHSIG when the parent's thread ends; it survives execve.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
PR_SET_TIMERSLACK = 29
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when `parent` ends; exit at once if it has ended already."""
    prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def supervise(count: int, work: Callable[[int], None]) -> int:
    """Fork `count` workers that call `work(index)` until SIGTERM ends them all; return the exit code of this process.

    A worker that ends by itself is a failure: the others are ended too, and the code is 1.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    parent = os.getpid()
    workers = [_fork(parent, index, work) for index in range(count)]
    received = signal.sigwait({*STOP_SIGNALS, signal.SIGCHLD})
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    for pid in workers:
        os.waitpid(pid, 0)
    # A process that kills the whole cgroup may reach a worker before this one.
    if received == signal.SIGCHLD and not signal.sigpending() & set(STOP_SIGNALS):
        print("a worker ended by itself; ending the others", file=sys.stderr)
        return 1
    return 0


def _fork(parent: int, index: int, work: Callable[[int], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
        end_with_parent(parent)
        work(index)
    except OSError as error:
        print(f"worker {index}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


ROOT = Path(__file__).resolve().parents[1]


def launch_in_cgroups(
    argv: Sequence[str],
    *,
    procs: Sequence[Path] = (),
    end_signal: int = signal.SIGKILL,
    pass_fds: Sequence[int] = (),
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `argv` in its own session, so that a terminal's Ctrl-C reaches only this process.

    The kernel sends `end_signal` when this process ends. Its output goes to `output`, or to the output of this process.
    Call it from the main thread: the kernel watches the thread that forked, not the process.
    """
    joined = ":".join(str(path) for path in procs)
    command = [*module_command("demo.launch"), str(os.getpid()), str(int(end_signal)), joined, *argv]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        stdout=output,
        stderr=output,
        env={**os.environ, "PYTHONPATH": _python_path()},
    )


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of this code base, from any directory."""
    return [sys.executable, "-P", "-m", module]


def _python_path() -> str:
    """Return PYTHONPATH with this code base, which need not be installed: -P keeps the working directory out of the path."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def main(argv: Sequence[str]) -> None:
    parent, signum, joined, *program = argv
    end_with_parent(int(parent), int(signum))
    for procs in filter(None, joined.split(":")):
        Path(procs).write_text(str(os.getpid()))
    os.execvp(program[0], program)  # noqa: S606 - this process is replaced on purpose


if __name__ == "__main__":
    main(sys.argv[1:])
