"""Facts become catalogue rows: every row, nothing else, with numbers that can be computed from tests/fakes.py."""

from __future__ import annotations

import os

import msgspec
import pytest

from api.catalogue import BY_NAME, CATALOGUE, WAIT_BOUNDS_S
from api.decisions import Status
from api.facts import Wait
from exporters.families import Distribution, Family, Observed, families
from tests.fakes import ABOUT, BATCH_WAITS, bare_round, busy_round, outcome

WEB_LABELS = ("/web", "default", "web", "web", "shared_cores")
BATCH_LABELS = ("/batch", "default", "batch", "batch", "reclaimed_cores")
ROOT_LABELS = ("/", "", "", "", "")


@pytest.fixture
def observed() -> Observed:
    return Observed(version="1.2.3").after(busy_round(2), ABOUT)


def shown(observed: Observed) -> dict[str, Family]:
    return {family.metric.name: family for family in families(observed)}


def points(observed: Observed, name: str) -> dict[tuple[str, ...], float]:
    family = shown(observed).get(name)
    return {} if family is None else {point.labels: point.value for point in family.points}


def test_a_rich_round_fills_every_row_of_the_catalogue_and_nothing_else(observed: Observed) -> None:
    names = [family.metric.name for family in families(observed)]
    assert sorted(names) == sorted(metric.name for metric in CATALOGUE)


def test_every_sample_has_its_rows_labels_and_no_two_are_the_same_series(observed: Observed) -> None:
    for family in families(observed):
        samples = [*family.points, *family.distributions]
        assert {len(sample.labels) for sample in samples} == {len(family.metric.labels)}
        assert len({sample.labels for sample in samples}) == len(samples)
        assert bool(family.distributions) == (family.metric.kind == "histogram")


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("dioptase_node_cpu_seconds_total", ("user",), 5.0),
        ("dioptase_node_cpu_seconds_total", ("steal",), 0.0),
        ("dioptase_node_cpus", (), 4),
        ("dioptase_node_load1", (), 3.5),
        ("dioptase_node_memory_available_bytes", (), 6 * 2**30),
        ("dioptase_node_pressure_seconds_total", ("cpu", "some"), 0.6),
        ("dioptase_node_pressure_seconds_total", ("io", "full"), 0.01),
        ("dioptase_cgroup_cpu_usage_seconds_total", WEB_LABELS, 3.0),
        ("dioptase_cgroup_cpu_usage_seconds_total", BATCH_LABELS, 4.5),
        ("dioptase_cgroup_cpu_usage_seconds_total", ROOT_LABELS, 7.5),
        ("dioptase_cgroup_cpu_periods_total", WEB_LABELS, 20),
        ("dioptase_cgroup_cpu_throttled_periods_total", WEB_LABELS, 4),
        ("dioptase_cgroup_cpu_throttled_seconds_total", WEB_LABELS, 0.08),
        ("dioptase_cgroup_memory_usage_bytes", BATCH_LABELS, 16 * 2**20),
        ("dioptase_cgroup_pressure_seconds_total", (*WEB_LABELS, "cpu", "some"), 0.05),
        ("dioptase_pool_cpus", ("reclaim",), 2),
        ("dioptase_reclaim_lent_cores", (), 2.5),
        ("dioptase_round_duration_seconds", (), 0.012),
        ("dioptase_snapshot_timestamp_seconds", (), 1_700_000_002.0),
        ("dioptase_act_mode", ("on",), 1),
        ("dioptase_act_mode", ("dry-run",), 0),
        ("dioptase_source_up", ("runqlat", "tp_btf"), 1),
        ("dioptase_source_up", ("psi", ""), 0),
        ("dioptase_source_duration_seconds", ("cgroups",), 0.005),
        ("dioptase_limitations", (), 1),
        ("dioptase_round_interval_seconds", (), 2.0),
        ("dioptase_latency_target_seconds", (), 0.005),
        ("dioptase_journal_writable", (), 0),
        ("dioptase_otel_failures_total", (), 3),
        ("dioptase_otel_dropped_spans_total", (), 7),
        ("dioptase_build_info", ("1.2.3",), 1),
    ],
)
def test_a_fact_in_base_units(observed: Observed, name: str, labels: tuple[str, ...], value: float) -> None:
    assert points(observed, name)[labels] == pytest.approx(value, rel=1e-12)


def test_waits_are_cumulative_over_inclusive_bounds_in_seconds(observed: Observed) -> None:
    by_labels = {d.labels: d for d in shown(observed)["dioptase_cgroup_runq_wait_seconds"].distributions}
    web = by_labels[WEB_LABELS]
    counts = dict(zip(WAIT_BOUNDS_S, web.cumulative, strict=False))
    assert (counts[4e-6], counts[8e-6], counts[64e-6], counts[128e-6]) == (0, 180, 180, 198)
    assert (counts[0.008192], counts[0.016384], web.cumulative[-1]) == (198, 200, 200)
    # 90 waits of 8 us, 9 of 128 us and one of 16,384 us make 18,256 us a second.
    assert web.sum_s == pytest.approx(2 * 0.018256)
    assert by_labels[BATCH_LABELS].cumulative[-1] == 2 * BATCH_WAITS[10]


def test_a_fact_that_is_none_has_no_sample(observed: Observed) -> None:
    assert BATCH_LABELS not in points(observed, "dioptase_cgroup_cpu_periods_total")
    assert ROOT_LABELS not in points(observed, "dioptase_cgroup_memory_usage_bytes")
    assert ("cpu", "full") not in points(observed, "dioptase_node_pressure_seconds_total")
    waits = shown(observed)["dioptase_cgroup_runq_wait_seconds"].distributions
    assert ROOT_LABELS not in [d.labels for d in waits]


def test_sums_without_slots_are_a_histogram_of_one_bucket() -> None:
    finished = busy_round(2)
    web = msgspec.structs.replace(finished.snapshot.cgroups["/web"], wait=Wait(sum_ns=1_500_000, count=3))
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups={"/web": web})
    observed = Observed(version="1").after(msgspec.structs.replace(finished, snapshot=snapshot))
    assert shown(observed)["dioptase_cgroup_runq_wait_seconds"].distributions == (
        Distribution(WEB_LABELS, (), (3,), 0.0015),
    )


def test_before_the_first_round_only_the_version_is_known() -> None:
    assert [family.metric.name for family in families(Observed(version="1"))] == ["dioptase_build_info"]


def test_a_machine_that_gives_nothing_shows_only_the_agent() -> None:
    names = {family.metric.name for family in families(Observed(version="1").after(bare_round()))}
    assert names == {
        "dioptase_node_cpus",
        "dioptase_rounds_total",
        "dioptase_round_duration_seconds",
        "dioptase_snapshot_timestamp_seconds",
        "dioptase_act_mode",
        "dioptase_limitations",
        "dioptase_build_info",
    }


def test_decisions_and_rounds_add_up_over_rounds_and_leave_the_old_value_alone() -> None:
    first = Observed(version="1").after(busy_round(2))
    before = points(first, "dioptase_decisions_total")
    vanished = outcome(status=Status.VANISHED)
    second = first.after(busy_round(3, outcomes=(outcome(), vanished))).after(bare_round(4))
    assert points(second, "dioptase_decisions_total") == {
        ("cpuset.cpus", "wait_below_target", "applied"): 2,
        ("cpuset.cpus", "wait_below_target", "vanished"): 1,
        ("cpu.idle", "wait_below_target", "unchanged"): 1,
        ("cpu.max", "wait_below_target", "refused"): 1,
    }
    assert points(second, "dioptase_rounds_total") == {("tick", "grow"): 2, ("tick", ""): 1}
    assert points(first, "dioptase_decisions_total") == before


def test_a_cgroup_whose_name_is_not_utf8_is_shown_escaped() -> None:
    finished = busy_round(2)
    path = os.fsdecode(b"/caf\xe9")
    web = msgspec.structs.replace(finished.snapshot.cgroups["/web"], path=path)
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups={path: web})
    observed = Observed(version="1").after(msgspec.structs.replace(finished, snapshot=snapshot))
    assert points(observed, "dioptase_cgroup_threads") == {("/caf\\xe9", "", "", "", ""): 8}


def test_names_in_opentelemetry_are_unique_and_carry_no_unit() -> None:
    names = [metric.otel_name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    assert BY_NAME["dioptase_cgroup_runq_wait_seconds"].otel_name == "dioptase.cgroup.runq.wait"
    assert BY_NAME["dioptase_cgroup_cpu_throttled_periods_total"].otel_name == "dioptase.cgroup.cpu.throttled.periods"
