"""The journal records each outcome once, survives torn lines and full disks, and stays bounded in memory and on disk."""

from __future__ import annotations

import logging
import os
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from agent.journal.decisions import DecisionJournal
from api.decision import Cycle, JournalEntry, Outcome, OutcomeStatus
from api.knobs import Knob
from tests.builders.four_cpu_node import bare_cycle, busy_cycle, outcome

APPLIED = outcome(before="3", after="2-3")


def turn(seq: int, *outcomes: Outcome) -> Cycle:
    return busy_cycle(seq, outcomes=outcomes)


def bare_turn(seq: int, *outcomes: Outcome) -> Cycle:
    return msgspec.structs.replace(bare_cycle(seq), outcomes=outcomes)


def numbered(journal: DecisionJournal, count: int, start: int = 0) -> None:
    """Publish this number of cycles, one entry each, with distinct values."""
    for i in range(start, start + count):
        journal.publish(turn(i + 2, outcome(value=str(i))))


def values(journal: DecisionJournal, after: int = 0, limit: int = 200) -> list[str]:
    return [entry.outcome.decision.value for entry in journal.entries(after, limit)]


def lines(path: Path) -> list[JournalEntry]:
    return [msgspec.json.decode(line, type=JournalEntry) for line in path.read_bytes().splitlines()]


def test_an_entry_has_the_number_of_its_cycle() -> None:
    journal = DecisionJournal(None)
    journal.publish(turn(7, APPLIED))
    assert list(journal.entries()) == [
        JournalEntry(
            seq=1,
            wall_time_ns=1_700_000_007_000_000_000,
            cycle_seq=7,
            trigger="tick",
            policy="latency",
            outcome=APPLIED,
        )
    ]


def test_values_that_the_runtime_applied_between_cycles_are_entries() -> None:
    """The cycle then finds the value unchanged, which adds no entry."""
    journal, result = DecisionJournal(None), outcome(before="0-3", value="1", after="1")
    same = msgspec.structs.replace(result, status=OutcomeStatus.UNCHANGED, before="1")
    journal.publish(msgspec.structs.replace(turn(7, same), runtime_outcomes=(result,)))
    journal.publish(turn(8, same))
    assert [(entry.trigger, entry.cycle_seq, entry.outcome) for entry in journal.entries()] == [("nri", 7, result)]


def test_a_repair_that_repeats_is_one_entry_until_the_value_is_decided_again() -> None:
    """The kubelet clears cpu.idle of its classes every minute, 1,440 times a day."""
    journal = DecisionJournal(None)
    first, repaired, same = (
        outcome(Knob.IDLE, "1", before="0", after="1"),
        outcome(Knob.IDLE, "1", before="0", after="1", repaired=True),
        outcome(Knob.IDLE, "1", OutcomeStatus.UNCHANGED, before="1", after="1"),
    )
    cycles = [first, *([same, repaired] * 1440), first, repaired]
    for seq, each in enumerate(cycles, 2):
        journal.publish(turn(seq, each))
    recorded = [(entry.cycle_seq, entry.outcome.repaired) for entry in journal.entries()]
    assert recorded == [(2, False), (4, True), (2883, False), (2884, True)]


def test_the_newest_entries_after_a_seq_oldest_first() -> None:
    journal = DecisionJournal(None)
    numbered(journal, 10)
    assert values(journal, limit=3) == ["7", "8", "9"]
    assert values(journal, after=4, limit=3) == values(journal, after=7) == ["7", "8", "9"]
    assert values(journal, after=8) == ["8", "9"]
    assert values(journal, after=10) == values(journal, limit=0) == []


def test_2000_entries_take_less_than_a_mebibyte_and_a_half_whether_added_or_loaded(tmp_path: Path) -> None:
    """Entries are kept as lines of 560 bytes each."""
    path = tmp_path / "decisions.jsonl"
    verdict = msgspec.structs.replace(APPLIED.decision.reason, text="because " * 30)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        journal = DecisionJournal(path)
        for i in range(2000):
            decision = msgspec.structs.replace(
                APPLIED.decision, value=str(i), reason=msgspec.structs.replace(verdict, inputs={"wait_us": i + 0.5})
            )
            journal.publish(bare_turn(i + 2, msgspec.structs.replace(APPLIED, decision=decision)))
        result = tracemalloc.get_traced_memory()[0] - before
        journal.close()
        del journal
        before = tracemalloc.get_traced_memory()[0]
        loaded = DecisionJournal(path)
        loaded_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(loaded.entries(limit=2000)) == 2000
    assert max(result, loaded_bytes) < 3 << 19
    assert path.stat().st_size > 1 << 20
    loaded.close()


def test_a_restored_value_belongs_to_the_pod_of_the_last_decision(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    restored = msgspec.structs.replace(APPLIED, decision=msgspec.structs.replace(APPLIED.decision, pod=""))
    first = DecisionJournal(path)
    first.publish(turn(7, APPLIED))
    first.publish(turn(8, restored))
    first.close()
    second = DecisionJournal(path)
    second.publish(turn(9, restored))
    assert [entry.outcome.decision.pod for entry in second.entries()] == [APPLIED.decision.pod] * 3
    second.close()


def test_a_cycle_without_advice_or_outcomes_adds_nothing() -> None:
    journal = DecisionJournal(None)
    journal.publish(bare_cycle())
    assert list(journal.entries()) == []


@pytest.mark.parametrize(
    ("status", "times"),
    [
        (OutcomeStatus.APPLIED, 3),
        (OutcomeStatus.UNCHANGED, 0),
        (OutcomeStatus.DRY_RUN, 1),
        (OutcomeStatus.REFUSED, 1),
        (OutcomeStatus.VANISHED, 1),
        (OutcomeStatus.MISMATCH, 1),
    ],
)
def test_how_often_three_equal_outcomes_are_recorded(status: OutcomeStatus, times: int) -> None:
    journal = DecisionJournal(None)
    for seq in (2, 3, 4):
        journal.publish(turn(seq, outcome(status=status)))
    assert len(journal.entries()) == times


def test_a_repeated_failure_is_recorded_again_after_another_outcome() -> None:
    refused, other_knob = outcome(status=OutcomeStatus.REFUSED), outcome(Knob.IDLE, "1", OutcomeStatus.REFUSED)
    other_value, unchanged = outcome(value="3", status=OutcomeStatus.REFUSED), outcome(status=OutcomeStatus.UNCHANGED)
    journal = DecisionJournal(None)
    for seq, came in enumerate((refused, refused, other_knob, refused, other_value, refused, unchanged, refused)):
        journal.publish(turn(seq + 2, came))
    assert [entry.cycle_seq for entry in journal.entries()] == [2, 4, 6, 7, 9]


def test_memory_and_disk_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    journal = DecisionJournal(path, keep=5)
    numbered(journal, 23)
    assert values(journal) == ["18", "19", "20", "21", "22"]
    assert [entry.seq for entry in lines(path)] == [21, 22, 23]
    assert [entry.seq for entry in lines(tmp_path / "decisions.jsonl.1")] == [16, 17, 18, 19, 20]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["decisions.jsonl", "decisions.jsonl.1"]


def test_numbers_go_on_after_a_restart_and_files_stay_bounded(tmp_path: Path) -> None:
    path = tmp_path / "state" / "decisions.jsonl"
    for start in range(0, 12, 4):
        journal = DecisionJournal(path, keep=4)
        numbered(journal, 4, start)
        journal.close()
    restarted = DecisionJournal(path, keep=4)
    assert [entry.seq for entry in restarted.entries()] == [9, 10, 11, 12]
    assert len(lines(path)) + len(lines(path.with_name("decisions.jsonl.1"))) == 8
    numbered(restarted, 1, 12)
    assert restarted.entries()[-1].seq == 13


def test_a_crash_at_any_byte_loses_only_the_line_it_tore(tmp_path: Path) -> None:
    complete_file = tmp_path / "whole"
    numbered(DecisionJournal(complete_file), 3)
    content = complete_file.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    torn = tmp_path / "torn"
    for cut in range(0, len(content) + 1, 7):
        torn.write_bytes(content[:cut])
        complete = sum(end <= cut for end in ends)
        journal = DecisionJournal(torn)
        # A line that lacks only its newline is complete JSON: shown now, but not kept on disk.
        assert len(journal.entries()) - complete in (0, int(cut + 1 in ends))
        journal.publish(turn(9, outcome(value="new")))
        journal.close()
        assert [entry.outcome.decision.value for entry in lines(torn)] == [*["0", "1", "2"][:complete], "new"]


def test_damaged_lines_are_left_out_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "decisions.jsonl"
    numbered(DecisionJournal(path), 2)
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, b"\xff\xfe\x00", b'{"seq": "seven"}', b"[]", b'{"a":"\xff"}', second, b""]))
    with caplog.at_level(logging.WARNING):
        assert [entry.seq for entry in DecisionJournal(path).entries()] == [1, 2]
    assert "4 damaged lines" in caplog.text


@contextmanager
def no_room_beyond(size: int) -> Iterator[None]:
    """Limit the size of every file of this process: the kernel refuses the rest, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_nothing_but_the_disk_copy_until_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "decisions.jsonl"
    journal = DecisionJournal(path)
    numbered(journal, 2)
    with caplog.at_level(logging.ERROR), no_room_beyond(path.stat().st_size + 10):
        numbered(journal, 3, 2)
    assert values(journal) == ["0", "1", "2", "3", "4"]
    assert [entry.seq for entry in lines(path)] == [1, 2], "half a line was left behind"
    assert (journal.problem, journal.writable) == (f"{path}: File too large", False)
    assert len(caplog.records) == 1

    numbered(journal, 1, 5)
    assert [entry.seq for entry in lines(path)] == [1, 2, 3, 4, 5, 6]
    assert (journal.problem, journal.writable) == ("", True)


def test_a_directory_in_the_way_is_reported_and_survived(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.mkdir()
    journal = DecisionJournal(path)
    assert journal.problem == f"{path}: Is a directory"
    numbered(journal, 2)
    assert values(journal) == ["0", "1"]
    journal.close()


def test_a_cgroup_whose_name_is_not_utf8_can_be_recorded(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    broken = msgspec.structs.replace(APPLIED.decision, cgroup=os.fsdecode(b"/caf\xe9"))
    DecisionJournal(path).publish(turn(2, msgspec.structs.replace(APPLIED, decision=broken)))
    assert lines(path)[0].outcome.decision.cgroup == "/caf\\xe9"


def test_invalid_text_and_a_pipe_instead_of_the_file_are_survived(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b'{"seq":1,"wall_time_ns":1,"round_seq":1,"trigger":"\xff\xfe","policy":""}\n')
    journal = DecisionJournal(path)
    assert journal.entries() == []
    journal.close()
    path.unlink()
    os.mkfifo(path)
    journal = DecisionJournal(path)
    assert "not a regular file" in journal.problem
    journal.close()
