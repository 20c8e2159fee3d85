"""How soon the agent reacts to a load spike: the journal says when it decided, the cgroup's files when it was done."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from api.decisions import JournalEntry, Status
from api.knobs import Knob
from bench.cell import Bed, bench_cgroups, colocated
from bench.modes import BATCH, ONLINE, Mode, Node
from bench.report import Reaction
from demo.cgroups import DemoCgroups
from demo.counters import Cell
from demo.schedule import Wave

NS_PER_S, NS_PER_MS = 1_000_000_000, 1_000_000
CALM_SHARE, SPIKE_SHARE = 0.1, 0.95
"""Of the node. A spike that cpu.idle alone copes with calls for no change; at 95 % online tasks wait for each other too."""
PERIOD_S, SPIKE_S, REST_S = 30.0, 4.0, 1.0
"""Between two spikes the agent has time to lend again what the spike took."""
SPIKE_AT_S = 20.0
POLL_S = 0.005


class FileWatch:
    """Notes when the text of any knob file of the cgroups changes."""

    def __init__(self, groups: DemoCgroups) -> None:
        directories = [directory for name in (ONLINE, BATCH) for directory in groups.directories(name)]
        names = ("cpu.idle", "cpu.shares", "cpu.weight", "cpu.cfs_quota_us", "cpu.max", "cpuset.cpus")
        self._files = [path.open("rb", buffering=0) for d in directories for n in names if (path := d / n).exists()]
        self.changes_ns: list[int] = []
        """CLOCK_REALTIME of each change."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before = self._read()
        while not self._ended.wait(POLL_S):
            now = self._read()
            if now != before:
                self.changes_ns.append(time.time_ns())
            before = now

    def _read(self) -> list[bytes]:
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read(256))
        return texts

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        for file in self._files:
            file.close()


def react(bed: Bed, mode: Mode, spikes: int) -> Reaction:
    """Put the service under `spikes` sudden spikes and see what the agent does about them."""
    low, high = bed.size.rate(CALM_SHARE), bed.size.rate(SPIKE_SHARE)
    wave = Wave(low=low, high=low, period_s=PERIOD_S, spike=high, spike_at_s=SPIKE_AT_S, spike_s=SPIKE_S)
    duration_s = PERIOD_S * spikes
    with bench_cgroups(bed.hierarchy) as groups, tempfile.TemporaryDirectory(prefix="dioptase-bench-") as name:
        node = Node(bed.hierarchy, groups, bed.cpus, CALM_SHARE)
        with colocated(node, mode, bed.size, Path(name), wave, duration_s=duration_s) as (loads, agent):
            assert agent is not None
            watch = FileWatch(groups)
            try:
                loads.process("client").wait(duration_s + 60)
                start_ns = loads.client[Cell.STARTED_NS]
                entries = msgspec.json.decode(
                    agent.get("/api/v1/decisions?limit=2000") or b"[]", type=list[JournalEntry]
                )
            finally:
                watch.close()
    onsets = [start_ns + int(onset * NS_PER_S) for onset in wave.spikes(duration_s)]
    return _reaction(mode.name, onsets, [e for e in entries if takes_back(e)], watch.changes_ns)


def _reaction(mode: str, onsets_ns: list[int], taken: list[JournalEntry], changes_ns: list[int]) -> Reaction:
    decided, written, triggers = [], [], []
    for onset in onsets_ns:
        end = onset + int((SPIKE_S + REST_S) * NS_PER_S)
        if (entry := next((e for e in taken if onset <= e.wall_time_ns < end), None)) is None:
            continue
        decided.append((entry.wall_time_ns - onset) / NS_PER_MS)
        triggers.append(entry.trigger)
        written += [(t - onset) / NS_PER_MS for t in changes_ns if t >= entry.wall_time_ns][:1]
    return Reaction(
        mode=mode,
        spikes=len(onsets_ns),
        decided_ms=tuple(decided),
        written_ms=tuple(written),
        triggers=tuple(triggers),
    )


def takes_back(entry: JournalEntry) -> bool:
    """Whether the decision was carried out and leaves the batch job less than before: what a spike calls for."""
    outcome = entry.outcome
    if outcome.status is not Status.APPLIED or outcome.decision.knob is not Knob.QUOTA:
        return False
    return _quota(outcome.decision.value) < _quota(outcome.before or "max")


def _quota(text: str) -> float:
    """The first word of cpu.max: microseconds, or no limit."""
    word = text.split(maxsplit=1)[0]
    return math.inf if word == "max" else float(word)
