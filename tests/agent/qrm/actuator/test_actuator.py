"""Writes of the actuator on trees of ordinary files; tests/kernel/test_actuator.py runs it on a real kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.originals import FILE_NAME, decode_journal
from agent.qrm.actuator.state_dir import open_originals
from agent.qrm.knobs.knob_files import KNOB_SPECS, UNSUPPORTED
from api.decision import ActMode, OutcomeStatus
from api.knobs import ONE_SHOT_KNOBS, Knob
from tests.agent.qrm.actuator.trees import BOOT, MODES, Bench

CPU_KNOBS = (Knob.CPUSET, Knob.MEMS, Knob.WEIGHT, Knob.QUOTA, Knob.BURST, Knob.IDLE)


@pytest.fixture(params=MODES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    instance = Bench(tmp_path, request.param)
    yield instance
    instance.close()


def test_every_knob_is_written_read_back_and_restored(bench: Bench) -> None:
    before = bench.tree.texts("/batch")
    requests = {Knob.CPUSET: "2-3", Knob.WEIGHT: "1", Knob.QUOTA: "150000 50000"}
    outcomes = bench.apply(*(("/batch", knob, value) for knob, value in requests.items()))
    assert [(o.status, o.decision.knob, o.after) for o in outcomes] == [
        (OutcomeStatus.APPLIED, knob, value) for knob, value in requests.items()
    ]
    assert bench.tree.texts("/batch") != before
    restored = bench.originals.restore(bench.files)
    assert {o.status for o in restored} == {OutcomeStatus.APPLIED}
    assert bench.tree.texts("/batch") == before
    assert bench.originals.entries() == ()
    assert not bench.originals.path.exists()


def test_an_unchanged_value_is_neither_written_nor_journalled(bench: Bench) -> None:
    outcomes = bench.apply(("/batch", Knob.QUOTA, "max"), ("/batch", Knob.IDLE, "0"), ("/batch", Knob.WEIGHT, "100"))
    assert {o.status for o in outcomes} == {OutcomeStatus.UNCHANGED}
    assert bench.journalled() == {}
    assert [o.after for o in outcomes] == ["max 100000", "0", "100"]


def test_clamped_values_are_applied_and_report_the_requested_value(bench: Bench) -> None:
    bench.apply(("/batch", Knob.QUOTA, "20000"))
    outcomes = bench.apply(
        ("/batch", Knob.CPUSET, "1-9"), ("/batch", Knob.WEIGHT, "99999"), ("/batch", Knob.QUOTA, "900000")
    )
    assert [(o.decision.value, o.clamped_from, o.after) for o in outcomes] == [
        ("1-3", "1-9", "1-3"),
        ("10000", "99999", "10000"),
        ("max 100000", "900000", "max 100000"),
    ]


@pytest.mark.parametrize(
    ("knob", "value", "error"),
    [
        (Knob.CPUSET, "6-7", "none of the CPUs 6-7 is available in the parent cgroup, which has 0-3"),
        (Knob.WEIGHT, "high", "cpu.weight: 'high' is not a whole number of at least 0"),
        (Knob.QUOTA, "a 100000", "cpu.max: 'a' is not a whole number"),
        (Knob.IDLE, "yes", "cpu.idle: 'yes' is neither 0 nor 1"),
    ],
)
def test_an_invalid_value_is_refused_and_others_are_applied(bench: Bench, knob: Knob, value: str, error: str) -> None:
    bad, good = bench.apply(("/batch", knob, value), ("/batch", Knob.WEIGHT, "50"))
    assert bad.status is OutcomeStatus.REFUSED
    assert error in bad.error
    assert good.status is OutcomeStatus.APPLIED


def test_the_root_cgroup_is_never_written(bench: Bench) -> None:
    before = bench.tree.texts("/")
    (outcome,) = bench.apply(("/", Knob.IDLE, "1"))
    assert outcome.status is OutcomeStatus.REFUSED
    assert bench.tree.texts("/") == before


def test_setting_idle_journals_the_weight(bench: Bench) -> None:
    bench.apply(("/batch", Knob.IDLE, "1"))
    weight = {"cpu.weight": "100\n"} if bench.tree.hierarchy.mode == "v2" else {"cpu.shares": "1024\n"}
    assert bench.journalled() == {("/batch", Knob.IDLE): {"cpu.idle": "0\n"}, ("/batch", Knob.WEIGHT): weight}


def test_a_weight_is_not_written_while_the_cgroup_is_idle(bench: Bench) -> None:
    weight, idle = bench.apply(("/batch", Knob.WEIGHT, "50"), ("/batch", Knob.IDLE, "1"))
    assert (weight.status, idle.status) == (OutcomeStatus.UNCHANGED, OutcomeStatus.APPLIED)
    assert "cpu.idle=1 pins the weight" in weight.error
    (weight,) = bench.apply(("/batch", Knob.WEIGHT, "50"))
    assert (weight.status, weight.after) == (OutcomeStatus.UNCHANGED, "100")
    weight, idle = bench.apply(("/batch", Knob.WEIGHT, "50"), ("/batch", Knob.IDLE, "0"))
    assert (weight.status, weight.after, idle.status) == (OutcomeStatus.APPLIED, "50", OutcomeStatus.APPLIED)


def test_the_weight_of_an_idle_cgroup_is_not_journalled(bench: Bench) -> None:
    bench.tree.file("/batch", "cpu.idle").write_text("1\n")
    idle, weight = bench.apply(("/batch", Knob.IDLE, "0"), ("/batch", Knob.WEIGHT, "50"))
    assert (idle.status, weight.status) == (OutcomeStatus.APPLIED, OutcomeStatus.APPLIED)
    assert bench.journalled() == {("/batch", Knob.IDLE): {"cpu.idle": "1\n"}}


def test_a_journalled_original_is_not_written_again(bench: Bench) -> None:
    bench.tree.make("/other")
    bench.apply(("/batch", Knob.WEIGHT, "50"), ("/other", Knob.WEIGHT, "50"))
    inode = bench.originals.path.stat().st_ino
    bench.apply(("/batch", Knob.WEIGHT, "60"), ("/other", Knob.WEIGHT, "70"))
    assert bench.originals.path.stat().st_ino == inode


def test_another_cgroup_on_the_path_is_left_alone(bench: Bench) -> None:
    old = bench.tree.id("/batch")
    bench.tree.remove("/batch")
    bench.tree.make("/batch")
    before = bench.tree.texts("/batch")
    outcomes = bench.actuator.apply([bench.tree.decision("/batch", knob, "1", old) for knob in CPU_KNOBS])
    assert {o.status for o in outcomes} == {OutcomeStatus.VANISHED}
    assert bench.tree.texts("/batch") == before


def test_outcomes_come_in_the_order_of_the_decisions(bench: Bench) -> None:
    bench.tree.make("/batch/inner")
    requests = [(path, knob) for knob in reversed(CPU_KNOBS) for path in ("/batch/inner", "/batch")]
    outcomes = bench.apply(*((path, knob, "1") for path, knob in requests))
    assert [(o.decision.cgroup, o.decision.knob) for o in outcomes] == requests


def test_a_child_is_clamped_to_the_new_cpus_of_its_parent(bench: Bench) -> None:
    bench.tree.make("/batch/inner")
    inner, outer = bench.apply(("/batch/inner", Knob.CPUSET, "0-3"), ("/batch", Knob.CPUSET, "1-2"))
    assert (inner.after, outer.after) == ("1-2", "1-2")
    assert inner.clamped_from == "0-3"


def test_a_nested_cpuset_of_the_owner_stays_within_the_parent_s(bench: Bench) -> None:
    """On version 1 nested cgroups get decisions as well: CPU 3 stays, and follows the parent once it is not allowed."""
    bench.tree.make("/batch/inner")
    bench.tree.file("/batch/inner", "cpuset.cpus").write_text("3\n")
    for parent_cpus, pinned in (("1-3", "3"), ("0-3", "3"), ("1-2", "1-2"), ("2-3", "3")):
        _, inner = bench.apply(("/batch", Knob.CPUSET, parent_cpus), ("/batch/inner", Knob.CPUSET, parent_cpus))
        assert inner.after == pinned


@pytest.mark.parametrize("mode", MODES)
def test_off_and_dry_run_write_nothing(tmp_path: Path, mode: str) -> None:
    bench = Bench(tmp_path, mode, ActMode.DRY_RUN)
    before = bench.tree.texts("/batch")
    requests = [("/batch", Knob.IDLE, "1"), ("/batch", Knob.QUOTA, "30000"), ("/batch", Knob.WEIGHT, "7")]
    idle, quota, weight = bench.apply(*requests)
    assert (idle.status, idle.before, idle.after) == (OutcomeStatus.DRY_RUN, "0", None)
    assert (quota.status, quota.before, quota.after) == (OutcomeStatus.DRY_RUN, "max 100000", None)
    assert weight.status is OutcomeStatus.UNCHANGED
    off = Actuator(bench.files, bench.originals, ActMode.OFF)
    assert off.apply([bench.tree.decision(*request) for request in requests]) == ()
    assert bench.tree.texts("/batch") == before
    assert bench.journalled() == {}
    bench.close()


@pytest.mark.parametrize("mode", MODES)
def test_without_a_journal_nothing_is_written(tmp_path: Path, mode: str) -> None:
    bench = Bench(tmp_path, mode)
    before = bench.tree.texts("/batch")
    outcomes = Actuator(bench.files, None, ActMode.ON).apply([bench.tree.decision("/batch", Knob.WEIGHT, "7")])
    assert [(o.status, o.before, o.after) for o in outcomes] == [(OutcomeStatus.REFUSED, "100", None)]
    assert "--state-dir" in outcomes[0].error
    assert bench.tree.texts("/batch") == before
    bench.close()


def test_a_knob_that_the_kernel_lacks_is_refused_by_name(bench: Bench) -> None:
    bench.tree.file("/batch", "cpu.idle").unlink()
    idle, weight = bench.apply(("/batch", Knob.IDLE, "1"), ("/batch", Knob.WEIGHT, "7"))
    assert (idle.status, weight.status) == (OutcomeStatus.REFUSED, OutcomeStatus.APPLIED)
    assert "cannot read cpu.idle: No such file or directory" in idle.error


def test_restore_skips_knobs_that_are_still_decided(bench: Bench) -> None:
    bench.apply(("/batch", Knob.IDLE, "1"), ("/batch", Knob.CPUSET, "1"))
    outcomes = bench.originals.restore(bench.files, keep={("/batch", Knob.IDLE)})
    assert [(o.decision.knob, o.status) for o in outcomes] == [(Knob.CPUSET, OutcomeStatus.APPLIED)]
    assert set(bench.journalled()) == {("/batch", Knob.IDLE), ("/batch", Knob.WEIGHT)}
    assert bench.tree.file("/batch", "cpu.idle").read_text() == "1\n"


def test_available_knobs_are_probed_for_each_cgroup(bench: Bench) -> None:
    bench.tree.make("/old")
    bench.tree.file("/old", "cpu.idle").unlink()
    version = "v2" if bench.tree.hierarchy.mode == "v2" else "v1"
    everything = frozenset(knob for knob in (*KNOB_SPECS, *ONE_SHOT_KNOBS) if (knob, version) not in UNSUPPORTED)
    assert bench.actuator.knobs(["/batch", "/old", "/none"]) == {
        "/batch": everything,
        "/old": everything - {Knob.IDLE},
        "/none": frozenset(),
    }


def set_quota(bench: Bench, quota_us: int | None) -> None:
    """Write the quota as its owner would; None is no limit."""
    if bench.tree.hierarchy.mode == "v2":
        bench.tree.file("/batch", "cpu.max").write_text(f"{quota_us or 'max'} 100000\n")
    else:
        bench.tree.file("/batch", "cpu.cfs_quota_us").write_text(f"{quota_us or -1}\n")


def quota_of(bench: Bench) -> str:
    return bench.files.read("/batch", bench.tree.id("/batch"), Knob.QUOTA)


def test_an_external_modification_becomes_the_new_original(bench: Bench) -> None:
    set_quota(bench, 150000)
    bench.apply(("/batch", Knob.QUOTA, "10000"))
    set_quota(bench, 80000)
    (outcome,) = bench.apply(("/batch", Knob.QUOTA, "10000"))
    assert (outcome.status, outcome.before, outcome.after) == (OutcomeStatus.APPLIED, "80000 100000", "10000 100000")
    assert outcome.error == "cpu.max was changed by another program to 80000 100000, which becomes its new original"
    _, on_disk = decode_journal(bench.originals.path.read_bytes())
    assert [entry.raw for entry in on_disk] == [entry.raw for entry in bench.originals.entries()]
    (outcome,) = bench.apply(("/batch", Knob.QUOTA, "10000"))
    assert (outcome.status, outcome.error) == (OutcomeStatus.UNCHANGED, "")
    (outcome,) = bench.apply(("/batch", Knob.QUOTA, "max"))
    assert (outcome.after, outcome.clamped_from) == ("80000 100000", "max"), "the owner's new limit is never loosened"
    bench.apply(("/batch", Knob.QUOTA, "20000"))
    bench.originals.restore(bench.files)
    assert quota_of(bench) == "80000 100000"
    assert not bench.originals.path.exists()


def test_a_lower_quota_of_the_owner_stays(bench: Bench) -> None:
    bench.apply(("/batch", Knob.QUOTA, "10000"))
    set_quota(bench, 5000)
    (outcome,) = bench.apply(("/batch", Knob.QUOTA, "10000"))
    assert (outcome.status, outcome.after, outcome.clamped_from) == (OutcomeStatus.UNCHANGED, "5000 100000", "10000")
    assert "changed by another program to 5000 100000" in outcome.error
    set_quota(bench, 4000)
    (outcome,) = bench.apply(("/batch", Knob.QUOTA, "10000"))
    assert "changed by another program to 4000 100000" in outcome.error
    bench.originals.restore(bench.files)
    assert quota_of(bench) == "4000 100000"


def test_an_external_change_after_the_last_cycle_is_not_restored(bench: Bench) -> None:
    bench.apply(("/batch", Knob.QUOTA, "10000"), ("/batch", Knob.WEIGHT, "7"))
    set_quota(bench, 80000)
    outcomes = {outcome.decision.knob: outcome for outcome in bench.originals.restore(bench.files)}
    assert "another program changed the value" in outcomes[Knob.QUOTA].error
    assert (outcomes[Knob.WEIGHT].status, outcomes[Knob.WEIGHT].error) == (OutcomeStatus.APPLIED, "")
    assert quota_of(bench) == "80000 100000"
    assert bench.originals.entries() == ()


def test_a_knob_that_returned_to_its_original_is_no_external_change(bench: Bench) -> None:
    bench.apply(("/batch", Knob.QUOTA, "10000"))
    set_quota(bench, None)
    (outcome,) = bench.apply(("/batch", Knob.QUOTA, "10000"))
    assert (outcome.status, outcome.error) == (OutcomeStatus.APPLIED, "")


def test_a_restarted_agent_keeps_originals_and_detects_later_changes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "v2")
    set_quota(bench, 150000)
    bench.apply(("/batch", Knob.QUOTA, "10000"))
    bench.originals.close()
    again = open_originals(tmp_path / "state", BOOT)
    actuator = Actuator(bench.files, again, ActMode.ON)
    for value, status in (("10000", OutcomeStatus.UNCHANGED), ("20000", OutcomeStatus.APPLIED)):
        (outcome,) = actuator.apply([bench.tree.decision("/batch", Knob.QUOTA, value)])
        assert (outcome.status, outcome.error) == (status, "")
    again.close()
    again = open_originals(tmp_path / "state", BOOT)
    actuator = Actuator(bench.files, again, ActMode.ON)
    # The first cycle finds the decided value: it counts as the agent's own, and later differences are external.
    actuator.apply([bench.tree.decision("/batch", Knob.QUOTA, "20000")])
    set_quota(bench, 80000)
    (outcome,) = actuator.apply([bench.tree.decision("/batch", Knob.QUOTA, "20000")])
    assert "changed by another program to 80000 100000" in outcome.error
    again.restore(bench.files)
    assert quota_of(bench) == "80000 100000"
    again.close()
    bench.close()


def test_a_program_that_keeps_changing_a_knob_costs_one_journal_write_per_cycle(bench: Bench) -> None:
    bench.apply(("/batch", Knob.QUOTA, "10000"))
    sizes, inodes = set(), set()
    for turn in range(50):
        set_quota(bench, 50000 + turn)
        before = bench.originals.path.stat().st_ino
        (outcome,) = bench.apply(("/batch", Knob.QUOTA, "10000"))
        assert f"changed by another program to {50000 + turn} 100000" in outcome.error
        sizes.add(len(bench.originals.path.read_bytes()))
        inodes.add(bench.originals.path.stat().st_ino != before)
    assert (len(sizes), inodes) == (1, {True})
    assert sorted(path.name for path in bench.originals.path.parent.iterdir()) == ["holder.pid", FILE_NAME]


def test_a_cpuset_reduced_by_offline_cpus_is_no_external_change(bench: Bench) -> None:
    effective = "cpuset.cpus.effective" if bench.tree.hierarchy.mode == "v2" else "cpuset.effective_cpus"
    bench.apply(("/batch", Knob.CPUSET, "2-3"))
    original = bench.journalled()
    bench.tree.file("/", effective).write_text("0-2\n")
    bench.tree.file("/batch", "cpuset.cpus").write_text("2\n")
    (outcome,) = bench.apply(("/batch", Knob.CPUSET, "1-2"))
    assert (outcome.status, outcome.error) == (OutcomeStatus.APPLIED, "")
    bench.tree.file("/batch", "cpuset.cpus").write_text("0\n")
    assert bench.journalled() == original
    (outcome,) = bench.apply(("/batch", Knob.CPUSET, "1-2"))
    assert "cpuset.cpus was changed by another program to 0," in outcome.error
