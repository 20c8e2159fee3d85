"""Every metric once: exporters, docs/metrics.md, dashboards and tests all read this table."""

from __future__ import annotations

import msgspec

from api.histograms import BOUNDS_NS, COARSE_SLOTS

NS_PER_S = 1_000_000_000
US_PER_S = 1_000_000
CGROUP_LABELS = ("cgroup", "namespace", "pod", "container", "qos")
"""Labels of everything that belongs to a cgroup; the last four are empty where no listed pod owns it."""
BELOW = " Cgroups below included."
OWN = " Of the cgroup's own tasks, without cgroups below."
RECURSIVE = " Cgroups below included; on version 1 only where the kernel has the files ending in _recursive."
WAIT_BOUNDS_S: tuple[float, ...] = tuple(bound / NS_PER_S for bound in BOUNDS_NS)
COARSE_BOUNDS_S: tuple[float, ...] = tuple(WAIT_BOUNDS_S[slot] for slot in COARSE_SLOTS)
"""Of histograms that every cgroup has several of: throttles, reclaim and block I/O."""


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
    Metric("dioptase_node_info", "gauge", "", "1, with the CPU's code name and whether this is a virtual machine.",
           ("codename", "virtual")),
    Metric("dioptase_node_cpu_seconds_total", "counter", "seconds", "CPU time of the node by mode.", ("mode",),
           since="boot"),
    Metric("dioptase_node_percpu_seconds_total", "counter", "seconds", "CPU time of each CPU by mode.", ("cpu", "mode"),
           since="boot"),
    Metric("dioptase_node_cpus", "gauge", "", "Online CPUs."),
    Metric("dioptase_node_cpu_frequency_hertz", "gauge", "hertz", "Frequency that each CPU runs at.", ("cpu",)),
    Metric("dioptase_node_run_delay_seconds_total", "counter", "seconds",
           "Time that tasks waited for each CPU while they could run (/proc/schedstat).", ("cpu",), since="boot"),
    Metric("dioptase_node_softirq_seconds_total", "counter", "seconds",
           "Time of each CPU in the kernel's deferred interrupt work, by vector.", ("cpu", "vector")),
    Metric("dioptase_node_interrupts_total", "counter", "", "Interrupts of each CPU, all kinds together.", ("cpu",),
           since="boot"),
    Metric("dioptase_node_load1", "gauge", "", "Load average over one minute."),
    Metric("dioptase_node_load5", "gauge", "", "Load average over five minutes."),
    Metric("dioptase_node_load15", "gauge", "", "Load average over fifteen minutes."),
    Metric("dioptase_node_procs_running", "gauge", "", "Tasks that run or wait for a CPU."),
    Metric("dioptase_node_procs_blocked", "gauge", "", "Tasks that wait for block I/O."),
    Metric("dioptase_node_pressure_seconds_total", "counter", "seconds",
           "Time in which some or all tasks of the node stalled for a resource (PSI).", ("resource", "kind"), since="boot"),
    Metric("dioptase_node_energy_joules_total", "counter", "joules", "Energy used, by RAPL domain.", ("domain",),
           since="boot"),
    # The node's memory
    Metric("dioptase_node_memory_total_bytes", "gauge", "bytes", "Memory of the node."),
    Metric("dioptase_node_memory_available_bytes", "gauge", "bytes", "Memory that could be had without swapping."),
    Metric("dioptase_node_memory_bytes", "gauge", "bytes",
           "Memory by kind, in the names of /proc/meminfo; kinds overlap.", ("kind",)),
    Metric("dioptase_node_numa_memory_bytes", "gauge", "bytes",
           "Memory of each NUMA node by kind, in the kernel's names.", ("numa_node", "kind")),
    Metric("dioptase_node_zone_bytes", "gauge", "bytes",
           "Memory of a zone: managed and free, and the watermarks: kswapd is woken below low and sleeps above high; "
           "below min, allocations reclaim themselves.", ("numa_node", "zone", "mark")),
    Metric("dioptase_node_fragmentation_index", "gauge", "",
           "Why an allocation of 2^order pages would fail: towards 0 for want of memory, towards 1 because free memory "
           "is in pieces, -1 where it would not fail.", ("numa_node", "order")),
    Metric("dioptase_node_vm_events_total", "counter", "",
           "Events of reclaim, faults, swap, compaction and NUMA balancing, in the names of /proc/vmstat; pages or times.",
           ("event",), since="boot"),
    Metric("dioptase_node_kswapd_wakeups_total", "counter", "", "Times that background reclaim was woken.",
           ("numa_node",)),
    Metric("dioptase_node_kswapd_active_seconds_total", "counter", "seconds",
           "Time from each waking of background reclaim until it slept again.", ("numa_node",)),
    Metric("dioptase_node_kswapd_scanned_pages_total", "counter", "", "Pages that background reclaim looked at.",
           ("numa_node",)),
    Metric("dioptase_node_kswapd_reclaimed_pages_total", "counter", "", "Pages that background reclaim freed.",
           ("numa_node",)),
    Metric("dioptase_node_oom_kill_timestamp_seconds", "gauge", "seconds",
           "When the kernel last killed a process for memory, as far as the agent saw."),
    Metric("dioptase_node_l3_occupancy_bytes", "gauge", "bytes",
           "L3 cache held by a resctrl control group, the monitoring groups in it included. The empty group is the default "
           "one, which has what is in no other: the sum over groups is all that the cache holds.", ("cache", "group")),
    Metric("dioptase_node_l3_memory_bytes_total", "counter", "bytes",
           "Memory traffic of a resctrl control group through an L3 cache, to any NUMA node; the sum over groups is all of "
           "the cache's.", ("cache", "group"), since="boot"),
    Metric("dioptase_node_l3_local_memory_bytes_total", "counter", "bytes",
           "Memory traffic of a resctrl control group through an L3 cache, to its own NUMA node; the sum over groups is all "
           "of the cache's.", ("cache", "group"), since="boot"),
    # The node's disks and network
    Metric("dioptase_node_disk_bytes_total", "counter", "bytes", "Bytes read and written.", ("device", "operation"),
           since="boot"),
    Metric("dioptase_node_disk_operations_total", "counter", "", "Requests completed.", ("device", "operation"),
           since="boot"),
    Metric("dioptase_node_disk_operation_seconds_total", "counter", "seconds",
           "Time that requests took, summed over requests.", ("device", "operation"), since="boot"),
    Metric("dioptase_node_disk_busy_seconds_total", "counter", "seconds", "Time with at least one request in flight.",
           ("device",), since="boot"),
    Metric("dioptase_node_disk_in_flight", "gauge", "", "Requests in flight.", ("device",)),
    Metric("dioptase_node_filesystem_size_bytes", "gauge", "bytes", "Size of a file system.", ("mountpoint",)),
    Metric("dioptase_node_filesystem_available_bytes", "gauge", "bytes", "Room for whoever is not root.",
           ("mountpoint",)),
    Metric("dioptase_node_filesystem_inodes", "gauge", "", "Files that a file system has room for.", ("mountpoint",)),
    Metric("dioptase_node_filesystem_free_inodes", "gauge", "", "Files that can still be made.", ("mountpoint",)),
    Metric("dioptase_node_network_bytes_total", "counter", "bytes", "Bytes through a network interface.",
           ("interface", "direction"), since="boot"),
    Metric("dioptase_node_network_packets_total", "counter", "", "Packets through a network interface.",
           ("interface", "direction"), since="boot"),
    Metric("dioptase_node_network_errors_total", "counter", "", "Packets lost to errors.", ("interface", "direction"),
           since="boot"),
    Metric("dioptase_node_network_drops_total", "counter", "", "Packets dropped by the kernel.",
           ("interface", "direction"), since="boot"),
    Metric("dioptase_node_network_events_total", "counter", "",
           "Events of IP, TCP and UDP that mean trouble, and the traffic to hold them against, in the kernel's names.",
           ("event",), since="boot"),
    Metric("dioptase_node_tcp_sockets", "gauge", "", "TCP sockets by state.", ("state",)),
    # Every cgroup: CPU
    Metric("dioptase_cgroup_cpu_usage_seconds_total", "counter", "seconds", "CPU time used." + BELOW,
           CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_cpu_seconds_total", "counter", "seconds", "CPU time used, by mode: user or system." + BELOW,
           (*CGROUP_LABELS, "mode"), since="boot"),
    Metric("dioptase_cgroup_cpu_limit_cores", "gauge", "cores",
           "CPU that the quota allows the cgroup and those below; no sample without one.",
           CGROUP_LABELS),
    Metric("dioptase_cgroup_cpu_weight", "gauge", "",
           "Share of CPU under contention: cpu.weight (100 is usual), on version 1 cpu.shares (1024 is usual).",
           CGROUP_LABELS),
    Metric("dioptase_cgroup_cpu_idle", "gauge", "", "1 where the cgroup runs only when nobody else wants to (cpu.idle).",
           CGROUP_LABELS),
    Metric("dioptase_cgroup_cpuset_cpus", "gauge", "", "CPUs that the cgroup may run on.", CGROUP_LABELS),
    Metric("dioptase_cgroup_cpu_periods_total", "counter", "", "CFS periods that elapsed under the cgroup's own quota.",
           CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_cpu_throttled_periods_total", "counter", "", "CFS periods in which the cgroup's own quota ran out.",
           CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_cpu_throttled_seconds_total", "counter", "seconds",
           "Time throttled by the cgroup's own quota, summed over its run queues.", CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_cpu_cycles_total", "counter", "",
           "Unhalted CPU cycles; the rate of these by that of instructions is cycles per instruction (CPI)." + OWN,
           CGROUP_LABELS),
    Metric("dioptase_cgroup_cpu_instructions_total", "counter", "", "Instructions retired." + OWN, CGROUP_LABELS),
    Metric("dioptase_cgroup_cpu_cache_misses_total", "counter", "", "Misses of the last level of cache." + OWN, CGROUP_LABELS),
    Metric("dioptase_cgroup_throttle_seconds", "histogram", "seconds",
           "Length of each single throttle by the cgroup's own quota, of one run queue.", CGROUP_LABELS),
    Metric("dioptase_cgroup_runq_wait_seconds", "histogram", "seconds",
           "Time that tasks were runnable but not running, of every switch, unsampled." + OWN, CGROUP_LABELS),
    Metric("dioptase_cgroup_blame_seconds_total", "counter", "seconds",
           "Time that tasks waited for a CPU, by who had it meanwhile. Cause: neighbour (the cgroup culprit ran), self "
           "(its own tasks ran), own_quota, higher_class (real-time tasks ran) or other. Culprits that made it wait "
           "least have no sample where they are many; all parts, these too, add up to the sum of "
           "dioptase_cgroup_runq_wait_seconds." + OWN, (*CGROUP_LABELS, "cause", "culprit", "culprit_pod")),
    Metric("dioptase_cgroup_threads", "gauge", "",
           "Threads, those of cgroups below included; without them where the pids controller is not there.", CGROUP_LABELS),
    Metric("dioptase_cgroup_threads_by_state", "gauge", "",
           "Threads by what they do: runnable, uninterruptible (not for a disk), iowait or sleeping." + OWN,
           (*CGROUP_LABELS, "state")),
    Metric("dioptase_cgroup_pids_limit", "gauge", "",
           "Threads that the cgroup and those below may have; no sample without a limit.",
           CGROUP_LABELS),
    Metric("dioptase_cgroup_load", "gauge", "",
           "Load average over 1m, 5m or 15m: runnable and uninterruptible threads, damped as the kernel does." + OWN,
           (*CGROUP_LABELS, "period")),
    Metric("dioptase_cgroup_load_runnable", "gauge", "", "Load average of runnable threads alone over 1m, 5m or 15m." + OWN,
           (*CGROUP_LABELS, "period")),
    Metric("dioptase_cgroup_numa_migrations_total", "counter", "",
           "Times that the scheduler moved a task to a CPU of another NUMA node." + OWN, CGROUP_LABELS),
    Metric("dioptase_cgroup_pressure_seconds_total", "counter", "seconds",
           "Time in which some or all tasks of the cgroup stalled for a resource (PSI)." + BELOW,
           (*CGROUP_LABELS, "resource", "kind"), since="boot"),
    # Every cgroup: memory
    Metric("dioptase_cgroup_memory_usage_bytes", "gauge", "bytes", "Memory charged, page cache included." + BELOW,
           CGROUP_LABELS),
    Metric("dioptase_cgroup_memory_working_set_bytes", "gauge", "bytes",
           "Memory charged without inactive page cache: what the kubelet evicts by." + BELOW, CGROUP_LABELS),
    Metric("dioptase_cgroup_memory_swap_bytes", "gauge", "bytes", "Swap used." + BELOW, CGROUP_LABELS),
    Metric("dioptase_cgroup_memory_kernel_bytes", "gauge", "bytes", "Memory of the kernel on behalf of the cgroup." + BELOW,
           CGROUP_LABELS),
    Metric("dioptase_cgroup_memory_limit_bytes", "gauge", "bytes",
           "Limits and protections that are set for the cgroup and those below: max, high, low, min, swap_max.",
           (*CGROUP_LABELS, "kind")),
    Metric("dioptase_cgroup_memory_bytes", "gauge", "bytes",
           "Memory by kind, from memory.stat, in the names of version 2 on both versions; kinds overlap." + BELOW,
           (*CGROUP_LABELS, "kind")),
    Metric("dioptase_cgroup_memory_numa_bytes", "gauge", "bytes", "Memory by kind and NUMA node." + BELOW,
           (*CGROUP_LABELS, "kind", "numa_node")),
    Metric("dioptase_cgroup_page_faults_total", "counter", "", "Page faults, minor and major." + BELOW, CGROUP_LABELS,
           since="boot"),
    Metric("dioptase_cgroup_major_page_faults_total", "counter", "", "Page faults that had to wait for a disk." + BELOW,
           CGROUP_LABELS, since="boot"),
    Metric("dioptase_cgroup_workingset_pages_total", "counter", "",
           "Pages that were evicted and soon needed again: refault; of them activate (taken as in use at once) and "
           "restore (had been in use: thrashing)." + BELOW, (*CGROUP_LABELS, "event", "kind"), since="boot"),
    Metric("dioptase_cgroup_reclaim_scanned_pages_total", "counter", "",
           "Pages of the cgroup that reclaim looked at, by who did: kswapd or direct." + BELOW, (*CGROUP_LABELS, "by"),
           since="boot"),
    Metric("dioptase_cgroup_reclaim_stolen_pages_total", "counter", "",
           "Pages of the cgroup that reclaim took, by who did: kswapd or direct." + BELOW,
           (*CGROUP_LABELS, "by"), since="boot"),
    Metric("dioptase_cgroup_memory_events_total", "counter", "",
           "Times that memory hit a boundary, the cgroups below included: low, high, max, oom, oom_kill, oom_group_kill. "
           "Version 1 counts oom_kill alone, of the cgroup itself.",
           (*CGROUP_LABELS, "event"), since="boot"),
    Metric("dioptase_cgroup_oom_kills_total", "counter", "", "Processes killed for memory." + OWN,
           CGROUP_LABELS),
    Metric("dioptase_cgroup_reclaim_seconds", "histogram", "seconds",
           "Time that tasks of the cgroup had to reclaim memory themselves: direct (the node was short) or limit (the "
           "cgroup's own limit)." + OWN, (*CGROUP_LABELS, "kind")),
    Metric("dioptase_cgroup_reclaimed_pages_total", "counter", "", "Pages that tasks of the cgroup freed themselves." + OWN,
           CGROUP_LABELS),
    Metric("dioptase_cgroup_kswapd_wakeups_total", "counter", "",
           "Times that an allocation of the cgroup woke background reclaim." + OWN, CGROUP_LABELS),
    # Every cgroup: disks and network
    Metric("dioptase_cgroup_io_bytes_total", "counter", "bytes", "Bytes read, written and discarded." + RECURSIVE,
           (*CGROUP_LABELS, "device", "operation"), since="boot"),
    Metric("dioptase_cgroup_io_operations_total", "counter", "", "Operations of reading, writing and discarding." + RECURSIVE,
           (*CGROUP_LABELS, "device", "operation"), since="boot"),
    Metric("dioptase_cgroup_block_io_seconds", "histogram", "seconds",
           "Time of each request from issue to completion." + OWN, (*CGROUP_LABELS, "device", "operation")),
    Metric("dioptase_cgroup_block_io_request_bytes_total", "counter", "bytes", "Bytes of the requests that were timed." + OWN,
           (*CGROUP_LABELS, "device", "operation")),
    Metric("dioptase_cgroup_network_bytes_total", "counter", "bytes", "Payload of TCP and UDP sockets." + OWN,
           (*CGROUP_LABELS, "protocol", "direction")),
    Metric("dioptase_cgroup_network_packets_total", "counter", "", "Packets of TCP and UDP sockets." + OWN,
           (*CGROUP_LABELS, "protocol", "direction")),
    Metric("dioptase_cgroup_network_retransmits_total", "counter", "", "TCP segments sent again." + OWN, CGROUP_LABELS),
    # What pods say of themselves
    Metric("dioptase_indicator_latency_seconds", "histogram", "seconds",
           "Request latency that a pod publishes about itself.", ("namespace", "pod"), since="boot"),
    # Advice and what came of it
    Metric("dioptase_pool_cpus", "gauge", "", "CPUs in the pool; pools overlap where priority separates them.", ("pool",)),
    Metric("dioptase_share_requirement_cores", "gauge", "cores", "CPU that online pods are estimated to need."),
    Metric("dioptase_reclaim_headroom_cores", "gauge", "cores",
           "CPU that can be promised to reclaimed pods in all, what they use now included."),
    Metric("dioptase_reclaim_headroom_bytes", "gauge", "bytes", "The same of memory."),
    Metric("dioptase_reclaim_numa_headroom_cores", "gauge", "cores", "CPU that can be promised on each NUMA node.",
           ("numa_node",)),
    Metric("dioptase_reclaim_numa_headroom_bytes", "gauge", "bytes", "Memory that can be promised on each NUMA node.",
           ("numa_node",)),
    Metric("dioptase_reclaim_advertised_cores", "gauge", "cores",
           "CPU that the node advertises for reclaimed pods: headroom over a window, in bounded steps, less a reserve. Not "
           "there until a window is full."),
    Metric("dioptase_reclaim_advertised_bytes", "gauge", "bytes", "The same of memory."),
    Metric("dioptase_reclaim_numa_advertised_cores", "gauge", "cores", "CPU that is advertised of each NUMA node.",
           ("numa_node",)),
    Metric("dioptase_reclaim_numa_advertised_bytes", "gauge", "bytes", "Memory that is advertised of each NUMA node.",
           ("numa_node",)),
    Metric("dioptase_region_headroom_cores", "gauge", "cores",
           "CPU that a region of online pods leaves by the policy of headroom for its kind. Not to be summed: regions share "
           "what they may grow to.", ("region", "kind")),
    Metric("dioptase_reclaim_lent_cores", "gauge", "cores", "CPU that reclaimed pods may use now."),
    Metric("dioptase_shadow_requirement_cores", "gauge", "cores", "CPU that online pods need, as the shadow policy estimates.",
           ("policy",)),
    Metric("dioptase_shadow_headroom_cores", "gauge", "cores",
           "CPU that the shadow policy would promise to reclaimed pods in all.", ("policy",)),
    Metric("dioptase_shadow_lent_cores", "gauge", "cores", "CPU that the shadow policy would let reclaimed pods use.",
           ("policy",)),
    # The forecast of what online work will use, and what came of earlier ones
    Metric("dioptase_forecast_cpu_used_cores", "gauge", "cores",
           "CPU that all but reclaimed pods use, the system included; mean of five seconds."),
    Metric("dioptase_forecast_cpu_peak_cores", "gauge", "cores",
           "The most of that to expect within the next hour, margin included."),
    Metric("dioptase_forecast_cpu_expected_cores", "gauge", "cores", "The same without the margin."),
    Metric("dioptase_forecast_cpu_margin_cores", "gauge", "cores",
           "What is added for safety, steered by the misses of the past."),
    Metric("dioptase_forecast_cpu_shortfall_mean_cores", "gauge", "cores",
           "By how much the forecasts of the last day that the peak exceeded fell short, on average; 0 where none did."),
    Metric("dioptase_forecast_cpu_shortfall_max_cores", "gauge", "cores", "By how much the worst of the last day did."),
    Metric("dioptase_forecast_cpu_bias_cores", "gauge", "cores",
           "Mean of forecast minus peak over the last day: above 0 is caution."),
    Metric("dioptase_forecast_memory_used_bytes", "gauge", "bytes",
           "Memory that all but reclaimed pods have and that could not be had without swapping."),
    Metric("dioptase_forecast_memory_peak_bytes", "gauge", "bytes",
           "The most of that to expect within the next hour, margin included."),
    Metric("dioptase_forecast_memory_expected_bytes", "gauge", "bytes", "The same without the margin."),
    Metric("dioptase_forecast_memory_margin_bytes", "gauge", "bytes",
           "What is added for safety, steered by the misses of the past."),
    Metric("dioptase_forecast_memory_shortfall_mean_bytes", "gauge", "bytes",
           "By how much the forecasts of the last day that the peak exceeded fell short, on average; 0 where none did."),
    Metric("dioptase_forecast_memory_shortfall_max_bytes", "gauge", "bytes", "By how much the worst of the last day did."),
    Metric("dioptase_forecast_memory_bias_bytes", "gauge", "bytes",
           "Mean of forecast minus peak over the last day: above 0 is caution."),
    Metric("dioptase_forecast_miss_ratio", "gauge", "ratio",
           "Part of the forecasts of the last day that the peak of their hour exceeded.", ("resource",)),
    Metric("dioptase_forecast_big_miss_ratio", "gauge", "ratio",
           "Part of them that it exceeded by more than a tenth of the node.", ("resource",)),
    Metric("dioptase_forecast_promised_miss_ratio", "gauge", "ratio",
           "Misses that the settings allow: forecast.missRatio.", ("resource",)),
    Metric("dioptase_forecast_quantile_ratio", "gauge", "ratio",
           "Part of past errors that the margin covers, as its misses have steered it.", ("resource",)),
    Metric("dioptase_forecast_alarm", "gauge", "",
           "1 for an hour after use rose above every forecast: it is added to all of them.", ("resource",)),
    Metric("dioptase_forecast_trusted", "gauge", "",
           "Whether history is long and fresh enough to promise more than Katalyst's formula.", ("resource",)),
    Metric("dioptase_forecast_history_seconds", "gauge", "seconds", "Time of which peaks are remembered.", ("resource",)),
    Metric("dioptase_forecast_evaluated_total", "counter", "", "Forecasts whose hour is over, one for each five minutes.",
           ("resource",)),
    Metric("dioptase_forecast_missed_total", "counter", "", "Those of them that the peak exceeded.", ("resource",)),
    # Decisions and rounds
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
    Metric("dioptase_source_up", "gauge", "",
           "Whether a source answered in the latest round. Detail is what it runs on: of a probe its form, loading before "
           "there is one, absent where the running kernel takes none.", ("source", "detail")),
    Metric("dioptase_source_duration_seconds", "gauge", "seconds", "How long a source took in the latest round.", ("source",)),
    Metric("dioptase_source_lost_events_total", "counter", "",
           "Events that a source could not count since it was opened, for whatever reason.", ("source",)),
    Metric("dioptase_limitations", "gauge", "", "Things that this node lacks, each with its remedy in the banner."),
    Metric("dioptase_journal_writable", "gauge", "", "Whether decisions reach the disk; they are kept in memory else."),
    Metric("dioptase_recording_writable", "gauge", "", "Whether rounds reach the recording, where one is asked for."),
    Metric("dioptase_recording_size_bytes", "gauge", "bytes", "Size of the recording on disk, all its files."),
    Metric("dioptase_recording_rounds_total", "counter", "", "Rounds written to the recording."),
    Metric("dioptase_recording_lost_rounds_total", "counter", "",
           "Rounds that are missing in the recording: the disk was full, failed or slower than the rounds came."),
    Metric("dioptase_exporter_dropped_total", "counter", "",
           "What a limit kept out of these metrics, counted anew every round: cgroup (exporters.maxCgroups), culprit and "
           "device (of one cgroup), interface.", ("what",)),
    Metric("dioptase_otel_failures_total", "counter", "", "Exports that no OpenTelemetry collector took."),
    Metric("dioptase_otel_dropped_spans_total", "counter", "", "Rounds of which no OpenTelemetry collector got the span."),
    Metric("dioptase_build_info", "gauge", "", "1, with the version.", ("version",)),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in CATALOGUE}
