"""The journal and the log of evictions: every real one, dry ones once in ten minutes, across restarts."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from agent.journal.decisions import DecisionJournal
from agent.journal.evictions import EvictionJournal
from agent.journal.log import CycleLog
from api.decision import Cycle, JournalEntry
from api.eviction import (
    ActiveCondition,
    EvictionCondition,
    EvictionEntry,
    EvictionEvent,
    EvictionEventReason,
    EvictionResult,
    EvictionThreshold,
    EvictionVictim,
    ThresholdMet,
)
from api.knobs import Reason
from tests.builders.four_cpu_node import S, busy_cycle

WHY = Reason(rule="soft_threshold_met", text="it holds 200.0 MiB, above 105.0 MiB", threshold=105.0, inputs={"pods": 1})
CREATED = EvictionEvent(
    pod="default/batch", reason=EvictionEventReason.CREATED, message="Successfully create eviction", at_ns=1
)
LATE = EvictionEvent(pod="default/batch", reason=EvictionEventReason.EXCEEDED, message="processes are left", at_ns=2)


def victim(pod: str = "batch", *, dry_run: bool = False, notify: bool = False) -> EvictionVictim:
    return EvictionVictim(
        pod=f"default/{pod}", uid=f"uid-{pod}", plugin="p", scope="s", reason=WHY, forced=False, grace_s=1.0,
        dry_run=dry_run, notify=notify,
    )  # fmt: skip


def at(
    seq: int, *victims: EvictionVictim, kills: tuple[EvictionEvent, ...] = (), result: EvictionResult | None = None
) -> Cycle:
    evictions = result or EvictionResult(victims=victims)
    return msgspec.structs.replace(busy_cycle(seq), evictions=evictions, kills=kills)


def pods(entries: list[EvictionEntry]) -> list[tuple[int, str, str]]:
    return [(e.seq, e.pod, e.kill.reason.value if e.kill else "victim") for e in entries]


def test_victims_and_steps_are_entries_whose_numbers_continue_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "evictions.jsonl"
    journal = EvictionJournal(path)
    journal.publish(at(5, victim()))
    journal.publish(at(6, victim("web"), kills=(CREATED,)))
    journal.close()
    again = EvictionJournal(path)
    again.publish(at(1, kills=(LATE,)))
    assert pods(list(again.entries())) == [
        (1, "default/batch", "victim"),
        (2, "default/batch", "EvictCreated"),
        (3, "default/web", "victim"),
        (4, "default/batch", "EvictExceededGracePeriod"),
    ]
    first = again.entries()[0]
    assert (first.cycle_seq, first.victim) == (5, victim())
    assert [entry.seq for entry in again.entries(after=2, limit=1)] == [4]
    assert [entry.seq for entry in again.entries(matches=lambda entry: entry.pod == "default/web")] == [3]
    again.close()


def test_dry_run_victims_and_notices_repeat_after_ten_minutes_and_evictions_always() -> None:
    journal = EvictionJournal(None)
    for seq in range(1, 702, 50):
        journal.publish(at(seq, victim(dry_run=True), victim("told", notify=True)))
    assert [(entry.cycle_seq, entry.pod) for entry in journal.entries()] == [
        (1, "default/batch"), (1, "default/told"), (601, "default/batch"), (601, "default/told"),
    ]  # fmt: skip
    journal = EvictionJournal(None)
    for seq in (1, 2):
        journal.publish(at(seq, victim()))
    journal.publish(at(3, victim(dry_run=True)))
    assert [entry.cycle_seq for entry in journal.entries()] == [1, 2, 3]


def test_decisions_and_evictions_are_in_separate_files(tmp_path: Path) -> None:
    decisions, evictions = DecisionJournal(tmp_path / "decisions.jsonl"), EvictionJournal(tmp_path / "evictions.jsonl")
    for journal in (decisions, evictions):
        journal.publish(at(5, victim(), kills=(CREATED,)))
        journal.close()
    lines = (tmp_path / "decisions.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=JournalEntry).cycle_seq for line in lines] == [5, 5]
    assert len((tmp_path / "evictions.jsonl").read_bytes().splitlines()) == 2


def test_a_disk_that_refuses_loses_no_entry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "evictions.jsonl"
    path.mkdir()
    journal = EvictionJournal(path)
    journal.publish(at(1, victim()))
    assert (journal.writable, len(journal.entries())) == (False, 1)
    assert "evictions" in caplog.text
    path.rmdir()
    journal.publish(at(2, victim("web")))
    journal.close()
    assert (journal.writable, len(path.read_bytes().splitlines())) == (True, 2)


def threshold(met: ThresholdMet, subject: str = "") -> EvictionThreshold:
    return EvictionThreshold(plugin="p", met=met, scope="s", subject=subject, reason=WHY)


def test_the_log_has_thresholds_conditions_and_victims(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dioptase")
    log = CycleLog()
    shown = ActiveCondition(condition=EvictionCondition(name="MemoryPressure"), plugin="p", since_ns=S, last_met_ns=S)
    log.publish(
        at(
            1,
            result=EvictionResult(
                thresholds=(threshold(ThresholdMet.NOT_MET), threshold(ThresholdMet.NOT_MET, "numa1"))
            ),
        )
    )
    caplog.clear()
    soft = EvictionResult(
        thresholds=(threshold(ThresholdMet.SOFT), threshold(ThresholdMet.NOT_MET, "numa1")), conditions=(shown,)
    )
    log.publish(at(2, result=msgspec.structs.replace(soft, victims=(victim(), victim("dry", dry_run=True)))))
    log.publish(at(3, result=soft, kills=(CREATED, LATE)))
    log.publish(at(4, result=EvictionResult(thresholds=(threshold(ThresholdMet.HARD),))))
    log.publish(at(5, result=EvictionResult(thresholds=(threshold(ThresholdMet.NOT_MET),))))
    assert [(record.levelname, record.getMessage()) for record in caplog.records if record.module == "evictions"] == [
        ("WARNING", f"p soft: {WHY.text}"),
        ("WARNING", "condition MemoryPressure is active"),
        ("WARNING", f"default/batch is evicted: {WHY.text}"),
        ("WARNING", f"default/dry would be evicted: {WHY.text}"),
        ("INFO", "default/batch: EvictCreated: Successfully create eviction"),
        ("WARNING", "default/batch: EvictExceededGracePeriod: processes are left"),
        ("WARNING", f"p hard: {WHY.text}"),
        ("INFO", "condition MemoryPressure is no longer active"),
        ("INFO", "p s: no longer met"),
    ]
