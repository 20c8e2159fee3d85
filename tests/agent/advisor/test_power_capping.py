"""Answers to power alerts: Katalyst's own cases, the accounting of caps, and missing inputs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.power_capping import (
    PowerInputs,
    PowerOperation,
    PowerSpec,
    PowerState,
    advise_power,
    check_power_annotations,
    domain_watts,
    evict_percent,
    node_watts,
    package_limit,
    package_watts,
    parse_power_spec,
    power_annotation_keys,
)
from agent.config.advisor import PowerConfig
from api.advice import PowerActionKind, PowerCap
from api.knobs import Reason
from api.snapshot import NodeSample
from tests.builders.snapshots import snapshot

S = 1_000_000_000
CONFIG = PowerConfig()
ALERT_S = 1_700_000_000


def situation(
    level: str = "p0",
    budget: int = 80,
    *,
    operation: PowerOperation = PowerOperation.AUTO,
    left_min: float = 15,
    evictable: int = 0,
    now_s: float = 100,
    **fields: Any,
) -> PowerInputs:
    limit_s = {"s0": 120, "p0": 1800, "p1": 3600, "p2": 14400}.get(level, 0)
    return PowerInputs(
        **{
            "now_ns": round(now_s * S),
            "wall_time_ns": round((ALERT_S + limit_s - left_min * 60) * S),
            "spec": PowerSpec(level=level, budget_watts=budget, alert_time_ns=ALERT_S * S, operation=operation),
            "watts": 100.0,
            "pods": 100,
            "evictable": evictable,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("case", "used", "kind", "number"),
    [
        # Katalyst's own: 100 W against 80 (or 95)
        (situation("s0"), 0, PowerActionKind.CAP, 80),
        (situation("s0"), 10, PowerActionKind.CAP, 80),
        (situation("p0", evictable=50), 0, PowerActionKind.EVICT, 14),
        (situation("p0", operation=PowerOperation.FREQ_CAP), 0, PowerActionKind.CAP, 90),
        (situation("p0", 95), 0, PowerActionKind.CAP, 95),
        (situation("p0", 95), 8, PowerActionKind.CAP, 98),
        (situation("p0", 80), 8, PowerActionKind.CAP, 98),
        (situation("p0", 95), 10, PowerActionKind.NOOP, 0),
        (situation("p0", 95), 25, PowerActionKind.NOOP, 0),
        (situation("p1"), 0, PowerActionKind.NOOP, 0),
        (situation("p1", evictable=50), 0, PowerActionKind.NOOP, 0),
        (situation("p2"), 0, PowerActionKind.NOOP, 0),
        # an idle node is not slowed down, at .45 exactly neither; one that is not measured is, as at Katalyst
        (situation("p0", cpu_ratio=0.45), 0, PowerActionKind.NOOP, 0),
        (situation("p0", cpu_ratio=0.46), 0, PowerActionKind.CAP, 90),
        (situation("p0", cpu_ratio=0.2, evictable=5), 0, PowerActionKind.EVICT, 14),
        # what the alert asks for counts more than its level
        (situation("s0", operation=PowerOperation.EVICT, evictable=50), 0, PowerActionKind.EVICT, 14),
        (situation("p2", operation=PowerOperation.EVICT, evictable=50), 0, PowerActionKind.EVICT, 14),
        (situation("s0", operation=PowerOperation.FREQ_CAP), 10, PowerActionKind.CAP, 80),
        (situation("p1", operation=PowerOperation.FREQ_CAP), 10, PowerActionKind.NOOP, 0),
        (situation("s0", operation=PowerOperation.THROTTLE), 0, PowerActionKind.NOOP, 0),
        (situation("s0", operation=PowerOperation.NOOP), 0, PowerActionKind.NOOP, 0),
        # within the budget
        (situation("s0", 100), 0, PowerActionKind.NOOP, 0),
        (situation("s0", 99, watts=99.9), 0, PowerActionKind.NOOP, 0),
        # the alert requests eviction, but no pod is evictable
        (situation("p0", operation=PowerOperation.EVICT), 0, PowerActionKind.NOOP, 0),
        # missing and unknown
        (situation("s0", watts=None), 0, PowerActionKind.NOOP, 0),
        (situation("s0", watts=0.0), 0, PowerActionKind.NOOP, 0),
        (situation("s0", watts=float("nan")), 0, PowerActionKind.NOOP, 0),
        (situation("p3", evictable=5), 0, PowerActionKind.NOOP, 0),
        (situation("s0", spec=None), 0, PowerActionKind.NOOP, 0),
    ],
)
def test_answers_to_alerts(case: PowerInputs, used: int, kind: PowerActionKind, number: int) -> None:
    action, state = advise_power(case, PowerState(lowered_percent=used), CONFIG)
    assert (action.kind, action.percent + action.target_watts) == (kind, number)
    assert state.lowering == (state.cap is not None) == (kind is PowerActionKind.CAP)


@pytest.mark.parametrize(
    ("budget", "now", "left_min", "percent"),
    [
        # Katalyst's own: 17 % too much
        (100, 120, 2, 17),
        (100, 120, 20, 9),
        (100, 120, 30, 6),
        (100, 120, 60, 2),
        (80, 100, 15, 14),
        (88, 99, 60, 1),
        (99, 100, 200, 1),  # never none
        (100, 120, 9.99, 17),
        (100, 120, -5, 17),
        (100, 120, -20, 31),  # overdue: more than the excess,
        (10, 100, -200, 100),  # but never more than there are
        (0, 100, 0, 100),
    ],
)
def test_percent_by_time_left(budget: int, now: int, left_min: float, percent: int) -> None:
    assert evict_percent(budget, now, left_min * 60) == percent


@pytest.mark.parametrize(
    ("pods", "evictable", "count"),
    [(100, 50, 14), (101, 50, 15), (3, 3, 1), (100, 5, 5), (1, 1, 1)],
)
def test_number_of_evicted_pods(pods: int, evictable: int, count: int) -> None:
    action, _ = advise_power(situation(evictable=evictable, pods=pods), PowerState(), CONFIG)
    assert (action.percent, action.count) == (14, count)
    assert f"evict 14 % of {pods} pods, {count} of them reclaimed" in action.reason.text


def test_caps_below_s0_add_up_to_ten_percent() -> None:
    state = PowerState()
    story = [
        # watts, kind, target, lowered in all
        (200, PowerActionKind.CAP, 180, 0),
        (190, PowerActionKind.CAP, 180, 5),  # 5 % by the cap: 5 % left, 190 x .95 = 180.5
        (195, PowerActionKind.CAP, 185, 5),  # rose: not a cap's doing
        (186, PowerActionKind.CAP, 184, 9),  # 9 x 100 / 195 = 4: 1 % left
        (183, PowerActionKind.NOOP, 0, 10),  # 3 x 100 / 186 = 1: that was all
    ]
    for number, (drawn, kind, target, lowered) in enumerate(story):
        action, state = advise_power(situation(budget=100, watts=float(drawn), now_s=100 + 10 * number), state, CONFIG)
        assert (action.kind, action.target_watts, state.lowered_percent) == (kind, target, lowered)
    assert not state.lowering
    # what falls while no cap is on is not counted
    _, state = advise_power(situation(budget=100, watts=150.0, now_s=200), state, CONFIG)
    assert state.lowered_percent == 10
    # when the alert is over the cap is released once, and a new alert starts again
    action, state = advise_power(situation(spec=None, now_s=201), state, CONFIG)
    assert action.kind is PowerActionKind.RESET
    assert state == PowerState()
    assert advise_power(situation(spec=None, now_s=202), state, CONFIG)[0].kind is PowerActionKind.NOOP


def test_a_cap_is_given_time_to_settle() -> None:
    action, state = advise_power(situation("s0"), PowerState(), CONFIG)
    assert action.kind is PowerActionKind.CAP
    action, same = advise_power(situation("s0", now_s=108.9), state, CONFIG)
    assert (action.kind, action.reason.rule, same) == (PowerActionKind.NOOP, "power_settling", state)
    assert advise_power(situation("s0", now_s=109), state, CONFIG)[0].kind is PowerActionKind.CAP
    # a clock of another boot does not wait, and what was lowered then is forgotten
    action, state = advise_power(situation("p0", now_s=5), replace(state, lowered_percent=10), CONFIG)
    assert state.cap is not None
    assert (action.target_watts, state.cap.target_watts) == (90, 90)


def test_power_state_survives_json() -> None:
    cap = PowerCap(target_watts=80, package_watts=30, reason=Reason(rule="power_cap", text="Cap."))
    state = PowerState(acted_ns=5, cap=cap, lowering=True, lowered_percent=3, last_watts=100)
    assert msgspec.json.decode(msgspec.json.encode(state), type=PowerState) == state


ANNOTATIONS = {
    "power.example/power-alert": "P0",
    "power.example/power-budget": "611.31",
    "power.example/power-alert-time": "2023-11-14T22:13:20Z",
    "power.example/power-internal-op": "4",
}


def test_the_alert_is_read_from_annotations() -> None:
    spec = parse_power_spec(ANNOTATIONS, "power.example")
    assert spec == PowerSpec(
        level="p0", budget_watts=611, alert_time_ns=1_700_000_000 * S, operation=PowerOperation.FREQ_CAP
    )
    bare = {key.partition("/")[2]: value for key, value in ANNOTATIONS.items()}
    assert parse_power_spec(bare, "") == spec
    assert parse_power_spec(ANNOTATIONS, "other") is None
    del bare["power-internal-op"]
    auto = parse_power_spec(bare, "")
    assert auto is not None
    assert auto.operation is PowerOperation.AUTO


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("power-budget", "much"),
        ("power-budget", "nan"),
        ("power-budget", "0"),
        ("power-budget", "-4"),
        ("power-alert-time", "yesterday"),
        ("power-alert-time", "2023-11-14T22:13:20"),  # whose time?
        ("power-internal-op", "3"),
        ("power-internal-op", "evict"),
    ],
)
def test_an_invalid_alert_names_the_annotation(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=key):
        parse_power_spec({**ANNOTATIONS, f"power.example/{key}": value}, "power.example")


@pytest.mark.parametrize(
    ("before", "after", "expected", "packages"),
    [
        ({"package-0": 0, "package-1": 5}, {"package-0": 80_000_000, "package-1": 40_000_005}, 60.0, (40.0, 20.0)),
        ({"package-0": 0, "package-0/dram": 0}, {"package-0": 80_000_000, "package-0/dram": 20_000_000}, 50.0, (40.0,)),
        ({"package-0": 0, "package-0/core": 0}, {"package-0": 80_000_000, "package-0/core": 70_000_000}, 40.0, (40.0,)),
        ({"package-0": 0, "psys": 0}, {"package-0": 80_000_000, "psys": 200_000_000}, 100.0, (40.0,)),
        ({"package-0": 90}, {"package-0": 80}, None, ()),  # wrapped around
        ({}, {"package-0": 80}, None, ()),
        ({"core": 0}, {"core": 80}, None, ()),
        ({}, {}, None, ()),
    ],
)
def test_watts_by_energy_counters(
    before: dict[str, int], after: dict[str, int], expected: float | None, packages: tuple[float, ...]
) -> None:
    first = replace(snapshot(0, []), node=NodeSample(power_uj=before))
    then = replace(snapshot(2, []), node=NodeSample(power_uj=after))
    watts = domain_watts(first, then)
    assert (node_watts(watts), package_watts(watts)) == (expected, packages)
    assert domain_watts(then, then) == {}


@pytest.mark.parametrize(
    ("target", "total", "packages", "limit"),
    [
        (80, 100.0, (100.0,), 80),
        (80, 100.0, (60.0,), 40),  # 40 W outside of the package stay
        (160, 200.0, (50.0, 150.0), 110),  # the package with little load keeps its 50 W
        (100, 200.0, (50.0, 150.0), 50),
        (90, 200.0, (50.0, 150.0), 45),
        (81, 200.0, (75.0, 75.0), 15),  # half of 81 - 50, rounded down
        (10, 200.0, (50.0, 50.0), 1),  # the rest alone draws more
        (80, 100.0, (120.0,), 80),  # the platform's meter shows less than the package's
        (80, 100.0, (), 0),
    ],
)
def test_one_limit_of_all_packages_meets_the_target(
    target: int, total: float, packages: tuple[float, ...], limit: int
) -> None:
    assert package_limit(target, total, packages) == limit


def test_the_cap_stays_in_force_within_the_budget_and_while_the_alert_is_unreadable() -> None:
    action, capped = advise_power(situation("s0", package_watts=(70.0,)), PowerState(), CONFIG)
    assert capped.cap == PowerCap(target_watts=80, package_watts=50, reason=action.reason)
    action, state = advise_power(situation("s0", watts=79.0, now_s=110), capped, CONFIG)
    assert (action.reason.rule, state.cap) == ("power_within_budget", capped.cap)
    garbage = Reason(rule="power_alert_invalid", text="The power alert is invalid.")
    action, state = advise_power(situation("s0", spec=None, unknown=garbage, now_s=120), state, CONFIG)
    assert (action.kind, action.reason, state.cap) == (PowerActionKind.NOOP, garbage, capped.cap)
    action, state = advise_power(situation("s0", spec=None, now_s=121), state, CONFIG)
    assert (action.kind, state.cap) == (PowerActionKind.RESET, None)


@given(
    st.dictionaries(st.sampled_from([*power_annotation_keys("")]), st.text() | st.sampled_from(["1", "nan", "9e999"]))
)
def test_any_annotations_are_an_alert_none_or_an_error_that_names_the_key(annotations: dict[str, str]) -> None:
    problem = check_power_annotations(annotations, "")
    assert not problem or any(key in problem for key in power_annotation_keys(""))


@given(
    st.sampled_from(["s0", "p0", "p1", "p2", "p9"]),
    st.integers(0, 500),
    st.none() | st.floats(0, 500),
    st.integers(0, 40),
    st.floats(-100, 300),
    st.integers(0, 20),
    st.sampled_from(PowerOperation),
)
def test_answers_stay_within_pods_and_power(
    level: str, budget: int, drawn: float | None, evictable: int, left_min: float, used: int, operation: PowerOperation
) -> None:
    case = situation(
        level, budget, operation=operation, left_min=left_min, evictable=evictable, watts=drawn, pods=evictable + 5
    )
    action, _ = advise_power(case, PowerState(lowered_percent=used), CONFIG)
    assert action.count <= evictable
    if action.kind is PowerActionKind.EVICT:
        assert 1 <= action.percent <= 100
        assert action.count >= 1
    if action.kind is PowerActionKind.CAP:
        assert budget <= action.target_watts < action.current_watts
    if drawn is None:
        assert action.kind is PowerActionKind.NOOP
