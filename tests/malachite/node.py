"""A pod at work in cgroups as a kubelet makes them, an agent that watches, and comparisons of what its client stored."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.units import MIB, NS_PER_US
from tests.kernel.real_cgroups import TestCgroup
from tests.live.agent_process import Agent, pods_file
from tests.malachite import stock_client
from tests.malachite.kernel_files import Files
from tests.malachite.stock_client import PORT

QUOTA_US, PERIOD_US, SHARES = 10_000, 100_000, 4096
LIMIT = 256 * MIB
BLOCK, MESSAGE = 65536, 4096
"""What the pod writes and reads, and what it sends itself, again and again."""
UID, CONTAINER = "0d1a2b3c-dead-beef-0000-000000000001", "c0ffee"
BEST_EFFORT, BURSTABLE = "/kubepods/besteffort", "/kubepods/burstable"
GROUPS = ("/kubepods", BEST_EFFORT, BURSTABLE, f"{BEST_EFFORT}/pod{UID}", f"{BEST_EFFORT}/pod{UID}/{CONTAINER}")
WORK = """import mmap, os, socket, sys, threading, time
kept = bytearray(b"x") * (40 << 20)
server = socket.create_server(("127.0.0.1", 0))
def answer():
    peer, _ = server.accept()
    while peer.recv(65536): pass
threading.Thread(target=answer, daemon=True).start()
talk = socket.create_connection(server.getsockname())
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0))
block = mmap.mmap(-1, int(sys.argv[2]))
while True:
    ends = time.monotonic() + 0.05
    while time.monotonic() < ends: pass
    talk.sendall(b"y" * int(sys.argv[3]))
    os.pwrite(file, block, 0); os.preadv(file, [block], 0)
"""


READS_BACK_S = 7.0
"""All files of a cgroup are read within five seconds, and a round is a second."""


def clear_leftovers(hierarchy: Hierarchy) -> None:
    """Remove leftovers of a killed run. With any other pod or a process, /kubepods belongs to a real kubelet."""
    for mount in {*hierarchy.v1.values(), *([hierarchy.v2] if hierarchy.v2 else [])}:
        actual = [path for path in (mount / "kubepods").rglob("*") if path.is_dir()]
        if any(f"/{path.relative_to(mount)}" not in GROUPS for path in actual):
            return
        for name in reversed(GROUPS):
            with suppress(OSError):  # missing, or in use
                (mount / name.lstrip("/")).rmdir()


class Checks:
    """Counts comparisons and reports all failures together."""

    def __init__(self) -> None:
        self.done = 0
        self.wrong: list[str] = []

    def equal(self, what: str, stored: float, read: float) -> None:
        self.between(what, stored, read, read)

    def near(self, what: str, stored: float, read: float, share: float, slack: float = 0.0) -> None:
        margin = abs(read) * share + slack
        self.between(what, stored, read - margin, read + margin)

    def between(self, what: str, stored: float, low: float, high: float) -> None:
        self.done += 1
        if not low <= stored <= high:
            self.wrong.append(f"{what}: the client stored {stored}, the files say {low} to {high}")

    def reason(self, at_least: int) -> None:
        assert not self.wrong, "\n".join([f"{len(self.wrong)} of {self.done} are wrong:", *self.wrong])
        assert self.done >= at_least, f"only {self.done} values were compared"


class Node:
    """Cgroups as a kubelet makes them, a pod at work in them, and an agent that watches."""

    def __init__(self, hierarchy: Hierarchy, directory: Path) -> None:
        self.groups = [TestCgroup(hierarchy, name) for name in GROUPS]
        self.container = self.groups[-1]
        self.container.file("cpu", "cpu.cfs_period_us").write_text(str(PERIOD_US))
        self.container.file("cpu", "cpu.cfs_quota_us").write_text(str(QUOTA_US))
        self.container.file("cpu", "cpu.shares").write_text(str(SHARES))
        self.container.file("memory", "memory.limit_in_bytes").write_text(str(LIMIT))
        pods = pods_file(directory / "pods.yaml", self.container.path, BURSTABLE)
        state = str(directory / "state")
        self.agent = Agent(
            "--pods", str(pods), "--act", "off", "--malachite", f"127.0.0.1:{PORT}", "--state-dir", state
        )
        work = [sys.executable, "-c", WORK, str(directory / "blocks"), str(BLOCK), str(MESSAGE)]
        self.process = self.container.start(work)

    def stop_work(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def close(self) -> None:
        self.agent.__exit__()
        for group in reversed(self.groups):
            group.close()


class Rest:
    """What the client has after the pod's processes were stopped and its files read again."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self.again()

    def again(self) -> None:
        time.sleep(READS_BACK_S)
        self.stored = ask(self._program, rounds=1)

    def check(self, compare: Callable[[stock_client.Stored, Checks], None], at_least: int) -> None:
        """Compare, and once more where the kernel was still settling accounts: it uncharges pages in batches, later."""
        for _ in range(3):
            checks = Checks()
            compare(self.stored, checks)
            if not checks.wrong:
                break
            self.again()
        checks.reason(at_least)


def ask(program: Path, rounds: int) -> stock_client.Stored:
    pods = [f"{UID}/{CONTAINER}"]
    return stock_client.run(program, pods=pods, paths=[f"{BEST_EFFORT}/pod{UID}"], rounds=rounds, reclaim=BEST_EFFORT)


class Sample:
    """Counters of the container at one moment."""

    def __init__(self, pid: int) -> None:
        files = Files(f"{BEST_EFFORT}/pod{UID}/{CONTAINER}")
        # Version 1's own counters stay at zero until a device is limited; the process itself is always counted.
        moved = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        self.at = time.monotonic()
        self.usage = files.number("cpuacct", "cpuacct.usage")
        self.throttled = files.keyed("cpu", "cpu.stat", "nr_throttled")
        self.periods = files.keyed("cpu", "cpu.stat", "nr_periods")
        self.throttled_us = files.keyed("cpu", "cpu.stat", "throttled_time") // NS_PER_US
        self.read_bytes, self.written_bytes = int(moved["read_bytes"]), int(moved["write_bytes"])
        self.reads, self.writes = self.read_bytes / BLOCK, self.written_bytes / BLOCK
        self.sent = self.writes * MESSAGE

    def rate(self, before: Sample, field: str) -> float:
        return float(getattr(self, field) - getattr(before, field)) / (self.at - before.at)
