"""Disk settings, resctrl groups and OOM scores in cycles: written, repaired, restored, and reported problems."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.config.qrm import KnobsConfig
from agent.qrm.actuator import boot_journal
from agent.qrm.actuator.node_knobs import DISKS, OOM, RECHECK_PERIOD_NS, RESCTRL, NodeKnobs, open_node_knobs
from agent.qrm.actuator.oom_scores import OomScores, ProcessTable
from agent.qrm.actuator.sysfs_writer import SysfsWriter
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import OutcomeStatus
from api.knobs import Knob
from api.qos import Enhancements
from api.snapshot import Disk, NodeSample, Snapshot
from tests.agent.qrm.actuator.fakes import FakeResctrl, add_process, disk
from tests.builders.pods import reclaimed, shared
from tests.builders.snapshots import snapshot

INTEL = "    L3:0=7ff\n    MB:0=100\n"
SDA, QOS = "block/sda/queue/wbt_lat_usec", "fs/cgroup/io.cost.qos"
LATER = RECHECK_PERIOD_NS


class Node:
    """A temporary sysfs with one SSD, and a cgroup tree of version 2 in it."""

    def __init__(self, root: Path) -> None:
        self.sys, self.state = root / "sys", root / "state"
        self.state.mkdir()
        self.write(SDA, "75000\n")
        self.write(QOS, "8:0 enable=0 ctrl=auto\n")
        self.snapshot = snapshot_of({"sda": disk("8:0", "SSD")})

    def write(self, path: str, text: str) -> None:
        (self.sys / path).parent.mkdir(parents=True, exist_ok=True)
        (self.sys / path).write_text(text)

    def read(self, path: str) -> str:
        return (self.sys / path).read_text().strip()

    def knobs(self, config: Mapping[str, Any], *, dry: bool = False) -> NodeKnobs:
        settings = msgspec.convert(config, KnobsConfig)
        files = SysfsWriter(self.sys, self.state, "boot")
        hierarchy = Hierarchy(v1={}, v2=self.sys / "fs/cgroup")
        scores = OomScores(ProcessTable(self.sys.parent / "proc", self.sys / "fs/cgroup"), self.state, "boot")
        return NodeKnobs(settings, hierarchy, (files, FakeResctrl(self.sys / "fs/resctrl"), scores), dry=dry)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def snapshot_of(disks: Mapping[str, Disk]) -> Snapshot:
    pods = [shared("web"), reclaimed("batch")]
    return msgspec.structs.replace(snapshot(0, pods), node=NodeSample(disks=disks))


SETTINGS = {"io": {"wbtUs": {"SSD": 2000}, "costQos": {"sda": "enable=1 rpct=95.00"}}}


def test_disk_settings_are_written_repaired_and_restored(node: Node) -> None:
    knobs = node.knobs(SETTINGS)
    outcomes, sources = knobs.run_cycle(node.snapshot, 0)
    assert [(o.decision.cgroup, o.decision.knob.value, o.status, o.before, o.after) for o in outcomes] == [
        ("/sys/block/sda", "wbt_lat_usec", OutcomeStatus.APPLIED, "75000", "2000"),
        (
            "/sys/dev/block/8:0",
            "io.cost.qos",
            OutcomeStatus.APPLIED,
            "8:0 enable=0 ctrl=auto",
            "8:0 enable=1 rpct=95.00",
        ),
    ]
    assert sources == ()
    assert outcomes[0].decision.reason.text == (
        "Write-back to sda is throttled while reads take longer than 2000 us, as configured for SSD."
    )
    assert knobs.run_cycle(node.snapshot, LATER - 1) == ((), ()), "knobs are not read in every cycle"
    node.write(SDA, "1\n")
    assert [o.status for o in knobs.run_cycle(node.snapshot, LATER)[0]] == [
        OutcomeStatus.APPLIED,
        OutcomeStatus.UNCHANGED,
    ]
    node.write(SDA, "2000\n")
    assert {(o.decision.knob.value, o.status) for o in knobs.restore()} == {
        ("wbt_lat_usec", OutcomeStatus.APPLIED),
        ("io.cost.qos", OutcomeStatus.APPLIED),
    }
    assert (node.read(SDA), node.read(QOS)) == ("1", "8:0 enable=0 ctrl=auto"), "1 was written externally"


def test_the_journal_is_written_twice_for_any_number_of_disks(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cycle waits for the disk at every write of the journal, for milliseconds."""
    for number in range(24):
        node.write(f"block/sd{number}/queue/wbt_lat_usec", "75000\n")
    knobs = node.knobs({"io": {"wbtUs": {"SSD": 2000}}})
    written = []
    monkeypatch.setattr(boot_journal, "replace_file", lambda path, data: written.append(data))
    outcomes, _ = knobs.run_cycle(snapshot_of({f"sd{number}": disk(f"8:{number}", "SSD") for number in range(24)}), 0)
    assert [o.status for o in outcomes] == [OutcomeStatus.APPLIED] * 24
    assert [data.count(b'"left":"2000"') for data in written] == [0, 24]


def test_a_dry_run_writes_nothing(node: Node) -> None:
    node.write("fs/resctrl/schemata", INTEL)
    knobs = node.knobs({**SETTINGS, "resctrl": {"enabled": True}}, dry=True)
    outcomes, _ = knobs.run_cycle(node.snapshot, 0)
    assert [o.status for o in outcomes] == [OutcomeStatus.DRY_RUN] * 5
    assert {o.decision.knob for o in outcomes} <= {Knob.WBT, Knob.IO_COST_QOS, Knob.IO_COST_MODEL, Knob.SCHEMATA}
    assert (node.read(SDA), list(node.state.iterdir())) == ("75000", [])
    assert [path.name for path in (node.sys / "fs/resctrl").iterdir()] == ["schemata"]


def test_settings_of_an_earlier_agent_that_are_not_configured_are_restored(node: Node) -> None:
    node.knobs(SETTINGS).run_cycle(node.snapshot, 0)
    # The agent is killed; the next one has other settings.
    knobs = node.knobs({"io": {"costQos": SETTINGS["io"]["costQos"]}})
    outcomes, _ = knobs.run_cycle(node.snapshot, LATER)
    assert [(o.decision.knob.value, o.status, o.decision.reason.rule) for o in outcomes] == [
        ("io.cost.qos", OutcomeStatus.UNCHANGED, "iocost"),
        ("wbt_lat_usec", OutcomeStatus.APPLIED, "restore"),
    ]
    assert node.read(SDA) == "75000"


def test_unreadable_disks_keep_their_settings(node: Node) -> None:
    knobs = node.knobs(SETTINGS)
    knobs.run_cycle(node.snapshot, 0)
    outcomes, (source,) = knobs.run_cycle(snapshot_of({}), LATER)
    assert (outcomes, source.name, source.ok) == ((), DISKS, False)
    assert source.error == "the node's disks are not known"
    assert node.read(SDA) == "2000"
    _, sources = knobs.run_cycle(node.snapshot, 2 * LATER)
    assert sources == ()


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"io": {"costQos": {"sdz": "enable=1"}}}, "io.cost is configured for sdz, which is no disk of this node"),
        (
            {"io": {"wbtUs": {"HDD": 2000}}},
            "wbtUs is configured for HDD, and no such disk of this node throttles its write-back",
        ),
    ],
)
def test_settings_that_cannot_be_applied_are_reported_in_every_cycle(
    node: Node, config: dict[str, Any], error: str
) -> None:
    knobs = node.knobs(config)
    for now_ns in (0, 1):
        outcomes, (source,) = knobs.run_cycle(node.snapshot, now_ns)
        assert (outcomes, source.name, source.ok, source.error) == ((), DISKS, False, error)
    assert source.remedy


def test_without_a_root_of_version_2_there_is_no_io_cost(node: Node) -> None:
    (node.sys / QOS).unlink()
    outcomes, (source,) = node.knobs(SETTINGS).run_cycle(node.snapshot, 0)
    assert [o.decision.knob.value for o in outcomes] == ["wbt_lat_usec"]
    assert source.error == "io.cost is configured, and the root of version 2 has no io.cost.qos"


def test_a_journal_that_cannot_be_written_changes_nothing(node: Node) -> None:
    knobs = node.knobs(SETTINGS)
    node.state.rmdir()
    outcomes, _ = knobs.run_cycle(node.snapshot, 0)
    assert [(o.status, "cannot be journalled" in o.error) for o in outcomes] == [(OutcomeStatus.REFUSED, True)] * 2
    assert node.read(SDA) == "75000"


def test_levels_have_groups_with_the_threads_of_their_containers(node: Node) -> None:
    for name in ("", "/dioptase-reclaimed_cores"):
        node.write(f"fs/resctrl{name}/schemata", INTEL)
    node.write("fs/resctrl/dioptase-reclaimed_cores/tasks", "")
    node.write("fs/cgroup/batch/cgroup.threads", "70\n0\n")
    knobs = node.knobs({"resctrl": {"enabled": True, "levels": {"reclaimed_cores": {"catEndPercent": 20}}}})
    (outcome,), sources = knobs.run_cycle(node.snapshot, 0)
    assert (outcome.status, outcome.after, sources) == (OutcomeStatus.APPLIED, "L3:0=7 MB:0=100", ())
    assert node.read("fs/resctrl/dioptase-reclaimed_cores/tasks") == "70", (
        "a thread of another PID namespace has no number"
    )
    assert [o.status for o in knobs.restore()] == [OutcomeStatus.APPLIED]
    assert not (node.sys / "fs/resctrl/dioptase-reclaimed_cores").exists()


@pytest.mark.parametrize(
    ("schemata", "levels", "error"),
    [
        (None, {}, "/fs/resctrl cannot be read: "),
        ("L3:0=f\n", {"shared_cores": {"catStartPercent": 80}}, "no cache way"),
    ],
)
def test_missing_resctrl_is_reported_if_configured(
    node: Node, schemata: str | None, levels: dict[str, Any], error: str
) -> None:
    if schemata is not None:
        node.write("fs/resctrl/schemata", schemata)
    outcomes, (source,) = node.knobs({"resctrl": {"enabled": True, "levels": levels}}).run_cycle(node.snapshot, 0)
    assert (outcomes, source.name, source.ok, error in source.error) == ((), RESCTRL, False, True)
    assert node.knobs({}).run_cycle(node.snapshot, 0) == ((), ())


def test_node_knobs_open_on_this_machine(tmp_path: Path) -> None:
    config = msgspec.convert({"resctrl": {"enabled": True}}, KnobsConfig)
    knobs = open_node_knobs(config, Hierarchy(v1={}, v2=tmp_path), (tmp_path, "boot"), Path("/sys"), dry=True)
    _, sources = knobs.run_cycle(snapshot_of({}), 0)
    assert len(sources) == (0 if Path("/sys/fs/resctrl/schemata").exists() else 1)


def test_node_knobs_are_needed_only_if_configured() -> None:
    for config, of_the_node in (({}, False), ({"resctrl": {"enabled": True}}, True), ({"io": {"wbtUs": {"SSD": 1}}}, True),
                                ({"io": {"weights": {"shared_cores": 5}}}, False), (SETTINGS, True),
                                ({"oomPriority": True}, True)):  # fmt: skip
        assert msgspec.convert(config, KnobsConfig).of_the_node is of_the_node


def test_modules_of_node_knobs_are_loaded_only_if_configured() -> None:
    program = "import sys, agent.__main__; print([name for name in sys.modules if name.startswith('agent.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "'agent.qrm.actuator.originals'" in done.stdout
    for name in ("node_knobs", "sysfs_writer", "resctrl_groups", "oom_scores"):
        assert f"'agent.qrm.actuator.{name}'" not in done.stdout


def process(node: Node, cgroup: str, pid: int, score: int) -> Path:
    """Add a process of that cgroup to the temporary /proc; return its oom_score_adj file."""
    score_file = add_process(node.sys.parent / "proc", node.sys / f"fs/cgroup{cgroup}", pid, score)
    node.snapshot = with_inodes(node, node.snapshot)
    return score_file


def with_inodes(node: Node, original: Snapshot) -> Snapshot:
    """Return the snapshot with the inodes of the temporary tree."""
    cgroups = {
        path: msgspec.structs.replace(sample, id=(node.sys / f"fs/cgroup{path}").stat().st_ino, threads=1)
        for path, sample in original.cgroups.items()
        if (node.sys / f"fs/cgroup{path}").exists()
    }
    return msgspec.structs.replace(original, cgroups={**original.cgroups, **cgroups})


def test_oom_scores_are_restored_when_a_pod_or_the_setting_is_removed(node: Node) -> None:
    web, batch = process(node, "/web", 100, 0), process(node, "/batch", 200, 0)
    priorities = {"web": 50, "batch": -40}
    pods = tuple(
        msgspec.structs.replace(each, enhancements=Enhancements(oom_priority=priorities[each.name]))
        for each in node.snapshot.pods
    )
    snapshot = msgspec.structs.replace(node.snapshot, pods=pods)
    knobs = node.knobs({"oomPriority": True})
    outcomes, sources = knobs.run_cycle(snapshot, 0)
    assert [(o.decision.cgroup, o.decision.pod, o.status, o.before, o.after) for o in outcomes] == [
        ("/web", "default/web", OutcomeStatus.APPLIED, "0", "-150"),
        ("/batch", "default/batch", OutcomeStatus.APPLIED, "0", "940"),
    ]
    assert (web.read_text(), batch.read_text(), sources) == ("-150", "940", ())
    blind = msgspec.structs.replace(snapshot, cgroups={})
    assert knobs.run_cycle(blind, LATER) == ((), ()), "an unreadable tree is no reason to restore anything"
    assert batch.read_text() == "940"
    (retained, back), _ = knobs.run_cycle(msgspec.structs.replace(snapshot, pods=pods[:1]), 2 * LATER)
    assert (retained.status, back.decision.cgroup, back.after, batch.read_text()) == (
        OutcomeStatus.UNCHANGED,
        "/batch",
        "0",
        "0",
    )
    # The next agent has the feature disabled.
    assert [(o.decision.cgroup, o.status) for o in node.knobs({}).run_cycle(snapshot, 0)[0]] == [
        ("/web", OutcomeStatus.APPLIED)
    ]
    assert (web.read_text(), list(node.state.iterdir())) == ("0", [])


def test_invisible_processes_are_reported(node: Node) -> None:
    process(node, "/web", 100, 0)
    (node.sys / "fs/cgroup/web/cgroup.procs").write_text("0\n")
    outcomes, (source,) = node.knobs({"oomPriority": True}).run_cycle(node.snapshot, 0)
    assert {o.status for o in outcomes} == {OutcomeStatus.UNCHANGED}
    assert (source.name, "host's PID namespace" in source.remedy) == (OOM, True)
