"""On a slow disk, each write of disk settings, OOM scores and thread slices waits for its own original and for no other."""

from __future__ import annotations

from pathlib import Path

from agent.qrm.actuator.boot_journal import NOT_ON_DISK_YET
from agent.qrm.actuator.oom_scores import OomScores, ProcessTable
from agent.qrm.actuator.sysfs_writer import SysfsWriter
from agent.qrm.actuator.thread_slices import ThreadSlices
from agent.qrm.knobs.io import SysfsSetting
from api.decision import Outcome, OutcomeStatus
from api.knobs import Reason
from tests.agent.qrm.actuator import test_oom_scores, test_thread_slices
from tests.agent.qrm.actuator.test_thread_slices import DEFAULT, SHORT, S
from tests.builders.held_disk import HeldDisk

WBT = "block/{}/queue/wbt_lat_usec"
APPLIED, UNCHANGED = OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED


def summary(outcomes: tuple[Outcome, ...]) -> list[tuple[OutcomeStatus, str]]:
    return [(outcome.status, outcome.error) for outcome in outcomes]


class Disks:
    """Two disks in sysfs whose writer saves originals to a disk that answers on request."""

    def __init__(self, root: Path) -> None:
        self.sys, self.disk = root / "sys", HeldDisk()
        for name in ("sda", "sdb"):
            self.file(name).parent.mkdir(parents=True)
            self.file(name).write_text("75000\n")
        self.writer = SysfsWriter(self.sys, root, "boot", self.disk)

    def file(self, name: str) -> Path:
        return self.sys / WBT.format(name)

    def apply(self, *names: str, line: str = "2000") -> list[tuple[OutcomeStatus, str]]:
        reason = Reason(rule="wbt", text="t")
        settings = [SysfsSetting(path=WBT.format(name), line=line, reason=reason) for name in names]
        return summary(self.writer.apply(settings))

    def texts(self) -> list[str]:
        return [self.file(name).read_text().strip() for name in ("sda", "sdb")]


def test_a_setting_waits_for_its_original_only(tmp_path: Path) -> None:
    disks = Disks(tmp_path)
    assert disks.apply("sda") == [(UNCHANGED, NOT_ON_DISK_YET)]
    disks.disk.answer()
    assert disks.apply("sda", "sdb") == [(APPLIED, ""), (UNCHANGED, NOT_ON_DISK_YET)]
    assert disks.texts() == ["2000", "75000"]
    disks.disk.answer()
    assert disks.apply("sda", "sdb") == [(UNCHANGED, ""), (APPLIED, "")]
    disks.writer.restore()
    assert disks.texts() == ["75000", "75000"]


def test_an_owner_may_change_a_setting_while_its_original_waits(tmp_path: Path) -> None:
    disks = Disks(tmp_path)
    disks.apply("sda", "sdb")
    disks.file("sda").write_text("60000\n")
    disks.file("sdb").write_text("50000\n")
    disks.disk.answer()
    assert disks.apply("sda") == [(UNCHANGED, NOT_ON_DISK_YET)]
    disks.disk.answer()
    assert disks.apply("sda") == [(APPLIED, "")]
    disks.writer.restore()
    assert disks.texts() == ["60000", "50000"], "sdb was never written"


def test_only_processes_with_an_original_on_disk_get_a_score(tmp_path: Path) -> None:
    machine, disk = test_oom_scores.Machine(tmp_path), HeldDisk()
    scores = OomScores(ProcessTable(machine.proc, machine.group.parent), machine.state, "boot", disk)
    machine.start(10, 0)
    assert summary(scores.apply([machine.decision(1000)])) == [(UNCHANGED, NOT_ON_DISK_YET)]
    disk.answer()
    machine.start(11, 500)
    assert summary(scores.apply([machine.decision(1000)])) == [(APPLIED, "")]
    assert machine.scores(10, 11) == [1000, 500], "a container that forks all the time does not wait for ever"
    disk.answer()
    scores.apply([machine.decision(1000)])
    assert machine.scores(10, 11) == [1000, 1000]
    scores.restore()
    assert machine.scores(10, 11) == [0, 500]


def test_slices_of_a_container_wait_for_its_entry_and_new_threads_do_not(tmp_path: Path) -> None:
    machine, disk = test_thread_slices.Machine(tmp_path), HeldDisk()
    slices = ThreadSlices(machine.hierarchy, machine.scheduler, machine.state, "boot", disk)
    machine.start(1)
    assert summary(slices.apply([machine.decision()], S)) == [(UNCHANGED, NOT_ON_DISK_YET)]
    assert machine.slices(1) == [DEFAULT]
    disk.answer()
    assert summary(slices.apply([machine.decision()], 2 * S)) == [(APPLIED, "")]
    machine.start(2)
    assert summary(slices.apply([machine.decision()], 3 * S)) == [(APPLIED, "")]
    assert machine.slices(1, 2) == [SHORT, SHORT]
    assert disk.waiting == {}, "the entry of the container is on disk"
