"""The actuator on cgroups within cgroups, where the kernel holds one value against another."""

from __future__ import annotations

import pytest

from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.writer import KnobWriter, OriginalValue
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import OutcomeStatus
from api.knobs import Knob
from tests.kernel.knob_cgroups import KnobCgroup, nested, statuses

pytestmark = pytest.mark.kernel


def test_nested_cpusets_move_to_other_cpus_and_back_in_one_round(
    hierarchy: Hierarchy, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    with nested(hierarchy, "move") as (outer, inner):
        before = outer.texts(), inner.texts()
        outcomes = actuator.apply([inner.decide(Knob.CPUSET, "1"), outer.decide(Knob.CPUSET, "1")])
        assert [(o.status, o.before, o.after) for o in outcomes] == [(OutcomeStatus.APPLIED, "0", "1")] * 2
        assert statuses(originals.restore(files)) == [OutcomeStatus.APPLIED] * 2
        assert (outer.texts(), inner.texts()) == before
        assert originals.entries() == ()


def test_nested_cpusets_grow_from_the_top_and_shrink_from_the_bottom(hierarchy: Hierarchy, actuator: Actuator) -> None:
    with nested(hierarchy, "grow") as (outer, inner):
        for knobbed in (outer, inner):
            knobbed.put({"cpuset.cpus": "0-1\n"})
        for value in ("0", "0-1", "0"):
            outcomes = actuator.apply([inner.decide(Knob.CPUSET, value), outer.decide(Knob.CPUSET, value)])
            assert [(o.status, o.after) for o in outcomes] == [(OutcomeStatus.APPLIED, value)] * 2


def test_what_the_owner_pinned_below_stays_where_it_is(hierarchy: Hierarchy, actuator: Actuator) -> None:
    with nested(hierarchy, "pinned") as (outer, inner):
        outer.put({"cpuset.cpus": "0-1\n"})
        inner.put({"cpuset.cpus": "0\n"})
        for value, pinned in (("0-1", "0"), ("1", "1"), ("0-1", "0")):
            _, inner_outcome = actuator.apply([outer.decide(Knob.CPUSET, value), inner.decide(Knob.CPUSET, value)])
            assert inner_outcome.after == pinned


def test_an_inherited_cpuset_is_inherited_again(
    batch: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    batch.put({"cpuset.cpus": "\n"})
    (outcome,) = actuator.apply([batch.decide(Knob.CPUSET, "1")])
    assert (outcome.status, outcome.before, outcome.after) == (OutcomeStatus.APPLIED, "", "1")
    originals.restore(files)
    assert batch.texts()["cpuset.cpus"] == "\n"


def test_what_version_1_refuses_is_reported_with_a_remedy_and_changes_nothing(
    hierarchy: Hierarchy, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    if hierarchy.mode == "v2":
        pytest.skip("version 2 refuses no cpuset and no quota because of a cgroup above or below")
    with nested(hierarchy, "no") as (outer, inner):
        inner.put({"cpuset.cpus": "0\n", "cpu.cfs_quota_us": "140000\n"})
        before = outer.texts(), inner.texts()
        narrow, quota = actuator.apply([outer.decide(Knob.CPUSET, "1"), outer.decide(Knob.QUOTA, "30000")])
        assert statuses((narrow, quota)) == [OutcomeStatus.REFUSED] * 2
        assert "Device or resource busy: a cgroup below uses CPUs that this list leaves out" in narrow.error
        assert "Invalid argument: keep the quota" in quota.error
        # The period had to change first, without a limit: that is undone too.
        assert (outer.texts(), inner.texts()) == before
        assert set(statuses(originals.restore(files))) == {OutcomeStatus.UNCHANGED}


@pytest.mark.parametrize(
    ("originals_us", "now_us"), [((30000, 20000), (90000, 80000)), ((90000, 80000), (30000, 20000))]
)
def test_nested_quotas_go_back_whichever_has_to_go_first(
    hierarchy: Hierarchy,
    originals: OriginalsJournal,
    files: KnobWriter,
    originals_us: tuple[int, int],
    now_us: tuple[int, int],
) -> None:
    with nested(hierarchy, "quotas") as pair:
        for knobbed, quota in zip(pair, originals_us, strict=True):
            files.write(knobbed.path, knobbed.id, Knob.QUOTA, f"{quota} 100000")
        before = [knobbed.texts() for knobbed in pair]
        for knobbed in pair:
            raw = files.read_raw(knobbed.path, knobbed.id, Knob.QUOTA)
            originals.record(OriginalValue(cgroup=knobbed.path, cgroup_id=knobbed.id, knob=Knob.QUOTA, raw=raw))
            files.write(knobbed.path, knobbed.id, Knob.QUOTA, "max")
        for knobbed, quota in zip(pair, now_us, strict=True):
            files.write(knobbed.path, knobbed.id, Knob.QUOTA, f"{quota} 100000")
        assert statuses(originals.restore(files)) == [OutcomeStatus.APPLIED] * 2
        assert [knobbed.texts() for knobbed in pair] == before
