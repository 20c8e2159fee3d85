"""Who makes whom wait: waits of cgroups, who had the CPU meanwhile, what the own quota did, what the threads do."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.panels import (
    ANY,
    BY_CGROUP,
    CGROUP_NAME,
    Board,
    Panel,
    Query,
    heat,
    lines,
    most,
    number,
    quantile,
    ranking,
    rate_by,
)

WAIT = "dioptase_cgroup_runq_wait_seconds"
BLAME = "dioptase_cgroup_blame_seconds_total"
THROTTLE = "dioptase_cgroup_throttle_seconds"
NEIGHBOURS = f'{ANY},cause="neighbour"'
OWN_QUOTA = f'{ANY},cause="own_quota"'
NO_NEIGHBOURS = f'{ANY},cause!="neighbour"'
WAITED = rate_by(f"{WAIT}_sum", ANY, "job, instance")
OTHERWISE = rate_by(BLAME, NO_NEIGHBOURS, "job, instance")
BLAMED = f"({WAITED} and {OTHERWISE})"
"""All waits of a node that knows who had the CPU. Not the sum of the parts: of many culprits only the worst have one."""
BY_NEIGHBOURS = f"clamp_min({WAITED} - {OTHERWISE}, 0)"
"""Of all neighbours, named or not; waits and parts are read one after the other, which can leave a little less than nothing."""
MS = "ms/s"
"""Milliseconds of wait per second: 1,000 is one task that waits all the time."""


def board() -> Board:
    return Board(
        "workload",
        "Dioptase: who makes whom wait",
        "Which cgroups wait for a CPU, who had it meanwhile, and what their own quotas did; with or without listed pods.",
        ("cgroup",),
        (
            ("At a glance", _glance()),
            ("Who waits", _waits()),
            ("Who makes them wait", _blame()),
            ("Throttled by their own quota", _throttled()),
            ("Threads and load", _threads()),
            ("Disk and network", _traffic()),
        ),
    )


def _per_ms(expr: str) -> str:
    return f"1000 * {expr}"


def _glance() -> list[Panel]:
    waiting = f"sum({rate_by(f'{WAIT}_sum', ANY)})"
    return [
        number(
            "Tasks waiting", "tasks", waiting, "Mean number of tasks that could run and did not, of all chosen cgroups."
        ),
        number(
            "Longest wait, p99",
            units.Seconds,
            f"max({quantile(0.99, WAIT, ANY, BY_CGROUP)})",
            "Of the cgroup that waits longest. What is too long, its users say; 10 ms is felt by most services.",
        ),
        number(
            "Because of neighbours",
            units.PercentUnit,
            f"sum({BY_NEIGHBOURS}) / sum({BLAMED})",
            "Share of all waits in which another cgroup had the CPU: what moving or shrinking a neighbour can win.",
        ),
        number(
            "Because of own quotas",
            units.PercentUnit,
            f"sum({rate_by(BLAME, OWN_QUOTA)}) / sum({BLAMED})",
            "Share of all waits that own quotas cause: no neighbour can help, a higher limit can.",
        ),
        number(
            "Longest throttle, p99",
            units.Seconds,
            f"max({quantile(0.99, THROTTLE, ANY, BY_CGROUP)})",
            "How long a cgroup is stopped at a time once its quota has run out.",
        ),
        number(
            "Stuck threads",
            units.Short,
            f'sum(dioptase_cgroup_threads_by_state{{{ANY},state="uninterruptible"}})',
            "Threads that sleep and cannot be woken, not for a disk: for locks, for memory, for a network file system.",
        ),
    ]


def _waits() -> list[Panel]:
    return [
        heat(
            "Waits of the chosen cgroups",
            WAIT,
            ANY,
            "Each column is a moment, each cell how many waits of that length ended.",
        ),
        ranking(
            "Tasks waiting, by cgroup",
            "tasks",
            "Mean number of tasks that could run and did not: what a cgroup lacks in CPUs.",
            Query(most(rate_by(f"{WAIT}_sum", ANY, BY_CGROUP)), CGROUP_NAME),
        ),
        lines(
            "Run-queue wait, p99",
            units.Seconds,
            "99 of 100 waits were no longer. The longest dozen.",
            Query(most(quantile(0.99, WAIT, ANY, BY_CGROUP)), CGROUP_NAME),
            log=True,
        ),
        lines(
            "Run-queue wait, median",
            units.Seconds,
            "Half of the waits were no longer. The longest dozen.",
            Query(most(quantile(0.5, WAIT, ANY, BY_CGROUP)), CGROUP_NAME),
            log=True,
        ),
    ]


def _blame() -> list[Panel]:
    pairs = rate_by(BLAME, NEIGHBOURS, "job, instance, cgroup, culprit")
    return [
        ranking(
            "Worst pairs",
            MS,
            "Who waits, and for whom: the first cgroup's tasks could run while the second one's did.",
            Query(most(_per_ms(pairs)), "{{cgroup}} waits for {{culprit}} on {{instance}}"),
        ),
        ranking(
            "Worst culprits",
            MS,
            "What a cgroup costs all others to whom it is among the worst 16. It need not be in the wrong: it may be the one "
            "that works.",
            Query(most(_per_ms(rate_by(BLAME, NEIGHBOURS, "job, instance, culprit"))), "{{culprit}} on {{instance}}"),
        ),
        lines(
            "Waits by cause",
            MS,
            "neighbour: another cgroup ran. self: its own tasks queue for one another. own_quota: its limit. higher_class: "
            "real-time tasks. other: a CPU on its way out of idleness, or a cgroup that is gone.",
            Query(_per_ms(BY_NEIGHBOURS), "neighbour on {{instance}}"),
            Query(_per_ms(rate_by(BLAME, NO_NEIGHBOURS, "job, instance, cause")), "{{cause}} on {{instance}}"),
            stacked=True,
        ),
        lines(
            "Worst pairs over time",
            MS,
            "The dozen pairs in which a neighbour costs most.",
            Query(most(_per_ms(pairs)), "{{cgroup}} waits for {{culprit}} on {{instance}}"),
        ),
    ]


def _throttled() -> list[Panel]:
    throttled = rate_by("dioptase_cgroup_cpu_throttled_periods_total", ANY, BY_CGROUP)
    periods = rate_by("dioptase_cgroup_cpu_periods_total", ANY, BY_CGROUP)
    used = rate_by("dioptase_cgroup_cpu_usage_seconds_total", ANY, BY_CGROUP)
    return [
        lines(
            "Periods throttled",
            units.PercentUnit,
            "Share of CFS periods in which the cgroup's own quota ran out. No neighbour causes it; a higher limit ends it.",
            Query(most(f"{throttled} / {periods}"), CGROUP_NAME),
        ),
        lines(
            "Length of single throttles, p99",
            units.Seconds,
            "A few long ones hurt a service more than many short ones: a request that is cut waits that long.",
            Query(most(quantile(0.99, THROTTLE, ANY, BY_CGROUP)), CGROUP_NAME),
            log=True,
        ),
        lines(
            "CPU use against the limit",
            units.PercentUnit,
            "Use as a share of what the quota allows. Throttled far below 100 %: bursts are the problem, not the mean.",
            Query(
                most(f"{used} / on ({BY_CGROUP}) sum by ({BY_CGROUP}) (dioptase_cgroup_cpu_limit_cores{{{ANY}}})"),
                CGROUP_NAME,
            ),
        ),
        lines(
            "CPU use by cgroup",
            "cores",
            "The dozen that use most; a cgroup's use includes that of the cgroups below it.",
            Query(most(used), CGROUP_NAME),
        ),
    ]


def _threads() -> list[Panel]:
    states = "dioptase_cgroup_threads_by_state"
    stalled = f'{ANY},resource="cpu",kind="some"'
    return [
        lines(
            "Threads by state",
            units.Short,
            "Of all chosen cgroups. Sleeping threads are left out: most do all day.",
            Query(f'sum by (job, instance, state) ({states}{{{ANY},state!="sleeping"}})', "{{state}} on {{instance}}"),
            stacked=True,
        ),
        lines(
            "Threads that run or want to",
            units.Short,
            "More than the cgroup's CPUs for long: it queues for itself.",
            Query(most(f'sum by ({BY_CGROUP}) ({states}{{{ANY},state="runnable"}})'), CGROUP_NAME),
        ),
        lines(
            "Load of cgroups, 1 minute",
            units.Short,
            "Runnable and uninterruptible threads, damped as the kernel does for the node.",
            Query(most(f'sum by ({BY_CGROUP}) (dioptase_cgroup_load{{{ANY},period="1m"}})'), CGROUP_NAME),
        ),
        lines(
            "Stalled on CPU (PSI)",
            units.PercentUnit,
            "Share of time in which some task of the cgroup waited for a CPU.",
            Query(most(rate_by("dioptase_cgroup_pressure_seconds_total", stalled, BY_CGROUP)), CGROUP_NAME),
        ),
    ]


def _traffic() -> list[Panel]:
    block = "dioptase_cgroup_block_io_seconds"
    return [
        lines(
            "Disk requests, p99",
            units.Seconds,
            "From issue to completion, by device: the disk's share of a slow request.",
            Query(
                most(quantile(0.99, block, ANY, "job, instance, cgroup, device")),
                "{{cgroup}}: {{device}} on {{instance}}",
            ),
            log=True,
        ),
        lines(
            "Disk bytes",
            units.BytesPerSecondSI,
            "Read and written; a neighbour of the same disk is slowed by what this one moves.",
            Query(
                most(rate_by("dioptase_cgroup_block_io_request_bytes_total", ANY, "job, instance, cgroup, operation")),
                "{{cgroup}}: {{operation}} on {{instance}}",
            ),
        ),
        lines(
            "Network bytes",
            units.BytesPerSecondSI,
            "Payload of TCP and UDP sockets.",
            Query(
                most(rate_by("dioptase_cgroup_network_bytes_total", ANY, "job, instance, cgroup, direction")),
                "{{cgroup}}: {{direction}} on {{instance}}",
            ),
        ),
        lines(
            "TCP segments sent again",
            "segments/s",
            "Loss or a peer that is too slow; each one costs a request at least 200 ms.",
            Query(most(rate_by("dioptase_cgroup_network_retransmits_total", ANY, BY_CGROUP)), CGROUP_NAME),
        ),
    ]
