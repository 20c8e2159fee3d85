"""Policy `latency`: a table of single cycles, and sequences of cycles."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.engine import PolicyState, advise_cpu
from agent.advisor.interference import Interference
from agent.advisor.latency import LatencyInputs, evaluate_latency, is_latency_alarm
from agent.config.advisor import AdvisorConfig, LatencyConfig
from agent.config.config import AgentConfig
from api.knobs import Reason
from api.rates import exclude_throttling
from api.snapshot import CgroupSample, ComponentHealth, RunqLatency, Snapshot, ThreadStates
from tests.agent.advisor.cycles import advice_of, advise_cycles, evaluate_cycles
from tests.builders.nodes import S
from tests.builders.nodes import run_queue_latency as waits
from tests.builders.pods import reclaimed, shared
from tests.builders.snapshots import snapshot

CONFIG = LatencyConfig(target_wait_ms=8.192)  # a slot's bound: no interpolation in the tables
ADVISOR = AdvisorConfig(latency=CONFIG)
LIMITS = {"/web": CONFIG.target_wait_ms * 1e6}


def web_and_batch(
    at_s: float, total: dict[int, int], batch_s: float, *, web_s: float | None = None, **fields: Any
) -> Snapshot:
    """Return a snapshot of an online pod with these cumulative waits, and of a batch pod that has used `batch_s`."""
    usage_s = {"web": 0.2 * at_s if web_s is None else web_s, "batch": batch_s}
    latency = {"web": waits(total), "batch": waits({10: 1})}
    return snapshot(at_s, [shared("web"), reclaimed("batch")], usage_s=usage_s, latency=latency, **fields)


def situation(
    wait: RunqLatency | None, *, used: float | None = 1.6, now_s: float = 100.0, enable: bool = True
) -> LatencyInputs:
    return LatencyInputs(
        now_ns=round(now_s * S),
        elapsed_ns=S,
        node_cpus=2,
        waits={"/web": wait},
        reclaimed_use_cores=used,
        requirement_cores=0.5,
        enable_reclaim=enable,
    )


@pytest.mark.parametrize(
    ("wait", "before", "calm_for_s", "used", "after", "action", "rule"),
    [
        # calm
        ({10: 1000}, 2.0, 60, 1.6, 2.0, "hold", "wait_below_target"),
        ({10: 1000}, 1.0, 60, 1.0, 1.2, "grow", "wait_below_target"),
        ({10: 1000}, 1.9, 60, 1.0, 2.0, "grow", "wait_below_target"),
        ({10: 1000}, 1.0, 2, 1.0, 1.0, "hold", "not_calm_yet"),
        ({}, 1.0, 60, 1.0, 1.2, "grow", "wait_below_target"),
        # 1 % may wait longer, and one wait is no breach
        ({10: 990, 16000: 10}, 2.0, 60, 1.6, 2.0, "hold", "wait_below_target"),
        ({10: 3, 16000: 1}, 2.0, 60, 1.6, 2.0, "hold", "wait_below_target"),
        # between half the target and the target
        ({10: 900, 8000: 100}, 1.0, 60, 1.0, 1.0, "hold", "wait_near_target"),
        # above: half of what is used, whatever was lent
        ({10: 900, 16000: 100}, 2.0, 60, 1.6, 0.8, "shrink", "wait_above_target"),
        ({10: 900, 16000: 100}, 1.0, 60, 1.6, 0.5, "shrink", "wait_above_target"),
        ({10: 900, 16000: 100}, 2.0, 60, None, 1.0, "shrink", "wait_above_target"),
        ({10: 900, 16000: 100}, 0.1, 60, 0.1, 0.1, "hold", "wait_above_target"),
        # four times above: everything but 5 % of the node
        ({10: 900, 60000: 100}, 2.0, 60, 1.6, 0.1, "shrink", "wait_far_above_target"),
    ],
)
def test_one_cycle(
    wait: dict[int, int], before: float, calm_for_s: float, used: float | None, after: float, action: str, rule: str
) -> None:
    state = AdvisorState(reclaimable_cores=before, last_breach_ns=round((100 - calm_for_s) * S), last_wait_ns=99 * S)
    allowance = evaluate_latency(situation(waits(wait), used=used), state, CONFIG)
    assert (allowance.reclaimable_cores, allowance.action, allowance.reason.rule) == (
        pytest.approx(after),
        action,
        rule,
    )


def test_the_reason_contains_its_inputs() -> None:
    reason = evaluate_latency(
        situation(waits({10: 900, 16000: 100})), AdvisorState(reclaimable_cores=2.0), CONFIG
    ).reason
    assert reason.threshold == 8.192
    # rank 990 of 1000 lies 90 % into the slot from 8.192 to 16.384 ms
    assert reason.inputs["wait_ms"] == pytest.approx(15.565, abs=0.001)
    assert reason.inputs["cgroup"] == "/web"
    assert "15.6 ms" in reason.text


def test_missing_latency_freezes_and_then_falls_back_to_the_estimate() -> None:
    state = AdvisorState(reclaimable_cores=2.0, last_wait_ns=97 * S)
    fresh = evaluate_latency(situation(None), state, CONFIG)
    assert (fresh.reclaimable_cores, fresh.action, fresh.reason.rule) == (2.0, "freeze", "wait_unknown")
    state = AdvisorState(reclaimable_cores=2.0, last_wait_ns=95 * S)
    stale = evaluate_latency(situation(None), state, CONFIG)
    assert (stale.reclaimable_cores, stale.action, stale.reason.rule) == (1.5, "shrink", "wait_unknown_long")
    low = evaluate_latency(situation(None), AdvisorState(reclaimable_cores=0.3, last_wait_ns=95 * S), CONFIG)
    assert low.reclaimable_cores == 0.3, "missing input never grows what is lent"


def test_one_breach_counts_even_if_another_container_is_not_measured() -> None:
    both = LatencyInputs(
        now_ns=S, elapsed_ns=S, node_cpus=2, waits={"/a": None, "/b": waits({10: 900, 60000: 100})},
        reclaimed_use_cores=1.0, requirement_cores=0.0,
    )  # fmt: skip
    assert evaluate_latency(both, AdvisorState(reclaimable_cores=2.0), CONFIG).reason.rule == "wait_far_above_target"


def test_the_worst_container_decides_not_the_mean() -> None:
    both = LatencyInputs(
        now_ns=S, elapsed_ns=S, node_cpus=2,
        waits={"/busy": waits({10: 100_000}), "/small": waits({16000: 40})},
        reclaimed_use_cores=1.0, requirement_cores=0.0,
    )  # fmt: skip
    allowance = evaluate_latency(both, AdvisorState(reclaimable_cores=2.0), CONFIG)
    assert allowance.action == "shrink"
    assert allowance.reason.inputs["cgroup"] == "/small"


def test_sums_alone_stand_for_an_exponential() -> None:
    # mean 1 ms: the 99th percentile of an exponential is ln(100) = 4.6 ms; mean 2 ms gives 9.2 ms, above 8.192
    calm = evaluate_latency(
        situation(RunqLatency(sum_ns=100_000_000, count=100)), AdvisorState(reclaimable_cores=2.0), CONFIG
    )
    high = evaluate_latency(
        situation(RunqLatency(sum_ns=200_000_000, count=100)), AdvisorState(reclaimable_cores=2.0), CONFIG
    )
    assert calm.reason.rule == "wait_near_target"
    assert high.reason.rule == "wait_above_target"
    assert high.reason.inputs["wait_ms"] == pytest.approx(9.21, abs=0.01)


def test_own_throttling_is_excluded_from_latency() -> None:
    # ten periods, each with one throttle of 79 ms (a task with 20 ms in 100), and a thousand short waits
    current = exclude_throttling(waits({10: 1000, 79_000: 10}), 10 * 79_000_000, 10, 1, 2)
    assert (current.count, current.slots) == (1000, waits({10: 1000}).slots)
    both = exclude_throttling(waits({10: 1000, 30_000: 50, 79_000: 10}), 10 * 79_000_000, 10, 1, 2)
    assert both.slots is not None
    assert sum(both.slots[15:]) >= 40, "waits for a CPU stay although some are as long as part of a throttle"
    assert exclude_throttling(waits({10: 5}), 0, 0, 1, 2) == waits({10: 5})
    assert exclude_throttling(RunqLatency(sum_ns=900, count=9), 800, 1, 1, 2) == RunqLatency(sum_ns=100, count=9)
    # four threads on one CPU are each held back while the kernel counts the time once
    crowd = exclude_throttling(waits({10: 1000, 79_000: 40}), 10 * 79_000_000, 10, 4, 1)
    assert crowd.slots == waits({10: 1000}).slots


def test_alarm_between_cycles() -> None:
    before = {"/web": waits({10: 1000})}
    assert not is_latency_alarm(before, {"/web": waits({10: 1100})}, LIMITS, CONFIG)
    assert not is_latency_alarm(before, {"/web": waits({10: 1000, 20000: 1})}, LIMITS, CONFIG), "one wait is no breach"
    assert is_latency_alarm(before, {"/web": waits({10: 1050, 20000: 2})}, LIMITS, CONFIG)
    assert not is_latency_alarm({}, {"/web": waits({20000: 50})}, LIMITS, CONFIG), (
        "a cgroup seen first has no past to subtract"
    )


def test_a_spike_shrinks_in_one_cycle_and_regrows_slowly() -> None:
    """Ten calm seconds, two with breaches, then calm: the quota shrinks at once and regrows by a tenth of the node a second."""
    cycles = [
        web_and_batch(second, {10: 1000 * (second + 1), 60000: 200 * min(max(second - 9, 0), 2)}, 1.7 * second)
        for second in range(40)
    ]
    reclaimable = [advice.reclaimable_cores for advice in advise_cycles(cycles, ADVISOR)]
    assert [reclaimable[s] for s in (0, 9, 10, 11, 13)] == [2.0, 2.0, 0.1, 0.1, 0.1]
    assert reclaimable[14] == pytest.approx(0.3)
    assert reclaimable[18] == pytest.approx(1.1)
    assert reclaimable[19] == pytest.approx(1.3)
    # 1.7 cores were in use when it hurt: from three quarters of that on, growth goes at a tenth of its pace
    assert reclaimable[24] == pytest.approx(1.4)
    assert reclaimable[39] == pytest.approx(1.7)
    assert all(reclaimable[s] <= reclaimable[s + 1] for s in range(11, 39))


def test_without_online_pods_the_quota_grows_to_the_whole_node_in_steps() -> None:
    cycles = [snapshot(second, [reclaimed("batch")]) for second in range(12)]
    advices = advise_cycles(cycles, ADVISOR, AdvisorState(reclaimable_cores=0.1))
    assert {advice.reason.rule for advice in advices} == {"nothing_online"}
    reclaimable = [advice.reclaimable_cores for advice in advices]
    assert reclaimable[:3] == pytest.approx([0.1, 0.3, 0.5])
    assert reclaimable[-1] == 2.0


def test_a_stale_pod_list_stops_growth() -> None:
    """The stale list may miss new pods; the listed ones are protected as before."""
    calm, half = {10: 1000}, AdvisorState(reclaimable_cores=0.5)
    failed = {"sources": (ComponentHealth(name="pods", ok=False, error="the kubelet hangs", remedy="see why"),)}
    readings = [(calm, {}), (calm, {}), (calm, failed), (calm, failed), ({10: 1000, 60_000: 200}, failed)]
    cycles = [
        snapshot(second, [shared("web")], latency={"web": waits(total)}, **health)
        for second, (total, health) in enumerate(readings)
    ]
    advices = advise_cycles(cycles, ADVISOR, half)
    assert [(round(each.reclaimable_cores, 2), each.action, each.reason.rule) for each in advices] == [
        (0.5, "freeze", "wait_unknown"),
        (0.7, "grow", "wait_below_target"),
        (0.7, "freeze", "pods_unknown"),
        (0.7, "freeze", "pods_unknown"),
        (0.1, "shrink", "wait_far_above_target"),
    ]
    (advice,) = advise_cycles([snapshot(9, [], **failed)], ADVISOR, half)
    assert (advice.reclaimable_cores, advice.reason.rule) == (0.5, "pods_unknown")
    assert advice.reason.text == (
        "No online pod runs on this node, but the list of pods is stale and may miss new pods: "
        "the CPU quota of reclaimed pods does not grow."
    )


def starving(
    at_s: float, total: dict[int, int], *, runnable: int | None, used_s: float = 0.0, periods: int = 0
) -> Snapshot:
    """Return a snapshot of the web pod with these runnable threads; batch work has 1.6 of 2 CPUs."""
    current = web_and_batch(at_s, total, 1.6 * at_s, web_s=used_s)
    states = None
    if runnable is not None:
        states = ThreadStates(runnable=runnable, uninterruptible=0, iowait=0, sleeping=4)
    web = replace(current.cgroups["/web"], threads_by_state=states, periods=periods, throttled_periods=periods)
    return replace(current, cgroups={**current.cgroups, "/web": web})


def replayed(*current: Snapshot, reclaimable: float) -> list[tuple[float, Reason]]:
    """Return quota and reason of each cycle; the agent, a shadow policy and a replay must agree."""
    state = PolicyState(advisor=AdvisorState(reclaimable_cores=reclaimable))
    advices = [advice_of(result) for result in evaluate_cycles(current, AgentConfig(advisor=ADVISOR), state)[0]]
    return [(advice.reclaimable_cores, advice.reason) for advice in advices]


def test_a_cycle_without_finished_waits_stops_growth_while_threads_wait() -> None:
    """A wait is measured when it ends: a short cycle between ticks may find all of them pending."""
    calm = {10: 1000}
    before, now = starving(10, calm, runnable=0), starving(10.05, calm, runnable=8)
    reclaimable, reason = replayed(before, now, reclaimable=1.0)[-1]
    assert (reclaimable, reason.rule) == (1.0, "wait_under_way")
    assert reason.text == (
        "/web has 8 runnable threads, used 0.00 cores and finished no wait for a CPU in this cycle: "
        "the CPU quota of reclaimed pods does not grow."
    )
    assert [reason.inputs[name] for name in ("cgroup", "waits", "wait_ms", "runnable")] == ["/web", 0, None, 8]
    reclaimable, reason = replayed(before, now, reclaimable=2.0)[-1]
    assert (reclaimable, reason.rule) == (2.0, "wait_under_way"), "the reason does not claim short waits"


def test_lasting_starvation_stops_growth() -> None:
    cycles = [starving(10 + second, {10: 1000}, runnable=8) for second in range(20)]
    assert {reason.rule for _, reason in replayed(*cycles, reclaimable=1.0)} == {"wait_unknown", "wait_under_way"}
    assert {reclaimable for reclaimable, _ in replayed(*cycles, reclaimable=1.0)} == {1.0}


@pytest.mark.parametrize(
    ("now", "rule"),
    [
        # one thread that ran all the time without a break waits for nothing
        (starving(11, {10: 1000}, runnable=1, used_s=0.97), "wait_below_target"),
        (starving(11, {10: 1000}, runnable=2, used_s=0.97), "wait_under_way"),
        # no thread is runnable, or threads are not counted
        (starving(11, {10: 1000}, runnable=0), "wait_below_target"),
        (starving(11, {10: 1000}, runnable=None), "wait_below_target"),
        # waits ended: they say it
        (starving(11, {10: 1100}, runnable=8), "wait_below_target"),
        # its own quota holds it back
        (starving(11, {10: 1000}, runnable=8, periods=7), "wait_below_target"),
    ],
)
def test_starving_containers(now: Snapshot, rule: str) -> None:
    reclaimable, reason = replayed(starving(10, {10: 1000}, runnable=0), now, reclaimable=1.0)[-1]
    assert (reason.rule, reclaimable) == (rule, 1.0 if rule == "wait_under_way" else pytest.approx(1.2))
    nothing = now.cgroups["/web"].wait == waits({10: 1000}) and rule == "wait_below_target"
    assert (
        reason.text.startswith(
            "No online pod finished waiting for a CPU in this cycle: reclaimed pods may use 1.2 of 2"
        )
        == nothing
    )


def played(*cycles: tuple[dict[int, int] | None, int]) -> list[tuple[float, str]]:
    """Return quota and rule of each cycle: the web pod's cumulative waits, None for a failed read, and its id."""
    shots = [
        web_and_batch(second, total, 1.6 * second, ids={"web": number, "batch": 5})
        if total is not None
        else snapshot(second, [shared("web"), reclaimed("batch")], cgroups={})
        for second, (total, number) in enumerate(cycles)
    ]
    return [(advice.reclaimable_cores, advice.reason.rule) for advice in advise_cycles(shots, ADVISOR)]


def test_a_failed_read_of_the_cgroups_stops_growth() -> None:
    calm, harm = {10: 1000}, {10: 1000, 60_000: 200}
    cycles = played((calm, 1), (harm, 1), (None, 1), (harm, 1))
    assert [rule for _, rule in cycles] == ["wait_unknown", "wait_far_above_target", "wait_unknown", "wait_unknown"]
    assert [reclaimable for reclaimable, _ in cycles] == [2.0, 0.1, 0.1, 0.1]


def test_the_first_waits_of_a_recreated_cgroup_count() -> None:
    cycles = played(({10: 1000}, 1), ({10: 2000}, 1), ({60_000: 300}, 2))
    assert cycles[-1] == (0.1, "wait_far_above_target")


def test_a_cycle_milliseconds_after_another_does_not_measure_zero_use() -> None:
    times = ((0.0, 0), (1.0, 0), (2.0, 0), (2.005, 300))
    cycles = [
        web_and_batch(at, {10: 1000 * (n + 2), 16_000: slow}, 1.6 * min(at, 2.0)) for n, (at, slow) in enumerate(times)
    ]
    reclaimable = advise_cycles(cycles, ADVISOR)[-1].reclaimable_cores
    assert reclaimable == pytest.approx(0.75), "half of 1.6 cores, less what 5 ms without a tick of the counter say"


def test_breaches_above_a_level_do_not_cause_oscillation() -> None:
    """Above 1.5 of 2 cores batch work causes a breach: the quota settles below, and breaches become rare."""
    state, total = AdvisorState(), {10: 0, 16_000: 0}
    used, reclaimable, breaches, sum_reclaimable = 0.0, 2.0, 0, 0.0
    for second in range(600):
        used += reclaimable
        total = {10: total[10] + 1000, 16_000: total[16_000] + (200 if reclaimable > 1.5 else 0)}
        current = web_and_batch(second, total, used)
        advice, state = advise_cpu(current, ADVISOR, state, current.taken_at_ns)
        assert advice is not None
        reclaimable = advice.reclaimable_cores
        breaches += advice.reason.rule == "wait_above_target"
        sum_reclaimable += reclaimable
    assert breaches <= 27
    assert sum_reclaimable / 600 >= 1.15


def test_disabling_reclaim_keeps_only_the_minimum() -> None:
    allowance = evaluate_latency(
        situation(waits({10: 1000}), enable=False), AdvisorState(reclaimable_cores=2.0), CONFIG
    )
    assert (allowance.reclaimable_cores, allowance.reason.rule) == (0.1, "reclaim_disabled")


def test_a_new_cgroup_of_the_same_path_is_not_compared_with_the_old_one() -> None:
    first = snapshot(0, [shared("web")], latency={"web": waits({10: 5000})}, ids={"web": 7})
    again = snapshot(1, [shared("web")], latency={"web": waits({60000: 9000})}, ids={"web": 8})
    advice = advise_cycles([first, again], ADVISOR)[-1]
    assert advice.reason.inputs["waits"] == 9000, "all of its own, and none subtracted"


@given(
    slots=st.lists(st.integers(0, 10_000), min_size=27, max_size=27),
    before=st.floats(0, 4),
    used=st.one_of(st.none(), st.floats(0, 2)),
    missing=st.booleans(),
    elapsed_s=st.floats(0, 100),
)
def test_the_quota_stays_within_the_node_and_grows_by_one_step_at_most(
    slots: list[int], before: float, used: float | None, missing: bool, elapsed_s: float
) -> None:
    wait = None if missing else RunqLatency(sum_ns=0, count=sum(slots), slots=tuple(slots))
    case = LatencyInputs(
        now_ns=10**12, elapsed_ns=round(elapsed_s * S), node_cpus=2, waits={"/web": wait},
        reclaimed_use_cores=used, requirement_cores=1.0,
    )  # fmt: skip
    allowance = evaluate_latency(case, AdvisorState(reclaimable_cores=before, last_wait_ns=0), CONFIG)
    assert 0.1 <= allowance.reclaimable_cores <= 2.0
    assert allowance.reclaimable_cores <= max(before + max(0.2 * elapsed_s, 0.05), 0.1) + 1e-9
    if missing:
        assert allowance.reclaimable_cores <= max(before, 0.1)


def test_latency_that_remains_without_batch_work_becomes_the_baseline() -> None:
    # At the minimum for three cycles, and the pods still wait 16 ms: their own queueing, which no smaller quota reduces.
    busy, state, reported = waits({10: 900, 16000: 100}), AdvisorState(reclaimable_cores=2.0), []
    for second in range(1, 16):
        allowance = evaluate_latency(situation(busy, used=state.reclaimable_cores, now_s=100 + second), state, CONFIG)
        state = replace(
            state,
            reclaimable_cores=allowance.level_cores,
            harmful_cores=allowance.harmful_cores,
            baseline_latency_ns=allowance.baseline_latency_ns,
            minimum_since_ns=allowance.minimum_since_ns,
            last_breach_ns=allowance.last_breach_ns,
            last_wait_ns=allowance.last_wait_ns,
        )
        reported.append((allowance.reason.rule, allowance.reclaimable_cores))
    assert [cores for _, cores in reported[:5]] == [1.0, 0.5, 0.25, 0.1, 0.1]
    assert reported[7:9] == [("wait_above_target", 0.1), ("not_calm_yet", 0.1)]
    assert reported[-1][0] == "wait_is_own"
    assert reported[-1][1] >= 1.0, "a tenth of the node a second, for nothing of it was harm"
    # More than a quarter beyond that is harm, whatever the pods make by themselves ...
    worse = evaluate_latency(situation(waits({10: 900, 40000: 100}), used=1.0, now_s=116), state, CONFIG)
    assert (worse.action, worse.reason.rule) == ("shrink", "wait_above_target")
    # ... and once waits are short, the target alone counts again.
    calm = evaluate_latency(situation(waits({10: 900}), used=1.0, now_s=117), state, CONFIG)
    assert not calm.baseline_latency_ns


def test_the_baseline_of_one_container_excuses_no_other() -> None:
    # /api waits 30 ms by itself, as was learnt; /web, which never did, waits 26 ms against a target of 5.
    config, state = (
        LatencyConfig(target_wait_ms=5),
        AdvisorState(reclaimable_cores=2.0, baseline_latency_ns={"/api": 30e6}, last_wait_ns=0),
    )
    both = {"/api": waits({30000: 1000}), "/web": waits({26000: 1000})}
    now = replace(situation(waits({}), used=1.0), waits=both)
    allowance = evaluate_latency(now, state, config)
    assert (allowance.reason.rule, allowance.reclaimable_cores) == ("wait_far_above_target", 0.1)
    assert "p99 of /web is " in allowance.reason.text
    assert allowance.baseline_latency_ns == {"/api": 30e6}
    # And a wait of /web that is short leaves the other's alone.
    short = evaluate_latency(replace(now, waits={**both, "/web": waits({100: 1000})}), state, config)
    assert (short.reason.rule, short.reclaimable_cores) == ("wait_is_own", 2.0)


@pytest.mark.parametrize(
    ("reclaimed_ns", "own_ms", "reclaimable"),
    [(100, None, 0.1), (10, None, 0.1), (9, 8.0, 0.3), (0, 8.0, 0.3)],
)
def test_latency_by_batch_work_never_becomes_the_baseline(
    reclaimed_ns: int, own_ms: float | None, reclaimable: float
) -> None:
    """Longer at the minimum than calm_s, with 8 ms and a target of 5: batch work is the aggressor from a tenth of the
    latency on."""
    config = LatencyConfig(target_wait_ms=5)
    blame = Interference(total_ns=100, by_reclaimed={"/b": reclaimed_ns}, other="/web", other_ns=100 - reclaimed_ns)
    now = replace(situation(waits({8000: 1000}), used=0.1), blames={"/web": blame})
    allowance = evaluate_latency(now, AdvisorState(reclaimable_cores=0.1, minimum_since_ns=0, last_breach_ns=0), config)
    assert allowance.reclaimable_cores == reclaimable
    assert allowance.baseline_latency_ns == ({} if own_ms is None else {"/web": pytest.approx(own_ms * 1e6, rel=0.05)})
    # Latency with another aggressor carries no information about this one.
    other = Interference(total_ns=100, by_reclaimed={}, other="/api", other_ns=100)
    both = replace(
        now, waits={"/web": waits({8000: 1000}), "/api": waits({30000: 1000})}, blames={"/web": blame, "/api": other}
    )
    allowance = evaluate_latency(
        both, AdvisorState(reclaimable_cores=0.1, minimum_since_ns=0, last_breach_ns=0), config
    )
    assert allowance.reclaimable_cores == reclaimable


def test_a_baseline_excuses_no_latency_by_batch_work() -> None:
    """The baseline of /api is 30 ms; now all of its 30 ms are attributed to batch work."""
    config, state = (
        LatencyConfig(target_wait_ms=5),
        AdvisorState(reclaimable_cores=2.0, baseline_latency_ns={"/api": 30e6}, last_wait_ns=0),
    )
    for by_batch, rule, reclaimable in ((100, "wait_far_above_target", 0.1), (9, "wait_is_own", 2.0)):
        blame = Interference(total_ns=100, by_reclaimed={"/b": by_batch}, other="/api", other_ns=100 - by_batch)
        now = replace(situation(waits({}), used=1.0), waits={"/api": waits({30000: 1000})}, blames={"/api": blame})
        allowance = evaluate_latency(now, state, config)
        assert (allowance.reason.rule, allowance.reclaimable_cores) == (rule, reclaimable)
        assert allowance.baseline_latency_ns == {"/api": 30e6}


def test_harmful_cores_are_dropped_only_with_a_new_baseline() -> None:
    calm = situation(waits({30000: 1000}), used=0.1)
    learning = AdvisorState(reclaimable_cores=0.1, minimum_since_ns=0, harmful_cores=1.0, last_wait_ns=0)
    assert evaluate_latency(calm, learning, CONFIG).harmful_cores is None
    state = replace(learning, baseline_latency_ns={"/web": 30e6}, reclaimable_cores=1.0, minimum_since_ns=None)
    assert evaluate_latency(calm, state, CONFIG).harmful_cores == 1.0


def test_the_reason_and_its_inputs_are_about_the_same_container() -> None:
    """/api has the higher latency, within its baseline; /web breaches."""
    now = replace(situation(waits({})), waits={"/api": waits({30000: 1000}), "/web": waits({16000: 1000})})
    reason = evaluate_latency(
        now, AdvisorState(reclaimable_cores=2.0, baseline_latency_ns={"/api": 31e6}, last_wait_ns=0), CONFIG
    ).reason
    assert "p99 of /web is" in reason.text
    assert (reason.inputs["cgroup"], reason.inputs["own_wait_ms"]) == ("/web", None)
    assert f"is {reason.inputs['wait_ms']:.3g} ms" in reason.text


@pytest.mark.parametrize(("successor", "retained"), [(100, {"/web": 30e6}), (999, {})])
def test_a_replaced_container_has_no_baseline(successor: int, retained: dict[str, float]) -> None:
    pods = [shared("web"), reclaimed("batch")]
    first, later = (snapshot(at_s, pods, latency={"web": waits({})}) for at_s in (0, 1))
    assert first.cgroups["/web"].id == 100
    # Restarted counters carry no information: the cgroup id decides.
    other = replace(later.cgroups["/web"], id=successor, wait=None)
    later = replace(later, cgroups={**later.cgroups, "/web": other})
    state = AdvisorState(previous=first, baseline_latency_ns={"/web": 30e6}, reclaimable_cores=1.0)
    _, after = advise_cpu(later, AdvisorConfig(), state, later.taken_at_ns)
    assert after.baseline_latency_ns == retained


def test_descendants_count_for_a_container() -> None:
    def nested(at_s: float, wait: RunqLatency) -> Snapshot:
        bare = snapshot(at_s, [shared("web"), reclaimed("batch")], latency={"web": waits({})})
        inner = CgroupSample(path="/web/inner", id=7, wait=wait, periods=0)
        return replace(bare, cgroups={**bare.cgroups, "/web/inner": inner})

    cycles = [nested(1, waits({10: 100})), nested(2, waits({10: 1000, 60_000: 100}))]
    advice = advise_cycles(cycles, AdvisorConfig())[-1]
    assert advice.reason.rule == "wait_far_above_target"
    assert advice.reason.inputs["cgroup"] == "/web"
