"""Programs of known resource use in cgroups of version 2, the kernel's counters of them, and the agent's writers.

Durations in a guest mean little: assert counts, shares and placement.
"""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.qrm.actuator.writer import KnobWriter
from agent.qrm.knobs.knob_files import canonical
from agent.sensors.triggers.psi_triggers import PsiTrigger
from api.cpu import parse_cpu_list
from api.decision import ActMode, Outcome, OutcomeStatus
from api.knobs import Knob
from tests.builders.waiting import until
from tests.kernel.knob_cgroups import KnobCgroup
from tests.kernel.real_cgroups import TestCgroup, require_writable_cgroups

DATA = Path("/run/data")
"""Mount point of the data disk."""
SPIN = ("sh", "-c", "while :; do :; done")
PYTHON = (sys.executable, "-I", "-S", "-c")
"""Python options that skip site-packages, which makes a start much cheaper."""
HOLD = """
import _signal, ctypes, mmap, sys, time
if sys.argv[2:]:
    assert ctypes.CDLL(None).mlockall(3) == 0
size, block = int(sys.argv[1]), bytes(range(1, 129)) * 8192
held = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.madvise(mmap.MADV_NOHUGEPAGE)
def touch(*_):
    for page in range(0, size, 4096):
        held[page] = 255 - held[page]
_signal.signal(_signal.SIGUSR1, touch)
while held.tell() < size:
    held.write(block[: size - held.tell()])
time.sleep(3600)
"""
"""Program that holds anonymous memory in small pages, all written, and writes them again on SIGUSR1. With a further argument
the memory is locked (mlockall)."""
CACHE = """
import sys, time
with open(sys.argv[1], "rb", buffering=0) as file:
    while file.read(1 << 20):
        pass
    time.sleep(3600)
"""
"""Program that fills the page cache with a file."""


class KnobWriters(NamedTuple):
    """The agent's writers of knobs, with a journal of originals."""

    files: KnobWriter
    originals: OriginalsJournal
    actuator: Actuator

    @contextmanager
    def turned(self, *knobs: tuple[TestCgroup, Knob, str]) -> Iterator[None]:
        """Write the knobs by the agent, read them back, and restore them exactly after the block."""
        decisions = [KnobCgroup(group).decide(knob, value) for group, knob, value in knobs]
        shown = [path for group, knob, _ in knobs for path in self.shown(group, knob)]
        before = [path.read_text() for path in shown]
        outcomes = self.actuator.apply(decisions)
        expected = [(OutcomeStatus.APPLIED, canonical(knob, value), "") for _, knob, value in knobs]
        assert [(o.status, o.after, o.error) for o in outcomes] == expected
        assert all(path.read_text() != text for path, text in zip(shown, before, strict=True))
        yield
        # The weight that cpu.idle pins comes back with it.
        assert {o.status for o in self.originals.restore(self.files)} <= {
            OutcomeStatus.APPLIED,
            OutcomeStatus.UNCHANGED,
        }
        assert [path.read_text() for path in shown] == before
        assert self.originals.entries() == ()

    def shown(self, group: TestCgroup, knob: Knob) -> list[Path]:
        """Return the files of a knob."""
        place = self.files._codec(knob, group.path)
        return [group.file(place.controller, file) for file in place.files]

    def once(self, group: TestCgroup, knob: Knob, value: str) -> Outcome:
        """Apply a one-shot knob and return its outcome."""
        self.actuator.apply([KnobCgroup(group).decide(knob, value)])
        outcomes: list[Outcome] = []
        until(lambda: bool(outcomes.extend(self.actuator.finished()) or outcomes), f"{knob.value} is done")
        return outcomes[0]


@contextmanager
def knob_writers(state: Path) -> Iterator[KnobWriters]:
    """Yield writers on this machine's cgroups."""
    with (
        closing(KnobWriter(require_writable_cgroups())) as files,
        closing(open_originals(state, read_boot_id())) as originals,
    ):
        yield KnobWriters(files, originals, Actuator(files, originals, ActMode.ON))


@contextmanager
def family(above: TestCgroup, *names: str) -> Iterator[list[TestCgroup]]:
    """Yield cgroups of these names below another one, whose controllers are enabled for its children."""
    above.file("cpu", "cgroup.subtree_control").write_text("+cpu +cpuset +memory +io +pids")
    with ExitStack() as stack:
        created = []
        for name in names:
            created.append(TestCgroup(above.hierarchy, f"{above.path}/{name}"))
            stack.callback(created[-1].close)
        yield created


def spin(group: TestCgroup) -> None:
    """Start a process in the group that uses all CPU it gets; return once it runs."""
    process = group.start(SPIN)
    procs = group.file("cpu", "cgroup.procs")
    until(lambda: str(process.pid) in procs.read_text().split(), "it has joined")


def hold(group: TestCgroup, size: int, *, cpu: int | None = None, locked: bool = False) -> None:
    """Start a process in the group that holds so many bytes, first touched on that CPU; return once it holds them."""
    pinned = () if cpu is None else ("taskset", "-c", str(cpu))
    process = group.start([*pinned, *PYTHON, HOLD, str(size), *(["locked"] if locked else [])])

    def held() -> bool:
        assert process.poll() is None, "it has all the memory that it asks for"
        return charged(group) >= size

    until(held, f"{group.path} holds {size} bytes")


def cache(group: TestCgroup, path: Path, size: int) -> None:
    """Create a file on the data disk with so many bytes in the page cache, charged to the group."""
    path.write_bytes(bytes(size))
    drop_caches(path)
    group.start([*PYTHON, CACHE, str(path)])
    until(lambda: numbers(group, "memory.stat")["file"] >= size, f"{path} is cached")


def drop_caches(path: Path) -> None:
    """Write a file back and drop it from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def charged(group: TestCgroup) -> int:
    """Return the group's bytes of memory and swap together."""
    return number(group, "memory.current") + swapped(group)


def swapped(group: TestCgroup) -> int:
    """Return the group's bytes of swap."""
    return number(group, "memory.swap.current")


def reclaimed_bytes(group: TestCgroup) -> int:
    """Return the bytes that the kernel has taken from the group since it was created: swapped out, or dropped from its page
    cache, in which the first process after a boot has Python's files."""
    lines = group.file("memory", "memory.stat").read_text().splitlines()
    (pages,) = (int(line.split()[1]) for line in lines if line.startswith("pgsteal "))
    return pages * mmap.PAGESIZE


def number(group: TestCgroup, file: str) -> int:
    """Read a file that holds one number."""
    return int(group.file("memory", file).read_text())


def numbers(group: TestCgroup, file: str) -> dict[str, int]:
    """Read a file with a name and a number in each line."""
    lines = (line.split() for line in group.file("memory", file).read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines}


def on_nodes(group: TestCgroup, kind: str = "anon") -> dict[int, int]:
    """Return bytes of that kind by NUMA node."""
    lines = (line.split() for line in group.file("memory", "memory.numa_stat").read_text().splitlines())
    pairs = next(line[1:] for line in lines if line[0] == kind)
    return {int(pair[1:].split("=")[0]): int(pair.split("=")[1]) for pair in pairs}


def io(group: TestCgroup, device: str) -> dict[str, int]:
    """Return the group's counters of a disk in io.stat."""
    for line in group.file("io", "io.stat").read_text().splitlines():
        words = line.split()
        if words[0] == device:
            return {key: int(value) for key, value in (word.split("=") for word in words[1:]) if value.isdigit()}
    return {}


def ran_on(processes: Collection[subprocess.Popen[bytes]]) -> set[int]:
    """Return the CPUs on which the processes last ran (proc(5): field 39 of stat)."""
    observed = set()
    for _ in range(60):
        for process in processes:
            observed.add(int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[36]))
        time.sleep(0.02)
    return observed


def numa_nodes() -> dict[int, tuple[int, ...]]:
    """Return the online CPUs of each NUMA node."""
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {int(node.name[4:]): parse_cpu_list((node / "cpulist").read_text()) for node in nodes}


def meminfo(name: str, node: int | None = None) -> int:
    """Return the field of this name in a NUMA node's or the machine's meminfo, in bytes."""
    path = "/proc/meminfo" if node is None else f"/sys/devices/system/node/node{node}/meminfo"
    line = next(line for line in Path(path).read_text().splitlines() if f"{name}:" in line)
    return int(line.split()[-2]) * 1024


def free_bytes(node: int | None = None) -> int:
    """Return the free memory of a NUMA node or of the machine in bytes."""
    return meminfo("MemFree", node)


def vmstat() -> dict[str, int]:
    """Return every counter of /proc/vmstat."""
    return {name: int(value) for name, value in map(str.split, Path("/proc/vmstat").read_text().splitlines())}


def generations() -> bool:
    """Return whether the multi-generational LRU is enabled."""
    enabled = Path("/sys/kernel/mm/lru_gen/enabled")
    return enabled.exists() and int(enabled.read_text(), 16) != 0


def number_of(serial: str) -> str:
    """Return the device number, such as `254:16`, of the disk with that serial number."""
    return (disk(serial) / "dev").read_text().strip()


def disk(serial: str) -> Path:
    """Return the /sys/block directory of the disk with that serial number."""
    return next(path.parent for path in Path("/sys/block").glob("vd*/serial") if path.read_text().strip() == serial)


def fires(trigger: PsiTrigger, within_s: float) -> bool:
    """Return whether the trigger fires: an event is POLLPRI (psi_trigger_poll in kernel/sched/psi.c)."""
    poll = select.poll()
    poll.register(trigger.fileno(), select.POLLPRI)
    return any(events & select.POLLPRI and not events & select.POLLERR for _, events in poll.poll(within_s * 1000))
