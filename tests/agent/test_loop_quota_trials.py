"""Verdicts of quota trials in the loop: they survive a restart, stop no cycle, and exist only where the agent acts."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import QuotaTrialState
from agent.advisor.engine import PolicyState
from agent.advisor.quota_trial import measures_limit
from agent.config.config import AgentConfig
from agent.journal.decisions import DecisionJournal
from agent.journal.quota_verdict_file import FILE_NAME, QuotaVerdictFile
from agent.loop import Loop
from agent.qrm.decisions.cpu import cpu_requests
from api.decision import ActMode, OutcomeStatus
from api.interfaces import Unavailable
from api.knobs import Knob
from tests.agent.test_loop import Scripted, loop_over
from tests.builders.four_cpu_node import busy_snapshot, outcome
from tests.builders.quota_trial_node import QuotaTrialNode, harm_of_batch, own_bursts
from tests.builders.quota_verdicts import quota_verdict
from tests.builders.snapshots import cycle

VERDICT = quota_verdict()


def policy_state(loop: Loop) -> PolicyState:
    return cast(PolicyState, getattr(loop, "_policy_state"))  # noqa: B009


def test_verdicts_of_the_previous_agent_are_loaded_and_saved_again(tmp_path: Path) -> None:
    QuotaVerdictFile(tmp_path, "k").save((VERDICT,))
    loop = loop_over(Scripted(busy_snapshot), quota_verdicts=QuotaVerdictFile(tmp_path, "k"))
    loop.run_cycle("tick")
    assert policy_state(loop).advisor.quota_trial.verdicts == (VERDICT,)
    assert QuotaVerdictFile(tmp_path, "k").load() == (VERDICT,)


def test_a_damaged_file_is_a_startup_warning(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    finished = loop_over(Scripted(busy_snapshot), quota_verdicts=QuotaVerdictFile(tmp_path, "k")).run_cycle("tick")
    assert finished.startup_warnings[0].startswith("Every CPU quota is tried again: ")


def test_verdicts_that_cannot_be_written_are_reported_and_stop_no_cycle(tmp_path: Path) -> None:
    file = QuotaVerdictFile(tmp_path / "gone", "k")
    loop = loop_over(Scripted(busy_snapshot), quota_verdicts=file)
    with pytest.raises(Unavailable):
        file.save((VERDICT,))
    finished = loop.run_cycle("tick")
    status = {source.name: source for source in finished.snapshot.sources}["quota-verdicts"]
    assert not status.ok
    assert "No such file or directory" in status.error
    assert finished.outcomes


@pytest.mark.parametrize(("act", "trials"), [(ActMode.ON, True), (ActMode.DRY_RUN, False), (ActMode.OFF, False)])
def test_only_an_agent_that_acts_tests_its_quota(act: ActMode, *, trials: bool) -> None:
    script = Scripted(busy_snapshot)
    script.act = act
    loop = loop_over(script)
    loop.apply_config(AgentConfig())
    loop.run_cycle("tick")
    assert bool(policy_state(loop).advisor.quota_trial.key) is trials


def test_a_shadow_policy_tests_nothing() -> None:
    loop = loop_over(Scripted(busy_snapshot), AgentConfig(shadow=AgentConfig().advisor))
    for _ in range(2):
        loop.run_cycle("tick")
    shadow = cast(PolicyState, getattr(loop, "_shadow_state"))  # noqa: B009
    assert shadow.advisor.quota_trial.key == ""
    assert policy_state(loop).advisor.quota_trial.key != ""


def test_latency_is_watched_in_an_interval_with_the_smallest_quota_too() -> None:
    """Both kinds of intervals end with the same alarm. Otherwise an alarm at the smallest quota changes nothing."""
    node = QuotaTrialNode(own_bursts, AgentConfig())
    while not measures_limit(node.state.advisor.quota_trial):
        node.run(1)
    loop = loop_over(Scripted(busy_snapshot))
    loop.run_cycle("tick")
    can_shrink = getattr(loop, "_can_shrink")  # noqa: B009
    assert node.cores == pytest.approx(0.2)
    setattr(loop, "_policy_state", node.state)  # noqa: B010
    assert can_shrink()
    ended = replace(node.state.advisor, quota_trial=QuotaTrialState())
    setattr(loop, "_policy_state", replace(node.state, advisor=ended))  # noqa: B010
    assert not can_shrink()


def test_the_journal_records_that_a_quota_helped_although_it_does_not_change() -> None:
    trial = QuotaTrialNode(harm_of_batch, AgentConfig()).run_until("quota_helped")
    journal = DecisionJournal(None)
    for each in trial[-2:]:
        (quota,) = [
            request
            for request in cpu_requests(each.advice, each.snapshot, {"/batch": frozenset(Knob)})
            if request.knob is Knob.QUOTA
        ]
        unchanged = outcome(Knob.QUOTA, quota.value, OutcomeStatus.UNCHANGED)
        unchanged = replace(unchanged, decision=replace(unchanged.decision, reason=quota.reason))
        journal.publish(cycle(each.snapshot, outcomes=(unchanged,), advice=each.advice))
    (entry,) = journal.entries()
    reason = entry.outcome.decision.reason
    assert reason.rule == "quota_helped"
    assert "helped default/web: run-queue latency p99 " in reason.text
    assert reason.inputs["workloads"] == "default/web"
