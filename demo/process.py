"""Processes that never outlive the one that started them, however that one ends.

The kernel sends a process its PR_SET_PDEATHSIG signal when the thread that forked it ends. It survives execve, so the
launcher sets it before the program starts, and forked workers set it for themselves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_TIMERSLACK = 29
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send us `signum` when `parent` ends; leave at once where it already has."""
    prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def supervise(count: int, work: Callable[[int], None]) -> int:
    """Fork `count` workers that call `work(index)`, for ever; SIGTERM ends them all. The exit code of this process.

    A worker that ends by itself is a failure: the others are ended too and the code is 1.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    parent = os.getpid()
    workers = [_fork(parent, index, work) for index in range(count)]
    received = signal.sigwait({*STOP_SIGNALS, signal.SIGCHLD})
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    for pid in workers:
        os.waitpid(pid, 0)
    # Whoever ends all of a cgroup at once may reach a worker before us.
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
