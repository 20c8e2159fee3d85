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
        "Waits for CPU, reclaimable CPU and its use by batch work, decisions and their reasons.",
        ("namespace", "pod"),
        (
            ("At a glance", _glance()),
            ("Waits", _runq_latency_row()),
            ("Use of the CPU", _use()),
            ("What is lent", _reclaimable_row()),
            ("What was decided", _decisions_row()),
            ("Is the agent healthy", _health()),
        ),
    )


def _glance() -> list[Panel]:
    own_quota = rate_by("dioptase_cgroup_blame_seconds_total", f'{ONLINE_SELECTOR},cause="own_quota"')
    cut = f"{own_quota} / {rate_by(f'{RUNQ_LATENCY}_sum', ONLINE_SELECTOR)} > 0.5"
    busy = f'sum(rate(dioptase_node_cpu_seconds_total{{{NODE_SELECTOR},mode!~"idle|iowait|steal"}}{RATE_INTERVAL}))'
    return [
        stat_panel(
            "Worst online wait, p99",
            units.PercentUnit,
            f"max(({quantile_by(0.99, RUNQ_LATENCY, ONLINE_SELECTOR)} unless {cut}) / on (job, instance) "
            f"group_left () {LATENCY_TARGET})",
            "Run-queue wait of the slowest online pod, as a share of its node's target. From half of the target on nothing "
            "more is lent; above it CPU is taken back. Without pods whose own quota makes more than half of their waits: "
            "the policy takes that out of them.",
            (0.5, 1),
        ),
        stat_panel(
            "Node use",
            units.PercentUnit,
            f"{busy} / sum(dioptase_node_cpus{{{NODE_SELECTOR}}})",
            "Share of all CPUs that run something. Lending is there to raise it.",
        ),
        stat_panel(
            "Lent", "cores", f"sum(dioptase_reclaim_lent_cores{{{NODE_SELECTOR}}})", "What reclaimed pods may use now."
        ),
        stat_panel(
            "Used by reclaimed pods",
            "cores",
            f"sum(rate(dioptase_cgroup_cpu_usage_seconds_total{{{RECLAIMED_SELECTOR}}}{RATE_INTERVAL}))",
            "What they do use. Well below what is lent: they have no more to do.",
        ),
        stat_panel(
            "Nodes that act",
            units.Short,
            f'sum(dioptase_act_mode{{{NODE_SELECTOR},mode="on"}})',
            "Nodes whose agent writes. The others decide nothing, or only say what they would do.",
        ),
        overdue_cycles(),
    ]


def _runq_latency_row() -> list[Panel]:
    latency = "dioptase_indicator_latency_seconds"
    return [
        heatmap_panel(
            "Waits of online pods",
            RUNQ_LATENCY,
            ONLINE_SELECTOR,
            "Each column is a moment, each cell how many waits of that length ended.",
        ),
        heatmap_panel(
            "Waits of reclaimed pods",
            RUNQ_LATENCY,
            f'{POD_SELECTOR},qos="reclaimed_cores"',
            "They are meant to wait: they run on what is left.",
        ),
        line_panel(
            "Run-queue wait, p99",
            units.Seconds,
            "99 of 100 waits were no longer. An online pod above its node's target is what the alert is about, unless its own "
            "quota makes most of its waits.",
            Query(quantile_by(0.99, RUNQ_LATENCY, POD_SELECTOR), POD_LEGEND),
            Query(LATENCY_TARGET, "target on {{instance}}"),
            log=True,
        ),
        line_panel(
            "Run-queue wait, median",
            units.Seconds,
            "Half of the waits were no longer.",
            Query(quantile_by(0.5, RUNQ_LATENCY, POD_SELECTOR), POD_LEGEND),
            log=True,
        ),
        line_panel(
            "Tasks waiting",
            units.Short,
            "Mean number of tasks that could run and did not: what a pod lacks in CPUs, whatever it uses.",
            Query(rate_by(f"{RUNQ_LATENCY}_sum", POD_SELECTOR), POD_LEGEND),
        ),
        line_panel(
            "Request latency that pods report, p99",
            units.Seconds,
            "The pods' own word, where they publish it: it should stay put while work is lent.",
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
            "Steal is time that the hypervisor gave to other guests.",
            Query(
                rate_by("dioptase_node_cpu_seconds_total", f'{NODE_SELECTOR},mode!="idle"', "job, instance, mode"),
                "{{mode}} on {{instance}}",
            ),
            stacked=True,
        ),
        line_panel(
            "Periods throttled",
            units.PercentUnit,
            "Share of CFS periods in which a pod's own quota ran out. Lending does not cause this; a low limit does.",
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
            "Lent, used, headroom, need",
            "cores",
            "What reclaimed pods may use, what they use, their headroom (CPU for all of them together, what they "
            "use now included), and what online pods need.",
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
            "Decisions that did something, or failed to",
            units.Short,
            "By the rule that fired and what came of it; `dioptase explain` tells each with its numbers.",
            Query(f"sum by (job, instance, rule, outcome) ({changes})", "{{rule}}: {{outcome}} on {{instance}}"),
            bars=True,
        ),
        cycles_by_trigger(),
    ]


def _health() -> list[Panel]:
    return [
        source_states(),
        line_panel(
            "Round and sources, duration",
            units.Seconds,
            "A round should stay far below its second.",
            Query(f"dioptase_round_duration_seconds{{{NODE_SELECTOR}}}", "round on {{instance}}"),
            Query(f"dioptase_source_duration_seconds{{{NODE_SELECTOR}}}", "{{source}} on {{instance}}"),
        ),
        snapshot_age(),
        line_panel(
            "What the agent costs",
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
            "Reports lost",
            units.Short,
            "1 where decisions do not reach the disk of the node, and exports that no OpenTelemetry collector took.",
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
