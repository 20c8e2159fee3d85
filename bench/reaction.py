"""Measures how fast CPU is taken back from batch work when the online load jumps."""

from __future__ import annotations

import math
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import JournalEntry, OutcomeStatus
from api.knobs import Knob
from bench.colocation_cell import CellSetup, running_cell, warmup_s
from bench.colocation_modes import BATCH, ONLINE, ColocationMode, Scenario
from bench.colocation_report import Reaction
from demo.cgroups import DemoCgroups
from demo.counters import ClientCell
from demo.schedule import RateBursts, random_bursts

NS_PER_S, NS_PER_MS = 1_000_000_000, 1_000_000
CALM_SHARE, STEP_SHARE = 0.1, 0.9
"""Of the node: a step takes nearly all that batch work has."""
PERIOD_S, STEP_S, FIRST_S = 3.5, 1.2, 2.0
BURSTING = 0.3
"""Part of the time that bursts last which come and go at random."""
POLL_S, WINDOW_S, BEFORE_S = 0.005, 0.05, 0.3
TAKEN_BACK_SHARE = 0.9
"""CPU counts as taken back when batch work's use has fallen by so much of what the step calls for."""
KINDS = ("steps", "bursts")


def schedule_of(kind: str, low: float, high: float, steps: int) -> RateBursts:
    """So many steps at even distances, or as many bursts of random lengths and distances in the same time."""
    if kind == "steps":
        return RateBursts(low=low, high=high, period_s=PERIOD_S, on=((FIRST_S, FIRST_S + STEP_S),))
    return random_bursts(low, high, period_s=PERIOD_S * steps, count=steps, on_share=BURSTING, seed=1)


class BatchCpuSampler:
    """Notes what CPU time the batch job has had, and when the text of any knob file changes."""

    def __init__(self, hierarchy: Hierarchy, groups: DemoCgroups) -> None:
        directories = [directory for name in (ONLINE, BATCH) for directory in groups.directories(name)]
        names = ("cpu.idle", "cpu.shares", "cpu.weight", "cpu.cfs_quota_us", "cpu.max", "cpuset.cpus")
        self._files = [path.open("rb", buffering=0) for d in directories for n in names if (path := d / n).exists()]
        mount, v2 = hierarchy.controller("cpuacct"), hierarchy.mode == "v2"
        self._use = (
            hierarchy.primary / BATCH / "cpu.stat" if v2 or mount is None else mount / BATCH / "cpuacct.usage"
        ).open("rb", buffering=0)
        self.samples: list[tuple[int, int]] = []
        """CLOCK_REALTIME and CPU time so far, in ns."""
        self.changes_ns: list[int] = []
        """CLOCK_REALTIME of each change."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(PermissionError):  # then it is late where both CPUs are busy, never early
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        before = self._read()
        while not self._ended.wait(POLL_S):
            now = self._read()
            if now != before:
                self.changes_ns.append(time.time_ns())
            before = now
            self._use.seek(0)
            self.samples.append((time.time_ns(), used_ns(self._use.read(4096))))

    def _read(self) -> list[bytes]:
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read(256))
        return texts

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        for file in (*self._files, self._use):
            file.close()


def used_ns(text: bytes) -> int:
    """CPU time in cpuacct.usage, or in cpu.stat."""
    word, _, rest = text.partition(b" ")
    return int(rest.split(maxsplit=1)[0]) * 1000 if word == b"usage_usec" else int(word)


def measure_reaction(bed: CellSetup, mode: ColocationMode, kind: str, steps: int) -> Reaction:
    """Put the service under so many sudden jumps of its load and see what becomes of the batch job's CPU."""
    schedule = schedule_of(kind, bed.size.rate(CALM_SHARE), bed.size.rate(STEP_SHARE), steps)
    scenario = Scenario(name=kind, what=kind, load=CALM_SHARE)
    first_s = warmup_s(mode)
    schedule = msgspec.structs.replace(schedule, from_s=first_s)
    duration_s = first_s + PERIOD_S * steps
    with running_cell(bed, mode, scenario, schedule, duration_s=duration_s) as running:
        watch = BatchCpuSampler(bed.hierarchy, running.groups)
        try:
            running.loads.process("client").wait(duration_s + 60)
            start_ns = running.loads.client[ClientCell.STARTED_NS]
            said = running.agent.get("/api/v1/decisions?limit=2000", 10) if running.agent else None
        finally:
            watch.close()
    entries = [e for e in msgspec.json.decode(said or b"[]", type=list[JournalEntry]) if is_taking_back(e)]
    onsets_s = [onset for onset in schedule.spikes(duration_s) if onset >= first_s]
    spans = [tuple(start_ns + int(at * NS_PER_S) for at in (on, burst_end_s(schedule, on))) for on in onsets_s]
    return _reaction((mode.name, kind), spans, watch, entries, bed.size.cpus * (1 - STEP_SHARE))


def burst_end_s(schedule: RateBursts, onset_s: float) -> float:
    """When the burst that begins there ends."""
    at = (onset_s - schedule.from_s) % schedule.period_s
    begin, end = min(schedule.on, key=lambda burst: abs(burst[0] - at))
    return onset_s + end - begin


def _reaction(
    which: tuple[str, str],
    spans: Sequence[tuple[int, ...]],
    watch: BatchCpuSampler,
    entries: Sequence[JournalEntry],
    left_cores: float,
) -> Reaction:
    taken: list[float] = []
    decided, written, triggers = [], [], []
    for onset, end in spans:
        if (found := taken_back_ms(watch.samples, onset, end, left_cores)) is not None:
            taken.append(found)
        entry = next((e for e in entries if onset <= e.wall_time_ns < end), None)
        if entry is not None:
            decided.append((entry.wall_time_ns - onset) / NS_PER_MS)
            triggers.append(entry.trigger)
            written += [(t - onset) / NS_PER_MS for t in watch.changes_ns if t >= entry.wall_time_ns][:1]
    return Reaction(
        mode=which[0],
        kind=which[1],
        steps=len(spans),
        taken_ms=tuple(value for value in taken if math.isfinite(value)),
        never=sum(not math.isfinite(value) for value in taken),
        decided_ms=tuple(decided),
        written_ms=tuple(written),
        triggers=tuple(triggers),
    )


def taken_back_ms(samples: Sequence[tuple[int, int]], onset_ns: int, end_ns: int, left_cores: float) -> float | None:
    """From the onset until batch work's use, over the WINDOW_S before, has fallen by nine tenths of the way to what the step
    leaves; the window counts too, so nothing is faster than that. Infinite where that does not come about within the step,
    None where batch work had so little before that there was nothing to take."""
    began = mean_cores(samples, onset_ns - int(BEFORE_S * NS_PER_S), onset_ns)
    if began is None or began <= left_cores:
        return None
    limit = began - TAKEN_BACK_SHARE * (began - left_cores)
    first = bisect_left(samples, (onset_ns,))
    for at_ns, _ in samples[first : bisect_right(samples, (end_ns,))]:
        now = mean_cores(samples, at_ns - int(WINDOW_S * NS_PER_S), at_ns)
        if now is not None and now <= limit:
            return (at_ns - onset_ns) / NS_PER_MS
    return math.inf


def mean_cores(samples: Sequence[tuple[int, int]], from_ns: int, until_ns: int) -> float | None:
    """Mean use between the samples that are nearest before both times; None where there are none."""
    first, last = (bisect_right(samples, (at, 1 << 63)) - 1 for at in (from_ns, until_ns))
    if first < 0 or first == last:
        return None
    (then_ns, then_used), (now_ns, now_used) = samples[first], samples[last]
    return (now_used - then_used) / (now_ns - then_ns)


def is_taking_back(entry: JournalEntry) -> bool:
    """Whether the decision was carried out and leaves the batch job less than before: what a spike calls for."""
    outcome = entry.outcome
    if outcome.status is not OutcomeStatus.APPLIED or outcome.decision.knob is not Knob.QUOTA:
        return False
    return _quota(outcome.decision.value) < _quota(outcome.before or "max")


def _quota(text: str) -> float:
    """The first word of cpu.max: microseconds, or no limit."""
    word = text.split(maxsplit=1)[0]
    return math.inf if word == "max" else float(word)
