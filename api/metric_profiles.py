"""Selects the metrics of each metric profile: `small`, `standard` (the default) and `full`.
Pure. Exporters, docs/metrics.md and the tests of the dashboards read these tables. A profile selects metrics, values of
their labels, cgroups and bucket bounds by constant tables only, so that no counter comes and goes while the agent runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from api.histogram import BOUNDS_NS, COARSE_SLOTS
from api.metrics import CGROUP_LABELS, Metric

MAX_AGGRESSORS_PER_CGROUP = 16
"""Number of aggressors per cgroup that have series in `full`: those with the largest share of its latency."""


class MetricProfile(StrEnum):
    """How many of the metrics an agent exports."""

    SMALL = "small"
    STANDARD = "standard"
    FULL = "full"


class ProfileLimits(NamedTuple):
    """What a profile limits besides metrics and label values."""

    latency_slots: tuple[int, ...]
    """Slots whose upper bounds are buckets of run-queue latency."""
    coarse_slots: tuple[int, ...]
    """Slots whose upper bounds are buckets of throttles, reclaim and block I/O."""
    aggressors: int
    """Number of aggressors per cgroup that have series."""
    container_cgroups_only: bool
    """Whether cgroups of pods, pause containers and nested cgroups have no series on a node with pods."""
    series_per_container: int | None
    """Upper bound of the series of an ordinary container; None without a bound."""


PROFILE_LIMITS: Mapping[MetricProfile, ProfileLimits] = {
    # Latency targets are 1 to 50 ms: only there is a factor of 2 between two bounds worth its series.
    MetricProfile.SMALL: ProfileLimits((11, 13, 14, 16), (), 0, container_cgroups_only=True, series_per_container=25),
    MetricProfile.STANDARD: ProfileLimits(
        (8, 10, 11, 12, 13, 14, 15, 16, 18), (10, 12, 14, 16), 4, container_cgroups_only=True, series_per_container=60
    ),
    MetricProfile.FULL: ProfileLimits(
        tuple(range(len(BOUNDS_NS))),
        COARSE_SLOTS,
        MAX_AGGRESSORS_PER_CGROUP,
        container_cgroups_only=False,
        series_per_container=None,
    ),
}

SMALL_CGROUP_METRICS = frozenset({
    "dioptase_cgroup_cpu_usage_seconds_total",
    "dioptase_cgroup_cpu_limit_cores",
    "dioptase_cgroup_cpu_periods_total",
    "dioptase_cgroup_cpu_throttled_periods_total",
    "dioptase_cgroup_runq_wait_seconds",
    "dioptase_cgroup_runq_wait_evaluated_seconds",
    "dioptase_cgroup_blame_seconds_total",
    "dioptase_cgroup_threads",
    "dioptase_cgroup_pressure_seconds_total",
    "dioptase_cgroup_memory_working_set_bytes",
    "dioptase_cgroup_memory_limit_bytes",
    "dioptase_cgroup_oom_kills_total",
})  # fmt: skip
STANDARD_CGROUP_METRICS = SMALL_CGROUP_METRICS | {
    "dioptase_cgroup_cpu_idle",
    "dioptase_cgroup_cpu_throttled_seconds_total",
    "dioptase_cgroup_throttle_seconds",
    "dioptase_cgroup_threads_by_state",
    "dioptase_cgroup_load",
    "dioptase_cgroup_memory_bytes",
    "dioptase_cgroup_major_page_faults_total",
    "dioptase_cgroup_workingset_pages_total",
    "dioptase_cgroup_reclaim_seconds",
    "dioptase_cgroup_kswapd_wakeups_total",
    "dioptase_cgroup_block_io_seconds",
    "dioptase_cgroup_block_io_request_bytes_total",
    "dioptase_cgroup_network_bytes_total",
    "dioptase_cgroup_network_retransmits_total",
}
NOT_SMALL_NODE_METRICS = frozenset({
    "dioptase_node_percpu_seconds_total",
    "dioptase_node_cpu_frequency_hertz",
    "dioptase_node_run_delay_seconds_total",
    "dioptase_node_softirq_seconds_total",
    "dioptase_node_interrupts_total",
    "dioptase_node_numa_memory_bytes",
    "dioptase_node_zone_bytes",
    "dioptase_node_fragmentation_index",
    "dioptase_node_network_events_total",
})  # fmt: skip
"""Metrics of the node with a series for each CPU, zone, order or kernel counter."""

_SMALL_VALUES: Mapping[str, Mapping[str, frozenset[str]]] = {
    "dioptase_cgroup_runq_wait_evaluated_seconds": {"percentile": frozenset({"p99"})},
    "dioptase_cgroup_blame_seconds_total": {"cause": frozenset({"own_quota"})},
    "dioptase_cgroup_pressure_seconds_total": {
        "resource": frozenset({"cpu", "memory"}),
        "kind": frozenset({"some"}),
    },
    "dioptase_cgroup_memory_limit_bytes": {"kind": frozenset({"max"})},
}
_STANDARD_VALUES: Mapping[str, Mapping[str, frozenset[str]]] = {
    "dioptase_cgroup_runq_wait_evaluated_seconds": {"percentile": frozenset({"p99"})},
    "dioptase_cgroup_pressure_seconds_total": {"kind": frozenset({"some"})},
    "dioptase_cgroup_memory_limit_bytes": {"kind": frozenset({"max"})},
    "dioptase_cgroup_memory_bytes": {"kind": frozenset({"anon", "file"})},
    "dioptase_cgroup_threads_by_state": {"state": frozenset({"runnable", "uninterruptible", "iowait"})},
    "dioptase_cgroup_load": {"period": frozenset({"1m"})},
    "dioptase_cgroup_workingset_pages_total": {"event": frozenset({"refault"})},
}
LABEL_VALUES: Mapping[MetricProfile, Mapping[str, Mapping[str, frozenset[str]]]] = {
    MetricProfile.SMALL: _SMALL_VALUES,
    MetricProfile.STANDARD: _STANDARD_VALUES,
    MetricProfile.FULL: {},
}
"""Label values that a profile has, by metric and label; all of a label that is not here."""

LATE_METRICS = frozenset({
    "dioptase_cgroup_cpu_periods_total",
    "dioptase_cgroup_cpu_throttled_periods_total",
    "dioptase_cgroup_cpu_throttled_seconds_total",
    "dioptase_cgroup_throttle_seconds",
    "dioptase_cgroup_runq_wait_seconds",
    "dioptase_cgroup_workingset_pages_total",
    "dioptase_cgroup_reclaim_seconds",
    "dioptase_cgroup_kswapd_wakeups_total",
    "dioptase_cgroup_block_io_seconds",
    "dioptase_cgroup_block_io_request_bytes_total",
    "dioptase_cgroup_network_bytes_total",
    "dioptase_cgroup_network_retransmits_total",
})  # fmt: skip
"""Counters and histograms whose series begin when they have counted something, except in `full`: of most cgroups they stay
zero."""


def has_metric(profile: MetricProfile, metric: Metric) -> bool:
    """Return whether a profile has any series of this metric."""
    if profile is MetricProfile.FULL:
        return True
    if metric.labels[: len(CGROUP_LABELS)] == CGROUP_LABELS:
        names = SMALL_CGROUP_METRICS if profile is MetricProfile.SMALL else STANDARD_CGROUP_METRICS
        return metric.name in names
    return profile is MetricProfile.STANDARD or metric.name not in NOT_SMALL_NODE_METRICS


def label_filter(profile: MetricProfile, metric: Metric) -> tuple[tuple[int, frozenset[str]], ...]:
    """Return the label values of a cgroup metric that a profile has: position of the label after CGROUP_LABELS, its values."""
    allowed = LABEL_VALUES[profile].get(metric.name, {})
    return tuple((metric.labels.index(label) - len(CGROUP_LABELS), values) for label, values in allowed.items())


def is_late(profile: MetricProfile, metric: Metric) -> bool:
    """Return whether the series of this metric begin when they have counted something."""
    return profile is not MetricProfile.FULL and metric.name in LATE_METRICS
