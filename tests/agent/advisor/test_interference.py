"""Attribution of run-queue latency: how much, from which reclaimed pods, and when the quota does not shrink."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agent.advisor.advisor_state import AdvisorState
from agent.advisor.interference import MIN_WEIGHT_RATIO, Interference, attribute_latency, update_weights
from agent.advisor.latency import LatencyInputs, evaluate_latency
from agent.config.advisor import AdvisorConfig, LatencyConfig
from agent.qrm.decisions.cpu import cpu_requests
from api.knobs import Knob
from api.snapshot import Blame, CgroupSample, RunqLatency, Snapshot
from tests.agent.advisor.cycles import advise_cycles
from tests.builders.nodes import S
from tests.builders.nodes import run_queue_latency as waits
from tests.builders.pods import reclaimed, shared
from tests.builders.snapshots import snapshot

CONFIG = LatencyConfig(target_wait_ms=8.192)
SLOW = waits({10: 900, 16000: 100})


def blame(by_cgroup: dict[str, int], *, higher: int = 0, other: int = 0, throttled: int = 0) -> Blame:
    return Blame(by_cgroup=by_cgroup, throttled_ns=throttled, higher_class_ns=higher, other_ns=other)


def two_rounds(before: Blame | None, after: Blame | None, path: str = "/web") -> tuple[Snapshot, Snapshot]:
    first, second = snapshot(100, []), snapshot(101, [])
    return tuple(
        replace(shot, cgroups={path: CgroupSample(path=path, id=7, blame=result)})
        for shot, result in ((first, before), (second, after))
    )  # type: ignore[return-value]


def test_latency_is_attributed_to_the_cgroup_that_had_the_cpu() -> None:
    """Only growth between two cycles counts; a descendant counts as its reclaimed container; throttling has no aggressor."""
    before = blame({"/batch": 100, "/third": 50}, throttled=5)
    after = blame({"/batch": 130, "/batch/inner": 20, "/third": 950, "/web": 40}, higher=10, other=50, throttled=9000)
    result = attribute_latency(["/web"], ["/batch", "/idle"], *two_rounds(before, after))
    assert result == Interference(
        total_ns=30 + 20 + 900 + 40 + 10 + 50, by_reclaimed={"/batch": 50}, other="/third", other_ns=900
    )
    assert result.reclaimed_ratio == pytest.approx(50 / 1050)


@pytest.mark.parametrize(
    ("before", "after"), [(None, blame({"/batch": 5})), (blame({}), None)], ids=["not before", "not now"]
)
def test_latency_without_counters_is_unknown(before: Blame | None, after: Blame | None) -> None:
    assert attribute_latency(["/web"], ["/batch"], *two_rounds(before, after)) is None
    assert attribute_latency(["/gone"], ["/batch"], *two_rounds(before, after)) is None


def lending_of(
    blames: dict[str, Interference | None], current: dict[str, RunqLatency | None], reclaimable_cores: float = 2.0
) -> tuple[str, float, str]:
    situation = LatencyInputs(
        now_ns=100 * S,
        elapsed_ns=S,
        node_cpus=2,
        waits=current,
        reclaimed_use_cores=1.6,
        requirement_cores=0.5,
        blames=blames,
    )
    allowance = evaluate_latency(
        situation, AdvisorState(reclaimable_cores=reclaimable_cores, last_wait_ns=99 * S), CONFIG
    )
    return allowance.reason.rule, allowance.reclaimable_cores, allowance.reason.text


def interference(batch: int, total: int = 1000, other: str = "/third") -> Interference:
    return Interference(total_ns=total, by_reclaimed={"/batch": batch}, other=other, other_ns=total - batch)


@pytest.mark.parametrize(
    ("result", "rule", "reclaimable"),
    [
        (interference(1000), "wait_above_target", 0.8),
        (interference(100), "wait_above_target", 0.8),
        (interference(99), "wait_by_others", 2.0),
        (interference(0), "wait_by_others", 2.0),
        (interference(0, 0), "wait_above_target", 0.8),
        (None, "wait_above_target", 0.8),
    ],
    ids=["all by reclaimed", "a tenth", "less than a tenth", "none", "no latency", "not measured"],
)
def test_latency_by_others_does_not_shrink_the_quota(
    result: Interference | None, rule: str, reclaimable: float
) -> None:
    got = lending_of({"/web": result}, {"/web": SLOW})
    assert got[:2] == (rule, pytest.approx(reclaimable))


@pytest.mark.parametrize(
    ("result", "rule", "reclaimable"),
    [
        (interference(100), "wait_near_target", 0.5),
        (interference(99), "wait_near_by_others", 0.7),
        (None, "wait_near_target", 0.5),
    ],
    ids=["a tenth", "less than a tenth", "not measured"],
)
def test_latency_by_others_below_the_target_does_not_stop_growth(
    result: Interference | None, rule: str, reclaimable: float
) -> None:
    near = waits({10: 900, 8000: 100})
    assert lending_of({"/web": result}, {"/web": near}, 0.5)[:2] == (rule, pytest.approx(reclaimable))


def test_the_reason_names_the_aggressor() -> None:
    assert (
        "reclaimed pods had the CPU for 5% of that time, /third for 95%"
        in lending_of({"/web": interference(50)}, {"/web": SLOW})[2]
    )
    assert "its own tasks for 95%" in lending_of({"/web": interference(50, other="/web")}, {"/web": SLOW})[2]


def test_one_container_with_latency_by_batch_work_is_enough() -> None:
    """/slow has higher latency, but by others; /web breaches by batch work."""
    worse = waits({10: 900, 30000: 100})
    rule, reclaimable, text = lending_of(
        {"/slow": interference(0), "/web": interference(500)}, {"/slow": worse, "/web": SLOW}
    )
    assert (rule, reclaimable) == ("wait_above_target", pytest.approx(0.8))
    assert "of /web is 15.6 ms" in text


@pytest.mark.parametrize(
    ("before", "used", "healed", "expected"),
    [
        ({}, 0.75, 0.0, {"/a": 1 - 0.75 * 0.8, "/b": 1 - 0.75 * 0.2}),
        ({"/a": 0.2}, 0.9, 0.0, {"/a": MIN_WEIGHT_RATIO, "/b": 1 - 0.9 * 0.2}),
        ({"/a": 0.5, "/gone": 0.1}, 0.0, 0.1, {"/a": 0.6}),
        ({"/a": 0.95}, 0.0, 0.1, {}),
        ({"/a": 0.5}, 0.0, 0.0, {"/a": 0.5}),
    ],
    ids=["by their parts", "never to nothing", "heals", "is whole again", "stays"],
)
def test_aggressors_lose_weight(
    before: dict[str, float], used: float, healed: float, expected: dict[str, float]
) -> None:
    result = Interference(total_ns=1000, by_reclaimed={"/a": 400, "/b": 100}, other="/x", other_ns=500)
    got = update_weights(
        before, ["/a", "/b"], {"/web": result if used else None}, shrink_ratio=used, recovered_ratio=healed
    )
    assert got == pytest.approx(expected)


def quotas(batch_a: int, third: int) -> tuple[str, dict[str, str]]:
    """Return the quotas of two batch pods with 0.8 cores each, after a cycle in which web waits 100 times 16 ms.

    The latency is attributed to /a and to a third cgroup by these parts.
    """
    pods = [shared("web"), reclaimed("a"), reclaimed("b")]
    shots = []
    for number in (0, 1):
        usage_s = {"web": 0.3 * number, "a": 0.8 * number, "b": 0.8 * number}
        shot = snapshot(100 + number, pods, usage_s=usage_s, latency={"web": SLOW if number else waits({})})
        web = replace(shot.cgroups["/web"], blame=blame({"/a": number * batch_a, "/third": number * third}))
        shots.append(replace(shot, cgroups={**shot.cgroups, "/web": web}))
    advice = advise_cycles(shots, AdvisorConfig(latency=CONFIG))[-1]
    decisions = cpu_requests(advice, shots[-1], {f"/{p.name}": frozenset((Knob.QUOTA, Knob.IDLE)) for p in pods})
    aggressors = [d for d in decisions if "made online pods wait" in d.reason.text]
    assert {d.cgroup: d.reason.inputs["claim"] for d in aggressors} == advice.claims
    return advice.reason.rule, {d.cgroup: d.value for d in decisions if d.knob is Knob.QUOTA}


def test_a_cycle_lowers_the_weight_of_the_aggressor() -> None:
    """1.6 cores are used, so 0.8 of 2 remain reclaimable: the quota shrinks by 0.6, all of it from the weight of /a."""
    rule, decided = quotas(batch_a=900, third=100)
    assert rule == "wait_above_target"
    assert decided == {"/a": f"{round(0.8 * 0.4 / 1.4 * 100_000)} 100000", "/b": f"{round(0.8 / 1.4 * 100_000)} 100000"}


def test_a_cycle_does_not_shrink_the_quota_with_another_aggressor() -> None:
    assert quotas(batch_a=10, third=990) == ("wait_by_others", {"/a": "max 100000", "/b": "max 100000"})
