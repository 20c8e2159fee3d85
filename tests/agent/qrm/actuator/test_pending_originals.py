"""Originals of cgroups that the runtime creates with the agent's values: journalled before a cycle, restored exactly."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agent.journal.decisions import DecisionJournal
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.originals import OriginalsJournal, restore_all
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
from tests.agent.qrm.actuator.trees import UNLIMITED, Tree
from tests.builders.four_cpu_node import busy_cycle

BATCH = "/batch"
NEXT = {Knob.QUOTA: "10000 100000", Knob.WEIGHT: "2"}


class Stage:
    def __init__(self, folder: Path) -> None:
        self.tree = Tree(folder / "cgroup", "v1")
        self.files = KnobWriter(self.tree.hierarchy)
        self.originals = OriginalsJournal(folder / "originals.json", "boot")
        self.now_s = 100.0
        self.pending = PendingOriginals(lambda: self.now_s)
        self.actuator = Actuator(self.files, self.originals, ActMode.ON, self.pending)

    def create(self, **texts: str) -> None:
        """Create the cgroup as a runtime does that was given these values; `cpu_shares` is the file cpu.shares."""
        self.tree.make(BATCH, {name.replace("_", ".", 1): text for name, text in texts.items()})

    def held(self, name: str) -> str:
        return self.tree.file(BATCH, name).read_text().strip()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_value_set_at_creation_is_restored_to_the_owner_s(stage: Stage) -> None:
    stage.pending.add(BATCH, {Knob.CPUSET: "0-3", Knob.QUOTA: "max 100000"}, 1.0)
    stage.create(cpuset_cpus="3", cpu_cfs_quota_us="20000")
    decisions = [stage.tree.decision(BATCH, Knob.CPUSET, "3"), stage.tree.decision(BATCH, Knob.QUOTA, "20000 100000")]
    assert {each.status for each in stage.actuator.apply(decisions)} == {OutcomeStatus.UNCHANGED}
    assert {entry.knob for entry in stage.originals.entries()} == {Knob.CPUSET, Knob.QUOTA}
    stage.originals.restore(stage.files)
    assert (stage.held("cpuset.cpus"), stage.held("cpu.cfs_quota_us")) == ("0-3", "-1")


def test_the_agent_s_value_is_never_taken_as_an_original(stage: Stage) -> None:
    stage.pending.add(BATCH, {Knob.WEIGHT: "204"}, 1.0)
    stage.create(cpu_shares="10")
    (outcome,) = stage.actuator.apply([stage.tree.decision(BATCH, Knob.WEIGHT, "300")])
    assert (outcome.status, outcome.error) == (OutcomeStatus.APPLIED, ""), "and no external modification is reported"
    stage.originals.restore(stage.files)
    assert stage.held("cpu.shares") == "204"


def test_an_unlisted_cgroup_keeps_its_values_until_a_decision(stage: Stage) -> None:
    stage.pending.add(BATCH, {Knob.CPUSET: "0-3"}, 1.0)
    stage.create(cpuset_cpus="3")
    stage.actuator.apply([])
    assert stage.pending.unlisted((), 2.0) == {BATCH}
    assert stage.actuator.release([], {BATCH}) == ()
    assert stage.held("cpuset.cpus") == "3"
    assert stage.pending.unlisted({BATCH}, 3.0) == frozenset(), "a cycle has decided"
    assert stage.pending.unlisted((), 4.0) == frozenset()
    (outcome,) = stage.actuator.release([], ())
    assert (outcome.status, stage.held("cpuset.cpus")) == (OutcomeStatus.APPLIED, "0-3")


def test_a_cgroup_that_never_appears_is_dropped(stage: Stage) -> None:
    stage.pending.add(BATCH, {Knob.CPUSET: "0-3"}, 1.0)
    assert stage.pending.unlisted((), 1.0 + UNLISTED_GRACE_S) == frozenset()
    stage.pending.add("/other", {Knob.CPUSET: "0-3"}, 1.0 + MAX_PENDING_S)
    stage.create(cpuset_cpus="3")
    assert stage.pending.adopt(stage.files, stage.originals) == 0


def test_a_journalled_original_stays_unless_the_owner_changes_it(stage: Stage) -> None:
    stage.create(cpu_shares="512")
    stage.actuator.apply([stage.tree.decision(BATCH, Knob.WEIGHT, "300")])
    stage.pending.add(BATCH, {Knob.WEIGHT: "204"}, 1.0)
    stage.pending.adopt(stage.files, stage.originals)
    assert [dict(entry.raw.texts) for entry in stage.originals.entries()] == [{"cpu.shares": "512\n"}]
    stage.pending.add(BATCH, {Knob.WEIGHT: "205"}, 2.0, existing=True)
    stage.pending.adopt(stage.files, stage.originals)
    assert [dict(entry.raw.texts) for entry in stage.originals.entries()] == [{"cpu.shares": "205\n"}]


@pytest.mark.parametrize(("held", "status"), [("3", OutcomeStatus.APPLIED), ("2", OutcomeStatus.MISMATCH)])
def test_an_adopted_outcome_is_reported_once_with_the_kernel_s_value(
    stage: Stage, held: str, status: OutcomeStatus
) -> None:
    decision = stage.tree.decision(BATCH, Knob.CPUSET, "3", cgroup_id=0)
    outcome_before = Outcome(
        decision=decision, status=OutcomeStatus.APPLIED, before="0-3", after="3", clamped_from="3-4"
    )
    stage.pending.add(BATCH, {Knob.CPUSET: "0-3"}, 1.0, outcomes={Knob.CPUSET: outcome_before})
    stage.create(cpuset_cpus=held)
    stage.actuator.apply([])
    stage.now_s += WRITE_GRACE_S
    again = stage.actuator.apply([stage.tree.decision(BATCH, Knob.CPUSET, held)])
    assert [each.status for each in again] == [OutcomeStatus.UNCHANGED]
    (outcome,) = stage.pending.outcomes()
    assert (outcome.status, outcome.before, outcome.after, outcome.clamped_from) == (status, "0-3", held, "3-4")
    assert outcome.decision.cgroup_id == again[0].decision.cgroup_id
    stage.pending.add(BATCH, {Knob.CPUSET: "0-3"}, 2.0, outcomes={Knob.CPUSET: outcome_before})
    stage.actuator.apply([])
    assert stage.pending.outcomes() == (), "an outcome is reported once"


@pytest.mark.parametrize("existing", [False, True])
def test_values_are_not_journalled_before_the_runtime_has_written(stage: Stage, existing: bool) -> None:
    """A new cgroup has the kernel's values first: they are not the owner's, and the runtime's write is not external."""
    given = {Knob.QUOTA: ("max 100000", "20000 100000"), Knob.WEIGHT: ("20", "1")}
    decisions = [stage.tree.decision(BATCH, knob, after, cgroup_id=0) for knob, (_, after) in given.items()]
    outcomes = {
        each.knob: Outcome(decision=each, status=OutcomeStatus.APPLIED, before=given[each.knob][0], after=each.value)
        for each in decisions
    }
    stage.create()
    if existing:
        stage.actuator.apply([stage.tree.decision(BATCH, Knob.WEIGHT, "1")])
    stage.pending.add(BATCH, {Knob.QUOTA: "max 100000", Knob.WEIGHT: "204"}, 1.0, existing=existing, outcomes=outcomes)
    before = stage.held("cpu.shares"), stage.held("cpu.cfs_quota_us")
    for _ in range(2):
        outcomes_now = stage.actuator.apply([stage.tree.decision(BATCH, Knob.QUOTA, "10000 100000")])
        assert [(each.status, each.error) for each in outcomes_now] == [(OutcomeStatus.UNCHANGED, NOT_WRITTEN_YET)]
        assert (stage.held("cpu.shares"), stage.held("cpu.cfs_quota_us")) == before
        stage.now_s += WRITE_GRACE_S / 4
    stage.tree.file(BATCH, "cpu.cfs_quota_us").write_text("20000\n")
    stage.tree.file(BATCH, "cpu.shares").write_text("10\n")
    outcomes_now = stage.actuator.apply([stage.tree.decision(BATCH, knob, value) for knob, value in NEXT.items()])
    assert [(each.status, each.error, each.after) for each in outcomes_now] == [
        (OutcomeStatus.APPLIED, "", "10000 100000"), (OutcomeStatus.APPLIED, "", "2"),
    ]  # fmt: skip
    assert [each.status for each in stage.pending.outcomes()] == [OutcomeStatus.APPLIED, OutcomeStatus.APPLIED]
    stage.originals.restore(stage.files)
    assert (stage.held("cpu.cfs_quota_us"), stage.held("cpu.shares")) == ("-1", "204")


def test_a_runtime_that_never_writes_is_not_waited_for(stage: Stage) -> None:
    decision = stage.tree.decision(BATCH, Knob.WEIGHT, "1", cgroup_id=0)
    outcome_before = Outcome(decision=decision, status=OutcomeStatus.APPLIED, before="20", after="1")
    stage.pending.add(BATCH, {Knob.WEIGHT: "204"}, 1.0, outcomes={Knob.WEIGHT: outcome_before})
    stage.create(cpu_shares="1024")
    again = [stage.tree.decision(BATCH, Knob.WEIGHT, "2")]
    assert [each.error for each in stage.actuator.apply(again)] == [NOT_WRITTEN_YET]
    stage.now_s += WRITE_GRACE_S
    assert [(each.status, each.after) for each in stage.actuator.apply(again)] == [(OutcomeStatus.APPLIED, "2")]
    assert [each.status for each in stage.pending.outcomes()] == [OutcomeStatus.MISMATCH]


def test_a_journal_that_cannot_be_written_is_tried_again(stage: Stage, tmp_path: Path) -> None:
    stage.pending.add(BATCH, {Knob.CPUSET: "0-3"}, 1.0)
    stage.create(cpuset_cpus="3")
    (tmp_path / "originals.json").mkdir()
    (outcome,) = stage.actuator.apply([stage.tree.decision(BATCH, Knob.CPUSET, "2")])
    assert (outcome.status, stage.held("cpuset.cpus")) == (OutcomeStatus.REFUSED, "3")
    (tmp_path / "originals.json").rmdir()
    stage.actuator.apply([stage.tree.decision(BATCH, Knob.CPUSET, "2")])
    stage.originals.restore(stage.files)
    assert stage.held("cpuset.cpus") == "0-3"


def test_restoring_numa_nodes_leaves_the_memory_migrate_flag_alone(stage: Stage) -> None:
    stage.pending.add(BATCH, {Knob.MEMS: "0-1"}, 1.0)
    stage.create(cpuset_mems="1")
    stage.pending.adopt(stage.files, stage.originals)
    stage.originals.restore(stage.files)
    assert (stage.held("cpuset.mems"), stage.held("cpuset.memory_migrate")) == ("0-1", "0")


def test_a_container_created_after_the_last_cycle_is_in_the_journal_before_its_restore(stage: Stage) -> None:
    stage.create(cpuset_cpus="1")
    decision = stage.tree.decision(BATCH, Knob.CPUSET, "1")
    adopted = Outcome(decision=decision, status=OutcomeStatus.APPLIED, before="0-3", after="1")
    stage.pending.add(BATCH, {Knob.CPUSET: "0-3"}, 1.0, outcomes={Knob.CPUSET: adopted})
    stage.pending.adopt(stage.files, stage.originals)
    # The outcomes of the last cycle are in the decision journal already.
    latest = msgspec.structs.replace(busy_cycle(7, outcomes=()), runtime_outcomes=(adopted,))
    journal = DecisionJournal(None)
    assert restore_all(stage.originals, stage.files, (), latest, journal, stage.pending.outcomes()) == 0
    entries = [(entry.trigger, entry.outcome.before, entry.outcome.after) for entry in journal.entries()]
    assert entries == [("nri", "0-3", "1"), ("end", "1", "0-3")]
    assert {entry.outcome.decision.pod for entry in journal.entries()} == {"default/batch"}
    assert restore_all(stage.originals, stage.files, (), latest, journal) == 0
    assert len(journal.entries()) == 2


@pytest.mark.parametrize(
    ("both", "restored"), [(str(64 << 20), UNLIMITED.strip()), (str(96 << 20), str(96 << 20)), (None, None)]
)
def test_a_limit_of_memory_and_swap_that_the_runtime_coupled_is_restored_too(
    stage: Stage, both: str | None, restored: str | None
) -> None:
    """The runtime sets the limit of memory and swap to the memory limit from NRI, and the kernel refuses a memory limit above
    it."""
    stage.pending.add(BATCH, {Knob.MEMORY_MAX: "max"}, 1.0)
    stage.create(memory_limit_in_bytes=str(64 << 20))
    memsw = stage.tree.file(BATCH, "memory.memsw.limit_in_bytes")
    if both is None:
        memsw.unlink()
    else:
        memsw.write_text(f"{both}\n")
    assert stage.pending.adopt(stage.files, stage.originals) == 1
    stage.originals.restore(stage.files)
    assert stage.held("memory.limit_in_bytes") == UNLIMITED.strip()
    assert (memsw.read_text().strip() if memsw.exists() else None) == restored
    assert stage.originals.entries() == ()
