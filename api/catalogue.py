"""Every metric once: exporters, docs/metrics.md, dashboards and tests all read this table."""

from __future__ import annotations

import msgspec

from api.histograms import BOUNDS_NS

NS_PER_S = 1_000_000_000
US_PER_S = 1_000_000
CGROUP_LABELS = ("cgroup", "namespace", "pod", "container", "qos")
"""Labels of everything that belongs to a cgroup; the last four are empty where no listed pod owns it."""
WAIT_BOUNDS_S: tuple[float, ...] = tuple(bound / NS_PER_S for bound in BOUNDS_NS)


class Metric(msgspec.Struct, frozen=True):
    """One row. `name` is complete, unit and `_total` included; `kind` is counter, gauge or histogram.

    `since` says when a counter or histogram was zero: at `boot` where the kernel counts, when the `agent` started where
    the agent or its probes do. Gauges do not look at it.
    """

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    since: str = "agent"

    @property
    def otel_name(self) -> str:
        """OpenTelemetry spells names with dots and keeps unit and `_total` out of them."""
        stem = self.name.removesuffix("_total").removesuffix(f"_{self.unit}")
        return stem.replace("_", ".")


CATALOGUE: tuple[Metric, ...] = (
    # The node
    Metric("dioptase_node_cpu_seconds_total", "counter", "seconds", "CPU time of the node by mode.", ("mode",),
           since="boot"),
    Metric("dioptase_node_cpus", "gauge", "", "Online CPUs."),
    Metric("dioptase_node_load1", "gauge", "", "Load average over one minute."),
    Metric("dioptase_node_memory_total_bytes", "gauge", "bytes", "Memory of the node."),
    Metric("dioptase_node_memory_available_bytes", "gauge", "bytes", "Memory that could be had without swapping."),
    Metric("dioptase_node_pressure_seconds_total", "counter", "seconds",
           "Time in which some or all tasks of the node stalled for a resource (PSI).", ("resource", "kind"), since="boot"),
    # Every cgroup
    Metric("dioptase_cgroup_cpu_usage_seconds_total", "counter", "seconds", "CPU time used.",
           CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_cpu_periods_total", "counter", "", "CFS periods that elapsed under a quota.",
           CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_cpu_throttled_periods_total", "counter", "", "CFS periods in which the quota ran out.",
           CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_cpu_throttled_seconds_total", "counter", "seconds",
           "Time throttled by the cgroup's own quota, summed over its run queues.", CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_threads", "gauge", "", "Threads.", CGROUP_LABELS),
    Metric("dioptase_cgroup_memory_usage_bytes", "gauge", "bytes", "Memory charged, page cache included.", CGROUP_LABELS),
    Metric("dioptase_cgroup_pressure_seconds_total", "counter", "seconds",
           "Time in which some or all tasks of the cgroup stalled for a resource (PSI).",
           (*CGROUP_LABELS, "resource", "kind"), since="boot"),
    Metric("dioptase_cgroup_runq_wait_seconds", "histogram", "seconds",
           "Time that tasks were runnable but not running, of every switch, unsampled.", CGROUP_LABELS),
    # What pods say of themselves
    Metric("dioptase_indicator_latency_seconds", "histogram", "seconds",
           "Request latency that a pod publishes about itself.", ("namespace", "pod"), since="boot"),
    # Advice and what came of it
    Metric("dioptase_pool_cpus", "gauge", "", "CPUs in the pool; pools overlap where priority separates them.", ("pool",)),
    Metric("dioptase_share_requirement_cores", "gauge", "cores", "CPU that online pods are estimated to need."),
    Metric("dioptase_reclaim_headroom_cores", "gauge", "cores", "CPU that can be promised to reclaimed pods."),
    Metric("dioptase_reclaim_lent_cores", "gauge", "cores", "CPU that reclaimed pods may use now."),
    Metric("dioptase_decisions_total", "counter", "", "Decisions on knobs.", ("knob", "rule", "outcome")),
    Metric("dioptase_rounds_total", "counter", "", "Rounds of sense, advise, act by what started them and what was advised.",
           ("trigger", "action")),
    # The agent itself
    Metric("dioptase_round_duration_seconds", "gauge", "seconds", "How long the latest round took."),
    Metric("dioptase_round_interval_seconds", "gauge", "seconds", "Time between two rounds, as set: intervalS."),
    Metric("dioptase_latency_target_seconds", "gauge", "seconds",
           "Run-queue wait that online pods may see, as set: advisor.latency.targetWaitMs."),
    Metric("dioptase_snapshot_timestamp_seconds", "gauge", "seconds", "When the snapshot behind these numbers was taken."),
    Metric("dioptase_act_mode", "gauge", "", "1 for the mode in force: off, dry-run or on.", ("mode",)),
    Metric("dioptase_source_up", "gauge", "", "Whether a source answered in the latest round.", ("source", "detail")),
    Metric("dioptase_source_duration_seconds", "gauge", "seconds", "How long a source took in the latest round.", ("source",)),
    Metric("dioptase_limitations", "gauge", "", "Things that this node lacks, each with its remedy in the banner."),
    Metric("dioptase_journal_writable", "gauge", "", "Whether decisions reach the disk; they are kept in memory else."),
    Metric("dioptase_otel_failures_total", "counter", "", "Exports that no OpenTelemetry collector took."),
    Metric("dioptase_otel_dropped_spans_total", "counter", "", "Rounds of which no OpenTelemetry collector got the span."),
    Metric("dioptase_build_info", "gauge", "", "1, with the version.", ("version",)),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in CATALOGUE}
