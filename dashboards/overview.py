"""The first look, top to bottom as somebody on call asks: who is slow, who causes it, what did the system do, is it healthy."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.colocation import pools
from dashboards.decisions import rounds_by_trigger
from dashboards.health import limitations, overdue, snapshot_age, sources
from dashboards.panels import (
    BY_POD,
    NODE,
    ONLINE,
    POD,
    POD_NAME,
    RATE,
    RECLAIMED,
    TARGET,
    Board,
    Panel,
    Query,
    heat,
    lines,
    number,
    quantile,
    rate_by,
)

WAIT = "dioptase_cgroup_runq_wait_seconds"


def board() -> Board:
    return Board(
        "overview",
        "Dioptase overview",
        "Who waits for CPU, what is lent to batch work, what was decided and why.",
        ("namespace", "pod"),
        (
            ("At a glance", _glance()),
            ("Who waits", _waits()),
            ("Who uses the CPU", _use()),
            ("What is lent", _lent()),
            ("What was decided", _decided()),
            ("Is the agent healthy", _health()),
        ),
    )


def _glance() -> list[Panel]:
    own_quota = rate_by("dioptase_cgroup_blame_seconds_total", f'{ONLINE},cause="own_quota"')
    cut = f"{own_quota} / {rate_by(f'{WAIT}_sum', ONLINE)} > 0.5"
    busy = f'sum(rate(dioptase_node_cpu_seconds_total{{{NODE},mode!~"idle|iowait|steal"}}{RATE}))'
    return [
        number(
            "Worst online wait, p99",
            units.PercentUnit,
            f"max(({quantile(0.99, WAIT, ONLINE)} unless {cut}) / on (job, instance) group_left () {TARGET})",
            "Run-queue wait of the slowest online pod, as a share of its node's target. From half of the target on nothing "
            "more is lent; above it CPU is taken back. Without pods whose own quota makes more than half of their waits: "
            "the policy takes that out of them.",
            (0.5, 1),
        ),
        number(
            "Node use",
            units.PercentUnit,
            f"{busy} / sum(dioptase_node_cpus{{{NODE}}})",
            "Share of all CPUs that run something. Lending is there to raise it.",
        ),
        number("Lent", "cores", f"sum(dioptase_reclaim_lent_cores{{{NODE}}})", "What reclaimed pods may use now."),
        number(
            "Used by reclaimed pods",
            "cores",
            f"sum(rate(dioptase_cgroup_cpu_usage_seconds_total{{{RECLAIMED}}}{RATE}))",
            "What they do use. Well below what is lent: they have no more to do.",
        ),
        number(
            "Nodes that act",
            units.Short,
            f'sum(dioptase_act_mode{{{NODE},mode="on"}})',
            "Nodes whose agent writes. The others decide nothing, or only say what they would do.",
        ),
        overdue(),
    ]


def _waits() -> list[Panel]:
    latency = "dioptase_indicator_latency_seconds"
    return [
        heat(
            "Waits of online pods",
            WAIT,
            ONLINE,
            "Each column is a moment, each cell how many waits of that length ended.",
        ),
        heat(
            "Waits of reclaimed pods",
            WAIT,
            f'{POD},qos="reclaimed_cores"',
            "They are meant to wait: they run on what is left.",
        ),
        lines(
            "Run-queue wait, p99",
            units.Seconds,
            "99 of 100 waits were no longer. An online pod above its node's target is what the alert is about, unless its own "
            "quota makes most of its waits.",
            Query(quantile(0.99, WAIT, POD), POD_NAME),
            Query(TARGET, "target on {{instance}}"),
            log=True,
        ),
        lines(
            "Run-queue wait, median",
            units.Seconds,
            "Half of the waits were no longer.",
            Query(quantile(0.5, WAIT, POD), POD_NAME),
            log=True,
        ),
        lines(
            "Tasks waiting",
            units.Short,
            "Mean number of tasks that could run and did not: what a pod lacks in CPUs, whatever it uses.",
            Query(rate_by(f"{WAIT}_sum", POD), POD_NAME),
        ),
        lines(
            "Request latency that pods report, p99",
            units.Seconds,
            "The pods' own word, where they publish it: it should stay put while work is lent.",
            Query(quantile(0.99, latency, POD), POD_NAME),
        ),
    ]


def _use() -> list[Panel]:
    throttled = rate_by("dioptase_cgroup_cpu_throttled_periods_total", POD)
    periods = rate_by("dioptase_cgroup_cpu_periods_total", POD)
    stalled = f'dioptase_cgroup_pressure_seconds_total{{{POD},resource="cpu",kind="some"}}'
    return [
        lines(
            "CPU use by pod",
            "cores",
            "Cores in use, stacked.",
            Query(rate_by("dioptase_cgroup_cpu_usage_seconds_total", POD), POD_NAME),
            stacked=True,
        ),
        lines(
            "CPU use of the node by mode",
            "cores",
            "Steal is time that the hypervisor gave to somebody else.",
            Query(
                rate_by("dioptase_node_cpu_seconds_total", f'{NODE},mode!="idle"', "job, instance, mode"),
                "{{mode}} on {{instance}}",
            ),
            stacked=True,
        ),
        lines(
            "Periods throttled",
            units.PercentUnit,
            "Share of CFS periods in which a pod's own quota ran out. Lending does not cause this; a low limit does.",
            Query(f"{throttled} / {periods}", POD_NAME),
        ),
        lines(
            "Stalled on CPU (PSI)",
            units.PercentUnit,
            "Share of time in which some task waited for a CPU, in the container of the pod that stalled most.",
            Query(f"max by ({BY_POD}) (rate({stalled}{RATE}))", POD_NAME),
        ),
    ]


def _lent() -> list[Panel]:
    used = rate_by("dioptase_cgroup_cpu_usage_seconds_total", RECLAIMED, "job, instance")
    return [
        lines(
            "Lent, used, headroom, need",
            "cores",
            "What reclaimed pods may use, what they use, their headroom (CPU that can be promised to them in all, what they "
            "use now included), and what online pods need.",
            Query(f"dioptase_reclaim_lent_cores{{{NODE}}}", "lent on {{instance}}"),
            Query(used, "used by reclaimed pods on {{instance}}"),
            Query(f"dioptase_reclaim_headroom_cores{{{NODE}}}", "headroom on {{instance}}"),
            Query(f"dioptase_share_requirement_cores{{{NODE}}}", "needed by online pods on {{instance}}"),
        ),
        pools(),
    ]


def _decided() -> list[Panel]:
    changes = f'increase(dioptase_decisions_total{{{NODE},outcome!="unchanged"}}{RATE})'
    return [
        lines(
            "Decisions that did something, or failed to",
            units.Short,
            "By the rule that fired and what came of it; `dioptase explain` tells each with its numbers.",
            Query(f"sum by (job, instance, rule, outcome) ({changes})", "{{rule}}: {{outcome}} on {{instance}}"),
            bars=True,
        ),
        rounds_by_trigger(),
    ]


def _health() -> list[Panel]:
    return [
        sources(),
        lines(
            "Round and sources, duration",
            units.Seconds,
            "A round should stay far below its second.",
            Query(f"dioptase_round_duration_seconds{{{NODE}}}", "round on {{instance}}"),
            Query(f"dioptase_source_duration_seconds{{{NODE}}}", "{{source}} on {{instance}}"),
        ),
        snapshot_age(),
        lines(
            "What the agent costs",
            "cores",
            "CPU of the agent's own process.",
            Query(
                f"rate(process_cpu_seconds_total{{{NODE}}}{RATE}) and on (job, instance) dioptase_build_info",
                "{{instance}}",
            ),
        ),
        lines(
            "Memory of the agent",
            units.BytesIEC,
            "Resident memory of the agent's own process.",
            Query(
                f"process_resident_memory_bytes{{{NODE}}} and on (job, instance) dioptase_build_info", "{{instance}}"
            ),
        ),
        limitations(),
        lines(
            "Reports lost",
            units.Short,
            "1 where decisions do not reach the disk of the node, and exports that no OpenTelemetry collector took.",
            Query(f"1 - dioptase_journal_writable{{{NODE}}}", "journal on {{instance}}"),
            Query(f"increase(dioptase_otel_failures_total{{{NODE}}}{RATE})", "exports of {{instance}}"),
            Query(f"increase(dioptase_otel_dropped_spans_total{{{NODE}}}{RATE})", "spans of {{instance}}"),
        ),
    ]
