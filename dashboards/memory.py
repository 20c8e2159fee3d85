"""The memory dashboard: free memory, reclaim, pressure and OOM kills by node and cgroup."""

from __future__ import annotations

from grafana_foundation_sdk.models import units

from dashboards.panels import (
    BY_CGROUP,
    CGROUP_LEGEND,
    CGROUP_SELECTOR,
    NODE_SELECTOR,
    RATE_INTERVAL,
    Board,
    Panel,
    Query,
    heatmap_panel,
    line_panel,
    rate_by,
    stat_panel,
    top_series,
)

RECLAIM = "dioptase_cgroup_reclaim_seconds"
EVENTS = "dioptase_node_vm_events_total"
ZONE = "dioptase_node_zone_bytes"
INSTANCE_LEGEND = "on {{instance}}"
MS_PER_S = "ms/s"


def board() -> Board:
    return Board(
        "memory",
        "Dioptase: memory and reclaim",
        "Available memory, reclaim by kswapd and by the workloads themselves, and the cgroups that reclaim delays.",
        ("cgroup",),
        (
            ("Summary", _glance()),
            ("The node", _node()),
            ("Reclaim", _reclaim()),
            ("Cgroups", _cgroups()),
        ),
    )


def _events(pattern: str) -> str:
    return rate_by(EVENTS, f'{NODE_SELECTOR},event=~"{pattern}"', "job, instance")


def _glance() -> list[Panel]:
    available = (
        f"dioptase_node_memory_available_bytes{{{NODE_SELECTOR}}} / dioptase_node_memory_total_bytes{{{NODE_SELECTOR}}}"
    )
    return [
        stat_panel(
            "Available memory", units.PercentUnit, f"min({available})", "Without swapping, on the node with the least."
        ),
        stat_panel(
            "Memory pressure",
            units.PercentUnit,
            f'max(rate(dioptase_node_pressure_seconds_total{{{NODE_SELECTOR},resource="memory",kind="some"}}{RATE_INTERVAL}))',
            "Share of time in which some task waited for memory, of the worst node. Little is much.",
            (0.01, 0.1),
        ),
        stat_panel(
            "Direct reclaim",
            MS_PER_S,
            f'1000 * sum(rate({RECLAIM}_sum{{{NODE_SELECTOR},kind="direct"}}{RATE_INTERVAL}))',
            "Time that tasks spent in reclaim because the node was short of memory.",
            (1, 50),
        ),
        stat_panel(
            "Reclaim at limits",
            MS_PER_S,
            f'1000 * sum(rate({RECLAIM}_sum{{{NODE_SELECTOR},kind="limit"}}{RATE_INTERVAL}))',
            "Time that tasks spent in reclaim because of their cgroup's own limit. A higher limit ends it.",
            (10, 200),
        ),
        stat_panel(
            "kswapd at work",
            units.PercentUnit,
            f"max(rate(dioptase_node_kswapd_active_seconds_total{{{NODE_SELECTOR}}}{RATE_INTERVAL}))",
            "Share of time in which background reclaim was awake, on the busiest NUMA node. Near 100 % it cannot keep up.",
            (0.2, 0.7),
        ),
        stat_panel(
            "OOM kills, last hour",
            units.Short,
            f'sum(increase({EVENTS}{{{NODE_SELECTOR},event="oom_kill"}}[1h]))',
            (
                "Processes killed by the OOM killer, by the node's own counter, which includes removed cgroups. `dioptase "
                "top`, the page and the agent's log name them."
            ),
            (1,),
        ),
    ]


def _node() -> list[Panel]:
    def mark(name: str) -> str:
        return f'sum by (job, instance, numa_node, zone) ({ZONE}{{{NODE_SELECTOR},mark="{name}"}})'

    return [
        line_panel(
            "Memory",
            units.BytesIEC,
            "Available memory includes what can be reclaimed without swapping.",
            Query(f"dioptase_node_memory_total_bytes{{{NODE_SELECTOR}}}", f"all {INSTANCE_LEGEND}"),
            Query(f"dioptase_node_memory_available_bytes{{{NODE_SELECTOR}}}", f"available {INSTANCE_LEGEND}"),
            Query(f'dioptase_node_memory_bytes{{{NODE_SELECTOR},kind="MemFree"}}', f"free {INSTANCE_LEGEND}"),
            Query(f'dioptase_node_memory_bytes{{{NODE_SELECTOR},kind="AnonPages"}}', f"anonymous {INSTANCE_LEGEND}"),
        ),
        line_panel(
            "Free memory of zones relative to the low watermark",
            units.Short,
            "Below 1 kswapd is woken. At the min watermark, often 0.8, tasks reclaim directly.",
            Query(f"{mark('free')} / ({mark('low')} > 0)", f"{{{{zone}}}} of node {{{{numa_node}}}} {INSTANCE_LEGEND}"),
            log=True,
        ),
        line_panel(
            "kswapd, time awake",
            units.PercentUnit,
            "Background reclaim of each NUMA node.",
            Query(
                rate_by("dioptase_node_kswapd_active_seconds_total", NODE_SELECTOR, "job, instance, numa_node"),
                f"node {{{{numa_node}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "kswapd, wakeups",
            "1/s",
            "How often memory ran below a low watermark.",
            Query(
                rate_by("dioptase_node_kswapd_wakeups_total", NODE_SELECTOR, "job, instance, numa_node"),
                f"node {{{{numa_node}}}} {INSTANCE_LEGEND}",
            ),
        ),
        line_panel(
            "Pages scanned and reclaimed",
            "pages/s",
            "By kswapd and by tasks (direct). Far more scanned than reclaimed: little memory is easy to reclaim.",
            Query(_events("pgscan_kswapd"), f"kswapd looked at {INSTANCE_LEGEND}"),
            Query(_events("pgsteal_kswapd"), f"kswapd took {INSTANCE_LEGEND}"),
            Query(_events("pgscan_direct"), f"direct looked at {INSTANCE_LEGEND}"),
            Query(_events("pgsteal_direct"), f"direct took {INSTANCE_LEGEND}"),
        ),
        line_panel(
            "Refaults and swap",
            "pages/s",
            "Pages read again soon after their reclaim, and swap traffic. High: the node has too little memory.",
            Query(_events("workingset_refault_.*"), f"refaulted {INSTANCE_LEGEND}"),
            Query(_events("pswpin"), f"swapped in {INSTANCE_LEGEND}"),
            Query(_events("pswpout"), f"swapped out {INSTANCE_LEGEND}"),
            Query(_events("pgmajfault"), f"major faults {INSTANCE_LEGEND}"),
        ),
    ]


def _reclaim() -> list[Panel]:
    def stalled(kind: str) -> str:
        selector = f'{CGROUP_SELECTOR},kind="{kind}"'
        return top_series("1000 * " + rate_by(f"{RECLAIM}_sum", selector, BY_CGROUP))

    return [
        line_panel(
            "Direct reclaim by cgroup",
            MS_PER_S,
            "Milliseconds per second that tasks were stopped by reclaim. 1,000: one task all the time.",
            Query(stalled("direct"), CGROUP_LEGEND),
        ),
        line_panel(
            "Reclaim at the cgroup's own limit, by cgroup",
            MS_PER_S,
            "The cgroup's limit is too low for its work. Other cgroups do not cause this.",
            Query(stalled("limit"), CGROUP_LEGEND),
        ),
        heatmap_panel(
            "Duration of reclaims",
            RECLAIM,
            CGROUP_SELECTOR,
            "Direct reclaim and reclaim at limits: the delay of a request during it.",
        ),
        line_panel(
            "Wakeups of kswapd by cgroup",
            "1/s",
            "Cgroups whose allocations woke kswapd: often those that grow, not those that are delayed.",
            Query(
                top_series(rate_by("dioptase_cgroup_kswapd_wakeups_total", CGROUP_SELECTOR, BY_CGROUP)), CGROUP_LEGEND
            ),
        ),
    ]


def _cgroups() -> list[Panel]:
    limit = f'sum by ({BY_CGROUP}) (dioptase_cgroup_memory_limit_bytes{{{CGROUP_SELECTOR},kind="max"}})'
    used = f"sum by ({BY_CGROUP}) (dioptase_cgroup_memory_working_set_bytes{{{CGROUP_SELECTOR}}})"
    refaults = rate_by("dioptase_cgroup_workingset_pages_total", f'{CGROUP_SELECTOR},event="refault"', BY_CGROUP)
    stalled = f'{CGROUP_SELECTOR},resource="memory",kind="some"'
    return [
        line_panel(
            "Use against the limit",
            units.PercentUnit,
            "Working set relative to the cgroup's own limit. At 100 % it reclaims, or its processes are killed.",
            Query(top_series(f"{used} / {limit}"), CGROUP_LEGEND),
        ),
        line_panel(
            "Working set",
            units.BytesIEC,
            "Memory without inactive page cache. A cgroup's includes that of the cgroups below it.",
            Query(top_series(used), CGROUP_LEGEND),
        ),
        line_panel(
            "Refaults",
            "pages/s",
            "Pages that were read again soon after their reclaim. High values: the cgroup has too little memory.",
            Query(top_series(refaults), CGROUP_LEGEND),
        ),
        line_panel(
            "Stalled on memory (PSI)",
            units.PercentUnit,
            "Share of time in which some task of the cgroup waited for memory.",
            Query(top_series(rate_by("dioptase_cgroup_pressure_seconds_total", stalled, BY_CGROUP)), CGROUP_LEGEND),
        ),
        line_panel(
            "OOM kills",
            units.Short,
            "Processes killed for memory, of each cgroup itself.",
            Query(
                top_series(
                    f"sum by ({BY_CGROUP}) (increase(dioptase_cgroup_oom_kills_total{{{CGROUP_SELECTOR}}}{RATE_INTERVAL}))"
                ),
                CGROUP_LEGEND,
            ),
            bars=True,
        ),
        line_panel(
            "Major faults",
            "1/s",
            "Page faults that had to wait for a disk.",
            Query(
                top_series(rate_by("dioptase_cgroup_major_page_faults_total", CGROUP_SELECTOR, BY_CGROUP)),
                CGROUP_LEGEND,
            ),
        ),
    ]
