"""Reads the node's CPU counters: time by mode, run delay, interrupts, frequencies, and L3 and memory bandwidth by
resctrl. CPU times of /proc/stat have the resolution of sysconf(_SC_CLK_TCK), 10 ms on nearly all kernels."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.sensors import parsers
from agent.sensors.kernel_files import ProcSysFiles
from agent.sensors.parsers import SAFE_DIGITS, number
from api.snapshot import L3Monitor

_USER_HZ = os.sysconf("SC_CLK_TCK")
_RUN_DELAY, _TIMESLICES = 7, 8
"""Columns after cpuN: yields, 0, schedules, idles, wakeups, local wakeups, run time, wait time, slices
(kernel/sched/stats.c)."""
_RUNNING, _BLOCKED = parsers.keyed(b"procs_running"), parsers.keyed(b"procs_blocked")
_KHZ_PER_MHZ = 1000
_CPUFREQ_SEARCH_READS = 60
"""Reads between two searches for CPUs with cpufreq."""
_ZEROS = b" 0"


def read_cpu_times(files: ProcSysFiles) -> dict[str, Any]:
    """Read /proc/stat: CPU time by mode, and the numbers of running and blocked tasks."""
    return files.parse("stat", _parse_stat) or {}


def read_run_delays(files: ProcSysFiles) -> dict[str, Any]:
    """Read run-queue wait and timeslices by CPU from /proc/schedstat, which needs CONFIG_SCHEDSTATS."""
    text = files.read_optional(files.proc / "schedstat", keep=True)
    delays_ns = parse_run_delays(text)
    if not delays_ns:
        files.lack("there is no /proc/schedstat", "use a kernel with CONFIG_SCHEDSTATS for waits per CPU")
    return {"run_delay_ns": delays_ns, "timeslices": parse_timeslices(text)}


class CpuFrequencyReader:
    """Current frequency by CPU: cpufreq's, or without a driver that of /proc/cpuinfo, read now and then."""

    def __init__(self) -> None:
        self._reads = 0
        self._driven: dict[int, Path] = {}
        self._cpuinfo_khz: dict[int, int] = {}

    def __call__(self, files: ProcSysFiles) -> dict[str, Any]:
        if self._reads % _CPUFREQ_SEARCH_READS == 0:
            cpus = files.numbered(files.sys / "devices/system/cpu", "cpu")
            paths = {cpu: directory / "cpufreq/scaling_cur_freq" for cpu, directory in cpus}
            self._driven = {cpu: path for cpu, path in paths.items() if files.exists(path)}
            self._cpuinfo_khz = (
                {} if self._driven else parse_cpuinfo_khz(files.read_optional(files.proc / "cpuinfo", keep=True))
            )
        self._reads += 1
        values = {cpu: number(files.read_optional(path, keep=True)) for cpu, path in self._driven.items()}
        khz_by_cpu = {cpu: khz for cpu, khz in values.items() if khz is not None} or self._cpuinfo_khz
        if not khz_by_cpu:
            files.lack("no frequency of any CPU is known", "load a cpufreq driver, if the machine has one")
        return {"cpu_khz": khz_by_cpu}


def read_interrupts(files: ProcSysFiles) -> dict[str, Any]:
    """Read /proc/interrupts, all kinds together. Container runtimes mask the file with /dev/null."""
    if (files.proc / "interrupts").is_char_device():
        files.lack(
            "/proc/interrupts is hidden", "the container runtime masks it; start the agent outside of a container"
        )
        return {"interrupts": {}}
    return {"interrupts": files.parse("interrupts", parse_interrupts) or {}}


def parse_run_delays(text: bytes) -> dict[int, int]:
    """Parse wait time in nanoseconds by CPU from /proc/schedstat."""
    return _schedstat_column(text, _RUN_DELAY)


def parse_timeslices(text: bytes) -> dict[int, int]:
    """Parse timeslices by CPU from /proc/schedstat."""
    return _schedstat_column(text, _TIMESLICES)


def _schedstat_column(text: bytes, index: int) -> dict[int, int]:
    values = {}
    for line in text.split(b"\n"):
        if line.startswith(b"cpu"):
            label, *words = line.split()
            cpu = number(label[3:])
            value = number(words[index]) if len(words) > index else None
            if cpu is not None and value is not None:
                values[cpu] = value
    return values


def parse_cpuinfo_khz(text: bytes) -> dict[int, int]:
    """Parse `cpu MHz` by `processor` from /proc/cpuinfo on x86."""
    khz_by_cpu = {}
    cpu: int | None = None
    for line in text.split(b"\n"):
        key, _, value = line.partition(b":")
        if key.strip() == b"processor":
            cpu = number(value)
        elif key.strip() == b"cpu MHz" and cpu is not None:
            mhz = parsers.decimal(value.strip())
            if mhz:
                khz_by_cpu[cpu] = round(mhz * _KHZ_PER_MHZ)
    return khz_by_cpu


def parse_interrupts(text: bytes) -> dict[int, int]:
    """Sum interrupts by CPU. The heading names the CPUs; lines with fewer numbers (ERR, MIS) belong to none."""
    heading, _, body = text.partition(b"\n")
    cpus = [number(word[3:]) if word.startswith(b"CPU") else None for word in heading.split()]
    if not cpus or None in cpus:
        return {}
    sums = [0] * len(cpus)
    for line in body.split(b"\n"):
        words = line.partition(b":")[2].split(None, len(cpus))[: len(cpus)]
        counts = b"".join(words)
        # Most lines of a large machine are nothing but zeros.
        if len(words) < len(cpus) or not counts.isdigit() or not counts.strip(_ZEROS):
            continue
        if max(map(len, words)) < SAFE_DIGITS:
            sums = [total + int(word) for total, word in zip(sums, words, strict=True)]
    return {
        cpu: total for cpu, total in zip(cpus, sums, strict=True) if cpu is not None and total <= parsers.MAX_COUNTER
    }


def _parse_stat(text: bytes) -> dict[str, Any] | None:
    total, per_cpu = parsers.cpu_lines(text, _USER_HZ)
    if total is None:
        return None
    return {"cpu": total, "per_cpu": per_cpu, "procs_running": _RUNNING(text), "procs_blocked": _BLOCKED(text)}


_RESCTRL_ROOT = "fs/resctrl"
_DOMAIN = re.compile(r"mon_L3_([0-9]{1,4})", re.ASCII)
_RESERVED_DIRECTORIES = {"info", "mon_data", "mon_groups"}
MAX_RESCTRL_GROUPS = 64
"""Bound of the groups to read: each counter is read on a CPU of its domain (mon_event_read of the kernel's resctrl)."""
RESCTRL_MISSING = "there is no resctrl file system with monitors"
RESCTRL_REMEDY = "mount -t resctrl resctrl /sys/fs/resctrl, on a CPU with cache or bandwidth monitoring"


def read_l3_monitors(files: ProcSysFiles) -> dict[str, Any]:
    """Read counters of the node (empty group name), and of control and monitoring groups (`NAME`,
    `NAME/mon_groups/NAME`)."""
    root = files.sys / _RESCTRL_ROOT
    monitors = []
    for group in _monitoring_groups(files, root):
        data = root / group / "mon_data"
        for entry in files.names(data):
            match = _DOMAIN.fullmatch(entry)
            monitor = _read_l3_monitor(files, data / entry, int(match[1]), group) if match else None
            if monitor is not None:
                monitors.append(monitor)
    if not monitors:
        files.lack(RESCTRL_MISSING, RESCTRL_REMEDY)
    return {"l3": tuple(monitors)}


def _monitoring_groups(files: ProcSysFiles, root: Path) -> list[str]:
    def parts() -> Iterator[str]:
        controls = [
            "",
            *(name for name in files.names(root) if name not in _RESERVED_DIRECTORIES and (root / name).is_dir()),
        ]
        yield from controls  # first, because together they have all of the node's traffic
        for control in controls:
            below = f"{control}/mon_groups".lstrip("/")
            yield from (f"{below}/{name}" for name in files.names(root / below))

    return [group for _, group in zip(range(MAX_RESCTRL_GROUPS), parts(), strict=False)]


def _read_l3_monitor(files: ProcSysFiles, directory: Path, domain: int, group: str) -> L3Monitor | None:
    # A counter that the hardware cannot return now reads `Unavailable` or `Error`.
    total = number(files.read_optional(directory / "mbm_total_bytes"))
    local = number(files.read_optional(directory / "mbm_local_bytes"))
    if total is None or local is None:
        return None
    occupancy = number(files.read_optional(directory / "llc_occupancy"))
    name = parsers.name(group.encode(errors="surrogateescape"))
    return L3Monitor(id=domain, group=name, total_bytes=total, local_bytes=local, occupancy_bytes=occupancy)
