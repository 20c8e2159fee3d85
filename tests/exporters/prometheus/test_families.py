"""Facts become catalogue rows: every row, nothing else, with numbers computable from tests/builders/four_cpu_node.py."""

from __future__ import annotations

import os
from mmap import PAGESIZE

import msgspec
import pytest

from api.advice import PowerActionKind
from api.decision import Decision, Outcome, OutcomeStatus
from api.knobs import Knob, Reason
from api.metrics import AGENT_METRICS, AGENT_METRICS_BY_NAME, COARSE_BOUNDS_S, RUNQ_LATENCY_BOUNDS_S
from api.snapshot import UNLIMITED, Blame, CgroupLimits, Interface, IoStat, L3Monitor, RunqLatency
from api.units import MIB
from exporters.prometheus.cgroup_families import MAX_AGGRESSORS_PER_CGROUP, worst_aggressors
from exporters.prometheus.families import (
    AgentInfo,
    MetricsState,
    cycle_trace_ids,
    metric_families,
    with_limits_read_back,
)
from exporters.prometheus.metric_family import MetricDistribution, MetricFamily
from tests.builders.four_cpu_node import BATCH_WAITS, S, bare_cycle, busy_cycle, outcome
from tests.builders.full_node import RICH_ABOUT, full_cycle

WEB_LABELS = ("/web", "default", "web", "web", "shared_cores")
BATCH_LABELS = ("/batch", "default", "batch", "batch", "reclaimed_cores")
ROOT_LABELS = ("/", "", "", "", "")
SERIES_OF_A_CGROUP = 200


@pytest.fixture
def observed() -> MetricsState:
    return MetricsState(version="1.2.3").after(full_cycle(2), RICH_ABOUT)


def shown(observed: MetricsState) -> dict[str, MetricFamily]:
    return {family.metric.name: family for family in metric_families(observed)}


def points(observed: MetricsState, name: str) -> dict[tuple[str, ...], float]:
    family = shown(observed).get(name)
    return {} if family is None else {point.labels: point.value for point in family.points}


def test_a_rich_cycle_fills_every_row_of_the_catalogue_and_nothing_else(observed: MetricsState) -> None:
    names = [family.metric.name for family in metric_families(observed)]
    assert sorted(names) == sorted(metric.name for metric in AGENT_METRICS)


def test_every_sample_has_its_rows_labels_and_no_two_are_the_same_series(observed: MetricsState) -> None:
    for family in metric_families(observed):
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
        ("dioptase_pool_size_cpus", ("share-NUMA0", "0"), 3),
        ("dioptase_pool_size_cpus", ("reclaim", ""), 1),
        ("dioptase_pool_quota_cores", ("reclaim", ""), 1.5),
        ("dioptase_region_control_cores", ("share-NUMA0", "share", "rama", "non-reclaimed-cpu-requirement"), 3.0),
        ("dioptase_region_bound_cores", ("share-NUMA0", "upper"), 4.0),
        ("dioptase_region_indicator", ("share-NUMA0", "cpu_sched_wait"), 450.0),
        ("dioptase_region_indicator_target", ("share-NUMA0", "cpu_sched_wait"), 400.0),
        ("dioptase_rejected_pods", ("dedicated_needs_numa_binding",), 1),
        ("dioptase_memory_provision_bytes", ("0",), 2048 * MIB),
        ("dioptase_memory_condition", ("0", "tune_memcg"), 1),
        ("dioptase_memory_condition", ("0", "no_risk"), 0),
        ("dioptase_memory_condition", ("", "no_risk"), 1),
        ("dioptase_memory_shortfall_bytes", ("0",), 256 * MIB),
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
        ("dioptase_source_lost_events_total", ("runqlat",), 7),
        ("dioptase_pool_cpus", ("reclaim",), 2),
        ("dioptase_reclaim_lent_cores", (), 2.5),
        ("dioptase_quota_trial_runq_wait_seconds", ("helped", "with"), 0.006),
        ("dioptase_quota_trial_runq_wait_seconds", ("helped", "without"), 0.041),
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
        ("dioptase_state_syncs_total", ("originals.json",), 4),
        ("dioptase_state_sync_seconds_total", ("originals.json",), 0.5),
        ("dioptase_state_sync_pending_seconds", (), 0.25),
        ("dioptase_otel_failures_total", (), 3),
        ("dioptase_otel_dropped_spans_total", (), 7),
        ("dioptase_reclaimable_cpu_seconds_total", (), 18000.0),
        ("dioptase_reclaimed_cpu_seconds_total", ("team-a",), 900.0),
        ("dioptase_reclaimed_interference_seconds_total", (), 36.0),
        ("dioptase_online_measured_seconds_total", ("idle",), 1800.0),
        ("dioptase_online_cpu_seconds_total", ("busy",), 8100.0),
        ("dioptase_reclaimed_reductions_total", ("wait_above_target",), 12),
        ("dioptase_reclaimed_evictions_total", ("below_min",), 1),
        ("dioptase_node_info", ("Intel_CascadeLake", "1"), 1),
        ("dioptase_node_percpu_seconds_total", ("3", "user"), 1.25),
        ("dioptase_node_cpu_frequency_hertz", ("0",), 2.5e9),
        ("dioptase_node_run_delay_seconds_total", ("1",), 0.02),
        ("dioptase_node_softirq_seconds_total", ("2", "NET_RX"), 0.004),
        ("dioptase_node_load15", (), 3.0),
        ("dioptase_node_memory_bytes", ("SReclaimable",), 128 * 2**20),
        ("dioptase_node_zone_bytes", ("0", "Normal", "low"), 5120 * 4096),
        ("dioptase_node_fragmentation_index", ("0", "9"), 0.823),
        ("dioptase_node_vm_events_total", ("pgsteal_kswapd",), 300),
        ("dioptase_node_kswapd_active_seconds_total", ("0",), 0.06),
        ("dioptase_node_oom_kill_timestamp_seconds", (), 1_700_000_001.0),
        ("dioptase_node_disk_operation_seconds_total", ("vda", "write"), 0.024),
        ("dioptase_node_disk_busy_seconds_total", ("vda",), 0.03),
        ("dioptase_node_network_drops_total", ("eth0", "sent"), 2),
        ("dioptase_node_energy_joules_total", ("package-0",), 80.0),
        ("dioptase_node_tcp_sockets", ("close_wait",), 1),
        ("dioptase_cgroup_cpu_seconds_total", (*WEB_LABELS, "system"), 1.0),
        ("dioptase_cgroup_cpu_limit_cores", WEB_LABELS, 2.0),
        ("dioptase_cgroup_cpu_cycles_total", WEB_LABELS, 6e9),
        ("dioptase_cgroup_cpu_instructions_total", WEB_LABELS, 4e9),
        ("dioptase_cgroup_cpu_cache_misses_total", WEB_LABELS, 2e6),
        ("dioptase_cgroup_cpuset_cpus", WEB_LABELS, 4),
        ("dioptase_cgroup_cpu_idle", WEB_LABELS, 0),
        ("dioptase_cgroup_memory_working_set_bytes", WEB_LABELS, 44 * 2**20),
        ("dioptase_cgroup_memory_bytes", (*WEB_LABELS, "anon"), 32 * 2**20),
        ("dioptase_cgroup_memory_limit_bytes", (*WEB_LABELS, "swap_max"), 0),
        ("dioptase_cgroup_memory_limit_bytes", (*WEB_LABELS, "max"), 512 * 2**20),
        ("dioptase_cgroup_memory_numa_bytes", (*WEB_LABELS, "anon", "0"), 32 * 2**20),
        ("dioptase_cgroup_major_page_faults_total", WEB_LABELS, 6),
        ("dioptase_cgroup_workingset_pages_total", (*WEB_LABELS, "restore", "file"), 4),
        ("dioptase_cgroup_reclaim_stolen_pages_total", (*WEB_LABELS, "direct"), 20),
        ("dioptase_cgroup_memory_events_total", (*WEB_LABELS, "oom_kill"), 2),
        ("dioptase_cgroup_threads_by_state", (*WEB_LABELS, "uninterruptible"), 1),
        ("dioptase_cgroup_threads_by_state", (*WEB_LABELS, "iowait"), 1),
        ("dioptase_cgroup_load", (*WEB_LABELS, "5m"), 2.5),
        ("dioptase_cgroup_load_runnable", (*WEB_LABELS, "15m"), 1.0),
        ("dioptase_cgroup_blame_seconds_total", (*WEB_LABELS, "neighbour", "/batch", "default/batch"), 0.4),
        ("dioptase_cgroup_blame_seconds_total", (*WEB_LABELS, "self", "", ""), 0.02),
        ("dioptase_cgroup_blame_seconds_total", (*WEB_LABELS, "own_quota", "", ""), 0.08),
        ("dioptase_cgroup_blame_seconds_total", (*BATCH_LABELS, "neighbour", "/web", "default/web"), 0.06),
        ("dioptase_cgroup_blame_seconds_total", (*BATCH_LABELS, "self", "", ""), 0.0),
        ("dioptase_cgroup_io_bytes_total", (*WEB_LABELS, "vda", "write"), 4 * 2**20),
        ("dioptase_cgroup_io_operations_total", (*WEB_LABELS, "vda", "discard"), 2),
        ("dioptase_cgroup_block_io_request_bytes_total", (*WEB_LABELS, "vda", "read"), 2 * 2**20),
        ("dioptase_cgroup_network_bytes_total", (*WEB_LABELS, "tcp", "sent"), 6000),
        ("dioptase_cgroup_network_retransmits_total", WEB_LABELS, 2),
        ("dioptase_recording_writable", (), 1),
        ("dioptase_recording_lost_rounds_total", (), 2),
        ("dioptase_exporter_dropped_total", ("cgroup",), 0),
        ("dioptase_build_info", ("1.2.3",), 1),
    ],
)
def test_a_fact_in_base_units(observed: MetricsState, name: str, labels: tuple[str, ...], value: float) -> None:
    assert points(observed, name)[labels] == pytest.approx(value, rel=1e-12)


def test_waits_are_cumulative_over_inclusive_bounds_in_seconds(observed: MetricsState) -> None:
    by_labels = {d.labels: d for d in shown(observed)["dioptase_cgroup_runq_wait_seconds"].distributions}
    web = by_labels[WEB_LABELS]
    counts = dict(zip(RUNQ_LATENCY_BOUNDS_S, web.cumulative, strict=False))
    assert (counts[4e-6], counts[8e-6], counts[64e-6], counts[128e-6]) == (0, 180, 180, 198)
    assert (counts[0.008192], counts[0.016384], web.cumulative[-1]) == (198, 200, 200)
    # 90 waits of 8 us, 9 of 128 us and one of 16,384 us make 18,256 us a second.
    assert web.sum_s == pytest.approx(2 * 0.018256)
    assert by_labels[BATCH_LABELS].cumulative[-1] == 2 * BATCH_WAITS[10]


def test_a_fact_that_is_none_has_no_sample(observed: MetricsState) -> None:
    assert BATCH_LABELS not in points(observed, "dioptase_cgroup_cpu_periods_total")
    assert ROOT_LABELS not in points(observed, "dioptase_cgroup_memory_usage_bytes")
    assert ("cpu", "full") not in points(observed, "dioptase_node_pressure_seconds_total")
    waits = shown(observed)["dioptase_cgroup_runq_wait_seconds"].distributions
    assert ROOT_LABELS not in [d.labels for d in waits]


def test_sums_without_slots_are_a_histogram_of_one_bucket() -> None:
    finished = busy_cycle(2)
    web = msgspec.structs.replace(finished.snapshot.cgroups["/web"], wait=RunqLatency(sum_ns=1_500_000, count=3))
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups={"/web": web})
    observed = MetricsState(version="1").after(msgspec.structs.replace(finished, snapshot=snapshot))
    assert shown(observed)["dioptase_cgroup_runq_wait_seconds"].distributions == (
        MetricDistribution(WEB_LABELS, (), (), (3,), 0.0015),
    )


def test_before_the_first_cycle_only_the_version_is_known() -> None:
    assert [family.metric.name for family in metric_families(MetricsState(version="1"))] == ["dioptase_build_info"]


def test_a_machine_that_gives_nothing_shows_only_the_agent() -> None:
    names = {family.metric.name for family in metric_families(MetricsState(version="1").after(bare_cycle()))}
    assert names == {
        "dioptase_node_cpus",
        "dioptase_rounds_total",
        "dioptase_round_duration_seconds",
        "dioptase_snapshot_timestamp_seconds",
        "dioptase_act_mode",
        "dioptase_limitations",
        "dioptase_exporter_dropped_total",
        "dioptase_build_info",
    }


def test_decisions_and_cycles_add_up_over_cycles_and_leave_the_old_value_alone() -> None:
    first = MetricsState(version="1").after(busy_cycle(2))
    before = points(first, "dioptase_decisions_total")
    vanished = outcome(status=OutcomeStatus.VANISHED)
    second = first.after(busy_cycle(3, outcomes=(outcome(), vanished))).after(bare_cycle(4))
    assert points(second, "dioptase_decisions_total") == {
        ("cpuset.cpus", "wait_below_target", "applied"): 2,
        ("cpuset.cpus", "wait_below_target", "vanished"): 1,
        ("cpu.idle", "wait_below_target", "unchanged"): 1,
        ("cpu.max", "wait_below_target", "refused"): 1,
    }
    assert points(second, "dioptase_rounds_total") == {("tick", "grow"): 2, ("tick", ""): 1}
    # Of the same knob one was repaired, and one only written.
    assert points(second, "dioptase_knob_repairs_total") == {("cpuset.cpus",): 1}
    assert points(first, "dioptase_decisions_total") == before


def test_a_cgroup_whose_name_is_not_utf8_is_shown_escaped() -> None:
    finished = busy_cycle(2)
    path = os.fsdecode(b"/caf\xe9")
    web = msgspec.structs.replace(finished.snapshot.cgroups["/web"], path=path)
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups={path: web})
    observed = MetricsState(version="1").after(msgspec.structs.replace(finished, snapshot=snapshot))
    assert points(observed, "dioptase_cgroup_threads") == {("/caf\\xe9", "", "", "", ""): 8}


def test_names_in_opentelemetry_are_unique_and_carry_no_unit() -> None:
    names = [metric.otel_name for metric in AGENT_METRICS]
    assert len(set(names)) == len(names)
    assert AGENT_METRICS_BY_NAME["dioptase_cgroup_runq_wait_seconds"].otel_name == "dioptase.cgroup.runq.wait"
    assert (
        AGENT_METRICS_BY_NAME["dioptase_cgroup_cpu_throttled_periods_total"].otel_name
        == "dioptase.cgroup.cpu.throttled.periods"
    )


def test_coarse_histograms_have_every_second_bound_and_lose_nothing(observed: MetricsState) -> None:
    shown_now = shown(observed)
    direct, limit = (
        next(d for d in shown_now["dioptase_cgroup_reclaim_seconds"].distributions if d.labels == (*WEB_LABELS, kind))
        for kind in ("direct", "limit")
    )
    assert COARSE_BOUNDS_S[0] == 16e-6
    assert (len(COARSE_BOUNDS_S), COARSE_BOUNDS_S[-1]) == (11, 16.777216)
    # 4 direct reclaims a second of 4.096 ms each, 6 of 1.024 ms at the limit.
    counts = dict(zip(COARSE_BOUNDS_S, direct.cumulative, strict=False))
    assert (counts[1.024e-3], counts[4.096e-3], direct.cumulative[-1]) == (0, 8, 8)
    assert direct.sum_s == pytest.approx(8 * 4.096e-3)
    assert dict(zip(COARSE_BOUNDS_S, limit.cumulative, strict=False))[1.024e-3] == 12


def test_no_limit_no_protection_and_no_quota_have_no_sample(observed: MetricsState) -> None:
    kinds = {labels[-1] for labels in points(observed, "dioptase_cgroup_memory_limit_bytes") if labels[0] == "/web"}
    assert kinds == {"max", "low", "swap_max"}
    for limits in (CgroupLimits(), CgroupLimits(quota_us=-1, period_us=100_000), CgroupLimits(quota_us=5, period_us=0)):
        assert points(with_web(limits=limits), "dioptase_cgroup_cpu_limit_cores") == {}
    assert points(with_web(limits=CgroupLimits(memory_max_bytes=UNLIMITED)), "dioptase_cgroup_memory_limit_bytes") == {}
    assert points(with_web(limits=CgroupLimits(cpus="0-")), "dioptase_cgroup_cpuset_cpus") == {}


def test_version_1_counts_pages_and_descendants() -> None:
    observed = with_web(
        memory_stat={"rss": 1, "total_rss": 4096, "inactive_file": 3, "total_inactive_file": 8192, "total_pgfault": 7},
        numa_stat={"total": {0: 9}, "anon": {0: 1, 1: 2}, "hierarchical_anon": {0: 3, 1: 4}},
    )
    assert points(observed, "dioptase_cgroup_memory_bytes") == {
        (*WEB_LABELS, "anon"): 4096, (*WEB_LABELS, "inactive_file"): 8192,
    }  # fmt: skip
    assert points(observed, "dioptase_cgroup_memory_numa_bytes") == {
        (*WEB_LABELS, "anon", "0"): 3 * PAGESIZE, (*WEB_LABELS, "anon", "1"): 4 * PAGESIZE,
    }  # fmt: skip
    assert points(observed, "dioptase_cgroup_page_faults_total") == {WEB_LABELS: 7}
    assert points(observed, "dioptase_cgroup_memory_working_set_bytes") == {WEB_LABELS: 64 * 2**20 - 8192}
    shrunk = with_web(memory_bytes=100, memory_stat={"inactive_file": 4096})
    assert points(shrunk, "dioptase_cgroup_memory_working_set_bytes") == {WEB_LABELS: 0}


def test_before_linux_5_9_what_is_needed_again_is_of_files() -> None:
    name = "dioptase_cgroup_workingset_pages_total"
    old = with_web(memory_stat={"workingset_refault": 7, "workingset_activate": 5, "workingset_restore": 3})
    assert points(old, name) == {
        (*WEB_LABELS, event, "file"): count for event, count in (("refault", 7), ("activate", 5), ("restore", 3))
    }
    split = with_web(memory_stat={"workingset_refault_anon": 1, "workingset_refault_file": 2, "workingset_refault": 3})
    assert points(split, name) == {(*WEB_LABELS, "refault", "anon"): 1, (*WEB_LABELS, "refault", "file"): 2}


def with_web(**changes: object) -> MetricsState:
    """A node where /web alone is, with these facts changed."""
    finished = busy_cycle(2)
    web = msgspec.structs.replace(finished.snapshot.cgroups["/web"], **changes)
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups={"/web": web})
    return MetricsState(version="1").after(msgspec.structs.replace(finished, snapshot=snapshot))


def test_the_sum_over_groups_of_resctrl_is_the_caches_whole_traffic() -> None:
    """Of 1200 bytes, 400 are those of the group `batch`, and 40 of these those of a pod that is monitored in it."""
    counted = (("", 800), ("mon_groups/web", 80), ("batch", 400), ("batch/mon_groups/pod", 40))
    monitors = tuple(
        L3Monitor(id=0, group=group, total_bytes=total, local_bytes=total, occupancy_bytes=total)
        for group, total in counted
    )
    base = bare_cycle()
    snapshot = msgspec.structs.replace(base.snapshot, node=msgspec.structs.replace(base.snapshot.node, l3=monitors))
    readings = MetricsState(version="1").after(msgspec.structs.replace(base, snapshot=snapshot), RICH_ABOUT)
    for name in ("occupancy_bytes", "memory_bytes_total", "local_memory_bytes_total"):
        assert points(readings, f"dioptase_node_l3_{name}") == {("0", ""): 800, ("0", "batch"): 400}


def test_the_cgroups_of_pods_keep_their_series_and_the_rest_is_counted() -> None:
    observed = MetricsState(version="1").after(full_cycle(2, cgroups=30), AgentInfo(max_cgroups=4))
    paths = {labels[0] for labels in points(observed, "dioptase_cgroup_threads")}
    assert paths == {"/web", "/batch", "/", "/other-0"}
    assert points(observed, "dioptase_exporter_dropped_total")[("cgroup",)] == 29
    assert points(observed.after(full_cycle(3, cgroups=30)), "dioptase_exporter_dropped_total")[("cgroup",)] == 58
    assert {family.metric.name for family in metric_families(observed)} <= {metric.name for metric in AGENT_METRICS}


def test_a_cgroup_names_its_worst_culprits_and_the_rest_is_counted() -> None:
    by_cgroup = {"/web": 999_000_000, **{f"/n{i}": 1_000_000 * i for i in range(30)}}
    observed = with_web(blame=Blame(by_cgroup=by_cgroup, throttled_ns=1, higher_class_ns=2, other_ns=3))
    blamed = points(observed, "dioptase_cgroup_blame_seconds_total")
    neighbours = {labels[-2]: value for labels, value in blamed.items() if labels[-3] == "neighbour"}
    assert neighbours == {f"/n{i}": pytest.approx(i / 1000) for i in range(14, 30)}
    assert len(blamed) == 16 + 4
    assert points(observed, "dioptase_exporter_dropped_total")[("culprit",)] == 14
    few = with_web(blame=Blame(by_cgroup={"/n1": 5, "/n2": 0}, throttled_ns=0, higher_class_ns=0, other_ns=0))
    assert [labels[-2] for labels in points(few, "dioptase_cgroup_blame_seconds_total") if labels[-2]] == ["/n1"]
    assert points(few, "dioptase_exporter_dropped_total")[("culprit",)] == 0


def test_devices_and_interfaces_are_bounded() -> None:
    io = {f"8:{i}": IoStat(read_bytes=i, write_bytes=0, reads=0, writes=0) for i in range(20)}
    observed = with_web(io=io)
    assert len(points(observed, "dioptase_cgroup_io_bytes_total")) == 16 * 2
    assert points(observed, "dioptase_exporter_dropped_total")[("device",)] == 4
    finished = busy_cycle(2)
    veths = {f"veth{i}": Interface(received={"bytes": i}, sent={}) for i in range(200)}
    node = msgspec.structs.replace(finished.snapshot.node, interfaces=veths)
    snapshot = msgspec.structs.replace(finished.snapshot, node=node)
    observed = MetricsState(version="1").after(msgspec.structs.replace(finished, snapshot=snapshot))
    assert len(points(observed, "dioptase_node_network_bytes_total")) == 128
    assert points(observed, "dioptase_exporter_dropped_total")[("interface",)] == 72


def test_the_worst_wait_of_a_cycle_is_an_exemplar_of_its_bucket(observed: MetricsState) -> None:
    waits = {d.labels: d for d in shown(observed)["dioptase_cgroup_runq_wait_seconds"].distributions}
    ((place, exemplar),) = waits[WEB_LABELS].exemplars.items()
    assert (place, exemplar.value, exemplar.at_ns) == (14, 0.016384, 1_700_000_002 * 10**9)
    trace_id, span_id = cycle_trace_ids(full_cycle(2).snapshot)
    assert exemplar.labels == (("trace_id", f"{trace_id:032x}"), ("span_id", f"{span_id:016x}"), ("round", "2"))
    untraced = MetricsState(version="1").after(full_cycle(2, cgroups=1))
    waits = {d.labels: d for d in shown(untraced)["dioptase_cgroup_runq_wait_seconds"].distributions}
    assert waits[WEB_LABELS].exemplars[14].labels == (("round", "2"),)
    assert waits[("/other-0", "", "", "", "")].exemplars == {}, "only what a person watches: the cgroups of pods"
    first = MetricsState(version="1").after(msgspec.structs.replace(full_cycle(2), previous=None))
    assert not any(d.exemplars for d in shown(first)["dioptase_cgroup_runq_wait_seconds"].distributions)


def test_every_series_of_a_cgroup_is_counted() -> None:
    """What docs/operations.md says a cgroup costs; a container in cAdvisor has about 100 series."""
    item, two = (
        sum(
            len(family.points) + sum(len(d.cumulative) + 2 for d in family.distributions)
            for family in metric_families(MetricsState(version="1").after(full_cycle(2, cgroups=n)))
        )
        for n in (1, 2)
    )
    assert two - item == SERIES_OF_A_CGROUP


def test_a_growing_aggressor_has_a_series_at_once() -> None:
    def blame(newcomer_ns: int) -> Blame:
        old = {f"/old{n}": 3600 * S for n in range(MAX_AGGRESSORS_PER_CGROUP + 4)}
        return Blame(by_cgroup={**old, "/new": newcomer_ns}, throttled_ns=0, higher_class_ns=0, other_ns=0)

    assert "/new" not in worst_aggressors("/web", blame(S))
    assert "/new" in worst_aggressors("/web", blame(S), blame(S // 2))


def test_what_is_said_of_the_node_as_a_whole(observed: MetricsState) -> None:
    assert points(observed, "dioptase_power_action") == {("noop",): 0, ("evict",): 0, ("cap",): 1, ("reset",): 0}
    assert points(observed, "dioptase_power_cap_watts") == {(): 80}
    assert points(observed, "dioptase_power_evict_pods") == {(): 0}
    assert points(observed, "dioptase_overcommit_ratio") == {("cpu",): 1.6, ("memory",): 1.17}


def test_without_a_cap_there_is_no_number_of_watts() -> None:
    finished = full_cycle(2)
    assert finished.node is not None
    assert finished.node.power is not None
    power = msgspec.structs.replace(finished.node.power, kind=PowerActionKind.EVICT, count=3, target_watts=0)
    node = msgspec.structs.replace(finished.node, power=power, power_cap=None, overcommit=None)
    readings = MetricsState(version="1.2.3").after(msgspec.structs.replace(finished, node=node), RICH_ABOUT)
    assert points(readings, "dioptase_power_cap_watts") == {}
    assert points(readings, "dioptase_power_evict_pods") == {(): 3}
    assert points(readings, "dioptase_overcommit_ratio") == {}


def test_memory_that_is_not_known_is_not_short_of_nothing(observed: MetricsState) -> None:
    assert ("1",) not in points(observed, "dioptase_memory_shortfall_bytes")
    assert points(observed, "dioptase_memory_condition")["1", "unknown"] == 1


def read_back(
    knob: Knob, after: str | None, status: OutcomeStatus = OutcomeStatus.APPLIED, cgroup: str = "/batch"
) -> Outcome:
    decision = Decision(
        cgroup=cgroup, cgroup_id=1, pod="default/batch", knob=knob, value="x", reason=Reason(rule="r", text="t")
    )
    return Outcome(decision=decision, status=status, after=after)


@pytest.mark.parametrize(
    ("created", "field", "expected"),
    [
        (read_back(Knob.QUOTA, "36000 100000"), "quota_us", 36_000),
        (read_back(Knob.QUOTA, "max 200000"), "quota_us", -1),
        (read_back(Knob.QUOTA, "36000 200000", OutcomeStatus.UNCHANGED), "period_us", 200_000),
        (read_back(Knob.IDLE, "1"), "idle", True),
        (read_back(Knob.CPUSET, "1-2"), "cpus", "1-2"),
        (read_back(Knob.MEMORY_MAX, "4096"), "memory_max_bytes", 4096),
    ],
)
def test_what_was_read_back_is_shown(created: Outcome, field: str, expected: object) -> None:
    finished = msgspec.structs.replace(busy_cycle(2), outcomes=(created,))
    assert getattr(with_limits_read_back(finished).cgroups["/batch"].limits, field) == expected


@pytest.mark.parametrize(
    "created",
    [
        read_back(Knob.QUOTA, "36000 100000", OutcomeStatus.DRY_RUN),
        read_back(Knob.QUOTA, "36000 100000", OutcomeStatus.MISMATCH),
        read_back(Knob.QUOTA, None),
        read_back(Knob.QUOTA, "36000 100000", cgroup="/gone"),
    ],
)
def test_what_was_not_is_not(created: Outcome) -> None:
    finished = msgspec.structs.replace(busy_cycle(2), outcomes=(created,))
    assert with_limits_read_back(finished) is finished.snapshot
