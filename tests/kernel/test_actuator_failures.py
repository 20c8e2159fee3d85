"""The actuator where cgroups vanish, disks are full or read-only, kernels show other values, and without privileges."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.qrm.actuator.writer import KnobWriter, OriginalValue, RawValue
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import ActMode, OutcomeStatus
from api.knobs import Knob
from tests.agent.qrm.actuator.trees import Tree
from tests.kernel.knob_cgroups import KnobCgroup, statuses
from tests.kernel.real_cgroups import cgroup, require_root

pytestmark = pytest.mark.kernel

CPU_KNOBS = (Knob.CPUSET, Knob.WEIGHT, Knob.QUOTA, Knob.IDLE)


def test_an_original_that_the_kernel_no_longer_takes_stays_in_the_journal(
    batch: KnobCgroup, originals: OriginalsJournal, files: KnobWriter
) -> None:
    if batch.version == "v2":
        pytest.skip("version 2 has no value that it takes and shows as another")
    raw = RawValue(directory_id=batch.id, texts={"cpu.shares": "1\n"})
    originals.record(OriginalValue(cgroup=batch.path, cgroup_id=batch.id, knob=Knob.WEIGHT, raw=raw))
    (outcome,) = originals.restore(files)
    assert (outcome.status, batch.texts()["cpu.shares"]) == (OutcomeStatus.MISMATCH, "2\n")
    assert len(originals.entries()) == 1


def test_a_vanished_cgroup_and_its_successor(
    hierarchy: Hierarchy, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    with cgroup(hierarchy, "gone") as group:
        old = KnobCgroup(group)
        old_id = old.id
        assert statuses(actuator.apply([old.decide(Knob.WEIGHT, "10"), old.decide(Knob.CPUSET, "1")])) == [
            OutcomeStatus.APPLIED,
            OutcomeStatus.APPLIED,
        ]
    decisions = [old.decide(knob, "1", old_id) for knob in CPU_KNOBS]
    assert statuses(actuator.apply(decisions)) == [OutcomeStatus.VANISHED] * 4
    with cgroup(hierarchy, "gone") as group:
        new = KnobCgroup(group)
        assert (new.path, new.id != old_id) == (old.path, True)
        before = new.texts()
        assert statuses(actuator.apply(decisions)) == [OutcomeStatus.VANISHED] * 4
        assert statuses(originals.restore(files)) == [OutcomeStatus.VANISHED] * 2
        assert originals.entries() == ()
        assert new.texts() == before


def test_a_recreated_cpuset_cgroup_is_detected_and_keeps_its_values(
    batch: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    if batch.version == "v2":
        pytest.skip("version 2 has one directory for all controllers")
    actuator.apply([batch.decide(Knob.CPUSET, "1")])
    directory = batch.cgroup.file("cpuset", "cpuset.cpus").parent
    directory.rmdir()
    directory.mkdir()
    assert files.read(batch.path, batch.id, Knob.CPUSET) == ""
    assert statuses(originals.restore(files)) == [OutcomeStatus.VANISHED]
    assert batch.texts()["cpuset.cpus"] == "\n"
    assert originals.entries() == ()


def test_a_cgroup_removed_under_an_open_descriptor_is_vanished(hierarchy: Hierarchy, files: KnobWriter) -> None:
    with cgroup(hierarchy, "open") as group:
        before = files.read_raw(group.path, group.id, Knob.QUOTA)
        decision = KnobCgroup(group).decide(Knob.QUOTA, "5000")
    (outcome,) = Actuator(files, None, ActMode.ON).apply([decision])
    assert outcome.status is OutcomeStatus.VANISHED
    assert isinstance(before, RawValue)


@contextmanager
def tmpfs(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def _fill(path: Path) -> None:
    subprocess.run(["dd", "if=/dev/zero", f"of={path}/ballast", "bs=4096"], check=False, stderr=subprocess.DEVNULL)
    status = os.statvfs(path)
    assert status.f_bavail == 0


def test_a_full_disk_leaves_the_knobs_alone_and_still_lets_originals_back(
    batch: KnobCgroup, files: KnobWriter, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "state", "64k") as state:
        originals = open_originals(state, read_boot_id())
        actuator = Actuator(files, originals, ActMode.ON)
        before = batch.texts()
        assert statuses(actuator.apply([batch.decide(Knob.WEIGHT, "10")])) == [OutcomeStatus.APPLIED]
        _fill(state)
        weighted = batch.texts()
        (idle,) = actuator.apply([batch.decide(Knob.IDLE, "1")])
        assert idle.status is OutcomeStatus.REFUSED
        assert "No space left on device: free space in" in idle.error
        assert batch.texts() == weighted
        assert not (state / "originals.json.tmp").exists()
        # A knob whose original is on disk already may still move.
        assert statuses(actuator.apply([batch.decide(Knob.WEIGHT, "20")])) == [OutcomeStatus.APPLIED]
        originals.close()
        again = open_originals(state, read_boot_id())
        assert statuses(again.restore(files)) == [OutcomeStatus.APPLIED]
        assert again.entries() == ()
        assert batch.texts() == before
        again.close()


def test_a_read_only_disk_leaves_the_knobs_alone_and_keeps_what_it_knows(
    batch: KnobCgroup, files: KnobWriter, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "state", "64k") as state:
        originals = open_originals(state, read_boot_id())
        before = batch.texts()
        Actuator(files, originals, ActMode.ON).apply([batch.decide(Knob.WEIGHT, "10")])
        originals.close()
        subprocess.run(["mount", "-o", "remount,ro", state], check=True)
        again = open_originals(state, read_boot_id())
        assert "Read-only file system" in again.messages[0]
        (idle,) = Actuator(files, again, ActMode.ON).apply([batch.decide(Knob.IDLE, "1")])
        assert idle.status is OutcomeStatus.REFUSED
        assert "Read-only file system" in idle.error
        assert statuses(again.restore(files)) == [OutcomeStatus.APPLIED]
        assert batch.texts() == before
        # It was put back, but forgetting it could not be written down: it will be looked at once more.
        assert len(again.entries()) == 1
        assert "Read-only file system" in again.messages[-1]
        again.close()


def test_a_kernel_that_shows_another_value_is_a_mismatch(tmp_path: Path) -> None:
    # coredump_filter takes a decimal number and shows it as hexadecimal digits: 16 becomes 00000010.
    require_root()
    tree = Tree(tmp_path / "cgroup", "v2")
    tree.make("/batch")
    odd = Path(f"/proc/{os.getpid()}/coredump_filter")
    old = odd.read_text()
    files, originals = KnobWriter(tree.hierarchy), open_originals(tmp_path / "state", read_boot_id())
    subprocess.run(["mount", "--bind", odd, tree.file("/batch", "cpu.weight")], check=True)
    try:
        (outcome,) = Actuator(files, originals, ActMode.ON).apply([tree.decision("/batch", Knob.WEIGHT, "16")])
    finally:
        subprocess.run(["umount", tree.file("/batch", "cpu.weight")], check=True)
        odd.write_text(f"0x{old}")
    assert (outcome.status, outcome.after) == (OutcomeStatus.MISMATCH, "10")
    assert "another value than the one written" in outcome.error
    assert len(originals.entries()) == 1
    files.close()
    originals.close()


def run_unprivileged(work: Callable[..., None], *arguments: object) -> int | None:
    """Exit code of that work in a process of its own; it gives up its privileges itself."""
    process = get_context("forkserver").Process(target=work, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def refuse_without_privileges(hierarchy: Hierarchy, state: Path, path: str, cgroup_id: int) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    files = KnobWriter(hierarchy)
    assert files.read(path, cgroup_id, Knob.WEIGHT) == "33"
    obstacle = files.write_obstacle()
    assert obstacle is not None
    assert obstacle.remedy.startswith("run the agent as root, or delegate")
    decision = Tree.decision(None, path, Knob.WEIGHT, "10", cgroup_id)  # type: ignore[arg-type]
    (outcome,) = Actuator(files, open_originals(state, read_boot_id()), ActMode.ON).apply([decision])
    assert outcome.status is OutcomeStatus.REFUSED, outcome
    assert "Permission denied: run the agent as root" in outcome.error


def test_without_root_values_are_read_and_nothing_is_written(batch: KnobCgroup, tmp_path: Path) -> None:
    # Outside tmp_path, which only root may enter.
    state = Path(f"/tmp/dioptase-test-{os.getpid()}-nobody")
    state.mkdir()
    os.chown(state, 65534, 65534)
    try:
        before = batch.texts()
        assert run_unprivileged(refuse_without_privileges, batch.cgroup.hierarchy, state, batch.path, batch.id) == 0
        assert batch.texts() == before
    finally:
        for file in state.iterdir():
            file.unlink()
        state.rmdir()
