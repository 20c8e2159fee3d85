"""The colocation dashboard: reported, reclaimable and used resources, and their cost in run-queue latency."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.panels import (
    BY_POD,
    LATENCY_TARGET,
    NODE_SELECTOR,
    ONLINE_SELECTOR,
    POD_LEGEND,
    POD_SELECTOR,
    RATE_INTERVAL,
    RECLAIMED_SELECTOR,
    Board,
    Panel,
    Query,
    line_panel,
    quantile_by,
    rate_by,
    stat_panel,
)

USED = "dioptase_cgroup_cpu_usage_seconds_total"
BLAME = "dioptase_cgroup_blame_seconds_total"
RUNQ_LATENCY = "dioptase_cgroup_runq_wait_seconds"
_BATCH = f'label_replace(dioptase_cgroup_threads{{{RECLAIMED_SELECTOR}}}, "culprit", "$1", "cgroup", "(.*)")'
"""One series for each reclaimed cgroup, as a culprit."""


def board() -> Board:
    return Board(
        "colocation",
        "Dioptase colocation",
        "What is lent, what is made of it, what online pods wait for it, and what another policy would do.",
        ("namespace", "pod"),
        (
            ("At a glance", _glance()),
            ("What is lent", _reclaimable()),
            ("Regions and their sizes", _regions()),
            ("Memory", _memory()),
            ("What it costs online pods", _harm()),
            ("How forecasts fare", _forecasts()),
            ("What another policy would do", _shadow()),
            ("What steers the pools and the node", _steering()),
        ),
    )


def interference(by: str, online: str = ONLINE_SELECTOR) -> str:
    """Time a second that online pods waited while batch work had the CPU."""
    created = rate_by(BLAME, f'{online},cause="neighbour"', f"{by}, culprit")
    return f"sum by ({by}) ({created} and on (job, instance, culprit) {_BATCH})"


def _glance() -> list[Panel]:
    cpus = f"sum(dioptase_node_cpus{{{NODE_SELECTOR}}})"
    busy = f'sum(rate(dioptase_node_cpu_seconds_total{{{NODE_SELECTOR},mode!~"idle|iowait|steal"}}{RATE_INTERVAL}))'
    used = f"sum(rate({USED}{{{RECLAIMED_SELECTOR}}}{RATE_INTERVAL}))"
    return [
        stat_panel("Node use", units.PercentUnit, f"{busy} / {cpus}", "Share of all CPUs that run something."),
        stat_panel(
            "Of that batch work",
            units.PercentUnit,
            f"{used} / {cpus}",
            "Share of all CPUs that reclaimed pods use: what lending adds.",
        ),
        stat_panel(
            "Lent", "cores", f"sum(dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}})", "What reclaimed pods may use now."
        ),
        stat_panel(
            "Promised",
            "cores",
            f"sum(dioptase_reclaim_headroom_cores{{{NODE_SELECTOR}}})",
            "CPU for all reclaimed pods together, their current use included.",
        ),
        stat_panel(
            "Online waits for batch work",
            "s/s",
            f"sum({interference('job, instance')}) or vector(0)",
            "Seconds a second that tasks of online pods waited while a reclaimed cgroup had their CPU. With cpu.idle this is "
            "what the kernel needs to switch.",
        ),
        stat_panel(
            "Worst online wait, p99",
            units.PercentUnit,
            f"max({quantile_by(0.99, RUNQ_LATENCY, ONLINE_SELECTOR)} / on (job, instance) group_left () {LATENCY_TARGET})",
            "Run-queue wait of the slowest online pod, as a share of its node's target.",
            (0.5, 1),
        ),
    ]


def _reclaimable() -> list[Panel]:
    return [
        line_panel(
            "Lent and used",
            "cores",
            "Used well below lent: batch work has no more to do. Used at lent: it would take more.",
            Query(f"dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}}", "lent on {{instance}}"),
            Query(rate_by(USED, RECLAIMED_SELECTOR, "job, instance"), "used on {{instance}}"),
        ),
        line_panel(
            "Headroom and need",
            "cores",
            "Headroom for reclaimed pods, the headroom that the node reports (a mean of minutes, in bounded steps), and "
            "what online pods are estimated to need.",
            Query(f"dioptase_reclaim_headroom_cores{{{NODE_SELECTOR}}}", "headroom on {{instance}}"),
            Query(f"dioptase_reclaim_advertised_cores{{{NODE_SELECTOR}}}", "advertised on {{instance}}"),
            Query(f"dioptase_share_requirement_cores{{{NODE_SELECTOR}}}", "needed on {{instance}}"),
            Query(f"dioptase_node_cpus{{{NODE_SELECTOR}}}", "CPUs of {{instance}}"),
        ),
        line_panel(
            "Advertised CPU by NUMA node",
            "cores",
            "Found in this round, and advertised. Far apart for long: the steps of the reporter are too small, or nothing new "
            "is known.",
            Query(
                f"dioptase_reclaim_numa_headroom_cores{{{NODE_SELECTOR}}}", "node {{numa_node}} of {{instance}}, found"
            ),
            Query(
                f"dioptase_reclaim_numa_advertised_cores{{{NODE_SELECTOR}}}",
                "node {{numa_node}} of {{instance}}, advertised",
            ),
        ),
        line_panel(
            "Batch work by pod",
            "cores",
            "Which reclaimed pods use what is lent.",
            Query(rate_by(USED, RECLAIMED_SELECTOR), POD_LEGEND),
            stacked=True,
        ),
        pools(),
    ]


def pools() -> Panel:
    """How many CPUs each pool has."""
    return line_panel(
        "CPUs of the pools",
        units.Short,
        "Pools overlap where priority, not partition, separates them.",
        Query(f"dioptase_pool_cpus{{{NODE_SELECTOR}}}", "{{pool}} on {{instance}}"),
    )


def _regions() -> list[Panel]:
    return [
        line_panel(
            "Sizes of the pools",
            units.Short,
            "CPUs that each pool is to have, by NUMA node; which CPUs they are QRM chooses.",
            Query(f"dioptase_pool_size_cpus{{{NODE_SELECTOR}}}", "{{pool}} {{numa_node}} on {{instance}}"),
            stacked=True,
        ),
        line_panel(
            "What regions ask for",
            "cores",
            "Each policy's answer for a region of online pods, by Katalyst's control. `dioptase explain POOL` has the formula.",
            Query(
                f"dioptase_region_control_cores{{{NODE_SELECTOR}}}",
                "{{region}} by {{policy}}: {{control}} on {{instance}}",
            ),
        ),
        line_panel(
            "Pods whose wish for CPUs or network bandwidth cannot be fulfilled",
            units.Short,
            "They run all the same, on what others have. `dioptase explain POD` says why.",
            Query(f"dioptase_rejected_pods{{{NODE_SELECTOR}}}", "{{rule}} on {{instance}}"),
            stacked=True,
        ),
    ]


def _memory() -> list[Panel]:
    return [
        line_panel(
            "Memory headroom",
            units.BytesIEC,
            "For all reclaimed pods together, their current use included; compared with a stock memory advisor.",
            Query(f"dioptase_reclaim_memory_headroom_bytes{{{NODE_SELECTOR}}}", "headroom on {{instance}}"),
            Query(f"dioptase_reclaim_memory_advertised_bytes{{{NODE_SELECTOR}}}", "advertised on {{instance}}"),
            Query(
                f"sum by (job, instance) (dioptase_memory_provision_bytes{{{NODE_SELECTOR}}})",
                "by the stock advisor on {{instance}}",
            ),
        ),
        line_panel(
            "Memory headroom by NUMA node",
            units.BytesIEC,
            "Where it is known how it is spread.",
            Query(
                f"dioptase_reclaim_numa_memory_headroom_bytes{{{NODE_SELECTOR}}}",
                "NUMA node {{numa_node}} of {{instance}}",
            ),
            stacked=True,
        ),
        line_panel(
            "Memory missing to twice the critical watermark",
            units.BytesIEC,
            "Above 0 cgroups are tuned, and below the watermark itself cache is dropped. The node as a whole has no number.",
            Query(f"dioptase_memory_shortfall_bytes{{{NODE_SELECTOR}}}", "{{numa_node}} of {{instance}}"),
        ),
        line_panel(
            "How short memory is",
            units.Short,
            "1 for the state in force: tune_memcg, drop_cache or unknown, when nothing is done. No line: no_risk.",
            Query(
                f'dioptase_memory_condition{{{NODE_SELECTOR},state!="no_risk"}} == 1',
                "{{state}} {{numa_node}} on {{instance}}",
            ),
        ),
    ]


def _harm() -> list[Panel]:
    return [
        line_panel(
            "Online waits for batch work, by pod",
            "s/s",
            "Time that each online pod waited while a reclaimed cgroup had its CPU. Waits for others, and for its own tasks, "
            "are on the workload dashboard: batch work is not shrunk for those.",
            Query(interference(BY_POD), POD_LEGEND),
        ),
        line_panel(
            "Share of online waits that batch work made",
            units.PercentUnit,
            "Below a tenth nothing is taken from batch work (leastBlameRatio): other aggressors caused the waits.",
            Query(
                f"{interference('job, instance')} / on (job, instance) {rate_by(BLAME, ONLINE_SELECTOR, 'job, instance')}",
                "{{instance}}",
            ),
        ),
        line_panel(
            "Online run-queue wait, p99",
            units.Seconds,
            "Compared with the target of policy latency.",
            Query(quantile_by(0.99, RUNQ_LATENCY, ONLINE_SELECTOR), POD_LEGEND),
            Query(LATENCY_TARGET, "target on {{instance}}"),
            log=True,
        ),
        line_panel(
            "Request latency that pods report, p99",
            units.Seconds,
            "The pods' own word, where they publish it: it should stay put while work is lent.",
            Query(quantile_by(0.99, "dioptase_indicator_latency_seconds", POD_SELECTOR), POD_LEGEND),
        ),
    ]


def _forecasts() -> list[Panel]:
    return [
        line_panel(
            "CPU: use and forecast",
            "cores",
            "All but reclaimed pods, including the system. Use should stay below the forecast; the space between "
            "is what caution costs.",
            Query(f"dioptase_forecast_cpu_used_cores{{{NODE_SELECTOR}}}", "used on {{instance}}"),
            Query(f"dioptase_forecast_cpu_peak_cores{{{NODE_SELECTOR}}}", "forecast on {{instance}}"),
        ),
        line_panel(
            "Memory: use and forecast",
            units.BytesIEC,
            "The same of memory that could not be had without swapping.",
            Query(f"dioptase_forecast_memory_used_bytes{{{NODE_SELECTOR}}}", "used on {{instance}}"),
            Query(f"dioptase_forecast_memory_peak_bytes{{{NODE_SELECTOR}}}", "forecast on {{instance}}"),
        ),
        line_panel(
            "Forecasts that were missed, of the last day",
            units.PercentUnit,
            "Compared with the limit in the settings. Above it for a while after a change of the load; if "
            "for longer, see the runbook.",
            Query(f"dioptase_forecast_miss_ratio{{{NODE_SELECTOR}}}", "{{resource}} on {{instance}}"),
            Query(f"dioptase_forecast_big_miss_ratio{{{NODE_SELECTOR}}}", "{{resource}} by a tenth of {{instance}}"),
            Query(f"dioptase_forecast_promised_miss_ratio{{{NODE_SELECTOR}}}", "{{resource}} allowed on {{instance}}"),
        ),
        line_panel(
            "CPU: by how much forecasts err",
            "cores",
            "Of the last day: the mean of the misses, the worst, and by how much forecasts were above the peak on average.",
            Query(f"dioptase_forecast_cpu_shortfall_mean_cores{{{NODE_SELECTOR}}}", "missed by on {{instance}}"),
            Query(f"dioptase_forecast_cpu_shortfall_max_cores{{{NODE_SELECTOR}}}", "at worst on {{instance}}"),
            Query(f"dioptase_forecast_cpu_bias_cores{{{NODE_SELECTOR}}}", "above the peak on {{instance}}"),
        ),
    ]


def _shadow() -> list[Panel]:
    return [
        line_panel(
            "Lent, and what the shadow policy would lend",
            "cores",
            "The second policy of the settings sees the same snapshots and touches nothing. Replay a recording for what would "
            "have come of it.",
            Query(f"dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}}", "lent on {{instance}}"),
            Query(f"dioptase_shadow_lent_cores{{{NODE_SELECTOR}}}", "{{policy}} would lend on {{instance}}"),
        ),
        line_panel(
            "Headroom, and that of the shadow policy",
            "cores",
            "Of two policies that miss as seldom, the one that promises more is worth more.",
            Query(f"dioptase_reclaim_headroom_cores{{{NODE_SELECTOR}}}", "headroom on {{instance}}"),
            Query(f"dioptase_shadow_headroom_cores{{{NODE_SELECTOR}}}", "{{policy}} would promise on {{instance}}"),
        ),
    ]


def _steering() -> list[Panel]:
    where, target = (f"dioptase_region_indicator{end}{{{NODE_SELECTOR}}}" for end in ("", "_target"))
    return [
        line_panel(
            "Indicators over their targets",
            units.PercentUnit,
            "Of the pools whose policy follows indicators (rama, dynamic-quota): above 100 % the pool grows, below it shrinks.",
            Query(f"{where} / {target}", "{{region}} {{indicator}} on {{instance}}"),
        ),
        line_panel(
            "Overcommitment",
            "",
            "How many times what it has the node may be scheduled for.",
            Query(f"dioptase_overcommit_ratio{{{NODE_SELECTOR}}}", "{{resource}} on {{instance}}"),
        ),
        line_panel(
            "Answers to power alerts",
            "",
            "Reclaimed pods that have to leave, and watts to cap the node to.",
            Query(f"dioptase_power_evict_pods{{{NODE_SELECTOR}}}", "pods to leave {{instance}}"),
            Query(f"dioptase_power_cap_watts{{{NODE_SELECTOR}}}", "watts at most on {{instance}}"),
        ),
    ]
