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
        (
            "Reclaimable CPU and memory, their use by reclaimed pods, the harm to online pods, and the decisions of the "
            "shadow policy."
        ),
        ("namespace", "pod"),
        (
            ("Summary", _glance()),
            ("Reclaimable CPU", _reclaimable()),
            ("Regions and pool sizes", _regions()),
            ("Memory", _memory()),
            ("Harm to online pods", _harm()),
            ("Accuracy of forecasts", _forecasts()),
            ("Shadow policy", _shadow()),
            ("Indicators, overcommitment and power", _steering()),
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
        stat_panel(
            "Node use", units.PercentUnit, f"{busy} / {cpus}", "Share of the CPU time of all CPUs that is not idle."
        ),
        stat_panel(
            "Of which reclaimed pods",
            units.PercentUnit,
            f"{used} / {cpus}",
            "Share of the CPU time of all CPUs that reclaimed pods use: the gain of colocation.",
        ),
        stat_panel(
            "Reclaimable CPU",
            "cores",
            f"sum(dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}})",
            "CPU that reclaimed pods may use now.",
        ),
        stat_panel(
            "Headroom",
            "cores",
            f"sum(dioptase_reclaim_headroom_cores{{{NODE_SELECTOR}}})",
            "CPU for all reclaimed pods together, their current use included.",
        ),
        stat_panel(
            "Online pods' waits for reclaimed pods",
            "s/s",
            f"sum({interference('job, instance')}) or vector(0)",
            (
                "Seconds per second that tasks of online pods waited while a reclaimed cgroup had their CPU. With cpu.idle "
                "only the time of the context switch remains."
            ),
        ),
        stat_panel(
            "Longest online run-queue latency, p99",
            units.PercentUnit,
            f"max({quantile_by(0.99, RUNQ_LATENCY, ONLINE_SELECTOR)} / on (job, instance) group_left () {LATENCY_TARGET})",
            "Run-queue latency of the slowest online pod, relative to its node's target.",
            (0.5, 1),
        ),
    ]


def _reclaimable() -> list[Panel]:
    return [
        line_panel(
            "Reclaimable CPU and its use",
            "cores",
            (
                "Use far below the reclaimable CPU: the reclaimed pods have no more work. Use close to it: they could use "
                "more."
            ),
            Query(f"dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}}", "lent on {{instance}}"),
            Query(rate_by(USED, RECLAIMED_SELECTOR, "job, instance"), "used on {{instance}}"),
        ),
        line_panel(
            "Headroom and estimated need",
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
            (
                "Headroom of this cycle, and the advertised one. If they differ for long, the reporter's steps are too small, "
                "or inputs are missing."
            ),
            Query(
                f"dioptase_reclaim_numa_headroom_cores{{{NODE_SELECTOR}}}", "node {{numa_node}} of {{instance}}, found"
            ),
            Query(
                f"dioptase_reclaim_numa_advertised_cores{{{NODE_SELECTOR}}}",
                "node {{numa_node}} of {{instance}}, advertised",
            ),
        ),
        line_panel(
            "CPU use of reclaimed pods",
            "cores",
            "CPU use by reclaimed pod.",
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
        "Pools overlap if priority separates them instead of cpusets.",
        Query(f"dioptase_pool_cpus{{{NODE_SELECTOR}}}", "{{pool}} on {{instance}}"),
    )


def _regions() -> list[Panel]:
    return [
        line_panel(
            "Sizes of the pools",
            units.Short,
            "Number of CPUs of each pool by NUMA node. QRM selects the CPUs.",
            Query(f"dioptase_pool_size_cpus{{{NODE_SELECTOR}}}", "{{pool}} {{numa_node}} on {{instance}}"),
            stacked=True,
        ),
        line_panel(
            "Requirements of the regions",
            "cores",
            (
                "Requirement that a policy computed for a region of online pods, by Katalyst's control knob. `dioptase "
                "explain POOL` shows the formula."
            ),
            Query(
                f"dioptase_region_control_cores{{{NODE_SELECTOR}}}",
                "{{region}} by {{policy}}: {{control}} on {{instance}}",
            ),
        ),
        line_panel(
            "Pods without the requested CPUs or network bandwidth",
            units.Short,
            "They run on the CPUs of the fallback pool. `dioptase explain POD` shows the reason.",
            Query(f"dioptase_rejected_pods{{{NODE_SELECTOR}}}", "{{rule}} on {{instance}}"),
            stacked=True,
        ),
    ]


def _memory() -> list[Panel]:
    return [
        line_panel(
            "Memory headroom",
            units.BytesIEC,
            "For all reclaimed pods together, including their current use; compared with a stock memory advisor.",
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
            "Only if the use by NUMA node is known.",
            Query(
                f"dioptase_reclaim_numa_memory_headroom_bytes{{{NODE_SELECTOR}}}",
                "NUMA node {{numa_node}} of {{instance}}",
            ),
            stacked=True,
        ),
        line_panel(
            "Memory below twice the critical watermark",
            units.BytesIEC,
            (
                "Above 0, memory of cgroups is tuned; below the critical watermark itself, cache is dropped. By NUMA node "
                "only."
            ),
            Query(f"dioptase_memory_shortfall_bytes{{{NODE_SELECTOR}}}", "{{numa_node}} of {{instance}}"),
        ),
        line_panel(
            "Memory pressure state",
            units.Short,
            "1: the current state, one of tune_memcg, drop_cache and unknown (nothing is done). No line: no_risk.",
            Query(
                f'dioptase_memory_condition{{{NODE_SELECTOR},state!="no_risk"}} == 1',
                "{{state}} {{numa_node}} on {{instance}}",
            ),
        ),
    ]


def _harm() -> list[Panel]:
    return [
        line_panel(
            "Online pods' waits for reclaimed pods, by pod",
            "s/s",
            (
                "Time that each online pod waited while a reclaimed cgroup had its CPU. Waits for other pods and for its own "
                "tasks are on the workload dashboard; they do not reduce the reclaimable CPU."
            ),
            Query(interference(BY_POD), POD_LEGEND),
        ),
        line_panel(
            "Share of online pods' waits caused by reclaimed pods",
            units.PercentUnit,
            (
                "Below a tenth (leastBlameRatio) the reclaimable CPU is not reduced, because other aggressors caused the "
                "waits."
            ),
            Query(
                f"{interference('job, instance')} / on (job, instance) {rate_by(BLAME, ONLINE_SELECTOR, 'job, instance')}",
                "{{instance}}",
            ),
        ),
        line_panel(
            "Online run-queue latency, p99",
            units.Seconds,
            "Compared with the target of policy latency.",
            Query(quantile_by(0.99, RUNQ_LATENCY, ONLINE_SELECTOR), POD_LEGEND),
            Query(LATENCY_TARGET, "target on {{instance}}"),
            log=True,
        ),
        line_panel(
            "Request latency reported by pods, p99",
            units.Seconds,
            "As published by the pods themselves. It should not rise while reclaimed pods run.",
            Query(quantile_by(0.99, "dioptase_indicator_latency_seconds", POD_SELECTOR), POD_LEGEND),
        ),
    ]


def _forecasts() -> list[Panel]:
    return [
        line_panel(
            "CPU: use and forecast",
            "cores",
            (
                "CPU use of everything but reclaimed pods. It should stay below the forecast; the difference is CPU that "
                "cannot be reclaimed."
            ),
            Query(f"dioptase_forecast_cpu_used_cores{{{NODE_SELECTOR}}}", "used on {{instance}}"),
            Query(f"dioptase_forecast_cpu_peak_cores{{{NODE_SELECTOR}}}", "forecast on {{instance}}"),
        ),
        line_panel(
            "Memory: use and forecast",
            units.BytesIEC,
            "The same for memory that cannot be reclaimed without swapping.",
            Query(f"dioptase_forecast_memory_used_bytes{{{NODE_SELECTOR}}}", "used on {{instance}}"),
            Query(f"dioptase_forecast_memory_peak_bytes{{{NODE_SELECTOR}}}", "forecast on {{instance}}"),
        ),
        line_panel(
            "Missed forecasts, last day",
            units.PercentUnit,
            (
                "Compared with the limit in the settings. It exceeds the limit for some time after the load changes; if it "
                "stays above, see the runbook."
            ),
            Query(f"dioptase_forecast_miss_ratio{{{NODE_SELECTOR}}}", "{{resource}} on {{instance}}"),
            Query(f"dioptase_forecast_big_miss_ratio{{{NODE_SELECTOR}}}", "{{resource}} by a tenth of {{instance}}"),
            Query(f"dioptase_forecast_promised_miss_ratio{{{NODE_SELECTOR}}}", "{{resource}} allowed on {{instance}}"),
        ),
        line_panel(
            "CPU: forecast error",
            "cores",
            (
                "Last day: mean and largest excess of the peak over the forecast, and mean distance of forecasts above the "
                "peak."
            ),
            Query(f"dioptase_forecast_cpu_shortfall_mean_cores{{{NODE_SELECTOR}}}", "missed by on {{instance}}"),
            Query(f"dioptase_forecast_cpu_shortfall_max_cores{{{NODE_SELECTOR}}}", "at worst on {{instance}}"),
            Query(f"dioptase_forecast_cpu_bias_cores{{{NODE_SELECTOR}}}", "above the peak on {{instance}}"),
        ),
    ]


def _shadow() -> list[Panel]:
    return [
        line_panel(
            "Reclaimable CPU, of the policy and of the shadow policy",
            "cores",
            (
                "The second policy of the settings evaluates the same snapshots without writing. Replay a recording to see "
                "the effect."
            ),
            Query(f"dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}}", "lent on {{instance}}"),
            Query(f"dioptase_shadow_lent_cores{{{NODE_SELECTOR}}}", "{{policy}} would lend on {{instance}}"),
        ),
        line_panel(
            "Headroom, of the policy and of the shadow policy",
            "cores",
            "Of two policies with equally few misses, the one with the larger headroom is better.",
            Query(f"dioptase_reclaim_headroom_cores{{{NODE_SELECTOR}}}", "headroom on {{instance}}"),
            Query(f"dioptase_shadow_headroom_cores{{{NODE_SELECTOR}}}", "{{policy}} would promise on {{instance}}"),
        ),
    ]


def _steering() -> list[Panel]:
    where, target = (f"dioptase_region_indicator{end}{{{NODE_SELECTOR}}}" for end in ("", "_target"))
    return [
        line_panel(
            "Indicators relative to their targets",
            units.PercentUnit,
            (
                "Of pools whose policy regulates by indicators (rama, dynamic-quota). Above 100 % the pool grows, below it "
                "shrinks."
            ),
            Query(f"{where} / {target}", "{{region}} {{indicator}} on {{instance}}"),
        ),
        line_panel(
            "Overcommitment",
            "",
            "Ratio of schedulable to physical resources.",
            Query(f"dioptase_overcommit_ratio{{{NODE_SELECTOR}}}", "{{resource}} on {{instance}}"),
        ),
        line_panel(
            "Responses to power alerts",
            "",
            "Reclaimed pods to evict, and the power cap of the node in watts.",
            Query(f"dioptase_power_evict_pods{{{NODE_SELECTOR}}}", "pods to leave {{instance}}"),
            Query(f"dioptase_power_cap_watts{{{NODE_SELECTOR}}}", "watts at most on {{instance}}"),
        ),
    ]
