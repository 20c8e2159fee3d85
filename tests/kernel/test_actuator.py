"""The actuator and the journal of originals on real cgroups: what this kernel takes, refuses and does behind one's back."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from agent.hierarchy import Hierarchy
from agent.qrm.actuator import Actuator
from agent.qrm.knobs import KnobFiles, Original, RawValue
from agent.qrm.originals import Originals, boot_id, open_originals
from api.decisions import Act, Knob, Outcome, Status
from tests.agent.qrm.trees import Tree
from tests.kernel.knobbed import ODD, Knobbed, nested
from tests.kernel.support import cgroup, require_root, require_writable_cgroups

pytestmark = pytest.mark.kernel


@pytest.fixture
def hierarchy() -> Hierarchy:
    found = require_writable_cgroups()
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two CPUs to move a cpuset from one to the other")
    return found


@pytest.fixture
def batch(hierarchy: Hierarchy) -> Iterator[Knobbed]:
    with cgroup(hierarchy, "act") as made:
        knobbed = Knobbed(made)
        knobbed.put(ODD[knobbed.version])
        yield knobbed


@pytest.fixture
def files(hierarchy: Hierarchy) -> Iterator[KnobFiles]:
    opened = KnobFiles(hierarchy)
    yield opened
    opened.close()


@pytest.fixture
def originals(tmp_path: Path) -> Iterator[Originals]:
    opened = open_originals(tmp_path / "state", boot_id())
    yield opened
    opened.close()


@pytest.fixture
def actuator(files: KnobFiles, originals: Originals) -> Actuator:
    return Actuator(files, originals, Act.ON)


def statuses(outcomes: tuple[Outcome, ...]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


def test_every_knob_is_applied_and_restored_bit_for_bit(
    batch: Knobbed, actuator: Actuator, originals: Originals, files: KnobFiles
) -> None:
    before = batch.texts()
    weight, quota, cpuset = actuator.apply(
        [batch.decide(Knob.WEIGHT, "10"), batch.decide(Knob.QUOTA, "30000 100000"), batch.decide(Knob.CPUSET, "1")]
    )
    assert [(o.status, o.before, o.after) for o in (weight, quota, cpuset)] == [
        (Status.APPLIED, "33", "10"),
        (Status.APPLIED, "70000 50000", "30000 100000"),
        (Status.APPLIED, "0", "1"),
    ]
    (idle,) = actuator.apply([batch.decide(Knob.IDLE, "1")])
    assert (idle.status, idle.before, idle.after) == (Status.APPLIED, "0", "1")
    changed = batch.texts()
    assert all(changed[name] != before[name] for name in before)
    assert statuses(originals.restore(files)) == [Status.APPLIED] * 4
    assert batch.texts() == before
    assert originals.entries() == ()


def test_the_quota_really_throttles(batch: Knobbed, actuator: Actuator) -> None:
    stat = batch.made.file("cpu", "cpu.stat")
    actuator.apply([batch.decide(Knob.QUOTA, "20000 100000")])
    batch.made.burn()
    deadline = time.monotonic() + 60
    while "nr_throttled 0" in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "nr_throttled 0" not in stat.read_text()


def test_leaving_idle_gives_the_owner_their_weight_and_not_the_kernel_s_default(
    batch: Knobbed, actuator: Actuator
) -> None:
    file = "cpu.weight" if batch.version == "v2" else "cpu.shares"
    own = batch.texts()[file]
    actuator.apply([batch.decide(Knob.IDLE, "1")])
    assert batch.texts()[file] != own
    (outcome,) = actuator.apply([batch.decide(Knob.IDLE, "0")])
    assert (outcome.status, outcome.error) == (Status.APPLIED, "")
    assert batch.texts()[file] == own


def test_a_weight_for_an_idle_group_waits_and_the_kernel_would_refuse_it(
    batch: Knobbed, actuator: Actuator, files: KnobFiles
) -> None:
    actuator.apply([batch.decide(Knob.IDLE, "1")])
    (outcome,) = actuator.apply([batch.decide(Knob.WEIGHT, "7")])
    assert outcome.status is Status.UNCHANGED
    assert "pins the weight" in outcome.error
    with pytest.raises(Exception, match="Invalid argument") as caught:
        files.write(batch.path, batch.id, Knob.WEIGHT, "7")
    assert caught.value.remedy == "cpu.idle=1 pins the weight: set cpu.idle to 0 first"
    weight, idle = actuator.apply([batch.decide(Knob.WEIGHT, "7"), batch.decide(Knob.IDLE, "0")])
    assert (weight.status, weight.after, idle.status) == (Status.APPLIED, "7", Status.APPLIED)


def test_a_group_found_idle_is_left_idle(
    batch: Knobbed, actuator: Actuator, originals: Originals, files: KnobFiles
) -> None:
    batch.made.file("cpu", "cpu.idle").write_text("1\n")
    before = batch.texts()
    assert statuses(actuator.apply([batch.decide(Knob.IDLE, "0"), batch.decide(Knob.WEIGHT, "50")])) == [
        Status.APPLIED,
        Status.APPLIED,
    ]
    actuator.apply([batch.decide(Knob.WEIGHT, "60")])
    assert Status.REFUSED not in statuses(originals.restore(files))
    assert batch.texts() == before
    assert originals.entries() == ()


def test_an_unlimited_quota_and_its_period_come_back(
    batch: Knobbed, actuator: Actuator, originals: Originals, files: KnobFiles
) -> None:
    unlimited = (
        {"cpu.max": "max 25000\n"}
        if batch.version == "v2"
        else {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "25000\n"}
    )
    batch.put({**ODD[batch.version], **dict(reversed(unlimited.items()))})
    before = batch.texts()
    assert statuses(actuator.apply([batch.decide(Knob.QUOTA, "max 100000")])) == [Status.UNCHANGED]
    assert statuses(actuator.apply([batch.decide(Knob.QUOTA, "5000")])) == [Status.APPLIED]
    originals.restore(files)
    assert batch.texts() == before


def test_ratios_at_the_parent_s_limit_move_between_periods(hierarchy: Hierarchy, files: KnobFiles) -> None:
    with nested(hierarchy, "ratio") as (_, inner):
        # 1.4 CPUs each, all that the group above has: with the old quota or the old period it would be more on the way.
        for value in ("70000 50000", "140000 100000", "14000 10000", "1400000 1000000"):
            files.write(inner.path, inner.id, Knob.QUOTA, value)
            assert files.read(inner.path, inner.id, Knob.QUOTA) == value


def test_the_owner_s_quota_is_never_loosened(batch: Knobbed, actuator: Actuator) -> None:
    before = batch.texts()
    (outcome,) = actuator.apply([batch.decide(Knob.QUOTA, "max")])
    assert (outcome.status, outcome.after, outcome.clamped_from) == (Status.UNCHANGED, "70000 50000", "max")
    (outcome,) = actuator.apply([batch.decide(Knob.QUOTA, "30000")])
    assert (outcome.status, outcome.after) == (Status.APPLIED, "30000 100000")
    (outcome,) = actuator.apply([batch.decide(Knob.QUOTA, "180000")])
    assert (outcome.status, outcome.after, outcome.clamped_from) == (Status.APPLIED, "70000 50000", "180000")
    assert batch.texts() == before


def test_an_owner_s_new_quota_is_what_comes_back(
    batch: Knobbed, actuator: Actuator, originals: Originals, files: KnobFiles
) -> None:
    actuator.apply([batch.decide(Knob.QUOTA, "10000 100000")])
    files.write(batch.path, batch.id, Knob.QUOTA, "40000 50000")
    theirs = batch.texts()
    (outcome,) = actuator.apply([batch.decide(Knob.QUOTA, "10000 100000")])
    assert (outcome.status, outcome.after) == (Status.APPLIED, "10000 100000")
    assert "changed by someone else to 40000 50000: taken as its new original" in outcome.error
    originals.restore(files)
    assert batch.texts() == theirs


def test_what_cpu_idle_does_to_the_weight_is_no_owner_s_change(
    batch: Knobbed, actuator: Actuator, originals: Originals, files: KnobFiles
) -> None:
    before, idle = batch.texts(), batch.made.file("cpu", "cpu.idle")
    actuator.apply([batch.decide(Knob.WEIGHT, "10")])
    for value in "101":
        (outcome,) = actuator.apply([batch.decide(Knob.IDLE, value)])
        assert (outcome.status, outcome.error) == (Status.APPLIED, "")
    # Somebody makes it not idle: the kernel resets the weight, which nobody has asked for.
    idle.write_text("0\n")
    (outcome,) = actuator.apply([batch.decide(Knob.IDLE, "1")])
    assert (outcome.status, outcome.error) == (Status.APPLIED, "")
    idle.write_text("0\n")
    weight, outcome = actuator.apply([batch.decide(Knob.WEIGHT, "10"), batch.decide(Knob.IDLE, "0")])
    assert (weight.status, weight.error, outcome.error) == (Status.APPLIED, "", "")
    actuator.apply([batch.decide(Knob.IDLE, "1")])
    assert Status.REFUSED not in statuses(originals.restore(files))
    assert batch.texts() == before


def test_a_weight_that_the_owner_sets_beside_leaving_idle_is_theirs(
    batch: Knobbed, actuator: Actuator, originals: Originals, files: KnobFiles
) -> None:
    actuator.apply([batch.decide(Knob.IDLE, "1")])
    batch.made.file("cpu", "cpu.idle").write_text("0\n")
    files.write(batch.path, batch.id, Knob.WEIGHT, "50")
    theirs = batch.texts()
    (outcome,) = actuator.apply([batch.decide(Knob.IDLE, "1")])
    assert outcome.error == "cpu.weight was changed by someone else to 50: taken as its new original"
    originals.restore(files)
    assert batch.texts() == theirs


def test_nested_cpusets_move_to_other_cpus_and_back_in_one_round(
    hierarchy: Hierarchy, actuator: Actuator, originals: Originals, files: KnobFiles
) -> None:
    with nested(hierarchy, "move") as (outer, inner):
        before = outer.texts(), inner.texts()
        outcomes = actuator.apply([inner.decide(Knob.CPUSET, "1"), outer.decide(Knob.CPUSET, "1")])
        assert [(o.status, o.before, o.after) for o in outcomes] == [(Status.APPLIED, "0", "1")] * 2
        assert statuses(originals.restore(files)) == [Status.APPLIED] * 2
        assert (outer.texts(), inner.texts()) == before
        assert originals.entries() == ()


def test_nested_cpusets_grow_from_the_top_and_shrink_from_the_bottom(hierarchy: Hierarchy, actuator: Actuator) -> None:
    with nested(hierarchy, "grow") as (outer, inner):
        for value in ("0-1", "0"):
            outcomes = actuator.apply([inner.decide(Knob.CPUSET, value), outer.decide(Knob.CPUSET, value)])
            assert [(o.status, o.after) for o in outcomes] == [(Status.APPLIED, value)] * 2


def test_an_inherited_cpuset_is_inherited_again(
    batch: Knobbed, actuator: Actuator, originals: Originals, files: KnobFiles
) -> None:
    batch.put({"cpuset.cpus": "\n"})
    (outcome,) = actuator.apply([batch.decide(Knob.CPUSET, "1")])
    assert (outcome.status, outcome.before, outcome.after) == (Status.APPLIED, "", "1")
    originals.restore(files)
    assert batch.texts()["cpuset.cpus"] == "\n"


def test_what_version_1_refuses_is_reported_with_a_remedy_and_changes_nothing(
    hierarchy: Hierarchy, actuator: Actuator, originals: Originals, files: KnobFiles
) -> None:
    if hierarchy.mode == "v2":
        pytest.skip("version 2 refuses no cpuset and no quota because of a cgroup above or below")
    with nested(hierarchy, "no") as (outer, inner):
        inner.put({"cpuset.cpus": "0\n", "cpu.cfs_quota_us": "140000\n"})
        before = outer.texts(), inner.texts()
        narrow, quota = actuator.apply([outer.decide(Knob.CPUSET, "1"), outer.decide(Knob.QUOTA, "30000")])
        assert statuses((narrow, quota)) == [Status.REFUSED] * 2
        assert "Device or resource busy: a cgroup below uses CPUs that this list leaves out" in narrow.error
        assert "Invalid argument: keep the quota" in quota.error
        # The period had to change first, without a limit: that is undone too.
        assert (outer.texts(), inner.texts()) == before
        assert set(statuses(originals.restore(files))) == {Status.UNCHANGED}


@pytest.mark.parametrize(
    ("originals_us", "now_us"), [((30000, 20000), (90000, 80000)), ((90000, 80000), (30000, 20000))]
)
def test_nested_quotas_go_back_whichever_has_to_go_first(
    hierarchy: Hierarchy,
    originals: Originals,
    files: KnobFiles,
    originals_us: tuple[int, int],
    now_us: tuple[int, int],
) -> None:
    with nested(hierarchy, "quotas") as pair:
        for knobbed, quota in zip(pair, originals_us, strict=True):
            files.write(knobbed.path, knobbed.id, Knob.QUOTA, f"{quota} 100000")
        before = [knobbed.texts() for knobbed in pair]
        for knobbed in pair:
            raw = files.read_raw(knobbed.path, knobbed.id, Knob.QUOTA)
            originals.record(Original(cgroup=knobbed.path, cgroup_id=knobbed.id, knob=Knob.QUOTA, raw=raw))
            files.write(knobbed.path, knobbed.id, Knob.QUOTA, "max")
        for knobbed, quota in zip(pair, now_us, strict=True):
            files.write(knobbed.path, knobbed.id, Knob.QUOTA, f"{quota} 100000")
        assert statuses(originals.restore(files)) == [Status.APPLIED] * 2
        assert [knobbed.texts() for knobbed in pair] == before


def test_an_original_that_the_kernel_no_longer_takes_stays_in_the_journal(
    batch: Knobbed, originals: Originals, files: KnobFiles
) -> None:
    if batch.version == "v2":
        pytest.skip("version 2 has no value that it takes and shows as another")
    raw = RawValue(directory_id=batch.id, texts={"cpu.shares": "1\n"})
    originals.record(Original(cgroup=batch.path, cgroup_id=batch.id, knob=Knob.WEIGHT, raw=raw))
    (outcome,) = originals.restore(files)
    assert (outcome.status, batch.texts()["cpu.shares"]) == (Status.MISMATCH, "2\n")
    assert len(originals.entries()) == 1


def test_a_vanished_cgroup_and_its_successor(
    hierarchy: Hierarchy, actuator: Actuator, originals: Originals, files: KnobFiles
) -> None:
    with cgroup(hierarchy, "gone") as made:
        old = Knobbed(made)
        old_id = old.id
        assert statuses(actuator.apply([old.decide(Knob.WEIGHT, "10"), old.decide(Knob.CPUSET, "1")])) == [
            Status.APPLIED,
            Status.APPLIED,
        ]
    decisions = [old.decide(knob, "1", old_id) for knob in Knob]
    assert statuses(actuator.apply(decisions)) == [Status.VANISHED] * 4
    with cgroup(hierarchy, "gone") as made:
        new = Knobbed(made)
        assert (new.path, new.id != old_id) == (old.path, True)
        before = new.texts()
        assert statuses(actuator.apply(decisions)) == [Status.VANISHED] * 4
        assert statuses(originals.restore(files)) == [Status.VANISHED] * 2
        assert originals.entries() == ()
        assert new.texts() == before


def test_a_cpuset_group_made_anew_on_its_own_is_seen_and_keeps_its_values(
    batch: Knobbed, actuator: Actuator, originals: Originals, files: KnobFiles
) -> None:
    if batch.version == "v2":
        pytest.skip("version 2 has one directory for all controllers")
    actuator.apply([batch.decide(Knob.CPUSET, "1")])
    directory = batch.made.file("cpuset", "cpuset.cpus").parent
    directory.rmdir()
    directory.mkdir()
    assert files.read(batch.path, batch.id, Knob.CPUSET) == ""
    assert statuses(originals.restore(files)) == [Status.VANISHED]
    assert batch.texts()["cpuset.cpus"] == "\n"
    assert originals.entries() == ()


def test_a_cgroup_removed_under_an_open_descriptor_is_vanished(hierarchy: Hierarchy, files: KnobFiles) -> None:
    with cgroup(hierarchy, "open") as made:
        before = files.read_raw(made.path, made.id, Knob.QUOTA)
        decision = Knobbed(made).decide(Knob.QUOTA, "5000")
    (outcome,) = Actuator(files, None, Act.ON).apply([decision])
    assert outcome.status is Status.VANISHED
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
    batch: Knobbed, files: KnobFiles, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "state", "64k") as state:
        originals = open_originals(state, boot_id())
        actuator = Actuator(files, originals, Act.ON)
        before = batch.texts()
        assert statuses(actuator.apply([batch.decide(Knob.WEIGHT, "10")])) == [Status.APPLIED]
        _fill(state)
        weighted = batch.texts()
        (idle,) = actuator.apply([batch.decide(Knob.IDLE, "1")])
        assert idle.status is Status.REFUSED
        assert "No space left on device: make room in" in idle.error
        assert batch.texts() == weighted
        assert not (state / "originals.json.tmp").exists()
        # A knob whose original is on disk already may still move.
        assert statuses(actuator.apply([batch.decide(Knob.WEIGHT, "20")])) == [Status.APPLIED]
        originals.close()
        again = open_originals(state, boot_id())
        assert statuses(again.restore(files)) == [Status.APPLIED]
        assert again.entries() == ()
        assert batch.texts() == before
        again.close()


def test_a_read_only_disk_leaves_the_knobs_alone_and_keeps_what_it_knows(
    batch: Knobbed, files: KnobFiles, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "state", "64k") as state:
        originals = open_originals(state, boot_id())
        before = batch.texts()
        Actuator(files, originals, Act.ON).apply([batch.decide(Knob.WEIGHT, "10")])
        originals.close()
        subprocess.run(["mount", "-o", "remount,ro", state], check=True)
        again = open_originals(state, boot_id())
        assert "Read-only file system" in again.messages[0]
        (idle,) = Actuator(files, again, Act.ON).apply([batch.decide(Knob.IDLE, "1")])
        assert idle.status is Status.REFUSED
        assert "Read-only file system" in idle.error
        assert statuses(again.restore(files)) == [Status.APPLIED]
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
    files, originals = KnobFiles(tree.hierarchy), open_originals(tmp_path / "state", boot_id())
    subprocess.run(["mount", "--bind", odd, tree.file("/batch", "cpu.weight")], check=True)
    try:
        (outcome,) = Actuator(files, originals, Act.ON).apply([tree.decision("/batch", Knob.WEIGHT, "16")])
    finally:
        subprocess.run(["umount", tree.file("/batch", "cpu.weight")], check=True)
        odd.write_text(f"0x{old}")
    assert (outcome.status, outcome.after) == (Status.MISMATCH, "10")
    assert "another value than the one written" in outcome.error
    assert len(originals.entries()) == 1
    files.close()
    originals.close()


def as_nobody(work: Callable[..., None], *arguments: object) -> int | None:
    """Exit code of that work in a process of its own; it gives up its privileges itself."""
    process = get_context("forkserver").Process(target=work, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def refuse_without_privileges(hierarchy: Hierarchy, state: Path, path: str, cgroup_id: int) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    files = KnobFiles(hierarchy)
    assert files.read(path, cgroup_id, Knob.WEIGHT) == "33"
    obstacle = files.obstacle()
    assert obstacle is not None
    assert obstacle.remedy.startswith("run the agent as root, or delegate")
    decision = Tree.decision(None, path, Knob.WEIGHT, "10", cgroup_id)  # type: ignore[arg-type]
    (outcome,) = Actuator(files, open_originals(state, boot_id()), Act.ON).apply([decision])
    assert outcome.status is Status.REFUSED, outcome
    assert "Permission denied: run the agent as root" in outcome.error


def test_without_root_values_are_read_and_nothing_is_written(batch: Knobbed, tmp_path: Path) -> None:
    # Outside tmp_path, which only root may enter.
    state = Path(f"/tmp/dioptase-test-{os.getpid()}-nobody")
    state.mkdir()
    os.chown(state, 65534, 65534)
    try:
        before = batch.texts()
        assert as_nobody(refuse_without_privileges, batch.made.hierarchy, state, batch.path, batch.id) == 0
        assert batch.texts() == before
    finally:
        for file in state.iterdir():
            file.unlink()
        state.rmdir()
