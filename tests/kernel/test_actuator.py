"""The actuator and the journal of originals on a real cgroup: what is applied comes back, what an owner changes stays."""

from __future__ import annotations

import pytest

from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import OutcomeStatus
from api.knobs import Knob
from tests.builders.waiting import until
from tests.kernel.knob_cgroups import ODD, KnobCgroup, nested, statuses

pytestmark = pytest.mark.kernel


def test_every_knob_is_applied_and_restored_exactly(
    batch: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    before = batch.texts()
    values = {
        Knob.WEIGHT: "10",
        Knob.QUOTA: "30000 100000",
        Knob.CPUSET: "1",
        Knob.BURST: "10000",
        Knob.MEMORY_MAX: "67108864",
    }
    outcomes = actuator.apply([batch.decide(knob, value) for knob, value in values.items()])
    assert [(o.status, o.before, o.after) for o in outcomes] == [
        (OutcomeStatus.APPLIED, "33", "10"),
        (OutcomeStatus.APPLIED, "70000 50000", "30000 100000"),
        (OutcomeStatus.APPLIED, "0", "1"),
        (OutcomeStatus.APPLIED, "30000", "10000"),
        (OutcomeStatus.APPLIED, "134217728", "67108864"),
    ]
    (idle,) = actuator.apply([batch.decide(Knob.IDLE, "1")])
    assert (idle.status, idle.before, idle.after) == (OutcomeStatus.APPLIED, "0", "1")
    changed = batch.texts()
    assert all(changed[name] != before[name] for name in before)
    assert statuses(originals.restore(files)) == [OutcomeStatus.APPLIED] * 6
    assert batch.texts() == before
    assert originals.entries() == ()


def test_the_quota_really_throttles(batch: KnobCgroup, actuator: Actuator) -> None:
    stat = batch.cgroup.file("cpu", "cpu.stat")
    actuator.apply([batch.decide(Knob.QUOTA, "20000 100000")])
    batch.cgroup.burn()
    until(lambda: "nr_throttled 0" not in stat.read_text(), seconds=60)


def test_leaving_idle_restores_the_owner_s_weight_and_not_the_default(batch: KnobCgroup, actuator: Actuator) -> None:
    file = "cpu.weight" if batch.version == "v2" else "cpu.shares"
    own = batch.texts()[file]
    actuator.apply([batch.decide(Knob.IDLE, "1")])
    assert batch.texts()[file] != own
    (outcome,) = actuator.apply([batch.decide(Knob.IDLE, "0")])
    assert (outcome.status, outcome.error) == (OutcomeStatus.APPLIED, "")
    assert batch.texts()[file] == own


def test_a_weight_for_an_idle_group_waits_and_the_kernel_would_refuse_it(
    batch: KnobCgroup, actuator: Actuator, files: KnobWriter
) -> None:
    actuator.apply([batch.decide(Knob.IDLE, "1")])
    (outcome,) = actuator.apply([batch.decide(Knob.WEIGHT, "7")])
    assert outcome.status is OutcomeStatus.UNCHANGED
    assert "pins the weight" in outcome.error
    with pytest.raises(Exception, match="Invalid argument") as caught:
        files.write(batch.path, batch.id, Knob.WEIGHT, "7")
    assert caught.value.remedy == "cpu.idle=1 pins the weight: set cpu.idle to 0 first"
    weight, idle = actuator.apply([batch.decide(Knob.WEIGHT, "7"), batch.decide(Knob.IDLE, "0")])
    assert (weight.status, weight.after, idle.status) == (OutcomeStatus.APPLIED, "7", OutcomeStatus.APPLIED)


def test_a_group_found_idle_is_left_idle(
    batch: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    batch.cgroup.file("cpu", "cpu.idle").write_text("1\n")
    before = batch.texts()
    assert statuses(actuator.apply([batch.decide(Knob.IDLE, "0"), batch.decide(Knob.WEIGHT, "50")])) == [
        OutcomeStatus.APPLIED,
        OutcomeStatus.APPLIED,
    ]
    actuator.apply([batch.decide(Knob.WEIGHT, "60")])
    assert OutcomeStatus.REFUSED not in statuses(originals.restore(files))
    assert batch.texts() == before
    assert originals.entries() == ()


def test_an_unlimited_quota_and_its_period_come_back(
    batch: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    unlimited = (
        {"cpu.max": "max 25000\n"}
        if batch.version == "v2"
        else {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "25000\n"}
    )
    batch.put({**ODD[batch.version], **dict(reversed(unlimited.items()))})
    before = batch.texts()
    assert statuses(actuator.apply([batch.decide(Knob.QUOTA, "max 100000")])) == [OutcomeStatus.UNCHANGED]
    assert statuses(actuator.apply([batch.decide(Knob.QUOTA, "5000")])) == [OutcomeStatus.APPLIED]
    originals.restore(files)
    assert batch.texts() == before


def test_ratios_at_the_parent_s_limit_move_between_periods(hierarchy: Hierarchy, files: KnobWriter) -> None:
    with nested(hierarchy, "ratio") as (_, inner):
        # 1.4 CPUs each, all that the group above has: with the old quota or the old period it would be more on the way.
        for value in ("70000 50000", "140000 100000", "14000 10000", "1400000 1000000"):
            files.write(inner.path, inner.id, Knob.QUOTA, value)
            assert files.read(inner.path, inner.id, Knob.QUOTA) == value


def test_the_owner_s_quota_is_never_exceeded(batch: KnobCgroup, actuator: Actuator) -> None:
    before = batch.texts()
    (outcome,) = actuator.apply([batch.decide(Knob.QUOTA, "max")])
    assert (outcome.status, outcome.after, outcome.clamped_from) == (OutcomeStatus.UNCHANGED, "70000 50000", "max")
    (outcome,) = actuator.apply([batch.decide(Knob.QUOTA, "30000")])
    assert (outcome.status, outcome.after) == (OutcomeStatus.APPLIED, "30000 100000")
    (outcome,) = actuator.apply([batch.decide(Knob.QUOTA, "180000")])
    assert (outcome.status, outcome.after, outcome.clamped_from) == (OutcomeStatus.APPLIED, "70000 50000", "180000")
    assert batch.texts() == before


def test_an_owner_s_new_quota_is_what_comes_back(
    batch: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    actuator.apply([batch.decide(Knob.QUOTA, "10000 100000")])
    files.write(batch.path, batch.id, Knob.QUOTA, "40000 50000")
    # The agent's first quota has taken down the burst, which is the owner's too.
    burst = "cpu.max.burst" if batch.version == "v2" else "cpu.cfs_burst_us"
    owner_texts = {**batch.texts(), burst: ODD[batch.version][burst]}
    assert batch.texts() != owner_texts
    (outcome,) = actuator.apply([batch.decide(Knob.QUOTA, "10000 100000")])
    assert (outcome.status, outcome.after) == (OutcomeStatus.APPLIED, "10000 100000")
    assert "changed by another program to 40000 50000, which becomes its new original" in outcome.error
    originals.restore(files)
    assert batch.texts() == owner_texts


def test_what_cpu_idle_does_to_the_weight_is_no_owner_s_change(
    batch: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    before, idle = batch.texts(), batch.cgroup.file("cpu", "cpu.idle")
    actuator.apply([batch.decide(Knob.WEIGHT, "10")])
    for value in "101":
        (outcome,) = actuator.apply([batch.decide(Knob.IDLE, value)])
        assert (outcome.status, outcome.error) == (OutcomeStatus.APPLIED, "")
    # Another program clears cpu.idle: the kernel resets the weight, which is no external modification.
    idle.write_text("0\n")
    (outcome,) = actuator.apply([batch.decide(Knob.IDLE, "1")])
    assert (outcome.status, outcome.error) == (OutcomeStatus.APPLIED, "")
    idle.write_text("0\n")
    weight, outcome = actuator.apply([batch.decide(Knob.WEIGHT, "10"), batch.decide(Knob.IDLE, "0")])
    assert (weight.status, weight.error, outcome.error) == (OutcomeStatus.APPLIED, "", "")
    actuator.apply([batch.decide(Knob.IDLE, "1")])
    assert OutcomeStatus.REFUSED not in statuses(originals.restore(files))
    assert batch.texts() == before


def test_a_weight_set_by_the_owner_while_leaving_idle_is_the_new_original(
    batch: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    actuator.apply([batch.decide(Knob.IDLE, "1")])
    batch.cgroup.file("cpu", "cpu.idle").write_text("0\n")
    files.write(batch.path, batch.id, Knob.WEIGHT, "50")
    owner_texts = batch.texts()
    (outcome,) = actuator.apply([batch.decide(Knob.IDLE, "1")])
    assert outcome.error == "cpu.weight was changed by another program to 50, which becomes its new original"
    originals.restore(files)
    assert batch.texts() == owner_texts
