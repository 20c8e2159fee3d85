"""Reported headroom: Katalyst's window, steps, minimum and NUMA rule, and the effect of stale inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isnan
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.advisor.headroom.headroom_reporter import (
    AveragingWindow,
    NodeCapacity,
    ReporterState,
    freshness_ratio,
    next_level,
    report_headroom,
)
from agent.config.report import ReportConfig
from api.advice import Headroom
from api.knobs import Reason
from api.units import GIB, MIB

S = 1_000_000_000
V = Reason(rule="r", text="t")
NODE = NodeCapacity(cores_by_numa={0: 48, 1: 48}, memory_bytes=200 * GIB)
PLAIN = ReportConfig(min_cores=0, min_memory_mib=0, ignored_cores=0, ignored_memory_mib=0)


def cpu(cores: float | None, by_numa: Mapping[int, float] | None = None) -> Headroom:
    if by_numa is None:
        by_numa = {} if cores is None else {0: cores / 2, 1: cores / 2}
    return Headroom(cores=cores, cores_by_numa=by_numa, reason=V)


def run(
    result: Iterable[Headroom], config: ReportConfig = PLAIN, *, node: NodeCapacity = NODE, every_s: float = 30
) -> tuple[list[Headroom], ReporterState]:
    """Return the reported headroom after each of these, one per period."""
    state, reported = ReporterState(), []
    for number, item in enumerate(result):
        reported_now, state = report_headroom(item, node, state, config, round(number * every_s * S))
        reported.append(reported_now)
    return reported, state


def cores(result: Iterable[float | None], config: ReportConfig = PLAIN, **fields: Any) -> list[float | None]:
    return [reported.cores for reported in run([cpu(item, {}) for item in result], config, **fields)[0]]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        # nothing until four samples are there; then their mean
        ([10, 20, 30, 40], [None, None, None, 25]),
        # the mean moves by 2.5, then by 5 of which 4 are taken
        ([10, 10, 10, 10, 20, 30], [None, None, None, 10, 12.5, 16.5]),
        # less than 0.3 is not worth telling, exactly 0.3 is
        ([10, 10, 10, 10, 11, 10], [None, None, None, 10, 10, 10]),
        ([10, 10, 10, 10, 11.2], [None, None, None, 10, 10.3]),
        # down in steps of 4 too
        ([40, 40, 40, 40, 0, 0, 0, 0, 0], [None, None, None, 40, 36, 32, 28, 24, 20]),
        # never more than the CPUs
        ([400] * 4, [None, None, None, 96]),
        # a missing sample is not zero: the mean of four that count
        ([10, 10, None, 10, 10], [None, None, None, None, 10]),
        ([float("nan")] * 5, [None] * 5),
    ],
)
def test_window_and_steps(result: list[float | None], expected: list[float | None]) -> None:
    assert cores(result) == [None if item is None else pytest.approx(item) for item in expected]


def test_samples_count_for_twice_the_window() -> None:
    gap: list[float | None] = [10, 10, 10, *[None] * 4, 10]  # the first is 210 s old: it counts
    assert cores(gap)[-1] == 10
    assert cores([10, 10, 10, *[None] * 5, 10])[-1] is None  # 240 s


@pytest.mark.parametrize(
    ("level", "config", "expected"),
    [
        (20, {"reserved_cores": 3}, 17),
        (5, {"reserved_cores": 3}, 4),  # 2, raised to the minimum
        (2, {}, 4),
        (2, {"min_cores": 0}, 2),
        (2, {"min_cores": 500}, 96),  # a minimum that the node does not have
    ],
)
def test_reserve_and_minimum(level: float, config: dict[str, Any], expected: float) -> None:
    assert cores([level] * 4, ReportConfig(ignored_cores=0, **config))[-1] == expected


@pytest.mark.parametrize(("cpus", "least"), [(2, 0.5), (8, 2), (16, 4), (96, 4)])
def test_the_minimum_of_a_small_node_is_a_quarter(cpus: int, least: float) -> None:
    node = NodeCapacity(cores_by_numa={0: float(cpus)})
    reported = [item.cores for item in run([cpu(0.2, {0: 0.2})] * 4, ReportConfig(), node=node)[0]]
    assert reported[-1] == least


def test_numa_nodes_follow_their_own_windows_scaled_to_the_total() -> None:
    # node 1 grows by 12 at once: its own window gives 4 of the 12 / 4 = 3, the total 3 of 3
    result = [cpu(30, {0: 20, 1: 10})] * 4 + [cpu(42, {0: 20, 1: 22})]
    reported = run(result)[0]
    assert reported[3].cores_by_numa == {0: pytest.approx(20), 1: pytest.approx(10)}
    assert reported[4].cores_by_numa == {0: pytest.approx(20), 1: pytest.approx(13)}
    reported = run(result, replace(PLAIN, reserved_cores=6))[0]
    assert reported[3].cores_by_numa == {0: pytest.approx(16), 1: pytest.approx(8)}


def test_headroom_that_is_zero_on_every_numa_node_is_zero() -> None:
    """Each NUMA node steps by 4, and the total by 4 too: when the parts are 0, so is the total."""
    reported = [item.cores for item in run([cpu(20)] * 4 + [cpu(0)] * 4)[0]]
    assert reported[3:] == [pytest.approx(item) for item in (20, 16, 12, 8, 0)]


def test_a_numa_node_with_a_negligible_resource_reports_neither() -> None:
    both = Headroom(
        cores=20.1,
        cores_by_numa={0: 20, 1: 0.1},
        memory_bytes=40.0 * GIB,
        memory_by_numa={0: 10.0 * GIB, 1: 30.0 * GIB},
        reason=V,
    )
    reported = run([both] * 4, ReportConfig())[0][-1]
    assert reported.cores_by_numa == {0: 20, 1: 0}
    assert reported.memory_by_numa == {0: 10 * GIB, 1: 0}
    assert (reported.cores, reported.memory_bytes) == (20, 10 * GIB)
    assert "NUMA node 1: one resource is negligible" in reported.reason.text


def test_without_one_resource_neither_is_reported() -> None:
    both = Headroom(cores=20, cores_by_numa={0: 20, 1: 0}, memory_bytes=50.0 * MIB, reason=V)
    reported = run([both] * 4, ReportConfig(min_memory_mib=0))[0][-1]
    assert (reported.cores, reported.memory_bytes, reported.cores_by_numa) == (0, 0, {0: 0, 1: 0})


def test_memory_has_steps_and_a_minimum_of_its_own() -> None:
    def result(gib: float) -> Headroom:
        return Headroom(cores=10, memory_bytes=gib * GIB, reason=V)

    reported = [item.memory_bytes for item in run([result(g) for g in (20, 20, 20, 20, 60, 21, 20.5)], PLAIN)[0]]
    assert reported[3:5] == [20 * GIB, 25 * GIB]
    assert reported[5] == 30 * GIB  # the mean is 30.25, a step of 5 GiB
    assert reported[6] == pytest.approx(30.375 * GIB)
    assert run([result(1)] * 4, ReportConfig())[0][-1].memory_bytes == 5 * GIB


def test_the_reason_contains_the_numbers() -> None:
    both = Headroom(cores=20, memory_bytes=2.0 * GIB, reason=V)
    reported, state = run([both] * 4, ReportConfig(reserved_cores=3))
    assert reported[-1].reason.text == (
        "CPU: 17.00 cores reported, from a level of 20.00 cores less 3.00 cores reserved."
        " Memory: 5.00 GiB reported, from a level of 2.00 GiB raised to the minimum of 5.00 GiB."
    )
    stale = report_headroom(cpu(None), NODE, state, ReportConfig(reserved_cores=3), 630 * S)[0].reason.text
    assert stale.startswith("CPU: 10.50 cores reported; inputs have been missing for 540 s.")  # 4 + 13 x .5


def test_the_reason_names_the_limit_of_numa_nodes() -> None:
    """The computed headroom is 20 GiB, on a NUMA node of 12.5."""
    node = NodeCapacity(cores_by_numa={0: 2}, memory_bytes=24 * GIB, memory_by_numa={0: 12.5 * GIB})
    result = Headroom(
        cores=1.0, cores_by_numa={0: 1.0}, memory_bytes=20.0 * GIB, memory_by_numa={0: 20.0 * GIB}, reason=V
    )
    reported = run([result] * 4, node=node)[0][-1]
    assert reported.memory_bytes == 12.5 * GIB
    assert reported.reason.text.endswith(
        "Memory: 20.00 GiB reported, from a level of 20.00 GiB. Limited to 12.50 GiB, the capacity of the NUMA nodes."
    )


def test_a_part_that_is_not_a_number_makes_the_total_unknown() -> None:
    reported = run([cpu(20, {0: 10, 1: 10})] * 4 + [cpu(20, {0: 10, 1: float("nan")})])[0]
    assert (reported[-1].cores, reported[-1].reason.rule) == (20, "stale_held")


def test_unknown_memory_does_not_change_cpu() -> None:
    reported = run([cpu(20)] * 4, ReportConfig())[0][-1]
    assert (reported.cores, reported.memory_bytes, reported.memory_by_numa) == (20, None, {})


def test_between_periods_nothing_changes() -> None:
    reported, state = run([cpu(20)] * 4)
    later, same = report_headroom(cpu(90), NODE, state, PLAIN, round(119.9 * S))
    assert later == reported[-1]
    assert same == state
    assert report_headroom(cpu(90), NODE, state, PLAIN, 120 * S)[1].tick_ns == 120 * S


def test_a_smaller_node_is_reported_at_once() -> None:
    state = run([cpu(80)] * 4)[1]
    reported = report_headroom(cpu(80), NodeCapacity(cores_by_numa={0: 24}), state, PLAIN, 91 * S)[0]
    assert (reported.cores, reported.cores_by_numa) == (24, {0: 24, 1: 0})
    both = Headroom(cores=8, memory_bytes=90.0 * GIB, memory_by_numa={0: 30.0 * GIB, 1: 60.0 * GIB}, reason=V)
    state = run([both] * 4)[1]
    reported = report_headroom(both, NodeCapacity(cores_by_numa={0: 24}, memory_bytes=45 * GIB), state, PLAIN, 91 * S)[
        0
    ]
    assert (reported.memory_bytes, reported.memory_by_numa) == (45 * GIB, {0: 15 * GIB, 1: 30 * GIB})


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [(30, 40), (180, 40), (210, 38.5), (540, 22), (870, 5.5), (900, 4), (3600, 4)],
)
def test_reported_headroom_decays_between_3_and_15_minutes_to_the_minimum(age_s: float, expected: float) -> None:
    state = run([cpu(40)] * 4, ReportConfig())[1]
    reported, _ = report_headroom(cpu(None), NODE, state, ReportConfig(), round((90 + age_s) * S))
    assert reported.cores == pytest.approx(expected)
    assert reported.cores_by_numa == {0: pytest.approx(expected / 2), 1: pytest.approx(expected / 2)}
    assert reported.reason.rule == ("stale_held" if age_s <= 180 else "stale_decayed")


def test_decayed_headroom_regrows_in_steps() -> None:
    config = ReportConfig()
    state = run([cpu(40)] * 4, config)[1]
    reported = [report_headroom(cpu(None), NODE, state, config, 900 * S)[0].cores]
    state = report_headroom(cpu(None), NODE, state, config, 900 * S)[1]
    for number in range(31, 37):
        reported_now, state = report_headroom(cpu(40), NODE, state, config, number * 30 * S)
        reported.append(reported_now.cores)
    # 810 s old at first, 840 s at the first sample: 40 down to 4 + 36 x 60/720; the window fills, then steps of 4
    assert reported == [pytest.approx(item) for item in (8.5, 7, 7, 7, 11, 15, 19)]


def test_disabling_reclaim_reports_zero_at_once_and_resets_the_state() -> None:
    state = run([cpu(40)] * 4)[1]
    reported, state = report_headroom(cpu(40), NODE, state, PLAIN, 91 * S, enable_reclaim=False)
    assert (reported.cores, reported.cores_by_numa, reported.memory_bytes) == (0, {0: 0, 1: 0}, 0)
    reported, state = report_headroom(cpu(40), NODE, state, PLAIN, 92 * S)
    assert reported.cores == 0
    for number in range(3):
        reported, state = report_headroom(cpu(40), NODE, state, PLAIN, (122 + 30 * number) * S)
    assert reported.cores == 40


def test_a_reboot_resets_the_state() -> None:
    state = run([cpu(40)] * 4)[1]
    reported, state = report_headroom(cpu(40), NODE, state, PLAIN, 5 * S)
    assert reported.cores is None
    assert len(state.cores.total.samples) == 1


def test_a_new_numa_node_does_not_change_the_report_until_its_window_is_full() -> None:
    state = run([cpu(20, {0: 20})] * 4)[1]
    for number in range(4, 8):
        reported, state = report_headroom(cpu(40, {0: 20, 1: 20}), NODE, state, PLAIN, number * 30 * S)
        if number < 7:
            assert (reported.cores, reported.cores_by_numa) == (20, {0: 20})
    assert (reported.cores, reported.cores_by_numa) == (36, {0: 18, 1: 18})


def gib(total: float, *parts: float) -> Headroom:
    by_numa = {numa: part * GIB for numa, part in enumerate(parts)}
    return Headroom(cores=10, memory_bytes=total * GIB, memory_by_numa=by_numa, reason=V)


def test_a_sample_without_parts_does_not_hold_the_total() -> None:
    """80 GiB, then 10, in steps of 5; the sample between has no parts."""
    reported = run([gib(80, 40, 40)] * 4 + [gib(80)] + [gib(10, 5, 5)] * 4)[0]
    assert [item.memory_bytes for item in reported[3:]] == [g * GIB for g in (80, 80, 75, 70, 65, 60)]
    assert [item.memory_by_numa for item in reported[3:]] == [
        {0: g * GIB, 1: g * GIB} for g in (40, 40, 37.5, 35, 32.5, 30)
    ]


def test_parts_expire_with_their_samples() -> None:
    reported = run([gib(80, 60, 20)] * 4 + [gib(80)] * 8)[0]
    assert reported[10].memory_by_numa == {0: 60 * GIB, 1: 20 * GIB}  # 210 s
    assert (reported[11].memory_bytes, reported[11].memory_by_numa) == (80 * GIB, {})


def test_the_total_falls_while_a_new_numa_node_is_unknown() -> None:
    state, reported = run([cpu(20, {0: 20})] * 4)[1], []
    for number in range(4, 8):
        reported_now, state = report_headroom(cpu(6, {0: 3, 1: 3}), NODE, state, PLAIN, number * 30 * S)
        reported.append((reported_now.cores, reported_now.cores_by_numa[0]))
    # at last node 0 is four steps down from 20, and node 1 is known: 4 and 3 parts of 6
    assert reported == [(16.5, 16.5), (13, 13), (9.5, 9.5), (6, pytest.approx(6 * 4 / 7))]


def test_a_resource_without_new_inputs_is_stale_until_it_recovers() -> None:
    """The CPU headroom is 20 all the time but for 10 minutes without inputs; memory is always known."""
    both, item = gib(80), replace(gib(80), cores=None)
    both = replace(both, cores=20)
    reported = run([item] + [both] * 4 + [item] * 20 + [both] * 8, ReportConfig())[0]
    assert [each.stale for each in reported] == [("cpu",)] + [()] * 4 + [("cpu",)] * 20 + [("cpu",)] * 5 + [()] * 3
    # 600 s old: 4 + 16 x 270/720 = 10 at first; 14 and 18 on the way, and a step of 2
    assert [each.cores for each in reported[25:]] == [pytest.approx(c) for c in (10, 10, 10, 14, 18, 20, 20, 20)]


def test_a_measured_change_is_not_stale() -> None:
    reported = run([cpu(c) for c in (40, 40, 40, 40, 0, 0, 0, 90, 90, 90)])[0]
    assert [item.stale for item in reported] == [("memory",)] * 10


def test_a_reduction_by_a_stale_resource_is_stale() -> None:
    """Memory of NUMA node 1 decays to a negligible amount, so its CPU is not reported either."""
    result = Headroom(
        cores=20, cores_by_numa={0: 10, 1: 10}, memory_bytes=20.0 * GIB,
        memory_by_numa={0: 19.8 * GIB, 1: 0.2 * GIB}, reason=V,
    )  # fmt: skip
    lost = replace(result, memory_bytes=None, memory_by_numa={})
    reported = run([result] * 4 + [lost] * 29, ReportConfig())[0]
    assert [(item.cores, item.stale) for item in (reported[3], reported[9], reported[-1])] == [
        (20, ()),
        (20, ("memory",)),
        (10, ("cpu", "memory")),
    ]


def test_reporter_state_survives_json() -> None:
    state = run([cpu(40)] * 5, ReportConfig())[1]
    assert msgspec.json.decode(msgspec.json.encode(state), type=ReporterState) == state


def test_invalid_settings_are_rejected() -> None:
    for wrong in ({"windowS": 10}, {"freshS": 900}, {"minStepCores": 5}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, ReportConfig)


amounts = st.none() | st.floats(0, 300) | st.just(float("nan"))


@given(st.lists(st.tuples(amounts, amounts, st.floats(1, 400)), min_size=1, max_size=25), st.booleans())
def test_never_above_the_node_never_negative_never_more_on_missing_inputs(
    turns: list[tuple[float | None, float | None, float]], defaults: bool
) -> None:
    config = ReportConfig() if defaults else PLAIN
    state, now_s, before = ReporterState(), 0.0, None
    for result, gib, wait_s in turns:
        now_s += wait_s
        item = Headroom(
            cores=result,
            cores_by_numa={} if result is None else {0: result / 3, 1: result * 2 / 3},
            memory_bytes=None if gib is None else gib * GIB,
            reason=V,
        )
        reported, state = report_headroom(item, NODE, state, config, round(now_s * S))
        if reported.cores is not None:
            assert 0 <= reported.cores <= 96
            assert sum(reported.cores_by_numa.values()) == pytest.approx(reported.cores, abs=1e-5)
            assert all(0 <= value <= 48 for value in reported.cores_by_numa.values())
        if reported.memory_bytes is not None:
            assert 0 <= reported.memory_bytes <= 200 * GIB
        if before is not None:
            missing = result is None or isnan(result)
            if missing and before.cores is not None:
                assert reported.cores is not None
                assert reported.cores <= before.cores + 1e-5
                assert all(reported.cores_by_numa[n] <= before.cores_by_numa[n] + 1e-5 for n in reported.cores_by_numa)
            elif before.cores is not None and reported.cores is not None and not defaults:
                assert reported.cores <= before.cores + 4 + 1e-5
        before = reported


@given(st.none() | st.floats(0, 100), st.floats(0, 100))
def test_a_step_moves_towards_the_mean_and_not_beyond(level: float | None, mean: float) -> None:
    window = AveragingWindow(size=4, ttl_ns=1, min_step=0.3, max_step=4)
    after = next_level(level, mean, window)
    if level is None:
        assert after == mean
    else:
        assert min(level, mean) <= after <= max(level, mean)
        assert abs(after - level) <= 4 + 1e-9


@given(st.floats(0, 2000), st.floats(0, 2000))
def test_freshness_only_falls(one_s: float, other_s: float) -> None:
    first, second = sorted((one_s, other_s))
    assert 1 >= freshness_ratio(first, 180, 900) >= freshness_ratio(second, 180, 900) >= 0
