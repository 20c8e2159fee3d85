"""Writes of new knobs wait until their originals, which are saved together, are on disk; nothing else waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.boot_journal import NOT_ON_DISK_YET
from agent.qrm.actuator.journal_health import STALLED_S, JournalHealth, ReserveHealth
from agent.qrm.actuator.originals import FILE_NAME, RESERVE_NAME, OriginalsJournal
from agent.qrm.actuator.pending_originals import PendingOriginals
from agent.qrm.actuator.state_dir import open_originals
from agent.qrm.actuator.writer import KnobWriter
from api.decision import ActMode, Outcome, OutcomeStatus
from api.knobs import Knob
from tests.agent.qrm.actuator.trees import BOOT, Tree
from tests.builders.held_disk import HeldDisk

OLD, NEW, OTHER = "/old", "/new", "/other"
APPLIED, UNCHANGED, REFUSED = OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED, OutcomeStatus.REFUSED


class SlowNode:
    """Three cgroups, and an actuator whose disk answers on request. The quota of /old was written before."""

    def __init__(self, root: Path) -> None:
        self.tree, self.state, self.disk = Tree(root / "cgroup", "v2"), root / "state", HeldDisk()
        for path in (OLD, NEW, OTHER):
            self.tree.make(path)
        self.files, self.pending = KnobWriter(self.tree.hierarchy), PendingOriginals()
        self.originals: OriginalsJournal = open_originals(self.state, BOOT, self.disk)
        self.actuator = Actuator(self.files, self.originals, ActMode.ON, self.pending)
        self.apply((OLD, Knob.QUOTA, "20000"))
        self.disk.answer()
        assert self.statuses((OLD, Knob.QUOTA, "20000")) == [APPLIED]
        self.disk.done.clear()

    def apply(self, *requests: tuple[str, Knob, str]) -> tuple[Outcome, ...]:
        return self.actuator.apply([self.tree.decision(*request) for request in requests])

    def statuses(self, *requests: tuple[str, Knob, str]) -> list[OutcomeStatus]:
        return [outcome.status for outcome in self.apply(*requests)]

    def quota(self, path: str) -> str:
        return self.tree.file(path, "cpu.max").read_text().strip()

    def journalled(self) -> set[tuple[str, Knob]]:
        """Return what the next agent finds."""
        path = self.state / FILE_NAME
        return {(entry.cgroup, entry.knob) for entry in OriginalsJournal(path, BOOT).entries()}


@pytest.fixture
def node(tmp_path: Path) -> SlowNode:
    return SlowNode(tmp_path)


def test_a_knob_that_was_written_before_does_not_wait_for_the_original_of_another(node: SlowNode) -> None:
    shrunk, new = node.apply((OLD, Knob.QUOTA, "10000"), (NEW, Knob.QUOTA, "10000"))
    assert (shrunk.status, node.quota(OLD)) == (APPLIED, "10000 100000")
    assert (new.status, new.error, node.quota(NEW)) == (UNCHANGED, NOT_ON_DISK_YET, "max 100000")
    for quota in ("9000", "8000", "7000"):
        assert node.statuses((OLD, Knob.QUOTA, quota), (NEW, Knob.QUOTA, quota)) == [APPLIED, UNCHANGED]
    assert (node.quota(OLD), node.quota(NEW)) == ("7000 100000", "max 100000")
    assert node.journalled() == {(OLD, Knob.QUOTA)}
    node.disk.answer()
    assert node.journalled() == {(OLD, Knob.QUOTA), (NEW, Knob.QUOTA)}
    assert node.quota(NEW) == "max 100000", "the disk thread writes no knob"
    assert node.statuses((OLD, Knob.QUOTA, "7000"), (NEW, Knob.QUOTA, "7000")) == [UNCHANGED, APPLIED]
    assert node.quota(NEW) == "7000 100000"


def test_all_originals_that_wait_are_saved_by_one_write(node: SlowNode) -> None:
    for path in (NEW, OTHER):
        node.apply((path, Knob.QUOTA, "10000"))
        node.apply((path, Knob.QUOTA, "10000"), (path, Knob.WEIGHT, "2"))
    node.disk.answer()
    assert node.disk.done == [FILE_NAME]
    assert len(node.journalled()) == 5
    requests = [
        (path, knob, value) for path in (NEW, OTHER) for knob, value in ((Knob.QUOTA, "10000"), (Knob.WEIGHT, "2"))
    ]
    assert node.statuses(*requests) == [APPLIED] * 4
    assert node.disk.waiting == {}, "nothing is left to save"


def test_originals_staged_while_a_commit_runs_wait_for_the_next_one(node: SlowNode) -> None:
    node.apply((NEW, Knob.QUOTA, "10000"))
    (commit,) = node.disk.waiting.values()
    node.disk.waiting.clear()
    replaced = node.originals._write

    def staging(data: bytes | None) -> bool:
        node.originals._write = replaced  # type: ignore[method-assign]
        node.apply((OTHER, Knob.QUOTA, "10000"))
        return replaced(data)

    node.originals._write = staging  # type: ignore[method-assign]
    commit()
    assert node.journalled() == {(OLD, Knob.QUOTA), (NEW, Knob.QUOTA)}
    assert node.statuses((NEW, Knob.QUOTA, "10000"), (OTHER, Knob.QUOTA, "10000")) == [APPLIED, UNCHANGED]
    node.disk.answer()
    assert node.statuses((OTHER, Knob.QUOTA, "10000")) == [APPLIED]


def test_a_knob_waits_while_a_commit_is_removing_its_original(node: SlowNode) -> None:
    """A decision ends and is made again during a slow write: a crash after that write would lose the original."""
    node.actuator.release([], ())
    assert node.quota(OLD) == "max 100000"
    (commit,) = node.disk.waiting.values()
    node.disk.waiting.clear()
    replaced, statuses = node.originals._write, list[OutcomeStatus]()

    def deciding_again(data: bytes | None) -> bool:
        node.originals._write = replaced  # type: ignore[method-assign]
        statuses.extend(node.statuses((OLD, Knob.QUOTA, "10000")))
        return replaced(data)

    node.originals._write = deciding_again  # type: ignore[method-assign]
    commit()
    assert (statuses, node.journalled()) == ([UNCHANGED], set())
    assert node.quota(OLD) == "max 100000", "no original is on disk"
    node.disk.answer()
    assert node.statuses((OLD, Knob.QUOTA, "10000")) == [APPLIED]
    assert node.journalled() == {(OLD, Knob.QUOTA)}


def test_the_owner_may_change_a_knob_while_its_original_waits(node: SlowNode) -> None:
    node.apply((NEW, Knob.QUOTA, "10000"))
    node.tree.file(NEW, "cpu.max").write_text("50000 100000\n")
    node.disk.answer()
    assert node.statuses((NEW, Knob.QUOTA, "10000")) == [UNCHANGED], "the original on disk is no longer the owner's"
    node.disk.answer()
    assert node.statuses((NEW, Knob.QUOTA, "10000")) == [APPLIED]
    node.originals.restore(node.files)
    assert node.quota(NEW) == "50000 100000"


def test_a_knob_that_is_released_before_it_was_written_keeps_what_its_owner_wrote(node: SlowNode) -> None:
    node.apply((OLD, Knob.QUOTA, "20000"), (NEW, Knob.QUOTA, "10000"))
    node.tree.file(NEW, "cpu.max").write_text("50000 100000\n")
    assert node.actuator.release([node.tree.decision(OLD, Knob.QUOTA, "20000")], ()) == ()
    assert node.quota(NEW) == "50000 100000"
    node.disk.answer()
    assert node.journalled() == {(OLD, Knob.QUOTA)}


def test_the_value_that_the_runtime_gave_a_container_is_not_taken_for_its_original(node: SlowNode) -> None:
    node.pending.add(NEW, {Knob.QUOTA: "max 100000"}, 1.0, given={Knob.QUOTA: "10000 100000"})
    node.tree.file(NEW, "cpu.max").write_text("10000 100000\n")
    assert node.statuses((NEW, Knob.QUOTA, "5000")) == [UNCHANGED]
    assert node.statuses((NEW, Knob.QUOTA, "5000")) == [UNCHANGED]
    assert node.quota(NEW) == "10000 100000", "the limit of its creation holds without a journal"
    node.disk.answer()
    assert node.statuses((NEW, Knob.QUOTA, "5000")) == [APPLIED]
    node.originals.restore(node.files)
    assert node.quota(NEW) == "max 100000"


def test_a_value_that_the_owner_changed_is_saved_as_the_new_original_before_the_agent_writes_again(
    node: SlowNode,
) -> None:
    node.tree.file(OLD, "cpu.max").write_text("70000 100000\n")
    (outcome,) = node.apply((OLD, Knob.QUOTA, "20000"))
    assert "was changed by another program to 70000 100000, which becomes its new original" in outcome.error
    assert (outcome.status, node.quota(OLD)) == (UNCHANGED, "70000 100000")
    node.disk.answer()
    assert node.statuses((OLD, Knob.QUOTA, "20000")) == [APPLIED]
    node.originals.restore(node.files)
    assert node.quota(OLD) == "70000 100000"


def test_the_loop_is_woken_once_when_awaited_originals_are_on_disk(node: SlowNode) -> None:
    woken: list[str] = []
    node.actuator.on_journalled(lambda: woken.append("woken"))
    node.apply((NEW, Knob.QUOTA, "10000"))
    assert woken == []
    node.disk.answer()
    assert woken == ["woken"]
    node.apply((NEW, Knob.QUOTA, "10000"))
    node.originals.restore(node.files)
    node.disk.answer()
    assert woken == ["woken"], "no write waits for the removal of originals"


def test_a_disk_that_refuses_is_reported_and_noticed_again_when_it_accepts(node: SlowNode) -> None:
    health = JournalHealth(node.originals)
    (node.state / f"{FILE_NAME}.tmp").mkdir()
    node.apply((NEW, Knob.QUOTA, "10000"))
    assert health.problem() is None, "the disk has not answered yet"
    node.disk.answer()
    problem = health.problem()
    assert problem is not None
    assert "original values cannot be journalled in" in problem.reason
    (new,) = node.apply((NEW, Knob.QUOTA, "10000"))
    assert (new.status, node.quota(NEW)) == (REFUSED, "max 100000")
    assert "Is a directory: free space in" in new.error
    assert node.statuses((OLD, Knob.QUOTA, "5000")) == [APPLIED], "its original is on disk"
    # The pod ends, so that nothing new has to be journalled.
    node.actuator.release([node.tree.decision(OLD, Knob.QUOTA, "5000")], ())
    node.disk.answer()
    (node.state / f"{FILE_NAME}.tmp").rmdir()
    node.originals._retry_due_s = 0.0
    node.apply((OLD, Knob.QUOTA, "5000"))
    node.disk.answer()
    assert health.problem() is None


def test_a_commit_that_never_ends_counts_as_a_failure_after_a_while(node: SlowNode) -> None:
    node.apply((NEW, Knob.QUOTA, "10000"))
    assert node.originals.stalled_s() < STALLED_S
    node.originals._staged_since_s = -STALLED_S * 1000
    problem = JournalHealth(node.originals).problem()
    assert problem is not None
    assert "has not been written for" in problem.reason
    node.disk.answer()
    assert JournalHealth(node.originals).problem() is None


def unreplaceable(state: Path) -> None:
    """Make the file impossible to replace, as a full disk does."""
    (state / f"{FILE_NAME}.tmp").mkdir()


def test_on_a_full_disk_originals_go_to_the_reserve_and_the_next_agent_finds_them(node: SlowNode) -> None:
    node.originals.allocate_reserve(node.disk)
    node.disk.answer()
    assert ReserveHealth(node.originals).problem() is None
    unreplaceable(node.state)
    node.apply((NEW, Knob.QUOTA, "10000"))
    node.disk.answer()
    assert JournalHealth(node.originals).problem() is None
    problem = ReserveHealth(node.originals).problem()
    assert problem is not None
    assert "they are saved in originals.reserve" in problem.reason
    assert node.statuses((NEW, Knob.QUOTA, "10000")) == [APPLIED]
    assert node.journalled() == {(OLD, Knob.QUOTA), (NEW, Knob.QUOTA)}
    killed = OriginalsJournal(node.state / FILE_NAME, BOOT)
    killed.restore(node.files)
    assert node.quota(NEW) == "max 100000"


def test_with_space_again_the_file_counts_and_the_reserve_is_empty(node: SlowNode) -> None:
    node.originals.allocate_reserve(node.disk)
    unreplaceable(node.state)
    node.apply((NEW, Knob.QUOTA, "10000"))
    node.disk.answer()
    node.apply((NEW, Knob.QUOTA, "10000"))
    (node.state / f"{FILE_NAME}.tmp").rmdir()
    node.originals._retry_due_s = 0.0
    node.apply((NEW, Knob.QUOTA, "10000"))
    node.disk.answer()
    assert ReserveHealth(node.originals).problem() is None
    assert node.originals._reserve is not None
    assert node.originals._reserve.read() is None
    assert node.journalled() == {(OLD, Knob.QUOTA), (NEW, Knob.QUOTA)}
    node.originals.restore(node.files)
    node.disk.answer()
    assert node.journalled() == set()
    assert not (node.state / FILE_NAME).exists()


def test_a_reserve_that_is_older_than_the_file_is_ignored(node: SlowNode) -> None:
    node.originals.allocate_reserve(node.disk)
    unreplaceable(node.state)
    node.apply((NEW, Knob.QUOTA, "10000"))
    node.disk.answer()
    saved = (node.state / RESERVE_NAME).read_bytes()
    (node.state / f"{FILE_NAME}.tmp").rmdir()
    node.apply((OTHER, Knob.QUOTA, "10000"))
    node.disk.answer()
    node.originals.restore(node.files, keep={(OTHER, Knob.QUOTA)})
    node.disk.answer()
    (node.state / RESERVE_NAME).write_bytes(saved)
    assert node.journalled() == {(OTHER, Knob.QUOTA)}
