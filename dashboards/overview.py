"""The overview dashboard for the on-call engineer: latency, its cause, the system's decisions, and its health."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.agent import limitations, overdue_cycles, snapshot_age, source_states
from dashboards.colocation import pools
from dashboards.decisions import cycles_by_trigger
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
    heatmap_panel,
    line_panel,
    quantile_by,
    rate_by,
    stat_panel,
)

RUNQ_LATENCY = "dioptase_cgroup_runq_wait_seconds"


def board() -> Board:
    return Board(
        "overview",
        "Dioptase overview",
        "Run-queue latency, reclaimable CPU and its use by reclaimed pods, decisions and their reasons.",
        ("namespace", "pod"),
        (
            ("Summary", _glance()),
            ("Run-queue latency", _runq_latency_row()),
            ("CPU use", _use()),
            ("Reclaimable CPU", _reclaimable_row()),
            ("Decisions", _decisions_row()),
            ("Agent health", _health()),
        ),
    )


def _glance() -> list[Panel]:
    own_quota = rate_by("dioptase_cgroup_blame_seconds_total", f'{ONLINE_SELECTOR},cause="own_quota"')
    cut = f"{own_quota} / {rate_by(f'{RUNQ_LATENCY}_sum', ONLINE_SELECTOR)} > 0.5"
    busy = f'sum(rate(dioptase_node_cpu_seconds_total{{{NODE_SELECTOR},mode!~"idle|iowait|steal"}}{RATE_INTERVAL}))'
    return [
        stat_panel(
            "Longest online run-queue latency, p99",
            units.PercentUnit,
            f"max(({quantile_by(0.99, RUNQ_LATENCY, ONLINE_SELECTOR)} unless {cut}) / on (job, instance) "
            f"group_left () {LATENCY_TARGET})",
            (
                "Run-queue latency of the slowest online pod, relative to its node's target. From 50 % on the reclaimable CPU "
                "does not grow; above 100 % it shrinks. Pods whose own quota causes more than half of their waits are left "
                "out."
            ),
            (0.5, 1),
        ),
        stat_panel(
            "Node use",
            units.PercentUnit,
            f"{busy} / sum(dioptase_node_cpus{{{NODE_SELECTOR}}})",
            "Share of the CPU time of all CPUs that is not idle. Colocation should raise it.",
        ),
        stat_panel(
            "Reclaimable CPU",
            "cores",
            f"sum(dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}})",
            "CPU that reclaimed pods may use now.",
        ),
        stat_panel(
            "Used by reclaimed pods",
            "cores",
            f"sum(rate(dioptase_cgroup_cpu_usage_seconds_total{{{RECLAIMED_SELECTOR}}}{RATE_INTERVAL}))",
            "CPU use of reclaimed pods. Far below the reclaimable CPU: they have no more work.",
        ),
        stat_panel(
            "Agents with --act on",
            units.Short,
            f'sum(dioptase_act_mode{{{NODE_SELECTOR},mode="on"}})',
            "Agents that write. The others measure only, or run dry.",
        ),
        overdue_cycles(),
    ]


def _runq_latency_row() -> list[Panel]:
    latency = "dioptase_indicator_latency_seconds"
    return [
        heatmap_panel(
            "Run-queue latency of online pods",
            RUNQ_LATENCY,
            ONLINE_SELECTOR,
            "Number of waits by duration, over time.",
        ),
        heatmap_panel(
            "Run-queue latency of reclaimed pods",
            RUNQ_LATENCY,
            f'{POD_SELECTOR},qos="reclaimed_cores"',
            "Reclaimed pods are expected to wait: they get the CPU that online pods leave.",
        ),
        line_panel(
            "Run-queue latency, p99",
            units.Seconds,
            (
                "99 of 100 waits were shorter. The alert fires for an online pod above its node's target, unless its own "
                "quota causes most of its waits."
            ),
            Query(quantile_by(0.99, RUNQ_LATENCY, POD_SELECTOR), POD_LEGEND),
            Query(LATENCY_TARGET, "target on {{instance}}"),
            log=True,
        ),
        line_panel(
            "Run-queue latency, median",
            units.Seconds,
            "Half of the waits were shorter.",
            Query(quantile_by(0.5, RUNQ_LATENCY, POD_SELECTOR), POD_LEGEND),
            log=True,
        ),
        line_panel(
            "Tasks waiting",
            units.Short,
            "Mean number of runnable tasks without a CPU: the CPUs that a pod lacks.",
            Query(rate_by(f"{RUNQ_LATENCY}_sum", POD_SELECTOR), POD_LEGEND),
        ),
        line_panel(
            "Request latency reported by pods, p99",
            units.Seconds,
            "As published by the pods themselves. It should not rise while reclaimed pods run.",
            Query(quantile_by(0.99, latency, POD_SELECTOR), POD_LEGEND),
        ),
    ]


def _use() -> list[Panel]:
    throttled = rate_by("dioptase_cgroup_cpu_throttled_periods_total", POD_SELECTOR)
    periods = rate_by("dioptase_cgroup_cpu_periods_total", POD_SELECTOR)
    stalled = f'dioptase_cgroup_pressure_seconds_total{{{POD_SELECTOR},resource="cpu",kind="some"}}'
    return [
        line_panel(
            "CPU use by pod",
            "cores",
            "Cores in use, stacked.",
            Query(rate_by("dioptase_cgroup_cpu_usage_seconds_total", POD_SELECTOR), POD_LEGEND),
            stacked=True,
        ),
        line_panel(
            "CPU use of the node by mode",
            "cores",
            "Steal: time in which the hypervisor ran other guests.",
            Query(
                rate_by("dioptase_node_cpu_seconds_total", f'{NODE_SELECTOR},mode!="idle"', "job, instance, mode"),
                "{{mode}} on {{instance}}",
            ),
            stacked=True,
        ),
        line_panel(
            "Throttled periods",
            units.PercentUnit,
            "Share of CFS periods in which a pod's own quota ran out. The cause is its limit, not reclaimed pods.",
            Query(f"{throttled} / {periods}", POD_LEGEND),
        ),
        line_panel(
            "Stalled on CPU (PSI)",
            units.PercentUnit,
            "Share of time in which some task waited for a CPU, in the container of the pod that stalled most.",
            Query(f"max by ({BY_POD}) (rate({stalled}{RATE_INTERVAL}))", POD_LEGEND),
        ),
    ]


def _reclaimable_row() -> list[Panel]:
    used = rate_by("dioptase_cgroup_cpu_usage_seconds_total", RECLAIMED_SELECTOR, "job, instance")
    return [
        line_panel(
            "Reclaimable CPU, its use, headroom and need",
            "cores",
            (
                "CPU that reclaimed pods may use, their use, their headroom (including their use), and the estimated need of "
                "online pods."
            ),
            Query(f"dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}}", "lent on {{instance}}"),
            Query(used, "used by reclaimed pods on {{instance}}"),
            Query(f"dioptase_reclaim_headroom_cores{{{NODE_SELECTOR}}}", "headroom on {{instance}}"),
            Query(f"dioptase_share_requirement_cores{{{NODE_SELECTOR}}}", "needed by online pods on {{instance}}"),
        ),
        pools(),
    ]


def _decisions_row() -> list[Panel]:
    changes = f'increase(dioptase_decisions_total{{{NODE_SELECTOR},outcome!="unchanged"}}{RATE_INTERVAL})'
    return [
        line_panel(
            "Decisions written or failed",
            units.Short,
            "By rule and outcome. `dioptase explain` shows each with its numbers.",
            Query(f"sum by (job, instance, rule, outcome) ({changes})", "{{rule}}: {{outcome}} on {{instance}}"),
            bars=True,
        ),
        cycles_by_trigger(),
    ]


def _health() -> list[Panel]:
    return [
        source_states(),
        line_panel(
            "Cycle and sources, duration",
            units.Seconds,
            "A cycle should take far less than its interval of a second.",
            Query(f"dioptase_round_duration_seconds{{{NODE_SELECTOR}}}", "round on {{instance}}"),
            Query(f"dioptase_source_duration_seconds{{{NODE_SELECTOR}}}", "{{source}} on {{instance}}"),
        ),
        snapshot_age(),
        line_panel(
            "CPU of the agent",
            "cores",
            "CPU of the agent's own process.",
            Query(
                f"rate(process_cpu_seconds_total{{{NODE_SELECTOR}}}{RATE_INTERVAL}) and on (job, instance) dioptase_build_info",
                "{{instance}}",
            ),
        ),
        line_panel(
            "Memory of the agent",
            units.BytesIEC,
            "Resident memory of the agent's own process.",
            Query(
                f"process_resident_memory_bytes{{{NODE_SELECTOR}}} and on (job, instance) dioptase_build_info",
                "{{instance}}",
            ),
        ),
        limitations(),
        line_panel(
            "Lost reports",
            units.Short,
            "1: decisions cannot be written to the node's disk. Also exports that failed at the OpenTelemetry collector.",
            Query(f"1 - dioptase_journal_writable{{{NODE_SELECTOR}}}", "journal on {{instance}}"),
            Query(
                f"increase(dioptase_otel_failures_total{{{NODE_SELECTOR}}}{RATE_INTERVAL})", "exports of {{instance}}"
            ),
            Query(
                f"increase(dioptase_otel_dropped_spans_total{{{NODE_SELECTOR}}}{RATE_INTERVAL})",
                "spans of {{instance}}",
            ),
        ),
    ]
