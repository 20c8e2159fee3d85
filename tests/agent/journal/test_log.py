"""The agent's log: changes, failures and recoveries once each."""

from __future__ import annotations

import logging

import msgspec
import pytest

from agent.journal.log import CycleLog
from api.decision import ActMode, Cycle, Decision, Outcome, OutcomeStatus
from api.knobs import Knob, Reason
from api.qos import QoSLevel
from api.snapshot import ComponentHealth
from tests.agent.advisor.builders import pod, snapshot
from tests.builders.four_cpu_node import advice

SNAPSHOT = snapshot(1, [pod("web", QoSLevel.SHARED)])


def outcome(status: OutcomeStatus, value: str = "1", error: str = "") -> Outcome:
    decision = Decision(
        cgroup="/b",
        cgroup_id=1,
        pod="default/b",
        knob=Knob.IDLE,
        value=value,
        reason=Reason(rule="r", text="because"),
    )
    return Outcome(decision=decision, status=status, before="0", error=error)


def finished(
    *outcomes: Outcome, sources: tuple[ComponentHealth, ...] = (), startup_warnings: tuple[str, ...] = ()
) -> Cycle:
    shot = msgspec.structs.replace(SNAPSHOT, sources=sources)
    return Cycle(
        snapshot=shot,
        previous=None,
        act=ActMode.ON,
        trigger="tick",
        outcomes=outcomes,
        startup_warnings=startup_warnings,
    )


def logged(caplog: pytest.LogCaptureFixture, *rounds: Cycle) -> list[str]:
    caplog.set_level(logging.INFO)
    sink = CycleLog()
    for cycle in rounds:
        sink.publish(cycle)
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


def test_the_first_lines_are_warnings_mode_and_pods(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged(
        caplog, finished(startup_warnings=("No BPF: do this.",)), finished(startup_warnings=("No BPF: do this.",))
    )
    assert lines == ["WARNING No BPF: do this.", "INFO act on, pods: default/web (shared_cores)"]


def test_changes_are_logged_and_repetitions_are_not(caplog: pytest.LogCaptureFixture) -> None:
    dry, refused = outcome(OutcomeStatus.DRY_RUN), outcome(OutcomeStatus.REFUSED, error="no: do that")
    rounds = [
        finished(dry),
        finished(dry),
        finished(outcome(OutcomeStatus.UNCHANGED)),
        finished(refused),
        finished(refused),
    ]
    assert logged(caplog, *rounds)[1:] == [
        "INFO /b: cpu.idle 0 -> 1 (dry-run) because",
        "WARNING /b: cpu.idle 0 -> 1 (refused) no: do that",
    ]


def test_every_write_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    applied = outcome(OutcomeStatus.APPLIED)
    assert len(logged(caplog, finished(applied), finished(applied))) == 3


def test_a_repair_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    repaired = msgspec.structs.replace(outcome(OutcomeStatus.APPLIED), repaired=True)
    assert logged(caplog, finished(repaired))[1:] == ["INFO /b: cpu.idle 0 -> 1 (repaired) because"]


def test_a_repair_that_repeats_is_logged_once_until_a_value_changes(caplog: pytest.LogCaptureFixture) -> None:
    """The kubelet clears cpu.idle of its classes every minute."""
    repaired = msgspec.structs.replace(outcome(OutcomeStatus.APPLIED), repaired=True)
    same, other = outcome(OutcomeStatus.UNCHANGED), msgspec.structs.replace(repaired, before="7")
    cycles = [finished(each) for each in (repaired, same, repaired, same, repaired, other, repaired)]
    lines = logged(caplog, *cycles)
    assert [line.partition(" -> ")[0] for line in lines[1:]] == [
        f"INFO /b: cpu.idle {text}" for text in ("0", "7", "0")
    ]


def test_failure_and_recovery_of_a_component_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bad = (ComponentHealth(name="pods", ok=False, error="not YAML", remedy="fix it"),)
    lines = logged(caplog, finished(), finished(sources=bad), finished(sources=bad), finished())
    assert lines[1:] == ["WARNING pods: not YAML: fix it", "INFO pods: works again"]


def test_an_unfulfilled_request_and_its_end_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rejected = {"default/db": Reason(rule="dedicated_resize", text="db requested 2 CPUs, and now 4.")}
    wrong = msgspec.structs.replace(finished(), advice=msgspec.structs.replace(advice(), rejected=rejected))
    right = msgspec.structs.replace(finished(), advice=advice())
    assert logged(caplog, right, wrong, wrong, right)[1:] == [
        "WARNING request of pod default/db cannot be satisfied: db requested 2 CPUs, and now 4.",
        "INFO request of pod default/db is satisfied, or the pod has ended",
    ]
