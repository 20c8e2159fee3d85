"""Decoding of wakeup counters; tests/kernel/test_wakeups.py tests the counting itself."""

from __future__ import annotations

from api.histogram import SLOT_COUNT
from api.snapshot import Durations, Wakeups
from probes import registry
from probes.wakeups import FORMS, decode, job


def row(sum_ns: int, *counts: int) -> list[int]:
    return [sum_ns, *counts, *(0,) * (SLOT_COUNT - len(counts))]


def times(sum_ns: int, *counts: int) -> Durations:
    return Durations(sum_ns=sum_ns, count=sum(counts), slots=tuple(row(sum_ns, *counts)[1:]))


def test_classes_are_columns_and_wakers_without_a_name_are_part_of_the_rest() -> None:
    counted = [*row(900, 1, 2), *row(50, 3), *row(7, 1)]
    assert decode(counted, {"/a": row(4000, 0, 0, 2)}, row(30, 2, 1)) == Wakeups(
        by_cgroup={"/a": times(4000, 0, 0, 2)},
        interrupt=times(900, 1, 2),
        kernel_thread=times(50, 3),
        other=times(37, 3, 1),
    )
    assert decode(counted, {}, None).other == times(7, 1)


def test_preemption_is_counted_where_some_kernel_keeps_it() -> None:
    """By task, by CPU, or by CPU in a struct with others: the source is compiled with whatever of these there is."""
    for form in job(FORMS, 2).forms:
        assert {"PREEMPT_COUNT", "CPU_PREEMPT_COUNT", "HOT_PREEMPT_COUNT", "RUNQUEUES"} < form.optional.keys()


def test_the_agent_loads_it_only_if_configured() -> None:
    assert "wakeups" not in registry.DEFAULT_PROBES
    assert [name for name, _ in registry.openers(["wakeups"])] == ["wakeups"]
