"""Originals of cgroups that were made with the agent's values: journalled before a round reads them, and put back exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.pending_originals import (
    MAX_PENDING_S,
    NOT_WRITTEN_YET,
    UNLISTED_GRACE_S,
    WRITE_GRACE_S,
    PendingOriginals,
)
from agent.qrm.actuator.writer import KnobWriter
from api.decision import ActMode, Outcome, OutcomeStatus
from api.knobs import Knob
from tests.agent.qrm.actuator.trees import Tree

BATCH = "/batch"
NEXT = {Knob.QUOTA: "10000 100000", Knob.WEIGHT: "2"}


class Stage:
    def __init__(self, folder: Path) -> None:
        self.tree = Tree(folder / "cgroup", "v1")
        self.files = KnobWriter(self.tree.hierarchy)
        self.originals = OriginalsJournal(folder / "originals.json", "boot")
        self.now_s = 100.0
        self.foretold = PendingOriginals(lambda: self.now_s)
        self.actuator = Actuator(self.files, self.originals, ActMode.ON, self.foretold)

    def made(self, **texts: str) -> None:
        """By a runtime that was told what to give it."""
        self.tree.make(BATCH)
        for name, text in texts.items():
            self.tree.file(BATCH, name.replace("_", ".", 1)).write_text(f"{text}\n")

    def held(self, name: str) -> str:
        return self.tree.file(BATCH, name).read_text().strip()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_what_a_round_finds_as_decided_is_put_back_to_what_the_owner_wanted(stage: Stage) -> None:
    stage.foretold.add(BATCH, {Knob.CPUSET: "0-3", Knob.QUOTA: "max 100000"}, 1.0)
    stage.made(cpuset_cpus="3")
    stage.tree.file(BATCH, "cpu.cfs_quota_us").write_text("20000\n")
    decisions = [
        stage.tree.decision(BATCH, Knob.CPUSET, "3"),
        stage.tree.decision(BATCH, Knob.QUOTA, "20000 100000"),
    ]
    assert [one.status for one in stage.actuator.apply(decisions)] == [OutcomeStatus.UNCHANGED, OutcomeStatus.UNCHANGED]
    assert {entry.knob for entry in stage.originals.entries()} == {Knob.CPUSET, Knob.QUOTA}
    stage.originals.restore(stage.files)
    assert (stage.held("cpuset.cpus"), stage.held("cpu.cfs_quota_us")) == ("0-3", "-1")


def test_a_round_that_decides_otherwise_takes_nothing_of_ours_for_an_original(stage: Stage) -> None:
    stage.foretold.add(BATCH, {Knob.WEIGHT: "204"}, 1.0)
    stage.made(cpu_shares="10")
    (outcome,) = stage.actuator.apply([stage.tree.decision(BATCH, Knob.WEIGHT, "300")])
    assert (outcome.status, outcome.error) == (OutcomeStatus.APPLIED, ""), "and nobody else is said to have written it"
    stage.originals.restore(stage.files)
    assert stage.held("cpu.shares") == "204"


def test_who_is_not_listed_yet_keeps_what_it_was_made_with_until_somebody_decides(stage: Stage) -> None:
    stage.foretold.add(BATCH, {Knob.CPUSET: "0-3"}, 1.0)
    stage.made(cpuset_cpus="3")
    stage.actuator.apply([])
    assert stage.foretold.unlisted((), 2.0) == {BATCH}
    assert stage.actuator.release([], {BATCH}) == ()
    assert stage.held("cpuset.cpus") == "3"
    assert stage.foretold.unlisted({BATCH}, 3.0) == frozenset(), "a round has decided"
    assert stage.foretold.unlisted((), 4.0) == frozenset()
    (outcome,) = stage.actuator.release([], ())
    assert (outcome.status, stage.held("cpuset.cpus")) == (OutcomeStatus.APPLIED, "0-3")


def test_who_never_comes_is_forgotten(stage: Stage) -> None:
    stage.foretold.add(BATCH, {Knob.CPUSET: "0-3"}, 1.0)
    assert stage.foretold.unlisted((), 1.0 + UNLISTED_GRACE_S) == frozenset()
    stage.foretold.add("/other", {Knob.CPUSET: "0-3"}, 1.0 + MAX_PENDING_S)
    stage.made(cpuset_cpus="3")
    assert stage.foretold.adopt(stage.files, stage.originals) == 0


def test_an_original_that_is_known_stays_unless_it_is_told_anew(stage: Stage) -> None:
    stage.made(cpu_shares="512")
    stage.actuator.apply([stage.tree.decision(BATCH, Knob.WEIGHT, "300")])
    stage.foretold.add(BATCH, {Knob.WEIGHT: "204"}, 1.0)
    stage.foretold.adopt(stage.files, stage.originals)
    assert [dict(entry.raw.texts) for entry in stage.originals.entries()] == [{"cpu.shares": "512\n"}]
    stage.foretold.add(BATCH, {Knob.WEIGHT: "205"}, 2.0, existing=True)
    stage.foretold.adopt(stage.files, stage.originals)
    assert [dict(entry.raw.texts) for entry in stage.originals.entries()] == [{"cpu.shares": "205\n"}]


@pytest.mark.parametrize(("held", "status"), [("3", OutcomeStatus.APPLIED), ("2", OutcomeStatus.MISMATCH)])
def test_what_came_of_it_is_told_once_and_with_what_the_kernel_shows(
    stage: Stage, held: str, status: OutcomeStatus
) -> None:
    decision = stage.tree.decision(BATCH, Knob.CPUSET, "3", cgroup_id=0)
    told = Outcome(decision=decision, status=OutcomeStatus.APPLIED, before="0-3", after="3", clamped_from="3-4")
    stage.foretold.add(BATCH, {Knob.CPUSET: "0-3"}, 1.0, outcomes={Knob.CPUSET: told})
    stage.made(cpuset_cpus=held)
    stage.actuator.apply([])
    stage.now_s += WRITE_GRACE_S
    again = stage.actuator.apply([stage.tree.decision(BATCH, Knob.CPUSET, held)])
    assert [one.status for one in again] == [OutcomeStatus.UNCHANGED]
    (outcome,) = stage.foretold.outcomes()
    assert (outcome.status, outcome.before, outcome.after, outcome.clamped_from) == (status, "0-3", held, "3-4")
    assert outcome.decision.cgroup_id == again[0].decision.cgroup_id
    stage.foretold.add(BATCH, {Knob.CPUSET: "0-3"}, 2.0, outcomes={Knob.CPUSET: told})
    stage.actuator.apply([])
    assert stage.foretold.outcomes() == (), "that is known already"


@pytest.mark.parametrize("existing", [False, True])
def test_what_a_runtime_has_not_written_yet_is_nobodys(stage: Stage, existing: bool) -> None:
    """It makes the cgroup first, with the kernel's values in it: not the owner's, nor is what follows somebody else's."""
    given = {Knob.QUOTA: ("max 100000", "20000 100000"), Knob.WEIGHT: ("20", "1")}
    decisions = [stage.tree.decision(BATCH, knob, after, cgroup_id=0) for knob, (_, after) in given.items()]
    outcomes = {
        one.knob: Outcome(decision=one, status=OutcomeStatus.APPLIED, before=given[one.knob][0], after=one.value)
        for one in decisions
    }
    stage.made()
    if existing:
        stage.actuator.apply([stage.tree.decision(BATCH, Knob.WEIGHT, "1")])
    stage.foretold.add(BATCH, {Knob.QUOTA: "max 100000", Knob.WEIGHT: "204"}, 1.0, existing=existing, outcomes=outcomes)
    before = stage.held("cpu.shares"), stage.held("cpu.cfs_quota_us")
    for _ in range(2):
        found = stage.actuator.apply([stage.tree.decision(BATCH, Knob.QUOTA, "10000 100000")])
        assert [(one.status, one.error) for one in found] == [(OutcomeStatus.UNCHANGED, NOT_WRITTEN_YET)]
        assert (stage.held("cpu.shares"), stage.held("cpu.cfs_quota_us")) == before
        stage.now_s += WRITE_GRACE_S / 4
    stage.tree.file(BATCH, "cpu.cfs_quota_us").write_text("20000\n")
    stage.tree.file(BATCH, "cpu.shares").write_text("10\n")
    found = stage.actuator.apply([stage.tree.decision(BATCH, knob, value) for knob, value in NEXT.items()])
    assert [(one.status, one.error, one.after) for one in found] == [
        (OutcomeStatus.APPLIED, "", "10000 100000"), (OutcomeStatus.APPLIED, "", "2"),
    ]  # fmt: skip
    assert [one.status for one in stage.foretold.outcomes()] == [OutcomeStatus.APPLIED, OutcomeStatus.APPLIED]
    stage.originals.restore(stage.files)
    assert (stage.held("cpu.cfs_quota_us"), stage.held("cpu.shares")) == ("-1", "204")


def test_a_runtime_that_never_writes_is_not_waited_for(stage: Stage) -> None:
    decision = stage.tree.decision(BATCH, Knob.WEIGHT, "1", cgroup_id=0)
    told = Outcome(decision=decision, status=OutcomeStatus.APPLIED, before="20", after="1")
    stage.foretold.add(BATCH, {Knob.WEIGHT: "204"}, 1.0, outcomes={Knob.WEIGHT: told})
    stage.made(cpu_shares="1024")
    again = [stage.tree.decision(BATCH, Knob.WEIGHT, "2")]
    assert [one.error for one in stage.actuator.apply(again)] == [NOT_WRITTEN_YET]
    stage.now_s += WRITE_GRACE_S
    assert [(one.status, one.after) for one in stage.actuator.apply(again)] == [(OutcomeStatus.APPLIED, "2")]
    assert [one.status for one in stage.foretold.outcomes()] == [OutcomeStatus.MISMATCH]


def test_a_journal_that_cannot_be_written_is_tried_again(stage: Stage, tmp_path: Path) -> None:
    stage.foretold.add(BATCH, {Knob.CPUSET: "0-3"}, 1.0)
    stage.made(cpuset_cpus="3")
    (tmp_path / "originals.json").mkdir()
    (outcome,) = stage.actuator.apply([stage.tree.decision(BATCH, Knob.CPUSET, "2")])
    assert (outcome.status, stage.held("cpuset.cpus")) == (OutcomeStatus.REFUSED, "3")
    (tmp_path / "originals.json").rmdir()
    stage.actuator.apply([stage.tree.decision(BATCH, Knob.CPUSET, "2")])
    stage.originals.restore(stage.files)
    assert stage.held("cpuset.cpus") == "0-3"


def test_numa_nodes_are_put_back_without_what_the_owner_never_said(stage: Stage) -> None:
    stage.foretold.add(BATCH, {Knob.MEMS: "0-1"}, 1.0)
    stage.made(cpuset_mems="1")
    stage.foretold.adopt(stage.files, stage.originals)
    stage.originals.restore(stage.files)
    assert (stage.held("cpuset.mems"), stage.held("cpuset.memory_migrate")) == ("0-1", "0")
