"""CPU lists, quantities, QoS levels, histograms and rates: the arithmetic that everything else stands on."""

from __future__ import annotations

import time
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.cpu import format_cpu_list, parse_cpu_list
from api.histogram import BOUNDS_NS, SLOT_COUNT, count_above, quantile_ns, slot_of
from api.qos import QOS_LEVEL_KEY, QoSLevel, explicit_qos_level
from api.quantity import convert_quantity, parse_quantity
from api.rates import compute_rates
from api.snapshot import CgroupSample, CpuTimes, RunqLatency
from tests.agent.advisor.builders import pod, snapshot, waits


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", ()), ("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), (" 8,0-1 \n", (0, 1, 8)), ("3,3,2-3", (2, 3)), ("0-0", (0,))],
)
def test_cpu_lists_are_read(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "0-99999999999", "1,,x", "0x1", "²", "1-2-3"])
def test_what_is_no_cpu_list_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="CPU list"):
        parse_cpu_list(text)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20))))
def test_overlapping_ranges_are_the_union_of_their_numbers(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{low}-{low + length}" for low, length in ranges)
    union = {cpu for low, length in ranges for cpu in range(low, low + length + 1)}
    assert parse_cpu_list(text) == tuple(sorted(union))


def test_a_repeated_wide_range_takes_as_long_as_a_repeated_narrow_one() -> None:
    """The text of an annotation decides, not the sum of its ranges: expanding each range took 100 times the CPU time."""

    def cpu_ns(text: str) -> int:
        started_ns = time.process_time_ns()
        parse_cpu_list(text)
        return time.process_time_ns() - started_ns

    wide, narrow = ",".join(["0-8191"] * 9000), ",".join(["8191-8191"] * 9000)
    assert parse_cpu_list(wide) == tuple(range(8192))
    assert min(cpu_ns(wide) for _ in range(3)) < 10 * min(cpu_ns(narrow) for _ in range(3))


def test_an_error_quotes_the_start_of_a_long_list() -> None:
    with pytest.raises(ValueError, match="neither a number") as caught:
        parse_cpu_list("0," * 100_000 + "x" * 50_000)
    assert len(str(caught.value)) < 250


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_round_trip(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        ("0.25", "0.25"),
        ("1Gi", "1073741824"),
        ("2k", "2000"),
        ("1e3", "1000"),
        ("1.5E2", "150"),
        ("5e-1", "0.5"),
        ("1E", "1000000000000000000"),
        ("1Ei", "1152921504606846976"),
        ("7n", "7e-9"),
        ("250u", "0.00025"),
    ],
)
def test_quantities(text: str, value: str) -> None:
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize(
    "text", ["", "-1", "1 Gi", "1e", "1e3Ki", "1e999", "1K", "1ki", "Gi", "1GI", "nan", "٣", "9" * 30]
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("value", "expected_quantity"),
    [(2, "2"), (0.5, "0.5"), (1e-10, "0"), ("500m", "0.5"), (0, "0"), (10**17, "100000000000000000")],
)
def test_a_quantity_may_be_a_plain_number(value: object, expected_quantity: str) -> None:
    assert convert_quantity(value) == Decimal(expected_quantity)


@pytest.mark.parametrize("value", [True, None, [], {}, -1, -0.5, float("inf"), float("nan"), b"1", "8Ei", 10**19])
def test_what_json_has_in_the_place_of_a_quantity(value: object) -> None:
    with pytest.raises(ValueError, match=r"not a quantity|more than any machine"):
        convert_quantity(value)


def test_no_qos_level_is_none_but_a_wrong_one_is_an_error() -> None:
    assert explicit_qos_level({}) is None
    assert explicit_qos_level({QOS_LEVEL_KEY: "reclaimed_cores"}) is QoSLevel.RECLAIMED
    with pytest.raises(ValueError, match="'best_effort' is not a QoS level; use one of shared_cores"):
        explicit_qos_level({QOS_LEVEL_KEY: "best_effort"})


@pytest.mark.parametrize(
    ("wait_ns", "slot"),
    [(0, 0), (1, 0), (1000, 0), (1001, 1), (2000, 1), (2001, 2), (4000, 2), (4001, 3), (10**15, SLOT_COUNT - 1)],
)
def test_slots_have_inclusive_upper_bounds(wait_ns: int, slot: int) -> None:
    assert slot_of(wait_ns) == slot


@given(st.integers(0, 10**14))
def test_a_wait_lies_within_the_bounds_of_its_slot(wait_ns: int) -> None:
    slot = slot_of(wait_ns)
    assert slot == SLOT_COUNT - 1 or wait_ns <= BOUNDS_NS[slot]
    assert slot == 0 or wait_ns > BOUNDS_NS[slot - 1]


def slots_of(counts: dict[int, int]) -> list[int]:
    return [counts.get(k, 0) for k in range(SLOT_COUNT)]


@pytest.mark.parametrize(
    ("counts", "q", "expected_ns"),
    [
        ({}, 0.99, None),
        ({0: 100}, 0.5, 500),  # half way into the first microsecond
        ({3: 100}, 0.5, 6000),  # half way from 4 to 8 us
        ({0: 99, 10: 1}, 0.99, 1000),
        ({0: 98, 10: 2}, 0.99, 768_000),  # half way from 512 to 1024 us
        ({26: 5}, 0.5, 1000 << 25),  # open slot: its lower bound
    ],
)
def test_quantiles_interpolate_inside_a_slot(counts: dict[int, int], q: float, expected_ns: float | None) -> None:
    assert quantile_ns(slots_of(counts), q) == expected_ns


@given(st.lists(st.integers(0, 1000), min_size=SLOT_COUNT, max_size=SLOT_COUNT), st.floats(0.01, 0.99))
def test_above_is_the_inverse_of_the_quantile(slots: list[int], q: float) -> None:
    value = quantile_ns(slots, q)
    if value is not None and value < BOUNDS_NS[-1]:
        # Where no slot is empty around the rank the two meet exactly; across a gap the quantile is the gap's lower edge.
        assert count_above(slots, value) == pytest.approx((1 - q) * sum(slots), abs=1e-6 * sum(slots) + 1e-6)


def test_rates_of_use_throttling_and_waits() -> None:
    web = pod("web", QoSLevel.SHARED)
    before = snapshot(0, [web], usage_s={"web": 1.0}, wait={"web": waits({10: 5})})
    after = snapshot(2, [web], usage_s={"web": 1.5}, wait={"web": waits({10: 5, 3000: 2})})
    change = compute_rates(before, after)
    assert change is not None
    web_rates = change.cgroups["/web"]
    assert web_rates.cpu_cores == 0.25
    assert web_rates.wait is not None
    assert (web_rates.wait.count, web_rates.wait.sum_ns) == (2, 6_000_000)
    assert web_rates.wait_cores == pytest.approx(0.003)


@pytest.mark.parametrize(("busy_ms", "cores"), [(30, 1.5), (50, 2.0)])
def test_no_more_of_the_node_is_busy_than_it_has(busy_ms: int, cores: float) -> None:
    """A round of 20 ms on 2 CPUs, and five ticks of 10 ms between the two reads of /proc/stat."""
    first, second = snapshot(1.0, []), snapshot(1.02, [])
    times = CpuTimes(user_ns=0, nice_ns=0, system_ns=0, idle_ns=0, iowait_ns=0, irq_ns=0, softirq_ns=0, steal_ns=0)
    later = msgspec.structs.replace(times, user_ns=busy_ms * 1_000_000)
    first, second = (
        msgspec.structs.replace(snapshot, node=msgspec.structs.replace(snapshot.node, cpu=cpu))
        for snapshot, cpu in ((first, times), (second, later))
    )
    rates = compute_rates(first, second)
    assert rates is not None
    assert rates.node.busy_cores == pytest.approx(cores)


def test_no_rate_for_a_new_cgroup_a_counter_that_fell_or_another_boot() -> None:
    web = pod("web", QoSLevel.SHARED)
    before = snapshot(0, [web], usage_s={"web": 1.0}, ids={"web": 1})
    renewed = compute_rates(before, snapshot(1, [web], usage_s={"web": 2.0}, ids={"web": 2}))
    assert renewed is not None
    assert "/web" not in renewed.cgroups
    fell = compute_rates(before, snapshot(1, [web], usage_s={"web": 0.5}, ids={"web": 1}))
    assert fell is not None
    assert fell.cgroups["/web"].cpu_cores is None
    assert compute_rates(before, msgspec.structs.replace(snapshot(1, [web]), boot_id="other")) is None
    assert compute_rates(before, before) is None


def test_throttled_ratio_is_of_the_periods_that_elapsed() -> None:
    web = pod("web", QoSLevel.SHARED)
    first, second = snapshot(0, [web]), snapshot(1, [web])

    def with_periods(base, periods: int, throttled: int):  # type: ignore[no-untyped-def]
        sample = CgroupSample(path="/web", id=100, periods=periods, throttled_periods=throttled, throttled_ns=0)
        return msgspec.structs.replace(base, cgroups={"/web": sample})

    change = compute_rates(with_periods(first, 100, 10), with_periods(second, 110, 15))
    assert change is not None
    assert change.cgroups["/web"].throttled_periods_ratio == 0.5
    idle = compute_rates(with_periods(first, 100, 10), with_periods(second, 100, 10))
    assert idle is not None
    assert idle.cgroups["/web"].throttled_periods_ratio == 0.0


def test_waits_known_as_sums_only_have_no_slots() -> None:
    web = pod("web", QoSLevel.SHARED)
    before = snapshot(0, [web], wait={"web": RunqLatency(sum_ns=10, count=1)})
    after = snapshot(1, [web], wait={"web": RunqLatency(sum_ns=30, count=2)})
    change = compute_rates(before, after)
    assert change is not None
    assert change.cgroups["/web"].wait == RunqLatency(sum_ns=20, count=1)
