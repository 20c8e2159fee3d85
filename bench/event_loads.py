"""Loads that cause one kind of kernel event each: context switches, packets, disk reads, migrations, reclaim."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

from agent.sensors.cgroup.hierarchy import detect_hierarchy
from demo.launch import launch_in_cgroups
from probes.loader import Loaded


class SwitchLoad:
    """Pairs of processes that pass a byte back and forth, until the end of the `with` block."""

    def __init__(self, cpus: tuple[int, ...]) -> None:
        self._cpus = cpus
        self._counts = mmap.mmap(-1, 8 * len(cpus))
        self._pids: list[int] = []
        root = detect_hierarchy(Path("/proc")).primary
        self._groups = [root / f"dioptase-bench-switch-{os.getpid()}-{cpu}" for cpu in cpus]

    def round_trips(self) -> int:
        return sum(struct.unpack(f"{len(self._cpus)}Q", self._counts[:]))

    def __enter__(self) -> SwitchLoad:
        for at, (cpu, group) in enumerate(zip(self._cpus, self._groups, strict=True)):
            group.mkdir()
            there, back = os.pipe(), os.pipe()
            self._pids += [
                self._fork(cpu, group, partial(self._lead, there[1], back[0], at)),
                self._fork(cpu, group, partial(self._follow, there[0], back[1])),
            ]
            for fd in (*there, *back):
                os.close(fd)
        return self

    def _fork(self, cpu: int, group: Path, body: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            os.sched_setaffinity(0, {cpu})
            (group / "cgroup.procs").write_text(str(os.getpid()))
            body()
            os._exit(0)
        return pid

    def _lead(self, writer: int, reader: int, at: int) -> None:
        trips = 0
        while True:
            os.write(writer, b"x")
            os.read(reader, 1)
            trips += 1
            struct.pack_into("Q", self._counts, 8 * at, trips)

    @staticmethod
    def _follow(reader: int, writer: int) -> None:
        while True:
            os.read(reader, 1)
            os.write(writer, b"x")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for group in self._groups:
            group.rmdir()


LoadStep = Callable[[], None]
SLEEPERS = 1000
LIMIT_BYTES, FILE_BYTES = 16 << 20, 64 << 20
READER_CODE = (
    "import sys\nwhile True:\n    with open(sys.argv[1], 'rb', buffering=0) as file:\n"
    "        while file.read(1 << 20): pass"
)
"""A program that reads a file repeatedly."""
STEP_S = 0.05
"""Duration of a step of a load that runs in its own processes."""


@contextmanager
def datagrams(_loaded: Loaded) -> Iterator[LoadStep]:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
    ):
        receiver.bind(("127.0.0.1", 0))
        sender.connect(receiver.getsockname())
        yield lambda: (sender.send(b"x" * 100), receiver.recv(100), None)[-1]


@contextmanager
def stream(_loaded: Loaded) -> Iterator[LoadStep]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            yield lambda: (sender.send(b"x" * 100), receiver.recv(100), None)[-1]


@contextmanager
def connections(_loaded: Loaded) -> Iterator[LoadStep]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def turn() -> None:
            with socket.create_connection(server.getsockname()) as sender:
                receiver, _ = server.accept()
                with receiver:
                    sender.send(b"x")
                    receiver.recv(1)

        yield turn


@contextmanager
def direct_reads(_loaded: Loaded) -> Iterator[LoadStep]:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as backing:
        backing.write(b"z" * (1 << 20))
        backing.flush()
        device = subprocess.run(
            ["losetup", "--find", "--show", backing.name], capture_output=True, text=True, check=True
        ).stdout.strip()
        file, buffer = os.open(device, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
        try:
            yield lambda: (os.preadv(file, [buffer], 0), None)[-1]
        finally:
            os.close(file)
            subprocess.run(["losetup", "--detach", device], check=True)


@contextmanager
def switches(_loaded: Loaded) -> Iterator[LoadStep]:
    """Two processes on one CPU that pass a byte back and forth."""
    with SwitchLoad((min(os.sched_getaffinity(0)),)):
        yield lambda: time.sleep(STEP_S)


@contextmanager
def migrations(_loaded: Loaded) -> Iterator[LoadStep]:
    """Move this task from one CPU to another and back."""
    allowed = os.sched_getaffinity(0)
    first, last = min(allowed), max(allowed)

    def turn() -> None:
        os.sched_setaffinity(0, {first})
        os.sched_setaffinity(0, {last})

    try:
        yield turn
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def limited_reads(_loaded: Loaded) -> Iterator[LoadStep]:
    """A process reads a file that is larger than its memory limit: each batch of pages must be reclaimed first."""
    memory = detect_hierarchy().controller("memory")
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
            reader = launch_in_cgroups([sys.executable, "-c", READER_CODE, file.name], procs=[group / "cgroup.procs"])
            try:
                yield lambda: time.sleep(STEP_S)
            finally:
                reader.kill()
                reader.wait()
    finally:
        group.rmdir()


@contextmanager
def thread_walks(loaded: Loaded) -> Iterator[LoadStep]:
    """The iterator visits every thread of the node, among them 1,000 sleeping threads of this process."""
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


LOADS: dict[str, Callable[[Loaded], AbstractContextManager[LoadStep]]] = {
    "datagrams": datagrams,
    "stream": stream,
    "connections": connections,
    "direct reads": direct_reads,
    "switches": switches,
    "moves": migrations,
    "reads under a limit": limited_reads,
    "1,000 threads": thread_walks,
}
