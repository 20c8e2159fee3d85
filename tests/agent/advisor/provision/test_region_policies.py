"""Proposals of every provision policy: Katalyst's own vectors, every branch, and sequences of cycles."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.advisor_state import IndicatorController, ProvisionState, RegionState
from agent.advisor.provision.provisioner import propose_canonical, propose_none, provision_cpus
from agent.advisor.provision.region_policies import (
    PolicySettings,
    RegionInputs,
    RegionProposal,
    propose_dynamic_quota,
    propose_rama,
    update_controller,
)
from agent.advisor.provision.regions import RegionBounds
from agent.config.advisor import DEFAULT_RAMA_GAINS, AdvisorConfig, ProvisionConfig, RamaGains
from api.advice import ControlKnob, IndicatorState, Region, RegionKind
from tests.agent.advisor.provision.builders import reclaim_pool, region, shared, situation
from tests.builders.nodes import topology

REQUIREMENT, QUOTA = ControlKnob.REQUIREMENT, ControlKnob.RECLAIM_QUOTA
HARD = RamaGains(up=0.1, down=0.01, dead_above=0.05, dead_below=0.2)
ADVISOR = AdvisorConfig(reserved_for_allocate_cores=0)
SETTINGS = PolicySettings(
    advisor=ADVISOR,
    gains={"cpu_sched_wait": HARD, "cpi": replace(HARD, dead_above=0.0), "mem_access_read_lat": HARD},
)
REGION = Region(name="share", kind=RegionKind.SHARE, pool="share", numa_nodes=(0,), containers=("/a",))
BOUND = replace(REGION, name="share-NUMA0", pool="share-NUMA0", bound=True)
BOUNDS = RegionBounds(upper=90, lower=4)


def case(knob: tuple[ControlKnob, float] = (REQUIREMENT, 40.0), **more: Any) -> RegionInputs:
    signals = tuple(
        IndicatorState(name=name, current=current, target=target)
        for name, (current, target) in more.pop("signals", {}).items()
    )
    return RegionInputs(**({"region": REGION, "bounds": BOUNDS, "need": 2.5, "knob": knob, "signals": signals} | more))


def proposed(answer: RegionProposal | str) -> RegionProposal:
    assert isinstance(answer, RegionProposal), answer
    return answer


def test_canonical_requires_the_estimate() -> None:
    answer = proposed(propose_canonical(case(), SETTINGS))
    assert answer.controls == {REQUIREMENT: 2.5}
    assert answer.text == "1 container is estimated to need 2.50 cores"


def test_none_requires_nothing() -> None:
    assert proposed(propose_none(case(), SETTINGS)).controls == {}


UP = 40 + 0.1 * 90 * log(2)


@pytest.mark.parametrize(
    ("signals", "knob", "expected"),
    [
        ({"cpu_sched_wait": (800, 400)}, 40, UP),
        ({"cpu_sched_wait": (4, 400)}, 40, 38),  # ln 0.01 x 0.01 x 90 = -4.1: no more than 2 down
        ({"cpu_sched_wait": (401, 400)}, 40, 40),  # within the dead band
        ({"cpu_sched_wait": (420, 400)}, 40, 40),  # exactly at its upper edge
        ({"cpu_sched_wait": (320, 400)}, 40, 40),  # and at its lower one
        ({"cpu_sched_wait": (319, 400)}, 40, 40 + 0.01 * 90 * log(319 / 400)),
        ({"cpu_sched_wait": (80000, 400)}, 40, 50),  # 0.1 x 90 x ln 200 = 47: no more than 10 up
        ({"cpu_sched_wait": (80000, 400)}, 85, 90),  # the region's upper bound
        ({"cpu_sched_wait": (4, 400)}, 5, 4),  # and its lower bound
        ({"cpi": (2, 1), "mem_access_read_lat": (4, 40)}, 40, UP),  # the one that asks for most decides
        ({"cpi": (1, 2), "mem_access_read_lat": (4, 40)}, 40, 40 + 0.01 * 90 * log(0.5)),
        ({"cpu_sched_wait": (4, 400), "unheard_of": (9, 1)}, 40, 38),  # one without gains is not followed
    ],
)
def test_rama_moves_the_requirement(signals: Mapping[str, tuple[float, float]], knob: float, expected: float) -> None:
    answer = proposed(propose_rama(case((REQUIREMENT, knob), signals=signals), SETTINGS))
    assert answer.controls == {REQUIREMENT: pytest.approx(expected)}


def test_the_number_that_katalyst_prints() -> None:
    answer = proposed(propose_rama(case(signals={"cpu_sched_wait": (800, 400)}), SETTINGS))
    assert answer.controls[REQUIREMENT] == pytest.approx(46.23832462503951)
    assert answer.text == (
        "cpu_sched_wait is 800 us, its target 400 us: non-reclaimed-cpu-requirement moves from 40.00 by +6.24 to 46.24 cores"
    )
    assert answer.inputs == {
        "dominant": "cpu_sched_wait", "knob_cores": 40.0, "cpu_sched_wait": 800, "cpu_sched_wait_target": 400
    }  # fmt: skip


@pytest.mark.parametrize(
    ("signals", "quota", "expected"),
    [
        ({"cpu_sched_wait": (800, 400)}, 20, 20 - 0.1 * 90 * log(2)),
        ({"cpu_sched_wait": (4, 400)}, 20, 22),
        ({"cpi": (2, 1), "mem_access_read_lat": (4, 40)}, 20, 20 - 0.1 * 90 * log(2)),  # the lowest decides
        ({"cpu_sched_wait": (80000, 400)}, 8, 4),
    ],
)
def test_rama_moves_the_quota_the_other_way(
    signals: Mapping[str, tuple[float, float]], quota: float, expected: float
) -> None:
    answer = proposed(propose_rama(case((QUOTA, quota), signals=signals), SETTINGS))
    assert answer.controls == {QUOTA: pytest.approx(expected)}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"enable_reclaim": False}, "reclaiming is disabled"),
        ({"bounds": RegionBounds(upper=90, lower=4, reserved_for_allocate=4)}, "4 cores are reserved"),
        ({"signals": {}}, "no indicator has a value"),
        ({"signals": {"unheard_of": (2.0, 1.0)}}, "no indicator has a value"),
    ],
)
def test_rama_does_not_apply(more: dict[str, Any], why: str) -> None:
    answer = propose_rama(case(**({"signals": {"cpu_sched_wait": (800, 400)}} | more)), SETTINGS)
    assert isinstance(answer, str)
    assert why in answer


def test_the_total_accumulates_while_the_knob_stays_and_resets_when_it_moves() -> None:
    # A region of 4 CPUs: a step is too small to move the knob by itself.
    small = RegionBounds(upper=4, lower=1)
    signals = {"cpu_sched_wait": (600.0, 400.0)}
    step = 0.1 * 4 * log(1.5)
    state = RegionState()
    for number in (1, 2, 3):
        answer = proposed(propose_rama(case((REQUIREMENT, 2.0), bounds=small, signals=signals, state=state), SETTINGS))
        assert answer.controls[REQUIREMENT] == pytest.approx(2 + number * step)
        state = RegionState(policy="rama", controllers=answer.controllers)
    answer = proposed(propose_rama(case((REQUIREMENT, 3.0), bounds=small, signals=signals, state=state), SETTINGS))
    assert answer.controls[REQUIREMENT] == pytest.approx(3 + step)


@pytest.mark.parametrize(
    ("knob", "usage", "unknown", "expected"),
    [
        ((REQUIREMENT, 40.0), 0.008, {"cpu_sched_wait"}, 40.0),  # by use alone it would be 38
        ((REQUIREMENT, 40.0), 0.008, {"cpi"}, 38.0),  # an indicator without a previous value
        ((REQUIREMENT, 40.0), 0.008, set(), 38.0),  # without a target any more
        ((REQUIREMENT, 40.0), 1.6, {"cpu_sched_wait"}, UP),  # to protect more is always right
        ((QUOTA, 20.0), 0.008, {"cpu_sched_wait"}, 20.0),
        ((QUOTA, 20.0), 1.6, {"cpu_sched_wait"}, 20 - 0.1 * 90 * log(2)),
    ],
)
def test_rama_stops_growth_while_one_of_its_indicators_is_unknown(
    knob: tuple[ControlKnob, float], usage: float, unknown: set[str], expected: float
) -> None:
    retained = IndicatorController(knob=knob[1], total=0.0, error=0.1)
    state = RegionState(policy="rama", controllers={"cpu_sched_wait": retained, "mem_access_read_lat": retained})
    signals = {"mem_access_read_lat": (usage, 0.8)}
    answer = proposed(propose_rama(case(knob, signals=signals, state=state, unknown=frozenset(unknown)), SETTINGS))
    assert answer.controls == {knob[0]: pytest.approx(expected)}
    assert (answer.controllers.get("cpu_sched_wait") == retained) is ("cpu_sched_wait" in unknown), (
        "until it is known again"
    )
    assert ("cpu_sched_wait has no value any more" in answer.text) is (expected == knob[1])


def test_rama_holds_its_value_when_its_indicators_vanish() -> None:
    state = RegionState(policy="rama", controllers={"cpu_sched_wait": IndicatorController(knob=40, total=1, error=0.1)})
    answer = proposed(propose_rama(case(state=state), SETTINGS))
    assert answer.controls == {REQUIREMENT: 40.0}  # not the 2.5 that are estimated
    assert answer.controllers == state.controllers
    assert proposed(propose_rama(case(state=state, need=44.0), SETTINGS)).controls == {REQUIREMENT: 44.0}
    assert proposed(propose_rama(case((QUOTA, 7.5), state=state), SETTINGS)).controls == {QUOTA: 7.5}


@pytest.mark.parametrize(
    ("before", "current", "expected"),
    [
        (0.0, 4.0, 0.01 * log(4) + 0.5 * log(4)),  # away from the target and growing
        (log(8), 4.0, 0.01 * log(4) - 0.25 * log(2)),  # above it, but coming back
        (0.0, 0.25, 0.01 * log(0.25) - 0.25 * log(4)),  # below it and growing
        (-log(8), 0.25, 0.01 * log(0.25) + 0.5 * log(2)),  # below it, but coming back
    ],
)
def test_the_derivative_opposes_change(before: float, current: float, expected: float) -> None:
    gains = RamaGains(up=0.01, down=0.01, dead_above=0.1, dead_below=0.1, derivative_up=0.5, derivative_down=0.25)
    signal = IndicatorState(name="x", current=current, target=1.0)
    result = update_controller(IndicatorController(knob=5, total=0.0, error=before), signal, 5, 1, gains, ADVISOR)
    assert result.total == pytest.approx(expected)
    assert result.error == pytest.approx(log(current))


def test_gains_are_katalysts() -> None:
    wait, usage, cpi = (
        DEFAULT_RAMA_GAINS["cpu_sched_wait"],
        DEFAULT_RAMA_GAINS["cpu_usage_ratio"],
        DEFAULT_RAMA_GAINS["cpi"],
    )
    assert (wait.up, wait.down, wait.dead_above, wait.dead_below) == (0.05, 0.009, 0.05, 0.2)
    assert (usage.up, usage.down, usage.dead_above, usage.dead_below) == (0.1, 0.04, 0.01, 0.06)
    assert (cpi.up, cpi.down, cpi.dead_above, cpi.dead_below) == (0.1, 0.04, 0.0, 0.02)
    assert (
        DEFAULT_RAMA_GAINS["mem_access_read_lat"]
        == DEFAULT_RAMA_GAINS["mem_access_write_lat"]
        == DEFAULT_RAMA_GAINS["mem_l3_miss_lat"]
        == wait
    )


@given(
    st.dictionaries(
        st.sampled_from(sorted(DEFAULT_RAMA_GAINS)), st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6)), min_size=1
    ),
    st.floats(4, 90),
    st.floats(-2, 10),
)
def test_rama_never_leaves_its_bounds(signals: dict[str, tuple[float, float]], knob: float, total: float) -> None:
    state = RegionState(controllers={name: IndicatorController(knob=knob, total=total) for name in signals})
    settings = PolicySettings(advisor=ADVISOR, gains=DEFAULT_RAMA_GAINS)
    up = proposed(propose_rama(case((REQUIREMENT, knob), signals=signals, state=state), settings)).controls[REQUIREMENT]
    assert max(4, knob - 2) <= up <= min(90, knob + 10)
    down = proposed(propose_rama(case((QUOTA, knob), signals=signals, state=state), settings)).controls[QUOTA]
    assert max(4, knob - 10) <= down <= min(90, knob + 2)


@pytest.mark.parametrize(
    ("cpus", "target", "current", "use", "reserved", "expected"),
    [
        (4, 0.6, 0.4, 2.0, 1.0, 2.8),
        (44, 0.6, 0.4, 2.0, 1.0, 10.8),
        (4, 0.4, 0.9, 2.5, 1.0, 1.0),  # at least what is reserved
        (4, 0.4, 0.6, 2.5, 1.0, 1.7),  # too much use: less than they use now
        (0, 0.6, 0.4, 0.0, 2.0, 2.0),
    ],
)
def test_dynamic_quota(cpus: int, target: float, current: float, use: float, reserved: float, expected: float) -> None:
    built = case(
        region=BOUND,
        bounds=RegionBounds(upper=90, lower=4, reserved_for_reclaim=reserved),
        signals={"cpu_usage_ratio": (current, target)},
        reclaim_cpus=cpus,
        reclaim_use_cores=use,
    )
    assert proposed(propose_dynamic_quota(built, SETTINGS)).controls == {QUOTA: pytest.approx(expected)}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"enable_reclaim": False}, "disabled"),
        ({"region": REGION}, "not bound to a NUMA node"),
        ({"signals": {"cpi": (1.0, 1.4)}}, "not measured"),
        ({"reclaim_use_cores": None}, "not measured"),
    ],
)
def test_dynamic_quota_does_not_apply(more: dict[str, Any], why: str) -> None:
    built: dict[str, Any] = {
        "region": BOUND, "signals": {"cpu_usage_ratio": (0.4, 0.6)}, "reclaim_cpus": 4, "reclaim_use_cores": 2.0
    }  # fmt: skip
    answer = propose_dynamic_quota(case(**(built | more)), SETTINGS)
    assert isinstance(answer, str)
    assert why in answer


def test_a_quota_is_retained_when_its_inputs_vanish() -> None:
    state = RegionState(policy="dynamic-quota", quota_cores=2.8)
    built = case(region=BOUND, reclaim_cpus=4, reclaim_use_cores=None, state=state)
    assert proposed(propose_dynamic_quota(built, SETTINGS)).controls == {QUOTA: 2.8}


RAMA = ProvisionConfig(share_policies=("rama",))


def test_rama_falls_back_to_canonical_with_a_reserve() -> None:
    built = situation([shared("a", 8)], usage={"a": 4.0}, indicators={"default/a": {"cpu_sched_wait": 800.0}})
    state = ProvisionState(regions={"share": RegionState(requirement=10)})
    advice, _ = provision_cpus(built, state, AdvisorConfig(), RAMA)
    result = region(advice, "share")
    assert (result.policy, result.controls) == ("canonical", {REQUIREMENT: 9.0})
    assert "rama does not apply: 4 cores are reserved for allocation" in result.reason.text


def test_rama_follows_its_indicators_cycle_by_cycle() -> None:
    built = situation([shared("a", 8)], usage={"a": 4.0}, indicators={"default/a": {"cpu_sched_wait": 920.0}})
    state = ProvisionState(regions={"share": RegionState(requirement=10)})
    sizes = []
    for _ in range(4):
        advice, state = provision_cpus(built, state, ADVISOR, RAMA)
        sizes.append(region(advice, "share").controls[REQUIREMENT])
    # 0.05 x 44 x ln 2 = 1.52 a cycle, rounded up
    assert sizes == [12, 14, 16, 18]
    assert region(advice, "share").signals == (IndicatorState(name="cpu_sched_wait", current=920.0, target=460.0),)
    assert advice.regions[0].reason.rule == "provision_rama"


def test_dynamic_quota_restricts_the_quota_of_rama() -> None:
    config = ProvisionConfig(overlap=True, quota=True, share_policies=("rama", "dynamic-quota"))
    built = situation(
        [shared("a", 8, numa=(0,))],
        cpus=topology(48, sockets=2),
        usage={"a": 4.0},
        indicators={"default/a": {"cpu_sched_wait": 460.0, "cpu_usage_ratio": 0.7}},
        reclaim_quota_cores={0: 12.0},
        reclaim_use_cores={0: 3.0},
        pools={"reclaim": tuple(range(20))},
    )
    advice, state = provision_cpus(built, ProvisionState(), ADVISOR, config)
    # rama: 12 + at most 2; dynamic-quota: 20 x (0.8 - 0.7) + 3
    assert reclaim_pool(advice, 0).quota_cores == pytest.approx(5.0)
    assert "dynamic-quota allows 5.00 cores" in region(advice, "share-NUMA0").reason.text
    assert state.regions["share-NUMA0"].quota_cores == pytest.approx(5.0)
    # Without quotas rama moves the requirement, whatever quota exists.
    plain = ProvisionConfig(share_policies=("rama",))
    result = region(provision_cpus(built, ProvisionState(), ADVISOR, plain)[0], "share-NUMA0")
    assert (result.policy, sorted(result.controls)) == ("rama", [REQUIREMENT])
    alone = replace(config, restrict={})
    # By itself rama would leave 12: the wait is on its target, and the indicator that allows least decides.
    assert reclaim_pool(provision_cpus(built, ProvisionState(), ADVISOR, alone)[0], 0).quota_cores == 12.0
