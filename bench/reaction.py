"""How soon the agent reacts to a load spike: the journal says when it decided, the cgroup's files when it was done."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import msgspec

from api.decisions import JournalEntry, Status
from bench.cell import AGENT_WARMUP_S, Bed, bench_cgroups, colocated
from bench.modes import BATCH, ONLINE, Mode, Node
from bench.report import Reaction
from demo.cgroups import DemoCgroups
from demo.counters import Cell
from demo.schedule import Wave

NS_PER_S, NS_PER_MS = 1_000_000_000, 1_000_000
PERIOD_S, SPIKE_S, REST_S = 20.0, 4.0, 1.0
"""Between two spikes the agent has time to lend again what the spike took."""
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
    """Put the service under `spikes` sudden spikes from 10 to 60 % of the node and see what the agent does about them."""
    low, high = bed.size.rate(0.1), bed.size.rate(0.6)
    wave = Wave(low=low, high=low, period_s=PERIOD_S, spike=high, spike_at_s=AGENT_WARMUP_S, spike_s=SPIKE_S)
    duration_s = PERIOD_S * spikes
    with bench_cgroups(bed.hierarchy) as groups, tempfile.TemporaryDirectory(prefix="dioptase-bench-") as name:
        node = Node(bed.hierarchy, groups, bed.cpus, 0.1)
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
    return _reaction(mode.name, onsets, [e for e in entries if e.outcome.status is Status.APPLIED], watch.changes_ns)


def _reaction(mode: str, onsets_ns: list[int], applied: list[JournalEntry], changes_ns: list[int]) -> Reaction:
    decided, written, triggers = [], [], []
    for onset in onsets_ns:
        end = onset + int((SPIKE_S + REST_S) * NS_PER_S)
        if change := next((t for t in changes_ns if onset <= t < end), None):
            written.append((change - onset) / NS_PER_MS)
        if entry := next((e for e in applied if onset <= e.wall_time_ns < end), None):
            decided.append((entry.wall_time_ns - onset) / NS_PER_MS)
            triggers.append(entry.trigger)
    return Reaction(
        mode=mode,
        spikes=len(onsets_ns),
        decided_ms=tuple(decided),
        written_ms=tuple(written),
        triggers=tuple(triggers),
    )
