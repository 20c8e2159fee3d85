"""Power limits of processor packages: written from a cap, read back, restored after the alert and after a kill."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agent.config.advisor import PowerConfig
from agent.config.config import AgentConfig
from agent.config.qrm import KnobsConfig
from agent.loop import Loop
from agent.qrm.actuator.node_knobs import POWER, NodeKnobs
from agent.qrm.actuator.oom_scores import OomScores, ProcessTable
from agent.qrm.actuator.sysfs_writer import FILE_NAME, SysfsWriter
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.advice import NodeAdvice, PowerCap
from api.decision import Outcome, OutcomeStatus
from api.knobs import Knob, Reason
from api.snapshot import Snapshot
from tests.agent.advisor.builders import snapshot
from tests.agent.qrm.actuator.fakes import FakeResctrl
from tests.agent.test_loop import Scripted

LIMIT = Knob.POWER_LIMIT.value
REASON = Reason(rule="power_cap", text="The node draws 200 W of 160 W at alert s0: cap power to 160 W.", threshold=160)
OVER = NodeAdvice()
UNKNOWN = NodeAdvice(releases_power_cap=False)


def cap(package_watts: int) -> NodeAdvice:
    limit = PowerCap(target_watts=160, package_watts=package_watts, reason=REASON)
    return NodeAdvice(power_cap=limit, releases_power_cap=False)


class PowerNode:
    """A powercap tree of two packages with dram, the platform, and the same packages by another interface."""

    def __init__(self, root: Path) -> None:
        self.sys, self.state = root / "sys", root / "state"
        self.state.mkdir()
        for zone, name, limit in (
            ("intel-rapl:0", "package-0", 205_000_000),
            ("intel-rapl:0:0", "dram", 41_000_000),
            ("intel-rapl:1", "package-1", 205_000_000),
            ("intel-rapl:2", "psys", 500_000_000),
            ("intel-rapl-mmio:0", "package-0", 205_000_000),
        ):
            directory = self.sys / "class/powercap" / zone
            directory.mkdir(parents=True)
            (directory / "name").write_text(f"{name}\n")
            (directory / LIMIT).write_text(f"{limit}\n")
        self.knobs = self.restart()
        self._now_ns = 0

    def file(self, zone: str) -> Path:
        return self.sys / "class/powercap" / zone / LIMIT

    def limits(self) -> dict[str, int]:
        """Limits by zone in watts."""
        return {path.parent.name: int(path.read_text()) // 1_000_000 for path in self.sys.glob(f"*/*/*/{LIMIT}")}

    def restart(self, *, dry: bool = False) -> NodeKnobs:
        """Open the knobs as a new agent does, whether or not the previous one ended."""
        scores = OomScores(ProcessTable(self.sys.parent / "proc", self.sys), self.state, "boot")
        writers = (SysfsWriter(self.sys, self.state, "boot"), FakeResctrl(self.sys / "fs/resctrl"), scores)
        self.knobs = NodeKnobs(KnobsConfig(), Hierarchy(v1={}, v2=self.sys), writers, dry=dry)
        return self.knobs

    def cycle(self, advice: NodeAdvice | None) -> tuple[tuple[Outcome, ...], dict[str, str]]:
        """Run one cycle, a second after the last; return the outcomes and the errors by component."""
        self._now_ns += 1_000_000_000
        outcomes, health = self.knobs.run_cycle(snapshot(0, []), self._now_ns, advice)
        return outcomes, {component.name: component.error for component in health}


ORIGINAL = {
    "intel-rapl:0": 205, "intel-rapl:0:0": 41, "intel-rapl:1": 205, "intel-rapl:2": 500, "intel-rapl-mmio:0": 205
}  # fmt: skip
CAPPED = {**ORIGINAL, "intel-rapl:0": 70, "intel-rapl:1": 70}


@pytest.fixture
def node(tmp_path: Path) -> PowerNode:
    return PowerNode(tmp_path)


def test_a_cap_limits_every_package_and_ends_with_the_alert(node: PowerNode) -> None:
    outcomes, problems = node.cycle(cap(70))
    assert [(o.decision.cgroup, o.decision.knob, o.status, o.before, o.after) for o in outcomes] == [
        (f"/sys/class/powercap/intel-rapl:{number}", Knob.POWER_LIMIT, OutcomeStatus.APPLIED, "205000000", "70000000")
        for number in (0, 1)
    ]
    assert outcomes[0].decision.reason.text == f"{REASON.text} Limit of this processor package: 70 W."
    assert (problems, node.limits()) == ({}, CAPPED)
    assert node.cycle(cap(70)) == ((), {}), "the same cap is checked every five seconds"
    assert node.cycle(UNKNOWN)[0] == ()
    assert node.limits() == CAPPED, "an alert that cannot be read changes nothing"
    outcomes, _ = node.cycle(cap(60))
    assert [(o.before, o.after) for o in outcomes] == [("70000000", "60000000")] * 2
    node.cycle(cap(60))
    # The alert is over: at once, not after five seconds.
    outcomes, _ = node.cycle(OVER)
    assert [(o.status, o.after, o.decision.reason.rule) for o in outcomes] == [
        (OutcomeStatus.APPLIED, "205000000", "restore")
    ] * 2
    assert (node.limits(), list(node.state.iterdir())) == (ORIGINAL, [])


@pytest.mark.parametrize("advice", [None, UNKNOWN])
def test_after_a_kill_limits_wait_until_the_alert_is_known_to_be_over(
    node: PowerNode, advice: NodeAdvice | None
) -> None:
    node.cycle(cap(70))
    assert (node.state / FILE_NAME).exists()
    node.restart()
    node.cycle(advice)
    assert node.limits() == CAPPED
    node.restart()
    node.cycle(OVER)
    assert node.limits() == ORIGINAL


def test_another_cap_after_a_kill_between_write_and_save_keeps_the_original(node: PowerNode) -> None:
    node.cycle(cap(100))
    journal = node.state / FILE_NAME
    entries = msgspec.json.decode(journal.read_bytes())
    for entry in entries["entries"]:
        entry["left"] = ""
    journal.write_bytes(msgspec.json.encode(entries))
    node.restart()
    node.cycle(cap(80))
    assert node.limits() == {**ORIGINAL, "intel-rapl:0": 80, "intel-rapl:1": 80}
    node.cycle(OVER)
    assert node.limits() == ORIGINAL


def test_a_cap_leaves_a_quarter_of_each_original_limit(node: PowerNode) -> None:
    outcomes, _ = node.cycle(cap(1))
    assert [outcome.after for outcome in outcomes] == ["51250000", "51250000"]
    assert outcomes[0].decision.reason.text.endswith("Limit of this processor package: 51.25 W.")


def test_a_limit_that_is_lowered_externally_during_a_cap_is_not_raised(node: PowerNode) -> None:
    node.cycle(cap(100))
    node.file("intel-rapl:0").write_text("60000000\n")
    node.cycle(cap(90))
    assert node.limits() == {**ORIGINAL, "intel-rapl:0": 60, "intel-rapl:1": 90}
    node.cycle(OVER)
    assert node.limits() == {**ORIGINAL, "intel-rapl:0": 60}


def test_the_end_of_the_agent_restores_limits(node: PowerNode) -> None:
    node.cycle(cap(70))
    node.restart()
    assert [outcome.status for outcome in node.knobs.restore()] == [OutcomeStatus.APPLIED] * 2
    assert (node.limits(), list(node.state.iterdir())) == (ORIGINAL, [])


def test_a_cap_only_lowers_and_an_external_limit_becomes_the_original(node: PowerNode) -> None:
    node.file("intel-rapl:0").write_text("50000000\n")
    node.file("intel-rapl:1").write_text("0\n")
    outcomes, _ = node.cycle(cap(70))
    assert [o.status for o in outcomes] == [OutcomeStatus.UNCHANGED, OutcomeStatus.APPLIED]
    assert node.limits() == {**ORIGINAL, "intel-rapl:0": 50, "intel-rapl:1": 70}
    node.file("intel-rapl:1").write_text("120000000\n")
    node.cycle(cap(60))
    node.cycle(OVER)
    assert node.limits() == {**ORIGINAL, "intel-rapl:0": 50, "intel-rapl:1": 120}


def test_a_dry_run_writes_nothing(node: PowerNode) -> None:
    node.restart(dry=True)
    outcomes, _ = node.cycle(cap(70))
    assert [(o.status, o.decision.value) for o in outcomes] == [(OutcomeStatus.DRY_RUN, "70000000")] * 2
    assert (node.limits(), list(node.state.iterdir())) == (ORIGINAL, [])


def test_limits_that_cannot_be_written_are_reported(node: PowerNode) -> None:
    node.file("intel-rapl:1").unlink()
    node.file("intel-rapl:1").mkdir()  # as root, any file can be written, and this is none
    outcomes, problems = node.cycle(cap(70))
    assert [o.status for o in outcomes] == [OutcomeStatus.APPLIED, OutcomeStatus.REFUSED]
    assert problems == {
        POWER: "the power limit of a processor package cannot be set: "
        f"class/powercap/intel-rapl:1/{LIMIT}: Is a directory: see whether this kernel and this device have it"
    }


ALERT = {"power-alert": "s0", "power-budget": "160", "power-alert-time": "2026-01-02T03:04:05Z"}


def test_annotations_of_the_node_act_on_the_packages_and_garbage_changes_nothing(node: PowerNode) -> None:
    steps: list[tuple[Mapping[str, str] | None, int, str]] = [
        (None, 205, "power_alert_unknown"),
        (ALERT, 70, "power_cap"),  # 150 and 50 W, 30 W of them are memory's: 160 - 30 = 130 = 70 + 60
        ({**ALERT, "power-budget": "much"}, 70, "power_alert_invalid"),
        (None, 70, "power_alert_unknown"),
        (ALERT, 70, "power_settling"),
        ({}, 205, "power_alert_over"),
        ({}, 205, "power_no_alert"),
    ]

    def sensed(seq: int) -> Snapshot:
        spent = {"package-0": 110, "package-1": 60, "package-0/dram": 30}
        current = snapshot(seq, [])
        power = {domain: watts * seq * 1_000_000 for domain, watts in spent.items()}
        annotations = steps[seq - 1][0]
        return replace(current, node=replace(current.node, power_uj=power, annotations=annotations))

    stand_in: Any = Scripted(sensed)
    config = AgentConfig(power=PowerConfig(enable=True))
    loop = Loop(config=config, sensor=stand_in, actuator=stand_in, sinks=[stand_in], node_knobs=node.knobs)
    for _, watts, rule in steps:
        finished = loop.run_cycle("tick")
        assert finished.node is not None
        assert finished.node.power is not None
        assert (node.limits()["intel-rapl:0"], finished.node.power.reason.rule) == (watts, rule)


@pytest.mark.parametrize("watts", [0, 70])
def test_a_machine_without_limits_reports_that_power_is_not_capped(tmp_path: Path, watts: int) -> None:
    node = PowerNode(tmp_path)
    if watts:
        for zone in ("intel-rapl:0", "intel-rapl:1"):
            node.file(zone).unlink()
    outcomes, problems = node.cycle(cap(watts))
    assert outcomes == ()
    assert problems == {
        POWER: "power cannot be capped to 160 W: no package has a limit in force in /sys/class/powercap"
    }


def test_a_package_that_its_owner_disabled_keeps_its_limit(tmp_path: Path) -> None:
    node = PowerNode(tmp_path)
    node.file("intel-rapl:0").with_name("enabled").write_text("0\n")
    node.file("intel-rapl:1").with_name("enabled").write_text("1\n")
    outcomes, problems = node.cycle(cap(70))
    assert ([outcome.decision.value for outcome in outcomes], problems) == (["70000000"], {})
    assert (node.limits()["intel-rapl:0"], node.limits()["intel-rapl:1"]) == (205, 70)
    assert node.file("intel-rapl:0").with_name("enabled").read_text() == "0\n"
