"""Trials of the CPU quota in a closed loop: a quota that cannot help is lifted and stays lifted, one that helps stays, and
no trial delays what the policy does against latency."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from agent.advisor.engine import PolicyState, restore_policy_state, without_quota_trials
from agent.advisor.quota_trial import MEMORY_NS, online_workloads
from agent.config.config import AgentConfig
from agent.offline.replay import PolicyReplay
from agent.qrm.cpuset.state import CpusetState
from api.advice import QuotaVerdict
from tests.builders.pods import reclaimed, shared
from tests.builders.quota_trial_node import (
    BATCH,
    BURST,
    CPUS,
    QUIET,
    WEB,
    QuotaTrialNode,
    Waits,
    harm_of_batch,
    own_bursts,
)

S = 1_000_000_000
CONFIG = AgentConfig()
DID_NOT_HELP, HELPED, TRIAL, ENDED = "quota_did_not_help", "quota_helped", "quota_trial", "quota_trial_ended"


def verdict_of(node: QuotaTrialNode) -> QuotaVerdict:
    (verdict,) = node.state.advisor.quota_trial.verdicts
    return verdict


def lifted_node() -> QuotaTrialNode:
    """A node immediately after the verdict that the quota does not help."""
    node = QuotaTrialNode(own_bursts, CONFIG)
    node.run_until(DID_NOT_HELP)
    return node


def test_a_quota_that_cannot_help_is_lifted_for_an_hour_and_then_tried_again() -> None:
    node = QuotaTrialNode(own_bursts, CONFIG)
    trial = node.run_until(DID_NOT_HELP)
    assert any(cycle.advice.action == "shrink" for cycle in trial), "the policy acted first"
    assert 40 <= len(trial) <= 600
    assert node.cores == CPUS
    reason, verdict = trial[-1].advice.reason, verdict_of(node)
    assert not verdict.helped
    assert reason.inputs["without_quota_ms"] == pytest.approx(verdict.without_quota_ns / 1e6, abs=0.001)
    assert (reason.inputs["lent_cores"], reason.inputs["workloads"]) == (CPUS, "default/web")
    assert "The CPU quota of reclaimed pods did not help default/web: run-queue latency p99 " in reason.text
    assert trial[-1].advice.quota_verdict == verdict
    rest_s = (verdict.expires_wall_ns - verdict.wall_time_ns) // S
    assert rest_s * S == MEMORY_NS
    memory = node.run(rest_s - 10, 10)
    assert {cycle.advice.reclaimable_cores for cycle in memory} == {CPUS}
    breaches = [cycle for cycle in memory if cycle.rule == DID_NOT_HELP]
    assert len(breaches) == pytest.approx(rest_s / 70, abs=1), "every burst is explained, none costs batch work"
    assert "target 10 ms: no quota is set. The CPU quota" in breaches[0].advice.reason.text
    again = node.run(30)
    assert any(cycle.advice.action == "shrink" for cycle in again)
    assert again[-1].advice.quota_verdict is None


def test_a_quota_that_helps_stays_and_its_numbers_are_reported_once() -> None:
    node = QuotaTrialNode(harm_of_batch, CONFIG)
    trial = node.run_until(HELPED, 300)
    verdict, reason = verdict_of(node), trial[-1].advice.reason
    assert verdict.helped
    assert (verdict.with_quota_ns / 1e6, verdict.without_quota_ns / 1e6) == (
        pytest.approx(0.127, abs=0.01),
        pytest.approx(62, abs=4),
    )
    assert verdict.statistic > verdict.required_statistic
    assert "The CPU quota of reclaimed pods helped default/web: run-queue latency p99 " in reason.text
    assert {"without_quota_s", "with_quota_s", "wait_ms", "lent_cores"} <= reason.inputs.keys()
    released = [cycle for cycle in trial if cycle.rule == TRIAL and cycle.advice.action == "grow"]
    assert 3 <= len(released) <= 6, "few control intervals are enough"
    later = node.run(200)
    assert not [cycle for cycle in later if cycle.rule in (TRIAL, HELPED, DID_NOT_HELP)]
    assert all(cycle.advice.action == "shrink" for cycle in later if cycle.rule == "wait_far_above_target")


def test_a_control_interval_ends_in_the_cycle_in_which_latency_rises() -> None:
    node = QuotaTrialNode(harm_of_batch, CONFIG)
    released = node.run_until(TRIAL)
    while released[-1].advice.action != "grow":
        released = node.run_until(TRIAL)
    assert node.cores == CPUS
    (after,) = node.run(1)
    assert (after.advice.action, after.rule) == ("shrink", "wait_far_above_target")
    assert after.advice.reclaimable_cores == pytest.approx(0.2)


def test_a_control_interval_ends_with_the_former_quota_if_latency_comes_near_its_target() -> None:
    def near_target(second: int, cores: float) -> Waits:
        if second < 3:
            return BURST
        return {100: 360, 7_000: 40} if cores > CPUS / 2 else QUIET

    node = QuotaTrialNode(near_target, CONFIG)
    cycles = node.run_until(ENDED, 60)
    released = next(cycle for cycle in reversed(cycles) if cycle.rule == TRIAL and cycle.advice.action == "grow")
    assert cycles[-1].at_s - released.at_s == 1
    assert cycles[-1].advice.action == "shrink"
    assert cycles[-1].advice.reclaimable_cores == released.cores


def test_the_last_control_interval_ends_with_the_former_quota_too() -> None:
    """The comparison after it finds that the quota helps: then latency must not wait for the steps of the policy."""

    def above_target(second: int, cores: float) -> Waits:
        if second < 3:
            return BURST
        return {100: 360, 12_000: 40} if cores > CPUS / 2 else QUIET

    node = QuotaTrialNode(above_target, CONFIG)
    cycles = node.run_until(HELPED, 300)
    released = next(cycle for cycle in reversed(cycles) if cycle.rule == TRIAL and cycle.advice.action == "grow")
    assert cycles[-1].at_s - released.at_s == 1
    assert cycles[-1].advice.reclaimable_cores <= released.cores


def test_a_control_interval_ends_if_no_wait_ends() -> None:
    """The online tasks may wait for reclaimed pods all the time: a wait is measured when it ends."""
    node = QuotaTrialNode(lambda second, cores: BURST if second < 3 else QUIET if cores < CPUS / 2 else {}, CONFIG)
    cycles = node.run_until(ENDED, 60)
    released = next(cycle for cycle in reversed(cycles) if cycle.rule == TRIAL and cycle.advice.action == "grow")
    assert cycles[-1].at_s - released.at_s == 1
    assert cycles[-1].advice.reclaimable_cores == released.cores


@pytest.mark.parametrize("latency", [own_bursts, harm_of_batch])
def test_until_the_first_interval_with_the_quota_the_policy_decides_as_without_trials(latency: object) -> None:
    nodes = [QuotaTrialNode(latency, config) for config in (CONFIG, without_quota_trials(CONFIG))]  # type: ignore[arg-type]
    with_trials, without = (node.run(30) for node in nodes)
    first = next(i for i, cycle in enumerate(with_trials) if cycle.rule == TRIAL)
    assert any(cycle.advice.action == "shrink" for cycle in with_trials[:first])
    assert [cycle.advice.reason for cycle in with_trials[:first]] == [c.advice.reason for c in without[:first]]


def test_without_trials_every_burst_costs_batch_work() -> None:
    cycles = QuotaTrialNode(own_bursts, without_quota_trials(CONFIG)).run(300)
    assert sum(cycle.cores for cycle in cycles[60:]) / 240 < 0.6 * CPUS
    assert not {cycle.rule for cycle in cycles} & {TRIAL, HELPED, DID_NOT_HELP, ENDED}


def test_latency_far_above_that_of_the_trial_is_acted_on_in_the_same_cycle() -> None:
    node = lifted_node()
    worst_us = verdict_of(node).worst_ns / 1000
    node.latency = lambda _second, _cores: {100: 360, round(8 * worst_us): 40}
    (cycle,) = node.run(1)
    assert (cycle.advice.action, cycle.rule) == ("shrink", "wait_far_above_target")
    assert cycle.advice.reclaimable_cores == pytest.approx(0.2)
    assert node.state.advisor.quota_trial.verdicts == ()


def test_other_online_workloads_have_no_verdict_and_a_rollout_changes_none() -> None:
    labels = {"pod-template-hash": "5d4f"}
    node = QuotaTrialNode(own_bursts, CONFIG)
    node.pods = (shared("web-5d4f-x2x2x", cpu_request=1.0, labels=labels), BATCH)
    node.run_until(DID_NOT_HELP)
    node.pods = (shared("web-7777-abcde", cpu_request=1.0, labels={"pod-template-hash": "7777"}), BATCH)
    assert {cycle.advice.reclaimable_cores for cycle in node.run(60)} == {CPUS}
    node.pods = (*node.pods, shared("db", cpu_request=1.0))
    assert any(cycle.advice.action == "shrink" for cycle in node.run(20))


def test_a_new_online_pod_ends_a_control_interval() -> None:
    node = QuotaTrialNode(own_bursts, CONFIG)
    cycles = node.run_until(TRIAL)
    while cycles[-1].advice.action != "grow":
        cycles = node.run_until(TRIAL)
    node.latency = lambda _second, _cores: QUIET
    node.pods = (*node.pods, shared("db", cpu_request=1.0))
    (cycle,) = node.run(1)
    assert (cycle.rule, cycle.advice.reclaimable_cores) == (ENDED, cycles[-1].cores)


def test_disabled_reclaiming_is_stronger_than_a_verdict() -> None:
    node = lifted_node()
    node.config = replace(CONFIG, advisor=replace(CONFIG.advisor, enable_reclaim=False))
    (cycle,) = node.run(1)
    assert (cycle.rule, cycle.advice.reclaimable_cores) == ("reclaim_disabled", pytest.approx(0.2))


def test_a_quota_that_is_not_in_force_is_not_tested() -> None:
    """The file of the quota cannot be written: reclaimed pods use all CPUs whatever the policy decides."""
    node = QuotaTrialNode(own_bursts, CONFIG)
    node.use_cores = lambda _cores: CPUS - 0.5
    cycles = node.run(400)
    assert any(cycle.advice.action == "shrink" for cycle in cycles)
    assert not [cycle for cycle in cycles if cycle.rule in (TRIAL, HELPED, DID_NOT_HELP)]


def test_an_agent_that_restarts_knows_the_verdict() -> None:
    verdicts = lifted_node().state.advisor.quota_trial.verdicts
    restored = restore_policy_state(CpusetState(), verdicts=verdicts)
    node = QuotaTrialNode(own_bursts, CONFIG, restored)
    node.at_s = verdicts[0].wall_time_ns / S + 60
    assert {cycle.advice.reclaimable_cores for cycle in node.run(60)} == {CPUS}


def test_a_clock_that_was_set_back_makes_verdicts_invalid() -> None:
    verdicts = lifted_node().state.advisor.quota_trial.verdicts
    node = QuotaTrialNode(own_bursts, CONFIG, restore_policy_state(CpusetState(), verdicts=verdicts))
    assert any(cycle.advice.action == "shrink" for cycle in node.run(20))


@pytest.mark.parametrize("latency", [own_bursts, harm_of_batch])
def test_a_replay_of_the_recorded_snapshots_comes_to_the_same_verdict(latency: object) -> None:
    node = QuotaTrialNode(latency, CONFIG)  # type: ignore[arg-type]
    cycles = node.run(400)
    assert {cycle.rule for cycle in cycles} & {HELPED, DID_NOT_HELP}
    replay = PolicyReplay(CONFIG)
    encoded = [msgspec.json.encode(cycle.snapshot) for cycle in cycles]
    decoded = [msgspec.json.decode(data, type=type(cycles[0].snapshot)) for data in encoded]
    advices = [replay.evaluate(snapshot)[0] for snapshot in decoded]
    assert [advice.reason for advice in advices if advice is not None] == [c.advice.reason for c in cycles]


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("web-5d4f-x2x2x", {"pod-template-hash": "5d4f"}, "default/web"),
        ("web-5d4f-x2x2x", {}, "default/web-5d4f-x2x2x"),
        ("agent-x2x2x", {"controller-revision-hash": "9c"}, "default/agent"),
        ("db-0", {"controller-revision-hash": "db-9c"}, "default/db"),
        ("web", {"pod-template-hash": ""}, "default/web"),
        ("web", {"controller-revision-hash": "9c"}, "default/web"),
    ],
    ids=["Deployment", "no label", "DaemonSet", "StatefulSet", "empty hash", "no dash"],
)
def test_a_workload_has_the_name_of_its_controller(name: str, labels: dict[str, str], expected: str) -> None:
    assert online_workloads([shared(name, labels=labels), reclaimed("batch")])[1] == expected


def test_workloads_differ_by_all_names_and_are_shown_by_three() -> None:
    pods = [shared(f"web{i}") for i in range(9)]
    assert online_workloads(pods)[1] == "default/web0, default/web1, default/web2 and 6 more"
    assert online_workloads(pods)[0] != online_workloads(pods[:-1])[0]
    assert online_workloads(reversed(pods)) == online_workloads(pods)
    assert online_workloads([WEB])[0] != online_workloads([replace(WEB, namespace="other")])[0]
    assert len(online_workloads(pods)[0]) == 16


def test_the_state_is_bounded() -> None:
    """Two thousand seconds without a verdict: the intervals and their age are limited."""
    node = QuotaTrialNode(lambda _second, _cores: QUIET, CONFIG, PolicyState())
    node.run(2000, 5)
    intervals = node.state.advisor.quota_trial.intervals
    assert len(intervals) == 32
    assert not any(interval.limited for interval in intervals)
    assert all(interval.duration_ns == 5 * S for interval in intervals)
