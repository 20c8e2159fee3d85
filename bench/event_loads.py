"""Loads that make one kind of event each: what `bench.event_cost` measures probes under.

A load is a context manager that takes the loaded probe and gives a function, one turn of the load. All are on loopback, in
memory or in cgroups of their own, and end with their `with` block.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from agent.hierarchy import detect
from bench.switch_load import SwitchLoad
from demo.launch import launch
from probes.loader import Loaded

Turn = Callable[[], None]
SLEEPERS = 1000
LIMIT_BYTES, FILE_BYTES = 16 << 20, 64 << 20
READ = "import sys\nwhile True:\n    with open(sys.argv[1], 'rb', buffering=0) as file:\n        while file.read(1 << 20): pass"
"""A program that reads a file over and over."""
TURN_S = 0.05
"""Of a load that runs by itself, in processes of its own."""


@contextmanager
def datagrams(_loaded: Loaded) -> Iterator[Turn]:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as two,
    ):
        two.bind(("127.0.0.1", 0))
        one.connect(two.getsockname())
        yield lambda: (one.send(b"x" * 100), two.recv(100), None)[-1]


@contextmanager
def stream(_loaded: Loaded) -> Iterator[Turn]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        two, _ = server.accept()
        with two:
            yield lambda: (one.send(b"x" * 100), two.recv(100), None)[-1]


@contextmanager
def connections(_loaded: Loaded) -> Iterator[Turn]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def turn() -> None:
            with socket.create_connection(server.getsockname()) as one:
                two, _ = server.accept()
                with two:
                    one.send(b"x")
                    two.recv(1)

        yield turn


@contextmanager
def direct_reads(_loaded: Loaded) -> Iterator[Turn]:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as backing:
        backing.write(b"z" * (1 << 20))
        backing.flush()
        made = subprocess.run(
            ["losetup", "--find", "--show", backing.name], capture_output=True, text=True, check=True
        ).stdout.strip()
        file, buffer = os.open(made, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
        try:
            yield lambda: (os.preadv(file, [buffer], 0), None)[-1]
        finally:
            os.close(file)
            subprocess.run(["losetup", "--detach", made], check=True)


@contextmanager
def switches(_loaded: Loaded) -> Iterator[Turn]:
    """Two processes on one CPU that pass a byte back and forth."""
    with SwitchLoad((min(os.sched_getaffinity(0)),)):
        yield lambda: time.sleep(TURN_S)


@contextmanager
def moves(_loaded: Loaded) -> Iterator[Turn]:
    """This task goes from one CPU to another and back."""
    allowed = os.sched_getaffinity(0)
    one, two = min(allowed), max(allowed)

    def turn() -> None:
        os.sched_setaffinity(0, {one})
        os.sched_setaffinity(0, {two})

    try:
        yield turn
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def reads_under_a_limit(_loaded: Loaded) -> Iterator[Turn]:
    """A process reads a file that is larger than its memory limit: each batch of pages has to be reclaimed first."""
    memory = detect().controller("memory")
    if memory is None:
        raise SystemExit("reclaim needs the memory controller; enable it in cgroup.subtree_control")
    group = memory / f"dioptase-bench-reclaim-{os.getpid()}"
    group.mkdir()
    try:
        limit = group / "memory.max"
        (limit if limit.exists() else group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        with tempfile.NamedTemporaryFile(dir=Path(__file__).parent / "results") as file:
            file.write(os.urandom(1 << 20) * (FILE_BYTES >> 20))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            reader = launch([sys.executable, "-c", READ, file.name], procs=[group / "cgroup.procs"])
            try:
                yield lambda: time.sleep(TURN_S)
            finally:
                reader.kill()
                reader.wait()
    finally:
        group.rmdir()


@contextmanager
def thread_walks(loaded: Loaded) -> Iterator[Turn]:
    """The iterator walks over every thread of the node, 1,000 sleeping ones of ours among them."""
    over = threading.Event()
    sleepers = [threading.Thread(target=over.wait) for _ in range(SLEEPERS)]
    for sleeper in sleepers:
        sleeper.start()
    (iterator,) = loaded.programs
    try:
        yield lambda: (loaded.records(iterator), None)[-1]
    finally:
        over.set()
        for sleeper in sleepers:
            sleeper.join()


LOADS: dict[str, Callable[[Loaded], AbstractContextManager[Turn]]] = {
    "datagrams": datagrams,
    "stream": stream,
    "connections": connections,
    "direct reads": direct_reads,
    "switches": switches,
    "moves": moves,
    "reads under a limit": reads_under_a_limit,
    "1,000 threads": thread_walks,
}
