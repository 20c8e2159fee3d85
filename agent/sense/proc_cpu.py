"""The node's CPUs: time by mode, waiting for them, interrupts and frequencies.

CPU times come from /proc/stat in ticks of sysconf(_SC_CLK_TCK), 10 ms nearly everywhere: that is their resolution.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from agent.sense import parsers
from agent.sense.node_files import NodeFiles
from agent.sense.parsers import LONGEST_SAFE, number

_HZ = os.sysconf("SC_CLK_TCK")
_RUN_DELAY, _TIMESLICES = 7, 8
"""cpuN, then yields, 0, schedules, idles, wakeups, local wakeups, run time, wait time, slices (kernel/sched/stats.c)."""
_RUNNING, _BLOCKED = parsers.keyed(b"procs_running"), parsers.keyed(b"procs_blocked")
_KHZ_PER_MHZ = 1000
_SEARCH_EVERY = 60
"""Reads between two looks at which CPUs have a frequency that is driven."""
_ZEROS = b" 0"


def times(files: NodeFiles) -> dict[str, Any]:
    """/proc/stat: CPU time by mode, and tasks that run or are blocked right now."""
    return files.parse("stat", _stat) or {}


def delays(files: NodeFiles) -> dict[str, Any]:
    """/proc/schedstat: how long tasks waited for each CPU. Only kernels with CONFIG_SCHEDSTATS have it."""
    text = files.look(files.proc / "schedstat", keep=True)
    found = run_delays(text)
    if not found:
        files.lack("there is no /proc/schedstat", "use a kernel with CONFIG_SCHEDSTATS for waits per CPU")
    return {"run_delay_ns": found, "timeslices": timeslices(text)}


class Frequencies:
    """Current frequency by CPU: cpufreq's, and where nothing drives it what /proc/cpuinfo says now and then."""

    def __init__(self) -> None:
        self._reads = 0
        self._driven: dict[int, Path] = {}
        self._told: dict[int, int] = {}

    def __call__(self, files: NodeFiles) -> dict[str, Any]:
        if self._reads % _SEARCH_EVERY == 0:
            cpus = files.numbered(files.sys / "devices/system/cpu", "cpu")
            paths = {cpu: directory / "cpufreq/scaling_cur_freq" for cpu, directory in cpus}
            self._driven = {cpu: path for cpu, path in paths.items() if files.exists(path)}
            self._told = {} if self._driven else cpuinfo_khz(files.look(files.proc / "cpuinfo", keep=True))
        self._reads += 1
        values = {cpu: number(files.look(path, keep=True)) for cpu, path in self._driven.items()}
        found = {cpu: khz for cpu, khz in values.items() if khz is not None} or self._told
        if not found:
            files.lack("no frequency of any CPU is known", "load a cpufreq driver, where the machine has one")
        return {"cpu_khz": found}


def interrupts(files: NodeFiles) -> dict[str, Any]:
    """/proc/interrupts, all kinds together. Container runtimes put /dev/null in its place."""
    if (files.proc / "interrupts").is_char_device():
        files.lack(
            "/proc/interrupts is hidden", "the container runtime does that; start the agent outside of a container"
        )
        return {"interrupts": {}}
    return {"interrupts": files.parse("interrupts", interrupt_counts) or {}}


def run_delays(text: bytes) -> dict[int, int]:
    """Nanoseconds by CPU, of /proc/schedstat."""
    return _column(text, _RUN_DELAY)


def timeslices(text: bytes) -> dict[int, int]:
    """How often a task got the CPU, of /proc/schedstat."""
    return _column(text, _TIMESLICES)


def _column(text: bytes, index: int) -> dict[int, int]:
    found = {}
    for line in text.split(b"\n"):
        if line.startswith(b"cpu"):
            label, *words = line.split()
            cpu = number(label[3:])
            value = number(words[index]) if len(words) > index else None
            if cpu is not None and value is not None:
                found[cpu] = value
    return found


def cpuinfo_khz(text: bytes) -> dict[int, int]:
    """`cpu MHz` by `processor`, of /proc/cpuinfo on x86."""
    found = {}
    cpu: int | None = None
    for line in text.split(b"\n"):
        key, _, value = line.partition(b":")
        if key.strip() == b"processor":
            cpu = number(value)
        elif key.strip() == b"cpu MHz" and cpu is not None:
            mhz = parsers.decimal(value.strip())
            if mhz:
                found[cpu] = round(mhz * _KHZ_PER_MHZ)
    return found


def interrupt_counts(text: bytes) -> dict[int, int]:
    """Sums by CPU. The heading names the CPUs; lines with fewer numbers (ERR, MIS) belong to none."""
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
        if max(map(len, words)) < LONGEST_SAFE:
            sums = [total + int(word) for total, word in zip(sums, words, strict=True)]
    return {cpu: total for cpu, total in zip(cpus, sums, strict=True) if cpu is not None and total <= parsers.LARGEST}


def _stat(text: bytes) -> dict[str, Any] | None:
    total, per_cpu = parsers.cpu_lines(text, _HZ)
    if total is None:
        return None
    return {"cpu": total, "per_cpu": per_cpu, "procs_running": _RUNNING(text), "procs_blocked": _BLOCKED(text)}
