"""The workload dashboard: run-queue latency by cgroup and aggressor, throttling, and thread states."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.panels import (
    BY_CGROUP,
    CGROUP_LEGEND,
    CGROUP_SELECTOR,
    Board,
    Panel,
    Query,
    bar_gauge_panel,
    heatmap_panel,
    line_panel,
    quantile_by,
    rate_by,
    stat_panel,
    top_series,
)

RUNQ_LATENCY = "dioptase_cgroup_runq_wait_seconds"
BLAME = "dioptase_cgroup_blame_seconds_total"
THROTTLE = "dioptase_cgroup_throttle_seconds"
NEIGHBOURS = f'{CGROUP_SELECTOR},cause="neighbour"'
OWN_QUOTA = f'{CGROUP_SELECTOR},cause="own_quota"'
NO_NEIGHBOURS = f'{CGROUP_SELECTOR},cause!="neighbour"'
RUNQ_LATENCY_SUM = rate_by(f"{RUNQ_LATENCY}_sum", CGROUP_SELECTOR, "job, instance")
OTHER_CAUSES = rate_by(BLAME, NO_NEIGHBOURS, "job, instance")
ATTRIBUTED = f"({RUNQ_LATENCY_SUM} and {OTHER_CAUSES})"
"""All waits of a node with blame data. More than the sum of the parts, which exist for the worst aggressors only."""
BY_NEIGHBOURS = f"clamp_min({RUNQ_LATENCY_SUM} - {OTHER_CAUSES}, 0)"
"""Of all neighbours, named or not; waits and parts are read one after the other, which can leave a little less than nothing."""
MS_PER_S = "ms/s"
"""Milliseconds of wait per second: 1,000 is one task that waits all the time."""


def board() -> Board:
    return Board(
        "workload",
        "Dioptase: run-queue interference",
        (
            "Cgroups that wait for a CPU, the cgroups that had it meanwhile, and throttling by their own quotas. Needs no "
            "listed pods."
        ),
        ("cgroup",),
        (
            ("Summary", _glance()),
            ("Run-queue latency", _waits()),
            ("Causes of run-queue latency", _blame()),
            ("Throttled by their own quota", _throttled()),
            ("Threads and load", _threads()),
            ("Disk and network", _traffic()),
        ),
    )


def _per_ms(expr: str) -> str:
    return f"1000 * {expr}"


def _glance() -> list[Panel]:
    waiting = f"sum({rate_by(f'{RUNQ_LATENCY}_sum', CGROUP_SELECTOR)})"
    return [
        stat_panel(
            "Tasks waiting", "tasks", waiting, "Mean number of runnable tasks without a CPU, of all selected cgroups."
        ),
        stat_panel(
            "Longest run-queue latency, p99",
            units.Seconds,
            f"max({quantile_by(0.99, RUNQ_LATENCY, CGROUP_SELECTOR, BY_CGROUP)})",
            "Of the cgroup that waits longest. Most services are affected from 10 ms on.",
        ),
        stat_panel(
            "Caused by other cgroups",
            units.PercentUnit,
            f"sum({BY_NEIGHBOURS}) / sum({ATTRIBUTED})",
            "Share of the waits in which another cgroup had the CPU. Moving or limiting that cgroup would remove them.",
        ),
        stat_panel(
            "Caused by own quotas",
            units.PercentUnit,
            f"sum({rate_by(BLAME, OWN_QUOTA)}) / sum({ATTRIBUTED})",
            "Share of the waits that the cgroups' own quotas cause. A higher limit would remove them.",
        ),
        stat_panel(
            "Longest throttle, p99",
            units.Seconds,
            f"max({quantile_by(0.99, THROTTLE, CGROUP_SELECTOR, BY_CGROUP)})",
            "Time that a cgroup is stopped once its quota has run out.",
        ),
        stat_panel(
            "Stuck threads",
            units.Short,
            f'sum(dioptase_cgroup_threads_by_state{{{CGROUP_SELECTOR},state="uninterruptible"}})',
            "Uninterruptible threads that do not wait for a disk, but for locks, memory or a network file system.",
        ),
    ]


def _waits() -> list[Panel]:
    return [
        heatmap_panel(
            "Run-queue latency of the selected cgroups",
            RUNQ_LATENCY,
            CGROUP_SELECTOR,
            "Number of waits by duration, over time.",
        ),
        bar_gauge_panel(
            "Tasks waiting, by cgroup",
            "tasks",
            "Mean number of runnable tasks without a CPU: the CPUs that a cgroup lacks.",
            Query(top_series(rate_by(f"{RUNQ_LATENCY}_sum", CGROUP_SELECTOR, BY_CGROUP)), CGROUP_LEGEND),
        ),
        line_panel(
            "Run-queue latency, p99",
            units.Seconds,
            "99 of 100 waits were shorter. The twelve longest.",
            Query(top_series(quantile_by(0.99, RUNQ_LATENCY, CGROUP_SELECTOR, BY_CGROUP)), CGROUP_LEGEND),
            log=True,
        ),
        line_panel(
            "Run-queue latency, median",
            units.Seconds,
            "Half of the waits were shorter. The twelve longest.",
            Query(top_series(quantile_by(0.5, RUNQ_LATENCY, CGROUP_SELECTOR, BY_CGROUP)), CGROUP_LEGEND),
            log=True,
        ),
    ]


def _blame() -> list[Panel]:
    pairs = rate_by(BLAME, NEIGHBOURS, "job, instance, cgroup, culprit")
    return [
        bar_gauge_panel(
            "Pairs with the longest waits",
            MS_PER_S,
            "Tasks of the first cgroup were runnable while tasks of the second ran.",
            Query(top_series(_per_ms(pairs)), "{{cgroup}} waits for {{culprit}} on {{instance}}"),
        ),
        bar_gauge_panel(
            "Aggressors with the longest waits",
            MS_PER_S,
            (
                "Waits of other cgroups, if this one is among their 16 largest aggressors. An aggressor may simply have the "
                "most work."
            ),
            Query(
                top_series(_per_ms(rate_by(BLAME, NEIGHBOURS, "job, instance, culprit"))), "{{culprit}} on {{instance}}"
            ),
        ),
        line_panel(
            "Waits by cause",
            MS_PER_S,
            (
                "neighbour: another cgroup ran. self: its own tasks ran. own_quota: its quota had run out. higher_class: "
                "real-time tasks ran. other: the CPU was leaving idle, or the cgroup was removed."
            ),
            Query(_per_ms(BY_NEIGHBOURS), "neighbour on {{instance}}"),
            Query(_per_ms(rate_by(BLAME, NO_NEIGHBOURS, "job, instance, cause")), "{{cause}} on {{instance}}"),
            stacked=True,
        ),
        line_panel(
            "Pairs with the longest waits, over time",
            MS_PER_S,
            "The twelve pairs with the longest waits.",
            Query(top_series(_per_ms(pairs)), "{{cgroup}} waits for {{culprit}} on {{instance}}"),
        ),
    ]


def _throttled() -> list[Panel]:
    throttled = rate_by("dioptase_cgroup_cpu_throttled_periods_total", CGROUP_SELECTOR, BY_CGROUP)
    periods = rate_by("dioptase_cgroup_cpu_periods_total", CGROUP_SELECTOR, BY_CGROUP)
    used = rate_by("dioptase_cgroup_cpu_usage_seconds_total", CGROUP_SELECTOR, BY_CGROUP)
    return [
        line_panel(
            "Throttled periods",
            units.PercentUnit,
            "Share of CFS periods in which the cgroup's own quota ran out. A higher limit ends it.",
            Query(top_series(f"{throttled} / {periods}"), CGROUP_LEGEND),
        ),
        line_panel(
            "Duration of throttles, p99",
            units.Seconds,
            "A few long throttles harm a service more than many short ones: a request waits that long.",
            Query(top_series(quantile_by(0.99, THROTTLE, CGROUP_SELECTOR, BY_CGROUP)), CGROUP_LEGEND),
            log=True,
        ),
        line_panel(
            "CPU use against the limit",
            units.PercentUnit,
            "CPU use relative to the quota. Throttled far below 100 %: bursts exceed the quota, not the mean.",
            Query(
                top_series(
                    f"{used} / on ({BY_CGROUP}) sum by ({BY_CGROUP}) (dioptase_cgroup_cpu_limit_cores{{{CGROUP_SELECTOR}}})"
                ),
                CGROUP_LEGEND,
            ),
        ),
        line_panel(
            "CPU use by cgroup",
            "cores",
            "The twelve with the highest use, which includes that of the cgroups below.",
            Query(top_series(used), CGROUP_LEGEND),
        ),
    ]


def _threads() -> list[Panel]:
    states = "dioptase_cgroup_threads_by_state"
    stalled = f'{CGROUP_SELECTOR},resource="cpu",kind="some"'
    return [
        line_panel(
            "Threads by state",
            units.Short,
            "Of all selected cgroups, without sleeping threads.",
            Query(
                f'sum by (job, instance, state) ({states}{{{CGROUP_SELECTOR},state!="sleeping"}})',
                "{{state}} on {{instance}}",
            ),
            stacked=True,
        ),
        line_panel(
            "Runnable threads",
            units.Short,
            "If it stays above the cgroup's CPUs, its threads wait for each other.",
            Query(top_series(f'sum by ({BY_CGROUP}) ({states}{{{CGROUP_SELECTOR},state="runnable"}})'), CGROUP_LEGEND),
        ),
        line_panel(
            "Load of cgroups, 1 minute",
            units.Short,
            "Runnable and uninterruptible threads, averaged as the kernel's load average.",
            Query(
                top_series(f'sum by ({BY_CGROUP}) (dioptase_cgroup_load{{{CGROUP_SELECTOR},period="1m"}})'),
                CGROUP_LEGEND,
            ),
        ),
        line_panel(
            "Stalled on CPU (PSI)",
            units.PercentUnit,
            "Share of time in which some task of the cgroup waited for a CPU.",
            Query(top_series(rate_by("dioptase_cgroup_pressure_seconds_total", stalled, BY_CGROUP)), CGROUP_LEGEND),
        ),
    ]


def _traffic() -> list[Panel]:
    block = "dioptase_cgroup_block_io_seconds"
    return [
        line_panel(
            "Disk requests, p99",
            units.Seconds,
            "From issue to completion, by device.",
            Query(
                top_series(quantile_by(0.99, block, CGROUP_SELECTOR, "job, instance, cgroup, device")),
                "{{cgroup}}: {{device}} on {{instance}}",
            ),
            log=True,
        ),
        line_panel(
            "Disk bytes",
            units.BytesPerSecondSI,
            "Read and written. This traffic slows other cgroups on the same disk.",
            Query(
                top_series(
                    rate_by(
                        "dioptase_cgroup_block_io_request_bytes_total",
                        CGROUP_SELECTOR,
                        "job, instance, cgroup, operation",
                    )
                ),
                "{{cgroup}}: {{operation}} on {{instance}}",
            ),
        ),
        line_panel(
            "Network bytes",
            units.BytesPerSecondSI,
            "Payload of TCP and UDP sockets.",
            Query(
                top_series(
                    rate_by("dioptase_cgroup_network_bytes_total", CGROUP_SELECTOR, "job, instance, cgroup, direction")
                ),
                "{{cgroup}}: {{direction}} on {{instance}}",
            ),
        ),
        line_panel(
            "TCP retransmits",
            "segments/s",
            "Packet loss or a slow peer. Each retransmit delays a request by at least 200 ms.",
            Query(
                top_series(rate_by("dioptase_cgroup_network_retransmits_total", CGROUP_SELECTOR, BY_CGROUP)),
                CGROUP_LEGEND,
            ),
        ),
    ]
