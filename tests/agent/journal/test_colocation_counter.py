"""Totals of colocation: what a cycle adds, and the state file after a restart, a kill, a full disk and with damage."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from agent.journal.colocation_counter import BUSY_CORES, FILE_NAME, ColocationCounter, SavedTotals, add_cycle
from api.colocation import (
    MAX_NAMES,
    OTHER_NAMES,
    ColocationTotals,
    OnlineTotals,
    add_counts,
    sum_totals,
    totals_since,
)
from api.decision import ActMode, Cycle
from api.eviction import EvictionResult, EvictionVictim
from api.histogram import BOUNDS_NS
from api.knobs import Knob, Reason
from api.snapshot import RunqLatency
from common.state_file import encode_state
from tests.builders.four_cpu_node import BATCH, WEB, advice, busy_cycle, busy_snapshot, outcome
from tests.builders.interference_node import interference_cycles

S, MS = 1_000_000_000, 1_000_000
EMPTY = ColocationTotals(since_wall_ns=7)
WAITS, WAITS_NS = 99, 90 * BOUNDS_NS[3] + 9 * BOUNDS_NS[7] + BOUNDS_NS[14] - BOUNDS_NS[13]
"""Of the 100 waits a second the longest was the container's own throttling, removed at the lower bound of its slot."""


def without_batch(seq: int, batch_cores: float = 0.0) -> Cycle:
    """The busy cycle, but /batch used this many cores in it, which the node did not."""
    previous, current = busy_snapshot(seq - 1), busy_snapshot(seq)
    batch = msgspec.structs.replace(
        current.cgroups["/batch"], cpu_usage_ns=2250 * MS * (seq - 1) + round(batch_cores * S)
    )
    cgroups = {**current.cgroups, "/batch": batch}
    return msgspec.structs.replace(
        busy_cycle(seq), snapshot=msgspec.structs.replace(current, cgroups=cgroups), previous=previous
    )


def test_a_cycle_with_batch_work_adds_its_interval() -> None:
    totals = add_cycle(EMPTY, busy_cycle(2), 2.5)
    assert totals.duration_ns == S
    assert totals.reclaimed_ns == {"default": 2250 * MS}
    # 4 CPUs, of which online pods and the system used 1.5: all 2.5 reclaimable cores were there.
    assert totals.reclaimable_ns == 2500 * MS
    assert (totals.busy.duration_ns, totals.busy.cpu_ns) == (S, 1500 * MS)
    assert (totals.busy.latency.count, totals.busy.latency.sum_ns) == (WAITS, WAITS_NS)
    assert totals.idle == EMPTY.idle
    assert totals.interference_duration_ns == 0, "no probe blame, so it is unknown, not zero"


@pytest.mark.parametrize(("limit", "expected_ms"), [(None, 0), (1.0, 1000), (2.5, 2500), (4.0, 2500)])
def test_reclaimable_time_is_neither_above_the_limit_nor_what_others_used(
    limit: float | None, expected_ms: int
) -> None:
    """With cpu.idle reclaimed pods may run on all 4 CPUs, but 1.5 cores of them were not theirs."""
    assert add_cycle(EMPTY, busy_cycle(2), limit).reclaimable_ns == expected_ms * MS


@pytest.mark.parametrize(
    ("cores", "is_busy"), [(0.0, False), (BUSY_CORES - 0.001, False), (BUSY_CORES, True), (1.0, True)]
)
def test_reclaimed_pods_are_busy_from_a_twentieth_of_a_core_on(cores: float, *, is_busy: bool) -> None:
    totals = add_cycle(EMPTY, without_batch(2, cores), 2.5)
    assert (totals.busy.duration_ns, totals.idle.duration_ns) == ((S, 0) if is_busy else (0, S))
    assert totals.busy.latency.count + totals.idle.latency.count == WAITS


def test_a_node_without_reclaimed_pods_is_idle() -> None:
    cycle = busy_cycle(2)
    alone = msgspec.structs.replace(cycle, snapshot=msgspec.structs.replace(cycle.snapshot, pods=(WEB,)))
    totals = add_cycle(EMPTY, alone, 2.5)
    assert (totals.idle.duration_ns, totals.busy.duration_ns, totals.used_ns) == (S, 0, 0)


def test_an_interval_in_which_the_use_of_reclaimed_pods_is_unknown_counts_as_neither() -> None:
    cycle = busy_cycle(2)
    assert cycle.previous is not None
    new = {path: sample for path, sample in cycle.previous.cgroups.items() if path != "/batch"}
    totals = add_cycle(
        EMPTY, msgspec.structs.replace(cycle, previous=msgspec.structs.replace(cycle.previous, cgroups=new)), 2.5
    )
    assert (totals.duration_ns, totals.busy.duration_ns, totals.idle.duration_ns) == (S, 0, 0)


def test_an_agent_that_does_not_act_measures_latency_only(tmp_path: Path) -> None:
    counter = ColocationCounter(tmp_path, 7)
    for seq in (1, 2, 3):
        cycle = msgspec.structs.replace(busy_cycle(seq, act=ActMode.OFF), advice=None)
        cycle.share_evaluated_latency({})
        counter.count(cycle)
    assert counter.totals.reclaimable_ns == 0
    assert counter.totals.busy.latency.count == 2 * WAITS


def test_what_a_cycle_decides_counts_from_the_next_one_on(tmp_path: Path) -> None:
    counter = ColocationCounter(tmp_path, 7)
    for seq, cores in ((1, 2.0), (2, 1.0), (3, 0.5)):
        counter.count(msgspec.structs.replace(busy_cycle(seq), advice=advice("hold", cores)))
    assert counter.totals.reclaimable_ns == (2000 + 1000) * MS


def test_interference_is_the_time_that_online_pods_waited_for_reclaimed_ones() -> None:
    """/web waits 240 ms a second for /batch, and 100 for a cgroup of no pod; /batch itself does not count."""
    cycles = interference_cycles(3)
    totals = EMPTY
    for cycle in cycles:
        totals = add_cycle(totals, cycle, None)
    measured = sum(cycle.rates is not None for cycle in cycles)
    assert measured > 0
    assert totals.interference_ns == 240 * MS * measured
    assert totals.interference_duration_ns == S * measured


@pytest.mark.parametrize(
    ("cycle", "expected"),
    [
        (msgspec.structs.replace(busy_cycle(2), advice=advice("shrink")), {"wait_below_target": 1}),
        (msgspec.structs.replace(busy_cycle(2), advice=advice("grow")), {}),
        (msgspec.structs.replace(busy_cycle(2, act=ActMode.DRY_RUN), advice=advice("shrink")), {}),
        (msgspec.structs.replace(busy_cycle(2, outcomes=(outcome(Knob.IDLE, "1"),)), advice=advice("shrink")), {}),
        (msgspec.structs.replace(busy_cycle(2, outcomes=()), advice=advice("shrink")), {}),
    ],
    ids=["shrink", "grow", "dry run", "priority only", "nothing written"],
)
def test_a_reduction_is_a_cycle_that_wrote_less_cpu(cycle: Cycle, expected: dict[str, int]) -> None:
    assert add_cycle(EMPTY, cycle, 2.5).reductions == expected


def test_evictions_of_reclaimed_pods_count_by_rule() -> None:
    def victim(uid: str, **fields: bool) -> EvictionVictim:
        return EvictionVictim(
            pod=uid, uid=uid, plugin="memory", scope="memory", reason=Reason(rule="below_min", text="t"), forced=True,
            grace_s=None, **fields,
        )  # fmt: skip

    victims = (victim(BATCH.uid), victim(WEB.uid), victim(BATCH.uid, dry_run=True), victim(BATCH.uid, notify=True))
    cycle = msgspec.structs.replace(busy_cycle(2), evictions=EvictionResult(victims=victims))
    assert add_cycle(EMPTY, cycle, 2.5).evictions == {"below_min": 1}


def test_names_are_bounded() -> None:
    counts = add_counts({}, {f"n{i}": 1 for i in range(MAX_NAMES + 10)})
    assert len(counts) == MAX_NAMES + 1
    assert counts[OTHER_NAMES] == 10
    assert add_counts(counts, {"n0": 2, "n70": 1}) == {**counts, "n0": 3, OTHER_NAMES: 11}


def test_totals_of_nodes_add_up() -> None:
    first = add_cycle(EMPTY, busy_cycle(2), 2.5)
    other = msgspec.structs.replace(add_cycle(EMPTY, without_batch(3), 1.0), since_wall_ns=3, evictions={"x": 2})
    both = sum_totals([first, other])
    assert both is not None
    assert (both.since_wall_ns, both.duration_ns, both.reclaimable_ns) == (3, 2 * S, 2750 * MS)
    assert (both.used_ns, both.evictions) == (2250 * MS, {"x": 2})
    assert (both.busy.latency.count, both.idle.latency.count) == (WAITS, WAITS)
    assert sum_totals([]) is None


def counted(directory: Path, cycles: int) -> ColocationTotals:
    counter = ColocationCounter(directory, 7)
    for seq in range(1, cycles + 1):
        counter.count(busy_cycle(seq))
    counter.close()
    return counter.totals


def test_totals_continue_after_a_restart(tmp_path: Path) -> None:
    first = counted(tmp_path, 3)
    again = ColocationCounter(tmp_path, 99)
    assert (again.totals, again.messages) == (first, ())
    assert counted(tmp_path, 3).used_ns == 2 * first.used_ns == 4 * 2250 * MS
    assert (tmp_path / FILE_NAME).stat().st_size < 4096


def test_counters_of_an_agent_begin_at_zero_after_a_kill_and_never_fall(tmp_path: Path) -> None:
    """Prometheus takes a counter that falls by a second for a reset, and adds the whole value again."""
    killed = ColocationCounter(tmp_path, 7)
    for seq in range(1, 49):
        killed.count(busy_cycle(seq))
    successor = ColocationCounter(tmp_path, 8)
    assert successor.totals.used_ns < killed.totals.used_ns
    exported = [totals_since(successor.totals, successor.earlier)]
    for seq in range(50, 54):
        successor.count(busy_cycle(seq))
        exported.append(totals_since(successor.totals, successor.earlier))
    assert [each.used_ns for each in exported] == sorted(each.used_ns for each in exported)
    assert (exported[0].used_ns, exported[-1].used_ns) == (0, 4 * 2250 * MS)
    assert exported[-1].busy.latency.count == 4 * WAITS


@pytest.mark.kernel
def test_a_damaged_file_on_a_read_only_disk_keeps_the_totals_in_memory(tmp_path: Path) -> None:
    """After `errors=remount-ro` both happen at once; an agent must not end because of its statistics."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=True)
    try:
        (tmp_path / FILE_NAME).write_bytes(b"garbage")
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        counter = ColocationCounter(tmp_path, 7)
        counter.count(busy_cycle(1))
        counter.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    (message,) = counter.messages
    assert "They are not saved" in message
    assert "Read-only file system" in message
    assert (counter.path, counter.failure) == (None, None)


def test_the_file_is_written_once_a_minute_and_at_the_end(tmp_path: Path) -> None:
    counter, path, inodes = ColocationCounter(tmp_path, 7), tmp_path / FILE_NAME, []
    for seq in range(1, 200):
        counter.count(busy_cycle(seq))
        if not inodes or path.stat().st_ino != inodes[-1]:
            inodes.append(path.stat().st_ino)
    assert len(inodes) == 4
    assert ColocationCounter(tmp_path, 7).totals.duration_ns == 180 * S
    counter.close()
    assert ColocationCounter(tmp_path, 7).totals.duration_ns == 198 * S


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-2], "cannot be read"),
        (lambda data: data.replace(b"4500000000", b"4600000000", 1), "checksum"),
        (lambda data: data.replace(b'"version":1', b'"version":2', 1), "layout version 2, this program supports 1"),
        (lambda data: b"", "cannot be read"),
    ],
    ids=["cut short", "another number", "another version", "empty"],
)
def test_a_damaged_file_is_renamed_and_totals_start_at_zero(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    counted(tmp_path, 3)
    path = tmp_path / FILE_NAME
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    counter = ColocationCounter(tmp_path, 99)
    assert counter.totals == ColocationTotals(since_wall_ns=99)
    assert message in counter.messages[0]
    assert (tmp_path / f"{FILE_NAME}.damaged-1").read_bytes() == damaged


@pytest.mark.parametrize(
    "totals",
    [
        ColocationTotals(since_wall_ns=1, duration_ns=10**400),
        ColocationTotals(since_wall_ns=1, reclaimed_ns={"default": -1}),
        ColocationTotals(since_wall_ns=1, busy=OnlineTotals(latency=RunqLatency(sum_ns=1, count=2, slots=(1, 1)))),
    ],
)
def test_a_file_with_totals_that_cannot_be_is_damaged(tmp_path: Path, totals: ColocationTotals) -> None:
    """Its checksum is right."""
    (tmp_path / FILE_NAME).write_bytes(encode_state(SavedTotals(totals=totals)))
    counter = ColocationCounter(tmp_path, 99)
    assert counter.totals == ColocationTotals(since_wall_ns=99)
    assert "is damaged: it cannot be read: Expected `" in counter.messages[0]
    assert (tmp_path / f"{FILE_NAME}.damaged-1").exists()


def test_a_write_error_is_a_failure_until_a_write_succeeds(tmp_path: Path) -> None:
    missing = tmp_path / "state"
    counter = ColocationCounter(missing, 7)
    counter.count(busy_cycle(1))
    assert counter.failure is not None
    assert "cannot be written" in counter.failure.reason
    missing.mkdir()
    counter.count(busy_cycle(2))
    assert counter.failure is not None, "the next attempt is a minute later"
    counter.count(busy_cycle(62))
    assert counter.failure is None


def test_without_a_state_directory_totals_are_in_memory(tmp_path: Path) -> None:
    counter = ColocationCounter(None, 7)
    finished = [counter.count(busy_cycle(seq)) for seq in (1, 2)][-1]
    counter.close()
    assert finished.totals == counter.totals
    assert finished.totals is not None
    assert finished.totals.duration_ns == S


KILLED = """
import sys
from pathlib import Path
import msgspec
from agent.journal.colocation_counter import ColocationCounter
from tests.builders.four_cpu_node import busy_cycle
counter, cycle = ColocationCounter(Path(sys.argv[1]), 7), busy_cycle(2)
for seq in range(10**9):
    at_ns = cycle.snapshot.taken_at_ns + seq * 61 * 10**9  # so that every cycle writes
    late = msgspec.structs.replace(cycle.snapshot, taken_at_ns=at_ns)
    before = msgspec.structs.replace(cycle.previous, taken_at_ns=at_ns - 10**9)
    counter.count(msgspec.structs.replace(cycle, snapshot=late, previous=before))
    print(seq, flush=True)
"""


def test_a_killed_agent_leaves_whole_cycles(tmp_path: Path) -> None:
    """SIGKILL at any moment, also between writing and renaming: the file is that of a whole number of cycles."""
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        latest = [int(child.stdout.readline()) for _ in range(20)][-1]
        child.send_signal(signal.SIGKILL)
    counter = ColocationCounter(tmp_path, 99)
    assert counter.messages == ()
    cycles, rest = divmod(counter.totals.duration_ns, S)
    assert rest == 0
    assert cycles >= latest + 1
    assert counter.totals.used_ns == cycles * 2250 * MS
