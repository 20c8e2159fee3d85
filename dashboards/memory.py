"""Memory and reclaim: how much is left, who has to free it, who suffers from that, who was killed."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.panels import (
    ANY,
    BY_CGROUP,
    CGROUP_NAME,
    NODE,
    RATE,
    Board,
    Panel,
    Query,
    heat,
    lines,
    most,
    number,
    rate_by,
)

RECLAIM = "dioptase_cgroup_reclaim_seconds"
EVENTS = "dioptase_node_vm_events_total"
ZONE = "dioptase_node_zone_bytes"
ON = "on {{instance}}"
MS = "ms/s"


def board() -> Board:
    return Board(
        "memory",
        "Dioptase: memory and reclaim",
        "How much memory is left, whether the kernel or the workloads themselves have to free it, and who pays for that.",
        ("cgroup",),
        (
            ("At a glance", _glance()),
            ("The node", _node()),
            ("Who reclaims", _reclaim()),
            ("Cgroups", _cgroups()),
        ),
    )


def _events(pattern: str) -> str:
    return rate_by(EVENTS, f'{NODE},event=~"{pattern}"', "job, instance")


def _glance() -> list[Panel]:
    available = f"dioptase_node_memory_available_bytes{{{NODE}}} / dioptase_node_memory_total_bytes{{{NODE}}}"
    return [
        number(
            "Memory that could be had", units.PercentUnit, f"min({available})", "Without swapping, of the worst node."
        ),
        number(
            "Memory pressure",
            units.PercentUnit,
            f'max(rate(dioptase_node_pressure_seconds_total{{{NODE},resource="memory",kind="some"}}{RATE}))',
            "Share of time in which some task waited for memory, of the worst node. Little is much.",
            (0.01, 0.1),
        ),
        number(
            "Direct reclaim",
            MS,
            f'1000 * sum(rate({RECLAIM}_sum{{{NODE},kind="direct"}}{RATE}))',
            "Time that tasks spent freeing memory because the node was short, not working: the price of a full node.",
            (1, 50),
        ),
        number(
            "Reclaim at limits",
            MS,
            f'1000 * sum(rate({RECLAIM}_sum{{{NODE},kind="limit"}}{RATE}))',
            "Time that tasks spent freeing memory because of their cgroup's own limit: a higher limit ends it.",
            (10, 200),
        ),
        number(
            "kswapd at work",
            units.PercentUnit,
            f"max(rate(dioptase_node_kswapd_active_seconds_total{{{NODE}}}{RATE}))",
            "Share of time in which background reclaim was awake, of the busiest NUMA node. Near 100 % it is losing.",
            (0.2, 0.7),
        ),
        number(
            "OOM kills, last hour",
            units.Short,
            f'sum(increase({EVENTS}{{{NODE},event="oom_kill"}}[1h]))',
            "Processes that the kernel killed for memory, by its own count, which no removed cgroup takes away; top, the page "
            "and the agent's log name them.",
            (1,),
        ),
    ]


def _node() -> list[Panel]:
    def mark(name: str) -> str:
        return f'sum by (job, instance, numa_node, zone) ({ZONE}{{{NODE},mark="{name}"}})'

    return [
        lines(
            "Memory",
            units.BytesIEC,
            "Available counts what could be reclaimed without swapping.",
            Query(f"dioptase_node_memory_total_bytes{{{NODE}}}", f"all {ON}"),
            Query(f"dioptase_node_memory_available_bytes{{{NODE}}}", f"available {ON}"),
            Query(f'dioptase_node_memory_bytes{{{NODE},kind="MemFree"}}', f"free {ON}"),
            Query(f'dioptase_node_memory_bytes{{{NODE},kind="AnonPages"}}', f"anonymous {ON}"),
        ),
        lines(
            "Zones, free against their low watermark",
            units.Short,
            "Below 1 kswapd is woken; at the min watermark, often 0.8, tasks have to reclaim themselves.",
            Query(f"{mark('free')} / ({mark('low')} > 0)", f"{{{{zone}}}} of node {{{{numa_node}}}} {ON}"),
            log=True,
        ),
        lines(
            "kswapd, time awake",
            units.PercentUnit,
            "Background reclaim of each NUMA node.",
            Query(
                rate_by("dioptase_node_kswapd_active_seconds_total", NODE, "job, instance, numa_node"),
                f"node {{{{numa_node}}}} {ON}",
            ),
        ),
        lines(
            "kswapd, wakeups",
            "1/s",
            "How often memory ran below a low watermark.",
            Query(
                rate_by("dioptase_node_kswapd_wakeups_total", NODE, "job, instance, numa_node"),
                f"node {{{{numa_node}}}} {ON}",
            ),
        ),
        lines(
            "Pages looked at and taken",
            "pages/s",
            "By kswapd and by the tasks themselves (direct). Far more looked at than taken: nothing cheap is left.",
            Query(_events("pgscan_kswapd"), f"kswapd looked at {ON}"),
            Query(_events("pgsteal_kswapd"), f"kswapd took {ON}"),
            Query(_events("pgscan_direct"), f"direct looked at {ON}"),
            Query(_events("pgsteal_direct"), f"direct took {ON}"),
        ),
        lines(
            "Refaults and swap",
            "pages/s",
            "Pages that were needed again soon after they were taken, and swap traffic: the node runs in too little memory.",
            Query(_events("workingset_refault_.*"), f"refaulted {ON}"),
            Query(_events("pswpin"), f"swapped in {ON}"),
            Query(_events("pswpout"), f"swapped out {ON}"),
            Query(_events("pgmajfault"), f"major faults {ON}"),
        ),
    ]


def _reclaim() -> list[Panel]:
    def stalled(kind: str) -> str:
        selector = f'{ANY},kind="{kind}"'
        return most("1000 * " + rate_by(f"{RECLAIM}_sum", selector, BY_CGROUP))

    return [
        lines(
            "Direct reclaim, by who had to",
            MS,
            "Milliseconds a second that tasks stood still: 1,000 is one task all the time.",
            Query(stalled("direct"), CGROUP_NAME),
        ),
        lines(
            "Reclaim at the own limit, by cgroup",
            MS,
            "The cgroup's limit is too low for what it does; neighbours have no part in it.",
            Query(stalled("limit"), CGROUP_NAME),
        ),
        heat(
            "How long each reclaim took",
            RECLAIM,
            ANY,
            "Direct and at limits: the pause that a request in the middle of it feels.",
        ),
        lines(
            "Who woke kswapd",
            "1/s",
            "Whose allocations found a zone below its watermark: often who grows, not who suffers.",
            Query(most(rate_by("dioptase_cgroup_kswapd_wakeups_total", ANY, BY_CGROUP)), CGROUP_NAME),
        ),
    ]


def _cgroups() -> list[Panel]:
    limit = f'sum by ({BY_CGROUP}) (dioptase_cgroup_memory_limit_bytes{{{ANY},kind="max"}})'
    used = f"sum by ({BY_CGROUP}) (dioptase_cgroup_memory_working_set_bytes{{{ANY}}})"
    refaults = rate_by("dioptase_cgroup_workingset_pages_total", f'{ANY},event="refault"', BY_CGROUP)
    stalled = f'{ANY},resource="memory",kind="some"'
    return [
        lines(
            "Use against the limit",
            units.PercentUnit,
            "Working set as a share of the cgroup's own limit. At 100 % it reclaims or dies.",
            Query(most(f"{used} / {limit}"), CGROUP_NAME),
        ),
        lines(
            "Working set",
            units.BytesIEC,
            "Memory without inactive page cache. A cgroup's includes that of the cgroups below it.",
            Query(most(used), CGROUP_NAME),
        ),
        lines(
            "Refaults",
            "pages/s",
            "Pages read again soon after they were taken: the cgroup runs in too little memory.",
            Query(most(refaults), CGROUP_NAME),
        ),
        lines(
            "Stalled on memory (PSI)",
            units.PercentUnit,
            "Share of time in which some task of the cgroup waited for memory.",
            Query(most(rate_by("dioptase_cgroup_pressure_seconds_total", stalled, BY_CGROUP)), CGROUP_NAME),
        ),
        lines(
            "OOM kills",
            units.Short,
            "Processes killed for memory, of each cgroup itself.",
            Query(
                most(f"sum by ({BY_CGROUP}) (increase(dioptase_cgroup_oom_kills_total{{{ANY}}}{RATE}))"), CGROUP_NAME
            ),
            bars=True,
        ),
        lines(
            "Major faults",
            "1/s",
            "Page faults that had to wait for a disk.",
            Query(most(rate_by("dioptase_cgroup_major_page_faults_total", ANY, BY_CGROUP)), CGROUP_NAME),
        ),
    ]
