"""Slices of threads: which threads get one, what is journalled, and that every thread gets the default back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.journal.decisions import DecisionJournal
from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.originals import restore_all
from agent.qrm.actuator.sched_attr import ThreadScheduling
from agent.qrm.actuator.state_dir import open_originals
from agent.qrm.actuator.thread_slices import (
    FILE_NAME,
    HIDDEN_REMEDY,
    PERMISSION_REMEDY,
    ThreadSlices,
    open_thread_slices,
)
from agent.qrm.actuator.writer import KnobWriter
from agent.qrm.decisions.cpu_priority import SHORT_SLICE
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import ActMode, Decision, OutcomeStatus
from api.interfaces import Unavailable
from api.knobs import Knob, Reason
from tests.agent.qrm.actuator.fakes import kill_at_every_step
from tests.agent.qrm.actuator.trees import Tree

DEFAULT, SHORT, OWN = 1_400_000, int(SHORT_SLICE), 3_000_000
OTHER, FIFO, BATCH, IDLE = 0, 1, 3, 5
S, APPLIED = 1_000_000_000, OutcomeStatus.APPLIED


class FakeScheduler:
    """Threads with attributes; a slice of 0 becomes the default, as in the kernel."""

    def __init__(self) -> None:
        self.threads: dict[int, ThreadScheduling] = {}
        self.forbidden: set[int] = set()
        self.reads: list[int] = []
        self.default: int | None = DEFAULT
        self.after_set: Callable[[int], None] = lambda _thread: None

    def read(self, thread: int) -> ThreadScheduling | None:
        self.reads.append(thread)
        return self.threads.get(thread)

    def set_slice(self, thread: int, nice: int, slice_ns: int) -> None:
        if thread in self.forbidden:
            raise PermissionError(1, "Operation not permitted")
        if thread in self.threads:
            policy = self.threads[thread].policy
            self.threads[thread] = ThreadScheduling(policy, nice, slice_ns or DEFAULT)
        self.after_set(thread)

    def default_slice_ns(self) -> int | None:
        return self.default


class Machine:
    """A cgroup of ordinary files whose threads have a FakeScheduler."""

    def __init__(self, root: Path, version: str = "v2") -> None:
        self.root, self.state, self.scheduler = root / "cgroup", root / "state", FakeScheduler()
        self.hierarchy = (
            Hierarchy(v1={}, v2=self.root) if version == "v2" else Hierarchy(v1={"cpu": self.root}, v2=None)
        )
        self._file = "cgroup.threads" if version == "v2" else "tasks"
        for directory in (self.state, self.root / "batch/below"):
            directory.mkdir(parents=True, exist_ok=True)

    def start(
        self, thread: int, slice_ns: int = DEFAULT, *, policy: int = OTHER, nice: int = 0, where: str = "batch"
    ) -> None:
        self.scheduler.threads[thread] = ThreadScheduling(policy, nice, slice_ns)
        with (self.root / where / self._file).open("a") as file:
            file.write(f"{thread}\n")

    def leave(self, thread: int) -> None:
        """Move the thread out of the container."""
        file = self.root / "batch" / self._file
        file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if int(line) != thread))

    def slices(self, *threads: int) -> list[int]:
        return [self.scheduler.threads[thread].slice_ns for thread in threads]

    def opened(self, boot: str = "boot") -> ThreadSlices:
        return ThreadSlices(self.hierarchy, self.scheduler, self.state, boot)

    def decision(self) -> Decision:
        return Decision(
            cgroup="/batch", cgroup_id=(self.root / "batch").stat().st_ino, pod="default/batch", knob=Knob.SLICE,
            value=SHORT_SLICE, reason=Reason(rule="short_slice", text="t"),
        )  # fmt: skip


@pytest.fixture(params=["v1", "v2"])
def machine(tmp_path: Path, request: pytest.FixtureRequest) -> Machine:
    return Machine(tmp_path, request.param)


def test_only_default_slices_are_shortened_and_nothing_else_changes(machine: Machine) -> None:
    machine.start(10, nice=5)
    machine.start(11, policy=BATCH, nice=-3, where="batch/below")
    machine.start(12, OWN)
    machine.start(13, policy=IDLE)
    machine.start(14, policy=FIFO, slice_ns=0)
    slices = machine.opened()
    (dry,) = slices.apply([machine.decision()], dry=True)
    assert (dry.status, dry.before, machine.slices(10, 11), list(machine.state.iterdir())) == (
        OutcomeStatus.DRY_RUN, str(DEFAULT), [DEFAULT, DEFAULT], [],
    )  # fmt: skip
    (done,) = slices.apply([machine.decision()])
    assert (done.status, done.before, done.after) == (OutcomeStatus.APPLIED, str(DEFAULT), SHORT_SLICE)
    assert machine.slices(10, 11, 12, 13, 14) == [SHORT, SHORT, OWN, DEFAULT, 0]
    assert machine.scheduler.threads[10] == (OTHER, 5, SHORT)
    assert machine.scheduler.threads[11] == (BATCH, -3, SHORT)
    slices.restore()
    assert machine.scheduler.threads[10] == (OTHER, 5, DEFAULT)
    assert machine.slices(11, 12, 13, 14) == [DEFAULT, OWN, DEFAULT, 0]
    assert not (machine.state / FILE_NAME).exists()


def test_only_new_threads_and_a_quarter_of_the_others_are_read_each_second(machine: Machine) -> None:
    """Threads of which none is due at second 0: their number is no multiple of 4, and 13 is read once more before its write."""
    for thread in (10, 11):
        machine.start(thread)
    slices = machine.opened()
    slices.apply([machine.decision()])
    machine.start(12, SHORT)  # inherits the slice
    machine.start(13)  # joined from outside
    machine.scheduler.reads.clear()
    (done,) = slices.apply([machine.decision()])
    assert (done.status, sorted(machine.scheduler.reads)) == (OutcomeStatus.APPLIED, [12, 13, 13])
    machine.scheduler.reads.clear()
    (same,) = slices.apply([machine.decision()])
    assert (same.status, same.after, machine.scheduler.reads) == (OutcomeStatus.UNCHANGED, SHORT_SLICE, [12])


def test_a_slice_that_something_else_reset_is_found_within_four_seconds(machine: Machine) -> None:
    machine.start(10)
    slices = machine.opened()
    slices.apply([machine.decision()])
    machine.scheduler.threads[10] = ThreadScheduling(OTHER, 0, DEFAULT)
    statuses = [slices.apply([machine.decision()], second * S)[0].status for second in range(1, 5)]
    assert statuses.count(APPLIED) == 1
    assert machine.slices(10) == [SHORT]


def test_nice_is_what_the_thread_has_when_its_slice_is_written(machine: Machine) -> None:
    """`nice -n 10 job` in the container calls setpriority while the journal is written."""
    for thread in (10, 11):
        machine.start(thread)

    def renice(thread: int) -> None:
        other = 21 - thread
        policy, _, slice_ns = machine.scheduler.threads[other]
        machine.scheduler.threads[other] = ThreadScheduling(policy, 10, slice_ns)

    machine.scheduler.after_set = renice
    machine.opened().apply([machine.decision()])
    assert [machine.scheduler.threads[thread].nice for thread in (10, 11)] == [10, 10]


def test_after_a_kill_the_next_agent_restores_inherited_slices_too(machine: Machine) -> None:
    machine.start(10)
    machine.opened().apply([machine.decision()])
    content = json.loads((machine.state / FILE_NAME).read_text())
    assert content["containers"] == [{"cgroup": "/batch", "cgroup_id": machine.decision().cgroup_id, "slice_ns": SHORT}]
    machine.start(11, SHORT)
    successor = machine.opened()
    (same,) = successor.apply([machine.decision()])
    assert (same.status, successor.restore({"/batch"}), machine.slices(10, 11)) == (
        OutcomeStatus.UNCHANGED, (), [SHORT, SHORT],
    )  # fmt: skip
    (back,) = successor.restore()
    assert (back.status, back.before, back.after, machine.slices(10, 11)) == (
        OutcomeStatus.APPLIED, SHORT_SLICE, "0", [DEFAULT, DEFAULT],
    )  # fmt: skip


def test_a_child_forked_during_the_restore_gets_the_default(machine: Machine) -> None:
    machine.start(10)
    slices = machine.opened()
    slices.apply([machine.decision()])
    children = iter((11, 12))

    def fork(_thread: int) -> None:
        if (child := next(children, None)) is not None:
            machine.start(child, SHORT)

    machine.scheduler.after_set = fork
    slices.restore()
    assert machine.slices(10, 11, 12) == [DEFAULT] * 3


def test_a_thread_that_leaves_the_container_during_the_write_keeps_the_default(machine: Machine) -> None:
    machine.start(10)
    machine.start(11)
    moved = iter((11,))
    machine.scheduler.after_set = lambda _thread: machine.leave(thread) if (thread := next(moved, 0)) else None
    machine.opened().apply([machine.decision()])
    assert machine.slices(10, 11) == [SHORT, DEFAULT]


def test_a_refusal_names_the_capability_and_is_tried_again_after_a_minute(machine: Machine) -> None:
    for thread in (10, 11):
        machine.start(thread)
        machine.scheduler.forbidden.add(thread)
    slices = machine.opened()
    (refused,) = slices.apply([machine.decision()], S)
    assert (refused.status, refused.after) == (OutcomeStatus.REFUSED, str(DEFAULT))
    assert refused.error.startswith("2 threads, the first is 1")
    assert refused.error.endswith(f", cannot be given a slice of {SHORT_SLICE} ns: {PERMISSION_REMEDY}")
    machine.scheduler.forbidden.discard(11)
    machine.scheduler.reads.clear()
    (again,) = slices.apply([machine.decision()], 60 * S)
    assert (again.status, again.error, machine.scheduler.reads) == (OutcomeStatus.REFUSED, refused.error, [])
    (partial,) = slices.apply([machine.decision()], 61 * S)
    assert (partial.status, machine.slices(10, 11)) == (OutcomeStatus.MISMATCH, [DEFAULT, SHORT])
    slices.restore()
    assert (machine.slices(11), slices.entries()) == ([DEFAULT], ())


def test_a_refused_restore_stays_in_the_journal(machine: Machine) -> None:
    machine.start(10)
    slices = machine.opened()
    slices.apply([machine.decision()])
    machine.scheduler.forbidden.add(10)
    (refused,) = slices.restore()
    assert (refused.status, len(slices.entries())) == (OutcomeStatus.REFUSED, 1)
    assert refused.error == f"thread 10 cannot be given the default slice: {PERMISSION_REMEDY}"
    machine.scheduler.forbidden.clear()
    machine.opened().restore()
    assert machine.slices(10) == [DEFAULT]


def test_threads_of_another_pid_namespace_are_reported(machine: Machine) -> None:
    machine.start(0)
    (refused,) = machine.opened().apply([machine.decision()])
    assert refused.error == f"/batch: the threads are not visible: {HIDDEN_REMEDY}"


def test_a_removed_and_a_replaced_container_are_vanished(machine: Machine) -> None:
    machine.start(10)
    slices = machine.opened()
    slices.apply([machine.decision()])
    (removed,) = slices.apply([replace(machine.decision(), cgroup_id=1)])
    assert removed.status is OutcomeStatus.VANISHED
    (machine.root / "batch").rename(machine.root / "other")
    (removed,) = slices.restore()
    assert (removed.status, slices.entries()) == (OutcomeStatus.VANISHED, ())


def test_a_kernel_without_slices_refuses(machine: Machine) -> None:
    machine.scheduler.default = None
    slices = machine.opened()
    (refused,) = slices.apply([machine.decision()])
    assert (slices.available, refused.status, "Linux 6.12" in refused.error) == (False, OutcomeStatus.REFUSED, True)


def test_nothing_is_written_without_the_journal(machine: Machine) -> None:
    machine.start(10)
    slices = ThreadSlices(machine.hierarchy, machine.scheduler, machine.state / "gone", "boot")
    (refused,) = slices.apply([machine.decision()])
    assert (refused.status, "cannot be journalled" in refused.error, machine.slices(10)) == (
        OutcomeStatus.REFUSED, True, [DEFAULT],
    )  # fmt: skip


def test_another_boot_and_a_damaged_journal(machine: Machine) -> None:
    machine.start(10)
    machine.opened().apply([machine.decision()])
    assert machine.opened("another").entries() == ()
    (machine.state / FILE_NAME).write_text("{")
    with pytest.raises(Unavailable, match="cannot be read"):
        machine.opened()


@pytest.mark.parametrize(
    "fields",
    [
        {"cgroup": "/../../etc"},
        {"cgroup": "batch"},
        {"cgroup": "/batch\0"},
        {"cgroup": "/"},
        {"slice_ns": 0},
        {"slice_ns": -1},
        {"slice_ns": 99_999},
        {"slice_ns": 100_000_001},
        {"slice_ns": 10**400},
    ],
)
def test_an_entry_that_the_agent_never_writes_is_damage(tmp_path: Path, fields: dict[str, object]) -> None:
    machine, path = Machine(tmp_path), tmp_path / "state" / FILE_NAME
    machine.start(10)
    machine.opened().apply([machine.decision()])
    (entry,) = json.loads(path.read_text())["containers"]
    path.write_text(json.dumps({"boot_id": "boot", "containers": [{**entry, **fields}]}))
    with pytest.raises(Unavailable, match=f"{FILE_NAME} cannot be read: ") as caught:
        machine.opened()
    assert caught.value.remedy.startswith("restart the pods that it names")
    slices, warnings = open_thread_slices(ActMode.ON, machine.hierarchy, (machine.state, "boot"), enabled=True)
    assert slices is None
    assert warnings[0].startswith("Slices of threads are not changed: ")


class StoredScheduler(FakeScheduler):
    """Attributes in a file, so that they outlive a killed process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load(self) -> None:
        pairs = json.loads(self._path.read_text()).items()
        self.threads = {int(thread): ThreadScheduling(*values) for thread, values in pairs}

    def store(self) -> None:
        self._path.write_text(json.dumps(self.threads))

    def set_slice(self, thread: int, nice: int, slice_ns: int) -> None:
        super().set_slice(thread, nice, slice_ns)
        self.store()


def test_a_kill_at_any_step_leaves_no_slice_behind(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.scheduler = scheduler = StoredScheduler(tmp_path / "threads.json")
    for thread in (10, 11):
        machine.start(thread)

    def prepare() -> None:
        scheduler.threads = dict.fromkeys((10, 11), ThreadScheduling(OTHER, 0, DEFAULT))
        scheduler.store()

    def work() -> None:
        machine.opened().apply([machine.decision()])
        machine.opened().restore()

    def check(step: str) -> None:
        scheduler.load()
        machine.opened().restore()
        assert machine.slices(10, 11) == [DEFAULT, DEFAULT], step

    calls = [(os, "fsync"), (Path, "rename"), (Path, "unlink"), (StoredScheduler, "set_slice")]
    assert kill_at_every_step(calls, prepare, work, check) > 7


def test_the_actuator_walks_threads_only_when_they_are_due_and_restores_what_is_not_decided(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.start(10)
    tree = Tree(tmp_path / "knobs", "v2")
    tree.make("/batch", {})
    files, originals = KnobWriter(tree.hierarchy), open_originals(machine.state, "boot")
    slices = machine.opened()
    actuator = Actuator(files, originals, ActMode.ON, None, slices)
    assert Knob.SLICE in actuator.knobs(["/batch"])["/batch"]
    (done,) = actuator.apply([machine.decision()], S)
    assert (done.status, machine.slices(10)) == (OutcomeStatus.APPLIED, [SHORT])
    machine.start(11)
    outcomes = {second: actuator.apply([machine.decision()], second * S)[0] for second in range(2, 12)}
    due = [second for second, outcome in outcomes.items() if outcome.status is APPLIED]
    assert len(due) == 1, "the thread that joined is found once"
    assert due[0] <= 6, "within 5 s"
    assert machine.slices(11) == [SHORT]
    assert actuator.release([machine.decision()], ()) == ()
    assert actuator.release([], {"/batch"}) == (), "a cgroup that was not read keeps its slices"
    (back,) = actuator.release([], ())
    assert (back.status, back.decision.value, machine.slices(10, 11)) == (APPLIED, "0", [DEFAULT, DEFAULT])
    (again,) = actuator.apply([machine.decision()], 20 * S)
    assert again.status is APPLIED
    assert restore_all(originals, files, (slices,), None, DecisionJournal(None)) == 0
    assert machine.slices(10, 11) == [DEFAULT, DEFAULT]
    originals.close()
    files.close()


def test_a_failing_write_of_the_journal_discards_no_outcome_of_the_same_release(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.start(10)
    tree = Tree(tmp_path / "knobs", "v2")
    tree.make("/batch", {"cpu.weight": "100\n", "cpu.idle": "0\n"})
    files, originals = KnobWriter(tree.hierarchy), open_originals(machine.state, "boot")
    moved, slices_dir = tmp_path / "moved", tmp_path / "slices"
    slices_dir.mkdir()
    slices = ThreadSlices(machine.hierarchy, machine.scheduler, slices_dir, "boot")
    actuator = Actuator(files, originals, ActMode.ON, None, slices)
    weight = replace(machine.decision(), knob=Knob.WEIGHT, value="1", cgroup_id=tree.id("/batch"))
    assert [each.status for each in actuator.apply([weight, machine.decision()], S)] == [APPLIED, APPLIED]
    slices_dir.rename(moved)
    (restored,) = actuator.release([], ())
    assert (restored.decision.knob, restored.status, machine.slices(10)) == (Knob.WEIGHT, APPLIED, [DEFAULT])
    assert [actuator.release([], ()) for _ in range(2)] == [(), ()]
    assert len(originals.messages) == 1, "reported once, not in every cycle"
    assert "cannot be journalled in" in originals.messages[0]
    moved.rename(slices_dir)
    assert (slices_dir / FILE_NAME).exists()
    actuator.release([], ())
    assert not (slices_dir / FILE_NAME).exists(), "the write is repeated"
    originals.close()
    files.close()


def test_a_dry_run_changes_no_slice_and_an_agent_without_slices_decides_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.start(10)
    tree = Tree(tmp_path / "knobs", "v2")
    tree.make("/batch", {})
    files = KnobWriter(tree.hierarchy)
    (outcome,) = Actuator(files, None, ActMode.DRY_RUN, None, machine.opened()).apply([machine.decision()], S)
    assert (outcome.status, machine.slices(10)) == (OutcomeStatus.DRY_RUN, [DEFAULT])
    machine.scheduler.default = None
    for slices in (None, machine.opened()):
        assert Knob.SLICE not in Actuator(files, None, ActMode.ON, None, slices).knobs(["/batch"])["/batch"]
    files.close()


@pytest.mark.parametrize(
    ("act", "enabled", "left", "opened"),
    [
        (ActMode.ON, False, False, False),
        (ActMode.ON, True, False, True),
        (ActMode.ON, False, True, True),
        (ActMode.DRY_RUN, False, True, False),
        (ActMode.OFF, True, True, False),
    ],
)
def test_slices_are_opened_if_enabled_or_if_an_earlier_agent_left_some(
    tmp_path: Path, act: ActMode, *, enabled: bool, left: bool, opened: bool
) -> None:
    machine = Machine(tmp_path)
    if left:
        machine.start(10)
        machine.opened().apply([machine.decision()])
    slices, _ = open_thread_slices(act, machine.hierarchy, (machine.state, "boot"), enabled=enabled)
    assert (slices is not None) is opened
    (machine.state / FILE_NAME).write_text("{")
    slices, warnings = open_thread_slices(ActMode.ON, machine.hierarchy, (machine.state, "boot"), enabled=enabled)
    assert slices is None
    assert "Slices of threads are not changed" in warnings[0]
