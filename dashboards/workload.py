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
        "Which cgroups wait for a CPU, which ones held it meanwhile, and the effect of their own quotas; "
        "with or without listed pods.",
        ("cgroup",),
        (
            ("At a glance", _glance()),
            ("Waits", _waits()),
            ("Causes of the waits", _blame()),
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
            "Tasks waiting", "tasks", waiting, "Mean number of tasks that could run and did not, of all chosen cgroups."
        ),
        stat_panel(
            "Longest wait, p99",
            units.Seconds,
            f"max({quantile_by(0.99, RUNQ_LATENCY, CGROUP_SELECTOR, BY_CGROUP)})",
            "Of the cgroup that waits longest. What is too long, its users say; 10 ms is felt by most services.",
        ),
        stat_panel(
            "Because of neighbours",
            units.PercentUnit,
            f"sum({BY_NEIGHBOURS}) / sum({ATTRIBUTED})",
            "Share of all waits in which another cgroup had the CPU: what moving or shrinking a neighbour can win.",
        ),
        stat_panel(
            "Because of own quotas",
            units.PercentUnit,
            f"sum({rate_by(BLAME, OWN_QUOTA)}) / sum({ATTRIBUTED})",
            "Share of all waits that own quotas cause: no neighbour can help, a higher limit can.",
        ),
        stat_panel(
            "Longest throttle, p99",
            units.Seconds,
            f"max({quantile_by(0.99, THROTTLE, CGROUP_SELECTOR, BY_CGROUP)})",
            "How long a cgroup is stopped at a time once its quota has run out.",
        ),
        stat_panel(
            "Stuck threads",
            units.Short,
            f'sum(dioptase_cgroup_threads_by_state{{{CGROUP_SELECTOR},state="uninterruptible"}})',
            "Threads that sleep and cannot be woken, not for a disk: for locks, for memory, for a network file system.",
        ),
    ]


def _waits() -> list[Panel]:
    return [
        heatmap_panel(
            "Waits of the chosen cgroups",
            RUNQ_LATENCY,
            CGROUP_SELECTOR,
            "Each column is a moment, each cell how many waits of that length ended.",
        ),
        bar_gauge_panel(
            "Tasks waiting, by cgroup",
            "tasks",
            "Mean number of tasks that could run and did not: what a cgroup lacks in CPUs.",
            Query(top_series(rate_by(f"{RUNQ_LATENCY}_sum", CGROUP_SELECTOR, BY_CGROUP)), CGROUP_LEGEND),
        ),
        line_panel(
            "Run-queue wait, p99",
            units.Seconds,
            "99 of 100 waits were no longer. The longest dozen.",
            Query(top_series(quantile_by(0.99, RUNQ_LATENCY, CGROUP_SELECTOR, BY_CGROUP)), CGROUP_LEGEND),
            log=True,
        ),
        line_panel(
            "Run-queue wait, median",
            units.Seconds,
            "Half of the waits were no longer. The longest dozen.",
            Query(top_series(quantile_by(0.5, RUNQ_LATENCY, CGROUP_SELECTOR, BY_CGROUP)), CGROUP_LEGEND),
            log=True,
        ),
    ]


def _blame() -> list[Panel]:
    pairs = rate_by(BLAME, NEIGHBOURS, "job, instance, cgroup, culprit")
    return [
        bar_gauge_panel(
            "Worst pairs",
            MS_PER_S,
            "Waits by pair: tasks of the first cgroup could run while tasks of the second one did.",
            Query(top_series(_per_ms(pairs)), "{{cgroup}} waits for {{culprit}} on {{instance}}"),
        ),
        bar_gauge_panel(
            "Worst culprits",
            MS_PER_S,
            "Waits that a cgroup causes to all others for which it is among the worst 16. It need not be "
            "at fault: it may be the one "
            "that works.",
            Query(
                top_series(_per_ms(rate_by(BLAME, NEIGHBOURS, "job, instance, culprit"))), "{{culprit}} on {{instance}}"
            ),
        ),
        line_panel(
            "Waits by cause",
            MS_PER_S,
            "neighbour: another cgroup ran. self: its own tasks queue for one another. own_quota: its limit. higher_class: "
            "real-time tasks. other: a CPU on its way out of idleness, or a cgroup that is gone.",
            Query(_per_ms(BY_NEIGHBOURS), "neighbour on {{instance}}"),
            Query(_per_ms(rate_by(BLAME, NO_NEIGHBOURS, "job, instance, cause")), "{{cause}} on {{instance}}"),
            stacked=True,
        ),
        line_panel(
            "Worst pairs over time",
            MS_PER_S,
            "The dozen pairs in which a neighbour costs most.",
            Query(top_series(_per_ms(pairs)), "{{cgroup}} waits for {{culprit}} on {{instance}}"),
        ),
    ]


def _throttled() -> list[Panel]:
    throttled = rate_by("dioptase_cgroup_cpu_throttled_periods_total", CGROUP_SELECTOR, BY_CGROUP)
    periods = rate_by("dioptase_cgroup_cpu_periods_total", CGROUP_SELECTOR, BY_CGROUP)
    used = rate_by("dioptase_cgroup_cpu_usage_seconds_total", CGROUP_SELECTOR, BY_CGROUP)
    return [
        line_panel(
            "Periods throttled",
            units.PercentUnit,
            "Share of CFS periods in which the cgroup's own quota ran out. No neighbour causes it; a higher limit ends it.",
            Query(top_series(f"{throttled} / {periods}"), CGROUP_LEGEND),
        ),
        line_panel(
            "Length of single throttles, p99",
            units.Seconds,
            "A few long ones hurt a service more than many short ones: a request that is cut waits that long.",
            Query(top_series(quantile_by(0.99, THROTTLE, CGROUP_SELECTOR, BY_CGROUP)), CGROUP_LEGEND),
            log=True,
        ),
        line_panel(
            "CPU use against the limit",
            units.PercentUnit,
            "Use as a share of what the quota allows. Throttled far below 100 %: bursts are the problem, not the mean.",
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
            "The dozen that use most; a cgroup's use includes that of the cgroups below it.",
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
            "Of all chosen cgroups. Sleeping threads are left out: most do all day.",
            Query(
                f'sum by (job, instance, state) ({states}{{{CGROUP_SELECTOR},state!="sleeping"}})',
                "{{state}} on {{instance}}",
            ),
            stacked=True,
        ),
        line_panel(
            "Threads that run or want to",
            units.Short,
            "More than the cgroup's CPUs for long: it queues for itself.",
            Query(top_series(f'sum by ({BY_CGROUP}) ({states}{{{CGROUP_SELECTOR},state="runnable"}})'), CGROUP_LEGEND),
        ),
        line_panel(
            "Load of cgroups, 1 minute",
            units.Short,
            "Runnable and uninterruptible threads, damped as the kernel does for the node.",
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
            "From issue to completion, by device: the disk's share of a slow request.",
            Query(
                top_series(quantile_by(0.99, block, CGROUP_SELECTOR, "job, instance, cgroup, device")),
                "{{cgroup}}: {{device}} on {{instance}}",
            ),
            log=True,
        ),
        line_panel(
            "Disk bytes",
            units.BytesPerSecondSI,
            "Read and written; a neighbour of the same disk is slowed by what this one moves.",
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
            "TCP segments sent again",
            "segments/s",
            "Loss or a peer that is too slow; each one costs a request at least 200 ms.",
            Query(
                top_series(rate_by("dioptase_cgroup_network_retransmits_total", CGROUP_SELECTOR, BY_CGROUP)),
                CGROUP_LEGEND,
            ),
        ),
    ]
