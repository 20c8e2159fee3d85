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

SEEN = snapshot(1, [pod("web", QoSLevel.SHARED)])


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
    seen = msgspec.structs.replace(SEEN, sources=sources)
    return Cycle(
        snapshot=seen,
        previous=None,
        act=ActMode.ON,
        trigger="tick",
        outcomes=outcomes,
        startup_warnings=startup_warnings,
    )


def told(caplog: pytest.LogCaptureFixture, *rounds: Cycle) -> list[str]:
    caplog.set_level(logging.INFO)
    sink = CycleLog()
    for one in rounds:
        sink.publish(one)
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


def test_the_start_says_mode_pods_and_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    lines = told(
        caplog, finished(startup_warnings=("No BPF: do this.",)), finished(startup_warnings=("No BPF: do this.",))
    )
    assert lines == ["WARNING No BPF: do this.", "INFO act on, pods: default/web (shared_cores)"]


def test_changes_are_told_and_repetitions_are_not(caplog: pytest.LogCaptureFixture) -> None:
    dry, refused = outcome(OutcomeStatus.DRY_RUN), outcome(OutcomeStatus.REFUSED, error="no: do that")
    rounds = [
        finished(dry),
        finished(dry),
        finished(outcome(OutcomeStatus.UNCHANGED)),
        finished(refused),
        finished(refused),
    ]
    assert told(caplog, *rounds)[1:] == [
        "INFO /b: cpu.idle 0 -> 1 (dry-run) because",
        "WARNING /b: cpu.idle 0 -> 1 (refused) no: do that",
    ]


def test_every_write_is_told(caplog: pytest.LogCaptureFixture) -> None:
    applied = outcome(OutcomeStatus.APPLIED)
    assert len(told(caplog, finished(applied), finished(applied))) == 3


def test_a_repair_is_told_as_one(caplog: pytest.LogCaptureFixture) -> None:
    repaired = msgspec.structs.replace(outcome(OutcomeStatus.APPLIED), repaired=True)
    assert told(caplog, finished(repaired))[1:] == ["INFO /b: cpu.idle 0 -> 1 (repaired) because"]


def test_a_source_that_fails_and_recovers_is_told_once_each(caplog: pytest.LogCaptureFixture) -> None:
    bad = (ComponentHealth(name="pods", ok=False, error="not YAML", remedy="mend it"),)
    lines = told(caplog, finished(), finished(sources=bad), finished(sources=bad), finished())
    assert lines[1:] == ["WARNING pods: not YAML: mend it", "INFO pods: works again"]


def test_a_wish_that_cannot_be_fulfilled_is_told_once_and_that_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    rejected = {"default/db": Reason(rule="dedicated_resize", text="db asked for 2, and now for 4.")}
    wrong = msgspec.structs.replace(finished(), advice=msgspec.structs.replace(advice(), rejected=rejected))
    right = msgspec.structs.replace(finished(), advice=advice())
    assert told(caplog, right, wrong, wrong, right)[1:] == [
        "WARNING default/db does not get what it asks for: db asked for 2, and now for 4.",
        "INFO default/db: what it asks for is there, or it is gone",
    ]
