"""Catalogue of every metric of the agent and of the controller.
Exporters, docs/metrics.md, dashboards and tests read this table. Units are Prometheus base units.
"""

from __future__ import annotations

import msgspec

from api.histogram import BOUNDS_NS, COARSE_SLOTS
from api.units import NS_PER_S


class Metric(msgspec.Struct, frozen=True):
    """One metric. `name` includes unit and `_total`; `kind` is counter, gauge or histogram.

    `since` says when a counter or histogram was zero: at `boot` if the kernel counts, at the start of the `agent` if the
    agent or its probes count. It has no meaning for gauges.
    """

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    since: str = "agent"

    @property
    def otel_name(self) -> str:
        """Name by OpenTelemetry's conventions: with dots, without unit and `_total`."""
        stem = self.name.removesuffix("_total").removesuffix(f"_{self.unit}")
        return stem.replace("_", ".")


CGROUP_LABELS = ("cgroup", "namespace", "pod", "container", "qos")
"""Labels of all cgroup metrics; the last four are empty if no listed pod owns the cgroup."""
HELP_INCLUDES_DESCENDANTS = " Includes descendants."
HELP_OWN_TASKS = " Without descendants."
HELP_RECURSIVE = " Includes descendants; on version 1 only with the kernel's _recursive files."
RUNQ_LATENCY_BOUNDS_S: tuple[float, ...] = tuple(bound / NS_PER_S for bound in BOUNDS_NS)
COARSE_BOUNDS_S: tuple[float, ...] = tuple(RUNQ_LATENCY_BOUNDS_S[slot] for slot in COARSE_SLOTS)
"""Bounds of the histograms of which each cgroup has several: throttles, reclaim and block I/O."""


AGENT_METRICS: tuple[Metric, ...] = (
    # The node
    Metric("dioptase_node_info", "gauge", "",
           "Constant 1, labelled with the CPU's microarchitecture and whether the node is a virtual machine.",
           ("codename", "virtual")),
    Metric("dioptase_node_cpu_seconds_total", "counter", "seconds", "CPU time of the node by mode.",
           ("mode",), since="boot"),
    Metric("dioptase_node_percpu_seconds_total", "counter", "seconds", "CPU time of each CPU by mode.",
           ("cpu", "mode"), since="boot"),
    Metric("dioptase_node_cpus", "gauge", "", "Online CPUs."),
    Metric("dioptase_node_cpu_frequency_hertz", "gauge", "hertz", "Current frequency of each CPU.", ("cpu",)),
    Metric("dioptase_node_run_delay_seconds_total", "counter", "seconds",
           "Time that runnable tasks waited for each CPU (/proc/schedstat).", ("cpu",), since="boot"),
    Metric("dioptase_node_softirq_seconds_total", "counter", "seconds", "Time of each CPU in softirqs, by vector.",
           ("cpu", "vector")),
    Metric("dioptase_node_interrupts_total", "counter", "", "Interrupts of each CPU, all kinds together.",
           ("cpu",), since="boot"),
    Metric("dioptase_node_load1", "gauge", "", "Load average over one minute."),
    Metric("dioptase_node_load5", "gauge", "", "Load average over five minutes."),
    Metric("dioptase_node_load15", "gauge", "", "Load average over fifteen minutes."),
    Metric("dioptase_node_procs_running", "gauge", "", "Tasks that are running or waiting for a CPU."),
    Metric("dioptase_node_procs_blocked", "gauge", "", "Tasks that are waiting for block I/O."),
    Metric("dioptase_node_pressure_seconds_total", "counter", "seconds",
           "Time in which some or all tasks of the node stalled for a resource (PSI).",
           ("resource", "kind"), since="boot"),
    Metric("dioptase_node_energy_joules_total", "counter", "joules", "Energy used, by RAPL domain.",
           ("domain",), since="boot"),
    # The node's memory
    Metric("dioptase_node_memory_total_bytes", "gauge", "bytes", "Memory of the node."),
    Metric("dioptase_node_memory_available_bytes", "gauge", "bytes", "Memory available without swapping."),
    Metric("dioptase_node_memory_bytes", "gauge", "bytes",
           "Memory by kind in the names of /proc/meminfo; kinds overlap.", ("kind",)),
    Metric("dioptase_node_numa_memory_bytes", "gauge", "bytes",
           "Memory of each NUMA node by kind, in the kernel's names.", ("numa_node", "kind")),
    Metric("dioptase_node_zone_bytes", "gauge", "bytes",
           "Memory of a zone: managed, free, and the watermarks. kswapd wakes below low and sleeps above high; "
           "below min, allocations reclaim memory themselves.", ("numa_node", "zone", "mark")),
    Metric("dioptase_node_fragmentation_index", "gauge", "",
           "Reason why an allocation of 2^order pages would fail: near 0 for lack of memory, near 1 because of "
           "fragmentation, -1 if it would not fail.", ("numa_node", "order")),
    Metric("dioptase_node_vm_events_total", "counter", "",
           "Events of reclaim, faults, swap, compaction and NUMA balancing, pages or times, in the names of "
           "/proc/vmstat.", ("event",), since="boot"),
    Metric("dioptase_node_kswapd_wakeups_total", "counter", "", "Times that kswapd was woken.", ("numa_node",)),
    Metric("dioptase_node_kswapd_active_seconds_total", "counter", "seconds",
           "Time between each wakeup of kswapd and its next sleep.", ("numa_node",)),
    Metric("dioptase_node_kswapd_scanned_pages_total", "counter", "", "Pages that kswapd scanned.", ("numa_node",)),
    Metric("dioptase_node_kswapd_reclaimed_pages_total", "counter", "", "Pages that kswapd freed.", ("numa_node",)),
    Metric("dioptase_node_oom_kill_timestamp_seconds", "gauge", "seconds",
           "Time of the last OOM kill that the agent observed."),
    Metric("dioptase_node_l3_occupancy_bytes", "gauge", "bytes",
           "L3 cache occupied by a resctrl control group and its monitoring groups. The empty group is the default "
           "group; the sum over groups is the occupancy of the cache.",
           ("cache", "group")),
    Metric("dioptase_node_l3_memory_bytes_total", "counter", "bytes",
           "Memory traffic of a resctrl control group through an L3 cache, to any NUMA node.", ("cache", "group"),
           since="boot"),
    Metric("dioptase_node_l3_local_memory_bytes_total", "counter", "bytes",
           "Memory traffic of a resctrl control group through an L3 cache, to its own NUMA node.", ("cache", "group"),
           since="boot"),
    # The node's disks and network
    Metric("dioptase_node_disk_bytes_total", "counter", "bytes", "Bytes read and written.",
           ("device", "operation"), since="boot"),
    Metric("dioptase_node_disk_operations_total", "counter", "", "Requests completed.",
           ("device", "operation"), since="boot"),
    Metric("dioptase_node_disk_operation_seconds_total", "counter", "seconds",
           "Time that requests took, summed over requests.", ("device", "operation"), since="boot"),
    Metric("dioptase_node_disk_busy_seconds_total", "counter", "seconds", "Time with at least one request in flight.",
           ("device",), since="boot"),
    Metric("dioptase_node_disk_in_flight", "gauge", "", "Requests in flight.", ("device",)),
    Metric("dioptase_node_filesystem_size_bytes", "gauge", "bytes", "Size of a file system.", ("mountpoint",)),
    Metric("dioptase_node_filesystem_available_bytes", "gauge", "bytes", "Free space for unprivileged users.",
           ("mountpoint",)),
    Metric("dioptase_node_filesystem_inodes", "gauge", "", "Inodes of a file system.", ("mountpoint",)),
    Metric("dioptase_node_filesystem_free_inodes", "gauge", "", "Free inodes of a file system.", ("mountpoint",)),
    Metric("dioptase_node_network_bytes_total", "counter", "bytes", "Bytes through a network interface.",
           ("interface", "direction"), since="boot"),
    Metric("dioptase_node_network_packets_total", "counter", "", "Packets through a network interface.",
           ("interface", "direction"), since="boot"),
    Metric("dioptase_node_network_errors_total", "counter", "", "Packets lost to errors.",
           ("interface", "direction"), since="boot"),
    Metric("dioptase_node_network_drops_total", "counter", "", "Packets dropped by the kernel.",
           ("interface", "direction"), since="boot"),
    Metric("dioptase_node_network_events_total", "counter", "",
           "Errors of IP, TCP and UDP and the traffic to compare them with, in the kernel's names.",
           ("event",), since="boot"),
    Metric("dioptase_node_tcp_sockets", "gauge", "", "TCP sockets by state.", ("state",)),
    # Every cgroup: CPU
    Metric("dioptase_cgroup_cpu_usage_seconds_total", "counter", "seconds",
           "CPU time used." + HELP_INCLUDES_DESCENDANTS, CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_cpu_seconds_total", "counter", "seconds",
           "CPU time used, by mode: user or system." + HELP_INCLUDES_DESCENDANTS,
           (*CGROUP_LABELS, "mode"), since="boot"),
    Metric("dioptase_cgroup_cpu_limit_cores", "gauge", "cores",
           "CPU quota of the cgroup including its descendants; no sample without a quota.", CGROUP_LABELS),
    Metric("dioptase_cgroup_cpu_weight", "gauge", "",
           "Share of CPU under contention: cpu.weight (default 100), on version 1 cpu.shares (default 1024).",
           CGROUP_LABELS),
    Metric("dioptase_cgroup_cpu_idle", "gauge", "",
           "1 if the scheduler prefers the other children of its parent to this cgroup (cpu.idle).", CGROUP_LABELS),
    Metric("dioptase_cgroup_cpuset_cpus", "gauge", "", "Number of CPUs that the cgroup may run on.", CGROUP_LABELS),
    Metric("dioptase_cgroup_cpu_periods_total", "counter", "",
           "CFS periods that elapsed under the cgroup's own quota.", CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_cpu_throttled_periods_total", "counter", "",
           "CFS periods in which the cgroup's own quota ran out.", CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_cpu_throttled_seconds_total", "counter", "seconds",
           "Time throttled by the cgroup's own quota, summed over its run queues.", CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_cpu_cycles_total", "counter", "",
           "Unhalted CPU cycles. Divide the rate by that of instructions for cycles per instruction (CPI)."
           + HELP_OWN_TASKS, CGROUP_LABELS),
    Metric("dioptase_cgroup_cpu_instructions_total", "counter", "", "Instructions retired." + HELP_OWN_TASKS,
           CGROUP_LABELS),
    Metric("dioptase_cgroup_cpu_cache_misses_total", "counter", "", "Misses of the last-level cache." + HELP_OWN_TASKS,
           CGROUP_LABELS),
    Metric("dioptase_cgroup_throttle_seconds", "histogram", "seconds",
           "Duration of each throttling of one run queue by the cgroup's own quota.", CGROUP_LABELS),
    Metric("dioptase_cgroup_runq_wait_seconds", "histogram", "seconds",
           "Run-queue latency: time that tasks were runnable but not running, at every context switch."
           + HELP_OWN_TASKS, CGROUP_LABELS),
    Metric("dioptase_cgroup_runq_wait_evaluated_seconds", "gauge", "seconds",
           "Run-queue latency of the latest cycle as the advisor evaluates it: without waits that the container's own CPU "
           "quota caused, which dioptase_cgroup_runq_wait_seconds includes. Online containers only."
           + HELP_INCLUDES_DESCENDANTS,
           (*CGROUP_LABELS, "percentile")),
    Metric("dioptase_cgroup_blame_seconds_total", "counter", "seconds",
           "Run-queue latency by what occupied the CPU meanwhile. Cause: neighbour (the cgroup in culprit ran), "
           "self (its own tasks ran), own_quota (throttled), higher_class (real-time tasks ran) or other. Only the "
           "largest culprits have samples; with the others they add up to the sum of "
           "dioptase_cgroup_runq_wait_seconds." + HELP_OWN_TASKS,
           (*CGROUP_LABELS, "cause", "culprit", "culprit_pod")),
    Metric("dioptase_cgroup_threads", "gauge", "",
           "Threads including those of descendants; without descendants if the pids controller is not available.",
           CGROUP_LABELS),
    Metric("dioptase_cgroup_threads_by_state", "gauge", "",
           "Threads by state: runnable, uninterruptible (not for a disk), iowait or sleeping." + HELP_OWN_TASKS,
           (*CGROUP_LABELS, "state")),
    Metric("dioptase_cgroup_pids_limit", "gauge", "",
           "Maximum number of threads of the cgroup including its descendants; no sample without a limit.",
           CGROUP_LABELS),
    Metric("dioptase_cgroup_load", "gauge", "",
           "Load average over 1m, 5m or 15m: runnable and uninterruptible threads, damped as in the kernel."
           + HELP_OWN_TASKS, (*CGROUP_LABELS, "period")),
    Metric("dioptase_cgroup_load_runnable", "gauge", "",
           "Load average of runnable threads only, over 1m, 5m or 15m." + HELP_OWN_TASKS, (*CGROUP_LABELS, "period")),
    Metric("dioptase_cgroup_numa_migrations_total", "counter", "",
           "Times that the scheduler moved a task to a CPU of another NUMA node." + HELP_OWN_TASKS, CGROUP_LABELS),
    Metric("dioptase_cgroup_pressure_seconds_total", "counter", "seconds",
           "Time in which some or all tasks of the cgroup stalled for a resource (PSI)." + HELP_INCLUDES_DESCENDANTS,
           (*CGROUP_LABELS, "resource", "kind"), since="boot"),
    # Every cgroup: memory
    Metric("dioptase_cgroup_memory_usage_bytes", "gauge", "bytes",
           "Memory charged, page cache included." + HELP_INCLUDES_DESCENDANTS, CGROUP_LABELS),
    Metric("dioptase_cgroup_memory_working_set_bytes", "gauge", "bytes",
           "Memory charged minus inactive page cache, which the kubelet's eviction uses."
           + HELP_INCLUDES_DESCENDANTS, CGROUP_LABELS),
    Metric("dioptase_cgroup_memory_swap_bytes", "gauge", "bytes", "Swap used." + HELP_INCLUDES_DESCENDANTS,
           CGROUP_LABELS),
    Metric("dioptase_cgroup_memory_kernel_bytes", "gauge", "bytes",
           "Kernel memory charged to the cgroup." + HELP_INCLUDES_DESCENDANTS, CGROUP_LABELS),
    Metric("dioptase_cgroup_memory_limit_bytes", "gauge", "bytes",
           "Limits and protections of the cgroup including its descendants: max, high, low, min, swap_max.",
           (*CGROUP_LABELS, "kind")),
    Metric("dioptase_cgroup_memory_bytes", "gauge", "bytes",
           "Memory by kind from memory.stat, in the names of version 2 on both versions; kinds overlap."
           + HELP_INCLUDES_DESCENDANTS, (*CGROUP_LABELS, "kind")),
    Metric("dioptase_cgroup_memory_numa_bytes", "gauge", "bytes",
           "Memory by kind and NUMA node." + HELP_INCLUDES_DESCENDANTS, (*CGROUP_LABELS, "kind", "numa_node")),
    Metric("dioptase_cgroup_page_faults_total", "counter", "",
           "Page faults, minor and major." + HELP_INCLUDES_DESCENDANTS, CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_major_page_faults_total", "counter", "",
           "Page faults that waited for a disk." + HELP_INCLUDES_DESCENDANTS, CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_workingset_pages_total", "counter", "",
           "Evicted pages that were soon needed again: refault, and of these activate (considered active at once) "
           "and restore (were active before eviction: thrashing)." + HELP_INCLUDES_DESCENDANTS,
           (*CGROUP_LABELS, "event", "kind"), since="boot"),
    Metric("dioptase_cgroup_reclaim_scanned_pages_total", "counter", "",
           "Pages of the cgroup that reclaim scanned, by kswapd or direct." + HELP_INCLUDES_DESCENDANTS,
           (*CGROUP_LABELS, "by"), since="boot"),
    Metric("dioptase_cgroup_reclaim_stolen_pages_total", "counter", "",
           "Pages of the cgroup that reclaim freed, by kswapd or direct." + HELP_INCLUDES_DESCENDANTS,
           (*CGROUP_LABELS, "by"), since="boot"),
    Metric("dioptase_cgroup_memory_events_total", "counter", "",
           "Times that memory reached a boundary, including descendants: low, high, max, oom, oom_kill, "
           "oom_group_kill. Version 1 has only oom_kill, of the cgroup itself.",
           (*CGROUP_LABELS, "event"), since="boot"),
    Metric("dioptase_cgroup_oom_kills_total", "counter", "", "Processes killed by the OOM killer." + HELP_OWN_TASKS,
           CGROUP_LABELS),
    Metric("dioptase_cgroup_reclaim_seconds", "histogram", "seconds",
           "Time that tasks of the cgroup spent reclaiming memory: direct (the node was short of memory) or limit "
           "(the cgroup's own limit)." + HELP_OWN_TASKS, (*CGROUP_LABELS, "kind")),
    Metric("dioptase_cgroup_reclaimed_pages_total", "counter", "",
           "Pages freed by tasks of the cgroup in direct reclaim." + HELP_OWN_TASKS, CGROUP_LABELS),
    Metric("dioptase_cgroup_kswapd_wakeups_total", "counter", "",
           "Times that an allocation of the cgroup woke kswapd." + HELP_OWN_TASKS, CGROUP_LABELS),
    # Every cgroup: disks and network
    Metric("dioptase_cgroup_io_bytes_total", "counter", "bytes", "Bytes read, written and discarded." + HELP_RECURSIVE,
           (*CGROUP_LABELS, "device", "operation"), since="boot"),
    Metric("dioptase_cgroup_io_operations_total", "counter", "",
           "Read, write and discard operations." + HELP_RECURSIVE,
           (*CGROUP_LABELS, "device", "operation"), since="boot"),
    Metric("dioptase_cgroup_block_io_seconds", "histogram", "seconds",
           "Time of each request from issue to completion." + HELP_OWN_TASKS,
           (*CGROUP_LABELS, "device", "operation")),
    Metric("dioptase_cgroup_block_io_request_bytes_total", "counter", "bytes",
           "Bytes of the requests in dioptase_cgroup_block_io_seconds." + HELP_OWN_TASKS,
           (*CGROUP_LABELS, "device", "operation")),
    Metric("dioptase_cgroup_network_bytes_total", "counter", "bytes",
           "Payload of TCP and UDP sockets." + HELP_OWN_TASKS, (*CGROUP_LABELS, "protocol", "direction")),
    Metric("dioptase_cgroup_network_packets_total", "counter", "", "Packets of TCP and UDP sockets." + HELP_OWN_TASKS,
           (*CGROUP_LABELS, "protocol", "direction")),
    Metric("dioptase_cgroup_network_retransmits_total", "counter", "", "Retransmitted TCP segments." + HELP_OWN_TASKS,
           CGROUP_LABELS),
    # Metrics that pods publish about themselves
    Metric("dioptase_indicator_latency_seconds", "histogram", "seconds",
           "Request latency that a pod publishes about itself.", ("namespace", "pod"), since="boot"),
    # Advice and its results
    Metric("dioptase_pool_cpus", "gauge", "", "CPUs in the pool; pools overlap if priority separates them.",
           ("pool",)),
    Metric("dioptase_pool_size_cpus", "gauge", "",
           "Size of a pool on each NUMA node, or on any if numa_node is empty, without the CPUs that it shares "
           "with other pools.", ("pool", "numa_node")),
    Metric("dioptase_pool_quota_cores", "gauge", "cores",
           "CPU limit of all cgroups of a pool together; no sample without a limit.", ("pool", "numa_node")),
    Metric("dioptase_region_control_cores", "gauge", "cores",
           "Output of the provision policy of a region of online pods, by Katalyst's control knob.",
           ("region", "kind", "policy", "control")),
    Metric("dioptase_region_bound_cores", "gauge", "cores", "Lower and upper limit of a region's size.",
           ("region", "bound")),
    Metric("dioptase_rejected_pods", "gauge", "",
           "Pods whose CPU or network bandwidth request cannot be satisfied, by rule.", ("rule",)),
    Metric("dioptase_network_capacity_mbit", "gauge", "mbit",
           "Allocatable bandwidth of a network card in Mbit/s: a share of its speed minus the reserve.",
           ("interface", "direction")),
    Metric("dioptase_network_promised_mbit", "gauge", "mbit",
           "Allocated bandwidth of a network card in Mbit/s, each direction.", ("interface",)),
    Metric("dioptase_share_requirement_cores", "gauge", "cores", "Estimated CPU requirement of online pods."),
    Metric("dioptase_reclaim_headroom_cores", "gauge", "cores",
           "CPU headroom: total CPU that reclaimed pods may request, their current use included."),
    Metric("dioptase_reclaim_memory_headroom_bytes", "gauge", "bytes",
           "Memory headroom: total memory that reclaimed pods may request, by memory advice or Koordinator's "
           "formula."),
    Metric("dioptase_reclaim_numa_headroom_cores", "gauge", "cores", "CPU headroom of each NUMA node.",
           ("numa_node",)),
    Metric("dioptase_reclaim_numa_memory_headroom_bytes", "gauge", "bytes", "Memory headroom of each NUMA node.",
           ("numa_node",)),
    Metric("dioptase_reclaim_advertised_cores", "gauge", "cores",
           "CPU that the node reports for reclaimed pods: the headroom smoothed over a window, in bounded steps, "
           "minus a reserve. No sample until the window is full."),
    Metric("dioptase_reclaim_memory_advertised_bytes", "gauge", "bytes",
           "Memory that the node reports for reclaimed pods, smoothed like CPU."),
    Metric("dioptase_reclaim_numa_advertised_cores", "gauge", "cores",
           "CPU reported for reclaimed pods of each NUMA node.", ("numa_node",)),
    Metric("dioptase_reclaim_numa_memory_advertised_bytes", "gauge", "bytes",
           "Memory reported for reclaimed pods of each NUMA node.", ("numa_node",)),
    Metric("dioptase_region_headroom_cores", "gauge", "cores",
           "CPU headroom of a region of online pods by the policy of its kind. Do not sum: regions share the CPUs "
           "that they may grow to.", ("region", "kind")),
    Metric("dioptase_reclaim_lent_cores", "gauge", "cores", "CPU that reclaimed pods may use now."),
    Metric("dioptase_quota_trial_runq_wait_seconds", "gauge", "seconds",
           "Quantile of the run-queue latency of online pods in the latest trial of the CPU quota of reclaimed pods, with "
           "and without the quota. Verdict did_not_help means that the quota is lifted. No sample without a verdict.",
           ("verdict", "quota")),
    Metric("dioptase_shadow_requirement_cores", "gauge", "cores",
           "CPU requirement of online pods estimated by the shadow policy.", ("policy",)),
    Metric("dioptase_shadow_headroom_cores", "gauge", "cores",
           "CPU headroom for reclaimed pods computed by the shadow policy.", ("policy",)),
    Metric("dioptase_shadow_lent_cores", "gauge", "cores", "CPU that the shadow policy would let reclaimed pods use.",
           ("policy",)),
    Metric("dioptase_region_indicator", "gauge", "",
           "Current value of an indicator that the policy of a region follows, in the indicator's own unit: "
           "microseconds of cpu_sched_wait, milliseconds of request_p99_ms, ratios.", ("region", "indicator")),
    Metric("dioptase_region_indicator_target", "gauge", "", "Target value of the indicator, in its own unit.",
           ("region", "indicator")),
    Metric("dioptase_power_action", "gauge", "",
           "1 for the action on a power alert in effect: noop, evict, cap or reset.", ("action",)),
    Metric("dioptase_power_cap_watts", "gauge", "watts", "Power cap of the node; no sample without a cap."),
    Metric("dioptase_power_evict_pods", "gauge", "", "Reclaimed pods to be evicted because of a power alert."),
    Metric("dioptase_overcommit_ratio", "gauge", "",
           "Overcommitment ratio of this node, by resource (cpu or memory): schedulable divided by physical "
           "amount; 1 means none.", ("resource",)),
    Metric("dioptase_memory_provision_bytes", "gauge", "bytes",
           "Memory for reclaimed pods of each NUMA node as a stock advisor reports it (sockets.take); not applied.",
           ("numa_node",)),
    Metric("dioptase_memory_condition", "gauge", "",
           "1 for the memory condition: no_risk, tune_memcg, drop_cache or unknown; of the whole node if numa_node "
           "is empty.", ("numa_node", "state")),
    Metric("dioptase_memory_shortfall_bytes", "gauge", "bytes",
           "Memory missing to twice the critical watermark; of the whole node if numa_node is empty.",
           ("numa_node",)),
    # Forecast of online use, and the accuracy of earlier forecasts
    Metric("dioptase_forecast_cpu_used_cores", "gauge", "cores",
           "CPU used by everything but reclaimed pods, the system included; mean of five seconds."),
    Metric("dioptase_forecast_cpu_peak_cores", "gauge", "cores",
           "Predicted peak of forecast_cpu_used within the next hour, margin included."),
    Metric("dioptase_forecast_cpu_expected_cores", "gauge", "cores", "Predicted peak without the margin."),
    Metric("dioptase_forecast_cpu_margin_cores", "gauge", "cores",
           "Safety margin of the forecast, adjusted after misses."),
    Metric("dioptase_forecast_cpu_shortfall_mean_cores", "gauge", "cores",
           "Mean amount by which the last day's exceeded forecasts were too low; 0 if none was exceeded."),
    Metric("dioptase_forecast_cpu_shortfall_max_cores", "gauge", "cores",
           "Largest amount by which a forecast of the last day was too low."),
    Metric("dioptase_forecast_cpu_bias_cores", "gauge", "cores",
           "Mean of forecast minus peak over the last day; positive values are conservative."),
    Metric("dioptase_forecast_memory_used_bytes", "gauge", "bytes",
           "Memory used by everything but reclaimed pods that is not available without swapping."),
    Metric("dioptase_forecast_memory_peak_bytes", "gauge", "bytes",
           "Predicted peak of forecast_memory_used within the next hour, margin included."),
    Metric("dioptase_forecast_memory_expected_bytes", "gauge", "bytes", "Predicted peak without the margin."),
    Metric("dioptase_forecast_memory_margin_bytes", "gauge", "bytes",
           "Safety margin of the forecast, adjusted after misses."),
    Metric("dioptase_forecast_memory_shortfall_mean_bytes", "gauge", "bytes",
           "Mean amount by which the last day's exceeded forecasts were too low; 0 if none was exceeded."),
    Metric("dioptase_forecast_memory_shortfall_max_bytes", "gauge", "bytes",
           "Largest amount by which a forecast of the last day was too low."),
    Metric("dioptase_forecast_memory_bias_bytes", "gauge", "bytes",
           "Mean of forecast minus peak over the last day; positive values are conservative."),
    Metric("dioptase_forecast_miss_ratio", "gauge", "ratio",
           "Share of the last day's forecasts that the peak of their hour exceeded.", ("resource",)),
    Metric("dioptase_forecast_big_miss_ratio", "gauge", "ratio",
           "Share of the last day's forecasts that the peak exceeded by more than a tenth of the node.",
           ("resource",)),
    Metric("dioptase_forecast_promised_miss_ratio", "gauge", "ratio",
           "Configured target of the miss ratio: forecast.missRatio.", ("resource",)),
    Metric("dioptase_forecast_quantile_ratio", "gauge", "ratio",
           "Quantile of past errors covered by the margin; adjusted after misses.", ("resource",)),
    Metric("dioptase_forecast_alarm", "gauge", "",
           "1 for an hour after use rose above every forecast; the excess is added to all forecasts meanwhile.",
           ("resource",)),
    Metric("dioptase_forecast_trusted", "gauge", "",
           "Whether the history is long and recent enough to allow more headroom than Katalyst's formula.",
           ("resource",)),
    Metric("dioptase_forecast_history_seconds", "gauge", "seconds", "Length of the recorded history of peaks.",
           ("resource",)),
    Metric("dioptase_forecast_evaluated_total", "counter", "",
           "Forecasts evaluated at the end of their hour; one is made every five minutes.", ("resource",)),
    Metric("dioptase_forecast_missed_total", "counter", "", "Evaluated forecasts that the peak exceeded.",
           ("resource",)),
    # Totals of colocation since the start of the agent; `dioptase value` has those of earlier agents too
    Metric("dioptase_reclaimable_cpu_seconds_total", "counter", "seconds",
           "CPU time that reclaimed pods could use: within their limit, and not used by anything else. Grows only while the "
           "agent acts."),
    Metric("dioptase_reclaimed_cpu_seconds_total", "counter", "seconds",
           "CPU time that reclaimed pods used, by namespace; namespaces beyond the 64th are _other.", ("namespace",)),
    Metric("dioptase_reclaimed_interference_seconds_total", "counter", "seconds",
           "Time that tasks of online pods waited while reclaimed pods had the CPU; no sample without the probe blame."),
    Metric("dioptase_online_runq_wait_seconds", "histogram", "seconds",
           "Run-queue latency of all online pods of the node as the advisor evaluates it, while reclaimed pods were busy "
           "(0.05 cores or more) or idle.", ("reclaimed_pods",)),
    Metric("dioptase_online_measured_seconds_total", "counter", "seconds",
           "Time in which dioptase_online_runq_wait_seconds was measured.", ("reclaimed_pods",)),
    Metric("dioptase_online_cpu_seconds_total", "counter", "seconds",
           "CPU time of online pods in dioptase_online_measured_seconds_total.", ("reclaimed_pods",)),
    Metric("dioptase_reclaimed_reductions_total", "counter", "",
           "Cycles that reduced the CPU quota or the CPUs of reclaimed pods, by rule.", ("rule",)),
    Metric("dioptase_reclaimed_evictions_total", "counter", "",
           "Evictions of reclaimed pods, by rule; dry runs and notifications are not counted.", ("rule",)),
    # Decisions and cycles
    Metric("dioptase_decisions_total", "counter", "", "Decisions on knobs.", ("knob", "rule", "outcome")),
    Metric("dioptase_knob_repairs_total", "counter", "",
           "Knobs that were written again because another process or the kernel had changed them.", ("knob",)),
    Metric("dioptase_rounds_total", "counter", "", "Cycles of sense, advise and act, by trigger and advised action.",
           ("trigger", "action")),
    # Evictions, if an eviction plugin is configured
    Metric("dioptase_eviction_threshold", "gauge", "",
           "Threshold of an eviction plugin, in the unit of the observed value. Subject is the instance within the "
           "scope: a NUMA node, pool, network card or detector.", ("plugin", "scope", "subject")),
    Metric("dioptase_eviction_observed", "gauge", "", "Observed value that is compared with the threshold.",
           ("plugin", "scope", "subject")),
    Metric("dioptase_eviction_met", "gauge", "",
           "State of the threshold: 0 not met, 1 soft, 2 hard; no sample if it could not be evaluated.",
           ("plugin", "scope", "subject")),
    Metric("dioptase_eviction_not_judged", "gauge", "",
           "Thresholds that could not be evaluated because an input was missing or the plugin failed; they evict "
           "no pods.", ("plugin",)),
    Metric("dioptase_eviction_condition", "gauge", "",
           "1 while the condition is in force, so that the scheduler avoids the node. Kind: node or cnr.",
           ("condition", "kind")),
    Metric("dioptase_eviction_leaving_pods", "gauge", "",
           "Pods whose eviction was accepted and which are still on the node."),
    Metric("dioptase_eviction_held_pods", "gauge", "",
           "Pods whose eviction is pending, by cause: budget (disruption budget), refused, unreachable or busy (API "
           "server or runtime; the request is repeated), cluster-budget (evictions of all nodes).", ("why",)),
    Metric("dioptase_eviction_victims_total", "counter", "",
           "Pods selected for eviction, in a dry run too, counted once per pod. Pods that were only notified are "
           "not counted.", ("plugin", "dry_run")),
    Metric("dioptase_eviction_kills_total", "counter", "",
           "Steps of evictions, by Katalyst's reasons: EvictCreated, EvictSucceeded, EvictFailed, "
           "EvictExceededGracePeriod, ContainerStopped, NotifySuccess, NotifyFailed, and EvictCancelled for pods "
           "whose eviction was blocked until it was no longer needed.", ("reason",)),
    # The agent itself
    Metric("dioptase_round_duration_seconds", "gauge", "seconds", "Duration of the latest cycle."),
    Metric("dioptase_round_interval_seconds", "gauge", "seconds", "Configured interval between two cycles: intervalS."),
    Metric("dioptase_latency_target_seconds", "gauge", "seconds",
           "Configured run-queue latency target of online pods: advisor.latency.targetWaitMs."),
    Metric("dioptase_snapshot_timestamp_seconds", "gauge", "seconds",
           "Time at which the snapshot behind these metrics was taken."),
    Metric("dioptase_act_mode", "gauge", "", "1 for the mode in effect: off, dry-run or on.", ("mode",)),
    Metric("dioptase_source_up", "gauge", "",
           "Whether a component answered in the latest cycle. Detail is its variant; of a probe loading before one "
           "is attached, absent if the running kernel supports none.", ("source", "detail")),
    Metric("dioptase_source_duration_seconds", "gauge", "seconds", "Time that a component took in the latest cycle.",
           ("source",)),
    Metric("dioptase_source_lost_events_total", "counter", "",
           "Events that a component could not count since it was opened, for any reason.", ("source",)),
    Metric("dioptase_limitations", "gauge", "",
           "Missing prerequisites of this node; the startup warnings list each with its remedy."),
    Metric("dioptase_journal_writable", "gauge", "",
           "Whether decisions can be written to disk; otherwise they are kept in memory."),
    Metric("dioptase_state_syncs_total", "counter", "",
           "Writes of the agent's state files that were synced to disk, by file.", ("file",)),
    Metric("dioptase_state_sync_seconds_total", "counter", "seconds",
           "Time until these writes were on disk: open, write, fsync, rename and fsync of the directory.", ("file",)),
    Metric("dioptase_state_sync_pending_seconds", "gauge", "seconds",
           "Age of the oldest such write that has not ended; 0 without one. Only writes of new knobs wait for it."),
    Metric("dioptase_recording_writable", "gauge", "",
           "Whether cycles can be written to the recording, if one is configured."),
    Metric("dioptase_recording_size_bytes", "gauge", "bytes", "Size of all files of the recording."),
    Metric("dioptase_recording_rounds_total", "counter", "", "Cycles written to the recording."),
    Metric("dioptase_recording_lost_rounds_total", "counter", "",
           "Cycles missing in the recording because the disk was full, failed or too slow."),
    Metric("dioptase_exporter_dropped_total", "counter", "",
           "Series left out because of a limit, counted in every cycle: cgroup (exporters.maxCgroups), culprit and "
           "device (of one cgroup), interface.", ("what",)),
    Metric("dioptase_api_requests_total", "counter", "",
           "Requests to the API server by HTTP status; unreachable if there was no response.",
           ("method", "resource", "status")),
    Metric("dioptase_nri_containers_total", "counter", "",
           "Containers created or updated, by the agent's reply to the runtime: adjusted; unchanged; unknown or late, "
           "if the inputs were missing or late; refused, unchanged because they failed to start with an earlier "
           "reply.", ("answer",)),
    Metric("dioptase_config_obeyed", "gauge", "",
           "1 for each object of the cluster's configuration that this node applies, 0 if it cannot be applied.",
           ("kind", "object", "hash")),
    Metric("dioptase_protocol_calls_total", "counter", "",
           "Calls over Unix sockets by gRPC code. Side: made by the agent, or served.", ("side", "method", "code")),
    Metric("dioptase_advice_age_seconds", "gauge", "seconds",
           "Time since advice was last sent to an external QRM plugin or received from an external advisor "
           "(direction).", ("direction", "resource")),
    Metric("dioptase_protocol_peers", "gauge", "",
           "Connected Katalyst peers at Unix sockets: qrm-plugin (requests advice), advisor (its advice is "
           "applied), plugin-manager (registered the agent's resource plugins).", ("role",)),
    Metric("dioptase_otel_failures_total", "counter", "", "Exports that no OpenTelemetry collector accepted."),
    Metric("dioptase_otel_dropped_spans_total", "counter", "",
           "Cycles whose span no OpenTelemetry collector received."),
    Metric("dioptase_build_info", "gauge", "", "Constant 1, labelled with the version.", ("version",)),
)  # fmt: skip
AGENT_METRICS_BY_NAME = {metric.name: metric for metric in AGENT_METRICS}

CONTROLLER_METRICS: tuple[Metric, ...] = (
    Metric("dioptase_controller_leading", "gauge", "", "1 if this replica is the leader, 0 if it is on standby."),
    Metric("dioptase_controller_reconciles_total", "counter", "",
           "Reconciliations by result: done, retried (the API server rejected a request or was unreachable) or "
           "failed (a bug).", ("controller", "result")),
    Metric("dioptase_controller_queue_length", "gauge", "", "Keys waiting to be reconciled.", ("controller",)),
    Metric("dioptase_controller_api_requests_total", "counter", "",
           "Requests to the API server by HTTP status; unreachable if there was no response.",
           ("method", "resource", "status")),
    Metric("dioptase_controller_watched_objects", "gauge", "", "Objects in the informer's store.", ("resource",)),
    Metric("dioptase_controller_unreadable_objects", "gauge", "", "Objects that do not match their type.",
           ("resource",)),
    Metric("dioptase_controller_watch_age_seconds", "gauge", "seconds",
           "Time since the last event of a resource from the API server, which sends a bookmark at least once a "
           "minute.", ("resource",)),
    Metric("dioptase_controller_relists_total", "counter", "", "Lists made because a watch could not be continued.",
           ("resource",)),
    Metric("dioptase_kcc_target_nodes", "gauge", "", "Nodes that a configuration object targets.",
           ("resource", "object")),
    Metric("dioptase_kcc_canary_nodes", "gauge", "", "Target nodes that the rollout has reached.",
           ("resource", "object")),
    Metric("dioptase_kcc_updated_nodes", "gauge", "", "Target nodes whose CustomNodeConfig has the newest content.",
           ("resource", "object")),
    Metric("dioptase_kcc_invalid_objects", "gauge", "",
           "Invalid configuration objects; while there is one, nothing of its kind is rolled out.", ("resource",)),
    Metric("dioptase_kcc_node_updates_total", "counter", "", "Changes of a node's CustomNodeConfig.", ("resource",)),
    Metric("dioptase_eviction_budget_limit", "gauge", "", "Evictions that all agents together may make in a minute."),
    Metric("dioptase_eviction_budget_used", "gauge", "",
           "Evictions that agents have counted since the controller renewed the budget."),
    Metric("dioptase_lifecycle_agents", "gauge", "",
           "Nodes by the state of their agent: ready, not_ready or not_found.", ("agent", "state")),
    Metric("dioptase_lifecycle_unwell_nodes", "gauge", "", "Nodes with an agent that is not ready."),
    Metric("dioptase_lifecycle_halt", "gauge", "",
           "1 for the reason why no node is tainted or evicted: none, partial or full (too many nodes at once), "
           "stale (no events received).", ("reason",)),
    Metric("dioptase_lifecycle_taints_total", "counter", "",
           "Changes of nodes: taint, untaint, or removal of reclaimed resources (take-back), by result: done, "
           "refused, dry-run.", ("action", "result")),
    Metric("dioptase_lifecycle_evictions_total", "counter", "",
           "Evictions of reclaimed pods from nodes without an agent: evicted, gone, budget (blocked by a "
           "disruption budget), refused, dry-run.", ("result",)),
    Metric("dioptase_overcommit_matched_nodes", "gauge", "",
           "Nodes to which a NodeOvercommitConfig applies; 0 if a newer one has the same pool.", ("object",)),
    Metric("dioptase_webhook_reviews_total", "counter", "",
           "Reviews of the webhooks by result: unchanged, changed, rejected, or failed, after which the API server "
           "applies the failure policy.", ("webhook", "result")),
    Metric("dioptase_webhook_invalid_profiles", "gauge", "",
           "1 for each colocation profile that has no effect because it is invalid.", ("kind", "object")),
    Metric("dioptase_webhook_certificate_expiry_timestamp_seconds", "gauge", "seconds",
           "End of the served certificate in seconds since the epoch."),
    Metric("dioptase_scheduler_requests_total", "counter", "",
           "Requests of kube-scheduler to the extender by result: done, error (with the reason in the response) or "
           "invalid.", ("verb", "result")),
    Metric("dioptase_scheduler_request_seconds_total", "counter", "seconds",
           "Time spent on requests of kube-scheduler.", ("verb",)),
    Metric("dioptase_scheduler_pending_pods", "gauge", "", "Pods that the extender rejected on every node."),
    Metric("dioptase_scheduler_pending_pods_by_plugin", "gauge", "",
           "The same pods by the plugin that rejected most nodes at the latest attempt: a plugin's name, Gang, Invalid (a "
           "value of the pod), Cache (the extender does not know the nodes yet), or Unknown (pods of an earlier extender, not "
           "tried yet).",
           ("plugin",)),
    Metric("dioptase_scheduler_request_duration_seconds", "histogram", "seconds",
           "Duration of requests of kube-scheduler.", ("verb",)),
    Metric("dioptase_scheduler_oldest_pending_seconds", "gauge", "seconds",
           "Time since the first rejection of the pod that waits longest, or since the start of the extender; 0 without such "
           "pods."),
    Metric("dioptase_scheduler_assumed_pods", "gauge", "",
           "Pods whose binding is under way, or not confirmed by the API server yet."),
    Metric("dioptase_scheduler_nodes", "gauge", "", "Nodes in the extender's state."),
    Metric("dioptase_scheduler_problems", "gauge", "",
           "Objects with a value that the extender cannot read; its log names them."),
)  # fmt: skip
CONTROLLER_METRICS_BY_NAME = {metric.name: metric for metric in CONTROLLER_METRICS}
