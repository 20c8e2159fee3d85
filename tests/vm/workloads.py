"""Programs in cgroups of version 2 whose use of the machine is known, what the kernel counts of them, and the agent's hands.

Time in a guest means little: what is asserted of these programs are counts, shares and places.
"""

from __future__ import annotations

import os
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
from api.cpu import parse_cpu_list
from api.decision import ActMode, Outcome, OutcomeStatus
from api.knobs import Knob
from tests.builders.waiting import until
from tests.kernel.knob_cgroups import KnobCgroup
from tests.kernel.real_cgroups import TestCgroup, require_writable_cgroups

MIB = 1 << 20
DATA = Path("/run/data")
"""Where the data disk is mounted."""
SPIN = ("sh", "-c", "while :; do :; done")
PYTHON = (sys.executable, "-I", "-S", "-c")
"""Nothing of any installation is read: a start costs a fraction of a usual one."""
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
"""So many bytes of anonymous memory in small pages, each written to; each page once more on SIGUSR1. With another argument
none of them can be swapped out (mlockall of what is mapped and will be)."""
CACHE = """
import sys, time
with open(sys.argv[1], "rb", buffering=0) as file:
    while file.read(1 << 20):
        pass
    time.sleep(3600)
"""
"""A file in page cache."""


class KnobWriters(NamedTuple):
    """The agent's way to knobs and back, with a journal of its own."""

    files: KnobWriter
    originals: OriginalsJournal
    actuator: Actuator

    @contextmanager
    def turned(self, *knobs: tuple[TestCgroup, Knob, str]) -> Iterator[None]:
        """The knobs are written and read back by the agent for the duration of the block, and restored exactly."""
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
        """The files of a knob."""
        place = self.files._codec(knob, group.path)
        return [group.file(place.controller, file) for file in place.files]

    def once(self, group: TestCgroup, knob: Knob, value: str) -> Outcome:
        """Have something done that is not set; what came of it."""
        self.actuator.apply([KnobCgroup(group).decide(knob, value)])
        outcomes: list[Outcome] = []
        until(lambda: bool(outcomes.extend(self.actuator.finished()) or outcomes), f"{knob.value} is done")
        return outcomes[0]


@contextmanager
def knob_writers(state: Path) -> Iterator[KnobWriters]:
    """On this machine's cgroups."""
    with (
        closing(KnobWriter(require_writable_cgroups())) as files,
        closing(open_originals(state, read_boot_id())) as originals,
    ):
        yield KnobWriters(files, originals, Actuator(files, originals, ActMode.ON))


@contextmanager
def family(above: TestCgroup, *names: str) -> Iterator[list[TestCgroup]]:
    """Groups of these names below another, which gets every controller to hand down."""
    above.file("cpu", "cgroup.subtree_control").write_text("+cpu +cpuset +memory +io +pids")
    with ExitStack() as stack:
        created = []
        for name in names:
            created.append(TestCgroup(above.hierarchy, f"{above.path}/{name}"))
            stack.callback(created[-1].close)
        yield created


def spin(group: TestCgroup) -> None:
    """Have a process in the group that takes all the CPU it is given; returns when it is there."""
    process = group.start(SPIN)
    procs = group.file("cpu", "cgroup.procs")
    until(lambda: str(process.pid) in procs.read_text().split(), "it has joined")


def hold(group: TestCgroup, size: int, *, cpu: int | None = None, locked: bool = False) -> None:
    """Have a process in the group hold so many bytes, first touched on that CPU; returns when it does."""
    pinned = () if cpu is None else ("taskset", "-c", str(cpu))
    process = group.start([*pinned, *PYTHON, HOLD, str(size), *(["locked"] if locked else [])])

    def held() -> bool:
        assert process.poll() is None, "it has all the memory that it asks for"
        return charged(group) >= size

    until(held, f"{group.path} holds {size} bytes")


def cache(group: TestCgroup, path: Path, size: int) -> None:
    """Have so many bytes of a new file on the data disk in the page cache of the group."""
    path.write_bytes(bytes(size))
    drop_caches(path)
    group.start([*PYTHON, CACHE, str(path)])
    until(lambda: numbers(group, "memory.stat")["file"] >= size, f"{path} is cached")


def drop_caches(path: Path) -> None:
    """Have a file on its disk and nowhere else."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def charged(group: TestCgroup) -> int:
    """Bytes of memory and swap together."""
    return number(group, "memory.current") + swapped(group)


def swapped(group: TestCgroup) -> int:
    """Bytes of swap."""
    return number(group, "memory.swap.current")


def number(group: TestCgroup, file: str) -> int:
    """A file that holds one number."""
    return int(group.file("memory", file).read_text())


def numbers(group: TestCgroup, file: str) -> dict[str, int]:
    """A file with a name and a number in each line."""
    lines = (line.split() for line in group.file("memory", file).read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines}


def on_nodes(group: TestCgroup, kind: str = "anon") -> dict[int, int]:
    """Bytes of that kind by NUMA node."""
    lines = (line.split() for line in group.file("memory", "memory.numa_stat").read_text().splitlines())
    pairs = next(line[1:] for line in lines if line[0] == kind)
    return {int(pair[1:].split("=")[0]): int(pair.split("=")[1]) for pair in pairs}


def io(group: TestCgroup, device: str) -> dict[str, int]:
    """What the group has read and written of a disk."""
    for line in group.file("io", "io.stat").read_text().splitlines():
        words = line.split()
        if words[0] == device:
            return {key: int(value) for key, value in (word.split("=") for word in words[1:]) if value.isdigit()}
    return {}


def ran_on(processes: Collection[subprocess.Popen[bytes]]) -> set[int]:
    """CPUs on which the processes were last running (proc(5): field 39 of stat)."""
    observed = set()
    for _ in range(60):
        for process in processes:
            observed.add(int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[36]))
        time.sleep(0.02)
    return observed


def numa_nodes() -> dict[int, tuple[int, ...]]:
    """Online CPUs of each NUMA node."""
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {int(node.name[4:]): parse_cpu_list((node / "cpulist").read_text()) for node in nodes}


def meminfo(name: str, node: int | None = None) -> int:
    """Bytes that a NUMA node or the machine says of that name."""
    path = "/proc/meminfo" if node is None else f"/sys/devices/system/node/node{node}/meminfo"
    line = next(line for line in Path(path).read_text().splitlines() if f"{name}:" in line)
    return int(line.split()[-2]) * 1024


def free_bytes(node: int | None = None) -> int:
    """Free memory of a NUMA node or of the machine."""
    return meminfo("MemFree", node)


def vmstat() -> dict[str, int]:
    """Every counter of /proc/vmstat."""
    return {name: int(value) for name, value in map(str.split, Path("/proc/vmstat").read_text().splitlines())}


def generations() -> bool:
    """Whether the multi-generational LRU is on."""
    enabled = Path("/sys/kernel/mm/lru_gen/enabled")
    return enabled.exists() and int(enabled.read_text(), 16) != 0


def number_of(serial: str) -> str:
    """`254:16`, as io.max and io.stat name the disk with that serial number."""
    return (disk(serial) / "dev").read_text().strip()


def disk(serial: str) -> Path:
    """/sys/block/... of the disk with that serial number."""
    return next(path.parent for path in Path("/sys/block").glob("vd*/serial") if path.read_text().strip() == serial)
