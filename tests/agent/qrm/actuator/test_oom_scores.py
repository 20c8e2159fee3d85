"""OOM scores: the order in which the OOM killer selects pods, and the journal of the original scores."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.qrm.actuator.oom_scores import FILE_NAME, LOWERING_HINT, OomScores, ProcessTable
from agent.qrm.decisions.memory_controls import decide_oom_scores, oom_score_adj
from api.annotations import OOM_PRIORITY_BOUNDS
from api.decision import Decision, OutcomeStatus
from api.interfaces import Unavailable
from api.knobs import Knob, Reason
from api.qos import Enhancements, QoSLevel
from tests.agent.qrm.actuator.fakes import add_process, kill_at_every_step
from tests.builders.pods import reclaimed, shared
from tests.builders.snapshots import snapshot

# --- scores


@pytest.mark.parametrize(
    ("priority", "expected"),
    [(-100, 1000), (-50, 950), (-1, 901), (0, 0), (50, -150), (99, -297), (100, -300), (199, -597), (200, -600), (299, -897),
     (300, -1000)],
)  # fmt: skip
def test_a_lower_priority_has_a_higher_score(priority: int, expected: int) -> None:
    assert oom_score_adj(priority) == expected


@given(st.integers(-100, 299))
def test_every_higher_priority_has_a_lower_score(priority: int) -> None:
    assert oom_score_adj(priority) > oom_score_adj(priority + 1) >= -1000


def test_default_scores_of_levels_differ_by_at_least_300() -> None:
    """The difference in thousandths of the memory is what a higher level may use more before it is selected first."""
    order = (QoSLevel.RECLAIMED, QoSLevel.SHARED, QoSLevel.DEDICATED, QoSLevel.SYSTEM)
    defaults = [oom_score_adj(OOM_PRIORITY_BOUNDS[level][0]) for level in order]
    assert [low - high for low, high in pairwise(defaults)] == [1000, 300, 300]


def test_every_listed_container_with_a_cgroup_gets_a_decision() -> None:
    web = msgspec.structs.replace(shared("web"), enhancements=Enhancements(oom_priority=300))
    observed = snapshot(0, [web, reclaimed("late")])
    observed = msgspec.structs.replace(
        observed, cgroups={path: sample for path, sample in observed.cgroups.items() if path != "/late"}
    )
    (decision,) = decide_oom_scores(observed)
    assert (decision.cgroup, decision.pod, decision.knob, decision.value) == (
        "/web", "default/web", Knob.OOM_SCORE_ADJ, "-1000",
    )  # fmt: skip
    assert decision.reason.text == (
        "oom_score_adj of shared_cores with oom_priority 300 is -1000: the OOM killer never selects them."
    )


# --- written and restored


class Machine:
    """A /proc and a cgroup of ordinary files, in which processes start with the given score."""

    def __init__(self, root: Path) -> None:
        self.proc, self.state, self.group = root / "proc", root / "state", root / "cgroup/batch"
        for directory in (self.proc, self.state, self.group / "below"):
            directory.mkdir(parents=True, exist_ok=True)

    def start(self, pid: int, score: int, *, parent: int = 1, start: int = 7, where: str = "") -> None:
        add_process(self.proc, self.group / where, pid, score, parent=parent, start=start)

    def write(self, pid: int, score: int) -> None:
        (self.proc / str(pid) / "oom_score_adj").write_text(f"{score}\n")

    def end(self, pid: int) -> None:
        for file in (self.proc / str(pid)).iterdir():
            file.unlink()
        (self.proc / str(pid)).rmdir()

    def scores(self, *pids: int) -> list[int]:
        return [int((self.proc / str(pid) / "oom_score_adj").read_text()) for pid in pids]

    def opened(self, boot: str = "boot") -> OomScores:
        return OomScores(ProcessTable(self.proc, self.group.parent), self.state, boot)

    def decision(self, value: int) -> Decision:
        return Decision(
            cgroup="/batch", cgroup_id=self.group.stat().st_ino, pod="default/batch", knob=Knob.OOM_SCORE_ADJ,
            value=str(value), reason=Reason(rule="oom_priority", text="t"),
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_every_process_is_restored_and_a_child_gets_its_parent_s_score(machine: Machine) -> None:
    machine.start(10, 0)
    machine.start(11, 500, where="below")
    scores = machine.opened()
    (dry,) = scores.apply([machine.decision(1000)], dry=True)
    assert (dry.status, dry.before, machine.scores(10, 11), list(machine.state.iterdir())) == (
        OutcomeStatus.DRY_RUN, "0 500", [0, 500], [],
    )  # fmt: skip
    (done,) = scores.apply([machine.decision(1000)])
    assert (done.status, done.before, done.after, machine.scores(10, 11)) == (
        OutcomeStatus.APPLIED, "0 500", "1000", [1000, 1000],
    )  # fmt: skip
    journal = (machine.state / FILE_NAME).read_bytes()
    machine.start(12, 1000, parent=11)  # forked with the score of its parent
    machine.start(13, 1000, parent=999)  # its parent has ended
    assert [o.status for o in scores.apply([machine.decision(1000)])] == [OutcomeStatus.UNCHANGED]
    assert (machine.state / FILE_NAME).read_bytes() == journal, "a child of a known process needs no journal write"
    machine.start(14, 300)  # a process that joined from outside
    assert [o.before for o in scores.apply([machine.decision(1000)])] == ["300 1000"]
    # Another process, after the first was killed.
    (back,) = machine.opened().restore()
    assert (back.status, back.before, machine.scores(10, 11, 12, 13, 14)) == (
        OutcomeStatus.APPLIED, "1000", [0, 500, 500, 0, 300],
    )  # fmt: skip
    assert not (machine.state / FILE_NAME).exists()


def test_a_process_with_the_decided_score_keeps_it_after_the_restore(machine: Machine) -> None:
    machine.start(10, 0)
    machine.start(11, 1000)
    scores = machine.opened()
    scores.apply([machine.decision(1000)])
    scores.restore()
    assert machine.scores(10, 11) == [0, 1000]


def test_another_priority_is_no_original(machine: Machine) -> None:
    machine.start(10, 0)
    scores = machine.opened()
    scores.apply([machine.decision(1000)])
    assert [o.before for o in scores.apply([machine.decision(950)])] == ["1000"]
    assert machine.scores(10) == [950]
    machine.opened().restore()
    assert machine.scores(10) == [0]


def test_an_external_score_and_a_reused_pid_are_left_alone(machine: Machine) -> None:
    for pid in (10, 11, 12):
        machine.start(pid, 0)
    scores = machine.opened()
    scores.apply([machine.decision(1000)])
    machine.write(11, -500)
    machine.end(12)
    machine.start(12, 700, start=8)  # its PID was reused
    scores.restore()
    assert machine.scores(10, 11, 12) == [0, -500, 700]


def test_another_cgroup_of_the_same_path_is_left_alone(machine: Machine) -> None:
    machine.start(10, 0)
    scores = machine.opened()
    scores.apply([msgspec.structs.replace(machine.decision(1000), cgroup_id=1)])
    assert (machine.scores(10), scores.entries()) == ([0], ())


def test_another_boot_and_a_damaged_journal(machine: Machine) -> None:
    machine.start(10, 0)
    machine.opened().apply([machine.decision(1000)])
    assert machine.opened("another").entries() == ()
    (machine.state / FILE_NAME).write_text("{")
    with pytest.raises(Unavailable, match="cannot be read"):
        machine.opened()


def test_no_score_is_written_without_its_original_in_the_journal(machine: Machine) -> None:
    machine.start(10, 0)
    scores = OomScores(ProcessTable(machine.proc, machine.group.parent), machine.state / "gone", "boot")
    for _ in range(2):
        (refused,) = scores.apply([machine.decision(1000)])
        assert (refused.status, "cannot be journalled" in refused.error, machine.scores(10)) == (
            OutcomeStatus.REFUSED, True, [0],
        )  # fmt: skip


class Unprivileged(ProcessTable):
    """Like the kernel: without privileges no score goes below the one that a privileged process set last."""

    def write(self, pid: int, start: int, score: int) -> bool:
        if score < 0:
            raise PermissionError(13, "Permission denied")
        return super().write(pid, start, score)


def test_lowering_without_the_capability_is_reported(machine: Machine) -> None:
    for pid in (10, 11):
        machine.start(pid, 0)
    scores = OomScores(Unprivileged(machine.proc, machine.group.parent), machine.state, "boot")
    (refused,) = scores.apply([machine.decision(-300)])
    assert (refused.status, refused.after) == (OutcomeStatus.REFUSED, "0")
    assert refused.error == f"2 processes, the first is 10, cannot be given -300: {LOWERING_HINT}"
    (back,) = scores.restore()
    assert (back.status, machine.scores(10, 11), scores.entries()) == (OutcomeStatus.UNCHANGED, [0, 0], ())


def test_refused_restores_stay_in_the_journal(machine: Machine) -> None:
    machine.start(10, -500)
    machine.opened().apply([machine.decision(1000)])
    weak = OomScores(Unprivileged(machine.proc, machine.group.parent), machine.state, "boot")
    (refused,) = weak.restore()
    assert (refused.status, refused.error) == (
        OutcomeStatus.REFUSED,
        f"process 10 cannot be given -500: {LOWERING_HINT}",
    )
    weak.apply([machine.decision(950)])
    assert machine.scores(10) == [950]
    machine.opened().restore()
    assert machine.scores(10) == [-500], "the first original, not a score in between"


def test_a_kill_at_any_step_loses_no_original(machine: Machine) -> None:
    """SIGKILL before each system call that leaves something behind, on both of two changes."""
    for pid in (10, 11):
        machine.start(pid, 0)

    def prepare() -> None:
        machine.write(10, 0)
        machine.write(11, 500)

    def work() -> None:
        scores = machine.opened()
        scores.apply([machine.decision(1000)])
        scores.apply([machine.decision(950)])

    def check(step: str) -> None:
        machine.opened().restore()
        assert machine.scores(10, 11) == [0, 500], step

    calls = [(os, "fsync"), (Path, "rename"), (Path, "unlink"), (ProcessTable, "write")]
    assert kill_at_every_step(calls, prepare, work, check) > 12
