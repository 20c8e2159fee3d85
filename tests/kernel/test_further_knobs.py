"""Memory, swap, NUMA nodes, disks and packets on real cgroups: put back bit for bit; and what is done once."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.one_shot import IN_PROGRESS
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.qrm.actuator.sysfs_writer import SysfsWriter
from agent.qrm.actuator.writer import KnobWriter, OriginalValue
from agent.qrm.knobs.io import SysfsSetting
from agent.qrm.knobs.notation import PAGE_BYTES
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import Outcome, OutcomeStatus
from api.knobs import Knob, Reason
from api.units import MIB
from cli.reset import reset
from tests.builders.waiting import until
from tests.kernel.knob_cgroups import KnobCgroup, nested, statuses
from tests.kernel.real_cgroups import cgroup

pytestmark = pytest.mark.kernel

HOLD = """
import mmap, sys, time
anonymous = mmap.mmap(-1, int(sys.argv[1]) or 4096)
for page in range(0, int(sys.argv[1]), 4096):
    anonymous[page] = 1
with open(sys.argv[2], "rb") as file:
    while file.read(1 << 20):
        pass
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def group(hierarchy: Hierarchy) -> Iterator[KnobCgroup]:
    """A cgroup with the kernel's own values."""
    with cgroup(hierarchy, "further") as instance:
        yield KnobCgroup(instance)


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A file of 32 MiB, all of it on disk and none of it in memory."""
    path = tmp_path / "cached"
    with path.open("wb") as file:
        file.write(bytes(32 * MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def disk() -> str:
    """Number of a disk that stands for any."""
    cgroup_id = sorted(Path("/sys/block").glob("*/dev"))
    if not cgroup_id:
        pytest.skip("this machine has no block device")
    return cgroup_id[0].read_text().strip()


def requires(files: KnobWriter, group: KnobCgroup, knob: Knob) -> None:
    if not files.available(knob, group.path):
        pytest.skip(f"this kernel has no {knob.value} here")


def raw(files: KnobWriter, group: KnobCgroup, knob: Knob) -> dict[str, str]:
    """What the files hold, read by other means than the agent's."""
    codec = files._codec(knob, group.path)
    return {file: group.cgroup.file(codec.controller, file).read_text() for file in codec.files}


@pytest.mark.parametrize(
    ("knob", "first", "then"),
    [
        (Knob.BURST, "0", "5000"),
        (Knob.MEMORY_MAX, "max", str(64 * MIB)),
        (Knob.MEMORY_HIGH, "max", str(48 * MIB)),
        (Knob.MEMORY_LOW, "0", str(4 * MIB)),
        (Knob.MEMORY_MIN, "0", str(4 * MIB)),
        (Knob.IO_WEIGHT, "100", "20"),
        (Knob.IO_MAX, "", "{disk} rbps=1048576 wbps=max riops=max wiops=200"),
        (Knob.NET_CLASS, "0", "65537"),
    ],
)
def test_a_knob_is_written_read_back_and_restored(
    group: KnobCgroup,
    actuator: Actuator,
    originals: OriginalsJournal,
    files: KnobWriter,
    knob: Knob,
    first: str,
    then: str,
) -> None:
    requires(files, group, knob)
    then = then.format(disk=disk()) if "{" in then else then
    before = raw(files, group, knob)
    (outcome,) = actuator.apply([group.decide(knob, then)])
    assert (outcome.status, outcome.before, outcome.after) == (OutcomeStatus.APPLIED, first, then)
    assert raw(files, group, knob) != before
    (outcome,) = actuator.apply([group.decide(knob, then)])
    assert outcome.status is OutcomeStatus.UNCHANGED
    assert statuses(originals.restore(files)) == [OutcomeStatus.APPLIED]
    assert raw(files, group, knob) == before


def test_an_owner_s_disk_limits_stay_and_come_back(
    group: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    requires(files, group, Knob.IO_MAX)
    device = disk()
    files.write(group.path, group.id, Knob.IO_MAX, f"{device} rbps=2097152 wiops=300")
    before = raw(files, group, Knob.IO_MAX)
    (outcome,) = actuator.apply([group.decide(Knob.IO_MAX, f"{device} rbps=4194304 wbps=1048576")])
    assert outcome.after == f"{device} rbps=2097152 wbps=1048576 riops=max wiops=300", "never looser than the owner's"
    (outcome,) = actuator.apply([group.decide(Knob.IO_MAX, "4000:77 rbps=1048576")])
    assert outcome.status is OutcomeStatus.REFUSED
    assert "whole disks that are there" in outcome.error
    originals.restore(files)
    assert raw(files, group, Knob.IO_MAX) == before


def test_memory_moves_with_the_nodes_and_the_owner_s_flag_comes_back(
    group: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    """Of one NUMA node: what lies outside is cut off, what has nothing in common is refused, the flag is what changes."""
    if files.allowed_above(group.path, Knob.MEMS) != (0,):
        pytest.skip("this machine has more than one NUMA node")
    (outcome,) = actuator.apply([group.decide(Knob.MEMS, "0-1")])
    assert (outcome.status, outcome.after, outcome.clamped_from) == (OutcomeStatus.UNCHANGED, "0", "0-1")
    (outcome,) = actuator.apply([group.decide(Knob.MEMS, "1")])
    assert (outcome.status, "none of the NUMA nodes 1" in outcome.error) == (OutcomeStatus.REFUSED, True)
    before = raw(files, group, Knob.MEMS)
    cgroup_id = files.read_raw(group.path, group.id, Knob.MEMS)
    originals.record(OriginalValue(cgroup=group.path, cgroup_id=group.id, knob=Knob.MEMS, raw=cgroup_id))
    files.write(group.path, group.id, Knob.MEMS, "0")
    if group.version == "v1":
        assert raw(files, group, Knob.MEMS) == {**before, "cpuset.memory_migrate": "1\n"}
        assert statuses(originals.restore(files)) == [OutcomeStatus.APPLIED]
    assert raw(files, group, Knob.MEMS) == before


def test_swap_is_counted_from_memory_and_makes_way_for_it(
    group: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    requires(files, group, Knob.SWAP_MAX)
    before = raw(files, group, Knob.SWAP_MAX), raw(files, group, Knob.MEMORY_MAX)
    memory, swap = actuator.apply(
        [group.decide(Knob.MEMORY_MAX, str(32 * MIB)), group.decide(Knob.SWAP_MAX, str(8 * MIB))]
    )
    assert (memory.after, swap.after) == (str(32 * MIB), str(8 * MIB))
    # Version 1 would refuse more memory than both may have together.
    memory, swap = actuator.apply(
        [group.decide(Knob.MEMORY_MAX, str(128 * MIB)), group.decide(Knob.SWAP_MAX, str(4 * MIB))]
    )
    assert (memory.status, memory.after, swap.status) == (OutcomeStatus.APPLIED, str(128 * MIB), OutcomeStatus.APPLIED)
    for _ in range(2):
        memory, swap = actuator.apply(
            [group.decide(Knob.MEMORY_MAX, str(128 * MIB)), group.decide(Knob.SWAP_MAX, str(4 * MIB))]
        )
    assert (swap.status, swap.after) == (OutcomeStatus.UNCHANGED, str(4 * MIB))
    assert set(statuses(originals.restore(files))) == {OutcomeStatus.APPLIED}
    assert (raw(files, group, Knob.SWAP_MAX), raw(files, group, Knob.MEMORY_MAX)) == before


def test_a_quota_below_the_owner_s_burst_takes_it_down_and_both_come_back(
    group: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter
) -> None:
    files.write(group.path, group.id, Knob.QUOTA, "90000 100000")
    files.write(group.path, group.id, Knob.BURST, "80000")
    before = raw(files, group, Knob.QUOTA), raw(files, group, Knob.BURST)
    (outcome,) = actuator.apply([group.decide(Knob.QUOTA, "20000 100000")])
    assert (outcome.status, outcome.error) == (OutcomeStatus.APPLIED, "")
    assert files.read(group.path, group.id, Knob.BURST) == "20000"
    burst, quota = actuator.apply([group.decide(Knob.BURST, "50000"), group.decide(Knob.QUOTA, "40000 100000")])
    assert (burst.after, burst.clamped_from, quota.after) == ("40000", "50000", "40000 100000")
    # The burst alone is not given back as long as a quota is decided that it does not fit under.
    assert actuator.release([group.decide(Knob.QUOTA, "40000 100000")], ()) == ()
    assert set(statuses(originals.restore(files))) == {OutcomeStatus.APPLIED}
    assert (raw(files, group, Knob.QUOTA), raw(files, group, Knob.BURST)) == before


def hold(group: KnobCgroup, anonymous_bytes: int, path: Path) -> None:
    """A process in the group that has that much anonymous memory and that file in its page cache."""
    process = group.cgroup.start([sys.executable, "-c", HOLD, str(anonymous_bytes), str(path)])
    until(lambda: used(group) >= anonymous_bytes + path.stat().st_size, seconds=60)
    assert process.poll() is None


def used(group: KnobCgroup) -> int:
    name = "memory.current" if group.version == "v2" else "memory.usage_in_bytes"
    return int(group.cgroup.file("memory", name).read_text())


def test_a_limit_below_the_usage_is_reached_in_steps_and_kills_no_process(
    group: KnobCgroup, actuator: Actuator, cached: Path
) -> None:
    hold(group, 48 * MIB, cached)
    limits = []
    for _ in range(12):
        (outcome,) = actuator.apply([group.decide(Knob.MEMORY_MAX, str(MIB))], time.monotonic_ns())
        assert outcome.after is not None, outcome
        assert outcome.clamped_from == str(MIB)
        limits.append(int(outcome.after) if outcome.after != "max" else 1 << 62)
    (process,) = group.cgroup.processes
    assert process.poll() is None, "no process is killed"
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > 48 * MIB + 16 * MIB, "one step takes no more than half of the page cache"
    assert 48 * MIB <= limits[-1] < 48 * MIB + 24 * MIB, "what is anonymous stays, most of what is cached does not"
    assert limits[-1] % PAGE_BYTES == 0


def finish(actuator: Actuator) -> Outcome:
    return until(actuator.finished, "a one-shot control is finished", 60)[0]


def test_page_cache_is_dropped_in_a_thread_and_leaves_nothing_to_restore(
    group: KnobCgroup, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter, cached: Path
) -> None:
    requires(files, group, Knob.DROP_CACHE)
    hold(group, 16 * MIB, cached)
    first, second = actuator.apply([group.decide(Knob.DROP_CACHE, str(16 * MIB))] * 2)
    assert (first.status, first.error, second.error) == (OutcomeStatus.UNCHANGED, IN_PROGRESS, IN_PROGRESS)
    outcome = finish(actuator)
    assert outcome.status is OutcomeStatus.APPLIED, outcome
    assert outcome.before is not None
    assert outcome.after is not None
    assert int(outcome.before) - int(outcome.after) >= 15 * MIB
    assert int(outcome.after) >= 16 * MIB, "anonymous memory stays"
    assert actuator.finished() == (), "twice in one round is once"
    assert originals.entries() == ()


def test_memory_is_reclaimed_where_the_kernel_can(
    group: KnobCgroup, actuator: Actuator, files: KnobWriter, cached: Path
) -> None:
    if not files.available(Knob.MEMORY_RECLAIM, group.path):
        actuator.apply([group.decide(Knob.MEMORY_RECLAIM, str(MIB))])
        outcome = finish(actuator)
        assert outcome.status is OutcomeStatus.REFUSED
        assert "there is no memory.reclaim" in outcome.error
        return
    hold(group, 16 * MIB, cached)
    actuator.apply([group.decide(Knob.MEMORY_RECLAIM, str(8 * MIB))])
    outcome = finish(actuator)
    assert outcome.status is OutcomeStatus.APPLIED
    assert int(outcome.before or 0) - int(outcome.after or 0) >= 6 * MIB


def test_pages_move_or_the_kernel_says_why_not(
    group: KnobCgroup, actuator: Actuator, files: KnobWriter, cached: Path
) -> None:
    requires(files, group, Knob.MIGRATE_PAGES)
    hold(group, 4 * MIB, cached)
    actuator.apply([group.decide(Knob.MIGRATE_PAGES, "0 0")])
    outcome = finish(actuator)
    assert outcome.status is OutcomeStatus.APPLIED, outcome
    assert int(outcome.before or 0) >= 4 * MIB
    actuator.apply([group.decide(Knob.MIGRATE_PAGES, "0 1023")])
    outcome = finish(actuator)
    assert outcome.status is OutcomeStatus.REFUSED
    assert "cannot migrate pages of process" in outcome.error


def test_a_vanished_group_gives_nothing_back(hierarchy: Hierarchy, actuator: Actuator) -> None:
    with cgroup(hierarchy, "gone") as instance:
        decision = KnobCgroup(instance).decide(Knob.DROP_CACHE, str(MIB))
    actuator.apply([decision])
    assert finish(actuator).status is OutcomeStatus.VANISHED


VALUES = {
    Knob.CPUSET: ("0", "1", "0-1"),
    Knob.IDLE: ("0", "1"),
    Knob.WEIGHT: ("7", "200"),
    Knob.QUOTA: ("20000 100000", "60000 50000", "9000 90000", "max"),
    Knob.BURST: ("0", "15000", "90000"),
    Knob.MEMORY_MAX: (str(64 * MIB), str(96 * MIB), "max"),
    Knob.SWAP_MAX: ("0", str(8 * MIB)),
    Knob.IO_WEIGHT: ("10", "500"),
    Knob.IO_MAX: ("{disk} wbps=1048576", "{disk} riops=500 wbps=2097152", ""),
}


OUTSIDE = (Knob.QUOTA, Knob.CPUSET)
"""On version 1 the kernel refuses one that does not fit between those of the groups above and below."""


@pytest.mark.parametrize("seed", range(12))
def test_whatever_was_decided_everything_comes_back(
    hierarchy: Hierarchy, actuator: Actuator, originals: OriginalsJournal, files: KnobWriter, seed: int
) -> None:
    """Forty rounds of random wishes for two nested groups, some of which are dropped again; nothing is refused but what lies
    outside the group above."""
    chosen, device = random.Random(seed), disk()
    with nested(hierarchy, f"random{seed}") as pair:
        knobs = [knob for knob in VALUES if files.available(knob, pair[1].path)]
        before = [raw(files, group, knob) for group in pair for knob in knobs]
        requests: dict[tuple[int, Knob], str] = {}
        for number in range(40):
            place = chosen.randrange(2), chosen.choice(knobs)
            requests.pop(place, None)
            if chosen.random() < 0.8:
                requests[place] = chosen.choice(VALUES[place[1]]).format(disk=device)
            decisions = [pair[index].decide(knob, value) for (index, knob), value in requests.items()]
            outcomes = actuator.apply(decisions, number * 1_000_000_000)
            assert not [o for o in outcomes if o.repaired], "there was no external write"
            wrong = [o for o in outcomes if o.status not in (OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED)]
            # A burst does not fit under a quota that could not be raised.
            outside = {(o.decision.cgroup, Knob.BURST) for o in wrong if o.decision.knob is Knob.QUOTA}
            wrong = [o for o in wrong if (o.decision.cgroup, o.decision.knob) not in outside]
            assert not [o for o in wrong if o.decision.knob not in OUTSIDE and "set memory.max first" not in o.error], (
                wrong
            )
            released = actuator.release(decisions, ())
            assert not [o for o in released if o.status is OutcomeStatus.REFUSED and o.decision.knob not in OUTSIDE], (
                released
            )
        assert OutcomeStatus.REFUSED not in statuses(originals.restore(files))
        assert [raw(files, group, knob) for group in pair for knob in knobs] == before
        assert originals.entries() == ()


def test_a_disk_s_write_back_throttling_is_put_back_by_a_reset(tmp_path: Path) -> None:
    """On an unused loop device."""
    free = [
        disk
        for disk in sorted(Path("/sys/block").glob("loop*"), reverse=True)
        if not (disk / "loop").exists() and (disk / "queue/wbt_lat_usec").exists()
    ]
    if not free:
        pytest.skip("no unused loop device with write-back throttling")
    file = free[0] / "queue/wbt_lat_usec"
    before = file.read_text()
    state = tmp_path / "state"
    open_originals(state, read_boot_id()).close()
    path = str(file.relative_to("/sys"))
    setting = SysfsSetting(path=path, line="4321", reason=Reason(rule="wbt", text="as configured"))
    try:
        (outcome,) = SysfsWriter(Path("/sys"), state, read_boot_id()).apply([setting])
        assert (outcome.status, outcome.before, outcome.after) == (OutcomeStatus.APPLIED, before.strip(), "4321")
        done = CliRunner().invoke(reset, ["--state-dir", str(state)])
        assert (done.exit_code, file.read_text()) == (0, before), done.output
        assert f"/sys/block/{free[0].name} wbt_lat_usec: restored" in done.output
    finally:
        file.write_text(before)
