"""Parses kernel text files that cgroups and the node share into numbers. Pure and total.
A parser returns None or leaves a line out where the text is malformed; it never raises. Values are in the units
that the names say (ns, us, bytes); numbers that are negative or exceed 64 bits are malformed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec

from api.snapshot import CpuTimes, Pressure
from api.units import KIB, NS_PER_S

MAX_COUNTER = (1 << 64) - 1
"""Kernel counters are unsigned and have 64 bits."""
SAFE_DIGITS = 20
"""Digits of MAX_COUNTER: any number with fewer fits."""
_MAX_DIGITS = SAFE_DIGITS
_MAX_CACHED_NAMES = 4096
_STALL_KEYS = (b"avg10=", b"avg60=", b"avg300=", b"total=")
_CPU_FIELDS = 8
"""Fields user nice system idle iowait irq softirq steal; the two guest fields are contained in user and nice
(Documentation/filesystems/proc.rst)."""


def number(text: bytes) -> int | None:
    """Parse a file that holds one number: cpuacct.usage, memory.current, pids.current. `max` is no number."""
    word = text.strip()
    if not word.isdigit() or len(word) > _MAX_DIGITS:
        return None
    value = int(word)
    return value if value <= MAX_COUNTER else None


def scaled(word: bytes, scale: int) -> int | None:
    """Parse a number in another unit; None also if it does not fit into 64 bits then."""
    value = number(word)
    return None if value is None or value * scale > MAX_COUNTER else value * scale


@lru_cache(maxsize=_MAX_CACHED_NAMES)
def name(word: bytes) -> str:
    """Return a name in a kernel text. Equal names share one string, because thousands of mappings have the same keys."""
    return word.decode("ascii", "backslashreplace")


def flat(text: bytes) -> dict[str, int]:
    """Parse `name value` lines: memory.stat, memory.events, /proc/vmstat. Malformed lines are left out."""
    words = text.split()
    names, values = words[::2], words[1::2]
    is_well_formed = len(names) == len(values) == text.count(b"\n")
    if is_well_formed and b"".join(values).isdigit() and max(map(len, values)) < SAFE_DIGITS:
        return dict(zip(map(name, names), map(int, values), strict=True))
    values_by_name = {}
    for line in text.split(b"\n"):
        parts = line.split()
        value = number(parts[1]) if len(parts) == 2 else None
        if value is not None:
            values_by_name[name(parts[0])] = value
    return values_by_name


def keyed(key: bytes, scale: int = 1) -> Callable[[bytes], int | None]:
    """Return a parser of one `key value` line of cpu.stat and similar files; the value is multiplied by `scale`."""
    start, inner = key + b" ", b"\n" + key + b" "

    def read(text: bytes) -> int | None:
        if text.startswith(start):
            at = len(start)
        else:
            at = text.find(inner)
            if at < 0:
                return None
            at += len(inner)
        end = text.find(b"\n", at)
        return scaled(text[at:] if end < 0 else text[at:end], scale)

    return read


def task_count(text: bytes) -> int | None:
    """Return the number of threads in a `tasks` or `cgroup.threads` file."""
    return None if text.translate(None, b"0123456789\n") else text.count(b"\n")


def task_ids(text: bytes) -> tuple[int, ...]:
    """Return the thread ids of a `tasks` or `cgroup.threads` file, without 0, a task outside of this PID namespace
    (kernel/pid.c, pid_nr_ns)."""
    numbers = (number(line) for line in text.split(b"\n"))
    return tuple(tid for tid in numbers if tid)


def pressure(text: bytes) -> Pressure | None:
    """Parse a PSI file: `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, and the same of `full` if the kernel has it."""
    some = full = None
    for line in text.split(b"\n"):
        if line.startswith(b"some "):
            some = some or _stall(line)
        elif line.startswith(b"full "):
            full = full or _stall(line)
    if some is None:
        return None
    stalled = Pressure(some_us=some[3], some_avg10=some[0], some_avg60=some[1], some_avg300=some[2])
    if full is None:
        return stalled
    return msgspec.structs.replace(
        stalled, full_us=full[3], full_avg10=full[0], full_avg60=full[1], full_avg300=full[2]
    )


def cpu_lines(text: bytes, hz: int) -> tuple[CpuTimes | None, dict[int, CpuTimes]]:
    """Parse /proc/stat: the line of all CPUs, and one per online CPU. `hz` is the kernel's unit, sysconf(_SC_CLK_TCK)."""
    total: CpuTimes | None = None
    per_cpu: dict[int, CpuTimes] = {}
    for line in text.split(b"\n"):
        if not line.startswith(b"cpu"):
            continue
        label, *words = line.split()
        times = _cpu_times(words, hz)
        if times is None:
            continue
        if label == b"cpu":
            total = times
        elif (cpu := number(label[3:])) is not None:
            per_cpu[cpu] = times
    return total, per_cpu


def meminfo(text: bytes) -> dict[str, int]:
    """Parse /proc/meminfo or node*/meminfo of sysfs: bytes, and values without a unit as they are (HugePages_*, in
    pages)."""
    bytes_by_name = {}
    for line in text.split(b"\n"):
        label, colon, rest = line.partition(b":")
        words = rest.split()
        value = scaled(words[0], KIB if words[1:] == [b"kB"] else 1) if words and colon else None
        if value is not None and label:
            bytes_by_name[name(label.rpartition(b" ")[2])] = value
    return bytes_by_name


def load_averages(text: bytes) -> tuple[float, float, float] | None:
    """Parse /proc/loadavg: runnable and uninterruptible tasks over 1, 5 and 15 minutes."""
    words = text.split()
    if len(words) < 3:
        return None
    load1, load5, load15 = (decimal(word) for word in words[:3])
    return None if load1 is None or load5 is None or load15 is None else (load1, load5, load15)


def schedstat(text: bytes) -> tuple[int, int, int] | None:
    """Parse /proc/TID/schedstat: nanoseconds on a CPU, nanoseconds runnable and waiting, number of timeslices."""
    words = [number(word) for word in text.split()]
    if len(words) != 3:
        return None
    run_ns, wait_ns, slices = words
    return None if run_ns is None or wait_ns is None or slices is None else (run_ns, wait_ns, slices)


def start_ticks(text: bytes) -> int | None:
    """Parse the thread's start from /proc/TID/stat, in ticks since boot. The name in it may hold blanks and
    parentheses."""
    fields = text.rpartition(b")")[2].split()
    return number(fields[19]) if len(fields) > 19 else None


def _cpu_times(words: list[bytes], hz: int) -> CpuTimes | None:
    values = [number(word) for word in words[:_CPU_FIELDS]]
    if len(values) < 4 or hz <= 0:
        return None
    # Kernels before 2.6.11 had no steal: a missing field is zero.
    numbers = [value for value in values if value is not None and value * NS_PER_S // hz <= MAX_COUNTER]
    if len(numbers) != len(values):
        return None
    user, nice, system, idle, iowait, irq, softirq, steal = (
        value * NS_PER_S // hz for value in (*numbers, *(0,) * (_CPU_FIELDS - len(numbers)))
    )
    return CpuTimes(
        user_ns=user, nice_ns=nice, system_ns=system, idle_ns=idle,
        iowait_ns=iowait, irq_ns=irq, softirq_ns=softirq, steal_ns=steal,
    )  # fmt: skip


def _stall(line: bytes) -> tuple[float, float, float, int] | None:
    words = line.split(b" ")
    if len(words) < 5 or not all(word.startswith(key) for word, key in zip(words[1:], _STALL_KEYS, strict=False)):
        return None
    averages = [decimal(word.partition(b"=")[2]) for word in words[1:4]]
    parsed = [average for average in averages if average is not None]
    total = number(words[4][6:])
    return None if total is None or len(parsed) < 3 else (parsed[0], parsed[1], parsed[2], total)


def decimal(word: bytes) -> float | None:
    """Parse digits and one point; float() takes more (nan, 1e9, 1_0), which no kernel writes."""
    return float(word) if len(word) <= _MAX_DIGITS and word.replace(b".", b"", 1).isdigit() else None
